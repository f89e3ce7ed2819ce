"""Who computes, pushes and waits when: the simulated clock of a parameter server as a picture."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import numpy as np

from spmd.errors import OptionError, import_extra
from spmd.render.picture import Picture
from spmd.wire.param_server.statistics import ServerStatistics

COMPUTES, TRAVELS, WAITS, DROPPED, UPDATE = "#3566c0", "#c4571f", "#e4e4e4", "#b9c9e8", "#222222"
GRADIENTS = 16  # so many, one after another, can be told apart on a line
HIGH = 0.72  # of a line that is one unit high


@overload
def timeline(
    account: ServerStatistics | Mapping[str, ServerStatistics],
    path: None = None,
    *,
    begin: float = ...,
    seconds: float | None = ...,
    workers: int = ...,
) -> Picture: ...
@overload
def timeline(
    account: ServerStatistics | Mapping[str, ServerStatistics],
    path: str | Path,
    *,
    begin: float = ...,
    seconds: float | None = ...,
    workers: int = ...,
) -> Path: ...
def timeline(
    account: ServerStatistics | Mapping[str, ServerStatistics],
    path: str | Path | None = None,
    *,
    begin: float = 0.0,
    seconds: float | None = None,
    workers: int = 16,
) -> Picture | Path:
    """Draw a parameter server's simulated clock: a picture for a notebook's cell, or into a file (.png, .svg, .pdf).

    One line per worker: blue it computes, pale and hatched it computes a gradient that is dropped, orange the gradient stands in line for a
    link and travels, grey it waits. A tick above the lines is an update.

    Args:
      account: of `spmd.simulate` or `Trainer.simulate`; several, by title, are drawn below each other on the same axis of time.
      begin, seconds: the stretch of simulated time that is drawn; None: as long as a worker takes for about sixteen gradients.
      workers: so many are drawn, the first; the picture says how many are left out.

    Returns:
      The path of the file, whose folder is made if it is not there; a `Picture` without a path.

    Raises:
      MissingExtraError: matplotlib is not installed (the extra `examples`).
      OptionError: nothing would be drawn, no account, or a suffix that says nothing.

    Example:
      >>> import spmd, tempfile
      >>> told = spmd.simulate(spmd.ParameterServer(spares=1, compute_time="exponential(1)"), workers=4, steps=20)
      >>> timeline(told, tempfile.mkdtemp() + "/timeline.png").read_bytes()[1:4]
      b'PNG'
    """
    picture = Picture(timeline_figure(account, begin=begin, seconds=seconds, workers=workers))
    return picture if path is None else picture.save(path)


def timeline_figure(
    account: ServerStatistics | Mapping[str, ServerStatistics], *, begin: float = 0.0, seconds: float | None = None, workers: int = 16
) -> Any:
    """The same drawing as a `matplotlib.figure.Figure`, with no window and no global state behind it."""
    make = import_extra("matplotlib.figure", "examples").Figure
    several = account if isinstance(account, Mapping) else {"": account}
    if not several or not all(isinstance(one, ServerStatistics) for one in several.values()):
        raise OptionError(f"timeline: {account!r} is no account.", fix="what spmd.simulate gives, or a dict of such by title.")
    told = {title or _title(one): one for title, one in several.items()}
    end = _end(told, begin, seconds, workers)
    lines = [min(one.workers, workers) for one in told.values()]
    drawn = make(figsize=(11, 0.9 + sum(0.55 + 0.2 * count for count in lines)), layout="constrained")
    panels = drawn.subplots(len(told), 1, sharex=True, squeeze=False, height_ratios=[count + 1.5 for count in lines])[:, 0]
    for axes, (title, one), count in zip(panels, told.items(), lines, strict=True):
        _panel(axes, one, begin, end, count)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_title(_said(one, count), loc="right", fontsize=9, color="#555555")
    longest = max(one.seconds for one in told.values())
    part = f": {begin:.4g} to {end:.4g}, of up to {longest:,.4g}" if end - begin < longest else ""
    panels[-1].set_xlabel(f"simulated seconds{part}", fontsize=9)
    drawn.legend(handles=_legend(told), loc="outside upper center", ncols=5, frameon=False, fontsize=9, handlelength=1.6)
    return drawn


def _end(told: Mapping[str, ServerStatistics], begin: float, seconds: float | None, workers: int) -> float:
    """Where the axis ends."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (begin, 0.0 if seconds is None else seconds))
    if not numbers or isinstance(workers, bool) or not isinstance(workers, int):
        why = f"begin={begin!r}, seconds={seconds!r}, workers={workers!r}: wanted two numbers and a whole one."
        raise OptionError(f"timeline: {why}", fix="such as begin=0, seconds=20, workers=8.")
    longest = max((one.seconds for one in told.values()), default=0.0)
    if seconds is None:
        each = [float(np.median((one.spans.done - one.spans.began)[one.spans.arrived])) for one in told.values()]
        seconds = min(longest - begin, GRADIENTS * max(each, default=0.0)) if begin < longest else 0.0
    if not (math.isfinite(seconds) and seconds > 0 and 0 <= begin < longest) or workers < 1:
        why = f"begin={begin!r}, seconds={seconds!r}, workers={workers!r}: nothing would be drawn of {longest:,.4g} simulated seconds."
        raise OptionError(f"timeline: {why}", fix="a stretch of time inside, and at least one worker.")
    return begin + seconds


def _title(account: ServerStatistics) -> str:
    spares = f", {account.declared.spares} spares" if account.declared.spares else ""
    return f"{account.declared.mode}{spares}"


def _said(account: ServerStatistics, lines: int) -> str:
    """What the picture alone does not tell."""
    late, more = account.staleness, account.workers - lines
    mean = f", mean staleness {late @ np.arange(len(late)) / late.sum():.1f}" if account.declared.asynchronous else ""
    left = f"; {more} more workers are not drawn" if more else ""
    wasted, rate = account.wasted_seconds.mean() / account.seconds, account.applied.sum() / account.seconds
    lost = f" ({wasted:.0%} wasted)" if wasted else ""
    return f"computing {1 - account.idle_share.mean():.0%}{lost}, {rate:.3g} gradients applied per second{mean}{left}"


def _panel(axes: Any, account: ServerStatistics, begin: float, end: float, lines: int) -> None:
    spans, last = account.spans, min(end, account.seconds)
    dropped = spans.arrived & ~spans.applied
    for worker in range(lines):
        at, mine = (worker - HIGH / 2, HIGH), spans.worker == worker
        bars = lambda start, stop, which, mine=mine: _bars(start[mine & which], stop[mine & which], begin, last)
        axes.broken_barh([(begin, last - begin)], at, facecolor=WAITS, linewidth=0)
        axes.broken_barh(bars(spans.began, spans.done, ~dropped), at, facecolor=COMPUTES, edgecolor="white", linewidth=0.6)
        axes.broken_barh(bars(spans.began, spans.done, dropped), at, facecolor=DROPPED, edgecolor=COMPUTES, linewidth=0.0, hatch="/////")
        axes.broken_barh(bars(spans.queued, spans.time, spans.time > spans.queued), at, facecolor=TRAVELS, linewidth=0)
    made = spans.time[spans.commit] if account.declared.asynchronous else spans.queued[spans.commit]
    made = made[(made >= begin) & (made <= last)]
    axes.vlines(made, -1.25, -0.65, color=UPDATE, linewidth=1.1)
    axes.set_xlim(begin, end)
    axes.set_ylim(lines - 0.4, -1.3)
    axes.set_yticks([0, lines - 1] if lines > 1 else [0])
    axes.set_ylabel("worker", fontsize=9, labelpad=2)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)


def _bars(start: np.ndarray, stop: np.ndarray, begin: float, end: float) -> list[tuple[float, float]]:
    """(left, width) of what lies inside."""
    left, right = np.maximum(start, begin), np.minimum(stop, end)
    return [(a, b - a) for a, b in zip(left.tolist(), right.tolist(), strict=True) if b > a]


def _legend(told: Mapping[str, ServerStatistics]) -> list[Any]:
    patch, line = (import_extra(module, "examples") for module in ("matplotlib.patches", "matplotlib.lines"))
    found = [patch.Patch(facecolor=COMPUTES, label="computes")]
    if any(one.dropped.any() for one in told.values()):
        found.append(patch.Patch(facecolor=DROPPED, edgecolor=COMPUTES, linewidth=0, hatch="/////", label="computes, to be dropped"))
    if any(one.send_seconds.any() for one in told.values()):
        found.append(patch.Patch(facecolor=TRAVELS, label="in line for a link, and on it"))
    found.append(patch.Patch(facecolor=WAITS, label="waits"))
    return [*found, line.Line2D([], [], color=UPDATE, marker="|", linestyle="", markersize=8, label="update")]
