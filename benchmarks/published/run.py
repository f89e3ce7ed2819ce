"""Plans of training steps that others have measured, held against what they measured.

    pip install -e '.[gpu-compiler]'  # the compiler alone, 400 MB, no CUDA libraries
    make published  # every run; writes benchmarks/results/published.md
    # some runs, without writing; --report prints their plans
    python benchmarks/published/run.py --only M6,M8

Runs are entries of runs.toml. Programs are compiled once and kept in $SPMD_CACHE.
"""

import os

# plans need no GPU, and JAX's plugin for GPUs complains of missing libraries
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import spmd
from spmd.planner.text_report import time_range

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import reported
from benchmarks.published.comparisons import rankings_report, scaling_report
from benchmarks.published.entries import REMATS, Published, Run, Times, layout_of, mesh_of, read
from benchmarks.published.models import KINDS, loss_of_logits, next_token_loss
from benchmarks.published.peaks import INTRODUCTION as PEAKS, peak_row

# XLA would compute products again to save memory, also where the step fits without it; the programs
# that were measured do not.
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


def plan(run: Run, published: Published) -> Any:
    """The plan of a run: all its microbatches, with the optimizer's step."""
    sizes = dict(published.models[run.model])
    kind, length, cluster = sizes.pop("kind"), sizes.pop("length", 0), published.cluster(run)
    layout = layout_of(run)
    compiler = dataclasses.replace(layout.compiler, options=OPTIONS)
    layout = dataclasses.replace(
        layout, attention=spmd.Attention(run.attention), remat=REMATS[run.remat], compiler=compiler
    )
    if layout.pipeline.axis:
        layout = dataclasses.replace(
            layout, pipeline=dataclasses.replace(layout.pipeline, microbatches=run.accumulate)
        )
    mesh, rows = mesh_of(run, layout, cluster.count), published.step_rows(run)
    if kind in ("gpt", "unrolled_gpt"):
        sizes["length"] = length
    if published.dense(run):
        tokens = jax.ShapeDtypeStruct((rows, length), "int32")
        batch, loss = (
            {"tokens": tokens, "targets": tokens},
            loss_of_logits if run.logits else next_token_loss,
        )
    else:
        batch = {
            "image": jax.ShapeDtypeStruct((rows, length, length, 3), "bfloat16"),
            "label": jax.ShapeDtypeStruct((rows,), "int32"),
        }
        loss = spmd.losses.cross_entropy
    return spmd.plan(
        lambda: KINDS[kind](**sizes, rngs=nnx.Rngs(0)),
        batch,
        loss=loss,
        optimizer=optax.adamw(3e-4) if kind != "resnet50" else optax.sgd(0.1, momentum=0.9),
        target=cluster,
        mesh=mesh,
        layout=layout,
        precision="bfloat16",
        accumulate=1 if layout.pipeline.axis else run.accumulate,
        timeout=1500.0,
    )


def errors(ratios: Sequence[float]) -> tuple[float, float]:
    """The median and the largest absolute error of predicted / measured."""
    sizes = [abs(ratio - 1) for ratio in ratios]
    return statistics.median(sizes), max(sizes)


def row(run: Run, planned: Any) -> str:
    """A line of the table."""
    times, memory = planned.timeline, planned.memory.peak / 2**30
    measured = f"{run.seconds:.4g} s" if run.seconds else "out of memory"
    ratio = f"{times.seconds / run.seconds:.2f}" if run.seconds else ""
    peak = f"{run.peak:.1f}" if run.peak else "more than there is" if run.out_of_memory else ""
    cells = [
        run.id,
        run.source,
        run.model,
        run.target,
        run.mesh or run.layout,
        f"{run.rows} x {run.accumulate}",
        run.remat or "-",
    ]
    cells += [
        measured,
        f"{times.seconds:.4g} s",
        time_range(times),
        ratio,
        f"{times.mfu:.1%}",
        peak,
    ]
    cells.append(
        "another schedule's"
        if planned.layout.pipeline.axis
        else f"{memory:.1f}" + ("" if planned.fits else " (does not fit)")
    )
    return "| " + " | ".join(cells) + " |"


COLUMNS = (
    "run",
    "source",
    "model",
    "hardware",
    "layout",
    "rows",
    "remat",
    "measured",
    "planned",
    "range",
    "ratio",
    "MFU",
    "peak",
    "planned",
)
HEAD = f"| {' | '.join(COLUMNS)} |"

INTRODUCTION = """Ratio: planned / measured. Rows: of a worker's microbatch, times microbatches. Peak: GiB on a device. Plans take
their shares from `spmd/planner/targets/`, two of which are fitted to these runs (matrix products and memory, for A100 and for H100):
`published_fit.md` has the errors on sources that were not fitted to. Attention is that of the kernel that a run had, where that is another
than cuDNN's (`[kernels]` in runs.toml). Peaks are those of the program alone, and what PyTorch's allocator counts. All microbatches of a
step are planned, in a loop. What sources leave open, and which runs do not count, was decided with the measured times known; only the two
shares are tested on runs that they were not fitted to."""  # noqa: E501


MISSED = 0.15

RANKINGS = """Pairs of runs with the same source, model, kind and number of devices, and rows in a step. They differ in layout alone: the
mesh, and the rows of a microbatch. Measured times within 5 % of each other are a tie, since each was measured once. Unstable are runs that
their source contradicts (runs.toml has the rule, which was written with the measured times known)."""  # noqa: E501
SCALING = """Runs of the same program with the same rows on each device, over more and more of them: throughput of each device, relative to
that of the smallest run. Of each series of several runs only the smallest, if any, was fitted to."""  # noqa: E501


def summary(
    published: Published, ratios: Mapping[str, float], inside: Collection[str] = ()
) -> list[str]:
    """Median and worst error of dense transformers, and of all, and how many measured times are
    inside of the range of a plan.
    """
    lines = []
    for title, only in (("dense transformers", True), ("all that are counted", False)):
        counted = [run for run in published.runs if run.id in ratios and run.counted]
        chosen = {run.id: ratios[run.id] for run in counted if published.dense(run) or not only}
        if chosen:
            median, worst = errors(list(chosen.values()))
            within = f"{len(set(inside) & set(chosen))} inside of the plan's range"
            lines.append(
                f"{title}: {len(chosen)} runs, median error {median:.1%}, worst {worst:.1%}; "
                f"{within}."
            )
    return lines


def notes(published: Published, ratios: Mapping[str, float]) -> list[str]:
    """What was not reached, and what is different, doubtful and not planned."""
    missed = [
        run
        for run in published.runs
        if run.id in ratios and run.counted and abs(ratios[run.id] - 1) > MISSED
    ]
    parts = [
        f"## Errors of more than {MISSED:.0%}",
        "",
        *(f"- {run.id}, {ratios[run.id]:.2f}: {run.differs}." for run in missed),
        "",
    ]
    titles = {
        "doubtful": "Not counted",
        "unstable": "Not counted or ranked",
        "not_planned": "Not planned",
    }
    titles |= {"differs": "Programs that differ", "memory": "Peaks explained"}
    for field, title in titles.items():
        found: dict[str, list[str]] = {}
        for run in published.runs:
            if getattr(run, field):
                found.setdefault(getattr(run, field), []).append(run.id)
        parts += [
            f"## {title}",
            "",
            *(f"- {', '.join(ids)}: {why}." for why, ids in found.items()),
            "",
        ]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan published runs.")
    parser.add_argument("--only", help="ids of runs, by comma")
    parser.add_argument("--report", action="store_true", help="print each plan's full report")
    args = parser.parse_args()
    published = read()
    wanted = (
        args.only.split(",")
        if args.only
        else [run.id for run in published.runs if not run.not_planned]
    )
    peaks: list[str] = []
    lines, ratios, times, inside = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)], {}, {}, []
    print("\n".join(lines), flush=True)
    for run in (run for run in published.runs if run.id in wanted):
        try:
            planned = plan(run, published)
        except spmd.SpmdError as error:
            print(f"{run.id}: {error}", flush=True)
            continue
        lines.append(row(run, planned))
        print(planned if args.report else lines[-1], flush=True)
        if (run.peak or run.out_of_memory) and not planned.layout.pipeline.axis:
            peaks.append(peak_row(run, planned))
        times[run.id] = Times(planned.timeline.seconds, *planned.timeline.range)
        if run.seconds:
            (low, high), ratios[run.id] = (
                planned.timeline.range,
                planned.timeline.seconds / run.seconds,
            )
            inside += [run.id] if low <= run.seconds <= high else []
    ranked = ["## Rankings", "", RANKINGS, "", *rankings_report(published, times)]
    compared = [
        *ranked,
        "",
        "## Scaling",
        "",
        SCALING,
        "",
        *scaling_report(published, times),
        "",
        PEAKS,
        *peaks,
    ]
    print(*summary(published, ratios, inside), "", *compared, sep="\n")
    if not args.only:
        head = reported.head(
            "Published runs, planned",
            "python benchmarks/published/run.py",
            "jax",
            "jaxlib",
            "jax-cuda13-pjrt",
        )
        found = [f"- {line}" for line in summary(published, ratios, inside)]
        reported.write(
            "published",
            [
                *head,
                *lines,
                "",
                *found,
                "",
                INTRODUCTION,
                "",
                *compared,
                "",
                *notes(published, ratios),
            ],
        )


if __name__ == "__main__":
    main()
