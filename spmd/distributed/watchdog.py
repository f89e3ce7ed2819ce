"""The watchdog: no process waits forever for one that has failed, and all processes stop after the
same step.

Each of several processes runs a thread that polls the coordination service four times a second. A
process that fails publishes its error there and exits without JAX's barrier; all others print the
error and exit too. A process that makes no progress for longer than its phase allows prints its
threads' stacks and the last known state of every process. A single process has the same interface
and no thread.
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
from spmd.distributed.launcher_protocol import (
    DISAGREED,
    ERROR,
    FAILED,
    HEARTBEAT_SECONDS,
    PEER,
    STALL,
    STALLED,
    TERMINATED,
    USAGE,
    WAIT,
    format_error,
    report_to_launcher,
)
from spmd.distributed.links import LOST_SECONDS, Links, lost, unanswered
from spmd.distributed.stragglers import StragglerMonitor
from spmd.distributed.timeouts import StallTimeouts
from spmd.errors import ClusterError, RendezvousTimeout, SpmdError, printable

POLL_SECONDS = 0.25  # between two polls, with up to 500 processes
# The longest that a failing process, and process 0, which hosts the service, stays for others to
# read the error.
EXIT_SECONDS = 3.0
SIGTERM_REASON = "asked to end"  # why a run stopped that has received SIGTERM
STOP_TIMEOUT = 30.0  # seconds for all processes to report at which step they can stop
# Seconds without progress after another process has finished its script: it joins no collective.
PEER_DONE_TIMEOUT = 10.0
NOTHING_TO_SAVE = "before there was anything to save"
MAX_ERROR_CHARS = 4000  # of an error that is published
# a step stalls only after this multiple of the mean step time, where that is more than the timeout
STALL_FACTOR = 10.0


class Watchdog:
    """The watchdog of a single process: tracks the phase, and whether a stop was requested."""

    rank = 0
    timeouts = StallTimeouts()  # nothing watches a single process
    leaves_together = False  # whether `leave` ends this process

    def __init__(self) -> None:
        self.stop_reason = ""
        self.run_started = False
        self.has_trained = False  # whether this run has made a step, which can be saved
        self._leaving = False  # whether this process has received SIGTERM and had nothing to save
        self.requested_stop_reason = ""  # of a requested stop, even if the run has not acted on it
        # by the number of the iterator (`distributed/uneven_batches.py`)
        self.batches_taken: dict[int, int] = {}
        self.data_wait_seconds = 0.0  # seconds that the run has waited for data
        # why this process leaves its run, if it decided that alone
        self.local_stop_reason: str | None = None
        # reading data or in a user's callback, which needs no other process
        self._in_local_work = False
        # phase, step, time of the last progress: one tuple, so that reads are atomic
        self._progress = ("script", 0, time.monotonic())

    def begin_run(self, step: int) -> None:
        """Note that a run starts, or resumes, at a step."""
        self.stop_reason = self.requested_stop_reason = ""
        self.run_started = True
        self.local_stop_reason = None
        self.has_trained = False
        if self.rank == 0:
            report_to_launcher("began", {"step": step}, overwrite=False)
        self.record_progress("compile", step)

    def record_progress(self, phase: str, step: int) -> None:
        """Note that this process has entered, or advanced in, a phase after `step` steps."""
        self._progress = (phase, step, time.monotonic())

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Within the block, this phase and its timeout apply; afterwards the previous ones."""
        previous = self.phase
        self.record_progress(phase, self.step)
        try:
            yield
        finally:
            self.record_progress(previous, self.step)

    @contextlib.contextmanager
    def local_work(self, active: bool = True) -> Iterator[None]:
        """Mark the block as work that needs no other process, or as not that."""
        previous, self._in_local_work = self._in_local_work, active
        try:
            yield
        finally:
            self._in_local_work = previous

    @property
    def phase(self) -> str:
        """The phase of the run that this process is in, such as "step"."""
        return self._progress[0]

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self._progress[1]

    def request_stop(self, reason: str) -> None:
        """Ask the run to stop, for example on a signal, or from a callback that only this process
        runs.
        """
        self.stop_reason = self.requested_stop_reason = self.requested_stop_reason or reason

    def leave(self) -> None:
        """Say that this process got SIGTERM and has nothing to save. All exit with code 143."""
        self._leaving = True
        text = f"{NOTHING_TO_SAVE}: this process ends with code {TERMINATED}"
        write_to_stderr(f"spmd: it received SIGTERM in {self.phase}, {text}\n")

    def should_stop(self, step: int, batch: int = 0) -> bool:
        """Return whether a run that was asked to stop does so here: after this step, or before this
        batch of the evaluation after it.
        """
        del step, batch
        return bool(self.stop_reason)

    def script_finished(self) -> None:
        """Note that this process has finished its script: later errors may follow from that."""
        self._heartbeat("done")

    def _heartbeat(self, end: str = "") -> None:
        """Write a heartbeat for the launcher; a single process writes none."""

    def report_failure(self, error: BaseException, code: int = FAILED) -> None:
        """Report an uncaught error to the launcher and to the processes that wait for this one."""
        self._write_failure(format_error(error)[:MAX_ERROR_CHARS], failure_kind(error), code)

    def _write_failure(self, text: str, kind: str, code: int) -> None:
        report_to_launcher(
            f"{self.rank}",
            {"step": self.step, "phase": self.phase, "kind": kind, "error": text, "code": code},
        )


class ClusterWatchdog(Watchdog):
    """The watchdog of one of several processes."""

    leaves_together = True

    def __init__(
        self,
        rank: int,
        size: int,
        timeouts: StallTimeouts,
        log: Callable[[str], None],
        links: Links | None = None,
    ):
        super().__init__()
        self._links = links or {}
        self.rank, self.size = rank, size
        self.timeouts, self._log = timeouts, log
        self._run_count = self._acknowledged_runs = 0
        self._exiting = threading.Lock()
        self._mean_step_seconds, self._step_count = 0.0, 0
        # points are (step, batch of the evaluation after it), in the order of the run
        self._newest_point = (0, 0)
        # the point that this process had reached when it saw the request to stop
        self._mark: tuple[int, int] | None = None
        # the furthest mark: all stop at the first point after it
        self._last_mark: tuple[int, int] | None = None
        # when this process first saw that another had finished
        self._peer_done_at: float | None = None
        self._warned_peer_done = self._left = False
        self._heartbeat_at = -math.inf
        self._stragglers = StragglerMonitor()
        self._poll_seconds = POLL_SECONDS * max(1.0, size / 500)
        self._finished = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="spmd watchdog", daemon=True)
            for target in (self._poll, self._check_stall)
        ]

    def start(self) -> None:
        """Start the threads; from now on an uncaught error in this process reaches the others."""
        previous_hook = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            previous_hook(kind, error, trace)
            self.report_failure(error, exit_code(error))

        sys.excepthook = hook
        atexit.register(self._finish)
        for thread in self._threads:
            thread.start()

    def _finish(self) -> None:
        """Pass JAX's barrier at exit while the threads still poll, then end the threads.

        A thread that is inside JAX while Python shuts down would abort the process with signal 6.
        """
        self.script_finished()
        try:
            coordination.put(f"now/done/{self.rank}", "")
            coordination.shutdown()
        finally:
            self._finished.set()
            for thread in self._threads:
                thread.join(timeout=10.0)

    def begin_run(self, step: int) -> None:
        """Note that a run starts; it has the same number in every process."""
        self._mean_step_seconds, self._step_count = 0.0, 0
        self._newest_point = (step, 0)
        self._mark = self._last_mark = None
        super().begin_run(step)
        self._run_count += 1  # last: from now on the thread sees this run

    def record_progress(self, phase: str, step: int) -> None:
        """Note progress, and measure the time between steps, or calls that run many steps."""
        previous, _, progress_at = self._progress
        if phase == previous == "step":
            self._step_count += 1
            change = time.monotonic() - progress_at - self._mean_step_seconds
            self._mean_step_seconds += change / min(self._step_count, 50)
        super().record_progress(phase, step)

    def request_stop(self, reason: str) -> None:
        """Ask all processes to stop; the thread publishes the request, which this process then sees
        like the others.
        """
        self.requested_stop_reason = self.requested_stop_reason or reason

    def should_stop(self, step: int, batch: int = 0) -> bool:
        """Return whether all processes stop here.

        All processes ask at the same points, in the same order. Each process's thread, which never
        waits for a device, publishes the point that its run had reached. All stop at the first
        point after the furthest of these marks, so a process that is past its own mark can wait for
        the other threads.

        Raises:
          TimeoutError: some process did not publish its mark within `STOP_TIMEOUT` seconds.
        """
        # after an evaluation the step's own point is behind
        point = self._newest_point = max(self._newest_point, (step, batch))
        if not self.stop_reason:
            return False
        while self._mark is None:
            time.sleep(0.01)
        if self._last_mark is None and point > self._mark:
            marks = [
                json.loads(coordination.get(f"stop/{self._run_count}/{rank}", STOP_TIMEOUT))
                for rank in range(self.size)
            ]
            self._last_mark = max((int(step), int(batch)) for step, batch in marks)
        return self._last_mark is not None and point > self._last_mark

    def _sync_stop(self, messages: Mapping[str, str]) -> None:
        """Publish a request to stop; acknowledge those of others, for this run and those before
        it.
        """
        current = f"stop/{self._run_count}"
        if self.requested_stop_reason and self._run_count and current not in messages:
            coordination.put(f"now/{current}", self.requested_stop_reason)
            messages = {**messages, current: self.requested_stop_reason}
        for run in range(self._acknowledged_runs + 1, self._run_count + 1):
            if f"stop/{run}" in messages:
                if run == self._run_count:
                    # first: a run that sees it does not pass the mark until the mark is published
                    self.stop_reason = self.requested_stop_reason = messages[current]
                    if messages[current] == SIGTERM_REASON and not self.has_trained:
                        self._leaving = True  # it compiles, perhaps for minutes
                self._mark = self._newest_point
                coordination.put(f"stop/{run}/{self.rank}", json.dumps(self._mark))
                self._acknowledged_runs = run

    def report_failure(self, error: BaseException, code: int = FAILED) -> None:
        """Publish the error and exit; after a broken transfer, first give the process that caused
        it time to publish its own.
        """
        if isinstance(error, jax.errors.JaxRuntimeError):
            # the thread exits with what another process has published
            time.sleep(3 * self._poll_seconds)
        with self._exiting:
            # first: what follows may hang, for example in the file system
            self._force_exit_after(3 * EXIT_SECONDS, code)
            super().report_failure(error, code)
            self._publish_failure(format_error(error))
            self._exit(code)

    def _leave_all(self) -> None:
        """Publish that this process was asked to end, and has nothing to save; all exit."""
        with self._exiting:
            self._force_exit_after(2 * EXIT_SECONDS, TERMINATED)
            coordination.put(f"now/leave/{self.rank}", "")
            self._exit(TERMINATED)

    def _publish_failure(self, text: str) -> None:
        record = {
            "host": socket.gethostname(),
            "phase": self.phase,
            "step": self.step,
            "error": text[:MAX_ERROR_CHARS],
        }
        try:
            coordination.put(f"now/fail/{self.rank}", json.dumps(record))
        except Exception as error:  # without the service, no process can read it
            self._log(f"cannot report the failure to the other processes: {type(error).__name__}")

    def _exit(self, code: int, *, wait: bool = True) -> NoReturn:
        """Exit; the process that failed first waits until all others have read why, since a broken
        connection would hide the reason.

        Process 0, which hosts the service, acknowledges first and always exits last.
        """
        self._heartbeat("left")
        self._force_exit_after(2 * EXIT_SECONDS, code)
        deadline = time.monotonic() + EXIT_SECONDS
        receipt = f"seen/{self.rank}"

        def unread() -> int:
            return self.size - 1 - len(coordination.read_dir("seen/").keys() - {str(self.rank)})

        try:
            if self.rank == 0:
                coordination.put(receipt, "")
            while (wait or self.rank == 0) and time.monotonic() < deadline and unread():
                time.sleep(0.02)
            coordination.put(receipt, "")
        except Exception as error:
            self._log(f"cannot wait for the other processes: {type(error).__name__}")
        if self.rank == 0:
            time.sleep(0.1)  # for processes that are about to exit
        coordination.exit_now(code)

    def _poll(self) -> None:
        unreachable_since = None
        while not self._finished.wait(self._poll_seconds):
            if not coordination.is_initialized():
                return  # the user has shut it down
            try:
                phase, step, progress_at = self._progress
                since = round(time.monotonic() - progress_at, 2)
                beat = {
                    "phase": phase,
                    "step": step,
                    "since": since,
                    "at": time.time(),
                    "taken": dict(self.batches_taken),
                    "waited": self.data_wait_seconds,
                    "unanswered": unanswered() if since > LOST_SECONDS else [],
                }
                coordination.put(f"beat/{self.rank}", json.dumps(beat))
                messages = coordination.read_dir("now/")
                if self._leaving:
                    self._leave_all()
                self._handle_messages(messages)
                if self.rank == 0 and phase == "step" and self._stragglers.due():
                    for line in self._stragglers.warnings(_beats()):
                        self._log(line)
                unreachable_since = None
            except Exception as error:
                unreachable_since = unreachable_since or time.monotonic()
                if time.monotonic() - unreachable_since > EXIT_SECONDS:
                    self._log(
                        "process 0, which hosts the coordination service, is gone: "
                        f"{printable(str(error), 300)}"
                    )
                    self._exit(PEER, wait=False)

    def _check_stall(self) -> None:
        """Detect a stall, in a thread that uses no service: a frozen process 0 neither answers nor
        closes its connections.
        """
        while not self._finished.wait(self._poll_seconds):
            phase, _, progress_at = self._progress
            if time.monotonic() - self._heartbeat_at >= HEARTBEAT_SECONDS:
                self._heartbeat()
            if names := lost(self._links):
                self._report_lost(
                    f"{', '.join(names)}: no answer for {LOST_SECONDS} s; that host, or the "
                    "network to it, is lost"
                )
            timeout = self._timeout(phase)
            if (idle := time.monotonic() - progress_at) > timeout:
                gone = _gone(unanswered())
                reason = f"stalled in {phase} (limit {timeout:g} s){gone}"
                text = f"stalled: no progress for {idle:.1f} s in {phase} (limit {timeout:g}){gone}"
                self._abort(reason, STALLED, text)

    def _report_lost(self, text: str) -> NoReturn:
        """Report a host that is lost, and exit; JAX would abort this process a little later,
        without naming it.
        """
        with self._exiting:
            self._force_exit_after(2 * EXIT_SECONDS, PEER)
            self._log(text)
            self._write_failure(text, WAIT, PEER)
            if self.rank == 0:  # the service is here: those that are still connected read it
                self._publish_failure(text)
                self._exit(PEER)
            self._heartbeat("left")
            coordination.exit_now(PEER)

    def _heartbeat(self, end: str = "") -> None:
        """Write a heartbeat for the launcher; the last one says how this process has left."""
        if not self._left:
            self._left = bool(end)
            self._heartbeat_at = time.monotonic()
            record = {
                "phase": self.phase,
                "step": self.step,
                "since": time.monotonic() - self._progress[2],
                "busy": self._in_local_work,
                "stopped": self.local_stop_reason,
                "end": end,
            }
            report_to_launcher(f"life.{self.rank}", record)

    def _handle_messages(self, messages: Mapping[str, str]) -> None:
        """Act on a failure of another process, on one that has finished, and on a request to
        stop.
        """
        failures = {int(rank): json.loads(text) for rank, text in _under("fail/", messages).items()}
        failures.pop(self.rank, None)
        if failures:
            with self._exiting:  # unless this process is about to exit for its own error
                self._force_exit_after(2 * EXIT_SECONDS, PEER)
                for rank, record in sorted(failures.items()):
                    where = f"process {rank} on {printable(record['host'], 100)}"
                    when = f"at step {int(record['step'])} ({printable(record['phase'], 20)})"
                    self._log(f"{where} failed {when}: {printable(record['error'])}")
                self._exit(PEER, wait=False)
        if leaving := sorted(_under("leave/", messages)):
            with self._exiting:
                self._force_exit_after(2 * EXIT_SECONDS, TERMINATED)
                self._log(
                    f"process {', '.join(leaving)} received SIGTERM {NOTHING_TO_SAVE}; this "
                    f"process ends with code {TERMINATED}"
                )
                self._exit(TERMINATED, wait=False)
        done = sorted(map(int, _under("done/", messages)))
        if done and self.rank not in done:
            self._check_peer_done(f"process {', '.join(map(str, done))} has finished its script")
        self._sync_stop(messages)

    def _check_peer_done(self, text: str) -> None:
        """Abort if this process waits, inside a run, for processes that have finished; outside a
        run it may have more to do alone.
        """
        phase, _, progress_at = self._progress
        now = time.monotonic()
        self._peer_done_at = self._peer_done_at or now
        idle = now - max(self._peer_done_at, progress_at)
        # a run's end may have local work
        if idle < PEER_DONE_TIMEOUT or phase in ("step", "save"):
            return
        if phase == "script":
            if not self._warned_peer_done:
                self._log(f"{text}, and this process has not")
            self._warned_peer_done = True
            return
        self._abort(f"{text}, and is waited for in {phase}", FAILED)

    def _timeout(self, phase: str) -> float:
        if phase == "script":
            return math.inf
        if phase != "step" or math.isinf(self.timeouts.step):
            return float(getattr(self.timeouts, phase))
        if not self._step_count:
            return max(self.timeouts.step, self.timeouts.compile)
        return max(self.timeouts.step, STALL_FACTOR * self._mean_step_seconds)

    def _abort(self, text: str, code: int, message: str = "") -> None:
        """Log the reason, the stacks of all threads and the state of every process; publish the
        failure, and exit.
        """
        with self._exiting:
            self._force_exit_after(2 * EXIT_SECONDS, code)
            self._log(f"{message or text}; the threads of this process:")
            faulthandler.dump_traceback(all_threads=True)
            kind = STALL if code == STALLED and self._in_local_work else WAIT
            self._write_failure(text, kind, code)
            now = time.time()
            for rank, beat in sorted(_beats().items()):
                where = f"process {rank}: step {beat['step']}, {printable(str(beat['phase']), 20)}"
                age = max(now - beat["at"], 0.0)
                self._log(
                    f"{where}, last progress {beat['since']:.1f} s before its last heartbeat, "
                    f"{age:.1f} s ago{_gone(beat['unanswered'])}"
                )
            self._publish_failure(text)
            self._exit(code)

    def _force_exit_after(self, seconds: float, code: int) -> None:
        """Exit even if something on the way out hangs, such as a call to a stopped process 0."""
        timer = threading.Timer(seconds, os._exit, (code,))
        timer.daemon = True
        timer.start()


def _beats() -> dict[int, dict[str, Any]]:
    """The last heartbeats of all processes, by rank."""
    texts = coordination.read_dir("beat/")
    return {int(rank): json.loads(text) for rank, text in texts.items()}


def _under(path: str, messages: Mapping[str, str]) -> dict[str, str]:
    """The messages under a path, by their keys below it."""
    return {key[len(path) :]: text for key, text in messages.items() if key.startswith(path)}


def _gone(addresses: list[str]) -> str:
    """The part of a report of a stall about hosts that do not answer a process."""
    if not addresses:
        return ""
    return f"; no answer from {printable(', '.join(addresses), 200)}"


_current = Watchdog()


def current() -> Watchdog:
    """This process's watchdog."""
    return _current


def start(
    rank: int,
    size: int,
    timeouts: StallTimeouts,
    log: Callable[[str], None],
    links: Links | None = None,
) -> None:
    """Watch this process, one of several, from now on; `links`: its connections to others, which
    show that a host is lost.
    """
    global _current
    watchdog = ClusterWatchdog(rank, size, timeouts, log, links)
    watchdog.start()
    _current = watchdog


def failure_kind(error: BaseException) -> str:
    """The kind of an error: WAIT if it may be the consequence of a failure in another process."""
    while error.__cause__ is not None:  # such as a callback's
        error = error.__cause__
    if isinstance(error, TimeoutError | RendezvousTimeout):
        return WAIT
    # JAX raises one class for a broken transfer and for a lack of memory; the latter is this
    # process's own error.
    is_xla = isinstance(error, jax.errors.JaxRuntimeError)
    return WAIT if is_xla and "RESOURCE_EXHAUSTED" not in str(error) else ERROR


def exit_code(error: BaseException) -> int:
    """The exit code for an error: that of SystemExit, or one that says whether a restart could
    help.
    """
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, SystemExit):
        return int(error.code is not None)
    if isinstance(error, RendezvousTimeout):
        return FAILED
    if isinstance(error, ClusterError):
        return DISAGREED
    return USAGE if isinstance(error, SpmdError) and not _current.run_started else FAILED


def write_to_stderr(text: str) -> None:
    """Write a line from a signal handler, which may interrupt print itself; a terminal that has
    been closed shows nothing.
    """
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def print_error(error: BaseException) -> None:
    """Print an error as Python would."""
    traceback.print_exception(error, file=sys.stderr)
