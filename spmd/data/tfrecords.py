"""Records of TFRecord files of `tf.train.Example`, without TensorFlow; every checksum is
verified.
"""

import logging
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from spmd.data.features import Feature, Parser
from spmd.data.record_index import RecordIndex, check_uncompressed, find_files
from spmd.data.records import FileFormat, ReadOptions, Records
from spmd.errors import DataError, import_extra, option, quoted

# bytes around a record: its length and the checksum of that; the checksum of its data
HEAD, TAIL = 12, 4


class TFRecordFiles(FileFormat):
    """Records of TFRecord files."""

    file_kind = "TFRecord file"

    def __init__(self, offsets: RecordIndex, parser: Parser):
        self.paths, self.counts, self.sizes = offsets.paths, offsets.counts, offsets.sizes
        self._offsets, self._parser, self.fields = offsets, parser, parser.fields

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Check the checksum of each record, and parse its features."""
        masked_crc = crc_function()  # looked up once, not for each record
        raw, starts, ends = self._offsets.read_bytes(records)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            data = raw[start + HEAD : end - TAIL]
            if int.from_bytes(raw[end - TAIL : end], "little") == masked_crc(data):
                self._parser.read_record(data, leaves, row, bad)
            else:
                bad[row] = "its checksum is not that of its data"

    def where(self, record: int) -> str:
        """Return the file, the number of the record in it, and its first byte, in words."""
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
    supported. Needs the extra `tfrecord`.

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
      MissingExtraError: google-crc32c or protobuf is not installed.

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
        # Of a damaged file, `skip` decides how much is in the index.
        f"tfrecord 2 {skip}",
        index,
        fills_file=True,
    )
    return Records(TFRecordFiles(offsets, parser), reading)


def scan(path: str, *, skip: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return where each record begins and ends, including its length and checksums, in bytes.

    Raises:
      DataError: the file is truncated, or a length is damaged, so that the next record cannot be
        found. With `skip` that is a warning, and the rest of the file is left out.
    """
    size = os.path.getsize(path)
    # An empty file cannot be mapped.
    if not size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # Mapped: only the heads of records are read, and not what lies between them.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        edges, damaged = _record_edges(data, size)
    count, end = len(edges) - 1, edges[-1]
    starts = np.array(edges[:-1], np.int64)
    ends = np.array(edges[1:], np.int64)
    if end == size:
        return starts, ends
    if damaged:
        why = "the checksum of its length is not right: where the next record begins is not known"
    else:
        why = (
            f"the file is truncated: {size - end} bytes are left of {size}, and the record there "
            "is longer"
        )
    # The first bytes of a compressed file look like a damaged length.
    if not count:
        check_uncompressed(path)
    if not skip:
        fix = "a TFRecord file; nothing of this one can be read"
        if count:
            skipping = option("on_error", quoted("skip"))
            fix = f"the file as it was written, or {skipping}, which leaves out all from there on"
        raise DataError(f"{path}, record {count} (byte {end}): {why}.", fix=f"{fix}.")
    logging.getLogger("spmd").warning(
        "%s, record %d (byte %d): %s. All from there on is left out.", path, count, end, why
    )
    return starts, ends


def _record_edges(data: mmap.mmap, size: int) -> tuple[list[int], bool]:
    """Return where records begin, and where the last complete one ends; and if the next one has a
    damaged length.
    """
    masked_crc, edges = crc_function(), [0]
    length_and_crc = struct.Struct("<QI")
    while edges[-1] + HEAD <= size:
        start = edges[-1]
        length, crc = length_and_crc.unpack_from(data, start)
        if crc != masked_crc(data[start : start + 8]):
            return edges, True
        end = start + HEAD + length + TAIL
        if end > size:
            break
        edges.append(end)
    return edges, False


def crc_function() -> Callable[[bytes], int]:
    """Return a function of bytes to their CRC-32C (Castagnoli) as TFRecord files store it: rotated
    by 15 bits, plus a constant (tensorflow/core/lib/hash/crc32c.h).

    Raises:
      MissingExtraError: google-crc32c is not installed.

    Example:
      >>> hex(crc_function()(b"123456789"))
      '0xc78ab0e5'
    """
    crc32c = import_extra("google_crc32c", "tfrecord").value

    def masked_crc(data: bytes) -> int:
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    return masked_crc
