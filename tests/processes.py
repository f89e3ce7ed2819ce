"""The environment of processes that tests start: they compile as the test does, and import this
checkout.
"""

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(**variables: object) -> dict[str, str]:
    """Return the variables for a process that a test starts: those of this process, without its
    simulated devices, and `variables`.

    `conftest.py` keeps the options of the compiler up to date: most tests, and what they start,
    compile with few optimizations.
    """
    own = {
        "XLA_FLAGS": os.environ["SPMD_TEST_FLAGS"],
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
    }
    return os.environ | own | {name: str(value) for name, value in variables.items()}


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that a test has started, and wait for it: it has 20 s after SIGTERM."""
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def handled_by(handler: Any, number: int = signal.SIGHUP) -> Iterator[None]:
    """Within the block this handles the signal, also in processes that are started: who started the
    tests may ignore SIGHUP.
    """
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


@contextlib.contextmanager
def room_for(count: int) -> Iterator[None]:
    """In the block, no file of this process can have more bytes: what is written is written in
    part, and then there is an error.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
