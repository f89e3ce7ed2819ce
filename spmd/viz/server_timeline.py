"""The simulated timeline of a parameter server as a picture: the times in which workers compute,
send and wait.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from spmd.errors import OptionError, import_extra
from spmd.render.picture import Picture
from spmd.wire.server.statistics import ServerStatistics

COMPUTES = "#3566c0"
SENDS = "#c4571f"
WAITS = "#80808040"
DROPPED = "#b9c9e8"
UPDATE = "#808080"
EDGE = "#16305f"  # between two gradients; seen on white and on black
# a bar of a gradient that is dropped
WASTED: dict[str, Any] = {
    "facecolor": DROPPED,
    "edgecolor": COMPUTES,
    "linewidth": 0,
    "hatch": "/////",
}
GRADIENTS = 16  # of a worker by default; more are hard to distinguish
BAR_HEIGHT = 0.72  # of a line

Accounts = ServerStatistics | Mapping[str, ServerStatistics]  # one, or several by title


@overload
def timeline(
    account: Accounts,
    path: None = None,
    *,
    begin: float = 0.0,
    seconds: float | None = None,
    workers: int = 16,
) -> Picture: ...
@overload
def timeline(
    account: Accounts,
    path: str | Path,
    *,
    begin: float = 0.0,
    seconds: float | None = None,
    workers: int = 16,
) -> Path: ...
def timeline(
    account: Accounts,
    path: str | Path | None = None,
    *,
    begin: float = 0.0,
    seconds: float | None = None,
    workers: int = 16,
) -> Picture | Path:
    """Draw a parameter server's simulated timeline: a picture for a notebook's cell, or a file
    (.png, .svg, .pdf).

    One line per worker: blue while it computes, pale and hatched for a gradient that is dropped,
    orange while a gradient waits for a link and is sent, grey while the worker waits. A tick above
    the lines is an update.

    Args:
      account: what `spmd.simulate` or `Trainer.simulate` returns; several, by title, are drawn
        below each other on the same time axis.
      begin, seconds: the interval of simulated time; None: about as long as sixteen gradients of a
        worker.
      workers: the number of workers to draw; the picture says how many are left out.
      path: of the file; None: a picture.

    Returns:
      The path of the file, whose folder is created if needed; a `Picture` without a path.

    Raises:
      MissingExtraError: matplotlib is not installed (the extra `examples`).
      OptionError: nothing would be drawn, not the result of a simulation, or an unknown suffix.

    Example:
      >>> import spmd, tempfile
      >>> account = spmd.simulate(
      ...     spmd.ParameterServer(spares=1, compute_time="exponential(1)"), workers=4, steps=20
      ... )
      >>> timeline(account, tempfile.mkdtemp() + "/timeline.png").read_bytes()[1:4]
      b'PNG'
    """
    picture = Picture(timeline_figure(account, begin=begin, seconds=seconds, workers=workers))
    if path is None:
        return picture
    return picture.save(path)


def timeline_figure(
    account: Accounts, *, begin: float = 0.0, seconds: float | None = None, workers: int = 16
) -> Any:
    """Return the drawing as a `matplotlib.figure.Figure`, without a window or global state."""
    make = import_extra("matplotlib.figure", "examples").Figure
    by_title: Mapping[str, ServerStatistics]
    if isinstance(account, Mapping):
        by_title = account
    else:
        by_title = {"": account}
    accounts = list(by_title.values())
    if not accounts or not all(isinstance(part, ServerStatistics) for part in accounts):
        raise OptionError(
            f"timeline: {account!r} is not a simulation.",
            fix="what spmd.simulate returns, or a dict of these by title.",
        )
    end = _end(accounts, begin, seconds, workers)
    lines = [min(account.workers, workers) for account in accounts]
    heights = [0.55 + 0.2 * count for count in lines]
    height = 0.9 + sum(heights)
    figure = make(figsize=(11, height), layout="constrained")
    ratios = [count + 1.5 for count in lines]
    # squeeze=False: one panel, too, comes in an array.
    panels = figure.subplots(len(accounts), 1, sharex=True, squeeze=False, height_ratios=ratios)
    panels = panels[:, 0]
    for axes, (title, account), count in zip(panels, by_title.items(), lines, strict=True):
        _panel(axes, account, begin, end, count)
        axes.set_title(title or _title(account), loc="left", fontsize=11)
        axes.set_title(_summary(account, count), loc="right", fontsize=9, color="#808080")
    longest = max(account.seconds for account in accounts)
    part = ""
    if end - begin < longest:
        part = f": {begin:.4g} to {end:.4g}, of up to {longest:,.4g}"
    panels[-1].set_xlabel(f"simulated seconds{part}", fontsize=9)
    style = {"ncols": 5, "frameon": False, "fontsize": 9, "handlelength": 1.6}
    figure.legend(handles=_legend(accounts), loc="outside upper center", **style)
    return figure


def _end(
    accounts: Sequence[ServerStatistics], begin: float, seconds: float | None, workers: int
) -> float:
    """Return the end of the time axis.

    Raises:
      OptionError: the interval or `workers` are out of range.
    """
    interval = f"begin={begin!r}, seconds={seconds!r}, workers={workers!r}"
    # Python's bool is an integer
    has_bool = any(isinstance(value, bool) for value in (begin, seconds, workers))
    has_numbers = isinstance(begin, int | float) and isinstance(seconds, int | float | None)
    if has_bool or not has_numbers or not isinstance(workers, int):
        fix = "such as begin=0, seconds=20, workers=8."
        raise OptionError(f"timeline: {interval}: expected two numbers and an integer.", fix=fix)
    longest = max(account.seconds for account in accounts)
    if seconds is None:
        slowest = max(map(_seconds_of_gradient, accounts))
        seconds = min(longest - begin, GRADIENTS * slowest)
    is_interval = math.isfinite(seconds) and seconds > 0 and 0 <= begin < longest
    if not is_interval or workers < 1:
        fix = "an interval within these, and at least one worker."
        raise OptionError(
            f"timeline: {interval}: nothing would be drawn of {longest:,.4g} simulated seconds.",
            fix=fix,
        )
    return begin + seconds


def _seconds_of_gradient(account: ServerStatistics) -> float:
    """Return the median time in which a worker computes a gradient that arrives."""
    spans = account.spans
    durations = spans.done - spans.began
    return float(np.median(durations[spans.arrived]))


def _title(account: ServerStatistics) -> str:
    title = account.declared.mode
    if account.declared.spares:
        title += f", {account.declared.spares} spares"
    return title


def _summary(account: ServerStatistics, lines: int) -> str:
    """Return the figures that the picture alone does not show."""
    text = f"computing {1 - account.idle_share.mean():.0%}"
    wasted_share = account.wasted_seconds.mean() / account.seconds
    if wasted_share:
        text += f" ({wasted_share:.0%} wasted)"
    rate = account.applied.sum() / account.seconds
    text += f", {rate:.3g} gradients applied per second"
    if account.declared.asynchronous:
        counts = account.staleness
        mean = counts @ np.arange(len(counts)) / counts.sum()
        text += f", mean staleness {mean:.1f}"
    left_out = account.workers - lines
    if left_out > 0:
        text += f"; {left_out} more workers are not drawn"
    return text


def _panel(axes: Any, account: ServerStatistics, begin: float, end: float, lines: int) -> None:
    """Draw one simulation."""
    spans = account.spans
    last = min(end, account.seconds)
    dropped = spans.arrived & ~spans.applied
    computing = {"facecolor": COMPUTES, "edgecolor": EDGE, "linewidth": 0.8}
    sending = {"facecolor": SENDS, "linewidth": 0}
    for worker in range(lines):
        line = (worker - BAR_HEIGHT / 2, BAR_HEIGHT)
        local = spans.worker == worker
        local_not_dropped = local & ~dropped
        local_dropped = local & dropped
        local_sent = local & (spans.time > spans.queued)
        # First, because matplotlib draws later bars over earlier ones.
        axes.broken_barh([(begin, last - begin)], line, facecolor=WAITS, linewidth=0)
        for start, stop, chosen, style in (
            (spans.began, spans.done, local_not_dropped, computing),
            (spans.began, spans.done, local_dropped, WASTED),
            (spans.queued, spans.time, local_sent, sending),
        ):
            bars = _bars(start[chosen], stop[chosen], begin, last)
            axes.broken_barh(bars, line, **style)
    times = spans.queued
    if account.declared.asynchronous:
        times = spans.time
    updates = times[spans.commit]
    updates = updates[(updates >= begin) & (updates <= last)]
    axes.vlines(updates, -1.25, -0.65, color=UPDATE, linewidth=1.1)
    axes.set_xlim(begin, end)
    # worker 0 at the top, below the ticks of updates
    axes.set_ylim(lines - 0.4, -1.3)
    ticks = [0]
    if lines > 1:
        ticks = [0, lines - 1]
    axes.set_yticks(ticks)
    axes.set_ylabel("worker", fontsize=9, labelpad=2)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)


def _bars(
    start: np.ndarray, stop: np.ndarray, begin: float, end: float
) -> list[tuple[float, float]]:
    """Return (left, width) of intervals, clipped to the axis."""
    left = np.maximum(start, begin)
    right = np.minimum(stop, end)
    ends = zip(left.tolist(), right.tolist(), strict=True)
    return [(first, last - first) for first, last in ends if last > first]


def _legend(accounts: Sequence[ServerStatistics]) -> list[Any]:
    """Return the entries of the legend, without what no picture has."""
    patch = import_extra("matplotlib.patches", "examples")
    line = import_extra("matplotlib.lines", "examples")
    handles = [patch.Patch(facecolor=COMPUTES, label="computes")]
    if any(account.dropped.any() for account in accounts):
        handles.append(patch.Patch(**WASTED, label="computes a dropped gradient"))
    if any(account.send_seconds.any() for account in accounts):
        handles.append(patch.Patch(facecolor=SENDS, label="waits for a link, and sends"))
    handles.append(patch.Patch(facecolor=WAITS, label="waits"))
    tick = {"marker": "|", "linestyle": "", "markersize": 8}
    handles.append(line.Line2D([], [], color=UPDATE, label="update", **tick))
    return handles
