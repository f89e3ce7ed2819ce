"""Small curves as a few characters of text or as SVG, for progress displays and notebook cells."""

import html
import itertools
import math
from collections.abc import Mapping, Sequence

from spmd.render.svg import caption

BARS = "▁▂▃▄▅▆▇█"
# A curve that spans more than this factor is drawn on a logarithmic scale.
LOG_RANGE = 30.0
# Points of a curve; longer curves are averaged to this many.
MOST = 240
MOST_DOTS = 30  # more are drawn smaller
# training, evaluation: they differ in lightness too, on white and on black
COLOURS = ("#3f74d1", "#d0692f")


def thinned(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` values: the means of equal parts.

    >>> thinned([1, 3, 5, 7], 2)
    [2.0, 6.0]
    """
    if len(values) <= count:
        return list(values)
    edges = [len(values) * part // count for part in range(count + 1)]
    parts = [values[start:end] for start, end in itertools.pairwise(edges)]
    return [sum(part) / len(part) for part in parts]


def spark(values: Sequence[float], width: int = 16) -> str:
    """Return a curve as text, the lowest bar for the smallest value; "!" for values that are not
    finite.

    >>> spark([4.0, 3.0, 2.0, 1.0]), spark([1.0, float("nan")])
    ('█▆▃▁', '▁!')
    """
    means = thinned(values, width)
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low or 1.0
    text = ""
    for mean in means:
        if math.isfinite(mean):
            text += BARS[round((len(BARS) - 1) * (mean - low) / span)]
        else:
            text += "!"
    return text


def gauge(value: float, capacity: float, width: int = 40) -> str:
    """Return the used part of a capacity as text; the part beyond the capacity stands behind its
    end.

    >>> print(gauge(3, 8, 16), gauge(10, 8, 10), gauge(1, 1e9, 4), sep="\\n")
    [██████░░░░░░░░░░]
    [████████]██
    [▏░░░]
    """
    columns = width
    if value:
        columns = round(width * min(capacity / value, 1.0))
    full = columns
    if value <= capacity:
        full = int(columns * value / capacity)
    begun = ""
    if value and not full:
        begun = "▏"
    return f"[{'█' * full}{begun}{'░' * (columns - full - len(begun))}]{'█' * (width - columns)}"


def panel(
    name: str,
    trained: Mapping[int, float],
    evaluated: Mapping[int, float],
    width: int = 420,
    height: int = 150,
) -> str:
    """Return one metric over steps as SVG: a line for training, dots for evaluations, with a
    legend; readable on white and on black.
    """
    finite = {step: value for step, value in trained.items() if math.isfinite(value)}
    line = list(zip(thinned(list(finite), MOST), thinned(list(finite.values()), MOST), strict=True))
    dots = [(step, value) for step, value in evaluated.items() if math.isfinite(value)]
    points = [*line, *dots]
    if not points:
        return f"<p>{html.escape(name)}: nothing was measured</p>"
    steps, values = [*finite, *(step for step, _ in dots)], [value for _, value in points]
    scale, title = float, name
    if min(values) > 0 and max(values) > LOG_RANGE * min(values):
        scale, title = math.log, f"{name}, logarithmic"
    low, high = scale(min(values)), scale(max(values))

    def x(step: float) -> float:
        return 64 + (width - 74) * (step - min(steps)) / max(max(steps) - min(steps), 1)

    def y(value: float) -> float:
        part = 0.5
        if high > low:
            part = (scale(value) - low) / (high - low)
        return height - 25 - (height - 50) * part

    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line)
    radius: float = 3
    if len(dots) > MOST_DOTS:
        radius = 1.5
    circles = "".join(
        f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="{radius}" fill="{COLOURS[1]}"/>'
        for step, value in dots
    )
    labels = [
        caption(64, 14, title),
        caption(60, y(max(values)) + 4, f"{max(values):.3g}", "end"),
        caption(64, height - 8, f"{min(steps)}"),
        caption((64 + width - 10) / 2, height - 8, "step", "middle"),
        caption(width - 10, height - 8, f"{max(steps)}", "end"),
    ]
    if high > low:
        labels.append(caption(60, y(min(values)) + 4, f"{min(values):.3g}", "end"))
    if dots:
        labels.append(
            f'<path d="M{width - 80} 10h0" stroke="{COLOURS[1]}" stroke-width="6" '
            'stroke-linecap="round"/>'
        )
        labels.append(caption(width - 10, 14, "evaluation", "end"))
    if dots and line:
        labels.append(f'<path d="M{width - 164} 10h14" stroke="{COLOURS[0]}" stroke-width="2"/>')
        labels.append(caption(width - 92, 14, "training", "end"))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" class="small" style="font:12px '
        'system-ui,sans-serif" fill="currentColor" '
        f'role="img" aria-label="{html.escape(name)}"><polyline points="{path}" fill="none" '
        f'stroke="{COLOURS[0]}" stroke-width="1.6"/>'
        f"{circles}{''.join(labels)}</svg>"
    )
