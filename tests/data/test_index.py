"""The record index: after any change it is correct or rebuilt. Hashes of contents: a run does not
resume on other data.
"""

import json
import logging
import os
import random
import shutil

import numpy as np
import pytest
import written
from linear import fit

import spmd
from spmd.data import csv_files, data_hash
from spmd.errors import CheckpointError, DataError, OptionError

ROWS = 40


@pytest.fixture
def path(tmp_path):
    return written.csv(
        tmp_path / "a.csv", [f"{at},{at / 2}" for at in range(100, 100 + ROWS)], "x,y"
    )


def opened(path):
    return spmd.data.csv(path, batch_size=ROWS, shuffle=False, index=path.parent / "index")


def read(path):
    return next(iter(opened(path)))["x"].tolist()


def indexed(path):
    """The file that holds the index."""
    read(path)
    (file,) = (path.parent / "index").iterdir()
    return file


def damages(raw):
    """(name, bytes) of a file damaged in many ways: flipped bits, truncation, edited numbers."""
    rng = random.Random(0)
    yield "empty", b""
    yield "a line break", b"\n"
    yield "zeros", bytes(len(raw))
    for length in sorted({1, 7, len(raw) // 2, len(raw) - 1, *rng.sample(range(len(raw)), 8)}):
        yield f"truncated to {length}", raw[:length]
    for bit in sorted(
        {*range(0, 8 * len(raw), 151), *rng.sample(range(8 * len(raw)), 20), 8 * len(raw) - 1}
    ):
        yield (
            f"bit {bit}",
            raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :],
        )
    yield (
        "a record that begins later",
        raw.replace((4 + 9).to_bytes(8, "little"), (4 + 10).to_bytes(8, "little")),
    )
    yield "more at the end", raw + b"\n"
    yield "twice", raw * 2


def test_a_damaged_index_is_built_again_and_reported(path, caplog, monkeypatch):
    """For some 100 kinds of damage, the records read are those of the data, and the index is
    restored.
    """
    file, expected = indexed(path), list(range(100, 100 + ROWS))
    raw = file.read_bytes()
    for name, damaged in damages(raw):
        file.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "spmd"):
            assert read(path) == expected, name
        assert (
            damaged == raw or f"the index of {path} is damaged and is built again" in caplog.text
        ), name
        assert file.read_bytes() == raw, name
    with monkeypatch.context() as patched:
        patched.setattr(csv_files, "_scan", None)  # an intact index is used
        assert read(path) == expected


def test_index_of_another_file_is_not_used(path, caplog):
    file, other = indexed(path), written.csv(path.parent / "b.csv", ["7,1", "8,1"], "x,y")
    spmd.data.csv(other, batch_size=2, index=path.parent / "index")
    (theirs,) = {*(path.parent / "index").iterdir()} - {file}
    shutil.copy(file, theirs)
    data = spmd.data.csv(other, batch_size=2, shuffle=False, index=path.parent / "index")
    assert next(iter(data))["x"].tolist() == [7, 8]


def test_index_is_rebuilt_for_data_changed_with_the_same_size_and_time(path):
    """Same size, same modification time."""
    indexed(path)
    stat = os.stat(path)
    path.write_text(path.read_text().replace("\n100,50.0\n101,50.5\n", "\n10,50.0\n1010,50.5\n"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert os.stat(path).st_size == stat.st_size and read(path)[:3] == [10, 1010, 102]


def test_an_index_that_cannot_be_kept_is_reported(path, caplog):
    file = indexed(path)
    file.unlink()
    file.mkdir()
    with caplog.at_level(logging.WARNING, "spmd"):
        assert read(path) == list(range(100, 100 + ROWS))
    assert "cannot be kept, so the next run looks for its records again" in caplog.text
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]
    with pytest.raises(
        OptionError, match=r"the folder .*index cannot be created: .*a.csv is a file"
    ):
        spmd.data.csv(path, batch_size=ROWS, index=path / "index")


# other contents -----------------------------------------------------------------------------------


def test_data_of_the_same_size_and_other_contents_is_not_resumed(tmp_path):
    rng = np.random.default_rng(0)
    table = rng.integers(1, 9, (32, 17))
    path = written.csv(
        tmp_path / "a.csv",
        [",".join(map(str, row)) for row in table],
        ",".join([*(f"x{at}" for at in range(16)), "y"]),
    )
    columns = {"x": [f"x{at}" for at in range(16)], "y": ["y"]}

    def make():
        return spmd.data.csv(
            path,
            columns=columns,
            types={name: "float32" for name in [*columns["x"], "y"]},
            batch_size=16,
        )

    fit(make(), steps=1, checkpoint=tmp_path / "run")
    state = iter(make()).get_state()
    assert json.loads(json.dumps(state)) == state
    iter(make()).set_state(state)
    raw = path.read_bytes()
    path.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1]) + raw[-1:])
    with pytest.raises(
        CheckpointError,
        match=r"its data is not the same\n1 problem:\n\n  contents\n      saved '\w{16}', now "
        r"'\w{16}'\n      fix: ",
    ):
        fit(make(), steps=3, checkpoint=tmp_path / "run", resume=True)
    with pytest.raises(DataError, match=r"this state is of other data: contents was"):
        iter(make()).set_state(state)


def test_arrays_of_other_contents_are_not_resumed(tmp_path):
    data = {"x": np.zeros((32, 16), np.float32), "y": np.zeros((32, 1), np.float32)}
    fit(data, batch_size=16, steps=1, checkpoint=tmp_path / "run")
    data["y"][7] = 1
    with pytest.raises(CheckpointError, match=r"1 problem:\n\n  contents y\n"):
        fit(data, batch_size=16, steps=2, checkpoint=tmp_path / "run", resume=True)
    fit(data, batch_size=16, steps=2, checkpoint=tmp_path / "run", resume="changed_data")
    assert _changed(tmp_path / "run") == ["contents y of the data have changed"]
    with pytest.raises(
        OptionError, match=r"^resume='yes'\n    fix: True, False, or \"changed_data\""
    ):
        fit(data, batch_size=16, steps=3, checkpoint=tmp_path / "run", resume="yes")


def _changed(folder):
    """What the resumed run reports as changed."""
    (resumed,) = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if "resumed" in line
    ]
    return resumed["changed"]


def test_checkpoint_without_hashes_is_resumed_with_a_warning(tmp_path, monkeypatch):
    """As earlier versions wrote them."""
    data = {"x": np.zeros((32, 16), np.float32), "y": np.zeros((32, 1), np.float32)}
    with monkeypatch.context() as before:
        before.setattr(data_hash, "of_arrays", lambda arrays: {})
        fit(data, batch_size=16, steps=1, checkpoint=tmp_path / "run")
    fit(data, batch_size=16, steps=2, checkpoint=tmp_path / "run", resume=True)
    assert _changed(tmp_path / "run") == [
        "the checkpoint has no hash of its data, so the contents of the data were not compared"
    ]


def test_a_sample_of_large_files_has_their_ends_and_blocks_between(tmp_path, monkeypatch):
    monkeypatch.setattr(data_hash, "BLOCK", 4)
    raw = [bytes(range(100)), b"", bytes(range(50)), b"z"]
    paths = [tmp_path / str(at) for at in range(4)]
    hashes = {}
    for blocks, total in ((5, 151), (38, 151)):
        for at in [None, *range(total)]:
            changed = bytearray(b"".join(raw))
            if at is not None:
                changed[at] ^= 1
            for path, first, contents in zip(
                paths, np.cumsum([0, *map(len, raw)]), raw, strict=False
            ):
                path.write_bytes(changed[first : first + len(contents)])
            hashes[blocks, at] = data_hash.of_files(
                [str(path) for path in paths], list(map(len, raw)), blocks
            )
    noticed = {
        blocks: [at for at in range(151) if hashes[blocks, at] != hashes[blocks, None]]
        for blocks in (5, 38)
    }
    assert noticed[38] == list(range(151)), "all of what is small"
    assert noticed[5] == [
        at for first in (0, 36, 73, 110, 147) for at in range(first, first + 4)
    ], "the last block spans two files"


def test_a_sample_of_large_arrays_has_the_first_and_the_last_row(monkeypatch):
    monkeypatch.setattr(data_hash, "BLOCK", 8)
    monkeypatch.setattr(data_hash, "BLOCKS", 8)
    x = np.zeros((100, 2), np.float32)
    before = data_hash.of_arrays({"x": x})
    noticed = []
    for row in range(100):
        x[row, 1] = 1
        noticed += [row] if data_hash.of_arrays({"x": x}) != before else []
        x[row, 1] = 0
    assert noticed[0] == 0 and noticed[-1] == 99 and len(noticed) == 8
    assert (
        data_hash.of_arrays({"x": x.astype(np.float64)})
        != before
        != data_hash.of_arrays({"x": x[:, :1]})
    )
