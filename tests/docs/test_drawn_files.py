"""Pictures: the files are what is drawn, the pages' figures are those of results, and all layouts
are drawn and found.
"""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from docpages import PAGES, ROOT

from docs.building import charts, concepts, draw
from spmd.layout.layout_files import shipped

FIGURES = json.loads(
    (ROOT / "benchmarks" / "results" / "headline_plans.json").read_text(encoding="utf-8")
)


@pytest.mark.system
@pytest.mark.parametrize("name", draw.NAMES)
def test_a_file_is_what_is_drawn(name):
    shown = (draw.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert shown == draw.file_text(name), "python docs/building/draw.py"
    assert len(shown) < 60_000 and ET.fromstring(shown).get("aria-label")


def test_every_file_is_shown():
    shown = {
        name
        for page in PAGES.values()
        for name in re.findall(r"pictures/(\w+)\.svg", page.read_text(encoding="utf-8"))
    }
    assert {path.stem for path in draw.FOLDER.iterdir()} == shown == {*draw.NAMES, "timeline"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_readme_has_a_picture_for_each_theme(theme):
    text = PAGES["README.md"].read_text(encoding="utf-8")
    assert all(f"docs/pictures/{name}_{theme}.svg" in text for name in draw.PANELS)
    assert (
        draw.file_text(f"readme_fits_{theme}").count(f"color:{getattr(draw, theme.upper())}") == 1
    )


def test_the_decision_tree_ends_in_shipped_layouts():
    ends = [layout for _, answers in concepts.TREE for _, layout in answers]
    assert set(ends) <= set(shipped()) and len(ends) == len(set(ends)) >= 12
    assert all(f'href="#{layout}"' in concepts.decision_tree() for layout in ends)


def gib(name):
    return f"{FIGURES[name]['expected'] / 2**30:.1f} of {FIGURES[name]['capacity'] / 2**30:.1f} GiB"


def test_figures_in_the_text_are_those_of_the_plans():
    assert (
        not FIGURES["gpt data_parallel"]["fits"]
        and FIGURES["gpt fsdp"]["fits"]
        and FIGURES["lstm one device"]["fits"]
    )
    for page in ("README.md", "docs/index.md"):
        text = PAGES[page].read_text(encoding="utf-8")
        assert (
            f"does not fit, {gib('gpt data_parallel')}" in text
            and f"fits, {gib('gpt fsdp')}" in text
        )
    text = re.sub(r"\\\n\s*", "", PAGES["README.md"].read_text(encoding="utf-8"))
    assert FIGURES["gpt fsdp"]["command"] in text
    text = re.sub(r"\\\n\s*", "", PAGES["docs/benchmarks.md"].read_text(encoding="utf-8"))
    alone = FIGURES["lstm one device"]["seconds"]
    assert FIGURES["lstm wavefront"]["command"] in text and gib("lstm one device") in text
    assert f"{alone / FIGURES['lstm wavefront']['seconds']:.1f} times as fast on eight GPUs" in text
    times = [
        charts.seconds(FIGURES[name]["seconds"])
        for name in ("lstm one device", "lstm data_parallel", "lstm wavefront")
    ]
    assert "one device {}, data parallel {}, wavefront {}".format(*times) in text
    lost = {
        row["ratio"]: row["median"]
        for row in charts.table("model_parallel", "| wavefront 1 | a layer", "| ratio")
    }
    assert f"{float(lost['wavefront 1 / one device']):.2f} times as long as one device" in text
