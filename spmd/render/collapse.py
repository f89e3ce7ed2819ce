"""Rows of a table that differ only in a number of their path, as one row."""

import re
from collections.abc import Iterable, Sequence

LEAST = 3  # rows; two are shown as they are


def collapsed(rows: Sequence[Sequence[str]], least: int = LEAST) -> list[tuple[str, ...]]:
    """Return rows whose first cell is a path, with rows that agree in all but one number of it
    joined, at the place of the first.

    >>> collapsed([*((f"blocks/{n}/bias", "x8") for n in range(12)), ("head/bias", "x8")])
    [('blocks/{0..11}/bias', 'x8'), ('head/bias', 'x8')]
    """
    joined = [tuple(row) for row in rows]
    deepest = max((row[0].count("/") + 1 for row in joined), default=0)
    for depth in reversed(range(deepest)):
        groups: dict[tuple, list[tuple[str, ...]]] = {}
        for row in joined:
            groups.setdefault(_joined_key(row, depth), []).append(row)
        remaining, joined_keys = [], set()
        for row in joined:
            key = _joined_key(row, depth)
            if len(groups[key]) < least:
                remaining.append(row)
            elif key not in joined_keys:
                joined_keys.add(key)
                remaining.append(_joined_row(key, groups[key], depth))
        joined = remaining
    return joined


def _joined_key(row: tuple[str, ...], depth: int) -> tuple:
    """Return the part that rows to be joined have in common: all but the number at this depth; the
    row itself if there is no number.
    """
    parts = row[0].split("/")
    if depth >= len(parts) or not parts[depth].isdigit():
        return row
    parts[depth] = "*"
    return "/".join(parts), *row[1:]


def _joined_row(key: tuple, group: Sequence[tuple[str, ...]], depth: int) -> tuple[str, ...]:
    parts = key[0].split("/")
    numbers = [row[0].split("/")[depth] for row in group]
    parts[depth] = ranges(map(int, numbers))
    return "/".join(parts), *key[1:]


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in braces, with numbers that follow each other as a range.

    >>> ranges([0, 1, 2, 3, 7]), ranges([4, 2])
    ('{0..3,7}', '{2,4}')
    """
    text = ""
    for number in sorted(numbers):
        last = re.search(r"(\d+)(?:\.\.(\d+))?$", text)
        if last and number == int(last[2] or last[1]) + 1:
            text = f"{text[: last.start()]}{last[1]}..{number}"
        elif text:
            text += f",{number}"
        else:
            text = str(number)
    return f"{{{text}}}"
