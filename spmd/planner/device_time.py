"""Charges the time of a traced device to the operations of a program, each moment to one of
them.
"""

import bisect
import dataclasses
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from spmd.planner.hlo import Instruction, Module, collective_kind
from spmd.planner.trace_reader import NO_PROGRAM, Event

CONTAINERS = ("while", "conditional", "call", "async-start")  # their time is that of what they run
# what an event is: a collective, other work, work that the trace does not name, a container, of
# another program
COMMUNICATION, COMPUTATION, UNNAMED, CONTAINER, OTHERS = range(5)


@dataclasses.dataclass
class Measured:
    """What one device did in its executions of a program, in seconds.

    Attributes:
      executions: complete ones.
      windows: from the first operation of each to its last.
      charged: time of operations by name; of collectives, in which nothing else ran.
      launches: time inside of executions in which nothing ran.
      hidden: time of collectives in which other operations ran.
      between: time between two executions in which nothing ran; `other`: in which other programs
        did.
    """

    executions: int = 0
    windows: float = 0.0
    launches: float = 0.0
    hidden: float = 0.0
    between: float = 0.0
    other: float = 0.0
    charged: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))


def measure(
    events: Sequence[Event],
    program: tuple[str, int],
    module: Module,
    instructions: Mapping[str, tuple[str, Instruction]],
) -> Measured:
    """Charge the time of one device to the operations of a program.

    Args:
      events: of the device, of all programs, in the order in which they began.
      instructions: of the program by name, each with its computation.
    """
    of_program = [event for event in events if event.program == program]
    ran = {event.operation for event in of_program}
    kinds = {
        name: _kind(module, *instructions[name], ran) if name in instructions else COMPUTATION
        for name in ran
    }
    windows = _windows(of_program, {instr.name for instr in module.computations[module.entry]})
    result = Measured(len(windows), sum(end - begin for begin, end in windows))
    begins = [begin for begin, _ in windows]
    points = sorted({at for event in events for at in (event.begin, event.end)})
    # heaps of (-begin, number of the event), by what it is
    running: tuple[list[tuple[float, int]], ...] = ([], [], [], [], [])
    number = 0
    for at, until in itertools.pairwise(points):
        while number < len(events) and events[number].begin <= at:
            event = events[number]
            kind = (
                kinds[event.operation]
                if event.program == program
                else UNNAMED
                if event.program == NO_PROGRAM
                else OTHERS
            )
            heapq.heappush(running[kind], (-event.begin, number))
            number += 1
        for heap in running:
            while heap and events[heap[0][1]].end <= at:
                heapq.heappop(heap)
        place, span = bisect.bisect_right(begins, at) - 1, until - at
        if place >= 0 and at < windows[place][1]:
            work = running[COMPUTATION] or running[UNNAMED]
            if charged := work or running[COMMUNICATION]:
                result.charged[events[charged[0][1]].operation] += span
            else:
                result.launches += span
            result.hidden += span * (
                bool(work) and any(events[one].end > at for _, one in running[COMMUNICATION])
            )
        elif 0 <= place < len(windows) - 1:
            busy = bool(running[UNNAMED] or running[OTHERS])
            result.other += span * busy
            result.between += span * (not busy)
    return result


def _kind(module: Module, computation: str, instr: Instruction, ran: set[str]) -> int:
    """What an instruction is, given all that have run."""
    if collective_kind(instr.op) or collective_kind(instr.op.removesuffix("-done")):
        return COMMUNICATION
    if instr.op in CONTAINERS and any(
        inner.name in ran for called in instr.called for _, inner in module.nested(called)
    ):
        return CONTAINER
    return COMPUTATION


def _windows(events: Sequence[Event], entry: set[str]) -> list[tuple[float, float]]:
    """When each execution of a program began and ended. Outside of loops an instruction runs as
    often in one as in any other, so what most of them have run is the number of executions; what a
    loop runs belongs to the execution that began last.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.operation in entry:
            times[event.operation].append(event.begin)
    if not times:
        return []
    count = Counter(map(len, times.values())).most_common(1)[0][0]
    begins = [
        min(began[number] for began in times.values() if len(began) == count)
        for number in range(count)
    ]
    begins[0] = events[0].begin
    ends = list(begins)
    for event in events:
        place = bisect.bisect_right(begins, event.begin) - 1
        ends[place] = max(ends[place], event.end)
    return [
        (max(begin, previous), end)
        for begin, end, previous in zip(begins, ends, [begins[0], *ends], strict=False)
    ]
