"""Pages of the site from executed notebooks."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SVG = '<svg viewBox="0 0 1 1"><text>1</text></svg>'


def load(path):
    specification = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


pages, tool = (
    load(ROOT / "docs" / "building" / "notebook_pages.py"),
    load(ROOT / "tools" / "notebooks.py"),
)


def test_shown_puts_drawings_into_the_page():
    """What the tool makes an image, for Git hosts, takes the colour of the page again."""
    committed = re.sub(r"<svg\b.*?</svg>", tool.as_image, f"<p>a</p>{SVG}")
    assert "<svg" not in committed
    shown = pages.shown(
        {"output_type": "display_data", "data": {"text/html": committed, "text/plain": "a"}}
    )
    assert shown == "<p>a</p>" + SVG.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')


def test_shown_escapes_text_and_prefers_drawings():
    assert (
        pages.shown({"output_type": "stream", "name": "stdout", "text": ["a < b\n", "c\n"]})
        == '<pre class="prose">a &lt; b\nc</pre>'
    )
    assert (
        pages.shown({"output_type": "stream", "name": "stdout", "text": "loss  0.5\n"})
        == "<pre>loss  0.5</pre>"
    ), "columns"
    picture = {
        "image/svg+xml": SVG.replace(
            "<text", '<style type="text/css">*{}</style><text style="fill: #808080"'
        ),
        "image/png": "iVBO\n",
        "text/plain": "<Figure>",
    }
    shown = pages.shown({"output_type": "display_data", "data": picture})
    assert (
        shown.startswith('<div class="figure"><svg')
        and "fill: currentColor" in shown
        and "#808080" not in shown
        and "<style" not in shown
    )
    del picture["image/svg+xml"]
    assert (
        pages.shown({"output_type": "display_data", "data": picture})
        == '<img alt="" src="data:image/png;base64,iVBO">'
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_fill_leaves_no_cell_empty(path):
    markdown = pages.markdown(path)
    assert markdown.startswith("# ")
    empty = re.findall(r'<div class="output" id="output-\d+"></div>', markdown)
    filled = pages.fill("\n".join(empty), path)
    assert not set(empty) & set(filled.splitlines()) and filled.count(
        'class="output" data-search-exclude'
    ) == len(empty)
    styles = re.findall(r"<style>.*?</style>", filled, re.DOTALL)
    assert len(set(styles)) == len(styles)
    assert re.search(r"<(svg|img)\b", pages.thumbnail(path))


def test_gallery_names_every_notebook():
    gallery, navigation = (
        (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8"),
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8"),
    )
    for path in NOTEBOOKS:
        assert (
            f"(../notebooks/{path.name})" in gallery and f"notebooks/{path.stem}.md" in navigation
        )
        title = "".join(
            json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
        ).partition("\n")[0]
        assert title.startswith("# ")
