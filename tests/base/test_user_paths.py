"""Folders and files that cannot be created or written: refused with what is in the way."""

import errno
import os
import pathlib
import re

import matplotlib.figure
import numpy as np
import optax
import pytest

import spmd
from spmd.base.user_paths import blocking_file, check_free, output_path, write_text
from spmd.errors import CheckpointError, ExportError, OptionError
from spmd.render.picture import Picture
from spmd.run.checkpoint import Checkpoint, CheckpointStore
from spmd.run.loggers import JsonLines, TensorBoard


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
    text = (
        rf"^the folder \S*{path}/checkpoints cannot be created: {BAD[path]}\.\n    fix: another "
        r"path\.$"
    )
    with pytest.raises(CheckpointError, match=text) as raised:
        CheckpointStore(Checkpoint(path))
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize(
    "make",
    [lambda path: JsonLines(f"{path}/log.jsonl"), TensorBoard],
    ids=["JsonLines", "TensorBoard"],
)
@pytest.mark.parametrize("path", BAD, ids=lambda path: path[:20])
def test_loggers_refuse_a_folder_that_cannot_be_made(path, make):
    with pytest.raises(
        OptionError, match=rf"^the folder \S*{path} cannot be created: {BAD[path]}\."
    ):
        make(path)


def test_json_lines_refuse_a_folder_in_the_place_of_their_file(here):
    (here / "metrics.jsonl").mkdir()
    with pytest.raises(
        OptionError,
        match=r"^the file metrics\.jsonl cannot be written: metrics\.jsonl is a folder\.",
    ):
        JsonLines("metrics.jsonl")


@pytest.mark.parametrize("path", [path for path in BAD if "is a" in BAD[path]])
def test_export_refuses_a_folder_before_it_works(path, here):
    with pytest.raises(ExportError, match=rf"^{BAD[path]}\.\n    fix: another folder"):
        check_free(here / path, ExportError)


def test_files_that_reports_are_saved_to_are_refused_the_same_way():
    with pytest.raises(
        OptionError,
        match=r"^the folder file/under cannot be created: \S*/file is a file\.\n    fix: another "
        r"path\.$",
    ):
        write_text(pathlib.Path("file/under/report.html"), "text")
    with pytest.raises(
        OptionError,
        match=r"^the file lost cannot be written: \S*/lost is a link to /nowhere/at/all, which "
        r"does "
        r"not exist\.",
    ):
        write_text(pathlib.Path("lost"), "text")


@pytest.mark.parametrize("value", [None, 3, "", "a\0b", b"runs"], ids=repr)
def test_a_path_that_is_none_is_refused(value):
    for take in (JsonLines, TensorBoard, Checkpoint):
        with pytest.raises(
            OptionError, match=r"(is (None|an int|a bytes)|is not a valid path)\.\n    fix: a path"
        ):
            take(value)


def test_a_run_whose_layout_cannot_be_written_is_refused(here):
    os.makedirs("run/layout.toml")
    model = spmd.FunctionalModel(
        lambda key: {"w": np.zeros((2, 1), np.float32)}, lambda params, x: x @ params["w"]
    )
    data = {"x": np.ones((8, 2), np.float32), "y": np.ones((8, 1), np.float32)}
    with pytest.raises(
        CheckpointError, match=r"layout\.toml cannot be written: \S*layout\.toml is a folder\."
    ):
        spmd.fit(
            model,
            data,
            loss=spmd.losses.mean_squared_error,
            optimizer=optax.sgd(0.1),
            batch_size=8,
            checkpoint="run",
        )


def test_obstacle_sees_nothing_where_a_folder_can_be(here):
    assert blocking_file(here) is None and blocking_file(here / "new" / "run") is None
    (here / "kept").mkdir()
    (here / "link").symlink_to(here / "kept")
    assert blocking_file(here / "link" / "run") is None
    assert re.fullmatch(BAD["file"], blocking_file(here / "file") or "")


def test_file_that_cannot_be_replaced_stays_as_it_was(here, monkeypatch):
    (here / "plan.html").write_text("old")
    (here / "plan.html").chmod(0o640)
    (here / "link.html").symlink_to("plan.html")

    def full(self, text, **options):
        with self.open("w") as file:
            file.write(text[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    names = sorted(os.listdir(here))
    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "write_text", full)
        with pytest.raises(
            OptionError, match=r"^the file link.html cannot be written: No space left on device\."
        ):
            write_text(pathlib.Path("link.html"), "new contents")
    assert (here / "plan.html").read_text() == "old" and sorted(os.listdir(here)) == names
    write_text(pathlib.Path("link.html"), "new contents")
    assert (here / "plan.html").read_text() == "new contents" and (
        here / "plan.html"
    ).stat().st_mode & 0o777 == 0o640
    assert (here / "link.html").is_symlink() and sorted(os.listdir(here)) == names


def test_picture_that_cannot_be_drawn_leaves_the_file_as_it_was(here):
    class Broken:
        canvas = matplotlib.figure.Figure().canvas

        def savefig(self, path, **options):
            pathlib.Path(path).write_bytes(b"\x89PN")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (here / "a.png").write_bytes(b"old")
    with pytest.raises(OptionError, match="No space left on device"):
        Picture(Broken()).save("a.png")
    assert (here / "a.png").read_bytes() == b"old"


def test_output_path_is_tried_and_nothing_is_left(here):
    (here / "old.toml").write_text("old")
    output_path("new.toml", "a file", (".toml",))
    output_path("old.toml", "a file", (".toml",), overwrite=True)
    assert (here / "old.toml").read_text() == "old" and not [
        name for name in os.listdir(here) if name.startswith((".", "new"))
    ]


def test_text_is_written_to_a_pipe(here):
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(pathlib.Path("pipe"), "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
