"""Ends what a launcher has started when the launcher is gone, however it went: `python orphan_reaper.py COOKIE LAUNCHER`.

A process that is killed can end nothing, and what its processes have started, such as the workers of a data loader, has other parents. So
this small process waits for the launcher's end, and then kills every process whose environment holds the launcher's cookie, which is
inherited by all below and by nobody else. Linux only: elsewhere processes end themselves and their group (`runner.py`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "SPMD_GROUP"  # the variable; of a launcher that another has started it holds the cookies of both
LOOK = 0.25  # seconds between two looks at the launcher
ROUNDS = 40  # looks for processes, since one may be starting another meanwhile


@contextlib.contextmanager
def keeping(cookie: str) -> Iterator[None]:
    """In the block, whose processes are given the cookie, a keeper waits for the end of this process."""
    command = [sys.executable, "-I", "-S", __file__, cookie, str(os.getpid())]
    keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) if _linux() else None
    owner = os.getpid()
    try:
        yield
    finally:
        if keeper is not None and os.getpid() == owner:  # not in a fork
            keeper.kill()
            keeper.wait()


def _linux() -> bool:
    return Path("/proc/self/environ").exists()


def with_cookie(cookie: str) -> list[int]:
    """Processes of this user whose environment holds the cookie."""
    found, wanted = [], cookie.encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                variables = Path(entry.path, "environ").read_bytes().split(b"\0")
                if any(
                    wanted in value.split(b",") for name, _, value in (one.partition(b"=") for one in variables) if name == NAME.encode()
                ):
                    found.append(int(entry.name))
    return found


def main(cookie: str, launcher: int) -> None:
    """Wait for the end of the launcher, then kill what it has left."""
    while os.getppid() == launcher:
        time.sleep(LOOK)
    for _ in range(ROUNDS):
        for number in with_cookie(cookie):
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
