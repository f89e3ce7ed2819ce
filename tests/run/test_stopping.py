"""Runs that end early, by an error in user code or by Ctrl-C: the state is saved, and the run can
be resumed.
"""

import contextlib
import json
import os
import signal
import threading
import time
import traceback
import warnings

import pytest
from job import started, train
from small import Fail, Recorder, fit, fit_net, labelled, numbers, same

import spmd
from spmd.data import prefetch
from spmd.distributed.launcher_protocol import exit_at_once
from spmd.errors import CallbackError, OptionError
from spmd.run import time_account
from spmd.run.checkpoint import CheckpointStore
from spmd.run.loop import Loop
from spmd.run.signals import interruptible
from tests.processes import handled_by

FIX = "\n    fix: correct the line at which its traceback, above, ends."


def resumed(path, **options):
    return fit(epochs=3, checkpoint=path, resume=True, **options)


@pytest.mark.system
@pytest.mark.parametrize(
    "event, step, saved",
    [
        ("on_step", 1, 2),
        ("on_step", 4, 5),
        ("on_eval", 3, 3),
        ("on_eval", 6, 6),
        ("on_checkpoint", 3, 3),
        ("on_stop", 9, 9),
    ],
)
def test_a_callback_that_raises_does_not_lose_the_state(event, step, saved, tmp_path):
    """A step's metrics are known one step later; the newest state is the one that is saved."""
    error = RuntimeError("mine")
    recorder = Recorder()
    options = {"epochs": 3, "eval_data": numbers(40, 1)}
    with pytest.raises(CallbackError) as raised:
        fit(**options, checkpoint=tmp_path, callbacks=[recorder, Fail(event, step, error)])
    assert str(raised.value) == f"step {step}: callback Fail.{event} raises RuntimeError: mine{FIX}"
    assert raised.value.__cause__ is error
    assert "_maybe" in [entry.name for entry in traceback.extract_tb(error.__traceback__)]
    assert raised.value.__notes__ == [
        f"spmd: the state after step {saved} was saved in {tmp_path}."
    ]
    assert [event for event, _ in recorder.events].count("stop") == 1
    rest, uninterrupted = fit(**options, checkpoint=tmp_path, resume=True), fit(**options)
    assert same(rest.state, uninterrupted.state)
    assert rest.history["loss"] == uninterrupted.history["loss"][saved:]


@pytest.mark.system
def test_an_error_before_the_first_step_saves_nothing(tmp_path):
    with pytest.raises(CallbackError) as raised:
        fit(checkpoint=tmp_path, callbacks=[Fail("on_start", 0, RuntimeError("mine"))])
    assert not getattr(raised.value, "__notes__", [])
    assert same(fit(checkpoint=tmp_path).state, fit().state)


@pytest.mark.system
def test_a_reader_that_raises_does_not_lose_the_state(tmp_path):
    def batches(broken):
        data = numbers()
        for first in range(0, 96, 16):
            if broken and first == 64:
                raise OSError("the disk is gone")
            yield {name: leaf[first : first + 16] for name, leaf in data.items()}

    with pytest.raises(OSError, match="the disk is gone") as raised:
        fit(lambda: batches(True), batch_size=None, checkpoint=tmp_path)
    assert raised.value.__notes__ == [f"spmd: the state after step 4 was saved in {tmp_path}."]
    rest = fit(lambda: batches(False), batch_size=None, checkpoint=tmp_path, resume=True)
    assert same(rest.state, fit(lambda: batches(False), batch_size=None).state)


def test_failed_save_is_a_note_on_the_error(tmp_path, monkeypatch):
    def full(self, *given):
        raise OSError("no space left")

    monkeypatch.setattr(CheckpointStore, "save", full)
    error = RuntimeError("mine")
    with pytest.raises(CallbackError) as raised:
        fit(checkpoint=tmp_path, callbacks=[Fail("on_step", 1, error)])
    assert raised.value.__cause__ is error
    assert raised.value.__notes__ == [
        "spmd: and the state after step 2 could not be saved: OSError: no space left"
    ]


def test_second_error_is_a_note_on_the_first():
    first = RuntimeError("mine")
    with pytest.raises(CallbackError) as raised:
        fit(callbacks=[Fail("on_step", 1, first), Fail("on_stop", 2, ValueError("another"))])
    assert raised.value.__cause__ is first
    second = "step 2: callback Fail.on_stop raises ValueError: another"
    assert raised.value.__notes__ == [f"spmd: and on_stop failed: CallbackError: {second}"]


# Ctrl-C -------------------------------------------------------------------------------------------


def test_ctrl_c_saves_and_returns(tmp_path, caplog):
    before = signal.getsignal(signal.SIGINT)
    recorder = Recorder()

    def press(info):
        if info.step == 4:
            signal.raise_signal(signal.SIGINT)

    result = fit(epochs=3, checkpoint=tmp_path, callbacks=[recorder, press])
    assert result.stop_reason == "interrupted"
    assert int(result.state.step) == len(result.history) == 5
    assert recorder.events[-2:] == [("checkpoint", 5), ("stop", 5)]
    assert signal.getsignal(signal.SIGINT) is before
    kept = (
        f"interrupted after step 5: the checkpoint is in {tmp_path}, and fit(..., resume=True) "
        "resumes from it."
    )
    assert caplog.messages[-1] == kept
    rest, uninterrupted = resumed(tmp_path), fit(epochs=3)
    assert same(rest.state, uninterrupted.state) and rest.stop_reason is None


def test_ctrl_c_without_a_folder_says_that_nothing_is_saved(capfd):
    result = fit(
        epochs=3,
        progress=True,
        callbacks=[lambda info: info.step == 4 and signal.raise_signal(signal.SIGINT)],
    )
    assert result.stop_reason == "interrupted"
    kept = (
        "interrupted after step 5: nothing was saved, since there is no checkpoint folder: "
        "fit(checkpoint=...) names one.\n"
    )
    assert capfd.readouterr().err.endswith(kept)


@pytest.mark.system
def test_ctrl_c_twice_interrupts_at_once_and_still_saves(tmp_path):
    def press(info):
        if info.step == 4:
            signal.raise_signal(signal.SIGINT)
            until = time.monotonic() + 60
            # two that come before the first is handled count as one
            while not info._control.watchdog.stop_reason:
                assert time.monotonic() < until
                time.sleep(0.001)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        fit(epochs=3, checkpoint=tmp_path, callbacks=[press])
    assert raised.value.__notes__ == [f"spmd: the state after step 5 was saved in {tmp_path}."]
    assert same(resumed(tmp_path).state, fit(epochs=3).state)


class Evaluation:
    """Evaluation data that notes which checkpoints were on disk whenever it was read."""

    def __init__(self, folder):
        self.folder, self.found = folder, []

    def __call__(self):
        self.found.append(finished_steps(self.folder))
        yield numbers(32, 1)


@pytest.mark.system
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=["SIGTERM", "Ctrl-C"],
)
@pytest.mark.parametrize(
    "step, evaluated, every, eval_every",
    [(2, 0, None, None), (5, 1, 5, None), (5, 1, None, 5), (6, 1, None, None)],
    ids=["mid-epoch", "where it saves", "where it evaluates", "epoch's end"],
)
def test_a_signal_saves_before_it_evaluates(number, step, evaluated, every, eval_every, tmp_path):
    """Checkpoints are judged by a metric; still no evaluation may keep the last one from being
    written. The resumed run makes up for it.
    """

    def run(folder, **options):
        evaluation = Evaluation(folder)
        checkpoint = spmd.Checkpoint(folder, best="eval_loss", keep=100, every=every)
        return evaluation, lambda: fit(
            epochs=3, eval_data=evaluation, eval_every=eval_every, checkpoint=checkpoint, **options
        )

    evaluation, run_until_signal = run(
        tmp_path / "stopped",
        callbacks=[lambda info: signal.raise_signal(number) if info.step == step - 1 else None],
    )
    with pytest.raises(SystemExit) if number == signal.SIGTERM else contextlib.nullcontext():
        run_until_signal()
    assert finished_steps(tmp_path / "stopped")[-1] == step and len(evaluation.found) == evaluated
    uninterrupted, rest = (
        run(tmp_path / "uninterrupted")[1](),
        run(tmp_path / "stopped", resume=True)[1](),
    )
    assert same(rest.state, uninterrupted.state)
    assert rest.history.evaluations == [
        row for row in uninterrupted.history.evaluations if row["step"] >= step
    ]


class Batches:
    """Evaluation data of 4 batches; reading the second one at a step raises a signal."""

    def __init__(self, number=None, evaluation=1):
        self.number, self.wanted, self.evaluations, self.read = number, evaluation, 0, 0

    def __call__(self):
        self.evaluations += 1
        for at in range(4):
            self.read += 1
            if self.number is not None and (self.evaluations, at) == (self.wanted, 1):
                signal.raise_signal(self.number)
            yield numbers(32, at)


@pytest.mark.system
@pytest.mark.parametrize(
    "eval_every, best",
    [(None, None), (2, None), (None, "eval_loss")],
    ids=["epoch's end", "mid-epoch", "judged"],
)
def test_a_signal_during_an_evaluation_ends_it_between_batches(eval_every, best, tmp_path):
    """The state is saved, nothing of the evaluation is reported, and the resumed run makes it
    anew.
    """

    def run(folder, evaluation, **options):
        checkpoint = spmd.Checkpoint(folder, best=best, keep=100)
        return fit(
            epochs=3, eval_data=evaluation, eval_every=eval_every, checkpoint=checkpoint, **options
        )

    recorder, step = Recorder(), 2 if eval_every else 3
    batches = Batches(signal.SIGINT)
    ended = run(tmp_path / "stopped", batches, callbacks=[recorder])
    assert batches.read == 2, "the current batch, and no other"
    assert (
        ended.stop_reason == "interrupted"
        and int(ended.state.step) == step
        and finished_steps(tmp_path / "stopped") == [step]
    )
    assert (
        ended.history.evaluations == []
        and ended.history.unfinished == [step]
        and recorder.steps("eval") == []
    )
    assert "0 evaluations (1 more not completed)" in repr(ended.history)
    rows = [
        json.loads(line)
        for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if row.get("event") == "evaluation not completed"] == [step]
    assert not [row for row in rows if "eval_loss" in row]
    rest, uninterrupted = (
        run(tmp_path / "stopped", Batches(), resume=True),
        run(tmp_path / "uninterrupted", Batches()),
    )
    assert same(rest.state, uninterrupted.state)
    assert (
        rest.history.evaluations == uninterrupted.history.evaluations
        and uninterrupted.history.unfinished == []
    )


def test_sigterm_during_the_last_evaluation_saves_and_ends(tmp_path, caplog):
    """All steps are made; the evaluation is not, so the run was not at its end."""
    batches = Batches(signal.SIGTERM)
    options = {"steps": 3, "eval_every": 5, "checkpoint": tmp_path}
    with pytest.raises(SystemExit) as raised:
        fit(eval_data=batches, **options)
    assert raised.value.code == 143 and batches.read == 2 and finished_steps(tmp_path) == [3]
    kept = (
        f"ended by SIGTERM after step 3: the checkpoint is in {tmp_path}, and fit(..., "
        "resume=True) resumes from it."
    )
    assert caplog.messages[-1] == kept
    rest = fit(eval_data=Batches(), resume=True, **options)
    assert [row["step"] for row in rest.history.evaluations] == [3]


# SIGTERM where nothing is to save -----------------------------------------------------------------


def terminate(*_):
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("where", ["model", "on_start", "restore"])
def test_sigterm_before_the_first_step_ends_at_once(where, tmp_path, monkeypatch, capfd):
    """The folder is released, nothing new is saved, and what was there is intact."""
    if where == "restore":
        fit(steps=2, checkpoint=tmp_path)
        monkeypatch.setattr(CheckpointStore, "restore", terminate)
    if where == "model":
        monkeypatch.setattr("spmd.train.state_factory.StateFactory.init", terminate)
    recorder = Recorder()
    before = signal.getsignal(signal.SIGTERM)
    callbacks = (
        [recorder, Fail("on_start", 0, SystemExit(99))]
        if where != "on_start"
        else [recorder, Start(terminate)]
    )
    with pytest.raises(SystemExit) as raised:
        fit(steps=4, checkpoint=tmp_path, callbacks=callbacks, resume=where == "restore")
    assert raised.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert "before there was anything to save" in capfd.readouterr().err
    assert (
        finished_steps(tmp_path) == ([2] if where == "restore" else [])
        and recorder.steps("checkpoint") == []
    )
    monkeypatch.undo()
    assert same(fit(steps=4, checkpoint=tmp_path, resume=True).state, fit(steps=4).state)


class Start(spmd.callbacks.Callback):
    """Calls a function before the first step."""

    def __init__(self, function):
        self.function = function

    def on_start(self, info):
        self.function()


def test_sigterm_while_the_last_checkpoint_is_written_is_not_lost(tmp_path, monkeypatch):
    seal = CheckpointStore._seal

    def sealed(store):
        os.kill(os.getpid(), signal.SIGTERM)
        seal(store)

    monkeypatch.setattr(CheckpointStore, "_seal", sealed)
    with pytest.raises(SystemExit) as raised:
        fit(steps=3, checkpoint=tmp_path)
    assert raised.value.code == 143 and finished_steps(tmp_path) == [3]


def test_sigterm_while_memory_is_released_is_not_lost(tmp_path, monkeypatch):
    def released(loop, *, remove):
        assert remove
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loop, "_close_memory", released)
    with pytest.raises(SystemExit) as raised:
        fit(steps=3, checkpoint=tmp_path)
    assert raised.value.code == 143 and finished_steps(tmp_path) == [3]


@pytest.mark.parametrize("took, said", [(20.0, True), (19.0, False)])
def test_save_that_may_take_longer_than_the_time_left_is_reported(
    took, said, tmp_path, monkeypatch, caplog
):
    """By a fake clock: 10 s of 30 pass between the signal and the save."""
    clock = [1000.0]
    monkeypatch.setattr(time_account, "now", lambda: clock[0])
    monkeypatch.setenv("SPMD_GRACE", "29.5")

    def press(info):
        if info.step == 2:
            signal.raise_signal(signal.SIGTERM)
            clock[0] += 10.0
            info._control.parts.store.write_seconds = took

    with pytest.raises(SystemExit):
        fit(epochs=3, checkpoint=tmp_path, callbacks=[press])
    text = (
        "step 3 may not be saved in time: the last checkpoint took 20 s to write, and 19.5 s are "
        "left after SIGTERM.\n"
    )
    assert (
        (f"{text}    fix: spmd launch --grace 40" in caplog.text)
        == said
        == ("in time" in caplog.text)
    )
    assert finished_steps(tmp_path) == [3]


def test_sigterm_while_the_reader_hangs_saves(tmp_path, monkeypatch, caplog):
    """The reader's thread blocks for as long as the run lasts."""
    monkeypatch.setattr(prefetch, "JOIN_SECONDS", 0.05)
    trained, released = threading.Event(), threading.Event()

    def batches():
        for at in range(2):
            yield numbers(32, at)
        trained.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        released.wait(60)

    with pytest.raises(SystemExit) as raised:
        fit(batches, batch_size=None, checkpoint=tmp_path, callbacks=[lambda info: trained.set()])
    released.set()
    assert raised.value.code == 143 and "the data's reader is still busy 0.05 s" in caplog.text
    assert finished_steps(tmp_path) == [2]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2], ids=str)
def test_signals_of_terminals_and_schedulers_save_and_end(
    number, tmp_path, monkeypatch, capfd, caplog
):
    """SIGHUP always, the others by choice; the choice wins over a handler, such as that of a job
    library.
    """
    monkeypatch.setenv("SPMD_STOP_SIGNALS", "USR1, USR2")
    with handled_by(signal.SIG_DFL), handled_by(mine := lambda *_: os._exit(3), signal.SIGUSR2):
        with pytest.raises(SystemExit) as raised:
            fit(
                epochs=3,
                checkpoint=tmp_path,
                callbacks=[lambda info: signal.raise_signal(number) if info.step == 4 else None],
            )
        assert (
            signal.getsignal(signal.SIGUSR2) is mine
            and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        )
    assert raised.value.code == 143 and finished_steps(tmp_path) == [3, 5]
    assert capfd.readouterr().err.count(f"spmd: {number.name} acts as SIGTERM\n") == 1
    kept = (
        f"ended by SIGTERM after step 5: the checkpoint is in {tmp_path}, and fit(..., "
        "resume=True) resumes from it."
    )
    assert caplog.messages[-1] == kept
    assert same(resumed(tmp_path).state, fit(epochs=3).state)


def test_ignored_sighup_stays_ignored(tmp_path, capfd):
    """As nohup starts a process."""
    with handled_by(signal.SIG_IGN):
        result = fit(
            steps=4,
            checkpoint=tmp_path,
            callbacks=[lambda info: signal.raise_signal(signal.SIGHUP)],
        )
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert (
        result.stop_reason is None
        and finished_steps(tmp_path)[-1] == 4
        and "acts as" not in capfd.readouterr().err
    )


def test_sighup_before_the_first_step_ends_at_once(tmp_path, capfd):
    with pytest.raises(SystemExit) as raised, handled_by(signal.SIG_DFL):
        fit(
            steps=4,
            checkpoint=tmp_path,
            callbacks=[Start(lambda: signal.raise_signal(signal.SIGHUP))],
        )
    assert raised.value.code == 143
    lines = (
        "spmd: SIGHUP acts as SIGTERM\nspmd: it received SIGTERM in compile, before there was "
        "anything to save"
    )
    assert f"{lines}: this process ends with code 143\n" in capfd.readouterr().err


@pytest.mark.parametrize("names", ["USR3", "USR1,TERM"])
def test_unknown_stop_signal_is_refused(names, monkeypatch):
    monkeypatch.setenv("SPMD_STOP_SIGNALS", names)
    with pytest.raises(OptionError) as raised:
        fit(steps=1)
    name = names.split(",")[-1]
    assert str(raised.value) == (
        f'SPMD_STOP_SIGNALS={names}: "{name}" cannot be chosen; TERM and HUP stop a run without '
        "it.\n"
        "    fix: SPMD_STOP_SIGNALS=USR1, SPMD_STOP_SIGNALS=USR2, or SPMD_STOP_SIGNALS=USR1,USR2."
    )


def test_fork_does_not_end_the_run():
    """A worker of a data loader that receives SIGTERM ends by it, and the run continues."""

    def fork(info):
        read, written = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(written, b"1")
            while True:
                time.sleep(1)
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        os.close(read)
        os.close(written)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, about forks
        result = fit(steps=4, callbacks=[lambda info: fork(info) if info.step == 1 else None])
    assert int(result.state.step) == 4 and result.stop_reason is None


def test_outside_the_main_thread_signals_are_left_alone():
    results = []
    thread = threading.Thread(target=lambda: results.append(fit(steps=2)))
    thread.start()
    thread.join(60)
    assert int(results[0].state.step) == 2


def lines_until(process, wanted):
    """Lines of the process, up to the wanted one."""
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.strip() == wanted:
            return lines
    raise AssertionError(f"the process ended before {wanted!r}: {lines}\n{process.stderr.read()}")


def finished_steps(path):
    """Steps that are complete on disk: an unfinished one has a longer name. This opens no store, so
    it removes nothing.
    """
    return sorted(
        int(entry.name) for entry in (path / "checkpoints").iterdir() if entry.name.isdigit()
    )


@pytest.fixture(scope="module")
def undisturbed():
    with contextlib.redirect_stdout(open(os.devnull, "w")) as silent, silent:
        return train()


@pytest.mark.system
def test_ctrl_c_of_a_real_process(tmp_path, undisturbed):
    with started(timeout=400, checkpoint=str(tmp_path), epochs=100_000) as process:
        lines_until(process, "step 7")
        os.kill(process.pid, signal.SIGINT)
        out, errors = process.communicate()
    assert process.returncode == 0, errors
    last = out.strip().splitlines()[-1].split()
    assert last[0] == "done" and last[2] == "interrupted" and int(last[1]) >= 7
    assert "Traceback" not in errors
    assert finished_steps(tmp_path)[-1] == int(last[1])


@pytest.mark.system
@pytest.mark.parametrize(
    "every, kill",
    [
        pytest.param(2, "checkpoint 6", id="during a save"),
        pytest.param(2, "by us", id="from outside", marks=pytest.mark.slow),
        pytest.param(2, "step 7", id="between saves", marks=pytest.mark.slow),
        pytest.param(1, "checkpoint 5", id="saving each step", marks=pytest.mark.slow),
        pytest.param(None, "checkpoint 3", id="at an epoch's end", marks=pytest.mark.slow),
    ],
)
def test_resume_after_kill_matches_uninterrupted_run(every, kill, tmp_path, undisturbed):
    """kill -9, like a power failure. An incomplete checkpoint does not count; the run resumes from
    the one before it.
    """
    options = {"checkpoint": str(tmp_path), "every": every}
    with started(timeout=400, kill=kill, **options) as process:
        if kill == "by us":
            lines_until(process, "step 6")
            os.kill(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert "done" not in out
    latest = max(finished_steps(tmp_path), default=0)
    assert latest < 12
    rest = train(**options, resume=True)
    assert int(rest.state.step) == 12
    assert same(rest.state, undisturbed.state)
    assert rest.history["loss"] == undisturbed.history["loss"][latest:]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.system
def test_the_run_that_is_killed_is_sensitive_to_its_seed(undisturbed):
    assert not same(fit_net(labelled(80), epochs=4, seed=1).state, undisturbed.state)


@pytest.mark.slow
def test_resume_skips_a_checkpoint_that_was_not_committed(tmp_path):
    """All is written and nothing is committed when the process dies: it is not taken for a
    checkpoint.
    """
    options = {"checkpoint": str(tmp_path), "every": 2, "wide": 10_000}
    with started(timeout=400, kill="seal 4", **options) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    # one is unfinished
    assert finished_steps(tmp_path) == [2] and len(list((tmp_path / "checkpoints").iterdir())) == 2
    rest = train(**options, resume=True, epochs=2)
    assert same(rest.state, train(wide=10_000, epochs=2).state)
    # unfinished checkpoints are removed
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "6"}


@pytest.mark.system
def test_3000_small_steps_on_8_devices_finish():
    """In a process of its own: with more than 2 steps in flight, XLA's CPU devices wait for each
    other for ever and abort.
    """
    with started(timeout=400, small_steps=3000) as process:
        out, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]
    assert out.split() == ["done", "3000", "3000"]


def test_handler_of_the_first_process_of_a_container_gives_way_to_a_run():
    before = signal.signal(signal.SIGTERM, exit_at_once)
    try:
        with interruptible():
            assert signal.getsignal(signal.SIGTERM) is not exit_at_once
        assert signal.getsignal(signal.SIGTERM) is exit_at_once
    finally:
        signal.signal(signal.SIGTERM, before)
