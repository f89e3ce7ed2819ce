"""A line to the agent of one host, over ssh (`agent.py`)."""

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.errors import printable
from spmd.launch.hostfile import Host
from spmd.launch.process_group import to_stdout

ALIVE = 5.0  # seconds between two words to each host, so that it knows that it was not cut off
LONGEST = 1 << 20  # characters of a line from a host


class Line:
    """The connection to the agent of one host."""

    def __init__(self, host: Host, ssh: Sequence[str], python: str, folder: str):
        own = f"env PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])} " if "PYTHONPATH" in os.environ else ""
        command = f"cd {shlex.quote(folder)} && exec {own}{shlex.quote(python)} -m spmd.launch.ssh_agent {shlex.quote(host.reached)}"
        self.host = host
        self.heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self.last = ""  # what ssh itself said last
        self.ranks: list[int] = []
        self.said: dict[str, Any] | None = None  # what nobody has taken yet
        self.hello: dict[str, Any] = {}
        self.writing = threading.Lock()
        self.process = subprocess.Popen(
            [*ssh, host.name, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._complaints, self._stay)]
        for thread in self.threads:
            thread.start()

    def say(self, what: Mapping[str, Any]) -> None:
        """Tell the agent; one that is gone hears nothing."""
        with self.writing, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(what) + "\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """What the agent says next, kept until somebody takes it; None where it has said nothing so far."""
        if self.said is None:
            with contextlib.suppress(queue.Empty):
                self.said = self.heard.get(timeout=seconds)
        return self.said

    def leave(self) -> None:
        """Say nothing more: the agent ends with all that it has started."""
        with self.writing, contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()  # type: ignore[union-attr]

    def close(self, until: float) -> None:
        """End the connection, however the agent takes it; by then, on the monotonic clock, at the latest."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(0.1, until - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for thread in self.threads[:2]:
            thread.join(timeout=max(0.1, until - time.monotonic()))
        for stream, thread in zip((self.process.stdout, self.process.stderr), self.threads, strict=False):
            if stream is not None and not thread.is_alive():  # what ssh has left behind may keep them open
                stream.close()

    def _read(self) -> None:
        """Print lines, and keep what is for the launcher; what is not of an agent ends the connection, as its end does."""
        why = ""
        try:
            while line := self.process.stdout.readline(LONGEST):  # type: ignore[union-attr]
                said = json.loads(line)
                if "line" in said:
                    with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or not in these letters
                        to_stdout(said["line"])
                elif isinstance(said, dict):
                    self.heard.put(said)
        except (ValueError, TypeError, RecursionError):
            why = f"what it says is not from spmd: {printable(line.strip(), 200)}"
        finally:
            self.heard.put({"gone": why})

    def _complaints(self) -> None:
        for line in self.process.stderr or ():
            self.last = printable(line.strip(), 300) or self.last
            print(f"[{self.host.name}] {printable(line.rstrip(), 2000)}", file=sys.stderr, flush=True)

    def _stay(self) -> None:
        while self.process.poll() is None:
            self.say({"alive": True})
            time.sleep(ALIVE)
