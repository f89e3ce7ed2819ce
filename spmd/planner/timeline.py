"""The predicted time of a step, from its compiled program and the target's figures.

Each instruction takes its launch overhead and a roofline time: its products at the rate that their
sizes reach on the target (`cost.py`) or bytes at the memory's bandwidth, whichever takes longer. A
collective takes the time of its bytes on the slowest of three levels of links (`Transfer.levels`)
and the latencies of its hops; a site's devices share its link to other sites. Computation between
its start and its end in XLA's schedule hides it. Collectives run one at a time. All devices are
equal. Copies between device and host take the time of their bytes on the host's link, one at a
time, and are hidden likewise.

Which fragments a step sends and receives is data (`spmd.wire.server.schedule`): a compiled
program has a branch for each, and so the times of all steps.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.cost import (
    FREE,
    Cost,
    cost_of,
    first_touch_time,
    host_bytes,
    memory_time,
    product_time,
)
from spmd.planner.hlo import Instruction, Module, captured, collective_kind
from spmd.planner.target import Target
from spmd.planner.traffic import Partitioned, Transfer, transfer_time

LIMITS = {
    "matrix products": "products",
    "convolutions": "convolutions",
    "attention": "attention",
    "memory": "memory",
    "launch overhead": "launches",
    "exposed communication": "exposed",
}
KINDS = {
    "matmul": "products",
    "convolution": "convolutions",
    "attention": "attention",
    "attention_backward": "attention",
}
SPREADS = {  # of parts, if named otherwise
    "products": "matmul",
    "launches": "launch",
    "exposed": "link",
    "convolutions": "convolution",
}
REMATERIALIZED = ".remat"  # in the names of operations that XLA repeats to save memory
REMATTED = "rematted_computation"  # in the scopes of what jax.checkpoint computes again
ADDED = (  # of a loop's body
    *LIMITS.values(),
    "compute",
    "communicated",
    "host_seconds",
    "host_bytes",
    "rematerialized",
    "repeated_memory",
)
# by name of the start: when the communication ends, when it was started, and what it is
_Pending = dict[str, tuple[float, float, Transfer | None]]


@dataclasses.dataclass(frozen=True)
class Span:
    """An interval on one device, in seconds from the step's beginning: communication or
    computation.
    """

    name: str
    where: str
    begin: float
    end: float
    communicates: bool


@dataclasses.dataclass(frozen=True)
class Wait:
    """Communication that computation does not hide, of one collective of the program.

    Attributes:
      transfer: the collective.
      times: how often it runs in a step.
      exposed: seconds of a step that it is waited for.
      beside: seconds of computation that are scheduled between its start and its end, each time.
    """

    transfer: Transfer
    times: int
    exposed: float
    beside: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The times of one step on one device, in seconds.

    Attributes:
      seconds: the whole step.
      products, convolutions, attention, memory, launches: computation, by what limits it: matrix
        units, in one of three kinds of kernels, memory bandwidth, or launch overhead.
      deviation: how far off `seconds` may be, in either direction.
      exposed: communication that no computation hides; `hidden`: communication that computation
        hides.
      host_seconds, host_bytes: copies between device and host, time on the link and bytes in both
        directions; what computation does not hide of them is part of `exposed`.
      flops: FLOPs of one device in a step, recomputation included.
      model_flops: the part of them that the model asks for, however it is sharded: its products,
        forward and backward.
      peak: the device's peak, in FLOPs per second, for the dtype with the most FLOPs.
      spans: the schedule of the entry computation; a loop is one span.
      waits: collectives that are not hidden, those that take the most of the step first.
      rematerialized: seconds of computation that XLA repeats, on its own account, to save memory.
      repeated_memory: the part of `memory` that is spent on computing again what `[remat]`, the
        model or XLA discards.
      at_peak: seconds that what is multiplied takes at the device's peak, by the fields `products`,
        `convolutions` and `attention`.
      operations: seconds of a step by instruction of the program and field, such as ("dot.1",
        "products"), loops multiplied out; launches are not among them, and of communication only
        what is exposed.
    """

    seconds: float
    products: float
    memory: float
    launches: float
    exposed: float
    hidden: float
    flops: float
    model_flops: float
    peak: float
    spans: tuple[Span, ...]
    host_seconds: float = 0.0
    host_bytes: float = 0.0
    waits: tuple[Wait, ...] = ()
    rematerialized: float = 0.0
    convolutions: float = 0.0
    attention: float = 0.0
    deviation: float = 0.0
    repeated_memory: float = 0.0
    at_peak: Mapping[str, float] = dataclasses.field(default_factory=dict)
    operations: Mapping[tuple[str, str], float] = dataclasses.field(
        default_factory=dict, repr=False
    )

    @property
    def multiplying(self) -> float:
        """Seconds of kernels that matrix units limit."""
        return self.products + self.convolutions + self.attention

    @property
    def range(self) -> tuple[float, float]:
        """The shortest and the longest time that the target's figures allow for."""
        return self.seconds - self.deviation, self.seconds + self.deviation

    @property
    def mfu(self) -> float:
        """The share of the device's peak that the model's own FLOPs use."""
        if not self.seconds:
            return 0.0
        return self.model_flops / (self.seconds * self.peak)

    @property
    def hfu(self) -> float:
        """The share of the device's peak that the compiled program uses; recomputed FLOPs count."""
        if not self.seconds:
            return 0.0
        return self.flops / (self.seconds * self.peak)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by what limits it; they add up to the whole step."""
        return {limit: getattr(self, field) for limit, field in LIMITS.items()}

    @property
    def limit(self) -> str:
        """The limit of the largest part of the time."""
        return max(self.parts, key=lambda limit: self.parts[limit]).removeprefix("exposed ")


@dataclasses.dataclass
class _Clock:
    """The clocks of computation and of the links, and the totals so far."""

    compute: float = 0.0
    link: float = 0.0
    host_link: float = 0.0
    products: float = 0.0
    convolutions: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    exposed: float = 0.0
    communicated: float = 0.0
    host_seconds: float = 0.0
    host_bytes: float = 0.0
    rematerialized: float = 0.0
    repeated_memory: float = 0.0
    at_peak: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    operations: dict[tuple[str, str], float] = dataclasses.field(
        default_factory=lambda: defaultdict(float)
    )
    waits: list[Wait] = dataclasses.field(default_factory=list)
    flops: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = dataclasses.field(default_factory=list)


def timeline_of(
    module: Module,
    mesh: MeshSpec,
    cluster: Cluster,
    data_axes: tuple[str, ...],
    *,
    model_flops: float = math.inf,
    widened: str = "",
    due: Collection[str] | None = None,
    temporaries: float = 0.0,
) -> Timeline:
    """Simulate a program's schedule.

    Args:
      model_flops: of the model on one device; at most what the program executes, which leaves out
        gradients that nothing needs.
      widened: the target's dtype of products that another compiler has widened to float32.
      due: the synchronizations of this step, as `sync_turn` names them; None: all that the program
        has.
      temporaries: bytes that the step allocates; the time to clear them is part of `memory`.
    """
    schedule = _Schedule(module, mesh, cluster, data_axes, widened, due)
    clock = schedule.simulate(module.entry)
    # glibc returns large blocks after each step, so the next one touches new pages
    clearing = first_touch_time(temporaries, cluster.target)
    clock.compute += clearing
    clock.memory += clearing
    flops = sum(clock.flops.values())
    dtype = max(clock.flops, key=lambda dtype: clock.flops[dtype], default="float32")
    return Timeline(
        seconds=clock.compute,
        products=clock.products,
        memory=clock.memory,
        launches=clock.launches,
        exposed=clock.exposed,
        hidden=max(clock.communicated - clock.exposed, 0.0),
        flops=flops,
        model_flops=min(model_flops, flops),
        peak=cluster.target.rate(dtype),
        spans=tuple(clock.spans),
        host_seconds=clock.host_seconds,
        host_bytes=clock.host_bytes,
        waits=tuple(sorted(clock.waits, key=lambda wait: -wait.exposed)),
        rematerialized=clock.rematerialized,
        convolutions=clock.convolutions,
        attention=clock.attention,
        deviation=deviation(clock, cluster.target),
        repeated_memory=clock.repeated_memory,
        at_peak=dict(clock.at_peak),
        operations=dict(clock.operations),
    )


def sync_turn(instr: Instruction) -> str:
    """Return the part of a synchronization that a conditional is, such as "send/0", by the scopes
    of `spmd.wire.server.local_training`; "" if it is none.

    >>> scope = 'metadata={op_name="jit(f)/shard_map/receive/3/cond"}'
    >>> sync_turn(Instruction("c", (), "conditional", (), scope))
    'receive/3'
    """
    if instr.op != "conditional":
        return ""
    return captured(r"(?:^|/)((?:send|receive)/\d+)/", instr.scope)


def deviation(parts: Any, target: Target) -> float:
    """Return the seconds that a step may be off, if the figures of its parts are off independently
    of each other.

    >>> from types import SimpleNamespace
    >>> from spmd.planner.target import Spread, load
    >>> target = dataclasses.replace(load("h100"), spread=Spread(matmul=0.3, memory=0.4))
    >>> parts = SimpleNamespace(
    ...     products=1.0, memory=1.0, convolutions=0, attention=0, launches=0, exposed=0
    ... )
    >>> round(deviation(parts, target), 9)
    0.5
    """
    errors = []
    for part in LIMITS.values():
        spread = getattr(target.spread, SPREADS.get(part, part))
        errors.append(getattr(parts, part) * spread)
    return math.hypot(*errors)


@dataclasses.dataclass(frozen=True)
class _Schedule(Partitioned):
    """The schedule of a program, which is simulated computation by computation."""

    widened: str = ""
    due: Collection[str] | None = None

    def simulate(self, name: str) -> _Clock:
        """Simulate a computation."""
        clock, pending = _Clock(), _Pending()
        for instr in self.module.computations.get(name, ()):
            if collective_kind(instr.op):
                self._begin(clock, pending, name, instr)
            elif size := host_bytes(self.module, name, instr):
                self._copy(clock, pending, name, instr, size)
            elif instr.op.endswith("-done"):
                self._end(clock, pending, instr)
            else:
                self._work(clock, name, instr)
        return clock

    def _work(self, clock: _Clock, name: str, instr: Instruction) -> None:
        """Advance by an instruction that does not communicate, or by all that it runs."""
        began, memory = clock.compute, clock.memory
        if instr.op in ("while", "conditional", "call", "async-start"):
            self._nested(clock, name, instr)
        elif instr.op not in FREE and not instr.op.endswith("-update"):
            launch = self.cluster.target.achieved.launch
            if instr.op == "iota":
                launch = 0.0
            self._compute(clock, instr, cost_of(self.module, name, instr), launch)
            # jax.checkpoint marks what it computes again in the scope, XLA in the name
            if REMATTED in instr.scope or REMATERIALIZED in instr.name:
                clock.repeated_memory += clock.memory - memory
        if REMATERIALIZED in instr.name:
            clock.rematerialized += clock.compute - began
        if clock.compute > began:
            clock.spans.append(Span(instr.name, instr.scope, began, clock.compute, False))

    def _compute(self, clock: _Clock, instr: Instruction, cost: Cost, launch: float) -> None:
        """Advance by an instruction's time and its launch overhead."""
        target = self.cluster.target
        if self.widened:
            cost = _narrowed(cost, self.widened)
        times: dict[str, float] = defaultdict(float)
        for product in cost.products:
            times[KINDS[product.kind]] += product_time(product, target)
        products, memory = sum(times.values()), memory_time(cost.bytes, target)
        part = "memory"
        if times and products >= memory:
            part = max(times, key=lambda kind: times[kind])
        seconds = max(products, memory)
        setattr(clock, part, getattr(clock, part) + seconds)
        clock.operations[instr.name, part] += seconds
        # for reports: how far kernels are from the peak
        if part != "memory":
            clock.at_peak[part] += sum(
                product.flops * product.share / target.rate(product.dtype)
                for product in cost.products
            )
        clock.launches += launch
        clock.compute += seconds + launch
        for dtype, count in cost.flops.items():
            clock.flops[dtype] += count

    def _copy(
        self, clock: _Clock, pending: _Pending, name: str, instr: Instruction, size: float
    ) -> None:
        """Begin a copy between device and host, or run an instruction that reads or writes the
        host's memory.
        """
        target = self.cluster.target
        # a TPU's description has no such link: the copy takes no time
        bandwidth = (target.host_bandwidth or math.inf) * target.achieved.link
        begin = max(clock.compute, clock.host_link)
        clock.host_link = begin + size / bandwidth
        clock.host_seconds += clock.host_link - begin
        clock.host_bytes += size
        clock.communicated += clock.host_link - begin
        clock.spans.append(Span(instr.name, instr.scope, begin, clock.host_link, True))
        if instr.op.endswith("-start"):
            pending[instr.name] = clock.host_link, clock.compute, None
            return
        self._compute(clock, instr, cost_of(self.module, name, instr), target.achieved.launch)
        self._wait(clock, instr.name, clock.host_link, clock.compute, None)

    def _begin(self, clock: _Clock, pending: _Pending, name: str, instr: Instruction) -> None:
        """Begin a collective, and wait for it unless it is asynchronous."""
        transfer = self.transfer(name, instr)
        # a group of one device sends nothing
        if transfer.group <= 1:
            return
        begin = max(clock.compute, clock.link)
        clock.link = begin + transfer_time(transfer, self.cluster)
        clock.communicated += clock.link - begin
        clock.spans.append(Span(instr.name, transfer.where, begin, clock.link, True))
        if transfer.asynchronous:
            pending[instr.name] = clock.link, clock.compute, transfer
        else:
            self._wait(clock, instr.name, clock.link, clock.compute, transfer)

    def _end(self, clock: _Clock, pending: _Pending, instr: Instruction) -> None:
        """Wait for the communication that this instruction is the end of."""
        for name in instr.operands:
            if name in pending:
                self._wait(clock, name, *pending.pop(name))

    def _wait(
        self, clock: _Clock, name: str, done: float, started: float, transfer: Transfer | None
    ) -> None:
        """Advance to the end of a communication."""
        if done <= clock.compute:
            return
        exposed = done - clock.compute
        clock.exposed += exposed
        clock.operations[name, "exposed"] += exposed
        if transfer is not None:
            clock.waits.append(Wait(transfer, 1, exposed, clock.compute - started))
        clock.compute = done

    def _nested(self, clock: _Clock, name: str, instr: Instruction) -> None:
        """Advance by the computations that a loop, a conditional or a call runs."""
        times = 1
        if instr.op == "while":
            inner = self.simulate(instr.called_as("body"))
            # A loop whose length XLA does not know counts once; a note of the plan names it.
            times = self.module.trip_count(name, instr) or 1
        else:
            inner = self._branch(instr)
        for field in ADDED:
            setattr(clock, field, getattr(clock, field) + times * getattr(inner, field))
        for wait in inner.waits:
            clock.waits.append(
                dataclasses.replace(wait, times=times * wait.times, exposed=times * wait.exposed)
            )
        if inner.communicated:
            # XLA ends a collective in the computation that starts it, so the link is free after a
            # loop.
            clock.link = max(clock.link, clock.compute)
        if inner.host_seconds:
            clock.host_link = max(clock.host_link, clock.compute)
        for dtype, count in inner.flops.items():
            clock.flops[dtype] += times * count
        for part, value in inner.at_peak.items():
            clock.at_peak[part] += times * value
        for operation, value in inner.operations.items():
            clock.operations[operation] += times * value

    def _branch(self, instr: Instruction) -> _Clock:
        """Return the clock of the branch that takes the longest; of a synchronization that is not
        due, the shortest.
        """
        branches = [self.simulate(called) for called in instr.called]
        # which branch a step takes is data: the longest one, unless it is known
        branches.sort(key=lambda branch: branch.compute)
        if not branches:
            return _Clock()
        turn = sync_turn(instr)
        skipped = turn and self.due is not None and turn not in self.due
        if skipped:
            return branches[0]
        return branches[-1]


def _narrowed(cost: Cost, dtype: str) -> Cost:
    """Return a cost with its products of float32 in the dtype that the target multiplies."""
    products = []
    for product in cost.products:
        is_wide = product.dtype == "float32"
        products.append(dataclasses.replace(product, dtype=dtype) if is_wide else product)
    return Cost(tuple(products), cost.bytes)
