"""Fits shares of the peak that programs reach to published runs, and reports the error on runs that
were not fitted to.

    # after run.py, whose compiled programs it takes from $SPMD_CACHE
    python benchmarks/published/fit.py

For each device, the shares of the peak in matrix products and of the memory's bandwidth are
searched on a grid, with the least mean squared logarithm of predicted / measured, each source with
the same weight, and with a weak preference for PRIOR. Leave-one-source-out: the fit is repeated
without each source, and predicts that source's runs, also those that were never fitted to (`fitted
= false`). Everything else in a target is not fitted.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

import spmd
from spmd.planner.hlo import parse
from spmd.planner.timeline import timeline_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import reported
from benchmarks.published.entries import Run, read
from benchmarks.published.run import errors, plan

# matmul and memory for which times are computed
COARSE = np.array([0.5, 0.6, 0.75, 1.0]), np.array([0.6, 0.75, 1.0])
# and those that are searched; times are linear in 1 / share
MATMUL, MEMORY = np.arange(0.5, 0.96, 0.01), np.arange(0.6, 0.96, 0.01)
# what kernels on their own reach, and a standard deviation of its logarithm
PRIOR = {"matmul": (0.7, 0.15), "memory": (0.85, 0.1)}

Grid = Mapping[str, np.ndarray]  # by run: seconds [matmul, memory]


def grid_of(run: Run) -> np.ndarray:
    """The predicted seconds of a run for each pair of shares."""
    planned = plan(run, read())
    module, data_axes = parse(planned.compiled.hlo), planned.program.placed.resolved.data_axes
    seconds = np.zeros(tuple(map(len, COARSE)))
    for at, (matmul, memory) in enumerate(itertools.product(*COARSE)):
        achieved = dataclasses.replace(
            planned.cluster.target.achieved, matmul=float(matmul), memory=float(memory)
        )
        target = dataclasses.replace(planned.cluster.target, achieved=achieved)
        cluster = dataclasses.replace(planned.cluster, target=target)
        seconds.flat[at] = timeline_of(module, planned.mesh, cluster, data_axes).seconds
    rows = np.array(
        [np.interp(1 / MATMUL, 1 / COARSE[0][::-1], column[::-1]) for column in seconds.T]
    ).T
    return np.array([np.interp(1 / MEMORY, 1 / COARSE[1][::-1], row[::-1]) for row in rows])


def fitted(runs: Collection[Run], grid: Grid) -> tuple[int, int]:
    """The place in the grid of the best shares for these runs."""
    total = np.zeros((len(MATMUL), len(MEMORY)))
    for source in {run.source for run in runs}:
        of_source = [run for run in runs if run.source == source]
        total += (
            sum(np.log(grid[run.id] / run.seconds) ** 2 for run in of_source)
            / len(of_source)
            / 0.1**2
        )
    (matmul, width), (memory, height) = PRIOR["matmul"], PRIOR["memory"]
    total += ((np.log(MATMUL / matmul) / width) ** 2)[:, None] + (
        (np.log(MEMORY / memory) / height) ** 2
    )[None]
    at = np.unravel_index(np.argmin(total), total.shape)
    return int(at[0]), int(at[1])


def of_chip(runs: Collection[Run], grid: Grid, held_out: dict[str, float]) -> list[str]:
    """A report on one kind of device; adds predicted / measured of each run, by a fit without its
    source, to `held_out`.
    """
    chosen = [run for run in runs if run.fitted]
    everything = fitted(chosen, grid)
    lines = [
        "| left out | matmul | memory | predicted / measured of what was left out |",
        "|---|---|---|---|",
    ]
    inside = ", ".join(f"{run.id} {grid[run.id][everything] / run.seconds:.2f}" for run in chosen)
    lines.append(
        f"| nothing | {MATMUL[everything[0]]:.2f} | {MEMORY[everything[1]]:.2f} | in sample: "
        f"{inside} |"
    )
    for source in sorted({run.source for run in runs}):
        at = fitted([run for run in chosen if run.source != source], grid)
        ratios = {run.id: grid[run.id][at] / run.seconds for run in runs if run.source == source}
        held_out |= ratios
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        lines.append(f"| {source} | {MATMUL[at[0]]:.2f} | {MEMORY[at[1]]:.2f} | {shown} |")
    return lines


def main() -> None:
    argparse.ArgumentParser(description="Fit shares of the peak to published runs.").parse_args()
    published, grid, held_out = read(), {}, {}
    runs = [run for run in published.runs if run.counted and published.dense(run)]
    for run in list(runs):
        try:
            grid[run.id] = grid_of(run)
        except spmd.SpmdError as error:
            print(f"{run.id}: {error}", flush=True)
            runs.remove(run)
    chips = {run.id: run.target.rpartition("x")[2].partition("_")[0].upper() for run in runs}
    lines = []
    for chip in sorted(set(chips.values())):
        lines += [
            f"## {chip}",
            "",
            *of_chip([run for run in runs if chips[run.id] == chip], grid, held_out),
            "",
        ]
    median, worst = errors(list(held_out.values()))
    lines.append(
        f"On sources that were left out: {len(held_out)} runs, median error {median:.1%}, worst "
        f"{worst:.1%}."
    )
    for title, fitted_to in (("fitted to otherwise", True), ("never fitted to", False)):
        median, worst = errors([held_out[run.id] for run in runs if run.fitted == fitted_to])
        lines.append(
            f"- {title}: {sum(run.fitted == fitted_to for run in runs)} runs, median error "
            f"{median:.1%}, worst {worst:.1%}."
        )
    print("\n".join(lines))
    head = reported.head(
        "Shares of the peak, fitted to published runs",
        "python benchmarks/published/fit.py",
        "jax",
        "jaxlib",
        "jax-cuda13-pjrt",
    )
    reported.write("published_fit", [*head, *lines])


if __name__ == "__main__":
    main()
