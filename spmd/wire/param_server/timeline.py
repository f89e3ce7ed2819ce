"""Every gradient of a stretch of the simulated clock: when it was computed, when it travelled, and what became of it."""

import dataclasses
import math

import numpy as np

from spmd.errors import OptionError
from spmd.wire.param_server.clock import Times
from spmd.wire.param_server.events import Events
from spmd.wire.param_server.schedule import Round


@dataclasses.dataclass(frozen=True, eq=False)
class Spans:
    """Gradients in the order of the clock's word on them. Arrays [gradients]; times are simulated seconds from 0.

    Attributes:
      worker: whose it is.
      began, done: the worker computed from then to then; a spare that is late only until the next round begins.
      pushed, time: from then to then it stood in line for a link and travelled; in a synchronous round, and at a meeting, all that the
        network takes.
      arrived: False: still under way when the account ends, and so neither applied nor dropped.
      applied: whether it became part of an update.
      commit: whether the update was made when it arrived; of workers who train by themselves, the last before each meeting.
      staleness: versions between reading and arriving; -1 where none is told.
      sends, receives: which share of all parameters travelled to the servers with it, and from them: before it where gradients arrive one
        by one, else after it.
    """

    worker: np.ndarray
    began: np.ndarray
    done: np.ndarray
    pushed: np.ndarray
    time: np.ndarray
    arrived: np.ndarray
    applied: np.ndarray
    commit: np.ndarray
    staleness: np.ndarray
    sends: np.ndarray
    receives: np.ndarray


class Known(Times):
    """The times of an account's gradients: of each worker those that arrive and the next one. What comes later never ends."""

    def __init__(self, events: Events, last: np.ndarray):
        super().__init__(events.declared.compute_time, events.workers, events.declared.seed)
        self._last = last

    @property
    def length(self) -> int | None:
        """There is always a next gradient."""
        return None

    def of(self, worker: int, number: int) -> float:
        """Seconds; without end after the account's, and after a trace's."""
        rows = super().length
        late = number > self._last[worker] or (rows is not None and number >= rows)
        return math.inf if late else super().of(worker, number)


def spans(events: Events, steps: int) -> tuple[float, Spans]:
    """How many seconds the first rounds take, and their gradients. The clock is asked anew: what a run remembers of its own stays.

    Raises:
      OptionError: no number of steps, or a trace of times that ends before.
    """
    check_number("steps", steps)
    declared, workers = events.declared, events.workers
    clock, counts, end = Events(declared, workers, events.sent), np.zeros(workers, np.int64), 0.0
    for step in range(steps):
        counts += clock.round(step).takes
        end = clock.round(step).end
    # who is under way at the end arrives rounds later: time goes on, but nobody begins another gradient
    last = counts if declared.asynchronous else np.full(workers, steps)
    clock, reader, step, now = Events(declared, workers, events.sent, Known(events, last)), _Reader(declared.asynchronous, workers), 0, 0.0
    while math.isfinite(now) and (reader.number <= counts).any():
        now, step = reader.take(clock.round(step)), step + 1
    return end, reader.spans(counts)


class _Reader:
    """Rounds, one after another, as columns over gradients."""

    def __init__(self, late: bool, workers: int):
        self.late = late  # whether gradients arrive one by one
        self.number, self.fetched = np.zeros(workers, np.int64), np.zeros(workers, bool)
        self.columns: dict[str, list[np.ndarray]] = {}

    def take(self, found: Round) -> float:
        """One more round. Returns its end."""
        count = int(found.takes.sum())
        worker, at, whole = found.worker[:count], np.arange(count), np.ones(count)
        rows = {name: getattr(found, name)[:count] for name in ("worker", "began", "done", "time", "applied", "commit", "staleness")}
        rows |= {"number": self.number[worker], "pushed": rows["done"], "sends": whole, "receives": whole}
        if self.late:
            read = found.reads.cumsum(axis=0)  # row r is told before event r
            rows["receives"] = np.where(self.fetched[worker] | (read[at, worker] > 0), 1.0, 0.0)
            self.fetched |= read[-1] > 0
            self.fetched[worker] = read[-1, worker] > read[at, worker]
        else:  # the network is busy when the last of those who are waited for is done
            rows["pushed"], rows["time"] = np.full(count, rows["time"][rows["applied"]].max()), np.full(count, found.end)
            if len(found.sends):
                rows |= {"sends": whole * found.sends.mean(), "receives": whole * found.receives.mean()}
                rows["commit"] = found.sends.any() & (at == count - 1)
        self.number[worker] += 1
        for name, part in rows.items():
            self.columns.setdefault(name, []).append(part)
        return found.end

    def spans(self, counts: np.ndarray) -> Spans:
        """Of every worker so many gradients, which arrive, and the next one."""
        told = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        told = {name: part[(told["number"] <= counts[told["worker"]]) & np.isfinite(told["done"])] for name, part in told.items()}
        worker, number = told["worker"], told.pop("number")
        order = np.lexsort((number, worker))
        again = np.full(len(order), np.inf)  # when its worker begins the next one
        again[order[:-1]] = np.where(np.diff(worker[order]) == 0, told["began"][order[1:]], np.inf)
        told["done"] = np.minimum(told["done"], again)
        told["time"] = np.maximum(told["done"], np.minimum(told["time"], again))
        told["pushed"] = np.clip(told["pushed"], told["done"], told["time"])
        arrived = number < counts[worker]
        return Spans(arrived=arrived, **told | {"applied": told["applied"] & arrived, "commit": told["commit"] & arrived})


def check_number(name: str, value: object) -> None:
    """Whether it is a whole number from 1.

    Raises:
      OptionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}: a whole number from 1.")
