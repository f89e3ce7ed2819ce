"""Documents of JSON lines and Parquet files, read by number; errors name the file, the line and the
column.
"""

import abc
import codecs
import functools
import itertools
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.parquet_files import open_parquet
from spmd.data.record_index import CHUNK, RecordIndex, check_uncompressed, find_files
from spmd.errors import (
    DataError,
    OptionError,
    did_you_mean,
    first_line,
    join_names,
    option,
    quoted,
    short_repr,
    type_name,
)

JSON_LINES, PARQUET = (".jsonl", ".ndjson", ".json"), (".parquet",)
NEWLINE = 10
KEPT = 8  # row groups: text is larger than numbers


def json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file.

    Raises:
      DataError: it is no JSON, or no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read: {first_line(error)}.", fix="the file as it was written."
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} holds {type_name(content)}.",
            fix="an object with named fields, as it was written.",
        )
    return content


class Documents(abc.ABC):
    """Documents of files by number, each a dict of what was stored.

    Attributes:
      file_kind: the name of a file in messages.
      paths: the files.
      counts: documents of each file.
      sizes: bytes of each file.
    """

    file_kind: str
    paths: tuple[str, ...]
    counts: Sequence[int]
    sizes: Sequence[int]

    @abc.abstractmethod
    def read_documents(self, numbers: np.ndarray) -> list[dict[str, Any] | ValueError]:
        """Return the documents int64[n], ascending; in place of one that cannot be read, the
        reason.
        """

    @abc.abstractmethod
    def where(self, number: int) -> str:
        """The file of a document and its line or row."""


class JsonLines(Documents):
    """One JSON object a line."""

    file_kind = "JSON lines file"

    def __init__(self, paths: tuple[str, ...], index: str | Path | None):
        for path in paths:
            check_uncompressed(path)
            _check_no_array(path)
        self._lines = RecordIndex(paths, _scan, "jsonl 1", index)
        self.paths, self.sizes = self._lines.paths, self._lines.sizes
        self.counts = self._lines.counts

    def read_documents(self, numbers: np.ndarray) -> list[dict[str, Any] | ValueError]:
        """The parsed lines."""
        raw, starts, ends = self._lines.read_bytes(numbers)
        edges = zip(starts.tolist(), ends.tolist(), strict=True)
        return [_parsed(raw[start:end]) for start, end in edges]

    def where(self, number: int) -> str:
        """The file, and the line, from 1."""
        path, _, start = self._lines.place(number)
        line = 1
        with open(path, "rb") as file:
            while start and (data := file.read(min(CHUNK, start))):
                line, start = line + data.count(b"\n"), start - len(data)
        return f"{path}, line {line}"


def _scan(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return where lines begin and end, without blank ones; a byte order mark is no part of the
    first.
    """
    breaks, at, last, first_start = [], 0, b"", 0
    with open(path, "rb") as file:
        if file.read(3) == codecs.BOM_UTF8:
            first_start = 3
        file.seek(0)
        while data := file.read(CHUNK):
            breaks.append(np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE) + at)
            at, last = at + len(data), data[-1:]
    if last != b"\n":
        breaks.append(np.array([at]))
    ends = np.concatenate([np.zeros(0, np.int64), *breaks])
    starts = np.concatenate([[first_start], ends[:-1] + 1]).astype(np.int64)
    starts = starts[: len(ends)]
    blank = []
    with open(path, "rb") as file:
        # An empty line has a \r where Windows has written it.
        for line in np.flatnonzero(ends - starts <= 1).tolist():
            letter = b""
            if ends[line] > starts[line]:
                letter = os.pread(file.fileno(), 1, int(starts[line]))
            if letter in b" \t\r":
                blank.append(line)
    return np.delete(starts, blank), np.delete(ends, blank)


def _parsed(line: bytes) -> dict[str, Any] | ValueError:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return ValueError(f"byte {error.start + 1} is not UTF-8")
    except json.JSONDecodeError as error:
        return ValueError(f"column {error.colno}: it is no JSON: {error.msg}")
    except RecursionError:
        return ValueError("it is nested too deeply to be read")
    except ValueError as error:  # such as a number of thousands of digits
        return ValueError(f"it cannot be read as JSON: {first_line(error)}")
    if not isinstance(value, dict):
        return ValueError(f"it holds {type_name(value)}, not an object with named fields")
    return value


def _check_no_array(path: str) -> None:
    with open(path, "rb") as file:
        begin = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if begin.startswith(b"["):
        # never the file itself, which the shell would empty first
        lines = Path(path).with_name(f"{Path(path).stem}-lines.jsonl")
        raise DataError(
            f"{path} is a JSON array, and documents are read by line.",
            fix=f"one object a line, as  jq -c '.[]' {shlex.quote(path)} > "
            f"{shlex.quote(str(lines))}  writes them.",
        )


class ParquetDocuments(Documents):
    """Rows of Parquet files, of which only the fields are read; the latest row groups are kept."""

    file_kind = "Parquet file"

    def __init__(self, paths: tuple[str, ...], fields: Sequence[str]):
        self.paths, self._fields = paths, list(fields)
        self.sizes = [os.path.getsize(path) for path in paths]
        rows_of = [self._rows(path) for path in paths]
        self.counts = [sum(rows) for rows in rows_of]
        self._groups = []
        for path, rows in zip(paths, rows_of, strict=True):
            self._groups += [(path, group) for group in range(len(rows))]
        self._first = np.cumsum([0, *itertools.chain.from_iterable(rows_of)])

    def _rows(self, path: str) -> list[int]:
        """Rows of each row group of a file that has all fields."""
        with open_parquet(path) as file:
            names = file.schema_arrow.names
            for field in self._fields:
                if field not in names:
                    raise OptionError(
                        f'{path} has no column "{field}".', fix=f"{did_you_mean(field, names)}"
                    )
            return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]

    @functools.cached_property
    def _row_group(self) -> Any:
        return functools.lru_cache(KEPT)(self._read_row_group)

    # a cache cannot be pickled; a copy for another process begins with an empty one
    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_row_group"}

    def _read_row_group(self, path: str, group: int) -> Any:
        with open_parquet(path) as file:
            return file.read_row_group(group, columns=self._fields)

    def read_documents(self, numbers: np.ndarray) -> list[dict[str, Any] | ValueError]:
        """Rows as dicts of Python values."""
        groups = np.searchsorted(self._first, numbers, "right") - 1
        documents: list[dict[str, Any] | ValueError] = []
        for group in np.unique(groups).tolist():  # ascending, as the numbers are
            rows = numbers[groups == group] - self._first[group]
            try:
                documents += self._row_group(*self._groups[group]).take(rows).to_pylist()
            except (OSError, ValueError) as error:  # what pyarrow raises for damaged pages
                documents += itertools.repeat(
                    ValueError(f"its row group cannot be read: {first_line(error)}"), len(rows)
                )
        return documents

    def where(self, number: int) -> str:
        """The file, and the row, from 0."""
        file = int(np.searchsorted(np.cumsum(self.counts), number, "right"))
        return f"{self.paths[file]}, row {number - sum(self.counts[:file])}"


def open_documents(
    files: str | Path | Sequence[str | Path], fields: Sequence[str], index: str | Path | None = None
) -> Documents:
    """The documents of files of one kind, as their names say; where lines begin is stored in the
    folder `index`, if any.

    Raises:
      DataError: no file, or one that is not what its name says.
      OptionError: files of several kinds or an unknown one, or a column that a Parquet file does
        not have.
    """
    paths = find_files(files)
    kinds = {Path(path).suffix.lower() for path in paths}
    if kinds <= set(JSON_LINES):
        return JsonLines(paths, index)
    if kinds <= set(PARQUET):
        return ParquetDocuments(paths, fields)
    raise OptionError(
        f"text of files that end in {join_names(sorted(kinds))}.",
        fix=f"files of one kind: {', '.join((*JSON_LINES, *PARQUET))}.",
    )


def text_of(document: dict[str, Any], field: str) -> str:
    """The text of a field.

    Raises:
      ValueError: it is missing, or no text.
    """
    if field not in document:
        others = {
            "messages": f"{option('chat')} reads messages",
            "prompt": f"{option('field', quoted('prompt'), quoted('completion'))} reads pairs",
        }
        hints = [f" ({hint})" for name, hint in others.items() if name in document]
        hint = "".join(hints[:1])
        raise ValueError(
            f'it has no field "{field}"; it has {join_names(document, 5) or "none"}{hint}'
        )
    return check_text(document[field], f'field "{field}"')


def check_text(value: Any, name: str) -> str:
    """The value, if it is text that UTF-8 can hold.

    Raises:
      ValueError: it is not.
    """
    if not isinstance(value, str):
        description = "None"
        if value is not None:
            description = f"{type_name(value)}, {short_repr(value)},"
        raise ValueError(f"{name} is {description} and should be text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can name half of a surrogate pair
            raise ValueError(
                f"{name} has {value[error.start]!r}, half of a surrogate pair, at character "
                f"{error.start + 1}"
            ) from None
    return value
