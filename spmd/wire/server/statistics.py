"""Statistics of a simulated run: computing and waiting of each worker, bytes sent, and gradients
dropped.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from spmd.base.deprecated import warn
from spmd.base.tree import format_bytes
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.events import Events
from spmd.wire.server.timeline import GradientSpans, spans
from spmd.wire.server.timing import Network

MAX_ROWS = 10  # printed workers; of more, those that compute least and most


@dataclasses.dataclass(frozen=True, eq=False)
class ServerStatistics:
    """Totals over the first steps of a parameter server's clock; prints as a table. Times are
    simulated seconds, arrays by worker.

    A step is a round: a synchronous update, or as many gradients as can be computed concurrently.
    All servers behave alike: the figures of a link hold for the link of each server.

    Attributes:
      declared: the parameter server.
      workers: number of workers.
      sent: bytes that a worker sends to one server with a gradient, and receives from it.
      steps: number of steps.
      seconds: their total time.
      spans: every gradient, including those in progress at the end.

    Example:
      >>> stats = ServerStatistics.of(
      ...     Events(ParameterServer(spares=1, compute_time=(1.0, 2.0, 4.0)), workers=3), steps=10
      ... )
      >>> stats.seconds, stats.idle_seconds.tolist(), stats.dropped.tolist(), stats.drop_bias
      (20.0, [10.0, 0.0, 0.0], [0, 0, 10], 3.0)
    """

    declared: ParameterServer
    workers: int
    sent: tuple[float, float]
    steps: int
    seconds: float
    spans: GradientSpans

    @classmethod
    def of(cls, events: Events, steps: int) -> "ServerStatistics":
        """The statistics of a clock's first steps. They are simulated again, so a run that uses the
        clock is not affected.

        Raises:
          OptionError: `steps` is not a number from 1, or a trace of times ends too early.
        """
        return cls(events.declared, events.workers, events.sent, steps, *spans(events, steps))

    # time -----------------------------------------------------------------------------------------

    @property
    def seconds_per_step(self) -> float:
        """Mean time of a step."""
        return self.seconds / self.steps

    @property
    def compute_seconds(self) -> np.ndarray:
        """Seconds of computing gradients, including those that are dropped or in progress at the
        end.
        """
        return self._seconds(self.spans.began, self.spans.done)

    @property
    def wasted_seconds(self) -> np.ndarray:
        """Seconds of computing gradients that were dropped."""
        return self._seconds(
            self.spans.began, self.spans.done, self.spans.arrived & ~self.spans.applied
        )

    @property
    def send_seconds(self) -> np.ndarray:
        """Seconds in which gradients queued for a link and were sent; in a synchronous round or
        synchronization, parameters too.
        """
        return self._seconds(self.spans.queued, self.spans.time)

    @property
    def push_seconds(self) -> np.ndarray:
        """The former name of `send_seconds`."""
        warn("push_seconds", "send_seconds")
        return self.send_seconds

    @property
    def idle_seconds(self) -> np.ndarray:
        """Seconds without computing: waiting for other workers, links or parameters."""
        return self.seconds - self.compute_seconds

    @property
    def idle_share(self) -> np.ndarray:
        """The share of time without computing."""
        return self._share(self.idle_seconds)

    def _share(self, seconds: np.ndarray) -> np.ndarray:
        """Return shares of the total time, by worker; zeros before any time has passed."""
        if not self.seconds:
            return np.zeros(self.workers)
        return seconds / self.seconds

    def _seconds(
        self, start: np.ndarray, end: np.ndarray, which: np.ndarray | bool = True
    ) -> np.ndarray:
        return self._by_worker(np.where(which, self._within(start, end), 0.0))

    def _within(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        return np.minimum(end, self.seconds) - np.minimum(start, self.seconds)

    def _by_worker(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.spans.worker, values, self.workers)

    # gradients ------------------------------------------------------------------------------------

    @property
    def arrived(self) -> np.ndarray:
        """Gradients that arrived and were applied or dropped, including those of spares."""
        return self._by_worker(self.spans.arrived).astype(int)

    @property
    def applied(self) -> np.ndarray:
        """Gradients that are part of an update."""
        return self._by_worker(self.spans.applied).astype(int)

    @property
    def dropped(self) -> np.ndarray:
        """Gradients that came too late; the model does not learn from their rows."""
        return self.arrived - self.applied

    @property
    def drop_bias(self) -> float:
        """The largest dropped share of a worker's gradients, over the mean of these shares.

        1: all workers lose an equal share, or none; `workers`: all dropped gradients are of one
        worker. A worker that loses more than others has less influence. If its rows differ (long
        sentences, one hospital's), the model learns less from them.
        """
        has_arrived = self.arrived > 0
        shares = self.dropped[has_arrived] / self.arrived[has_arrived]
        if not shares.any():
            return 1.0
        return float(shares.max() / shares.mean())

    @property
    def staleness(self) -> np.ndarray:
        """Number of arrived gradients by staleness: [k] used parameters that were k versions
        old.
        """
        staleness = self.spans.staleness[self.spans.arrived]
        return np.bincount(staleness[staleness >= 0], minlength=1)

    @property
    def updates(self) -> int:
        """Updates that the servers have applied; for local SGD, synchronizations."""
        return int(self.spans.commit.sum())

    @property
    def gradients_per_update(self) -> float:
        """The effective batch, in gradients; nan before the first update. Gradients of an
        incomplete update do not count.
        """
        updates = np.flatnonzero(self.spans.commit)
        if not len(updates):
            return math.nan
        return self.spans.applied[: updates[-1] + 1].sum() / len(updates)

    # links ----------------------------------------------------------------------------------------

    @property
    def link_bytes(self) -> tuple[float, float]:
        """Bytes that a server has received over its link, and sent."""
        arrived = self.spans.arrived
        sent = arrived
        if self.declared.asynchronous:
            sent = self.spans.began - self._network.latency <= self.seconds
        received_parameters = float(self.spans.sends[arrived].sum())
        sent_parameters = float(self.spans.receives[sent].sum())
        return self.sent[0] * received_parameters, self.sent[1] * sent_parameters

    @property
    def link_busy(self) -> tuple[float, float]:
        """The share of the time in which a server's link is busy inwards, and outwards."""
        if not self.seconds:
            return 0.0, 0.0
        bandwidth = self._network.bandwidth
        if not self.declared.asynchronous:
            inwards, outwards = (count / bandwidth for count in self.link_bytes)
        else:
            # one transfer at a time; the end may fall within one
            send, receive = (count / bandwidth for count in self.sent)
            spans = self.spans
            left = spans.began[spans.receives > 0] - self._network.latency
            inwards = self._within(spans.time - send, spans.time).sum()
            outwards = self._within(left - receive, left).sum()
        return float(inwards / self.seconds), float(outwards / self.seconds)

    @property
    def _network(self) -> Network:
        return Network.parse(self.declared.network)

    def __str__(self) -> str:
        arrived = int(self.arrived.sum())
        applied = int(self.applied.sum())
        counts = self.staleness
        mean_staleness = counts @ np.arange(len(counts)) / max(counts.sum(), 1)
        time = f"{self.seconds:,.4g} s, {self.seconds_per_step:.4g} s a step"
        if self.seconds:
            time += f"; {applied / self.seconds:,.4g} gradients applied per second"
        gradients = f"{arrived:,} arrived, {applied:,} applied"
        if applied < arrived:
            dropped = arrived - applied
            share = 1 - applied / arrived
            gradients += f", {dropped:,} dropped ({share:.1%}; bias {self.drop_bias:.2f})"
        updates = f"{self.updates:,}"
        if self.updates:
            updates += f", of {self.gradients_per_update:.4g} gradients each"
        directions = zip(("inwards", "outwards"), self.link_bytes, self.link_busy, strict=True)
        links = [
            f"{format_bytes(count)} {direction}, busy {busy:.1%}"
            for direction, count, busy in directions
        ]
        lines = [
            f"{self.declared.mode}, {self.workers} workers, {self.steps:,} steps",
            f"time       {time}",
            f"gradients  {gradients}",
            f"updates    {updates}",
            f"staleness  mean {mean_staleness:.2f}, largest {len(counts) - 1}",
            f"each link  {'; '.join(links)}",
        ]
        return "\n".join([*lines, "", *self._table()])

    __repr__ = __str__

    def _table(self) -> list[str]:
        """Shares of the time, by worker."""
        computing = self.compute_seconds
        sending = self.send_seconds
        waiting = self.idle_seconds - sending
        seconds = (computing, self.wasted_seconds, sending, waiting)
        shares = [self._share(part) for part in seconds]
        order = np.arange(self.workers)
        left_out = []
        if self.workers > MAX_ROWS:
            ends = [*range(MAX_ROWS // 2), *range(-MAX_ROWS // 2, 0)]
            order = np.argsort(computing, kind="stable")[ends]
            left_out.append(
                f"{'...':>6}  {self.workers - MAX_ROWS} workers that compute more than those above "
                "and less than those below"
            )
        lines = []
        for worker in order:
            counts = (f"{self.arrived[worker]:,}", f"{self.dropped[worker]:,}")
            lines.append(_row(worker, [share[worker] for share in shares], counts))
        mean_counts = (f"{self.arrived.mean():,.1f}", f"{self.dropped.mean():,.1f}")
        mean = _row("mean", [share.mean() for share in shares], mean_counts)
        names = ("computing", "wasted", "sending", "waiting", "arrived", "dropped")
        header = "worker" + "".join(f"{name:>11}" for name in names)
        return [header, *lines[: MAX_ROWS // 2], *left_out, *lines[MAX_ROWS // 2 :], mean]


def _row(name: object, shares: Sequence[float], counts: Sequence[str]) -> str:
    """Return a line of the table: shares as percentages, and counts."""
    cells = [f"{share:>11.1%}" for share in shares]
    cells += [f"{count:>11}" for count in counts]
    return f"{name:>6}" + "".join(cells)
