"""Disks that are full: every file that the library writes is named in the error, which is raised
once, by a real limit of the system.
"""

import json
import os
from pathlib import Path

import numpy as np
import optax
import pytest

import spmd
from spmd.base import output_files
from spmd.base.output_files import OutputFile, open_output
from spmd.base.user_paths import replace_text
from spmd.errors import CheckpointError, ExportError, OptionError
from spmd.pretrained.safetensors_files import write_file
from spmd.run.history import History
from spmd.run.loggers import JsonLines
from spmd.run.manifest import write_manifest
from spmd.run.memory_folder import run_id
from spmd.run.piece_file import _new_file
from tests.processes import room_for

CONTENT = bytes(5000)


def write_buffered(path):
    with open_output(path) as file:
        for _ in range(100):
            file.write(CONTENT[:50])


def write_size(path):
    with OutputFile(path, "wb") as file:
        file.truncate(5000)


def write_piece(path):
    with _new_file(path) as file:
        file.write(CONTENT)


def write_listed_files(path):
    path.parent.mkdir(exist_ok=True)
    for number in range(100):
        (path.parent / f"{number}").touch()
    write_manifest(path.parent)


WRITERS = {
    "a.bin": write_buffered,
    "b.bin": write_size,
    "c.json": lambda path: output_files.write_checked(path, CONTENT),
    "d.html": lambda path: replace_text(path, CONTENT.decode()),
    "e.safetensors": lambda path: write_file(path, {"w": np.ones(5000, np.float32)}),
    "f.piece": write_piece,
    "g/manifest.json": write_listed_files,
}


@pytest.mark.parametrize("name", WRITERS)
def test_error_of_a_full_disk_names_the_file(name, tmp_path):
    with room_for(4096), pytest.raises(OSError, match="File too large") as raised:
        WRITERS[name](tmp_path / name)
    assert str(raised.value.filename).startswith(str(tmp_path / name)), (
        "the file, or the part beside it that was to replace it"
    )


def test_id_of_a_run_in_memory_names_its_file(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with room_for(4), pytest.raises(OSError, match=r"File too large: '.*/checkpoints/memory_id'"):
        run_id(tmp_path, keep=False)


def test_json_lines_name_their_file_and_lose_nothing(tmp_path):
    log, records = (
        JsonLines(tmp_path / "log.jsonl"),
        [{"step": step, "text": "x" * 3000} for step in range(1, 5)],
    )
    log.write(records[0])
    with room_for(4096):
        for record in records[1:3]:
            with pytest.raises(OptionError) as raised:
                log.write(record)
            assert (
                str(raised.value)
                == f"the file {tmp_path}/log.jsonl cannot be written: File too large.\n    fix: "
                "another path."
            )
    log.write(records[3])
    log.close()
    assert [
        json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ] == records


def test_history_names_its_file(tmp_path):
    history = History(("loss",))
    history.write_to(tmp_path, 0)
    history.add_steps(1, np.ones((500, 2, 1), np.float32))
    with room_for(4096), pytest.raises(CheckpointError) as raised:
        history.flush()
    assert (
        str(raised.value)
        == f"the file {tmp_path}/history.bin cannot be written: File too large.\n    fix: another "
        "path."
    )
    history.close()
    assert History.read(tmp_path)["loss"] == history["loss"]


def train(**options):
    model = spmd.FunctionalModel(
        lambda key: {"w": np.zeros((2000, 1), np.float32)}, lambda params, x: x @ params["w"]
    )
    data = {"x": np.ones((8, 2000), np.float32), "y": np.ones((8, 1), np.float32)}
    return spmd.fit(
        model,
        data,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(1e-6),
        batch_size=8,
        **{"steps": 1, **options},
    )


@pytest.mark.parametrize(
    "count", [10, 1000, 8200], ids=["first array", "an array", "list of arrays"]
)
def test_export_names_its_file_and_leaves_nothing(count, tmp_path):
    result = train()
    with (
        room_for(count),
        pytest.raises(
            ExportError,
            match=r"^the model could not be written: .*File too large: '.*/\.model\.\d+\.tmp/",
        ),
    ):
        result.export(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_run_names_its_file_of_metrics(tmp_path):
    """The file, not the class of the logger: the user has added none."""
    with room_for(6000), pytest.raises(OptionError) as raised:
        train(steps=100, log_every=1, checkpoint=tmp_path / "run")
    assert (
        str(raised.value)
        == f"the file {tmp_path}/run/metrics.jsonl cannot be written: File too large.\n    fix: "
        "another path."
    )


def test_folder_that_may_be_written_but_not_read(tmp_path, monkeypatch):
    """Opening it fails as for a user without the right to read, which root always has."""
    given = os.open
    synced = []

    def refuse_folders(path, *options):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        return given(path, *options)

    monkeypatch.setattr(os, "open", refuse_folders)
    monkeypatch.setattr(os, "sync", lambda: synced.append("everything"))
    replace_text(tmp_path / "layout.toml", "x = 1")
    assert (tmp_path / "layout.toml").read_text() == "x = 1"
    assert synced == ["everything"]
