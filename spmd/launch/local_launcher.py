"""Several processes on this machine, restarted together when one fails."""

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.distributed.host_gpus import visible_gpus
from spmd.distributed.launcher_protocol import chosen_stop_signals
from spmd.distributed.world import free_port
from spmd.errors import OptionError, in_python, option
from spmd.launch.process_group import ProcessGroup, Stoppable, start_processes
from spmd.launch.restart_policy import Attempt, read_records, run_with_restarts, summarize_attempt
from spmd.launch.settings import Settings, check_integer
from spmd.launch.spares import Spares, check_spares
from spmd.launch.validation import check_script_is_named

MOST = 256  # processes on one machine


@dataclasses.dataclass(frozen=True)
class LocalConfig:
    """The processes to start on this machine.

    Args:
      processes: how many; None: one for each GPU.
      devices: GPUs to use, by number; None: all.
      settings: how they are started.
      spares: whether a spare process waits beside each, for a restart (`spmd.launch.spares`).
    """

    processes: int | None = None
    devices: tuple[int, ...] | None = None
    settings: Settings = dataclasses.field(default_factory=Settings)
    spares: bool = False

    def __post_init__(self):
        check_integer("processes", self.processes, MOST)
        if self.devices is not None:
            if (
                not self.devices
                or min(self.devices) < 0
                or len(set(self.devices)) < len(self.devices)
            ):
                devices = in_python(str(list(self.devices)), ",".join(map(str, self.devices)))
                raise OptionError(
                    f"{option('devices', devices)}.",
                    fix="distinct GPU numbers from 0.",
                )
            self.settings.refuse_with_simulate("devices")
        if self.settings.stall and self.count == 1:
            raise OptionError(
                "stall has no effect on a single process.", fix="leave it out, or use 2 processes."
            )
        check_spares(self.spares, self.settings)

    @property
    def gpus(self) -> list[str]:
        """The GPUs to divide among the processes, as CUDA_VISIBLE_DEVICES names them; none if CPU
        devices are simulated.
        """
        if self.settings.simulate:
            return []
        if self.devices is None:
            return visible_gpus()
        return [str(number) for number in self.devices]

    @property
    def count(self) -> int:
        """The number of processes.

        Raises:
          OptionError: there is no GPU, and no number of processes; or the GPUs cannot be shared
            equally.
        """
        gpus = self.gpus
        count = len(gpus) if self.processes is None else self.processes
        if not count:
            fix = (
                f"{option('processes', 2)} and {option('simulate', 4)}, for 4 CPU devices in each."
            )
            raise OptionError("this machine has no GPU.", fix=fix)
        if len(gpus) % count:
            fix = f"{option('devices', '0,1')} and so on, or another number."
            raise OptionError(
                f"{len(gpus)} GPUs cannot be shared equally by {count} processes.", fix=fix
            )
        return count


def launch(argv: Sequence[str], config: LocalConfig, log: Callable[[str], None]) -> int:
    """Run a script in several processes until it ends, and restart them after failures.

    Args:
      argv: the script and its arguments; or "-m", a module and its arguments.
      config: the processes.
      log: called with lines about failures and restarts.

    Returns:
      0, or the exit code of the process that failed first.
    """
    check_script(argv)
    in_memory: set[str] = set()
    with Spares(config.count if config.spares else 0, log) as spares:
        code = run_with_restarts(
            lambda times: _attempt(argv, config, times, in_memory, spares),
            config.settings.max_restarts,
            log,
        )
    remove_memory_folders(in_memory)
    return code


def _attempt(
    argv: Sequence[str],
    config: LocalConfig,
    times: Sequence[float],
    in_memory: set[str],
    spares: Spares,
) -> Attempt:
    """Run all processes once; add their folders of checkpoints in memory."""
    with report_folder() as folder:
        commands = {
            rank: (worker_command(argv), environment)
            for rank, environment in process_environments(config, times, folder).items()
        }
        group = ProcessGroup({})
        started = start_processes(
            commands, rank_prefix(config.count), group=group, pop_spare=spares.pop_ready
        )
        with forward_signals(group, group.signal), started, spares.replace(commands, folder):
            codes = group.wait(config.settings.grace)
        records = read_records(folder)
        in_memory |= memory_folders(records)
        return summarize_attempt(records, codes, group.first, group.stop_signal, group.failed_at)


def memory_folders(records: Iterable[Mapping[str, Any]]) -> set[str]:
    """The folders of checkpoints in memory that processes have reported."""
    return {
        str(record.get("folder")) for record in records if str(record["name"]).startswith("memory.")
    }


def remove_memory_folders(folders: Iterable[str]) -> None:
    """Remove folders of checkpoints in memory that no process uses, after the last attempt. A run
    that ends well has removed its.
    """
    for folder in map(Path, folders):
        # imports JAX, which an agent does not need to start processes
        from spmd.run.memory_folder import is_memory_folder, remove_unused

        if is_memory_folder(folder):
            remove_unused(folder)


def process_environments(
    config: LocalConfig, times: Sequence[float], folder: Path
) -> dict[int, dict[str, str]]:
    """The environment of each process, by rank.

    Args:
      config: the processes.
      times: of the attempts, as `restart_policy.run_with_restarts` gives them; empty if there are
        no attempts.
      folder: where they leave their records.
    """
    count, gpus = config.count, config.gpus
    shared = {
        **os.environ,
        **config.settings.environment(),
        **attempt_environment(times),
        "SPMD_PROCESSES": str(count),
        # Chosen anew for each attempt: processes of the last one may still have its port.
        "SPMD_COORDINATOR": f"127.0.0.1:{free_port('127.0.0.1')}",
        "SPMD_REPORT": str(folder),
        "SPMD_LAUNCHER": str(os.getpid()),
    }
    return {rank: shared | rank_environment(rank, rank, count, gpus) for rank in range(count)}


def attempt_environment(times: Sequence[float]) -> dict[str, str]:
    """Variables of all processes of an attempt, which has a new token; `times` as for
    `process_environments`.
    """
    # `times` has the launcher's start, two for each earlier attempt, and the start of this one.
    number = max(len(times) - 2, 0) // 2
    variables = {
        # A process that is left over from an earlier attempt does not know the new token, and
        # cannot join.
        "SPMD_TOKEN": secrets.token_hex(16),
        "SPMD_ATTEMPT": str(number),
        "PYTHONUNBUFFERED": "1",
    }
    return {**variables, "SPMD_TIMES": " ".join(f"{seconds:.3f}" for seconds in times)}


def rank_environment(
    rank: int, local_rank: int, local_size: int, gpus: Sequence[str]
) -> dict[str, str]:
    """Variables of one process: its rank, in all and on its host, and its share of the host's
    GPUs.
    """
    variables = {
        "SPMD_PROCESS": str(rank),
        "SPMD_LOCAL_PROCESS": str(local_rank),
        "SPMD_LOCAL_PROCESSES": str(local_size),
    }
    if gpus:
        share = len(gpus) // local_size
        shared_gpus = gpus[local_rank * share : (local_rank + 1) * share]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(shared_gpus)
    return variables


def rank_prefix(count: int) -> Callable[[int], str]:
    """The prefix of a rank's output lines, as a function of the rank.

    >>> rank_prefix(11)(3)
    '[ 3] '
    """
    width = len(str(count - 1))
    return lambda rank: f"[{rank:{width}d}] "


def worker_command(argv: Sequence[str]) -> list[str]:
    """The command of one process."""
    return [sys.executable, "-m", "spmd.launch.runner", *argv]


@contextlib.contextmanager
def report_folder(inside: Path | None = None, name: str = "spmd-launch") -> Iterator[Path]:
    """A folder for $SPMD_REPORT that only this user can read; removed at the end of the block."""
    # mkdtemp makes folders with mode 0700.
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=inside))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_script(argv: Sequence[str]) -> None:
    """Raise OptionError if there is nothing to run."""
    check_script_is_named(argv, "--processes 2")
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise OptionError(
            f'there is no script "{argv[0]}".', fix="the path of a Python file, or -m and a module."
        )


@contextlib.contextmanager
def forward_signals(group: Stoppable, send: Callable[[int], object]) -> Iterator[None]:
    """Forward SIGTERM, SIGHUP and the signals of $SPMD_STOP_SIGNALS (all as SIGTERM) and Ctrl-C to
    all processes, once, while the block runs.

    A second Ctrl-C kills the processes.

    Args:
      group: the processes.
      send: sends them a signal.
    """

    def forward(number: int, frame: object) -> None:
        del frame
        # SIGHUP too, which a terminal sends when it is closed: that must not lose a run
        if number != signal.SIGINT:
            number = signal.SIGTERM
        if group.stop_signal is None:
            group.stop_signal = number
            send(number)
        elif number == signal.SIGINT:
            send(signal.SIGKILL)

    signals = [signal.SIGTERM, signal.SIGINT, *chosen_stop_signals()]
    # nohup ignores SIGHUP, and so must a launcher that was started with it
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    previous = {number: signal.signal(number, forward) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
