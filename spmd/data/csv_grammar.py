"""Finds where records and fields of CSV begin and end. Nothing else decides what is valid, so it
cannot depend on what is read together.

A quote opens a field only as its first byte. Inside of quotes, two of them are one, and a single
one closes; quotes elsewhere are ordinary letters. Records end with \\n, \\r\\n or \\r outside of
quotes; lines of nothing but blanks are skipped. All this is as pandas has it.
"""

import codecs
import os
from collections.abc import Iterator, Sequence

import numpy as np

from spmd.data.number_parsing import decimals
from spmd.data.record_index import CHUNK
from spmd.errors import DataError

NEWLINE, RETURN, QUOTE = b'\n\r"'


def records(
    path: str, separator: str, chunk: int = CHUNK
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield where records begin and end in a file, int64[n] each, for `chunk` bytes at a time.

    Raises:
      DataError: a quote that is not closed.
    """
    size = os.path.getsize(path)
    # numpy cannot map an empty file.
    if not size:
        return
    # Slices of an np.memmap are np.memmaps, each set up by Python code of numpy's.
    data = np.asarray(np.memmap(path, np.uint8, "r"))
    at = 0
    # Excel begins a file in UTF-8 with a byte order mark.
    if data[:3].tobytes() == codecs.BOM_UTF8:
        at = len(codecs.BOM_UTF8)
    begun = at
    inside, opened = False, at
    while at < size:
        stop = min(at + chunk, size)
        # the meaning of a quote or a carriage return is decided by what comes next
        while stop < size and data[stop - 1] in (QUOTE, RETURN):
            stop += 1
        text = np.asarray(data[at:stop])
        ends = _breaks(text)
        quotes = np.flatnonzero(text == QUOTE)
        if len(quotes) or inside:
            turns = _turns(data, quotes + at, np.array([begun]), separator, inside=inside)
            # A line break after an odd number of turns is inside of quotes.
            ends = ends[(np.searchsorted(turns, ends + at) + inside) % 2 == 0]
            if len(turns):
                opened = int(turns[-1])
            inside = bool((inside + len(turns)) % 2)
        ends = ends + (at + 1)
        at = stop
        # the last record may end without a line break
        last_end = begun
        if len(ends):
            last_end = int(ends[-1])
        if at == size and not inside and at > last_end:
            ends = np.append(ends, at)
        if len(ends):
            starts = np.append(begun, ends[:-1])
            begun = int(ends[-1])
            filled = _not_blank(data, starts, ends, separator)
            yield starts[filled], ends[filled]
    if inside:
        raise DataError(
            f"{path}, line {line(path, opened)}: a quote that is never closed.",
            fix="close it, or write quotes in quotes twice.",
        )


class Cells:
    """The fields of records.

    Args:
      raw: the records, one after the other.
      starts, ends: int64[n]: where in `raw` each begins and ends.
      separator: one letter.
      wide: how many fields a record has.

    Attributes:
      rows: int64[m]: the positions of records that have so many fields.
      odd: the number of fields of each other record, by position.
    """

    def __init__(self, raw: bytes, starts: np.ndarray, ends: np.ndarray, separator: str, wide: int):
        self._raw, self._text = raw, np.frombuffer(raw, np.uint8)
        marks = _separators(self._text, starts, separator)
        counts = np.searchsorted(marks, ends) - np.searchsorted(marks, starts) + 1
        complete = counts == wide
        self.rows = np.flatnonzero(complete)
        self.odd = {at: int(counts[at]) for at in np.flatnonzero(~complete).tolist()}
        if self.odd:
            marks = marks[np.repeat(complete, counts - 1)]
            starts, ends = starts[complete], ends[complete]
        marks = marks.reshape(len(starts), wide - 1)
        self._begins = np.concatenate([starts[:, None], marks + 1], axis=1)
        self._stops = np.concatenate(
            [marks, _without_break(self._text, starts, ends)[:, None]], axis=1
        )

    def decimals(self, columns: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The result of `number_parsing.decimals` for some columns, in quotes or not: each
        [columns, m].
        """
        begins = np.ascontiguousarray(self._begins[:, columns].T)
        stops = np.ascontiguousarray(self._stops[:, columns].T)
        if QUOTE in self._raw:
            # Clipped: an empty field at the very end begins after the last byte.
            quoted = (stops - begins > 1) & (self._text.take(begins, mode="clip") == QUOTE)
            quoted &= self._text.take(stops - 1, mode="clip") == QUOTE
            begins, stops = begins + quoted, stops - quoted
        values, is_integer, sound = decimals(self._text, begins.ravel(), stops.ravel())
        return (
            values.reshape(begins.shape),
            is_integer.reshape(begins.shape),
            sound.reshape(begins.shape),
        )

    def lengths(self, columns: Sequence[int]) -> np.ndarray:
        """int64[columns, m]: the bytes of each field."""
        return (self._stops[:, columns] - self._begins[:, columns]).T

    def field(self, row: int, column: int) -> bytes:
        """The text of one field; `row` counts complete records."""
        return unquoted(self._raw[self._begins[row, column] : self._stops[row, column]])


def split(record: bytes, separator: str) -> list[bytes]:
    """The fields of one record, as they are written.

    Example:
      >>> split(b'1,"a,b",5"\\n', ",")
      [b'1', b'"a,b"', b'5"']
    """
    text, start = np.frombuffer(record, np.uint8), np.zeros(1, np.int64)
    stop = int(_without_break(text, start, start + len(record))[0])
    fields, first = [], 0
    for last in [*_separators(text, start, separator).tolist(), stop]:
        fields.append(record[first:last])
        first = last + 1
    return fields


def unquoted(field: bytes) -> bytes:
    """Return the text of a field, without quotes around it.

    Example:
      >>> [unquoted(field) for field in (b"a", b'5"', b'"a"', b'"say ""so"", he said"', b'"a"b"')]
      [b'a', b'5"', b'a', b'say "so", he said', b'ab"']
    """
    if not field.startswith(b'"'):
        return field
    at = 1
    while (at := field.find(b'"', at)) >= 0 and field[at + 1 : at + 2] == b'"':
        at += 2
    if at < 0:
        at = len(field)
    return field[1:at].replace(b'""', b'"') + field[at + 1 :]


def line(path: str, start: int) -> int:
    """The number of a line, from 1, by its first byte."""
    with open(path, "rb") as file:
        count, last = 1, b""
        while start and (data := file.read(min(CHUNK, start))):
            # A \r\n may lie across two reads, so the last byte of the one before counts, too.
            count += data.count(b"\n") + data.count(b"\r") - (last + data).count(b"\r\n")
            last, start = data[-1:], start - len(data)
    return count


def _breaks(text: np.ndarray) -> np.ndarray:
    """Return the last byte of each line break."""
    returns = np.flatnonzero(text == RETURN)
    # Clipped: a carriage return that ends the file has no byte after it.
    alone = returns[text.take(returns + 1, mode="clip") != NEWLINE]
    breaks = np.flatnonzero(text == NEWLINE)
    if not len(alone):
        return breaks
    return np.sort(np.concatenate([breaks, alone]))


def _separators(text: np.ndarray, starts: np.ndarray, separator: str) -> np.ndarray:
    """int64[n]: the bytes that separate fields, in a text of records that begin at `starts`."""
    marks, quotes = np.flatnonzero(text == ord(separator)), np.flatnonzero(text == QUOTE)
    if not len(quotes):
        return marks
    turns = _turns(text, quotes, starts, separator, inside=False)
    return marks[np.searchsorted(turns, marks) % 2 == 0]


def _without_break(text: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """int64[n]: the ends of records, without a line break."""
    stops = ends - (text[ends - 1] == NEWLINE)
    # A record that is \n alone has no byte before it; that one is of another record.
    return stops - ((stops > starts) & (text[stops - 1] == RETURN))


def _turns(
    text: np.ndarray, quotes: np.ndarray, starts: np.ndarray, separator: str, *, inside: bool
) -> np.ndarray:
    """Return the quotes that open and close, in turn; two in quotes that stand for one close and
    open again.

    Args:
      quotes: int64[n], where they stand in the text.
      starts: where records begin.
      inside: the first quote is in a field that was opened before.
    """
    after = np.zeros(256, bool)
    after[[NEWLINE, RETURN, ord(separator), QUOTE]] = True
    openers = quotes[int(inside) :: 2]  # as they nearly always are
    if np.isin(openers[~after[text[np.maximum(openers - 1, 0)]]], starts).all():
        return quotes
    after[QUOTE] = False
    opens = after[text[np.maximum(quotes - 1, 0)]] | np.isin(quotes, starts)
    # -2 is next to no byte.
    turns, closed = [], -2
    for at, begins in zip(quotes.tolist(), opens.tolist(), strict=True):
        if inside or begins or at == closed + 1:
            turns.append(at)
            closed = -2
            if inside:
                closed = at
            inside = not inside
    return np.array(turns, np.int64)


def _not_blank(
    text: np.ndarray, starts: np.ndarray, ends: np.ndarray, separator: str
) -> np.ndarray:
    """bool[n]: lines that hold something."""
    blanks = np.zeros(256, bool)
    # A separator that is a space or a tab is not blank: it separates empty fields.
    blanks[list(b" \t\r\n".replace(separator.encode(), b""))] = True
    filled, left, at = np.ones(len(starts), bool), np.arange(len(starts)), starts
    while len(left):
        is_blank = blanks[text[at]]
        left, at = left[is_blank], at[is_blank] + 1
        done = at == ends[left]
        filled[left[done]] = False
        left, at = left[~done], at[~done]
    return filled
