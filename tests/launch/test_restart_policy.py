"""The policy of starting again, over what attempts came to."""

import json
import signal
import time
from types import SimpleNamespace

import numpy as np
import optax
import pytest

import spmd
from spmd.launch import process_group, ssh_launcher
from spmd.launch.restart_policy import (
    ALL,
    LOST,
    Attempt,
    exit_code,
    no_restart_reason,
    read_records,
    summarize_attempt,
)

BOOM = {1: (26, "ValueError: boom")}


def attempt(code=1, began=0, failures=BOOM):
    return Attempt({0: 42, 1: code}, began, failures, first={1: code})


@pytest.mark.parametrize(
    ("attempts", "why"),
    [
        ([attempt()], None),
        ([attempt(-9, failures={})] * 3, None),
        ([attempt(78)], "processes that disagree would disagree again"),
        ([attempt(2)], "the error before training would recur"),
        ([attempt(143)], "it was asked to stop"),
        ([Attempt({0: 143, 1: 143}, 0, saved=40)], "it was asked to stop, and has saved step 40"),
        ([attempt(), attempt(began=20)], "the same error occurred twice at the same step"),
        ([attempt(), attempt(failures={1: (27, "ValueError: boom")})], None),
        ([attempt(), attempt(failures={0: (26, "OSError: other")})], None),
        ([attempt(-9, 20, {})] * 4, "no progress: 4 attempts started at step 20"),
        ([attempt(-9, None, {})] * 4, "no progress: 4 attempts started at step 0"),
        ([*[attempt(-9, 20, {})] * 3, attempt(-9, 30, {})], None),
        (
            [attempt(-9, step, {}) for step in range(6)],
            "the limit of 5 restarts is reached (--max-restarts)",
        ),
    ],
)
def test_no_restart_reason(attempts, why):
    assert no_restart_reason(attempts, 5) == why


def test_no_restart_by_default():
    assert (
        no_restart_reason([attempt()], 0) == "the limit of 0 restarts is reached (--max-restarts)"
    )


@pytest.mark.parametrize(
    ("outcome", "code", "why"),
    [
        (attempt(3), 3, "process 1 at step 26: ValueError: boom"),
        (attempt(-9, failures={}), 137, "process 1 ended with signal 9"),
        (
            attempt(-9, failures={0: (26, "Gloo:\n reset \x1b[1m")}),
            42,
            r"process 1 ended with signal 9; consequence: process 0 at step 26: Gloo: reset "
            r"\x1b[1m",
        ),
        (Attempt({0: 42, 1: 7}), 42, "process 1 ended with code 7"),
        (Attempt({0: -9, 1: 5}, first={1: 5}), 5, "process 1 ended with code 5"),
        (Attempt({0: -9, 1: 255}, first={1: 255}), 255, "the host of process 1 is gone"),
        (Attempt({ALL: 255}), 255, "hosts are missing"),
        (
            Attempt({0: 143, 1: 143}, saved=7),
            143,
            "2 processes ended with code 143 after SIGTERM, and have saved step 7",
        ),
        (
            Attempt({0: 143}, saved=7),
            143,
            "process 0 ended with code 143: it received SIGTERM, and has saved step 7",
        ),
    ],
)
def test_exit_code_and_cause(outcome, code, why):
    assert (exit_code(outcome), outcome.cause) == (code, why)


def test_attempt_is_read_from_records(tmp_path):
    (tmp_path / "1.json").write_text(json.dumps({"at": 2.0, "step": 26, "error": "second"}))
    (tmp_path / "0.json").write_text(json.dumps({"at": 1.0, "step": 25, "error": "first"}))
    (tmp_path / "2.json").write_text('{"at": 0.5, "st')  # killed while it wrote
    (tmp_path / "began.json").write_text(json.dumps({"at": 0.0, "step": 20}))
    outcome = summarize_attempt(read_records(tmp_path), {0: 1, 1: 1, 2: -9}, {2: -9})
    assert outcome.first_step == 20 and list(outcome.failures.items()) == [
        (0, (25, "first")),
        (1, (26, "second")),
    ]
    assert outcome.signature == (25, "first")


@pytest.mark.parametrize("saves", [True, False])
def test_saved_step_is_reported_only_if_saved(saves, tmp_path, monkeypatch):
    """A run without a checkpoint folder saves nothing on SIGTERM, and does not claim to."""
    (tmp_path / "reported").mkdir()
    monkeypatch.setenv("SPMD_REPORT", str(tmp_path / "reported"))
    model = spmd.FunctionalModel(
        lambda key: {"w": np.zeros((4, 1), np.float32)}, lambda params, x: x @ params["w"]
    )
    data = {"x": np.ones((32, 4), np.float32), "y": np.ones((32, 1), np.float32)}
    options = {"checkpoint": tmp_path / "run"} if saves else {}

    def end(info):
        if info.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        spmd.fit(
            model,
            data,
            loss=spmd.losses.mean_squared_error,
            optimizer=optax.sgd(0.1),
            batch_size=8,
            callbacks=[end],
            **options,
        )
    outcome = summarize_attempt(
        read_records(tmp_path / "reported"), {0: 143}, {0: 143}, signal.SIGTERM
    )
    assert outcome.cause == "process 0 ended with code 143: it received SIGTERM" + (
        ", and has saved step 3" if saves else ""
    )


@pytest.mark.parametrize(
    ("ends", "code", "heard"),
    [("kill -9 $$", -9, False), ("exit 3", 3, True)],
    ids=["killed", "failed"],
)
def test_others_are_ended_soon_after_one_was_killed(tmp_path, monkeypatch, ends, code, heard):
    """After one was killed the others are ended soon (with a fake clock); after one failed they may
    exit on their own.
    """
    clock, ended = SimpleNamespace(now=None), []

    def monotonic():
        clock.now = clock.now or 0.0
        return clock.now

    def sleep(seconds):
        clock.now = (
            clock.now if heard or clock.now is None else clock.now + process_group.KILLED / 4
        )
        time.sleep(0.01)

    monkeypatch.setattr(
        process_group, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep, time=time.time)
    )
    wait = f"while [ ! -e {tmp_path}/gone ]; do sleep 0.02; done"
    last = "echo reported" if heard else "exec sleep 1000"
    commands = {
        0: (["sh", "-c", f"{wait}; {last}"], {}),
        1: (["sh", "-c", f"touch {tmp_path}/gone; {ends}"], {}),
    }
    lines = []
    with process_group.start_processes(
        commands, lambda rank: f"[{rank}] ", write=lines.append
    ) as both:
        codes = both.wait(
            grace=5.0, send=lambda number: (ended.append(clock.now), both.signal(number))
        )
    assert both.first[1] == code and codes == {0: 0 if heard else -9, 1: code}
    assert lines == (["[0] reported\n"] if heard else []) and ended == (
        [] if heard else [1.25 * process_group.KILLED]
    )


class Agent:
    """A connection to an agent whose process ends with a code, or, without one, when it is
    killed.
    """

    def __init__(self, rank, clock, code=None):
        self.ranks, self.clock, self.killed_at, self.last_error = [rank], clock, None, ""
        self.host, self.unhandled = SimpleNamespace(name=f"host {rank}"), None
        if code is not None:
            self.unhandled = {"gone": ""} if code == LOST else self.ended(code, {rank: code})

    def ended(self, code, first):
        return {"ended": {"codes": {self.ranks[0]: code}, "first": first, "records": []}}

    def hear(self, seconds):
        self.clock.now += seconds
        return self.unhandled

    def send(self, message):
        self.killed_at, self.unhandled = (
            self.clock.now,
            self.unhandled or self.ended(-message["signal"], {}),
        )


@pytest.mark.parametrize("code", [-9, LOST, 3])
def test_other_hosts_are_ended_soon_after_one_was_killed_or_lost(monkeypatch, code):
    """With a fake clock. After an error the others may report what follows from it, and exit."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        ssh_launcher, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now)
    )
    agents = [Agent(0, clock), Agent(1, clock, code)]
    group = ssh_launcher.RemoteProcessGroup(lambda text: None)
    group.agents = agents
    assert (
        group.wait(grace=5.0) == {0: -9, 1: code}
        and group.first == {1: code}
        and 100 < group.failed_at < 100.1
    )
    seconds = process_group.KILLED if code != 3 else 2 * process_group.SETTLE
    assert seconds < agents[0].killed_at - group.failed_at < seconds + 0.2
