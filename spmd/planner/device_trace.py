"""A trace of `jax.profiler`: the operations that ran on each device, the seconds for which each is
charged, and the layers that they belong to.

On a CPU the threads of XLA have an event for each operation. An operation that continues in other
threads has a second event where it ends. On a GPU each device has a plane, and each of its streams
a line of kernels; XLA annotates them with the instruction.
"""

import bisect
import dataclasses
import heapq
import itertools
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from spmd.nn.unchanged_models import AS_WRITTEN
from spmd.planner.hlo import Instruction, Module, collective_kind

NO_PROGRAM = ("", 0)
# of a copy on a GPU; one without an instruction, such as that of the next batch, is no part of a
# program
COPY = "memcpy_details"
# in the name of the event at which an operation of a CPU ends, which its `_c` connects with the
# `_p` of its first event
END = "end: "
CONTAINERS = ("while", "conditional", "call", "async-start")  # their time is that of what they run
# what an event is: a collective, other work, work that the trace does not name, a container, of
# another program
COMMUNICATION, COMPUTATION, UNNAMED, CONTAINER, OTHERS = range(5)
OUTSIDE = "model and loss, outside of layers"
REST = "optimizer, and the rest of the step"
PARTS = {  # of the step, by their scopes
    "gather_params": "gathering parameters",
    "gather_updates": "gathering updates",
    "reduce_gradients": "reducing gradients",
    "send": "synchronizing workers",
    "receive": "synchronizing workers",
    "stats": "batch statistics",
    "metrics": "metrics",
}
ADDED = {  # by JAX's transformations and by this library; they are no layers
    *(
        "while",
        "body",
        "cond",
        "closed_call",
        "checkpoint",
        "remat",
        "rematted_computation",
        "shard_map",
    ),
    *("eval_jaxpr", "pjit", "custom_jvp_call", "custom_vjp_call", AS_WRITTEN),
}
# the name of a function of Python, which JAX adds to the loops of random numbers
FUNCTION = re.compile(r"\w+(\.\w+)+")


@dataclasses.dataclass(frozen=True)
class Event:
    """An operation that ran.

    Attributes:
      device: its number in this process.
      program: the name and the number of the program; `NO_PROGRAM` where the trace does not say.
      operation: the name of the instruction.
      begin, end: seconds since the trace began.
    """

    device: int
    program: tuple[str, int]
    operation: str
    begin: float
    end: float


def read_trace(path: Path) -> list[Event]:
    """Read the operations in a file that `jax.profiler` has written, `NAME.xplane.pb`, in the order
    in which they began.
    """
    with warnings.catch_warnings():
        # of Python 3.13, about a type of jaxlib's
        warnings.simplefilter("ignore", DeprecationWarning)
        return events_of(ProfileData.from_file(str(path)))


def events_of(trace: Any) -> list[Event]:
    """Return the operations of `jax.profiler.ProfileData`, or what has the same attributes."""
    events: list[Event] = []
    # XLA's profiler names planes and lines so (its `cupti_collector.cc` and `xplane_schema.cc`).
    for plane in trace.planes:
        if gpu := re.fullmatch(r"/device:GPU:(\d+)", plane.name):
            events += _gpu_events(plane, int(gpu[1]))
        elif plane.name.startswith("/host:CPU"):
            events += _cpu_events(plane)
    return sorted(events, key=lambda event: (event.begin, event.end))


def _gpu_events(plane: Any, device: int) -> Iterator[Event]:
    """Yield the kernels and copies of a GPU, which are on the lines of its streams."""
    for line in plane.lines:
        if not line.name.startswith("Stream #"):
            continue
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" in stats or COPY not in stats:
                yield _event(event, stats, device, event.end_ns)


def _cpu_events(plane: Any) -> Iterator[Event]:
    """Yield the operations of XLA's threads, each with the end that another thread may have."""
    begun, ends = [], defaultdict[Any, float](float)
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            # XLA:CPU runs parts of an operation in other threads, and the last of them writes this
            # event.
            if event.name.startswith(END):
                ends[stats.get("_c")] = event.start_ns
            elif "hlo_op" in stats:
                begun.append((event, stats))
    # an operation that continues in other threads ends where they end
    for event, stats in begun:
        end = max(event.end_ns, ends[stats.get("_p")])
        yield _event(event, stats, int(stats.get("device_ordinal", 0)), end)


def _event(event: Any, stats: dict[str, Any], device: int, end: float) -> Event:
    """Return an event of the profiler as an operation."""
    program = str(stats.get("hlo_module", "")), int(stats.get("program_id", 0))
    operation = str(stats.get("hlo_op", "")).rpartition("/")[2]
    return Event(device, program, operation, event.start_ns * 1e-9, end * 1e-9)


def module_number(module: bytes) -> int:
    """Return the number that a trace gives a program, from its serialized `HloModuleProto`: field
    5, its `id`; 0 if it has none.

    >>> module_number(bytes([0x0A, 1, 0x66, 0x28, 0x96, 0x01]))
    150
    """
    at = 0
    while at < len(module):
        key, at = _varint(module, at)
        if key & 7 not in (0, 2):  # it has numbers and messages only, up to the id
            break
        size, at = _varint(module, at)
        if key == 5 << 3:
            return size
        if key & 7 == 2:
            at += size
    return 0


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Read a number in the format of protocol buffers, seven bits in a byte, and return it with the
    place where it ends.
    """
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at += 1
        shift += 7
    return value | message[at] << shift, at + 1


@dataclasses.dataclass
class Measured:
    """The seconds of one device in its executions of a program.

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
    kinds = _event_kinds({event.operation for event in of_program}, module, instructions)
    windows = _windows(of_program, {instr.name for instr in module.computations[module.entry]})
    result = Measured(len(windows), sum(end - begin for begin, end in windows))
    begins = [begin for begin, _ in windows]
    points = sorted({event.begin for event in events} | {event.end for event in events})
    # heaps of (-begin, number of the event), by what it is
    running: tuple[list[tuple[float, int]], ...] = ([], [], [], [], [])
    number = 0
    for at, until in itertools.pairwise(points):
        while number < len(events) and events[number].begin <= at:
            event = events[number]
            kind = OTHERS
            if event.program == NO_PROGRAM:
                kind = UNNAMED
            if event.program == program:
                kind = kinds[event.operation]
            heapq.heappush(running[kind], (-event.begin, number))
            number += 1
        # a heap's first operation is the one that began last: it is charged while it runs
        for heap in running:
            while heap and events[heap[0][1]].end <= at:
                heapq.heappop(heap)
        place, span = bisect.bisect_right(begins, at) - 1, until - at
        if place >= 0 and at < windows[place][1]:
            # Communication is charged only where nothing else runs, as a plan counts exposed
            # communication.
            work = running[COMPUTATION] or running[UNNAMED]
            if charged := work or running[COMMUNICATION]:
                _, last = charged[0]
                result.charged[events[last].operation] += span
            else:
                result.launches += span
            if work and any(events[one].end > at for _, one in running[COMMUNICATION]):
                result.hidden += span
        elif 0 <= place < len(windows) - 1:
            if running[UNNAMED] or running[OTHERS]:
                result.other += span
            else:
                result.between += span
    return result


def _event_kinds(
    ran: set[str], module: Module, instructions: Mapping[str, tuple[str, Instruction]]
) -> dict[str, int]:
    """Return the kinds of all operations that have run."""
    kinds = {}
    for name in ran:
        _, instr = instructions.get(name, ("", None))
        kinds[name] = COMPUTATION
        if instr is None:
            continue
        if collective_kind(instr.op) or collective_kind(instr.op.removesuffix("-done")):
            kinds[name] = COMMUNICATION
        elif instr.op in CONTAINERS and not ran.isdisjoint(_names_inside(module, instr)):
            kinds[name] = CONTAINER
    return kinds


def _names_inside(module: Module, instr: Instruction) -> Iterator[str]:
    """Yield the names of all instructions that an instruction runs."""
    for called in instr.called:
        for _, inner in module.nested(called):
            yield inner.name


def _windows(events: Sequence[Event], entry: set[str]) -> list[tuple[float, float]]:
    """Return when each execution of a program began and ended.

    Outside of loops an instruction runs as often in one as in any other, so what most of them have
    run is the number of executions; what a loop runs belongs to the execution that began last.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.operation in entry:
            times[event.operation].append(event.begin)
    if not times:
        return []
    count = Counter(map(len, times.values())).most_common(1)[0][0]
    complete = [began for began in times.values() if len(began) == count]
    # XLA:CPU starts operations in any order that their data allows, so each execution may begin
    # with another operation.
    begins = [min(moments) for moments in zip(*complete, strict=True)]
    # what a loop runs may begin before any operation outside of loops
    begins[0] = events[0].begin
    ends = list(begins)
    for event in events:
        place = bisect.bisect_right(begins, event.begin) - 1
        ends[place] = max(ends[place], event.end)
    # an execution may begin before the one before it has ended
    windows = zip(begins, ends, [begins[0], *ends], strict=False)
    return [(max(begin, previous), end) for begin, end, previous in windows]


def layer_of(scope: str) -> str:
    """Return the path of a layer, forward or backward, or the part of the step, that a scope is in.

    Args:
      scope: of one instruction, as `spmd.planner.hlo.Module.scopes` has it.

    >>> (
    ...     layer_of("shard_map/transpose(jvp(blocks/0))/attention/out/dot_general"),
    ...     layer_of("shard_map/jvp(blocks/1)/jit(relu)/max"),
    ... )
    ('blocks/0/attention/out', 'blocks/1')
    >>> layer_of("shard_map/reduce_gradients/exact/0/psum"), layer_of("add")
    ('reducing gradients', 'optimizer, and the rest of the step')
    >>> layer_of("shard_map/jvp()/exp")
    'model and loss, outside of layers'
    >>> layer_of("state.params['blocks'][1]['up']['kernel']")
    'blocks/1/up'
    """
    scope = scope.partition(";")[0]  # XLA has merged several
    if scope.startswith("state.params"):  # a copy of a parameter
        names = re.findall(r"\[\\?'?([^\]'\\]+)\\?'?\]", scope)
        return "/".join(names[:-1]) or OUTSIDE
    names = [name for name in _unwrapped(scope).split("/") if name and name not in ADDED]
    # The last name of a scope is the operation's own.
    parts = [name for name in names if not FUNCTION.fullmatch(name)][:-1]
    # JAX writes jvp around the scopes of what is differentiated: the model and the loss.
    if "jvp(" in scope:
        return "/".join(parts) or OUTSIDE
    for part in parts:
        if part in PARTS:
            return PARTS[part]
    return REST


def _unwrapped(scope: str) -> str:
    """Return a scope without the names of transformations, innermost first; what they wrap stays if
    it is a path of layers.
    """
    while (match := re.search(r"\w+\(([^()]*)\)", scope)) is not None:
        inner = match[1]
        if match[0].startswith("jit(") or "->" in inner:
            inner = ""
        scope = scope[: match.start()] + inner + scope[match.end() :]
    return scope
