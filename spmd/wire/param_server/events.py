"""The simulated clock's word on every step: what goes into the compiled step as data, and what is told of it."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmd.errors import OptionError
from spmd.layout.server import ParameterServer
from spmd.layout.timing import Network
from spmd.wire.param_server.clock import Times
from spmd.wire.param_server.schedule import Asynchronous, Round, synchronous
from spmd.wire.param_server.sync_schedule import sync_steps

KEPT = 4096  # rounds that are remembered, of few workers; an earlier one is simulated again from the start
MOST = 2**14  # asynchronous workers
ROOM = 2**26  # bytes, about, for those of many


class Events:
    """The rounds of a run, by the number of the step. The same declaration gives the same rounds, whenever they are asked for.

    Args:
      declared: the layout's `[parameter_server]`.
      workers: how many are simulated.
      sent: bytes that a worker sends to one server, and gets from it.
      times: seconds that gradients take; None: as declared.

    Example:
      >>> events = Events(ParameterServer(spares=1, compute_time=(3.0, 1.0, 2.0)), workers=3)
      >>> events.step_inputs(0)["present"].tolist(), events.metrics(0)
      ([False, True, True], {'simulated_seconds': 2.0, 'idle_share': 0.16666666666666663})
    """

    def __init__(self, declared: ParameterServer, workers: int, sent: tuple[float, float] = (0.0, 0.0), times: Times | None = None):
        self.declared, self.workers, self.sent = declared, workers, sent
        if declared.asynchronous and workers > MOST:
            raise OptionError(f"[parameter_server] {workers} workers: a round is a table of workers by workers.", fix=f"at most {MOST}.")
        self._network = Network.parse(declared.network)
        self._times = Times(declared.compute_time, workers, declared.seed) if times is None else times
        self._coming: Iterator[Round] = iter(())
        self._first, self._rounds, self._busy, self._lock = 0, [], [], threading.Lock()
        self._kept_rounds = max(16, min(KEPT, ROOM // workers**2))
        self._restart()

    def _restart(self) -> None:
        self._coming = rounds(self.declared, self.workers, self._times, self._network, self.sent)
        self._first, self._rounds, self._busy = 0, [], []

    @property
    def steps(self) -> int | None:
        """How many steps a trace lasts for certain; None without an end."""
        return self._times.length

    @property
    def masked(self) -> bool:
        """Whether the compiled step needs to know anything: not where everybody always takes part at once."""
        return self.declared.mode != "synchronous" or self.declared.spares > 0 or self.declared.warmup_steps > 0

    def round(self, step: int) -> Round:
        """What happens in this step, from 0. Threads may ask: the one that reads data ahead does."""
        with self._lock:
            return self._round(step)

    def _round(self, step: int) -> Round:
        if step < self._first:
            self._restart()
        while step >= self._first + len(self._rounds):
            try:
                found = next(self._coming)
            except OptionError:  # a trace that ends: told again to whoever asks again
                self._restart()
                raise
            self._rounds.append(found)
            count, before = int(found.takes.sum()), self._busy[-1] if self._busy else 0.0
            self._busy.append(before + float((np.minimum(found.done, found.end) - found.began)[:count].sum()))
            if len(self._rounds) > self._kept_rounds:
                del self._rounds[0], self._busy[0]
                self._first += 1
        return self._rounds[step - self._first]

    @property
    def assigns_rows(self) -> bool:
        """Whether rows have to be dealt out, because in some steps not everybody is given some."""
        return self.declared.asynchronous or self.declared.warmup_steps > 0

    def check_trace_length(self, steps: int | None, parts: int | None, epochs: int = 1, *, drop: bool = False) -> None:
        """Whether the times last for so many steps, or until so many parts of data are taken in each epoch; known at once only of a trace.

        `drop`: an epoch ends before a round in which not everybody would have a part.

        Raises:
          OptionError: a trace that ends before.
        """
        if self.steps is None or steps is parts is None:
            return
        step = taken = epoch = 0
        while (steps is None or step < steps) and epoch < epochs:
            takes = int(self.round(step).takes.sum())
            ends = parts is not None and drop and taken + takes > parts
            taken, step = (taken, step) if ends else (taken + takes, step + 1)
            if ends or (parts is not None and taken >= parts):
                epoch, taken = epoch + 1, 0

    def step_inputs(self, step: int, have: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """What the compiled step needs to know.

        Args:
          have: bool[workers], who has data; None: all have. Where the data ends the update is of fewer, and never waits.

        Returns:
          `counted`, float32[2, names]: sums and counts of what is counted in this step; and who takes part in what order, unless
          everybody always takes part at once; and which parameters workers that train by themselves send and receive.
        """
        found = self.round(step)
        have = np.ones(self.workers, bool) if have is None else have
        if self.declared.local:
            counted = self._counted(have.sum(), have.sum(), found.sends.any())
            return {"counted": counted, "present": have, "sends": found.sends, "receives": found.receives}
        if not self.declared.asynchronous:
            present = self._kept(found, have) if self.masked else have
            counted = {"counted": self._counted(present.sum(), (have & found.takes).sum(), present.any())}
            return counted | ({"present": present} if self.masked else {})
        present = found.present & have
        here = present[found.worker]
        applied, commit = found.applied & here, found.commit & here
        short = here.any() and not here[: int(found.present.sum())].all()
        if short and self.declared.mode == "softsync":  # the data ends: what was gathered is an update, of fewer
            commit[np.flatnonzero(here)[-1]] = True
        counted = self._counted(applied.sum(), here.sum(), commit.sum(), found.staleness[here].sum(), here.sum())
        given = {"worker": found.worker, "applied": applied, "weight": found.weight, "commit": commit}
        return {"counted": counted, "present": present, **given, "reads": found.reads}

    def _counted(self, applied: Any, arrived: Any, updates: Any, staleness: Any = 0, count: Any = 0) -> np.ndarray:
        sums, counts = [applied, arrived - applied, updates, staleness], [1, 1, 1, max(count, 1)]
        return np.array([sums, counts], np.float32)[:, : len(self.metric_names)]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of what is counted: gradients that were applied and dropped in a step, updates that the servers have made of them (of
        workers who train by themselves: at a meeting), and the mean staleness of those that arrived."""
        return ("gradients_applied", "gradients_dropped", "updates", *(("staleness",) if self.declared.asynchronous else ()))

    def _kept(self, found: Round, have: np.ndarray) -> np.ndarray:
        """Of those who have data the fastest, as many as an update waits for."""
        if have.all():
            return found.present
        wanted = int(found.present.sum())
        order = [worker for worker in found.worker if have[worker]]
        kept = np.zeros(self.workers, bool)
        kept[list(itertools.islice(order, wanted))] = True
        return kept

    def skipped_scopes(self, step: int) -> list[str]:
        """Where workers who train by themselves do not meet in this step: names of scopes in the step."""
        found = self.round(step)
        told = (("send", found.sends), ("receive", found.receives))
        return [f"{way}/{number}/" for way, due in told for number, now in enumerate(due) if not now]

    def metrics(self, step: int) -> dict[str, float]:
        """What the clock says when this step is over: the time, and the share of all workers' time so far in which they did not compute
        gradients that have arrived."""
        with self._lock:
            end, busy = self._round(step).end, self._busy[step - self._first]
        return {"simulated_seconds": end, "idle_share": 1 - busy / (end * self.workers) if end else 0.0}


def rounds(
    declared: ParameterServer, workers: int, times: Times, network: Network, sent: tuple[float, float] = (0.0, 0.0)
) -> Iterator[Round]:
    """The rounds of a run, without end. `sent` is what a worker sends to one server and gets from it, in bytes."""
    push, pull = (part / network.bandwidth for part in sent)
    if declared.local:
        return sync_steps(declared, workers, times, push, pull, network.latency)
    if declared.asynchronous:
        return Asynchronous(declared, workers, times, network.latency, push, pull).rounds()
    return synchronous(declared, workers, times, (push + pull) * workers, 2 * network.latency)
