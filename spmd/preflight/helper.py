"""The process that compiles: started when the first program comes, kept for those that follow, gone when nobody asks for a minute.

Starting one and its JAX takes longer than compiling a small step, and a search compiles dozens. There is one at a time; it is
replaced where it has too few simulated devices, or where XLA's flags have changed, which are read once in a process.
"""

import atexit
import dataclasses
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from spmd.errors import CompileError

LOG = "log"  # in a request's folder: what compilers print
DEVICES = 8  # simulated ones at least, so that most plans can share a process


@dataclasses.dataclass
class Helper:
    """A worker (`preflight/worker.py`) and what it was started with."""

    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    devices: int
    owner: int  # the process that started it; a fork of that has none of its own

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Where requests go, and replies come from."""
        requests, replies = self.process.stdin, self.process.stdout
        if requests is None or replies is None:
            raise CompileError("the helper has no pipes.")
        return requests, replies

    def serves(self, own: dict[str, str], devices: int) -> bool:
        """Whether a request of that environment and so many devices can be sent to it."""
        return self.owner == os.getpid() and self.process.poll() is None and self.environment == own and self.devices >= devices

    def stop(self) -> None:
        """End it, at once; a fork of its owner leaves it alone."""
        if self.owner == os.getpid():
            with self.process:  # closes its pipes, and reaps it
                self.process.kill()


_LOCK = threading.Lock()
_kept: Helper | None = None


def ask(folder: Path, own: dict[str, str], devices: int, what: str, timeout: float, say: Callable[[str], None]) -> None:
    """Have the request in a folder compiled; what there is to say of it is in the folder then, its log too.

    Args:
      folder: where `request.pickle` is, and results come.
      own: variables of the helper's environment beside the caller's; "" takes one away.
      devices: how many it must simulate.
      what: is compiled, in words.
      timeout: seconds after which it is stopped.
      say: is told once a second how long it has taken.

    Raises:
      CompileError: it takes too long.
    """
    global _kept
    with _LOCK:
        if _kept is not None and _kept.serves(own, devices) and _dealt_with(_kept, folder, what, timeout, say):
            return
        stop()  # one that ended meanwhile, since nobody asked, or with this very program: then a fresh one says why
        _kept = _start(folder, own, max(devices, DEVICES))
        _dealt_with(_kept, folder, what, timeout, say)


def stop() -> None:
    """End the helper that is kept, if there is one."""
    global _kept
    if _kept is not None:
        _kept.stop()
        _kept = None


atexit.register(stop)


def _start(folder: Path, own: dict[str, str], devices: int) -> Helper:
    environment = {name: value for name, value in (os.environ | own).items() if value}
    command = [sys.executable, "-P", "-m", "spmd.preflight.worker", str(devices)]
    with (folder / LOG).open("wb") as log:
        # it ends when its standard input does, so it does not outlive this process, however that ends
        process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)
    return Helper(process, own, devices, os.getpid())


def _dealt_with(helper: Helper, folder: Path, what: str, timeout: float, say: Callable[[str], None]) -> bool:
    """Whether the helper came to an end of a request, well or not; one that did not, for whatever reason, is stopped."""
    done = False
    try:
        done = _answered(helper, folder, what, timeout, say)
    finally:
        if not done:
            stop()
    return done


def _answered(helper: Helper, folder: Path, what: str, timeout: float, say: Callable[[str], None]) -> bool:
    """Whether the helper has dealt with a request; False where it ended first, for whatever reason."""
    began, (requests, replies) = time.monotonic(), helper.pipes
    try:
        requests.write(f"{folder.resolve()}\n".encode())
    except BrokenPipeError:
        return False
    while not select.select([replies], [], [], min(1.0, max(0.0, began + timeout - time.monotonic())))[0]:
        spent = time.monotonic() - began
        if spent >= timeout:
            raise CompileError(
                f"compiling for {what} took more than {timeout:g} s.\n"
                "    cure: a larger timeout, or spmd.nn.LayerStack for a list of layers: it compiles as one layer does."
            )
        say(f"compiling for {what}: {spent:.0f} s of at most {timeout:.0f}")
    return bool(replies.readline())
