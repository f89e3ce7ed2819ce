"""Live progress, in a terminal or a notebook; nothing at all elsewhere, unless asked for."""

import io
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmd.errors import OptionError, short_repr
from spmd.render.sparkline import MOST, panel, spark
from spmd.tree import format_bytes

REFRESH_SECONDS = 0.2  # seconds between two redraws: a step costs one look at the clock
WIDE = 200  # characters of a notebook's line, which the page wraps; in the page's own ink
BARS = ((120, 24), (70, 10), (0, 4))  # from a width on, characters of the bar
TIME = 12  # characters of the time left and of what is between the columns
SELDOM = 5.0  # seconds between two lines of a log

PRE = '<pre style="font: 13px/1.4 ui-monospace, monospace; margin: 0">{code}</pre>'


class NoProgress:
    """Shows nothing."""

    def start(self, step: int, total: int | None) -> None:
        """Nothing."""

    def due(self) -> bool:
        """Never."""
        return False

    def update(self, step: int, epoch: int, metrics: dict[str, float], samples: int) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Bar:
    """Step, time left, a bar, metrics and samples per second, drawn by rich on whatever `paint` paints on.

    Step and time are always there; of the rest what the width has room for, the first things first.
    """

    def __init__(self, console: Any, paint: Any):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        fixed, text = (lambda: Column(no_wrap=True)), TextColumn("{task.fields[text]}", markup=False)
        bar = BarColumn(bar_width=next(size for width, size in BARS if console.width >= width), table_column=fixed())
        self._progress = Progress(
            MofNCompleteColumn(table_column=fixed()),
            bar,
            TimeRemainingColumn(table_column=fixed()),
            text,
            console=console,
            auto_refresh=False,
        )
        self._task, self._paint = None, paint
        self._room = lambda: console.width - (bar.bar_width or 0) - TIME

    def start(self, step: int, total: int | None) -> None:
        """Draw the bar at `step` of `total` (None: not known)."""
        self._count = lambda step: 2 * len(str(total)) + 1 if total is not None else len(f"{step}/?")
        self._task = self._progress.add_task("", total=total, completed=step, text="compiling")
        self._paint.start(self._progress)

    def draw(self, step: int, parts: Sequence[str], losses: Mapping[int, float]) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=step, text=_fitting(parts, self._room() - self._count(step)))
            self._paint.refresh(self._progress, losses)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._paint.say(self._progress, text)

    def close(self) -> None:
        """Leave the screen as it was."""
        self._paint.stop(self._progress)


class Terminal:
    """Paints in place with the terminal's own means."""

    def start(self, progress: Any) -> None:
        """Begin."""
        progress.start()

    def refresh(self, progress: Any, losses: Mapping[int, float]) -> None:
        """Redraw."""
        progress.refresh()

    def say(self, progress: Any, text: str) -> None:
        """A line above the bar, or several that break between words."""
        progress.console.print(text, markup=False, highlight=False)

    def stop(self, progress: Any) -> None:
        """Leave the last picture."""
        progress.stop()


class Notebook:
    """Paints one output of the cell, again and again; rich's own way would need ipywidgets."""

    def start(self, progress: Any) -> None:
        """Open the output."""
        from IPython.display import display

        self._handle: Any = display({"text/plain": ""}, raw=True, display_id=True)
        self.refresh(progress, {})

    def refresh(self, progress: Any, losses: Mapping[int, float]) -> None:
        """Replace what the output shows: the bar, and the curve of the loss below it."""
        progress.console.print(progress.get_renderable())
        html = progress.console.export_html(inline_styles=False, clear=False, code_format=PRE)  # classes that no page colours
        html += panel("loss", losses, {}) if len(losses) > 1 else ""
        self._handle.update({"text/plain": progress.console.export_text().strip(), "text/html": html}, raw=True)

    def say(self, progress: Any, text: str) -> None:
        """A line below the bar."""
        print(text)

    def stop(self, progress: Any) -> None:
        """Leave the last picture."""


class Lines:
    """Plain lines, for logs."""

    def __init__(self, console: Any):
        self._console, self._total = console, None

    def start(self, step: int, total: int | None) -> None:
        """Remember where it ends."""
        self._total = total

    def draw(self, step: int, parts: Sequence[str], losses: Mapping[int, float]) -> None:
        """One more line."""
        self.say("  ".join([f"step {step}{f'/{self._total}' if self._total else ''}", *parts]))

    def say(self, text: str) -> None:
        """One line, however long."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is left open."""


class Progress:
    """Works out what to show, at most every `period` seconds, and has it drawn."""

    def __init__(self, surface: Bar | Lines, period: float):
        self._surface, self._period = surface, period
        self._next, self._seen, self._since, self._rate = 0.0, 0, 0.0, 0.0
        self._losses: dict[int, float] = {}  # at each redraw; of many every other one is kept

    def start(self, step: int, total: int | None) -> None:
        """Begin at `step` of `total` (None: not known)."""
        self._since = time.monotonic()
        self._surface.start(step, total)

    def due(self) -> bool:
        """Whether it is time to redraw."""
        return time.monotonic() >= self._next

    def update(self, step: int, epoch: int, metrics: dict[str, float], samples: int) -> None:
        """Redraw; `samples` counts the examples since the start."""
        now = time.monotonic()
        self._next = now + self._period
        if now > self._since and samples > self._seen:
            rate = (samples - self._seen) / (now - self._since)
            self._rate = rate if self._seen == 0 else 0.7 * self._rate + 0.3 * rate
        self._seen, self._since = samples, now
        numbers = [f"{name} {value:.4g}" for name, value in metrics.items()]
        self._losses |= {step: metrics["loss"]} if "loss" in metrics else {}
        if len(self._losses) > MOST:
            self._losses = dict(list(self._losses.items())[::2])
        curve = [spark(list(self._losses.values()))] if len(self._losses) > 1 else []
        self._surface.draw(step, [f"epoch {epoch + 1}", *numbers, f"{self._rate:,.0f} samples/s", *_memory(), *curve], self._losses)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._surface.say(text)

    def close(self) -> None:
        """Leave the screen as it was."""
        self._surface.close()


def _fitting(parts: Sequence[str], room: int) -> str:
    """As many of the parts as there is room for, in their order.

    >>> _fitting(["epoch 1", "loss 0.25", "1,000 samples/s"], room=20)
    'epoch 1  loss 0.25'
    """
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        text = longer if len(longer) <= room else text
    return text


def _memory() -> list[str]:
    """The most that a device of this process has held, of those that say so."""
    told = [device.memory_stats() or {} for device in jax.local_devices()]
    held = max((one.get("peak_bytes_in_use", 0) for one in told), default=0)
    return [f"{format_bytes(held)} per device"] if held else []


def _in_kernel() -> bool:
    """Whether cells of a notebook run here; that somebody imported IPython or its kernel says nothing."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


def make_progress(wanted: bool | str) -> NoProgress | Progress:
    """`True` shows progress anywhere, `False` nowhere, `"auto"` in a terminal or a notebook."""
    if not isinstance(wanted, bool) and not (isinstance(wanted, str) and wanted == "auto"):
        raise OptionError(f"progress={short_repr(wanted)}.", fix='True, False or "auto".')
    if wanted is False:
        return NoProgress()
    from rich.console import Console

    if _in_kernel():
        return Progress(
            Bar(Console(file=io.StringIO(), record=True, width=WIDE, no_color=True, force_jupyter=False), Notebook()), REFRESH_SECONDS
        )
    console = Console(file=sys.stderr)
    if console.is_terminal:
        return Progress(Bar(console, Terminal()), REFRESH_SECONDS)
    return NoProgress() if wanted == "auto" else Progress(Lines(console), SELDOM)
