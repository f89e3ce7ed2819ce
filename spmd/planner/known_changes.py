"""Changes that are known to help: each as a layout file or an option spells it, and as `plan_with`
takes it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from spmd.layout.compiler import GPU, UNROLLING, XLA_NAMES
from spmd.layout.remat import Remat
from spmd.layout.schema import Default, Layout
from spmd.mesh import MeshSpec
from spmd.nn.schedule import MICROBATCHES
from spmd.planner.candidates import microbatches, remat_level, remats
from spmd.planner.cluster import LARGEST
from spmd.planner.compile import COMPILERS
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.model_flops import large_products, trace_model
from spmd.planner.notes import in_parts, stored_scores
from spmd.planner.plan_data import (
    EXPOSED,
    RECOMPUTATION,
    PlanData,
    StepCost,
)
from spmd.tree import parse_bytes

# as text, and the layout, mesh, cluster and number of microbatches that it changes
Edits = Iterator[tuple[str, dict[str, Any]]]


def fuse_attention(plan: PlanData) -> Edits:
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


def more_remat(plan: PlanData) -> Edits:
    """Yield each level of rematerialization that saves less than the plan's."""
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


def reduce_each_microbatch(plan: PlanData) -> Edits:
    """Yield gradients that are reduced in every microbatch, where they are added up before."""
    if plan.program.accumulated == "local":
        gradients = dataclasses.replace(plan.layout.gradients, accumulate="reduced")
        yield (
            '[gradients] accumulate = "reduced"',
            {"layout": dataclasses.replace(plan.layout, gradients=gradients)},
        )


def more_microbatches(plan: PlanData) -> Edits:
    """The smallest numbers of microbatches that might be enough."""
    placed = plan.program.placed
    parts = placed.exchange.worker_count * (plan.layout.pipeline.microbatches or 1)
    counts = [count for count in microbatches(plan.rows, parts) if count > placed.config.accumulate]
    possible = [count for count in counts if plan.least_memory(count) <= plan.memory.capacity]
    for count in (possible or counts[-1:])[:3]:
        yield f"accumulate={count}", {"accumulate": count}


def shard_optimizer(plan: PlanData) -> Edits:
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


def shard_parameters(plan: PlanData) -> Edits:
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


def more_devices(plan: PlanData) -> Edits:
    """Yield twice the devices, and twice again, along the last data axis."""
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


SWITCHES = ("double_buffering", "pipelined_collectives")  # of which the opposite is tried
THRESHOLDS = {
    "combine_all_gather": "all_gather",
    "combine_reduce_scatter": "reduce_scatter",
    "combine_all_reduce": "all_reduce",
}
LARGE = "256 MiB"  # up to which collectives are merged; XLA's own threshold is 30 MiB


def why_not_tuned(plan: PlanData) -> str | None:
    """Why no options can be tried on this plan's target; None if they can."""
    target = plan.cluster.target
    if target.platform not in GPU:
        return (
            "options of the compiler were not tried: they are for GPUs, and "
            f"XLA:{COMPILERS[target.platform][3]} has none of them"
        )
    return (
        None
        if plan.compiled.exact
        else f"options of the compiler were not tried: {plan.compiled.compiler}"
    )


def trials(plan: PlanData) -> Iterator[tuple[str, bool | str]]:
    """Options that may change a plan's program, and values that it was not compiled with."""
    options, transfers = plan.compiled.options, plan.traffic.transfers
    # elsewhere the switches change nothing
    in_loops = any(transfer.times > 1 for transfer in transfers)
    for key in SWITCHES:
        now = options.get(XLA_NAMES[key][0]) in (True, UNROLLING[True])
        if in_loops and key not in plan.layout.compiler.keys:
            yield key, not now
    for key, kind in THRESHOLDS.items():
        several = sum(transfer.kind == kind for transfer in transfers) > 1
        if (
            key not in plan.layout.compiler.keys
            and several
            and options.get(XLA_NAMES[key][0]) != parse_bytes(LARGE)
        ):
            yield key, LARGE


ANOTHER_BATCH = "another batch size: half as many updates for as many rows"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A change to plan: its name, what it changes as `plan_with` takes it, how training differs,
    and the trial that must not fit before.
    """

    name: str
    changes: Mapping[str, Any]
    to_use: str = ""
    differs: str = ""
    unless: str = ""


def layout_difference(before: Layout, after: Layout) -> str:
    """The tables of a layout file that differ, as the file should have them.

    >>> print(layout_difference(Layout(remat=Remat("nothing")), Layout(remat=Remat("dots"))))
    [remat]
    save = "dots"
    """
    old, new = (layout.to_toml().strip().split("\n\n") for layout in (before, after))
    changed = [block for block in new if block not in old and block]
    kept = {block.partition("\n")[0] for block in new}
    gone = dict.fromkeys(
        block.partition("\n")[0] for block in old if block.partition("\n")[0] not in kept
    )
    return "\n".join([*changed, *(f"# without {header}" for header in gone)])


def _gradients(plan: PlanData, **keys: Any) -> Layout:
    return dataclasses.replace(
        plan.layout, gradients=dataclasses.replace(plan.layout.gradients, **keys)
    )


def _own_reduction(plan: PlanData) -> dict[str, str]:
    """The key that a layout needs for collectives of its own, where XLA chooses them."""
    sharded = plan.layout.default.params != "replicate"
    return (
        {"reduction": "reduce_scatter" if sharded else "all_reduce"}
        if plan.layout.gradients.reduction == "compiler"
        else {}
    )


def _less_remat(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    remat = plan.layout.remat
    if remat_level(remat) == 2:
        less = dataclasses.replace(remat, save="dots")
        yield Trial(remat_text(less), {"layout": dataclasses.replace(plan.layout, remat=less)})
    if remat != Remat():
        yield Trial("no [remat]", {"layout": dataclasses.replace(plan.layout, remat=Remat())})


def _with_microbatches(plan: PlanData, count: int, **more: Any) -> Trial:
    name = ", ".join([*([f"batch_size={more['rows']}"] if more else []), f"accumulate={count}"])
    batch = (
        f"batch_size={more['rows']}, " if more else "",
        f" --batch-size {more['rows']}" if more else "",
    )
    to_use = (
        f"fit(..., {batch[0]}accumulate={count}), or `spmd plan{batch[1]} --accumulate {count}`"
    )
    stats = (
        "statistics of a batch, as BatchNorm's, are those of other microbatches"
        if jax.tree.leaves(plan.program.placed.abstract_state.stats)
        else ""
    )
    return Trial(name, {"accumulate": count, **more}, to_use, ANOTHER_BATCH if more else stats)


def _fewer_microbatches(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    placed = plan.program.placed
    counts = [
        1,
        *microbatches(
            plan.rows, placed.exchange.worker_count * (plan.layout.pipeline.microbatches or 1)
        ),
    ]
    fewer = [count for count in counts if count < placed.config.accumulate]
    if fewer:
        yield _with_microbatches(plan, fewer[-1])


def _larger_batch(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Twice the rows; where they do not fit, with the next level of rematerialization."""
    rows = 2 * plan.rows
    name, to_use = (
        f"batch_size={rows}",
        f"fit(..., batch_size={rows}), or `spmd plan --batch-size {rows}`",
    )
    yield Trial(name, {"rows": rows}, to_use, ANOTHER_BATCH)
    more = next(
        (
            remat
            for remat in remats(plan.program.placed)
            if remat_level(remat) > remat_level(plan.layout.remat)
        ),
        None,
    )
    if more is not None:
        layout = dataclasses.replace(plan.layout, remat=more)
        both = f"{to_use}; in the layout:\n{layout_difference(plan.layout, layout)}"
        yield Trial(
            f"{name}, {remat_text(more)}",
            {"rows": rows, "layout": layout},
            both,
            ANOTHER_BATCH,
            unless=name,
        )


def _rows_and_microbatches(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Twice the rows in twice the microbatches: gradients are reduced once for both."""
    yield _with_microbatches(plan, 2 * plan.program.placed.config.accumulate, rows=2 * plan.rows)


def _bfloat16(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    if plan.program.placed.config.precision == "float32":
        to_use = 'fit(..., precision="bfloat16"), or `spmd plan --precision bfloat16`'
        yield Trial(
            'precision="bfloat16"', {"precision": "bfloat16"}, to_use, "computed in bfloat16"
        )


def _fused_attention(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    for text, changes in fuse_attention(plan):
        yield Trial(text, changes)


def _gather(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Weights of stacks gathered layer by layer; and their gradients added up before they are
    reduced.
    """
    gradients, placed = plan.layout.gradients, plan.program.placed
    if (
        plan.layout.default.params != "replicate"
        and placed.model.stacks()
        and not plan.program.sync.layerwise
    ):
        yield Trial(
            '[gradients] gather = "layer"',
            {"layout": _gradients(plan, **_own_reduction(plan), gather="layer")},
        )
    if plan.program.accumulated == "reduced":
        yield Trial(
            '[gradients] accumulate = "local"', {"layout": _gradients(plan, accumulate="local")}
        )
    narrow = placed.config.precision == "bfloat16"  # XLA then sends them in bfloat16 anyway
    if cost.purpose == "parameters" and gradients.weights == "exact" and not narrow:
        layout = _gradients(plan, **_own_reduction(plan), weights="bfloat16")
        yield Trial('[gradients] weights = "bfloat16"', {"layout": layout})


def _codec(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    if (
        cost.purpose == "gradients"
        and not plan.layout.gradients.compressed
        and plan.layout.gradients.reduction != "parameter_server"
    ):
        yield Trial(
            '[gradients] codec = "bfloat16"',
            {"layout": _gradients(plan, **_own_reduction(plan), codec="bfloat16")},
        )


def _layouts(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Parameters and optimizer state sharded over more or fewer devices."""
    layout, axes = plan.layout, plan.layout.data_axes()
    if layout.default.params == "replicate":
        for text, changes in (*shard_optimizer(plan), *shard_parameters(plan)):
            yield Trial(text, changes)
        return
    axis = layout.default.params.removeprefix("shard:")
    size, nodes = plan.mesh.sizes.get(axis, 1), plan.cluster.nodes
    if axes == (axis,) and 1 < nodes < size and size % nodes == 0 and "node" not in plan.mesh.sizes:
        hybrid = _hybrid(plan, axis)
        to_use = (
            f'{layout_difference(layout, hybrid["layout"])}\n# and mesh="{hybrid["mesh"]}" where '
            "fit has one"
        )
        yield Trial("parameters sharded inside nodes, replicated between them", hybrid, to_use)
    if axis in axes:
        default = dataclasses.replace(layout.default, params="replicate", max_replicated=None)
        gradients = dataclasses.replace(
            layout.gradients, reduction="reduce_scatter", gather="auto", accumulate="auto"
        )
        changed = dataclasses.replace(
            layout,
            default=default,
            optimizer=dataclasses.replace(layout.optimizer, shard=axis),
            gradients=gradients,
        )
        yield Trial(
            f'[default] params = "replicate", [optimizer] shard = "{axis}"', {"layout": changed}
        )


def _hybrid(plan: PlanData, axis: str) -> dict[str, Any]:
    """One data axis as two: `node`, over which parameters are replicated, and what is left of
    it.
    """
    layout, nodes, split = plan.layout, plan.cluster.nodes, ("node", axis)
    sizes = [
        ("node", nodes),
        *((name, size // nodes if name == axis else size) for name, size in plan.mesh.axes),
    ]

    def changed(spec: tuple) -> tuple:
        return tuple(split if entry == axis else entry for entry in spec)

    rules = tuple(dataclasses.replace(rule, spec=changed(rule.spec)) for rule in layout.batch.rules)
    batch = dataclasses.replace(layout.batch, spec=changed(layout.batch.spec), rules=rules)
    mesh = MeshSpec(tuple(sizes))
    # by layer only what is sharded over all data axes
    gradients = dataclasses.replace(layout.gradients, gather="auto", accumulate="auto")
    return {
        "mesh": mesh,
        "layout": dataclasses.replace(layout, batch=batch, mesh=mesh.axes, gradients=gradients),
    }


def _pipeline(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    for schedule in [
        schedule for schedule in plan.schedules.values() if schedule.unit == MICROBATCHES
    ][:1]:
        pipeline = dataclasses.replace(plan.layout.pipeline, microbatches=2 * schedule.microbatches)
        yield Trial(
            f"[pipeline] microbatches = {pipeline.microbatches}",
            {"layout": dataclasses.replace(plan.layout, pipeline=pipeline)},
        )


def _compiler(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    for key, value in trials(plan) if why_not_tuned(plan) is None else ():
        compiler = dataclasses.replace(plan.layout.compiler, **{key: value})
        shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
        yield Trial(
            f"[compiler] {key} = {shown}",
            {"layout": dataclasses.replace(plan.layout, compiler=compiler)},
        )


KNOWN: dict[str, Iterable[Callable[[PlanData, StepCost], Iterator[Trial]]]] = {
    "products": (_bfloat16, _larger_batch),
    "convolutions": (_bfloat16, _larger_batch),
    "attention": (_bfloat16, _larger_batch),
    "memory": (_fused_attention, _bfloat16, _larger_batch, _fewer_microbatches),
    "launches": (_fewer_microbatches, _larger_batch),
    EXPOSED: (_gather, _fewer_microbatches, _layouts, _rows_and_microbatches, _codec, _compiler),
    RECOMPUTATION: (_less_remat,),
    "bubbles": (_pipeline, _larger_batch),
    "replicated": (_layouts,),
}
