"""The communication of a compiled step: every collective, how often it runs, over which devices, and how many bytes it sends."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from spmd.layout.resolve import num_shards
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
        """Of these, bytes to devices of the same node and to other nodes.

        A ring passes through all devices of a node and then those of the next one. There are as many rings as devices in a node, each with
        a link of its own between nodes. Two nodes exchange the halves of an all-reduce, as two trees do.
        """
        k, n, b = self.per_node, self.group // self.per_node, self.operand
        if self.kind == "collective_permute":
            return (float(b), 0.0) if n <= 1 else (0.0, float(b))
        if self.kind == "all_to_all":
            return (k - 1) * b / (k * n), (n - 1) * b / n
        sent = {"all_gather": (k * n - 1) * b, "reduce_scatter": (k * n - 1) * b / (k * n), "all_reduce": 2 * (k * n - 1) * b / (k * n)}
        between = 0.0 if n <= 1 else b / k if n == 2 and self.kind == "all_reduce" else sent[self.kind] / k
        return sent[self.kind] - between, between


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Every collective of a step, in program order; printed, a table."""

    transfers: tuple[Transfer, ...]

    def bytes(self, purpose: str | None = None) -> int:
        """Bytes that one device sends in a step, for one purpose or all."""
        return sum(transfer.sent * transfer.times for transfer in self.transfers if purpose in (None, transfer.purpose))

    def dtypes(self, purpose: str) -> set[str]:
        """Dtypes of the arrays that are sent for a purpose."""
        return {array.dtype for transfer in self.transfers if transfer.purpose == purpose for array in transfer.arrays}

    @property
    def between(self) -> float:
        """Bytes that one device sends to other nodes in a step."""
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
            transfer.purpose,
            transfer.kind + ("" if transfer.asynchronous else " (waits)") + (" (in some steps)" if transfer.conditional else ""),
            f"{', '.join(transfer.axes) or 'parts of axes'} ({transfer.group})",
            _payload(transfer.arrays),
            f"{transfer.times}{f' in {count}' if count > 1 else ''}",
            format_bytes(transfer.sent * transfer.times * count),
            transfer.where,
        )
        for transfer, count in sorted(counts.items(), key=lambda item: -item[0].sent * item[0].times * item[1])
    ]
    return ("what", "collective", "over", "payload", "times", "sent/device", "where"), rows


def _payload(arrays: tuple[Array, ...]) -> str:
    largest = max(arrays, key=lambda array: array.bytes)
    return str(largest) + (f" and {len(arrays) - 1} more" if len(arrays) > 1 else "")


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A program on a mesh whose devices fill the nodes of a cluster in order."""

    module: Module
    mesh: MeshSpec
    cluster: Cluster
    data_axes: tuple[str, ...]

    def transfers(self, name: str, times: int = 1) -> Iterator[Transfer]:
        """The collectives of a computation that runs `times` times."""
        for instr in self.module.computations.get(name, ()):
            if collective_kind(instr.op):
                transfer = self.transfer(name, instr, times)
                if transfer.group > 1:
                    yield transfer
            elif instr.op == "while":
                yield from self.transfers(instr.called_as("body"), times * (self.module.trip_count(name, instr) or 1))
            elif instr.op == "conditional":  # the branch that sends the most
                branches = [tuple(self.transfers(branch, times)) for branch in instr.called]
                most = max(branches, key=lambda branch: sum(part.sent * part.times for part in branch), default=())
                always = len({tuple(dataclasses.replace(part, name="") for part in branch) for branch in branches}) == 1
                yield from (part if always else dataclasses.replace(part, conditional=True) for part in most)
            elif instr.op in ("call", "async-start"):
                for called in instr.called:
                    yield from self.transfers(called, times)

    def transfer(self, computation: str, instr: Instruction, times: int = 1) -> Transfer:
        """A collective, or its start, as a `Transfer`."""
        kind, members = collective_kind(instr.op) or "", groups(instr, self.module.partitions)
        differing = {differing_axes(group, self.mesh) for group in members}
        if kind == "collective_permute":
            moved = tuple(set(itertools.chain.from_iterable(differing)))
            axes, size = (moved, self.mesh.sizes[moved[0]]) if len(moved) == 1 else ((), len(members))
            per_node = size if all(devices_per_node(pair, self.cluster) == 2 for pair in members) else 1
        else:
            axes, size, per_node = differing.pop(), len(members[0]), devices_per_node(members[0], self.cluster)
            axes = () if differing or num_shards(axes, self.mesh) != size else axes
        purposes = [(_purpose(where, kind, axes, self.data_axes), where) for where in self.module.scopes(computation, instr)]
        purpose, where = min(purposes, key=lambda pair: PURPOSES.index(pair[0]))
        asynchronous = instr.op.endswith("-start") and '"is_sync":true' not in instr.rest
        return Transfer(kind, purpose, axes, size, per_node, payload(instr), times, _short(where), instr.name, asynchronous)


def traffic_of(module: Module, mesh: MeshSpec, cluster: Cluster, data_axes: tuple[str, ...]) -> Traffic:
    """The collectives of a program."""
    return Traffic(tuple(Partitioned(module, mesh, cluster, data_axes).transfers(module.entry)))


def devices_per_node(group: Sequence[int], cluster: Cluster) -> int:
    """How many devices of a group share a node; 1 if they cannot be divided evenly."""
    most = max(Counter(device // cluster.devices for device in group).values())
    return most if len(group) % most == 0 else 1


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


def differing_axes(devices: Sequence[int], mesh: MeshSpec) -> tuple[str, ...]:
    """The mesh axes along which these devices differ."""
    positions = np.unravel_index(devices, [size for _, size in mesh.axes])
    return tuple(name for name, along in zip(mesh.names, positions, strict=True) if len(np.unique(along)) > 1)
