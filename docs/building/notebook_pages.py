"""Executed notebooks as pages: prose, code, and below each cell what it has shown."""

import base64
import html
import json
import re
from pathlib import Path

_DRAWING = re.compile(r'<img\b[^>]*?src="data:image/svg\+xml;base64,([^"]*)"[^>]*>')
# what `tools/notebooks.py` adds for Git hosts
_PORTABLE = re.compile(r'(<svg) color="#808080"([^>]*>)(?:<style>.*?</style>)?', re.DOTALL)
# columns, which stay below each other only if lines are not wrapped
_ALIGNED = re.compile(r"\S {2,}\S")
_GREY = re.compile(r"#808080\b")  # matplotlib's, on every ground: see notebooks/matplotlibrc
_DECLARATION = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_SIZE = re.compile(r'(<svg\b[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"')
_STYLE = re.compile(r"<style\b.*?</style>", re.DOTALL)
LEGIBLE = 600  # units; the text of larger pictures is left out of the gallery
THUMBNAIL = "thumbnail"  # the tag of the cell whose last picture stands in the gallery


def _drawn(match: re.Match) -> str:
    """A drawing as part of the page, whose colour it takes."""
    return _GREY.sub(
        "currentColor", _PORTABLE.sub(r"\1\2", base64.b64decode(match[1]).decode(), count=1)
    )


def _inside(text: str) -> str:
    """HTML of a cell as part of a page: tables are not styled as those of the page's text."""
    return _DRAWING.sub(_drawn, text).replace("<table>", '<table class="cell">')


def _text(parts) -> str:
    return "".join(parts)


def _printed(text: str) -> str:
    """Text of a cell: prose is wrapped, columns are not."""
    kind = "" if _ALIGNED.search(text) else ' class="prose"'
    return f"<pre{kind}>{html.escape(text, quote=False)}</pre>"


def _figure(svg: str) -> str:
    """A figure of matplotlib as part of the page: its greys are the page's colour, and it is as
    wide as at its resolution.
    """
    svg = _STYLE.sub("", _DECLARATION.sub("", svg))
    svg = _SIZE.sub(
        lambda match: f'{match[1]} fill="currentColor" width="{float(match[2]) * 4 / 3:.0f}"',
        svg,
        count=1,
    )
    return f'<div class="figure">{_GREY.sub("currentColor", svg)}</div>'


def shown(output: dict) -> str:
    """One output of a cell as HTML; "" if a page has no use for it.

    >>> shown({"output_type": "stream", "name": "stdout", "text": "1 < 2\\n"})
    '<pre class="prose">1 &lt; 2</pre>'
    """
    if output["output_type"] == "stream":
        return _printed(_text(output["text"]).rstrip())
    data = {kind: _text(parts) for kind, parts in output.get("data", {}).items()}
    if "text/html" in data:
        return _inside(data["text/html"])
    if "image/svg+xml" in data:
        return _figure(data["image/svg+xml"])
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"].replace(chr(10), "")}">'
    return _printed(data.get("text/plain", ""))


def cells(path: Path) -> list[dict]:
    """The cells of a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def markdown(path: Path) -> str:
    """A notebook as Markdown, with an empty element for the outputs of each cell: see `fill`."""
    parts = []
    for number, cell in enumerate(cells(path)):
        source = _text(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        tables = [
            _text(output["data"]["text/markdown"])
            for output in cell["outputs"]
            if "text/markdown" in output.get("data", {})
        ]
        parts += tables or (
            [f'<div class="output" id="output-{number}"></div>'] if cell["outputs"] else []
        )
    files = (
        f'<p class="files">Download: <a href="{path.name}" download>Notebook</a> <a '
        f'href="{path.stem}.py" download>Script</a></p>'
    )
    heading, _, rest = "\n\n".join(parts).partition("\n")
    return f"{heading}\n\n{files}\n{rest}\n"


def fill(page: str, path: Path) -> str:
    """The HTML of a page from `markdown`, with the outputs of the notebook in their places."""
    styles = set()

    def once(match: re.Match) -> str:
        fresh = match[0] not in styles
        styles.add(match[0])
        return match[0] if fresh else ""

    for number, cell in enumerate(cells(path)):
        outputs = "\n".join(
            f"<div>{part}</div>" for part in map(shown, cell.get("outputs", [])) if part
        )
        empty = f'<div class="output" id="output-{number}"></div>'
        # no <div>: the search would index what follows the first inner one
        page = page.replace(
            empty,
            f'<section class="output" data-search-exclude>{_STYLE.sub(once, outputs)}</section>',
        )
    return page


def thumbnail(path: Path) -> str:
    """The picture that stands for a notebook: the last one of the cell with the tag `thumbnail`.

    Raises:
      ValueError: no cell has the tag, or it shows no picture.
    """
    for cell in cells(path):
        if THUMBNAIL in cell["metadata"].get("tags", []):
            shows = " ".join(map(shown, cell["outputs"]))
            pictures = re.findall(r"<svg\b.*?</svg>|<img\b[^>]*>", shows, re.DOTALL)
            if pictures:
                width = re.search(r'viewBox="\S+ \S+ ([\d.]+)', pictures[-1])
                kind = "spmd-cell large" if width and float(width[1]) > LEGIBLE else "spmd-cell"
                return (
                    "<span "
                    f'class="{kind}">{"".join(_STYLE.findall(shows)[:1])}{pictures[-1]}</span>'
                )
    raise ValueError(f"{path.name}: no cell with the tag {THUMBNAIL!r} shows a picture")
