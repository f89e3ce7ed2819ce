"""The schedule of a parameter server: when each gradient arrives, and which version of the
parameters it used; and the steps in which local SGD workers synchronize (modes "local" and
"elastic").

A seeded event simulation on the host, whose rounds enter the compiled step as data. A round is as
many gradients as can be computed concurrently: at most one per worker, all at parameters that were
read before the round began.
"""

import dataclasses
import heapq
from collections.abc import Iterator

import numpy as np

from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.timing import Times, parse_staleness_scale

MIN_WEIGHT = 1e-20  # of a gradient: float32 must be able to divide by it
# Kinds of events. At one instant arrivals come before reads. QUEUES: a gradient reaches the
# server's link. TRACE_ENDS: a worker would begin a gradient that its trace of times does not have.
ARRIVES, READS, QUEUES, TRACE_ENDS = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Round:
    """One step of the compiled program. Arrays are over events in order of arrival, at most one per
    worker.

    Attributes:
      worker: int32[workers], the worker whose gradient arrives; every worker once, absent ones
        last.
      takes: bool[workers], by worker: gets rows for this round.
      present: bool[workers], by worker: has a gradient in this round; False for a spare, whose
        gradient is dropped.
      applied: bool[workers]; False: dropped, or absent.
      weight: float32[workers], of the gradient within its update.
      commit: bool[workers]: the update is applied after this arrival.
      reads: bool[workers + 1, workers]: which workers read parameters before the round (row 0), and
        after each event; no rows if all read at the same time.
      staleness: int32[workers], versions between read and arrival; -1 where nothing arrives.
      began, done, time: float64[workers]: simulated seconds at which the gradient was begun,
        computed, and arrived.
      end: simulated seconds at the end of the round.
      sends, receives: bool[fragments]: the fragments that local SGD workers send to the servers
        after it, and receive.
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
    def empty(cls, workers: int, *, asynchronous: bool = False) -> "Round":
        """A round in which nothing happens. `asynchronous`: gradients arrive one by one, so the
        order of reads matters.
        """
        table_rows = 0
        if asynchronous:
            table_rows = workers + 1

        def no() -> np.ndarray:
            return np.zeros(workers, bool)

        return cls(
            worker=np.zeros(workers, np.int32),
            takes=no(),
            present=no(),
            applied=no(),
            weight=np.ones(workers, np.float32),
            commit=no(),
            reads=np.zeros((table_rows, workers), bool),
            staleness=np.full(workers, -1, np.int32),
            began=np.zeros(workers),
            done=np.zeros(workers),
            time=np.zeros(workers),
            end=0.0,
        )


def synchronous(
    declared: ParameterServer, workers: int, times: Times, network: float, delay: float
) -> Iterator[Round]:
    """All begin at the same time; the update waits for all but the spares, and the slowest are
    dropped. Ties: the lower number first.
    """
    now = 0.0
    number = 0
    while True:
        count = workers
        awaited = workers - declared.spares
        # the first worker trains alone before the others join
        if number < declared.warmup_steps:
            count = 1
            awaited = 1
        seconds = np.array([times.of(worker, number) for worker in range(count)])
        order = np.argsort(seconds, kind="stable")
        done = now + seconds[order]
        new_round = Round.empty(workers)
        new_round.worker[:] = [*order, *range(count, workers)]
        new_round.staleness[:count] = 0
        new_round.applied[:awaited] = True
        new_round.commit[awaited - 1] = True
        new_round.takes[order] = True
        new_round.present[order[:awaited]] = True
        new_round.began[:] = now
        new_round.done[:count] = done
        new_round.time[:count] = done
        now += float(seconds[order[awaited - 1]]) + network * count / workers + delay
        number += 1
        yield dataclasses.replace(new_round, end=now)


class Asynchronous:
    """A queue of events: gradients arrive at the servers, and workers read parameters.

    All servers behave alike, so one is simulated. Gradients queue for its inbound link, `send`
    seconds each, and parameters for its outbound link, `receive` seconds each.
    """

    def __init__(
        self,
        declared: ParameterServer,
        workers: int,
        times: Times,
        latency: float,
        send: float,
        receive: float,
    ):
        self.declared = declared
        self.workers = workers
        self.times = times
        self.latency = latency
        self.send = send
        self.receive = receive
        self.remote = latency > 0 or send > 0 or receive > 0
        self.scale = parse_staleness_scale(declared.staleness_scale) or (lambda tau: 1.0)
        self.per_update = declared.per_update(workers)
        self.inbound = self.outbound = 0.0  # when the links are free again
        self.version = 0
        self.read_version = np.zeros(workers, np.int64)
        self.arrived = np.zeros(workers, np.int64)  # gradients that arrived, by worker: its clock
        self.begun = np.zeros(workers, np.int64)  # gradients begun
        self.started = np.zeros(workers)
        self.finished = np.zeros(workers)
        self.waiting: set[int] = set()  # workers that read when the bound on the slowest allows it
        self.count = 0  # gradients of the next update so far, over rounds
        # (time, kind, worker): a heap orders equal times by kind, then by worker
        self.queue: list[tuple[float, int, int]] = []
        self.joined = declared.warmup_steps <= 0  # whether all workers take part
        self._open()

    def _open(self) -> None:
        """Begin a round."""
        self.current = Round.empty(self.workers, asynchronous=True)
        self.events = 0
        # workers whose next gradient belongs to a later round
        self.read_this_round: set[int] = set()

    def rounds(self) -> Iterator[Round]:
        """Rounds without end."""
        starters = range(1)
        if self.joined:
            starters = range(self.workers)
        for worker in starters:
            self._begin(worker, 0.0)
        while True:
            now, kind, worker = self.queue[0]
            if kind == ARRIVES:
                yield from self._arrivals(now)
                continue
            if kind == TRACE_ENDS:  # close the current round, then raise
                if self.events:
                    yield self._close()
                self.times.of(worker, int(self.begun[worker]))
            heapq.heappop(self.queue)
            if kind == READS:
                self._read(worker, now)
            else:
                self._queue(worker, now)

    def _arrivals(self, now: float) -> Iterator[Round]:
        """Let the gradients of this moment arrive; yield the rounds that end meanwhile."""
        tied = []
        while self.queue and self.queue[0][:2] == (now, ARRIVES):
            tied.append(heapq.heappop(self.queue)[2])
        senders: list[int] = []
        for worker in tied:
            if self.current.present[worker] or worker in self.read_this_round:
                yield self._close()
            self._arrive(worker, now)
            senders.append(worker)
            if self.current.commit[self.events - 1] or self.per_update == 1:
                self._answer(senders, now)
                senders = []
        self._answer(senders, now)

    def _begin(self, worker: int, now: float) -> None:
        """Begin a gradient; it is sent when done, and arrives when the inbound link is free."""
        self.started[worker] = now
        number = int(self.begun[worker])
        length = self.times.length
        if length is not None and number >= length:
            heapq.heappush(self.queue, (now, TRACE_ENDS, worker))
            return
        done = now + self.times.of(worker, number)
        self.finished[worker] = done
        self.begun[worker] += 1
        if self.remote:
            heapq.heappush(self.queue, (done + self.latency, QUEUES, worker))
        else:
            heapq.heappush(self.queue, (done, ARRIVES, worker))

    def _queue(self, worker: int, now: float) -> None:
        """Gradients arrive in the order in which they queue for the link."""
        self.inbound = max(now, self.inbound) + self.send
        heapq.heappush(self.queue, (self.inbound, ARRIVES, worker))

    def _arrive(self, worker: int, now: float) -> None:
        index = self.events
        current = self.current
        tau = int(self.version - self.read_version[worker])
        self.events += 1
        current.worker[index] = worker
        current.present[worker] = True
        current.staleness[index] = tau
        current.began[index] = self.started[worker]
        current.done[index] = self.finished[worker]
        current.time[index] = now
        self.arrived[worker] += 1
        limit = self.declared.max_staleness
        if limit is not None and tau > limit:
            return
        current.applied[index] = True
        current.weight[index] = max(self.scale(tau), MIN_WEIGHT)
        self.count += 1
        if self.count == self.per_update:
            current.commit[index] = True
            self.count = 0
            self.version += 1

    def _answer(self, senders: list[int], now: float) -> None:
        """The senders read, or wait for the slowest worker; waiting workers continue if they
        may.
        """
        if not self.joined and self.version >= self.declared.warmup_steps:
            self.joined = True
            self.arrived[:] = 0  # clocks start now
            self.waiting |= set(range(1, self.workers))
        self.waiting |= set(senders)
        ready = sorted(self.waiting)
        if self.declared.mode == "bounded" and self.joined and self.declared.bound is not None:
            most = self.arrived.min() + self.declared.bound
            ready = [worker for worker in ready if self.arrived[worker] <= most]
        for worker in ready:
            self.waiting.remove(worker)
            if self.arrived[worker] % self.declared.fetch_every and worker in senders:
                self._begin(worker, now)
            elif self.remote:
                sent = max(now, self.outbound)  # the server replies with the parameters
                self.outbound = sent + self.receive
                heapq.heappush(self.queue, (sent, READS, worker))
            else:
                self._read(worker, now)

    def _read(self, worker: int, now: float) -> None:
        self.current.reads[self.events, worker] = True
        if self.events:
            self.read_this_round.add(worker)
        self.read_version[worker] = self.version
        self._begin(worker, now + self.receive + self.latency)

    def _close(self) -> Round:
        """End the round, and begin the next one."""
        current = self.current
        current.worker[self.events :] = np.flatnonzero(~current.present)
        current.takes[:] = current.present
        closed = dataclasses.replace(current, end=float(current.time[self.events - 1]))
        self._open()
        return closed


def sync_steps(
    declared: ParameterServer,
    workers: int,
    times: Times,
    send: float,
    receive: float,
    latency: float,
) -> Iterator[Round]:
    """One round for each step of the workers, without end.

    A worker waits only for the reply of the servers, which is sent when the last worker's
    parameters have arrived.

    Args:
      send, receive: seconds that all parameters of one worker take on a server's link, inwards and
        outwards. All fragments are assumed to be of equal size.
    """
    now = np.zeros(workers)
    number = 0
    replies = np.zeros(declared.fragments)  # when each fragment is back at the workers
    network = workers * (send + receive) / declared.fragments + 2 * latency
    while True:
        seconds = np.array([times.of(worker, number) for worker in range(workers)])
        number += 1
        done = now + seconds
        order = np.argsort(done, kind="stable")
        new_round = Round.empty(workers)
        new_round.worker[:] = order
        new_round.staleness[:] = 0
        new_round.takes[:] = True
        new_round.present[:] = True
        new_round.applied[:] = True
        new_round.began[:] = now[order]
        new_round.done[:] = done[order]
        new_round.time[:] = done[order]
        sends = due_fragments(declared, number)
        receives = due_fragments(declared, number - declared.overlap)
        replies[sends] = done.max() + network
        now = np.maximum(done, replies[receives].max(initial=0.0))
        end = float(now.max())
        yield dataclasses.replace(new_round, sends=sends, receives=receives, end=end)


def due_fragments(declared: ParameterServer, number: int) -> np.ndarray:
    """bool[fragments]: which fragments are synchronized after step `number`. They take turns, each
    once in `every` steps.

    >>> [
    ...     due_fragments(ParameterServer(mode="local", every=4, fragments=2), number).tolist()
    ...     for number in (1, 2, 3, 4)
    ... ]
    [[False, False], [True, False], [False, False], [False, True]]
    """
    return (_since(declared, number) == 0) & (number > 0)


def unsynced_steps(declared: ParameterServer, steps: int) -> int:
    """Number of steps since the last synchronization, for the fragment where that is longest ago.

    >>> [unsynced_steps(ParameterServer(mode="local", every=4), steps) for steps in (3, 4, 5, 8)]
    [3, 0, 1, 0]
    """
    return int(np.minimum(_since(declared, steps), steps).max())


def has_pending_sync(declared: ParameterServer, steps: int) -> bool:
    """Return whether after `steps` steps the workers have sent a fragment whose reply they have not
    received yet.

    >>> [
    ...     has_pending_sync(ParameterServer(mode="local", every=4, overlap=1), steps)
    ...     for steps in (3, 4, 5)
    ... ]
    [False, True, False]
    """
    return any(due_fragments(declared, steps - ago).any() for ago in range(declared.overlap))


def _since(declared: ParameterServer, number: int) -> np.ndarray:
    """int[fragments]: steps since each fragment's turn."""
    every = declared.every or 1
    turns = np.arange(1, declared.fragments + 1) * (every // declared.fragments)
    return (number - turns) % every
