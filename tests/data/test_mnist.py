"""IDX files, read from files these tests write."""

import gzip
import re
import struct

import numpy as np
import pytest

import spmd
from spmd.data.idx_files import read_idx
from spmd.errors import DataError

CODES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def idx(array, code=0x08):
    """The bytes of an IDX file."""
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(CODES[code]).tobytes()


IMAGES = np.random.default_rng(0).integers(0, 256, (10, 28, 28), dtype=np.uint8)
LABELS = np.arange(10, dtype=np.uint8)


def write(folder, *, dot="-", gz=False, skip=()):
    contents = {
        "train-images": idx(IMAGES),
        "train-labels": idx(LABELS),
        "t10k-images": idx(IMAGES[:4]),
        "t10k-labels": idx(LABELS[:4]),
    }
    for stem, raw in contents.items():
        if stem not in skip:
            name = f"{stem}{dot}idx{3 if 'images' in stem else 1}-ubyte{'.gz' if gz else ''}"
            (folder / name).write_bytes(gzip.compress(raw) if gz else raw)
    return folder


@pytest.mark.parametrize("gz", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("dot", ["-", "."])
def test_both_halves_are_read_and_scaled(tmp_path, dot, gz):
    train, test = spmd.data.mnist(write(tmp_path, dot=dot, gz=gz))
    assert train["image"].shape == (10, 28, 28, 1) and train["image"].dtype == np.float32
    assert np.array_equal(train["image"][..., 0], IMAGES.astype(np.float32) / 255)
    assert train["label"].dtype == np.int32 and np.array_equal(train["label"], LABELS)
    assert np.array_equal(test["image"], train["image"][:4]) and np.array_equal(
        test["label"], LABELS[:4]
    )
    assert train["image"].min() >= 0 and train["image"].max() <= 1


@pytest.mark.parametrize("code", CODES, ids=[f"0x{code:02x}" for code in CODES])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (0, 3)], ids=str)
def test_every_kind_of_number_in_any_shape(tmp_path, code, shape):
    kind = np.dtype(CODES[code])
    low = -100 if kind.kind in "if" else 0
    array = np.random.default_rng(code).integers(low, 100, shape).astype(kind)
    (tmp_path / "file").write_bytes(idx(array, code))
    numbers = read_idx(tmp_path / "file")
    assert np.array_equal(numbers, array) and numbers.shape == shape
    assert numbers.dtype == kind.newbyteorder("=") and numbers.dtype.isnative
    assert numbers.flags.writeable


IDX = "\n    fix: one of MNIST's four files, as it was downloaded."


def refused(tmp_path, raw):
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(DataError) as raised:
        read_idx(tmp_path / "file")
    return str(raised.value).replace(str(tmp_path / "file"), "FILE")


def test_each_kind_of_damage_has_its_error(tmp_path):
    raw = idx(IMAGES)
    assert (
        refused(tmp_path, raw[:-1])
        == "FILE: shape [10, 28, 28] needs 7840 bytes of data, the file has 7839.\n    fix: "
        "download it again."
    )
    assert (
        refused(tmp_path, raw + b"x")
        == "FILE: shape [10, 28, 28] needs 7840 bytes of data, the file has 7841.\n    fix: "
        "download it again."
    )
    assert (
        refused(tmp_path, raw[:10])
        == "FILE: the header of 3 dims is truncated.\n    fix: download it again."
    )
    assert refused(tmp_path, b"") == f"FILE is not an IDX file: it starts with ''.{IDX}"
    assert (
        refused(tmp_path, b"\x89PNG" + raw)
        == f"FILE is not an IDX file: it starts with '89 50 4e 47'.{IDX}"
    )
    assert (
        refused(tmp_path, b"\0\0\x0a\x01" + raw)
        == f"FILE is not an IDX file: it starts with '00 00 0a 01'.{IDX}"
    )
    assert re.match("FILE is a damaged gzip file: ", refused(tmp_path, gzip.compress(raw)[:-20]))
    spoilt = bytearray(gzip.compress(raw))
    spoilt[40] ^= 0xFF
    assert re.match("FILE is a damaged gzip file: ", refused(tmp_path, bytes(spoilt)))


def test_a_missing_file_lists_the_names_looked_for(tmp_path):
    with pytest.raises(DataError) as raised:
        spmd.data.mnist(write(tmp_path, skip=("t10k-labels",)))
    assert str(raised.value) == (
        f"{tmp_path} has none of t10k-labels-idx1-ubyte, t10k-labels-idx1-ubyte.gz, "
        "t10k-labels.idx1-ubyte, t10k-labels.idx1-ubyte.gz.\n"
        "    fix: the folder with MNIST's four files."
    )
    with pytest.raises(DataError, match="nowhere has none of train-images"):
        spmd.data.mnist(tmp_path / "nowhere")


def test_images_and_labels_of_different_lengths_raise(tmp_path):
    write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:9]))
    with pytest.raises(DataError) as raised:
        spmd.data.mnist(tmp_path)
    assert (
        str(raised.value)
        == f"{tmp_path}: train images are [10, 28, 28], labels [9]; wanted [n, height, width] and "
        "[n].\n"
        "    fix: both files of one data set."
    )
