"""A target as the text of its TOML file."""

from collections.abc import Mapping
from typing import Any

from spmd.planner.target import Estimate, Overhead, Target

TABLES = ("flops", "inside", "between", "achieved", "spread", "overhead", "compiler", "sources")
COMMENTS = {
    "flops": "per second, dense, by the dtype that is multiplied",
    "inside": "what one device sends to others in its node",
    "between": "what one device sends to other nodes",
    "achieved": "shares of these that programs reach, and seconds before an operation begins",
    "spread": "how far off each may be, as a share of it",
    "overhead": "of memory beside XLA's program: what is expected, and its standard deviation",
}


def target_text(target: Target) -> str:
    """The file that `spmd.planner.target.load` reads as this target.

    >>> import tomllib
    >>> from spmd.planner.target import load
    >>> tomllib.loads(target_text(load("h100")))["achieved"]["launch"]
    4e-06
    """
    numbers = ("memory", "memory_bandwidth", "devices_per_node", "first_touch", "simulated")
    heads = {"title": target.title, "platform": target.platform} | {
        name: getattr(target, name) for name in numbers
    }
    lines = [f"{name} = {_value(value)}" for name, value in heads.items() if value]
    for name in TABLES:
        part = getattr(target, name)
        if part == Overhead():
            continue
        table = part if isinstance(part, Mapping) else vars(part)
        comment = f"  # {COMMENTS[name]}" if name in COMMENTS else ""
        lines += (
            [
                "",
                f"[{name}]{comment}",
                *(f"{key} = {_value(value)}" for key, value in table.items()),
            ]
            if table
            else []
        )
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """A value in TOML; floats with four digits."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Estimate):
        return _value([value.expected, value.deviation])
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value) if isinstance(value, int) else repr(float(f"{value:.4g}"))
