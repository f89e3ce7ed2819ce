"""Pipeline schedules: what each stage computes in each tick. Plain tables, without arrays or
devices.

A stage is a device along the pipeline's mesh axis, with one group of layers or several (`groups`);
with g groups on each of p stages, group number c of stage s is the network's (c p + s)th. One tick
is the time that a group takes for one microbatch, forward or backward. The next stage can use the
result of a tick in the following tick.

Sources: GPipe (Huang et al., arXiv:1811.06965); 1F1B (Narayanan et al., PipeDream,
arXiv:1806.03377, in the form with a flush, arXiv:2006.09503); interleaved stages (Narayanan et al.,
arXiv:2104.04473); the wavefront of a stack of recurrent layers is that of GNMT (Wu et al.,
arXiv:1609.08144), where chunks of time take the place of microbatches.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from spmd.errors import OptionError, check_integer, did_you_mean

# The parts of a pipeline's input, as a schedule is printed.
MICROBATCHES, TIME_CHUNKS = "microbatches", "chunks of time"


class Work(NamedTuple):
    """The work of a stage in a tick: the microbatch (or chunk of time), the group of layers, and
    the direction.
    """

    microbatch: int
    group: int = 0
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table of work. Printed, one line per stage: numbers are microbatches, marked by ' in the
    backward pass.

    Attributes:
      name: "gpipe", "circular" or "1f1b".
      stages, microbatches, groups: their numbers; groups are those of one stage.
      hop: ticks until the next stage can use a result.
      unit: the parts that `microbatches` counts, as they are printed: "chunks of time" in the
        wavefront of recurrent layers.
      table: [tick][stage]; None: idle.

    Example:
      >>> make_schedule("1f1b", stages=2, microbatches=3)
      1f1b, 2 stages, 3 microbatches: 8 ticks, 25.0% idle
      0 |  0  1  . 0'  2 1'  . 2'
      1 |  .  0 0'  1 1'  2 2'  .
    """

    name: str
    stages: int
    microbatches: int
    groups: int
    table: tuple[tuple[Work | None, ...], ...]
    hop: int = 1
    unit: str = MICROBATCHES

    @property
    def ticks(self) -> int:
        """The length of the table."""
        return len(self.table)

    @property
    def forward(self) -> "Schedule":
        """The forward pass alone: all that a program needs whose backward pass is made by
        `jax.grad`.
        """
        orders: list[list[Work]] = [[] for _ in range(self.stages)]
        for tick in self.table:
            for stage, work in enumerate(tick):
                if work is not None and not work.backward:
                    orders[stage].append(work)
        return dataclasses.replace(self, table=_timed(orders, self.groups, self.hop))

    @property
    def bubble(self) -> float:
        """The share of all stages' time that is idle."""
        idle = sum(tick.count(None) for tick in self.table)
        return idle / (self.ticks * self.stages)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """By stage: the most activations stored at a time, in microbatches of one group. For a
        forward pass alone, all of them.
        """
        most = [0] * self.stages
        stored = [0] * self.stages
        for tick in self.table:
            for stage, work in enumerate(tick):
                if work is None:
                    continue
                if work.backward:
                    stored[stage] -= 1
                else:
                    stored[stage] += 1
                    most[stage] = max(most[stage], stored[stage])
        return tuple(most)

    def __str__(self) -> str:
        head = f"{self.name}, {self.stages} stages"
        if self.groups > 1:
            head += f" of {self.groups} groups"
        lines = [
            f"{head}, {self.microbatches} {self.unit}: {self.ticks} ticks, {self.bubble:.1%} idle"
        ]
        cells = {work: self._cell(work) for tick in self.table for work in tick}
        width = max(map(len, cells.values())) + 1
        for stage in range(self.stages):
            row = "".join(cells[tick[stage]].rjust(width) for tick in self.table)
            lines.append(f"{stage} |{row}")
        return "\n".join(lines)

    __repr__ = __str__

    def _cell(self, work: Work | None) -> str:
        if work is None:
            return "."
        cell = f"{work.microbatch}"
        if 1 < self.groups <= 26:
            cell += chr(ord("a") + work.group)
        elif self.groups > 1:
            cell += f"/{work.group}"
        if work.backward:
            cell += "'"
        return cell


def make_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    groups: int = 1,
    hop: int = 1,
    unit: str = MICROBATCHES,
) -> Schedule:
    """Return the schedule of this name, forward and backward.

    Args:
      name: "gpipe": all forward, then all backward; so for the wavefront of recurrent layers, with
        chunks of time as microbatches. "circular": the same with several groups of layers on each
        stage, so that the pipeline fills sooner. "1f1b": each stage runs backward as early as it
        can, so that it stores the activations of at most `stages` microbatches.
      hop: ticks until the next stage can use a result; 2: it is sent while the next tick is
        computed.
      stages: devices of the pipeline.
      microbatches: parts of the batch.
      groups: of layers on each stage, for "circular".
      unit: what the parts are.

    Returns:
      The schedule; printed, a line for each stage.

    Raises:
      OptionError: no such schedule, numbers below 1, or numbers that do not fit together.

    Example:
      >>> make_schedule("gpipe", stages=2, microbatches=2)
      gpipe, 2 stages, 2 microbatches: 6 ticks, 33.3% idle
      0 |  0  1  .  . 1' 0'
      1 |  .  0  1 1' 0'  .
    """
    if not isinstance(name, str) or name not in ORDERS:
        raise OptionError(
            f'schedule: no schedule "{name}".', fix=f"{did_you_mean(str(name), ORDERS)}"
        )
    for key, value in (
        ("stages", stages),
        ("microbatches", microbatches),
        ("groups", groups),
        ("hop", hop),
    ):
        check_integer(value, f"schedule: {key}")
    if name != "circular" and groups > 1:
        raise OptionError(
            f'schedule: groups={groups}: "{name}" has one on each stage.',
            fix='"circular", or groups=1.',
        )
    orders = [ORDERS[name](stage, stages, microbatches, groups) for stage in range(stages)]
    return Schedule(name, stages, microbatches, groups, _timed(orders, groups, hop), hop, unit)


def _gpipe_order(stage: int, stages: int, microbatches: int, groups: int) -> list[Work]:
    """Return an order in which `stages` microbatches, or those that are left, go through one group
    after the other, then the next ones; backward in reverse order.
    """
    del stage
    size = microbatches
    if groups > 1:
        size = stages
    forward = [
        Work(number, group)
        for first in range(0, microbatches, size)
        for group in range(groups)
        for number in range(first, min(first + size, microbatches))
    ]
    return forward + [work._replace(backward=True) for work in reversed(forward)]


def _1f1b_order(stage: int, stages: int, microbatches: int, groups: int) -> list[Work]:
    """Return an order that runs forward until the first gradient arrives, then one forward and one
    backward in turn.
    """
    del groups
    # The first gradient arrives after the microbatch has gone through the stages behind, and back.
    ahead = min(microbatches, stages - 1 - stage)
    forward = [Work(number, 0) for number in range(microbatches)]
    backward = [work._replace(backward=True) for work in forward]
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        order += pair
    return order + backward[microbatches - ahead :]


ORDERS = {"gpipe": _gpipe_order, "circular": _gpipe_order, "1f1b": _1f1b_order}


def _timed(
    orders: Sequence[Sequence[Work]], groups: int, hop: int
) -> tuple[tuple[Work | None, ...], ...]:
    """Return the table in which every stage works in its order, each item as soon as its inputs are
    available.
    """
    stages = len(orders)
    at = [0] * len(orders)
    table = []
    # The tick, by (microbatch, layer, backward).
    done: dict[tuple[int, int, bool], int] = {}
    layers = stages * groups

    def ready(stage: int, work: Work) -> bool:
        layer = work.group * stages + stage
        source = layer - 1
        if work.backward:
            source = layer + 1
            if (work.microbatch, layer, False) not in done:
                return False
        if not 0 <= source < layers:
            return True
        sent = done.get((work.microbatch, source, work.backward))
        return sent is not None and sent + hop <= len(table)

    def next_work(stage: int) -> Work | None:
        if at[stage] == len(orders[stage]):
            return None
        work = orders[stage][at[stage]]
        if not ready(stage, work):
            return None
        return work

    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        tick = [next_work(stage) for stage in range(stages)]
        # A result may be on its way for `hop` ticks, during which all stages may be waiting.
        if not any(tick) and len(table) - max(done.values(), default=0) > hop:
            raise RuntimeError("deadlock: every stage of the schedule waits for another")
        for stage, work in enumerate(tick):
            if work is not None:
                at[stage] += 1
                done[work.microbatch, work.group * stages + stage, work.backward] = len(table)
        table.append(tuple(tick))
    return tuple(table)


def best_chunk(time: int, stages: int, message: float = 0.5) -> int:
    """Return the time steps c of a chunk that minimise (T / c + p - 1)(c + a) on p recurrent
    stages, about sqrt(a T / (p - 1)).

    Short chunks fill the pipeline sooner, long ones send fewer messages.

    Args:
      time: total steps, T.
      message: the cost of sending, in steps of one stage, a.
      stages: p.

    Returns:
      c, from 1 to `time`.

    Example:
      >>> best_chunk(64, stages=8), best_chunk(64, stages=1)
      (2, 64)
    """

    def cost(chunk: int) -> float:
        return (-(-time // chunk) + stages - 1) * (chunk + message)

    divisors = [chunk for chunk in range(1, time + 1) if time % chunk == 0]
    return min(divisors, key=lambda chunk: (cost(chunk), -chunk))
