"""A pool of worker processes that run calls: start and end them, collect their answers and output,
and explain failures.
"""

import collections
import contextlib
import math
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from spmd.distributed.launcher_protocol import PEER, STALLED
from spmd.launch import ipc
from spmd.launch.local_launcher import (
    LocalConfig,
    process_environments,
    rank_prefix,
    report_folder,
    worker_command,
)
from spmd.launch.process_group import LOOK, SETTLE, ProcessGroup, start_processes, to_stdout
from spmd.launch.restart_policy import Attempt, code_text, read_records, summarize_attempt

MAX_BUFFERED = 10_000  # lines that wait to be shown
MARK_TIMEOUT = 2.0  # seconds for the output of a call to arrive


class OutputBuffer:
    """Output of the processes, printed by the thread that waits for a call: so it appears in the
    cell that called.
    """

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque()
        self.next_mark()
        self._is_shown = False
        self._lost = 0

    def next_mark(self) -> str:
        """A unique mark for the next call, which each process prints at its end."""
        self._mark = f"\x1e{secrets.token_hex(8)}"
        self._marked = 0  # the number of processes that have printed it
        return self._mark

    def add(self, line: str) -> None:
        """Keep a line; called by the threads that read from processes. Between calls, lines above
        `MAX_BUFFERED` are only counted.
        """
        text, mark, _ = line.partition(self._mark)
        # The end of a call, maybe after an incomplete line.
        if mark:
            self._marked += 1
            if text.partition("] ")[2]:
                self.add(text + "\n")
            return
        while len(self._lines) >= MAX_BUFFERED:
            if not self._is_shown:
                self._lost += 1
                return
            time.sleep(LOOK / 10)
        self._lines.append(line)

    @contextlib.contextmanager
    def keep_all(self) -> Iterator[None]:
        """Keep all lines during the block, whose code prints them regularly with `show`; print the
        rest at its end.
        """
        self._is_shown = True
        try:
            yield
        finally:
            self._is_shown = False
            self.show()

    def show(self) -> None:
        """Print the buffered lines."""
        while self._lines:
            to_stdout(self._lines.popleft())
        if self._lost:
            lost, self._lost = self._lost, 0
            to_stdout(f"spmd launch: {lost} lines, printed between calls, are not shown\n")

    def until(self, count: int) -> None:
        """Print all lines before this call's marks; a mark is missing if the function has closed
        its standard output.
        """
        deadline = time.monotonic() + MARK_TIMEOUT
        with self.keep_all():
            while self._marked < count and time.monotonic() < deadline:
                self.show()
                time.sleep(LOOK / 10)


class WorkerPool:
    """A group of worker processes, and the sockets to them.

    Attributes:
      lines: their output.
      owner: id of the process that started them.
    """

    def __init__(self) -> None:
        self.lines = OutputBuffer()
        self.owner = os.getpid()
        self._open = contextlib.ExitStack()
        self._ending = threading.Lock()
        self._group = ProcessGroup({})
        self._connections: dict[int, socket.socket] = {}
        self._late = False  # an answer has not come in time, though none has failed
        self._first: dict[int, int] = {}  # exit codes of those that ended first
        self._attempt = Attempt({})  # the outcome, from the processes' records, once all have ended
        self._folder: Path | None = None
        self._settled = math.inf  # the deadline of the others after one has failed

    def start(self, config: LocalConfig) -> None:
        """Start the processes; `exchange` waits for them."""
        self._folder = self._open.enter_context(report_folder())
        child_ends: dict[int, socket.socket] = {}
        try:
            commands = {}
            path = os.pathsep.join(filter(None, map(str, sys.path)))
            for rank, environment in process_environments(config, (), self._folder).items():
                self._connections[rank], child_ends[rank] = socket.socketpair()
                # a worker that computes reads nothing: sending to it must not stop the others
                self._connections[rank].setblocking(False)
                words = ["-m", "spmd.launch.notebook_worker", str(child_ends[rank].fileno())]
                # The notebook's import path, so that the worker finds spmd itself where it is not
                # installed.
                commands[rank] = worker_command(words), environment | {"PYTHONPATH": path}
            inherited = {rank: (end.fileno(),) for rank, end in child_ends.items()}
            started = start_processes(
                commands, rank_prefix(config.count), write=self.lines.add, inherited=inherited
            )
            self._group = self._open.enter_context(started)
        finally:
            for end in child_ends.values():
                end.close()

    def ended(self) -> dict[int, int]:
        """Exit codes of those that have ended, by rank; the first ones that are seen are kept for
        `why`.
        """
        codes = self._group.ended()
        self._first = self._first or codes
        return codes

    def exchange(self, message: bytes | None, seconds: float | None = None) -> dict[int, bytes]:
        """Send all processes a message and receive an answer from each, printing their output
        meanwhile.

        Args:
          message: None: send nothing.
          seconds: timeout; None: none.

        Returns:
          Answers by rank; without processes that were gone, or did not answer soon after another
          had failed.
        """
        until = None
        if seconds is not None:
            until = time.monotonic() + seconds
        failing = False

        def keep_waiting(answers: Mapping[int, bytes]) -> bool:
            nonlocal until, failing
            self.lines.show()
            failed = [answer for answer in answers.values() if answer.startswith(ipc.FAILED)]
            ended = self.ended()
            if not failing and (ended or failed):
                failing = True
                until = time.monotonic() + SETTLE
                self._settled = until
            self._late = not failing and until is not None and time.monotonic() > until
            return until is None or time.monotonic() < until

        with self.lines.keep_all():
            return ipc.broadcast_and_collect(self._connections, message, keep_waiting)

    def remaining_grace(self) -> float:
        """Seconds that remain for the others to exit after one has failed."""
        return min(SETTLE, max(0.5, self._settled - time.monotonic()))

    def end(self, grace: float, interrupt: bool = False) -> None:
        """Close the sockets, wait, and kill the processes that are left. Calling it again does
        nothing.

        Args:
          grace: seconds to exit on their own.
          interrupt: whether to interrupt them first, like Ctrl-C.
        """
        if os.getpid() != self.owner or not self._ending.acquire(blocking=False):
            # A fork has nothing to end.
            return
        try:
            with self._open, self.lines.keep_all():
                if interrupt:
                    self._group.signal(signal.SIGINT)
                for connection in self._connections.values():
                    connection.close()
                until = time.monotonic() + grace
                while len(self.ended()) < len(self._group.processes) and time.monotonic() < until:
                    self.lines.show()
                    time.sleep(LOOK)
                if self._folder is not None:
                    self._attempt = summarize_attempt(read_records(self._folder), {}, self._first)
        finally:
            # standard output may be closed at the end of a program
            with contextlib.suppress(Exception):
                self.lines.show()

    def why(self, answers: Mapping[int, bytes]) -> tuple[int | None, str, str]:
        """The process that failed first, how, and its traceback, given these answers; after
        `end`.
        """
        if self._attempt.unreported_cause is not None:
            return *self._attempt.unreported_cause, ""
        failures = {
            rank: pickle.loads(text[1:])
            for rank, text in answers.items()
            if text.startswith(ipc.FAILED)
        }
        stalled = {rank for rank, code in self._attempt.codes.items() if code == STALLED}
        reason = failure_reason(
            failures, self._first, self._attempt.failures, answered=set(answers), stalled=stalled
        )
        if reason is not None:
            return reason
        if self._late:
            return None, "some did not start in time", ""
        return None, "they have closed their sockets", ""


def failure_reason(
    failures: Mapping[int, tuple[str, str]],
    first: Mapping[int, int],
    reported: Mapping[int, tuple[int, str]],
    *,
    answered: Container[int],
    stalled: Container[int] = (),
) -> tuple[int | None, str, str] | None:
    """The process that failed first, how, and its traceback; None if nothing is known.

    A process that ended without a report is the cause of what the others report, such as a broken
    transfer.

    Args:
      failures: by rank, the error of a call, and its traceback.
      first: exit codes of the processes that ended first.
      reported: step and error by rank, root causes first.
      answered: ranks that have answered.
      stalled: ranks that exited because of a stall.
    """
    for rank, code in first.items():
        if code < 0 or not (code == PEER or rank in reported or rank in answered):
            return rank, describe_exit(rank, code), ""
    for rank, (step, text) in reported.items():
        # the watchdog knows of a stall, the call does not
        if rank not in failures or rank in stalled:
            return rank, f"process {rank} failed at step {step}: {text}", ""
        return rank, f"process {rank} failed: {failures[rank][0]}", failures[rank][1]
    for rank, (headline, trace) in failures.items():
        return rank, f"process {rank} failed: {headline}", trace
    for rank, code in first.items():
        return rank, describe_exit(rank, code), ""
    return None


def describe_exit(rank: int, code: int) -> str:
    """A description of how a process ended.

    >>> describe_exit(1, -9)
    'process 1 has ended with signal 9, sent by the system when memory runs out, or by a user'
    """
    reasons = {
        -signal.SIGKILL: ", sent by the system when memory runs out, or by a user",
        PEER: " (another process failed)",
        STALLED: " (no progress)",
    }
    return f"process {rank} has ended with {code_text(code)}{reasons.get(code, '')}"
