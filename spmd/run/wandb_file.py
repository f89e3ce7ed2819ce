"""Reads the files in which wandb keeps runs offline: it can read them back only from a server."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd.errors import import_extra

BLOCK = 32768  # bytes, in which records do not cross a boundary
HEADER = 7  # bytes of the file's header, and of each record's
COMPLETE, FIRST, LAST = 1, 2, 4  # parts of a message in a record; 3 is one in the middle


def offline_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield steps and metrics from a file of an offline run of wandb; histograms and pictures as
    dicts, whose "_type" says which.
    """
    record_class = import_extra("wandb.proto.wandb_internal_pb2", "wandb").Record
    for message in offline_messages(path):
        history = record_class.FromString(message).history
        items = _history_items(history)
        if not items:
            continue
        # The step is a field of the record, or else an item of it.
        step = history.step.num if history.HasField("step") else items["_step"]
        metrics: dict[str, Any] = {}
        for name, value in items.items():
            if name.startswith("_"):
                continue
            metrics[name] = value if isinstance(value, dict) else float(value)
        yield step, metrics


def _history_items(history: Any) -> dict[str, Any]:
    """Return the items of a record, by name; a histogram or a picture is a dict of its fields."""
    items: dict[str, Any] = {}
    for item in history.item:
        keys = [item.key] if item.key else item.nested_key
        name, *fields = keys
        value = json.loads(item.value_json)
        if fields:
            items.setdefault(name, {})["/".join(fields)] = value
        else:
            items[name] = value
    return items


def offline_messages(path: Path) -> Iterator[bytes]:
    """Yield the messages of a file of an offline run of wandb, without one that a killed process
    did not finish.

    The file is in LevelDB's log format: blocks of 32 KiB; in them records of a checksum (4 bytes),
    a length (2), whether it is all, the first, a middle or the last part of a message (1 to 4), and
    the part. The header of 7 bytes belongs to the first block.
    """
    content = path.read_bytes()
    message = b""
    offset = HEADER
    while offset + HEADER <= len(content):
        left = BLOCK - offset % BLOCK
        # LevelDB pads the end of a block that has no room for a record's header.
        if left < HEADER:
            offset += left
            continue
        length, part = struct.unpack("<HB", content[offset + 4 : offset + HEADER])
        end = offset + HEADER + length
        if not COMPLETE <= part <= LAST or end > len(content):
            return
        if part in (COMPLETE, FIRST):
            message = b""
        message += content[offset + HEADER : end]
        offset = end
        if part in (COMPLETE, LAST):
            yield message
