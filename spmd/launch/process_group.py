"""Processes on this machine, started and ended together, their lines prefixed with their ranks."""

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

SETTLE = 4.0  # seconds that the others have to leave by themselves, once one has failed
KILLED = 1.0  # the same, once one was killed: nobody told them, and all that they can tell is that it is gone
LOOK = 0.05
COLOUR, RESET = re.compile(r"\x1b\[[0-9;:]{0,64}m"), "\x1b[0m"
CONTROL = re.compile(rf"({COLOUR.pattern})|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class Signalled(Protocol):
    """What signals go to.

    Attributes:
      asked: the signal that asked all to end, if one did.
    """

    asked: int | None

    def signal(self, number: int) -> None:
        """Send a signal to all processes."""
        ...


@dataclasses.dataclass
class Group:
    """Processes and what their ranks are; each is a session of its own, so that all it starts can be ended with it.

    Attributes:
      processes: by rank.
      asked: the signal that asked all of them to end, if one did.
      first: exit codes of those that ended first, once all have.
    """

    processes: dict[int, subprocess.Popen]
    asked: int | None = None
    first: dict[int, int] = dataclasses.field(default_factory=dict)
    owner: int = dataclasses.field(default_factory=os.getpid, repr=False)

    def signal(self, number: int) -> None:
        """Send a signal to all that were not reaped yet, and to what they have started: until then nobody else has their number.

        A fork of who started them sends none.
        """
        if os.getpid() != self.owner:
            return
        for process in self.processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS answers so for a group of zombies
                    os.killpg(process.pid, number)

    def ended(self) -> dict[int, int]:
        """Exit codes of those that have ended, by rank; negative ones are signals. They are not reaped."""
        found = {}
        for rank, process in self.processes.items():
            told = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if told is not None:
                found[rank] = told.si_status if told.si_code == os.CLD_EXITED else -told.si_status
        return found

    def wait(self, grace: float, send: Callable[[int], None] | None = None) -> dict[int, int]:
        """Until all have ended: by themselves, or soon after one that failed, or that many seconds after they were asked to.

        Args:
          grace: seconds.
          send: sends a signal to all, once; None: as `signal` does.

        Returns:
          Exit codes by rank; negative ones are signals.
        """
        until: float | None = None
        first, killed = dict[int, int](), False
        while len(codes := self.ended()) < len(self.processes):
            if until is None and self.asked == signal.SIGTERM:
                until = time.monotonic() + grace
            elif until is None and self.asked is None and any(codes.values()):
                failed = {code for code in codes.values() if code}
                until, first = time.monotonic() + (KILLED if failed == {-signal.SIGKILL} else SETTLE), codes
            if until is not None and time.monotonic() > until:
                (self.signal if send is None or killed else send)(signal.SIGKILL)
                killed = True
            time.sleep(LOOK)
        self.first = first or codes
        return codes


def to_stdout(line: str) -> None:
    """Write what a process has printed where this program prints, without what could do more to a terminal than colour it."""
    sys.stdout.write(neutral(line))
    sys.stdout.flush()


def neutral(line: str) -> str:
    r"""A line whose control characters are spelled out, but for tabs, line ends and colours, which end with the line.

    >>> neutral("\x1b[31mred\x1b[2J\x07\n")
    '\x1b[31mred\\x1b[2J\\x07\x1b[0m\n'
    """
    text = line.rstrip("\n")
    shown = CONTROL.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", text)
    return shown + (RESET if COLOUR.search(text) and not text.endswith(RESET) else "") + line[len(text) :]


@contextlib.contextmanager
def started(
    commands: Mapping[int, tuple[Sequence[str], Mapping[str, str]]],
    prefix: Callable[[int], str],
    *,
    write: Callable[[str], None] = to_stdout,
    inherited: Mapping[int, Sequence[int]] | None = None,
    group: Group | None = None,
) -> Iterator[Group]:
    """Start a command with an environment for each rank; at the end of the block none of them is left, whatever happens.

    Args:
      commands: by rank.
      prefix: what stands before each line of a rank.
      write: takes what they print, line by line, in threads.
      inherited: file descriptors by rank that a process has besides.
      group: an empty one that signals go to already; what it was asked meanwhile its processes are.
    """
    group, readers, kept, cookie = group or Group({}), [], contextlib.ExitStack(), secrets.token_hex(16)
    try:
        kept.enter_context(orphan_reaper.keeping(cookie))
        for rank, (command, environment) in commands.items():
            cookies = ",".join(filter(None, (environment.get(orphan_reaper.NAME), cookie)))
            process = subprocess.Popen(
                command,
                env={**environment, orphan_reaper.NAME: cookies},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(inherited or {}).get(rank, ()),
                errors="replace",
                text=True,
            )
            group.processes[rank] = process
            reader = threading.Thread(target=_copy, args=(process.stdout, prefix(rank), write), daemon=True)
            reader.start()
            readers.append(reader)
        if group.asked is not None:
            group.signal(group.asked)
        yield group
    finally:
        group.signal(signal.SIGKILL)  # also what those that have ended have left behind
        for process in group.processes.values():
            process.wait()
        kept.close()
        until = time.monotonic() + 5.0  # what they have left behind may keep their output open
        for reader in readers:
            reader.join(timeout=max(0.1, until - time.monotonic()))
        for process in group.processes.values():
            if process.stdout is not None and not any(reader.is_alive() for reader in readers):
                process.stdout.close()


def _copy(lines: IO[str] | None, prefix: str, write: Callable[[str], None]) -> None:
    for line in lines or ():
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more; processes that print must not wait for it
            write(f"{prefix}{line}" if line.endswith("\n") else f"{prefix}{line}\n")
