"""Several processes on this machine, restarted together when one fails."""

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spmd.errors import OptionError
from spmd.hosts.world import free_port, visible_gpus
from spmd.launch.group import Group, started
from spmd.launch.restarts import Attempt, exit_code, pause, read, stop_because

MOST = 256  # processes on one machine


@dataclasses.dataclass(frozen=True)
class Local:
    """How processes are started here.

    Args:
      processes: how many; None: one for each GPU.
      simulate: CPU devices that each process is to see; None: what there is.
      max_restarts: how often the group is started again after a failure.
      grace: seconds to save and leave when it is asked to end.
      stall: seconds without progress by phase, such as "step=120" (`spmd.hosts.guard.Limits`).
      memory_fraction: of a GPU's memory that each process takes; None: as JAX does.
      preallocate: whether it takes it at once.
      devices: which GPUs, by number; None: all.
    """

    processes: int | None = None
    simulate: int | None = None
    max_restarts: int = 0
    grace: float = 30.0
    stall: str = ""
    memory_fraction: float | None = None
    preallocate: bool = True
    devices: tuple[int, ...] | None = None

    def __post_init__(self):
        for name, least, most in (("processes", 1, MOST), ("simulate", 1, 4096), ("max_restarts", 0, 10**6)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise OptionError(f"{name}={value}.\n    cure: from {least} to {most}.")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise OptionError(f"memory_fraction={self.memory_fraction}.\n    cure: more than 0, at most 1.")
        if not self.grace > 0:
            raise OptionError(f"grace={self.grace}.\n    cure: seconds, more than none.")
        if self.devices is not None and (not self.devices or min(self.devices) < 0 or len(set(self.devices)) < len(self.devices)):
            raise OptionError(f"devices={list(self.devices)}.\n    cure: numbers of GPUs from 0, each once.")
        for name, given in (
            ("devices", self.devices is not None),
            ("memory_fraction", self.memory_fraction is not None),
            ("preallocate", not self.preallocate),
        ):
            if given and self.simulate is not None:
                raise OptionError(f"{name} is for GPUs, and simulate={self.simulate} for where there is none.\n    cure: give one of them.")


def launch(words: Sequence[str], how: Local, say: Callable[[str], None]) -> int:
    """Run a script in several processes until it comes to an end, well or not.

    Args:
      words: the script and its arguments; or "-m", a module and its arguments.
      how: how many, and so on.
      say: is told of failures and restarts.

    Returns:
      0, or what the process ended with that failed first.
    """
    _check_script(words)
    gpus = _gpus(how)
    count = how.processes if how.processes is not None else len(gpus)
    if not count:
        raise OptionError("there is no GPU here.\n    cure: --processes N, with --simulate K for K CPU devices in each.")
    if how.stall and count == 1:
        raise OptionError(
            "a process that is alone waits for nobody, so --stall would do nothing.\n    cure: leave it out, or --processes 2."
        )
    attempts: list[Attempt] = []
    while True:
        attempt, asked = _attempt(words, how, count, gpus, len(attempts))
        if not any(attempt.codes.values()):
            return 0
        attempts.append(attempt)
        say(attempt.why)
        why = f"it was asked to end by signal {asked}" if asked is not None else stop_because(attempts, how.max_restarts)
        if why is not None:
            if how.max_restarts:
                say(f"not started again: {why}.")
            return exit_code(attempt)
        seconds = pause(len(attempts))
        say(f"restart {len(attempts)} of at most {how.max_restarts}" + (f", in {seconds:.0f} s" if seconds else ""))
        time.sleep(seconds)


def _attempt(words: Sequence[str], how: Local, count: int, gpus: Sequence[str], number: int) -> tuple[Attempt, int | None]:
    """All processes, once; and the signal that asked for their end, if there was one."""
    folder = Path(tempfile.mkdtemp(prefix="spmd-launch-"))  # only this user may look into it
    try:
        shared = _shared(how, count, number, folder)
        command = [sys.executable, "-m", "spmd.launch.runner", *words]
        commands = {rank: (command, shared | _own(rank, count, gpus)) for rank in range(count)}
        width = len(str(count - 1))
        with started(commands, lambda rank: f"[{rank:{width}d}] ") as group, _forwarded(group):
            codes = group.wait(how.grace)
        return dataclasses.replace(read(folder, codes), first=group.first), group.asked
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _shared(how: Local, count: int, number: int, folder: Path) -> dict[str, str]:
    """The environment that all processes have."""
    found = {
        "SPMD_PROCESSES": str(count),
        "SPMD_LOCAL_PROCESSES": str(count),
        "SPMD_COORDINATOR": f"127.0.0.1:{free_port('127.0.0.1')}",
        "SPMD_TOKEN": secrets.token_hex(16),
        "SPMD_REPORT": str(folder),
        "SPMD_ATTEMPT": str(number),
        "SPMD_LAUNCHER": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    found |= {"SPMD_STALL": how.stall} if how.stall else {}
    found |= {"SPMD_SIMULATE": str(how.simulate), "JAX_PLATFORMS": "cpu"} if how.simulate else {}
    found |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(how.memory_fraction)} if how.memory_fraction is not None else {}
    found |= {} if how.preallocate else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {**os.environ, **found}


def _own(rank: int, count: int, gpus: Sequence[str]) -> dict[str, str]:
    """What only this process has: its number, and its share of the GPUs."""
    own = {"SPMD_PROCESS": str(rank), "SPMD_LOCAL_PROCESS": str(rank)}
    if gpus:
        share = len(gpus) // count
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * share : (rank + 1) * share])
    return own


def _gpus(how: Local) -> list[str]:
    """The GPUs to share out, as CUDA_VISIBLE_DEVICES names them; none where CPU devices are simulated.

    Raises:
      OptionError: they cannot be shared evenly.
    """
    if how.simulate:
        return []
    found = visible_gpus() if how.devices is None else [str(number) for number in how.devices]
    if found and how.processes is not None and len(found) % how.processes:
        raise OptionError(
            f"{len(found)} GPUs cannot be shared by {how.processes} processes.\n    cure: --devices 0,1 and so on, or another number."
        )
    return found


def _check_script(words: Sequence[str]) -> None:
    if not words or words == ["-m"]:
        raise OptionError("there is no script to run.\n    cure: spmd launch --processes 2 train.py")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise OptionError(f'there is no script "{words[0]}".\n    cure: the path of a Python file, or -m and a module.')


@contextlib.contextmanager
def _forwarded(group: Group) -> Iterator[None]:
    """Inside the block SIGTERM and Ctrl-C go on to all processes, once; a second Ctrl-C ends them at once."""

    def ask(number: int, frame: object) -> None:
        del frame
        if group.asked is None:
            group.signal(number)
            group.asked = number
        elif number == signal.SIGINT:
            group.signal(signal.SIGKILL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
