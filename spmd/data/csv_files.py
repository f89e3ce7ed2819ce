"""Records of CSV files: the header is read, types are inferred, and errors name the line."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data import csv_grammar
from spmd.data.csv_checks import check_default, check_names, check_options, header_of, is_a
from spmd.data.csv_grammar import Cells
from spmd.data.number_parsing import holds, limits
from spmd.data.record_index import RecordIndex, check_uncompressed, find_files
from spmd.data.records import Field, FileFormat, ReadOptions, Records
from spmd.errors import DataError, OptionError, did_you_mean, join_names

LOOKED_AT = 1000  # records, from which types are inferred
SHOWN = 80  # letters of a field, in an error
BLOCK = 1024  # columns whose types are inferred together


@dataclasses.dataclass(frozen=True)
class Column:
    """A column that is read: its position in a line, its dtype, and the value of a field without
    text; or the number of each word of a category.
    """

    name: str
    at: int
    dtype: np.dtype
    default: Any = None
    words: dict[str, int] | None = None

    def value(self, text: str) -> Any:
        """Return the value of one field.

        Raises:
          ValueError: the text means nothing, or too much for the dtype; in words.
        """
        if not text.strip():
            if self.default is None:
                raise ValueError(
                    f'column "{self.name}" has no value; defaults={{"{self.name}": ...}} would '
                    "give it one"
                )
            return self.default
        if self.words is None:
            return self._number(text)
        if text not in self.words:
            raise ValueError(
                f'column "{self.name}" has {_short(repr(text))}, which is none of '
                f"{join_names(self.words)}"
            )
        return self.words[text]

    def _number(self, text: str) -> float:
        """Return the number of one field.

        Raises:
          ValueError: the text is none, or one that the dtype does not hold.
        """
        is_float = self.dtype.kind == "f"
        try:
            value = self._kind()(text)
        except ValueError:
            number, hint = "a number", ""
            if not is_float:
                number = "a whole number"
            if not is_float and is_a(float, text):
                hint = f'; types={{"{self.name}": "float32"}} would read numbers'
            raise ValueError(
                f'column "{self.name}" has {_short(repr(text))}, which is not {number}{hint}'
            ) from None
        # float() makes inf of `1e999` without an error. The words `inf` and `nan` have no digit.
        if isinstance(value, float) and math.isinf(value) and any(map(str.isdigit, text)):
            raise ValueError(
                f'column "{self.name}" has {_short(text)}, which no floating number holds'
            )
        if not holds(self.dtype, value):
            kinds = ("int64", "uint64", "float32", "float64")
            if is_float:
                kinds = ("float32", "float64")
            hint = ""
            for kind in kinds:
                if holds(np.dtype(kind), value):
                    hint = f'; types={{"{self.name}": "{kind}"}} would'
                    break
            raise ValueError(
                f'column "{self.name}" has {_short(text)}, which {self.dtype} does not hold{hint}'
            )
        return value

    def _kind(self) -> Callable[[str], float]:
        if self.dtype.kind == "f":
            return float
        return int


class CsvFiles(FileFormat):
    """Records of CSV files: each a line, or several where a field in quotes has line breaks."""

    file_kind = "CSV file"

    def __init__(
        self,
        offsets: RecordIndex,
        separator: str,
        names: list[str],
        groups: dict[str, Column | list[Column]],
    ):
        self.paths, self.counts, self.sizes = offsets.paths, offsets.counts, offsets.sizes
        self._offsets, self._separator = offsets, separator
        self._names, self._groups = names, groups
        # columns of one dtype, which are parsed together; columns of words in other blocks
        self._blocks: dict[tuple[np.dtype, bool], list[Column]] = {}
        columns: dict[str, Column] = {}
        for group in groups.values():
            if isinstance(group, Column):
                group = [group]
            columns |= {column.name: column for column in group}
        for column in columns.values():
            self._blocks.setdefault((column.dtype, column.words is not None), []).append(column)
        self.fields = {name: _field(group) for name, group in groups.items()}

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Plain numbers of all rows and columns at once; other fields one by one."""
        raw, starts, ends = self._offsets.read_bytes(records)
        cells = Cells(raw, starts, ends, self._separator, len(self._names))
        for at, count in cells.odd.items():
            bad[at] = f"{count} fields, and there are {len(self._names)} columns"
        columns: dict[str, np.ndarray] = {}
        wrong: dict[int, dict[int, str]] = {}  # by row and column
        for (dtype, worded), block in self._blocks.items():
            shape = (len(block), len(cells.rows))
            values, sound = np.zeros(shape, dtype), np.zeros(shape, bool)
            if not worded:
                values, sound = _numbers(dtype, *cells.decimals([column.at for column in block]))
            for number, row in np.argwhere(~sound).tolist():
                column = block[number]
                try:
                    text = cells.field(row, column.at).decode("utf-8")
                    values[number, row] = column.value(text)
                except ValueError as error:  # also a text that is not UTF-8
                    wrong.setdefault(int(cells.rows[row]), {})[column.at] = str(error)
            columns |= zip([column.name for column in block], values, strict=True)
        # the reason of the first column counts
        bad |= {at: reasons[min(reasons)] for at, reasons in wrong.items()}
        rows: Any = slice(None)
        if cells.odd:
            rows = cells.rows
        for name, group in self._groups.items():
            if isinstance(group, Column):
                leaves[name][rows] = columns[group.name]
                continue
            for place, column in enumerate(group):
                leaves[name][rows, place] = columns[column.name]

    def where(self, record: int) -> str:
        """The file and the line."""
        path, _, start = self._offsets.place(record)
        return f"{path}, line {csv_grammar.line(path, start)}"


def csv(
    files: str | Path | Sequence[str | Path],
    *,
    batch_size: int,
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    defaults: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    names: Sequence[str] | None = None,
    separator: str = ",",
    shuffle: bool | int = True,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "stop",
    index: str | Path | None = None,
) -> Records:
    """Batches of the rows of CSV files, for `fit` or a loop of one's own.

    The files have one header, which names the columns. Types are inferred from the first records:
    int32, else float32; `print` shows them. Where each record begins is found once, by reading the
    files through.

    Args:
      files: a pattern, a path, or several of them.
      batch_size: rows of a batch, over all processes.
      columns: which are read, each an array [rows]; or by the name of an array, its column, or
        several for [rows, columns]. None: all.
      defaults: by column, what stands for a field without text. Without one such a field is an
        error.
      types: by column, a dtype in place of the one that is inferred.
      categories: by column, the words it has; each becomes its number among them, int32.
      names: of the columns, where the files have no header.
      separator: one letter.
      shuffle: True, False, or the size of a window within which records are shuffled.
      seed: determines the order.
      workers: threads that read and decode ahead; the batches do not depend on their number.
      on_error: "stop", or "skip" to leave out records that cannot be read.
      index: a folder that stores where records begin, so that the next run need not look for them.
        None: nothing is written.

    Returns:
      A `spmd.data.Records`: an iterable of batches, dicts of arrays [rows, ...].

    Raises:
      DataError: no file, headers that differ, a type that cannot be inferred, a quote that is not
        closed.
      OptionError: a column that is not there, or an option out of range.

    Example:
      >>> import spmd, tempfile, pathlib
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "a.csv"
      >>> _ = file.write_text("age,height,kind\\n30,1.7,cat\\n,1.5,dog\\n")
      >>> data = spmd.data.csv(
      ...     file,
      ...     batch_size=2,
      ...     defaults={"age": 0},
      ...     categories={"kind": ["cat", "dog"]},
      ...     shuffle=False,
      ... )
      >>> data
      2 records of 1 CSV file in 1 batches of 2
          age     int32[]
          height  float32[]
          kind    int32[]
      >>> batch = next(iter(data))
      >>> batch["age"], batch["height"]
      (array([30,  0], dtype=int32), array([1.7, 1.5], dtype=float32))
      >>> batch["kind"]
      array([0, 1], dtype=int32)
    """
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    # One byte, because the grammar compares single bytes.
    if not isinstance(separator, str) or len(separator.encode()) != 1 or separator in '"\r\n':
        raise OptionError(f"separator={separator!r}.", fix="one letter, such as ',' or ';'.")
    check_options(columns, names, {"defaults": defaults, "types": types, "categories": categories})
    options = {
        "defaults": dict(defaults or {}),
        "types": dict(types or {}),
        "categories": dict(categories or {}),
    }
    paths = find_files(files)
    for path in paths:
        check_uncompressed(path)
    if names is None:
        header = header_of(paths, separator, chosen=columns is not None)
    else:
        header = list(names)
    offsets = RecordIndex(
        paths,
        lambda path: _scan(path, separator, header=names is None),
        # 3 is the version of the grammar: an index that an older version built is not used.
        f"csv 3 {names is None} {separator}",
        index,
    )
    if not len(offsets):
        raise DataError(
            f"no CSV file has a record below its header: {join_names(paths)}.",
            fix="look at what they were written from.",
        )
    sources = columns
    if not isinstance(sources, Mapping):
        names_read = header
        if columns is not None:
            names_read = list(columns)
        sources = {name: name for name in names_read}
    groups: dict[str, list[str]] = {}
    for name, source in sources.items():
        if isinstance(source, str):
            source = [source]
        groups[name] = list(source)
    check_names(header, groups, options)
    chosen = dict.fromkeys(itertools.chain.from_iterable(groups.values()))
    by_name = _columns(offsets, separator, header, chosen, **options)
    arrays: dict[str, Column | list[Column]] = {}
    for name, source in sources.items():
        if isinstance(source, str):
            arrays[name] = by_name[source]
        else:
            arrays[name] = [by_name[column] for column in source]
    return Records(CsvFiles(offsets, separator, header, arrays), reading)


def _columns(
    offsets: RecordIndex,
    separator: str,
    header: list[str],
    names: Collection[str],
    *,
    defaults: dict,
    types: dict,
    categories: dict,
) -> dict[str, Column]:
    """Return the columns, from the first records and the user's options."""
    first_records = offsets.read_bytes(np.arange(min(LOOKED_AT, len(offsets))))
    cells = Cells(*first_records, separator, len(header))
    at = {name: number for number, name in enumerate(header)}
    unknown = {name: at[name] for name in names if name not in types and name not in categories}
    dtypes: dict[str, Any] = dict(_inferred(cells, unknown, offsets.paths[0], wide=len(header)))
    dtypes |= types
    columns = {}
    for name in names:
        default = defaults.get(name)
        if name in categories:
            words = {word: number for number, word in enumerate(categories[name])}
            if default is not None and default not in words:
                raise OptionError(
                    f'defaults: "{name}" is {default!r}, which is none of the categories.',
                    fix=did_you_mean(str(default), words),
                )
            if default is not None:
                default = words[default]
            columns[name] = Column(name, at[name], np.dtype(np.int32), default, words)
            continue
        try:
            dtype = np.dtype(dtypes[name])
        except TypeError as error:
            raise OptionError(
                f'types: "{name}" is {types[name]!r}: {error}.', fix='such as "float32" or "int32".'
            ) from None
        if dtype.kind not in "iuf":
            raise OptionError(
                f'types: "{name}" is {dtype}: a column is read as integers or floats.',
                fix='such as "float32" or "int32".',
            )
        if default is not None:
            check_default(name, default, dtype)
        columns[name] = Column(name, at[name], dtype, default)
    return columns


def _inferred(
    cells: Cells, columns: dict[str, int], path: str, *, wide: int
) -> dict[str, np.dtype]:
    """The dtypes of columns by name; a wrong number of fields is reported when the record is
    read.
    """
    names, dtypes = list(columns), {}
    # Blocks bound the memory for a file with many columns.
    for first in range(0, len(names), BLOCK):
        block = names[first : first + BLOCK]
        places = [columns[name] for name in block]
        values, is_integer, sound = cells.decimals(places)
        is_empty = cells.lengths(places) == 0
        plain = (sound | is_empty).all(axis=1)
        # Of booleans, a <= b is "a implies b".
        small = (sound <= is_integer) & (values >= -(2**31)) & (values < 2**31)
        for at, name in enumerate(block):
            if plain[at] and sound[at].any() and small[at].all():
                dtypes[name] = np.dtype(np.int32)
            elif plain[at] and not (sound[at] <= is_integer[at]).all():
                dtypes[name] = np.dtype(np.float32)
            else:
                # Bytes that are not UTF-8 are an error of their record, when it is read.
                texts = []
                for row in range(len(cells.rows)):
                    text = cells.field(row, columns[name]).decode("utf-8", "replace")
                    if text.strip():
                        texts.append(text)
                dtypes[name] = _dtype(name, texts, path, alone=wide == 1)
    return dtypes


def _dtype(name: str, texts: list[str], path: str, *, alone: bool) -> np.dtype:
    """The dtype of one column, from fields that hold something."""
    if texts and all(is_a(int, text) for text in texts):
        if all(-(2**31) <= int(text) < 2**31 for text in texts):
            return np.dtype(np.int32)
        return np.dtype(np.int64)
    odd = [text for text in texts if not is_a(float, text)]
    if odd and len(odd) == len(texts):
        words = sorted(set(odd))
        fix = "columns=[...] without it"
        if len(words) < 10:
            fix = f'categories={{"{name}": {words!r}}}, {fix}'
        separators = [letter for letter in ";\t|" if letter in name and alone]
        if separators:
            fix = f"separator={separators[0]!r}"
        raise DataError(
            f'column "{name}" holds text, such as {odd[0]!r}, and no numbers ({path}).',
            fix=f"{fix}.",
        )
    return np.dtype(np.float32)


def _numbers(
    dtype: np.dtype, values: np.ndarray, is_integer: np.ndarray, sound: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers in a dtype, and which of them it holds."""
    if dtype.kind != "f":
        least, most = limits(dtype)
        sound = sound & is_integer & (values >= least) & (values <= most)
        values = np.where(sound, values, 0)
    # A number beyond float32 becomes inf, of which numpy would warn; it is refused below.
    with np.errstate(over="ignore"):
        values = values.astype(dtype)
    if dtype.kind == "f":
        sound = sound & ~np.isinf(values)
    return values, sound


def _scan(path: str, separator: str, *, header: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return where records begin and end, without the header.

    Raises:
      DataError: a quote that is not closed.
    """
    blocks = [np.stack(edges) for edges in csv_grammar.records(path, separator)]
    # The empty array is for files without a record: numpy cannot concatenate nothing.
    starts, ends = np.concatenate([np.zeros((2, 0), np.int64), *blocks], axis=1)
    return starts[header:], ends[header:]


def _short(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return f"{text[:SHOWN]}... ({len(text):,} letters)"


def _field(group: Column | list[Column]) -> Field:
    if isinstance(group, Column):
        return Field((), group.dtype)
    dtype = group[0].dtype
    if any(column.dtype != dtype for column in group):
        dtype = np.dtype(np.float32)
    return Field((len(group),), dtype)
