"""Notes on gradient communication, shown before a run."""

import math

import jax
import numpy as np

from spmd.base.tree import format_bytes, nbytes
from spmd.sync.build_communication import codec_applies
from spmd.sync.gradient_sync import GradientSync
from spmd.wire.codec.base import RowCodec
from spmd.wire.comm_log import SENT
from spmd.wire.reduction_registry import REDUCTIONS
from spmd.wire.server.events import Events
from spmd.wire.server.packing import Storage
from spmd.wire.server.statistics import ServerStatistics
from spmd.wire.transfer import Transfer

PREVIEW_ROUNDS = 200  # rounds that are simulated ahead of a run


def notes(sync: GradientSync) -> list[str]:
    """The codec of each gradient, the size of the residuals, and settings of the layout that have
    no effect.
    """
    declared, manual = sync.resolved.layout.gradients, sync.reduction.manual
    codecs, lines = ", ".join(codec for codec in declared.codecs if codec != "exact"), []
    if reduction := REDUCTIONS[declared.reduction].make:
        name = f'reduction "{declared.reduction}" ({reduction.__module__}.{reduction.__qualname__})'
        return [
            f"gradients are reduced by {name}."
            if manual
            else f"note: one worker, nothing is sent: {name} is not used."
        ]
    specs = sync.transfers.values()
    if declared.compressed and manual:
        lines.append(f"gradients are sent as {'; '.join(_codec_shares(sync))}.")
    if declared.compressed and not manual:
        lines.append(f"note: one worker, nothing is sent: codec {codecs} is not used.")
    elif declared.compressed and not codec_applies(sync.resolved, sync.mesh_axes):
        exact_axes = ", ".join(declared.exact_axes)
        lines.append(
            f"note: {exact_axes} spans all workers, and is exact: codec {codecs} is not used."
        )
    elif declared.compressed and all(spec.codec.lossless for spec in specs):
        lines.append(
            f"note: every gradient is sent exactly: codec {codecs} applies to none that it makes "
            "smaller."
        )
    elif declared.error_feedback and not any(spec.error_feedback for spec in specs):
        lines.append(
            "note: error_feedback = true, but every gradient is sent exactly: no residual is kept."
        )
    elif declared.error_feedback:
        residuals = sum(
            4 * math.prod(spec.shard_layout.shape) for spec in specs if spec.error_feedback
        )
        lines.append(
            f"error feedback keeps {format_bytes(residuals)} of float32 residuals on each device."
        )
    if sync.metric_names:
        lines.append(
            f"diagnostics = true sends every gradient again, in float32: {exact_bytes(sync):,} "
            "bytes more in each step."
        )
    return lines


def server_notes(storage: Storage, clock: Events) -> list[str]:
    """Say how evenly the servers are loaded, and how many gradients are dropped."""
    lines = []
    for dtype, assignment in storage.assignments.items():
        itemsize = np.dtype(dtype).itemsize
        least, most = (format_bytes(bound(assignment.load) * itemsize) for bound in (min, max))
        lines.append(
            f"{assignment.servers} servers, {assignment.placement}, {dtype}: {least} to {most} "
            "each, "
            f"imbalance {assignment.imbalance:.2f}; {assignment.padding:.1%} of the storage is "
            "padding."
        )
    if clock.declared.local:
        lines.append(
            "each worker has its own parameters and optimizer, and all synchronize every "
            f"{clock.declared.every} steps; evaluation and "
            "the returned model use the servers' parameters, without the steps after the last "
            "synchronization."
        )
    if clock.declared.max_staleness is not None:
        steps = min(PREVIEW_ROUNDS, clock.steps or PREVIEW_ROUNDS)
        statistics = ServerStatistics.of(clock, steps)
        share = statistics.dropped.sum() / statistics.arrived.sum()
        prefix, limit = "note: " if share > 0.25 else "", clock.declared.max_staleness
        lines.append(
            f"{prefix}of the gradients of the first {steps} rounds {share:.0%} are dropped: "
            f"max_staleness = {limit}."
        )
    return lines


def _codec_shares(sync: GradientSync) -> list[str]:
    """For each codec the number of its gradients, and their bytes as float32; for "exact" also
    their paths.
    """
    by_codec: dict[str, list[str]] = {}
    for path, transfer in sync.transfers.items():
        by_codec.setdefault(transfer.codec_name, []).append(path)
    shares = []
    for name, paths in by_codec.items():
        layouts = [sync.transfers[path].shard_layout for path in paths]
        details = [format_bytes(sum(4 * math.prod(layout.shape) for layout in layouts))]
        if name == "exact":
            details += paths[:3]
            details += ["..."] if len(paths) > 3 else []
        shares.append(f"{name}: {len(paths)} ({', '.join(details)})")
    return shares


def server_bytes(sync: GradientSync) -> tuple[int, int]:
    """Bytes that one worker sends to one parameter server, and receives from it: a row of every
    stored array.
    """
    sent, received, bfloat16 = 0, 0, sync.resolved.layout.gradients.weights == "bfloat16"
    for path, spec in sync.transfers.items():
        dtype = sync.resolved.placements[path].dtype
        width, itemsize = spec.shape[1], np.dtype(dtype).itemsize
        rows = jax.ShapeDtypeStruct((1, width), np.float32)
        payload = (
            jax.eval_shape(spec.codec.encode, rows) if isinstance(spec.codec, RowCodec) else None
        )
        sent += (
            sum(map(nbytes, jax.tree.leaves(payload))) if payload is not None else width * itemsize
        )
        received += width * (2 if bfloat16 and dtype == "float32" else itemsize)
    return sent, received


def exact_bytes(sync: GradientSync) -> int:
    """Bytes that each device would send if all gradients were sent exactly, under the same
    reduction.
    """
    return sum(_exact_bytes(sync, spec) for spec in sync.transfers.values())


def _exact_bytes(sync: GradientSync, spec: Transfer) -> int:
    """Bytes that `codec.exact.exact_mean` sends: reduce-scatters dim by dim, then an all-reduce of
    the shard.
    """
    sent, size = 0, math.prod(spec.shard_layout.shape) * spec.dtype.itemsize
    for entry in spec.shard_layout.spec:
        devices = sync.mesh_axes.devices_along(entry)
        sent, size = sent + SENT["reduce_scatter"](devices, size), size // devices
    return sent + SENT["all_reduce"](
        sync.mesh_axes.devices_along(spec.shard_layout.replicated_axes), size
    )
