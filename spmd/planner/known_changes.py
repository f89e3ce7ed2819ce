"""Changes that are known to help: each as a layout file or an option spells it, and as
`spmd.planner.suggestions.plan_with` takes it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from spmd.base.tree import parse_bytes
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
from spmd.planner.notes import THRESHOLDS, in_parts, stored_scores
from spmd.planner.plan_data import EXPOSED, RECOMPUTATION, PlanData, StepCost

ANOTHER_BATCH = "another batch size: half as many updates for as many rows"
SWITCHES = ("double_buffering", "pipelined_collectives")  # of which the opposite is tried
# The steps of `[recurrence] time_chunk` that are tried: products of several thousand rows, and less
# memory.
TIME_STEPS = (64, 16)
LARGE = "256 MiB"  # up to which collectives are merged; XLA's own threshold is 30 MiB
# as text, and the layout, mesh, cluster and number of microbatches that it changes
Edits = Iterator[tuple[str, dict[str, Any]]]


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


# -- changes that need less memory, in the order in which `fixes_of` tries them


def fuse_attention(plan: PlanData) -> Edits:
    """Yield attention that is computed in parts, where all scores are stored."""
    placed = plan.program.placed
    # Tracing asks for the compute capability of the GPU (`gpu_kernels.py`).
    with gpu_of(plan.cluster.target):
        products = large_products(plan.program, trace_model(plan.program))
    if stored_scores(plan.memory, placed, products):
        implementation = in_parts(placed)
        attention = dataclasses.replace(plan.layout.attention, implementation=implementation)
        layout = dataclasses.replace(plan.layout, attention=attention)
        yield f'[attention] implementation = "{implementation}"', {"layout": layout}


def recompute_time(plan: PlanData) -> Edits:
    """Yield fewer steps of loops over time to be kept at once, where there are more."""
    recurrence = plan.layout.recurrence
    longest = plan.program.placed.parallel.longest_loop
    if recurrence.implementation in ("as_written", "cudnn"):
        return
    for steps in TIME_STEPS:
        if steps < min(longest, recurrence.time_chunk or longest):
            less = dataclasses.replace(recurrence, time_chunk=steps)
            layout = dataclasses.replace(plan.layout, recurrence=less)
            yield f"[recurrence] time_chunk = {steps}", {"layout": layout}


def more_remat(plan: PlanData) -> Edits:
    """Yield each level of rematerialization that saves less than the plan's."""
    for remat in remats(plan.program.placed):
        if remat_level(remat) > remat_level(plan.layout.remat):
            yield remat_text(remat), {"layout": dataclasses.replace(plan.layout, remat=remat)}


def remat_text(remat: Remat) -> str:
    """Write a `[remat]` in one line."""
    if isinstance(remat.saves, str):
        saves = f'"{remat.saves}"'
    else:
        saves = _strings(remat.saves)
    where = ""
    if remat.modules:
        where = f" modules = {_strings(remat.modules)}"
    return f"[remat] save = {saves}{where}"


def _strings(names: Iterable[str]) -> str:
    """Write names as a list of TOML."""
    return str(list(names)).replace("'", '"')


def reduce_each_microbatch(plan: PlanData) -> Edits:
    """Yield gradients that are reduced in every microbatch, where they are added up before."""
    if plan.program.accumulated == "local":
        layout = _with_gradients(plan.layout, accumulate="reduced")
        yield '[gradients] accumulate = "reduced"', {"layout": layout}


def more_microbatches(plan: PlanData) -> Edits:
    """Yield the smallest numbers of microbatches that might be enough."""
    accumulate = plan.program.placed.config.accumulate
    counts = [count for count in microbatches(plan.rows, _parts(plan)) if count > accumulate]
    possible = [count for count in counts if plan.least_memory(count) <= plan.memory.capacity]
    for count in (possible or counts[-1:])[:3]:
        yield f"accumulate={count}", {"accumulate": count}


def _parts(plan: PlanData) -> int:
    """Return the number of parts that a step divides its rows into, without microbatches."""
    workers = plan.program.placed.exchange.worker_count
    return workers * (plan.layout.pipeline.microbatches or 1)


def shard_optimizer(plan: PlanData) -> Edits:
    """Yield optimizer state that is sharded over the workers, where parameters and state are
    replicated.
    """
    layout = plan.layout
    if layout.default.params != "replicate" or layout.optimizer.shard is not None:
        return
    if layout.gradients.reduction not in ("all_reduce", "compiler") or not layout.data_axes():
        return
    axis = layout.data_axes()[-1]
    optimizer = dataclasses.replace(layout.optimizer, shard=axis)
    changed = _with_gradients(layout, reduction="reduce_scatter")
    changed = dataclasses.replace(changed, optimizer=optimizer)
    yield f'[optimizer] shard = "{axis}", reduction = "reduce_scatter"', {"layout": changed}


def shard_parameters(plan: PlanData) -> Edits:
    """Yield parameters, and with them optimizer state, that are sharded over the workers, where
    they are replicated.
    """
    layout = plan.layout
    if layout.default.params != "replicate" or not layout.data_axes():
        return
    if layout.gradients.reduction == "parameter_server":
        return
    axis = layout.data_axes()[-1]
    changed = dataclasses.replace(
        _with_gradients(layout, reduction="reduce_scatter"),
        optimizer=dataclasses.replace(layout.optimizer, shard=None),
        default=Default(f"shard:{axis}"),
    )
    yield f'[default] params = "shard:{axis}", reduction = "reduce_scatter"', {"layout": changed}


def more_devices(plan: PlanData) -> Edits:
    """Yield twice the devices, and twice again, along the last data axis."""
    cluster, sizes = plan.cluster, dict(plan.mesh.axes)
    accumulate = plan.program.placed.config.accumulate
    axes = plan.layout.data_axes()
    while axes and 2 * cluster.count <= LARGEST:
        cluster = cluster.doubled()
        if axes[-1] in sizes:
            sizes[axes[-1]] *= 2
        mesh = MeshSpec(tuple(sizes.items()))
        accumulate = max(accumulate // 2, 1)  # the same number of rows per microbatch and device
        fewer = ""
        if accumulate > 1:
            fewer = f", accumulate={accumulate}"
        changes = {"mesh": mesh, "cluster": cluster, "accumulate": accumulate}
        yield f'target "{cluster}", mesh "{mesh}"{fewer}', changes


# -- options of the compiler


def why_not_tuned(plan: PlanData) -> str | None:
    """Return why no options can be tried on this plan's target; None if they can."""
    target = plan.cluster.target
    if target.platform not in GPU:
        return (
            "options of the compiler were not tried: they are for GPUs, and "
            f"XLA:{COMPILERS[target.platform][3]} has none of them"
        )
    if not plan.compiled.exact:
        return f"options of the compiler were not tried: {plan.compiled.compiler}"
    return None


def trials(plan: PlanData) -> Iterator[tuple[str, bool | str]]:
    """Yield options that may change a plan's program, and values that it was not compiled with."""
    options, transfers = plan.compiled.options, plan.traffic.transfers
    chosen = plan.layout.compiler.keys
    # outside of loops the switches change nothing
    if any(transfer.times > 1 for transfer in transfers):
        for key in SWITCHES:
            is_on = options.get(XLA_NAMES[key][0]) in (True, UNROLLING[True])
            if key not in chosen:
                yield key, not is_on
    # a single collective has nothing to be merged with
    for kind, key in THRESHOLDS.items():
        several = sum(transfer.kind == kind for transfer in transfers) > 1
        is_large = options.get(XLA_NAMES[key][0]) == parse_bytes(LARGE)
        if several and key not in chosen and not is_large:
            yield key, LARGE


# -- changes that may lower a cost of a step


def layout_difference(before: Layout, after: Layout) -> str:
    """Return the tables of a layout file that differ, as the file should have them.

    >>> print(layout_difference(Layout(remat=Remat("nothing")), Layout(remat=Remat("dots"))))
    [remat]
    save = "dots"
    """
    old, new = (layout.to_toml().strip().split("\n\n") for layout in (before, after))
    lines = [table for table in new if table and table not in old]
    headers = {table.partition("\n")[0] for table in new}
    gone = dict.fromkeys(table.partition("\n")[0] for table in old)
    lines += [f"# without {header}" for header in gone if header not in headers]
    return "\n".join(lines)


def _with_gradients(layout: Layout, **keys: Any) -> Layout:
    """Return the layout with these keys of `[gradients]`."""
    return dataclasses.replace(layout, gradients=dataclasses.replace(layout.gradients, **keys))


def _with_own_reduction(plan: PlanData, **keys: Any) -> Layout:
    """Return the plan's layout with these keys of `[gradients]`, and with collectives of its own,
    where XLA chooses them.
    """
    if plan.layout.gradients.reduction == "compiler":
        sharded = plan.layout.default.params != "replicate"
        if sharded:
            keys["reduction"] = "reduce_scatter"
        else:
            keys["reduction"] = "all_reduce"
    return _with_gradients(plan.layout, **keys)


def _less_remat(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    remat = plan.layout.remat
    if remat_level(remat) == 2:
        less = dataclasses.replace(remat, save="dots")
        yield Trial(remat_text(less), {"layout": dataclasses.replace(plan.layout, remat=less)})
    if remat != Remat():
        yield Trial("no [remat]", {"layout": dataclasses.replace(plan.layout, remat=Remat())})
    recurrence = plan.layout.recurrence
    if recurrence.time_chunk is not None:
        less = dataclasses.replace(recurrence, time_chunk=None)
        layout = dataclasses.replace(plan.layout, recurrence=less)
        yield Trial("no [recurrence] time_chunk", {"layout": layout})


def _fewer_microbatches(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    placed = plan.program.placed
    counts = [1, *microbatches(plan.rows, _parts(plan))]
    fewer = [count for count in counts if count < placed.config.accumulate]
    if not fewer:
        return
    differs = ""
    if jax.tree.leaves(placed.abstract_state.stats):
        differs = "statistics of a batch, as BatchNorm's, are those of other microbatches"
    option = f"accumulate={fewer[-1]}"
    to_use = f"fit(..., {option}), or `spmd plan --accumulate {fewer[-1]}`"
    yield Trial(option, {"accumulate": fewer[-1]}, to_use, differs)


def _larger_batch(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Yield twice the rows; where they do not fit, with the next level of rematerialization."""
    rows = 2 * plan.rows
    name = f"batch_size={rows}"
    to_use = f"fit(..., batch_size={rows}), or `spmd plan --batch-size {rows}`"
    yield Trial(name, {"rows": rows}, to_use, ANOTHER_BATCH)
    for remat, changes in more_remat(plan):
        difference = layout_difference(plan.layout, changes["layout"])
        both = f"{to_use}; in the layout:\n{difference}"
        changes["rows"] = rows
        yield Trial(f"{name}, {remat}", changes, both, ANOTHER_BATCH, unless=name)
        break


def _rows_and_microbatches(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Yield twice the rows in twice the microbatches: gradients are reduced once for both."""
    count, rows = 2 * plan.program.placed.config.accumulate, 2 * plan.rows
    options = f"batch_size={rows}, accumulate={count}"
    command = f"spmd plan --batch-size {rows} --accumulate {count}"
    changes = {"accumulate": count, "rows": rows}
    yield Trial(options, changes, f"fit(..., {options}), or `{command}`", ANOTHER_BATCH)


def _bfloat16(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    if plan.program.placed.config.precision == "float32":
        option = 'precision="bfloat16"'
        to_use = f"fit(..., {option}), or `spmd plan --precision bfloat16`"
        yield Trial(option, {"precision": "bfloat16"}, to_use, "computed in bfloat16")


def _fused_attention(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    for text, changes in fuse_attention(plan):
        yield Trial(text, changes)


def _gather(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Yield weights of stacks that are gathered layer by layer; and their gradients added up before
    they are reduced.
    """
    placed, sync = plan.program.placed, plan.program.sync
    sharded = plan.layout.default.params != "replicate"
    if sharded and placed.model.stacks() and not sync.layerwise:
        layout = _with_own_reduction(plan, gather="layer")
        yield Trial('[gradients] gather = "layer"', {"layout": layout})
    if plan.program.accumulated == "reduced":
        layout = _with_gradients(plan.layout, accumulate="local")
        yield Trial('[gradients] accumulate = "local"', {"layout": layout})
    # with bfloat16 compute, XLA sends weights in bfloat16 anyway
    wide = plan.layout.gradients.weights == "exact" and placed.config.precision != "bfloat16"
    if cost.purpose == "parameters" and wide:
        layout = _with_own_reduction(plan, weights="bfloat16")
        yield Trial('[gradients] weights = "bfloat16"', {"layout": layout})


def _codec(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    gradients = plan.layout.gradients
    on_server = gradients.reduction == "parameter_server"
    if cost.purpose == "gradients" and not gradients.compressed and not on_server:
        layout = _with_own_reduction(plan, codec="bfloat16")
        yield Trial('[gradients] codec = "bfloat16"', {"layout": layout})


def _layouts(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Yield parameters and optimizer state that are sharded over more or fewer devices."""
    layout, axes = plan.layout, plan.layout.data_axes()
    if layout.default.params == "replicate":
        for text, changes in (*shard_optimizer(plan), *shard_parameters(plan)):
            yield Trial(text, changes)
        return
    axis = layout.default.params.removeprefix("shard:")
    size, nodes = plan.mesh.sizes.get(axis, 1), plan.cluster.nodes
    divisible = 1 < nodes < size and size % nodes == 0
    if axes == (axis,) and divisible and "node" not in plan.mesh.sizes:
        hybrid = _hybrid(plan, axis)
        difference = layout_difference(layout, hybrid["layout"])
        to_use = f'{difference}\n# and mesh="{hybrid["mesh"]}" where fit has one'
        yield Trial("parameters sharded inside nodes, replicated between them", hybrid, to_use)
    if axis in axes:
        changed = dataclasses.replace(
            _with_gradients(layout, reduction="reduce_scatter", gather="auto", accumulate="auto"),
            default=dataclasses.replace(layout.default, params="replicate", max_replicated=None),
            optimizer=dataclasses.replace(layout.optimizer, shard=axis),
        )
        name = f'[default] params = "replicate", [optimizer] shard = "{axis}"'
        yield Trial(name, {"layout": changed})


def _hybrid(plan: PlanData, axis: str) -> dict[str, Any]:
    """Return one data axis as two: `node`, over which parameters are replicated, and what is left
    of it.
    """
    nodes, sizes = plan.cluster.nodes, dict(plan.mesh.axes)
    sizes[axis] //= nodes
    mesh = MeshSpec((("node", nodes), *sizes.items()))

    def changed(spec: tuple) -> tuple:
        return tuple(("node", axis) if entry == axis else entry for entry in spec)

    batch = plan.layout.batch
    rules = tuple(dataclasses.replace(rule, spec=changed(rule.spec)) for rule in batch.rules)
    layout = dataclasses.replace(
        # by layer only what is sharded over all data axes
        _with_gradients(plan.layout, gather="auto", accumulate="auto"),
        batch=dataclasses.replace(batch, spec=changed(batch.spec), rules=rules),
        mesh=mesh.axes,
    )
    return {"mesh": mesh, "layout": layout}


def _pipeline(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    """Yield twice the microbatches in the first pipeline that has them."""
    for schedule in plan.schedules.values():
        if schedule.unit == MICROBATCHES:
            count = 2 * schedule.microbatches
            pipeline = dataclasses.replace(plan.layout.pipeline, microbatches=count)
            layout = dataclasses.replace(plan.layout, pipeline=pipeline)
            yield Trial(f"[pipeline] microbatches = {count}", {"layout": layout})
            break


def _compiler(plan: PlanData, cost: StepCost) -> Iterator[Trial]:
    if why_not_tuned(plan) is not None:
        return
    for key, value in trials(plan):
        compiler = dataclasses.replace(plan.layout.compiler, **{key: value})
        if isinstance(value, str):
            shown = f'"{value}"'
        else:
            shown = str(value).lower()
        layout = dataclasses.replace(plan.layout, compiler=compiler)
        yield Trial(f"[compiler] {key} = {shown}", {"layout": layout})


# by kinds of costs
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
