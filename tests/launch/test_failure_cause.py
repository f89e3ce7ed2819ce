"""Who failed first, by the time of what processes have left behind."""

import pytest

from spmd.launch import failure_cause
from spmd.launch.restart_policy import ALL, summarize_attempt


def failure(rank, at, text, *, kind="wait", step=26, code=43, phase="step"):
    return {
        "name": str(rank),
        "at": at,
        "step": step,
        "phase": phase,
        "kind": kind,
        "error": text,
        "code": code,
    }


def life(rank, at, *, step=25, phase="step", since=0.0, busy=False, stopped=None, end=""):
    return {
        "busy": busy,
        "name": f"life.{rank}",
        "at": at,
        "step": step,
        "phase": phase,
        "since": since,
        "stopped": stopped,
        "end": end,
    }


STALLED = failure(0, 160.0, "stalled in step (limit 60 s)")
WAITED = life(0, 160.0, end="left")
CONSEQUENCE = "; consequence: process 0 at step 26: stalled in step (limit 60 s)"
HEARD = "last heartbeat in step after step 25, 60 s before another failed"
LOST_IT = f"was killed, stopped, or blocked by code that holds the GIL, {HEARD}"


@pytest.mark.parametrize(
    ("records", "codes", "first", "why"),
    [
        pytest.param(
            [STALLED, WAITED, life(1, 99.6)],
            {0: 43, 1: 0},
            {0: 43, 1: 0},
            f"process 1 ended with code 0 before the end of its script, {HEARD}{CONSEQUENCE}",
            id="os._exit(0)",
        ),
        pytest.param(
            [STALLED, WAITED, life(1, 99.6)],
            {0: 43, 1: -9},
            {0: 43},
            f"process 1 {LOST_IT}{CONSEQUENCE}",
            id="stopped, or GIL held",
        ),
        pytest.param(
            [STALLED, WAITED, life(1, 99.6)],
            {ALL: 43},
            {ALL: 43},
            f"process 1 {LOST_IT}{CONSEQUENCE}",
            id="stopped under srun",
        ),
        pytest.param(
            [
                STALLED,
                WAITED,
                life(1, 160.5, phase="save", since=60.5, stopped="enough", end="left"),
            ],
            {0: 43, 1: 42},
            {0: 43},
            "process 1 left its run alone after step 25 (info.stop: enough), 60 s before another "
            "failed" + CONSEQUENCE,
            id="info.stop on one",
        ),
        pytest.param(
            [STALLED, WAITED, life(1, 99.6, phase="script", end="done")],
            {0: 43, 1: 42},
            {0: 43},
            "process 1 finished its script after step 25, and others did not, 60 s before another "
            "failed" + CONSEQUENCE,
            id="sys.exit(0) on one",
        ),
        pytest.param(
            [STALLED, WAITED, life(1, 160.5, phase="eval", since=70.5, end="left")],
            {0: 43, 1: 42},
            {0: 43},
            "process 1 was in eval after step 25, others waited for it in step, 70 s before "
            "another failed" + CONSEQUENCE,
            id="in another phase",
        ),
        pytest.param(
            [STALLED, WAITED, life(1, 160.5, since=60.5, busy=True, end="left")],
            {0: 43, 1: 42},
            {0: 43},
            "process 1 made no progress in step after step 25, without waiting for others, 60 s "
            "before another failed" + CONSEQUENCE,
            id="asleep in a callback",
        ),
        pytest.param(
            [failure(0, 100.9, "JaxRuntimeError: reset", code=1, phase="script"), life(1, 99.5)],
            {0: 1, 1: 0},
            {0: 1, 1: 0},
            "process 1 ended with code 0 before the end of its script, last heartbeat in step "
            "after step 25, 1 s before another failed",
            id="os._exit(0), and a transfer broke off",
        ),
        pytest.param(
            [
                failure(0, 100.5, "CheckpointError: after shutdown", kind="error", code=1),
                life(0, 100.0, phase="script", end="done"),
                life(1, 103.0, end="left"),
            ],
            {0: 1, 1: 42},
            {0: 1},
            "process 0 finished its script after step 25, and others did not; consequence: process "
            "0 at step 26: CheckpointError",
            id="sys.exit(0), and what it had begun failed",
        ),
        pytest.param(
            [
                failure(0, 100.5, "CheckpointError: full", kind="error", code=1),
                life(0, 100.0, end="done"),
                life(1, 100.0, end="done"),
            ],
            {0: 1, 1: 42},
            {0: 1},
            "process 0 at step 26: CheckpointError: full",
            id="all came to their end, and the last save failed",
        ),
        pytest.param(
            [STALLED, failure(1, 161.0, "stalled in step (limit 60 s)", kind="stall", step=25)],
            {0: 43, 1: 43},
            {0: 43},
            "process 1 at step 25: stalled in step (limit 60 s)",
            id="one waits for devices, one does not",
        ),
        pytest.param(
            [
                failure(0, 100.9, "JaxRuntimeError: reset", code=1),
                life(0, 100.9, end="left"),
                life(1, 99.5),
            ],
            {0: 1, 1: -9},
            {1: -9},
            "process 1 ended with signal 9; consequence: process 0 at step 26: JaxRuntimeError: "
            "reset",
            id="killed",
        ),
        pytest.param(
            [
                failure(0, 100.9, "JaxRuntimeError: reset", code=1),
                failure(1, 101.0, "ValueError: boom", kind="error", code=1),
            ],
            {0: 1, 1: 1},
            {0: 1},
            "process 1 at step 26: ValueError: boom",
            id="a transfer that broke off was reported first",
        ),
        pytest.param(
            [
                failure(1, 100.0, "ValueError: boom", kind="error", code=1),
                life(0, 130.0),
                life(1, 100.0, end="left"),
            ],
            {0: -6, 1: 1},
            {0: -6, 1: 1},
            "process 1 at step 26: ValueError: boom",
            id="aborted by the service's end",
        ),
        pytest.param(
            [life(0, 99.6), life(1, 130.0)],
            {0: -9, 1: -6},
            {1: -6},
            "process 0 " + LOST_IT.replace("60 s", "30 s"),
            id="process 0 frozen",
        ),
        pytest.param(
            [
                life(0, 100.0, phase="script", end="done"),
                life(1, 130.0, phase="script"),
                failure(1, 130.0, "ValueError: x", kind="error", code=1),
            ],
            {0: 42, 1: 1},
            {1: 1},
            "process 1 at step 26: ValueError: x",
            id="one was ready, and the other failed at work of its own",
        ),
        pytest.param(
            [life(0, 100.0, end="done"), life(1, 100.0, end="done")],
            {0: 143, 1: 143},
            {0: 143},
            "2 processes ended with code 143 after SIGTERM",
            id="all were asked to end",
        ),
    ],
)
def test_root_cause_is_the_earliest_sign_of_failure(records, codes, first, why):
    attempt = summarize_attempt(records, codes, first)
    assert attempt.cause.startswith(why), attempt.cause


def test_unreadable_records_are_ignored():
    assert (
        failure_cause.failures([{"name": "life.1"}, {"name": "x", "at": 1}, {}]) == []
        and failure_cause.heartbeats([{"name": "life.x"}, {"name": "1"}, {}]) == {}
    )
