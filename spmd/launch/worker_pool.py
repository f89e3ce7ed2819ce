"""Processes that run and wait for calls: started, asked, and ended; what they print; and why they are gone."""

import collections
import contextlib
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from spmd.distributed.watchdog import PEER, STALLED
from spmd.launch import ipc
from spmd.launch.local_launcher import Machine, environments, prefixes, report_folder, runner
from spmd.launch.process_group import LOOK, SETTLE, Group, started, to_stdout
from spmd.launch.restart_policy import attempted, records

STALL = "stalled in "  # how the guard's word of a stall begins
KEPT = 10_000  # lines at most that wait to be shown
MARKED = 2.0  # seconds until all that a call has printed is here


class Lines:
    """What processes print, shown by who waits for them: so it stands in the cell that has called."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque()
        self._mark, self._marked = ipc.mark(), 0  # what each process prints when a call is over; and how many have
        self._read, self._lost = False, 0

    def next_mark(self) -> str:
        """A mark for the next call, which nothing else prints."""
        self._mark, self._marked = ipc.mark(), 0
        return self._mark

    def add(self, line: str) -> None:
        """Keep a line; threads that read from processes call it. While nobody waits for a call, those above `KEPT` are counted only."""
        text, cut, _ = line.partition(self._mark)
        if cut:  # the end of a call, maybe after a line that was not ended
            self._marked += 1
            if text.partition("] ")[2]:
                self.add(text + "\n")
            return
        while len(self._lines) >= KEPT:
            if not self._read:
                self._lost += 1
                return
            time.sleep(LOOK / 10)
        self._lines.append(line)

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """In the block somebody shows them again and again; at its end what there is is shown."""
        self._read = True
        try:
            yield
        finally:
            self._read = False
            self.show()

    def show(self) -> None:
        """Print what there is."""
        while self._lines:
            to_stdout(self._lines.popleft())
        if self._lost:
            lost, self._lost = self._lost, 0
            to_stdout(f"spmd launch: {lost} lines, printed while no call was waited for, are not shown\n")

    def until(self, count: int) -> None:
        """Print all that came before so many marks of this call; one may be missing where a function has closed its standard output."""
        until = time.monotonic() + MARKED
        with self.read():
            while self._marked < count and time.monotonic() < until:
                self.show()
                time.sleep(LOOK / 10)


class Running:
    """A group of processes and the pipes to them.

    Attributes:
      lines: what they print.
      owner: id of the process that has started them.
    """

    def __init__(self) -> None:
        self.lines = Lines()
        self.owner, self._open, self._ending = os.getpid(), contextlib.ExitStack(), threading.Lock()
        self._group, self._ends, self._late = Group({}), {}, False
        self._first: dict[int, int] = {}  # exit codes of those that ended first
        self._told: Mapping[int, tuple[int, str]] = {}  # what failed at which step, as processes have left it
        self._early: tuple[int, str] | None = None  # who was the reason for that, and has left nothing
        self._folder: Path | None = None
        self._settled = math.inf  # when those that have not failed are waited for no more

    def start(self, how: Machine) -> None:
        """Start them; `asked` waits for them."""
        self._folder = self._open.enter_context(report_folder())
        theirs: dict[int, ipc.Ends] = {}
        try:
            commands = {}
            for rank, environment in environments(how, 0, self._folder).items():
                self._ends[rank], theirs[rank] = ipc.pair()
                words = ["-m", "spmd.launch.notebook_worker", str(theirs[rank].reads), str(theirs[rank].writes)]
                commands[rank] = runner(words), environment | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))}
            inherited = {rank: (own.reads, own.writes) for rank, own in theirs.items()}
            self._group = self._open.enter_context(started(commands, prefixes(how.count), write=self.lines.add, inherited=inherited))
        finally:
            for own in theirs.values():
                own.close()

    def ended(self) -> dict[int, int]:
        """Exit codes of those that have ended, by rank."""
        return self._group.ended()

    def asked(self, message: bytes | None, seconds: float | None = None) -> dict[int, bytes]:
        """Give all a message and take an answer from each; show what they print meanwhile.

        Args:
          message: None where there is none to give.
          seconds: that it may take; None: as long as it takes.

        Returns:
          Answers by rank; without those that were gone, or did not answer soon after another had failed.
        """
        until = None if seconds is None else time.monotonic() + seconds
        failing = False

        def go_on(answers: Mapping[int, bytes]) -> bool:
            nonlocal until, failing
            self.lines.show()
            self._first = self._first or self.ended()
            if not failing and (self._first or any(answer.startswith(ipc.FAILED) for answer in answers.values())):
                failing, until = True, time.monotonic() + SETTLE
                self._settled = until
            self._late = not failing and until is not None and time.monotonic() > until
            return until is None or time.monotonic() < until

        with self.lines.read():
            return ipc.exchanged(self._ends, message, go_on)

    def patience(self) -> float:
        """Seconds that are left to leave, after one has failed."""
        return min(SETTLE, max(0.5, self._settled - time.monotonic()))

    def end(self, grace: float, interrupt: bool = False) -> None:
        """Hang up, and give them so many seconds to leave; none of them is there after it. To call it again does nothing.

        Args:
          grace: seconds.
          interrupt: whether they are interrupted first, as by Ctrl-C.
        """
        if os.getpid() != self.owner or not self._ending.acquire(blocking=False):
            return  # a fork has nothing to end
        try:
            with self._open, self.lines.read():
                if interrupt:
                    self._group.signal(signal.SIGINT)
                for own in self._ends.values():
                    own.close()
                until = time.monotonic() + grace
                while len(self.ended()) < len(self._group.processes) and time.monotonic() < until:
                    self._first = self._first or self.ended()
                    self.lines.show()
                    time.sleep(LOOK)
                self._first = self._first or self.ended()
                if self._folder is not None:
                    came_to = attempted(records(self._folder), {}, self._first)
                    self._told, self._early = came_to.failures, came_to.early
        finally:
            with contextlib.suppress(Exception):  # standard output may be gone at the end of a program
                self.lines.show()

    def _gone(self) -> str:
        return "some were not there in time" if self._late else "they have hung up"

    def why(self, answers: Mapping[int, bytes]) -> tuple[int | None, str, str]:
        """Who failed first, how, and its traceback, once all have ended and given these answers."""
        failures = {rank: pickle.loads(text[1:]) for rank, text in answers.items() if text.startswith(ipc.FAILED)}
        early = None if self._early is None else (*self._early, "")
        return early or reason(failures, self._first, self._told, set(answers)) or (None, self._gone(), "")


def reason(
    failures: Mapping[int, tuple[str, str]], first: Mapping[int, int], told: Mapping[int, tuple[int, str]], answered: Container[int]
) -> tuple[int | None, str, str] | None:
    """Of processes that have ended: who failed first, how, and its traceback; None where nothing is known.

    Whoever ended without a word is the cause of what the others say, which may be that a transfer broke off.

    Args:
      failures: by rank, what a call has failed with, and the traceback.
      first: exit codes of those that ended first.
      told: at which step what failed, in the order of time.
      answered: ranks that have answered.
    """
    for rank, code in first.items():
        if code < 0 or not (code == PEER or rank in told or rank in answered):
            return rank, in_words(rank, code), ""
    for rank, (step, text) in told.items():
        if rank not in failures or text.startswith(STALL):  # who stalls does not know it where it hangs
            return rank, f"process {rank} failed at step {step}: {text}", ""
        return rank, f"process {rank} failed: {failures[rank][0]}", failures[rank][1]
    for rank, (headline, trace) in failures.items():
        return rank, f"process {rank} failed: {headline}", trace
    for rank, code in first.items():
        return rank, in_words(rank, code), ""
    return None


def in_words(rank: int, code: int) -> str:
    """How a process has ended.

    >>> in_words(1, -9)
    'process 1 has ended with signal 9, which comes from the system when memory runs out, or from a person'
    """
    if code < 0:
        return f"process {rank} has ended with signal {-code}" + (
            ", which comes from the system when memory runs out, or from a person" if code == -signal.SIGKILL else ""
        )
    what = {PEER: " (another process failed)", STALLED: " (no progress)"}.get(code, "")
    return f"process {rank} has ended with code {code}{what}"
