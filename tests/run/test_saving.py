"""Saving: a thread writes a copy of the state while training continues; training waits where
devices have no memory for the copy.
"""

import dataclasses
import errno
import gc
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from small import fit, numbers, same

import spmd
from spmd.distributed import watchdog
from spmd.distributed.timeouts import StallTimeouts
from spmd.errors import CallbackError, CheckpointError, DivergedError
from spmd.run import checkpoint, device_snapshot, retention
from spmd.run.checkpoint import CheckpointStore, _not_written
from spmd.run.evaluate_and_save import Evaluator
from spmd.run.step_metrics import StepMetrics
from spmd.sweeps.storage import open_checkpoints
from spmd.train.state import State
from tests.processes import ROOT, environment

COPIED, WAITED_FOR = True, False


@pytest.fixture
def copied(monkeypatch):
    """Of each state that is handed to Orbax: whether it is a copy."""
    seen, write, write_copy = [], CheckpointStore._write, CheckpointStore._write_copy

    def noted(self, *given):
        seen.append(threading.current_thread().name == "a copy")
        return write(self, *given)

    def named(self, *given):
        thread = threading.current_thread()
        thread.name, before = "a copy", thread.name
        try:
            return write_copy(self, *given)
        finally:
            thread.name = before

    monkeypatch.setattr(CheckpointStore, "_write", noted)
    monkeypatch.setattr(CheckpointStore, "_write_copy", named)
    return seen


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("room", [COPIED, WAITED_FOR], ids=["copied", "waited for"])
def test_checkpoint_holds_the_state_of_its_step(room, tmp_path, copied, monkeypatch):
    """Steps donate the state that is being saved; each checkpoint holds the state of its own step,
    whichever thread hands it over.
    """
    if not room:
        monkeypatch.setattr(checkpoint, "fits_on_devices", lambda state: False)
    seen = {}
    run = fit(
        epochs=3,
        checkpoint=spmd.Checkpoint(tmp_path, every=1, keep=100),
        callbacks=[
            spmd.callbacks.Each(
                lambda info: seen.update({info.step: jax.device_get(info.state.params)}), every=1
            )
        ],
    )
    store = CheckpointStore(spmd.Checkpoint(tmp_path, keep=100))
    assert store.steps() == list(range(1, int(run.state.step) + 1))
    for step in store.steps():
        state, _ = store.restore(step, run.trainer.abstract_state)
        assert same(state.params, seen[step])
    store.close()
    assert not same(seen[1], seen[2])
    assert copied == [room] * int(run.state.step)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (RuntimeError("can't start new thread"), "raise the limit of the process's memory"),
        (MemoryError(), "raise the limit of the process's memory"),
        (OSError("no space left"), "see whether the disk of that folder works"),
    ],
    ids=["threads", "memory", "disk"],
)
def test_fix_of_a_failed_save_is_for_its_cause(error, fix, tmp_path):
    text = str(_not_written(tmp_path, error))
    assert type(error).__name__ in text and str(tmp_path) in text and fix in text


def test_failure_of_the_save_thread_is_raised_by_the_next_save(tmp_path, monkeypatch):
    """And again at the end; training does not continue as if the checkpoint existed."""
    monkeypatch.setattr(
        CheckpointStore,
        "_write",
        lambda self, *given: (_ for _ in ()).throw(OSError("no space left")),
    )
    with pytest.raises(
        CheckpointError, match=r"could not be written to .*: OSError: no space left"
    ):
        fit(steps=5, checkpoint=spmd.Checkpoint(tmp_path, every=2))
    assert not [entry for entry in (tmp_path / "checkpoints").iterdir()]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spmd save")]


def test_failed_save_does_not_take_the_place_of_another_error(tmp_path, monkeypatch, caplog):
    """Orbax raises the error of a save once in each thread that waits for it."""

    def refuse(store):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "_seal", refuse)
    store = CheckpointStore(spmd.Checkpoint(tmp_path))
    try:
        store.save(fit(steps=1).state, 1, {}, {})
        futures.wait([store._written])
    finally:
        store.release()
    assert f"a checkpoint could not be written to {tmp_path}: " in caplog.text
    assert "No space left on device" in caplog.text
    CheckpointStore(spmd.Checkpoint(tmp_path)).release()


FAILING = """
import errno, os, sys, threading
from tests.run.small import fit
import spmd

make = os.mkdir

def refuse(path, *args, **options):
    if "state.orbax-checkpoint-tmp" in str(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return make(path, *args, **options)

os.mkdir = refuse
try:
    fit(steps=4, checkpoint=spmd.Checkpoint(sys.argv[1], every=2))
finally:
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    print("left:", left, flush=True)
"""  # noqa: E501


@pytest.mark.system
def test_process_ends_soon_after_a_failed_save(tmp_path):
    """The threads that Orbax starts would wait for one another for five minutes: the process has
    two, from its start. The error is the last that it prints, with the note about a second try.
    """
    command = [sys.executable, "-c", FAILING, str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT
    )
    assert done.returncode == 1
    last = (
        rf"\nspmd\.errors\.CheckpointError: a checkpoint could not be written to {tmp_path}/run: "
        r"OSError: .*No space left on device.*\n    fix: .*\n"
        r"spmd: and the state after step 4 could not be saved: .*\n"
    )
    assert re.search(rf"{last}\Z", done.stderr), done.stderr
    assert done.stdout.splitlines()[-1] == "left: []", (
        "threads that the end of the process waits for"
    )


def test_save_that_fails_in_one_of_several_processes_is_printed(tmp_path, monkeypatch, capsys):
    """With its folder and a fix, by Orbax's thread and by ours; the others wait for this one."""
    fit(steps=1, checkpoint=tmp_path)
    monkeypatch.setattr(checkpoint.jax, "process_count", lambda: 2)
    thread = logging.LogRecord("absl", logging.ERROR, "", 0, "a save fails", (), None)
    thread.threadName = "async_save"
    full = OSError(errno.ENOSPC, "No space left on device", "0")
    thread.exc_info = type(full), full, None
    checkpoint._failures.emit(thread)
    printed = capsys.readouterr().err
    checkpoint._report_failure(tmp_path, full)
    assert capsys.readouterr().err == printed
    assert printed.splitlines() == [
        f"spmd.errors.CheckpointError: a checkpoint could not be written to {tmp_path}: OSError: "
        "[Errno 28] No space left on device: '0'",
        f"    fix: {checkpoint.LOOK_AT_DISK}",
    ]


@pytest.mark.parametrize("name", ["lr[0.1]", "a*", "what?", "back\\slash"])
def test_folder_that_orbax_reads_as_a_pattern_is_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"could not be read again") as raised:
        fit(steps=1, checkpoint=tmp_path / name / "run")
    other = re.search('such as "(.*)" in place of', raised.value.fix)[1]
    assert (
        int(fit(steps=1, checkpoint=Path(other) / "run").trainer.restore(Path(other) / "run").step)
        == 1
    )


def test_arrays_that_were_not_merged_are_a_failed_save(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MERGED", "no-such-file")
    with pytest.raises(CheckpointError, match="the arrays of step 1 were written, and not merged"):
        fit(steps=1, checkpoint=tmp_path)


def test_newest_checkpoint_is_on_disk_before_an_older_one_goes(tmp_path, monkeypatch):
    """And so are the folders that hold it; a loss of power in between leaves one of the two in
    full.
    """
    events, sync, remove = [], os.fsync, shutil.rmtree

    def synced(file):
        events.append(("on disk", os.readlink(f"/proc/self/fd/{file}")))
        return sync(file)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda path, *args, **options: (
            events.append(("gone", str(path))) or remove(path, *args, **options)
        ),
    )
    fit(steps=4, checkpoint=spmd.Checkpoint(tmp_path, every=2, keep=1))
    gone = events.index(("gone", str(tmp_path / "checkpoints" / ".removed-2")))
    newest = tmp_path / "checkpoints" / "4"
    needed = {str(path) for path in (newest, newest.parent, *newest.rglob("*"))}
    assert needed <= {path for what, path in events[:gone] if what == "on disk"}
    assert [path.name for path in newest.parent.iterdir()] == ["4"]


def test_old_checkpoint_that_cannot_be_removed_is_no_failed_save(tmp_path, monkeypatch, caplog):
    def fails(path, *args, **options):
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", fails)
        fit(steps=4, checkpoint=spmd.Checkpoint(tmp_path, every=2, keep=1))
    assert (
        "the old checkpoint" in caplog.text
        and "could not be removed: Input/output error" in caplog.text
    )
    assert (tmp_path / "checkpoints" / ".removed-2").is_dir()
    fit(steps=6, checkpoint=spmd.Checkpoint(tmp_path, every=2, keep=1), resume=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["6"]


def test_next_owner_removes_leftovers_though_nothing_is_left_to_train(tmp_path):
    """Of a checkpoint that was being removed, and of one that was being written, when a process was
    killed.
    """
    config = spmd.Checkpoint(tmp_path, every=4)
    trained = fit(steps=4, checkpoint=config)
    checkpoints = tmp_path / "checkpoints"
    for name in (".removed-2", "6.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp-1700000000"):
        shutil.copytree(checkpoints / "4", checkpoints / name)
    names = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "history-before-1.bin").write_bytes(b"of an earlier version")
    (tmp_path / ".notes").write_text("mine")
    assert same(fit(steps=4, checkpoint=config, resume=True).state, trained.state)
    assert [path.name for path in checkpoints.iterdir()] == ["4"]
    assert {path.name for path in tmp_path.iterdir()} == names | {".notes"}


def test_a_state_can_be_rescued_after_a_save_that_has_failed(tmp_path, monkeypatch):
    """The disk works again: the failure is raised, and the current state is saved."""
    write, calls = CheckpointStore._write, []

    def once(self, *given):
        calls.append(None)
        if len(calls) == 1:
            raise OSError("a hiccup")
        return write(self, *given)

    monkeypatch.setattr(CheckpointStore, "_write", once)
    with pytest.raises(CheckpointError, match="OSError: a hiccup") as raised:
        fit(steps=8, epochs=None, checkpoint=spmd.Checkpoint(tmp_path, every=2))
    assert raised.value.__notes__ == [f"spmd: the state after step 4 was saved in {tmp_path}."]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_where_there_was_room_once_there_is_room(tmp_path, copied, monkeypatch):
    """A copy lifts the peak that is asked for: one answer, the first, holds for all saves."""
    asked = []
    monkeypatch.setattr(
        checkpoint, "fits_on_devices", lambda state: not asked.append(None) and len(asked) == 1
    )
    fit(steps=6, checkpoint=spmd.Checkpoint(tmp_path, every=2))
    assert len(asked) == 1 and copied == [True] * 3


def test_devices_copy_before_the_host_waits_for_the_step(tmp_path, monkeypatch):
    """From the second save on: the first finds out whether there is room. What the watchdog sees
    the host wait for is the step, no save.
    """
    events, read, copy = [], StepMetrics.read_oldest, device_snapshot.StateCopier.__call__

    def noted(self):
        events.append(("read", self._unread[0][0], self._control.watchdog.phase))
        read(self)
        futures.wait([self._parts.store._written])

    guarded = watchdog.ClusterWatchdog(0, 1, StallTimeouts(), print)
    monkeypatch.setattr(watchdog, "_current", guarded)
    monkeypatch.setattr(StepMetrics, "read_oldest", noted)
    monkeypatch.setattr(
        device_snapshot.StateCopier,
        "__call__",
        lambda self, state: events.append("copy") or copy(self, state),
    )
    fit(
        steps=6,
        checkpoint=spmd.Checkpoint(tmp_path, every=2),
        callbacks=[spmd.callbacks.Each(lambda info: info.state, every=2)],
    )
    seen = [entry if entry == "copy" else entry[:2] for entry in events]
    assert seen == [
        *[("read", 1), ("read", 2), "copy"],
        *[("read", 3), "copy", ("read", 4)],
        *[("read", 5), "copy", ("read", 6)],
    ]
    assert {phase for _, _, phase in (entry for entry in events if entry != "copy")} <= {
        "compile",
        "step",
    }


def test_devices_copy_after_an_evaluation_which_may_want_the_room(tmp_path, monkeypatch):
    events, measure, copy = [], Evaluator.evaluate, device_snapshot.StateCopier.__call__
    monkeypatch.setattr(
        Evaluator, "evaluate", lambda self: events.append("evaluation") or measure(self)
    )
    monkeypatch.setattr(
        device_snapshot.StateCopier,
        "__call__",
        lambda self, state: events.append("copy") or copy(self, state),
    )
    fit(steps=4, checkpoint=spmd.Checkpoint(tmp_path, every=2), eval_data=numbers(8), eval_every=2)
    assert events[:4] == ["evaluation", "copy", "evaluation", "copy"]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("error", [DivergedError, ValueError, KeyboardInterrupt])
def test_unsaved_copy_is_dropped(error, tmp_path):
    """A callback raises after the copy was started. A diverged state is not saved; any other is."""
    seen = {}

    def fail(info):
        seen[info.step] = jax.device_get(info.state.params)
        futures.wait([info._control.parts.store._written])
        if info.step == 4:
            assert list(info._control.parts.store._copies) == [4]
            raise error("no more")

    each = spmd.callbacks.Each(fail)
    each.exact = True
    with pytest.raises(CallbackError if error is ValueError else error, match="no more"):
        fit(steps=6, checkpoint=spmd.Checkpoint(tmp_path, every=2), callbacks=[each])
    store, like = CheckpointStore(spmd.Checkpoint(tmp_path)), fit(steps=1).trainer.abstract_state
    assert store.steps() == ([2] if error is DivergedError else [2, 4])
    assert all(same(store.restore(step, like)[0].params, seen[step]) for step in store.steps())
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spmd save")]


def test_what_has_diverged_is_not_saved_because_a_save_has_failed(tmp_path, monkeypatch):
    """The copy starts before the step's metrics are read; the failure of the previous save is
    raised after that.
    """
    monkeypatch.setattr(
        CheckpointStore, "_write", lambda self, *given: (_ for _ in ()).throw(OSError("a hiccup"))
    )
    data = numbers(256)
    data["x"][96:128] = np.nan  # what the fourth step reads
    with pytest.raises(DivergedError, match=r"step 4: .* There is no checkpoint"):
        fit(
            data,
            steps=8,
            shuffle=False,
            checkpoint=spmd.Checkpoint(tmp_path, every=2),
            callbacks=[spmd.callbacks.TerminateOnNaN()],
        )
    assert not [*(tmp_path / "checkpoints").iterdir()]


def test_only_the_copy_that_is_saved_is_written(tmp_path):
    """The next copy replaces one that was not saved."""
    run = fit(steps=1)
    states = {
        step: dataclasses.replace(run.state, params={"w": run.state.params["w"] + step})
        for step in range(1, 6)
    }
    store = CheckpointStore(spmd.Checkpoint(tmp_path))
    for step in (1, 2, 4):
        store.copy(states[step - (step > 1)], step - (step > 1))
        store.copy(states[step], step)
        assert store.save(states[step], step, {}, {})
    store.copy(states[5], 5)
    assert store.latest() == 4 and store.steps() == [2, 4]
    store.close()
    again = CheckpointStore(spmd.Checkpoint(tmp_path))
    assert again.steps() == [2, 4]
    assert all(
        same(again.restore(step, run.trainer.abstract_state)[0], states[step]) for step in (2, 4)
    )
    again.close()


def test_copy_is_released_while_the_disk_is_written(tmp_path, monkeypatch):
    """Orbax has the bytes in the host's memory by then. On CPU devices the memory is kept for the
    next copy.
    """
    writing, go, copied_leaves = threading.Event(), threading.Event(), []
    call, sealed = device_snapshot.StateCopier.__call__, checkpoint.write_manifest

    def copied(self, state):
        self._reuse_memory = False  # as on a GPU
        copy = call(self, state)
        copied_leaves.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(copy))
        return copy

    def slow(folder):
        writing.set()
        go.wait(120)
        sealed(folder)

    monkeypatch.setattr(device_snapshot.StateCopier, "__call__", copied)
    monkeypatch.setattr(checkpoint, "write_manifest", slow)
    state, store = fit(steps=1).state, CheckpointStore(spmd.Checkpoint(tmp_path))
    store.save(state, 1, {}, {})
    assert writing.wait(120)
    until = time.monotonic() + 60
    # Orbax may be about to return
    while gc.collect() >= 0 and any(ref() for ref in copied_leaves) and time.monotonic() < until:
        time.sleep(0.01)
    alive = sum(ref() is not None for ref in copied_leaves)
    go.set()
    store.close()
    assert copied_leaves and not alive


def test_interrupted_copy_is_made_again(monkeypatch):
    """It may have donated what it was to take the place of."""
    three, four = (
        State(jax.numpy.int32(step), {"w": jax.numpy.asarray(weights)}, {}, {}, {}, (), {})
        for step, weights in ((3, np.arange(4.0)), (4, np.ones(4)))
    )
    copier = device_snapshot.StateCopier(three)
    first = jax.device_get(copier(three))
    complete_copy = copier._copy

    def interrupted(*given):
        complete_copy(*given)
        raise KeyboardInterrupt

    copier._copy = interrupted
    with pytest.raises(KeyboardInterrupt):
        copier(three)
    copier._copy = complete_copy
    assert same(copier(three), first)
    again = copier(four)
    assert same(again, four) and not same(again, first)


class Device:
    def __init__(self, **stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats or None


class Array:
    """One that lies on some devices, `size` bytes on each."""

    def __init__(self, devices, size):
        self.addressable_shards = [
            SimpleNamespace(device=device, data=np.zeros(size, np.uint8)) for device in devices
        ]


def test_a_copy_is_made_where_each_device_has_room_for_it_beside_all_that_it_ever_held():
    def room(*arrays):
        return device_snapshot.fits_on_devices(dict(enumerate(arrays)))

    wide, narrow = (
        Device(bytes_limit=1000, peak_bytes_in_use=100),
        Device(bytes_limit=1000, peak_bytes_in_use=700),
    )
    assert room(Array([wide, narrow], 200), Array([wide], 500))
    assert not room(Array([wide, narrow], 200), Array([wide], 600))  # 1.2 * 800 of 900
    assert not room(Array([wide, narrow], 260))  # 1.2 * 260 of 300
    assert room(Array([Device()], 10**6))  # a host's memory, which says nothing


def failing_once(store, monkeypatch):
    """Orbax's own metadata is written in a thread of its own, whose error `close` raises once."""
    close = store._manager.close
    errors = [OSError(errno.ENOSPC, "No space left on device")]

    def fail_and_then_close():
        if errors:
            raise errors.pop()
        close()

    monkeypatch.setattr(store._manager, "close", fail_and_then_close)
    return errors


def test_failed_metadata_of_orbax_name_the_folder(tmp_path, monkeypatch):
    fit(checkpoint=spmd.Checkpoint(tmp_path, every=2), steps=2)
    store = CheckpointStore(spmd.Checkpoint(tmp_path))
    store.steps()
    errors = failing_once(store, monkeypatch)
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        store.close()
    assert not errors
    assert str(tmp_path) in str(raised.value)


def test_failed_metadata_of_orbax_hide_no_other_error(tmp_path, monkeypatch, caplog):
    fit(checkpoint=spmd.Checkpoint(tmp_path / "run", every=2), steps=2)
    with pytest.raises(ZeroDivisionError), open_checkpoints(tmp_path / "run") as store:
        store.steps()
        failing_once(store, monkeypatch)
        raise ZeroDivisionError
    assert f"could not be written to {tmp_path / 'run'}: OSError" in caplog.text
