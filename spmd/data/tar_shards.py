"""Samples in tar files, as WebDataset stores them: consecutive files of one name, each with its own
ending.
"""

import io
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from spmd.base.output_files import name_errors
from spmd.data.decoder import Decoder, check_decode
from spmd.data.features import Feature
from spmd.data.record_index import RecordIndex, check_uncompressed, find_files
from spmd.data.records import FileFormat, ReadOptions, Records
from spmd.errors import DataError, first_line

# of a tar file: all headers and contents begin at a multiple of it
BLOCK = 512
KEY = "__key__"
NOTE = re.compile(r"__[^/]*__($|/)")
CHANGED = "the file has changed since its samples were found"


class TarFiles(FileFormat):
    """Samples of tar files; the bytes of one are consecutive, and are a tar file as well."""

    file_kind = "tar file"
    record_kind = "sample"
    # Encoded samples may be much larger than their arrays, so batches are read one by one.
    together = 1

    def __init__(self, samples: RecordIndex, into: Decoder, *, skip: bool):
        self.paths, self.counts, self.sizes = samples.paths, samples.counts, samples.sizes
        self._samples, self._into = samples, into
        if sum(self.counts):
            into.learn_first(self._read, sum(self.counts), self.where, skip=skip)
            self.fields = into.fields

    def _read(self, record: int) -> dict[str, Any]:
        raw, starts, ends = self._samples.read_bytes(np.array([record]))
        try:
            return _parts(raw[starts[0] : ends[0]])
        except tarfile.TarError as error:
            raise DataError(f"{CHANGED}: {first_line(error)}.", fix="the file as it was.") from None

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Read neighbouring samples together, and decode each."""
        raw, starts, ends = self._samples.read_bytes(records)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            try:
                sample = _parts(raw[start:end])
            except tarfile.TarError as error:
                bad[row] = f"{CHANGED}: {first_line(error)}"
                continue
            self._into.read_record(sample, leaves, row, bad)

    def where(self, record: int) -> str:
        """The file, the number of the sample in it, and its first byte, in words."""
        path, number, start = self._samples.place(record)
        return f"{path}, sample {number} (byte {start})"


def webdataset(
    files: str | Path | Sequence[str | Path],
    *,
    decode: Callable[[dict[str, Any]], Mapping[str, Any]],
    batch_size: int,
    pad: Mapping[str, Feature] | None = None,
    shuffle: bool | int = True,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "stop",
    index: str | Path | None = None,
) -> Records:
    """Batches of the samples in tar files, as the package webdataset writes them, for `fit` or your
    own loop.

    A sample is the consecutive files whose names are equal up to the first dot; files without an
    ending, hidden ones and `__notes__` belong to none, as for that package. Unlike with that
    package, samples are found once, and then read by number: all are shuffled, each comes once in
    an epoch, and a run resumes at the next one. Nothing but Python's `tarfile` is needed.

    Args:
      files: a pattern, a path, or several of them; not compressed.
      decode: from a sample to a dict of arrays, with the same shapes and dtypes for all samples. A
        sample is a dict of bytes by ending, such as {"jpg": ..., "cls": b"3"}, and its name under
        "__key__".
      batch_size: samples of a batch, over all processes.
      pad: by name, `spmd.data.padded(length, dtype)` for one-dimensional arrays of `decode` whose
        lengths differ.
      shuffle, seed, workers, on_error, index: as in `spmd.data.csv`.

    Returns:
      A `spmd.data.Records`: an iterable of batches, dicts of arrays [rows, ...].

    Raises:
      DataError: no file, or one that is compressed, truncated, damaged or no tar file; or two parts
        of a sample with one ending, or a link.
      OptionError: `decode` is no function.

    Example:
      >>> import spmd
      >>> spmd.data.webdataset("train-*.tar", decode=lambda sample: {}, batch_size=128)
      Traceback (most recent call last):
      spmd.errors.DataError: no file matches "train-*.tar".
      ...
    """
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    check_decode(decode, pad)
    samples = RecordIndex(find_files(files), scan, "webdataset 1", index)
    return Records(TarFiles(samples, Decoder(decode, pad or {}), skip=on_error == "skip"), reading)


def scan(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return where each sample of a tar file begins and ends, in bytes.

    Raises:
      DataError: it is no tar file, is truncated or damaged, has another one after it, or has two
        files of one name, or a link.
    """
    check_uncompressed(path)
    size = os.path.getsize(path)
    starts: list[int] = []
    ends: list[int] = []
    current: str | None = None
    endings: set[str] = set()
    end = 0
    try:
        # Opened here, since tarfile would leave it open where it raises an error.
        with name_errors(Path(path)), open(path, "rb") as content:
            with tarfile.open(fileobj=content, mode="r:") as file:
                for member in file:
                    end = _end_of(member)
                    name, ending = _split(member.name)
                    if not name or member.isdir():
                        continue
                    if not member.isreg() or member.issparse():
                        raise tarfile.ReadError(f"{member.name} is a link, or no regular file")
                    if name != current:
                        starts.append(member.offset)
                        ends.append(end)
                        current, endings = name, set()
                    if ending in endings:
                        raise tarfile.ReadError(f"{member.name} is there twice")
                    endings.add(ending)
                    ends[-1] = end
            _check_rest(content, end, size)
    except tarfile.TarError as error:
        raise DataError(
            f"{path}: {first_line(error)}.", fix="the tar file as it was written."
        ) from error
    return np.array(starts, np.int64), np.array(ends, np.int64)


def _end_of(member: tarfile.TarInfo) -> int:
    """The end of a file's content, with what fills its last block."""
    return member.offset_data + -(-member.size // BLOCK) * BLOCK


def _check_rest(content: IO[bytes], end: int, size: int) -> None:
    """Check that nothing but zeros follows the last file: `tarfile` ends without an error at a
    header that is damaged or cut off, and at the end of the first of two joined tar files.

    Raises:
      tarfile.TarError: something else follows, or the end is missing.
    """
    content.seek(min(end, size))
    at = end
    while piece := content.read(1 << 20):
        if used := piece.lstrip(b"\0"):
            at += len(piece) - len(used)
            raise tarfile.ReadError(f"what begins at byte {at - at % BLOCK} is no file of it")
        at += len(piece)
    if size < end + 2 * BLOCK:
        raise tarfile.ReadError(f"it is truncated: its end is missing after byte {size}")


def _parts(raw: bytes) -> dict[str, Any]:
    """The files of one sample: their bytes by ending, and the sample's name.

    Raises:
      tarfile.TarError: these are not the bytes of a sample.
    """
    sample: dict[str, Any] = {}
    end = 0
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as file:
        for member in file:
            end = _end_of(member)
            name, ending = _split(member.name)
            if not name or member.isdir():
                continue
            content = file.extractfile(member)
            if content is None:
                raise tarfile.ReadError(f"{member.name} is no regular file")
            sample[KEY] = name
            sample[ending] = content.read()
    if end != len(raw):
        raise tarfile.ReadError(f"{len(raw) - end} bytes are no file")
    return sample


def _split(path: str) -> tuple[str, str]:
    """The name of a sample, with its folder, and the ending of one of its files; "" and "" for a
    file that the package webdataset leaves out: without an ending, hidden, or a note on the shard.

    >>> _split("train/0001.seg.png"), _split("._0001.png"), _split("__meta__/a.json")
    (('train/0001', 'seg.png'), ('', ''), ('', ''))
    """
    folder, slash, name = path.rpartition("/")
    stem, dot, ending = name.partition(".")
    if not stem or not dot or NOTE.match(path):
        return "", ""
    return f"{folder}{slash}{stem}", ending.lower()
