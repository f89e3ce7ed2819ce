"""Notes of a plan on communication that a layout can do better, each with a change that removes
it.
"""

import dataclasses
import math

import numpy as np

from spmd.errors import SpmdError
from spmd.layout.compiler import GPU
from spmd.layout.gradients import Gradients
from spmd.layout.resolve import num_shards
from spmd.mesh import MeshSpec
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.sync_period import SyncPeriod
from spmd.planner.target import Cluster
from spmd.planner.timeline import Timeline, latency, transfer_time
from spmd.planner.traffic import Traffic, Transfer, sites_of
from spmd.specs import keep_axes
from spmd.train.compiled_step import Program, prepare_program
from spmd.tree import format_bytes, parse_bytes
from spmd.wire.reduction import MAX_EXACT_BUCKET

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
