"""Plans as HTML that loads nothing from elsewhere: the report of one plan, and drawings of arrays,
curves and searches.
"""

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spmd.base.specs import entry_axes, spec_text
from spmd.base.tree import describe, format_bytes
from spmd.layout.summary import COLUMNS, rows as layout_rows
from spmd.mesh import MeshSpec
from spmd.planner.memory import TITLES
from spmd.planner.plan_data import PlanData
from spmd.planner.text_report import costs_text, headline, seconds, step_time, timeline_text
from spmd.planner.timeline import Span
from spmd.planner.traffic import traffic_rows
from spmd.render.html import Html, document, folded, framed, table
from spmd.render.svg import WIDTH, box, caption, key, legend, on_box, strip, svg

SHARDS = 256  # at most this many shards of an array are drawn
COLOURS = "abcdefghi"
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


def shards_of(leaf: Any) -> dict[tuple[int, ...], list[int]]:
    """Return the devices that hold each shard of an array, by the shard's index along each dim.

    Devices are numbered by their id, or by their position on a mesh without devices.

    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from spmd.mesh import abstract_mesh
    >>> mesh = abstract_mesh(MeshSpec.parse("data=2,model=2"))
    >>> sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    >>> shards_of(jax.ShapeDtypeStruct((4, 8), "float32", sharding=sharding))
    {(0, 0): [0, 2], (0, 1): [1, 3]}
    """
    mesh = MeshSpec.parse(leaf.sharding.mesh)
    spec = leaf.sharding.spec
    unsharded = [()] * (len(leaf.shape) - len(spec))
    dims = [entry_axes(entry) for entry in spec] + unsharded
    ids = range(mesh.size)
    if isinstance(leaf.sharding.mesh, Mesh):
        ids = [device.id for device in leaf.sharding.mesh.devices.flat]
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, coordinates in zip(ids, np.ndindex(*mesh.sizes.values()), strict=True):
        at = dict(zip(mesh.names, coordinates, strict=True))
        index = []
        for axes in dims:
            index.append(_position([(at[axis], mesh.sizes[axis]) for axis in axes]))
        holders.setdefault(tuple(index), []).append(device)
    return {index: sorted(devices) for index, devices in holders.items()}


def _position(digits: Iterable[tuple[int, int]]) -> int:
    """Return the number with these digits, each with its base; the last one counts single units."""
    number = 0
    for digit, base in digits:
        number = number * base + digit
    return number


def array_drawing(path: str, leaf: Any) -> Html:
    """Draw an array of any rank as a grid of its shards with the devices that hold them: the last
    dim horizontally, all others vertically.
    """
    shards = shards_of(leaf)
    counts = [1 + max(indices) for indices in zip(*shards, strict=True)]
    columns = 1
    if counts:
        columns = min(counts[-1], SHARDS)
    width = min(WIDTH / columns, 220.0)
    height = 44.0
    gap = min(1.0, width / 8)
    parts = []
    row = 0
    for number, (index, devices) in enumerate(sorted(shards.items())[:SHARDS]):
        row = _position(zip(index[:-1], counts[:-1], strict=True))
        names = device_ranges(devices)
        title = f"{_slices(index, counts, leaf.shape)} on device{'s' * (len(devices) > 1)} {names}"
        # A scalar has one shard, whose index is empty.
        column = 0
        if index:
            column = index[-1]
        x = column * width
        y = row * height
        colour = COLOURS[number % len(COLOURS)]
        parts.append(box(x + gap, y + gap, width - 2 * gap, height - 2 * gap, colour, title))
        if 7 * len(names) < width:
            parts.append(on_box(x + width / 2, y + height / 2 + 4, names))
    label = ""
    if path:
        label = f"{path}  "
    spec = tuple(leaf.sharding.spec)
    place = "replicated"
    if any(spec):
        place = f"spec {spec_text(spec)}"
    label += f"{describe(leaf)}, {place}: the devices that hold each shard"
    if len(shards) > SHARDS:
        label += f"; {len(shards) - SHARDS} more shards are not drawn"
    narrow = None
    if columns * width < WIDTH / 2:
        narrow = round(columns * width)
    drawing = svg((row + 1) * height, parts, label, width=narrow)
    return framed(f"<p>{html.escape(label)}</p>{drawing}")


def _slices(index: Sequence[int], counts: Sequence[int], shape: Sequence[int]) -> str:
    """Write the part of an array that a shard is, such as "[0:4, :]"."""
    ranges = []
    for at, count, length in zip(index, counts, shape, strict=True):
        size = length // count
        if count == 1:
            ranges.append(":")
        else:
            ranges.append(f"{at * size}:{(at + 1) * size}")
    return f"[{', '.join(ranges)}]"


def device_ranges(devices: Iterable[int]) -> str:
    """Write numbers as text, consecutive ones as a range.

    >>> device_ranges([0, 1, 2, 3, 8, 10])
    '0-3, 8, 10'
    """
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    texts = []
    for run in runs:
        text = str(run[0])
        if len(run) > 1:
            text = f"{run[0]}-{run[-1]}"
        texts.append(text)
    return ", ".join(texts)


def throughput_chart(
    devices: Sequence[int],
    rates: Mapping[str, Sequence[float]],
    knees: Mapping[str, int],
    label: str,
) -> str:
    """Draw rows per second over number of devices as SVG, both axes logarithmic: a line for each
    codec, and a circle at its knee, if any.
    """
    top = math.log2(max(map(max, rates.values())))
    low = math.log2(min(map(min, rates.values())))

    def height(rate: float) -> float:
        return (math.log2(rate) - low) / max(top - low, 1.0)

    chart = LineChart([*map(str, devices)])
    powers = range(math.ceil(low), math.floor(top) + 1, max(1, math.ceil((top - low) / 10)))
    for power in powers:
        chart.ticks[f"{2.0**power:,.0f}"] = height(2.0**power)
    for codec, line in rates.items():
        name = codec
        mark = None
        if codec in knees:
            knee = devices.index(knees[codec])
            gain = f"doubling {knees[codec]} devices gains little; {line[knee]:,.0f} rows/s"
            name = f"{codec}, from {knees[codec]}"
            mark = (knee, f"{codec}: {gain}")
        chart.lines.append(Curve(name, [height(rate) for rate in line], mark))
    return chart.drawing(label)


def utilization_chart(
    speeds: Sequence[str], shares: Mapping[int, Sequence[float]], enough: float, label: str
) -> str:
    """Draw utilization over the speed of links as SVG: a line for each period, with a circle at the
    first speed where it is `enough`.
    """
    chart = LineChart(speeds)
    for percent in range(0, 101, 20):
        chart.ticks[f"{percent}%"] = percent / 100
    for steps, line in shares.items():
        name = "every step"
        if steps > 1:
            name = f"{steps} steps"
        mark = None
        for at, share in enumerate(line):
            if share >= enough:
                mark = (at, f"{name}: {share:.1%} at {speeds[at]}")
                break
        chart.lines.append(Curve(name, line, mark))
    return chart.drawing(label)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
      name: in the legend.
      heights: from 0 to 1, at each column.
      mark: the column of a circle, and its title; None for none.
    """

    name: str
    heights: Sequence[float]
    mark: tuple[int, str] | None


@dataclasses.dataclass(frozen=True)
class LineChart:
    """Lines over equidistant columns.

    Attributes:
      columns: their names.
      ticks: heights of horizontal lines, from 0 to 1, by their names.
    """

    columns: Sequence[str]
    ticks: dict[str, float] = dataclasses.field(default_factory=dict)
    lines: list[Curve] = dataclasses.field(default_factory=list)

    def drawing(self, label: str) -> str:
        """Draw the chart as SVG."""
        left, right, bottom = 80, WIDTH - 150, 300

        def x(position: int) -> float:
            return left + position / max(len(self.columns) - 1, 1) * (right - left)

        def y(height: float) -> float:
            return bottom - height * (bottom - 12)

        parts = []
        for position, name in enumerate(self.columns):
            at = f"{x(position):.1f}"
            parts.append(f'<line x1="{at}" y1="12" x2="{at}" y2="{bottom}" stroke="var(--soft)"/>')
            parts.append(caption(x(position), bottom + 18, name, "middle"))
        for name, height in self.ticks.items():
            parts.append(
                f'<line x1="{left}" y1="{y(height):.1f}" x2="{right}" y2="{y(height):.1f}" '
                'stroke="var(--soft)"/>'
            )
            parts.append(caption(left - 8, y(height) + 4, name, "end"))
        for number, line in enumerate(self.lines):
            colour = "acefd"[number % 5]
            points = " ".join(
                f"{x(position):.1f},{y(height):.1f}" for position, height in enumerate(line.heights)
            )
            stroke = f'stroke="var(--{colour})" stroke-width="2"'
            parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
            if line.mark is not None:
                at, title = line.mark
                centre = f'cx="{x(at):.1f}" cy="{y(line.heights[at]):.1f}"'
                parts.append(
                    f'<circle {centre} r="6" '
                    f'fill="var(--{colour})"><title>{html.escape(title)}</title></circle>'
                )
            parts.append(legend(right + 20, 32 + 22 * number, colour, line.name))
        return svg(bottom + 26, parts, label)


def pareto_chart(points: Sequence[tuple[str, str, float, int]], capacity: int, label: str) -> str:
    """Draw memory over time of plans as SVG: a circle for each, and a line along the Pareto front;
    time is logarithmic.

    Args:
      points: (the series, which has a colour; a name; seconds; bytes) of each, fastest first; they
        are numbered in this order.
      capacity: bytes of a device, a line if it is near.
    """
    series = list(dict.fromkeys(point[0] for point in points))
    left, right, bottom = 80, WIDTH - 230, 320
    logarithms = [math.log2(point[2]) for point in points]
    margin = 0.05 * max(max(logarithms) - min(logarithms), 0.2)
    low = min(logarithms) - margin
    high = max(logarithms) + margin
    top = 1.08 * max(point[3] for point in points)
    if 2 * top > capacity:
        top = max(top, 1.02 * capacity)

    def x(time: float) -> float:
        return left + (math.log2(time) - low) / (high - low) * (right - left)

    def y(size: float) -> float:
        return bottom - size / top * (bottom - 12)

    parts = []
    for share in range(5):
        at = 2 ** (low + share / 4 * (high - low))
        size = share / 4 * top
        parts.append(_line((left, y(size)), (right, y(size)), "soft"))
        parts.append(_line((x(at), 12), (x(at), bottom), "soft"))
        parts.append(caption(left - 8, y(size) + 4, format_bytes(round(size)), "end"))
        parts.append(caption(x(at), bottom + 18, seconds(at), "middle"))
    if capacity <= top:
        parts.append(_line((left, y(capacity)), (right, y(capacity)), "bad"))
        limit = f"{format_bytes(capacity)} on a device"
        parts.append(caption(right - 6, y(capacity) + 14, limit, "end"))
    places = [(x(time), y(size)) for _, _, time, size in points]
    corners = _stairs(places)
    corners.append((right, corners[-1][1]))
    line = " ".join(f"{across:.1f},{down:.1f}" for across, down in corners)
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--f)" stroke-width="2"/>')
    # the fastest lie on top of the others
    for number in range(len(points), 0, -1):
        kind, name, time, size = points[number - 1]
        place = places[number - 1]
        colour = f'fill="var(--{COLOURS[series.index(kind) % len(COLOURS)]})"'
        title = html.escape(f"{number}. {name}: {seconds(time)}, {format_bytes(size)}")
        shape = f'r="5" {colour} fill-opacity="0.45"'
        if place in corners:
            shape = f'r="7" {colour}'
        centre = f'cx="{place[0]:.1f}" cy="{place[1]:.1f}"'
        parts.append(f"<circle {centre} {shape}><title>{title}</title></circle>")
        faster = []
        if place in corners:
            faster = corners[: corners.index(place)]
        if place in corners and all(math.dist(place, other) > 14 for other in faster):
            text = str(number)
            if number == 1:
                text = "1, the best"
            parts.append(caption(place[0] + 9, place[1] - 7, text))
    for number, kind in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(legend(right + 20, 32 + 22 * number, colour, kind))
    explanation = (
        "seconds of a step, and peak memory of a device; the line is the Pareto front, numbers "
        "are those of the table"
    )
    parts.append(caption(left, bottom + 40, explanation))
    return svg(bottom + 48, parts, label)


def _stairs(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the Pareto front through places on a drawing, fastest first: a place
    that is lower down, which needs less memory than all before it, and the corner that leads to it.
    """
    corners: list[tuple[float, float]] = []
    for across, down in places:
        if corners and down > corners[-1][1]:
            corners.append((across, corners[-1][1]))
        if not corners or down > corners[-1][1]:
            corners.append((across, down))
    return corners


def _line(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="var(--{colour})"/>'
    )


def page(plan: PlanData, more: Mapping[str, str]) -> str:
    """Return a complete HTML document: the report, and further sections by their titles."""
    body = fragment(plan)
    if more:
        body += framed("".join(_section(title, text) for title, text in more.items()))
    return document(
        f"Plan: {plan.layout.name} on {plan.cluster}", body, style="body { margin: 1.2rem }"
    )


def _section(title: str, text: str) -> str:
    """Return a heading and a text, which is not HTML."""
    return f"<h2>{html.escape(title)}</h2><pre>{html.escape(text)}</pre>"


def fragment(plan: PlanData) -> Html:
    """Return the report for a notebook's cell."""
    *compiler, title, size, _ = map(html.escape, headline(plan).split("\n"))
    kind = {"DOES NOT FIT": "bad", "tight": "tight"}.get(plan.memory.word, "")
    name = f"{html.escape(plan.layout.name)} on {html.escape(str(plan.cluster))}"
    lines = [
        f"<h1>{name}</h1><p>{'<br>'.join([title, size, *compiler])}</p>",
        f'<p class="verdict {kind}">{html.escape(plan.memory.verdict)}</p>',
        f"<p>{step_time(plan)}, {plan.rows_per_second:,.0f} rows/s (predicted); "
        f"{format_bytes(plan.traffic.bytes())} sent by each device per step.</p>",
        f"<h2>Memory on each device</h2>{memory_bar(plan)}",
        f"<pre>{html.escape(str(plan.memory))}</pre>",
        f"<h2>The mesh on its nodes</h2>{mesh_drawing(plan)}",
        f"<h2>A step</h2>{timeline_drawing(plan)}<pre>{html.escape(timeline_text(plan))}</pre>",
    ]
    if plan.traffic.transfers:
        communication = f'<div class="wide">{table(*traffic_rows(plan.traffic))}</div>'
        lines.append(f"<h2>Communication</h2>{communication}")
    lines += [_section(name, str(schedule)) for name, schedule in plan.schedules.items()]
    if plan.notes:
        lines.append("<h2>Notes</h2>")
    lines += [f"<p>{html.escape(line)}</p>" for line in plan.notes]
    if plan.costs:
        lines.append(_section("Largest costs", costs_text(plan)))
    parameters = table(COLUMNS, layout_rows(plan.program.placed.resolved))
    layout = html.escape(plan.layout.to_toml())
    lines += [
        folded("placement of every parameter", f'<div class="wide">{parameters}</div>'),
        folded("the layout as TOML", f"<pre>{layout}</pre>"),
    ]
    return framed("".join(lines))


def memory_bar(plan: PlanData) -> str:
    """Draw what a device holds, to scale, and its capacity."""
    memory = plan.memory
    gradients = min(memory.gradients, memory.temporaries)
    sizes = memory.per_device | {
        "gradients": gradients,
        "activations and copies": memory.temporaries - gradients,
        "beside": memory.expected - memory.peak,
    }
    scale = WIDTH / max(memory.capacity, memory.expected)
    x = 0.0
    parts = []
    keys = []
    for name, colour in MEMORY.items():
        if sizes[name]:
            title = f"{TITLES.get(name, name)}: {format_bytes(sizes[name])}"
            width = max(sizes[name] * scale, VISIBLE)
            parts.append(box(x, 6, width, 26, colour, title))
            keys.append(key(colour, title))
            x += width
    capacity = f"{memory.capacity * scale:.1f}"
    parts.append(f'<path d="M0 4h{capacity}v30h-{capacity}z" class="outline"/>')
    keys.append(key("", f"a device has {format_bytes(memory.capacity)}"))
    return strip(38, parts, f"memory: {memory.verdict}") + f"<p>{''.join(keys)}</p>"


def mesh_drawing(plan: PlanData) -> str:
    """Draw nodes as frames and devices as squares with their mesh coordinates, innermost axis last;
    at most `SHOWN` of each.
    """
    cluster, mesh = plan.cluster, plan.mesh
    nodes = min(cluster.nodes, SHOWN)
    devices = min(cluster.devices, SHOWN)
    side, per_row = 46, 8
    columns = max(1, WIDTH // (min(devices, per_row) * side + 24))
    width = min(devices, per_row) * side + 12
    height = -(-devices // per_row) * side + 34
    parts = []
    for node in range(nodes):
        x = node % columns * (width + 12)
        y = node // columns * (height + 8)
        parts.append(
            f'<rect x="{x + 1}" y="{y + 18}" width="{width}" height="{height - 22}" fill="none" '
            'stroke="var(--line)" rx="5"/>'
        )
        site = ""
        if cluster.sites > 1:
            site = f", site {node * cluster.sites // cluster.nodes}"
        parts.append(caption(x + 4, y + 13, f"node {node}{site}"))
        for device in range(devices):
            left = x + 7 + device % per_row * side
            top = y + 24 + device // per_row * side
            number = node * cluster.devices + device
            coordinates = np.unravel_index(number, [size for _, size in mesh.axes])
            pairs = zip(mesh.names, coordinates, strict=True)
            title = f"device {number}: {', '.join(f'{name} {at}' for name, at in pairs)}"
            parts.append(box(left, top, side - 6, side - 6, "b", title))
            middle = (side - 6) / 2
            text = ",".join(map(str, coordinates))
            parts.append(on_box(left + middle, top + middle + 4, text))
    left_out = []
    if nodes < cluster.nodes:
        left_out.append(f"{cluster.nodes - nodes} more nodes")
    if devices < cluster.devices:
        left_out.append(f"{cluster.devices - devices} more devices on each")
    line = str(mesh)
    if left_out:
        line += f"; not drawn: {', '.join(left_out)}"
    drawing = svg(-(-nodes // columns) * (height + 8), parts, f"mesh {mesh}")
    return f"<p>{html.escape(line)}</p>{drawing}"


def timeline_drawing(plan: PlanData) -> str:
    """Draw computation and communication over time, to scale."""
    total = plan.timeline.seconds or 1.0
    left, width = 100, WIDTH - 100
    parts = []
    for name, communicates, colour, top in (
        ("computation", False, "a", 18),
        ("communication", True, "c", 58),
    ):
        parts.append(caption(0, top + 17, name))
        parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="26" fill="var(--soft)"/>')
        spans = [span for span in plan.timeline.spans if span.communicates is communicates]
        # an SVG of a long program would have a box for each of its thousands of instructions
        for span in merged(spans, total / width):
            duration = span.end - span.begin
            title = f"{span.name}: {seconds(duration)} {span.where}"
            x = left + span.begin / total * width
            length = max(duration / total * width, 0.4)
            parts.append(box(x, top, length, 26, colour, title))
    anchors = {0.0: "start", 0.25: "middle", 0.5: "middle", 0.75: "middle", 1.0: "end"}
    for share, anchor in anchors.items():
        text = "0"
        if share:
            text = seconds(share * total)
        parts.append(caption(left + share * width, 104, text, anchor))
    return svg(110, parts, f"a step of {seconds(total)}")


def merged(spans: Sequence[Span], pixel: float) -> list[Span]:
    """Merge spans with less than a pixel between them, so that a long program does not make a large
    page.
    """
    merged: list[Span] = []
    for span in spans:
        if merged and _touches(merged[-1], span, pixel):
            last = merged[-1]
            name = last.name
            if not last.name.endswith(" ..."):
                name = f"{last.name} ..."
            merged[-1] = Span(name, last.where, last.begin, span.end, last.communicates)
        else:
            merged.append(span)
    return merged


def _touches(last: Span, span: Span, pixel: float) -> bool:
    """Return True if two spans, of which one is short, have less than a pixel between them."""
    shorter = min(span.end - span.begin, last.end - last.begin)
    return span.begin - last.end < pixel and shorter < 2 * pixel
