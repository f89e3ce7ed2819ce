"""The memory of one device in a step, by what it holds, compared with its capacity: of a planned
step, and of the step that `fit` is about to run.
"""

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Mapping

import jax

from spmd.base.specs import spec_axes
from spmd.base.tree import Tree, flatten, format_bytes, nbytes
from spmd.errors import DeviceMemoryError
from spmd.layout.resolve import num_shards
from spmd.planner.cluster import Cluster, of_device
from spmd.planner.compile import Compiled
from spmd.planner.hlo import Module, arrays_of, plain_scopes
from spmd.planner.overhead import Item, likelihood, overhead_items, program_items, total
from spmd.planner.target import Overhead, Target
from spmd.render.sparkline import gauge
from spmd.train.compiled_step import TrainingProgram
from spmd.train.device_memory import in_host_memory, memory_limit, on_device, tree_on_device
from spmd.wire.transfer import HELD, OUTER, OWN, READ, RESIDUAL, SQUARES, SUM

LIKELY = 0.95  # how likely a step fits that is not called tight
DEVIATIONS = 1.645  # of a normal distribution, to either side, within which are nine in ten
# of a device's memory, where a target does not say what else is needed beside the program
TIGHT = 0.92
PREALLOCATED = 0.75  # of a GPU's memory, by JAX, unless one of these variables says otherwise
# The second is the older name; JAX refuses both together (jaxlib 0.10).
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
LARGEST = 8  # temporaries that are listed
# of the program
PARTS = (
    "parameters",
    "frozen",
    "optimizer",
    "exchange",
    "statistics",
    "batch",
    "constants",
    "fresh",
    "temporaries",
)
TITLES = {  # of fields of `Memory` in reports, where they differ from the field's name
    "frozen": "frozen parameters",
    "exchange": "codecs and servers",
    "statistics": "statistics, keys, step",
    "constants": "constants in the program",
    "fresh": "results not in the state",
    "beside": "beside the program",
}
EXCHANGE = {  # the parts of the state of codecs and servers, by their keys
    OWN: "weights of the worker",
    READ: "weights last received",
    HELD: "weights that workers read",
    OUTER: "outer momentum",
    SUM: "gradients at the server",
    SQUARES: "mean squares of gradients",
    RESIDUAL: "residuals of codecs",
}
# A value in XLA's report of buffers: its name, size, place and type.
_VALUE = re.compile(
    r"^ value: <\d+ ([\w.\-]+)\{?[\d, ]*\}? @\d+> \(size=(\d+),offset=(\d+)\): ([a-z].*)"
)


@dataclasses.dataclass(frozen=True)
class Side:
    """A part of a device's memory that is divided from the rest: where, the bytes expected there,
    those it has, and how likely these do.
    """

    where: str
    expected: int
    room: int
    likelihood: float

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.expected)} of {format_bytes(self.room)} {self.where} "
            f"({percent(self.likelihood)})"
        )


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device; all devices hold the same.

    Attributes:
      parameters, optimizer, exchange, statistics: the state: parameters, optimizer state, the state
        of codecs and servers, the rest.
      exchange_parts: what `exchange` consists of, by what it is.
      batch: the arrays of one batch and their weights.
      gradients: as the optimizer takes them: reduced, or a worker's where each has an optimizer; a
        part of `temporaries`.
      temporaries: gradients, activations and copies, as XLA has packed them.
      constants: arrays in the model's code that are not in its state, such as a numpy table.
      fresh: results that reuse no argument's buffer; the full state if it is not donated.
      host: pinned memory of the host that one device uses: the state's arrays there, and offloaded
        activations.
      peak: the most that is allocated at once, according to XLA.
      capacity: the device's memory.
      unread: arrays of the state that a step does not read, which XLA does not count.
      largest: (bytes, array, scope in the program) of the largest temporaries; they share memory,
        so they do not add up.
      items: what the device's memory is needed for, as expected, and how far off that may be: the
        program, and what is beside it.
      pool: bytes of a GPU that JAX allocates from, by default or as `pool_is_set` in the
        environment; None on other devices.
    """

    parameters: int
    frozen: int
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
    items: tuple[Item, ...]
    pool: int | None
    pool_is_set: bool
    exchange_parts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def expected(self) -> int:
        """Bytes that are expected to be needed, with those beside the program."""
        return round(total(self.items)[0])

    @property
    def range(self) -> tuple[int, int]:
        """The bytes that are needed lie between these, with a likelihood of nine in ten."""
        expected, deviation = total(self.items)
        return round(expected - DEVIATIONS * deviation), round(expected + DEVIATIONS * deviation)

    @property
    def inside(self) -> tuple[Item, ...]:
        """The items that JAX allocates."""
        return tuple(item for item in self.items if item.pool)

    @property
    def outside(self) -> tuple[Item, ...]:
        """The items that the CUDA driver and libraries allocate on their own account."""
        return tuple(item for item in self.items if not item.pool)

    @property
    def sides(self) -> tuple["Side", ...]:
        """The parts into which the device's memory is divided: on a GPU the part that JAX allocates
        from, and what that leaves.
        """
        if self.pool is None:
            return (_side("", self.items, self.capacity),)
        # what is left of one side does not help the other, so each is judged separately
        pool = round(self._best_pool or self.pool)
        return (
            _side("in JAX's part", self.inside, pool),
            _side("beside it", self.outside, self.capacity - pool),
        )

    @property
    def likelihood(self) -> float:
        """The likelihood that the step fits: that all sides do, whose parts are off independently
        of each other.
        """
        return math.prod(side.likelihood for side in self.sides)

    @property
    def headroom(self) -> int:
        """Memory that is expected to be left; negative if the step does not fit."""
        left = self.capacity - self.expected
        if self.pool is None or not self.pool_is_set:
            return left
        return min(
            left,
            round(self.pool - total(self.inside)[0]),
            round(self.capacity - self.pool - total(self.outside)[0]),
        )

    @property
    def fits(self) -> bool:
        """True if the step is more likely to fit than not."""
        return self.likelihood >= 0.5

    @property
    def _best_pool(self) -> float | None:
        """Bytes that JAX should allocate from, so that both sides are equally likely to have
        enough; None if it need not be changed.
        """
        if self.pool is None or self.pool_is_set or likelihood(self.inside, self.pool) >= LIKELY:
            return None
        inside, deviation = total(self.inside)
        outside, other = total(self.outside)
        if not deviation + other:
            return inside
        room = self.capacity - inside - outside
        # Within three deviations are 99.9 % of all cases: more would only be taken from the other
        # side.
        return inside + min(3 * deviation, room * deviation / (deviation + other))

    @property
    def fraction(self) -> float | None:
        """The share of a GPU's memory that JAX must be given for the step to fit; None if it has
        enough, or nothing would do.
        """
        pool = self._best_pool
        if pool is None or not self.fits:
            return None
        return math.ceil(100 * pool / self.capacity) / 100

    @property
    def per_device(self) -> dict[str, int]:
        """All figures by name, in bytes."""
        others = ("largest", "items", "pool", "pool_is_set", "exchange_parts")
        names = [field.name for field in dataclasses.fields(self) if field.name not in others]
        sizes = {name: getattr(self, name) for name in names}
        return sizes | {"expected": self.expected, "headroom": self.headroom}

    @property
    def _is_sure(self) -> bool:
        """True where a target does not say how far off anything may be."""
        return not total(self.items)[1]

    @property
    def word(self) -> str:
        """The first words of the verdict: "fits", "tight" or "DOES NOT FIT"."""
        if not self.fits:
            return "DOES NOT FIT"
        if self.likelihood < LIKELY or (self._is_sure and self.expected > TIGHT * self.capacity):
            return "tight"
        return "fits"

    @property
    def verdict(self) -> str:
        """The word, with the numbers."""
        share, chance = self._shares, self._chance
        if not self.fits:
            left = f"only {format_bytes(self.headroom)} left"
            if self.headroom < 0:
                left = f"{format_bytes(-self.headroom)} too much"
            return f"{self.word}{chance}: {share}; {left} on each device."
        if self.likelihood < LIKELY:
            return f"{self.word}: fits{chance}: {share}."
        if self.word == "tight":
            return f"{self.word}: {share}; drivers, NCCL and fragmentation need some as well."
        return f"fits{chance}: {share}."

    @property
    def _shares(self) -> str:
        """The expected bytes as a share of the capacity, with their range, and the share that JAX
        must be given.
        """
        share = (
            f"{format_bytes(self.expected)} of {format_bytes(self.capacity)} "
            f"({self.expected / self.capacity:.1%})"
        )
        if not self._is_sure:
            low, high = map(format_bytes, self.range)
            share += f", from {low} to {high} in nine cases of ten"
        if self.fraction:
            share += f", if JAX may use {self.fraction:.0%} of it"
        doubtful = not self._is_sure and self.pool is not None and self.likelihood < LIKELY
        if doubtful and self.range[0] <= self.capacity:
            share += f"; {' and '.join(map(str, self.sides))}"
        return share

    @property
    def _chance(self) -> str:
        """The likelihood of the word, as the verdict has it."""
        if self._is_sure:
            return ""
        likelihood = self.likelihood
        if not self.fits:
            likelihood = 1 - self.likelihood
        return f" with {percent(likelihood)} likelihood"

    def __str__(self) -> str:
        rows = [(title, size, "") for title, size in self._parts.items()]
        rows.append(("  of which gradients", self.gradients, ""))
        program, *beside = self.items
        off = ""
        if program.deviation:
            off = f"  +- {format_bytes(round(program.deviation))}"
        rows.append(("peak", self.peak, off))
        rows += [(item.title, round(item.expected), _deviation(item)) for item in beside]
        if beside:
            rows.append(("expected", self.expected, ""))
        if self.host:
            rows.append(("in the host's memory", self.host, ""))
        lines = [f"{title:<26}{format_bytes(size):>12}{more}" for title, size, more in rows]
        lines.append(self.verdict)
        lines.append(f"{gauge(self.expected, self.capacity)} {format_bytes(self.capacity)}")
        if self.largest:
            lines += ["", "largest temporaries (they share memory; sizes do not add up):"]
        for size, array, where in self.largest:
            lines.append(f"  {format_bytes(size):>10}  {array}  {where}")
        return "\n".join(lines)

    @property
    def _parts(self) -> dict[str, int]:
        """Bytes of the program by their titles in a report."""
        titles = dict(TITLES)
        if EXCHANGE[OWN] in self.exchange_parts:
            titles["parameters"] = "parameters of servers"
        sizes: dict[str, int] = {}
        for name in PARTS:
            if name == "exchange" and self.exchange:
                sizes |= self.exchange_parts
            elif size := getattr(self, name):
                sizes[titles.get(name, name)] = size
        return sizes


def _side(where: str, items: tuple[Item, ...], room: int) -> Side:
    """Return the part of a device's memory that must hold some items."""
    return Side(where, round(total(items)[0]), room, likelihood(items, room))


def _deviation(item: Item) -> str:
    """Write how far off an item may be, and that it is outside of the memory that JAX allocates."""
    if not item.deviation and item.pool:
        return ""
    outside = ""
    if not item.pool:
        outside = ", outside of what JAX allocates"
    return f"  +- {format_bytes(round(item.deviation))}{outside}"


def percent(likelihood: float) -> str:
    """Write a likelihood, never rounded to certainty.

    >>> percent(0.973), percent(0.99999), percent(1e-6)
    ('97%', 'more than 99%', 'less than 1%')
    """
    if likelihood > 0.99:
        return "more than 99%"
    if likelihood < 0.01:
        return "less than 1%"
    return f"{likelihood:.0%}"


def memory_fraction() -> float | None:
    """Return the share of a GPU's memory that the environment has JAX allocate from; None if it
    does not say.
    """
    for name in FRACTIONS:
        if fraction := os.environ.get(name):
            return float(fraction)
    return None


def usable_memory(target: Target) -> int | None:
    """Return the bytes that programs may use on each device, as a device would report them to
    `fit`; None for CPUs, which do not.
    """
    if target.platform == "cuda":
        return int((memory_fraction() or PREALLOCATED) * target.memory)
    if target.platform == "cpu":
        return None
    return int(target.memory - target.overhead.runtime.expected)


def memory_of(
    program: TrainingProgram, compiled: Compiled, module: Module, cluster: Cluster
) -> Memory:
    """Return the memory of a compiled step."""
    target = cluster.target
    state, batch, weights, events = program.arguments
    sizes = compiled.sizes
    arguments = tree_on_device((state, batch, weights, events))
    # XLA counts the result in a donated argument's place as an output, too: an alias.
    fresh = sizes["output"] - sizes["alias"]
    # arrays in the model's code are allocations of their own, which no argument holds
    constants = re.findall(
        r"^allocation \d+: size (\d+), .*\bconstant\b", compiled.buffers, re.MULTILINE
    )
    constant_bytes = sum(map(int, constants))
    peak = arguments + constant_bytes + fresh + sizes["temp"] + sizes["generated_code"]
    batch_bytes = tree_on_device((batch, weights, events))
    exchange_parts = Counter[str]()
    for entry in state.exchange.values():
        for kind, leaf in entry.items():
            exchange_parts[EXCHANGE.get(kind, TITLES["exchange"])] += tree_on_device(leaf)
    items = program_items(target.overhead, peak, sizes["temp"], exact=compiled.exact)
    if not items[1].expected:
        items = items[:1]  # nothing is lost
    on_host = [leaf for leaf in jax.tree.leaves(state) if in_host_memory(leaf)]
    on_gpu = target.platform == "cuda"
    return Memory(
        parameters=tree_on_device(state.params),
        frozen=tree_on_device(state.frozen),
        optimizer=tree_on_device(state.opt),
        exchange=tree_on_device(state.exchange),
        statistics=tree_on_device((state.stats, state.rngs, state.key, state.step)),
        batch=batch_bytes,
        gradients=exchange_parts[EXCHANGE[OWN]] or _gradients(program, state.params),
        temporaries=sizes["temp"],
        constants=constant_bytes,
        fresh=fresh,
        host=sum(map(on_device, on_host)) + sizes.get("host_temp", 0),
        peak=peak,
        capacity=target.memory,
        # XLA drops arguments that nothing reads; the arrays are there all the same
        unread=max(arguments - sizes["argument"], 0),
        largest=_largest(compiled.buffers, module),
        items=(*items, *overhead_items(module, cluster, batch_bytes)),
        pool=usable_memory(target) if on_gpu else None,
        pool_is_set=on_gpu and memory_fraction() is not None,
        exchange_parts={title: size for title, size in exchange_parts.items() if size},
    )


def _gradients(program: TrainingProgram, params: Tree) -> int:
    """Return the bytes of reduced gradients, sharded as the reduction leaves them."""
    placed = program.placed
    resolved, mean_spec = placed.resolved, placed.exchange.reduction.mean_spec
    size = 0
    for path, leaf in flatten(params).items():
        place = resolved.placements[path]
        axes = set(spec_axes(place.spec)) - set(resolved.data_axes)
        axes |= set(spec_axes(mean_spec(place)))
        size += nbytes(leaf) // num_shards(tuple(axes), resolved.mesh)
    return size


def _largest(buffers: str, module: Module) -> tuple[tuple[int, str, str], ...]:
    """Return the largest values that XLA has assigned to temporary memory, one for each buffer."""
    scopes = {instr.name: instr.scope for _, instr in module.instructions}
    values: dict[tuple[int, int], tuple[int, str, str]] = {}
    temporary = False
    for line in buffers.splitlines():
        # XLA packs all temporaries into one allocation, and lists its values below it
        if line.startswith("allocation "):
            temporary = "preallocated-temp" in line
        elif temporary and (value := _VALUE.match(line)):
            name, size, offset, kind = value.groups()
            key, arrays = (int(offset), int(size)), arrays_of(kind)
            # values that share a place are one buffer at different times
            if key not in values and arrays and not arrays[0].host:
                scope = plain_scopes(scopes.get(name, ""))[0]
                values[key] = (int(size), str(arrays[0]), scope)
    counts = Counter(sorted(values.values(), key=lambda item: -item[0]))
    largest = []
    for (size, array, scope), count in list(counts.items())[:LARGEST]:
        shown = array
        if count > 1:
            shown = f"{array} x {count}"
        largest.append((size, shown, scope))
    return tuple(largest)


def check_step_memory(program: TrainingProgram) -> str | None:
    """Return the memory of a step on a full batch, as one line; None if devices do not report
    their limit.

    The step is compiled for this, once: the first step reuses the program.

    Raises:
      DeviceMemoryError: a step needs more than a device has.
    """
    mesh = program.placed.mesh
    limit = memory_limit(mesh)
    if limit is None:
        return None
    analysis = program.compile().memory_analysis()
    state = tree_on_device(program.placed.abstract_state)
    temporaries = analysis.temp_size_in_bytes
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    # arrays of the state that a step does not read are no arguments of its program
    peak = max(analysis.argument_size_in_bytes, state) + fresh + temporaries
    kind = mesh.local_devices[0].device_kind
    target = of_device(kind)
    # of its own compiler and device, XLA's figure is exact
    items = program_items(target.overhead if target else Overhead(), peak, 0)
    chance, expected = likelihood(items, limit), round(total(items)[0])
    line = (
        f"a step needs {format_bytes(peak)} of {format_bytes(limit)} on each {kind} "
        f"({peak / limit:.0%}): {format_bytes(state)} of state, {format_bytes(temporaries)} of "
        "temporaries"
    )
    if chance < 0.5:
        lost = ""
        if expected > peak:
            lost = f", with {format_bytes(expected - peak)} that the allocator cannot use"
        raise DeviceMemoryError(
            f"{line}.\n    {format_bytes(expected - limit)} too much on each of {mesh.size} "
            f"devices{lost}.\n"
            "    JAX preallocates 75 % of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION "
            "says otherwise.",
            fix="`spmd plan` shows what another layout, microbatches or [remat] would need; "
            "check_memory=False starts anyway.",
        )
    if chance >= LIKELY:
        return f"{line}."
    return f"{line}; it fits with {percent(chance)} likelihood."
