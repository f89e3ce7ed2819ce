"""ArrayRecord files as records, read with grain: each is a byte string that a function or declared
features decode.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.decoder import Decoder, check_decode
from spmd.data.features import Feature, Parser
from spmd.data.record_index import find_files
from spmd.data.records import FileFormat, ReadOptions, Records
from spmd.errors import DataError, OptionError, first_line, import_extra, option


class ArrayRecordFiles(FileFormat):
    """Records of ArrayRecord files, with one grain source for each file."""

    file_kind = "ArrayRecord file"

    def __init__(self, paths: tuple[str, ...], into: Decoder | Parser, *, skip: bool):
        open_file = import_extra("grain", "data").sources.ArrayRecordDataSource
        self.paths, self._sources = paths, []
        for path in paths:
            try:
                self._sources.append(open_file(path))
            except Exception as error:
                raise DataError(
                    f"{path} is not an ArrayRecord file: {first_line(error)}.",
                    fix="the file as it was written.",
                ) from error
        self.counts = [len(source) for source in self._sources]
        self.sizes = [Path(path).stat().st_size for path in paths]
        self._first, self._into = np.cumsum([0, *self.counts]), into
        if sum(self.counts):
            if isinstance(into, Decoder):
                into.learn_first(self._read, sum(self.counts), self.where, skip=skip)
            self.fields = into.fields

    def _read(self, record: int) -> bytes:
        bad: dict[int, str] = {}
        (raw,) = self._raw(np.array([record]), bad)
        if raw is None:
            raise DataError(f"{bad[0]}.", fix="the file as it was written.")
        return raw

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Read the records of each file together."""
        for row, record in enumerate(self._raw(records, bad)):
            if record is not None:
                self._into.read_record(record, leaves, row, bad)

    def _raw(self, records: np.ndarray, bad: dict[int, str]) -> list[bytes | None]:
        files = np.searchsorted(self._first, records, "right") - 1
        raw: list[bytes | None] = []
        for file in np.unique(files).tolist():
            source = self._sources[file]
            rows = (records[files == file] - self._first[file]).tolist()
            try:
                # One call: array_record (0.8) reads the records of a call in parallel threads.
                raw += source.__getitems__(rows)
            except Exception:  # one of them is damaged; read each alone to find it
                for row in rows:
                    try:
                        raw.append(source[row])
                    except Exception as error:
                        bad[len(raw)] = f"it cannot be read: {first_line(error)}"
                        raw.append(None)
        return raw


def array_record(
    files: str | Path | Sequence[str | Path],
    *,
    batch_size: int,
    decode: Callable[[bytes], Mapping[str, Any]] | None = None,
    features: Mapping[str, Feature] | None = None,
    pad: Mapping[str, Feature] | None = None,
    shuffle: bool | int = True,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "stop",
) -> Records:
    """Batches of the records of ArrayRecord files, for `fit` or your own loop. Needs the extra
    `data`.

    Args:
      files: a pattern, a path, or several of them.
      batch_size: records of a batch, over all processes.
      decode: from the bytes of a record to a dict of arrays, with the same shapes and dtypes for
        all records.
      features: instead of `decode`, for records of `tf.train.Example`: by name, `spmd.data.fixed`
        or `spmd.data.padded`.
      pad: by name, `spmd.data.padded(length, dtype)` for one-dimensional arrays of `decode` whose
        lengths differ.
      shuffle, seed, workers, on_error: as in `spmd.data.csv`.

    Returns:
      A `spmd.data.Records`: an iterable of batches, dicts of arrays [rows, ...].

    Raises:
      DataError: no file, or a file that is not an ArrayRecord file.
      OptionError: neither or both of `decode` and `features`.

    Example:
      >>> import spmd
      >>> spmd.data.array_record("train-*.array_record", batch_size=128)
      Traceback (most recent call last):
      spmd.errors.OptionError: how to decode records is not given.
          fix: decode=function, or features={...} where they are tf.train.Example.
    """
    if (decode is None) == (features is None):
        problem = "how to decode records is not given"
        if decode is not None:
            problem = "decode and features are both given"
        raise OptionError(
            f"{problem}.",
            fix=f"decode=function, or {option('features', '{...}')} where they are "
            "tf.train.Example.",
        )
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    if features is not None and pad:
        raise OptionError(
            "pad is for decode only.", fix="spmd.data.padded(...) among the features."
        )
    if decode is not None:
        check_decode(decode, pad)
    into: Decoder | Parser
    if decode is not None:
        into = Decoder(decode, pad or {})
    else:
        into = Parser(features or {})
    return Records(ArrayRecordFiles(find_files(files), into, skip=on_error == "skip"), reading)
