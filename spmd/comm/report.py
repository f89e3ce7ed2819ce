"""What people should know of an exchange before it runs."""

import math

from spmd.comm.exchange import Exchange
from spmd.comm.log import SENT
from spmd.comm.route import Item, crosses, ways_of
from spmd.tree import format_bytes


def notes(exchange: Exchange) -> list[str]:
    """Which gradients travel as what, what is kept, and what of the layout comes to nothing."""
    declared, manual = exchange.resolved.layout.gradients, exchange.reduction.manual
    codecs, lines = ", ".join(codec for codec in declared.codecs if codec != "exact"), []
    if declared.compressed and manual:
        lines.append(f"gradients travel as {'; '.join(_shares(exchange))}.")
    if declared.compressed and not manual:
        lines.append(f"note: one worker, nothing travels: codec {codecs} is not used.")
    elif declared.compressed and not crosses(exchange.resolved, exchange.scene):
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


def _shares(exchange: Exchange) -> list[str]:
    """How many gradients, and how many bytes of them as float32, go by each codec; of the exact ones also which."""
    shares: dict[str, list[Item]] = {}
    for item in exchange.items.values():
        shares.setdefault(item.name, []).append(item)
    said = []
    for name, items in shares.items():
        listed = ", ".join(item.place.path for item in items[:3]) + (", ..." if len(items) > 3 else "")
        size = format_bytes(sum(4 * math.prod(item.cut.shape) for item in items))
        said.append(f"{name}: {len(items)} ({size}{', ' + listed if name == 'exact' else ''})")
    return said


def exact_bytes(exchange: Exchange) -> int:
    """Bytes that each device would send if all gradients travelled exactly, under the same reduction."""
    return sum(_exactly(exchange, item) for item in exchange.items.values())


def _exactly(exchange: Exchange, item: Item) -> int:
    """What `codec.exact.reduce` sends: reduce-scatters dim by dim, then an all-reduce of the piece."""
    sent, left = 0, math.prod(item.cut.shape) * item.dtype.itemsize
    for entry in item.cut.spec:
        ways = ways_of(exchange.scene, entry)
        sent, left = sent + SENT["reduce_scatter"](ways, left), left // ways
    return sent + SENT["all_reduce"](ways_of(exchange.scene, item.cut.left), left)
