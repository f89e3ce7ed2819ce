"""Tables of text that fit the terminal, and HTML in one style for pages and notebook cells."""

import functools
import html
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

# Colours inherit from the page, because a notebook's theme may differ from the browser's
# preference.
STYLE = """
.spmd-cell {
  --ink: currentColor; --soft: #8883; --line: #8886; --good: #2f8f57; --bad: #d9483b; --tight: #b7791f; --a: #3566c0; --b: #6f9ae0;
  --c: #c4571f; --d: #8a6fc4; --e: #2f8f83; --f: #9aa3b2; --g: #d9a441; --h: #b3b9c6; --i: #4c9fb5; --j: #a8576f; --k: #7d8c3a;
  font: 14px/1.5 system-ui, sans-serif;
}
.spmd-cell h1 { font-size: 1.4rem; margin: 0 }
.spmd-cell h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; border-bottom: 1px solid var(--line) }
.spmd-cell p { margin: .4rem 0; overflow-wrap: anywhere }
.spmd-cell table { border-collapse: collapse; margin: .4rem 0; font-size: .9em }
.spmd-cell table tr :is(td, th) { padding: .15rem .9rem .15rem 0; text-align: left !important; white-space: nowrap }
.spmd-cell table tr :is(td, th) { border: 0; border-bottom: 1px solid var(--soft) }
.spmd-cell table tr :is(td, th).number { text-align: right !important }
.spmd-cell :is(td, pre) { font-family: ui-monospace, monospace }
.spmd-cell table tr:nth-child(n) { background: none }
.spmd-cell table.mesh tr :is(td, th) { text-align: center !important; padding: .3rem .9rem }
.spmd-cell table.mesh tr td + td { border: 1px solid var(--a) }
.spmd-cell table.mesh tr th + th { border-bottom-color: var(--a) }
.spmd-cell pre { background: var(--soft); padding: .7rem; white-space: pre-wrap; font-size: .88em }
.spmd-cell .wide { overflow-x: auto }
.spmd-cell svg { display: block; width: 100%; max-width: 960px; height: auto }
.spmd-cell svg.small { width: auto; max-width: 100% }
.spmd-cell .key { display: inline-block; margin-right: 1.1rem; font-size: .9em }
.spmd-cell .key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
.spmd-cell svg .outline { fill: none; stroke: var(--ink); stroke-width: 2px; vector-effect: non-scaling-stroke }
.spmd-cell svg text { font: 12px system-ui, sans-serif; fill: currentColor }
.spmd-cell svg text.on { fill: #fff; paint-order: stroke; stroke: #000a; stroke-width: 2.5px }
.spmd-cell .verdict { font-weight: 600; color: var(--good) }
.spmd-cell .verdict.bad { color: var(--bad) }
.spmd-cell .verdict.tight { color: var(--tight) }
@media (max-width: 45em) {
  .spmd-cell { overflow-x: auto }
  .spmd-cell svg:not(.small, .strip) { min-width: 40rem }
  .spmd-cell pre { font-size: .74em; white-space: pre; overflow-x: auto }
}
"""  # noqa: E501


class Html(str):
    """HTML as a string that a notebook renders.

    >>> Html("<b>four</b>")._repr_html_()
    '<b>four</b>'
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


class Text(str):
    """Text whose repr is the text itself; a notebook may show it as HTML instead.

    >>> Text("a  b")
    a  b
    """

    _html: Html | None

    def __new__(cls, text: str, html: Html | None = None) -> "Text":
        """`html`: what a notebook shows instead; None: the text."""
        self = super().__new__(cls, text)
        self._html = html
        return self

    __repr__ = str.__str__

    def _repr_html_(self) -> Html | None:
        return self._html


# a number, with or without unit
NUMBER = re.compile(r"|-|[x+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?( ?(%|[KMGT]?i?B|[num]?s|min|h))?")
UNBOUND = 100_000  # columns of a file or a pipe, whose width is not limited
MIN_WIDTH = 4  # characters; columns do not shrink below it
HANG = "  "  # before the further lines of a first cell, which would else look like rows
# Where a cell may be wrapped, best first: after slashes and spaces (but not in a list or before a
# unit); commas; underscores; anywhere.
BREAKS = (
    r"(?:, | (?=(?:[KMGT]?i?B|[mu]?s)\b)|[^ /])+[ /]*|[ /]+",
    r"[^ ,/]+[ ,/]*|[ ,/]+",
    r"[^ ,/_]+[ ,/_]*|[ ,/_]+",
    r"(?s).",
)
LAST_COLUMN = re.compile(r".*\S {2,}(?=\S)")  # what stands before it
LEAST_HANGING = 24  # characters of a last column that is wrapped below itself


def terminal_width() -> int:
    """Columns of the terminal, or of $COLUMNS."""
    return shutil.get_terminal_size((UNBOUND, 24)).columns


def aligned(
    rows: Sequence[Sequence[str]],
    *,
    right: bool = False,
    ruled: bool = False,
    width: int | None = None,
) -> list[str]:
    """Rows of cells as lines with aligned columns. Cells are wrapped if the lines would be wider
    than the terminal, words last.

    Args:
      right: align cells to the right.
      ruled: draw a line below the first row.
      width: of the table; None: the terminal's.

    >>> print(
    ...     "\\n".join(
    ...         aligned(
    ...             [("path", "array"), ("blocks/0/kernel", "float32[8, 8]")], ruled=True, width=24
    ...         )
    ...     )
    ... )
    path       array
    ----------------
    blocks/0/  float32[8, 8]
      kernel
    """
    width = terminal_width() if width is None else width
    widths, lines = _widths(rows, width), []
    for row in rows:
        cells = [
            _wrapped(cell, wide, at == 0 and not right)
            for at, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        for at in range(max(map(len, cells))):
            parts = [cell[at] if at < len(cell) else "" for cell in cells]
            padded = [
                part.rjust(wide) if right else part.ljust(wide)
                for part, wide in zip(parts, widths, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
        if ruled and len(rows) > 1 and row is rows[0]:
            lines.append("-" * max(map(len, lines)))
    return lines


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Characters for each column. The next to shrink is the one that then adds the fewest lines, or
    the widest of several.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for pattern in BREAKS:
        least = [
            max(MIN_WIDTH, *(_least(cell, pattern, at == 0) for cell in column))
            for at, column in enumerate(columns)
        ]
        while sum(widths) + 2 * (len(widths) - 1) > width:
            shrinkable = [at for at, wide in enumerate(widths) if wide > least[at]]
            if not shrinkable:
                break
            counts = [
                [len(_wrapped(cell, wide, at == 0)) for cell in columns[at]]
                for at, wide in enumerate(widths)
            ]
            tallest = list(map(max, zip(*counts, strict=True)))

            def added(at: int, tallest: list[int] = tallest) -> tuple[int, int]:
                after = (len(_wrapped(cell, widths[at] - 1, at == 0)) for cell in columns[at])
                return sum(
                    max(count - most, 0) for count, most in zip(after, tallest, strict=True)
                ), -widths[at]

            widths[min(shrinkable, key=added)] -= 1
    return widths


@functools.lru_cache(maxsize=4096)
def _least(text: str, pattern: str, hanging: bool) -> int:
    """The width of a cell's longest part."""
    first, *rest = [part.rstrip() for part in re.findall(pattern, text)] or [""]
    return max([len(first), *(len(part) + len(HANG) * hanging for part in rest)])


@functools.lru_cache(maxsize=16384)
def _wrapped(text: str, width: int, hanging: bool) -> tuple[str, ...]:
    """A cell's text in lines; further ones hang if this is possible without splitting a word."""
    if len(text) <= width:
        return (text,)
    pattern = next(
        (pattern for pattern in BREAKS if _least(text, pattern, hanging) <= width), BREAKS[-1]
    )
    lines, hang = [""], HANG if hanging else ""
    for word in re.findall(pattern, text):
        if lines[-1].strip() and len(lines[-1] + word.rstrip()) > width:
            lines.append(hang)
        lines[-1] += word
    return tuple(line.rstrip() for line in lines)


def filled(text: str, *, width: int | None = None) -> str:
    """A text whose lines are wrapped at the terminal's width, inside a word only if it is a path;
    below a wide last column, or indented.

    >>> print(filled("fits: 3 GiB of 80 GiB on each device", width=20))
    fits: 3 GiB of 80
      GiB on each device
    """
    width = terminal_width() if width is None else width

    def wrap(line: str) -> str:
        before = LAST_COLUMN.match(line)
        indent = (
            len(before[0])
            if before and len(before[0]) + LEAST_HANGING <= width
            else len(line) - len(line.lstrip()) + 2
        )
        lines = [""]
        for word in re.findall(" +|[^ ]+", line):
            for part in [word] if indent + len(word) <= width else re.findall("[^/]+/*|/+", word):
                if lines[-1].strip() and len(lines[-1] + part) > width:
                    lines.append(" " * indent + part.lstrip())
                else:
                    lines[-1] += part
        return "\n".join(line.rstrip() for line in lines)

    return "\n".join(wrap(line) if len(line) > width else line for line in text.split("\n"))


def code_spans(text: str) -> str:
    """A text as HTML, in which what stands between backticks is code.

    >>> code_spans("sharded over `model` <all>")
    'sharded over <code>model</code> &lt;all&gt;'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def framed(body: str) -> Html:
    """HTML with the style of tables and drawings, for a page or a notebook's cell."""
    return Html(f'<div class="spmd-cell"><style>{STYLE}</style>{body}</div>')


def document(title: str, body: str, *, style: str = "") -> str:
    """A complete HTML page; `title` is escaped, `style` is CSS."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n:root {{ color-scheme: light dark }}\n"
        f"{style}\n</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def table(header: Sequence[Any], body: Iterable[Sequence[Any]], kind: str = "") -> str:
    """A table as HTML, one row per line; every cell is escaped, and columns of numbers are aligned
    to the right.

    >>> print(table(["path", "bytes"], [["a<b", "1.5 KiB"]]))
    <table><tr><th>path</th><th class="number">bytes</th></tr>
    <tr><td>a&lt;b</td><td class="number">1.5 KiB</td></tr></table>
    """
    rows = [[str(cell) for cell in row] for row in body]
    numeric = [
        bool(rows) and all(NUMBER.fullmatch(row[at]) for row in rows) for at in range(len(header))
    ]

    def line(tag: str, cells: Iterable[Any]) -> str:
        opening = (f'<{tag} class="number">' if right else f"<{tag}>" for right in numeric)
        return (
            "<tr>"
            + "".join(
                f"{start}{html.escape(str(cell))}</{tag}>"
                for start, cell in zip(opening, cells, strict=True)
            )
            + "</tr>"
        )

    css_class = f' class="{kind}"' if kind else ""
    return (
        f"<table{css_class}>"
        + "\n".join([line("th", header), *(line("td", row) for row in rows)])
        + "</table>"
    )


def folded(title: str, body: str) -> str:
    """HTML that is folded away below a title."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"
