"""How long a step takes, from its compiled program and a target's figures: every instruction in its order, what travels beside it.

A roofline for each instruction: operations at the target's rate for their dtype or bytes at the memory's, whichever takes longer, and the
time until it begins. A collective takes its bytes over the slower of its links (`Transfer.levels`, one level after the other) and a latency
for each of its rounds; what is between its start and its end in XLA's schedule hides it. One collective at a time. All devices are alike.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from spmd.mesh import MeshSpec
from spmd.planner.cost import FREE, Cost, cost_of
from spmd.planner.hlo import Instruction, Module, collective_kind
from spmd.planner.target import Cluster
from spmd.planner.traffic import Transfer, transfer_of

ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "collective_permute": 1}


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of time on one device: seconds from the step's beginning; `travels` for a collective, else it computes."""

    name: str
    where: str
    begin: float
    end: float
    travels: bool


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The times of one step on one device, in seconds.

    Attributes:
      seconds: the whole step.
      products, memory, launches: computing, by what limits it: matrix units, memory, or beginning at all.
      exposed: waiting for what travels; `hidden`: what travels while something is computed.
      flops: operations of one device in a step.
      peak: what the device could do, operations per second, of the dtype that has most of them.
      spans: what the entry computation does when; a loop is one span.
    """

    seconds: float
    products: float
    memory: float
    launches: float
    exposed: float
    hidden: float
    flops: float
    peak: float
    spans: tuple[Span, ...]

    @property
    def mfu(self) -> float:
        """The share of what the device could do that the program's own operations make use of; recomputed ones count."""
        return self.flops / (self.seconds * self.peak) if self.seconds else 0.0

    @property
    def limit(self) -> str:
        """What most of the time goes to."""
        parts = {
            "matrix products": self.products,
            "memory": self.memory,
            "beginning operations": self.launches,
            "what travels": self.exposed,
        }
        return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass
class _Clock:
    """Two clocks, of what computes and of what travels, and what they have counted."""

    compute: float = 0.0
    link: float = 0.0
    products: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    exposed: float = 0.0
    travelled: float = 0.0
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)


def timeline_of(module: Module, mesh: MeshSpec, cluster: Cluster, data_axes: tuple[str, ...], half: str = "") -> Timeline:
    """Go through a program's schedule. `half`: what products of float32 are in truth, where another compiler has widened them."""
    clock = _Schedule(module, mesh, cluster, data_axes, half).run(module.entry)
    most = max(clock.flops, key=lambda dtype: clock.flops[dtype], default="float32")
    return Timeline(
        clock.compute,
        clock.products,
        clock.memory,
        clock.launches,
        clock.exposed,
        max(clock.travelled - clock.exposed, 0.0),
        sum(clock.flops.values()),
        cluster.target.rate(most),
        tuple(clock.spans),
    )


@dataclasses.dataclass(frozen=True)
class _Schedule:
    module: Module
    mesh: MeshSpec
    cluster: Cluster
    data: tuple[str, ...]
    half: str = ""

    def run(self, name: str) -> _Clock:
        """The clocks after a computation."""
        clock, open_ = _Clock(), {}
        for one in self.module.computations.get(name, ()):
            began = clock.compute
            if collective_kind(one.op):
                self._begin(clock, open_, name, one)
            elif one.op.endswith("-done"):
                self._end(clock, open_, one)
            elif one.op in ("while", "conditional", "call", "async-start"):
                self._nested(clock, name, one)
            elif one.op not in FREE and not one.op.endswith(("-update",)):
                self._compute(clock, cost_of(self.module, name, one), launch=one.op not in ("iota",))
            if clock.compute > began and not one.op.endswith("-done") and not collective_kind(one.op):
                clock.spans.append(Span(one.name, one.scope, began, clock.compute, False))
        return clock

    def _compute(self, clock: _Clock, cost: Cost, *, launch: bool) -> None:
        target, reached = self.cluster.target, self.cluster.target.achieved
        if self.half and "float32" in cost.flops:
            cost = Cost({self.half: sum(cost.flops.values())}, cost.bytes)
        products = sum(count / (target.rate(dtype) * reached.matmul) for dtype, count in cost.flops.items())
        memory = cost.bytes / (target.memory_bandwidth * reached.memory)
        clock.products += products if products >= memory else 0.0
        clock.memory += memory if memory > products else 0.0
        clock.launches += reached.launch if launch else 0.0
        clock.compute += max(products, memory) + (reached.launch if launch else 0.0)
        for dtype, count in cost.flops.items():
            clock.flops[dtype] = clock.flops.get(dtype, 0.0) + count

    def _begin(self, clock: _Clock, open_: dict[str, float], name: str, one: Instruction) -> None:
        transfer = transfer_of(self.module, name, one, 1, self.mesh, self.cluster, self.data)
        if transfer.group <= 1:
            return
        begin = max(clock.compute, clock.link)
        clock.link = begin + travel_time(transfer, self.cluster)
        clock.travelled += clock.link - begin
        clock.spans.append(Span(one.name, transfer.where, begin, clock.link, True))
        if transfer.asynchronous:
            open_[one.name] = clock.link
        else:
            clock.exposed += clock.link - clock.compute
            clock.compute = clock.link

    def _end(self, clock: _Clock, open_: dict[str, float], one: Instruction) -> None:
        done = max((open_.pop(name) for name in one.operands if name in open_), default=0.0)
        clock.exposed += max(done - clock.compute, 0.0)
        clock.compute = max(clock.compute, done)

    def _nested(self, clock: _Clock, name: str, one: Instruction) -> None:
        if one.op == "while":
            inner, times = self.run(one.named("body")), self.module.trips(name, one) or 1
        else:
            inner, times = max((self.run(called) for called in one.called), key=lambda found: found.compute, default=_Clock()), 1
        for field in ("compute", "products", "memory", "launches", "exposed", "travelled"):
            setattr(clock, field, getattr(clock, field) + times * getattr(inner, field))
        clock.link = max(clock.link, clock.compute if inner.travelled else clock.link)
        for dtype, count in inner.flops.items():
            clock.flops[dtype] = clock.flops.get(dtype, 0.0) + times * count


def travel_time(transfer: Transfer, cluster: Cluster) -> float:
    """Seconds of one collective: bytes over each level's link, and a latency for each round of a tree."""
    target, (inside, between) = cluster.target, transfer.levels
    nodes, rounds = transfer.group // transfer.per_node, ROUNDS[transfer.kind]
    single = transfer.kind == "collective_permute"
    steps = lambda count: 1 if single else rounds * math.ceil(math.log2(count)) if count > 1 else 0
    near, far = (0, 1) if single and between else (steps(transfer.per_node), steps(nodes) if not single else 0)
    seconds = inside / (target.inside.bandwidth * target.achieved.link) + near * target.inside.latency
    return target.achieved.launch + seconds + between / (target.between.bandwidth * target.achieved.link) + far * target.between.latency


def asynchronous(module: Module) -> Iterator[tuple[str, int]]:
    """Every collective that has a start and an end: its name, and how many operations that compute lie between the two."""
    for lines in module.computations.values():
        for number, one in enumerate(lines):
            if collective_kind(one.op) and one.op.endswith("-start"):
                end = next((at for at, other in enumerate(lines) if other.op.endswith("-done") and one.name in other.operands), number)
                between = [
                    other for other in lines[number + 1 : end] if other.op not in FREE and not re.search(r"-(start|done)$", other.op)
                ]
                yield one.name, len(between)
