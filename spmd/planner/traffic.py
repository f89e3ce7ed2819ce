"""What travels in a compiled step: every collective of its program, how often, between whom, and how many bytes."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from spmd.mesh import MeshSpec
from spmd.planner.hlo import Array, Instruction, Module, collective_kind, groups, payload
from spmd.planner.target import Cluster
from spmd.render.html import aligned, filled
from spmd.tree import format_bytes
from spmd.wire.comm_log import SENT

PURPOSES = ("gradients", "parameters", "activations", "statistics", "metrics")
_SCOPES = {"pull": "parameters", "push": "gradients", "send": "gradients", "receive": "parameters", "stats": "statistics"}
_SCOPES |= {"metrics": "metrics"}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of the program.

    Attributes:
      kind: as `spmd.wire.comm_log` calls it: all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute.
      purpose: what travels: gradients, parameters, activations, statistics (of batches), metrics.
      axes: the mesh axes along which devices meet; () where these are not whole axes.
      group: how many devices meet; `per_node` of them share a node.
      arrays: what it gives on each device.
      times: how often it runs in a step, loops multiplied out.
      where: the scope in the program that it comes from; `name`, its own name there.
      asynchronous: whether something else may run between its start and its end.
      conditional: whether it runs only in steps in which a condition holds, as when workers meet now and then.
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
        """Bytes that each device brings."""
        size = sum(array.bytes for array in self.arrays)
        return {"all_gather": size // self.group, "reduce_scatter": size * self.group}.get(self.kind, size)

    @property
    def sent(self) -> int:
        """Bytes that one device sends each time, in a ring."""
        return SENT[self.kind](self.group, self.operand)

    @property
    def levels(self) -> tuple[float, float]:
        """Of these, bytes to devices of the same node and to other nodes, if each level does its part by itself.

        An all-reduce is then a reduce-scatter inside the node, an all-reduce of every device's share between nodes, and an all-gather
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
    """Every collective of a step, in the program's order; printed, a table."""

    transfers: tuple[Transfer, ...]

    def bytes(self, purpose: str | None = None) -> int:
        """Bytes that one device sends in a step, for one purpose or all."""
        return sum(one.sent * one.times for one in self.transfers if purpose in (None, one.purpose))

    @property
    def between(self) -> float:
        """Of these, bytes that leave the node."""
        return sum(one.levels[1] * one.times for one in self.transfers)

    def __str__(self) -> str:
        if not self.transfers:
            return "nothing travels."
        header, rows = traffic_rows(self)
        parts = [f"{format_bytes(self.bytes(purpose))} of {purpose}" for purpose in PURPOSES if self.bytes(purpose)]
        total = f"{self.bytes():,} bytes sent by each device per step: {', '.join(parts)}"
        total += f"; {format_bytes(self.between)} to other nodes" if self.between else ""
        return filled("\n".join([*aligned([header, *rows], ruled=True), "", f"{total}."]))


def traffic_rows(traffic: Traffic) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of what travels, its header and its rows; what is alike is one row, and what sends most comes first."""
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
        for one, count in _alike(traffic.transfers)
    ]
    return ("what", "collective", "over", "payload", "times", "sent/device", "where"), rows


def _alike(transfers: Sequence[Transfer]) -> list[tuple[Transfer, int]]:
    """Transfers that differ in nothing but their name, counted; those that send most first."""
    counted: dict[Transfer, int] = {}
    for one in transfers:
        key = dataclasses.replace(one, name="")
        counted[key] = counted.get(key, 0) + 1
    return sorted(counted.items(), key=lambda item: -item[0].sent * item[0].times * item[1])


def _payload(arrays: tuple[Array, ...]) -> str:
    largest = max(arrays, key=lambda array: array.bytes)
    return str(largest) + (f" and {len(arrays) - 1} more" if len(arrays) > 1 else "")


def traffic_of(module: Module, mesh: MeshSpec, cluster: Cluster, data_axes: tuple[str, ...]) -> Traffic:
    """The collectives of a program on a mesh whose devices fill the nodes of a cluster in order."""
    return Traffic(tuple(_walk(module, module.entry, 1, mesh, cluster, data_axes)))


def _walk(module: Module, name: str, times: int, mesh: MeshSpec, cluster: Cluster, data: tuple[str, ...]) -> Iterator[Transfer]:
    for one in module.computations.get(name, ()):
        if collective_kind(one.op):
            found = transfer_of(module, name, one, times, mesh, cluster, data)
            if found.group > 1:
                yield found
        elif one.op == "while":
            yield from _walk(module, one.named("body"), times * (module.trips(name, one) or 1), mesh, cluster, data)
        elif one.op == "conditional":  # of the branches the one that sends most
            branches = [tuple(_walk(module, branch, times, mesh, cluster, data)) for branch in one.called]
            most = max(branches, key=lambda found: sum(part.sent * part.times for part in found), default=())
            always = len({tuple(dataclasses.replace(part, name="") for part in found) for found in branches}) == 1
            yield from (part if always else dataclasses.replace(part, conditional=True) for part in most)
        elif one.op in ("call", "async-start"):
            for called in one.called:
                yield from _walk(module, called, times, mesh, cluster, data)


def transfer_of(
    module: Module, computation: str, one: Instruction, times: int, mesh: MeshSpec, cluster: Cluster, data: tuple[str, ...]
) -> Transfer:
    """A collective, or its start, as a `Transfer`."""
    kind, members, scopes = collective_kind(one.op) or "", groups(one, module.partitions), module.scopes(computation, one)
    if kind == "collective_permute":
        axes = _along(members, mesh)
        size = math.prod(mesh.sizes[axis] for axis in axes) if axes else len(members)
        crosses = any(a // cluster.devices != b // cluster.devices for a, b in members)
        shape = {"group": size, "per_node": 1 if crosses else size}
    else:
        axes = _axes(members, mesh)
        per_node = max(sum(other // cluster.devices == who // cluster.devices for other in members[0]) for who in members[0])
        size = len(members[0])
        shape = {"group": size, "per_node": per_node if size % per_node == 0 else 1}
    purpose, where = min(((_purpose(where, kind, axes, data), where) for where in scopes), key=lambda found: PURPOSES.index(found[0]))
    asynchronous = one.op.endswith("-start") and '"is_sync":true' not in one.rest
    more = {"arrays": payload(one), "times": times, "where": _short(where), "name": one.name, "asynchronous": asynchronous}
    return Transfer(kind, purpose, axes, **shape, **more)


def _purpose(where: str, kind: str, axes: tuple[str, ...], data: tuple[str, ...]) -> str:
    """What travels: as the step's own scopes say, else by whether workers meet or the parts of one."""
    for part in where.split("/"):
        if part in _SCOPES:
            return _SCOPES[part]
    if axes and set(axes) <= set(data) and kind != "collective_permute":
        if "transpose(" in where:
            return "gradients" if kind in ("all_reduce", "reduce_scatter") else "activations"
        return "parameters" if kind == "all_gather" else "metrics" if "jvp(" not in where else "statistics"
    return "activations"


def _short(where: str) -> str:
    """A scope without what every scope has."""
    backward = "transpose(" in where
    plain = re.sub(r"\b(jvp|transpose|vmap|checkpoint|remat|rematted_computation|shard_map|jit|closed_call|while|body)\b[()]*", "", where)
    parts = [part for part in re.sub(r"[()]", "", plain).split("/") if part]
    return "/".join([*(["backward"] if backward else []), *parts]) or "step"


def _axes(members: list[list[int]], mesh: MeshSpec) -> tuple[str, ...]:
    """The mesh axes along which these groups lie; () where they are not whole axes."""
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
    """The one axis along which all these pairs hand something on; () where there is none."""
    shape = [size for _, size in mesh.axes]
    moved = {
        index
        for a, b in pairs
        for index, (x, y) in enumerate(zip(np.unravel_index(a, shape), np.unravel_index(b, shape), strict=True))
        if x != y
    }
    return (mesh.axes[moved.pop()][0],) if len(moved) == 1 else ()
