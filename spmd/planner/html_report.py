"""Plans as HTML that loads nothing from elsewhere: the report of one plan, and drawings of arrays,
curves and searches.
"""

import functools
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spmd.layout.summary import COLUMNS, rows as layout_rows
from spmd.mesh import MeshSpec
from spmd.planner.memory import TITLES
from spmd.planner.plan_data import PlanData
from spmd.planner.text_report import costs_text, headline, seconds, step_time, timeline_text
from spmd.planner.timeline import Span
from spmd.planner.traffic import traffic_rows
from spmd.render.html import Html, document, folded, framed, table
from spmd.render.svg import WIDTH, box, caption, key, legend, on_box, strip, svg
from spmd.specs import entry_axes, spec_text
from spmd.tree import describe, format_bytes

SHARDS = 256  # at most this many shards of an array are drawn
COLOURS = "abcdefghi"


def shards_of(leaf: Any) -> dict[tuple[int, ...], list[int]]:
    """The devices that hold each shard of an array, by the shard's index along each dim.

    Devices are numbered by their id, or by their position on a mesh without devices.

    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from spmd.mesh import abstract_mesh
    >>> mesh = abstract_mesh(MeshSpec.parse("data=2,model=2"))
    >>> shards_of(
    ...     jax.ShapeDtypeStruct(
    ...         (4, 8), "float32", sharding=NamedSharding(mesh, PartitionSpec(None, "model"))
    ...     )
    ... )
    {(0, 0): [0, 2], (0, 1): [1, 3]}
    """
    mesh = MeshSpec.parse(leaf.sharding.mesh)
    dims = [entry_axes(entry) for entry in leaf.sharding.spec] + [()] * (
        len(leaf.shape) - len(leaf.sharding.spec)
    )
    holders: dict[tuple[int, ...], list[int]] = {}
    ids = (
        [device.id for device in leaf.sharding.mesh.devices.flat]
        if isinstance(leaf.sharding.mesh, Mesh)
        else range(mesh.size)
    )
    for device, coordinates in zip(ids, np.ndindex(*mesh.sizes.values()), strict=True):
        at = dict(zip(mesh.names, coordinates, strict=True))
        index = tuple(_position([(at[axis], mesh.sizes[axis]) for axis in axes]) for axes in dims)
        holders.setdefault(index, []).append(device)
    return {index: sorted(devices) for index, devices in holders.items()}


def _position(digits: Iterable[tuple[int, int]]) -> int:
    """The number whose digits, each with its base, are these; the last one counts single units."""
    return functools.reduce(lambda number, digit: number * digit[1] + digit[0], digits, 0)


def array_drawing(path: str, leaf: Any) -> Html:
    """An array of any rank as a grid of its shards with the devices that hold them: the last dim
    horizontally, all others vertically.
    """
    shards = shards_of(leaf)
    counts = [1 + max(index[dim] for index in shards) for dim in range(len(leaf.shape))]
    columns = min(counts[-1], SHARDS) if counts else 1
    width, height = min(WIDTH / columns, 220.0), 44.0
    gap = min(1.0, width / 8)
    parts = []
    for number, (index, devices) in enumerate(sorted(shards.items())[:SHARDS]):
        row, column = (
            _position(zip(index[:-1], counts[:-1], strict=True)),
            index[-1] if index else 0,
        )
        sizes = [size // count for size, count in zip(leaf.shape, counts, strict=True)]
        ends = zip(index, counts, sizes, strict=True)
        ranges = [
            ":" if count == 1 else f"{at * size}:{(at + 1) * size}" for at, count, size in ends
        ]
        names = device_ranges(devices)
        title = f"[{', '.join(ranges)}] on device{'s' * (len(devices) > 1)} {names}"
        x, y = column * width, row * height
        parts.append(
            box(
                x + gap,
                y + gap,
                width - 2 * gap,
                height - 2 * gap,
                COLOURS[number % len(COLOURS)],
                title,
            )
        )
        if 7 * len(names) < width:
            parts.append(on_box(x + width / 2, y + height / 2 + 4, names))
    more = f"; {len(shards) - SHARDS} more shards are not drawn" if len(shards) > SHARDS else ""
    spec = tuple(leaf.sharding.spec)
    label = f"{path}  " if path else ""
    label += (
        f"{describe(leaf)}, {f'spec {spec_text(spec)}' if any(spec) else 'replicated'}: the "
        f"devices that hold each shard{more}"
    )
    drawing = svg(
        (row + 1) * height,
        parts,
        label,
        width=round(columns * width) if columns * width < WIDTH / 2 else None,
    )
    return framed(f"<p>{html.escape(label)}</p>{drawing}")


def device_ranges(devices: Iterable[int]) -> str:
    """Numbers as text, consecutive ones as a range.

    >>> device_ranges([0, 1, 2, 3, 8, 10])
    '0-3, 8, 10'
    """
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def throughput_chart(
    devices: Sequence[int],
    rates: Mapping[str, Sequence[float]],
    knees: Mapping[str, int],
    label: str,
) -> str:
    """Rows per second over number of devices as SVG, both axes logarithmic: a line for each codec,
    and a circle at its knee, if any.
    """
    top = math.log2(max(map(max, rates.values())))
    low = math.log2(min(map(min, rates.values())))

    def height(rate: float) -> float:
        return (math.log2(rate) - low) / max(top - low, 1.0)

    powers = range(math.ceil(low), math.floor(top) + 1, max(1, math.ceil((top - low) / 10)))
    marks = {}
    for codec, line in ((codec, rates[codec]) for codec in knees):
        knee = devices.index(knees[codec])
        marks[codec] = (
            knee,
            f"{codec}: doubling {knees[codec]} devices gains little; {line[knee]:,.0f} rows/s",
        )
    lines = {codec: [height(rate) for rate in line] for codec, line in rates.items()}
    names = {codec: f"{codec}, from {knees[codec]}" if codec in knees else codec for codec in rates}
    return _line_chart(
        [*map(str, devices)],
        lines,
        {f"{2.0**power:,.0f}": height(2.0**power) for power in powers},
        marks,
        names,
        label,
    )


def utilization_chart(
    speeds: Sequence[str], shares: Mapping[int, Sequence[float]], enough: float, label: str
) -> str:
    """Utilization over the speed of links as SVG: a line for each period, with a circle at the
    first speed where it is `enough`.
    """
    lines, marks, names = {}, {}, {}
    for steps, line in shares.items():
        name = f"{steps} steps" if steps > 1 else "every step"
        lines[name], names[name] = list(line), name
        first = next((at for at, share in enumerate(line) if share >= enough), None)
        if first is not None:
            marks[name] = first, f"{name}: {line[first]:.1%} at {speeds[first]}"
    return _line_chart(
        speeds,
        lines,
        {f"{share}%": share / 100 for share in range(0, 101, 20)},
        marks,
        names,
        label,
    )


def _line_chart(
    columns: Sequence[str],
    lines: Mapping[str, Sequence[float]],
    ticks: Mapping[str, float],
    marks: Mapping[str, tuple[int, str]],
    names: Mapping[str, str],
    label: str,
) -> str:
    """Lines over equidistant columns as SVG.

    Args:
      lines: heights, from 0 to 1, at each column.
      ticks: heights of horizontal lines.
      marks: of a line, the column of a circle, and its title.
      names: of a line, in the legend.
    """
    left, right, bottom = 80, WIDTH - 150, 300

    def x(position: int) -> float:
        return left + position / max(len(columns) - 1, 1) * (right - left)

    def y(height: float) -> float:
        return bottom - height * (bottom - 12)

    parts = []
    for position, name in enumerate(columns):
        at = f"{x(position):.1f}"
        parts.append(f'<line x1="{at}" y1="12" x2="{at}" y2="{bottom}" stroke="var(--soft)"/>')
        parts.append(caption(x(position), bottom + 18, name, "middle"))
    for name, height in ticks.items():
        parts.append(
            f'<line x1="{left}" y1="{y(height):.1f}" x2="{right}" y2="{y(height):.1f}" '
            'stroke="var(--soft)"/>'
        )
        parts.append(caption(left - 8, y(height) + 4, name, "end"))
    for number, (name, heights) in enumerate(lines.items()):
        colour = "acefd"[number % 5]
        points = " ".join(
            f"{x(position):.1f},{y(height):.1f}" for position, height in enumerate(heights)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="var(--{colour})" stroke-width="2"/>'
        )
        if name in marks:
            at, title = marks[name]
            centre = f'cx="{x(at):.1f}" cy="{y(heights[at]):.1f}"'
            parts.append(
                f'<circle {centre} r="6" '
                f'fill="var(--{colour})"><title>{html.escape(title)}</title></circle>'
            )
        parts.append(legend(right + 20, 32 + 22 * number, colour, names[name]))
    return svg(bottom + 26, parts, label)


def pareto_chart(points: Sequence[tuple[str, str, float, int]], capacity: int, label: str) -> str:
    """Memory over time of plans as SVG: a circle for each, and a line along the Pareto front; time
    is logarithmic.

    Args:
      points: (the series, which has a colour; a name; seconds; bytes) of each, fastest first; they
        are numbered in this order.
      capacity: bytes of a device, a line if it is near.
    """
    series = list(dict.fromkeys(point[0] for point in points))
    left, right, bottom = 80, WIDTH - 230, 320
    low, high = (bound(math.log2(point[2]) for point in points) for bound in (min, max))
    low, high = low - 0.05 * max(high - low, 0.2), high + 0.05 * max(high - low, 0.2)
    top = 1.08 * max(point[3] for point in points)
    top = max(top, 1.02 * capacity) if 2 * top > capacity else top

    def x(time: float) -> float:
        return left + (math.log2(time) - low) / (high - low) * (right - left)

    def y(size: float) -> float:
        return bottom - size / top * (bottom - 12)

    parts = []
    for share in range(5):
        at, size = 2 ** (low + share / 4 * (high - low)), share / 4 * top
        parts.append(_line((left, y(size)), (right, y(size)), "soft"))
        parts.append(_line((x(at), 12), (x(at), bottom), "soft"))
        parts.append(caption(left - 8, y(size) + 4, format_bytes(round(size)), "end"))
        parts.append(caption(x(at), bottom + 18, seconds(at), "middle"))
    if capacity <= top:
        parts.append(_line((left, y(capacity)), (right, y(capacity)), "bad"))
        parts.append(
            caption(right - 6, y(capacity) + 14, f"{format_bytes(capacity)} on a device", "end")
        )
    front: list[tuple[float, float]] = []
    for _, _, time, size in points:
        if not front or y(size) > front[-1][1]:
            front += [*([(x(time), front[-1][1])] if front else []), (x(time), y(size))]
    corners = " ".join(
        f"{across:.1f},{down:.1f}" for across, down in [*front, (right, front[-1][1])]
    )
    parts.append(f'<polyline points="{corners}" fill="none" stroke="var(--f)" stroke-width="2"/>')
    for number, (kind, name, time, size) in reversed(list(enumerate(points, 1))):
        place, on_front = f'cx="{x(time):.1f}" cy="{y(size):.1f}"', (x(time), y(size)) in front
        colour = COLOURS[series.index(kind) % len(COLOURS)]
        title = html.escape(f"{number}. {name}: {seconds(time)}, {format_bytes(size)}")
        shape = (
            f'r="7" fill="var(--{colour})"'
            if on_front
            else f'r="5" fill="var(--{colour})" fill-opacity="0.45"'
        )
        parts.append(f"<circle {place} {shape}><title>{title}</title></circle>")
        faster = front[: front.index((x(time), y(size)))] if on_front else []
        legible = on_front and all(math.dist((x(time), y(size)), other) > 14 for other in faster)
        parts += [
            caption(x(time) + 9, y(size) - 7, "1, the best" if number == 1 else str(number))
        ] * legible
    parts += [
        legend(right + 20, 32 + 22 * number, COLOURS[number % len(COLOURS)], kind)
        for number, kind in enumerate(series)
    ]
    parts.append(
        caption(
            left,
            bottom + 40,
            "seconds of a step, and peak memory of a device; the line is the Pareto front, numbers "
            "are those of the table",
        )
    )
    return svg(bottom + 48, parts, label)


def _line(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="var(--{colour})"/>'
    )


VISIBLE = 2  # SVG units: the least width of what is in use
SHOWN = 64  # at most this many nodes, and devices of a node, are drawn
MEMORY = {  # in a device's memory: what is drawn, and its colour
    "parameters": "a",
    "frozen": "k",
    "optimizer": "c",
    "exchange": "d",
    "statistics": "f",
    "batch": "e",
    "constants": "g",
    "fresh": "h",
    "gradients": "i",
    "activations and copies": "b",
    "beside": "j",
}


def page(plan: PlanData, more: Mapping[str, str]) -> str:
    """A complete HTML document: the report, and further sections by their titles."""
    sections = "".join(
        f"<h2>{html.escape(title)}</h2><pre>{html.escape(body)}</pre>"
        for title, body in more.items()
    )
    body = fragment(plan) + (framed(sections) if sections else "")
    return document(
        f"Plan: {plan.layout.name} on {plan.cluster}", body, style="body { margin: 1.2rem }"
    )


def fragment(plan: PlanData) -> Html:
    """The report for a notebook's cell."""
    *compiler, title, size, _ = map(html.escape, headline(plan).split("\n"))
    kind = {"DOES NOT FIT": "bad", "tight": "tight"}.get(plan.memory.word, "")
    pipelines = "".join(
        f"<h2>{html.escape(name)}</h2><pre>{html.escape(str(schedule))}</pre>"
        for name, schedule in plan.schedules.items()
    )
    communication = f'<div class="wide">{table(*traffic_rows(plan.traffic))}</div>'
    lines = [
        f"<h1>{html.escape(plan.layout.name)} on "
        f"{html.escape(str(plan.cluster))}</h1><p>{'<br>'.join([title, size, *compiler])}</p>",
        f'<p class="verdict {kind}">{html.escape(plan.memory.verdict)}</p>',
        f"<p>{step_time(plan)}, {plan.rows_per_second:,.0f} rows/s (predicted); "
        f"{format_bytes(plan.traffic.bytes())} sent by each device per step.</p>",
        "<h2>Memory on each "
        f"device</h2>{memory_bar(plan)}<pre>{html.escape(str(plan.memory))}</pre>",
        f"<h2>The mesh on its nodes</h2>{mesh_drawing(plan)}",
        f"<h2>A step</h2>{timeline_drawing(plan)}<pre>{html.escape(timeline_text(plan))}</pre>",
        f"<h2>Communication</h2>{communication}" if plan.traffic.transfers else "",
        pipelines,
        "<h2>Notes</h2>" + "".join(f"<p>{html.escape(line)}</p>" for line in plan.notes)
        if plan.notes
        else "",
        f"<h2>Largest costs</h2><pre>{html.escape(costs_text(plan))}</pre>" if plan.costs else "",
        folded(
            "placement of every parameter",
            f'<div class="wide">{table(COLUMNS, layout_rows(plan.program.placed.resolved))}</div>',
        ),
        folded("the layout as TOML", f"<pre>{html.escape(plan.layout.to_toml())}</pre>"),
    ]
    return framed("".join(lines))


def memory_bar(plan: PlanData) -> str:
    """What a device holds, to scale, and its capacity."""
    memory = plan.memory
    gradients = min(memory.gradients, memory.temporaries)
    sizes = memory.per_device | {
        "gradients": gradients,
        "activations and copies": memory.temporaries - gradients,
    }
    sizes["beside"] = memory.expected - memory.peak
    scale = WIDTH / max(memory.capacity, memory.expected)
    x, parts, keys = 0.0, [], []
    for name in (name for name in MEMORY if sizes[name]):
        title, width = (
            f"{TITLES.get(name, name)}: {format_bytes(sizes[name])}",
            max(sizes[name] * scale, VISIBLE),
        )
        parts.append(box(x, 6, width, 26, MEMORY[name], title))
        keys.append(key(MEMORY[name], title))
        x += width
    parts.append(
        f'<path d="M0 4h{memory.capacity * scale:.1f}v30h-{memory.capacity * scale:.1f}z" '
        'class="outline"/>'
    )
    keys.append(key("", f"a device has {format_bytes(memory.capacity)}"))
    return strip(38, parts, f"memory: {memory.verdict}") + f"<p>{''.join(keys)}</p>"


def mesh_drawing(plan: PlanData) -> str:
    """Nodes as frames and devices as squares with their mesh coordinates, innermost axis last; at
    most `SHOWN` of each.
    """
    cluster, axes = plan.cluster, plan.mesh.axes
    nodes, devices = min(cluster.nodes, SHOWN), min(cluster.devices, SHOWN)
    side, per_row = 46, 8
    columns = max(1, WIDTH // (min(devices, per_row) * side + 24))
    width, height = min(devices, per_row) * side + 12, -(-devices // per_row) * side + 34
    parts = []
    for node in range(nodes):
        x, y = node % columns * (width + 12), node // columns * (height + 8)
        parts.append(
            f'<rect x="{x + 1}" y="{y + 18}" width="{width}" height="{height - 22}" fill="none" '
            'stroke="var(--line)" rx="5"/>'
        )
        site = f", site {node * cluster.sites // cluster.nodes}" if cluster.sites > 1 else ""
        parts.append(caption(x + 4, y + 13, f"node {node}{site}"))
        for device in range(devices):
            left, top = x + 7 + device % per_row * side, y + 24 + device // per_row * side
            number = node * cluster.devices + device
            coordinates = np.unravel_index(number, [size for _, size in axes])
            where = ", ".join(
                f"{name} {at}" for (name, _), at in zip(axes, coordinates, strict=True)
            )
            parts.append(box(left, top, side - 6, side - 6, "b", f"device {number}: {where}"))
            parts.append(
                on_box(
                    left + (side - 6) / 2, top + (side - 6) / 2 + 4, ",".join(map(str, coordinates))
                )
            )
    left_out = [f"{cluster.nodes - nodes} more nodes"] * (nodes < cluster.nodes)
    left_out += [f"{cluster.devices - devices} more devices on each"] * (devices < cluster.devices)
    line = str(plan.mesh) + ("; not drawn: " + ", ".join(left_out) if left_out else "")
    return f"<p>{html.escape(line)}</p>" + svg(
        -(-nodes // columns) * (height + 8), parts, f"mesh {plan.mesh}"
    )


def timeline_drawing(plan: PlanData) -> str:
    """Computation and communication over time, to scale."""
    total = plan.timeline.seconds or 1.0
    left, width = 100, WIDTH - 100
    parts = []
    for row, (name, communicates, colour) in enumerate(
        (("computation", False, "a"), ("communication", True, "c"))
    ):
        top = 18 + row * 40
        parts.append(caption(0, top + 17, name))
        parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="26" fill="var(--soft)"/>')
        for span in merged(
            [span for span in plan.timeline.spans if span.communicates is communicates],
            total / width,
        ):
            duration = span.end - span.begin
            title = f"{span.name}: {seconds(duration)} {span.where}"
            parts.append(
                box(
                    left + span.begin / total * width,
                    top,
                    max(duration / total * width, 0.4),
                    26,
                    colour,
                    title,
                )
            )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "end" if share == 1 else "start" if share == 0 else "middle"
        parts.append(
            caption(left + share * width, 104, seconds(share * total) if share else "0", anchor)
        )
    return svg(110, parts, f"a step of {seconds(total)}")


def merged(spans: Sequence[Span], pixel: float) -> list[Span]:
    """Spans with less than a pixel between them, merged, so that a long program does not make a
    large page.
    """
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if (
            last is not None
            and span.begin - last.end < pixel
            and min(span.end - span.begin, last.end - last.begin) < 2 * pixel
        ):
            name = last.name if last.name.endswith(" ...") else f"{last.name} ..."
            merged[-1] = Span(name, last.where, last.begin, span.end, last.communicates)
        else:
            merged.append(span)
    return merged
