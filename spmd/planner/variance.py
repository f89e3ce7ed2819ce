"""Along which mesh axes the values of a compiled program differ: a product of values that are equal
along an axis is replicated work.

Arguments differ along the axes over which they are sharded, and an operation's result along those
of its operands. An all-reduce or all-gather makes its result equal along the axes of its groups; a
reduce-scatter, an all-to-all and a permutation make it differ.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from spmd.mesh import MeshSpec
from spmd.planner.hlo import Instruction, Module, captured, collective_kind, groups
from spmd.planner.traffic import differing_axes

# of an array or of several; of a tuple, one for each element
Value: TypeAlias = "frozenset[str] | tuple[Value, ...]"
_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")


def sharded_axes(sharding: str, mesh: MeshSpec) -> frozenset[str]:
    """The mesh axes over which XLA's sharding of an argument divides it; all of them if it is not
    understood.

    In XLA's older notation, of tiles, or in the one with names of axes, which jax 0.11 has.

    >>> mesh = MeshSpec.parse("data=4,model=2")
    >>> (
    ...     sorted(sharded_axes("{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}", mesh)),
    ...     sharded_axes("{replicated}", mesh),
    ... )
    (['model'], frozenset())
    """
    if "replicated}" in sharding and "devices=" not in sharding:
        return frozenset()
    if named := re.fullmatch(r"\{mesh\[[^\]]*\], \[(.*?)\].*\}", sharding):
        axes = frozenset(re.findall(r"'([^']+)'", named.group(1)))
        return axes if axes <= set(mesh.names) else frozenset(mesh.names)
    match = _TILES.search(sharding)
    if match is None:
        return frozenset(mesh.names)
    tiles, dims, order, listed = (
        [int(n) for n in part.split(",")] if part else [] for part in match.groups()
    )
    ids = (
        np.array(listed)
        if listed
        else np.arange(math.prod(dims)).reshape(dims).transpose(order or None).ravel()
    )
    rest = (
        len(captured(r"last_tile_dims=\{([^}]*)\}", sharding).split(","))
        if "last_tile_dims" in sharding
        else 0
    )
    rest = rest or int("last_tile_dim_replicate" in sharding)
    tile = np.empty(mesh.size, int)
    tile[ids] = np.arange(ids.size) // math.prod(tiles[len(tiles) - rest :])
    grid = tile.reshape([size for _, size in mesh.axes])
    return frozenset(
        name for dim, name in enumerate(mesh.names) if (grid != grid.take([0], axis=dim)).any()
    )


def flat(value: Value) -> frozenset[str]:
    """The axes along which any part of a value differs."""
    return value if isinstance(value, frozenset) else frozenset().union(*map(flat, value))


def _join(first: Value, second: Value) -> Value:
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(map(_join, first, second))
    return flat(first) | flat(second)


@dataclasses.dataclass
class Variance:
    """The axes along which the operands of instructions differ.

    Attributes:
      operands: by computation and instruction.
    """

    module: Module
    mesh: MeshSpec
    operands: dict[tuple[str, str], frozenset[str]] = dataclasses.field(default_factory=dict)
    _results: dict[tuple[str, tuple[Value, ...]], Value] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        entry = [
            instr
            for instr in self.module.computations.get(self.module.entry, ())
            if instr.op == "parameter"
        ]
        by_number = {int(captured(r"^\((\d+)\)", instr.rest)): instr for instr in entry}
        arguments = (
            sharded_axes(captured(r"sharding=(\{.*?\})(?:, \w+=|$)", by_number[n].rest), self.mesh)
            for n in sorted(by_number)
        )
        self._run(self.module.entry, tuple(arguments))

    def copies(self, computation: str, instr: Instruction) -> int:
        """How many devices compute the same as an instruction does."""
        differing = self.operands.get((computation, instr.name), frozenset(self.mesh.names))
        return math.prod(size for name, size in self.mesh.axes if name not in differing)

    def _run(self, computation: str, arguments: tuple[Value, ...]) -> Value:
        """The result of a computation with these arguments."""
        key = computation, arguments
        if key not in self._results:
            values: dict[str, Value] = {}
            result: Value = frozenset()
            for instr in self.module.computations.get(computation, ()):
                taken = [values[name] for name in instr.operands if name in values]
                place = computation, instr.name
                self.operands[place] = self.operands.get(place, frozenset()) | flat(tuple(taken))
                result = values[instr.name] = self._result(computation, instr, taken, arguments)
            self._results[key] = result
        return self._results[key]

    def _result(
        self,
        computation: str,
        instr: Instruction,
        taken: Sequence[Value],
        arguments: tuple[Value, ...],
    ) -> Value:
        op, everything = instr.op, flat(tuple(taken))
        if op == "parameter":
            number = int(captured(r"^\((\d+)\)", instr.rest))
            return arguments[number] if number < len(arguments) else frozenset(self.mesh.names)
        if op == "tuple":
            return tuple(taken)
        if op == "get-tuple-element":
            number = int(captured(r"index=(\d+)", instr.rest))
            return (
                taken[0][number]
                if isinstance(taken[0], tuple) and number < len(taken[0])
                else flat(taken[0])
            )
        if op in ("partition-id", "replica-id"):
            return frozenset(self.mesh.names)
        if kind := collective_kind(op):
            return self._collective(kind, instr, taken)
        if op == "while":
            state = taken[0]
            while (after := _join(state, self._run(instr.called_as("body"), (state,)))) != state:
                state = after
            return state
        if op == "conditional":
            results = [
                self._run(called, (value,))
                for called, value in zip(instr.called, taken[1:], strict=False)
            ]
            chosen = flat(taken[0]) if taken else frozenset()
            result = results[0] if results else everything
            for other in results[1:]:
                result = _join(result, other)
            return flat(result) | chosen if chosen else result
        if op in ("fusion", "call", "async-start") and instr.called:
            return self._run(instr.called[0], tuple(taken))
        passes = op in ("opt-barrier", "copy", "bitcast") or op.endswith("-done")
        return taken[0] if taken and passes else everything

    def _collective(self, kind: str, instr: Instruction, taken: Sequence[Value]) -> Value:
        members = groups(instr, self.module.partitions)
        along = [frozenset(differing_axes(group, self.mesh)) for group in members]
        if kind in ("all_reduce", "all_gather"):
            axes = along[0]
            complete = all(one == axes for one in along) and len(members[0]) == math.prod(
                self.mesh.sizes[name] for name in axes
            )
            results = [flat(value) - (axes if complete else frozenset()) for value in taken]
        else:
            results = [flat(value) | frozenset().union(*along) for value in taken]
        return results[0] if len(results) == 1 else tuple(results)
