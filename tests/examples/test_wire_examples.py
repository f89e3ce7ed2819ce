"""The scripts of `examples/wire`, as a person runs them."""

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import environment

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "wire").glob("*.py"))
LINE = re.compile(r"(.+): loss ([\d.]+) to ([\d.]+), ([\d,]+) bytes sent per device and step")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_is_short_and_shows_what_changes(path):
    text = path.read_text(encoding="utf-8")
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text))) < 60
    docstring = text.split('"""')[1]
    assert re.search(r"^    -", docstring, re.M) and re.search(r"^    \+.*wire\.", docstring, re.M)


def test_page_shows_the_diff_of_each_script():
    page = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    shown = re.findall(r"\(\.\./examples/wire/(\w+\.py)\).*?```diff\n(.*?)```", page, re.S)
    assert sorted(name for name, _ in shown) == [path.name for path in SCRIPTS]
    for name, diff in shown:
        assert textwrap.indent(diff, "    ") in (ROOT / "examples" / "wire" / name).read_text(
            encoding="utf-8"
        ), name


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_learns_as_well_with_fewer_bytes(path, tmp_path):
    if path.name == "keras_loop.py" and not importlib.util.find_spec("keras"):
        pytest.skip('needs Keras 3: pip install "keras>=3.10"')
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    exact, encoded = (LINE.fullmatch(line) for line in done.stdout.splitlines())
    assert exact and encoded and exact[1].startswith("Exact()") and encoded[1].startswith("Int8")
    first, last, loss = float(exact[2]), float(exact[3]), float(encoded[3])
    assert last < first / 2 and abs(loss - last) < 0.05 * first
    sent, before = (int(found[4].replace(",", "")) for found in (encoded, exact))
    assert sent < before / 2


@pytest.mark.system
def test_keras_loop_says_what_to_install(tmp_path):
    script = "import runpy, sys; sys.modules['keras'] = None; runpy.run_path(sys.argv[1])"
    path = next(path for path in SCRIPTS if path.name == "keras_loop.py")
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (
        done.returncode == 1
        and done.stderr.strip() == 'This example needs Keras 3: pip install "keras>=3.10"'
    )
