"""Who arrives when, with weights of which version: a seeded simulation of events, on the host, in plain numbers.

Its rounds enter the compiled step as data. A round is as many gradients as can be computed at once: each worker has at most one in
it, and all of them are of weights that were read before the round began.
"""

import dataclasses
import heapq
from collections.abc import Iterator

import numpy as np

from spmd.layout.server import ParameterServer
from spmd.layout.timing import parse_staleness_scale
from spmd.wire.param_server.clock import Times

FAINT = 1e-20  # the least weight of a gradient: float32 must be able to divide by it
# at one instant pushes come before pulls; REACHES: is at the servers' door; ENDS: a worker goes on, and its trace does not
ARRIVES, READS, REACHES, ENDS = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Round:
    """One step of the compiled program. Arrays are over events in order of arrival, at most one per worker.

    Attributes:
      worker: int32[workers], whose gradient arrives; every worker once, those that are absent last.
      takes: bool[workers], by worker: is given rows for this round.
      present: bool[workers], by worker: has a gradient in this round that is not dropped for being late (a spare's is).
      applied: bool[workers]; False: dropped, or absent.
      weight: float32[workers], of the gradient within its update.
      commit: bool[workers]: the update is made after this arrival.
      reads: bool[workers + 1, workers]: which workers read weights before the round (row 0), and after each event; none where all read
        at once.
      staleness: int32[workers], versions between reading and arriving; -1 where nothing arrives.
      began, done, time: float64[workers]: simulated seconds at which the gradient was begun, was computed, and arrived.
      end: simulated seconds when the round is over.
      sends, receives: bool[fragments]: which parameters workers that train by themselves send to the servers after it, and take back.
    """

    worker: np.ndarray
    takes: np.ndarray
    present: np.ndarray
    applied: np.ndarray
    weight: np.ndarray
    commit: np.ndarray
    reads: np.ndarray
    staleness: np.ndarray
    began: np.ndarray
    done: np.ndarray
    time: np.ndarray
    end: float
    sends: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    receives: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))

    @classmethod
    def empty(cls, workers: int, *, late: bool = False) -> "Round":
        """A round in which nothing happens. `late`: gradients arrive one by one, and who reads after which matters."""
        no, one, zero = np.zeros(workers, bool), np.ones(workers, np.float32), np.zeros(workers)
        reads = np.zeros((workers + 1 if late else 0, workers), bool)
        order, stale = np.zeros(workers, np.int32), np.full(workers, -1, np.int32)
        return cls(order, no, no.copy(), no.copy(), one, no.copy(), reads, stale, zero, zero.copy(), zero.copy(), 0.0)


def synchronous(declared: ParameterServer, workers: int, times: Times, network: float, delay: float) -> Iterator[Round]:
    """All begin at once; the update waits for all but the spares, and the slowest are dropped. Ties go by number."""
    now, number = 0.0, 0
    while True:
        alone = number < declared.warmup_steps
        seconds = np.array([times.of(worker, number) for worker in range(1 if alone else workers)])
        order = np.argsort(seconds, kind="stable")
        kept = len(order) if alone else len(order) - declared.spares
        found = Round.empty(workers)
        full = np.concatenate([order, np.arange(len(order), workers)]).astype(np.int32)
        found.worker[:], found.staleness[: len(order)] = full, 0
        found.applied[:kept], found.commit[kept - 1] = True, True
        found.takes[order], found.present[order[:kept]] = True, True
        found.began[:] = now
        found.done[: len(order)] = found.time[: len(order)] = now + seconds[order]
        now += float(seconds[order[kept - 1]]) + network * len(order) / workers + delay
        number += 1
        yield dataclasses.replace(found, end=now)


class Asynchronous:
    """A queue of events: pushes that arrive at the servers, and pulls that are answered.

    Servers work alike, so one stands for all: pushes queue for its link inwards, `push` seconds each, pulls for its link outwards,
    `pull` seconds each.
    """

    def __init__(self, declared: ParameterServer, workers: int, times: Times, latency: float, push: float, pull: float):
        self.declared, self.workers, self.times = declared, workers, times
        self.latency, self.push, self.pull = latency, push, pull
        self.remote = latency > 0 or push > 0 or pull > 0
        self.scale = parse_staleness_scale(declared.staleness_scale) or (lambda tau: 1.0)
        self.per_update = declared.per_update(workers)
        self.inwards = self.outwards = 0.0  # when the links are free again
        self.version = 0
        self.read_version = np.zeros(workers, np.int64)
        self.pushed = np.zeros(workers, np.int64)  # gradients that arrived, by worker: its clock
        self.begun = np.zeros(workers, np.int64)  # gradients begun
        self.started, self.finished = np.zeros(workers), np.zeros(workers)
        self.waiting: set[int] = set()  # read, when the slowest allows
        self.count = 0  # gradients of the update that is being gathered, over rounds
        self.queue: list[tuple[float, int, int]] = []
        self.this = Round.empty(workers, late=True)
        self.events = 0
        self.read_here: set[int] = set()  # who read in this round: a gradient of these weights is for a later one

    def rounds(self) -> Iterator[Round]:
        """Rounds without end."""
        alone = self.declared.warmup_steps > 0
        for worker in range(1 if alone else self.workers):
            self._begin(worker, 0.0)
        self.joined = not alone
        while True:
            now, kind, worker = self.queue[0]
            if kind == ENDS:  # an error, once what there is has been told
                if self.events:
                    yield self._close(now)
                self.times.of(worker, int(self.begun[worker]))
            if kind != ARRIVES:
                worker = heapq.heappop(self.queue)[2]
                self._read(worker, now) if kind == READS else self._enter(worker, now)
                continue
            tied = []
            while self.queue and self.queue[0][:2] == (now, ARRIVES):
                tied.append(heapq.heappop(self.queue)[2])
            senders: list[int] = []
            for worker in tied:
                if self.this.present[worker] or worker in self.read_here:
                    yield self._close(now)
                self._arrive(worker, now)
                senders.append(worker)
                if self.this.commit[self.events - 1] or self.per_update == 1:
                    self._answer(senders, now)
                    senders = []
            self._answer(senders, now)

    def _begin(self, worker: int, now: float) -> None:
        """A worker begins a gradient; it will be sent when it is done, and arrive when the link inwards is free."""
        self.started[worker] = now
        number, known = int(self.begun[worker]), self.times.length
        if known is not None and number >= known:
            heapq.heappush(self.queue, (now, ENDS, worker))
            return
        done = self.finished[worker] = now + self.times.of(worker, number)
        self.begun[worker] += 1
        heapq.heappush(self.queue, (done + self.latency, REACHES, worker) if self.remote else (done, ARRIVES, worker))

    def _enter(self, worker: int, now: float) -> None:
        """A push is taken in when those before it are."""
        self.inwards = max(now, self.inwards) + self.push
        heapq.heappush(self.queue, (self.inwards, ARRIVES, worker))

    def _arrive(self, worker: int, now: float) -> None:
        at, this, tau = self.events, self.this, int(self.version - self.read_version[worker])
        self.events += 1
        this.worker[at], this.present[worker], this.staleness[at] = worker, True, tau
        this.began[at], this.done[at], this.time[at] = self.started[worker], self.finished[worker], now
        self.pushed[worker] += 1
        limit = self.declared.max_staleness
        if limit is not None and tau > limit:
            return
        this.applied[at], this.weight[at] = True, max(self.scale(tau), FAINT)
        self.count += 1
        if self.count == self.per_update:
            this.commit[at], self.count = True, 0
            self.version += 1

    def _answer(self, senders: list[int], now: float) -> None:
        """Those who have pushed read, or wait for the slowest; those who waited may go on now."""
        if not self.joined and self.version >= self.declared.warmup_steps:
            self.joined = True
            self.pushed[:] = 0  # clocks start here
            self.waiting |= set(range(1, self.workers))
        self.waiting |= set(senders)
        bound = self.declared.bound if self.declared.mode == "bounded" else None
        slowest = self.pushed.min() if self.joined else 0
        ready = [worker for worker in sorted(self.waiting) if bound is None or not self.joined or self.pushed[worker] - slowest <= bound]
        for worker in ready:
            self.waiting.remove(worker)
            if self.pushed[worker] % self.declared.fetch_every and worker in senders:
                self._begin(worker, now)
            elif self.remote:
                answered = max(now, self.outwards)  # a push is answered by the weights
                self.outwards = answered + self.pull
                heapq.heappush(self.queue, (answered, READS, worker))
            else:
                self._read(worker, now)

    def _read(self, worker: int, now: float) -> None:
        self.this.reads[self.events, worker] = True
        if self.events:
            self.read_here.add(worker)
        self.read_version[worker] = self.version
        self._begin(worker, now + self.pull + self.latency)

    def _close(self, now: float) -> Round:
        absent = [worker for worker in range(self.workers) if not self.this.present[worker]]
        self.this.worker[self.events :] = absent
        self.this.takes[:] = self.this.present
        found = dataclasses.replace(self.this, end=float(self.this.time[self.events - 1]))
        self.this, self.events, self.read_here = Round.empty(self.workers, late=True), 0, set()
        return found
