"""Parquet files as records, through pyarrow."""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.number_parsing import holds
from spmd.data.record_index import find_files
from spmd.data.records import Field, FileFormat, ReadOptions, Records
from spmd.errors import (
    DataError,
    OptionError,
    did_you_mean,
    first_line,
    import_extra,
    join_names,
    option,
    quoted,
    type_name,
)

CACHED = 32  # row groups: more than a window has runs
MISSING, BEYOND, LENGTH = 1, 2, 3  # problems of a value


class ParquetFiles(FileFormat):
    """Rows of Parquet files; reads entire row groups and caches the latest."""

    file_kind, record_kind = "Parquet file", "row"

    def __init__(
        self, paths: tuple[str, ...], columns: Sequence[str] | None, defaults: Mapping[str, Any]
    ):
        types = import_extra("pyarrow.types", "parquet")
        self.paths, self.sizes = paths, [os.path.getsize(path) for path in paths]
        files = [open_parquet(path) for path in paths]
        self.counts = [file.metadata.num_rows for file in files]
        self._groups = []
        for path, file in zip(paths, files, strict=True):
            for group in range(file.num_row_groups):
                self._groups.append((path, group, file.metadata.row_group(group).num_rows))
        self._first = np.cumsum([0, *(rows for _, _, rows in self._groups)])
        schema = files[0].schema_arrow
        for path, file in zip(paths, files, strict=True):
            # `equals` ignores the metadata, in which pandas keeps the number of rows of each file.
            if not file.schema_arrow.equals(schema):
                columns_text = (
                    f"columns {_schema_text(file.schema_arrow)}; {paths[0]} has "
                    f"{_schema_text(schema)}"
                )
                raise DataError(f"{path} has {columns_text}.", fix="files of one schema.")
            file.close()
        for name in (*(columns or ()), *defaults):
            if name not in schema.names:
                raise OptionError(
                    f'there is no column "{name}".', fix=f"{did_you_mean(str(name), schema.names)}"
                )
        kinds = {name: schema.field(name).type for name in columns or schema.names}
        lengths = {}
        for name, kind in kinds.items():
            if types.is_list(kind) or types.is_large_list(kind):
                lengths[name] = _list_length(paths, name)
        self.fields = {
            name: _field(name, kind, types, lengths.get(name)) for name, kind in kinds.items()
        }
        for name, value in defaults.items():
            if name in self.fields and self.fields[name].shape:
                fix = f"{option('on_error', quoted('skip'))}, which leaves out rows without a value"
                raise OptionError(
                    f'defaults: column "{name}" holds lists, for which there is no default.',
                    fix=f"{fix}.",
                )
            if name in self.fields and not holds(self.fields[name].dtype, value):
                dtype = self.fields[name].dtype
                raise OptionError(
                    f'defaults: "{name}" is {value!r}, and the column is {dtype}.',
                    fix="a number that it holds.",
                )
        self._defaults = {}
        for name, value in defaults.items():
            if name in self.fields:
                as_number = self.fields[name].dtype.type
                self._defaults[name] = as_number(value).item()

    @functools.cached_property
    def _row_group(
        self,
    ) -> Callable[[str, int, int], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        return functools.lru_cache(CACHED)(
            functools.partial(_read_row_group, fields=self.fields, defaults=self._defaults)
        )

    # a cache cannot be pickled; a copy for another process begins with an empty one
    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_row_group"}

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Read the rows of each row group together."""
        groups = np.searchsorted(self._first, records, "right") - 1
        for group in np.unique(groups).tolist():
            at = np.flatnonzero(groups == group)
            rows = records[at] - self._first[group]
            try:
                values, wrong = self._row_group(*self._groups[group])
            except (OSError, ValueError) as error:  # what pyarrow raises for damaged pages
                bad |= dict.fromkeys(
                    at.tolist(), f"its row group cannot be read: {first_line(error)}"
                )
                continue
            for name, field in self.fields.items():
                leaves[name][at] = values[name][rows]
                reasons = {
                    MISSING: "no value",
                    BEYOND: f"a number that {field.dtype} does not hold",
                    LENGTH: f"a list that is not of length {math.prod(field.shape)}",
                }
                problems = wrong[name][rows]
                for row in np.flatnonzero(problems):
                    bad[int(at[row])] = f'column "{name}" has {reasons[int(problems[row])]}'


def open_parquet(path: str) -> Any:
    """Open a Parquet file.

    Raises:
      DataError: it is none.
    """
    arrow = import_extra("pyarrow.parquet", "parquet")
    try:
        # pyarrow (26) ignores the checksums of pages unless it is asked to verify them.
        return arrow.ParquetFile(path, page_checksum_verification=True)
    except Exception as error:
        raise DataError(
            f"{path} is no Parquet file: {str(error).rstrip('.')}.",
            fix="the file as it was written.",
        ) from error


def _read_row_group(
    path: str, group: int, rows: int, *, fields: Mapping[str, Field], defaults: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return by column the values [rows, ...] of a row group, and int[rows]: the problem of each
    row, 0 if it has none.
    """
    with open_parquet(path) as file:
        table = file.read_row_group(group, columns=list(fields))
    if len(table) != rows:
        raise DataError(f"{path} has changed since it was opened.", fix="files that do not change.")
    values, wrong = {}, {}
    for name, field in fields.items():
        # A ChunkedArray has neither `offsets` nor `values`.
        column = table.column(name).combine_chunks()
        if field.shape:
            stored, problems = _lists(column, field)
        else:
            missing = np.asarray(column.is_null())
            # with nulls, pyarrow would make floats of integers
            if missing.any():
                column = column.fill_null(defaults.get(name, field.dtype.type(0).item()))
            # Arrow keeps booleans as bits, of which numpy can have no view.
            stored = column.to_numpy(zero_copy_only=False)
            problems = np.where(missing & (name not in defaults), MISSING, 0)
        # float64 beyond float32 becomes inf, of which numpy would warn; it is found below.
        with np.errstate(over="ignore"):
            values[name] = stored.astype(field.dtype)
        if field.dtype != stored.dtype:
            beyond = np.isinf(values[name]) & np.isfinite(stored)
            beyond_rows = beyond.reshape(len(problems), -1).any(axis=1)
            problems = np.where((problems == 0) & beyond_rows, BEYOND, problems)
        wrong[name] = problems
    return values, wrong


def _lists(column: Any, field: Field) -> tuple[np.ndarray, np.ndarray]:
    """Return lists of one length [rows, length], and int[rows]: the problem of each, 0 if it has
    none.
    """
    rows, length = len(column), field.shape[0]
    if not hasattr(column.type, "list_size"):  # lists that are of one length, and do not have to be
        return _equal_lists(column, length)
    # keeps the places of missing lists, which flatten drops
    numbers = column.values.slice(column.offset * length, rows * length)
    is_null = np.asarray(numbers.is_null())
    missing = np.asarray(column.is_null()) | is_null.reshape(rows, length).any(axis=1)
    values = _without_nulls(numbers).reshape(rows, length)
    return values, np.where(missing, MISSING, 0)


def _equal_lists(column: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lists whose lengths may differ, as `_lists` does."""
    # Offsets are positions in `values`, which holds the entire column even where this array is a
    # slice of it.
    offsets, numbers = np.asarray(column.offsets), column.values
    problems = np.where(np.diff(offsets) == length, 0, LENGTH)
    problems[np.asarray(column.is_null())] = MISSING
    values = _without_nulls(numbers)
    stored = np.zeros((len(column), length), values.dtype)
    of_length = problems == 0
    at = offsets[:-1][of_length, None] + np.arange(length)
    stored[of_length] = values[at]
    is_null = np.asarray(numbers.is_null())
    problems[of_length] = np.where(is_null[at].any(axis=1), MISSING, 0)
    return stored, problems


def _without_nulls(numbers: Any) -> np.ndarray:
    """Return the numbers of an Arrow array, with 0 for nulls, which would make floats of
    integers.
    """
    if numbers.null_count:
        numbers = numbers.fill_null(0)
    return numbers.to_numpy(zero_copy_only=False)


def _schema_text(schema: Any) -> str:
    columns = []
    for column in schema:
        text = f"{column.name} {column.type}"
        if not column.nullable:
            text += " not null"
        columns.append(text)
    return join_names(columns)


def _list_length(paths: Sequence[str], name: str) -> int | None:
    """The length of the lists of a column, in the first row group that has some; None if there are
    several.
    """
    compute = import_extra("pyarrow.compute", "parquet")
    for path in paths:
        with open_parquet(path) as file:
            for group in range(file.num_row_groups):
                column = file.read_row_group(group, columns=[name]).column(0)
                lengths = compute.unique(compute.drop_null(compute.list_value_length(column)))
                if len(lengths) == 1:
                    return lengths[0].as_py()
                if len(lengths):
                    return None
    return None


def _field(name: str, arrow_type: Any, types: Any, length: int | None = None) -> Field:
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        if length is None:
            fix = (
                "lists of one length, at least one of them in the first row group; or "
                "columns=[...] without it"
            )
            raise DataError(
                f'column "{name}" is {arrow_type}, and its lists are of several lengths.',
                fix=f"{fix}.",
            )
        shape, kind = (length,), arrow_type.value_type
    elif types.is_fixed_size_list(arrow_type):
        shape, kind = (arrow_type.list_size,), arrow_type.value_type
    else:
        shape, kind = (), arrow_type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        fix = "columns=[...] without it; or numbers, or lists of one length, in its place"
        raise DataError(
            f'column "{name}" is {arrow_type}, which cannot be placed on a device.', fix=f"{fix}."
        )
    dtype = np.dtype(kind.to_pandas_dtype())
    if dtype == np.float64:
        dtype = np.dtype(np.float32)
    return Field(shape, dtype)


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
    """Batches of the rows of Parquet files: columns of numbers, and of lists of one length. Needs
    the extra `parquet`.

    Entire row groups are read, and 32 are cached. If there are more, a window (`shuffle=10_000`)
    reads each once in an epoch; shuffle=True reads them repeatedly.

    Args:
      files: a pattern, a path, or several of them.
      batch_size: rows of a batch, over all processes.
      columns: which are read; None: all.
      defaults: by column of numbers, what stands for a missing value. Without one such a value is
        an error.
      shuffle, seed, workers, on_error: as in `spmd.data.csv`.

    Returns:
      A `spmd.data.Records`: an iterable of batches, dicts of arrays [rows, ...].

    Raises:
      DataError: no file, one that is no Parquet file, or a column that holds no numbers.
      OptionError: a column that is not there, or a default for one of lists.

    Example:
      >>> import pathlib, pyarrow, pyarrow.parquet, spmd, tempfile
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "a.parquet"
      >>> pyarrow.parquet.write_table(pyarrow.table({"x": [1.0, 2.0], "y": [0, 1]}), file)
      >>> next(iter(spmd.data.parquet(file, batch_size=2, shuffle=False)))["y"].tolist()
      [0, 1]
    """
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    names: Sequence[str] = ()
    if isinstance(columns, Sequence) and not isinstance(columns, str):
        names = columns
    if columns is not None and (not names or len(set(map(str, names))) < len(names)):
        raise OptionError(f"columns={columns!r}.", fix="a list of names, each once.")
    if defaults is not None and not isinstance(defaults, Mapping):
        raise OptionError(
            f"defaults={defaults!r} is {type_name(defaults)}.", fix="a dict, by column."
        )
    return Records(ParquetFiles(find_files(files), columns, defaults or {}), reading)
