"""The causes for which a compiled program executes more products than the model has: those that MFU
leaves out and HFU counts.

A product of values that are equal along a mesh axis is replicated work. Arguments differ along the
axes over which they are sharded, and an operation's result along those of its operands. An
all-reduce or all-gather makes its result equal along the axes of its groups; a reduce-scatter, an
all-to-all and a permutation make it differ.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from spmd.mesh import MeshSpec
from spmd.nn.schedule import Schedule
from spmd.planner.cost import FREE, Product, attention_recomputed, product_of
from spmd.planner.hlo import Instruction, Module, captured, collective_kind, groups, integers
from spmd.planner.model_flops import PASSES
from spmd.planner.timeline import REMATERIALIZED, REMATTED
from spmd.planner.traffic import differing_axes

# of an array or of several; of a tuple, one for each element
Value: TypeAlias = "frozenset[str] | tuple[Value, ...]"
_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")
RECOMPUTED = "recomputed in the backward pass"
BY_XLA = "recomputed by XLA"
IN_KERNELS = "recomputed in kernels of attention"
BUBBLES = "pipeline bubbles"
REPLICATED = "replicated"
PADDING = "padding by XLA"
OTHER = "other"
NOTHING_BEYOND = "nothing is executed beyond the model's products."
NEGATIVE = "other: gradients that nothing needs, as of the batch"


def sharded_axes(sharding: str, mesh: MeshSpec) -> frozenset[str]:
    """Return the mesh axes over which XLA's sharding of an argument divides it; all of them if it
    is not understood.

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
    # the mesh by name, from jax 0.11 on
    if named := re.fullmatch(r"\{mesh\[[^\]]*\], \[(.*?)\].*\}", sharding):
        axes = frozenset(re.findall(r"'([^']+)'", named.group(1)))
        if axes <= set(mesh.names):
            return axes
        return frozenset(mesh.names)
    # tiles of device numbers, which a mesh's axes are read from
    match = _TILES.search(sharding)
    if match is None:
        return frozenset(mesh.names)
    tiles, dims, order, listed = map(integers, match.groups())
    ids = np.array(listed)
    if not listed:
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order or None).ravel()
    # the last dims of the tiles say only how often each tile is repeated
    repeating = int("last_tile_dim_replicate" in sharding)
    if "last_tile_dims" in sharding:
        repeating = len(captured(r"last_tile_dims=\{([^}]*)\}", sharding).split(","))
    tile = np.empty(mesh.size, int)
    tile[ids] = np.arange(ids.size) // math.prod(tiles[len(tiles) - repeating :])
    grid = tile.reshape([size for _, size in mesh.axes])
    axes = []
    for dim, name in enumerate(mesh.names):
        if (grid != grid.take([0], axis=dim)).any():
            axes.append(name)
    return frozenset(axes)


def flat(value: Value) -> frozenset[str]:
    """Return the axes along which any part of a value differs."""
    if isinstance(value, frozenset):
        return value
    return frozenset().union(*map(flat, value))


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
        arguments: dict[int, Value] = {}
        for instr in self.module.computations.get(self.module.entry, ()):
            if instr.op == "parameter":
                sharding = captured(r"sharding=(\{.*?\})(?:, \w+=|$)", instr.attributes)
                arguments[_parameter(instr)] = sharded_axes(sharding, self.mesh)
        self._trace(self.module.entry, tuple(arguments[number] for number in sorted(arguments)))

    def copies(self, computation: str, instr: Instruction) -> int:
        """Return the number of devices that compute the same as an instruction does."""
        differing = self.operands.get((computation, instr.name), frozenset(self.mesh.names))
        return math.prod(size for name, size in self.mesh.axes if name not in differing)

    def _trace(self, computation: str, arguments: tuple[Value, ...]) -> Value:
        """Return the result of a computation with these arguments."""
        # XLA calls one computation from several places, such as the layers of a list.
        key = computation, arguments
        if key not in self._results:
            values: dict[str, Value] = {}
            result: Value = frozenset()
            for instr in self.module.computations.get(computation, ()):
                operands = [values[name] for name in instr.operands if name in values]
                place = computation, instr.name
                before = self.operands.get(place, frozenset())
                self.operands[place] = before | flat(tuple(operands))
                result = values[instr.name] = self._result(instr, operands, arguments)
            self._results[key] = result
        return self._results[key]

    def _result(
        self, instr: Instruction, operands: Sequence[Value], arguments: tuple[Value, ...]
    ) -> Value:
        """Return the result of an instruction with these operands, in a computation with these
        arguments.
        """
        op = instr.op
        if op == "parameter":
            number = _parameter(instr)
            if number < len(arguments):
                return arguments[number]
            return frozenset(self.mesh.names)
        if op == "tuple":
            return tuple(operands)
        if op == "get-tuple-element":
            number, value = int(captured(r"index=(\d+)", instr.attributes)), operands[0]
            if isinstance(value, tuple) and number < len(value):
                return value[number]
            return flat(value)
        # the number of the device differs along every axis
        if op in ("partition-id", "replica-id"):
            return frozenset(self.mesh.names)
        if kind := collective_kind(op):
            return self._collective(kind, instr, operands)
        if op == "while":
            return self._loop(instr, operands[0])
        if op == "conditional":
            return self._conditional(instr, operands)
        if op in ("fusion", "call", "async-start") and instr.called:
            return self._trace(instr.called[0], tuple(operands))
        # these hand their first operand on, element by element
        if operands and (op in ("opt-barrier", "copy", "bitcast") or op.endswith("-done")):
            return operands[0]
        return flat(tuple(operands))

    def _loop(self, instr: Instruction, state: Value) -> Value:
        """Return the state after a loop: of any number of iterations, so until it is stable."""
        while True:
            after = _join(state, self._trace(instr.called_as("body"), (state,)))
            if after == state:
                return state
            state = after

    def _conditional(self, instr: Instruction, operands: Sequence[Value]) -> Value:
        """Return the joined results of all branches; they differ as what chooses between them
        does.
        """
        branches = zip(instr.called, operands[1:], strict=False)
        results = [self._trace(called, (operand,)) for called, operand in branches]
        if results:
            result = functools.reduce(_join, results)
        else:
            result = flat(tuple(operands))
        choice = frozenset()
        if operands:
            choice = flat(operands[0])
        if not choice:
            return result
        return flat(result) | choice

    def _collective(self, kind: str, instr: Instruction, operands: Sequence[Value]) -> Value:
        """Return the result of a collective with these operands."""
        members = groups(instr, self.module.partitions)
        along = [frozenset(differing_axes(group, self.mesh)) for group in members]
        values = [flat(value) for value in operands]
        # Only these two leave the same result on all devices of a group.
        if kind in ("all_reduce", "all_gather"):
            axes = along[0]
            devices = math.prod(self.mesh.sizes[name] for name in axes)
            # Groups along a part of an axis leave values that differ from part to part.
            complete = all(others == axes for others in along) and len(members[0]) == devices
            results = [value - axes if complete else value for value in values]
        else:
            results = [value.union(*along) for value in values]
        if len(results) == 1:
            return results[0]
        return tuple(results)


def _parameter(instr: Instruction) -> int:
    """Return the number of the argument that an instruction is."""
    return int(captured(r"^\((\d+)\)", instr.attributes))


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
        """Causes of less than a thousandth of what is executed are left out."""
        if not self.executed:
            return NOTHING_BEYOND
        least = 0.001 * self.executed
        shares = []
        more = False
        for cause, flops in self.beyond.items():
            if abs(flops) >= least:
                shares.append(f"{flops / self.executed:.1%} {NEGATIVE if flops < 0 else cause}")
                more = more or flops > 0
        lines = []
        if more:
            lines = [f"executed beyond the model's: {', '.join(shares)}."]
        counted = []
        if self.masked >= least:
            share = self.masked / self.executed
            counted.append(f"{share:.1%} masked scores, which fused kernels leave out")
        if self.empty >= least:
            counted.append(f"{self.empty / self.executed:.1%} empty places of experts")
        if counted:
            lines.append(f"counted in both: {', '.join(counted)}.")
        return "\n".join(lines) or NOTHING_BEYOND


def flop_shares(
    module: Module,
    mesh: MeshSpec,
    schedules: Collection[Schedule],
    *,
    executed: float,
    model: float,
    empty: float = 0.0,
) -> FlopShares:
    """Return the shares of a program.

    Args:
      schedules: of its pipelines.
      executed, model, empty: FLOPs of one device.
    """
    products = _Products(module, Variance(module, mesh), schedules)
    causes = (RECOMPUTED, BY_XLA, IN_KERNELS, BUBBLES, REPLICATED, PADDING)
    beyond: dict[str, float] = dict.fromkeys(causes, 0.0)
    masked = forward = 0.0
    for product in products.of_computation(module.entry):
        masked += product.flops * (1 - product.product.share)
        parts = dict(products.causes(product))
        # JAX writes transpose around the scopes of a backward pass.
        if "transpose(" not in product.scope and RECOMPUTED not in parts:
            forward += product.flops - sum(parts.values())
        for cause, flops in parts.items():
            beyond[cause] += flops
    # XLA may merge a product with its repetition, and keep the repetition's scope
    beyond[RECOMPUTED] -= min(beyond[RECOMPUTED], max(model / PASSES - forward, 0.0))
    beyond[OTHER] = executed - model - sum(beyond.values())
    return FlopShares(executed, model, beyond, masked, empty)


def executed_flops(module: Module, mesh: MeshSpec) -> float:
    """Return the FLOPs of all products that one device of a mesh executes in a compiled program, as
    HFU counts them; 0 of a module without any.
    """
    products = _Products(module, Variance(module, mesh), ())
    return sum(product.flops for product in products.of_computation(module.entry))


@dataclasses.dataclass(frozen=True)
class _Executed:
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
class _Products:
    """The products that a program executes, and the causes of those that no model asks for."""

    module: Module
    variance: Variance
    schedules: Collection[Schedule]

    def of_computation(self, name: str, times: int = 1, bubble: float = 0.0) -> Iterator[_Executed]:
        """Yield every product of a computation, loops multiplied out; of a conditional, those of
        the branch with the most.
        """
        for instr in self.module.computations.get(name, ()):
            if instr.op == "while":
                body, trips = instr.called_as("body"), self.module.trip_count(name, instr) or 1
                share = bubble or self._bubble(body, trips)
                yield from self.of_computation(body, times * trips, share)
            elif instr.op == "conditional":
                branches = [
                    list(self.of_computation(called, times, bubble)) for called in instr.called
                ]
                yield from max(
                    branches,
                    key=lambda branch: sum(product.flops for product in branch),
                    default=[],
                )
            elif instr.op in ("call", "async-start"):
                for called in instr.called:
                    yield from self.of_computation(called, times, bubble)
            elif instr.op not in FREE and not collective_kind(instr.op):
                for computation, part in self.module.fused(name, instr):
                    product = product_of(self.module, computation, part)
                    if product is not None and product.flops:
                        yield _Executed(product, computation, part, instr, times, bubble)

    def causes(self, executed: _Executed) -> Iterator[tuple[str, float]]:
        """Yield the FLOPs of a product that the model does not ask for, by their causes, each part
        counted once.
        """
        flops = executed.flops
        if REMATERIALIZED in executed.instr.name or REMATERIALIZED in executed.part.name:
            yield BY_XLA, flops
            return
        if REMATTED in executed.scope:
            yield RECOMPUTED, flops
            return
        copies = self.variance.copies(executed.computation, executed.part)
        shares = (
            (BUBBLES, executed.bubble),
            (REPLICATED, 1 - 1 / copies),
            (IN_KERNELS, attention_recomputed(executed.part)),
            (PADDING, self._padded(executed)),
        )
        for cause, share in shares:
            yield cause, flops * share
            flops *= 1 - share

    def _bubble(self, body: str, trips: int) -> float:
        """Return the share of a loop over the ticks of a pipeline in which a stage's results are
        discarded; 0 for other loops.
        """
        instructions = self.module.computations.get(body, ())
        # the stages of a pipeline send to their neighbours in every tick
        if all(collective_kind(instr.op) != "collective_permute" for instr in instructions):
            return 0.0
        for schedule in self.schedules:
            if trips in (schedule.ticks, schedule.forward.ticks):
                return 1 - schedule.microbatches * schedule.groups / trips
        return 0.0

    def _padded(self, executed: _Executed) -> float:
        """Return the share of a product that XLA adds by padding its operands; a model's own
        padding is its own.
        """
        if executed.part.op != "dot":
            return 0.0
        share = 1.0
        operands = self.module.operands(executed.computation, executed.part)
        for operand, side in zip(operands, ("lhs", "rhs"), strict=False):
            # XLA pads operands to the tiles of its kernels; a pad of the model has its name in the
            # scope
            if operand.op != "pad" or re.search(r"/pad\b", operand.scope):
                continue
            source = self.module.operands(executed.computation, operand)[0]
            pattern = rf"{side}_(?:contracting|batch)_dims=(\{{[\d,]*\}})"
            both = integers("".join(re.findall(pattern, executed.part.attributes)))
            sizes = zip(source.arrays[0].shape, operand.arrays[0].shape, strict=True)
            for dim, (before, after) in enumerate(sizes):
                # a dim that both sides have is padded in both
                if side == "lhs" or dim not in both:
                    share *= before / after
        return 1 - share
