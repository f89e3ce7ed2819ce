"""Checkpoints in memory of a run in one process: what is resumed, what is damaged, no room, and
what is left.
"""

import collections
import contextlib
import json
import math
import shutil
import signal

import jax
import pytest
from small import fit, fit_net, numbers, same

import spmd
from spmd.errors import OptionError
from spmd.run import memory_checkpoint
from spmd.run.checkpoint import CheckpointStore
from spmd.run.history import History
from spmd.run.loop import Loop
from spmd.run.memory_checkpoint import MemoryCheckpoints
from spmd.run.memory_folder import MemoryFolder
from spmd.run.piece_file import read_header
from spmd.run.reshard_checkpoint import parse_shape


class Killed(BaseException):
    """Ends a run as a kill would: nothing is saved any more."""


@pytest.fixture
def none_left_out(monkeypatch):
    """Each checkpoint in memory is written before training continues."""
    save = MemoryCheckpoints.save
    monkeypatch.setattr(
        MemoryCheckpoints, "save", lambda memory, *given: (save(memory, *given), memory.wait())
    )


@pytest.fixture
def killed(monkeypatch, none_left_out):
    """A callback that kills the run after a step, once its checkpoints are written."""
    monkeypatch.setattr(Loop, "_rescue", lambda loop, error: _abandon(loop))

    def _abandon(loop):
        loop._close()
        loop._close_memory(remove=False)

    def after(step):
        def kill(info):
            if info.step == step:
                raise Killed

        return kill

    return after


def checkpoint(tmp_path, **options):
    return spmd.Checkpoint(
        tmp_path / "run",
        **{"every": 5, "memory_every": 2, "memory_folder": tmp_path / "memory", **options},
    )


def start_and_kill(tmp_path, killed, train=fit, step=9, **options):
    with pytest.raises(Killed):
        train(steps=20, checkpoint=checkpoint(tmp_path), callbacks=[killed(step)], **options)


def records(tmp_path, event):
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record.get("event") == event]


def pieces(tmp_path):
    return sorted(path for path in (tmp_path / "memory").rglob("*.0"))


@pytest.mark.parametrize("train", [fit, pytest.param(fit_net, marks=pytest.mark.system)])
def test_killed_run_resumes_from_memory_with_the_same_bits(tmp_path, killed, train):
    """Also with batch statistics and dropout; the history has every step once."""
    reference = train(steps=20)
    start_and_kill(tmp_path, killed, train)
    assert [path.name for path in pieces(tmp_path)] == ["6.0", "8.0"]
    result = train(steps=20, checkpoint=checkpoint(tmp_path), resume=True)
    assert same(result.state, reference.state)
    (resumed,) = records(tmp_path, "resumed")
    assert (resumed["step"], resumed["source"]) == (
        8,
        "memory (process 0: own host), 3 steps after the newest checkpoint on disk",
    )
    assert History.read(tmp_path / "run")["loss"] == reference.history["loss"]
    (counts,) = records(tmp_path, "memory")
    assert counts["saved"] == 6 and counts["skipped"] == counts["bytes_sent"] == 0
    assert not list((tmp_path / "memory").iterdir()), "nothing is left of a run that ends well"


@pytest.mark.parametrize("layout", ["fsdp", "data_parallel"])
def test_each_shard_is_in_memory_once(tmp_path, killed, layout):
    start_and_kill(tmp_path, killed, layout=layout, mesh="data=8")
    piece = read_header(pieces(tmp_path)[-1])
    elements = collections.Counter()
    for path, bounds in piece.shards:
        elements[path] += math.prod(last - first for first, last in bounds)
    assert elements == {
        path: math.prod(parse_shape(text)) for path, text in piece.meta["arrays"].items()
    }
    store = CheckpointStore(spmd.Checkpoint(tmp_path / "run"))
    store.close()
    assert piece.meta["arrays"] == store.meta(5)["arrays"]


@pytest.mark.system
def test_state_in_memory_that_is_older_than_the_disk_is_not_used(tmp_path, killed):
    start_and_kill(tmp_path, killed, step=11)
    for path in pieces(tmp_path):
        if path.name == "10.0":
            path.unlink()
    fit(steps=20, checkpoint=checkpoint(tmp_path), resume=True)
    assert [(record["step"], "source" in record) for record in records(tmp_path, "resumed")] == [
        (10, False)
    ]


@pytest.mark.system
def test_damaged_checkpoint_on_disk_is_replaced_by_memory(tmp_path, killed):
    """Step 10 on disk is damaged; 8 is in memory, and newer than step 5."""
    reference = fit(steps=20)
    start_and_kill(tmp_path, killed, step=11)
    next(path for path in pieces(tmp_path) if path.name == "10.0").unlink()
    (tmp_path / "run" / "checkpoints" / "10" / "meta" / "metadata").write_text("{}")
    result = fit(steps=20, checkpoint=checkpoint(tmp_path), resume=True)
    assert [record["step"] for record in records(tmp_path, "resumed")] == [8]
    assert (tmp_path / "run" / "damaged" / "10").exists() and same(result.state, reference.state)


@pytest.mark.system
@pytest.mark.parametrize("how", ["bit", "header", "truncated", "deleted", "other step", "folder"])
def test_damaged_piece_is_removed_and_an_older_step_is_used(tmp_path, killed, how, caplog):
    reference = fit(steps=20)
    start_and_kill(tmp_path, killed)
    path = pieces(tmp_path)[-1]
    content = bytearray(path.read_bytes())
    if how in ("bit", "header"):
        content[len(read_header(path).header()) if how == "bit" else 70] ^= 1
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[:100])
    elif how in ("deleted", "folder"):
        path.unlink()
        if how == "folder":
            (path / "inside").mkdir(parents=True)
    else:
        path.rename(path.with_name("9.0"))
    result = fit(steps=20, checkpoint=checkpoint(tmp_path), resume=True)
    assert [record["step"] for record in records(tmp_path, "resumed")] == [6]
    assert same(result.state, reference.state)
    assert (how == "deleted") == ("is damaged" not in caplog.text)


def test_deleted_memory_is_replaced_by_the_disk(tmp_path, killed):
    start_and_kill(tmp_path, killed)
    for path in pieces(tmp_path):
        path.unlink()
    fit(steps=20, checkpoint=checkpoint(tmp_path), resume=True)
    assert [record["step"] for record in records(tmp_path, "resumed")] == [5]


@pytest.mark.system
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"mesh": spmd.make_mesh("data=4", devices=jax.devices()[:4])},
            "step 8: the mesh was data=8, is data=4",
        ),
        ({"layout": "fsdp"}, "step 8: the layout has changed"),
    ],
)
def test_state_of_another_mesh_or_layout_is_not_used(tmp_path, killed, options, why, caplog):
    start_and_kill(tmp_path, killed, mesh="data=8")
    fit(steps=20, checkpoint=checkpoint(tmp_path), resume=True, **{"mesh": "data=8", **options})
    assert [record["step"] for record in records(tmp_path, "resumed")] == [5]
    assert f"checkpoints in memory are not used: {why}." in caplog.text


@pytest.mark.system
def test_state_that_is_not_read_and_a_start_at_step_0_are_said(
    tmp_path, killed, caplog, monkeypatch
):
    start_and_kill(tmp_path, killed)
    monkeypatch.setenv("SPMD_MEMORY_FOLDER", str(tmp_path / "memory"))
    fit(steps=6, checkpoint=spmd.Checkpoint(tmp_path / "run", every=5), resume=True)
    assert (
        "step 8 of this run is in memory, and is not used: Checkpoint has no memory_every"
        in caplog.text
    )
    caplog.clear()
    fit(steps=7, checkpoint=spmd.Checkpoint(tmp_path / "run", every=5), resume=True)
    assert "is not used" not in caplog.text, "the save at step 6 has forgotten it"
    assert "starts again" not in caplog.text
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    caplog.clear()
    result = fit(steps=1, checkpoint=checkpoint(tmp_path), resume=True)
    assert (
        f"the run in {tmp_path / 'run'} has no checkpoint: training starts again at step 0"
        in caplog.text
        and int(result.state.step) == 1
    )


def test_new_run_in_the_folder_does_not_find_an_earlier_ones_memory(tmp_path, killed):
    """The checkpoints were removed to start again, or there were none yet."""
    start_and_kill(tmp_path, killed, step=4)
    assert pieces(tmp_path)
    seen = []
    fit(
        steps=3,
        checkpoint=checkpoint(tmp_path),
        callbacks=[spmd.callbacks.Each(lambda info: seen.append(info.step), every=1)],
    )
    assert seen == [1, 2, 3]


def test_changed_data_is_an_error_as_with_a_checkpoint_on_disk(tmp_path, killed):
    start_and_kill(tmp_path, killed)
    with pytest.raises(spmd.errors.CheckpointError, match="its data is not the same"):
        fit(numbers(seed=1), steps=20, checkpoint=checkpoint(tmp_path), resume=True)
    assert pieces(tmp_path), "the state is still there for a run with the right data"


def test_training_continues_without_room(tmp_path, monkeypatch, caplog):
    """It is said once, and counted."""
    monkeypatch.setattr(
        MemoryFolder, "lacks_room", lambda folder, size, keeping: f"no room for {size}"
    )
    result = fit(steps=8, checkpoint=checkpoint(tmp_path))
    assert (
        int(result.state.step) == 8
        and caplog.text.count("training continues without checkpoints in memory: no room for") == 1
    )
    (counts,) = records(tmp_path, "memory")
    assert counts["saved"] == 0 and counts["skipped"] == 4


def test_write_that_fails_is_counted_and_stops_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        memory_checkpoint,
        "write_piece",
        lambda *given: (_ for _ in ()).throw(OSError("no space left")),
    )
    assert int(fit(steps=8, checkpoint=checkpoint(tmp_path)).state.step) == 8
    assert "a checkpoint could not be written to memory: OSError: no space left" in caplog.text
    assert records(tmp_path, "memory")[0]["failed"] >= 1


@pytest.mark.system
def test_folder_that_was_removed_by_hand_is_created_again(tmp_path, none_left_out):
    """In the middle of a run; later checkpoints are in it."""

    def remove(info):
        if info.step == 5:
            shutil.rmtree(tmp_path / "memory", ignore_errors=True)

    fit(steps=20, checkpoint=checkpoint(tmp_path, memory_every=4), callbacks=[remove])
    (counts,) = records(tmp_path, "memory")
    assert counts["saved"] == 5 and counts["skipped"] == 0


def test_folder_of_another_user_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        MemoryFolder,
        "__init__",
        lambda *given: (_ for _ in ()).throw(PermissionError("of another user")),
    )
    assert int(fit(steps=8, checkpoint=checkpoint(tmp_path)).state.step) == 8
    assert (
        "there are no checkpoints in memory: " in caplog.text and "of another user" in caplog.text
    )


@pytest.mark.system
def test_state_is_copied_to_the_host_where_devices_have_no_room(tmp_path, killed, monkeypatch):
    monkeypatch.setattr(memory_checkpoint, "fits_on_devices", lambda state, copies: False)
    reference = fit(steps=20)
    start_and_kill(tmp_path, killed)
    result = fit(steps=20, checkpoint=checkpoint(tmp_path), resume=True)
    assert [record["step"] for record in records(tmp_path, "resumed")] == [8]
    assert same(result.state, reference.state)


@pytest.mark.system
def test_at_most_two_steps_are_in_memory(tmp_path, monkeypatch):
    most = []
    write = MemoryCheckpoints._write

    def noted(self, *given):
        write(self, *given)
        most.append(len(pieces(tmp_path)))

    monkeypatch.setattr(MemoryCheckpoints, "_write", noted)
    fit(steps=20, checkpoint=checkpoint(tmp_path, memory_every=1))
    assert max(most) == 2


@pytest.mark.parametrize("signalled", [True, False])
def test_run_that_a_signal_ends_does_not_wait_for_memory(tmp_path, monkeypatch, signalled):
    waited = []
    monkeypatch.setattr(
        MemoryCheckpoints, "wait", lambda memory: waited.append(memory._closed.is_set())
    )

    def end(info):
        if info.step == 3 and signalled:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) if signalled else contextlib.nullcontext():
        fit(steps=6, checkpoint=checkpoint(tmp_path), callbacks=[end])
    assert waited == [signalled]


@pytest.mark.system
def test_resident_data(tmp_path, killed):
    """Steps run in calls of many, which end where a checkpoint in memory is due."""
    data = spmd.data.resident(numbers(), steps_per_call=5)
    reference = fit(data, steps=20)
    start_and_kill(tmp_path, killed, step=10, data=data)
    result = fit(data, steps=20, checkpoint=checkpoint(tmp_path), resume=True)
    assert same(result.state, reference.state)
    assert records(tmp_path, "resumed")[0]["step"] in (8, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_every": 0}, "Checkpoint: memory_every"),
        ({"memory_every": None}, "memory_folder has no effect without memory_every"),
        ({"memory_folder": 5}, "Checkpoint: memory_folder"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        checkpoint(tmp_path, **options)
