"""Records that processes leave for their launcher, in the folder $SPMD_REPORT: failures and
heartbeats.

A process writes `RANK.json` when it fails, and `life.RANK.json` every second: the time, what it was
doing, and how it left, if it has. A process that is frozen or killed writes nothing more, so its
last heartbeat says when that was. `launch/failure_cause.py` reads them.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from spmd.base.output_files import replace_whole

HEARTBEAT_SECONDS = 1.0
# Kinds of failures: an error of this process; no progress in its own code; another process did not
# arrive, or broke a transfer.
ERROR, STALL, WAIT = "error", "stall", "wait"


def report_to_launcher(name: str, record: dict[str, Any], *, overwrite: bool = True) -> None:
    """Leave a record for the launcher, if it has given a folder for it."""
    folder = os.environ.get("SPMD_REPORT")
    if not folder:
        return
    path = Path(folder, f"{name}.json")
    if path.parent.is_dir() and (overwrite or not path.exists()):
        # The failure itself matters more than its record.
        with contextlib.suppress(OSError), replace_whole(path, durable=False) as part:
            part.write_text(json.dumps({"at": time.time(), **record}), encoding="utf-8")


def format_error(error: BaseException) -> str:
    """An error in one line."""
    if not str(error):
        return type(error).__name__
    return f"{type(error).__name__}: {error}"
