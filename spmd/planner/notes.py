"""Notes of a plan: what is slow, large or other than the layout says in its compiled program, each
with the change that helps.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from spmd.errors import SpmdError
from spmd.layout.compiler import GPU
from spmd.layout.gradients import Gradients
from spmd.layout.resolve import num_shards
from spmd.mesh import MeshSpec
from spmd.nn.attention_kernels import PREFERRED, may_replace
from spmd.nn.low_precision import DTYPES, scope_of
from spmd.nn.parallel_context import STORED
from spmd.planner.cluster import Cluster
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.hlo import Module
from spmd.planner.memory import Memory
from spmd.planner.model_flops import (
    LargeProducts,
)
from spmd.planner.timeline import (
    SyncPeriod,
    Timeline,
    Wait,
    unmarked_parts,
)
from spmd.planner.traffic import Traffic, Transfer, latency, sites_of, transfer_time
from spmd.specs import keep_axes
from spmd.train.compiled_step import Program, prepare_program
from spmd.train.model_setup import PlacedModel
from spmd.tree import flatten, format_bytes, parse_bytes
from spmd.wire.reduction import MAX_EXACT_BUCKET
from spmd.wire.server.declaration import ParameterServer

WORTH_A_NOTE, SHOWN_WAITS = 0.02, 3  # of a step's time; and of its collectives
LARGE = 0.1  # of a step's peak memory: an array that is worth a note


def _period_notes(server: ParameterServer | None, period: SyncPeriod, module: Module) -> list[str]:
    """Notes on synchronizations that the compiled program runs in another way than the layout
    says.
    """
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
    """The implementation of attention that stores no array of all scores where the layout's own
    does.
    """
    written = placed.resolved.layout.attention.implementation == "as_written"
    return "auto" if written and placed.platform in PREFERRED else "chunked"


def stored_scores(
    memory: Memory, placed: PlacedModel, products: LargeProducts
) -> list[tuple[int, str, str]]:
    """The largest temporaries that hold all scores of an attention: bytes, the array, and where in
    the model it is.
    """
    # a gradient may have a length's sides
    weights = [leaf.shape for leaf in flatten(placed.abstract_state.params).values()]

    def are_scores(sizes: list[int]) -> bool:
        return any(
            _has(sizes, pair)
            and not any(_has(w, pair) and math.prod(sizes) <= math.prod(w) for w in weights)
            for pair in products.scores
        )

    parallel = placed.parallel
    if parallel.attention != "as_written" and may_replace(parallel) and STORED not in parallel.used:
        return []
    return [
        (size, array, where) for size, array, where in memory.largest if are_scores(_sizes(array))
    ]


def _sizes(array: str) -> list[int]:
    """The shape of an array in text.

    >>> _sizes("float32[8,4,64,64] x 2")
    [8, 4, 64, 64]
    """
    return [int(size) for size in re.findall(r"\d+", array.partition("[")[2].partition("]")[0])]


def _large_arrays(memory: Memory, placed: PlacedModel, products: LargeProducts) -> list[str]:
    """Notes on scores of attention, and on logits, that are among the largest temporaries, with
    what computes them in parts.
    """
    large = [
        (size, array, where, _sizes(array))
        for size, array, where in memory.largest
        if size >= LARGE * memory.peak
    ]
    scores = [
        found
        for found in stored_scores(memory, placed, products)
        if found[0] >= LARGE * memory.peak
    ]
    logits = [
        found
        for found in large
        if any(v in found[3] and math.prod(found[3]) > width * v for width, v in products.logits)
    ]
    return [
        f"note: {what} are stored: {array}, {format_bytes(size)} of "
        f"{format_bytes(memory.peak)}{f', in {where}' if where else ''}; {fix}."
        for what, found, fix in (
            (
                "all scores of attention",
                scores,
                f'[attention] implementation = "{in_parts(placed)}" computes them in parts',
            ),
            (
                "the logits of all tokens",
                logits,
                "spmd.losses.cross_entropy_from_features computes them in parts",
            ),
        )
        for size, array, where, *_ in found[:1]
    ]


def _has(dims: Sequence[int], pair: Sequence[int]) -> bool:
    return not Counter(pair) - Counter(dims)


def _waits(timeline: Timeline) -> list[str]:
    """Notes on the collectives that take the most of a step because nothing hides them, each with
    the reason.
    """
    groups: dict[tuple, list[Wait]] = {}
    for wait in timeline.waits:
        groups.setdefault(
            (
                wait.transfer.kind,
                wait.transfer.purpose,
                wait.transfer.where,
                wait.transfer.asynchronous,
            ),
            [],
        ).append(wait)
    lines = []
    for (kind, purpose, where, asynchronous), waits in groups.items():
        exposed, times = sum(wait.exposed for wait in waits), sum(wait.times for wait in waits)
        if exposed < WORTH_A_NOTE * timeline.seconds or len(lines) == SHOWN_WAITS:
            continue
        beside = sum(wait.beside * wait.times for wait in waits) / times
        reason = "XLA runs it synchronously" if not asynchronous else "the next operation needs it"
        if asynchronous and beside:
            needed = beside + exposed / times
            reason = (
                f"{_milliseconds(beside)} of computation are scheduled beside it, and it takes "
                f"{_milliseconds(needed)}"
            )
        often = f"{times} times, " if times > 1 else ""
        lines.append(
            f"note: {kind} of {purpose} ({where}) is waited for: {often}{_milliseconds(exposed)} "
            f"of a step; {reason}."
        )
    return lines


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value * 1e3:,.0f} ms"


def _rematerialized(timeline: Timeline) -> list[str]:
    """A note on operations that XLA repeats to save memory."""
    if timeline.rematerialized < WORTH_A_NOTE * timeline.seconds:
        return []
    took = f"{timeline.rematerialized * 1e3:,.3g} ms of a step"
    off = '[compiler] options = { xla_disable_hlo_passes = "rematerialization" }'
    return [
        f"note: XLA computes some results twice to save memory, which takes {took}; {off} forbids "
        "it, and [remat] says what to keep."
    ]


def _warnings(program: Program, traffic: Traffic, memory: Memory, cluster: Cluster) -> list[str]:
    """Notes on what the layout does not ask for: low-precision reductions, moved activations; and
    on memory that JAX does not use.
    """
    lines = []
    placed = program.placed
    exact = placed.resolved.layout.gradients.codec == "exact"
    low = traffic.dtypes("gradients") & {"bfloat16", "float16"}
    if (
        exact
        and low
        and any(leaf.dtype == "float32" for leaf in flatten(placed.abstract_state.params).values())
    ):
        fix = 'reduction = "all_reduce" or "reduce_scatter" reduces them in float32'
        lines.append(
            f"note: XLA reduces gradients in {', '.join(sorted(low))}, which the layout does not "
            f"ask for; {fix}."
        )
    data_axes = set(placed.resolved.data_axes)
    moved = sum(
        t.sent * t.times
        for t in traffic.transfers
        if t.purpose == "activations" and set(t.axes) & data_axes
    )
    if moved > traffic.bytes("parameters") + traffic.bytes("gradients"):
        lines.append(
            f"note: {format_bytes(moved)} of activations are sent over "
            f"{', '.join(sorted(data_axes))}, more than parameters and gradients: "
            "the layout moves activations to the parameters instead of parameters to the batch."
        )
    sometimes = sum(
        transfer.sent * transfer.times for transfer in traffic.transfers if transfer.conditional
    )
    if sometimes:
        lines.append(
            f"note: {format_bytes(sometimes)} are sent only in steps that synchronize workers; "
            "traffic and time are those of such a step, "
            "in which all parameters are sent and received."
        )
    if memory.pool is not None and memory.fraction is not None:
        reserved = f"JAX uses {memory.pool / memory.capacity:.0%} of a GPU's memory"
        lines.append(
            f"note: {reserved}; this step needs "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={memory.fraction:.2f}."
        )
    return lines


# bytes of a collective's operands on each device, below which latency is most of its time
SMALL = 256 * 2**10
MANY = 16  # of them in a step
LOST = 0.01  # of a step: latency that is worth a note
XLA_THRESHOLD = "30 MiB"  # up to which XLA:GPU merges collectives by default
KEYS = {
    "all_gather": "combine_all_gather",
    "reduce_scatter": "combine_reduce_scatter",
    "all_reduce": "combine_all_reduce",
}


def small_collectives(
    program: Program, traffic: Traffic, timeline: Timeline, cluster: Cluster
) -> list[str]:
    """Many collectives that send little each, where the layout keeps them separate."""
    declared, notes = program.placed.resolved.layout, []
    by_fix: dict[str, list[Transfer]] = {}
    for transfer in traffic.transfers:
        key = KEYS.get(transfer.kind, "")
        threshold = getattr(declared.compiler, key, None)
        if transfer.operand >= SMALL:
            continue
        if (
            declared.gradients.compressed
            and transfer.purpose == "gradients"
            and declared.gradients.bucket_bytes < MAX_EXACT_BUCKET
        ):
            by_fix.setdefault(f"[gradients] bucket_bytes = {Gradients.bucket_bytes}", []).append(
                transfer
            )
        elif (
            cluster.target.platform in GPU
            and threshold is not None
            and parse_bytes(threshold) < parse_bytes(XLA_THRESHOLD)
        ):
            by_fix.setdefault(f'[compiler] {key} = "{XLA_THRESHOLD}"', []).append(transfer)
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
    program: Program, traffic: Traffic, cluster: Cluster, least: float
) -> list[str]:
    """Stacks that are gathered in full before the loop over their layers, `least` bytes or more,
    where they need not be.
    """
    placed, sync = program.placed, program.sync
    mesh, layout = placed.resolved.mesh, placed.resolved.layout
    stacks = {}  # by the number of elements on a device, once gathered
    for path in placed.model.stacks().keys() & placed.resolved.all_placements.keys():
        place = placed.resolved.placement(path)
        if path not in sync.layerwise and any(keep_axes(place.spec, sync.mesh_axes.data_axes)):
            stacks[
                math.prod(place.shape)
                // num_shards(keep_axes(place.spec, sync.mesh_axes.model_axes), mesh)
            ] = path
    found = [
        (array, stacks[math.prod(array.shape)])
        for transfer in traffic.transfers
        if transfer.kind == "all_gather" and set(transfer.axes) & set(placed.resolved.data_axes)
        for array in transfer.arrays
        if math.prod(array.shape) in stacks
    ]
    size = sum(array.bytes for array, _ in found)
    if not found or size < least:
        return []
    changes = (
        {"gather": "layer"}
        if sync.reduction.manual
        else {"reduction": "reduce_scatter", "gather": "layer"}
    )
    try:
        changed = dataclasses.replace(
            layout, gradients=dataclasses.replace(layout.gradients, **changes)
        )
        with gpu_of(cluster.target):
            prepare_program(placed.with_layout(placed.mesh, changed), program.sample)
    except SpmdError:
        # such as a loss that reads the stack elsewhere, too; a note of the step says so
        return []
    array, path = max(found, key=lambda pair: pair[0].bytes)
    fix = ", ".join(f'{key} = "{value}"' for key, value in changes.items())
    return [
        f"note: {len(found)} arrays of stacks are gathered in full before the loop over their "
        f"layers, {format_bytes(size)}, such as "
        f"{path} as {array}; [gradients] {fix} gathers one layer at a time."
    ]


def crossing_notes(
    traffic: Traffic,
    mesh: MeshSpec,
    cluster: Cluster,
    data_axes: tuple[str, ...],
    period: SyncPeriod,
) -> list[str]:
    """Collectives that cross sites in every step, by the axis that does, and what they cost."""
    step = period.alone.seconds if period.alone else period.seconds
    across = [axis for axis in mesh.names if crosses_sites(axis, mesh, cluster)]
    by_axes: dict[tuple[str, ...], list[Transfer]] = {}
    for transfer in traffic.transfers:
        if transfer.leaving and not transfer.conditional:
            by_axes.setdefault(tuple(axis for axis in transfer.axes if axis in across), []).append(
                transfer
            )
    notes = []
    for axes, transfers in by_axes.items():
        took = sum(transfer.times * transfer_time(transfer, cluster) for transfer in transfers)
        sent = sum(transfer.times * transfer.leaving * transfer.levels[2] for transfer in transfers)
        if took < LOST * step:
            continue
        purposes = ", ".join(dict.fromkeys(transfer.purpose for transfer in transfers))
        named = f"axis {', '.join(axes)}" if axes else "a part of an axis"
        count, fix = (
            sum(transfer.times for transfer in transfers),
            _crossing_fix(axes, purposes, mesh, cluster, data_axes),
        )
        notes.append(
            f"note: {named} crosses sites in every step: collectives of {purposes} ({count}) send "
            f"{format_bytes(int(sent))} "
            f"over each site's link and take {took:.3g} s of a step of {step:.3g} s{fix}."
        )
    return notes


def repeated_exchanges(traffic: Traffic) -> list[str]:
    """All-to-alls between workers that train separately in which each device of a site sends as
    much as one of them has to.
    """
    found = [
        t
        for t in traffic.transfers
        if t.conditional and t.kind == "all_to_all" and t.leaving and t.counts[0] * t.counts[1] > 1
    ]
    if not found:
        return []
    sent, devices = (
        sum(t.times * t.leaving * t.levels[2] for t in found),
        max(t.counts[0] * t.counts[1] for t in found),
    )
    return [
        f"note: {devices} devices of a site each send a change of their own to other sites, "
        f"{format_bytes(int(sent))} over each site's "
        "link; [gradients] exact_axes, with the axes of the mesh inside of a site, averages them "
        "there first."
    ]


def crosses_sites(axis: str, mesh: MeshSpec, cluster: Cluster) -> bool:
    """Whether neighbours along a mesh axis are on different sites.

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
    """A change that keeps these collectives on a site, or makes them rare; "" if there is none."""
    inner = [axis for axis in axes if axis not in data_axes]
    if inner:
        order = (*(axis for axis in mesh.names if axis not in inner), *inner)
        moved = MeshSpec(tuple((axis, mesh.sizes[axis]) for axis in order))
        if not any(crosses_sites(axis, moved, cluster) for axis in inner):
            return f'; mesh="{moved}" keeps {", ".join(inner)} on a site'
        return ""
    return (
        '; [parameter_server] mode = "local" sends once in many steps (layout diloco)'
        if "gradients" in purposes
        else ""
    )


GEMM = re.compile(r"gemm|matmul")


@dataclasses.dataclass(frozen=True)
class LayerProducts:
    """The products of a layer in a compiled program.

    Attributes:
      asked: "bfloat16", "float8" or "int8".
      forward, backward: dtypes that are multiplied, by XLA's names.
      rounded: the program rounds its factors to the dtype of the forward pass. Without a product of
        its own in the forward pass, it is then one with another layer's: XLA merges products of the
        same input.
    """

    asked: str
    forward: set[str] = dataclasses.field(default_factory=set)
    backward: set[str] = dataclasses.field(default_factory=set)
    rounded: bool = False

    @property
    def wanted(self) -> tuple[str, str | None]:
        """The dtypes for the forward pass and for a gradient; None: that of the model."""
        forward, backward = (
            dtype and dtype.dtype.name.replace("_", "") for dtype in DTYPES[self.asked]
        )
        return forward, backward

    @property
    def others(self) -> list[str]:
        """Dtypes that are multiplied, and that were not asked for."""
        forward, backward = self.wanted
        return sorted(
            (self.forward - {forward})
            | (self.backward - {forward, backward} if backward is not None else set())
        )


def layer_products(module: Module, layers: Mapping[str, str]) -> dict[str, LayerProducts]:
    """The products of layers, by path.

    Args:
      layers: by path, what `[[precision]]` asks for.
    """
    paths = {scope_of(path): path for path in layers}
    found = {path: LayerProducts(asked) for path, asked in layers.items()}
    pattern = re.compile(
        "|".join(f"{re.escape(scope)}(?![^/)])" for scope in sorted(paths, key=len, reverse=True))
    )
    for name, lines in module.computations.items() if layers else ():
        for instr in lines:
            if (match := pattern.search(instr.scope)) is None:
                continue
            layer = found[paths[match[0]]]
            if instr.op == "dot" or GEMM.search(instr.custom_call):
                dtypes = layer.backward if "transpose(" in instr.scope else layer.forward
                dtypes.update(
                    part.arrays[0].dtype for part in module.operands(name, instr)[:2] if part.arrays
                )
            elif layer.wanted[0] in {array.dtype for array in instr.arrays}:
                found[paths[match[0]]] = dataclasses.replace(layer, rounded=True)
    return found


def precision_notes(module: Module, layers: Mapping[str, str]) -> list[str]:
    """For everything that is asked for, in which layers the program multiplies that, and in which
    it does not.
    """
    found, notes = layer_products(module, layers), {}
    held = {layer.asked for layer in found.values() if layer.wanted[0] in layer.forward}
    for path, layer in found.items():
        merged = not layer.forward and layer.rounded and layer.asked in held
        if layer.others or not (layer.forward or merged):
            multiplied = ", ".join(layer.others) or "nothing"
            what = (
                f"note: [[precision]] asks for products in {layer.asked}, and the program "
                f"multiplies {multiplied} in"
            )
        else:
            gradients = (
                f", gradients in {', '.join(sorted(layer.backward))}"
                if layer.wanted[1] is None and layer.backward
                else ""
            )
            together = ", which XLA merges with those of another layer" if merged else ""
            what = f"products in {layer.asked}{gradients}{together}:"
        notes.setdefault(what, []).append(path)
    return [f"{what} {', '.join(paths)}." for what, paths in notes.items()]
