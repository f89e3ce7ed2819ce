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

from spmd.errors import OptionError, short_repr
from spmd.log_info import log_info
from spmd.render.sparkline import MOST, panel, spark
from spmd.run.work import UNKNOWN, Work, peak_memory
from spmd.tree import format_bytes

REFRESH_SECONDS = 0.2  # between two redraws
NOTEBOOK_WIDTH = 200  # characters per line; the page wraps them
# (minimum width of the console, width of the bar, which is left out if it does not fit)
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
    """How far training has come.

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
    """Shows nothing, and is never due."""

    def _do_nothing(self, *args: Any, **options: Any) -> None:
        """Ignore the call."""

    start = begin = due = update = show = say = evaluated = close = _do_nothing

    def note(self, line: str) -> None:
        """Log a line that is to be seen without a display too."""
        log_info(line)

    def doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Nothing is shown."""
        del what
        return contextlib.nullcontext()


class Progress:
    """Computes what to show, at most every `period` seconds; subclasses draw it on a `rich`
    console.
    """

    def __init__(self, console: Any, period: float):
        self._console, self._period, self._total = console, period, None
        # the next redraw; samples per second; share of time spent waiting for data
        self._next, self._rate, self._waiting = 0.0, 0.0, 0.0
        self._started: Pace | None = None  # when the run began
        self._measured: Pace | None = None  # when the rate was last measured
        # at each redraw; every other one is dropped when there are many
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
        """Whether it is time to redraw."""
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
        self._losses |= {step: metrics["loss"]} if "loss" in metrics else {}
        if len(self._losses) > MOST:
            self._losses = dict(list(self._losses.items())[::2])
        curve = spark(list(self._losses.values())) if len(self._losses) > 1 else ""
        self._draw(step, [f"epoch {epoch + 1}", *numbers, *self._speed(work), *_memory()], curve)

    def _measure(self, pace: Pace, last: bool) -> None:
        """Measure the rate since it was last measured, and smooth it; at the end of a run, that of
        the whole run.
        """
        if self._started is None or self._measured is None:
            self._started = self._measured = pace
        since = self._started if last else self._measured
        seconds = pace.seconds - since.seconds
        if seconds <= 0 or (seconds < self._period and not last):
            return  # many steps may end at once: their number over next to no time is no rate
        rate = (pace.samples - since.samples) / seconds
        smooth = self._rate > 0 and not last
        self._rate = 0.7 * self._rate + 0.3 * rate if smooth else rate
        self._waiting = min(max(pace.waited - since.waited, 0.0) / seconds, 1.0)
        self._measured = pace

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show what is done in the block, at once, and for how long as time passes: the thread that
        does it cannot.
        """
        self._doing.append((what, time.monotonic()))
        self._show_doing(what, 0.0)
        done, thread = threading.Event(), None
        if len(self._doing) == 1:

            def watch() -> None:
                while not done.wait(TICK_SECONDS):
                    # a display that cannot be drawn ends no run
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
        """Tokens per second of text, else samples; MFU; HFU if it is more; and the share of waiting
        for data, if it is worth a look.

        Nothing before a rate was measured.
        """
        if not self._rate:
            return []
        rates = work.rates(self._rate)
        parts = [
            f"{rates['tokens_per_second']:,.0f} tokens/s"
            if work.tokens
            else f"{self._rate:,.0f} samples/s"
        ]
        parts += [f"MFU {rates['mfu']:.1%}"] if "mfu" in rates else []
        parts += (
            [f"HFU {rates['hfu']:.1%}"] if rates.get("hfu", 0.0) > rates.get("mfu", 0.0) else []
        )
        return (
            [*parts, f"{self._waiting:.0%} waiting for data"]
            if self._waiting >= WAITING_SHOWN
            else parts
        )

    def show(self, step: int, parts: Sequence[str]) -> None:
        """Redraw with other texts than those of a training step."""
        self._next = time.monotonic() + self._period
        self._draw(step, parts, "")

    def _draw(self, step: int, parts: Sequence[str], curve: str) -> None:
        """Each kind of progress draws its own way; the curve is shown where there is room for all
        the rest.
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
        self.say(
            f"step {step}: " + "  ".join(f"{name} {value:.4f}" for name, value in results.items())
        )

    def close(self) -> None:
        """Stop drawing."""


class Lines(Progress):
    """Plain lines, for logs."""

    _said_at = 0.0  # seconds for which something had taken long when that was last said

    def _draw(self, step: int, parts: Sequence[str], curve: str) -> None:
        self.say(
            "  ".join(
                [
                    f"step {step}{f'/{self._total}' if self._total else ''}",
                    *parts,
                    *filter(None, [curve]),
                ]
            )
        )

    def _show_doing(self, what: str, seconds: float) -> None:
        """A line when something has taken long, and again after as long."""
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
        self._columns, self._without_meter = (step, self._meter, left, text), (step, left, text)
        self._bar = progress.Progress(*self._columns, console=console, auto_refresh=False)
        self._task: Any = None
        self._line = False  # whether a line shows what is done before the bar

    def start(self, step: int, total: int | None, doing: str = "compiling") -> None:
        """Draw the bar at `step` of `total` (None: unknown)."""
        super().start(step, total, doing)
        self._show_doing("", 0.0)
        self._task = self._bar.add_task("", total=total, completed=step, text="")
        self._set_text(step, [doing], "")
        self._begin()

    def _set_text(self, step: int, parts: Sequence[str], curve: str) -> None:
        """The text beside the bar, and the width of the bar, for a terminal of today's width."""
        step_width = len(f"{step}/?") if self._total is None else 2 * len(str(self._total)) + 1
        room, width = self._console.width - TIME_WIDTH - step_width, self._console.width
        self._meter.bar_width = size = next(size for least, size in BAR_WIDTHS if width >= least)
        self._bar.columns = self._columns if size <= room else self._without_meter
        text = _join_fitting(parts, room - size, curve)
        self._bar.update(self._task, completed=step, text=text)

    def _draw(self, step: int, parts: Sequence[str], curve: str) -> None:
        self._set_text(step, parts, curve)
        self._refresh()

    def _show_doing(self, what: str, seconds: float) -> None:
        text = f"{what} ({seconds:.0f} s)" if seconds >= TICK_SECONDS else what
        if self._task is None:
            if text or self._line:
                self._show_line(text)
                self._line = bool(text)
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
        if self._line:
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
        # no colours: those of the page are used
        markup = PRE.format(code=html.escape(text.removesuffix(self._curve).strip()))
        markup += (
            panel("loss", self._losses, self._evaluated)
            if len(self._losses) > 1 or self._evaluated
            else ""
        )
        self._replace({"text/plain": text, "text/html": markup})

    def _draw(self, step: int, parts: Sequence[str], curve: str) -> None:
        self._curve = curve
        super()._draw(step, parts, curve)

    def say(self, text: str) -> None:
        """Print a line below the bar."""
        print(text)

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """A point beside the curve, and the numbers beside the bar."""
        self._evaluated |= {step: results["eval_loss"]} if "eval_loss" in results else {}
        shown = [f"{name} {value:.4g}" for name, value in results.items()]
        self._draw(int(self._bar.tasks[self._task].completed), shown, "")

    def close(self) -> None:
        """Keep the last state."""


def _join_fitting(parts: Sequence[str], width: int, curve: str = "") -> str:
    """The parts that fit the width, in order, joined; then the curve, if all of them do and it does
    too.

    >>> (
    ...     _join_fitting(["epoch 1", "loss 0.25", "1,000 samples/s"], 20),
    ...     _join_fitting(["epoch 1"], 20, "▃▂▁"),
    ... )
    ('epoch 1  loss 0.25', 'epoch 1  ▃▂▁')
    """
    shown = list[str]()
    for part in parts:
        shown += [part] if len("  ".join([*shown, part])) <= width else []
    full = "  ".join([*parts, *filter(None, [curve])])
    return full if len(full) <= width else "  ".join(shown)


def _memory() -> list[str]:
    """The peak memory of this process's devices, as far as they report it."""
    peak = peak_memory()
    return [f"{format_bytes(peak)} per device"] if peak else []


def _in_kernel() -> bool:
    """Whether notebook cells run in this process; that IPython was imported is not enough."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


class _Screen:
    """A stream whose reader may be gone, such as a closed terminal: what cannot be shown ends no
    run.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Write, and show it."""
        with _reader_may_be_gone():
            self._stream.write(text)

    def flush(self) -> None:
        """Show what is written."""
        with _reader_may_be_gone():
            self._stream.flush()


@contextlib.contextmanager
def _reader_may_be_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):  # of a closed terminal, and of a pipe
            raise


def make_progress(wanted: bool | str) -> NoProgress | Progress:
    """`True` shows progress anywhere, `False` nowhere, `"auto"` in a terminal or a notebook."""
    if not isinstance(wanted, bool) and not (isinstance(wanted, str) and wanted == "auto"):
        raise OptionError(f"progress={short_repr(wanted)}.", fix='True, False or "auto".')
    if wanted is False:
        return NoProgress()
    from rich.console import Console

    if _in_kernel():
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
    return NoProgress() if wanted == "auto" else Lines(console, LOG_SECONDS)
