"""Reads the files in which wandb keeps runs offline: it can read them back only from a server."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd.errors import import_extra

BLOCK, HEADER = 32768, 7  # bytes


def offline_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Steps and metrics in a file of an offline run of wandb; histograms and pictures as dicts,
    whose "_type" says which.
    """
    record_class = import_extra("wandb.proto.wandb_internal_pb2", "wandb").Record
    for message in offline_messages(path):
        history = record_class.FromString(message).history
        items: dict[str, Any] = {}
        for item in history.item:
            name, *field = [item.key] if item.key else item.nested_key
            value = json.loads(item.value_json)
            if field:  # of a histogram or a picture
                items.setdefault(name, {})["/".join(field)] = value
            else:
                items[name] = value
        if items:
            step = history.step.num if history.HasField("step") else items["_step"]
            named = {name: value for name, value in items.items() if not name.startswith("_")}
            yield (
                step,
                {
                    name: value if isinstance(value, dict) else float(value)
                    for name, value in named.items()
                },
            )


def offline_messages(path: Path) -> Iterator[bytes]:
    """The messages in a file of an offline run of wandb; what a killed process did not finish is
    left out.

    The file is in LevelDB's log format: blocks of 32 KiB; in them records of a checksum (4 bytes),
    a length (2), whether it is all, the first, a middle or the last part of a message (1 to 4), and
    the part. The header of 7 bytes belongs to the first block.
    """
    content, at, message = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        left = BLOCK - at % BLOCK
        if left < HEADER:  # padding
            at += left
            continue
        length, part = struct.unpack("<HB", content[at + 4 : at + HEADER])
        end = at + HEADER + length
        if not 1 <= part <= 4 or end > len(content):
            return
        message = (message if part > 2 else b"") + content[at + HEADER : end]
        at = end
        if part in (1, 4):
            yield message
