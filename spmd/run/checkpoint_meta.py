"""The metadata of a checkpoint: its file and its types."""

import re
from collections.abc import Mapping
from typing import Any

META = "meta/metadata"
REQUIRED_KEYS = ("step", "arrays")
META_TYPES = {
    "step": int,
    "arrays": dict,
    "best": list | None,
    "data": dict,
    "layout": str,
    "mesh": str,
    "options": dict,
    "storage": dict | None,
    "optimizer": dict,
    "position": dict,
    "callbacks": list,
    "pace": list | None,
}
ARRAY_PATTERN = r"\w+\[(\d+(, \d+)*)?\]"


def check_meta(meta: Mapping[str, Any]) -> None:
    """Check the types of a checkpoint's metadata.

    Raises:
      ValueError, KeyError: something is malformed or missing.
    """
    wrong = []
    for name, kind in META_TYPES.items():
        is_needed = name in meta or name in REQUIRED_KEYS
        if is_needed and not isinstance(meta[name], kind):
            wrong.append(name)
    best = meta.get("best") or ["", "min"]
    callbacks = meta.get("callbacks", [])
    if len(best) != 2 or not isinstance(best[0], str) or best[1] not in ("min", "max"):
        wrong.append("best")
    if not all(_is_callback_entry(entry) for entry in callbacks):
        wrong.append("callbacks")
    for path, text in meta["arrays"].items():
        if not re.fullmatch(ARRAY_PATTERN, str(text)):
            wrong.append(f"array {path}")
    if wrong:
        raise ValueError(f"{META}: {', '.join(wrong[:5])}")


def _is_callback_entry(entry: Any) -> bool:
    """Return whether a value is [class name, saved value]."""
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
