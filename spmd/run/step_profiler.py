"""Traces some steps of a run by `jax.profiler`. A profiler that hangs or fails is abandoned with
one warning, and training continues.
"""

import contextlib
import dataclasses
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from spmd.base.log_info import log_info
from spmd.base.tracebacks import trims_tracebacks
from spmd.base.user_paths import (
    as_path,
    blocking_file,
    make_folder,
    replace_text,
    run_file,
    wrap_os_errors,
)
from spmd.distributed import watchdog
from spmd.errors import OptionError, first_line, option, quoted, short_repr
from spmd.render.html import document
from spmd.run.config import RunState
from spmd.run.goodput import PAGE_STYLE, PROFILING, WAITING
from spmd.run.progress import NoProgress, Progress
from spmd.run.time_account import TimeAccount

MOST = 100  # steps: a trace has every operation of every device
FOLDER = "profile"
PAGE = "profile.html"
BEFORE, TRACING, DONE = "before", "tracing", "done"


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Profile:
    """The steps that `fit` traces, and the devices that they are compared with.

    Args:
      steps: such as "10:15": from the update after the 10th to the 15th, counted from the start of
        training; their losses are `history["loss"][10:15]`. At most 100. The first two steps of a
        process compile and warm up.
      folder: where the trace goes; None: `profile/` in the folder of `fit(checkpoint=...)`, or
        without one a new temporary folder.
      target: for which devices the step is predicted, as `spmd.plan` takes it, such as
        "8xmine.toml" of `spmd calibrate`; None: the shipped description of the devices that are
        here.
      seconds: how long to wait for the profiler when it starts, and when it stops.

    Raises:
      OptionError: one of these is invalid.

    Example:
      >>> Profile("10:15").begin, Profile("10:15").end
      (10, 15)
    """

    steps: str
    folder: str | Path | None = None
    target: Any = None
    seconds: float = 60.0

    def __post_init__(self) -> None:
        numbers = None
        if isinstance(self.steps, str):
            numbers = re.fullmatch(r"([0-9]+):([0-9]+)", self.steps.strip())
        if numbers is None:
            raise OptionError(
                f"Profile: {option('steps', short_repr(self.steps))}.",
                fix='two numbers of steps, such as "10:15".',
            )
        begin = int(numbers[1])
        end = int(numbers[2])
        if begin >= end:
            other = f"{end}:{begin}"
            if begin == end:
                other = f"{begin}:{begin + 5}"
            raise OptionError(
                f"Profile: {option('steps', quoted(self.steps))} has no step.",
                fix=f'the smaller number first, such as "{other}".',
            )
        if end - begin > MOST:
            why = (
                f"Profile: {option('steps', quoted(self.steps))} is {end - begin} steps, and at "
                f"most {MOST} are traced"
            )
            why += ": a trace has every operation."
            raise OptionError(why, fix=f'fewer, such as "{begin}:{begin + 5}".')
        if (
            isinstance(self.seconds, bool)
            or not isinstance(self.seconds, int | float)
            or not 0 < self.seconds <= threading.TIMEOUT_MAX
        ):
            raise OptionError(
                f"Profile: {option('seconds', short_repr(self.seconds))}.",
                fix="a number above 0, such as 60.",
            )
        if self.folder is not None:
            object.__setattr__(self, "folder", as_path(self.folder, "folder"))
        object.__setattr__(self, "_range", (begin, end))

    @property
    def begin(self) -> int:
        """The number of updates made before the first that is traced."""
        return self._range[0]  # type: ignore[attr-defined]

    @property
    def end(self) -> int:
        """The number of updates made once the last that is traced is done."""
        return self._range[1]  # type: ignore[attr-defined]

    def __str__(self) -> str:
        if self.end == self.begin + 1:
            return f"step {self.end}"
        return f"steps {self.begin + 1} to {self.end}"


def as_profile(value: Any, run_folder: Path | None = None) -> Profile | None:
    """Return the option `profile` of `fit`, and make its folder; a folder in the run's is not made
    yet, since the run may be refused.

    Raises:
      OptionError: it is neither None, nor a text such as "10:15", nor a `Profile`; or the folder
        cannot be made, or not written to.
      CheckpointError: in the run's folder, a link is in the place of the summary.
    """
    if value is None:
        return None
    profile = value if isinstance(value, Profile) else Profile(value)
    if profile.folder is not None:
        folder = Path(profile.folder)
        make_folder(folder, OptionError)
        # A folder may exist, and not be writable.
        with wrap_os_errors(folder, OptionError, "folder"), tempfile.TemporaryFile(dir=folder):
            pass
    elif run_folder is not None:
        why = blocking_file(run_folder / FOLDER)
        if why is not None:
            raise OptionError(
                f"Profile: the folder {run_folder / FOLDER} cannot be created: {why}.",
                fix="Profile(steps, folder=...).",
            )
    if run_folder is not None:
        run_file(run_folder, PAGE)
    return profile


class StepProfiler:
    """Starts a trace before the first call that makes one of the steps, and stops it after the last
    one; a call of several steps is traced in full. Each process traces its devices into a folder of
    its own; process 0 summarises the trace.

    Args:
      run_folder: of the run; None if it has none.
      summarize: returns what `fit` gives as `result.profile`, from `trace`, the file; `first` and
        `last`, the steps; `calls`, how many steps each call made; and `waited`, in seconds.

    Attributes:
      profile: what `summarize` has returned; None before, and if something failed.
    """

    def __init__(
        self,
        options: Profile,
        run_folder: Path | None,
        progress: NoProgress | Progress,
        summarize: Callable[..., Any],
    ):
        self._options = options
        self._run_folder = run_folder
        self._progress = progress
        self._summarize = summarize
        self._state = BEFORE
        self._calls: list[int] = []
        self._first = 0
        self._waited = 0.0
        self._began_at: int | None = None  # the run's first step in this process
        self._given_up = threading.Event()
        self._folder = Path()
        self._earlier: dict[Path, int] = {}
        # JAX gets a link when a trace starts; if its folder cannot be written to when the trace
        # stops, a new folder takes the link's place.
        self._link = Path()
        self.profile: Any = None

    def check(self, steps_per_call: int) -> None:
        """Refuse calls of too many steps.

        Raises:
          OptionError: a call, which is traced in full, makes more than 100 steps.
        """
        if steps_per_call > MOST:
            why = (
                f'profile="{self._options.steps}": a call is traced in full, makes '
                f"{steps_per_call} steps, and at most {MOST} are traced."
            )
            raise OptionError(why, fix=f"spmd.data.resident(data, steps_per_call={MOST // 2}).")

    @contextlib.contextmanager
    def trace_call(self, run: RunState, count: int) -> Iterator[None]:
        """Trace the call in the block, which dispatches `count` steps, if one of them is due."""
        options = self._options
        if self._began_at is None:
            self._began_at = run.step
        if self._state == BEFORE and run.step < options.end and run.step + count > options.begin:
            if self._began_at > options.begin:
                self._warn(f"not all of {options}, because the run began at step {self._began_at}")
            self._start(run)
        yield
        if self._state == TRACING:
            self._calls.append(count)
            if run.step >= options.end:
                self._finish(run)

    def end(self, run: RunState) -> None:
        """Stop a trace that is not complete after the run's last step, or say that there is
        none.
        """
        if self._state == TRACING:
            self._warn(f"not all of {self._options}, because the run ended after step {run.step}")
            self._finish(run)
        elif self._state == BEFORE and jax.process_index() == 0:
            passed = self._began_at is not None and self._began_at >= self._options.end
            why = f"began at step {self._began_at}" if passed else f"ended after step {run.step}"
            self._warn(f"no trace of {self._options}, because the run {why}")

    def close(self, account: TimeAccount) -> None:
        """Stop without a summary, after an error."""
        if self._state == TRACING:
            self._state = DONE
            with account(PROFILING):
                self._within_limit("stopped", self._stop_trace)

    def _stop_trace(self) -> None:
        with contextlib.suppress(OSError):
            # The folder may have been removed since the trace started.
            self._folder.mkdir(parents=True, exist_ok=True)
        try:
            jax.profiler.stop_trace()
        except Exception:
            # JAX starts no other trace before it has written this one: it is written to a folder
            # of its own in place of the link, and removed.
            with contextlib.suppress(Exception):
                self._link.unlink()
                self._link.mkdir()
                jax.profiler.stop_trace()
            raise
        finally:
            shutil.rmtree(self._link.parent, ignore_errors=True)

    def _start(self, run: RunState) -> None:
        # DONE until the trace has started: one that fails is not tried again.
        self._state = DONE
        self._first = run.step + 1
        # The devices may be one step behind, and the trace must not have an earlier step.
        jax.block_until_ready(run.state)
        with run.account(PROFILING):
            started = self._start_trace()
        if started:
            self._state = TRACING
            self._waited = run.account.goodput[WAITING]

    def _start_trace(self) -> bool:
        self._folder = self._make_folder()
        self._earlier = self._traces()
        options = jax.profiler.ProfileOptions()
        # The trace has operations of the devices. Each call of Python would fill it.
        options.python_tracer_level = 0
        options.host_tracer_level = 1

        def start() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._link = Path(tempfile.mkdtemp(prefix="spmd-profile-")) / "trace"
            self._link.symlink_to(self._folder.absolute())
            try:
                jax.profiler.start_trace(self._link, profiler_options=options)
            except Exception:
                shutil.rmtree(self._link.parent, ignore_errors=True)
                raise
            # It has started too late, and nothing else would stop it.
            if self._given_up.is_set():
                self._stop_trace()

        return self._within_limit("started", start)

    def _finish(self, run: RunState) -> None:
        self._state = DONE
        waited = run.account.goodput[WAITING] - self._waited
        jax.block_until_ready(run.state)
        with run.account(PROFILING):
            stopped = self._within_limit("stopped", self._stop_trace)
            if stopped and jax.process_index() == 0:
                with watchdog.current().local_work():
                    self._write_summary(run, waited)

    def _write_summary(self, run: RunState, waited: float) -> None:
        """Summarise the trace, and write the page of the summary."""
        try:
            traces = []
            for path, written in self._traces().items():
                if self._earlier.get(path) != written:
                    traces.append(path)
            if not traces:
                raise ValueError("the profiler has written no file")
            self.profile = self._summarize(
                trace=traces[0],
                first=self._first,
                last=run.step,
                calls=tuple(self._calls),
                waited=waited,
            )
            page_folder = self._folder if self._run_folder is None else self._run_folder
            page = page_folder / PAGE
            text = document(repr(self.profile), self.profile._repr_html_(), style=PAGE_STYLE)
            replace_text(page, text)
        except Exception as error:
            # A trace may have anything that is not expected, and training does not depend on it.
            self._warn(
                f"the trace in {self._folder} has no summary: {_cause(error)}. Training continues"
            )
            return
        if isinstance(self._progress, NoProgress):
            log_info(f"profile: {page}")
        self._progress.say(str(self.profile))

    def _make_folder(self) -> Path:
        """Return the folder of this process's trace."""
        if self._options.folder is not None:
            folder = Path(self._options.folder)
        elif self._run_folder is not None:
            folder = self._run_folder / FOLDER
        else:
            folder = Path(tempfile.mkdtemp(prefix="spmd-profile-"))
        if jax.process_count() > 1:
            # The name of a trace is a time, which several processes may share.
            folder /= f"process-{jax.process_index()}"
        return folder

    def _traces(self) -> dict[Path, int]:
        """Return the traces in the folder, and when each was written; traces that begin in the same
        second have one name.
        """
        paths = self._folder.glob("plugins/profile/*/*.xplane.pb")
        return {path: path.stat().st_mtime_ns for path in paths}

    def _within_limit(self, done: str, call_profiler: Callable[[], None]) -> bool:
        """Call the profiler in a thread, and wait until it returns, but not forever; return whether
        it did, without an error.
        """
        errors: list[BaseException] = []
        returned = threading.Event()

        def call_and_note() -> None:
            try:
                call_profiler()
            except BaseException as error:
                errors.append(error)
            finally:
                returned.set()

        # A daemon: the profiler may hang, and the process must be able to end.
        threading.Thread(target=call_and_note, name="spmd profiler", daemon=True).start()
        with watchdog.current().local_work():
            in_time = returned.wait(self._options.seconds)
        if not in_time:
            self._given_up.set()
            errors.append(
                TimeoutError(f"it has not {done} within {self._options.seconds:g} seconds")
            )
        if errors:
            self._warn(f"the profiler is abandoned: {_cause(errors[0])}. Training continues")
        return not errors

    def _warn(self, why: str) -> None:
        logging.getLogger("spmd").warning("profile: %s.", why)


def _cause(error: BaseException) -> str:
    """Return an error's first line, as part of a sentence."""
    return first_line(error).rstrip(".")
