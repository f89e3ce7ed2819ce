"""Records that processes leave for whoever has started them, in the folder $SPMD_REPORT: what failed when, and signs of life.

A process writes `RANK.json` when it fails, and `life.RANK.json` every second: when that was, what it was doing, and how it has left, if it
has. A process that is frozen or killed writes nothing more, so its record says when that was. `launch/failure_cause.py` reads them.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import jax

from spmd.errors import RendezvousTimeout

LIFE = 1.0  # seconds between two signs of life
ERROR, STALL, WAIT = (
    "error",
    "stall",
    "wait",
)  # kinds of failures: by itself; no progress in its own code; another did not come, or broke off


def report(name: str, record: dict[str, Any], *, again: bool = True) -> None:
    """Leave a record for who has started this process, if there is a folder for it."""
    folder = os.environ.get("SPMD_REPORT")
    path = Path(folder) / f"{name}.json" if folder else None
    if path is not None and path.parent.is_dir() and (again or not path.exists()):
        part = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # who fails has more to tell than that
            part.write_text(json.dumps({"at": time.time(), **record}), encoding="utf-8")
            part.replace(path)  # a process that is killed meanwhile leaves the record before


def kind_of(error: BaseException) -> str:
    """Whether an error may come from another process that failed, and not from this one."""
    while error.__cause__ is not None:  # such as a callback's
        error = error.__cause__
    transfer = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
    return WAIT if transfer or isinstance(error, TimeoutError | RendezvousTimeout) else ERROR


def text_of(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
