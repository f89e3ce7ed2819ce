"""Building blocks of drawings: self-contained SVG."""

import html
from collections.abc import Iterable, Sequence

WIDTH = 960  # of drawings, in SVG units; they scale with the page
# Colours of the style, in an order in which neighbours differ most.
SERIES = "acedgijkfb"


def box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    """Return a filled rectangle with a tooltip; `colour` is a letter of the style."""
    shape = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {shape} fill="var(--{colour})"><title>{html.escape(title)}</title></rect>'


def frame(x: float, y: float, width: float, height: float, title: str) -> str:
    """Return the outline of a rectangle, with a tooltip."""
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return (
        f'<rect {shape} fill="var(--soft)" '
        f'stroke="var(--line)"><title>{html.escape(title)}</title></rect>'
    )


def on_box(x: float, y: float, words: str) -> str:
    """Return a line of text centred on a filled rectangle, readable on every colour."""
    return (
        f'<text class="on" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{html.escape(words)}</text>'
    )


def caption(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a line of text that begins, has its middle or ends (`anchor`) at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def heading(x: float, y: float, words: str) -> str:
    """Return a line of bold text."""
    return caption(x, y, words).replace("<text ", '<text style="font-weight:600" ', 1)


def legend(x: float, y: float, colour: str, words: str) -> str:
    """Return a square of a colour of the style, and its meaning."""
    return box(x, y - 10, 11, 11, colour, words) + caption(x + 17, y, words)


def bars(rows: Sequence[tuple[str, float, str]], label: str) -> str:
    """Return bars below each other, each under its name and its value in words; the largest is as
    wide as the drawing.

    >>> bars([("all_gather", 2.0, "2 B"), ("all_reduce", 1.0, "1 B")], "bytes").count("<rect")
    2
    """
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    parts = []
    for number, (name, value, words) in enumerate(rows):
        parts.append(caption(0, 36 * number + 12, f"{name}: {words}"))
        parts.append(
            box(
                0,
                36 * number + 17,
                max(WIDTH * value / most, 1.0),
                11,
                SERIES[0],
                f"{name}: {words}",
            )
        )
    return svg(36 * len(rows), parts, label)


def svg(height: float, parts: Iterable[str], label: str, *, width: int | None = None) -> str:
    """Return a drawing of the common width, which scales with the page; or of a `width` in pixels,
    which is at most the page's.
    """
    view = f'viewBox="0 0 {width or WIDTH} {height:.0f}"'
    if width:
        view += f' width="{width}" class="small"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def strip(height: float, parts: Iterable[str], label: str) -> str:
    """Return a drawing without text, which is as wide as the page, however wide the page is."""
    return svg(height, parts, label).replace(
        "<svg ", f'<svg class="strip" style="height:{height:.0f}px" preserveAspectRatio="none" ', 1
    )


def key(colour: str, words: str) -> str:
    """Return a square of a colour of the style, and its meaning, in HTML: a row of these is
    wrapped; "" is an outline.
    """
    style = "box-shadow:inset 0 0 0 2px var(--ink)"
    if colour:
        style = f"background:var(--{colour})"
    return f'<span class="key"><i style="{style}"></i>{html.escape(words)}</span> '
