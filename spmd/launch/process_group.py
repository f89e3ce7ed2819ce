"""Processes on this machine that are started and ended together, with their output prefixed by
rank.
"""

import contextlib
import dataclasses
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Protocol

from spmd.launch import orphan_reaper

# Seconds for the others to exit on their own after one has failed.
SETTLE = 4.0
# The same after one was killed: it published no error that the others could log.
KILLED = 1.0
LOOK = 0.05
COLOUR, RESET = re.compile(r"\x1b\[[0-9;:]{0,64}m"), "\x1b[0m"
CONTROL = re.compile(rf"({COLOUR.pattern})|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class Stoppable(Protocol):
    """A group of processes that can be asked to stop.

    Attributes:
      stop_signal: the signal that asked all to stop, if any.
    """

    stop_signal: int | None


@dataclasses.dataclass
class ProcessGroup:
    """Processes by rank; each leads its own session, so that its descendants can be ended with it.

    Attributes:
      processes: by rank.
      stop_signal: the signal that asked all of them to stop, if any.
      first: exit codes of those that ended first, once all have ended.
      failed_at: when the first one had failed, in seconds since 1970; None if none has.
    """

    processes: dict[int, subprocess.Popen]
    stop_signal: int | None = None
    first: dict[int, int] = dataclasses.field(default_factory=dict)
    failed_at: float | None = None
    owner: int = dataclasses.field(default_factory=os.getpid, repr=False)

    def signal(self, number: int) -> None:
        """Send a signal to all processes that were not reaped yet, and to their descendants: until
        then their ids are not reused.

        Does nothing in a fork of the process that started them.
        """
        if os.getpid() != self.owner:
            return
        for process in self.processes.values():
            if process.returncode is None:
                # PermissionError: macOS, for a group of processes that ended and were not reaped
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)

    def ended(self) -> dict[int, int]:
        """Exit codes of those that have ended, by rank; negative ones are signals. They are not
        reaped.
        """
        codes = {}
        for rank, process in self.processes.items():
            # WNOWAIT: once a process is reaped, its id, which is also its group's, may be given to
            # a new one.
            status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                exited = status.si_code == os.CLD_EXITED
                codes[rank] = status.si_status if exited else -status.si_status
        return codes

    def wait(
        self,
        grace: float,
        send: Callable[[int], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> dict[int, int]:
        """Wait until all have ended; kill them soon after one has failed, or `grace` seconds after
        a request to stop.

        Args:
          grace: seconds.
          send: sends a signal to all; None: `signal` does.
          is_over: returns True where all are to be killed now, for a reason that their ends do not
            show.

        Returns:
          Exit codes by rank; negative ones are signals.
        """
        send = send or self.signal
        deadline: float | None = None
        first: dict[int, int] = {}
        while len(codes := self.ended()) < len(self.processes):
            if deadline is None and self.stop_signal == signal.SIGTERM:
                deadline = time.monotonic() + grace
            elif deadline is None and self.stop_signal is None and any(codes.values()):
                first = codes
                failed = {code for code in codes.values() if code}
                settle = KILLED if failed == {-signal.SIGKILL} else SETTLE
                deadline = time.monotonic() + settle
                self.failed_at = time.time()
            if is_over() or (deadline is not None and time.monotonic() > deadline):
                send(signal.SIGKILL)
                # `send` has done its part: from now on kill the processes here directly.
                send = self.signal
            time.sleep(LOOK)
        self.first = first or codes
        return codes


def to_stdout(line: str) -> None:
    """Write a line of a process to stdout, without control characters that do more to a terminal
    than colour it.
    """
    sys.stdout.write(escape_control_characters(line))
    sys.stdout.flush()


def escape_control_characters(line: str) -> str:
    r"""Spell out the control characters in a line, except for tabs, line ends and colours, which
    are reset at the end.

    >>> escape_control_characters("\x1b[31mred\x1b[2J\x07\n")
    '\x1b[31mred\\x1b[2J\\x07\x1b[0m\n'
    """
    text = line.rstrip("\n")
    end_of_line = line[len(text) :]
    shown = CONTROL.sub(lambda match: match[1] or f"\\x{ord(match[0]):02x}", text)
    if COLOUR.search(text) and not text.endswith(RESET):
        shown += RESET
    return shown + end_of_line


@contextlib.contextmanager
def start_processes(
    commands: Mapping[int, tuple[Sequence[str], Mapping[str, str]]],
    prefix: Callable[[int], str],
    *,
    write: Callable[[str], None] = to_stdout,
    inherited: Mapping[int, Sequence[int]] | None = None,
    group: ProcessGroup | None = None,
    pop_spare: Callable[[Mapping[str, str]], subprocess.Popen | None] = lambda environment: None,
) -> Iterator[ProcessGroup]:
    """Start a command with an environment for each rank; at the end of the block all of them are
    ended in any case.

    Args:
      commands: command and environment, by rank.
      prefix: the prefix of each output line, by rank.
      write: called with their output, line by line, from threads.
      inherited: additional file descriptors that a process inherits, by rank.
      group: an empty group that takes signals already; they are passed on once the processes are
        started.
      pop_spare: returns a process that has been started before, and continues with an environment;
        None: start one (`spmd.launch.spares`).
    """
    group = group or ProcessGroup({})
    readers = []
    reaper = contextlib.ExitStack()
    cookie = secrets.token_hex(16)
    try:
        reaper.enter_context(orphan_reaper.reap_orphans(cookie))
        for rank, (command, environment) in commands.items():
            cookies = ",".join(filter(None, (environment.get(orphan_reaper.NAME), cookie)))
            variables = {**environment, orphan_reaper.NAME: cookies}
            process = pop_spare(variables) or subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # a group of its own, to kill it with its descendants; and the terminal's Ctrl-C
                # reaches the launcher alone, which forwards it once
                start_new_session=True,
                pass_fds=(inherited or {}).get(rank, ()),
                errors="replace",
                text=True,
            )
            group.processes[rank] = process
            reader = threading.Thread(
                target=_copy, args=(process.stdout, prefix(rank), write), daemon=True
            )
            reader.start()
            readers.append(reader)
        if group.stop_signal is not None:
            group.signal(group.stop_signal)
        yield group
    finally:
        # Also descendants of processes that have ended.
        group.signal(signal.SIGKILL)
        for process in group.processes.values():
            process.wait()
        reaper.close()
        # A descendant may keep their output open.
        deadline = time.monotonic() + 5.0
        for reader in readers:
            reader.join(timeout=max(0.1, deadline - time.monotonic()))
        for process in group.processes.values():
            if process.stdout is not None and not any(reader.is_alive() for reader in readers):
                process.stdout.close()


def _copy(lines: IO[str] | None, prefix: str, write: Callable[[str], None]) -> None:
    for line in lines or ():
        if not line.endswith("\n"):
            line += "\n"
        # even if stdout is closed, read on: a process blocks once its pipe is full
        with contextlib.suppress(OSError, ValueError):
            write(f"{prefix}{line}")
