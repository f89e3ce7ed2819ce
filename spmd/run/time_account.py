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
from spmd.user_paths import explain_os_error, replace_text, run_file

FILE, PART, PAGE = "goodput.json", ".goodput.json", "goodput.html"
FLUSH_SECONDS = 1.0  # between two writes at log intervals

T = TypeVar("T")
_OFFSET = time.time() - time.monotonic()
_accounts = 0  # opened in this process


def now() -> float:
    """Seconds since 1970, by a clock that never goes backwards within a process."""
    return _OFFSET + time.monotonic()


class TimeAccount:
    """`with account("saving"):` charges the time spent in the block to a phase
    (`spmd.run.goodput.PHASES`), and the rest of the time to the phase around it: the phases add up
    to the time since the run began.

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
        self.timeline, self._clock, self._launched, self._phase = (
            timeline,
            clock,
            launched,
            STARTING,
        )
        self.waited = 0.0
        self._path: Path | None = None
        self._warned = False  # that it cannot be written
        self._written_at, self._closed = -math.inf, False
        # of a call on the devices; when the last one was done
        self._call_seconds, self._done_at = 0.0, -math.inf
        # step, time without profiling, samples, waited
        self._last_record: tuple[int, float, int, float] | None = None

    @classmethod
    def open(cls, folder: Path | None, clock: Callable[[], float] | None = None) -> "TimeAccount":
        """The account of a run in a folder, where `write_to` has written that of earlier attempts:
        a restarted run continues it.
        """
        global _accounts
        clock = now if clock is None else clock
        at, times, first = clock(), attempt_times(), not _accounts
        _accounts += 1
        launched, starts, ends = (
            (times[0], times[1::2], times[2::2])
            if times
            else (None, [_process_start(at) if first else at], [])
        )
        stored = _read(folder) if folder is not None and was_restarted() else None
        if stored is not None and stored["launched"] != launched and not was_requeued():
            stored = None  # of an earlier run in this folder
        if stored is None:
            began = min(launched or at, starts[0], at) if first else at
            timeline, phase = Timeline(began), STARTING
        else:
            timeline, phase = stored["timeline"], stored["phase"]
        # the clock was set back, or is behind that of the attempt before
        if (ahead := timeline.until - at) > 0:
            clock, at = _ahead(clock, ahead), timeline.until
        # without a folder an attempt starts over
        unrecorded = STARTING if folder is not None else REPEATED
        for start, end in zip(starts, ends, strict=False):
            if start > timeline.until or not timeline.attempts:
                timeline.charge(DOWN if timeline.attempts else STARTING, min(start, at))
                timeline.attempts += [start] if start >= timeline.began else []
                phase = unrecorded
            timeline.charge(phase, min(end, at))
        timeline.charge(DOWN if timeline.attempts else STARTING, min(starts[-1], at))
        timeline.attempts.append(timeline.until)
        timeline.charge(STARTING, at)
        return cls(timeline, clock, launched)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the time in the block to a phase."""
        previous = self._enter(phase)
        self._write()  # a process that is killed in the block was in this phase
        try:
            yield
        finally:
            self._enter(previous)
            self._write()  # and one that is killed after it was not

    def _enter(self, phase: str) -> str:
        """Charge the time so far to the current phase, which is returned, and enter another."""
        if not self._closed:
            self.timeline.charge(self._phase, self._clock())
        previous, self._phase = self._phase, phase
        return previous

    def resume(self, pace: Any) -> None:
        """The run resumes from a checkpoint with this `to_checkpoint()`; what was trained after it
        is lost. None: it starts over.
        """
        trained, began = (0.0, round(self.timeline.began, 3)) if pace is None else map(float, pace)
        if began == round(self.timeline.began, 3):
            self.timeline.repeat(self.timeline.totals.get(TRAINING, 0.0) - trained)
        elif (
            was_restarted()
            and began < self.timeline.began
            and not self.timeline.totals.get(TRAINING)
        ):
            # its account is not on disk
            until, self.timeline = self.timeline.until, Timeline(began)
            self.timeline.attempts = [began, until]
            self.timeline.charge(TRAINING, min(began + trained, until))
            self.timeline.charge(DOWN, until)

    def to_checkpoint(self) -> list[float]:
        """Seconds of training that are part of the state, and when the run began, to be saved with
        a checkpoint.
        """
        return [round(self.goodput[TRAINING], 3), round(self.timeline.began, 3)]

    def count_waiting(
        self, items: Iterable[T], is_idle: Callable[[], bool] = lambda: True
    ) -> Iterator[T]:
        """The same items. Waiting for one is charged to "waiting for data" as far as devices had
        nothing to do; `is_idle` says whether they have nothing to do now. All waiting counts in
        `waited`, and in what the watchdog reports.
        """
        reader = iter(items)
        while True:
            began, was_idle = self._clock(), is_idle()
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
                    self.timeline.charge(
                        self._phase, began if was_idle else min(began + self._call_seconds, at)
                    )
                    self.timeline.charge(WAITING, at)
            yield item

    def call_done(self, dispatched: float, *, seen: bool) -> None:
        """A call on the devices is done that was dispatched then; `seen`: the host has waited for
        it, so that this is when it ended.
        """
        at = self._clock()
        if seen:
            self._call_seconds = at - max(dispatched, self._done_at)
        self._done_at = at

    def now(self) -> float:
        """The account's clock."""
        return self._clock()

    def rates(self, step: int, samples: int, work: Work = UNKNOWN) -> dict[str, float]:
        """Steps, samples and tokens per second, MFU, HFU, the share of time spent waiting for data,
        all since the last record; and goodput.

        Profiling is not part of the time. Waiting idles a device only if reading a batch takes
        longer than a step.

        Args:
          step: steps so far.
          samples: examples so far, over all processes.
          work: what an example is for the devices.
        """
        work.rates(0.0)  # counts FLOPs before the first record, whose time is in no rate
        goodput, now, previous = self.goodput, self._clock(), self._last_record
        if now - self._written_at >= FLUSH_SECONDS:
            self._write()
        unprofiled = now - goodput[PROFILING]
        self._last_record = (step, unprofiled, samples, self.waited)
        if previous is None or unprofiled <= previous[1]:
            return {}
        seconds = unprofiled - previous[1]
        return {
            "steps_per_second": round((step - previous[0]) / seconds, 3),
            "samples_per_second": round((samples - previous[2]) / seconds, 1),
            **work.rates((samples - previous[2]) / seconds),
            "data_wait": round(min(max(self.waited - previous[3], 0.0) / seconds, 1.0), 3),
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
        """From now on, keep the account in a folder."""
        for name in (PART, PAGE):  # which are written later
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
        except OSError as error:  # of a full disk, for example, which may have room later
            if not self._warned:
                logging.getLogger("spmd").warning(
                    "%s cannot be written: %s.", self._path, explain_os_error(self._path, error)
                )
            self._warned = True
            with contextlib.suppress(OSError):
                part.unlink()

    def close(self) -> None:
        """Stop the account; write it, and its page. What follows until the process has ended is no
        part of the run.
        """
        if self._closed:
            return
        self._enter(DOWN)
        self._closed = True
        self._write()
        if self._path is not None:
            page = self.goodput.page(f"Goodput of {self._path.parent.name}")
            with contextlib.suppress(OSError):  # as for the account itself, which was just written
                replace_text(self._path.with_name(PAGE), page)
        self._path = None


def _ahead(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    return lambda: clock() + seconds


def _read(folder: Path) -> dict[str, Any] | None:
    """The account in a folder; None: there is none, or it is damaged."""
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        launched, phase = values["launched"], str(values["phase"])
        Goodput(Timeline(0.0))[phase]
        return {
            "timeline": Timeline.from_json(values),
            "phase": phase,
            "launched": launched if launched is None else float(launched),
        }
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
    """When this process started, where the system says so; in an interactive session, and in
    processes that wait for calls of one, now.
    """
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules or os.environ.get("SPMD_TIMES") == "":
        return at
    try:
        ticks = float(
            Path("/proc/self/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()[19]
        )
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return at
    return at - max(uptime - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
