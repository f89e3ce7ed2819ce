"""A resolved layout in words: a table for people, and notes below it."""

import html
import math

from spmd.base.specs import spec_text
from spmd.base.tree import describe, format_bytes
from spmd.layout.resolve import Resolved
from spmd.render.collapse import collapsed
from spmd.render.html import Text, aligned, filled, framed, table

COLUMNS = ("parameter", "array", "spec", "chosen by", "bytes/device", "copies")


def rows(resolved: Resolved) -> list[tuple[str, str, str, str, str, str]]:
    """Return one row per parameter: path, dtype and shape, spec, what chose it, bytes per device,
    copies of each byte.
    """
    mesh = resolved.mesh
    table_rows = []
    for place in resolved.all_placements.values():
        spec = "replicated"
        if any(place.spec):
            spec = spec_text(place.spec)
        chosen_by = place.chosen_by
        if place.path in resolved.frozen:
            chosen_by += "; not trained"
        size = format_bytes(place.bytes_per_device(mesh))
        copies = f"x{place.copies(mesh)}"
        table_rows.append((place.path, describe(place), spec, chosen_by, size, copies))
    return table_rows


def summary(resolved: Resolved) -> Text:
    """Return the table, its totals and notes, as text, or as HTML in a notebook."""
    body = collapsed(rows(resolved))
    declared = resolved.layout.gradients
    gradients = f"gradients by {declared.reduction}, codec {declared.codec}"
    if declared.rules:
        gradients += f" ({len(declared.rules)} rules)"
    if declared.error_feedback:
        gradients += ", error feedback"
    title = (
        f"{resolved.layout.source} on mesh {resolved.mesh}: {resolved.workers} "
        f"worker{'s' * (resolved.workers != 1)}, {gradients}"
    )
    lines = notes(resolved)
    paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    shown = framed(
        f'<p>{html.escape(title)}</p><div class="wide">{table(COLUMNS, body)}</div>{paragraphs}'
    )
    text = "\n".join([title, "", *aligned([COLUMNS, *body], ruled=True), "", *lines])
    return Text(filled(text), shown)


def notes(resolved: Resolved) -> list[str]:
    """Return totals, replication waste, what is trained, and mesh axes along which devices repeat
    the same work.
    """
    mesh = resolved.mesh
    places = resolved.all_placements.values()
    total = sum(place.nbytes for place in places)
    per_device = sum(place.bytes_per_device(mesh) for place in places)
    least = total / mesh.size
    scalars = sum(math.prod(place.shape) for place in places)
    arrays = f"{len(places)} array{'s' * (len(places) != 1)}"
    # Servers have padded rows, and frozen parameters may be codes and scales: neither have as many
    # numbers as parameters.
    padded = resolved.layout.gradients.reduction == "parameter_server"
    count = arrays
    if not padded and not resolved.frozen:
        count = f"{scalars:,} parameters in {arrays}"
    lines = [
        f"{count}, {format_bytes(total)}; {format_bytes(per_device)} on each of {mesh.size} devices"
    ]
    if mesh.size > 1 and per_device:
        copies = per_device - least
        lines[0] += (
            f" ({format_bytes(least)} if nothing were replicated: {copies:,.0f} bytes, "
            f"{copies / per_device:.0%}, are copies)."
        )
    if resolved.frozen:
        numbers = sum(math.prod(place.shape) for place in resolved.placements.values())
        size = format_bytes(sum(place.nbytes for place in resolved.frozen.values()))
        lines.append(
            f"{len(resolved.placements)} arrays of {numbers:,} numbers are trained; "
            f"{len(resolved.frozen)} ({size}) are not."
        )
    for axis in resolved.idle_axes():
        lines.append(
            f'note: the layout does not use mesh axis "{axis}" ({mesh.sizes[axis]} devices); the '
            "model's own code must."
        )
    return lines
