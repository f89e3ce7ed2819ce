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
    declared = sync.resolved.layout.gradients
    make = REDUCTIONS[declared.reduction].make
    if make is not None:
        name = f'reduction "{declared.reduction}" ({make.__module__}.{make.__qualname__})'
        if not sync.reduction.manual:
            return [f"note: one worker, nothing is sent: {name} is not used."]
        return [f"gradients are reduced by {name}."]
    lines = []
    if declared.compressed and sync.reduction.manual:
        lines.append(f"gradients are sent as {'; '.join(_codec_shares(sync))}.")
    lines += _codec_notes(sync)
    if sync.metric_names:
        lines.append(
            f"diagnostics = true sends every gradient again, in float32: {exact_bytes(sync):,} "
            "bytes more in each step."
        )
    return lines


def _codec_notes(sync: GradientSync) -> list[str]:
    """Return why codecs or error feedback are not used; else the size of the residuals."""
    declared = sync.resolved.layout.gradients
    codecs = ", ".join(codec for codec in declared.codecs if codec != "exact")
    transfers = sync.transfers.values()
    with_residuals = [transfer for transfer in transfers if transfer.error_feedback]
    if declared.compressed and not sync.reduction.manual:
        return [f"note: one worker, nothing is sent: codec {codecs} is not used."]
    if declared.compressed and not codec_applies(sync.resolved, sync.mesh_axes):
        exact_axes = ", ".join(declared.exact_axes)
        return [f"note: {exact_axes} spans all workers, and is exact: codec {codecs} is not used."]
    if declared.compressed and all(transfer.codec.lossless for transfer in transfers):
        return [
            f"note: every gradient is sent exactly: codec {codecs} applies to none that it makes "
            "smaller."
        ]
    if not declared.error_feedback:
        return []
    if not with_residuals:
        return [
            "note: error_feedback = true, but every gradient is sent exactly: no residual is kept."
        ]
    size = format_bytes(sum(_float32_bytes(transfer) for transfer in with_residuals))
    return [f"error feedback keeps {size} of float32 residuals on each device."]


def _float32_bytes(transfer: Transfer) -> int:
    """Return the bytes of a gradient on one device, as float32."""
    return 4 * math.prod(transfer.shard_layout.shape)


def server_notes(storage: Storage, clock: Events) -> list[str]:
    """Say how evenly the servers are loaded, and how many gradients are dropped."""
    lines = []
    for dtype, assignment in storage.assignments.items():
        itemsize = np.dtype(dtype).itemsize
        least = format_bytes(min(assignment.load) * itemsize)
        most = format_bytes(max(assignment.load) * itemsize)
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
    limit = clock.declared.max_staleness
    if limit is not None:
        steps = min(PREVIEW_ROUNDS, clock.steps or PREVIEW_ROUNDS)
        statistics = ServerStatistics.of(clock, steps)
        share = statistics.dropped.sum() / statistics.arrived.sum()
        line = f"of the gradients of the first {steps} rounds {share:.0%} are dropped: "
        line += f"max_staleness = {limit}."
        if share > 0.25:
            line = f"note: {line}"
        lines.append(line)
    return lines


def _codec_shares(sync: GradientSync) -> list[str]:
    """For each codec the number of its gradients, and their bytes as float32; for "exact" also
    their paths.
    """
    by_codec: dict[str, dict[str, Transfer]] = {}
    for path, transfer in sync.transfers.items():
        by_codec.setdefault(transfer.codec_name, {})[path] = transfer
    shares = []
    for name, transfers in by_codec.items():
        size = sum(_float32_bytes(transfer) for transfer in transfers.values())
        details = [format_bytes(size)]
        if name == "exact":
            details += list(transfers)[:3]
            if len(transfers) > 3:
                details.append("...")
        shares.append(f"{name}: {len(transfers)} ({', '.join(details)})")
    return shares


def server_bytes(sync: GradientSync) -> tuple[int, int]:
    """Bytes that one worker sends to one parameter server, and receives from it: a row of every
    stored array.
    """
    sent = 0
    received = 0
    for path, transfer in sync.transfers.items():
        dtype = sync.resolved.placements[path].dtype
        width = transfer.shape[1]
        size = width * np.dtype(dtype).itemsize
        if isinstance(transfer.codec, RowCodec):
            # Of one row: all servers have rows of the same width, and a codec encodes each alone.
            rows = jax.ShapeDtypeStruct((1, width), np.float32)
            payload = jax.eval_shape(transfer.codec.encode, rows)
            sent += sum(map(nbytes, jax.tree.leaves(payload)))
        else:
            sent += size
        if sync.rounds_params and dtype == "float32":
            received += 2 * width
        else:
            received += size
    return sent, received


def exact_bytes(sync: GradientSync) -> int:
    """Bytes that each device would send if all gradients were sent exactly, under the same
    reduction.
    """
    return sum(_exact_bytes(sync, spec) for spec in sync.transfers.values())


def _exact_bytes(sync: GradientSync, transfer: Transfer) -> int:
    """Bytes that `codec.exact.exact_mean` sends: reduce-scatters dim by dim, then an all-reduce of
    the shard.
    """
    layout = transfer.shard_layout
    sent = 0
    size = math.prod(layout.shape) * transfer.dtype.itemsize
    for entry in layout.spec:
        devices = sync.mesh_axes.devices_along(entry)
        sent += SENT["reduce_scatter"](devices, size)
        size //= devices
    copies = sync.mesh_axes.devices_along(layout.replicated_axes)
    return sent + SENT["all_reduce"](copies, size)
