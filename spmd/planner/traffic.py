"""The communication of a compiled step: every collective, how often it runs, over which devices, and how many bytes it sends."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from spmd.mesh import MeshSpec
from spmd.planner.hlo import Array, Instruction, Module, collective_kind, groups, payload
from spmd.planner.target import Cluster
from spmd.render.html import aligned, filled
from spmd.tree import format_bytes
from spmd.wire.comm_log import SENT

PURPOSES = ("gradients", "parameters", "activations", "statistics", "metrics")
_SCOPES = {
    "gather_params": "parameters",
    "reduce_gradients": "gradients",
    "send": "gradients",
    "receive": "parameters",
    "stats": "statistics",
    "metrics": "metrics",
}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of the program.

    Attributes:
      kind: as `spmd.wire.comm_log` calls it: all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute.
      purpose: what is sent: gradients, parameters, activations, statistics (of batches), metrics.
      axes: the mesh axes of its groups; () if these are only parts of axes.
      group: devices in a group; `per_node` of them share a node.
      arrays: its result on each device.
      times: how often it runs in a step, loops multiplied out.
      where: the scope in the program that it comes from; `name`, its own name there.
      asynchronous: whether other operations may run between its start and its end.
      conditional: whether it runs only in some steps, as when workers synchronize periodically.
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

    @property
    def operand(self) -> int:
        """Bytes of its operands on each device."""
        size = sum(array.bytes for array in self.arrays)
        return {"all_gather": size // self.group, "reduce_scatter": size * self.group}.get(self.kind, size)

    @property
    def sent(self) -> int:
        """Bytes that one device sends each time, with a ring algorithm."""
        return SENT[self.kind](self.group, self.operand)

    @property
    def levels(self) -> tuple[float, float]:
        """Of these, bytes to devices of the same node and to other nodes, with a hierarchical algorithm.

        An all-reduce is then a reduce-scatter inside the node, an all-reduce of every device's shard between nodes, and an all-gather
        inside; both sums are that of a ring.
        """
        k, n, b = self.per_node, self.group // self.per_node, self.operand
        if self.kind == "collective_permute":
            return (float(b), 0.0) if n <= 1 else (0.0, float(b))
        if self.kind == "all_gather":
            return (k - 1) * n * b, (n - 1) * b
        if self.kind == "all_to_all":
            return (k - 1) * b / (k * n), (n - 1) * b / n
        turns = 2 if self.kind == "all_reduce" else 1
        return turns * (k - 1) * b / k, turns * (n - 1) * b / (n * k)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Every collective of a step, in program order; printed, a table."""

    transfers: tuple[Transfer, ...]

    def bytes(self, purpose: str | None = None) -> int:
        """Bytes that one device sends in a step, for one purpose or all."""
        return sum(transfer.sent * transfer.times for transfer in self.transfers if purpose in (None, transfer.purpose))

    @property
    def between(self) -> float:
        """Of these, bytes that leave the node."""
        return sum(transfer.levels[1] * transfer.times for transfer in self.transfers)

    def __str__(self) -> str:
        if not self.transfers:
            return "no communication."
        header, rows = traffic_rows(self)
        parts = [f"{format_bytes(self.bytes(purpose))} of {purpose}" for purpose in PURPOSES if self.bytes(purpose)]
        total = f"{self.bytes():,} bytes sent by each device per step: {', '.join(parts)}"
        total += f"; {format_bytes(self.between)} to other nodes" if self.between else ""
        return filled("\n".join([*aligned([header, *rows], ruled=True), "", f"{total}."]))


def traffic_rows(traffic: Traffic) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and rows of the table; equal transfers share a row, and those that send the most come first."""
    counts = Counter(dataclasses.replace(transfer, name="") for transfer in traffic.transfers)
    rows = [
        (
            one.purpose,
            one.kind + ("" if one.asynchronous else " (waits)") + (" (in some steps)" if one.conditional else ""),
            f"{', '.join(one.axes) or 'parts of axes'} ({one.group})",
            _payload(one.arrays),
            f"{one.times}{f' in {count}' if count > 1 else ''}",
            format_bytes(one.sent * one.times * count),
            one.where,
        )
        for one, count in sorted(counts.items(), key=lambda item: -item[0].sent * item[0].times * item[1])
    ]
    return ("what", "collective", "over", "payload", "times", "sent/device", "where"), rows


def _payload(arrays: tuple[Array, ...]) -> str:
    largest = max(arrays, key=lambda array: array.bytes)
    return str(largest) + (f" and {len(arrays) - 1} more" if len(arrays) > 1 else "")


def traffic_of(module: Module, mesh: MeshSpec, cluster: Cluster, data_axes: tuple[str, ...]) -> Traffic:
    """The collectives of a program on a mesh whose devices fill the nodes of a cluster in order."""
    return Traffic(tuple(_transfers(module, module.entry, 1, mesh, cluster, data_axes)))


def _transfers(module: Module, name: str, times: int, mesh: MeshSpec, cluster: Cluster, data: tuple[str, ...]) -> Iterator[Transfer]:
    for instr in module.computations.get(name, ()):
        if collective_kind(instr.op):
            transfer = transfer_of(module, name, instr, times, mesh, cluster, data)
            if transfer.group > 1:
                yield transfer
        elif instr.op == "while":
            repeats = times * (module.trip_count(name, instr) or 1)
            yield from _transfers(module, instr.called_as("body"), repeats, mesh, cluster, data)
        elif instr.op == "conditional":  # the branch that sends the most
            branches = [tuple(_transfers(module, branch, times, mesh, cluster, data)) for branch in instr.called]
            most = max(branches, key=lambda branch: sum(part.sent * part.times for part in branch), default=())
            always = len({tuple(dataclasses.replace(part, name="") for part in branch) for branch in branches}) == 1
            yield from (part if always else dataclasses.replace(part, conditional=True) for part in most)
        elif instr.op in ("call", "async-start"):
            for called in instr.called:
                yield from _transfers(module, called, times, mesh, cluster, data)


def transfer_of(
    module: Module, computation: str, instr: Instruction, times: int, mesh: MeshSpec, cluster: Cluster, data: tuple[str, ...]
) -> Transfer:
    """A collective, or its start, as a `Transfer`."""
    kind, members, scopes = collective_kind(instr.op) or "", groups(instr, module.partitions), module.scopes(computation, instr)
    if kind == "collective_permute":
        axes = _along(members, mesh)
        size = math.prod(mesh.sizes[axis] for axis in axes) if axes else len(members)
        crosses = any(a // cluster.devices != b // cluster.devices for a, b in members)
        shape = {"group": size, "per_node": 1 if crosses else size}
    else:
        axes = _axes(members, mesh)
        per_node = max(Counter(device // cluster.devices for device in members[0]).values())
        size = len(members[0])
        shape = {"group": size, "per_node": per_node if size % per_node == 0 else 1}
    purposes = [(_purpose(where, kind, axes, data), where) for where in scopes]
    purpose, where = min(purposes, key=lambda pair: PURPOSES.index(pair[0]))
    asynchronous = instr.op.endswith("-start") and '"is_sync":true' not in instr.rest
    more = {"arrays": payload(instr), "times": times, "where": _short(where), "name": instr.name, "asynchronous": asynchronous}
    return Transfer(kind, purpose, axes, **shape, **more)


def _purpose(where: str, kind: str, axes: tuple[str, ...], data: tuple[str, ...]) -> str:
    """What is sent: by the step's own scopes; otherwise by whether a group is along the data axes."""
    for part in where.split("/"):
        if part in _SCOPES:
            return _SCOPES[part]
    if axes and set(axes) <= set(data) and kind != "collective_permute":
        if "transpose(" in where:
            return "gradients" if kind in ("all_reduce", "reduce_scatter") else "activations"
        return "parameters" if kind == "all_gather" else "metrics" if "jvp(" not in where else "statistics"
    return "activations"


def _short(where: str) -> str:
    """A scope without the parts that JAX's transformations add."""
    backward = "transpose(" in where
    plain = re.sub(r"\b(jvp|transpose|vmap|checkpoint|remat|rematted_computation|shard_map|jit|closed_call|while|body)\b[()]*", "", where)
    parts = [part for part in re.sub(r"[()]", "", plain).split("/") if part]
    return "/".join([*(["backward"] if backward else []), *parts]) or "step"


def _axes(members: list[list[int]], mesh: MeshSpec) -> tuple[str, ...]:
    """The mesh axes of these groups; () if they are only parts of axes."""
    ids, wanted = np.arange(mesh.size).reshape([size for _, size in mesh.axes]), {frozenset(group) for group in members}
    large = [index for index, (_, size) in enumerate(mesh.axes) if size > 1]
    for count in range(1, len(large) + 1):
        for inner in itertools.combinations(large, count):
            outer = [index for index in range(len(mesh.axes)) if index not in inner]
            size = math.prod(mesh.axes[index][1] for index in inner)
            if size == len(members[0]) and {frozenset(row) for row in ids.transpose([*outer, *inner]).reshape(-1, size).tolist()} == wanted:
                return tuple(mesh.axes[index][0] for index in inner)
    return ()


def _along(pairs: list[list[int]], mesh: MeshSpec) -> tuple[str, ...]:
    """The one axis along which all these pairs send; () if there is none."""
    shape = [size for _, size in mesh.axes]
    moved = {
        index
        for a, b in pairs
        for index, (x, y) in enumerate(zip(np.unravel_index(a, shape), np.unravel_index(b, shape), strict=True))
        if x != y
    }
    return (mesh.axes[moved.pop()][0],) if len(moved) == 1 else ()
