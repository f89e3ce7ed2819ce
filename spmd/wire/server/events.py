"""The events of every simulated step: the inputs of the compiled step, and its metrics."""

import operator
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmd.errors import OptionError, check_integer, short_repr, type_name
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.schedule import Asynchronous, Round, sync_steps, synchronous
from spmd.wire.server.timing import Network, Times

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
        self.declared = declared
        self.workers = workers
        self.sent = sent
        if declared.asynchronous and workers > MAX_WORKERS:
            raise OptionError(
                f"[parameter_server] {workers} workers: a round is a table of workers by workers.",
                fix=f"at most {MAX_WORKERS}.",
            )
        self._network = Network.parse(declared.network)
        if times is None:
            times = Times(declared.compute_time, workers, declared.seed)
        self._times = times
        # held by whichever thread asks: the loop, or the one that prefetches data
        self._lock = threading.Lock()
        self._kept_rounds = max(16, min(MAX_KEPT_ROUNDS, MAX_KEPT_BYTES // workers**2))
        self._restart()

    def _restart(self) -> None:
        self._coming = rounds(self.declared, self.workers, self._times, self._network, self.sent)
        self._first = 0  # the number of the first of `_rounds`
        self._rounds: list[Round] = []
        self._busy: list[float] = []  # seconds of all workers' gradients until each round's end

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
            before = 0.0
            if self._busy:
                before = self._busy[-1]
            self._rounds.append(new_round)
            self._busy.append(before + _busy_seconds(new_round))
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
        step = 0
        epoch = 0
        parts_used = 0  # of this epoch
        while (steps is None or step < steps) and epoch < epochs:
            # raises where the trace ends
            needed = int(self.round(step).takes.sum())
            too_few = parts is not None and drop and parts_used + needed > parts
            if not too_few:
                parts_used += needed
                step += 1
            if too_few or (parts is not None and parts_used >= parts):
                epoch += 1
                parts_used = 0

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
        events = self.round(step)
        if have is None:
            have = np.ones(self.workers, bool)
        if self.declared.local:
            return {
                "counted": self._counted(have.sum(), have.sum(), events.sends.any()),
                "present": have,
                "sends": events.sends,
                "receives": events.receives,
            }
        if self.declared.asynchronous:
            return self._arrivals(events, have)
        present = have
        if self.masked:
            present = self._fastest(events, have)
        arrived = (have & events.takes).sum()
        inputs = {"counted": self._counted(present.sum(), arrived, present.any())}
        if self.masked:
            inputs["present"] = present
        return inputs

    def _arrivals(self, events: Round, have: np.ndarray) -> dict[str, np.ndarray]:
        """Return the event data of an asynchronous round."""
        present = events.present & have
        here = present[events.worker]
        applied = events.applied & here
        commit = events.commit & here
        data_ended = here.any() and not here[: int(events.present.sum())].all()
        # the data ends: the gathered gradients are an update
        if data_ended and self.declared.mode == "softsync":
            commit[np.flatnonzero(here)[-1]] = True
        arrived = here.sum()
        staleness = events.staleness[here].sum()
        return {
            "counted": self._counted(applied.sum(), arrived, commit.sum(), staleness, arrived),
            "present": present,
            "worker": events.worker,
            "applied": applied,
            "weight": events.weight,
            "commit": commit,
            "reads": events.reads,
        }

    def _counted(
        self, applied: Any, arrived: Any, updates: Any, staleness: Any = 0, count: Any = 0
    ) -> np.ndarray:
        sums = [applied, arrived - applied, updates, staleness]
        # At least 1: where nothing arrives, the mean staleness is 0 / 1 and not NaN.
        counts = [1, 1, 1, max(count, 1)]
        return np.array([sums, counts], np.float32)[:, : len(self.metric_names)]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the counted metrics: gradients applied and dropped in a step, updates by the
        servers (for local SGD: synchronizations), and the mean staleness of the gradients that
        arrived.
        """
        names = ("gradients_applied", "gradients_dropped", "updates")
        if self.declared.asynchronous:
            return (*names, "staleness")
        return names

    def _fastest(self, events: Round, have: np.ndarray) -> np.ndarray:
        """The fastest of the workers that have data, as many as an update waits for."""
        if have.all():
            return events.present
        count = int(events.present.sum())
        order = [worker for worker in events.worker if have[worker]]
        fastest = np.zeros(self.workers, bool)
        fastest[order[:count]] = True
        return fastest

    def skipped_scopes(self, step: int) -> list[str]:
        """Scopes of the step that local SGD skips in this step, since those fragments are not
        due.
        """
        events = self.round(step)
        scopes = []
        for direction, due in (("send", events.sends), ("receive", events.receives)):
            scopes += [f"{direction}/{number}/" for number in np.flatnonzero(~due)]
        return scopes

    def metrics(self, step: int) -> dict[str, float]:
        """The simulated time at the end of this step, and the share of all workers' time so far
        that was not spent on gradients that have arrived.
        """
        number = _step_number(step)
        with self._lock:
            end = self._round(number).end
            busy = self._busy[number - self._first]
        idle_share = 0.0
        if end:
            idle_share = 1 - busy / (end * self.workers)
        return {"simulated_seconds": end, "idle_share": idle_share}


def _busy_seconds(new_round: Round) -> float:
    """Return the seconds that workers have computed gradients until the end of the round."""
    count = int(new_round.takes.sum())
    seconds = np.minimum(new_round.done, new_round.end) - new_round.began
    return float(seconds[:count].sum())


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
