"""Why the products that a compiled program executes are more than the model's: what MFU leaves out
and HFU counts.

A product of values that are equal along a mesh axis is replicated work. Arguments differ along the
axes over which they are sharded, and an operation's result along those of its operands. An
all-reduce or all-gather makes its result equal along the axes of its groups; a reduce-scatter, an
all-to-all and a permutation make it differ.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from spmd.mesh import MeshSpec
from spmd.nn.schedule import Schedule
from spmd.planner.cost import FREE, Product, attention_recomputed, cost_of, product_of
from spmd.planner.hlo import Instruction, Module, captured, collective_kind, groups
from spmd.planner.model_flops import PASSES
from spmd.planner.timeline import REMATERIALIZED, REMATTED
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


RECOMPUTED, BY_XLA, IN_KERNELS = (
    "recomputed in the backward pass",
    "recomputed by XLA",
    "recomputed in kernels of attention",
)
BUBBLES, REPLICATED, PADDING, OTHER = "pipeline bubbles", "replicated", "padding by XLA", "other"
NOTHING_BEYOND = "nothing is executed beyond the model's products."
NEGATIVE = "other: gradients that nothing needs, as of the batch"


@dataclasses.dataclass(frozen=True)
class FlopShares:
    """The FLOPs of a step on one device.

    Attributes:
      executed: those of all products of the compiled program.
      model: those that the model asks for: three times its products in the forward pass.
      beyond: the difference of both, by its causes; "other" is what is left, and negative where no
        gradients are needed, as of a batch.
      masked: of both, scores that a mask leaves out, and that fused kernels do not compute.
      empty: of both, places of experts beyond the tokens' choices, which their capacity makes.
    """

    executed: float
    model: float
    beyond: Mapping[str, float]
    masked: float
    empty: float

    def __str__(self) -> str:
        """A line or two; causes of less than a thousandth of what is executed are left out."""
        if not self.executed:
            return NOTHING_BEYOND
        causes = {
            cause: flops
            for cause, flops in self.beyond.items()
            if abs(flops) >= 0.001 * self.executed
        }
        shares = [
            f"{flops / self.executed:.1%} {NEGATIVE if flops < 0 else cause}"
            for cause, flops in causes.items()
        ]
        lines = (
            [f"executed beyond the model's: {', '.join(shares)}."]
            if max(causes.values(), default=0.0) > 0
            else []
        )
        inside = (
            (self.masked, "masked scores, which fused kernels leave out"),
            (self.empty, "empty places of experts"),
        )
        counted = [
            f"{flops / self.executed:.1%} {what}"
            for flops, what in inside
            if flops >= 0.001 * self.executed
        ]
        return (
            "\n".join(lines + ([f"counted in both: {', '.join(counted)}."] if counted else []))
            or NOTHING_BEYOND
        )


def flop_shares(
    module: Module,
    mesh: MeshSpec,
    schedules: Collection[Schedule],
    *,
    executed: float,
    model: float,
    empty: float = 0.0,
) -> FlopShares:
    """The shares of a program.

    Args:
      schedules: of its pipelines.
      executed, model, empty: FLOPs of one device.
    """
    walk = _Walk(module, Variance(module, mesh), schedules)
    beyond: dict[str, float] = dict.fromkeys(
        (RECOMPUTED, BY_XLA, IN_KERNELS, BUBBLES, REPLICATED, PADDING), 0.0
    )
    masked = forward = 0.0
    for found in walk.products(module.entry):
        masked += found.flops * (1 - found.product.share)
        causes = dict(walk.causes(found))
        forward += (
            0.0
            if "transpose(" in found.scope or RECOMPUTED in causes
            else found.flops - sum(causes.values())
        )
        for cause, flops in causes.items():
            beyond[cause] += flops
    # XLA may merge a product with its repetition, and keep the repetition's scope.
    beyond[RECOMPUTED] -= min(beyond[RECOMPUTED], max(model / PASSES - forward, 0.0))
    return FlopShares(
        executed, model, beyond | {OTHER: executed - model - sum(beyond.values())}, masked, empty
    )


def executed_flops(module: Module, mesh: MeshSpec) -> float:
    """FLOPs of all products that one device of a mesh executes in a compiled program, as HFU counts
    them; 0 of a module without any.
    """
    return sum(
        found.flops for found in _Walk(module, Variance(module, mesh), ()).products(module.entry)
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """A product, the instruction that it is or is fused into, how often it runs, and the share of
    this that is a bubble.
    """

    product: Product
    computation: str
    part: Instruction
    instr: Instruction
    times: int
    bubble: float

    @property
    def flops(self) -> float:
        return self.product.flops * self.times

    @property
    def scope(self) -> str:
        return self.part.scope or self.instr.scope


@dataclasses.dataclass(frozen=True)
class _Walk:
    module: Module
    variance: Variance
    schedules: Collection[Schedule]

    def products(self, name: str, times: int = 1, bubble: float = 0.0) -> Iterator[_Found]:
        """Every product of a computation, loops multiplied out; of a conditional, those of the
        branch with the most.
        """
        for instr in self.module.computations.get(name, ()):
            if instr.op == "while":
                body, trips = instr.called_as("body"), self.module.trip_count(name, instr) or 1
                yield from self.products(body, times * trips, bubble or self._bubble(body, trips))
            elif instr.op == "conditional":
                branches = [tuple(self.products(called, times, bubble)) for called in instr.called]
                yield from max(
                    branches, key=lambda branch: sum(found.flops for found in branch), default=()
                )
            elif instr.op in ("call", "async-start"):
                for called in instr.called:
                    yield from self.products(called, times, bubble)
            elif (
                instr.op not in FREE
                and not collective_kind(instr.op)
                and cost_of(self.module, name, instr).products
            ):
                parts = [
                    (name, instr),
                    *(nested for called in instr.called for nested in self.module.nested(called)),
                ]
                for computation, part in parts:
                    if (
                        product := product_of(self.module, computation, part)
                    ) is not None and product.flops:
                        yield _Found(product, computation, part, instr, times, bubble)

    def causes(self, found: _Found) -> Iterator[tuple[str, float]]:
        """What of a product the model does not ask for, each part counted once."""
        flops = found.flops
        if REMATERIALIZED in found.instr.name or REMATERIALIZED in found.part.name:
            yield BY_XLA, flops
            return
        if REMATTED in found.scope:
            yield RECOMPUTED, flops
            return
        shares = (
            (BUBBLES, found.bubble),
            (REPLICATED, 1 - 1 / self.variance.copies(found.computation, found.part)),
            (IN_KERNELS, attention_recomputed(found.part)),
            (PADDING, self._padded(found)),
        )
        for cause, share in shares:
            yield cause, flops * share
            flops *= 1 - share

    def _bubble(self, body: str, trips: int) -> float:
        """The share of a loop over the ticks of a pipeline in which a stage's results are
        discarded; 0 for other loops.
        """
        if not any(
            collective_kind(instr.op) == "collective_permute"
            for instr in self.module.computations.get(body, ())
        ):
            return 0.0
        for schedule in self.schedules:
            if trips in (schedule.ticks, schedule.forward.ticks):
                return 1 - schedule.microbatches * schedule.groups / trips
        return 0.0

    def _padded(self, found: _Found) -> float:
        """The share of a product that XLA adds by padding its operands; a model's own padding is
        its own.
        """
        if found.part.op != "dot":
            return 0.0
        kept = 1.0
        for number, (operand, side) in enumerate(
            zip(self.module.operands(found.computation, found.part), ("lhs", "rhs"), strict=False)
        ):
            if operand.op != "pad" or re.search(r"/pad\b", operand.scope):
                continue
            before = self.module.operands(found.computation, operand)[0].arrays[0].shape
            shared = re.findall(
                r"\d+",
                "".join(
                    re.findall(
                        rf"{side}_(?:contracting|batch)_dims=(\{{[\d,]*\}})", found.part.rest
                    )
                ),
            )
            for dim, (old, new) in enumerate(zip(before, operand.arrays[0].shape, strict=True)):
                # a dim that both sides have is padded in both
                kept *= old / new if number == 0 or str(dim) not in shared else 1.0
        return 1 - kept
