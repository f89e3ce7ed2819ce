"""A plan as an HTML page: tables, a bar of memory, the mesh on its nodes, and the timeline of a
step. It loads nothing from elsewhere.
"""

import html
from collections.abc import Mapping, Sequence

import numpy as np

from spmd.layout.summary import COLUMNS, rows as layout_rows
from spmd.planner.memory import TITLES
from spmd.planner.plan_data import PlanData
from spmd.planner.text_report import costs_text, headline, seconds, step_time, timeline_text
from spmd.planner.timeline import Span
from spmd.planner.traffic import traffic_rows
from spmd.render.html import Html, document, folded, framed, table
from spmd.render.svg import WIDTH, box, caption, key, on_box, strip, svg
from spmd.tree import format_bytes

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
