"""The protocol between a launcher and its processes: exit codes, signals that stop a run, and
records of failures and heartbeats. Without JAX, so that launchers and agents start at once.

docs/clusters.md explains the exit codes. Records are in the folder $SPMD_REPORT: a process writes
`RANK.json` when it fails, and `life.RANK.json` every second: the time, what it was doing, and how
it left, if it has. A process that is frozen or killed writes nothing more, so its last heartbeat
says when that was. `launch/failure_cause.py` reads them.
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

from spmd.base.output_files import replace_atomically
from spmd.errors import OptionError

FAILED = 1
USAGE = 2  # an error before training
PEER = 42  # another process has failed
STALLED = 43
DISAGREED = 78
TERMINATED = 143  # after SIGTERM, as in shells

# The variable, and the signals that it may name.
STOP_VARIABLE = "SPMD_STOP_SIGNALS"
STOP_SIGNALS = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}

HEARTBEAT_SECONDS = 1.0
# Kinds of failures: an error of this process; no progress in its own code; another process did not
# arrive, or broke a transfer.
ERROR, STALL, WAIT = "error", "stall", "wait"


def exit_at_once(number: int, frame: object) -> NoReturn:
    """Handle SIGTERM where no run does: in the first process of a container, for which the kernel
    ignores signals without a handler.
    """
    del number, frame
    os._exit(TERMINATED)


def chosen_stop_signals() -> list[signal.Signals]:
    """The signals of $SPMD_STOP_SIGNALS, such as "USR1" or "USR1,USR2", with which a scheduler asks
    a run to save and exit.

    Raises:
      OptionError: another name is among them.
    """
    text = os.environ.get(STOP_VARIABLE, "")
    names = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [name for name in names if name not in STOP_SIGNALS]:
        why = (
            f'{STOP_VARIABLE}={text}: "{unknown[0]}" cannot be chosen; TERM and HUP '
            "stop a run without it."
        )
        fix = f"{STOP_VARIABLE}=USR1, {STOP_VARIABLE}=USR2, or {STOP_VARIABLE}=USR1,USR2."
        raise OptionError(why, fix=fix)
    return [STOP_SIGNALS[name] for name in names]


def report_to_launcher(name: str, record: dict[str, Any], *, overwrite: bool = True) -> None:
    """Leave a record for the launcher, if it has given a folder for it."""
    folder = os.environ.get("SPMD_REPORT")
    if not folder:
        return
    path = Path(folder, f"{name}.json")
    if path.parent.is_dir() and (overwrite or not path.exists()):
        # The failure itself matters more than its record.
        with contextlib.suppress(OSError), replace_atomically(path, durable=False) as part:
            part.write_text(json.dumps({"at": time.time(), **record}), encoding="utf-8")


def format_error(error: BaseException) -> str:
    """An error in one line."""
    if not str(error):
        return type(error).__name__
    return f"{type(error).__name__}: {error}"
