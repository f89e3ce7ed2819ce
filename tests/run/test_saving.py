"""Saving: a thread writes a copy of the state while steps go on; where devices have no room for it, the steps wait."""

import threading

import jax
import numpy as np
import pytest
from small import fit, same

import spmd
from spmd.errors import CheckpointError
from spmd.run import checkpoint, copies
from spmd.run.checkpoint import Store

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
        monkeypatch.setattr(checkpoint, "has_room_for", lambda arrays: False)
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
    monkeypatch.setattr(checkpoint, "has_room_for", lambda arrays: not asked.append(None) and len(asked) == 1)
    fit(steps=6, checkpoint=spmd.Checkpoint(tmp_path, every=2))
    assert len(asked) == 1 and len(threads) == 3 and all(name.startswith("spmd save") for name in threads)


def test_a_copy_that_was_interrupted_is_made_anew(monkeypatch):
    """It may have donated what it was to take the place of."""
    arrays = {"step": jax.numpy.int32(3), "w": jax.numpy.arange(4.0)}
    copier = copies.Copier(arrays)
    first = {path: np.array(leaf) for path, leaf in copier(arrays).items()}
    whole = copier._copy

    def interrupted(*given):
        whole(*given)
        raise KeyboardInterrupt

    copier._copy = interrupted
    with pytest.raises(KeyboardInterrupt):
        copier(arrays)
    copier._copy = whole
    assert all(np.array_equal(leaf, first[path]) for path, leaf in copier(arrays).items())
    again = copier({"step": jax.numpy.int32(4), "w": jax.numpy.ones(4)})
    assert np.asarray(again["w"]).tolist() == [1, 1, 1, 1] and int(again["step"]) == 4


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
