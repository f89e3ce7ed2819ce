"""Renders chat templates in a process of their own (`template_server.py`)."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd.data import template_server
from spmd.errors import MissingExtraError, how_to_install, import_extra, printable

SECONDS = 10  # of the processor, for a template or one conversation
MOST_MEMORY = 1 << 30  # bytes of addresses
MOST_TEXT = 1 << 26  # characters of one conversation's texts
LEAST = (3, 1, 6)  # of jinja2: templates of older ones can leave the sandbox (CVE-2025-27516)


class Renderer:
    """A template, ready to render; its process ends with this one, and is started again after a
    conversation that ended it.

    Raises:
      MissingExtraError: jinja2 is not installed, or is too old.
      ValueError: the template cannot be read.
    """

    def __init__(self, source: str):
        self._home = str(Path(str(import_extra("jinja2", "text").__file__)).parents[1])
        if version() < LEAST:
            why = (
                f"jinja2 {importlib.metadata.version('jinja2')} is installed, whose sandbox lets "
                "templates out."
            )
            raise MissingExtraError(
                why,
                fix=f"{how_to_install('text')}, which installs {'.'.join(map(str, LEAST))} or "
                "newer.",
            )
        self._source, self._lock = source, threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = 0
        with self._lock:
            self._start()

    def __call__(self, calls: Sequence[dict[str, Any]]) -> list[str]:
        """The texts of some calls of the template, each with its variables.

        Raises:
          ValueError: one fails, or they take too much time or memory.
        """
        with self._lock:
            # a forked process starts a renderer of its own
            if (
                self._process is None
                or self._process.poll() is not None
                or self._owner != os.getpid()
            ):
                self._start()
            answer = self._ask(list(calls))
        if "error" in answer:
            raise ValueError(f"the chat template raises {printable(answer['error'], 500)}")
        return answer["texts"]

    def _start(self) -> None:
        """Start the process, and let it compile the template."""
        self.close()
        # -P: the files beside it hide no module of Python
        command = [sys.executable, "-P", template_server.__file__]
        command += [self._home, *map(str, (SECONDS, MOST_MEMORY, MOST_TEXT))]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            # The renderer's errors are not read, and a full pipe would block it.
            "stderr": subprocess.DEVNULL,
        }
        self._owner = os.getpid()
        # a session of its own: Ctrl-C in the terminal is for this process alone
        self._process = subprocess.Popen(
            command, text=True, encoding="utf-8", start_new_session=True, **pipes
        )
        answer = self._ask(self._source)
        if "error" in answer:
            self.close()
            raise ValueError(printable(answer["error"], 500))

    def _ask(self, request: Any) -> dict[str, Any]:
        """The answer to a request; an error if the process ends before it has one."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return {"error": "no process"}
        try:
            # JSON has no raw line break, so that one line is one request.
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            # such as Ctrl-C between a request and its answer, which the next request must not get
            self.close()
            raise
        # The process may have ended in the middle of a line.
        if line.endswith("\n"):
            return json.loads(line)
        code = process.wait()
        # With SIGXCPU the system ends a process at RLIMIT_CPU.
        if code == -signal.SIGXCPU:
            return {"error": f"no end: it has computed for {SECONDS} seconds"}
        why = f"code {code}"
        if code < 0:
            why = f"signal {-code}"
        return {
            "error": f"no answer: its process, which may use {MOST_MEMORY >> 20} MiB of memory, "
            f"ended with {why}"
        }

    def close(self) -> None:
        """End the process, if it is this one's."""
        process, self._process = self._process, None
        # A forked process has a copy of this object, and must not end the renderer of its parent.
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        # Otherwise it would stay as a zombie.
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # of what it has not read
                pipe.close()  # type: ignore[union-attr]  # both were asked for

    def __del__(self):
        # `__init__` may have raised before it set `_process`, for example because jinja2 is too
        # old.
        if hasattr(self, "_process"):
            self.close()


def version() -> tuple[int, ...]:
    """Return the first three numbers of the version of jinja2; 0 for one like "1rc1"."""
    numbers = []
    for part in importlib.metadata.version("jinja2").split(".")[:3]:
        if part.isdigit():
            numbers.append(int(part))
        else:
            numbers.append(0)
    return tuple(numbers)
