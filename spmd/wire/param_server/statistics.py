"""What the simulated clock says of a run: who computed, who waited, what travelled, and what was dropped."""

import dataclasses
import math

import numpy as np

from spmd.layout.server import ParameterServer
from spmd.layout.timing import Network
from spmd.tree import format_bytes
from spmd.wire.param_server.events import Events
from spmd.wire.param_server.timeline import Spans, spans

SHOWN = 10  # workers of a printed account; of more, those who compute least and most


@dataclasses.dataclass(frozen=True, eq=False)
class ServerStatistics:
    """The first steps of a parameter server's clock, added up; printed, a table. Times are simulated seconds, arrays are by worker.

    A step is a round: a synchronous update, or as many gradients as can be computed at once. Servers work alike: what is said of a link is
    so of each server's.

    Attributes:
      declared: the parameter server.
      workers: how many there are.
      sent: bytes that a worker sends to one server with a gradient, and gets from it.
      steps: how many.
      seconds: what they take together.
      spans: every gradient, those that are under way at the end too.

    Example:
      >>> told = ServerStatistics.of(Events(ParameterServer(spares=1, compute_time=(1.0, 2.0, 4.0)), workers=3), steps=10)
      >>> told.seconds, told.idle_seconds.tolist(), told.dropped.tolist(), told.drop_bias
      (20.0, [10.0, 0.0, 0.0], [0, 0, 10], 3.0)
    """

    declared: ParameterServer
    workers: int
    sent: tuple[float, float]
    steps: int
    seconds: float
    spans: Spans

    @classmethod
    def of(cls, events: Events, steps: int) -> "ServerStatistics":
        """The account of a clock's first steps. The clock is simulated anew, and nothing is asked of a run that uses it.

        Raises:
          OptionError: no number of steps, or a trace of times that ends before.
        """
        return cls(events.declared, events.workers, events.sent, steps, *spans(events, steps))

    # time --------------------------------------------------------------------------------------------------------------

    @property
    def seconds_per_step(self) -> float:
        """The mean."""
        return self.seconds / self.steps

    @property
    def compute_seconds(self) -> np.ndarray:
        """Seconds of computing gradients, those that are dropped or under way at the end included."""
        return self._seconds(self.spans.began, self.spans.done)

    @property
    def wasted_seconds(self) -> np.ndarray:
        """Seconds of computing gradients that were dropped."""
        return self._seconds(self.spans.began, self.spans.done, self.spans.arrived & ~self.spans.applied)

    @property
    def push_seconds(self) -> np.ndarray:
        """Seconds in which gradients stood in line for a link and travelled; in a synchronous round, and at a meeting, the weights too."""
        return self._seconds(self.spans.pushed, self.spans.time)

    @property
    def idle_seconds(self) -> np.ndarray:
        """Seconds without computing: waiting for other workers, for links, for weights."""
        return self.seconds - self.compute_seconds

    @property
    def idle_share(self) -> np.ndarray:
        """The share of all seconds without computing."""
        return self.idle_seconds / self.seconds if self.seconds else np.zeros(self.workers)

    def _seconds(self, start: np.ndarray, end: np.ndarray, which: np.ndarray | bool = True) -> np.ndarray:
        return self._by_worker(np.where(which, self._within(start, end), 0.0))

    def _within(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        return np.minimum(end, self.seconds) - np.minimum(start, self.seconds)

    def _by_worker(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.spans.worker, values, self.workers)

    # what became of gradients ------------------------------------------------------------------------------------------

    @property
    def arrived(self) -> np.ndarray:
        """Gradients that came to be applied or dropped; spares' too."""
        return self._by_worker(self.spans.arrived).astype(int)

    @property
    def applied(self) -> np.ndarray:
        """Gradients that became part of an update."""
        return self._by_worker(self.spans.applied).astype(int)

    @property
    def dropped(self) -> np.ndarray:
        """Gradients that came too late. What their rows would have taught is lost."""
        return self.arrived - self.applied

    @property
    def drop_bias(self) -> float:
        """The largest share that a worker has dropped, over the mean of workers' shares.

        1: all are dropped alike, or nothing is; `workers`: one bears it all. The rows of a worker that is dropped more often than others
        count for less. If those are other rows (long sentences, one hospital's), the model learns less of them.
        """
        here = self.arrived > 0
        shares = self.dropped[here] / self.arrived[here]
        return float(shares.max() / shares.mean()) if shares.any() else 1.0

    @property
    def staleness(self) -> np.ndarray:
        """Gradients that arrived, by how many versions old their weights were: [0] of the newest version, and so on."""
        told = self.spans.staleness[self.spans.arrived]
        return np.bincount(told[told >= 0], minlength=1)

    @property
    def updates(self) -> int:
        """Versions that the servers have made; of workers who train by themselves, meetings."""
        return int(self.spans.commit.sum())

    @property
    def gradients_per_update(self) -> float:
        """The effective batch, in gradients; nan before the first update. What the next one has gathered so far is not in it."""
        made = np.flatnonzero(self.spans.commit)
        return self.spans.applied[: made[-1] + 1].sum() / len(made) if len(made) else math.nan

    # links -------------------------------------------------------------------------------------------------------------

    @property
    def link_bytes(self) -> tuple[float, float]:
        """Bytes that a server's link has carried to it, and away from it."""
        here = self.spans.arrived
        sent = here if not self.declared.asynchronous else self.spans.began - self._network.latency <= self.seconds
        return self.sent[0] * float(self.spans.sends[here].sum()), self.sent[1] * float(self.spans.receives[sent].sum())

    @property
    def link_busy(self) -> tuple[float, float]:
        """The share of the time in which a server's link carries something to it, and away from it."""
        if not self.seconds:
            return 0.0, 0.0
        seconds = tuple(count / self._network.bandwidth for count in self.link_bytes)
        if self.declared.asynchronous:  # one after another, and what the end cuts in two is known
            push, pull = (count / self._network.bandwidth for count in self.sent)
            fetched = self.spans.receives > 0
            left = self.spans.began[fetched] - self._network.latency
            seconds = self._within(self.spans.time - push, self.spans.time).sum(), self._within(left - pull, left).sum()
        return float(seconds[0] / self.seconds), float(seconds[1] / self.seconds)

    @property
    def _network(self) -> Network:
        return Network.parse(self.declared.network)

    def __str__(self) -> str:
        arrived, applied, late = int(self.arrived.sum()), int(self.applied.sum()), self.staleness
        rate = f"; {applied / self.seconds:,.4g} gradients applied per second" if self.seconds else ""
        dropped = f", {arrived - applied:,} dropped ({1 - applied / arrived:.1%}; bias {self.drop_bias:.2f})" if applied < arrived else ""
        each = f", of {self.gradients_per_update:.4g} gradients each" if self.updates else ""
        link = zip(("inwards", "outwards"), self.link_bytes, self.link_busy, strict=True)
        lines = [
            f"{self.declared.mode}, {self.workers} workers, {self.steps:,} steps",
            f"time       {self.seconds:,.4g} s, {self.seconds_per_step:.4g} s a step{rate}",
            f"gradients  {arrived:,} arrived, {applied:,} applied{dropped}",
            f"updates    {self.updates:,}{each}",
            f"staleness  mean {late @ np.arange(len(late)) / max(late.sum(), 1):.2f}, largest {len(late) - 1}",
            f"each link  {'; '.join(f'{format_bytes(count)} {way}, busy {busy:.1%}' for way, count, busy in link)}",
        ]
        return "\n".join([*lines, "", *self._table()])

    __repr__ = __str__

    def _table(self) -> list[str]:
        """Shares of the time, by worker."""
        seconds = (self.compute_seconds, self.wasted_seconds, self.push_seconds, self.idle_seconds - self.push_seconds)
        shares = [part / self.seconds if self.seconds else np.zeros(self.workers) for part in seconds]
        row = lambda name, parts, counts: f"{name:>6}" + "".join(f"{part:>11.1%}" for part in parts) + "".join(counts)
        one = lambda n: row(n, [part[n] for part in shares], [f"{self.arrived[n]:>11,}", f"{self.dropped[n]:>11,}"])
        order, left = np.arange(self.workers), []
        if self.workers > SHOWN:
            order = np.argsort(seconds[0], kind="stable")[[*range(SHOWN // 2), *range(-SHOWN // 2, 0)]]
            left = [f"{'...':>6}  {self.workers - SHOWN} workers that compute more than those above and less than those below"]
        lines = [one(n) for n in order]
        mean = row("mean", [part.mean() for part in shares], [f"{part.mean():>11,.1f}" for part in (self.arrived, self.dropped)])
        header = "worker" + "".join(f"{name:>11}" for name in ("computing", "wasted", "pushing", "waiting", "arrived", "dropped"))
        return [header, *lines[: SHOWN // 2], *left, *lines[SHOWN // 2 :], mean]
