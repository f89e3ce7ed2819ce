"""The client of the compile server: it starts the process with the first program and reuses it; the
server exits after a minute idle.

Starting a process with JAX takes longer than compiling a small step, and a search compiles dozens.
There is one server at a time. It is replaced if it simulates too few devices, or if environment
variables have changed that JAX and XLA read only once.
"""

import atexit
import dataclasses
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from spmd.errors import CompileError

LOG = "log"  # in a request's folder: the compiler's output
REPORT_INTERVAL = 1.0  # seconds between progress lines
MIN_DEVICES = 8  # simulated devices of a server, so that most plans can share it
# prefixes of variables
RELEVANT = (
    "CUDA",
    "JAX",
    "LD_",
    "LIBTPU",
    "NVIDIA",
    "PJRT",
    "PYTHON",
    "TF_",
    "TMPDIR",
    "TPU",
    "XLA",
)


@dataclasses.dataclass
class CompileServer:
    """A process of `planner/compile_server.py`, the pipes to and from it, and the environment and
    devices it was started with.
    """

    process: subprocess.Popen
    requests: int
    replies: int
    environment: dict[str, str]
    devices: int

    def serves(self, environment: dict[str, str], devices: int) -> bool:
        """Whether it runs, and can compile for this environment and number of devices."""
        return (
            self.process.poll() is None
            and self.devices >= devices
            and _relevant(self.environment) == _relevant(environment)
        )

    def stop(self) -> int:
        """Kill it, and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        os.close(self.requests)
        os.close(self.replies)
        return code


_lock, _owner = threading.Lock(), 0
_server: CompileServer | None = None


def compile_request(
    folder: Path,
    changes: dict[str, str],
    devices: int,
    target: str,
    timeout: float,
    say: Callable[[str], None],
) -> None:
    """Compile the request in a folder; the results and the log are then in that folder.

    Args:
      folder: holds `request.pickle`, and gets the results.
      changes: environment variables of the server in addition to the caller's; "" removes one.
      devices: the number of devices it must simulate.
      target: a description of the target and its compiler, for messages.
      timeout: seconds after which it is stopped, including the time to wait for another thread's
        program.
      say: called once a second with a line on how long it has taken.

    Raises:
      CompileError: it takes too long, or the server is killed.
    """
    global _server, _owner
    began = time.monotonic()
    if _owner == threading.get_ident():
        raise CompileError(
            f"planning for {target} while another plan is compiled in the same thread.",
            fix="one after the other.",
        )
    while not _lock.acquire(timeout=REPORT_INTERVAL):
        _check_time(began, timeout, target, say)
    try:
        _owner = threading.get_ident()
        environment = {name: value for name, value in (os.environ | changes).items() if value}
        server = _server if _server is not None and _server.serves(environment, devices) else None
        if server is None or not _answered(server, folder, began, target, timeout, say):
            # it does not serve this request, or it exited: after a minute idle, or because of this
            # program, which a new one will show
            _end()
            server = _server = _start(folder, environment, max(devices, MIN_DEVICES))
            if not _answered(server, folder, began, target, timeout, say):
                code = _end()
                if not (folder / LOG).stat().st_size:
                    why = (
                        f"signal {-code}; the system sends 9 when memory runs out"
                        if code < 0
                        else f"code {code}"
                    )
                    fix = "run `spmd plan` on another machine."
                    raise CompileError(
                        f"compiling for {target}: the compiler's process ended with {why}.", fix=fix
                    )
    except BaseException:
        _end()  # its current work is no longer needed
        raise
    finally:
        _owner = 0
        _lock.release()


def _end() -> int:
    """Stop the current server, if there is one, and return its exit code."""
    global _server
    server, _server = _server, None
    return server.stop() if server is not None else 0


def stop() -> None:
    """Stop the current server, if there is one."""
    if _lock.acquire(blocking=False):
        try:
            _end()
        finally:
            _lock.release()
    elif (server := _server) is not None:
        server.process.kill()  # the thread that waits for it belongs to a program that is exiting


def _forked() -> None:
    """In a fork: the server belongs to the parent."""
    global _lock, _owner, _server
    server, _server, _lock, _owner = _server, None, threading.Lock(), 0
    if server is not None:
        server.process.returncode = 0  # this process does not wait for it
        os.close(server.requests)
        os.close(server.replies)


atexit.register(stop)
os.register_at_fork(after_in_child=_forked)


def _relevant(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(RELEVANT)}


def _start(folder: Path, environment: dict[str, str], devices: int) -> CompileServer:
    reads, requests = os.pipe()
    replies, writes = os.pipe()
    command = [sys.executable, "-P", "-m", "spmd.planner.compile_server", str(devices), str(writes)]
    try:
        with (folder / LOG).open("wb") as log:
            # it exits when its standard input is closed, so it does not outlive this process
            process = subprocess.Popen(
                command, stdin=reads, stdout=log, stderr=log, env=environment, pass_fds=(writes,)
            )
    except BaseException:
        os.close(requests)
        os.close(replies)
        raise
    finally:
        os.close(reads)
        os.close(writes)
    # so that it leaves no zombie
    threading.Thread(target=process.wait, name="spmd compile server", daemon=True).start()
    return CompileServer(process, requests, replies, environment, devices)


def _answered(
    server: CompileServer,
    folder: Path,
    began: float,
    target: str,
    timeout: float,
    say: Callable[[str], None],
) -> bool:
    """Whether the server has completed a request, successfully or not; False if it ended first, for
    whatever reason.
    """
    try:
        os.write(server.requests, os.fsencode(folder.resolve()) + b"\n")
    except OSError:
        return False
    with selectors.DefaultSelector() as selector:
        selector.register(server.replies, selectors.EVENT_READ)
        while not selector.select(
            min(REPORT_INTERVAL, max(0.0, began + timeout - time.monotonic()))
        ):
            _check_time(began, timeout, target, say)
    return bool(os.read(server.replies, 1))


def _check_time(began: float, timeout: float, target: str, say: Callable[[str], None]) -> None:
    spent = time.monotonic() - began
    if spent >= timeout:
        raise CompileError(
            f"compiling for {target} took more than {timeout:g} s.",
            fix="a larger timeout, or spmd.nn.LayerStack for a list of layers: it compiles like a "
            "single layer.",
        )
    say(f"compiling for {target}: {spent:.0f} s of at most {timeout:.0f}")
