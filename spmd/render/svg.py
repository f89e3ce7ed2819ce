"""What drawings of plans are made of: SVG that needs nothing beside it."""

import html
from collections.abc import Iterable

WIDTH = 960  # of drawings, in pixels of their own; they scale with the page


def box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    """A filled rectangle that tells its title under the pointer; colours are letters of the style."""
    shape = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {shape} fill="var(--{colour})"><title>{html.escape(title)}</title></rect>'


def on_box(x: float, y: float, text: str) -> str:
    """A line of text in the middle of a filled rectangle, readable on every colour."""
    return f'<text class="on" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{html.escape(text)}</text>'


def svg(height: float, parts: Iterable[str], label: str) -> str:
    """A drawing as wide as all of them."""
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
