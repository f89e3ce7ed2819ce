"""What objects show: tables of text that fit the terminal; in a notebook's cell HTML in one style and in the page's own ink."""

import html
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

# Paper and ink are the page's: what a browser prefers is not always what a notebook has.
STYLE = """
.spmd-cell {
  --ink: currentColor; --soft: #8883; --line: #8886; --good: #2f8f57; --bad: #d9483b; --tight: #b7791f; --a: #3566c0; --b: #6f9ae0;
  --c: #c4571f; --d: #8a6fc4; --e: #2f8f83; --f: #9aa3b2; --g: #d9a441; --h: #b3b9c6; --i: #4c9fb5; font: 14px/1.5 system-ui, sans-serif;
}
.spmd-cell h1 { font-size: 1.4rem; margin: 0 }
.spmd-cell h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; border-bottom: 1px solid var(--line) }
.spmd-cell p { margin: .4rem 0 }
.spmd-cell table { border-collapse: collapse; margin: .4rem 0; font-size: .9em }
.spmd-cell table tr :is(td, th) { padding: .15rem .9rem .15rem 0; text-align: left !important; white-space: nowrap }
.spmd-cell table tr :is(td, th) { border: 0; border-bottom: 1px solid var(--soft) }
.spmd-cell :is(td, pre) { font-family: ui-monospace, monospace }
.spmd-cell table tr:nth-child(n) { background: none }
.spmd-cell pre { background: var(--soft); padding: .7rem; white-space: pre-wrap; font-size: .88em }
.spmd-cell .wide { overflow-x: auto }
.spmd-cell svg { display: block; width: 100%; max-width: 960px }
.spmd-cell svg text { font: 12px system-ui, sans-serif; fill: currentColor }
.spmd-cell svg text.on { fill: #fff; paint-order: stroke; stroke: #000a; stroke-width: 2.5px }
.spmd-cell .verdict { font-weight: 600; color: var(--good) }
.spmd-cell .verdict.bad { color: var(--bad) }
.spmd-cell .verdict.tight { color: var(--tight) }
"""


class Html(str):
    """HTML as a string that a notebook shows as what it says.

    >>> Html("<b>four</b>")._repr_html_()
    '<b>four</b>'
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


class Text(str):
    """Text that a cell shows as it is printed, or as the HTML that says the same.

    >>> Text("a  b")
    a  b
    """

    _shown: Html | None

    def __new__(cls, text: str, shown: Html | None = None) -> "Text":
        """`shown` is the HTML, if there is any."""
        made = super().__new__(cls, text)
        made._shown = shown
        return made

    __repr__ = str.__str__

    def _repr_html_(self) -> Html | None:
        return self._shown


UNBOUND = 100_000  # columns of a file or a pipe, which can be as wide as it wants
NARROW = 6  # characters to which a column may shrink
# What a cell is broken into, from good to bad: behind spaces (but not in a list), slashes and underscores; behind commas too; anywhere.
PIECES = (r"(?:, |[^ /_])+[ /_]*|[ /_]+", r"[^ ,/_]+[ ,/_]*|[ ,/_]+", r"(?s).")


def terminal_width() -> int:
    """Columns of the terminal, or of $COLUMNS."""
    return shutil.get_terminal_size((UNBOUND, 24)).columns


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False, ruled: bool = False, width: int | None = None) -> list[str]:
    """Rows of cells as lines whose columns are aligned. Where that is wider than the terminal the widest cells take several lines.

    Args:
      right: cells end where their column ends, not begin where it begins.
      ruled: a line below the first row.
      width: of the whole; None: the terminal's.

    >>> print("\\n".join(aligned([("path", "array"), ("blocks/0/kernel", "float32[8, 8]")], ruled=True, width=24)))
    path       array
    ----------------
    blocks/0/  float32[8, 8]
    kernel
    """
    width = terminal_width() if width is None else width
    widths, lines = _widths(rows, width), []
    for row in rows:
        cells = [_wrapped(cell, wide) for cell, wide in zip(row, widths, strict=True)]
        for at in range(max(map(len, cells))):
            parts = [cell[at] if at < len(cell) else "" for cell in cells]
            padded = [part.rjust(wide) if right else part.ljust(wide) for part, wide in zip(parts, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
        if ruled and len(rows) > 1 and row is rows[0]:
            lines.append("-" * max(map(len, lines)))
    return lines


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Characters for each column; those give way first whose cells can be broken well, and of them the widest."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for pieces in PIECES:
        least = [max(NARROW, *(len(piece.rstrip()) for cell in column for piece in re.findall(pieces, cell))) for column in columns]
        while sum(widths) + 2 * (len(widths) - 1) > width:
            rest = [at for at, wide in enumerate(widths) if wide > least[at]]
            if not rest:
                break
            widths[max(rest, key=lambda at: widths[at])] -= 1
    return widths


def _wrapped(text: str, width: int) -> list[str]:
    """A cell's text in lines."""
    if len(text) <= width:
        return [text]
    found = (re.findall(pieces, text) for pieces in PIECES)
    fitting = next(words for words in found if max(len(word.rstrip()) for word in words) <= width)
    lines = [""]
    for word in fitting:
        if lines[-1] and len(lines[-1] + word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def filled(text: str, *, width: int | None = None) -> str:
    """A text whose lines are no wider than the terminal; those that are continue in the next line, indented.

    >>> print(filled("fits: 3 GiB of 80 GiB on each device", width=20))
    fits: 3 GiB of 80
      GiB on each device
    """
    width = terminal_width() if width is None else width
    wrap = lambda line: textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2), break_on_hyphens=False)
    return "\n".join(wrap(line) if len(line) > width else line for line in text.split("\n"))


def framed(body: str) -> Html:
    """HTML with the style that tables and drawings are in, for a page or a notebook's cell."""
    return Html(f'<div class="spmd-cell"><style>{STYLE}</style>{body}</div>')


def table(header: Sequence[Any], body: Iterable[Sequence[Any]], kind: str = "") -> str:
    """A table as HTML, one row to a line; every cell is text and is escaped.

    >>> table(["path"], [["a<b"]])
    '<table><tr><th>path</th></tr>\\n<tr><td>a&lt;b</td></tr></table>'
    """
    line = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
    named = f' class="{kind}"' if kind else ""
    return f"<table{named}>" + "\n".join([line("th", header), *(line("td", row) for row in body)]) + "</table>"


def folded(title: str, body: str) -> str:
    """HTML below a title that opens it."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"
