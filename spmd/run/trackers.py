"""The base class of loggers for experiment trackers.

A thread per tracker talks to it, so that training waits for no server. What a killed run had not
delivered, the resumed run reads from `metrics.jsonl` and delivers; what had arrived, it does not
write again. A tracker that fails is switched off with one warning.
"""

import contextlib
import functools
import inspect
import json
import logging
import math
import queue
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd.base.redact import redact_text
from spmd.distributed import watchdog
from spmd.distributed.initialize import grace_seconds
from spmd.errors import OptionError, did_you_mean, first_line, short_repr
from spmd.run.pictures import FOLDER as PICTURES
from spmd.run.run_facts import RunFacts
from spmd.run.signals import SIGINT_REASON
from spmd.train.histograms import Histogram, counts_not_finite

MOST_QUEUED = 10_000  # records that a tracker may be behind
ARTIFACTS = ("layout.toml", "metrics.jsonl", "*.html", "*.svg", "*.png")  # in the run's folder
ANY = ""  # in the result of `last_steps`: all metrics that are not listed
# In the result of `last_steps`: histograms of parameters and gradients, of which a step has all or
# none.
HISTOGRAMS = "histograms"
# The status of a run that has ended; STOPPED is by Ctrl-C or SIGTERM.
FINISHED = "finished"
FAILED = "failed"
STOPPED = "stopped"


class Tracker:
    """Base class of trackers: a subclass says how a run is found, written and closed, all in one
    thread.

    Args:
      checkpoints: record where the run's checkpoints are, too; they are not copied.
      seconds: how long `close` waits for the tracker; after SIGTERM at most a quarter of the time
        that `spmd launch --grace` gives.

    Raises:
      OptionError: `seconds` is not a number above 0.

    Example:
      >>> class Rows(Tracker):
      ...     def where(self, facts):
      ...         return f"rows of {facts.name}"
      ...
      ...     def open(self, facts):
      ...         self.rows = []
      ...
      ...     def last_steps(self):
      ...         return {"loss": 1}  # what had arrived before a kill
      ...
      ...     def log(self, step, metrics):
      ...         self.rows.append((step, metrics))
      ...
      ...     def finish(self, *, status):
      ...         self.rows.append(status)
      >>> log = Rows()
      >>> log.begin(RunFacts(id="3f29c1d2e8"))
      'rows of run-3f29c1d2'
      >>> for step in (1, 2):
      ...     log.write({"step": step, "loss": 1 / step})
      >>> log.close()
      >>> log.rows
      [(2, {'loss': 0.5}), 'finished']
    """

    def __init__(self, *, checkpoints: bool = False, seconds: float = 60.0, **unknown: Any):
        # A subclass passes on the options that it does not know.
        for name in unknown:
            fix = did_you_mean(name, _option_names(type(self)))
            raise OptionError(f'{type(self).__name__}: there is no option "{name}".', fix=fix)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 < seconds <= threading.TIMEOUT_MAX
        ):
            raise OptionError(
                f"{type(self).__name__}: seconds={short_repr(seconds)}.",
                fix="a number above 0, such as 60.",
            )
        if not isinstance(checkpoints, bool):
            raise OptionError(
                f"{type(self).__name__}: checkpoints={short_repr(checkpoints)}.",
                fix="True or False.",
            )
        self._checkpoints = checkpoints
        self._seconds = float(seconds)
        # None: no run is open.
        self._jobs: queue.Queue[Callable[[], None] | None] | None = None

    @property
    def place(self) -> Any:
        """The place that no two trackers of a class may share: a run there, whose steps both would
        write.
        """
        return id(self)

    def where(self, facts: RunFacts) -> str:
        """Return where the run is recorded, as one line."""
        raise NotImplementedError  # abstract: a subclass says how

    def open(self, facts: RunFacts) -> None:
        """Find the run with the id `facts.id`, or create it."""
        raise NotImplementedError  # abstract: a subclass says how

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each metric that the run had when it was opened, by name; `ANY`
        stands for all others.

        Histograms are `HISTOGRAMS`, and a picture is "pictures/NAME".
        """
        raise NotImplementedError  # abstract: a subclass says how

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step; steps never decrease."""
        raise NotImplementedError  # abstract: a subclass says how

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write all histograms of a step. A tracker that does not say how has none."""
        del step, histograms
        self._note("has no histograms; they are in metrics.jsonl")

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Write a picture of a step, a PNG or SVG file; `name` is "pictures/NAME". A tracker that
        does not say how has none.
        """
        del step, name
        self._note(f"has no pictures, such as {path}")

    def add_file(self, path: Path) -> None:
        """Add a file to the run, in place of an earlier one of its name."""
        raise NotImplementedError  # abstract: a subclass says how

    def add_checkpoints(self, folder: Path) -> None:
        """Record the folder of the run's checkpoints."""
        raise NotImplementedError  # abstract: a subclass says how

    def finish(self, *, status: str) -> None:
        """Flush, and close the run, which is "finished", "failed", or "stopped" by Ctrl-C or
        SIGTERM.
        """
        raise NotImplementedError  # abstract: a subclass says how

    def begin(self, facts: RunFacts) -> str | None:
        """Start to record a run; return a line that says where, or None if that failed."""
        # A run that failed before its first step has not closed its loggers.
        self.close()
        self._off = False
        self._opened = False
        self._facts = facts
        # A user may call `fit` where an error is handled, which is none of the run.
        self._error_before = sys.exc_info()[1]
        self._last: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._noted: set[str] = set()
        self._deadline: float | None = None  # of `close`, once it has begun
        self._jobs = queue.Queue(MOST_QUEUED)
        self._thread = threading.Thread(
            target=self._work, args=(self._jobs,), name=f"spmd {type(self).__name__}", daemon=True
        )
        self._thread.start()
        try:
            earlier = list(_earlier_records(facts))
            line = self.where(facts)
        except Exception as error:
            self._switch_off(error)
            return None
        self._put(functools.partial(self._start, facts, earlier))
        return line

    def write(self, record: dict[str, Any]) -> None:
        """Queue the record's numbers, histograms and pictures."""
        if self._jobs is None:
            self.begin(RunFacts())
        self._put(functools.partial(self._write, dict(record)))

    def begin_close(self) -> None:
        """Begin to deliver what is queued, and to close the run; `close` waits for it. So several
        trackers close at the same time.
        """
        if self._jobs is None or self._deadline is not None:
            return
        # In the phase "script" no run is under way, and a reason is of an earlier one.
        reason = ""
        if watchdog.current().phase != "script":
            reason = watchdog.current().requested_stop_reason
        # `fit` closes loggers while it handles the error that has ended the run.
        if sys.exc_info()[1] is not self._error_before:
            status = FAILED
        elif reason in (SIGINT_REASON, watchdog.SIGTERM_REASON):
            status = STOPPED
        else:
            status = FINISHED
        self._put(functools.partial(self._end, status=status))
        self._put(None)
        self._wait = self._seconds
        if reason == watchdog.SIGTERM_REASON:
            self._wait = min(self._seconds, grace_seconds() / 4)
        self._deadline = time.monotonic() + self._wait

    def close(self) -> None:
        """Deliver what is queued, add the run's files, and close the run; waits until `seconds`
        after `begin_close` at most.
        """
        self.begin_close()
        if self._jobs is None or self._deadline is None:
            return
        if not self._off:
            self._thread.join(max(self._deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._switch_off(TimeoutError(f"it has not finished within {self._wait:g} seconds"))
        self._jobs = None

    def _put(self, job: Callable[[], None] | None) -> None:
        if self._off or self._jobs is None:
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._switch_off(TimeoutError(f"it is {MOST_QUEUED} records behind"))

    def _work(self, jobs: queue.Queue[Callable[[], None] | None]) -> None:
        try:
            while (job := jobs.get()) is not None and not self._off:
                job()
        except BaseException as error:
            # SystemExit, too: a library may raise it.
            self._switch_off(error)
            if self._opened:
                with contextlib.suppress(BaseException):
                    self.finish(status=FAILED)

    def _switch_off(self, error: BaseException) -> None:
        """Stop recording, with one warning."""
        # Before `_off` is set: another thread's `close` drops the queue once the tracker is off.
        jobs = self._jobs
        if not self._off and jobs is not None:
            self._off = True
            why = "the tracker %s is switched off: %s. Training continues without it."
            # Errors of HTTP libraries quote the URL, which may have a password.
            reason = redact_text(first_line(error))
            logging.getLogger("spmd").warning(why, type(self).__name__, reason)
            with contextlib.suppress(queue.Full):
                jobs.put_nowait(None)

    def _start(self, facts: RunFacts, earlier: list[dict[str, Any]]) -> None:
        self.open(facts)
        self._opened = True
        self._last = dict(self.last_steps())
        for record in earlier:
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        """Write the part of a record that the run does not have yet."""
        step = record["step"]
        histograms = {}
        for name, fields in record.get(HISTOGRAMS, {}).items():
            histograms[name] = Histogram(**fields)
        numbers = {name: float(value) for name, value in record.items() if _is_number(name, value)}
        numbers |= counts_not_finite(histograms)
        new = {}
        for name, value in numbers.items():
            accepted = self._name(name)
            if self._is_new(accepted, step):
                new[accepted] = value
        named_histograms = {self._name(name): each for name, each in histograms.items()}
        if named_histograms and self._is_new(HISTOGRAMS, step):
            self.log_histograms(step, named_histograms)
            self._last[HISTOGRAMS] = step
        if new:
            self.log(step, new)
            self._last.update((name, step) for name in new)
        for name, path in record.get(PICTURES, {}).items():
            accepted = self._name(f"{PICTURES}/{name}")
            if not self._is_new(accepted, step):
                continue
            self._last[accepted] = step
            try:
                self.log_picture(step, accepted, (self._facts.folder or Path()) / path)
            except Exception as error:
                # A package may be missing, for example; metrics are still written.
                self._note(f"does not show {accepted}: {first_line(error)}")

    def _is_new(self, name: str, step: int) -> bool:
        return step > self._last.get(name, self._last.get(ANY, -1))

    def _name(self, name: str) -> str:
        """Return a name that every tracker accepts; of names that then are equal, all but the first
        get a checksum.
        """
        if name not in self._names:
            accepted = re.sub(r"[^\w\-./ ]", "_", name)
            if accepted in self._names.values():
                accepted = f"{accepted}_{zlib.crc32(name.encode()):08x}"
                self._note(
                    f'calls "{name}" {accepted}, since another name differs from it in special '
                    "characters only"
                )
            self._names[name] = accepted
        return self._names[name]

    def _note(self, text: str) -> None:
        """Log a warning that does not stop the tracker, once for each text."""
        if text not in self._noted:
            self._noted.add(text)
            text = redact_text(text)
            logging.getLogger("spmd").warning("the tracker %s %s.", type(self).__name__, text)

    def _end(self, *, status: str) -> None:
        """Add the run's files, and close the run."""
        folder = self._facts.folder
        try:
            if folder is not None:
                paths: list[Path] = []
                for pattern in ARTIFACTS:
                    paths += folder.glob(pattern)
                for path in sorted(paths):
                    self.add_file(path)
                if self._checkpoints:
                    self.add_checkpoints(folder.resolve() / "checkpoints")
        finally:
            self._opened = False
            self.finish(status=status)


def _option_names(tracker: type[Tracker]) -> dict[str, None]:
    """Return the options of a class of trackers, and of the classes that it inherits from."""
    names = []
    for kind in tracker.__mro__:
        if kind is object or "__init__" not in vars(kind):
            continue
        for parameter in inspect.signature(kind.__init__).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "self":
                names.append(parameter.name)
    return dict.fromkeys(names)


def _is_number(name: str, value: Any) -> bool:
    return name != "step" and isinstance(value, int | float) and not isinstance(value, bool)


def _earlier_records(facts: RunFacts) -> Iterator[dict[str, Any]]:
    """Yield the records of the run up to the step that it resumes from."""
    if not facts.resumes or facts.folder is None:
        return
    path = facts.folder / "metrics.jsonl"
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        lines.seek(facts.metrics_begin)
        for line in lines:
            # A loss of power may leave a last line that is not JSON.
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                continue
            if record["step"] <= facts.step:
                # `JsonLines` writes null for a number that is not finite.
                yield {name: math.nan if value is None else value for name, value in record.items()}
