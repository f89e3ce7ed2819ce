"""Utilization of training across sites that others have measured, held against plans.

    pip install -e '.[gpu-compiler]'
    python benchmarks/published/sites.py        # writes benchmarks/results/published_sites.md

Runs are entries of sites.toml, planned with diloco_sites.toml. The speed of the links is not
compiled: one program for each run.
"""

import os

# plans need no GPU, and JAX's plugin for GPUs complains of missing libraries
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import spmd
from spmd.planner.cluster import Cluster
from spmd.planner.text_report import seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import reported
from benchmarks.published.entries import read as read_runs
from benchmarks.published.models import KINDS, loss_of_logits
from benchmarks.published.run import OPTIONS

HERE = Path(__file__).parent
COLUMNS = (
    "run",
    "source",
    "link of a site",
    "steps",
    "published",
    "planned",
    "inner step",
    "synchronization",
    "over each link",
)


@dataclasses.dataclass(frozen=True)
class SiteRun:
    """An entry of sites.toml, which says what its fields are."""

    id: str
    source: str
    of: str
    hardware: str
    target: str
    model: dict[str, int]
    kernel: str
    rows: int
    accumulate: int
    every: int
    bandwidths: list[str]
    latency: str
    utilization: tuple[float, float]
    differs: str = ""


def read(path: Path = HERE / "sites.toml") -> list[SiteRun]:
    """The published runs across sites."""
    return [SiteRun(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["runs"]]


def plan(run: SiteRun) -> Any:
    """The plan of a run, at its slowest link."""
    cluster = Cluster.parse(f"{run.target}@{run.bandwidths[0]},{run.latency}")
    forward, backward = read_runs().kernels[run.kernel][cluster.target.name]
    achieved = dataclasses.replace(
        cluster.target.achieved, attention=forward, attention_backward=backward
    )
    cluster = dataclasses.replace(
        cluster, target=dataclasses.replace(cluster.target, achieved=achieved)
    )
    layout = spmd.Layout.load(HERE / "diloco_sites.toml")
    compiler = dataclasses.replace(layout.compiler, options=OPTIONS)
    server = dataclasses.replace(layout.parameter_server, every=run.every)
    layout = dataclasses.replace(
        layout, attention=spmd.Attention("auto"), compiler=compiler, parameter_server=server
    )
    sizes = dict(run.model)
    tokens = jax.ShapeDtypeStruct(
        (run.rows * run.accumulate * cluster.count, sizes.pop("length")), "int32"
    )
    return spmd.plan(
        lambda: KINDS["llama"](**sizes, rngs=nnx.Rngs(0)),
        {"tokens": tokens, "targets": tokens},
        loss=loss_of_logits,
        optimizer=optax.adamw(4e-4),
        target=cluster,
        mesh=f"site={cluster.sites},gpu={cluster.devices_per_site}",
        layout=layout,
        precision="bfloat16",
        accumulate=run.accumulate,
        timeout=1500.0,
    )


def rows(run: SiteRun, planned: Any) -> list[str]:
    """A line of the table for each speed."""
    curve = spmd.utilization(planned, bandwidths=run.bandwidths)
    low, high = run.utilization
    lines = []
    for bandwidth, period in zip(run.bandwidths, curve.periods[run.every], strict=True):
        inner, published = period.alone.seconds, f"{low:.0%} to {high:.0%}"
        cells = [
            run.id,
            run.source,
            f"{bandwidth}, {run.latency}",
            str(run.every),
            published,
            f"{period.utilization:.1%}",
        ]
        cells += [
            seconds(inner),
            seconds(period.total - run.every * inner),
            f"{period.site_bytes / 1e9:.2f} GB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    print("\n".join(lines), flush=True)
    for run in read():
        planned = plan(run)
        lines += rows(run, planned)
        print(
            *lines[2:],
            planned,
            spmd.utilization(planned, periods=(50, 125, 500)),
            sep="\n",
            flush=True,
        )
    head = reported.head(
        "Published runs across sites, planned",
        "python benchmarks/published/sites.py",
        "jax",
        "jaxlib",
        "jax-cuda13-pjrt",
    )
    notes = [f"- {run.id}: {text}." for run in read() for text in (f"from {run.of}", run.differs)]
    reported.write(
        "published_sites", [*head, *lines, "", __doc__.strip().split("\n\n")[-1], "", *notes]
    )


if __name__ == "__main__":
    main()
