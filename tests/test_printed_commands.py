"""Shell commands in messages and pages: none writes to the file that it reads, which the shell
empties first.
"""

import ast
import re
from pathlib import Path

import pytest

import spmd

ROOT = Path(spmd.__file__).parent
REDIRECTED = re.compile(r"([^\n`|;&]*?\s)>>?\s*([^\s`|;&)]*\.[a-z]+\b)")
SUFFIXES = ("", ".jsonl", ".json", ".toml", ".csv", ".html", ".txt", ".md")


def filled_in(node, suffix):
    """A string of the sources, with names in place of what it is formatted with: `{path.stem}.csv`
    is `path` where that is a .csv.
    """
    text = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else [node]:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        source = ast.unparse(part.value)
        base = re.sub(r"\W|stem|name|quote|shlex", "", source)
        text += base if source.endswith(".stem") else base + suffix
    return text


def overwritten(text):
    """Files that a command reads, and that its output replaces."""
    return [
        target
        for words, target in REDIRECTED.findall(text)
        if target.strip("\"'") in re.split(r"[\s\"']+", words)
    ]


def test_a_command_that_empties_its_input_is_noticed():
    assert overwritten("as  jq -c '.[]' a.jsonl > a.jsonl  writes them") and overwritten(
        'sort "a.txt" b.txt >a.txt'
    ) == ["a.txt"]
    node = ast.parse("f\"jq '.[]' {name.name} > {name.stem}.jsonl\"").body[0].value
    assert any(overwritten(filled_in(node, suffix)) for suffix in SUFFIXES)
    assert not overwritten("spmd layouts show fsdp > mine.toml")


@pytest.mark.parametrize(
    "file", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_no_message_prints_a_command_that_empties_its_input(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        # else it redirects nothing
        if any(isinstance(part, ast.Constant) and ">" in str(part.value) for part in parts):
            assert not any(overwritten(filled_in(node, suffix)) for suffix in SUFFIXES), (
                ast.unparse(node)
            )


def test_no_page_shows_a_command_that_empties_its_input():
    pages = [
        path for folder in ("docs", "examples") for path in (ROOT.parent / folder).rglob("*.md")
    ]
    assert pages
    for page in pages:
        assert not overwritten(page.read_text(encoding="utf-8")), page
