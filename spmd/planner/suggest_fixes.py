"""What would make a plan fit, tried in order and planned before it is told."""

import dataclasses
from collections.abc import Callable, Iterator

from spmd.errors import SpmdError, first_problem
from spmd.layout.schema import Default, Layout, OptimizerState
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.candidates import KEPT, microbatches, remats
from spmd.planner.planning import Plan, planned
from spmd.planner.target import LARGEST, LESS, Cluster
from spmd.planner.text_report import seconds
from spmd.tree import format_bytes


@dataclasses.dataclass(frozen=True)
class Fix:
    """A change to a plan, and its plan with that and all changes before it; printed, a line.

    Attributes:
      change: in words, as a layout or an option says it.
      plan: with the change; None where it cannot be made.
      why: then why not.
    """

    change: str
    plan: Plan | None
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether it does then."""
        return self.plan is not None and self.plan.fits

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.change}: {self.why}"
        memory, rows = self.plan.memory, f"{seconds(self.plan.timeline.seconds)} per step"
        verdict = "fits" if self.fits else "does not fit"
        return f"{self.change}: {verdict}, {format_bytes(memory.peak)} of {format_bytes(memory.capacity)}, {rows}"


@dataclasses.dataclass(frozen=True)
class _Trial:
    """What is planned next."""

    layout: Layout
    mesh: MeshSpec
    accumulate: int
    cluster: Cluster


def fixes_of(plan: Plan, *, timeout: float = 600.0, say: Callable[[str], None] = lambda line: None) -> tuple[Fix, ...]:
    """Plan one change after the other, each on top of those before it that help, until it fits.

    In this order: rematerialisation that keeps matrix products, then nothing; more microbatches; optimizer state cut over the workers;
    parameters too; twice the devices, and twice again.

    Returns:
      All that were tried, the last of which fits if any does; () for a plan that fits.
    """
    placed, found = plan.program.placed, []
    at = _Trial(plan.layout, plan.mesh, placed.config.accumulate, plan.cluster)
    best = plan
    for step in (_remat, _microbatches, _shard_optimizer, _shard_parameters, _more_devices):
        before = at
        for change, trial in step(before, best):
            if best.fits:
                break
            say(f"planning with {change}")
            moved = placed.moved(abstract_mesh(trial.mesh), trial.layout, accumulate=trial.accumulate)
            try:
                tried = planned(moved, plan.program.sample, trial.cluster, timeout=timeout)
            except SpmdError as error:
                found.append(Fix(change, None, first_problem(error)))
                break  # more of the same is refused as well
            found.append(Fix(change, tried))
            helps = tried.memory.peak < best.memory.peak * (LESS if step is _more_devices else 1.0)
            if helps:
                at, best = trial, tried
            elif step is _more_devices:
                break
    return tuple(found)


_Trials = Iterator[tuple[str, _Trial]]


def _remat(at: _Trial, best: Plan) -> _Trials:
    for remat in remats(best.program.placed):
        if KEPT.index(remat.saves) > KEPT.index(at.layout.remat.saves):
            where = f" modules = {list(remat.modules)}".replace("'", '"') if remat.modules else ""
            yield f'[remat] save = "{remat.saves}"{where}', dataclasses.replace(at, layout=dataclasses.replace(at.layout, remat=remat))


def _microbatches(at: _Trial, best: Plan) -> _Trials:
    """The least numbers that could do."""
    parts = best.program.placed.exchange.worker_count * (at.layout.pipeline.microbatches or 1)
    counts = [count for count in microbatches(best.rows, parts) if count > at.accumulate]
    could = [count for count in counts if best.at_least(count) <= best.memory.capacity]
    for count in (could or counts[-1:])[:3]:
        yield f"accumulate={count}", dataclasses.replace(at, accumulate=count)


def _whole(layout: Layout) -> bool:
    return layout.default.params == "replicate" and bool(layout.data_axes()) and layout.gradients.reduction in ("all_reduce", "compiler")


def _shard_optimizer(at: _Trial, best: Plan) -> _Trials:
    del best
    if _whole(at.layout) and at.layout.optimizer.shard is None:
        axis, gradients = at.layout.data_axes()[-1], dataclasses.replace(at.layout.gradients, reduction="reduce_scatter")
        layout = dataclasses.replace(at.layout, optimizer=OptimizerState(axis), gradients=gradients)
        yield f'[optimizer] shard = "{axis}", reduction = "reduce_scatter"', dataclasses.replace(at, layout=layout)


def _shard_parameters(at: _Trial, best: Plan) -> _Trials:
    del best
    if at.layout.default.params == "replicate" and at.layout.data_axes() and at.layout.gradients.reduction != "parameter_server":
        axis, gradients = at.layout.data_axes()[-1], dataclasses.replace(at.layout.gradients, reduction="reduce_scatter")
        default = Default(f"shard:{axis}")
        layout = dataclasses.replace(at.layout, optimizer=OptimizerState(), default=default, gradients=gradients)
        yield f'[default] params = "shard:{axis}", reduction = "reduce_scatter"', dataclasses.replace(at, layout=layout)


def _more_devices(at: _Trial, best: Plan) -> _Trials:
    del best
    axes, cluster = at.layout.data_axes(), at.cluster
    mesh = at.mesh
    while axes and 2 * cluster.count <= LARGEST:
        cluster = cluster.doubled()
        mesh = MeshSpec(tuple((name, 2 * size if name == axes[-1] else size) for name, size in mesh.axes))
        at = dataclasses.replace(at, mesh=mesh, cluster=cluster, accumulate=max(at.accumulate // 2, 1))  # as many rows at once
        fewer = f", accumulate={at.accumulate}" if at.accumulate > 1 else ""
        yield f'target "{cluster}", mesh "{mesh}"{fewer}', at
