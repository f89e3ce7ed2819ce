"""Limits, a guard of a process that is alone, and what facts say of programs; several processes are in test_launch.py."""

import json
import math

import pytest

from spmd.distributed import coordination, watchdog
from spmd.distributed.consistency import agree, program_facts
from spmd.distributed.initialize import join
from spmd.distributed.timeouts import Limits
from spmd.distributed.watchdog import Guard, Together
from spmd.errors import ClusterError, OptionError


def test_limits_as_they_are_written():
    assert Limits.parse("") == Limits() == Limits(1800.0, 60.0, 1800.0, 1800.0)
    assert Limits.parse(" step = 5 , save=inf") == Limits(step=5.0, save=math.inf)
    with pytest.raises(OptionError, match=r'^\$SPMD_STALL: stall limit "stop=5"'):
        Limits.parse("stop=5", "$SPMD_STALL: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stop=3", 'did you mean "step"'),
        ("step", '"" is no number'),
        ("step=0", "step=0.0"),
        ("eval=-1", "eval=-1.0"),
        ("save=nan", "save=nan"),
    ],
)
def test_limits_that_are_none(text, message):
    with pytest.raises(OptionError, match=message):
        Limits.parse(text)


def test_a_process_that_is_alone():
    assert join() is None and not coordination.started() and type(watchdog.current()) is Guard
    agree({"anything": "at all"})
    alone = Guard()
    alone.begin(3)
    assert not alone.stops(3)
    alone.ask("first")
    alone.ask("second")
    assert alone.stops(4) and alone.asked == "first"
    alone.begin(4)
    assert not alone.stops(4), "a new run was asked nothing"
    with pytest.raises(ClusterError, match=r"this process is alone.\n    fix: spmd.join\(\) first"):
        coordination.put("x", "y")


@pytest.fixture
def several(monkeypatch):
    """Guards of processes that share a service; `hear` is what each one's thread does when it looks."""
    service = {}
    monkeypatch.setattr(coordination, "put", lambda key, text: service.setdefault(key, text))
    monkeypatch.setattr(coordination, "get", lambda key, timeout: service[key])

    def make(size):
        guards = [Together(rank, size, Limits(), print) for rank in range(size)]
        for one in guards:
            one.begin(0)
        return guards

    def hear(one):
        one._stop_all({name.removeprefix("now/"): text for name, text in service.items() if name.startswith("now/")})

    return make, hear


def passed(one, points):
    """The points that a run passes until it stops, and where it stops."""
    points = iter(points)
    return next((point for point in points if one.stops(*point)), None)


EVALUATED = [(4, 0), *((4, batch) for batch in range(1, 7)), (4, 0), (5, 0), (6, 0)]  # an evaluation of 6 batches after step 4


@pytest.mark.parametrize(
    "first, second, last",
    [(0, 0, (4, 1)), (3, 3, (4, 4)), (1, 3, (4, 4)), (0, 6, (5, 0)), (6, 7, (5, 0)), (0, 9, None)],
    ids=["before it", "in it", "one batch apart", "at its last batch", "at its end", "at the end of the run"],
)
def test_processes_stop_at_the_same_point_of_an_evaluation(several, first, second, last):
    """Each has come to one of the points when it hears of the signal; none has passed the point where all stop."""
    make, hear = several
    guards = make(2)
    for one, at in zip(guards, (first, second), strict=True):
        assert passed(one, EVALUATED[: at + 1]) is None
    guards[0].ask("asked to end")
    for one in guards:
        hear(one)
    assert [passed(one, EVALUATED[at + 1 :]) for one, at in zip(guards, (first, second), strict=True)] == [last, last]


def test_processes_stop_after_the_same_step_though_one_is_ahead(several):
    make, hear = several
    guards = make(3)
    for one, step in zip(guards, (2, 3, 3), strict=True):
        assert not one.stops(step)
    guards[2].ask("asked to end")
    for one in reversed(guards):
        hear(one)
    assert [passed(one, [(step, 0) for step in range(3, 9)]) for one in guards] == [(4, 0)] * 3


def test_records_for_who_has_started_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMD_REPORT", str(tmp_path))
    alone = Guard()
    alone.begin(20)
    alone.at("step", 26)
    alone.begin(30)  # a second run of the same attempt
    alone.failed(ValueError("boom"))
    assert json.loads((tmp_path / "began.json").read_text())["step"] == 20
    told = json.loads((tmp_path / "0.json").read_text())
    assert (told["step"], told["error"], told["code"]) == (30, "ValueError: boom", 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [(SystemExit(), 0), (SystemExit(0), 0), (SystemExit(3), 3), (SystemExit("text"), 1), (ValueError(), 1), (ClusterError("x"), 78)],
)
def test_exit_codes(error, code):
    assert watchdog.exit_code(error) == code


def test_numbers_of_a_program():
    text = (
        "%cst = stablehlo.constant dense<-1.000000e-01> : tensor<f32>\n"
        "%c = stablehlo.constant dense<[0, 1]> : tensor<2xui32>\n"
        '%x = stablehlo.constant dense<"0x00FF"> : tensor<4xf32>\n'
    )
    found = program_facts(text, "the step")
    assert found.pop("the program of the step") and found == {
        "number 1 in the step": "-1.000000e-01 (f32)",
        "number 2 in the step": "[0, 1] (2xui32)",
    }
