"""A plan as one page: tables, a bar of memory, the mesh on its nodes, and a step's time, as HTML that needs nothing beside it."""

import html
from collections.abc import Sequence

from spmd.layout.summary import COLUMNS
from spmd.layout.summary import rows as layout_rows
from spmd.planner.layout_search import Search
from spmd.planner.planning import Plan
from spmd.planner.text_report import headline, seconds, timeline_text
from spmd.planner.timeline import Span
from spmd.planner.traffic import traffic_rows
from spmd.render.html import Html, folded, framed, table
from spmd.render.svg import WIDTH, box, on_box, svg
from spmd.tree import format_bytes

SHOWN = 64  # nodes, and devices of a node, that the mesh is drawn with
MEMORY = ("parameters", "optimizer", "exchange", "statistics", "batch", "constants", "fresh", "gradients", "activations and copies")
COLOURS = dict(zip(MEMORY, "acdfegh", strict=False)) | {"fresh": "h", "gradients": "i", "activations and copies": "b"}


def page(plan: Plan) -> str:
    """A whole HTML document."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = html.escape(f"Plan: {plan.layout.name} on {plan.cluster}")
    body = "<style>:root { color-scheme: light dark } body { margin: 1.2rem }</style>" + fragment(plan)
    return f'<!doctype html>\n<html lang="en"><head>{head}<title>{title}</title></head><body>{body}</body></html>\n'


def fragment(plan: Plan) -> Html:
    """The same for a notebook's cell."""
    compiler, what, _ = map(html.escape, headline(plan).split("\n"))
    kind = "bad" if not plan.fits else "tight" if plan.memory.verdict.startswith("tight") else ""
    pipelines = "".join(f"<h2>{html.escape(name)}</h2><pre>{html.escape(str(found))}</pre>" for name, found in plan.schedules.items())
    lines = [
        f"<h1>{html.escape(plan.layout.name)} on {html.escape(str(plan.cluster))}</h1><p>{what}<br>{compiler}</p>",
        f'<p class="verdict {kind}">{html.escape(plan.memory.verdict)}</p>',
        f"<p>{seconds(plan.timeline.seconds)} per step, {plan.rows_per_second:,.0f} rows/s (predicted); "
        f"{format_bytes(plan.traffic.bytes())} sent by each device per step.</p>",
        f"<h2>Memory on each device</h2>{memory_bar(plan)}<pre>{html.escape(str(plan.memory))}</pre>",
        f"<h2>The mesh on its nodes</h2>{mesh_drawing(plan)}",
        f"<h2>A step</h2>{timeline_drawing(plan)}<pre>{html.escape(timeline_text(plan))}</pre>",
        f'<h2>What travels</h2><div class="wide">{table(*traffic_rows(plan.traffic))}</div>' if plan.traffic.transfers else "",
        pipelines,
        "<h2>Notes</h2>" + "".join(f"<p>{html.escape(line)}</p>" for line in plan.notes) if plan.notes else "",
        folded("where every parameter lives", f'<div class="wide">{table(COLUMNS, layout_rows(plan.program.placed.resolved))}</div>'),
        folded("the layout as TOML", f"<pre>{html.escape(plan.layout.to_toml())}</pre>"),
    ]
    return framed("".join(lines))


def search_fragment(found: Search) -> Html:
    """What fits as a table, and the reasons of all others."""
    header, *body = found.rows()
    best = folded("the best layout as TOML", f"<pre>{html.escape(found.to_toml())}</pre>") if found.plans else ""
    fits = f'<div class="wide">{table(header, body)}</div>' if body else f'<p class="verdict bad">{html.escape(found.verdict)}</p>'
    reasons = "\n".join(line.strip() for line in found.reasons())
    rejected = folded(f"{len(found.rejected) + len(found.left_out)} rejected, and why", f"<pre>{html.escape(reasons)}</pre>")
    return framed(f"<p>{html.escape(found.head)}</p>{fits}{best}{rejected if reasons else ''}")


def memory_bar(plan: Plan) -> str:
    """What a device holds, to scale, against what it has."""
    memory = plan.memory
    gradients = min(memory.gradients, memory.temporaries)
    sizes = {name: getattr(memory, name) for name in MEMORY[:7]} | {"gradients": gradients, MEMORY[-1]: memory.temporaries - gradients}
    whole = max(memory.capacity, memory.peak)
    at, bars, legend = 0.0, [], []
    for name, size in sizes.items():
        if size:
            width = size / whole * WIDTH
            bars.append(box(at, 8, width, 26, COLOURS[name], f"{name}: {format_bytes(size)}"))
            at += width
            legend.append((name, size))
    end = memory.capacity / whole * WIDTH
    bars.append(f'<rect x="0" y="8" width="{end:.1f}" height="26" fill="none" stroke="var(--ink)"/>')
    keys = []
    for number, (name, size) in enumerate(legend):
        x, y = number % 3 * 320, 58 + number // 3 * 20
        keys.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="var(--{COLOURS[name]})"/>')
        keys.append(f'<text x="{x + 17}" y="{y}">{html.escape(name)}: {format_bytes(size)}</text>')
    return svg(66 + (len(legend) - 1) // 3 * 20, [*bars, *keys], f"memory: {memory.verdict}")


def mesh_drawing(plan: Plan) -> str:
    """Nodes as frames, devices as squares with their places on the mesh, innermost axis last; of very many the first."""
    cluster, axes = plan.cluster, plan.mesh.axes
    nodes, devices = min(cluster.nodes, SHOWN), min(cluster.devices, SHOWN)
    side, across = 46, 8
    down = -(-devices // across)
    columns = max(1, WIDTH // (min(devices, across) * side + 24))
    wide, high = min(devices, across) * side + 12, down * side + 34
    drawn = []
    for node in range(nodes):
        x, y = node % columns * (wide + 12), node // columns * (high + 8)
        drawn.append(f'<rect x="{x + 1}" y="{y + 18}" width="{wide}" height="{high - 22}" fill="none" stroke="var(--line)" rx="5"/>')
        drawn.append(f'<text x="{x + 4}" y="{y + 13}">node {node}</text>')
        for device in range(devices):
            left, top = x + 7 + device % across * side, y + 24 + device // across * side
            place, rest = [], node * cluster.devices + device
            for _, size in reversed(axes):
                place.insert(0, rest % size)
                rest //= size
            where = ", ".join(f"{name} {number}" for (name, _), number in zip(axes, place, strict=True))
            drawn.append(box(left, top, side - 6, side - 6, "b", f"device {node * cluster.devices + device}: {where}"))
            short = ",".join(map(str, place))
            drawn.append(on_box(left + (side - 6) / 2, top + (side - 6) / 2 + 4, short))
    left_out = [f"{cluster.nodes - nodes} more nodes"] * (nodes < cluster.nodes)
    left_out += [f"{cluster.devices - devices} more devices on each"] * (devices < cluster.devices)
    names = ", ".join(f"{name}={size}" for name, size in axes)
    text = f"<p>{html.escape(names)}{html.escape('; not drawn: ' + ', '.join(left_out) if left_out else '')}</p>"
    return text + svg(-(-nodes // columns) * (high + 8), drawn, f"mesh {names}")


def timeline_drawing(plan: Plan) -> str:
    """What is computed and what travels when, to scale."""
    total = plan.timeline.seconds or 1.0
    drawn = []
    for row, (name, travels, colour) in enumerate((("computes", False, "a"), ("travels", True, "c"))):
        top = 18 + row * 40
        drawn.append(
            f'<text x="0" y="{top + 17}">{name}</text><rect x="70" y="{top}" width="{WIDTH - 70}" height="26" fill="var(--soft)"/>'
        )
        spans = _merged([span for span in plan.timeline.spans if span.travels is travels], total / (WIDTH - 70))
        for span in spans:
            x, width = 70 + span.begin / total * (WIDTH - 70), (span.end - span.begin) / total * (WIDTH - 70)
            drawn.append(box(x, top, max(width, 0.4), 26, colour, f"{span.name}: {seconds(span.end - span.begin)} {span.where}"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, anchor = 70 + share * (WIDTH - 70), "end" if share == 1 else "start" if share == 0 else "middle"
        drawn.append(f'<text x="{x}" y="104" text-anchor="{anchor}">{seconds(share * total) if share else "0"}</text>')
    return svg(110, drawn, f"a step of {seconds(total)}")


def _merged(spans: Sequence[Span], least: float) -> list[Span]:
    """Spans nearer to each other than a pixel, as one, so that a long program is not a large page."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and span.begin - last.end < least and min(span.end - span.begin, last.end - last.begin) < 2 * least:
            name = last.name if last.name.endswith(" ...") else f"{last.name} ..."
            found[-1] = Span(name, last.where, last.begin, span.end, last.travels)
        else:
            found.append(span)
    return found
