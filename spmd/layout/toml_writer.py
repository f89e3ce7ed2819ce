"""A layout as TOML text."""

from typing import Any

from spmd.base.fields import as_toml, changed_values
from spmd.base.specs import spec_text
from spmd.layout.gradients import GradientRule
from spmd.layout.precision import Precision
from spmd.layout.schema import Batch, Layout, Rule

TABLES = (
    "default",
    "optimizer",
    "memory",
    "gradients",
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


def dumps(layout: Layout) -> str:
    """The TOML text of a layout; only what differs from the defaults is written, and at least one
    table: files without one are refused.
    """
    words = [
        f"{key} = {_value(value)}"
        for key in ("description", "use_when")
        if (value := getattr(layout, key))
    ]
    # In TOML a key below a header belongs to that header's table, so the keys of the top come
    # first.
    blocks = []
    if words:
        blocks = [words]
    if layout.mesh:
        blocks.append(["[mesh]", *(f"{axis} = {size}" for axis, size in layout.mesh)])
    if layout.batch != Batch():
        blocks.append(["[batch]", f"spec = {spec_text(layout.batch.spec)}"])
        blocks += [_rule_lines("batch.rules", rule) for rule in layout.batch.rules]
    blocks += [_rule_lines("params", rule) for rule in layout.params]
    if layout.axes:
        lines = [f"{_value(name)} = {spec_text((entry,))[1:-1]}" for name, entry in layout.axes]
        blocks.append(["[axes]", *lines])
    blocks += [_rule_lines("activations", rule) for rule in layout.activations]
    for name in TABLES:
        table = getattr(layout, name)
        if table != type(table)():
            blocks.append(_changed_lines(f"[{name}]", table))
    blocks += [_rule_lines("gradients.rules", rule) for rule in layout.gradients.rules]
    blocks += [_changed_lines("[[remat.rules]]", remat) for remat in layout.remat.rules]
    blocks += [_rule_lines("precision", rule) for rule in layout.precision]
    for adapter in layout.adapters:
        lines = ["[[adapters]]"]
        values = {"modules": adapter.modules, **changed_values(adapter)}
        for key, value in values.items():
            if key != "line":
                # `except` is a keyword of Python.
                lines.append(f"{key.removesuffix('_')} = {_value(value)}")
        blocks.append(lines)
    if blocks in ([], [words]):
        blocks.append(["[default]", f"params = {_value(layout.default.params)}"])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _changed_lines(header: str, table: Any) -> list[str]:
    """Return the lines of a table, with the values that differ from defaults."""
    return [header, *(f"{key} = {_value(value)}" for key, value in changed_values(table).items())]


def _rule_lines(header: str, rule: Rule | GradientRule | Precision) -> list[str]:
    lines = [f"[[{header}]]", f"path = {_value(rule.path)}"]
    if isinstance(rule, GradientRule):
        lines += [
            f"codec = {_value(rule.codec)}",
            *(f"{key} = {_value(value)}" for key, value in rule.options),
        ]
    elif isinstance(rule, Precision):
        lines.append(f"products = {_value(rule.products)}")
    else:
        lines.append(f"spec = {spec_text(rule.spec)}")
    if not rule.except_:
        return lines
    return [*lines, f"except = {_value(rule.except_)}"]


def _value(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "{ " + ", ".join(f"{key} = {_value(part)}" for key, part in value) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    # JSON has no nan and no inf
    if isinstance(value, str | bool):
        return as_toml(value)
    return repr(value)
