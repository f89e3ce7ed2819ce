"""Reads the operations of a trace by `jax.profiler`: which instruction of which program ran on
which device, and when.

On a CPU the threads of XLA have an event for each operation. An operation that continues in other
threads has a second event where it ends. On a GPU each device has a plane, and each of its streams
a line of kernels; XLA annotates them with the instruction.
"""

import dataclasses
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

NO_PROGRAM = ("", 0)
# of a copy on a GPU; one without an instruction, such as that of the next batch, is no part of a
# program
COPY = "memcpy_details"
# in the name of the event at which an operation of a CPU ends, which its `_c` connects with the
# `_p` of its first event
END = "end: "


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
    """The operations in a file that `jax.profiler` has written, `NAME.xplane.pb`, in the order in
    which they began.
    """
    with warnings.catch_warnings():
        # of Python 3.13, about a type of jaxlib's
        warnings.simplefilter("ignore", DeprecationWarning)
        return events_of(ProfileData.from_file(str(path)))


def events_of(trace: Any) -> list[Event]:
    """The operations of `jax.profiler.ProfileData`, or what has the same attributes."""
    events = [event for plane in trace.planes for event in _of_plane(plane)]
    return sorted(events, key=lambda event: (event.begin, event.end))


def _of_plane(plane: Any) -> Iterator[Event]:
    if gpu := re.fullmatch(r"/device:GPU:(\d+)", plane.name):
        for event in (
            event
            for line in plane.lines
            if line.name.startswith("Stream #")
            for event in line.events
        ):
            stats = dict(event.stats)
            if "hlo_op" in stats or COPY not in stats:
                yield _event(event, stats, int(gpu[1]), event.end_ns)
    elif plane.name.startswith("/host:CPU"):
        begun, ends = [], defaultdict[Any, float](float)
        for event in (event for line in plane.lines for event in line.events):
            if event.name.startswith(END):
                ends[dict(event.stats).get("_c")] = event.start_ns
            elif "hlo_op" in (stats := dict(event.stats)):
                begun.append((event, stats))
        for event, stats in begun:
            yield _event(
                event,
                stats,
                int(stats.get("device_ordinal", 0)),
                max(event.end_ns, ends[stats.get("_p")]),
            )


def _event(event: Any, stats: dict[str, Any], device: int, end: float) -> Event:
    program = str(stats.get("hlo_module", "")), int(stats.get("program_id", 0))
    operation = str(stats["hlo_op"]).rpartition("/")[2] if "hlo_op" in stats else ""
    return Event(device, program, operation, event.start_ns * 1e-9, end * 1e-9)


def module_number(module: bytes) -> int:
    """The number that a trace gives a program, from its serialized `HloModuleProto`: field 5, its
    `id`; 0 if it has none.

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
        at += size if key & 7 == 2 else 0
    return 0


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number in the format of protocol buffers, seven bits in a byte, and where it ends."""
    value = shift = 0
    while message[at] & 0x80:
        value, at, shift = value | (message[at] & 0x7F) << shift, at + 1, shift + 7
    return value | message[at] << shift, at + 1
