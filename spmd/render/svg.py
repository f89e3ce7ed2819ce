"""Building blocks of drawings: self-contained SVG."""

import html
from collections.abc import Iterable

WIDTH = 960  # of drawings, in SVG units; they scale with the page


def box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    """A filled rectangle with a tooltip; `colour` is a letter of the style."""
    shape = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {shape} fill="var(--{colour})"><title>{html.escape(title)}</title></rect>'


def on_box(x: float, y: float, text: str) -> str:
    """A line of text centred on a filled rectangle, readable on every colour."""
    return f'<text class="on" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{html.escape(text)}</text>'


def svg(height: float, parts: Iterable[str], label: str) -> str:
    """A drawing of the common width."""
    view = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
