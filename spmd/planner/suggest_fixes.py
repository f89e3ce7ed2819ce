"""Changes that would make a plan fit, tried in order, each one planned before it is reported."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic

import jax

from spmd.errors import SpmdError
from spmd.layout.remat import Remat
from spmd.layout.schema import Default
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.candidates import microbatches, remat_level, remats
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.model_flops import large_products, trace_model
from spmd.planner.plan_data import PlanData, PlanT, build_plan, in_parts, stored_scores
from spmd.planner.target import LARGEST, MIN_SAVING
from spmd.planner.text_report import seconds
from spmd.tree import format_bytes


@dataclasses.dataclass(frozen=True)
class Fix(Generic[PlanT]):
    """A change, and the plan with it and with all changes before it that helped; printed, one line.

    Attributes:
      change: the change, as a layout or an option spells it.
      plan: the plan with the change; None if it cannot be made.
      why: in that case, the reason.
    """

    change: str
    plan: PlanT | None
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether the step fits with the change."""
        return self.plan is not None and self.plan.fits

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.change}: {self.why}"
        memory, step = self.plan.memory, f"{seconds(self.plan.timeline.seconds)} per step"
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{self.change}: {verdict}, {format_bytes(memory.expected)} of "
            f"{format_bytes(memory.capacity)}, {step}"
        )


def fixes_of(
    plan: PlanT, *, timeout: float = 600.0, say: Callable[[str], None] = lambda line: None
) -> tuple[Fix[PlanT], ...]:
    """Plan one change after the other, each on top of the earlier ones that helped, until the step
    fits.

    In this order: attention in parts, where its scores are stored; rematerialization that saves
    matrix products, then nothing; gradients reduced in every microbatch; more microbatches;
    optimizer state sharded over the workers; parameters too; twice the devices, and twice again.

    Returns:
      All changes that were tried; the last one fits if any does. () for a plan that fits.
    """
    fixes: list[Fix[PlanT]] = []
    best = plan
    for step in (
        fuse_attention,
        _remat,
        _reduce_each,
        _microbatches,
        shard_optimizer,
        shard_parameters,
        _more_devices,
    ):
        before = best
        for change, changes in step(before):
            if best.fits:
                break
            say(f"planning with {change}")
            try:
                planned = plan_with(before, changes, timeout=timeout)
            except SpmdError as error:
                fixes.append(Fix(change, None, error.summary))
                break  # more of the same would be rejected too
            fixes.append(Fix(change, planned))
            if planned.memory.peak < best.memory.peak * (
                MIN_SAVING if step is _more_devices else 1.0
            ):
                best = planned
            elif step is _more_devices:
                break
    return tuple(fixes)


def plan_with(plan: PlanT, changes: Mapping[str, Any], *, timeout: float = 600.0) -> PlanT:
    """The plan of the same step with changes.

    Args:
      changes: some of `layout`, `mesh`, `cluster`, `accumulate`, `precision`, and `rows` of the
        batch.

    Raises:
      SpmdError: as `spmd.plan`.
    """
    variant = {
        "layout": plan.layout,
        "mesh": plan.mesh,
        "cluster": plan.cluster,
        "rows": plan.rows,
    } | dict(changes)
    options = {name: variant.get(name) for name in ("accumulate", "precision")}
    placed = plan.program.placed.with_layout(
        abstract_mesh(variant["mesh"]), variant["layout"], **options
    )
    sample = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((variant["rows"], *leaf.shape[1:]), leaf.dtype),
        plan.program.sample,
    )
    return build_plan(type(plan), placed, sample, variant["cluster"], timeout=timeout)


# as text, and the layout, mesh, cluster and number of microbatches that it changes
_Changes = Iterator[tuple[str, dict[str, Any]]]


def fuse_attention(plan: PlanData) -> _Changes:
    """Attention that is computed in parts, where all scores are stored."""
    with gpu_of(plan.cluster.target):
        products = large_products(plan.program, trace_model(plan.program))
    if stored_scores(plan.memory, plan.program.placed, products):
        implementation = in_parts(plan.program.placed)
        attention = dataclasses.replace(plan.layout.attention, implementation=implementation)
        yield (
            f'[attention] implementation = "{implementation}"',
            {"layout": dataclasses.replace(plan.layout, attention=attention)},
        )


def _remat(plan: PlanData) -> _Changes:
    for remat in remats(plan.program.placed):
        if remat_level(remat) > remat_level(plan.layout.remat):
            yield remat_text(remat), {"layout": dataclasses.replace(plan.layout, remat=remat)}


def remat_text(remat: Remat) -> str:
    """A `[remat]` in one line."""
    where = f" modules = {list(remat.modules)}".replace("'", '"') if remat.modules else ""
    saves = (
        f'"{remat.saves}"'
        if isinstance(remat.saves, str)
        else str(list(remat.saves)).replace("'", '"')
    )
    return f"[remat] save = {saves}{where}"


def _reduce_each(plan: PlanData) -> _Changes:
    if plan.program.accumulated == "local":
        gradients = dataclasses.replace(plan.layout.gradients, accumulate="reduced")
        yield (
            '[gradients] accumulate = "reduced"',
            {"layout": dataclasses.replace(plan.layout, gradients=gradients)},
        )


def _microbatches(plan: PlanData) -> _Changes:
    """The smallest numbers of microbatches that might be enough."""
    placed = plan.program.placed
    parts = placed.exchange.worker_count * (plan.layout.pipeline.microbatches or 1)
    counts = [count for count in microbatches(plan.rows, parts) if count > placed.config.accumulate]
    possible = [count for count in counts if plan.least_memory(count) <= plan.memory.capacity]
    for count in (possible or counts[-1:])[:3]:
        yield f"accumulate={count}", {"accumulate": count}


def shard_optimizer(plan: PlanData) -> _Changes:
    """Optimizer state sharded over the workers, where parameters and state are replicated."""
    layout = plan.layout
    replicated = layout.default.params == "replicate" and layout.gradients.reduction in (
        "all_reduce",
        "compiler",
    )
    if replicated and layout.data_axes() and layout.optimizer.shard is None:
        axis, gradients = (
            layout.data_axes()[-1],
            dataclasses.replace(layout.gradients, reduction="reduce_scatter"),
        )
        layout = dataclasses.replace(
            layout, optimizer=dataclasses.replace(layout.optimizer, shard=axis), gradients=gradients
        )
        yield f'[optimizer] shard = "{axis}", reduction = "reduce_scatter"', {"layout": layout}


def shard_parameters(plan: PlanData) -> _Changes:
    """Parameters, and with them optimizer state, sharded over the workers, where they are
    replicated.
    """
    layout = plan.layout
    if (
        layout.default.params == "replicate"
        and layout.data_axes()
        and layout.gradients.reduction != "parameter_server"
    ):
        axis, gradients = (
            layout.data_axes()[-1],
            dataclasses.replace(layout.gradients, reduction="reduce_scatter"),
        )
        layout = dataclasses.replace(
            layout,
            optimizer=dataclasses.replace(layout.optimizer, shard=None),
            default=Default(f"shard:{axis}"),
            gradients=gradients,
        )
        yield f'[default] params = "shard:{axis}", reduction = "reduce_scatter"', {"layout": layout}


def _more_devices(plan: PlanData) -> _Changes:
    axes, cluster, mesh, accumulate = (
        plan.layout.data_axes(),
        plan.cluster,
        plan.mesh,
        plan.program.placed.config.accumulate,
    )
    while axes and 2 * cluster.count <= LARGEST:
        cluster = cluster.doubled()
        mesh = MeshSpec(
            tuple((name, 2 * size if name == axes[-1] else size) for name, size in mesh.axes)
        )
        accumulate = max(accumulate // 2, 1)  # the same number of rows per microbatch and device
        fewer = f", accumulate={accumulate}" if accumulate > 1 else ""
        yield (
            f'target "{cluster}", mesh "{mesh}"{fewer}',
            {"mesh": mesh, "cluster": cluster, "accumulate": accumulate},
        )
