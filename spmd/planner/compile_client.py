"""The process that compiles: started when the first program comes, kept for those that follow, gone when nobody asks for a minute.

Starting one and its JAX takes longer than compiling a small step, and a search compiles dozens. There is one at a time; it is
replaced where it has too few simulated devices, or where what JAX and XLA read of the environment has changed, which they do once.
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

LOG = "log"  # in a request's folder: what compilers print
TOLD = 1.0  # seconds between two words about how long it takes
DEVICES = 8  # simulated ones at least, so that most plans can share a process
READ = ("CUDA", "JAX", "LD_", "LIBTPU", "NVIDIA", "PJRT", "PYTHON", "TF_", "TMPDIR", "TPU", "XLA")  # how names begin that count


@dataclasses.dataclass
class Helper:
    """A worker (`planner/compile_server.py`), the pipes to and from it, and what it was started with."""

    process: subprocess.Popen
    requests: int
    replies: int
    environment: dict[str, str]
    devices: int

    def serves(self, environment: dict[str, str], devices: int) -> bool:
        """Whether a request of that environment and so many devices can be sent to it."""
        return self.process.poll() is None and self.devices >= devices and _that_counts(self.environment) == _that_counts(environment)

    def stop(self) -> int:
        """End it at once; its exit code."""
        self.process.kill()
        code = self.process.wait()
        os.close(self.requests)
        os.close(self.replies)
        return code


_lock, _holder = threading.Lock(), 0
_kept: Helper | None = None


def ask(folder: Path, own: dict[str, str], devices: int, what: str, timeout: float, say: Callable[[str], None]) -> None:
    """Have the request in a folder compiled; what there is to say of it is in the folder then, its log too.

    Args:
      folder: where `request.pickle` is, and results come.
      own: variables of the helper's environment beside the caller's; "" takes one away.
      devices: how many it must simulate.
      what: is compiled, in words.
      timeout: seconds after which it is stopped; waiting for another thread's program counts.
      say: is told once a second how long it has taken.

    Raises:
      CompileError: it takes too long, or the helper is killed meanwhile.
    """
    global _kept, _holder
    began = time.monotonic()
    if _holder == threading.get_ident():
        raise CompileError(f"a plan was asked for while another is compiled in the same thread, for {what}.", fix="one after the other.")
    while not _lock.acquire(timeout=TOLD):
        _check_time(began, timeout, what, say)
    try:
        _holder = threading.get_ident()
        environment = {name: value for name, value in (os.environ | own).items() if value}
        helper = _kept if _kept is not None and _kept.serves(environment, devices) else None
        if helper is None or not _answered(helper, folder, began, what, timeout, say):
            # it was of another kind, or ended: since nobody asked, or by this very program; then a fresh one says so
            _end()
            helper = _kept = _start(folder, environment, max(devices, DEVICES))
            if not _answered(helper, folder, began, what, timeout, say):
                code = _end()
                if not (folder / LOG).stat().st_size:
                    why = f"signal {-code}; 9 comes from the system when memory runs out" if code < 0 else f"code {code}"
                    raise CompileError(f"compiling for {what}: the compiler's process ended with {why}.", fix="`spmd plan` elsewhere.")
    except BaseException:
        _end()  # whatever it is doing is not wanted any more
        raise
    finally:
        _holder = 0
        _lock.release()


def _end() -> int:
    """End the helper that is kept, if there is one; its exit code."""
    global _kept
    helper, _kept = _kept, None
    return helper.stop() if helper is not None else 0


def stop() -> None:
    """End the helper that is kept, if there is one, and nobody waits for it."""
    if _lock.acquire(blocking=False):
        try:
            _end()
        finally:
            _lock.release()
    elif (helper := _kept) is not None:
        helper.process.kill()  # who waits for it is a thread of a program that ends


def _forked() -> None:
    """In a fork: the helper is the parent's."""
    global _lock, _holder, _kept
    helper, _kept, _lock, _holder = _kept, None, threading.Lock(), 0
    if helper is not None:
        helper.process.returncode = 0  # nobody waits for it here
        os.close(helper.requests)
        os.close(helper.replies)


atexit.register(stop)
os.register_at_fork(after_in_child=_forked)


def _that_counts(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ)}


def _start(folder: Path, environment: dict[str, str], devices: int) -> Helper:
    reads, requests = os.pipe()
    replies, writes = os.pipe()
    command = [sys.executable, "-P", "-m", "spmd.planner.compile_server", str(devices), str(writes)]
    try:
        with (folder / LOG).open("wb") as log:
            # it ends when its standard input does, so it does not outlive this process, however that ends
            process = subprocess.Popen(command, stdin=reads, stdout=log, stderr=log, env=environment, pass_fds=(writes,))
    except BaseException:
        os.close(requests)
        os.close(replies)
        raise
    finally:
        os.close(reads)
        os.close(writes)
    threading.Thread(target=process.wait, name="spmd helper", daemon=True).start()  # so that it leaves no zombie
    return Helper(process, requests, replies, environment, devices)


def _answered(helper: Helper, folder: Path, began: float, what: str, timeout: float, say: Callable[[str], None]) -> bool:
    """Whether the helper has dealt with a request, well or not; False where it ended first, for whatever reason."""
    try:
        os.write(helper.requests, os.fsencode(folder.resolve()) + b"\n")
    except OSError:
        return False
    with selectors.DefaultSelector() as selector:
        selector.register(helper.replies, selectors.EVENT_READ)
        while not selector.select(min(TOLD, max(0.0, began + timeout - time.monotonic()))):
            _check_time(began, timeout, what, say)
    return bool(os.read(helper.replies, 1))


def _check_time(began: float, timeout: float, what: str, say: Callable[[str], None]) -> None:
    spent = time.monotonic() - began
    if spent >= timeout:
        raise CompileError(
            f"compiling for {what} took more than {timeout:g} s.\n"
            "    fix: a larger timeout, or spmd.nn.LayerStack for a list of layers: it compiles as one layer does."
        )
    say(f"compiling for {what}: {spent:.0f} s of at most {timeout:.0f}")
