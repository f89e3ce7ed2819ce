"""The memory of a device that a step uses beside what XLA plans for its program, as independent
estimates.

In the memory that JAX allocates from: workspaces of libraries, batches that `fit` places ahead, and
what the allocator cannot use. Outside of it: the CUDA context, and NCCL's buffers for each group of
devices that communicates. A target's `[overhead]` has the figures and their sources; a target
without it has none of these.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import NormalDist

from spmd.planner.cluster import Cluster
from spmd.planner.hlo import Instruction, Module, collective_kind, groups
from spmd.planner.target import Estimate, Overhead

PREFETCHED = 2  # batches that `fit` places ahead, unless its `prefetch` says otherwise
ESTIMATED = 4  # times as far off is a program's memory by another compiler; assumed
# NCCL sends these to each device directly, through buffers of its own for each
DIRECT = ("all_to_all", "collective_permute")


@dataclasses.dataclass(frozen=True)
class Item:
    """A part of a device's memory in bytes: what is expected, and its standard deviation.

    Attributes:
      pool: whether it is a part of the memory that JAX allocates from.
    """

    title: str
    expected: float
    deviation: float
    pool: bool = True


def likelihood(items: Iterable[Item], limit: float) -> float:
    """Return the probability that these need no more than `limit` bytes together, if each is off
    independently of the others.

    >>> (
    ...     round(likelihood([Item("a", 60, 3), Item("b", 20, 4)], limit=85), 3),
    ...     likelihood([Item("a", 60, 0)], limit=60),
    ... )
    (0.841, 1.0)
    """
    expected, deviation = total(items)
    if deviation:
        return NormalDist(expected, deviation).cdf(limit)
    return float(expected <= limit)


def total(items: Iterable[Item]) -> tuple[float, float]:
    """Return the expected sum, and its standard deviation: that of independent parts."""
    items = tuple(items)
    return sum(item.expected for item in items), math.hypot(*(item.deviation for item in items))


def program_items(
    overhead: Overhead, size: int, temporaries: int, *, exact: bool = True
) -> tuple[Item, ...]:
    """Return a program's bytes, and what the allocator loses beside them.

    Args:
      size: according to XLA, with its `temporaries`.
      exact: whether the program is that of the device's own compiler.
    """
    off = overhead.temporaries
    deviation = off.deviation * temporaries * (1 if exact else ESTIMATED)
    lost = overhead.fragmentation
    return (
        Item("program", size + off.expected * temporaries, deviation),
        Item("fragmentation", size * lost.expected, size * lost.deviation),
    )


def overhead_items(module: Module, cluster: Cluster, batch: int) -> tuple[Item, ...]:
    """Return everything else that a step needs on one device of a cluster; `batch` is the size of
    its arrays there. () if the target has none.
    """
    overhead = cluster.target.overhead
    if overhead == Overhead():
        return ()
    items = [Item("batches placed ahead", PREFETCHED * batch, 0.0)]
    # kernels run one at a time, so the largest workspace is enough
    if workspace := max(_workspaces(module, overhead), key=lambda one: one.expected, default=None):
        items.append(_item("workspace of a library", workspace))
    runtime = "the runtime's own"
    if cluster.target.platform == "cuda":
        runtime = "CUDA context"
    items.append(_item(runtime, overhead.runtime, pool=False))
    if count := len(communicators(module)):
        title = f"NCCL, {count} group{'s' * (count > 1)} of devices"
        items.append(_item(title, overhead.communicator, count, pool=False))
    if peers := direct_peers(module, cluster):
        title = f"NCCL, {peers} direct peer{'s' * (peers > 1)}"
        items.append(_item(title, overhead.peer, peers, pool=False))
    return tuple(item for item in items if item.expected)


def _item(title: str, estimate: Estimate, count: int = 1, *, pool: bool = True) -> Item:
    """Return several of the same kind as one item: all of them are off by the same share."""
    return Item(title, count * estimate.expected, count * estimate.deviation, pool)


def _collectives(module: Module) -> Iterator[tuple[Instruction, list[list[int]]]]:
    """Yield every collective of a program between several devices, with its groups."""
    for _, instr in module.instructions:
        # XLA leaves permutations without pairs in programs that it partitions
        if collective_kind(instr.op):
            members = groups(instr, module.partitions)
            if max(map(len, members), default=0) > 1:
                yield instr, members


def communicators(module: Module) -> set[frozenset[int]]:
    """Return the groups of devices of which the first device is a member: XLA makes one of NCCL's
    communicators for each.
    """
    communicators = set()
    for instr, members in _collectives(module):
        if collective_kind(instr.op) == "collective_permute":
            # XLA has no groups for it, only pairs; its communicator is that of all devices
            communicators.add(frozenset(range(module.partitions)))
        else:
            communicators.add(next(frozenset(group) for group in members if 0 in group))
    return communicators


def direct_peers(module: Module, cluster: Cluster) -> int:
    """Return the number of devices of its own node with which a device exchanges data directly;
    the most of any device.
    """
    peers: dict[int, set[int]] = defaultdict(set)
    for instr, members in _collectives(module):
        if collective_kind(instr.op) not in DIRECT:
            continue
        for group in members:
            for device, other in itertools.permutations(group, 2):
                neighbours = device // cluster.devices == other // cluster.devices
                if neighbours and device != other:
                    peers[device].add(other)
    return max(map(len, peers.values()), default=0)


def _workspaces(module: Module, overhead: Overhead) -> Iterator[Estimate]:
    """Yield the workspaces of kernels of libraries for which the program has none; kernels run one
    at a time, so the largest is enough.
    """
    for name, instr in module.instructions:
        call = instr.custom_call.lower()
        if instr.op == "dot":
            # without a GPU, XLA has products computed by Triton, which on a GPU cuBLAS may compute
            # faster
            yield overhead.workspace
        elif "conv" in call and "convert" not in call:
            yield overhead.convolution
        elif "fmha" in call and "backward" in call:
            # cuDNN's backward pass of attention adds up the gradient of the queries in float32 (Dao
            # 2023, arXiv:2307.08691, section 3.1), and reads as 0 bytes here
            query = module.operands(name, instr)[0].arrays[0]
            yield Estimate(4.0 * query.size, query.size)
