"""The steps between two synchronizations of workers that train separately: which steps send and
receive what, and how long each takes.

The program of a step has a branch for each fragment that is sent and for each that is received.
Which of them a step takes is data (`spmd.wire.server.sync_schedule`), so one compiled program has
the times of all steps, for any number of steps between synchronizations.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

from spmd.planner.hlo import Module
from spmd.planner.timeline import Timeline, sync_turn
from spmd.planner.traffic import Traffic
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.sync_schedule import due_fragments

StepTimes = Callable[..., Timeline]  # called with due=, as `timeline_of`


@dataclasses.dataclass(frozen=True)
class StepKind:
    """Steps of a period that synchronize the same.

    Attributes:
      count: how many of these the period has.
      due: what they send and receive, such as "send/0" of the first fragment; empty for steps in
        which workers train alone.
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

    >>> alone = StepKind(
    ...     count=9, due=frozenset(), seconds=1.0, deviation=0.1, exposed=0.0, hidden=0.0
    ... )
    >>> outer = StepKind(
    ...     count=1, due=frozenset({"send/0"}), seconds=6.0, deviation=1.1, exposed=5.0, hidden=0.0
    ... )
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
        return 1 - self.exposed / self.total if self.total else 1.0

    @property
    def alone(self) -> StepKind | None:
        """The steps in which workers train alone; None if there are none."""
        return next((kind for kind in self.kinds if not kind.due), None)

    @property
    def hidden(self) -> float:
        """Seconds of synchronization that run beside computation, in all steps together."""
        without = self.alone.hidden if self.alone else 0.0
        return sum(kind.count * max(kind.hidden - without, 0.0) for kind in self.kinds if kind.due)


def sync_period(server: ParameterServer | None, times: StepTimes, traffic: Traffic) -> SyncPeriod:
    """The period of a program's steps.

    Args:
      server: how workers synchronize, if they train separately; None: in every step.
      times: of a step, called with `due` as `timeline_of` is.
      traffic: of a step with all of them.
    """
    counts = (
        Counter(due_in_step(server, number) for number in range(server.every or 1))
        if server
        else Counter([frozenset[str]()])
    )
    kinds = []
    for due, count in counts.most_common():
        step = times(due=due if server else None)
        kinds.append(StepKind(count, due, step.seconds, step.deviation, step.exposed, step.hidden))
    crossing = (
        (t.leaving * t.levels[2] * t.times, 1 if t.conditional else counts.total())
        for t in traffic.transfers
    )
    return SyncPeriod(tuple(kinds), sum(size * often for size, often in crossing))


def due_in_step(server: ParameterServer, number: int) -> frozenset[str]:
    """What a step in the middle of a run sends and receives.

    >>> server = ParameterServer(mode="local", every=4, fragments=2, overlap=1)
    >>> [sorted(due_in_step(server, number)) for number in range(4)]
    [['send/1'], ['receive/1'], ['send/0'], ['receive/0']]
    """
    number += 2 * (server.every or 1)  # so that all that was sent before has arrived
    parts = {
        "send": due_fragments(server, number),
        "receive": due_fragments(server, number - server.overlap),
    }
    return frozenset(
        f"{part}/{turn}" for part, turns in parts.items() for turn in turns.nonzero()[0]
    )


def unmarked_parts(server: ParameterServer, module: Module) -> list[str]:
    """Parts of a synchronization whose branch the compiled program does not name, so that every
    step is timed with them.
    """
    found = {sync_turn(instr) for _, instr in module.nested(module.entry)}
    wanted = frozenset().union(
        *(due_in_step(server, number) for number in range(server.every or 1))
    )
    return sorted(
        part
        for part in wanted
        if part not in found and not (server.mode == "elastic" and part.startswith("receive"))
    )
