"""docs/renamed.md leads from names of earlier versions to names that the library has."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "spmd").rglob("*.py")}
WORDS = set(re.findall(r"\w+", " ".join(SOURCES.values())))


def new_names(title):
    """The names in the last column of the table below a title."""
    _, _, section = (
        (ROOT / "docs/renamed.md").read_text(encoding="utf-8").partition(f"## {title}\n")
    )
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [name for row in rows[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[-2])]


def source_of(name):
    """(The text of the deepest module that a dotted name has, the names after it.)"""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:count])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path in SOURCES:
                return SOURCES[path], parts[count:]
    return "", parts


@pytest.mark.parametrize("title", ["Modules", "Classes and functions"])
def test_new_names_exist(title):
    names = new_names(title)
    assert len(names) > 100
    for name in names:
        if re.fullmatch(r"spmd(\.\w+)+", name):
            text, rest = source_of(name)
            assert text and (not rest or re.search(rf"\b{rest[0]}\b", text)), name
        else:
            assert set(re.findall(r"\w+", name)) <= WORDS, name
