"""Runs that others have measured: their table, and one of them planned."""

import importlib.util
from types import SimpleNamespace

import pytest

from benchmarks.published.fit import MATMUL, MEMORY, fitted, of_chip
from benchmarks.published.peaks import peak_row
from benchmarks.published.run import Published, Run, errors, notes, plan, read, row, summary
from spmd.planner.compile import PLUGIN
from spmd.planner.overhead import Item

HEAD = '[models.small]\nkind = "gpt"\n\n[targets.mine]\nlike = "h100"\ntitle = "mine"\nmemory = 5\nclocks = 0.5\n'
ENTRY = """
[[runs]]
id = "A1"
source = "a paper"
of = "a page"
hardware = "8 H100"
target = "8xh100"
model = "small"
layout = "fsdp"
rows = 2
seconds = 1.5
"""


def read_text(folder, text):
    (folder / "runs.toml").write_text(HEAD + text)
    return read(folder / "runs.toml")


def test_every_published_run_is_planned_or_says_why_not():
    published = read()
    assert len(published.runs) == 33 and {run.id for run in published.runs} >= {"T1", "J1", "M9", "N17", "K3", "C2", "V1", "P1"}
    for run in published.runs:
        assert run.not_planned or (published.cluster(run).count and run.model in published.models), run.id
        assert run.seconds or run.out_of_memory or run.not_planned, run.id
        assert not (run.counted and run.doubtful), run.id
    assert sum(run.counted for run in published.runs) >= 16


def test_targets_of_the_table_are_others_with_changes(tmp_path):
    published = read_text(tmp_path, ENTRY.replace("8xh100", "2x8xmine"))
    cluster, like = published.cluster(published.runs[0]), published.cluster(Run("", "", "", "", target="8xh100"))
    assert (cluster.count, cluster.target.name, cluster.target.memory) == (16, "mine", 5)
    assert cluster.target.flops["bfloat16"] == like.target.flops["bfloat16"] / 2
    assert cluster.target.memory_bandwidth == like.target.memory_bandwidth
    run = next(run for run in read().runs if run.kernel)
    achieved = read().cluster(run).target.achieved
    assert achieved != read().cluster(Run("", "", "", "", target=run.target)).target.achieved


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ('layout = "fsdp"\n', "", "A1: no layout"),
        ("rows = 2", "row = 2", "A1: unknown key row"),
        ('"small"', '"large"', "A1: no model large"),
        ("rows = 2", 'rows = 2\nremat = "some"', "A1: no remat some"),
        ("rows = 2", 'rows = 2\nkernel = "fast"', "A1: no kernel fast"),
        ("seconds = 1.5\n", "", "A1: no seconds, and not out_of_memory"),
        (ENTRY, ENTRY + ENTRY, "A1: two entries"),
    ],
)
def test_wrong_entries_are_errors(tmp_path, old, new, problem):
    with pytest.raises(ValueError, match=problem):
        read_text(tmp_path, ENTRY.replace(old, new))


def test_errors_are_counted_of_runs_without_doubt(tmp_path):
    second = ENTRY.replace("A1", "A2") + 'doubtful = "it says nothing"\n'
    third = ENTRY.replace("A1", "A3") + 'not_planned = "it cannot be"\n'
    published = read_text(tmp_path, ENTRY + second + third)
    expected = "dense transformers: 1 runs, median error 10.0%, worst 10.0%; 1 inside of the plan's range."
    assert summary(published, {"A1": 0.9, "A2": 3.0}, ["A1"])[0] == expected
    assert errors([0.8, 1.1, 1.0]) == pytest.approx((0.1, 0.2))
    text = "\n".join(notes(published))
    assert "- A2: it says nothing." in text and "- A3: it cannot be." in text


def test_fit_finds_the_shares_that_times_were_made_with():
    runs = [Run(name, source, "", "", seconds=1.0) for name, source in (("A", "one"), ("B", "two"), ("C", "two"))]
    matmul, memory = MATMUL[:, None], MEMORY[None]
    grid = {run.id: part / matmul * 0.7 + (1 - part) / memory * 0.85 for run, part in zip(runs, (0.9, 0.5, 0.2), strict=True)}
    at = fitted(runs, grid)
    assert (round(MATMUL[at[0]], 3), round(MEMORY[at[1]], 3)) == (0.7, 0.85)
    held_out = {}
    lines = of_chip(runs, grid, held_out)
    assert len(lines) == 5 and held_out == pytest.approx({"A": 1.0, "B": 1.0, "C": 1.0})
    faster = {name: seconds * (0.8 if name == "A" else 1.0) for name, seconds in grid.items()}
    of_chip(runs, faster, held_out)
    assert held_out["A"] == pytest.approx(0.8) and held_out["B"] > 1.05, "each source is predicted from the others alone"


def test_peaks_are_compared_as_an_allocator_counts_them():
    items = (
        Item("program", 20 * 2**30, 2**30),
        Item("batches placed ahead", 2 * 2**30, 0.0),
        Item("CUDA context", 2**29, 2**28, pool=False),
    )
    memory = SimpleNamespace(inside=items[:2], batch=2**30, peak=20 * 2**30, expected=int(22.5 * 2**30), range=(20 * 2**30, 24 * 2**30))
    memory.capacity, memory.likelihood = 80 * 2**30, 0.9
    line = peak_row(Run("A1", "", "", "", peak=25.0), SimpleNamespace(memory=memory))
    assert line == "| A1 | 25.0 | 20.0 | 20.0 | 0.80 | 22.5 | 20.0 to 24.0 | 80.0 | 90% |"
    runs = [run for run in read().runs if run.peak and not run.not_planned]
    assert runs and all(run.memory for run in runs), "each difference is explained"


@pytest.mark.system
@pytest.mark.skipif(importlib.util.find_spec(PLUGIN) is None, reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'")
def test_published_run_is_planned():
    published = read()
    (run,) = (run for run in published.runs if run.id == "M1")
    planned = plan(run, published)
    assert isinstance(published, Published) and planned.compiled.exact
    low, high = planned.timeline.range
    assert low < planned.timeline.seconds < high
    assert 0.75 < planned.timeline.seconds / run.seconds < 1.25
    assert planned.timeline.attention > 0 and planned.memory.fits
    assert row(run, planned).startswith("| M1 | llm-foundry | mpt_125m | 8xa100_80 |")
