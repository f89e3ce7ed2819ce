"""Plans of training steps that others have measured, held against what they measured.

    pip install -e '.[gpu-compiler]'                     # the compiler alone, 400 MB, no CUDA libraries
    make published                                       # every run; writes benchmarks/results/published.md
    python benchmarks/published/run.py --only M6,M8      # some runs, without writing; --report prints their plans

Runs are entries of runs.toml. Programs are compiled once and kept in $SPMD_CACHE.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # plans need no GPU, and JAX's plugin for GPUs complains of missing libraries

import argparse
import dataclasses
import statistics
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import spmd
from spmd.mesh import MeshSpec
from spmd.planner.target import Cluster
from spmd.planner.text_report import time_range

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import reported
from benchmarks.published.models import KINDS, loss_of_logits, next_token_loss
from benchmarks.published.peaks import INTRODUCTION as PEAKS, peak_row

RUNS = Path(__file__).parent / "runs.toml"
REMATS = {  # by an entry's `remat`
    "": spmd.Remat(),
    "products": spmd.Remat("dots", modules=("blocks/layers",)),
    "layers": spmd.Remat(modules=("blocks/layers",)),
    "weights_products": spmd.Remat("dots_no_batch", modules=("blocks/layers",)),
    "first_of_pairs": spmd.Remat(modules=("blocks/layers/first",), rules=(spmd.Remat("dots_no_batch", ("blocks/layers/second",)),)),
}
# XLA would compute products again to save memory, also where the step fits without it; the programs that were measured do not.
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


@dataclasses.dataclass(frozen=True)
class Run:
    """An entry of runs.toml, which says what its fields are."""

    id: str
    source: str
    of: str
    hardware: str
    target: str = ""
    model: str = ""
    layout: str = ""
    mesh: str = ""
    rows: int = 0
    accumulate: int = 1
    remat: str = ""
    attention: str | None = "auto"
    logits: bool = False
    kernel: str = ""
    seconds: float | None = None
    peak: float | None = None
    out_of_memory: bool = False
    memory: str = ""
    differs: str = ""
    doubtful: str = ""
    not_planned: str = ""

    @property
    def counted(self) -> bool:
        """Whether its error is part of the statistics."""
        return not self.doubtful and not self.not_planned and self.seconds is not None


@dataclasses.dataclass(frozen=True)
class Published:
    """The content of runs.toml: runs, and the models and targets that they name."""

    runs: tuple[Run, ...]
    models: Mapping[str, Mapping[str, Any]]
    targets: Mapping[str, Mapping[str, Any]]
    kernels: Mapping[str, Mapping[str, tuple[float, float]]]

    def dense(self, run: Run) -> bool:
        """Whether its model is a transformer of text."""
        return bool(run.model) and self.models[run.model]["kind"] in ("gpt", "unrolled_gpt", "llama")

    def cluster(self, run: Run) -> Cluster:
        """Its hardware; a target of runs.toml is another one with some figures replaced, and so is one with another kernel of attention."""
        count, times, name = run.target.rpartition("x")
        changes = dict(self.targets.get(name, {"like": name}))
        cluster = Cluster.parse(f"{count}{times}{changes.pop('like')}")
        clocks = changes.pop("clocks", 1.0)
        changes["flops"] = {dtype: rate * clocks for dtype, rate in cluster.target.flops.items()}
        if run.kernel:
            shares = self.kernels[run.kernel][cluster.target.name]
            changes["achieved"] = dataclasses.replace(cluster.target.achieved, attention=shares[0], attention_backward=shares[1])
        return dataclasses.replace(cluster, target=dataclasses.replace(cluster.target, **({"name": name} | changes)))


def read(path: Path = RUNS) -> Published:
    """The published runs.

    Raises:
      ValueError: an entry has an unknown key, lacks one, or names a model or remat that is not there.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    known, problems, runs = {field.name for field in dataclasses.fields(Run)}, [], []
    for entry in table["runs"]:
        planned = () if "not_planned" in entry else ("target", "model", "layout", "rows")
        missing = {"id", "source", "of", "hardware", *planned} - set(entry)
        wrong = [f"unknown key {key}" for key in set(entry) - known] + [f"no {key}" for key in missing]
        if not wrong:
            run = Run(**entry)
            runs.append(run)
            wrong += [f"no model {run.model}"] if run.model and run.model not in table["models"] else []
            wrong += [f"no remat {run.remat}"] if run.remat not in REMATS else []
            wrong += [f"no kernel {run.kernel}"] if run.kernel and run.kernel not in table.get("kernels", {}) else []
            wrong += ["no seconds, and not out_of_memory"] if planned and run.seconds is None and not run.out_of_memory else []
        problems += [f"{entry.get('id')}: {why}" for why in wrong]
    repeated = {run.id for run in runs if [other.id for other in runs].count(run.id) > 1}
    problems += [f"{name}: two entries" for name in sorted(repeated)]
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return Published(tuple(runs), table["models"], table.get("targets", {}), table.get("kernels", {}))


def plan(run: Run, published: Published) -> Any:
    """The plan of a run: all its microbatches, with the optimizer's step."""
    sizes = dict(published.models[run.model])
    kind, length, cluster = sizes.pop("kind"), sizes.pop("length", 0), published.cluster(run)
    here = RUNS.parent / f"{run.layout}.toml"
    layout = spmd.Layout.load(here if here.is_file() else run.layout)
    compiler = dataclasses.replace(layout.compiler, options=OPTIONS)
    layout = dataclasses.replace(layout, attention=spmd.Attention(run.attention or None), remat=REMATS[run.remat], compiler=compiler)
    mesh = MeshSpec.parse(run.mesh or dict(layout.mesh)).resolve(cluster.count)
    rows = run.rows * run.accumulate * mesh.sizes["data"]
    if kind in ("gpt", "unrolled_gpt"):
        sizes["length"] = length
    if published.dense(run):
        tokens = jax.ShapeDtypeStruct((rows, length), "int32")
        batch, loss = {"tokens": tokens, "targets": tokens}, loss_of_logits if run.logits else next_token_loss
    else:
        batch = {"image": jax.ShapeDtypeStruct((rows, length, length, 3), "bfloat16"), "label": jax.ShapeDtypeStruct((rows,), "int32")}
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
        accumulate=run.accumulate,
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
    cells = [run.id, run.source, run.model, run.target, run.mesh or run.layout, f"{run.rows} x {run.accumulate}", run.remat or "-"]
    cells += [measured, f"{times.seconds:.4g} s", time_range(times), ratio, f"{times.mfu:.1%}", peak]
    cells.append(f"{memory:.1f}" + ("" if planned.fits else " (does not fit)"))
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
shares are tested on runs that they were not fitted to."""


def summary(published: Published, ratios: Mapping[str, float], inside: Collection[str] = ()) -> list[str]:
    """Median and worst error of dense transformers, and of all, and how many measured times are inside of the range of a plan."""
    lines = []
    for title, only in (("dense transformers", True), ("all that are counted", False)):
        counted = [run for run in published.runs if run.id in ratios and run.counted]
        chosen = {run.id: ratios[run.id] for run in counted if published.dense(run) or not only}
        if chosen:
            median, worst = errors(list(chosen.values()))
            within = f"{len(set(inside) & set(chosen))} inside of the plan's range"
            lines.append(f"{title}: {len(chosen)} runs, median error {median:.1%}, worst {worst:.1%}; {within}.")
    return lines


def notes(published: Published) -> list[str]:
    """What is different, doubtful and not planned."""
    parts = []
    titles = {"doubtful": "Not counted", "not_planned": "Not planned", "differs": "Programs that differ", "memory": "Peaks explained"}
    for field, title in titles.items():
        found: dict[str, list[str]] = {}
        for run in published.runs:
            if getattr(run, field):
                found.setdefault(getattr(run, field), []).append(run.id)
        parts += [f"## {title}", "", *(f"- {', '.join(ids)}: {why}." for why, ids in found.items()), ""]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan published runs.")
    parser.add_argument("--only", help="ids of runs, by comma")
    parser.add_argument("--report", action="store_true", help="print each plan's full report")
    args = parser.parse_args()
    published = read()
    wanted = args.only.split(",") if args.only else [run.id for run in published.runs if not run.not_planned]
    peaks: list[str] = []
    lines, ratios, inside = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)], {}, []
    print("\n".join(lines), flush=True)
    for run in (run for run in published.runs if run.id in wanted):
        try:
            planned = plan(run, published)
        except spmd.SpmdError as error:
            print(f"{run.id}: {error}", flush=True)
            continue
        lines.append(row(run, planned))
        print(planned if args.report else lines[-1], flush=True)
        peaks += [peak_row(run, planned)] if run.peak or run.out_of_memory else []
        if run.seconds:
            (low, high), ratios[run.id] = planned.timeline.range, planned.timeline.seconds / run.seconds
            inside += [run.id] if low <= run.seconds <= high else []
    print(*summary(published, ratios, inside), *([PEAKS, *peaks] if peaks else []), sep="\n")
    if not args.only:
        head = reported.head("Published runs, planned", "python benchmarks/published/run.py", "jax", "jaxlib", "jax-cuda13-pjrt")
        found = [f"- {line}" for line in summary(published, ratios, inside)]
        reported.write("published", [*head, *lines, "", *found, "", INTRODUCTION, "", PEAKS, *peaks, "", *notes(published)])


if __name__ == "__main__":
    main()
