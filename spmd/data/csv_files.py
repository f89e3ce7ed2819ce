"""CSV files as records: the header is read, types are inferred, and what is wrong is told with its line."""

import codecs
import csv as rows_of
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.csv_checks import check_default, check_names, check_options, check_unpacked, few, header_of, is_a
from spmd.data.numerals import decimals, holds, limits
from spmd.data.offsets import CHUNK, Offsets, found
from spmd.data.records import Field, Format, Reading, Records
from spmd.errors import DataError, OptionError

LOOKED_AT = 1000  # records, from which types are inferred
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'


@dataclasses.dataclass(frozen=True)
class Column:
    """A column that is read: where it stands in a line, what its text becomes, and what stands for a field without text."""

    name: str
    at: int
    dtype: np.dtype
    default: Any = None
    words: dict[str, int] | None = None

    def value(self, text: str) -> Any:
        """One field.

        Raises:
          ValueError: the text means nothing, or too much for the dtype; in words.
        """
        if not text.strip():
            if self.default is None:
                raise ValueError(f'column "{self.name}" has no value; defaults={{"{self.name}": ...}} would give it one')
            return self.default
        if self.words is not None:
            if text not in self.words:
                raise ValueError(f'column "{self.name}" has {text!r}, which is none of {few(self.words)}')
            return self.words[text]
        try:
            value = float(text) if self.dtype.kind == "f" else int(text)
        except ValueError:
            number = "a number" if self.dtype.kind == "f" else "a whole number"
            hint = f'; types={{"{self.name}": "float32"}} would read numbers' if self.dtype.kind != "f" and is_a(float, text) else ""
            raise ValueError(f'column "{self.name}" has {text!r}, which is not {number}{hint}') from None
        if not holds(self.dtype, value):
            kinds = ("float32", "float64") if self.dtype.kind == "f" else ("int64", "uint64", "float32", "float64")
            wider = next((one for one in kinds if holds(np.dtype(one), value)), None)
            hint = f'; types={{"{self.name}": "{wider}"}} would' if wider else ""
            raise ValueError(f'column "{self.name}" has {text}, which {self.dtype} does not hold{hint}')
        return value


class CsvFiles(Format):
    """Records of CSV files: each a line, or several where a field in quotes has line breaks."""

    what = "CSV file"

    def __init__(self, offsets: Offsets, separator: str, names: list[str], groups: dict[str, Column | list[Column]]):
        self.paths, self.counts, self.bytes = offsets.paths, offsets.counts, sum(offsets.sizes)
        self._offsets, self._separator, self._names, self._groups = offsets, separator, names, groups
        self._columns = [column for group in groups.values() for column in (group if isinstance(group, list) else [group])]
        self.fields = {name: _field(group) for name, group in groups.items()}

    def read(self, records: np.ndarray) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Numbers of all rows at once, where lines are regular; field by field where there are quotes, or something is wrong."""
        raw, starts, ends = self._offsets.read(records, end=b"\n")
        text = np.frombuffer(raw, np.uint8)
        cells = self._cells(raw, text, len(records))
        columns: dict[str, np.ndarray] = {}
        bad: dict[int, str] = {}
        if cells is None:
            rows = [self._row(raw[start:end], bad, at) for at, (start, end) in enumerate(zip(starts, ends, strict=True))]
            for column in self._columns:
                columns[column.name] = _values(column, [row[column.at] if row else None for row in rows], bad)
        else:
            starts, stops = (np.ascontiguousarray(edges[:, [column.at for column in self._columns]].T) for edges in cells)
            numbers = [at for at, column in enumerate(self._columns) if column.words is None]
            plain = decimals(text, starts[numbers].ravel(), stops[numbers].ravel())  # of all columns at once
            read = dict(zip(numbers, zip(*(one.reshape(len(numbers), len(records)) for one in plain), strict=True), strict=True))
            for at, column in enumerate(self._columns):
                columns[column.name] = _parsed(column, raw, read.get(at), starts[at], stops[at], bad)
        leaves = {}
        for name, group in self._groups.items():
            one = isinstance(group, Column)
            found = columns[group.name] if one else np.stack([columns[column.name] for column in group], axis=1)
            leaves[name] = found.astype(self.fields[name].dtype, copy=False)
        return leaves, bad

    def where(self, record: int) -> str:
        """The file and the line."""
        path, _, start = self._offsets.place(record)
        return f"{path}, line {_line(path, start)}"

    def _cells(self, raw: bytes, text: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Where each field begins and ends, int64[rows, columns]; None where the lines are not regular."""
        if _QUOTE in raw:
            return None
        wide = len(self._names)
        stops = np.flatnonzero((text == ord(self._separator)) | (text == _NEWLINE))
        if len(stops) != rows * wide:
            return None
        stops = stops.reshape(rows, wide)
        if (text[stops[:, -1]] != _NEWLINE).any() or (text[stops[:, :-1]] == _NEWLINE).any():
            return None
        starts = np.concatenate([[0], stops.ravel()[:-1] + 1]).reshape(rows, wide)
        stops[:, -1] -= (text[stops[:, -1] - 1] == _RETURN) & (stops[:, -1] > starts[:, -1])
        return starts, stops

    def _row(self, line: bytes, bad: dict[int, str], at: int) -> list[str] | None:
        try:
            row = _split(line.decode("utf-8"), self._separator)
        except (UnicodeDecodeError, rows_of.Error) as error:
            breaks = "new-line character" in str(error)  # the rest of that message speaks of how a file is opened
            bad[at] = "a line break in a field that is not in quotes, after a quote in the middle of one" if breaks else str(error)
            return None
        if len(row) != len(self._names):
            bad[at] = f"{len(row)} fields, and there are {len(self._names)} columns"
            return None
        return row


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

    The files have one header, which names the columns. Types are inferred from the first records: int32, else float32; `print` shows them.
    Where each record begins is found once, by reading the files through.

    Args:
      files: a pattern, a path, or several of them.
      batch_size: rows of a batch, over all processes.
      columns: which are read, each an array [rows]; or by the name of an array, its column, or several for [rows, columns]. None: all.
      defaults: by column, what stands for a field without text. Without one such a field is an error.
      types: by column, a dtype in place of the one that is inferred.
      categories: by column, the words it has; each becomes its number among them, int32.
      names: of the columns, where the files have no header.
      separator: one letter.
      shuffle: True, False, or a window of records that are mixed.
      seed: decides the order.
      workers: threads that read ahead; the batches do not depend on their number.
      on_error: "stop", or "skip" for leaving out records that cannot be read.
      index: a folder in which it is kept where records begin, so that the next run need not look. None: nothing is written.

    Raises:
      DataError: no file, headers that differ, a type that cannot be inferred, a quote that is not closed.
      OptionError: a column that is not there, or an option out of range.

    Example:
      >>> import spmd, tempfile, pathlib
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "a.csv"
      >>> _ = file.write_text("age,height,kind\\n30,1.7,cat\\n,1.5,dog\\n")
      >>> data = spmd.data.csv(file, batch_size=2, defaults={"age": 0}, categories={"kind": ["cat", "dog"]}, shuffle=False)
      >>> data
      2 records of 1 CSV file in 1 batches of 2
          age     int32[]
          height  float32[]
          kind    int32[]
      >>> next(iter(data))
      {'age': array([30,  0], dtype=int32), 'height': array([1.7, 1.5], dtype=float32), 'kind': array([0, 1], dtype=int32)}
    """
    reading = Reading(batch_size, shuffle, seed, workers, on_error)
    if not isinstance(separator, str) or len(separator.encode()) != 1 or separator in '"\r\n':
        raise OptionError(f"separator={separator!r}: one letter, such as ',' or ';'.")
    mappings = {"defaults": defaults, "types": types, "categories": categories}
    check_options(columns, names, mappings)
    paths = found(files)
    check_unpacked(paths)
    header = list(names) if names is not None else header_of(paths, separator, chosen=columns is not None)
    scan = lambda path: _scan(path, header=names is None)
    offsets = Offsets(paths, scan, f"csv 2 {names is None}", index)
    if not len(offsets):
        hint = _returns(paths[0])
        cure = "lines that end with \\n or \\r\\n, which these do not" if hint else "look at what they were written from"
        raise DataError(f"no CSV file has a record below its header: {few(paths)}.\n    cure: {cure}.")
    chosen = {name: name for name in header} if columns is None else columns
    wanted = dict(chosen) if isinstance(chosen, Mapping) else {name: name for name in chosen}
    check_names(header, wanted, mappings)
    about = _Inference(offsets, separator, header, dict(defaults or {}), dict(types or {}), dict(categories or {}))
    groups = {name: about.column(one) if isinstance(one, str) else [about.column(each) for each in one] for name, one in wanted.items()}
    return Records(CsvFiles(offsets, separator, header, groups), reading)


class _Inference:
    """What columns are, from the first records and what the user says."""

    def __init__(self, offsets: Offsets, separator: str, header: list[str], defaults: dict, types: dict, categories: dict):
        self._header, self._defaults, self._types, self._categories = header, defaults, types, categories
        raw, starts, ends = offsets.read(np.arange(min(LOOKED_AT, len(offsets))), end=b"\n")
        lines = [raw[start:end].decode("utf-8", "replace") for start, end in zip(starts, ends, strict=True)]
        rows = (_split_or_none(line, separator) for line in lines)
        self._rows = [row for row in rows if row is not None and len(row) == len(header)]  # others are told when they are read
        self._place = offsets.paths[0]

    def column(self, name: str) -> Column:
        at, default = self._header.index(name), self._defaults.get(name)
        if name in self._categories:
            words = {word: number for number, word in enumerate(self._categories[name])}
            if default is not None and default not in words:
                raise OptionError(f'defaults: "{name}" is {default!r}, which is none of {few(words)}.')
            return Column(name, at, np.dtype(np.int32), None if default is None else words[default], words)
        try:
            dtype = np.dtype(self._types[name]) if name in self._types else self._inferred(name, at)
        except TypeError as error:
            raise OptionError(f'types: "{name}" is {self._types[name]!r}: {error}.\n    cure: such as "float32" or "int32".') from None
        if dtype.kind not in "iuf":
            raise OptionError(f'types: "{name}" is {dtype}: a column is read as whole or floating numbers.')
        if default is not None:
            check_default(name, default, dtype)
        return Column(name, at, dtype, default)

    def _inferred(self, name: str, at: int) -> np.dtype:
        texts = [row[at] for row in self._rows if row[at].strip()]
        if texts and all(is_a(int, text) for text in texts):
            fits = all(-(2**31) <= int(text) < 2**31 for text in texts)
            return np.dtype(np.int32 if fits else np.int64)
        odd = [text for text in texts if not is_a(float, text)]
        if odd and len(odd) == len(texts):
            words = sorted(set(odd))
            cure = f'categories={{"{name}": {words!r}}}, columns=[...] without it' if len(words) < 10 else "columns=[...] without it"
            other = [letter for letter in ";\t|" if letter in name and len(self._header) == 1]
            cure = f"separator={other[0]!r}" if other else cure
            raise DataError(f'column "{name}" holds text, such as {odd[0]!r}, and no numbers ({self._place}).\n    cure: {cure}.')
        return np.dtype(np.float32)


def _values(column: Column, texts: list[str | None], bad: dict[int, str]) -> np.ndarray:
    """One column, field by field."""
    values = np.zeros(len(texts), column.dtype)
    for at, text in enumerate(texts):
        if text is not None and at not in bad:
            try:
                values[at] = column.value(text)
            except ValueError as error:
                bad[at] = str(error)
    return values


def _parsed(column: Column, raw: bytes, read: Any, starts: np.ndarray, stops: np.ndarray, bad: dict[int, str]) -> np.ndarray:
    """One column, of which plain numbers are `read`; other fields one by one."""
    if read is not None:
        values, whole, sound = read
        if column.dtype.kind != "f":
            least, most = limits(column.dtype)
            sound = sound & whole & (values >= least) & (values <= most)
            values = np.where(sound, values, 0)
        with np.errstate(over="ignore"):
            values = values.astype(column.dtype)
        left = np.flatnonzero(~sound | (np.isinf(values) if column.dtype.kind == "f" else False))
    else:
        left, values = np.arange(len(starts)), np.zeros(len(starts), column.dtype)
    for at in left.tolist():
        try:
            values[at] = column.value(raw[starts[at] : stops[at]].decode("utf-8"))
        except ValueError as error:  # also a text that is not UTF-8
            bad.setdefault(at, str(error))
    return values


def _scan(path: str, *, header: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where records begin and end: at line breaks that stand outside of quotes. Empty lines are none.

    Raises:
      DataError: a quote that is not closed.
    """
    found, at, inside, opened = [], 0, 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            text = np.frombuffer(chunk, np.uint8)
            breaks = np.flatnonzero(text == _NEWLINE)
            if inside or _QUOTE in chunk:
                quotes = np.flatnonzero(text == _QUOTE)
                breaks = breaks[(np.searchsorted(quotes, breaks) + inside) % 2 == 0]
                inside = (inside + len(quotes)) % 2
                opened = at + int(quotes[-1]) if len(quotes) else opened
            found.append(breaks + (at + 1))
            at += len(chunk)
    if inside:
        raise DataError(
            f"{path}, line {_line(path, opened)}: a quote that is never closed.\n    cure: close it, or write quotes in quotes twice."
        )
    ends = np.concatenate([*found, np.zeros(0, np.int64)])
    if at and (not len(ends) or ends[-1] != at):
        ends = np.append(ends, at)
    starts = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
    if header:
        starts, ends = starts[1:], ends[1:]
    elif len(starts):
        with open(path, "rb") as file:
            starts[0] = 3 if file.read(3) == codecs.BOM_UTF8 else 0
        starts, ends = starts[starts < ends], ends[starts < ends]
    if len(starts):
        text = np.memmap(path, np.uint8, "r")
        short = np.flatnonzero(ends - starts <= 2)
        empty = short[np.isin(text[starts[short]], (_NEWLINE, _RETURN))]
        starts, ends = np.delete(starts, empty), np.delete(ends, empty)
    return starts, ends


def _split(line: str, separator: str) -> list[str]:
    return next(rows_of.reader([line], delimiter=separator), [])


def _split_or_none(line: str, separator: str) -> list[str] | None:
    try:
        return _split(line, separator)
    except rows_of.Error:
        return None


def _field(group: Column | list[Column]) -> Field:
    if isinstance(group, Column):
        return Field((), group.dtype)
    return Field(
        (len(group),), np.result_type(*(column.dtype for column in group)) if len({c.dtype for c in group}) == 1 else np.dtype(np.float32)
    )


def _returns(path: str) -> bool:
    """Whether lines seem to end with carriage returns alone."""
    with open(path, "rb") as file:
        begin = file.read(CHUNK)
    return b"\r" in begin and b"\n" not in begin


def _line(path: str, start: int) -> int:
    """The number of a line, from 1, by its first byte."""
    count, left = 1, start
    with open(path, "rb") as file:
        while left and (chunk := file.read(min(CHUNK, left))):
            count += chunk.count(b"\n")
            left -= len(chunk)
    return count
