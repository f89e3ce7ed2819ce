"""The account of a run's time: at each moment it is in one phase. Kept on disk, it continues over
restarts.
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from spmd.base.user_paths import explain_os_error, replace_text, run_file
from spmd.distributed import watchdog
from spmd.distributed.initialize import attempt_times, was_requeued, was_restarted
from spmd.run.goodput import (
    DOWN,
    PROFILING,
    REPEATED,
    STARTING,
    TRAINING,
    WAITING,
    Goodput,
    Timeline,
)
from spmd.run.work import UNKNOWN, Work

FILE = "goodput.json"
PART = ".goodput.json"  # the next contents of FILE, until they are complete
PAGE = "goodput.html"
FLUSH_SECONDS = 1.0  # between two writes at log intervals

T = TypeVar("T")
_OFFSET = time.time() - time.monotonic()
_accounts = 0  # opened in this process


def now() -> float:
    """Return seconds since 1970, by a clock that never goes backwards within a process."""
    return _OFFSET + time.monotonic()


class TimeAccount:
    """The time of a run by phase (`spmd.run.goodput.PHASES`). `with account("saving"):` charges the
    time spent in the block to a phase, and the time outside to the phase around it: the phases add
    up to the time since the run began.

    Args:
      timeline: what was charged so far.
      clock: returns seconds since 1970.
      launched: when the launcher started; None without one.

    Attributes:
      waited: seconds that the run has waited for data, also while the devices computed.
    """

    def __init__(
        self, timeline: Timeline, clock: Callable[[], float], launched: float | None = None
    ):
        self.timeline = timeline
        self._clock = clock
        self._launched = launched
        self._phase = STARTING
        self.waited = 0.0
        self._path: Path | None = None
        # A warning says once that the file cannot be written.
        self._warned = False
        self._written_at = -math.inf
        self._closed = False
        self._call_seconds = 0.0  # of a call on the devices
        self._done_at = -math.inf  # when the last call was done
        # Step, time without profiling, samples and waited of the last record.
        self._last_record: tuple[int, float, int, float] | None = None

    @classmethod
    def open(cls, folder: Path | None, clock: Callable[[], float] | None = None) -> "TimeAccount":
        """Return the account of a run in a folder, where `write_to` has written the one of earlier
        attempts: a restarted run continues it.
        """
        global _accounts
        if clock is None:
            clock = now
        at = clock()
        times = attempt_times()
        first = not _accounts
        _accounts += 1
        # Without a launcher there are no times: this attempt is the first.
        launched = times[0] if times else None
        starts = times[1::2]
        ends = times[2::2]
        if not times:
            starts = [_process_start(at)] if first else [at]
        stored = None
        if folder is not None and was_restarted():
            stored = _read_account(folder)
        if stored is not None and stored["launched"] != launched and not was_requeued():
            # It is of an earlier run in this folder.
            stored = None
        if stored is None:
            began = at
            if first:
                began = min(launched or at, starts[0], at)
            timeline = Timeline(began)
            phase = STARTING
        else:
            timeline = stored["timeline"]
            phase = stored["phase"]
        # The clock was set back, or is behind the one of the attempt before.
        ahead = timeline.until - at
        if ahead > 0:
            clock = _ahead(clock, ahead)
            at = timeline.until
        # Without a folder an attempt starts over.
        unrecorded = STARTING if folder is not None else REPEATED
        for start, end in zip(starts, ends, strict=False):
            if start > timeline.until or not timeline.attempts:
                _begin_attempt(timeline, start, at)
                phase = unrecorded
            timeline.charge(phase, min(end, at))
        timeline.charge(_phase_before_attempt(timeline), min(starts[-1], at))
        timeline.attempts.append(timeline.until)
        timeline.charge(STARTING, at)
        return cls(timeline, clock, launched)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the time in the block to a phase."""
        previous = self._enter(phase)
        # A process that is killed in the block was in this phase, by the file.
        self._write()
        try:
            yield
        finally:
            self._enter(previous)
            # And one that is killed after the block was not.
            self._write()

    def _enter(self, phase: str) -> str:
        """Charge the time so far to the current phase, which is returned, and enter another."""
        if not self._closed:
            self.timeline.charge(self._phase, self._clock())
        previous = self._phase
        self._phase = phase
        return previous

    def resume(self, pace: Any) -> None:
        """Account for a run that resumes from a checkpoint: the training after it is lost.

        Args:
          pace: the checkpoint's `to_checkpoint()`; None: the run starts over.
        """
        if pace is None:
            trained = 0.0
            began = round(self.timeline.began, 3)
        else:
            trained, began = map(float, pace)
        if began == round(self.timeline.began, 3):
            self.timeline.repeat(self.timeline.totals.get(TRAINING, 0.0) - trained)
        elif (
            was_restarted()
            and began < self.timeline.began
            and not self.timeline.totals.get(TRAINING)
        ):
            # The account of the attempt before is not on disk.
            until = self.timeline.until
            self.timeline = Timeline(began)
            self.timeline.attempts = [began, until]
            self.timeline.charge(TRAINING, min(began + trained, until))
            self.timeline.charge(DOWN, until)

    def to_checkpoint(self) -> list[float]:
        """Return the seconds of training that are part of the state, and when the run began, to be
        saved with a checkpoint.
        """
        return [round(self.goodput[TRAINING], 3), round(self.timeline.began, 3)]

    def count_waiting(
        self, items: Iterable[T], is_idle: Callable[[], bool] = lambda: True
    ) -> Iterator[T]:
        """Yield the same items. Waiting for one is charged to "waiting for data" as far as devices
        had nothing to do; `is_idle` says whether they have nothing to do now. All waiting counts in
        `waited`, and in what the watchdog reports.
        """
        reader = iter(items)
        while True:
            began = self._clock()
            was_idle = is_idle()
            try:
                with watchdog.current().local_work():
                    item = next(reader)
            except StopIteration:
                return
            finally:
                at = self._clock()
                self.waited += at - began
                watchdog.current().data_wait_seconds = self.waited
                if was_idle or is_idle():
                    idle_since = began
                    if not was_idle:
                        # JAX does not say when a call was done: it took as long as the last one.
                        idle_since = min(began + self._call_seconds, at)
                    self.timeline.charge(self._phase, idle_since)
                    self.timeline.charge(WAITING, at)
            yield item

    def call_done(self, dispatched: float, *, awaited: bool) -> None:
        """Note that a call on the devices is done.

        Args:
          dispatched: when it was dispatched.
          awaited: the host has waited for it, so that it ended now.
        """
        at = self._clock()
        if awaited:
            self._call_seconds = at - max(dispatched, self._done_at)
        self._done_at = at

    def now(self) -> float:
        """Return the time by the account's clock."""
        return self._clock()

    def rates(self, step: int, samples: int, work: Work = UNKNOWN) -> dict[str, float]:
        """Return steps, samples and tokens per second, MFU, HFU, the share of time spent waiting
        for data, all since the last record; and goodput.

        Profiling is not part of the time. Waiting idles a device only if reading a batch takes
        longer than a step.

        Args:
          step: steps so far.
          samples: examples so far, over all processes.
          work: what an example is for the devices.
        """
        # Counts FLOPs before the first record, whose time is in no rate.
        work.rates(0.0)
        goodput = self.goodput
        at = self._clock()
        previous = self._last_record
        if at - self._written_at >= FLUSH_SECONDS:
            self._write()
        unprofiled = at - goodput[PROFILING]
        self._last_record = (step, unprofiled, samples, self.waited)
        if previous is None:
            return {}
        last_step, last_unprofiled, last_samples, last_waited = previous
        seconds = unprofiled - last_unprofiled
        if seconds <= 0:
            return {}
        samples_per_second = (samples - last_samples) / seconds
        waiting_share = max(self.waited - last_waited, 0.0) / seconds
        return {
            "steps_per_second": round((step - last_step) / seconds, 3),
            "samples_per_second": round(samples_per_second, 1),
            **work.rates(samples_per_second),
            "data_wait": round(min(waiting_share, 1.0), 3),
            "goodput": round(goodput.share(TRAINING), 3),
        }

    @property
    def goodput(self) -> Goodput:
        """The phases up to now."""
        self._enter(self._phase)
        return Goodput(self.timeline)

    @property
    def training_seconds(self) -> float:
        """Seconds of training so far, those of waiting for data included."""
        goodput = self.goodput
        return goodput[TRAINING] + goodput[WAITING]

    def write_to(self, folder: Path) -> None:
        """Keep the account in a folder from now on."""
        # These are written later, and a link in their place is an error now.
        for name in (PART, PAGE):
            run_file(folder, name)
        self._path = run_file(folder, FILE)
        self._write()

    def _write(self) -> None:
        """Replace the file, in which a reader finds the old account or the new one."""
        self._written_at = self.timeline.until
        if self._path is None:
            return
        values = {**self.timeline.to_json(), "phase": self._phase, "launched": self._launched}
        part = self._path.with_name(PART)
        try:
            part.write_text(json.dumps(values), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            # A full disk, for example, may have room later.
            if not self._warned:
                logging.getLogger("spmd").warning(
                    "%s cannot be written: %s.", self._path, explain_os_error(self._path, error)
                )
            self._warned = True
            with contextlib.suppress(OSError):
                part.unlink()

    def close(self) -> None:
        """Stop the account; write it, and its page. The time until the process has ended is no part
        of the run.
        """
        if self._closed:
            return
        self._enter(DOWN)
        self._closed = True
        self._write()
        if self._path is not None:
            page = self.goodput.page(f"Goodput of {self._path.parent.name}")
            # The disk may be full, as for the account itself, for which `_write` has warned.
            with contextlib.suppress(OSError):
                replace_text(self._path.with_name(PAGE), page)
        self._path = None


def _ahead(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    return lambda: clock() + seconds


def _phase_before_attempt(timeline: Timeline) -> str:
    """Return the phase of the time before an attempt: the run was down, unless it is the first."""
    return DOWN if timeline.attempts else STARTING


def _begin_attempt(timeline: Timeline, start: float, at: float) -> None:
    """Charge the time until an attempt that left no account, and add the attempt."""
    timeline.charge(_phase_before_attempt(timeline), min(start, at))
    if start >= timeline.began:
        timeline.attempts.append(start)


def _read_account(folder: Path) -> dict[str, Any] | None:
    """Return the account in a folder; None: there is none, or it is damaged."""
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        launched = values["launched"]
        if launched is not None:
            launched = float(launched)
        phase = str(values["phase"])
        # Raises KeyError if there is no such phase.
        Goodput(Timeline(0.0))[phase]
        return {"timeline": Timeline.from_json(values), "phase": phase, "launched": launched}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ):
        return None


def _process_start(at: float) -> float:
    """Return when this process started, where the system says so; in an interactive session, and in
    processes that wait for calls of one, now.
    """
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules or os.environ.get("SPMD_TIMES") == "":
        return at
    try:
        line = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        # The second field is the name of the program in parentheses, and may contain any character.
        fields = line.rpartition(")")[2].split()
        started_ticks = float(fields[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return at
    started = started_ticks / os.sysconf("SC_CLK_TCK")  # seconds after the boot
    return at - max(uptime - started, 0.0)
