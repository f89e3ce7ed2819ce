"""Predicts the mean step between two synchronizations of workers that train separately."""

import dataclasses
from collections import Counter
from collections.abc import Callable

from spmd.planner.hlo import Module
from spmd.planner.timeline import Timeline, sync_turn
from spmd.planner.traffic import Traffic
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.schedule import due_fragments

StepTimes = Callable[..., Timeline]  # called with due=, as `timeline_of`


@dataclasses.dataclass(frozen=True)
class StepKind:
    """Steps of a period that synchronize the same.

    Attributes:
      count: how many of these the period has.
      due: what they send and receive, such as "send/0"; empty where workers train alone.
      seconds, deviation: the time of one, and how far off it may be.
      exposed: seconds of it in which nothing is computed, because communication is waited for;
        `hidden`: communication beside computation.
    """

    count: int
    due: frozenset[str]
    seconds: float
    deviation: float
    exposed: float
    hidden: float


@dataclasses.dataclass(frozen=True)
class SyncPeriod:
    """The steps until the same parameters are synchronized again; a single step where workers
    synchronize in each.

    Attributes:
      kinds: its steps, those of the most frequent kind first.
      site_bytes: bytes that cross a site's link in one direction in a period.

    >>> alone = StepKind(9, frozenset(), seconds=1.0, deviation=0.1, exposed=0.0, hidden=0.0)
    >>> sends = frozenset({"send/0"})
    >>> outer = StepKind(1, sends, seconds=6.0, deviation=1.1, exposed=5.0, hidden=0.0)
    >>> period = SyncPeriod((alone, outer))
    >>> period.steps, period.total, period.seconds, round(period.utilization, 3)
    (10, 15.0, 1.5, 0.667)
    """

    kinds: tuple[StepKind, ...]
    site_bytes: float = 0.0

    @property
    def steps(self) -> int:
        """The number of steps."""
        return sum(kind.count for kind in self.kinds)

    @property
    def total(self) -> float:
        """The time of all steps together."""
        return sum(kind.count * kind.seconds for kind in self.kinds)

    @property
    def exposed(self) -> float:
        """Seconds of all steps in which communication is waited for."""
        return sum(kind.count * kind.exposed for kind in self.kinds)

    @property
    def seconds(self) -> float:
        """The time of a step, on average."""
        return self.total / self.steps

    @property
    def range(self) -> tuple[float, float]:
        """The shortest and the longest average time that the target's figures allow for."""
        off = sum(kind.count * kind.deviation for kind in self.kinds) / self.steps
        return self.seconds - off, self.seconds + off

    @property
    def utilization(self) -> float:
        """The share of the time in which a device computes."""
        if not self.total:
            return 1.0
        return 1 - self.exposed / self.total

    @property
    def alone(self) -> StepKind | None:
        """The steps in which workers train alone; None if there are none."""
        return next((kind for kind in self.kinds if not kind.due), None)

    @property
    def hidden(self) -> float:
        """Seconds of synchronization that run beside computation, in all steps together."""
        without = 0.0
        if self.alone:
            without = self.alone.hidden
        return sum(kind.count * max(kind.hidden - without, 0.0) for kind in self.kinds if kind.due)


def sync_period(server: ParameterServer | None, times: StepTimes, traffic: Traffic) -> SyncPeriod:
    """Return the period of a program's steps.

    Args:
      server: how workers synchronize, if they train separately; None: in every step.
      times: of a step, called with `due` as `timeline_of` is.
      traffic: of a step with all of them.
    """
    if server is None:
        counts = Counter([frozenset[str]()])
    else:
        counts = Counter(due_in_step(server, number) for number in range(server.every or 1))
    kinds = []
    for due, count in counts.most_common():
        step = times(due=due if server else None)
        kinds.append(StepKind(count, due, step.seconds, step.deviation, step.exposed, step.hidden))
    site_bytes = 0.0
    for transfer in traffic.transfers:
        turns = 1
        if not transfer.conditional:
            turns = counts.total()
        site_bytes += transfer.leaving * transfer.levels[2] * transfer.times * turns
    return SyncPeriod(tuple(kinds), site_bytes)


def due_in_step(server: ParameterServer, number: int) -> frozenset[str]:
    """Return the parts of a synchronization that a step in the middle of a run sends and receives.

    >>> server = ParameterServer(mode="local", every=4, fragments=2, overlap=1)
    >>> [sorted(due_in_step(server, number)) for number in range(4)]
    [['send/1'], ['receive/1'], ['send/0'], ['receive/0']]
    """
    number += 2 * (server.every or 1)  # so that all that was sent before has arrived
    sent = due_fragments(server, number).nonzero()[0]
    received = due_fragments(server, number - server.overlap).nonzero()[0]
    parts = [f"send/{fragment}" for fragment in sent]
    return frozenset(parts + [f"receive/{fragment}" for fragment in received])


def unmarked_parts(server: ParameterServer, module: Module) -> list[str]:
    """Return the parts of a synchronization whose branch the compiled program does not name, so
    that every step is timed with them.
    """
    named = {sync_turn(instr) for _, instr in module.nested(module.entry)}
    parts: set[str] = set()
    for number in range(server.every or 1):
        parts |= due_in_step(server, number)
    if server.mode == "elastic":
        # its workers receive in the branch in which they send
        parts = {part for part in parts if not part.startswith("receive")}
    return sorted(parts - named)
