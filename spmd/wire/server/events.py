"""The events of every simulated step: the inputs of the compiled step, and its metrics."""

import itertools
import operator
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmd.errors import OptionError, check_integer, short_repr, type_name
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.schedule import Asynchronous, Round, synchronous
from spmd.wire.server.sync_schedule import sync_steps
from spmd.wire.server.times import Times
from spmd.wire.server.timing import Network

MAX_KEPT_ROUNDS = 4096  # an earlier round is simulated again from the start
MAX_WORKERS = 2**14  # in asynchronous modes
MAX_KEPT_BYTES = 2**26  # of kept rounds, approximately


class Events:
    """The rounds of a run, by step. The same declaration always gives the same rounds.

    Args:
      declared: the layout's `[parameter_server]`.
      workers: number of simulated workers.
      sent: bytes that a worker sends to one server, and receives from it.
      times: seconds that gradients take; None: as declared.

    Example:
      >>> events = Events(ParameterServer(spares=1, compute_time=(3.0, 1.0, 2.0)), workers=3)
      >>> events.step_inputs(0)["present"].tolist(), events.metrics(0)
      ([False, True, True], {'simulated_seconds': 2.0, 'idle_share': 0.16666666666666663})
    """

    def __init__(
        self,
        declared: ParameterServer,
        workers: int,
        sent: tuple[float, float] = (0.0, 0.0),
        times: Times | None = None,
    ):
        self.declared, self.workers, self.sent = declared, workers, sent
        if declared.asynchronous and workers > MAX_WORKERS:
            raise OptionError(
                f"[parameter_server] {workers} workers: a round is a table of workers by workers.",
                fix=f"at most {MAX_WORKERS}.",
            )
        self._network = Network.parse(declared.network)
        self._times = (
            Times(declared.compute_time, workers, declared.seed) if times is None else times
        )
        self._coming: Iterator[Round] = iter(())
        self._first, self._rounds, self._busy, self._lock = 0, [], [], threading.Lock()
        self._kept_rounds = max(16, min(MAX_KEPT_ROUNDS, MAX_KEPT_BYTES // workers**2))
        self._restart()

    def _restart(self) -> None:
        self._coming = rounds(self.declared, self.workers, self._times, self._network, self.sent)
        self._first, self._rounds, self._busy = 0, [], []

    @property
    def steps(self) -> int | None:
        """Number of steps that a trace is sure to last; None if unlimited."""
        return self._times.length

    @property
    def masked(self) -> bool:
        """Return whether the compiled step needs event data: not if all workers take part in every
        step at the same time.
        """
        return (
            self.declared.mode != "synchronous"
            or self.declared.spares > 0
            or self.declared.warmup_steps > 0
        )

    def round(self, step: int) -> Round:
        """The events of this step, from 0. Thread-safe: the thread that prefetches data calls
        it.
        """
        number = _step_number(step)
        with self._lock:
            return self._round(number)

    def _round(self, step: int) -> Round:
        if step < self._first:
            self._restart()
        while step >= self._first + len(self._rounds):
            try:
                new_round = next(self._coming)
            except OptionError:  # the trace has ended: raise again on the next call
                self._restart()
                raise
            self._rounds.append(new_round)
            count, before = int(new_round.takes.sum()), self._busy[-1] if self._busy else 0.0
            self._busy.append(
                before
                + float((np.minimum(new_round.done, new_round.end) - new_round.began)[:count].sum())
            )
            if len(self._rounds) > self._kept_rounds:
                del self._rounds[0], self._busy[0]
                self._first += 1
        return self._rounds[step - self._first]

    @property
    def assigns_rows(self) -> bool:
        """Return whether rows must be assigned to workers, because in some steps not all workers
        get some.
        """
        return self.declared.asynchronous or self.declared.warmup_steps > 0

    def check_trace_length(
        self, steps: int | None, parts: int | None, epochs: int = 1, *, drop: bool = False
    ) -> None:
        """Check that a trace of times covers `steps`, or `epochs` of `parts` parts of data each.

        `drop`: an epoch ends before a round in which a worker would have no part.

        Raises:
          OptionError: the trace ends earlier.
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
        """The event data of the compiled step.

        Args:
          have: bool[workers], which workers have data; None: all. Where the data ends, an update
            has fewer gradients and does not wait.

        Returns:
          `counted`, float32[2, names]: sums and counts of the metrics; the participating workers
            and their order, if `masked`; and
          for local SGD the fragments that are sent and received.
        """
        found = self.round(step)
        have = np.ones(self.workers, bool) if have is None else have
        if self.declared.local:
            counted = self._counted(have.sum(), have.sum(), found.sends.any())
            return {
                "counted": counted,
                "present": have,
                "sends": found.sends,
                "receives": found.receives,
            }
        if not self.declared.asynchronous:
            present = self._kept(found, have) if self.masked else have
            counted = {
                "counted": self._counted(present.sum(), (have & found.takes).sum(), present.any())
            }
            return counted | ({"present": present} if self.masked else {})
        present = found.present & have
        here = present[found.worker]
        applied, commit = found.applied & here, found.commit & here
        data_ended = here.any() and not here[: int(found.present.sum())].all()
        # the data ends: the gathered gradients are an update
        if data_ended and self.declared.mode == "softsync":
            commit[np.flatnonzero(here)[-1]] = True
        counted = self._counted(
            applied.sum(), here.sum(), commit.sum(), found.staleness[here].sum(), here.sum()
        )
        arrivals = {
            "worker": found.worker,
            "applied": applied,
            "weight": found.weight,
            "commit": commit,
        }
        return {"counted": counted, "present": present, **arrivals, "reads": found.reads}

    def _counted(
        self, applied: Any, arrived: Any, updates: Any, staleness: Any = 0, count: Any = 0
    ) -> np.ndarray:
        sums, counts = [applied, arrived - applied, updates, staleness], [1, 1, 1, max(count, 1)]
        return np.array([sums, counts], np.float32)[:, : len(self.metric_names)]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the counted metrics: gradients applied and dropped in a step, updates by the
        servers (for local SGD: synchronizations), and the mean staleness of the gradients that
        arrived.
        """
        return (
            "gradients_applied",
            "gradients_dropped",
            "updates",
            *(("staleness",) if self.declared.asynchronous else ()),
        )

    def _kept(self, found: Round, have: np.ndarray) -> np.ndarray:
        """The fastest of the workers that have data, as many as an update waits for."""
        if have.all():
            return found.present
        count = int(found.present.sum())
        order = [worker for worker in found.worker if have[worker]]
        kept = np.zeros(self.workers, bool)
        kept[list(itertools.islice(order, count))] = True
        return kept

    def skipped_scopes(self, step: int) -> list[str]:
        """Scopes of the step that local SGD skips in this step, since those fragments are not
        due.
        """
        found = self.round(step)
        directions = (("send", found.sends), ("receive", found.receives))
        return [
            f"{direction}/{number}/"
            for direction, due in directions
            for number, is_due in enumerate(due)
            if not is_due
        ]

    def metrics(self, step: int) -> dict[str, float]:
        """The simulated time at the end of this step, and the share of all workers' time so far
        that was not spent on gradients that have arrived.
        """
        number = _step_number(step)
        with self._lock:
            end, busy = self._round(number).end, self._busy[number - self._first]
        return {
            "simulated_seconds": end,
            "idle_share": 1 - busy / (end * self.workers) if end else 0.0,
        }


def _step_number(step: Any) -> int:
    """The number of a step, from 0.

    Raises:
      OptionError: it is none; of a traced value, too.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise OptionError(
            f"step={short_repr(step)} is {type_name(step)}.",
            fix="an int: the clock runs on the host, not under jit.",
        ) from None
    check_integer(number, "step", 0)
    return number


def rounds(
    declared: ParameterServer,
    workers: int,
    times: Times,
    network: Network,
    sent: tuple[float, float] = (0.0, 0.0),
) -> Iterator[Round]:
    """The rounds of a run, without end. `sent` is what a worker sends to one server and receives
    from it, in bytes.
    """
    send, receive = (part / network.bandwidth for part in sent)
    if declared.local:
        return sync_steps(declared, workers, times, send, receive, network.latency)
    if declared.asynchronous:
        return Asynchronous(declared, workers, times, network.latency, send, receive).rounds()
    return synchronous(declared, workers, times, (send + receive) * workers, 2 * network.latency)
