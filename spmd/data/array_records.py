"""ArrayRecord files as records, read with grain: each is a byte string that a function or declared
features decode.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base.tree import describe
from spmd.data.features import Feature, Parser, fields_of
from spmd.data.number_parsing import limits
from spmd.data.record_index import find_files
from spmd.data.records import Field, FileFormat, ReadOptions, Records
from spmd.errors import DataError, OptionError, first_line, import_extra, option, quoted, type_name

LEARNED = 1000  # records, at least one of which must decode


class ArrayRecordFiles(FileFormat):
    """Records of ArrayRecord files, with one grain source for each file."""

    file_kind = "ArrayRecord file"

    def __init__(self, paths: tuple[str, ...], into: "Decoder | Parser", *, skip: bool):
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
                tried = 1
                if skip:
                    tried = min(sum(self.counts), LEARNED)
                self._learn(into, tried)
            self.fields = into.fields

    def _learn(self, into: "Decoder", most: int) -> None:
        """Learn the fields from the first record, or from the first readable one if bad records are
        skipped.

        Raises:
          DataError: none of the first `most` records can be read.
        """
        first_error = ""
        for record in range(most):
            bad: dict[int, str] = {}
            (raw,) = self._raw(np.array([record]), bad)
            if raw is None:
                why = bad[0]
            else:
                why = into.learn(raw)
            if not why:
                return
            first_error = first_error or f"{self.where(record)}: {why}"
        fix = "an intact file, and a function from bytes to a dict of arrays"
        if most > 1:
            first_error += f" (None of the first {most} records can be read.)"
        else:
            fix += f"; {option('on_error', quoted('skip'))} leaves out bad records"
        raise DataError(first_error, fix=f"{fix}.")

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


class Decoder:
    """A user's function from bytes to a dict of arrays, which must return the same shapes for each
    record, except in padded arrays.
    """

    def __init__(self, function: Callable[[bytes], Mapping[str, Any]], pad: Mapping[str, Feature]):
        self._function, self._pad = function, dict(pad)
        self._decoded_fields: dict[str, Field] = {}
        self.fields: dict[str, Field] = {}

    def learn(self, raw: bytes) -> str:
        """Learn shapes and dtypes from a record; returns what is wrong with it, or "".

        Raises:
          OptionError: the function does not return an array that `pad` names.
        """
        decoded = self._decoded(raw)
        if isinstance(decoded, str):
            return decoded
        missing = [name for name in self._pad if name not in decoded]
        if missing:
            raise OptionError(
                f"pad names {', '.join(missing)}, but decode returns {', '.join(decoded)}.",
                fix="names of the dict that decode returns.",
            )
        # Objects, bytes, text, times and numpy 2's StringDType; not "V", which bfloat16 has, too.
        unsupported = [
            f'{value.dtype} for "{name}"'
            for name, value in decoded.items()
            if value.dtype.kind in "OSUMmT"
        ]
        if unsupported or not decoded:
            return (
                f"decode returns {', '.join(unsupported) or 'nothing'}, which cannot be placed on "
                "a device"
            )
        self._decoded_fields = {
            name: Field(value.shape, value.dtype) for name, value in decoded.items()
        }
        self.fields = self._decoded_fields | fields_of(self._pad)
        return ""

    def _decoded(self, raw: bytes) -> dict[str, np.ndarray] | str:
        try:
            decoded = self._function(raw)
            if not isinstance(decoded, Mapping):
                return f"decode returns {type_name(decoded)}, but must return a dict of arrays"
            return {str(name): np.asarray(value) for name, value in decoded.items()}
        except Exception as error:
            # a user's function may raise anything; the error names the record
            return f"decode raises {first_line(error)}"

    def read_record(
        self, raw: bytes, into: dict[str, np.ndarray], at: int, bad: dict[int, str]
    ) -> None:
        """Store the arrays of one record in row `at`; if they are not those of the first, `bad`
        gets the reason.
        """
        decoded = self._decoded(raw)
        if isinstance(decoded, str):
            bad[at] = decoded
            return
        for name, field in self._decoded_fields.items():
            value, padded = decoded.get(name), self._pad.get(name)
            if value is None or (padded is None and Field(value.shape, value.dtype) != field):
                returned = "nothing"
                if value is not None:
                    returned = describe(value)
                bad[at] = (
                    f'decode returns {returned} for "{name}", but {field} for the first record; '
                    "pad=... pads arrays of different lengths"
                )
            elif padded is None:
                into[name][at] = value
            elif value.ndim != 1 or len(value) > padded.shape[0]:
                bad[at] = (
                    f'"{name}" has shape {list(value.shape)}, but is padded to [{padded.shape[0]}]'
                )
            elif len(value) and not _holds(padded.dtype, value):
                bad[at] = (
                    f'decode returns {value.dtype} for "{name}", with values that {padded.dtype} '
                    "cannot hold"
                )
            else:
                padded.store(name, value, into, at)


def _holds(dtype: np.dtype, values: np.ndarray) -> bool:
    """Return True if the dtype holds these numbers, up to rounding."""
    # For numpy, int64 to int32 is "same_kind", and wraps around; so integers are judged by value.
    if dtype.kind in "iu" and values.dtype.kind in "iu":
        least, most = limits(dtype)
        return bool(least <= values.min() and values.max() <= most)
    return np.can_cast(values.dtype, dtype, "same_kind")


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
    if decode is not None and not callable(decode):
        raise OptionError(
            f"decode is {type_name(decode)}.", fix="a function from bytes to a dict of arrays."
        )
    for name, feature in (pad or {}).items():
        if not isinstance(feature, Feature) or feature.fill is None:
            raise OptionError(
                f'pad: "{name}" is {feature!r}.', fix="spmd.data.padded(length, dtype)."
            )
    into: Decoder | Parser
    if decode is not None:
        into = Decoder(decode, pad or {})
    else:
        into = Parser(features or {})
    return Records(ArrayRecordFiles(find_files(files), into, skip=on_error == "skip"), reading)
