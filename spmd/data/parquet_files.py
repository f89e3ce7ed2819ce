"""Parquet files as records, through pyarrow."""

import collections
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.number_parsing import holds
from spmd.data.record_index import find_files
from spmd.data.records import Field, FileFormat, ReadOptions, Records
from spmd.errors import DataError, OptionError, did_you_mean, import_extra, type_name

KEPT = 32  # cached row groups: more than a window has runs
MISSING, BEYOND = 1, 2  # problems of a value


class ParquetFiles(FileFormat):
    """Rows of Parquet files; reads entire row groups and caches the latest."""

    what = "Parquet file"

    def __init__(self, paths: tuple[str, ...], columns: Sequence[str] | None, defaults: Mapping[str, Any]):
        types = import_extra("pyarrow.types", "parquet")
        self.paths, self.sizes = paths, [os.path.getsize(path) for path in paths]
        about = [self._opened(path) for path in paths]
        self.counts = [one.metadata.num_rows for one in about]
        self._groups = [(file, group) for file, one in enumerate(about) for group in range(one.metadata.num_row_groups)]
        sizes = [about[file].metadata.row_group(group).num_rows for file, group in self._groups]
        self._first, self._files = np.cumsum([0, *sizes]), np.cumsum([0, *self.counts])
        schema = about[0].schema_arrow
        for path, one in zip(paths, about, strict=True):
            if not one.schema_arrow.equals(schema):
                raise DataError(
                    f"{path} has columns {_schema_text(one.schema_arrow)}; {paths[0]} has {_schema_text(schema)}.",
                    fix="files of one schema.",
                )
            one.close()
        for name in (*(columns or ()), *defaults):
            if name not in schema.names:
                raise OptionError(f'there is no column "{name}".', fix=f"{did_you_mean(str(name), schema.names)}")
        self.fields = {name: _field(name, schema.field(name).type, types) for name in columns or schema.names}
        for name, value in defaults.items():
            if name in self.fields and self.fields[name].shape:
                fix = 'on_error="skip", which leaves out rows without a value'
                raise OptionError(f'defaults: column "{name}" holds lists, for which there is no default.', fix=f"{fix}.")
            if name in self.fields and not holds(self.fields[name].dtype, value):
                raise OptionError(
                    f'defaults: "{name}" is {value!r}, and the column is {self.fields[name].dtype}.', fix="a number that it holds."
                )
        self._defaults = {name: self.fields[name].dtype.type(value).item() for name, value in defaults.items() if name in self.fields}
        self._forget()

    def _forget(self) -> None:
        self._kept: collections.OrderedDict[int, tuple] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("_kept", "_lock")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._forget()

    def read(self, records: np.ndarray) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Reads the rows of each row group together."""
        leaves = {name: np.zeros((len(records), *field.shape), field.dtype) for name, field in self.fields.items()}
        bad: dict[int, str] = {}
        groups = np.searchsorted(self._first, records, "right") - 1
        for group in np.unique(groups).tolist():
            at = np.flatnonzero(groups == group)
            rows = records[at] - self._first[group]
            try:
                values, wrong = self._group(group)
            except (OSError, ValueError) as error:  # what pyarrow raises for damaged pages
                bad |= {int(one): f"its row group cannot be read: {str(error).splitlines()[0]}" for one in at}
                continue
            for name, field in self.fields.items():
                leaves[name][at] = values[name][rows]
                reasons = {MISSING: "no value", BEYOND: f"a number that {field.dtype} does not hold"}
                found = wrong[name][rows]
                bad |= {int(at[one]): f'column "{name}" has {reasons[int(found[one])]}' for one in np.flatnonzero(found)}
        return leaves, bad

    def where(self, record: int) -> str:
        """The file and the number of the row in it."""
        file = int(np.searchsorted(self._files, record, "right")) - 1
        return f"{self.paths[file]}, row {record - self._files[file]}"

    def _opened(self, path: str) -> Any:
        arrow = import_extra("pyarrow.parquet", "parquet")
        try:
            return arrow.ParquetFile(path, page_checksum_verification=True)
        except Exception as error:
            raise DataError(f"{path} is no Parquet file: {str(error).rstrip('.')}.", fix="the file as it was written.") from error

    def _group(self, group: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        with self._lock:
            if group in self._kept:
                self._kept.move_to_end(group)
                return self._kept[group]
        file, number = self._groups[group]
        with self._opened(self.paths[file]) as opened:
            table = opened.read_row_group(number, columns=list(self.fields))
        if len(table) != self._first[group + 1] - self._first[group]:
            raise DataError(f"{self.paths[file]} has changed since it was opened.", fix="files that do not change.")
        values, wrong = {}, {}
        for name, field in self.fields.items():
            column = table.column(name).combine_chunks()
            if field.shape:
                found, missing = _lists(column, field)
            else:
                missing = np.asarray(column.is_null())
                filled = column.fill_null(self._defaults.get(name, field.dtype.type(0).item())) if missing.any() else column
                found = filled.to_numpy(zero_copy_only=False)
                missing = np.zeros_like(missing) if name in self._defaults else missing
            with np.errstate(over="ignore"):
                values[name] = found.astype(field.dtype)
            beyond = np.isinf(values[name]) & np.isfinite(found) if field.dtype != found.dtype else np.zeros(found.shape, bool)
            wrong[name] = np.where(missing, MISSING, np.where(beyond.reshape(len(missing), -1).any(axis=1), BEYOND, 0))
        with self._lock:
            self._kept[group] = (values, wrong)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return values, wrong


def _lists(column: Any, field: Field) -> tuple[np.ndarray, np.ndarray]:
    """Lists of one length [rows, length], and bool[rows]: which of them are missing or lack a number."""
    rows, length = len(column), field.shape[0]
    numbers = column.values.slice(column.offset * length, rows * length)  # keeps the places of missing lists, which flatten drops
    lack = np.asarray(numbers.is_null())
    missing = np.asarray(column.is_null()) | lack.reshape(rows, length).any(axis=1)
    filled = numbers.fill_null(0) if lack.any() else numbers
    return filled.to_numpy(zero_copy_only=False).reshape(rows, length), missing


def _schema_text(schema: Any) -> str:
    few = [f"{one.name} {one.type}{'' if one.nullable else ' not null'}" for one in schema][:8]
    return ", ".join(few) + (f" and {len(schema) - 8} more" if len(schema) > 8 else "")


def _field(name: str, given: Any, types: Any) -> Field:
    shape, kind = ((given.list_size,), given.value_type) if types.is_fixed_size_list(given) else ((), given)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        fix = "columns=[...] without it; or numbers, or lists of one length, in its place"
        raise DataError(f'column "{name}" is {given}, which cannot be placed on a device.', fix=f"{fix}.")
    dtype = np.dtype(kind.to_pandas_dtype())
    return Field(shape, np.dtype(np.float32) if dtype == np.float64 else dtype)


def parquet(
    files: str | Path | Sequence[str | Path],
    *,
    batch_size: int,
    columns: Sequence[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    shuffle: bool | int = True,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "stop",
) -> Records:
    """Batches of the rows of Parquet files: columns of numbers, and of lists of one length. Needs the extra `parquet`.

    Entire row groups are read, and 32 are cached. If there are more, a window (`shuffle=10_000`) reads each once in an epoch;
    shuffle=True reads them repeatedly.

    Args:
      files: a pattern, a path, or several of them.
      batch_size: rows of a batch, over all processes.
      columns: which are read; None: all.
      defaults: by column of numbers, what stands for a missing value. Without one such a value is an error.
      shuffle: True, False, or a window of rows that are mixed.
      seed: decides the order.
      workers: threads that read ahead; the batches do not depend on their number.
      on_error: "stop", or "skip" for leaving out rows that cannot be read.

    Raises:
      DataError: no file, one that is no Parquet file, or a column that holds no numbers.
      OptionError: a column that is not there, or a default for one of lists.
    """
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    names = columns if isinstance(columns, Sequence) and not isinstance(columns, str) else ()
    if columns is not None and (not names or len(set(map(str, names))) < len(names)):
        raise OptionError(f"columns={columns!r}.", fix="a list of names, each once.")
    if defaults is not None and not isinstance(defaults, Mapping):
        raise OptionError(f"defaults={defaults!r} is {type_name(defaults)}.", fix="a dict, by column.")
    return Records(ParquetFiles(find_files(files), columns, defaults or {}), reading)
