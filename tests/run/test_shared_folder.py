"""Two processes and one run folder: reading changes nothing, and a second writer is refused without
harm to the first.
"""

import contextlib
import threading

import optax
import pytest
from job import started
from small import Fail, fit, linear, same

import spmd
from spmd.errors import CheckpointError
from spmd.run import checkpoint
from spmd.run.checkpoint import CheckpointStore


def trainer():
    return spmd.Trainer(linear(), loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.05))


@contextlib.contextmanager
def half_written(folder, monkeypatch):
    """A run with a checkpoint of step 2, and one of step 3 that is begun and not finished before
    the block ends.
    """
    state = fit(steps=2, checkpoint=folder).state
    later = fit(steps=3).state
    begun, finish, write_manifest = threading.Event(), threading.Event(), checkpoint.write_manifest

    def slow(place):
        begun.set()
        finish.wait(60)
        write_manifest(place)

    monkeypatch.setattr(checkpoint, "write_manifest", slow)
    store = CheckpointStore(spmd.Checkpoint(folder))
    store.save(later, 3, {"layout": spmd.Layout.load("data_parallel").to_toml()}, {})
    try:
        assert begun.wait(60)
        yield state
        assert not [name for name in folder.joinpath("checkpoints").iterdir() if name.name == "3"]
    finally:
        finish.set()
    store.close()
    assert same(trainer().restore(folder, step=3), later)


def entries(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_restore_leaves_an_unfinished_save_alone(tmp_path, monkeypatch):
    with half_written(tmp_path, monkeypatch) as state:
        before = entries(tmp_path)
        assert same(trainer().restore(tmp_path), state)
        assert entries(tmp_path) == before


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("resume", [False, True])
def test_second_fit_is_refused_and_leaves_an_unfinished_save_alone(resume, tmp_path, monkeypatch):
    with half_written(tmp_path, monkeypatch):
        before = entries(tmp_path)
        with pytest.raises(
            CheckpointError, match=r"is in use by this same process \(process \d+ on "
        ):
            fit(steps=8, checkpoint=tmp_path, resume=resume)
        assert entries(tmp_path) == before


def test_fit_inside_a_fit_on_the_same_folder_is_refused(tmp_path):
    def inner(info):
        fit(steps=2, checkpoint=tmp_path, resume=True)

    with pytest.raises(CheckpointError, match="this call is inside it, as in a callback"):
        fit(steps=2, checkpoint=tmp_path, callbacks=[inner])
    assert int(fit(steps=3, checkpoint=tmp_path, resume=True).state.step) == 3


def test_fit_interrupted_while_it_saves_releases_the_folder(tmp_path, monkeypatch):
    """A second Ctrl-C, while the save after the first is running. The traceback keeps the run
    alive, as in a notebook.
    """
    monkeypatch.setattr(
        CheckpointStore, "wait", lambda store: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    kept = []
    try:
        fit(checkpoint=tmp_path, callbacks=[Fail("on_step", 1, RuntimeError("mine"))])
    except KeyboardInterrupt as error:
        kept.append(error)
    assert kept and not (tmp_path / "owner.json").exists()
    monkeypatch.undo()
    assert int(fit(steps=3, checkpoint=tmp_path, resume=True).state.step) == 3


def test_fit_that_is_refused_changes_nothing(tmp_path):
    fit(steps=2, checkpoint=tmp_path)
    (tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    before = entries(tmp_path)
    for options in ({}, {"resume": True, "seed": 1}):
        with pytest.raises(CheckpointError):
            fit(steps=8, checkpoint=tmp_path, **options)
        assert entries(tmp_path) == before


def test_reader_of_a_folder_that_cannot_be_written(tmp_path):
    state = fit(steps=2, checkpoint=tmp_path).state
    for path in (tmp_path, tmp_path / "checkpoints"):
        path.chmod(0o500)
    try:
        assert same(trainer().restore(tmp_path), state)
    finally:
        for path in (tmp_path, tmp_path / "checkpoints"):
            path.chmod(0o700)


@pytest.mark.slow
def test_two_processes_with_resume(tmp_path):
    """The second is refused, the first ends as if there were no second."""
    with started(
        timeout=120, checkpoint=str(tmp_path), every=2, resume=True, epochs=100_000
    ) as first:
        for line in first.stdout:
            if line.strip() == "checkpoint 4":
                break
        with started(
            timeout=120, checkpoint=str(tmp_path), every=2, resume=True, epochs=100_000
        ) as second:
            out, errors = second.communicate(timeout=120)
        assert (
            second.returncode != 0
            and f"belongs to another run: process {first.pid} on " in errors
            and "step" not in out
        )
        first.terminate()
        out, errors = first.communicate(timeout=120)
    assert first.returncode == 143, errors
    assert not (tmp_path / "owner.json").exists()
