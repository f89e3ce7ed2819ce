"""Saving: a thread writes a copy of the state while steps go on; where devices have no room for it, the steps wait."""

import threading

import jax
import numpy as np
import pytest
from small import fit, same

import spmd
from spmd.errors import CheckpointError, DivergedError
from spmd.run import checkpoint, copies
from spmd.run.checkpoint import Store
from spmd.run.loop import Loop
from spmd.train.state import State

COPIED, WAITED_FOR = True, False


@pytest.fixture
def threads(monkeypatch):
    """The names of the threads that hand a state to Orbax."""
    found, write = [], Store._write

    def noted(self, *given):
        found.append(threading.current_thread().name)
        return write(self, *given)

    monkeypatch.setattr(Store, "_write", noted)
    return found


@pytest.mark.parametrize("room", [COPIED, WAITED_FOR], ids=["copied", "waited for"])
def test_what_is_saved_is_the_state_of_that_step(room, tmp_path, threads, monkeypatch):
    """Steps donate the state that is being saved; each checkpoint is that of its own step whoever hands it over."""
    if not room:
        monkeypatch.setattr(checkpoint, "has_room_for", lambda state: False)
    seen = {}
    whole = fit(
        epochs=3,
        checkpoint=spmd.Checkpoint(tmp_path, every=1, keep=100),
        callbacks=[spmd.callbacks.Each(lambda info: seen.update({info.step: jax.device_get(info.state.params)}), every=1)],
    )
    store = Store(spmd.Checkpoint(tmp_path, keep=100))
    assert store.steps() == list(range(1, int(whole.state.step) + 1))
    for step in store.steps():
        state, _ = store.restore(step, whole.trainer.abstract_state)
        assert same(state.params, seen[step])
    store.close()
    assert not same(seen[1], seen[2])
    assert len(threads) == int(whole.state.step)
    assert {name.startswith("spmd save") for name in threads} == {room}


def test_a_thread_that_fails_is_told_with_the_next_save(tmp_path, monkeypatch):
    """And again at the end; training does not go on as if there were a checkpoint."""
    monkeypatch.setattr(Store, "_write", lambda self, *given: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(CheckpointError, match=r"could not be written to .*: OSError: no space left"):
        fit(steps=5, checkpoint=spmd.Checkpoint(tmp_path, every=2))
    assert not [entry for entry in (tmp_path / "checkpoints").iterdir()]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spmd save")]


def test_a_state_can_be_rescued_after_a_save_that_has_failed(tmp_path, monkeypatch):
    """The disk is fine again: what is told is the failure, and what there is, is saved."""
    write, calls = Store._write, []

    def once(self, *given):
        calls.append(None)
        if len(calls) == 1:
            raise OSError("a hiccup")
        return write(self, *given)

    monkeypatch.setattr(Store, "_write", once)
    with pytest.raises(CheckpointError, match="OSError: a hiccup") as raised:
        fit(steps=8, epochs=None, checkpoint=spmd.Checkpoint(tmp_path, every=2))
    assert raised.value.__notes__ == [f"spmd: the state after step 4 was saved in {tmp_path}."]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_where_there_was_room_once_there_is_room(tmp_path, threads, monkeypatch):
    """A copy lifts the peak that is asked for: one answer, the first, holds for all saves."""
    asked = []
    monkeypatch.setattr(checkpoint, "has_room_for", lambda state: not asked.append(None) and len(asked) == 1)
    fit(steps=6, checkpoint=spmd.Checkpoint(tmp_path, every=2))
    assert len(asked) == 1 and len(threads) == 3 and all(name.startswith("spmd save") for name in threads)


def test_devices_copy_before_the_host_waits_for_the_step(tmp_path, monkeypatch):
    """From the second save on: the first finds out whether there is room, when the step has been held."""
    told, read, copy = [], Loop._read, Store.copy
    monkeypatch.setattr(Loop, "_read", lambda self: (told.append(("read", self._unread[0][0])), read(self)))
    monkeypatch.setattr(Store, "copy", lambda self, state, step: (told.append(("copy", step)), copy(self, state, step)))
    fit(steps=6, checkpoint=spmd.Checkpoint(tmp_path, every=2), callbacks=[spmd.callbacks.Each(lambda info: info.state, every=2)])
    first = {what: told.index(what) for what in told}
    assert all(first["copy", step] < first["read", step] for step in (2, 4, 6))


@pytest.mark.parametrize("error", [DivergedError, ValueError, KeyboardInterrupt])
def test_a_copy_that_nobody_saves_is_dropped(error, tmp_path, threads):
    """A callback raises after the devices were told to copy. What diverged is not saved, what else there is, is, and nothing waits."""

    def fail(info):
        if info.step == 4:
            raise error("no more")

    with pytest.raises(error, match="no more"):
        fit(steps=6, checkpoint=spmd.Checkpoint(tmp_path, every=2), callbacks=[spmd.callbacks.Each(fail, every=2)])
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == ({"2"} if error is DivergedError else {"2", "4"})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spmd save")]


def test_a_store_with_a_copy_in_hand_can_be_asked_and_closed(tmp_path):
    """The thread waits to be told what to do with it; nobody waits for the thread."""
    trainer, state = fit(steps=1).trainer, fit(steps=1).state
    store = Store(spmd.Checkpoint(tmp_path))
    store.save(state, 1, {}, {})
    store.copy(state, 2)
    assert store.steps() == [1] and store.latest() == 1
    store.save(state, 2, {}, {})
    store.copy(state, 3)
    store.copy(state, 4)
    store.save(state, 4, {}, {})
    store.copy(state, 5)
    store.close()
    again = Store(spmd.Checkpoint(tmp_path))
    assert again.steps() == [2, 4]
    assert same(again.restore(4, trainer.abstract_state)[0], state)
    again.close()


def test_a_copy_that_was_interrupted_is_made_anew(monkeypatch):
    """It may have donated what it was to take the place of."""
    state = lambda step, weights: State(jax.numpy.int32(step), {"w": jax.numpy.asarray(weights)}, {}, {}, {}, (), {})
    three, four = state(3, np.arange(4.0)), state(4, np.ones(4))
    copier = copies.Copier(three)
    first = jax.device_get(copier(three))
    whole = copier._copy

    def interrupted(*given):
        whole(*given)
        raise KeyboardInterrupt

    copier._copy = interrupted
    with pytest.raises(KeyboardInterrupt):
        copier(three)
    copier._copy = whole
    assert same(copier(three), first)
    again = copier(four)
    assert same(again, four) and not same(again, first)


class Device:
    def __init__(self, **told):
        self._told = told

    def memory_stats(self):
        return self._told or None


class Array:
    """One that lies on some devices, `size` bytes on each."""

    def __init__(self, devices, size):
        shard = lambda device: type("Shard", (), {"device": device, "data": np.zeros(size, np.uint8)})
        self.addressable_shards = [shard(device) for device in devices]


def test_a_copy_is_made_where_each_device_has_room_for_it_beside_all_that_it_ever_held():
    wide, narrow = Device(bytes_limit=1000, peak_bytes_in_use=100), Device(bytes_limit=1000, peak_bytes_in_use=700)
    room = lambda *arrays: copies.has_room_for(dict(enumerate(arrays)))
    assert room(Array([wide, narrow], 200), Array([wide], 500))
    assert not room(Array([wide, narrow], 200), Array([wide], 600))  # 1.2 * 800 of 900
    assert not room(Array([wide, narrow], 260))  # 1.2 * 260 of 300
    assert room(Array([Device()], 10**6))  # a host's memory, which says nothing
