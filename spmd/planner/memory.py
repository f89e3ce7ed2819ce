"""What one device has to hold in a step, split by what it is, against what it has."""

import dataclasses
import math
import re
from typing import Any

import jax

from spmd.layout.schema import spec_axes
from spmd.planner.compile import Compiled
from spmd.planner.hlo import Module, arrays_of, plain_scopes
from spmd.planner.target import Target
from spmd.train.compiled_step import Program
from spmd.tree import Tree, flatten, format_bytes

TIGHT = 0.92  # of a device's memory: above it what a driver, NCCL and fragments take may be missing
PREALLOCATED = 0.75  # of a GPU's memory: what JAX takes at its start, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
LARGEST = 8
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)\{?[\d, ]*\}? @\d+> \(size=(\d+),offset=(\d+)\): ([a-z].*)")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device; all devices hold the same.

    Attributes:
      parameters, optimizer, exchange, statistics: the state: weights, what the optimizer keeps, what codecs and servers keep, the rest.
      batch: the arrays of one batch and their weights.
      gradients: as the optimizer takes them, after they have met; a part of `temporaries`.
      temporaries: what the program itself needs beside arguments and results, as XLA has packed it: gradients, activations, copies.
      constants: arrays that the model has in its code and not in its state, such as a table of numpy's.
      fresh: results that take no argument's place; the whole state where it is not donated.
      peak: all of it at once, as XLA plans it.
      capacity: what the device has.
      unread: arrays of the state that a step holds and does not read, so that XLA does not count them.
      largest: (bytes, array, where in the program) of the largest temporaries; they share memory, so they do not add up.
    """

    parameters: int
    optimizer: int
    exchange: int
    statistics: int
    batch: int
    gradients: int
    temporaries: int
    constants: int
    fresh: int
    peak: int
    capacity: int
    unread: int
    largest: tuple[tuple[int, str, str], ...]

    @property
    def headroom(self) -> int:
        """What is left on the device; below zero where it does not fit."""
        return self.capacity - self.peak

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.headroom >= 0

    @property
    def per_device(self) -> dict[str, int]:
        """All of it by name, in bytes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "largest"} | {
            "headroom": self.headroom
        }

    @property
    def verdict(self) -> str:
        """Whether it fits, with the numbers."""
        share = f"{format_bytes(self.peak)} of {format_bytes(self.capacity)} ({self.peak / self.capacity:.1%})"
        if not self.fits:
            return f"DOES NOT FIT: {share}; {format_bytes(-self.headroom)} too much on each device."
        if self.peak > TIGHT * self.capacity:
            return f"tight: {share}; drivers, NCCL and fragments take some as well."
        return f"fits: {share}."

    def __str__(self) -> str:
        parts = ("parameters", "optimizer", "exchange", "statistics", "batch", "constants", "fresh", "temporaries")
        words = {"exchange": "codecs and servers", "statistics": "statistics, keys, step", "constants": "constants in the program"}
        words["fresh"] = "results beside the state"
        rows = [(words.get(name, name), getattr(self, name)) for name in parts]
        lines = [f"{name:<26}{format_bytes(size):>12}" for name, size in rows if size]
        lines.append(f"{'  of which gradients':<26}{format_bytes(self.gradients):>12}")
        lines += [f"{'peak':<26}{format_bytes(self.peak):>12}", self.verdict]
        if self.largest:
            lines += ["", "largest temporaries (they share memory; sizes do not add up):"]
            lines += [f"  {format_bytes(size):>10}  {array}  {where}" for size, array, where in self.largest]
        return "\n".join(lines)


def on_device(leaf: Any) -> int:
    """Bytes of one device's part of an array, from its shape and sharding."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def memory_of(program: Program, compiled: Compiled, module: Module, target: Target) -> Memory:
    """The memory of a compiled step."""
    state, batch, weights, events = program.arguments
    held = lambda tree: sum(on_device(leaf) for leaf in jax.tree.leaves(tree))
    sizes = compiled.sizes
    arguments = held((state, batch, weights, events))
    rest = (state.stats, state.rngs, state.key, state.step)
    unread = max(arguments - sizes["argument"], 0)
    fresh = sizes["output"] - sizes["alias"]
    constants = sum(int(size) for size in re.findall(r"^allocation \d+: size (\d+), .*\bconstant\b", compiled.buffers, re.MULTILINE))
    return Memory(
        parameters=held(state.params),
        optimizer=held(state.opt),
        exchange=held(state.exchange),
        statistics=held(rest),
        batch=held((batch, weights, events)),
        gradients=_gradients(program, state.params),
        temporaries=sizes["temp"],
        constants=constants,
        fresh=fresh,
        peak=arguments + constants + fresh + sizes["temp"] + sizes["generated_code"],
        capacity=target.memory,
        unread=unread,
        largest=_largest(compiled.buffers, module),
    )


def _gradients(program: Program, params: Tree) -> int:
    """Gradients as they leave the exchange: cut as the reduction leaves them."""
    placed = program.placed
    resolved, pushed = placed.resolved, placed.exchange.reduction.mean_spec
    total = 0
    for path, leaf in flatten(params).items():
        place = resolved.placements[path]
        axes = {*spec_axes(pushed(place)), *(axis for axis in spec_axes(place.spec) if axis not in resolved.data_axes)}
        total += math.prod(leaf.shape) * leaf.dtype.itemsize // math.prod(resolved.mesh.sizes[axis] for axis in axes)
    return total


def _largest(buffers: str, module: Module) -> tuple[tuple[int, str, str], ...]:
    """The largest values that XLA has put into temporary memory, one for each place there."""
    places = {one.name: one.scope for lines in module.computations.values() for one in lines}
    found: dict[tuple[int, int], tuple[int, str, str]] = {}
    temporary = False
    for line in buffers.splitlines():
        if line.startswith("allocation "):
            temporary = "preallocated-temp" in line
        elif temporary and (value := _VALUE.match(line)):
            name, size, offset, kind = value.groups()
            key = (int(offset), int(size))
            if key not in found and (arrays := arrays_of(kind)):
                found[key] = (int(size), str(arrays[0]), plain_scopes(places.get(name, ""))[0])
    ordered = sorted(found.values(), key=lambda item: -item[0])
    counted: dict[tuple[int, str, str], int] = {}
    for item in ordered:
        counted[item] = counted.get(item, 0) + 1
    shown = list(counted.items())[:LARGEST]
    return tuple((size, f"{array}{f' x {count}' if count > 1 else ''}", where) for (size, array, where), count in shown)
