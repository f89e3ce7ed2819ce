"""Live progress, in a terminal or a notebook; nothing at all elsewhere, unless asked for."""

import sys
import time
from typing import Any

from spmd.errors import OptionError

REFRESH = 0.2  # seconds between two redraws: a step costs one look at the clock


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


class RichProgress:
    """A bar with step, metrics, samples per second and time left, by rich; plain lines where nothing can be redrawn."""

    def __init__(self, console: Any):
        self._console, self._live = console, console.is_terminal or console.is_jupyter
        self._next, self._task, self._bar = 0.0, None, None
        self._seen, self._since, self._rate = 0, time.monotonic(), 0.0

    def start(self, step: int, total: int | None) -> None:
        """Draw the bar at `step` of `total` (None: not known)."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._total, self._since = total, time.monotonic()
        if self._live:
            columns = (
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, refresh_per_second=5)
            self._task = self._bar.add_task("", total=total, completed=step, text="compiling")
            self._bar.start()

    def due(self) -> bool:
        """Whether it is time to redraw."""
        return time.monotonic() >= self._next

    def update(self, step: int, epoch: int, metrics: dict[str, float], samples: int) -> None:
        """Redraw; `samples` counts the examples since the start."""
        now = time.monotonic()
        self._next = now + (REFRESH if self._live else 10.0)
        if now > self._since and samples > self._seen:
            rate = (samples - self._seen) / (now - self._since)
            self._rate = rate if self._seen == 0 else 0.7 * self._rate + 0.3 * rate
        self._seen, self._since = samples, now
        text = (
            f"epoch {epoch + 1}  " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()) + f"  {self._rate:,.0f} samples/s"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, text=text)
        else:
            self._console.print(f"step {step}{f'/{self._total}' if self._total else ''}  {text}", markup=False, highlight=False)

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def make_progress(wanted: bool | str) -> NoProgress | RichProgress:
    """`True` shows progress anywhere, `False` nowhere, `"auto"` in a terminal or a notebook."""
    if wanted not in (True, False, "auto"):
        raise OptionError(f'progress={wanted!r}.\n    cure: True, False or "auto".')
    if wanted is False:
        return NoProgress()
    from rich.console import Console

    console = Console(file=sys.stderr) if "ipykernel" not in sys.modules else Console()
    if wanted == "auto" and not (console.is_terminal or console.is_jupyter):
        return NoProgress()
    return RichProgress(console)
