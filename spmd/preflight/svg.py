"""What drawings of plans are made of: SVG that needs nothing beside it, readable in light and dark."""

import html
from collections.abc import Iterable

WIDTH = 960  # of drawings, in pixels of their own; they scale with the page
STYLE = """
.spmd-plan {
  color-scheme: light dark; --ink: #1d2433; --paper: #fff; --soft: #8883; --line: #8886; --good: #2e7d4f; --bad: #c0392b; --tight: #b7791f;
  --a: #3566c0; --b: #6f9ae0; --c: #c4571f; --d: #8a6fc4; --e: #2f8f83; --f: #9aa3b2; --g: #d9a441; --h: #b3b9c6; --i: #4c9fb5;
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); padding: 1.2rem;
}
@media (prefers-color-scheme: dark) {
  .spmd-plan { --ink: #e4e8f0; --paper: #14181f; --a: #2f5fb3; --b: #5b86cf; --good: #5fc48c; --bad: #ef7b6e; --tight: #e0b050; }
}
.spmd-plan h1 { font-size: 1.4rem; margin: 0 }
.spmd-plan h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; border-bottom: 1px solid var(--line) }
.spmd-plan table { border-collapse: collapse; font-size: .88em }
.spmd-plan :is(td, th) { padding: .15rem .9rem .15rem 0; text-align: left; border-bottom: 1px solid var(--soft); white-space: nowrap }
.spmd-plan :is(td, pre) { font-family: ui-monospace, monospace }
.spmd-plan pre { background: var(--soft); padding: .7rem; white-space: pre-wrap; font-size: .88em }
.spmd-plan .wide { overflow-x: auto }
.spmd-plan svg { display: block; width: 100%; max-width: 960px }
.spmd-plan svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
.spmd-plan .verdict { font-weight: 600; color: var(--good) }
.spmd-plan .verdict.bad { color: var(--bad) }
.spmd-plan .verdict.tight { color: var(--tight) }
"""


def framed(body: str) -> str:
    """HTML with the style that tables and drawings are in, for a page or a notebook's cell."""
    return f'<div class="spmd-plan"><style>{STYLE}</style>{body}</div>'


def box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    """A filled rectangle that tells its title under the pointer; colours are letters of the style."""
    shape = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {shape} fill="var(--{colour})"><title>{html.escape(title)}</title></rect>'


def svg(height: float, parts: Iterable[str], label: str) -> str:
    """A drawing as wide as all of them."""
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
