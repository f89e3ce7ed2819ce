"""Pipeline schedules: every work item once, after its inputs, in as many ticks as the literature
says.
"""

import itertools

import pytest

from spmd.errors import OptionError
from spmd.nn.schedule import ORDERS, Work, make_schedule

SIZES = [
    (stages, microbatches) for stages in (1, 2, 3, 4, 8) for microbatches in (1, 2, 4, 7, 8, 32)
]
CASES = [(name, stages, microbatches, 1) for name in ORDERS for stages, microbatches in SIZES]
CASES += [
    ("circular", stages, stages * many, groups)
    for stages in (1, 2, 4, 8)
    for many in (1, 2, 4)
    for groups in (2, 3, 4)
]
CASES += [
    ("circular", stages, microbatches, groups)
    for stages, microbatches in ((2, 1), (4, 2), (4, 11), (3, 7))
    for groups in (2, 3)
]
every_schedule = pytest.mark.parametrize("name, stages, microbatches, groups", CASES)


def made(name, stages, microbatches, groups=1):
    return make_schedule(name, stages=stages, microbatches=microbatches, groups=groups)


@every_schedule
def test_every_work_item_runs_once_and_after_its_inputs(name, stages, microbatches, groups):
    schedule = made(name, stages, microbatches, groups)
    when = {}
    for tick, row in enumerate(schedule.table):
        assert len(row) == stages
        for stage, work in enumerate(row):
            if work is not None:
                key = (work.microbatch, work.group * stages + stage, work.backward)
                assert key not in when
                when[key] = tick
    last = stages * groups - 1
    assert set(when) == set(itertools.product(range(microbatches), range(last + 1), (False, True)))
    for (number, layer, backward), tick in when.items():
        needs = [(number, layer, False)] if backward else []
        needs += [(number, layer + 1, True)] if backward and layer < last else []
        needs += [(number, layer - 1, False)] if not backward and layer else []
        assert all(when[need] < tick for need in needs)


@every_schedule
def test_ticks_and_idle_time_are_those_of_the_literature(name, stages, microbatches, groups):
    """(p - 1) / (v m + p - 1) of the time, for GPipe and 1F1B with v = 1; the last of a circle wait
    for those that its round lacks.
    """
    schedule = made(name, stages, microbatches, groups)
    missing = -microbatches % stages if groups > 1 else 0
    idle = (groups - 1) * missing + stages - 1
    ticks = groups * microbatches + idle
    assert schedule.ticks == 2 * ticks and schedule.forward.ticks == ticks
    assert schedule.bubble == idle / ticks


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_activations_kept_per_schedule(stages, microbatches):
    """All microbatches by GPipe; by 1F1B as many as there are stages from here on, however many
    microbatches.
    """
    assert made("gpipe", stages, microbatches).in_flight == (microbatches,) * stages
    assert made("1f1b", stages, microbatches).in_flight == tuple(
        min(microbatches, stages - stage) for stage in range(stages)
    )


@pytest.mark.parametrize("layers, chunks", [(4, 12), (4, 6), (8, 64), (2, 1), (1, 5)])
def test_a_wavefront_works_on_chunk_k_minus_l_at_tick_k(layers, chunks):
    ahead = made("gpipe", layers, chunks).forward
    assert ahead.ticks == chunks + layers - 1
    for tick, layer in itertools.product(range(ahead.ticks), range(layers)):
        number = tick - layer
        assert ahead.table[tick][layer] == (Work(number) if 0 <= number < chunks else None)


def test_groups_on_a_stage_divide_the_idle_time():
    plain, circular = made("gpipe", 4, 8), made("circular", 4, 8, 4)
    assert plain.bubble == 3 / 11 and circular.bubble == 3 / 35
    assert circular.table[4][0] == Work(0, 1), (
        "the first microbatch is back at the first stage when that has sent four"
    )


def test_printed():
    assert str(made("circular", 2, 2, 2).forward) == (
        "circular, 2 stages of 2 groups, 2 microbatches: 5 ticks, 20.0% idle\n0 | 0a 1a 0b 1b  .\n"
        "1 |  . 0a 1a 0b 1b"
    )


REFUSED = {
    "gpip": (("gpip", 2, 2), 'no schedule "gpip"[\\s\\S]*did you mean "gpipe"'),
    "none": ((None, 2, 2), 'no schedule "None"'),
    "no stages": (("gpipe", 0, 2), "stages=0.\n    fix: a whole number from 1"),
    "half a microbatch": (("gpipe", 2, 0.5), "microbatches=0.5"),
    "true": (("1f1b", True, 2), "stages=True"),
    "groups of gpipe": (
        ("gpipe", 2, 4, 2),
        'groups=2: "gpipe" has one on each stage[\\s\\S]*fix: "circular"',
    ),
}


@pytest.mark.parametrize("arguments, said", REFUSED.values(), ids=REFUSED)
def test_invalid_schedules_raise(arguments, said):
    with pytest.raises(OptionError, match=said):
        made(*arguments)
