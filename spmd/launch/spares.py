"""Spare processes: beside every process of an attempt one that has imported what a run needs, and
waits for the next attempt.

A spare process is started with the command of a worker, and $SPMD_SPARE, the number of a socket to
its launcher. It says there that it is ready, waits for the environment of an attempt, one line of
JSON, and continues as any worker does. It ends when the launcher closes the socket, or is gone.

*Unmeasured* with GPUs, where a start also opens the device: `benchmarks/spares.py` has timed
restarts on CPUs.
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from spmd.errors import OptionError, printable
from spmd.launch import orphan_reaper
from spmd.launch.failure_cause import heartbeats
from spmd.launch.restart_policy import code_text, read_records
from spmd.launch.settings import Settings
from spmd.launch.validation import RESERVED

NAME = "SPMD_SPARE"  # the variable
# beside jax: what a run imports
IMPORTS = ("flax.nnx", "optax", "orbax.checkpoint", "spmd.api", "spmd.losses")
# seconds after which an attempt counts as begun that does not say so, such as one without `fit`
BEGIN = 60.0
LOOK = 0.25  # seconds between two looks at what an attempt, or a spare process, does
# Seconds until a spare process counts as stuck, for example in a file system.
PATIENCE = 300.0
READY = b"\n"


@dataclasses.dataclass
class Spare:
    """A spare process, the launcher's end of its socket, and whether it has imported everything."""

    process: subprocess.Popen
    connection: socket.socket
    is_ready: bool = False

    def check(self) -> bool:
        """Update `is_ready`, and return whether the process still runs."""
        # There is nothing to read, or it has ended.
        with contextlib.suppress(OSError):
            self.is_ready = self.connection.recv(1) == READY or self.is_ready
        return self.process.poll() is None

    def describe_end(self) -> str:
        """A description of the end of the process, with the last line that it printed."""
        code = code_text(self.process.returncode)
        text = f"spare process {self.process.pid} ended with {code}"
        if last := printable(self._last_line(), 300):
            text += f": {last}"
        return text

    def _last_line(self) -> str:
        output = self.process.stdout.fileno()  # type: ignore[union-attr]
        try:
            # not to wait for the end of the output, which a descendant may have open
            os.set_blocking(output, False)
            printed = os.read(output, 1 << 20).decode(errors="replace")
        except OSError:  # nothing is there
            return ""
        return printed.strip().rpartition("\n")[2].strip()

    def end(self) -> None:
        """End it, with its descendants."""
        self.connection.close()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]


class Spares:
    """The spare processes of a launcher on this machine. A context manager: they end with its
    block.

    Args:
      count: how many to keep; 0: none, and nothing below does anything.
      log: called with lines about them.
    """

    def __init__(self, count: int, log: Callable[[str], None]):
        self.count = count
        self._log = log
        self._spares: list[Spare] = []
        self._attempts = 0
        self._used = 0  # by the current attempt
        self._open = contextlib.ExitStack()
        self._cookie = secrets.token_hex(16)

    def __enter__(self) -> "Spares":
        # not with the cookie of an attempt: Linux shows the environment of a process as it was at
        # its start, and a spare process may join any attempt
        if self.count:
            self._open.enter_context(orphan_reaper.reap_orphans(self._cookie))
        return self

    def __exit__(self, *error: object) -> None:
        with self._open:
            for spare in self._spares:
                spare.end()

    def pop_ready(self, environment: Mapping[str, str]) -> subprocess.Popen | None:
        """Let a ready spare process continue as a worker with this environment, and return it; None
        if none is ready.
        """
        self._remove_ended()
        for spare in [spare for spare in self._spares if spare.is_ready]:
            self._spares.remove(spare)
            try:
                # The socket does not block, and an environment may be larger than its buffer.
                spare.connection.settimeout(5.0)
                spare.connection.sendall(json.dumps(dict(environment)).encode() + b"\n")
            except OSError:  # it has just ended
                spare.end()
                continue
            spare.connection.close()
            self._used += 1
            return spare.process
        return None

    @contextlib.contextmanager
    def replace(
        self, commands: Mapping[int, tuple[Sequence[str], Mapping[str, str]]], folder: Path
    ) -> Iterator[None]:
        """Start the missing spare processes once the attempt that runs in the block trains.

        Args:
          commands: command and environment of each process of the attempt.
          folder: of its records.
        """
        if not self.count:
            yield
            return
        if self._attempts:
            text = f"restarted in {self._used} of {len(commands)} spare processes"
            if self._used != len(commands):
                text += "; no more were ready, so Python starts again"
            self._log(text)
        self._attempts += 1
        self._used = 0
        ended = threading.Event()
        command, environment = next(iter(commands.values()))
        thread = threading.Thread(
            target=self._start_missing, args=(command, environment, folder, ended), daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _start_missing(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        ended: threading.Event,
    ) -> None:
        """Once the attempt trains, start the missing ones, one after another: training shares the
        machine with no more than one.
        """
        until = time.monotonic() + BEGIN
        while not _trains(folder) and time.monotonic() < until:
            if ended.wait(LOOK):
                return
        self._remove_ended()
        for number in range(self.count):
            try:
                if number >= len(self._spares):
                    self._spares.append(self._start(command, environment))
            except OSError as error:  # no more processes are allowed, for example
                self._log(f"a spare process cannot be started: {error}")
                break
            spare = self._spares[number]
            until = time.monotonic() + PATIENCE
            while spare.check() and not spare.is_ready and time.monotonic() < until:
                if ended.wait(LOOK):
                    return
            if not spare.is_ready:
                # The next would not get further.
                break
        self._remove_ended()
        ready = sum(spare.is_ready for spare in self._spares)
        self._log(f"{ready} of {self.count} spare processes are ready")

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> Spare:
        ours, theirs = socket.socketpair()
        variables = dict(environment)
        # Rank and token of an attempt, which a spare process gets later.
        for name in RESERVED:
            variables.pop(f"SPMD_{name}", None)
        cookies = ",".join(filter(None, (variables.get(orphan_reaper.NAME), self._cookie)))
        variables |= {
            NAME: str(theirs.fileno()),
            "SPMD_LAUNCHER": str(os.getpid()),
            orphan_reaper.NAME: cookies,
        }
        with theirs:
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # a group of its own, as a worker has, which it becomes
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                errors="replace",
                text=True,
            )
        ours.setblocking(False)
        return Spare(process, ours)

    def _remove_ended(self) -> None:
        """Remove those that have ended."""
        for spare in list(self._spares):
            if not spare.check():
                self._log(spare.describe_end())
                self._spares.remove(spare)
                spare.end()


def _trains(folder: Path) -> bool:
    """Return whether a process of an attempt trains, from the records in the attempt's folder."""
    return any(beat.phase == "step" for beat in heartbeats(read_records(folder)).values())


def check_spares(spares: bool, settings: Settings) -> None:
    """Raise OptionError for spare processes that no restart would use."""
    if spares and not settings.max_restarts:
        raise OptionError("spares apply to restarts, and there are none.", fix="--max-restarts 10.")


def wait_as_spare(imports: Sequence[str] = IMPORTS) -> None:
    """Import, wait, and take over the environment of an attempt, in a process that was started as a
    spare one. In another, do nothing.

    Args:
      imports: modules.

    Raises:
      RuntimeError: JAX has looked for devices, of which a spare process must not hold memory.
    """
    number = os.environ.get(NAME)
    if number is None:
        return
    # Imports JAX, which launchers and agents do not need.
    from spmd.distributed import coordination

    with socket.socket(fileno=int(number)) as launcher:
        launcher.set_inheritable(False)
        handlers = list(logging.root.handlers)
        level = logging.root.level
        for name in imports:
            importlib.import_module(name)
        # orbax adds a handler when it is imported, and logging.basicConfig of a script does nothing
        # if there is one
        logging.root.handlers[:] = handlers
        logging.root.level = level
        # a process that has looked for devices holds memory of GPUs, and cannot join others
        if coordination.backends_initialized():
            raise RuntimeError(f"importing {', '.join(imports)} made JAX look for devices")
        launcher.sendall(READY)
        line = launcher.makefile("rb").readline()
    # Without a full line the launcher has closed the socket, and needs this process no more.
    if not line.endswith(b"\n"):
        os._exit(0)
    # A variable of an earlier attempt, such as a rank, must not stay.
    os.environ.clear()
    os.environ.update(json.loads(line))
