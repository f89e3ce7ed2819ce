"""Records of TFRecord files of `tf.train.Example`, without TensorFlow; every checksum is
verified.
"""

import logging
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from spmd.data.crc import crc32c, masked
from spmd.data.features import Feature, Parser
from spmd.data.record_index import RecordIndex, check_uncompressed, find_files
from spmd.data.records import FileFormat, ReadOptions, Records
from spmd.errors import DataError, option, quoted

# bytes around a record: its length and the checksum of that; the checksum of its data
HEAD, TAIL = 12, 4
ALIKE = 8  # consecutive records of one length after which many more are tried at once
TOGETHER = 1 << 16  # records whose heads are checked at a time


class TFRecordFiles(FileFormat):
    """Records of TFRecord files."""

    file_kind = "TFRecord file"

    def __init__(self, offsets: RecordIndex, parser: Parser):
        self.paths, self.counts, self.sizes = offsets.paths, offsets.counts, offsets.sizes
        self._offsets, self._parser, self.fields = offsets, parser, parser.fields

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Reads records of one length together."""
        raw, starts, ends = self._offsets.read(records)
        lengths = ends - starts
        for length in np.unique(lengths).tolist():
            at = np.flatnonzero(lengths == length)
            frames = _frames(raw, starts[at], length)
            data = frames[:, HEAD:-TAIL]
            sound = frames[:, -TAIL:].copy().view("<u4")[:, 0] == masked(crc32c(data))
            bad |= dict.fromkeys(at[~sound].tolist(), "its checksum is not that of its data")
            self._parser.read(data if sound.all() else data[sound], leaves, at[sound], bad)

    def where(self, record: int) -> str:
        """The file, the number of the record in it, and its first byte."""
        path, number, start = self._offsets.place(record)
        return f"{path}, record {number} (byte {start})"


def tfrecord(
    files: str | Path | Sequence[str | Path],
    *,
    features: Mapping[str, Feature],
    batch_size: int,
    shuffle: bool | int = True,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "stop",
    index: str | Path | None = None,
) -> Records:
    """Batches of `tf.train.Example` records in TFRecord files, for `fit` or your own loop.

    The beginnings of records are found once, from the lengths before them. Compressed files are not
    supported.

    Args:
      files: a pattern, a path, or several of them.
      features: by name, `spmd.data.fixed` or `spmd.data.padded`; other features are ignored.
      batch_size: records of a batch, over all processes.
      shuffle, seed, workers, index: as in `spmd.data.csv`.
      on_error: "stop", or "skip" to leave out records that cannot be read; of a file whose lengths
        are damaged, all from there on.

    Returns:
      A `spmd.data.Records`: an iterable of batches, dicts of arrays [rows, ...].

    Raises:
      DataError: no file, or one that is truncated or damaged.

    Example:
      >>> import spmd
      >>> spmd.data.tfrecord(
      ...     "train-*.tfrecord", features={"label": spmd.data.fixed((), "int32")}, batch_size=128
      ... )
      Traceback (most recent call last):
      spmd.errors.DataError: no file matches "train-*.tfrecord".
      ...
    """
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    skip = on_error == "skip"
    parser = Parser(features)
    offsets = RecordIndex(
        find_files(files),
        lambda path: scan(path, skip=skip),
        f"tfrecord 2 {skip}",
        index,
        fills_file=True,
    )
    return Records(TFRecordFiles(offsets, parser), reading)


def _frames(raw: bytes, starts: np.ndarray, length: int) -> np.ndarray:
    """uint8[n, length]: all bytes of records of one length."""
    if len(starts) == 1 or (np.diff(starts) == length).all():
        return np.frombuffer(raw, np.uint8, len(starts) * length, int(starts[0])).reshape(
            -1, length
        )
    view = memoryview(raw)
    return np.frombuffer(
        b"".join([view[start : start + length] for start in starts.tolist()]), np.uint8
    ).reshape(-1, length)


def scan(path: str, *, skip: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Where each record begins and ends, including its length and checksums.

    Raises:
      DataError: the file is truncated, or a length is damaged, so that the next record cannot be
        found. With `skip` that is a warning, and the rest of the file is left out.
    """
    size = os.path.getsize(path)
    if not size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        starts, end = _walk(data, size)
        heads = np.append(starts, end) if size - end >= HEAD else starts
        wrong = _first_damaged(np.frombuffer(data, np.uint8), heads)
    ends = np.append(starts[1:], end)[: len(starts)]
    if wrong is None and end == size:
        return starts, ends
    if wrong is None:
        count, at, why = (
            len(starts),
            end,
            f"the file is truncated: {size - end} bytes are left of {size}, and the record there "
            "is longer",
        )
    else:
        count, at, why = (
            wrong,
            int(heads[wrong]),
            "the checksum of its length is not right: where the next record begins is not known",
        )
    if not count:
        check_uncompressed(path)
    if not skip:
        rest = (
            f"the file as it was written, or {option('on_error', quoted('skip'))}, which leaves "
            "out all from there on"
        )
        fix = rest if count else "a TFRecord file; nothing of this one can be read"
        raise DataError(f"{path}, record {count} (byte {at}): {why}.", fix=f"{fix}.")
    logging.getLogger("spmd").warning(
        "%s, record %d (byte %d): %s. All from there on is left out.", path, count, at, why
    )
    return starts[:count], ends[:count]


def _walk(data: mmap.mmap, size: int) -> tuple[np.ndarray, int]:
    """The beginnings of records, by their lengths, and the end of the last complete one. Equal
    lengths are tried many at once.
    """
    pieces: list[np.ndarray] = []
    starts: list[int] = []
    length_at, at, before, alike = struct.Struct("<Q").unpack_from, 0, -1, 0
    while at + HEAD + TAIL <= size:
        (length,) = length_at(data, at)
        frame = length + HEAD + TAIL
        if at + frame > size:
            break
        alike = alike + 1 if length == before else 0
        before = length
        if alike < ALIKE:
            starts.append(at)
            at += frame
            continue
        heads = at + frame * np.arange(min(TOGETHER, (size - at) // frame))
        same = _gathered(np.frombuffer(data, np.uint8), heads, 8).view("<u8")[:, 0] == length
        run = len(same) if same.all() else int(same.argmin())
        pieces += [np.array(starts, np.int64), heads[:run]]
        starts, at = [], at + run * frame
        alike = alike if run == len(same) else 0
    return np.concatenate([*pieces, np.array(starts, np.int64)]).astype(np.int64), at


def _first_damaged(data: np.ndarray, starts: np.ndarray) -> int | None:
    """The first record whose length does not match its checksum."""
    for first in range(0, len(starts), TOGETHER):
        heads = _gathered(data, starts[first : first + TOGETHER], HEAD)
        right = heads[:, 8:].copy().view("<u4")[:, 0] == masked(crc32c(heads[:, :8]))
        if not right.all():
            return first + int(right.argmin())
    return None


def _gathered(data: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(length)]
