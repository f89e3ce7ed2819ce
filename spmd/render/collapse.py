"""Rows of a table that differ only in a number of their path, as one row."""

import re
from collections.abc import Iterable, Sequence

LEAST = 3  # rows; two are shown as they are


def collapsed(rows: Sequence[Sequence[str]], least: int = LEAST) -> list[tuple[str, ...]]:
    """Rows whose first cell is a path, those that agree in all but one number of it joined, at the
    place of the first.

    >>> collapsed([*((f"blocks/{n}/bias", "x8") for n in range(12)), ("head/bias", "x8")])
    [('blocks/{0..11}/bias', 'x8'), ('head/bias', 'x8')]
    """
    joined = [tuple(row) for row in rows]
    for depth in reversed(range(max((row[0].count("/") + 1 for row in joined), default=0))):
        groups: dict[tuple, list[int]] = {}
        for number, row in enumerate(joined):
            groups.setdefault(_key(row, depth), []).append(number)
        at_first = {
            group[0]: _joined(key, [joined[at] for at in group], depth)
            for key, group in groups.items()
            if len(group) >= least
        }
        left_out = {
            number for group in groups.values() if len(group) >= least for number in group[1:]
        }
        joined = [
            at_first.get(number, row) for number, row in enumerate(joined) if number not in left_out
        ]
    return joined


def _key(row: tuple[str, ...], depth: int) -> tuple:
    """What rows that can be joined have in common; the row itself if there is no number at this
    depth.
    """
    parts = row[0].split("/")
    return (
        ("/".join([*parts[:depth], "*", *parts[depth + 1 :]]), *row[1:])
        if parts[depth : depth + 1] and parts[depth].isdigit()
        else row
    )


def _joined(key: tuple, group: Sequence[tuple[str, ...]], depth: int) -> tuple[str, ...]:
    parts = key[0].split("/")
    parts[depth] = ranges(int(row[0].split("/")[depth]) for row in group)
    return "/".join(parts), *key[1:]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in braces, those that follow each other as a range.

    >>> ranges([0, 1, 2, 3, 7]), ranges([4, 2])
    ('{0..3,7}', '{2,4}')
    """
    text = ""
    for number in sorted(numbers):
        last = re.search(r"(\d+)(?:\.\.(\d+))?$", text)
        if last and number == int(last[2] or last[1]) + 1:
            text = f"{text[: last.start()]}{last[1]}..{number}"
        else:
            text += f",{number}" if text else str(number)
    return f"{{{text}}}"
