"""A timeline of simulated gradients: when each was computed and sent, and whether it was
applied.
"""

import dataclasses
import math

import numpy as np

from spmd.errors import OptionError
from spmd.wire.server.events import Events
from spmd.wire.server.schedule import Round
from spmd.wire.server.timing import Times


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
        if number > self._last[worker] or (rows is not None and number >= rows):
            return math.inf
        return super().of(worker, number)


def spans(events: Events, steps: int) -> tuple[float, GradientSpans]:
    """The seconds that the first rounds take, and their gradients. Simulates them again; the events
    of a run stay unchanged.

    Raises:
      OptionError: `steps` is not a number from 1, or a trace of times ends too early.
    """
    check_number("steps", steps)
    declared = events.declared
    workers = events.workers
    clock = Events(declared, workers, events.sent)
    counts = np.zeros(workers, np.int64)
    end = 0.0
    for step in range(steps):
        counts += clock.round(step).takes
        end = clock.round(step).end
    # gradients in progress at the end arrive in later rounds: time continues, but no worker begins
    # another gradient
    last = np.full(workers, steps)
    if declared.asynchronous:
        last = counts
    clock = Events(declared, workers, events.sent, TruncatedTimes(events, last))
    reader = _Reader(declared.asynchronous, workers)
    step = 0
    now = 0.0
    while math.isfinite(now) and (reader.number <= counts).any():
        now = reader.add(clock.round(step))
        step += 1
    return end, reader.spans(counts)


class _Reader:
    """Collects rounds as columns over gradients."""

    def __init__(self, asynchronous: bool, workers: int):
        self.asynchronous = asynchronous  # gradients arrive one by one
        self.number = np.zeros(workers, np.int64)
        self.fetched = np.zeros(workers, bool)
        self.columns: dict[str, list[np.ndarray]] = {}

    def add(self, new_round: Round) -> float:
        """Add a round; returns its end."""
        count = int(new_round.takes.sum())
        worker = new_round.worker[:count]
        columns = {name: getattr(new_round, name)[:count] for name in OF_ROUND}
        columns["number"] = self.number[worker]
        columns["queued"] = columns["done"]
        columns["sends"] = np.ones(count)
        columns["receives"] = np.ones(count)
        if self.asynchronous:
            columns["receives"] = self._fetches(new_round, worker)
        else:
            # the network is used when the last awaited worker is done
            columns["queued"] = np.full(count, columns["time"][columns["applied"]].max())
            columns["time"] = np.full(count, new_round.end)
            if len(new_round.sends):
                columns["sends"] = np.full(count, new_round.sends.mean())
                columns["receives"] = np.full(count, new_round.receives.mean())
                columns["commit"] = new_round.sends.any() & (np.arange(count) == count - 1)
        self.number[worker] += 1
        for name, part in columns.items():
            self.columns.setdefault(name, []).append(part)
        return new_round.end

    def _fetches(self, new_round: Round, worker: np.ndarray) -> np.ndarray:
        """Return 1 for each gradient before which its worker fetched parameters, 0 for others; and
        record which workers have fetched since their newest gradient.
        """
        index = np.arange(len(worker))
        reads = new_round.reads.cumsum(axis=0)  # row r: reads before event r
        before = reads[index, worker]
        fetches = np.where(self.fetched[worker] | (before > 0), 1.0, 0.0)
        self.fetched |= reads[-1] > 0
        self.fetched[worker] = reads[-1, worker] > before
        return fetches

    def spans(self, counts: np.ndarray) -> GradientSpans:
        """The first `counts` gradients of each worker, which arrive, and its next one."""
        columns = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        is_counted = columns["number"] <= counts[columns["worker"]]
        ends = np.isfinite(columns["done"])
        columns = {name: part[is_counted & ends] for name, part in columns.items()}
        worker = columns["worker"]
        number = columns.pop("number")
        # numpy sorts by the last key first: by worker, and then by number.
        order = np.lexsort((number, worker))
        same_worker = np.diff(worker[order]) == 0
        # When the worker of each gradient begins its next one.
        next_began = np.full(len(order), np.inf)
        next_began[order[:-1]] = np.where(same_worker, columns["began"][order[1:]], np.inf)
        columns["done"] = np.minimum(columns["done"], next_began)
        columns["time"] = np.maximum(columns["done"], np.minimum(columns["time"], next_began))
        columns["queued"] = np.clip(columns["queued"], columns["done"], columns["time"])
        columns["arrived"] = number < counts[worker]
        columns["applied"] = columns["applied"] & columns["arrived"]
        columns["commit"] = columns["commit"] & columns["arrived"]
        return GradientSpans(**columns)


# columns of a `Round`
OF_ROUND = ("worker", "began", "done", "time", "applied", "commit", "staleness")


def check_number(name: str, value: object) -> None:
    """Check that `value` is an integer from 1.

    Raises:
      OptionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}.", fix="a whole number from 1.")
