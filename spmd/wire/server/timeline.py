"""A timeline of simulated gradients: when each was computed and sent, and whether it was
applied.
"""

import dataclasses
import math

import numpy as np

from spmd.errors import OptionError
from spmd.wire.server.events import Events
from spmd.wire.server.schedule import Round
from spmd.wire.server.times import Times


@dataclasses.dataclass(frozen=True, eq=False)
class GradientSpans:
    """Gradients in the order of simulation. Arrays [gradients]; times are simulated seconds from 0.

    Attributes:
      worker: its worker.
      began, done: begin and end of its computation; that of a late spare ends when the next round
        begins.
      queued, time: begin and end of queueing for a link and being sent; in a synchronous round, and
        in a synchronization, the time of all transfers.
      arrived: False: still in progress at the end, so neither applied nor dropped.
      applied: whether it is part of an update.
      commit: whether the update was applied when it arrived; for local SGD, the last one before
        each synchronization.
      staleness: versions between read and arrival; -1 if unknown.
      sends, receives: the share of all parameters that was sent to the servers with it, and
        received from them: before it if gradients arrive one by one, else after it.
    """

    worker: np.ndarray
    began: np.ndarray
    done: np.ndarray
    queued: np.ndarray
    time: np.ndarray
    arrived: np.ndarray
    applied: np.ndarray
    commit: np.ndarray
    staleness: np.ndarray
    sends: np.ndarray
    receives: np.ndarray


class TruncatedTimes(Times):
    """The times of the simulated gradients: for each worker those that arrive and the next one.
    Later ones never end.
    """

    def __init__(self, events: Events, last: np.ndarray):
        super().__init__(events.declared.compute_time, events.workers, events.declared.seed)
        self._last = last

    @property
    def length(self) -> int | None:
        """Unlimited."""
        return None

    def of(self, worker: int, number: int) -> float:
        """Seconds; infinite past the last gradient, and past the end of a trace."""
        rows = super().length
        late = number > self._last[worker] or (rows is not None and number >= rows)
        return math.inf if late else super().of(worker, number)


def spans(events: Events, steps: int) -> tuple[float, GradientSpans]:
    """The seconds that the first rounds take, and their gradients. Simulates them again; the events
    of a run stay unchanged.

    Raises:
      OptionError: `steps` is not a number from 1, or a trace of times ends too early.
    """
    check_number("steps", steps)
    declared, workers = events.declared, events.workers
    clock, counts, end = Events(declared, workers, events.sent), np.zeros(workers, np.int64), 0.0
    for step in range(steps):
        counts += clock.round(step).takes
        end = clock.round(step).end
    # gradients in progress at the end arrive in later rounds: time continues, but no worker begins
    # another gradient
    last = counts if declared.asynchronous else np.full(workers, steps)
    clock = Events(declared, workers, events.sent, TruncatedTimes(events, last))
    reader, step, now = _Reader(declared.asynchronous, workers), 0, 0.0
    while math.isfinite(now) and (reader.number <= counts).any():
        now, step = reader.add(clock.round(step)), step + 1
    return end, reader.spans(counts)


class _Reader:
    """Collects rounds as columns over gradients."""

    def __init__(self, asynchronous: bool, workers: int):
        self.asynchronous = asynchronous  # gradients arrive one by one
        self.number, self.fetched = np.zeros(workers, np.int64), np.zeros(workers, bool)
        self.columns: dict[str, list[np.ndarray]] = {}

    def add(self, new_round: Round) -> float:
        """Add a round; returns its end."""
        count = int(new_round.takes.sum())
        worker, index, ones = new_round.worker[:count], np.arange(count), np.ones(count)
        rows = {
            name: getattr(new_round, name)[:count]
            for name in ("worker", "began", "done", "time", "applied", "commit", "staleness")
        }
        rows |= {
            "number": self.number[worker],
            "queued": rows["done"],
            "sends": ones,
            "receives": ones,
        }
        if self.asynchronous:
            read = new_round.reads.cumsum(axis=0)  # row r: reads before event r
            rows["receives"] = np.where(self.fetched[worker] | (read[index, worker] > 0), 1.0, 0.0)
            self.fetched |= read[-1] > 0
            self.fetched[worker] = read[-1, worker] > read[index, worker]
        else:  # the network is used when the last awaited worker is done
            rows["queued"] = np.full(count, rows["time"][rows["applied"]].max())
            rows["time"] = np.full(count, new_round.end)
            if len(new_round.sends):
                rows |= {
                    "sends": ones * new_round.sends.mean(),
                    "receives": ones * new_round.receives.mean(),
                }
                rows["commit"] = new_round.sends.any() & (index == count - 1)
        self.number[worker] += 1
        for name, part in rows.items():
            self.columns.setdefault(name, []).append(part)
        return new_round.end

    def spans(self, counts: np.ndarray) -> GradientSpans:
        """The first `counts` gradients of each worker, which arrive, and its next one."""
        columns = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        columns = {
            name: part[
                (columns["number"] <= counts[columns["worker"]]) & np.isfinite(columns["done"])
            ]
            for name, part in columns.items()
        }
        worker, number = columns["worker"], columns.pop("number")
        order = np.lexsort((number, worker))
        next_began = np.full(len(order), np.inf)  # when its worker begins the next gradient
        next_began[order[:-1]] = np.where(
            np.diff(worker[order]) == 0, columns["began"][order[1:]], np.inf
        )
        columns["done"] = np.minimum(columns["done"], next_began)
        columns["time"] = np.maximum(columns["done"], np.minimum(columns["time"], next_began))
        columns["queued"] = np.clip(columns["queued"], columns["done"], columns["time"])
        arrived = number < counts[worker]
        return GradientSpans(
            arrived=arrived,
            **columns
            | {"applied": columns["applied"] & arrived, "commit": columns["commit"] & arrived},
        )


def check_number(name: str, value: object) -> None:
    """Check that `value` is an integer from 1.

    Raises:
      OptionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}.", fix="a whole number from 1.")
