"""Notes of a plan: what is slow, large or other than the layout says in its compiled program, each
with the change that helps.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from spmd.base.fields import as_toml
from spmd.base.specs import keep_axes
from spmd.base.tree import flatten, format_bytes, parse_bytes
from spmd.errors import SpmdError
from spmd.layout.compiler import GPU, TRITON, compiler_notes
from spmd.layout.gradients import Gradients
from spmd.layout.resolve import num_shards
from spmd.layout.summary import notes as layout_notes
from spmd.mesh import MeshSpec
from spmd.nn.attention_kernels import PREFERRED, may_replace
from spmd.nn.parallel_context import STORED, ParallelConfig
from spmd.planner.cluster import Cluster
from spmd.planner.compile import Compiled, widened_dtype
from spmd.planner.cost import uncounted
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.hlo import Module
from spmd.planner.layer_products import precision_notes
from spmd.planner.memory import Memory
from spmd.planner.model_flops import LargeProducts
from spmd.planner.sync_period import SyncPeriod, unmarked_parts
from spmd.planner.timeline import Timeline, Wait
from spmd.planner.traffic import Traffic, Transfer, latency, sites_of, transfer_time
from spmd.sync.notes import notes as exchange_notes
from spmd.train.compiled_step import TrainingProgram, prepare_program
from spmd.train.compiler_options import AT_ONCE
from spmd.train.model_setup import PlacedModel
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.transfer import MAX_EXACT_BUCKET

WORTH_A_NOTE = 0.02  # of a step's time
SHOWN_WAITS = 3  # of a step's collectives
LARGE = 0.1  # of a step's peak memory: an array that is worth a note
# bytes of a collective's operands on each device, below which latency is most of its time
SMALL = 256 * 2**10
MANY = 16  # of them in a step
LOST = 0.01  # of a step: latency that is worth a note
XLA_THRESHOLD = "30 MiB"  # up to which XLA:GPU merges collectives by default
# keys of [compiler] that say up to which size XLA:GPU merges collectives
THRESHOLDS = {
    "all_gather": "combine_all_gather",
    "reduce_scatter": "combine_reduce_scatter",
    "all_reduce": "combine_all_reduce",
}


def plan_notes(
    program: TrainingProgram,
    cluster: Cluster,
    compiled: Compiled,
    module: Module,
    products: LargeProducts,
    *,
    memory: Memory,
    traffic: Traffic,
    timeline: Timeline,
    server: ParameterServer | None,
    period: SyncPeriod,
) -> list[str]:
    """Return all notes of a plan.

    Args:
      program, compiled, module: the step, its compiled program, and that program as it is read.
      products: of the model, those that are large.
      server: how workers synchronize, if they train separately.
    """
    placed = program.placed
    mesh, data_axes = MeshSpec.parse(placed.mesh), placed.resolved.data_axes
    notes = [*layout_notes(placed.resolved)[1:], *exchange_notes(placed.exchange), *program.notes]
    notes += compiler_notes(placed.resolved.layout.compiler, placed.platform)
    notes += _traffic_notes(program, traffic)
    notes += loop_notes(placed.parallel, placed.platform)
    notes += _pool_note(memory)
    notes += _retried(program, compiled)
    # XLA:CPU runs every collective synchronously
    if compiled.exact and placed.platform != "cpu":
        notes += _waits(timeline)
    notes += _rematerialized(timeline)
    notes += precision_notes(module, placed.products.layers)
    notes += _large_arrays(memory, placed, products)
    notes += small_collectives(program, traffic, timeline, cluster)
    notes += gathered_stacks(program, traffic, cluster, LARGE * memory.peak)
    notes += crossing_notes(traffic, mesh, cluster, data_axes, period)
    notes += repeated_exchanges(traffic)
    notes += _period_notes(server, period, module)
    notes += _uncertain(placed.config.precision, cluster, compiled, module)
    return notes


def _traffic_notes(program: TrainingProgram, traffic: Traffic) -> Iterator[str]:
    """Note communication that the layout does not ask for: reductions in low precision, and moved
    activations.
    """
    placed = program.placed
    # with bfloat16 compute XLA reduces gradients in bfloat16, unless the step does it itself
    params = flatten(placed.abstract_state.params).values()
    low = traffic.dtypes("gradients") & {"bfloat16", "float16"}
    exact = placed.resolved.layout.gradients.codec == "exact"
    if exact and low and any(leaf.dtype == "float32" for leaf in params):
        fix = 'reduction = "all_reduce" or "reduce_scatter" reduces them in float32'
        yield (
            f"note: XLA reduces gradients in {', '.join(sorted(low))}, which the layout does not "
            f"ask for; {fix}."
        )
    data_axes = set(placed.resolved.data_axes)
    moved = sometimes = 0
    for transfer in traffic.transfers:
        if transfer.purpose == "activations" and set(transfer.axes) & data_axes:
            moved += transfer.sent * transfer.times
        if transfer.conditional:
            sometimes += transfer.sent * transfer.times
    if moved > traffic.bytes("parameters") + traffic.bytes("gradients"):
        yield (
            f"note: {format_bytes(moved)} of activations are sent over "
            f"{', '.join(sorted(data_axes))}, more than parameters and gradients: "
            "the layout moves activations to the parameters instead of parameters to the batch."
        )
    if sometimes:
        yield (
            f"note: {format_bytes(sometimes)} are sent only in steps that synchronize workers; "
            "traffic and time are those of such a step, "
            "in which all parameters are sent and received."
        )


def loop_notes(parallel: ParallelConfig, platform: str) -> Iterator[str]:
    """Note how a GPU computes loops over time, and why not in another way."""
    if platform != "cuda" or not parallel.loop_lengths:
        return
    lengths = ", ".join(map(str, sorted(parallel.loop_lengths)))
    hoisted = ""
    if "hoisted" in parallel.used:
        hoisted = (
            "what does not depend on the step before is computed before and after "
            "them ([recurrence] implementation); "
        )
    yield (
        f"note: loops over time of {lengths} steps: {hoisted}each step launches several kernels. "
        'cuDNN\'s LSTM is used only where implementation = "cudnn" asks for it: it is float32, '
        "and JAX cannot trace it without a GPU, so that it cannot be planned."
    )


def _pool_note(memory: Memory) -> list[str]:
    """Note that a step needs more of a GPU's memory than JAX allocates by default."""
    if memory.pool is None or memory.fraction is None:
        return []
    reserved = f"JAX uses {memory.pool / memory.capacity:.0%} of a GPU's memory"
    needed = f"XLA_PYTHON_CLIENT_MEM_FRACTION={memory.fraction:.2f}"
    return [f"note: {reserved}; this step needs {needed}."]


def _retried(program: TrainingProgram, compiled: Compiled) -> list[str]:
    """Note options of the compiler that were needed because XLA failed without them."""
    if not compiled.retried:
        return []
    changed = {}
    for name, value in compiled.options.items():
        if program.functions.options.get(name) != value:
            changed[name] = value
    options = ", ".join(f"{name}={as_toml(value)}" for name, value in changed.items())
    fix = f"fit does the same; {AT_ONCE}"
    if TRITON in changed:
        fix = "XLA tunes nothing without a GPU"
    return [f"note: compiled with {options}, because XLA failed: {compiled.retried}; {fix}."]


def _uncertain(
    precision: str, cluster: Cluster, compiled: Compiled, module: Module
) -> Iterator[str]:
    """Note where the figures of a plan are not those of the step on its target."""
    if widened_dtype(precision, compiled):
        yield (
            f"note: XLA:CPU computes {precision} in float32, so this estimate needs and reads more "
            "memory than the target would."
        )
    if cluster.target.simulated not in (0, cluster.count):
        which = f"those of {cluster.target.simulated} devices that share this machine's cores"
        yield (
            f"note: the figures are {which}, and {cluster.count} share them otherwise; spmd "
            f"calibrate --devices {cluster.count}."
        )
    if names := uncounted(module):
        kernels = ", ".join(names[:3])
        yield f"note: the FLOPs of {kernels} are not counted, only their memory traffic."
    if loops := module.unbounded_loops:
        names = ", ".join(loops[:3])
        yield f"note: XLA does not know the trip count of {names}: counted once each."


def _period_notes(server: ParameterServer | None, period: SyncPeriod, module: Module) -> list[str]:
    """Note synchronizations that the compiled program runs in another way than the layout says."""
    if server is None:
        return []
    notes = []
    if unmarked := unmarked_parts(server, module):
        notes.append(
            f"note: XLA has merged the branches of {', '.join(unmarked)} with others, so every "
            "step is timed as if it took them."
        )
    waits = sum(kind.count * kind.exposed for kind in period.kinds if kind.due)
    if server.overlap and period.hidden < waits:
        ran = f"hides {period.hidden:.3g} s of them behind computation, and waits {waits:.3g} s"
        later = f"{server.overlap} step{'s' * (server.overlap > 1)} after it was sent"
        notes.append(
            f"note: overlap = {server.overlap} applies a synchronization {later}, but the compiled "
            "step ends when its own collectives "
            f"have: in a period of {period.steps} steps it {ran}."
        )
    return notes


def in_parts(placed: PlacedModel) -> str:
    """Return the implementation of attention that stores no array of all scores where the layout's
    own does.
    """
    written = placed.resolved.layout.attention.implementation == "as_written"
    if written and placed.platform in PREFERRED:
        return "auto"
    return "chunked"


def stored_scores(
    memory: Memory, placed: PlacedModel, products: LargeProducts
) -> list[tuple[int, str, str]]:
    """Return the largest temporaries that hold all scores of an attention: bytes, the array, and
    where in the model it is.
    """
    parallel = placed.parallel
    if parallel.attention != "as_written" and may_replace(parallel) and STORED not in parallel.used:
        return []
    # the gradient of a weight may have the sides of the scores: a model as wide as a row is long
    weights = [leaf.shape for leaf in flatten(placed.abstract_state.params).values()]
    stored = []
    for size, array, where in memory.largest:
        shape = _shape(array)
        for pair in products.scores:
            if _has(shape, pair) and not _is_gradient(shape, pair, weights):
                stored.append((size, array, where))
                break
    return stored


def _is_gradient(
    shape: Sequence[int], pair: Sequence[int], weights: Sequence[Sequence[int]]
) -> bool:
    """Return True if an array with the sides of an attention's scores may be the gradient of a
    weight, whose sides may be as long.
    """
    size = math.prod(shape)
    return any(_has(weight, pair) and size <= math.prod(weight) for weight in weights)


def _shape(array: str) -> list[int]:
    """Return the shape of an array in text.

    >>> _shape("float32[8,4,64,64] x 2")
    [8, 4, 64, 64]
    """
    sizes, _, _ = array.partition("[")[2].partition("]")
    return [int(size) for size in re.findall(r"\d+", sizes)]


def _large_arrays(memory: Memory, placed: PlacedModel, products: LargeProducts) -> list[str]:
    """Note scores of attention, and logits, that are among the largest temporaries, with what
    computes them in parts.
    """
    notes = []
    scores = stored_scores(memory, placed, products)
    fix = f'[attention] implementation = "{in_parts(placed)}"'
    notes += _stored("all scores of attention", scores, memory.peak, fix)
    logits = [part for part in memory.largest if _are_logits(_shape(part[1]), products)]
    fix = "spmd.losses.cross_entropy_from_features"
    notes += _stored("the logits of all tokens", logits, memory.peak, fix)
    return notes


def _stored(
    what: str, arrays: Sequence[tuple[int, str, str]], peak: int, fix: str
) -> Iterator[str]:
    """Note the first of these arrays that is large, and what computes it in parts."""
    for size, array, where in [part for part in arrays if part[0] >= LARGE * peak][:1]:
        sizes = f"{format_bytes(size)} of {format_bytes(peak)}"
        place = ""
        if where:
            place = f", in {where}"
        yield f"note: {what} are stored: {array}, {sizes}{place}; {fix} computes them in parts."


def _are_logits(shape: Sequence[int], products: LargeProducts) -> bool:
    size = math.prod(shape)
    return any(count in shape and size > width * count for width, count in products.logits)


def _has(dims: Sequence[int], pair: Sequence[int]) -> bool:
    """Return True if a shape has both sizes among its dims."""
    return not Counter(pair) - Counter(dims)


def _waits(timeline: Timeline) -> list[str]:
    """Note the collectives that take the most of a step because nothing hides them, each with the
    reason.
    """
    groups: dict[tuple, list[Wait]] = {}
    for wait in timeline.waits:
        transfer = wait.transfer
        key = (transfer.kind, transfer.purpose, transfer.where, transfer.asynchronous)
        groups.setdefault(key, []).append(wait)
    lines = []
    for (kind, purpose, where, asynchronous), waits in groups.items():
        exposed, times = sum(wait.exposed for wait in waits), sum(wait.times for wait in waits)
        if exposed < WORTH_A_NOTE * timeline.seconds or len(lines) == SHOWN_WAITS:
            continue
        beside = sum(wait.beside * wait.times for wait in waits) / times
        reason = "the next operation needs it"
        if not asynchronous:
            reason = "XLA runs it synchronously"
        elif beside:
            needed = beside + exposed / times
            reason = (
                f"{_milliseconds(beside)} of computation are scheduled beside it, and it takes "
                f"{_milliseconds(needed)}"
            )
        often = ""
        if times > 1:
            often = f"{times} times, "
        lines.append(
            f"note: {kind} of {purpose} ({where}) is waited for: {often}{_milliseconds(exposed)} "
            f"of a step; {reason}."
        )
    return lines


def _milliseconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:,.3g} ms"
    return f"{value * 1e3:,.0f} ms"


def _rematerialized(timeline: Timeline) -> list[str]:
    """Note operations that XLA repeats to save memory."""
    if timeline.rematerialized < WORTH_A_NOTE * timeline.seconds:
        return []
    took = f"{timeline.rematerialized * 1e3:,.3g} ms of a step"
    off = '[compiler] options = { xla_disable_hlo_passes = "rematerialization" }'
    return [
        f"note: XLA computes some results twice to save memory, which takes {took}; {off} forbids "
        "it, and [remat] says what to keep."
    ]


def small_collectives(
    program: TrainingProgram, traffic: Traffic, timeline: Timeline, cluster: Cluster
) -> list[str]:
    """Note many collectives that send little each, where the layout keeps them separate."""
    layout = program.placed.resolved.layout
    buckets = layout.gradients.compressed and layout.gradients.bucket_bytes < MAX_EXACT_BUCKET
    by_fix: dict[str, list[Transfer]] = {}
    for transfer in traffic.transfers:
        key = THRESHOLDS.get(transfer.kind, "")
        threshold = getattr(layout.compiler, key, None)
        if transfer.operand >= SMALL:
            continue
        if buckets and transfer.purpose == "gradients":
            fix = f"[gradients] bucket_bytes = {Gradients.bucket_bytes}"
        # Up to its own threshold XLA has merged all that it can.
        elif cluster.target.platform not in GPU or threshold is None:
            continue
        elif parse_bytes(threshold) < parse_bytes(XLA_THRESHOLD):
            fix = f'[compiler] {key} = "{XLA_THRESHOLD}"'
        else:
            continue
        by_fix.setdefault(fix, []).append(transfer)
    notes = []
    for fix, transfers in by_fix.items():
        count = sum(transfer.times for transfer in transfers)
        lost = sum(transfer.times * latency(transfer, cluster) for transfer in transfers)
        if count >= MANY and lost >= LOST * timeline.seconds:
            sent = format_bytes(sum(transfer.times * transfer.sent for transfer in transfers))
            notes.append(
                f"note: {count} collectives of less than {format_bytes(SMALL)} send {sent}, and "
                f"spend {lost * 1e3:.3g} ms on latency "
                f"({lost / timeline.seconds:.0%} of a step); {fix} merges them."
            )
    return notes


def gathered_stacks(
    program: TrainingProgram, traffic: Traffic, cluster: Cluster, least: float
) -> list[str]:
    """Note stacks that are gathered in full before the loop over their layers, `least` bytes or
    more, where they need not be.
    """
    placed = program.placed
    stacks = _sharded_stacks(program)
    arrays = []  # that are gathered, each with the path of its stack
    for transfer in traffic.transfers:
        if transfer.kind == "all_gather" and set(transfer.axes) & set(placed.resolved.data_axes):
            sizes = [(array, math.prod(array.shape)) for array in transfer.arrays]
            arrays += [(array, stacks[size]) for array, size in sizes if size in stacks]
    size = sum(array.bytes for array, _ in arrays)
    if not arrays or size < least:
        return []
    changes = {"gather": "layer"}
    if not program.sync.reduction.manual:
        changes = {"reduction": "reduce_scatter", "gather": "layer"}
    layout = placed.resolved.layout
    try:
        gradients = dataclasses.replace(layout.gradients, **changes)
        changed = dataclasses.replace(layout, gradients=gradients)
        # a note is given only where the change can be made
        with gpu_of(cluster.target):
            prepare_program(placed.with_layout(placed.mesh, changed), program.sample)
    except SpmdError:
        # such as a loss that reads the stack elsewhere, too; a note of the step says so
        return []
    array, path = max(arrays, key=lambda pair: pair[0].bytes)
    fix = ", ".join(f'{key} = "{value}"' for key, value in changes.items())
    return [
        f"note: {len(arrays)} arrays of stacks are gathered in full before the loop over their "
        f"layers, {format_bytes(size)}, such as "
        f"{path} as {array}; [gradients] {fix} gathers one layer at a time."
    ]


def _sharded_stacks(program: TrainingProgram) -> dict[int, str]:
    """Return the paths of sharded stacks that are not gathered by layer, by the number of elements
    on a device, once gathered.
    """
    placed, sync = program.placed, program.sync
    stacks = {}
    for path in placed.model.stacks().keys() & placed.resolved.all_placements.keys():
        place = placed.resolved.placement(path)
        if path in sync.layerwise or not any(keep_axes(place.spec, sync.mesh_axes.data_axes)):
            continue
        shards = num_shards(keep_axes(place.spec, sync.mesh_axes.model_axes), placed.resolved.mesh)
        stacks[math.prod(place.shape) // shards] = path
    return stacks


def crossing_notes(
    traffic: Traffic,
    mesh: MeshSpec,
    cluster: Cluster,
    data_axes: tuple[str, ...],
    period: SyncPeriod,
) -> list[str]:
    """Note collectives that cross sites in every step, by the axis that does, and their cost."""
    step = period.seconds
    if period.alone:
        step = period.alone.seconds
    across = [axis for axis in mesh.names if crosses_sites(axis, mesh, cluster)]
    by_axes: dict[tuple[str, ...], list[Transfer]] = {}
    for transfer in traffic.transfers:
        if transfer.leaving and not transfer.conditional:
            axes = tuple(axis for axis in transfer.axes if axis in across)
            by_axes.setdefault(axes, []).append(transfer)
    notes = []
    for axes, transfers in by_axes.items():
        took = sum(transfer.times * transfer_time(transfer, cluster) for transfer in transfers)
        sent = sum(transfer.times * transfer.leaving * transfer.levels[2] for transfer in transfers)
        if took < LOST * step:
            continue
        purposes = ", ".join(dict.fromkeys(transfer.purpose for transfer in transfers))
        title = "a part of an axis"
        if axes:
            title = f"axis {', '.join(axes)}"
        count = sum(transfer.times for transfer in transfers)
        fix = _crossing_fix(axes, purposes, mesh, cluster, data_axes)
        notes.append(
            f"note: {title} crosses sites in every step: collectives of {purposes} ({count}) send "
            f"{format_bytes(int(sent))} "
            f"over each site's link and take {took:.3g} s of a step of {step:.3g} s{fix}."
        )
    return notes


def repeated_exchanges(traffic: Traffic) -> list[str]:
    """Note all-to-alls between workers that train separately in which each device of a site sends
    as much as one of them has to.
    """
    sent, devices = 0.0, 0
    for transfer in traffic.transfers:
        on_site = transfer.counts[0] * transfer.counts[1]
        exchanges = transfer.conditional and transfer.kind == "all_to_all" and transfer.leaving
        if exchanges and on_site > 1:
            sent += transfer.times * transfer.leaving * transfer.levels[2]
            devices = max(devices, on_site)
    if not devices:
        return []
    return [
        f"note: {devices} devices of a site each send a change of their own to other sites, "
        f"{format_bytes(int(sent))} over each site's "
        "link; [gradients] exact_axes, with the axes of the mesh inside of a site, averages them "
        "there first."
    ]


def crosses_sites(axis: str, mesh: MeshSpec, cluster: Cluster) -> bool:
    """Return True if neighbours along a mesh axis are on different sites.

    >>> mesh, far = MeshSpec.parse("data=4,model=2"), Cluster.parse("2x1x4xcpu")
    >>> crosses_sites("data", mesh, far), crosses_sites("model", mesh, far)
    (True, False)
    """
    sizes = [size for _, size in mesh.axes]
    at = mesh.names.index(axis)
    lines = np.moveaxis(np.arange(mesh.size).reshape(sizes), at, -1).reshape(-1, sizes[at])
    return any(sites_of(line, cluster) > 1 for line in lines.tolist())


def _crossing_fix(
    axes: tuple[str, ...],
    purposes: str,
    mesh: MeshSpec,
    cluster: Cluster,
    data_axes: tuple[str, ...],
) -> str:
    """Return a change that keeps these collectives on a site, or makes them rare; "" if there is
    none.
    """
    inner = [axis for axis in axes if axis not in data_axes]
    if inner:
        order = (*(axis for axis in mesh.names if axis not in inner), *inner)
        moved = MeshSpec(tuple((axis, mesh.sizes[axis]) for axis in order))
        if any(crosses_sites(axis, moved, cluster) for axis in inner):
            return ""
        return f'; mesh="{moved}" keeps {", ".join(inner)} on a site'
    if "gradients" not in purposes:
        return ""
    return '; [parameter_server] mode = "local" sends once in many steps (layout diloco)'
