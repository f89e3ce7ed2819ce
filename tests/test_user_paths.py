"""Folders and files that cannot be created or written: refused with what is in the way."""

import os
import pathlib
import re

import numpy as np
import optax
import pytest

import spmd
from spmd.errors import CheckpointError, ExportError, OptionError
from spmd.run.checkpoint import Checkpoint, CheckpointStore
from spmd.run.loggers import JsonLines, TensorBoard
from spmd.user_paths import blocking_file, check_free, write_text


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("notes")
    (tmp_path / "lost").symlink_to("/nowhere/at/all")
    (tmp_path / "ring").symlink_to(tmp_path / "gnir")
    (tmp_path / "gnir").symlink_to(tmp_path / "ring")
    return tmp_path


BAD = {
    "file": r"\S*/file is a file",
    "file/under/it": r"\S*/file is a file",
    "lost": r"\S*/lost is a link to /nowhere/at/all, which does not exist",
    "lost/run": r"\S*/lost is a link to /nowhere/at/all, which does not exist",
    "ring/run": r"\S*/ring is a link to \S*/gnir, which does not exist",
    "/proc/run": "No such file or directory",
    "a" * 300: "File name too long",
}


@pytest.mark.parametrize("path", BAD, ids=lambda path: path[:20])
def test_store_refuses_a_folder_that_cannot_be_made(path):
    text = rf"^the folder \S*{path}/checkpoints cannot be created: {BAD[path]}\.\n    fix: another path\.$"
    with pytest.raises(CheckpointError, match=text) as raised:
        CheckpointStore(Checkpoint(path))
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("make", [lambda path: JsonLines(f"{path}/log.jsonl"), TensorBoard], ids=["JsonLines", "TensorBoard"])
@pytest.mark.parametrize("path", BAD, ids=lambda path: path[:20])
def test_loggers_refuse_a_folder_that_cannot_be_made(path, make):
    with pytest.raises(OptionError, match=rf"^the folder \S*{path} cannot be created: {BAD[path]}\."):
        make(path)


def test_json_lines_refuse_a_folder_in_the_place_of_their_file(here):
    (here / "metrics.jsonl").mkdir()
    with pytest.raises(OptionError, match=r"^the file metrics\.jsonl cannot be written: metrics\.jsonl is a folder\."):
        JsonLines("metrics.jsonl")


@pytest.mark.parametrize("path", [path for path in BAD if "is a" in BAD[path]])
def test_export_refuses_a_folder_before_it_works(path, here):
    with pytest.raises(ExportError, match=rf"^{BAD[path]}\.\n    fix: another folder"):
        check_free(here / path, ExportError)


def test_files_that_reports_are_saved_to_are_refused_the_same_way():
    with pytest.raises(OptionError, match=r"^the folder file/under cannot be created: \S*/file is a file\.\n    fix: another path\.$"):
        write_text(pathlib.Path("file/under/report.html"), "text")
    with pytest.raises(
        OptionError, match=r"^the file lost cannot be written: \S*/lost is a link to /nowhere/at/all, which does not exist\."
    ):
        write_text(pathlib.Path("lost"), "text")


@pytest.mark.parametrize("value", [None, 3, "", "a\0b", b"runs"], ids=repr)
def test_a_path_that_is_none_is_refused(value):
    for take in (JsonLines, TensorBoard, Checkpoint):
        with pytest.raises(OptionError, match=r"(is (None|an int|a bytes)|is not a valid path)\.\n    fix: a path"):
            take(value)


def test_a_run_whose_layout_cannot_be_written_is_refused(here):
    os.makedirs("run/layout.toml")
    model = spmd.FunctionalModel(lambda key: {"w": np.zeros((2, 1), np.float32)}, lambda params, x: x @ params["w"])
    data = {"x": np.ones((8, 2), np.float32), "y": np.ones((8, 1), np.float32)}
    with pytest.raises(CheckpointError, match=r"layout\.toml cannot be written: \S*layout\.toml is a folder\."):
        spmd.fit(model, data, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), batch_size=8, checkpoint="run")


def test_obstacle_sees_nothing_where_a_folder_can_be(here):
    assert blocking_file(here) is None and blocking_file(here / "new" / "run") is None
    (here / "kept").mkdir()
    (here / "link").symlink_to(here / "kept")
    assert blocking_file(here / "link" / "run") is None
    assert re.fullmatch(BAD["file"], blocking_file(here / "file") or "")
