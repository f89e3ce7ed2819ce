"""Stall timeouts, the watchdog, and facts about programs; tests with real processes are in
test_local_launcher.py.
"""

import json
import math

import pytest

from spmd.distributed import coordination, watchdog
from spmd.distributed.consistency import check_consistency
from spmd.distributed.initialize import join
from spmd.distributed.timeouts import StallTimeouts
from spmd.distributed.watchdog import ClusterWatchdog, Watchdog
from spmd.errors import ClusterError, OptionError
from spmd.train.program_facts import text_facts


def test_timeouts_are_parsed():
    assert StallTimeouts.parse("") == StallTimeouts() == StallTimeouts(1800.0, 60.0, 1800.0, 1800.0)
    assert StallTimeouts.parse(" step = 5 , save=inf") == StallTimeouts(step=5.0, save=math.inf)
    with pytest.raises(OptionError, match=r'^\$SPMD_STALL: stall limit "stop=5"'):
        StallTimeouts.parse("stop=5", "$SPMD_STALL: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stop=3", 'did you mean "step"'),
        ("step", '"" is not a number'),
        ("step=0", "step=0.0"),
        ("eval=-1", "eval=-1.0"),
        ("save=nan", "save=nan"),
    ],
)
def test_bad_timeouts_are_refused(text, message):
    with pytest.raises(OptionError, match=message):
        StallTimeouts.parse(text)


def test_single_process_needs_no_service():
    assert (
        join() is None
        and not coordination.is_initialized()
        and type(watchdog.current()) is Watchdog
    )
    check_consistency({"anything": "at all"})
    single = Watchdog()
    single.begin_run(3)
    assert not single.should_stop(3)
    single.request_stop("first")
    single.request_stop("second")
    assert single.should_stop(4) and single.stop_reason == "first"
    single.begin_run(4)
    assert not single.should_stop(4), "a new run starts without a stop request"
    with pytest.raises(
        ClusterError, match=r"this process is not part of a cluster.\n    fix: spmd.join\(\) first"
    ):
        coordination.put("x", "y")


@pytest.fixture
def several(monkeypatch):
    """Watchdogs of processes that share a service; `poll` is what each one's thread does."""
    service = {}
    monkeypatch.setattr(coordination, "put", lambda key, text: service.setdefault(key, text))
    monkeypatch.setattr(coordination, "get", lambda key, timeout: service[key])

    def make(size):
        watchdogs = [ClusterWatchdog(rank, size, StallTimeouts(), print) for rank in range(size)]
        for each in watchdogs:
            each.begin_run(0)
        return watchdogs

    def poll(each):
        each._sync_stop(
            {
                name.removeprefix("now/"): text
                for name, text in service.items()
                if name.startswith("now/")
            }
        )

    return make, poll


def first_stop(each, points):
    """The first of these points at which a run stops."""
    points = iter(points)
    return next((point for point in points if each.should_stop(*point)), None)


# an evaluation of 6 batches after step 4
EVALUATED = [(4, 0), *((4, batch) for batch in range(1, 7)), (4, 0), (5, 0), (6, 0)]


@pytest.mark.parametrize(
    "first, second, last",
    [(0, 0, (4, 1)), (3, 3, (4, 4)), (1, 3, (4, 4)), (0, 6, (5, 0)), (6, 7, (5, 0)), (0, 9, None)],
    ids=[
        "before it",
        "in it",
        "one a few batches ahead",
        "at its last batch",
        "at its end",
        "at the end of the run",
    ],
)
def test_processes_stop_at_the_same_point_of_an_evaluation(several, first, second, last):
    """Each has reached one of the points when it sees the request; none has passed the point where
    all stop.
    """
    make, poll = several
    watchdogs = make(2)
    for each, at in zip(watchdogs, (first, second), strict=True):
        assert first_stop(each, EVALUATED[: at + 1]) is None
    watchdogs[0].request_stop("asked to end")
    for each in watchdogs:
        poll(each)
    assert [
        first_stop(each, EVALUATED[at + 1 :])
        for each, at in zip(watchdogs, (first, second), strict=True)
    ] == [last, last]


def test_processes_stop_after_the_same_step_when_one_is_ahead(several):
    make, poll = several
    watchdogs = make(3)
    for each, step in zip(watchdogs, (2, 3, 3), strict=True):
        assert not each.should_stop(step)
    watchdogs[2].request_stop("asked to end")
    for each in reversed(watchdogs):
        poll(each)
    assert [first_stop(each, [(step, 0) for step in range(3, 9)]) for each in watchdogs] == [
        (4, 0)
    ] * 3


def test_failure_and_first_step_are_recorded_for_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMD_REPORT", str(tmp_path))
    single = Watchdog()
    single.begin_run(20)
    single.record_progress("step", 26)
    single.begin_run(30)  # a second run of the same attempt
    single.report_failure(ValueError("boom"))
    assert json.loads((tmp_path / "began.json").read_text())["step"] == 20
    record = json.loads((tmp_path / "0.json").read_text())
    assert (record["step"], record["error"], record["code"]) == (30, "ValueError: boom", 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit("text"), 1),
        (ValueError(), 1),
        (ClusterError("x"), 78),
    ],
)
def test_exit_code(error, code):
    assert watchdog.exit_code(error) == code


def test_text_facts_list_constants():
    text = (
        "%cst = stablehlo.constant dense<-1.000000e-01> : tensor<f32>\n"
        "%c = stablehlo.constant dense<[0, 1]> : tensor<2xui32>\n"
        '%x = stablehlo.constant dense<"0x00FF"> : tensor<4xf32>\n'
    )
    facts = text_facts(text, "the step")
    assert facts.pop("the program of the step") and facts == {
        "number 1 in the step": "-1.000000e-01 (f32)",
        "number 2 in the step": "[0, 1] (2xui32)",
    }
