"""Several processes on this machine, restarted together when one fails."""

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spmd.distributed.detect_cluster import free_port, visible_gpus
from spmd.errors import OptionError
from spmd.launch.process_group import Group, Signalled, started
from spmd.launch.restart_policy import Attempt, attempted, records, repeated
from spmd.launch.settings import Settings, whole_number

MOST = 256  # processes on one machine


@dataclasses.dataclass(frozen=True)
class Machine:
    """Which processes there are here.

    Args:
      processes: how many; None: one for each GPU.
      devices: which GPUs, by number; None: all.
      settings: how they are started.
    """

    processes: int | None = None
    devices: tuple[int, ...] | None = None
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self):
        whole_number("processes", self.processes, MOST)
        if self.devices is not None:
            if not self.devices or min(self.devices) < 0 or len(set(self.devices)) < len(self.devices):
                raise OptionError(f"devices={list(self.devices)}.", fix="numbers of GPUs from 0, each once.")
            self.settings.no_simulation("devices")
        if self.settings.stall and self.count == 1:
            raise OptionError("a process that is alone waits for nobody, so stall would do nothing.", fix="leave it out, or 2 processes.")

    @property
    def gpus(self) -> list[str]:
        """The GPUs to share out, as CUDA_VISIBLE_DEVICES names them; none where CPU devices are simulated."""
        if self.settings.simulate:
            return []
        return visible_gpus() if self.devices is None else [str(number) for number in self.devices]

    @property
    def count(self) -> int:
        """How many processes.

        Raises:
          OptionError: there is no GPU, and no number; or the GPUs cannot be shared evenly.
        """
        gpus = self.gpus
        count = self.processes if self.processes is not None else len(gpus)
        if not count:
            fix = "processes=2 and simulate=4, for 4 CPU devices in each (--processes 2 --simulate 4)."
            raise OptionError("there is no GPU here.", fix=fix)
        if len(gpus) % count:
            fix = "devices 0,1 and so on (--devices 0,1), or another number."
            raise OptionError(f"{len(gpus)} GPUs cannot be shared by {count} processes.", fix=fix)
        return count


def launch(words: Sequence[str], how: Machine, say: Callable[[str], None]) -> int:
    """Run a script in several processes until it comes to an end, well or not.

    Args:
      words: the script and its arguments; or "-m", a module and its arguments.
      how: how many, and so on.
      say: is told of failures and restarts.

    Returns:
      0, or what the process ended with that failed first.
    """
    check_script(words)
    return repeated(lambda number: _attempt(words, how, number), how.settings.max_restarts, say)


def _attempt(words: Sequence[str], how: Machine, number: int) -> Attempt:
    """All processes, once."""
    with report_folder() as folder:
        commands = {rank: (runner(words), environment) for rank, environment in environments(how, number, folder).items()}
        with forwarded(group := Group({})), started(commands, prefixes(how.count), group=group):
            codes = group.wait(how.settings.grace)
        return attempted(records(folder), codes, group.first, group.asked)


def environments(how: Machine, number: int, folder: Path) -> dict[int, dict[str, str]]:
    """What each process is told, by rank.

    Args:
      how: how many, and so on.
      number: of attempts before this one.
      folder: where they leave reports.
    """
    count, gpus = how.count, how.gpus
    shared = {**os.environ, **how.settings.environment(), **meeting(count, number, folder), "SPMD_LOCAL_PROCESSES": str(count)}
    return {rank: shared | _own(rank, count, gpus) for rank in range(count)}


def prefixes(count: int) -> Callable[[int], str]:
    """What stands before the lines of a rank.

    >>> prefixes(11)(3)
    '[ 3] '
    """
    width = len(str(count - 1))
    return lambda rank: f"[{rank:{width}d}] "


def runner(words: Sequence[str]) -> list[str]:
    """The command of one process."""
    return [sys.executable, "-m", "spmd.launch.runner", *words]


def meeting(count: int, number: int, folder: Path) -> dict[str, str]:
    """Variables by which processes of this machine find each other, by a fresh port and token; and where they leave reports."""
    return {
        "SPMD_PROCESSES": str(count),
        "SPMD_COORDINATOR": f"127.0.0.1:{free_port('127.0.0.1')}",
        "SPMD_TOKEN": secrets.token_hex(16),
        "SPMD_REPORT": str(folder),
        "SPMD_ATTEMPT": str(number),
        "SPMD_LAUNCHER": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def report_folder(inside: Path | None = None, name: str = "spmd-launch") -> Iterator[Path]:
    """A folder for `Settings`' $SPMD_REPORT that only this user may look into; gone at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=inside))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own(rank: int, count: int, gpus: Sequence[str]) -> dict[str, str]:
    """What only this process has: its number, and its share of the GPUs."""
    own = {"SPMD_PROCESS": str(rank), "SPMD_LOCAL_PROCESS": str(rank)}
    if gpus:
        share = len(gpus) // count
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * share : (rank + 1) * share])
    return own


def check_script(words: Sequence[str]) -> None:
    """Raise OptionError where there is nothing to run."""
    if not words or words == ["-m"]:
        raise OptionError("there is no script to run.", fix="spmd launch --processes 2 train.py")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise OptionError(f'there is no script "{words[0]}".', fix="the path of a Python file, or -m and a module.")


@contextlib.contextmanager
def forwarded(group: Signalled, send: Callable[[int], None] | None = None) -> Iterator[None]:
    """Inside the block SIGTERM, SIGHUP as if it were that, and Ctrl-C go on to all processes, once; a second Ctrl-C ends them at once.

    Args:
      group: who is asked.
      send: sends them a signal; None: as the group does.
    """
    send = group.signal if send is None else send

    def ask(number: int, frame: object) -> None:
        del frame
        number = signal.SIGTERM if number == signal.SIGHUP else number  # a terminal that is closed is no reason to lose a run
        if group.asked is None:
            group.asked = number
            send(number)
        elif number == signal.SIGINT:
            send(signal.SIGKILL)

    signals = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else [])]
    before = {number: signal.signal(number, ask) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
