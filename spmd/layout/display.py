"""A layout in a line of text, and as a table for a notebook's cell."""

import html
from typing import Any

from spmd.base.fields import changed_values
from spmd.base.specs import spec_text
from spmd.layout.gradients import GradientRule
from spmd.layout.precision import Precision
from spmd.layout.schema import Layout, Rule
from spmd.layout.trained import Adapter
from spmd.render.html import Html, code_spans, folded, framed, table

OTHERS = (
    "optimizer",
    "memory",
    "parameter_server",
    "remat",
    "pipeline",
    "sequence",
    "experts",
    "attention",
    "recurrence",
    "train",
    "compiler",
)
COLUMNS = ("", "of", "is", "except", "line")


def one_line(layout: Layout) -> str:
    """Return name, mesh, the number of rules, and the reduction of gradients.

    >>> one_line(Layout.load("zero1"))
    'Layout zero1 on data=-1: no rules, else replicate; gradients by reduce_scatter, exact'
    """
    axes = ", ".join(f"{axis}={size}" for axis, size in layout.mesh)
    name = layout.name
    if axes:
        name += f" on {axes}"
    counted = [(len(layout.params), "rule"), (len(layout.axes), "axis name")]
    counts = [f"{count} {word}{'s' * (count != 1)}" for count, word in counted if count]
    rules = ", ".join(counts) or "no rules"
    gradients = f"gradients by {layout.gradients.reduction}, {layout.gradients.codec}"
    return f"Layout {name}: {rules}, else {layout.default.params}; {gradients}"


def html_table(layout: Layout) -> Html:
    """Return the purpose of a layout, its rules as a table, and the file."""
    title, _, contents = one_line(layout).partition(":")
    words = f"<p><b>{html.escape(title)}</b>:{html.escape(contents)}</p>"
    described = ""
    if layout.description:
        described = f"<p>{code_spans(layout.description)}</p>"
    if layout.use_when:
        described += f"<p>Use it when: {html.escape(layout.use_when)}</p>"
    toml = folded("as TOML", f"<pre>{html.escape(layout.to_toml())}</pre>")
    # A layout that was written in Python has no lines, and most have no exceptions.
    columns = [column for column in zip(COLUMNS, *_rows(layout), strict=True) if any(column[1:])]
    header, *rows = zip(*columns, strict=True)
    return framed(f'{words}{described}<div class="wide">{table(header, rows)}</div>{toml}')


def _rows(layout: Layout) -> list[tuple[str, ...]]:
    """Return rows of kind, pattern, value, exceptions and line of the file: rules first, then
    values that differ from defaults.
    """
    rows = [_rule("parameters", rule) for rule in layout.params]
    rows += [("axis name", name, spec_text((entry,))[1:-1], "", "") for name, entry in layout.axes]
    rows += [("parameters", "all others", layout.default.params, "", "")]
    rows += [_rule("activations", rule) for rule in layout.activations]
    rows += [_rule("batch", rule) for rule in layout.batch.rules]
    rows.append(("batch", "all others", spec_text(layout.batch.spec), "", ""))
    pattern = "all"
    for rule in layout.gradients.rules:
        pattern = "all others"
        codec = ", ".join(filter(None, [rule.codec, _words(dict(rule.options))]))
        rows.append(("gradients", rule.path, codec, *_origin(rule)))
    gradients = {
        "reduction": layout.gradients.reduction,
        "codec": layout.gradients.codec,
        **changed_values(layout.gradients),
    }
    rows.append(("gradients", pattern, _words(gradients), "", ""))
    for rule in layout.remat.rules:
        rows.append(("remat", ", ".join(rule.modules), f"save {rule}", "", ""))
    for rule in layout.precision:
        rows.append(("precision", rule.path, f"products in {rule.products}", *_origin(rule)))
    for adapter in layout.adapters:
        values = f"rank {adapter.rank}, scale {adapter.scale:g}"
        rows.append(("adapter", adapter.modules, values, *_origin(adapter)))
    for name in OTHERS:
        words = _words(changed_values(getattr(layout, name)))
        if words:
            rows.append((name, "", words, "", ""))
    return rows


def _rule(kind: str, rule: Rule) -> tuple[str, ...]:
    return (kind, rule.path, spec_text(rule.spec), *_origin(rule))


def _origin(rule: Rule | GradientRule | Precision | Adapter) -> tuple[str, str]:
    """Return exceptions and line."""
    return ", ".join(rule.except_), str(rule.line or "")


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_word(value)}" for name, value in options.items())


def _word(value: Any) -> str:
    """Return a value as the file has it, without quotes."""
    if isinstance(value, tuple):
        return " ".join(map(_word, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
