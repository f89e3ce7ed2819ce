"""The entries of runs.toml: runs, and the models and targets that they name."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import spmd
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster

RUNS = Path(__file__).parent / "runs.toml"
REMATS = {  # by an entry's `remat`
    "": spmd.Remat(),
    "products": spmd.Remat("dots", modules=("blocks/layers",)),
    "layers": spmd.Remat(modules=("blocks/layers",)),
    "weights_products": spmd.Remat("dots_no_batch", modules=("blocks/layers",)),
    "first_of_pairs": spmd.Remat(
        modules=("blocks/layers/first",),
        rules=(spmd.Remat("dots_no_batch", ("blocks/layers/second",)),),
    ),
}


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
    attention: str = "auto"
    logits: bool = False
    kernel: str = ""
    seconds: float | None = None
    peak: float | None = None
    out_of_memory: bool = False
    fitted: bool = True
    memory: str = ""
    differs: str = ""
    doubtful: str = ""
    unstable: str = ""
    not_planned: str = ""

    @property
    def counted(self) -> bool:
        """Whether its error is part of the statistics."""
        return (
            not self.doubtful
            and not self.unstable
            and not self.not_planned
            and self.seconds is not None
        )


def layout_of(run: Run) -> spmd.Layout:
    """A shipped layout, or one of this folder."""
    here = RUNS.parent / f"{run.layout}.toml"
    return spmd.Layout.load(here if here.is_file() else run.layout)


def mesh_of(run: Run, layout: spmd.Layout, devices: int) -> MeshSpec:
    """The run's mesh, or its layout's."""
    return MeshSpec.parse(run.mesh or dict(layout.mesh)).resolve(devices)


@dataclasses.dataclass(frozen=True)
class Times:
    """The planned seconds of a step, and their range."""

    seconds: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Published:
    """The content of runs.toml: runs, and the models and targets that they name."""

    runs: tuple[Run, ...]
    models: Mapping[str, Mapping[str, Any]]
    targets: Mapping[str, Mapping[str, Any]]
    kernels: Mapping[str, Mapping[str, tuple[float, float]]]

    def dense(self, run: Run) -> bool:
        """Whether its model is a transformer of text."""
        return bool(run.model) and self.models[run.model]["kind"] in (
            "gpt",
            "unrolled_gpt",
            "llama",
        )

    def devices(self, run: Run) -> int:
        """How many devices a run has."""
        return self.cluster(run).count

    def step_rows(self, run: Run) -> int:
        """Rows of a step, on all devices."""
        return (
            run.rows
            * run.accumulate
            * mesh_of(run, layout_of(run), self.devices(run)).sizes["data"]
        )

    def cluster(self, run: Run) -> Cluster:
        """Its hardware; a target of runs.toml is another one with some figures replaced, and so is
        one with another kernel of attention.
        """
        count, times, name = run.target.rpartition("x")
        changes = dict(self.targets.get(name, {"like": name}))
        cluster = Cluster.parse(f"{count}{times}{changes.pop('like')}")
        clocks = changes.pop("clocks", 1.0)
        changes["flops"] = {dtype: rate * clocks for dtype, rate in cluster.target.flops.items()}
        if run.kernel:
            shares = self.kernels[run.kernel][cluster.target.name]
            changes["achieved"] = dataclasses.replace(
                cluster.target.achieved, attention=shares[0], attention_backward=shares[1]
            )
        return dataclasses.replace(
            cluster, target=dataclasses.replace(cluster.target, **({"name": name} | changes))
        )


def read(path: Path = RUNS) -> Published:
    """The published runs.

    Raises:
      ValueError: an entry has an unknown key, lacks one, or names a model or remat that is not
        there.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    known, problems, runs = {field.name for field in dataclasses.fields(Run)}, [], []
    for entry in table["runs"]:
        planned = () if "not_planned" in entry else ("target", "model", "layout", "rows")
        missing = {"id", "source", "of", "hardware", *planned} - set(entry)
        wrong = [f"unknown key {key}" for key in set(entry) - known] + [
            f"no {key}" for key in missing
        ]
        if not wrong:
            run = Run(**entry)
            runs.append(run)
            wrong += (
                [f"no model {run.model}"] if run.model and run.model not in table["models"] else []
            )
            wrong += [f"no remat {run.remat}"] if run.remat not in REMATS else []
            wrong += (
                [f"no kernel {run.kernel}"]
                if run.kernel and run.kernel not in table.get("kernels", {})
                else []
            )
            wrong += (
                ["no seconds, and not out_of_memory"]
                if planned and run.seconds is None and not run.out_of_memory
                else []
            )
        problems += [f"{entry.get('id')}: {why}" for why in wrong]
    repeated = {run.id for run in runs if [other.id for other in runs].count(run.id) > 1}
    problems += [f"{name}: two entries" for name in sorted(repeated)]
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return Published(
        tuple(runs), table["models"], table.get("targets", {}), table.get("kernels", {})
    )
