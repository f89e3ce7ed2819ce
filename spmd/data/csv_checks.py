"""Checks of CSV headers and options, before records are read."""

import collections
import itertools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base.output_files import name_errors
from spmd.data import csv_grammar
from spmd.data.number_parsing import NUMBERS, holds
from spmd.errors import DataError, OptionError, did_you_mean, join_names, type_name

HEADER = 1 << 16  # bytes that are looked at together for a header


def header_of(paths: tuple[str, ...], separator: str, *, chosen: bool) -> list[str]:
    """The names of the columns, the same in all files; an empty file has none.

    Args:
      chosen: columns are asked for by name, so that they are names even if they are numbers.

    Raises:
      DataError: headers that differ, or one that cannot be read or is none.
    """
    headers: dict[str, list[str]] = {}
    for path in paths:
        names = _header(path, separator)
        if names is not None:
            headers[path] = names
    # An empty file has no header, and says nothing about those of the others.
    if not headers:
        raise DataError(
            f"all files are empty: {join_names(paths, 3)}.",
            fix="look at what they were written from.",
        )
    first, header = next(iter(headers.items()))
    for path, names in headers.items():
        if twice := repeated(names):
            raise DataError(
                f"{path}: its header names {join_names(twice)} twice.",
                fix="other names, or names=[...] for no header.",
            )
        if names != header:
            raise DataError(
                f"{path} has columns {', '.join(names)}; {first} has {', '.join(header)}.",
                fix="files of one header.",
            )
    # as tables without names are written, from 0 or from 1
    numbers = list(map(str, range(len(header) + 1)))
    counted = len(header) > 2 and header in (numbers[:-1], numbers[1:])
    has_numbers_only = all(is_a(float, name) for name in header)
    if has_numbers_only and not chosen and not counted:
        fix = "names=[...] where there is no header, or columns=[...] where these are names"
        raise DataError(
            f"{first}: its header has numbers only: {join_names(header, 5)}.", fix=f"{fix}."
        )
    return header


def _header(path: str, separator: str) -> list[str] | None:
    """The fields of the first record; None if there is none."""
    for starts, ends in csv_grammar.records(path, separator, HEADER):
        if len(starts):
            with name_errors(Path(path)), open(path, "rb") as file:
                file.seek(int(starts[0]))
                fields = csv_grammar.split(file.read(int(ends[0] - starts[0])), separator)
            try:
                return [csv_grammar.unquoted(field).decode("utf-8") for field in fields]
            except UnicodeDecodeError:
                raise DataError(
                    f"{path}: its header is not UTF-8.", fix="a file in UTF-8."
                ) from None
    return None


def check_options(columns: Any, names: Any, mappings: dict[str, Any]) -> None:
    """Options that can be judged without a file.

    Raises:
      OptionError: a string or a number instead of names, or duplicate names.
    """
    for option, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise OptionError(
                f"{option}={value!r} is {type_name(value)}.", fix="a dict, by column."
            )
    both = sorted(set(mappings["types"] or ()) & set(mappings["categories"] or ()))
    if both:
        raise OptionError(
            f"types and categories both name {', '.join(both)}.",
            fix="categories alone, which are int32.",
        )
    for name, words in (mappings["categories"] or {}).items():
        if not _are_strings(words, Collection) or not words or len(set(words)) < len(words):
            raise OptionError(
                f'categories: "{name}" is {words!r}.', fix="a list of words, each once."
            )
    groups = [columns]
    if isinstance(columns, Mapping):
        groups = [group for group in columns.values() if not isinstance(group, str)]
    for option, value in [("names", names), *(("columns", group) for group in groups)]:
        if value is None:
            continue
        if not _are_strings(value, Iterable):
            raise OptionError(f"{option}={value!r} is {type_name(value)}.", fix="a list of names.")
        if twice := repeated(value):
            raise OptionError(f"{option}: {join_names(twice)} twice.", fix="each once.")


def _are_strings(value: Any, kind: Any) -> bool:
    """Return True for a collection or an iterable of strings, which is no string itself."""
    if isinstance(value, str) or not isinstance(value, kind):
        return False
    return all(isinstance(name, str) for name in value)


def check_names(header: list[str], groups: dict[str, list[str]], options: dict[str, Any]) -> None:
    """All columns that are named exist.

    Raises:
      OptionError: one does not, or none is named.
    """
    if not groups or not all(groups.values()):
        raise OptionError("columns names no column.", fix=f"some of {join_names(header)}.")
    columns = set(header)
    chosen = itertools.chain.from_iterable(groups.values())
    for option, names in [("columns", chosen), *options.items()]:
        for name in names:
            if name not in columns:
                raise OptionError(
                    f'{option}: there is no column "{name}".',
                    fix=f"{did_you_mean(str(name), header)}",
                )


def check_default(name: str, default: Any, dtype: np.dtype) -> None:
    """Check that the default for fields without text is one number of the column's dtype.

    Raises:
      OptionError: it is not.
    """
    part = isinstance(default, float | np.floating) and not default.is_integer()
    if not isinstance(default, NUMBERS) or (dtype.kind != "f" and part):
        fix = "a number"
        if isinstance(default, NUMBERS):
            fix = f'types={{"{name}": "float32"}}'
        raise OptionError(
            f'defaults: "{name}" is {default!r}, and the column is {dtype}.', fix=f"{fix}."
        )
    if not holds(dtype, default):
        raise OptionError(
            f'defaults: "{name}" is {default!r}, which {dtype} does not hold.',
            fix=f'types={{"{name}": ...}}.',
        )


def is_a(kind: type, text: str) -> bool:
    """Return True if Python reads text as a number of this kind."""
    try:
        kind(text)
    except ValueError:
        return False
    return True


def repeated(names: Iterable[str]) -> list[str]:
    """Duplicate names."""
    return sorted(name for name, times in collections.Counter(names).items() if times > 1)
