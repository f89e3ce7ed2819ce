"""What people should know of an exchange before it runs."""

import math

import jax
import numpy as np

from spmd.tree import format_bytes, nbytes
from spmd.wire.codec.base import RowCodec
from spmd.wire.comm_log import SENT
from spmd.wire.gradient_plan import GradientSpec, crosses, ways_of
from spmd.wire.gradient_sync import GradientSync
from spmd.wire.param_server.events import Events
from spmd.wire.param_server.packing import Storage
from spmd.wire.param_server.statistics import ServerStatistics

TRIED = 200  # rounds that the clock is asked about ahead of a run


def notes(exchange: GradientSync) -> list[str]:
    """Which gradients travel as what, what is kept, and what of the layout comes to nothing."""
    declared, manual = exchange.resolved.layout.gradients, exchange.reduction.manual
    codecs, lines = ", ".join(codec for codec in declared.codecs if codec != "exact"), []
    if declared.compressed and manual:
        lines.append(f"gradients travel as {'; '.join(_shares(exchange))}.")
    if declared.compressed and not manual:
        lines.append(f"note: one worker, nothing travels: codec {codecs} is not used.")
    elif declared.compressed and not crosses(exchange.resolved, exchange.mesh_axes):
        inside = ", ".join(declared.exact_axes)
        lines.append(f"note: {inside} spans all workers, and is exact: codec {codecs} is not used.")
    elif declared.compressed and all(item.codec.lossless for item in exchange.items.values()):
        lines.append(f"note: every gradient travels exactly: no rule leaves codec {codecs} one that it would make smaller.")
    elif declared.error_feedback and not any(item.feedback for item in exchange.items.values()):
        lines.append("note: error_feedback = true, but every gradient travels exactly: no residual is kept.")
    elif declared.error_feedback:
        kept = sum(4 * math.prod(item.cut.shape) for item in exchange.items.values() if item.feedback)
        lines.append(f"error feedback keeps {format_bytes(kept)} of float32 residuals on each device.")
    return lines


def server_notes(storage: Storage, clock: Events) -> list[str]:
    """How evenly the servers are loaded, and how much work is for nothing."""
    lines = []
    for kind, found in storage.assignments.items():
        size = np.dtype(kind).itemsize
        least, most = (format_bytes(bound(found.load) * size) for bound in (min, max))
        lines.append(
            f"{found.servers} servers, {found.placement}, {kind}: {least} to {most} each, imbalance {found.imbalance:.2f}; "
            f"{found.padding:.1%} of what is stored only fills up."
        )
    if clock.declared.local:
        lines.append(
            f"each worker has weights and an optimizer of its own, and all meet every {clock.declared.every} steps; what is evaluated, and "
            "returned in the end, are the servers' weights, which know nothing of what came after the last meeting."
        )
    if clock.declared.max_staleness is not None:
        steps = min(TRIED, clock.steps or TRIED)
        told = ServerStatistics.of(clock, steps)
        share = told.dropped.sum() / told.arrived.sum()
        word, limit = "note: " if share > 0.25 else "", clock.declared.max_staleness
        lines.append(f"{word}of the gradients of the first {steps} rounds {share:.0%} are dropped: max_staleness = {limit}.")
    return lines


def _shares(exchange: GradientSync) -> list[str]:
    """How many gradients, and how many bytes of them as float32, go by each codec; of the exact ones also which."""
    shares: dict[str, list[GradientSpec]] = {}
    for item in exchange.items.values():
        shares.setdefault(item.name, []).append(item)
    said = []
    for name, items in shares.items():
        listed = ", ".join(item.place.path for item in items[:3]) + (", ..." if len(items) > 3 else "")
        size = format_bytes(sum(4 * math.prod(item.cut.shape) for item in items))
        said.append(f"{name}: {len(items)} ({size}{', ' + listed if name == 'exact' else ''})")
    return said


def server_bytes(exchange: GradientSync) -> tuple[int, int]:
    """Bytes that one worker sends to one server of a parameter server, and gets from it: a row of every stored array."""
    pushed, pulled, short = 0, 0, exchange.resolved.layout.gradients.weights == "bfloat16"
    for item in exchange.items.values():
        width, itemsize = item.place.shape[1], np.dtype(item.place.dtype).itemsize
        rows = jax.ShapeDtypeStruct((1, width), np.float32)
        payload = jax.eval_shape(item.codec.encode, rows) if isinstance(item.codec, RowCodec) else None
        pushed += sum(map(nbytes, jax.tree.leaves(payload))) if payload is not None else width * itemsize
        pulled += width * (2 if short and item.place.dtype == "float32" else itemsize)
    return pushed, pulled


def exact_bytes(exchange: GradientSync) -> int:
    """Bytes that each device would send if all gradients travelled exactly, under the same reduction."""
    return sum(_exactly(exchange, item) for item in exchange.items.values())


def _exactly(exchange: GradientSync, item: GradientSpec) -> int:
    """What `codec.exact.reduce` sends: reduce-scatters dim by dim, then an all-reduce of the piece."""
    sent, left = 0, math.prod(item.cut.shape) * item.dtype.itemsize
    for entry in item.cut.spec:
        ways = ways_of(exchange.mesh_axes, entry)
        sent, left = sent + SENT["reduce_scatter"](ways, left), left // ways
    return sent + SENT["all_reduce"](ways_of(exchange.mesh_axes, item.cut.left), left)
