"""Tables of text that fit the terminal, and HTML in one style for pages and notebook cells."""

import html
import io
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, Literal

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
# Columns of a file or a pipe, whose width is not limited.
UNBOUND = 100_000
# Rich breaks lines at what `\s` of `re` matches: at this character too, which has no width and is
# taken out again. It stands behind slashes, so that paths are broken there.
BREAK = "\x1f"
# By rows of four characters, as rich defines boxes: two blanks between columns, the padding of a
# cell and the box's divider, and a line below the header.
RULE = "    \n    \n----\n    \n    \n    \n    \n    \n"
BEFORE_LAST_COLUMN = re.compile(r".*\S {2,}(?=\S)")
# Characters of a last column that is wrapped below itself.
LEAST_HANGING = 24


def terminal_width() -> int:
    """Return the width of the terminal, or $COLUMNS, in characters."""
    return shutil.get_terminal_size((UNBOUND, 24)).columns


def aligned(
    rows: Sequence[Sequence[str]],
    *,
    right: bool = False,
    ruled: bool = False,
    width: int | None = None,
) -> list[str]:
    """Return rows of cells as lines with aligned columns. Cells are wrapped if the lines would be
    wider than the terminal, paths after their slashes.

    Args:
      right: align cells to the right.
      ruled: draw a line below the first row.
      width: of the table, in characters; None: the terminal's.

    >>> rows = [("path", "array"), ("blocks/0/kernel", "float32[8, 8]")]
    >>> print("\\n".join(aligned(rows, ruled=True, width=28)))
    path           array
    ----------------------------
    blocks/0/      float32[8, 8]
    kernel
    """
    # imported here: rich takes 0.1 s, and many commands print no table
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return []
    if width is None:
        width = terminal_width()
    table = Table(box=Box(RULE), show_edge=False, show_header=ruled, padding=(0, 1, 0, 0))
    table.pad_edge = False
    justify: Literal["left", "right"] = "left"
    if right:
        justify = "right"
    for cell in rows[0]:
        table.add_column(Text(cell), justify=justify, overflow="fold")
    for row in rows[ruled:]:
        table.add_row(*(Text(cell.replace("/", f"/{BREAK}")) for cell in row))
    # In a notebook, a console of rich prints into the cell by default.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().replace(BREAK, "").splitlines()]


def filled(text: str, *, width: int | None = None) -> str:
    """Return a text whose lines are wrapped at the terminal's width, inside a word only if it is a
    path; below a wide last column, or indented.

    >>> print(filled("fits: 3 GiB of 80 GiB on each device", width=20))
    fits: 3 GiB of 80
      GiB on each device
    """
    if width is None:
        width = terminal_width()
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) > width:
            lines += _wrapped(line, width)
        else:
            lines.append(line)
    return "\n".join(lines)


def _wrapped(line: str, width: int) -> list[str]:
    """Return the lines into which a line is wrapped."""
    indent = len(line) - len(line.lstrip()) + 2
    columns = BEFORE_LAST_COLUMN.match(line)
    if columns and len(columns[0]) + LEAST_HANGING <= width:
        indent = len(columns[0])
    parts: list[str] = []
    for word in re.findall(" +|[^ ]+", line):
        if indent + len(word) <= width:
            parts.append(word)
        else:
            parts += re.findall("[^/]+/*|/+", word)
    lines = [""]
    for part in parts:
        if lines[-1].strip() and len(lines[-1] + part) > width:
            lines.append(" " * indent + part.lstrip())
        else:
            lines[-1] += part
    return [line.rstrip() for line in lines]


def code_spans(text: str) -> str:
    """Return a text as HTML, in which text between backticks is code.

    >>> code_spans("sharded over `model` <all>")
    'sharded over <code>model</code> &lt;all&gt;'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def framed(body: str) -> Html:
    """Return HTML with the style of tables and drawings, for a page or a notebook's cell."""
    return Html(f'<div class="spmd-cell"><style>{STYLE}</style>{body}</div>')


def document(title: str, body: str, *, style: str = "") -> str:
    """Return a complete HTML page; `title` is escaped, `style` is CSS."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n:root {{ color-scheme: light dark }}\n"
        f"{style}\n</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def table(header: Sequence[Any], body: Iterable[Sequence[Any]], kind: str = "") -> str:
    """Return a table as HTML, one row per line; every cell is escaped, and columns of numbers are
    aligned to the right.

    >>> print(table(["path", "bytes"], [["a<b", "1.5 KiB"]]))
    <table><tr><th>path</th><th class="number">bytes</th></tr>
    <tr><td>a&lt;b</td><td class="number">1.5 KiB</td></tr></table>
    """
    rows = [list(map(str, row)) for row in body]
    numeric = [False] * len(header)
    if rows:
        columns = zip(*rows, strict=True)
        numeric = [all(map(NUMBER.fullmatch, column)) for column in columns]
    css_class = ""
    if kind:
        css_class = f' class="{kind}"'
    lines = [_table_row("th", header, numeric), *(_table_row("td", row, numeric) for row in rows)]
    return f"<table{css_class}>" + "\n".join(lines) + "</table>"


def _table_row(tag: str, cells: Sequence[Any], numeric: Sequence[bool]) -> str:
    """Return one row of a table as HTML."""
    row = ""
    for cell, is_number in zip(cells, numeric, strict=True):
        css_class = ""
        if is_number:
            css_class = ' class="number"'
        row += f"<{tag}{css_class}>{html.escape(str(cell))}</{tag}>"
    return f"<tr>{row}</tr>"


def folded(title: str, body: str) -> str:
    """Return HTML that is folded away below a title."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"
