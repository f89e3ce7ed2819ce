"""An array cut over a mesh, and the curve of a saturation, as drawings."""

import html
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spmd.layout.schema import entry_axes, spec_text
from spmd.mesh import MeshSpec
from spmd.planner.scaling import Saturation
from spmd.render.html import Html, framed
from spmd.render.svg import WIDTH, box, on_box, svg
from spmd.tree import describe

PIECES = 256  # of an array that are drawn
COLOURS = "abcdefghi"


def pieces_of(leaf: Any) -> dict[tuple[int, ...], list[int]]:
    """Which devices (by number; of a mesh without devices, along it) hold which piece of an array: by the piece's place along each dim.

    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from spmd.mesh import abstract_mesh
    >>> mesh = abstract_mesh(MeshSpec.parse("data=2,model=2"))
    >>> pieces_of(jax.ShapeDtypeStruct((4, 8), "float32", sharding=NamedSharding(mesh, PartitionSpec(None, "model"))))
    {(0, 0): [0, 2], (0, 1): [1, 3]}
    """
    mesh = MeshSpec.parse(leaf.sharding.mesh)
    spec = (*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec)))
    found: dict[tuple[int, ...], list[int]] = {}
    numbers = [one.id for one in leaf.sharding.mesh.devices.flat] if isinstance(leaf.sharding.mesh, Mesh) else range(mesh.size)
    for device, place in zip(numbers, itertools.product(*(range(size) for _, size in mesh.axes)), strict=True):
        at = dict(zip(mesh.names, place, strict=True))
        index = []
        for entry in spec:
            number = 0
            for axis in entry_axes(entry):
                number = number * mesh.sizes[axis] + at[axis]
            index.append(number)
        found.setdefault(tuple(index), []).append(device)
    return {index: sorted(devices) for index, devices in found.items()}


def array_drawing(path: str, leaf: Any) -> Html:
    """An array of any rank: a square for each piece with the devices that hold it; the last dim goes across, all others down."""
    pieces = pieces_of(leaf)
    counts = [1 + max(index[dim] for index in pieces) for dim in range(len(leaf.shape))]
    across = min(counts[-1], PIECES) if counts else 1
    wide, high = min(WIDTH / across, 220.0), 44.0
    gap = min(1.0, wide / 8)
    drawn = []
    for number, (index, devices) in enumerate(sorted(pieces.items())[:PIECES]):
        row, column = 0, index[-1] if index else 0
        for part, count in zip(index[:-1], counts[:-1], strict=True):
            row = row * count + part
        ranges = [_range(index[dim], counts[dim], size) for dim, size in enumerate(leaf.shape)]
        title = f"[{', '.join(ranges)}] on device{'s' * (len(devices) > 1)} {_listed(devices)}"
        x, y = column * wide, row * high
        drawn.append(box(x + gap, y + gap, wide - 2 * gap, high - 2 * gap, COLOURS[number % len(COLOURS)], title))
        text = _listed(devices)
        if 7 * len(text) < wide:
            drawn.append(on_box(x + wide / 2, y + high / 2 + 4, text))
    rows = row + 1
    more = f"; {len(pieces) - PIECES} more pieces are not drawn" if len(pieces) > PIECES else ""
    spec = tuple(leaf.sharding.spec)
    named, spec_words = f"{path}  " if path else "", spec_text(spec) if any(spec) else "whole"
    words = f"{named}{describe(leaf)}, spec {spec_words}: the devices that hold each piece{more}"
    return framed(f"<p>{html.escape(words)}</p>{svg(rows * high, drawn, words)}")


def _range(index: int, count: int, size: int) -> str:
    return ":" if count == 1 else f"{index * (size // count)}:{(index + 1) * (size // count)}"


def _listed(devices: Iterable[int]) -> str:
    """Numbers, those that follow each other as a range.

    >>> _listed([0, 1, 2, 3, 8, 10])
    '0-3, 8, 10'
    """
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], device]
        else:
            parts.append([device])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[1]}" for part in parts)


def saturation_drawing(found: Saturation) -> Html:
    """Rows per second over devices, both doubling from line to line; a codec's knee is a circle."""
    top = math.log2(max(max(rates) for rates in found.rates.values()))
    low = math.log2(min(min(rates) for rates in found.rates.values()))
    left, right, high = 80, WIDTH - 150, 300
    x = lambda at: left + at / max(len(found.devices) - 1, 1) * (right - left)
    y = lambda rate: 12 + (top - math.log2(rate)) / max(top - low, 1.0) * (high - 12)
    drawn = []
    for at, count in enumerate(found.devices):
        drawn.append(f'<line x1="{x(at):.1f}" y1="12" x2="{x(at):.1f}" y2="{high}" stroke="var(--soft)"/>')
        drawn.append(f'<text x="{x(at):.1f}" y="{high + 18}" text-anchor="middle">{count}</text>')
    for power in np.arange(math.ceil(low), math.floor(top) + 1, max(1, math.ceil((top - low) / 10))):
        drawn.append(f'<line x1="{left}" y1="{y(2.0**power):.1f}" x2="{right}" y2="{y(2.0**power):.1f}" stroke="var(--soft)"/>')
        drawn.append(f'<text x="{left - 8}" y="{y(2.0**power) + 4:.1f}" text-anchor="end">{2.0**power:,.0f}</text>')
    for number, (codec, rates) in enumerate(found.rates.items()):
        colour = f"var(--{'acefd'[number % 5]})"
        line = " ".join(f"{x(at):.1f},{y(rate):.1f}" for at, rate in enumerate(rates))
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        knee = found.devices.index(found.knee(codec))
        title = f"{codec}: twice {found.devices[knee]} devices gain little; {rates[knee]:,.0f} rows/s"
        drawn.append(
            f'<circle cx="{x(knee):.1f}" cy="{y(rates[knee]):.1f}" r="6" fill="{colour}"><title>{html.escape(title)}</title></circle>'
        )
        drawn.append(f'<rect x="{right + 20}" y="{22 + 22 * number}" width="11" height="11" fill="{colour}"/>')
        drawn.append(f'<text x="{right + 37}" y="{32 + 22 * number}">{html.escape(codec)}, from {found.devices[knee]}</text>')
    words = f"rows/s of all devices for a batch of {found.rows} rows, by number of devices"
    return framed(
        f"<p>{words}; a circle is where twice as many gain little</p>{svg(high + 26, drawn, words)}<pre>{html.escape(str(found))}</pre>"
    )
