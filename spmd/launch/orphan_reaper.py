"""Kill the processes of a launcher that has died: `python orphan_reaper.py COOKIE LAUNCHER`.

A killed launcher cannot clean up, and grandchildren, such as the workers of a data loader, have
other parents. So this small process waits for the launcher's end, and then kills every process
whose environment contains the launcher's cookie, which only its descendants inherit. Linux only:
elsewhere processes end themselves and their process group (`runner.py`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Under a nested launcher this variable has the cookies of both.
NAME = "SPMD_GROUP"
LOOK = 0.25  # seconds between two checks of the launcher
# Searches for processes, since one may be starting another meanwhile.
ROUNDS = 40


@contextlib.contextmanager
def reap_orphans(cookie: str) -> Iterator[None]:
    """Run a reaper during the block: if this process dies, it kills the processes that have the
    cookie, as those started in the block do.
    """
    owner = os.getpid()
    reaper = None
    if Path("/proc/self/environ").exists():
        # -I and -S: no variable of the user's environment and no installed package can break or
        # delay it.
        command = [sys.executable, "-I", "-S", __file__, cookie, str(owner)]
        # A session of its own: a signal to the launcher's group must not end the reaper too.
        reaper = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        # a fork of this process, as of a data loader, may leave the block too
        if reaper is not None and os.getpid() == owner:
            reaper.kill()
            reaper.wait()


def processes_with_cookie(cookie: str) -> list[int]:
    """Processes of this user whose environment contains the cookie."""
    pids = []
    prefix = f"{NAME}=".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # The process may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            for line in Path(entry.path, "environ").read_bytes().split(b"\0"):
                if line.startswith(prefix):
                    cookies = line.removeprefix(prefix).split(b",")
                    if cookie.encode() in cookies:
                        pids.append(int(entry.name))
    return pids


def main(cookie: str, launcher: int) -> None:
    """Wait for the end of the launcher, then kill what it has left behind."""
    # A process whose parent has ended gets another one, so no process id has to be looked up that
    # may have been reused.
    while os.getppid() == launcher:
        time.sleep(LOOK)
    for _ in range(ROUNDS):
        for number in processes_with_cookie(cookie):
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
