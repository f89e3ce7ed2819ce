"""The memory of one device in a step, by what it holds, compared with its capacity."""

import dataclasses
import os
import re
from collections import Counter

import jax

from spmd.layout.resolve import num_shards
from spmd.planner.compile import Compiled
from spmd.planner.hlo import Module, arrays_of, plain_scopes
from spmd.planner.target import Target
from spmd.specs import spec_axes
from spmd.train.compiled_step import Program
from spmd.train.device_memory import in_host_memory, on_device, tree_on_device
from spmd.tree import Tree, flatten, format_bytes, nbytes

TIGHT = 0.92  # of a device's memory; above it, drivers, NCCL and fragmentation may need the rest
PREALLOCATED = 0.75  # of a GPU's memory, by JAX, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
LARGEST = 8  # temporaries that are listed
TITLES = {  # of fields of `Memory` in reports, where they differ from the field's name
    "exchange": "codecs and servers",
    "statistics": "statistics, keys, step",
    "constants": "constants in the program",
    "fresh": "results not in the state",
}
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)\{?[\d, ]*\}? @\d+> \(size=(\d+),offset=(\d+)\): ([a-z].*)")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device; all devices hold the same.

    Attributes:
      parameters, optimizer, exchange, statistics: the state: parameters, optimizer state, the state of codecs and servers, the rest.
      batch: the arrays of one batch and their weights.
      gradients: reduced gradients, as the optimizer takes them; a part of `temporaries`.
      temporaries: gradients, activations and copies, as XLA has packed them.
      constants: arrays in the model's code that are not in its state, such as a numpy table.
      fresh: results that reuse no argument's buffer; the full state if it is not donated.
      host: pinned memory of the host that one device uses: the state's arrays there, and offloaded activations.
      peak: the most that is allocated at once, according to XLA.
      capacity: the device's memory.
      unread: arrays of the state that a step does not read, which XLA does not count.
      largest: (bytes, array, scope in the program) of the largest temporaries; they share memory, so they do not add up.
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
    host: int
    peak: int
    capacity: int
    unread: int
    largest: tuple[tuple[int, str, str], ...]

    @property
    def headroom(self) -> int:
        """Memory left on the device; negative if the step does not fit."""
        return self.capacity - self.peak

    @property
    def fits(self) -> bool:
        """Whether the step fits in the device's memory."""
        return self.headroom >= 0

    @property
    def per_device(self) -> dict[str, int]:
        """All figures by name, in bytes."""
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "largest"}
        return sizes | {"headroom": self.headroom}

    @property
    def verdict(self) -> str:
        """Whether it fits, with the numbers."""
        share = f"{format_bytes(self.peak)} of {format_bytes(self.capacity)} ({self.peak / self.capacity:.1%})"
        if not self.fits:
            return f"DOES NOT FIT: {share}; {format_bytes(-self.headroom)} too much on each device."
        if self.peak > TIGHT * self.capacity:
            return f"tight: {share}; drivers, NCCL and fragmentation need some as well."
        return f"fits: {share}."

    def __str__(self) -> str:
        parts = ("parameters", "optimizer", "exchange", "statistics", "batch", "constants", "fresh", "temporaries")
        rows = [(TITLES.get(name, name), getattr(self, name)) for name in parts if getattr(self, name)]
        rows += [("  of which gradients", self.gradients), ("peak", self.peak)]
        rows += [("in the host's memory", self.host)] if self.host else []
        lines = [*(f"{title:<26}{format_bytes(size):>12}" for title, size in rows), self.verdict]
        if self.largest:
            lines += ["", "largest temporaries (they share memory; sizes do not add up):"]
            lines += [f"  {format_bytes(size):>10}  {array}  {where}" for size, array, where in self.largest]
        return "\n".join(lines)


def usable_memory(target: Target) -> int | None:
    """Bytes that programs may use on each device, as a device would report them to `fit`; None for CPUs, which do not."""
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or PREALLOCATED) if target.platform == "cuda" else 1.0
    return None if target.platform == "cpu" else int(fraction * target.memory)


def memory_of(program: Program, compiled: Compiled, module: Module, target: Target) -> Memory:
    """The memory of a compiled step."""
    state, batch, weights, events = program.arguments
    sizes = compiled.sizes
    arguments = tree_on_device((state, batch, weights, events))
    unread = max(arguments - sizes["argument"], 0)
    fresh = sizes["output"] - sizes["alias"]
    constants = sum(int(size) for size in re.findall(r"^allocation \d+: size (\d+), .*\bconstant\b", compiled.buffers, re.MULTILINE))
    return Memory(
        parameters=tree_on_device(state.params),
        optimizer=tree_on_device(state.opt),
        exchange=tree_on_device(state.exchange),
        statistics=tree_on_device((state.stats, state.rngs, state.key, state.step)),
        batch=tree_on_device((batch, weights, events)),
        gradients=_gradients(program, state.params),
        temporaries=sizes["temp"],
        constants=constants,
        fresh=fresh,
        host=sum(on_device(leaf) for leaf in jax.tree.leaves(state) if in_host_memory(leaf)) + sizes.get("host_temp", 0),
        peak=arguments + constants + fresh + sizes["temp"] + sizes["generated_code"],
        capacity=target.memory,
        unread=unread,
        largest=_largest(compiled.buffers, module),
    )


def _gradients(program: Program, params: Tree) -> int:
    """Bytes of reduced gradients, sharded as the reduction leaves them."""
    placed = program.placed
    resolved, mean_spec = placed.resolved, placed.exchange.reduction.mean_spec
    total = 0
    for path, leaf in flatten(params).items():
        place = resolved.placements[path]
        axes = {*spec_axes(mean_spec(place)), *(axis for axis in spec_axes(place.spec) if axis not in resolved.data_axes)}
        total += nbytes(leaf) // num_shards(tuple(axes), resolved.mesh)
    return total


def _largest(buffers: str, module: Module) -> tuple[tuple[int, str, str], ...]:
    """The largest values that XLA has assigned to temporary memory, one for each buffer."""
    scopes = {instr.name: instr.scope for lines in module.computations.values() for instr in lines}
    values: dict[tuple[int, int], tuple[int, str, str]] = {}
    temporary = False
    for line in buffers.splitlines():
        if line.startswith("allocation "):
            temporary = "preallocated-temp" in line
        elif temporary and (value := _VALUE.match(line)):
            name, size, offset, kind = value.groups()
            key = (int(offset), int(size))
            if key not in values and (arrays := arrays_of(kind)) and not arrays[0].host:
                values[key] = (int(size), str(arrays[0]), plain_scopes(scopes.get(name, ""))[0])
    counts = Counter(sorted(values.values(), key=lambda item: -item[0]))
    shown = list(counts.items())[:LARGEST]
    return tuple((size, f"{array}{f' x {count}' if count > 1 else ''}", where) for (size, array, where), count in shown)
