"""Goodput: how the time of a run was divided among phases, over all attempts, as numbers, a line of
text and a page.
"""

import html
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from spmd.render.html import Html, document, framed, table
from spmd.render.svg import WIDTH, box, caption, legend, svg

TRAINING = "training"
REPEATED = "repeated"
WAITING = "waiting for data"
DOWN = "down"
STARTING = "starting"
COMPILING = "compiling"
EVALUATING = "evaluating"
SAVING = "saving"
RESTORING = "restoring"
PROFILING = "profiling"
PHASES = {  # colour of the style, and meaning
    TRAINING: ("a", "steps that are part of the current state, and callbacks between them"),
    REPEATED: ("b", "steps that were lost, since a restart resumed from an earlier checkpoint"),
    COMPILING: ("d", "XLA, and the checks of the first batch"),
    EVALUATING: ("e", "evaluations"),
    SAVING: ("g", "what the loop waited for checkpoints"),
    RESTORING: ("i", "reading and checking a checkpoint"),
    PROFILING: ("k", "starting and stopping `jax.profiler`, and reading its trace"),
    WAITING: ("c", "devices had no batch"),
    STARTING: ("h", "imports, rendezvous, setup"),
    DOWN: ("j", "between a failure and the start of the next attempt"),
}
BINS = 256  # of the timeline
FINEST = 0.125  # seconds of a bin in a short run
PAGE_STYLE = "body { max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem }"
# The place of the strip in the drawing, in pixels.
LEFT = 4.0
TOP = 30.0
HEIGHT = 120.0
LABEL_WIDTH = 62.0  # the least room for a label
# Seconds between two labels of the axis.
TICKS = (
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    14400,
    21600,
    43200,
    86400,
)


class Timeline:
    """Seconds by phase, in total and in bins of equal width since the run began. Its size does not
    grow with the run.

    Args:
      began: when the run began, in seconds since 1970.

    Example:
      >>> timeline = Timeline(100.0)
      >>> timeline.charge("starting", 103.0), timeline.charge("training", 111.0)
      (None, None)
      >>> timeline.totals, timeline.until
      ({'starting': 3.0, 'training': 8.0}, 111.0)
    """

    def __init__(self, began: float):
        self.began = self.until = began
        self.width = FINEST
        self.bins: list[dict[str, float]] = []
        self.totals: dict[str, float] = {}
        self.attempts: list[float] = []  # when each started

    def charge(self, phase: str, until: float) -> None:
        """Charge the time since the last charge to a phase; none if a clock went backwards."""
        while until - self.began > BINS * self.width:
            pairs = itertools.zip_longest(self.bins[::2], self.bins[1::2], fillvalue={})
            self.bins = [_sum_of(early, late) for early, late in pairs]
            self.width *= 2
        self.totals[phase] = self.totals.get(phase, 0.0) + max(until - self.until, 0.0)
        while self.until < until:
            index = int((self.until - self.began) / self.width)
            end = self.began + (index + 1) * self.width
            # By rounding, the quotient may be that of the bin before.
            while end <= self.until:
                index += 1
                end += self.width
            while len(self.bins) <= index:
                self.bins.append({})
            seconds = min(end, until) - self.until
            self.bins[index][phase] = self.bins[index].get(phase, 0.0) + seconds
            self.until = min(end, until)

    def repeat(self, seconds: float) -> None:
        """Charge the newest `seconds` of training, which are lost, to "repeated" instead."""
        lost = min(max(seconds, 0.0), self.totals.get(TRAINING, 0.0))
        left = lost
        for each in reversed(self.bins):
            moved = min(each.get(TRAINING, 0.0), left)
            if moved:
                each[TRAINING] -= moved
                each[REPEATED] = each.get(REPEATED, 0.0) + moved
                left -= moved
        if lost:
            self.totals[TRAINING] -= lost
            self.totals[REPEATED] = self.totals.get(REPEATED, 0.0) + lost

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as JSON values."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Timeline":
        """Return the timeline that `to_json` returned as JSON values.

        Raises:
          ValueError, TypeError, KeyError: it is not what `to_json` returns.
        """
        self = cls(float(values["began"]))
        self.width = float(values["width"])
        self.until = float(values["until"])
        self.bins = [_seconds(each) for each in values["bins"]]
        self.totals = _seconds(values["totals"])
        self.attempts = [float(start) for start in values["attempts"]]
        numbers = (self.began, self.width, self.until, *self.attempts)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("not a timeline")
        if self.width < FINEST or self.until < self.began or len(self.bins) > BINS:
            raise ValueError("not a timeline")
        elapsed = self.until - self.began
        if not math.isclose(sum(self.totals.values()), elapsed, rel_tol=1e-6, abs_tol=0.1):
            raise ValueError(f"the phases do not add up to {elapsed} seconds")
        return self


def _seconds(values: Any) -> dict[str, float]:
    """Return seconds by phase, from JSON."""
    seconds = {name: float(value) for name, value in values.items()}
    if seconds.keys() - PHASES.keys():
        raise ValueError("not seconds by phase")
    for value in seconds.values():
        if not math.isfinite(value) or value < 0:
            raise ValueError("not seconds by phase")
    return seconds


def _sum_of(early: Mapping[str, float], late: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds by phase of two bins together."""
    return {name: early.get(name, 0.0) + late.get(name, 0.0) for name in {**early, **late}}


class Goodput(Mapping[str, float]):
    """Seconds of a run by phase, over all attempts since the launcher's start; they add up to the
    time that has passed.

    Without a launcher, a run begins with its process, or, if it is not the first of its process,
    with the call of `fit`. Goodput is the share of "training". Measured on process 0; the other
    processes do not know the earlier attempts.

    Attributes:
      timeline: the same in bins of equal width.

    Example:
      >>> timeline = Timeline(0.0)
      >>> timeline.charge("starting", 1.0), timeline.charge("training", 20.0)
      (None, None)
      >>> goodput = Goodput(timeline)
      >>> goodput["training"], goodput.share("training"), goodput
      (19.0, 0.95, goodput 95.0 % of 20 s: starting 5.0 %)
    """

    def __init__(self, timeline: Timeline):
        self.timeline = timeline

    @property
    def seconds(self) -> float:
        """The time since the run began."""
        return self.timeline.until - self.timeline.began

    def share(self, phase: str) -> float:
        """Return the share of a phase, from 0 to 1."""
        if self.seconds <= 0:
            return 0.0
        return self[phase] / self.seconds

    def __getitem__(self, phase: str) -> float:
        if phase not in PHASES:
            raise KeyError(f'no phase "{phase}"; there are {", ".join(PHASES)}')
        return self.timeline.totals.get(phase, 0.0)

    def __iter__(self) -> Iterator[str]:
        return iter(PHASES)

    def __len__(self) -> int:
        return len(PHASES)

    def __repr__(self) -> str:
        shares = [(self.share(phase), phase) for phase in PHASES if phase != TRAINING]
        parts = []
        for share, phase in sorted(shares, reverse=True):
            if share >= 0.0005:
                parts.append(f"{phase} {100 * share:.1f} %")
        text = f"goodput {100 * self.share(TRAINING):.1f} % of {duration(self.seconds)}"
        if len(self.timeline.attempts) > 1:
            text += f" in {len(self.timeline.attempts)} attempts"
        if parts:
            text += f": {', '.join(parts)}"
        return text

    def _repr_html_(self) -> Html:
        """Return the timeline and a table, for a notebook."""
        rows = []
        for phase, (_, meaning) in PHASES.items():
            if self[phase]:
                share = f"{100 * self.share(phase):.1f} %"
                rows.append((phase, f"{self[phase]:.1f}", share, meaning))
        attempts = f"attempts: {len(self.timeline.attempts)}"
        rows.append(("in total", f"{self.seconds:.1f}", "100.0 %", attempts))
        figures = table(("phase", "seconds", "share", "what it is"), rows)
        return framed(f"{self._drawing()}{figures}")

    def page(self, title: str) -> str:
        """Return a self-contained HTML page: the line, the timeline and the table."""
        lead = f"<h1>{html.escape(title)}</h1><p>{html.escape(repr(self))}</p>"
        return document(title, f"{framed(lead)}{self._repr_html_()}", style=PAGE_STYLE)

    def _drawing(self) -> str:
        """Draw time from left to right; the colours of a column are the shares of its bin. Vertical
        lines are the starts of attempts.
        """
        timeline = self.timeline
        scale = (WIDTH - 2 * LEFT) / max(self.seconds, FINEST)
        parts = ['<g shape-rendering="crispEdges">']
        for first, count, seconds in _columns(timeline.bins):
            parts += self._column(first, count, seconds, scale)
        parts.append("</g>")
        label_end = -math.inf
        for number, start in enumerate(timeline.attempts, 1):
            x = LEFT + max(start - timeline.began, 0.0) * scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6:.1f}" y2="{TOP + HEIGHT:.1f}" '
                'stroke="currentColor"/>'
            )
            # A label that would cover the one before is left out.
            if x >= label_end:
                if x > WIDTH - LABEL_WIDTH:
                    parts.append(caption(x - 4, TOP - 8, f"attempt {number}", "end"))
                else:
                    parts.append(caption(x + 4, TOP - 8, f"attempt {number}", "start"))
                label_end = x + LABEL_WIDTH
        parts += self._axis(scale)
        phases = [phase for phase in PHASES if self[phase]]
        for number, phase in enumerate(phases):
            row, column = divmod(number, 5)
            text = f"{phase} {100 * self.share(phase):.1f} %"
            colour, _ = PHASES[phase]
            parts.append(legend(LEFT + column * 190, TOP + HEIGHT + 48 + row * 20, colour, text))
        height = TOP + HEIGHT + 58 + (len(phases) - 1) // 5 * 20
        return svg(height, parts, f"Phases of the run over time: {self!r}")

    def _column(
        self, first: int, count: int, seconds: Mapping[str, float], scale: float
    ) -> Iterator[str]:
        """Draw the shares of some bins, one above the other."""
        width = self.timeline.width
        start = first * width
        span = min((first + count) * width, max(self.seconds, FINEST)) - start
        total = sum(seconds.values())
        top = TOP + HEIGHT
        for phase, (colour, _) in PHASES.items():
            if not seconds.get(phase) or total <= 0:
                continue
            height = HEIGHT * seconds[phase] / total
            top -= height
            share = f"{100 * seconds[phase] / total:.0f} %"
            text = f"{phase}, {share} of {duration(start)} to {duration(start + span)}"
            yield box(LEFT + start * scale, top, max(span * scale, 0.5), height, colour, text)

    def _axis(self, scale: float) -> Iterator[str]:
        """Draw times below the strip."""
        every = next((tick for tick in TICKS if tick * scale >= LABEL_WIDTH + 20), TICKS[-1])
        every *= max(1, math.ceil((LABEL_WIDTH + 20) / (every * scale)))
        for number in range(int(self.seconds / every) + 1):
            x = LEFT + number * every * scale
            if number == 0 or x < WIDTH - LABEL_WIDTH / 2:
                anchor = "middle" if number else "start"
                yield caption(x, TOP + HEIGHT + 18, duration(number * every), anchor)


def _columns(bins: list[dict[str, float]]) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield bins to draw: first, number, seconds by phase. Neighbours that have one and the same
    phase are one column.
    """
    positive = []
    for seconds in bins:
        positive.append({phase: value for phase, value in seconds.items() if value > 0})
    numbered = enumerate(positive)
    for phases, group in itertools.groupby(numbered, key=lambda pair: tuple(pair[1])):
        columns = list(group)
        if len(phases) == 1:
            first, _ = columns[0]
            yield first, len(columns), {phases[0]: 1.0}
        else:
            for number, seconds in columns:
                yield number, 1, seconds


def duration(seconds: float) -> str:
    """Return a time span in words.

    >>> [duration(seconds) for seconds in (0, 7.25, 90, 3600, 100_000)]
    ['0 s', '7.2 s', '1 min 30 s', '1 h', '27 h 46 min']
    """
    if seconds < 60:
        return f"{round(seconds, 1):g} s"
    all_minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(all_minutes, 60)
    parts = [(hours, "h"), (minutes, "min")]
    if not hours:
        parts.append((seconds_left, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value)
