"""Checks of CSV headers and options, before records are read."""

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from spmd.data import csv_grammar
from spmd.data.number_parsing import NUMBERS, holds
from spmd.data.record_index import compression
from spmd.errors import DataError, OptionError, did_you_mean, type_name

HEADER = 1 << 16  # bytes that are looked at together for a header


def header_of(paths: tuple[str, ...], separator: str, *, chosen: bool) -> list[str]:
    """The names of the columns, the same in all files; an empty file has none.

    Args:
      chosen: columns are asked for by name, so that they are names even if they are numbers.

    Raises:
      DataError: headers that differ, or one that cannot be read or is none.
    """
    first: tuple[str, list[str]] | None = None
    for path in paths:
        names = _header(path, separator)
        if names is None:
            continue
        if twice := repeated(names):
            raise DataError(f"{path}: its header names {few(twice)} twice.", fix="other names, or names=[...] for no header.")
        if first is not None and names != first[1]:
            raise DataError(f"{path} has columns {', '.join(names)}; {first[0]} has {', '.join(first[1])}.", fix="files of one header.")
        first = first or (path, names)
    if first is None:
        raise DataError(f"all files are empty: {', '.join(paths[:3])}.", fix="look at what they were written from.")
    counted = any(first[1] == [str(at + start) for at in range(len(first[1]))] for start in (0, 1))  # as tables without names are written
    if not chosen and not (counted and len(first[1]) > 2) and all(is_a(float, name) for name in first[1]):
        fix = "names=[...] where there is no header, or columns=[...] where these are names"
        raise DataError(f"{first[0]}: its header has numbers only: {', '.join(first[1][:5])}.", fix=f"{fix}.")
    return first[1]


def _header(path: str, separator: str) -> list[str] | None:
    """The fields of the first record; None if there is none."""
    for starts, ends in csv_grammar.records(path, separator, HEADER):
        if len(starts):
            with open(path, "rb") as file:
                file.seek(int(starts[0]))
                fields = csv_grammar.split(file.read(int(ends[0] - starts[0])), separator)
            try:
                return [csv_grammar.unquoted(field).decode("utf-8") for field in fields]
            except UnicodeDecodeError:
                raise DataError(f"{path}: its header is not UTF-8.", fix="a file in UTF-8.") from None
    return None


def check_uncompressed(paths: tuple[str, ...]) -> None:
    """Nothing is read of files that are compressed.

    Raises:
      DataError: one is.
    """
    for path in paths:
        if compression(path):
            raise DataError(f"{path} is compressed ({compression(path)}), and records in it cannot be found by number.", fix="unpack it.")


def check_options(columns: Any, names: Any, mappings: dict[str, Any]) -> None:
    """Options that can be judged without a file.

    Raises:
      OptionError: a string or a number instead of names, or duplicate names.
    """
    for what, given in mappings.items():
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"{what}={given!r} is {type_name(given)}.", fix="a dict, by column.")
    both = sorted(set(mappings["types"] or ()) & set(mappings["categories"] or ()))
    if both:
        raise OptionError(f"types and categories both name {', '.join(both)}.", fix="categories alone, which are int32.")
    for name, words in (mappings["categories"] or {}).items():
        sound = isinstance(words, Collection) and not isinstance(words, str) and all(isinstance(word, str) for word in words)
        if not sound or not words or len(set(words)) < len(words):
            raise OptionError(f'categories: "{name}" is {words!r}.', fix="a list of words, each once.")
    groups = columns.values() if isinstance(columns, Mapping) else ()
    for what, given in [("names", names), ("columns", columns), *(("columns", one) for one in groups if not isinstance(one, str))]:
        if given is None or isinstance(given, Mapping):
            continue
        if isinstance(given, str) or not isinstance(given, Iterable) or not all(isinstance(one, str) for one in given):
            raise OptionError(f"{what}={given!r} is {type_name(given)}.", fix="a list of names.")
        if twice := repeated(given):
            raise OptionError(f"{what}: {few(twice)} twice.", fix="each once.")


def check_names(header: list[str], wanted: dict[str, Any], options: dict[str, Any]) -> None:
    """All columns that are named are there.

    Raises:
      OptionError: one is not, or none is named.
    """
    if not wanted or any(not isinstance(one, str) and not len(one) for one in wanted.values()):
        raise OptionError("columns names no column.", fix=f"some of {few(header)}.")
    there = set(header)
    asked = [name for one in wanted.values() for name in ([one] if isinstance(one, str) else one)]
    for what, names in {"columns": asked, **options}.items():
        for name in names or ():
            if name not in there:
                raise OptionError(f'{what}: there is no column "{name}".', fix=f"{did_you_mean(str(name), header)}")


def check_default(name: str, default: Any, dtype: np.dtype) -> None:
    """What stands for a field without text is one number of the column's dtype.

    Raises:
      OptionError: it is not.
    """
    part = isinstance(default, float | np.floating) and not default.is_integer()
    if not isinstance(default, NUMBERS) or (dtype.kind != "f" and part):
        fix = f'types={{"{name}": "float32"}}' if isinstance(default, NUMBERS) else "a number"
        raise OptionError(f'defaults: "{name}" is {default!r}, and the column is {dtype}.', fix=f"{fix}.")
    if not holds(dtype, default):
        raise OptionError(f'defaults: "{name}" is {default!r}, which {dtype} does not hold.', fix=f'types={{"{name}": ...}}.')


def is_a(kind: type, text: str) -> bool:
    """Whether Python reads text as such a number."""
    try:
        kind(text)
    except ValueError:
        return False
    return True


def repeated(names: Iterable[str]) -> list[str]:
    """Duplicate names."""
    return sorted(name for name, times in collections.Counter(names).items() if times > 1)


def few(words: Iterable[str]) -> str:
    """Some of them, and how many more."""
    listed = list(words)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
