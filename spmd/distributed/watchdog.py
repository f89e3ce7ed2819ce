"""The guard: no process waits for ever for one that has failed, and all leave at the same step.

In each of several processes a thread looks four times a second at the coordination service. A process that fails writes there what went
wrong, and leaves without JAX's barrier; all others print it and leave too. One that makes no progress for longer than its phase may take
prints the stacks of its threads, and where everyone is. A process alone has the same face, and no thread.
"""

import atexit
import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax

from spmd.distributed import coordination
from spmd.distributed.records import LIFE, STALL, WAIT, kind_of, report, text_of
from spmd.distributed.stragglers import Comparison
from spmd.distributed.timeouts import Limits
from spmd.errors import ClusterError, RendezvousTimeout, SpmdError, escaped

FAILED, USAGE, PEER, STALLED, DISAGREED, TERMINATED = 1, 2, 42, 43, 78, 143  # exit codes; docs/clusters.md has them all
LOOK = 0.25  # seconds between two looks, of up to 500 processes
LINGER = 3.0  # seconds that who fails, and process 0, which has the service, stay at most so that others can read why
GRACE = 30.0  # seconds for all to say at which step they could stop
ALONE = 10.0  # seconds without progress, while another has come to the end of its script: it will not come
LONGEST = 4000  # letters of an error that are told
TIMES = 10.0  # a step stalls at so many times the mean, if that is more than the limit


class Guard:
    """Of a process that is alone: it knows the phase, and whether somebody asked to stop."""

    rank = 0

    def __init__(self) -> None:
        self.asked, self.began = "", False
        self.taken: dict[
            int, int
        ] = {}  # of data that each process reads for itself (`distributed/uneven_batches.py`): batches so far, by its number
        self.waited = 0.0  # seconds that the run has waited for data
        self.stopped: str | None = None  # why this process leaves its run, where it has decided that alone
        self._busy = False  # whether it does what needs no other process: reads data, or runs a user's callback
        self._now = ("script", 0, time.monotonic())  # phase, step, and when there was progress last: read and written together

    def begin(self, step: int) -> None:
        """A run begins, or goes on, at a step."""
        self.asked, self.began, self.stopped = "", True, None
        if self.rank == 0:
            report("began", {"step": step}, again=False)
        self.at("compile", step)

    def at(self, phase: str, step: int) -> None:
        """Progress: this phase, after so many steps."""
        self._now = (phase, step, time.monotonic())

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """In the block this phase and its limit, then again what was before."""
        before = self.phase
        self.at(phase, self.step)
        try:
            yield
        finally:
            self.at(before, self.step)

    @contextlib.contextmanager
    def busy(self, own: bool = True) -> Iterator[None]:
        """Whether in the block this process does what needs no other."""
        before, self._busy = self._busy, own
        try:
            yield
        finally:
            self._busy = before

    @property
    def phase(self) -> str:
        """What this process is doing."""
        return self._now[0]

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self._now[1]

    @property
    def wanted(self) -> str:
        """The reason to stop that somebody gave, whether or not it was followed."""
        return self.asked

    def ask(self, reason: str) -> None:
        """Somebody wants to stop: a signal, or a callback that knows what others do not."""
        self.asked = self.asked or reason

    def stops(self, step: int, batch: int = 0) -> bool:
        """Whether a run that somebody asked to stop does so here: after this step, or before this batch of the evaluation after it."""
        del step, batch
        return bool(self.asked)

    def over(self) -> None:
        """This process has come to the end of its script; what it does from now on may only be a consequence of that."""
        self._live("done")

    def _live(self, end: str = "") -> None:
        """A sign of life, for who has started several."""

    def failed(self, error: BaseException, code: int = FAILED) -> None:
        """An error that nobody has caught: whoever waits for this process is told."""
        self._report(text_of(error)[:LONGEST], kind_of(error), code)

    def _report(self, text: str, kind: str, code: int) -> None:
        report(f"{self.rank}", {"step": self.step, "phase": self.phase, "kind": kind, "error": text, "code": code})


class Together(Guard):
    """Of one of several processes."""

    def __init__(self, rank: int, size: int, limits: Limits, say: Callable[[str], None]):
        super().__init__()
        self.rank, self.size, self.limits, self._say = rank, size, limits, say
        self._runs, self._answered, self._leaving = 0, 0, threading.Lock()
        self._mean, self._calls = 0.0, 0  # seconds from one word of a step to the next, and how many there were
        self._wish, self._begun = "", (0, 0)  # the newest point at which the run has asked: after a step, before a batch of an evaluation
        self._mark: tuple[int, int] | None = None  # the point that this process had come to when it heard
        self._last: tuple[int, int] | None = None  # all stop at the first point after this one
        self._done: float | None = None  # when the first of the others was heard to have ended
        self._told_done, self._ended, self._lived = False, False, -math.inf
        self._comparison = Comparison()
        self._look, self._over = LOOK * max(1.0, size / 500), threading.Event()
        self._threads = [threading.Thread(target=target, name="spmd guard", daemon=True) for target in (self._watch, self._time)]

    def start(self) -> None:
        """Begin to look; what ends this process from now on is told to the others."""
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            before(kind, error, trace)
            self.failed(error, exit_code(error))

        sys.excepthook = hook
        atexit.register(self._finish)
        for thread in self._threads:
            thread.start()

    def _finish(self) -> None:
        """At the end of the process: through JAX's barrier while the thread still looks, and then the thread ends.

        A thread that is inside JAX when Python takes itself apart would end the process with signal 6.
        """
        self.over()
        try:
            coordination.put(f"now/done/{self.rank}", "")
            coordination.shutdown()
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(timeout=10.0)

    def begin(self, step: int) -> None:
        """A run begins; runs have the same number everywhere."""
        self._mean, self._calls, self._wish, self._begun, self._mark, self._last = 0.0, 0, "", (step, 0), None, None
        super().begin(step)
        self._runs += 1  # last: from now on the thread looks at this run

    def at(self, phase: str, step: int) -> None:
        """Progress; the time from step to step, or from one call of many steps to the next, is measured."""
        before, _, changed = self._now
        if phase == before == "step":
            self._calls += 1
            self._mean += (time.monotonic() - changed - self._mean) / min(self._calls, 50)
        super().at(phase, step)

    @property
    def wanted(self) -> str:
        """The reason to stop that somebody gave, whether or not it was followed."""
        return self.asked or self._wish

    def ask(self, reason: str) -> None:
        """Somebody wants to stop; the thread tells all, this process too."""
        self._wish = self._wish or reason

    def stops(self, step: int, batch: int = 0) -> bool:
        """Whether all stop here.

        All processes ask at the same points, in the same order. Each process's thread, which never waits for a device, says to which
        point its run had come. All stop at the first point after the furthest of these, so who is past its own mark can wait for the
        others' threads.

        Raises:
          TimeoutError: some did not say in `GRACE` seconds.
        """
        point = self._begun = max(self._begun, (step, batch))  # after an evaluation the step's own point is behind
        if not self.asked:
            return False
        while self._mark is None:
            time.sleep(0.01)
        if self._last is None and point > self._mark:
            marks = [json.loads(coordination.get(f"stop/{self._runs}/{rank}", GRACE)) for rank in range(self.size)]
            self._last = max((int(step), int(batch)) for step, batch in marks)
        return self._last is not None and point > self._last

    def _stop_all(self, told: Mapping[str, str]) -> None:
        """Pass on a wish to stop; answer that of others, for this run and those before it."""
        now = f"stop/{self._runs}"
        if self._wish and self._runs and now not in told:
            coordination.put(f"now/{now}", self._wish)
            told = {**told, now: self._wish}
        for run in range(self._answered + 1, self._runs + 1):
            if f"stop/{run}" in told:
                if run == self._runs:
                    self.asked = told[now]  # first: once the run can see it, it does not pass the mark by itself
                self._mark = self._begun
                coordination.put(f"stop/{run}/{self.rank}", json.dumps(self._mark))
                self._answered = run

    def failed(self, error: BaseException, code: int = FAILED) -> None:
        """Tell the others, and leave; where a transfer broke off, give who broke it off the time to say why."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(3 * self._look)  # the thread leaves with what another has told
        with self._leaving:
            self._end_in(3 * LINGER, code)  # first: what comes may hang, as a file system does
            super().failed(error, code)
            self._tell(text_of(error))
            self._leave(code)

    def _tell(self, text: str) -> None:
        record = {"host": socket.gethostname(), "phase": self.phase, "step": self.step, "error": text[:LONGEST]}
        try:
            coordination.put(f"now/fail/{self.rank}", json.dumps(record))
        except Exception as error:  # the service is gone, and so is who could have read it
            self._say(f"the others could not be told: {type(error).__name__}")

    def _leave(self, code: int, *, last: bool = True) -> NoReturn:
        """Go; the last stays until all others have read why, or are gone: a connection that breaks off says something else.

        Process 0, which has the service, says that it has read, and is always the last.
        """
        self._live("left")
        self._end_in(2 * LINGER, code)
        until, seen = time.monotonic() + LINGER, f"seen/{self.rank}"
        missing = lambda: self.size - 1 - len(coordination.below("seen/").keys() - {str(self.rank)})
        try:
            if self.rank == 0:
                coordination.put(seen, "")
            while (last or self.rank == 0) and time.monotonic() < until and missing():
                time.sleep(0.02)
            coordination.put(seen, "")
        except Exception as error:
            self._say(f"nobody can be waited for: {type(error).__name__}")
        if self.rank == 0:
            time.sleep(0.1)  # for those who are about to go
        coordination.leave(code)

    def _watch(self) -> None:
        lost = None
        while not self._over.wait(self._look):
            if not coordination.started():
                return  # the user has ended it
            try:
                phase, step, changed = self._now
                beat = {"phase": phase, "step": step, "since": round(time.monotonic() - changed, 2), "at": time.time()}
                coordination.put(f"beat/{self.rank}", json.dumps({**beat, "taken": dict(self.taken), "waited": self.waited}))
                self._hear(coordination.below("now/"))
                if self.rank == 0 and phase == "step" and self._comparison.due():
                    for line in self._comparison.lines({int(rank): json.loads(text) for rank, text in coordination.below("beat/").items()}):
                        self._say(line)
                lost = None
            except Exception as error:
                lost = lost or time.monotonic()
                if time.monotonic() - lost > LINGER:
                    self._say(f"process 0, which has the coordination service, is gone: {escaped(str(error), 300)}")
                    self._leave(PEER, last=False)

    def _time(self) -> None:
        """Look for a stall, in a thread that asks nobody: a process 0 that is frozen does not answer, nor break off."""
        while not self._over.wait(self._look):
            phase, _, changed = self._now
            if time.monotonic() - self._lived >= LIFE:
                self._live()
            if time.monotonic() - changed > self._limit(phase):
                self._stall(phase, changed, self._limit(phase))

    def _live(self, end: str = "") -> None:
        """A sign of life for who has started this process; the last one says how it has left."""
        if not self._ended:
            self._ended, self._lived = bool(end), time.monotonic()
            record = {"phase": self.phase, "step": self.step, "since": time.monotonic() - self._now[2], "busy": self._busy}
            report(f"life.{self.rank}", {**record, "stopped": self.stopped, "end": end})

    def _hear(self, told: Mapping[str, str]) -> None:
        """A failure of another; or a wish to stop."""
        failures = {int(key.removeprefix("fail/")): json.loads(text) for key, text in told.items() if key.startswith("fail/")}
        others = {rank: record for rank, record in failures.items() if rank != self.rank}
        if others:
            with self._leaving:  # unless this one is about to leave for its own error
                self._end_in(2 * LINGER, PEER)
                for rank, record in sorted(others.items()):
                    where = f"process {rank} on {escaped(record['host'], 100)}"
                    self._say(f"{where} failed at step {int(record['step'])} ({escaped(record['phase'], 20)}): {escaped(record['error'])}")
                self._leave(PEER, last=False)
        ended = sorted(int(key.removeprefix("done/")) for key in told if key.startswith("done/"))
        if ended and self.rank not in ended:
            self._alone(f"process {', '.join(map(str, ended))} has come to the end of its script")
        self._stop_all(told)

    def _alone(self, text: str) -> None:
        """Others have come to their end, and will not come where this one waits for them: in a run; elsewhere it may have more to do."""
        (phase, _, changed), now = self._now, time.monotonic()
        self._done = self._done or now
        if now - max(self._done, changed) < ALONE or phase in ("step", "save"):  # at its end a run may have work for one process only
            return
        if phase == "script":
            if not self._told_done:
                self._say(f"{text}, and this has not")
            self._told_done = True
            return
        self._give_up(f"{text}, and is waited for in {phase}", FAILED)

    def _limit(self, phase: str) -> float:
        if phase == "script":
            return math.inf
        if phase != "step" or math.isinf(self.limits.step):
            return float(getattr(self.limits, phase))
        return max(self.limits.step, TIMES * self._mean if self._calls else self.limits.compile)

    def _stall(self, phase: str, changed: float, limit: float) -> None:
        spent = time.monotonic() - changed
        said = f"stalled: no progress for {spent:.1f} s in {phase} (limit {limit:g})"
        self._give_up(f"stalled in {phase} (limit {limit:g} s)", STALLED, said)

    def _give_up(self, text: str, code: int, said: str = "") -> None:
        """Say why, with the stacks of all threads, and where everyone is; tell the others, and leave."""
        with self._leaving:
            self._end_in(2 * LINGER, code)
            self._say(f"{said or text}; the threads of this process:")
            faulthandler.dump_traceback(all_threads=True)
            self._report(text, STALL if code == STALLED and self._busy else WAIT, code)
            now = time.time()
            for rank, beat in sorted((int(rank), json.loads(told)) for rank, told in coordination.below("beat/").items()):
                where = f"process {rank}: step {beat['step']}, {escaped(str(beat['phase']), 20)}"
                age = max(now - beat["at"], 0.0)
                self._say(f"{where}, progress {beat['since']:.1f} s before its last sign of life, {age:.1f} s ago")
            self._tell(text)
            self._leave(code)

    def _end_in(self, seconds: float, code: int) -> None:
        """Whatever hangs on the way out, and be it a stopped process 0."""
        timer = threading.Timer(seconds, os._exit, (code,))
        timer.daemon = True
        timer.start()


_current = Guard()


def current() -> Guard:
    """This process's guard."""
    return _current


def watch(rank: int, size: int, limits: Limits, say: Callable[[str], None]) -> None:
    """Guard this process, one of several, from now on."""
    global _current
    found = Together(rank, size, limits, say)
    found.start()
    _current = found


def limit(limits: Limits) -> None:
    """Other limits, from now on."""
    if isinstance(_current, Together):
        _current.limits = limits


def exit_code(error: BaseException) -> int:
    """What a process ends with for an error: its own for SystemExit, another where to start again would not help."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, ClusterError):
        return FAILED if isinstance(error, RendezvousTimeout) else DISAGREED
    return USAGE if isinstance(error, SpmdError) and not _current.began else FAILED


def show(error: BaseException) -> None:
    """Print an error as Python would."""
    traceback.print_exception(error, file=sys.stderr)


def host() -> str:
    """This process, for people."""
    return f"{socket.gethostname()} (process id {os.getpid()})"
