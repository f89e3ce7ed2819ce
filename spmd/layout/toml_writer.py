"""A layout as TOML text."""

import dataclasses
from typing import Any

from spmd.layout.gradients import GradientRule
from spmd.layout.schema import Batch, Layout, Rule
from spmd.specs import spec_text


def dumps(layout: Layout) -> str:
    """The TOML text of a layout; only what differs from the defaults is written."""
    blocks = [[f"description = {_text(layout.description)}"]] if layout.description else []
    if layout.mesh:
        blocks.append(["[mesh]", *(f"{axis} = {size}" for axis, size in layout.mesh)])
    if layout.batch != Batch():
        blocks.append(["[batch]", f"spec = {spec_text(layout.batch.spec)}"])
        blocks += [_rule_lines("batch.rules", rule) for rule in layout.batch.rules]
    blocks += [_rule_lines("params", rule) for rule in layout.params]
    if layout.axes:
        blocks.append(["[axes]", *(f"{_text(name)} = {spec_text((entry,))[1:-1]}" for name, entry in layout.axes)])
    blocks += [_rule_lines("activations", rule) for rule in layout.activations]
    for name in ("default", "optimizer", "gradients", "parameter_server", "remat", "pipeline", "sequence", "experts"):
        part = getattr(layout, name)
        plain = [f for f in dataclasses.fields(part) if f.name not in ("options", "rules")]
        lines = [f"{f.name} = {_value(getattr(part, f.name))}" for f in plain if getattr(part, f.name) != f.default]
        if part != type(part)():
            blocks.append([f"[{name}]", *lines, *(f"{key} = {_value(value)}" for key, value in getattr(part, "options", ()))])
    blocks += [_gradient_lines(rule) for rule in layout.gradients.rules]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _rule_lines(header: str, rule: Rule) -> list[str]:
    lines = [f"[[{header}]]", f"path = {_text(rule.path)}", f"spec = {spec_text(rule.spec)}"]
    return [*lines, f"except = {_value(rule.except_)}"] if rule.except_ else lines


def _gradient_lines(rule: GradientRule) -> list[str]:
    lines = ["[[gradients.rules]]", f"path = {_text(rule.path)}", f"codec = {_text(rule.codec)}"]
    lines += [f"except = {_value(rule.except_)}"] if rule.except_ else []
    return [*lines, *(f"{key} = {_value(value)}" for key, value in rule.options)]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "{ " + ", ".join(f"{key} = {_value(part)}" for key, part in value) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _text(value) if isinstance(value, str) else repr(value)


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'
