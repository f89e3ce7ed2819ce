"""Runs that others have measured: their table, and one of them planned."""

import importlib.util
from types import SimpleNamespace

import pytest

from benchmarks.published.comparisons import (
    contradicted,
    pairs,
    rankings_report,
    scaling_report,
    series,
)
from benchmarks.published.entries import Published, Run, Times, read
from benchmarks.published.fit import MATMUL, MEMORY, fitted, of_chip
from benchmarks.published.peaks import peak_row
from benchmarks.published.run import errors, notes, plan, row, summary
from spmd.planner.compile import PLUGIN
from spmd.planner.overhead import Item

HEAD = (
    '[models.small]\nkind = "gpt"\n\n[targets.mine]\nlike = "h100"\ntitle = "mine"\nmemory = 5\n'
    "clocks = 0.5\n"
)
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


@pytest.mark.system
def test_every_published_run_is_planned_or_says_why_not():
    published = read()
    assert len(published.runs) >= 41 and {run.id for run in published.runs} >= {
        "T1",
        "J1",
        "M9",
        "N17",
        "K3",
        "C2",
        "V1",
        "P1",
    }
    for run in published.runs:
        assert run.not_planned or (
            published.cluster(run).count and run.model in published.models
        ), run.id
        assert run.seconds or run.out_of_memory or run.not_planned, run.id
        assert not (run.counted and (run.doubtful or run.unstable)), run.id
    assert {run.id for run, _ in contradicted(published)} == {
        run.id for run in published.runs if run.unstable
    }
    assert sum(run.counted for run in published.runs) >= 16


def test_targets_of_the_table_are_others_with_changes(tmp_path):
    published = read_text(tmp_path, ENTRY.replace("8xh100", "2x8xmine"))
    cluster, like = (
        published.cluster(published.runs[0]),
        published.cluster(Run("", "", "", "", target="8xh100")),
    )
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
    published = read_text(tmp_path, ENTRY + 'differs = "it is older"\n' + second + third)
    expected = (
        "dense transformers: 1 runs, median error 10.0%, worst 10.0%; 1 inside of the plan's range."
    )
    assert summary(published, {"A1": 0.9, "A2": 3.0}, ["A1"])[0] == expected
    assert errors([0.8, 1.1, 1.0]) == pytest.approx((0.1, 0.2), rel=1e-9)
    text = "\n".join(notes(published, {"A1": 0.8, "A2": 3.0}))
    assert "- A1, 0.80: it is older." in text and "- A2, " not in text
    assert "- A2: it says nothing." in text and "- A3: it cannot be." in text


def times(seconds):
    return {name: Times(middle, 0.9 * middle, 1.1 * middle) for name, middle in seconds.items()}


def entry(name, *, seconds, target="8xh100", mesh="data=8", rows=2, more=""):
    changes = {
        "A1": name,
        "8xh100": target,
        "rows = 2": f'rows = {rows}\nmesh = "{mesh}"',
        "seconds = 1.5": f"seconds = {seconds}",
    }
    text = ENTRY
    for old, new in changes.items():
        text = (
            text.replace(f'"{old}"', f'"{new}"') if f'"{old}"' in text else text.replace(old, new)
        )
    return text + more


def test_pairs_differ_in_layout_alone(tmp_path):
    entries = [
        entry("A1", seconds=1.0),
        entry("A2", seconds=2.0, mesh="data=4,model=2", rows=4),
        entry("A3", seconds=2.05, mesh="data=2,model=4", rows=8),
        entry("B1", seconds=4.0, rows=4),  # more rows in a step
        entry("B2", seconds=9.0, mesh="data=2,stage=4", rows=8, more='unstable = "it varies"\n'),
        entry("C1", seconds=0.6, target="2x8xh100", mesh="data=8,model=2"),  # more devices
    ]
    published = read_text(tmp_path, "".join(entries))
    planned = times({"A1": 1.1, "A2": 1.0, "A3": 1.5, "B1": 1.0, "B2": 3.0, "C1": 0.5})
    found = {tuple(run.id for run in pair.runs): pair for pair in pairs(published, planned)}
    assert set(found) == {
        ("A1", "A2"),
        ("A1", "A3"),
        ("A2", "A3"),
        ("A1", "B2"),
        ("A2", "B2"),
        ("A3", "B2"),
    }
    assert (
        not found["A1", "A2"].right and found["A1", "A2"].overlap and not found["A1", "A3"].overlap
    )
    assert found["A2", "A3"].tie and found["A1", "B2"].unstable and found["A1", "B2"].right
    text = "\n".join(rankings_report(published, planned))
    assert "- 1 of 2 pairs ordered right; with unstable runs, 4 of 5." in text
    assert (
        "| 8xh100 | A1 (data=8, 2 x 1) | A2 (data=4,model=2, 4 x 1) | 1 and 2 s | 1.1 and 1 s | "
        "wrong; inside of both ranges |" in text
    )


def test_runs_that_their_source_contradicts(tmp_path):
    slower = entry("C1", seconds=1.1, target="2x8xh100", mesh="data=8,model=2")
    wasteful = entry("A2", seconds=6.0, mesh="data=4,model=2", rows=4)
    published = read_text(tmp_path, entry("A1", seconds=1.0) + slower + wasteful)
    assert {(run.id, other.id) for run, other in contradicted(published)} == {
        ("C1", "A1"),
        ("A2", "C1"),
    }


def test_scaling_is_relative_to_the_smallest_run(tmp_path):
    runs = [
        entry(f"A{n}", seconds=seconds, target=f"{n}x8xh100", mesh="")
        for n, seconds in ((4, 1.25), (1, 1.0), (2, 1.1))
    ]
    other = entry("B1", seconds=3.0, target="8x8xh100", mesh="", rows=4)
    published = read_text(tmp_path, "".join(runs) + other)
    planned = times({"A1": 2.0, "A2": 2.0, "A4": 2.5, "B1": 1.0})
    assert [[run.id for run in runs] for runs in series(published, planned)] == [["A1", "A2", "A4"]]
    lines = scaling_report(published, planned)
    assert lines[2:5] == [
        "| A1 | 8 | 1.000 | 1.000 | |",
        "| A2 | 16 | 0.909 | 1.000 | +10.0% |",
        "| A4 | 32 | 0.800 | 0.800 | +0.0% |",
    ]
    assert (
        lines[-1]
        == "- 1 series, 2 throughputs relative to the smallest run, largest error 10.0% (A2)."
    )


def test_fit_finds_the_shares_that_times_were_made_with():
    runs = [
        Run(name, source, "", "", seconds=1.0)
        for name, source in (("A", "one"), ("B", "two"), ("C", "two"))
    ]
    matmul, memory = MATMUL[:, None], MEMORY[None]
    grid = {
        run.id: part / matmul * 0.7 + (1 - part) / memory * 0.85
        for run, part in zip(runs, (0.9, 0.5, 0.2), strict=True)
    }
    at = fitted(runs, grid)
    assert (round(MATMUL[at[0]], 3), round(MEMORY[at[1]], 3)) == (0.7, 0.85)
    held_out = {}
    lines = of_chip(runs, grid, held_out)
    assert len(lines) == 5 and held_out == pytest.approx({"A": 1.0, "B": 1.0, "C": 1.0}, rel=1e-9)
    added = [*runs, Run("D", "one", "", "", seconds=2.0, fitted=False)]
    assert of_chip(added, grid | {"D": grid["A"]}, held_out)[2] == lines[2] and held_out[
        "D"
    ] == pytest.approx(held_out["A"] / 2, rel=1e-9)
    faster = {name: seconds * (0.8 if name == "A" else 1.0) for name, seconds in grid.items()}
    of_chip(runs, faster, held_out)
    assert held_out["A"] == pytest.approx(0.8, rel=1e-9) and held_out["B"] > 1.05, (
        "each source is predicted from the others alone"
    )


def test_peaks_are_compared_as_an_allocator_counts_them():
    items = (
        Item("program", 20 * 2**30, 2**30),
        Item("batches placed ahead", 2 * 2**30, 0.0),
        Item("CUDA context", 2**29, 2**28, pool=False),
    )
    memory = SimpleNamespace(
        inside=items[:2],
        batch=2**30,
        peak=20 * 2**30,
        expected=int(22.5 * 2**30),
        range=(20 * 2**30, 24 * 2**30),
    )
    memory.capacity, memory.likelihood = 80 * 2**30, 0.9
    line = peak_row(Run("A1", "", "", "", peak=25.0), SimpleNamespace(memory=memory))
    assert line == "| A1 | 25.0 | 20.0 | 20.0 | 0.80 | 22.5 | 20.0 to 24.0 | 80.0 | 90% |"
    runs = [run for run in read().runs if run.peak and not run.not_planned]
    assert runs and all(run.memory for run in runs), "each difference is explained"


@pytest.mark.system
@pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)
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
