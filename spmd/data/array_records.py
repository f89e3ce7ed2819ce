"""ArrayRecord files as records, through grain: each is a string of bytes, and what it means is said by a function or by features."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.features import Feature, Parser
from spmd.data.number_parsing import limits
from spmd.data.record_index import find_files
from spmd.data.records import Field, FileFormat, ReadOptions, Records
from spmd.errors import DataError, OptionError, import_extra, type_name

LEARNED = 1000  # records, of which one has to be decoded


class ArrayRecordFiles(FileFormat):
    """Records of ArrayRecord files, one source of grain's for each file."""

    what = "ArrayRecord file"

    def __init__(self, paths: tuple[str, ...], into: "Decoder | Parser", *, skip: bool):
        sources = import_extra("grain", "data").sources
        self.paths, self._sources = paths, [_opened(sources.ArrayRecordDataSource, path) for path in paths]
        self.counts, self.sizes = [len(source) for source in self._sources], [Path(path).stat().st_size for path in paths]
        self._first, self._into = np.cumsum([0, *self.counts]), into
        if sum(self.counts):
            if isinstance(into, Decoder):
                self._learn(into, min(sum(self.counts), LEARNED if skip else 1))
            self.fields = into.fields()

    def _learn(self, into: "Decoder", most: int) -> None:
        """What records become, from the first; where those that cannot be read are skipped, from the first that can.

        Raises:
          DataError: none of so many can be read.
        """
        told = ""
        for record in range(most):
            bad: dict[int, str] = {}
            (raw,) = self._raw(np.array([record]), bad)
            why = bad[0] if raw is None else into.learn(raw)
            if not why:
                return
            told = told or f"{self.where(record)}: {why}"
        many = f" (None of the first {most} records can be read.)" if most > 1 else ""
        fix = 'a sound file, and a function from bytes to a dict of arrays; on_error="skip" leaves out records that are neither'
        raise DataError(f"{told}{many}", fix=f"{fix if most == 1 else fix.partition(';')[0]}.")

    def read(self, records: np.ndarray) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Records of a file together."""
        bad: dict[int, str] = {}
        leaves = {name: np.zeros((len(records), *field.shape), field.dtype) for name, field in self.fields.items()}
        raw = self._raw(records, bad)
        if isinstance(self._into, Decoder):
            for at, one in enumerate(raw):
                if one is not None:
                    self._into.read(one, leaves, at, bad)
            return leaves, bad
        lengths = np.array([-1 if one is None else len(one) for one in raw])
        for length in np.unique(lengths[lengths >= 0]).tolist():
            at = np.flatnonzero(lengths == length)
            rows = np.frombuffer(b"".join([raw[one] for one in at]), np.uint8).reshape(-1, length)  # type: ignore[misc]
            self._into.read(rows, leaves, at, bad)
        return leaves, bad

    def where(self, record: int) -> str:
        """The file and the number of the record in it."""
        file = int(np.searchsorted(self._first, record, "right")) - 1
        return f"{self.paths[file]}, record {record - self._first[file]}"

    def _raw(self, records: np.ndarray, bad: dict[int, str]) -> list[bytes | None]:
        files = np.searchsorted(self._first, records, "right") - 1
        found: list[bytes | None] = []
        for file in np.unique(files).tolist():
            rows = (records[files == file] - self._first[file]).tolist()
            try:
                found += self._sources[file].__getitems__(rows)
            except Exception:  # one of them is damaged: which one is found by reading each alone
                found += [self._alone(file, row, len(found) + at, bad) for at, row in enumerate(rows)]
        return found

    def _alone(self, file: int, row: int, at: int, bad: dict[int, str]) -> bytes | None:
        try:
            return self._sources[file][row]
        except Exception as error:
            bad[at] = f"it cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            return None


class Decoder:
    """A user's function from bytes to a dict of arrays, which has to give the same shapes for each record but where it is padded."""

    def __init__(self, function: Callable[[bytes], Mapping[str, Any]], pad: Mapping[str, Feature]):
        self._function, self._pad = function, dict(pad)
        self._fields: dict[str, Field] = {}

    def fields(self) -> dict[str, Field]:
        """What a record becomes."""
        padded = {name: field for one, feature in self._pad.items() for name, field in feature.fields(one).items()}
        return {**self._fields, **padded}

    def learn(self, raw: bytes) -> str:
        """Shapes and dtypes from a record; or what is wrong with it.

        Raises:
          OptionError: the function does not give what is to be padded.
        """
        found = self._decoded(raw)
        if isinstance(found, str):
            return found
        missing = [name for name in self._pad if name not in found]
        if missing:
            raise OptionError(f"pad names {', '.join(missing)}, and decode gives {', '.join(found)}.")
        strange = [f'{value.dtype} for "{name}"' for name, value in found.items() if value.dtype.kind in "OSUMmT"]
        if strange or not found:
            return f"decode gives {', '.join(strange) or 'nothing'}, which cannot go onto a device"
        self._fields = {name: Field(value.shape, value.dtype) for name, value in found.items()}
        return ""

    def _decoded(self, raw: bytes) -> dict[str, np.ndarray] | str:
        try:
            given = self._function(raw)
            if not isinstance(given, Mapping):
                return f"decode gives {type_name(given)}, and a dict of arrays is wanted"
            return {str(name): np.asarray(value) for name, value in given.items()}
        except Exception as error:  # whatever a user's function raises, the record is named
            return f"decode raises {type(error).__name__}: {error}"

    def read(self, raw: bytes, into: dict[str, np.ndarray], at: int, bad: dict[int, str]) -> None:
        """One record."""
        found = self._decoded(raw)
        if isinstance(found, str):
            bad[at] = found
            return
        for name, field in self._fields.items():
            value, padded = found.get(name), self._pad.get(name)
            if value is None or (padded is None and (value.shape != field.shape or value.dtype != field.dtype)):
                what = "nothing" if value is None else f"{value.dtype}{list(value.shape)}"
                bad[at] = f'decode gives {what} for "{name}", and {field} for the first record; pad=... makes one length of several'
            elif padded is None:
                into[name][at] = value
            elif value.ndim != 1 or len(value) > padded.shape[0]:
                bad[at] = f'"{name}" has shape {list(value.shape)}, and is padded to [{padded.shape[0]}]'
            elif len(value) and not _holds(padded.dtype, value):
                bad[at] = f'decode gives {value.dtype} for "{name}", of which {padded.dtype} does not hold all'
            else:
                into[name][at] = padded.fill
                into[name][at, : len(value)] = value
                into[f"{name}_mask"][at] = np.arange(padded.shape[0]) < len(value)


def _holds(dtype: np.dtype, values: np.ndarray) -> bool:
    """Whether numbers are what they were, up to rounding."""
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
    """Batches of the records of ArrayRecord files, for `fit` or a loop of one's own. Wants the extra `data`.

    Args:
      files: a pattern, a path, or several of them.
      batch_size: records of a batch, over all processes.
      decode: from the bytes of a record to a dict of arrays, alike for all records.
      features: in its place, where records are `tf.train.Example`: by name, `spmd.data.fixed` or `spmd.data.padded`.
      pad: by name, `spmd.data.padded(length, dtype)` for arrays of `decode` that have one dim of several lengths.
      shuffle: True, False, or a window of records that are mixed.
      seed: decides the order.
      workers: threads that read ahead; the batches do not depend on their number.
      on_error: "stop", or "skip" for leaving out records that cannot be read.

    Raises:
      DataError: no file, or one that is no ArrayRecord file.
      OptionError: neither or both of `decode` and `features`.

    Example:
      >>> import spmd
      >>> spmd.data.array_record("train-*.array_record", batch_size=128)
      Traceback (most recent call last):
      spmd.errors.OptionError: what the bytes of a record mean is not said.
          fix: decode=function, or features={...} where they are tf.train.Example.
    """
    if (decode is None) == (features is None):
        both = "decode and features are both given" if decode is not None else "what the bytes of a record mean is not said"
        raise OptionError(f"{both}.", fix="decode=function, or features={...} where they are tf.train.Example.")
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    skip = on_error == "skip"
    if features is not None:
        if pad:
            raise OptionError("pad belongs to decode.", fix="spmd.data.padded(...) among the features.")
        return Records(ArrayRecordFiles(find_files(files), Parser(features), skip=skip), reading)
    if not callable(decode):
        raise OptionError(f"decode is {type_name(decode)}.", fix="a function from bytes to a dict of arrays.")
    for name, one in (pad or {}).items():
        if not isinstance(one, Feature) or one.fill is None:
            raise OptionError(f'pad: "{name}" is {one!r}.', fix="spmd.data.padded(length, dtype).")
    return Records(ArrayRecordFiles(find_files(files), Decoder(decode, pad or {}), skip=skip), reading)


def _opened(source: Any, path: str) -> Any:
    try:
        return source(path)
    except Exception as error:
        raise DataError(f"{path} is no ArrayRecord file: {str(error).splitlines()[0] if str(error) else type(error).__name__}.") from error
