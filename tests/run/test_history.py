"""The history of a long run: bounded in memory, exact, and complete in the run's folder."""

import errno
import os
import pickle
import weakref

import jax
import numpy as np
import pytest
from small import fit

import spmd
from spmd.errors import CheckpointError, OptionError
from spmd.run import history as module
from spmd.run.history import History
from tests.compare import assert_close


def added(steps, *, constants=lambda before: {"seconds": 2.0 * before}, at_once=1):
    """A history of steps whose sums and counts are known, and these."""
    rng = np.random.default_rng(0)
    packed = np.stack(
        [rng.normal(size=(steps, 2)), rng.integers(1, 50, (steps, 2))], axis=1
    ).astype(np.float32)
    history = History(("loss", "accuracy"), constants)
    for first in range(0, steps, at_once):
        history.add_steps(first + 1, packed[first : first + at_once])
    return history, packed


@pytest.fixture
def small(monkeypatch):
    for name, value in (("DETAIL", 20), ("BLOCK", 5), ("WINDOWS", 4)):
        monkeypatch.setattr(module, name, value)


@pytest.mark.system
def test_history_is_flat_over_a_million_steps():
    history, retained = History(("loss",)), {}
    for first in range(1, 1_000_001, 1000):
        history.add_steps(first, np.ones((1000, 2, 1), np.float32))
        if first in (200_001, 999_001):
            retained[first] = len(pickle.dumps(history))
    early, late = retained.values()
    assert late - early < 1_000_000, "1.3 bytes a step, for the means of windows"
    assert (
        len(history) == 1_000_000
        and len(history["loss"]) < 102_000
        and len(list(history.rows())) == len(history["loss"])
    )


def test_history_keeps_no_buffer_of_a_step():
    """A view of a device's buffer keeps the buffer."""
    history, views = History(("loss",)), []
    for step in range(1, 6):
        packed = np.asarray(jax.numpy.ones((1, 2, 1)) * step)
        history.add_steps(step, packed)
        views.append(weakref.ref(packed))
        del packed
    assert all(view() is None for view in views) and history["loss"] == [1.0] * 5


def test_history_keeps_every_step_of_a_run_that_is_not_long():
    history, packed = added(2500, at_once=100)
    np.testing.assert_array_equal(history["loss"], packed[:, 0, 0] / packed[:, 1, 0])
    assert [row["step"] for row in history.rows()] == list(range(1, 2501)) and not any(
        "steps" in row for row in history.rows()
    )
    assert history["seconds"] == [2.0 * step for step in range(2500)]


@pytest.mark.parametrize("at_once", [1, 7])
def test_history_averages_old_steps_exactly(small, at_once):
    history, packed = added(103, at_once=at_once)
    rows = list(history.rows())
    windows = [row for row in rows if "steps" in row]
    assert sum(row["steps"] for row in windows) + len(rows) - len(windows) == len(history) == 103
    assert len(rows) - len(windows) >= 20 and len(windows) < 4
    first = 0
    for row in rows:
        part = packed[first : row["step"]].astype(np.float64)
        assert len(part) == row.get("steps", 1)
        sums, counts = part.sum(0)
        assert_close(row["loss"], sums[0] / counts[0])
        assert row["seconds"] == 2.0 * np.arange(first, row["step"]).mean()
        first = row["step"]
    for name in ("loss", "accuracy", "seconds"):
        assert history[name] == [row[name] for row in rows]


def test_history_of_a_long_run_is_pickled(small):
    history, _ = added(103)
    again = pickle.loads(pickle.dumps(history))
    assert list(again.rows()) == list(history.rows()) and again.names == history.names == (
        "loss",
        "accuracy",
        "seconds",
    )
    assert "103 steps" in repr(again) and "<svg" in again._repr_html_()


@pytest.mark.system
def test_history_file_has_every_step(small, tmp_path):
    result = fit(steps=33, checkpoint=spmd.Checkpoint(tmp_path, every=10), progress=False)
    plain = fit(steps=33, progress=False)
    read = History.read(tmp_path)
    assert len(read) == 33 > len(list(result.history.rows()))
    assert [row["step"] for row in read.rows()] == list(range(1, 34)) and "wire_bytes" in read
    assert read["loss"][-20:] == result.history["loss"][-20:]
    assert_close(np.average(read["loss"][:5]), np.average(plain.history["loss"][0]))


def test_history_file_is_continued_by_a_resumed_run(tmp_path):
    uninterrupted = fit(epochs=4, progress=False)
    fit(steps=7, checkpoint=spmd.Checkpoint(tmp_path, every=3), progress=False)
    path = tmp_path / module.FILE
    # steps that a killed attempt had made after its last checkpoint, and a half-written one
    with path.open("ab") as stream:
        lost = np.ones(3, module._row_type(1, 1))
        lost["step"] = 8, 9, 10
        stream.write(lost.tobytes() + b"half")
    rest = fit(epochs=4, checkpoint=tmp_path, resume=True, progress=False)
    assert (
        len(rest.history) == 5 and History.read(tmp_path)["loss"] == uninterrupted.history["loss"]
    )


@pytest.mark.system
def test_history_file_of_other_metrics_is_put_aside(tmp_path):
    fit(steps=4, checkpoint=tmp_path, progress=False)
    fit(
        steps=6,
        checkpoint=tmp_path,
        resume=True,
        metrics={"error": spmd.metrics.mean_absolute_error},
        progress=False,
    )
    assert [row["step"] for row in History.read(tmp_path).rows()] == [
        5,
        6,
    ] and "error" in History.read(tmp_path)
    assert (tmp_path / "history-before-5.bin").exists()


@pytest.mark.parametrize(
    "left",
    [b"", b'{"names": ["lo', b'{"names": ["error"], "known": []}\n' + bytes(48)],
    ids=["none", "half", "others"],
)
def test_history_file_of_a_run_that_starts_again_leaves_nothing(left, tmp_path):
    """None of its steps are part of the new run, as with a file of the same metrics."""
    (tmp_path / module.FILE).write_bytes(left)
    history = History(("loss",))
    history.write_to(tmp_path, 0)
    history.add_steps(1, np.ones((3, 2, 1), np.float32))
    history.close()
    assert [path.name for path in tmp_path.iterdir()] == [module.FILE] and History.read(tmp_path)[
        "loss"
    ] == [1.0] * 3


def test_history_file_after_a_write_in_part(tmp_path, monkeypatch):
    """A disk takes a part of the rows and then none; there is room again later, and every row is
    right.
    """
    room, write = [100], os.pwrite

    def part(file, content, offset):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(len(content), room[0])
        room[0] -= count
        return write(file, content[:count], offset)

    history = History(("loss",))
    history.write_to(tmp_path, 0)
    monkeypatch.setattr(os, "pwrite", part)
    history.add_steps(1, np.arange(20, dtype=np.float32).reshape(10, 2, 1))
    with pytest.raises(CheckpointError) as raised:
        history.flush()
    assert str(raised.value) == (
        f"the file {tmp_path}/history.bin cannot be written: No space left on device.\n    fix: "
        "free some disk space, or another path."
    )
    assert len(History.read(tmp_path)) < 10
    room[0] = 10**6
    history.add_steps(11, np.arange(20, dtype=np.float32).reshape(10, 2, 1))
    history.close()
    assert list(History.read(tmp_path).rows()) == list(history.rows())


def test_rows_that_are_not_in_the_order_of_steps_are_refused(tmp_path):
    history = History(("loss",))
    history.write_to(tmp_path, 0)
    history.add_steps(1, np.ones((10, 2, 1), np.float32))
    history.close()
    path = tmp_path / module.FILE
    size = module._row_type(1, 0).itemsize
    content = path.read_bytes()
    path.write_bytes(content[: -4 * size] + content[-4 * size + 3 :])  # as after a short write
    with pytest.raises(OptionError, match="is damaged: its steps do not rise"):
        History.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[1]\n", b"\xff\x00"])
def test_history_file_that_is_none_is_refused(tmp_path, content):
    with pytest.raises(OptionError, match="there is no file"):
        History.read(tmp_path)
    (tmp_path / module.FILE).write_bytes(content)
    with pytest.raises(OptionError, match="is damaged"):
        History.read(tmp_path)


def test_history_draws_what_was_counted():
    """Limits of skipped updates are of those steps alone, and of a run without any there are
    none.
    """
    history = History(("loss", "loss_limit", "skips_left"))
    history.add_steps(
        1, np.array([[[4.0, 5.0, 0.0], [1, 1, 0]], [[3.0, 0.0, 0.0], [1, 0, 0]]], np.float32)
    )
    assert repr(history) == "History of 2 steps and 0 evaluations  loss █▁ 3  loss_limit ▁ 5"
    page = history._repr_html_()
    assert (
        page.count("<svg") == 2 and "skips_left" not in page and "nothing was measured" not in page
    )
    assert history.curves() == {"loss": {1: 4.0, 2: 3.0}, "loss_limit": {1: 5.0}}
