"""`spmd launch` as tests run it: what it prints, line by line with the time, and what it ends
with.
"""

import dataclasses
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.processes import environment

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).parent / "faulty_job.py"


@dataclasses.dataclass
class Run:
    """What a launcher printed, line by line with the time, and its exit code."""

    lines: list[tuple[float, str]]
    code: int | None = None

    @property
    def text(self):
        return "\n".join(line for _, line in self.lines)

    @property
    def hashes(self):
        return re.findall(r"HASH (\w+) (\d+)", self.text)

    def when(self, pattern):
        """When the first line that matches was printed."""
        return next(at for at, line in self.lines if re.search(pattern, line))


def launch(*words, seconds=400, meanwhile=lambda process, run: None, small=None, **variables):
    """Run `spmd launch`; everything is reaped, whatever happens.

    A folder that is `small` holds 320 KiB while it runs, in a mount namespace of its own; what is
    in it is copied to `kept` beside it.
    """
    command = [sys.executable, "-m", "spmd", "launch", *map(str, words)]
    if small is not None:
        small.mkdir()
        mount = (
            f"mount -t tmpfs -o size=320k none {small}; {shlex.join(command)}; code=$?; cp -r "
            f"{small} {small.parent}/kept; exit $code"
        )
        command = ["unshare", "-m", "/bin/sh", "-c", mount]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**variables),
    )
    run = Run([])
    reader = threading.Thread(
        target=lambda: [
            run.lines.append((time.time(), line.rstrip("\n"))) for line in process.stdout
        ],
        daemon=True,
    )
    reader.start()
    limit = threading.Timer(seconds, process.kill)  # also ends what `meanwhile` waits for
    limit.start()
    try:
        meanwhile(process, run)
        run.code = process.wait(timeout=seconds)
    finally:
        limit.cancel()
        process.kill()  # what it has started ends when it is gone
        process.wait()
        reader.join(timeout=30)
        process.stdout.close()
    return run
