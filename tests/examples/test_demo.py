"""`make demo`: it learns, writes the promised files, and leaves earlier runs alone."""

import importlib
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.processes import environment

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(monkeypatch):
    """The demo as a module. Only a script has its own folder on sys.path, so this adds it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    return importlib.import_module("demo")


def test_demo_learns_and_leaves_its_results(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "demo"
    # the layout
    assert "dense/kernel" in done.stdout and "mesh data=4, model=2: 4 workers" in done.stdout
    assert "step 180: eval_loss" in done.stderr  # progress, although this is not a terminal
    assert "test accuracy 0.9" in done.stdout
    counts = re.findall(r"^.*[0-9] parameters.*$", f"{done.stdout}\n{done.stderr}", re.MULTILINE)
    assert len(counts) == 1, counts  # in the summary, or by `fit`
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "samples/s, training" in (folder / "report.html").read_text(encoding="utf-8")
    assert "step 180" in (folder / "report.html").read_text(encoding="utf-8")
    assert (folder / "checkpoints" / "180").is_dir()
    records = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [record["eval_accuracy"] >= 0.98 for record in records if "eval_accuracy" in record][-1]


def test_demo_says_when_it_fails_and_keeps_earlier_runs(demo, tmp_path, monkeypatch, capsys):
    poor = types.SimpleNamespace(
        history=None, evaluate=lambda data: {"accuracy": 0.5}, samples_per_second=1.0
    )
    monkeypatch.setattr(demo.spmd, "fit", lambda *arguments, **options: poor)
    for name in "curve", "report":
        monkeypatch.setattr(demo.viz, name, lambda *arguments, **options: None)
    mine = tmp_path / "demo" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep", encoding="utf-8")
    assert demo.main(["--runs", str(tmp_path)]) == 1
    assert "test accuracy 0.5000 is below 0.98" in capsys.readouterr().err
    assert mine.read_text(encoding="utf-8") == "keep" and len(list(mine.parent.iterdir())) == 1
    assert (tmp_path / "demo-2").is_dir()


def test_fresh_folder_counts_on(demo, tmp_path):
    assert [demo.fresh_folder(tmp_path / "runs").name for _ in range(3)] == [
        "demo",
        "demo-2",
        "demo-3",
    ]
