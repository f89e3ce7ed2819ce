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

TRAINING, REPEATED, WAITING, DOWN, STARTING = (
    "training",
    "repeated",
    "waiting for data",
    "down",
    "starting",
)
COMPILING, EVALUATING, SAVING, RESTORING, PROFILING = (
    "compiling",
    "evaluating",
    "saving",
    "restoring",
    "profiling",
)
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
BINS, FINEST = 256, 0.125  # number of bins of the timeline; seconds of a bin in a short run
PAGE_STYLE = "body { max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem }"
# of the strip in the drawing; and the least room for a label
LEFT, TOP, HEIGHT, LABEL_WIDTH = 4.0, 30.0, 120.0, 62.0
# seconds
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
        self.width, self.bins = FINEST, list[dict[str, float]]()
        self.totals: dict[str, float] = {}
        self.attempts: list[float] = []  # when each started

    def charge(self, phase: str, until: float) -> None:
        """Charge the time since the last charge to a phase; none if a clock went backwards."""
        while until - self.began > BINS * self.width:
            pairs = itertools.zip_longest(self.bins[::2], self.bins[1::2], fillvalue={})
            self.bins = [
                {name: early.get(name, 0.0) + late.get(name, 0.0) for name in early | late}
                for early, late in pairs
            ]
            self.width *= 2
        self.totals[phase] = self.totals.get(phase, 0.0) + max(until - self.until, 0.0)
        while self.until < until:
            at = int((self.until - self.began) / self.width)
            end = self.began + (at + 1) * self.width
            while end <= self.until:  # rounding
                at, end = at + 1, end + self.width
            self.bins += [{} for _ in range(at + 1 - len(self.bins))]
            seconds = min(end, until) - self.until
            self.bins[at][phase] = self.bins[at].get(phase, 0.0) + seconds
            self.until = min(end, until)

    def repeat(self, seconds: float) -> None:
        """The newest `seconds` of training are lost: they become "repeated"."""
        seconds = lost = min(max(seconds, 0.0), self.totals.get(TRAINING, 0.0))
        for each in reversed(self.bins):
            moved = min(each.get(TRAINING, 0.0), seconds)
            if moved:
                each[TRAINING] -= moved
                each[REPEATED] = each.get(REPEATED, 0.0) + moved
                seconds -= moved
        if lost:
            self.totals[TRAINING] -= lost
            self.totals[REPEATED] = self.totals.get(REPEATED, 0.0) + lost

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Timeline":
        """The inverse of `to_json`.

        Raises:
          ValueError, TypeError, KeyError: it is not what `to_json` returns.
        """
        self = cls(float(values["began"]))
        self.width, self.until = float(values["width"]), float(values["until"])
        self.bins, self.totals = (
            [_seconds(each) for each in values["bins"]],
            _seconds(values["totals"]),
        )
        self.attempts = [float(start) for start in values["attempts"]]
        numbers = (self.began, self.width, self.until, *self.attempts)
        if (
            not all(map(math.isfinite, numbers))
            or self.width < FINEST
            or self.until < self.began
            or len(self.bins) > BINS
        ):
            raise ValueError("not a timeline")
        elapsed = self.until - self.began
        if not math.isclose(sum(self.totals.values()), elapsed, rel_tol=1e-6, abs_tol=0.1):
            raise ValueError(f"the phases do not add up to {elapsed} seconds")
        return self


def _seconds(values: Any) -> dict[str, float]:
    """Seconds by phase, from JSON."""
    seconds = {name: float(value) for name, value in values.items()}
    if seconds.keys() - PHASES.keys() or not all(
        math.isfinite(value) and value >= 0 for value in seconds.values()
    ):
        raise ValueError("not seconds by phase")
    return seconds


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
        """The share of a phase, from 0 to 1."""
        return self[phase] / self.seconds if self.seconds > 0 else 0.0

    def __getitem__(self, phase: str) -> float:
        if phase not in PHASES:
            raise KeyError(f'no phase "{phase}"; there are {", ".join(PHASES)}')
        return self.timeline.totals.get(phase, 0.0)

    def __iter__(self) -> Iterator[str]:
        return iter(PHASES)

    def __len__(self) -> int:
        return len(PHASES)

    def __repr__(self) -> str:
        parts = sorted(
            ((self.share(phase), phase) for phase in PHASES if phase != TRAINING), reverse=True
        )
        others = ", ".join(
            f"{phase} {100 * share:.1f} %" for share, phase in parts if share >= 0.0005
        )
        count = len(self.timeline.attempts)
        attempts = f" in {count} attempts" if count > 1 else ""
        return (
            f"goodput {100 * self.share(TRAINING):.1f} % of "
            f"{duration(self.seconds)}{attempts}{': ' if others else ''}{others}"
        )

    def _repr_html_(self) -> Html:
        """The timeline and a table, for a notebook."""
        rows = [
            (phase, f"{self[phase]:.1f}", f"{100 * self.share(phase):.1f} %", PHASES[phase][1])
            for phase in PHASES
            if self[phase]
        ]
        rows.append(
            (
                "in total",
                f"{self.seconds:.1f}",
                "100.0 %",
                f"attempts: {len(self.timeline.attempts)}",
            )
        )
        return framed(
            f"{self._drawing()}{table(('phase', 'seconds', 'share', 'what it is'), rows)}"
        )

    def page(self, title: str) -> str:
        """A self-contained HTML page: the line, the timeline and the table."""
        lead = f"<h1>{html.escape(title)}</h1><p>{html.escape(repr(self))}</p>"
        return document(title, f"{framed(lead)}{self._repr_html_()}", style=PAGE_STYLE)

    def _drawing(self) -> str:
        """Time from left to right; the colours of a column are the shares of its bin. Vertical
        lines are the starts of attempts.
        """
        timeline, parts = self.timeline, ['<g shape-rendering="crispEdges">']
        scale = (WIDTH - 2 * LEFT) / max(self.seconds, FINEST)
        for first, count, seconds in _columns(timeline.bins):
            total, top = sum(seconds.values()), TOP + HEIGHT
            start = first * timeline.width
            span = min((first + count) * timeline.width, max(self.seconds, FINEST)) - start
            for phase in PHASES:
                if seconds.get(phase) and total > 0:
                    height = HEIGHT * seconds[phase] / total
                    top -= height
                    words = (
                        f"{phase}, {100 * seconds[phase] / total:.0f} % of {duration(start)} to "
                        f"{duration(start + span)}"
                    )
                    parts.append(
                        box(
                            LEFT + start * scale,
                            top,
                            max(span * scale, 0.5),
                            height,
                            PHASES[phase][0],
                            words,
                        )
                    )
        parts.append("</g>")
        free = -math.inf
        for number, start in enumerate(timeline.attempts, 1):
            x = LEFT + max(start - timeline.began, 0.0) * scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6:.1f}" y2="{TOP + HEIGHT:.1f}" '
                'stroke="currentColor"/>'
            )
            if x >= free:
                last = x > WIDTH - LABEL_WIDTH
                parts.append(
                    caption(
                        x - 4 if last else x + 4,
                        TOP - 8,
                        f"attempt {number}",
                        "end" if last else "start",
                    )
                )
                free = x + LABEL_WIDTH
        parts += self._axis(scale)
        shown = [phase for phase in PHASES if self[phase]]
        for at, phase in enumerate(shown):
            words = f"{phase} {100 * self.share(phase):.1f} %"
            parts.append(
                legend(
                    LEFT + at % 5 * 190, TOP + HEIGHT + 48 + at // 5 * 20, PHASES[phase][0], words
                )
            )
        height = TOP + HEIGHT + 58 + (len(shown) - 1) // 5 * 20
        return svg(height, parts, f"Phases of the run over time: {self!r}")

    def _axis(self, scale: float) -> Iterator[str]:
        """Times below the strip."""
        every = next((tick for tick in TICKS if tick * scale >= LABEL_WIDTH + 20), TICKS[-1])
        every *= max(1, math.ceil((LABEL_WIDTH + 20) / (every * scale)))
        for number in range(int(self.seconds / every) + 1):
            x = LEFT + number * every * scale
            if number == 0 or x < WIDTH - LABEL_WIDTH / 2:
                yield caption(
                    x, TOP + HEIGHT + 18, duration(number * every), "middle" if number else "start"
                )


def _columns(bins: list[dict[str, float]]) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Bins to draw: first, number, seconds by phase. Neighbours that have one and the same phase
    are one column.
    """
    places = enumerate(
        {phase: value for phase, value in each.items() if value > 0} for each in bins
    )
    for phases, group in itertools.groupby(places, key=lambda place: tuple(place[1])):
        columns = list(group)
        if len(phases) == 1:
            yield columns[0][0], len(columns), {phases[0]: 1.0}
        else:
            yield from ((at, 1, seconds) for at, seconds in columns)


def duration(seconds: float) -> str:
    """A time span in words.

    >>> [duration(seconds) for seconds in (0, 7.25, 90, 3600, 100_000)]
    ['0 s', '7.2 s', '1 min 30 s', '1 h', '27 h 46 min']
    """
    if seconds < 60:
        return f"{round(seconds, 1):g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = (
        [(hours, "h"), (minutes, "min"), (rest, "s")]
        if not hours
        else [(hours, "h"), (minutes, "min")]
    )
    return " ".join(f"{value} {unit}" for value, unit in parts if value)
