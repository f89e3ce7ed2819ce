"""A piece of a state in a file: what was written is read, and everything else is refused before it
is used.
"""

import hashlib
import io
import json
import os

import numpy as np
import pytest

from spmd.base.output_files import DamagedFileError
from spmd.run import piece_file
from spmd.run.piece_file import (
    MAGIC,
    Piece,
    parts,
    read_header,
    read_shards,
    receive_piece,
    write_piece,
)

ARRAYS = {"params/w": "float32[8, 3]", "opt/m": "bfloat16[5]", "step": "int32[]"}
CONTENTS = {
    ("params/w", ((0, 4), (0, 3))): np.arange(12, dtype=np.float32).reshape(4, 3),
    ("opt/m", ((0, 5),)): np.arange(5).astype("bfloat16"),
    ("step", ()): np.int32(7),
}


@pytest.fixture
def written(tmp_path):
    """A file, and its header."""
    meta = {"step": 7, "arrays": ARRAYS}
    piece = Piece(7, "a start", 1, meta, dict.fromkeys(CONTENTS, ""))
    path = tmp_path / "7.1"
    return path, write_piece(path, piece, CONTENTS.__getitem__)


def equal(shards):
    return all(
        array.dtype == CONTENTS[key].dtype and np.array_equal(array, CONTENTS[key])
        for key, array in shards.items()
    )


def test_written_shards_are_read(written):
    path, piece = written
    assert read_header(path) == piece and set(piece.shards) == set(CONTENTS)
    shards = dict(read_shards(path, piece, piece.shards))
    assert shards.keys() == CONTENTS.keys() and equal(shards)
    assert [entry.name for entry in path.parent.iterdir()] == ["7.1"]
    assert path.stat().st_mode & 0o077 == 0


def test_failed_write_leaves_no_file(tmp_path):
    with pytest.raises(KeyError):
        write_piece(
            tmp_path / "7.1",
            Piece(7, "", 1, {"step": 7, "arrays": ARRAYS}, {("step", ()): ""}),
            {}.__getitem__,
        )
    assert not list(tmp_path.iterdir())


def test_every_flipped_bit_is_found(written):
    path, piece = written
    content = path.read_bytes()
    padding = {at for at in range(len(content))} - _covered(piece, len(content))
    for at in range(0, len(content), 5):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            read = dict(read_shards(path, read_header(path), piece.shards))
            assert at in padding and equal(read), at
        except DamagedFileError:
            assert at not in padding, at


def _covered(piece, size):
    """The bytes of prefix, header and shards."""
    length = len(
        json.dumps(
            {
                "step": 7,
                "start": "a start",
                "rank": 1,
                "meta": piece.meta,
                "shards": [[*key, d] for key, d in piece.shards.items()],
            }
        )
    )
    begin, covered = len(piece.header()), set(range(piece_file.PREFIX + length))
    for key, at in piece.offsets().items():
        covered |= set(range(begin + at, begin + at + piece.nbytes(key)))
    assert max(covered) < size
    return covered


@pytest.mark.parametrize("left", [0, 10, piece_file.PREFIX, 200, -1])
def test_truncated_file_is_refused(written, left):
    path, _ = written
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DamagedFileError):
        read_header(path)


def forged(path, size=None, **changes):
    """A file whose header has a right checksum, and says something else."""
    fields = {
        "step": 7,
        "start": "",
        "rank": 1,
        "meta": {"step": 7, "arrays": ARRAYS},
        "shards": [["step", [], "0" * 64]],
        **changes,
    }
    text = json.dumps(fields).encode()
    header = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    header = header.ljust(-(-len(header) // 64) * 64, b"\0")
    path.write_bytes(header + bytes(64 if size is None else size))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": 8},
        {"rank": True},
        {"start": None},
        {"meta": []},
        {"meta": {"step": 7, "arrays": {"step": "object[]", "note": "int4[2]"}}},
        {"meta": {"step": 7, "arrays": {"step": "int32[x]"}}},
        {"shards": [["other", [], "0" * 64]]},
        {"shards": [["step", [[0, 1]], "0" * 64]]},
        {"shards": [["step", [], "0" * 63]]},
        {"shards": [["step", [], "0" * 64], ["step", [], "0" * 64]]},
        {"shards": [["params/w", [[0, 9], [0, 3]], "0" * 64]]},
        {"shards": [["params/w", [[4, 2], [0, 3]], "0" * 64]]},
        {"shards": [["params/w", [[-1, 2], [0, 3]], "0" * 64]]},
        {"shards": [["params/w", [[0, 2.0], [0, 3]], "0" * 64]]},
        {"shards": [["params/w", [[0, 8], [0, 3]], "0" * 64]]},
        {"shards": 5},
        {"size": 1 << 20},
    ],
    ids=str,
)
def test_header_is_checked_before_anything_is_allocated(tmp_path, changes, monkeypatch):
    forged(tmp_path / "7.1", **changes)
    monkeypatch.setattr(np, "empty", None)
    with pytest.raises(DamagedFileError):
        read_header(tmp_path / "7.1")


def test_length_of_the_header_is_bounded(tmp_path):
    (tmp_path / "7.1").write_bytes(MAGIC + (1 << 60).to_bytes(8, "little") + bytes(100))
    with pytest.raises(DamagedFileError, match="its header has 1152921504606846976 bytes of 116"):
        read_header(tmp_path / "7.1")


def test_deep_json_is_refused(tmp_path):
    text = b"[" * 100_000
    prefix = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
    (tmp_path / "7.1").write_bytes((prefix + text).ljust(-(-len(prefix + text) // 64) * 64, b"\0"))
    with pytest.raises(DamagedFileError, match="its header cannot be read"):
        read_header(tmp_path / "7.1")


def test_links_pipes_and_folders_are_refused(tmp_path, written):
    path, _ = written
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "absent"):
        with pytest.raises(DamagedFileError):
            read_header(tmp_path / name)


def stream(content):
    source = io.BytesIO(content)

    def read(view):
        if source.readinto(view) < len(view):
            raise ConnectionError("the sender is gone")

    return read


def test_selected_shards_are_sent(written, tmp_path):
    path, piece = written
    keys = [("step", ()), ("params/w", ((0, 4), (0, 3)))]
    content = b"".join(parts(path, piece, keys))
    other = tmp_path / "other"
    received = receive_piece(other, len(content), stream(content), lambda piece: None)
    assert set(received.shards) == set(keys) and read_header(other) == received
    assert other.read_bytes() == content
    assert equal(dict(read_shards(other, received, keys)))


@pytest.mark.parametrize("at", [3, 20, 100, -70])
def test_damage_on_the_way_leaves_no_file(written, tmp_path, at):
    path, piece = written
    content = bytearray(b"".join(parts(path, piece, list(CONTENTS))))
    content[at if at != -70 else len(piece.header()) + 1] ^= 4
    with pytest.raises(DamagedFileError):
        receive_piece(tmp_path / "other", len(content), stream(bytes(content)), lambda piece: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["7.1"]


def test_piece_that_is_not_wanted_is_not_written(written, tmp_path):
    path, piece = written
    content = b"".join(parts(path, piece, list(CONTENTS)))

    def refuse(piece):
        raise ValueError("not wanted")

    with pytest.raises(ValueError, match="not wanted"):
        receive_piece(tmp_path / "other", len(content), stream(content), refuse)
    assert not (tmp_path / "other").exists()
