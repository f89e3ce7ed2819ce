"""The communication of a compiled step: every collective, how often it runs, over which devices,
how many bytes it sends, and how long that takes on a target's links.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from spmd.base.tree import format_bytes
from spmd.layout.resolve import num_shards
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.hlo import Array, Instruction, Module, collective_kind, groups, payload
from spmd.render.collapse import LEAST, ranges
from spmd.render.html import aligned, filled
from spmd.wire.comm_log import SENT

PURPOSES = ("gradients", "parameters", "matrices", "activations", "statistics", "metrics")
_LEVEL = re.compile(r"(?<=/)\d+(?=[/)]|$)")  # a level of a path that is a number
_SCOPES = {
    "gather_params": "parameters",
    "reduce_gradients": "gradients",
    "send": "gradients",
    "receive": "parameters",
    "matrix_owners": "matrices",
    "stats": "statistics",
    "metrics": "metrics",
}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of the program.

    Attributes:
      kind: as `spmd.wire.comm_log` calls it: all_reduce, all_gather, reduce_scatter, all_to_all,
        collective_permute.
      purpose: what is sent: gradients, parameters, matrices (to the devices that update them),
        activations, statistics (of batches), metrics.
      axes: the mesh axes of its groups; () if these are only parts of axes.
      group: devices in a group; `per_node` of them share a node, and `per_site` a site (all of
        them, if it is 0).
      arrays: its result on each device.
      times: how often it runs in a step, loops multiplied out.
      where: the scope in the program that it comes from; `name`, its own name there.
      asynchronous: whether other operations may run between its start and its end.
      conditional: whether it runs only in some steps, as when workers synchronize periodically.
      leaving: devices of a site that send to other sites at the same time, over the link that they
        share.
    """

    kind: str
    purpose: str
    axes: tuple[str, ...]
    group: int
    per_node: int
    arrays: tuple[Array, ...]
    times: int
    where: str
    name: str
    asynchronous: bool
    conditional: bool = False
    per_site: int = 0
    leaving: int = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Devices of a group on each node, its nodes on each site, and its sites; their product is
        the group.
        """
        site = self.per_site or self.group
        return self.per_node, site // self.per_node, self.group // site

    @property
    def operand(self) -> int:
        """Bytes of its operands on each device."""
        size = sum(array.bytes for array in self.arrays)
        # XLA's text has results: that of an all-gather is larger than its operand, of a
        # reduce-scatter smaller.
        return {"all_gather": size // self.group, "reduce_scatter": size * self.group}.get(
            self.kind, size
        )

    @property
    def sent(self) -> int:
        """Bytes that one device sends each time, with a ring algorithm."""
        return SENT[self.kind](self.group, self.operand)

    @property
    def levels(self) -> tuple[float, float, float]:
        """Bytes of `sent` to devices of the same node, to other nodes of the same site, and to
        other sites.

        A ring passes through all devices of a node and then those of the next one. There are as
        many rings as devices in a node, each with a link of its own between nodes. Two nodes
        exchange the halves of an all-reduce, as two trees do. Over several sites, each reduces or
        gathers inside, and every device exchanges its part with its peers of other sites.
        """
        devices, nodes, sites = self.counts
        size = self.operand
        if self.kind == "collective_permute":
            if self.leaving:
                return 0.0, 0.0, float(size)
            if nodes > 1:
                return (0.0, float(size), 0.0)
            return (float(size), 0.0, 0.0)
        if self.kind == "all_to_all":
            inside = (devices - 1) * size / (devices * nodes * sites)
            return inside, (nodes - 1) * size / (nodes * sites), (sites - 1) * size / sites
        peers = devices * nodes - 1
        if self.kind == "all_gather":
            site, across = peers * sites * size, (sites - 1) * size
        else:
            rounds = 1
            if self.kind == "all_reduce":
                rounds = 2
            site = rounds * peers * size / (devices * nodes)
            across = rounds * (sites - 1) * (size / (devices * nodes * sites))
        between = 0.0
        if nodes == 2 and self.kind == "all_reduce":
            between = size / devices
        elif nodes > 1:
            between = site / devices
        return site - between, between, across


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Every collective of a step, in program order; printed, a table."""

    transfers: tuple[Transfer, ...]

    def bytes(self, purpose: str | None = None) -> int:
        """Return the bytes that one device sends in a step, for one purpose or all."""
        return sum(
            transfer.sent * transfer.times
            for transfer in self.transfers
            if purpose in (None, transfer.purpose)
        )

    def dtypes(self, purpose: str) -> set[str]:
        """Return the dtypes of the arrays that are sent for a purpose."""
        dtypes: set[str] = set()
        for transfer in self.transfers:
            if transfer.purpose == purpose:
                dtypes |= {array.dtype for array in transfer.arrays}
        return dtypes

    @property
    def between(self) -> float:
        """Bytes that one device sends to other nodes in a step, those of other sites included."""
        return sum(sum(transfer.levels[1:]) * transfer.times for transfer in self.transfers)

    @property
    def between_sites(self) -> float:
        """Bytes that one device sends to other sites in a step."""
        return sum(transfer.levels[2] * transfer.times for transfer in self.transfers)

    def __str__(self) -> str:
        if not self.transfers:
            return "no communication."
        header, rows = traffic_rows(self)
        parts = [
            f"{format_bytes(self.bytes(purpose))} of {purpose}"
            for purpose in PURPOSES
            if self.bytes(purpose)
        ]
        total = f"{self.bytes():,} bytes sent by each device per step: {', '.join(parts)}"
        if self.between:
            total += f"; {format_bytes(self.between)} to other nodes"
        if self.between_sites:
            total += f", {format_bytes(self.between_sites)} of them to other sites"
        return filled("\n".join([*aligned([header, *rows], ruled=True), "", f"{total}."]))


def traffic_rows(traffic: Traffic) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and rows of the table; equal transfers, also of equal layers, share a row,
    and those that send the most come first.
    """
    counts = _merge_layers(
        Counter(dataclasses.replace(transfer, name="") for transfer in traffic.transfers)
    )
    rows = []
    for transfer, count in counts.items():
        times = transfer.times * count
        row = (
            transfer.purpose,
            _collective(transfer),
            f"{', '.join(transfer.axes) or 'parts of axes'} ({transfer.group})",
            _payload(transfer.arrays),
            f"{times}",
            format_bytes(transfer.sent * times),
            transfer.where.removesuffix(f"/{transfer.kind}"),
        )
        rows.append((transfer.sent * times, row))
    rows.sort(key=lambda entry: -entry[0])
    header = ("what", "collective", "over", "payload", "times", "sent/device", "where")
    return header, [row for _, row in rows]


def _collective(transfer: Transfer) -> str:
    """Return the kind of a collective, with remarks."""
    text = transfer.kind
    if not transfer.asynchronous:
        text += " (waits)"
    if transfer.conditional:
        text += " (in some steps)"
    return text


def _merge_layers(counts: Counter[Transfer]) -> Counter[Transfer]:
    """Merge transfers that differ only in the numbers of the layers that they come from into one,
    at `blocks/{0..11}`.
    """
    groups: dict[Transfer, dict[tuple[int, ...], Transfer]] = {}
    for transfer in counts:
        pattern = dataclasses.replace(transfer, where=_LEVEL.sub("*", transfer.where))
        numbers = tuple(map(int, _LEVEL.findall(transfer.where)))
        groups.setdefault(pattern, {})[numbers] = transfer
    merged = Counter[Transfer]()
    for members in groups.values():
        levels = [sorted(set(level)) for level in zip(*members, strict=True)]
        if len(members) < LEAST or math.prod(map(len, levels)) != len(members):
            merged.update({transfer: counts[transfer] for transfer in members.values()})
            continue
        texts = iter([ranges(level) if len(level) > 1 else str(level[0]) for level in levels])
        first = next(iter(members.values()))
        where = _LEVEL.sub(lambda match, texts=texts: next(texts), first.where)
        count = sum(counts[transfer] for transfer in members.values())
        merged[dataclasses.replace(first, where=where)] = count
    return merged


def _payload(arrays: tuple[Array, ...]) -> str:
    """Name the largest array that a collective sends, and the number of the others."""
    largest = str(max(arrays, key=lambda array: array.bytes))
    if len(arrays) > 1:
        return f"{largest} and {len(arrays) - 1} more"
    return largest


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A program on a mesh whose devices fill the nodes of a cluster in order."""

    module: Module
    mesh: MeshSpec
    cluster: Cluster
    data_axes: tuple[str, ...]

    def transfers(self, name: str, times: int = 1) -> Iterator[Transfer]:
        """Yield the collectives of a computation that runs `times` times."""
        for instr in self.module.computations.get(name, ()):
            if collective_kind(instr.op):
                transfer = self.transfer(name, instr, times)
                if transfer.group > 1:
                    yield transfer
            elif instr.op == "while":
                # A loop whose length XLA does not know counts once; a note of the plan names it.
                trips = self.module.trip_count(name, instr) or 1
                yield from self.transfers(instr.called_as("body"), times * trips)
            elif instr.op == "conditional":
                yield from self._branch_transfers(instr, times)
            elif instr.op in ("call", "async-start"):
                for called in instr.called:
                    yield from self.transfers(called, times)

    def _branch_transfers(self, instr: Instruction, times: int) -> list[Transfer]:
        """Return the collectives of the branch that sends the most; they run in some steps only,
        unless all branches have the same.
        """
        branches = [list(self.transfers(branch, times)) for branch in instr.called]
        most = max(
            branches,
            key=lambda branch: sum(part.sent * part.times for part in branch),
            default=[],
        )
        unnamed = set()
        for branch in branches:
            unnamed.add(tuple(dataclasses.replace(part, name="") for part in branch))
        if len(unnamed) == 1:
            return most
        return [dataclasses.replace(part, conditional=True) for part in most]

    def transfer(self, computation: str, instr: Instruction, times: int = 1) -> Transfer:
        """Return a collective, or its start, as a `Transfer`."""
        kind = collective_kind(instr.op) or ""
        members = groups(instr, self.module.partitions)
        differing = {differing_axes(group, self.mesh) for group in members}
        if kind == "collective_permute":
            # pairs that differ along several axes are of no single one
            axes: tuple[str, ...] = tuple(set(itertools.chain.from_iterable(differing)))
            size = len(members)
            if len(axes) == 1:
                size = self.mesh.sizes[axes[0]]
            else:
                axes = ()
            # a permutation stays on nodes if all of its pairs do
            on_nodes = all(devices_per_node(pair, self.cluster) == 2 for pair in members)
            per_node = 1
            if on_nodes:
                per_node = size
            per_site = size
        else:
            axes = differing.pop()
            size = len(members[0])
            if differing or num_shards(axes, self.mesh) != size:
                axes = ()
            per_node = devices_per_node(members[0], self.cluster)
            farthest = max(members, key=lambda group: sites_of(group, self.cluster))
            per_site = devices_per_site(farthest, self.cluster, per_node)
        scopes = self.module.scopes(computation, instr)
        purposes = [_purpose(scope, kind, axes, self.data_axes) for scope in scopes]
        # XLA may have merged collectives of several purposes into this one.
        purpose = min(purposes, key=PURPOSES.index)
        return Transfer(
            kind,
            purpose,
            axes,
            size,
            per_node,
            payload(instr),
            times,
            where=_short(scopes[purposes.index(purpose)]),
            name=instr.name,
            # XLA:GPU marks a start that its end follows at once as synchronous
            asynchronous=instr.op.endswith("-start") and '"is_sync":true' not in instr.attributes,
            per_site=per_site,
            leaving=leaving_devices(members, self.cluster, pairs=kind == "collective_permute"),
        )


def traffic_of(
    module: Module, mesh: MeshSpec, cluster: Cluster, data_axes: tuple[str, ...]
) -> Traffic:
    """Return the collectives of a program."""
    return Traffic(tuple(Partitioned(module, mesh, cluster, data_axes).transfers(module.entry)))


def devices_per_node(group: Sequence[int], cluster: Cluster) -> int:
    """Return the number of devices of a group that share a node; 1 if they cannot be divided
    evenly.
    """
    # devices fill nodes in order
    most = max(Counter(device // cluster.devices for device in group).values())
    if len(group) % most == 0:
        return most
    return 1


def sites_of(group: Sequence[int], cluster: Cluster) -> int:
    """Return the number of sites that a group has devices on."""
    return len({device // cluster.devices_per_site for device in group})


def devices_per_site(group: Sequence[int], cluster: Cluster, per_node: int) -> int:
    """Return the number of devices of a group that share a site; `per_node`, as if each node were
    a site, if they cannot be divided evenly.
    """
    most = max(Counter(device // cluster.devices_per_site for device in group).values())
    if len(group) % most == 0 and most % per_node == 0:
        return most
    return per_node


def leaving_devices(members: Sequence[Sequence[int]], cluster: Cluster, *, pairs: bool) -> int:
    """Return the number of devices of a site that send to another site in a collective of these
    groups, or of these pairs of sender and receiver.

    >>> far = Cluster.parse("2x1x4xh100")
    >>> (
    ...     leaving_devices([[0, 4], [1, 5], [2, 3]], far, pairs=False),
    ...     leaving_devices([[0, 1], [3, 4]], far, pairs=True),
    ... )
    (2, 1)
    """
    senders: set[int] = set()
    for group in members:
        if sites_of(group, cluster) > 1:
            senders.update(group[:1] if pairs else group)
    by_site = Counter(device // cluster.devices_per_site for device in senders)
    return max(by_site.values(), default=0)


def _purpose(scope: str, kind: str, axes: tuple[str, ...], data: tuple[str, ...]) -> str:
    """Return the purpose of a collective: by the step's own scopes; otherwise by whether its groups
    are along the data axes.
    """
    # the step names its own collectives; the compiler's have the scope of what they are for
    for part in scope.split("/"):
        if part in _SCOPES:
            return _SCOPES[part]
    if not axes or not set(axes) <= set(data) or kind == "collective_permute":
        return "activations"
    # JAX writes transpose(jvp(...)) into the scope of a backward pass
    if "transpose(" in scope:
        if kind in ("all_reduce", "reduce_scatter"):
            return "gradients"
        return "activations"
    if kind == "all_gather":
        return "parameters"
    if "jvp(" in scope:
        return "statistics"
    return "metrics"


def _short(scope: str) -> str:
    """Return a scope without the parts that JAX's transformations add."""
    plain = re.sub(
        r"\b(jvp|transpose|vmap|checkpoint|remat|rematted_computation|shard_map|jit|closed_call|while|body)\b[()]*",
        "",
        scope,
    )
    parts = [part for part in re.sub(r"[()]", "", plain).split("/") if part]
    if "transpose(" in scope:
        parts.insert(0, "backward")
    return "/".join(parts) or "step"


def differing_axes(devices: Sequence[int], mesh: MeshSpec) -> tuple[str, ...]:
    """Return the mesh axes along which these devices differ."""
    positions = np.unravel_index(devices, [size for _, size in mesh.axes])
    pairs = zip(mesh.names, positions, strict=True)
    return tuple(name for name, along in pairs if len(np.unique(along)) > 1)


def transfer_time(transfer: Transfer, cluster: Cluster) -> float:
    """Return the seconds of one collective: its bytes on the slowest level of links, since chunks
    are sent on all at the same time, and its hops.

    A site's link is shared: the bytes of all devices that send to other sites at the same time
    cross it.

    >>> cluster = Cluster.parse("64x8xh100")
    >>> small, large = (
    ...     reduction_time("reduce_scatter", size, 512, 8, cluster) for size in (1 << 20, 1 << 30)
    ... )
    >>> 1e-3 < small < 2e-3 and large > 3 * small
    True
    """
    target = cluster.target
    inside, between, sites = transfer.levels
    sent = (inside, between, sites * transfer.leaving)
    links = (target.inside, target.between, target.sites)
    slowest = max(size / link.bandwidth for size, link in zip(sent, links, strict=True))
    hops = zip(_hops(transfer, target.platform), links, strict=True)
    delay = sum(count * link.latency for count, link in hops)
    return target.achieved.launch + slowest / target.achieved.link + delay


def _hops(transfer: Transfer, platform: str) -> tuple[int, int, int]:
    """Count how often the latency of links inside a node, between nodes, and between sites, delays
    one collective.

    The counts of GPUs are those of NCCL (ncclTopoTuneModel in its src/graph/tuning.cc). In a ring,
    a chunk passes every device once, and twice in an all-reduce; NCCL also has trees for an
    all-reduce, over nodes and along the devices of each node. Other devices communicate along
    trees. A collective over several sites is one on each site, and one of the sites.
    """
    inside, nodes, sites = transfer.counts
    if transfer.kind == "collective_permute":
        if transfer.leaving:
            return 0, 0, 1
        if nodes > 1:
            return (0, 1, 0)
        return (1, 0, 0)
    rounds = 1
    if transfer.kind == "all_reduce":
        rounds = 2
    tree = (
        rounds * math.ceil(math.log2(inside)),
        rounds * math.ceil(math.log2(nodes)),
        rounds * math.ceil(math.log2(sites)),
    )
    if platform != "cuda":
        return tree
    if transfer.kind == "all_to_all":  # everybody sends to everybody at the same time
        return min(inside - 1, 1), min(nodes - 1, 1), min(sites - 1, 1)
    if transfer.kind == "all_reduce":
        return rounds * (inside - 1), *tree[1:]
    return inside * nodes - nodes, nodes - 1, sites - 1


def latency(transfer: Transfer, cluster: Cluster) -> float:
    """Return the seconds of one collective that do not depend on its bytes."""
    return transfer_time(dataclasses.replace(transfer, arrays=()), cluster)


def reduction_time(kind: str, size: int, group: int, per_node: int, cluster: Cluster) -> float:
    """Return the seconds to reduce gradients of `size` bytes on each device in one collective over
    `group` devices, `per_node` of them on a node.
    """
    elements = size
    if kind != "all_reduce":
        elements = size // group
    transfer = Transfer(
        kind,
        "gradients",
        (),
        group,
        per_node,
        # Only bytes count for the links, so one array stands for all.
        arrays=(Array("uint8", (elements,), 8),),
        times=1,
        where="",
        name="",
        asynchronous=True,
    )
    return transfer_time(transfer, cluster)
