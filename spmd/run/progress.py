"""Live progress in a terminal or a notebook; elsewhere only on request."""

import contextlib
import errno
import html
import io
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO, cast

from spmd.base.log_info import log_info
from spmd.base.tree import format_bytes
from spmd.errors import OptionError, short_repr
from spmd.render.sparkline import MOST, panel, spark
from spmd.run.work import UNKNOWN, Work, peak_memory

REFRESH_SECONDS = 0.2  # between two redraws
NOTEBOOK_WIDTH = 200  # characters per line; the page wraps them
# (Minimum width of the console, width of the bar, which is left out if it does not fit.)
BAR_WIDTHS = ((120, 24), (70, 10), (0, 4))
TIME_WIDTH = 12  # characters of the remaining time and the gaps between columns
WAITING_SHOWN = 0.1  # share of time
LOG_SECONDS = 5.0  # between two lines of a log
TICK_SECONDS = 1.0  # between two looks at the clock while something takes long

PRE = (
    '<pre style="font: 13px/1.4 ui-monospace, monospace; margin: 0; white-space: pre-wrap; '
    'word-break: normal">{code}</pre>'
)


class Pace(NamedTuple):
    """The progress of training.

    Attributes:
      samples: examples so far.
      seconds: of a clock that runs while steps are computed or wait for data; compiling,
        evaluating, saving and profiling do not count.
      waited: seconds of waiting for data so far, also while the devices computed.
    """

    samples: int
    seconds: float
    waited: float = 0.0


AT_REST = Pace(0, 0.0)


class NoProgress:
    """A display that shows nothing, and is never due."""

    def _do_nothing(self, *args: Any, **options: Any) -> None:
        """Ignore the call."""

    start = begin = due = update = show = say = evaluated = close = _do_nothing

    def note(self, line: str) -> None:
        """Log a line that is to be seen without a display too."""
        log_info(line)

    def doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which nothing is shown."""
        del what
        return contextlib.nullcontext()


class Progress:
    """A display that computes what to show, at most every `period` seconds; subclasses draw it on a
    `rich` console.
    """

    def __init__(self, console: Any, period: float):
        self._console = console
        self._period = period
        self._total: int | None = None
        self._next = 0.0  # time of the next redraw
        self._rate = 0.0  # samples per second
        self._waiting = 0.0  # share of time spent waiting for data
        self._started: Pace | None = None  # when the run began
        self._measured: Pace | None = None  # when the rate was last measured
        # At each redraw; every other one is dropped when there are many.
        self._losses: dict[int, float] = {}
        self._doing: list[tuple[str, float]] = []  # what is done and since when, innermost last

    def start(self, step: int, total: int | None, doing: str = "compiling") -> None:
        """Begin at `step` of `total` (None: unknown); `doing` is shown until the first update, from
        whose pace on rates are measured.
        """
        del doing
        self._started = self._measured = None
        self._total = total

    def begin(self, pace: Pace) -> None:
        """Measure rates from this pace on: what came before, such as a first call that was
        compiled, is in none.
        """
        self._started = self._measured = pace
        self._rate = 0.0

    def due(self) -> bool:
        """Return whether it is time to redraw."""
        return time.monotonic() >= self._next

    def update(
        self,
        step: int,
        epoch: int,
        metrics: dict[str, float],
        pace: Pace,
        work: Work = UNKNOWN,
        *,
        last: bool = False,
    ) -> None:
        """Redraw; the last update of a run shows the rate of the whole run."""
        self._next = time.monotonic() + self._period
        self._measure(pace, last)
        numbers = [f"{name} {value:.4g}" for name, value in metrics.items()]
        if "loss" in metrics:
            self._losses[step] = metrics["loss"]
        if len(self._losses) > MOST:
            self._losses = dict(list(self._losses.items())[::2])
        curve = ""
        if len(self._losses) > 1:
            curve = spark(list(self._losses.values()))
        self._draw(step, [f"epoch {epoch + 1}", *numbers, *self._speed(work), *_memory()], curve)

    def _measure(self, pace: Pace, last: bool) -> None:
        """Measure the rate since it was last measured, and smooth it; at the end of a run, that of
        the whole run.
        """
        if self._started is None or self._measured is None:
            self._started = self._measured = pace
        since = self._started if last else self._measured
        seconds = pace.seconds - since.seconds
        # Many steps may end at once: their number over next to no time is no rate.
        if seconds <= 0 or (seconds < self._period and not last):
            return
        rate = (pace.samples - since.samples) / seconds
        if self._rate > 0 and not last:
            rate = 0.7 * self._rate + 0.3 * rate
        self._rate = rate
        self._waiting = min(max(pace.waited - since.waited, 0.0) / seconds, 1.0)
        self._measured = pace

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show what is done in the block, at once, and for how long as time passes: the thread that
        does it cannot.
        """
        self._doing.append((what, time.monotonic()))
        self._show_doing(what, 0.0)
        done = threading.Event()
        thread = None
        if len(self._doing) == 1:

            def watch() -> None:
                while not done.wait(TICK_SECONDS):
                    # A display that cannot be drawn ends no run.
                    with contextlib.suppress(Exception):
                        self._tick()

            thread = threading.Thread(target=watch, name="spmd progress", daemon=True)
            thread.start()
        try:
            yield
        finally:
            if thread is not None:
                done.set()
                thread.join()
            self._doing.pop()
            if not self._doing:
                self._show_doing("", 0.0)

    def _tick(self) -> None:
        """Show the innermost thing that is done, and for how long."""
        what, since = self._doing[-1]
        self._show_doing(what, time.monotonic() - since)

    def _show_doing(self, what: str, seconds: float) -> None:
        """Show what is done, and since when; "": nothing any more."""

    def _speed(self, work: Work) -> list[str]:
        """Return tokens per second of text, else samples; MFU; HFU if it is more; and the share of
        waiting for data, if it is worth a look.

        Nothing before a rate was measured.
        """
        if not self._rate:
            return []
        rates = work.rates(self._rate)
        parts = []
        if work.tokens:
            parts.append(f"{rates['tokens_per_second']:,.0f} tokens/s")
        else:
            parts.append(f"{self._rate:,.0f} samples/s")
        if "mfu" in rates:
            parts.append(f"MFU {rates['mfu']:.1%}")
        if rates.get("hfu", 0.0) > rates.get("mfu", 0.0):
            parts.append(f"HFU {rates['hfu']:.1%}")
        if self._waiting >= WAITING_SHOWN:
            parts.append(f"{self._waiting:.0%} waiting for data")
        return parts

    def show(self, step: int, parts: Sequence[str]) -> None:
        """Redraw with other texts than those of a training step."""
        self._next = time.monotonic() + self._period
        self._draw(step, parts, "")

    def _draw(self, step: int, parts: Sequence[str], curve: str) -> None:
        """Draw, each kind of progress in its own way; the curve is shown where there is room beside
        all the rest.
        """
        raise NotImplementedError  # abstract: only subclasses are made

    def note(self, line: str) -> None:
        """Print a line, also one that a run without a display logs."""
        self.say(line)

    def say(self, text: str) -> None:
        """Print text that stays, wrapped between words; a longer word than the terminal, such as a
        path, is not split.
        """
        wrapper = textwrap.TextWrapper(
            self._console.width, break_long_words=False, break_on_hyphens=False
        )
        self._console.print(
            "\n".join(map(wrapper.fill, text.split("\n"))),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Show the results of an evaluation."""
        numbers = [f"{name} {value:.4f}" for name, value in results.items()]
        self.say(f"step {step}: {'  '.join(numbers)}")

    def close(self) -> None:
        """Stop drawing."""


class Lines(Progress):
    """Plain lines, for logs."""

    _said_at = 0.0  # seconds for which something had taken long when that was last said

    def _draw(self, step: int, parts: Sequence[str], curve: str) -> None:
        position = f"step {step}"
        if self._total:
            position += f"/{self._total}"
        texts = [position, *parts]
        if curve:
            texts.append(curve)
        self.say("  ".join(texts))

    def _show_doing(self, what: str, seconds: float) -> None:
        """Print a line when something has taken long, and again after as long."""
        self._said_at = min(self._said_at, seconds)
        if what and seconds >= self._said_at + LOG_SECONDS:
            self._said_at = seconds
            self.say(f"{what} ({seconds:.0f} s)")

    def say(self, text: str) -> None:
        """Print one line without wrapping."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bar(Progress):
    """Step, remaining time, a bar, metrics and samples per second, in place in a terminal.

    Step and time are always shown; in a narrow terminal first the curve gives way, then metrics,
    the last ones first, then the bar.
    """

    def __init__(self, console: Any, period: float):
        from rich import progress
        from rich.table import Column

        super().__init__(console, period)
        step = progress.MofNCompleteColumn(table_column=Column(no_wrap=True))
        self._meter = progress.BarColumn(table_column=Column(no_wrap=True))
        left = progress.TimeRemainingColumn(table_column=Column(no_wrap=True))
        text = progress.TextColumn("{task.fields[text]}", markup=False)
        self._columns = (step, self._meter, left, text)
        self._without_meter = (step, left, text)
        # Without rich's thread: the loop redraws, at most once per period.
        self._bar = progress.Progress(*self._columns, console=console, auto_refresh=False)
        self._task: Any = None
        self._has_line = False  # a line shows what is done before the bar

    def start(self, step: int, total: int | None, doing: str = "compiling") -> None:
        """Draw the bar at `step` of `total` (None: unknown)."""
        super().start(step, total, doing)
        self._show_doing("", 0.0)
        self._task = self._bar.add_task("", total=total, completed=step, text="")
        self._set_text(step, [doing], "")
        self._begin()

    def _set_text(self, step: int, parts: Sequence[str], curve: str) -> None:
        """Set the text beside the bar, and the width of the bar, for the terminal's width now."""
        if self._total is None:
            step_width = len(f"{step}/?")
        else:
            step_width = 2 * len(str(self._total)) + 1
        width = self._console.width
        room = width - TIME_WIDTH - step_width
        bar_width = next(size for least, size in BAR_WIDTHS if width >= least)
        self._meter.bar_width = bar_width
        self._bar.columns = self._columns if bar_width <= room else self._without_meter
        text = _join_fitting(parts, room - bar_width, curve)
        self._bar.update(self._task, completed=step, text=text)

    def _draw(self, step: int, parts: Sequence[str], curve: str) -> None:
        self._set_text(step, parts, curve)
        self._refresh()

    def _show_doing(self, what: str, seconds: float) -> None:
        text = what
        if seconds >= TICK_SECONDS:
            text += f" ({seconds:.0f} s)"
        if self._task is None:
            if text or self._has_line:
                self._show_line(text)
                self._has_line = bool(text)
        elif text:
            self._draw(int(self._bar.tasks[0].completed), [text], "")

    def _show_line(self, text: str) -> None:
        """Show a line that the next one, or the bar, replaces."""
        self._console.file.write(f"\r\x1b[K{text[: self._console.width - 1]}")
        self._console.file.flush()

    def _begin(self) -> None:
        self._bar.start()

    def _refresh(self) -> None:
        self._bar.refresh()

    def say(self, text: str) -> None:
        """Print text that stays, wrapped between words."""
        if self._has_line:
            self._show_line("")
        super().say(text)

    def close(self) -> None:
        """Keep the last state."""
        self._bar.stop()


class NotebookBar(Bar):
    """The bar as one output of the cell, which each redraw replaces; rich's own display would need
    ipywidgets.
    """

    def __init__(self, console: Any, period: float):
        super().__init__(console, period)
        self._handle: Any = None
        self._curve = ""
        self._evaluated: dict[int, float] = {}  # losses of evaluations, by step

    def _begin(self) -> None:
        self._refresh()

    def _replace(self, content: dict[str, str]) -> None:
        """Replace the output, which the first one makes."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": ""}, raw=True, display_id=True)
        self._handle.update(content, raw=True)

    def _show_line(self, text: str) -> None:
        self._replace({"text/plain": text})

    def _refresh(self) -> None:
        """Replace the output by the bar, and a curve of the loss below it, which as text stands
        beside it.
        """
        self._console.print(self._bar.get_renderable())
        text = self._console.export_text().strip()
        # No colours: those of the page are used.
        markup = PRE.format(code=html.escape(text.removesuffix(self._curve).strip()))
        if len(self._losses) > 1 or self._evaluated:
            markup += panel("loss", self._losses, self._evaluated)
        self._replace({"text/plain": text, "text/html": markup})

    def _draw(self, step: int, parts: Sequence[str], curve: str) -> None:
        self._curve = curve
        super()._draw(step, parts, curve)

    def say(self, text: str) -> None:
        """Print a line below the bar."""
        print(text)

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Show a point beside the curve, and the numbers beside the bar."""
        if "eval_loss" in results:
            self._evaluated[step] = results["eval_loss"]
        numbers = [f"{name} {value:.4g}" for name, value in results.items()]
        self._draw(int(self._bar.tasks[self._task].completed), numbers, "")

    def close(self) -> None:
        """Keep the last state."""


def _join_fitting(parts: Sequence[str], width: int, curve: str = "") -> str:
    """Return the parts that fit the width, in order, joined; then the curve, if all of them do and
    it does too.

    >>> (
    ...     _join_fitting(["epoch 1", "loss 0.25", "1,000 samples/s"], 20),
    ...     _join_fitting(["epoch 1"], 20, "▃▂▁"),
    ... )
    ('epoch 1  loss 0.25', 'epoch 1  ▃▂▁')
    """
    all_parts = [*parts]
    if curve:
        all_parts.append(curve)
    full = "  ".join(all_parts)
    if len(full) <= width:
        return full
    fitting: list[str] = []
    for part in parts:
        if len("  ".join([*fitting, part])) <= width:
            fitting.append(part)
    return "  ".join(fitting)


def _memory() -> list[str]:
    """Return the peak memory of this process's devices, as far as they report it."""
    peak = peak_memory()
    if not peak:
        return []
    return [f"{format_bytes(peak)} per device"]


def _in_kernel() -> bool:
    """Return whether notebook cells run in this process; that IPython was imported is not
    enough.
    """
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


class _Screen:
    """A stream whose reader may be gone, such as a closed terminal: output that cannot be shown
    ends no run.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Write text, unless the reader is gone."""
        with _reader_may_be_gone():
            self._stream.write(text)

    def flush(self) -> None:
        """Show what is written, unless the reader is gone."""
        with _reader_may_be_gone():
            self._stream.flush()


@contextlib.contextmanager
def _reader_may_be_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Linux reports EIO for a closed terminal, and EPIPE for a pipe.
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise


def make_progress(choice: bool | str) -> NoProgress | Progress:
    """Return a display: with `True` anywhere, with `False` nowhere, with `"auto"` in a terminal or
    a notebook.
    """
    if not isinstance(choice, bool) and not (isinstance(choice, str) and choice == "auto"):
        raise OptionError(f"progress={short_repr(choice)}.", fix='True, False or "auto".')
    if choice is False:
        return NoProgress()
    from rich.console import Console

    if _in_kernel():
        # The console records into memory; the bar gives its text to the notebook.
        console = Console(
            file=io.StringIO(),
            record=True,
            width=NOTEBOOK_WIDTH,
            no_color=True,
            force_jupyter=False,
        )
        return NotebookBar(console, REFRESH_SECONDS)
    console = Console(file=cast(TextIO, _Screen(sys.stderr)))
    if console.is_terminal:
        return Bar(console, REFRESH_SECONDS)
    if choice == "auto":
        return NoProgress()
    return Lines(console, LOG_SECONDS)
