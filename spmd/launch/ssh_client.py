"""The connection to the agent on one host, over ssh (`ssh_agent.py`)."""

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

# Seconds between two keep-alive messages to each host; an agent gives up only after missing more
# than two (SILENCE).
ALIVE = 5.0
# Characters of a line that are read into memory: a host may send anything.
MAX_LINE = 1 << 20


class AgentConnection:
    """The connection to the agent on one host, which is kept over attempts.

    Attributes:
      host: the host.
      hello: its resources, when it last said so.
      ranks: of its processes in the current attempt.
      unhandled: a message that was received, but not handled yet.
      last_error: the last line that ssh itself printed.
      is_idle: whether it has answered, and runs no process: the next attempt can use it.
    """

    def __init__(self, host: Host, ssh: Sequence[str], python: str, folder: str):
        path = ""
        if "PYTHONPATH" in os.environ:
            path = f"env PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])} "
        # exec, so that no shell stays between sshd and the agent
        command = (
            f"cd {shlex.quote(folder)} && exec {path}{shlex.quote(python)} -m "
            f"spmd.launch.ssh_agent {shlex.quote(host.reached)}"
        )
        self.host = host
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.last_error = ""
        self.ranks: list[int] = []
        self.unhandled: dict[str, Any] | None = None
        self.hello: dict[str, Any] = {}
        self.is_idle = False
        self.writing = threading.Lock()
        self.process = subprocess.Popen(
            [*ssh, host.name, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # else the terminal's Ctrl-C would end ssh, before the signal is forwarded
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self.threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read_messages, self._read_errors, self._keep_alive)
        ]
        for thread in self.threads:
            thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the agent a message, unless it is gone."""
        # ValueError: `leave` has closed the stream.
        with self.writing, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """The agent's next message, kept until it is handled; None if there is none yet."""
        if self.unhandled is None:
            with contextlib.suppress(queue.Empty):
                self.unhandled = self.messages.get(timeout=seconds)
        return self.unhandled

    def leave(self) -> None:
        """Close the sending side: the agent then ends its processes, and exits."""
        with self.writing, contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()  # type: ignore[union-attr]

    def close(self, until: float) -> None:
        """End the connection, by force if the agent does not exit before `until` on the monotonic
        clock.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(0.1, until - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for thread in self.threads[:2]:
            thread.join(timeout=max(0.1, until - time.monotonic()))
        for stream, thread in zip(
            (self.process.stdout, self.process.stderr), self.threads, strict=False
        ):
            # a descendant of ssh may keep them open
            if stream is not None and not thread.is_alive():
                stream.close()

    def _read_messages(self) -> None:
        """Print output lines, and queue other messages; text that is not from an agent ends the
        connection, like its end.
        """
        why = ""
        try:
            while line := self.process.stdout.readline(MAX_LINE):  # type: ignore[union-attr]
                message = json.loads(line)
                if "line" in message:
                    # stdout is closed, or cannot encode the line
                    with contextlib.suppress(OSError, ValueError):
                        to_stdout(message["line"])
                elif isinstance(message, dict):
                    self.messages.put(message)
        except (ValueError, TypeError, RecursionError):
            why = f"unexpected output, not from spmd: {printable(line.strip(), 200)}"
        finally:
            self.messages.put({"gone": why})

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.last_error = printable(line.strip(), 300) or self.last_error
            print(
                f"[{self.host.name}] {printable(line.rstrip(), 2000)}", file=sys.stderr, flush=True
            )

    def _keep_alive(self) -> None:
        while self.process.poll() is None:
            self.send({"alive": True})
            time.sleep(ALIVE)
