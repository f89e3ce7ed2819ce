"""SLURM from inside: all processes of an allocation in one step of `srun`, and another step where that one fails."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spmd.distributed.initialize import SHUTDOWN_TIMEOUT
from spmd.distributed.watchdog import TERMINATED
from spmd.errors import OptionError
from spmd.launch.local_launcher import check_script, forwarded, report_folder, runner
from spmd.launch.process_group import Group, started
from spmd.launch.restart_policy import ALL, Attempt, attempted, records, repeated
from spmd.launch.settings import Settings

WAIT = round(SHUTDOWN_TIMEOUT) + 60  # seconds from the first process that has ended to the last: they leave by themselves, and say why
REPORTS = ".spmd"  # in the working folder, which all nodes see


def launch(words: Sequence[str], settings: Settings, say: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> int:
    """Run a script in all tasks of this allocation, until it comes to an end, well or not.

    Args:
      words: the script and its arguments; or "-m", a module and its arguments.
      settings: how processes are started, and how often.
      say: is told of failures and restarts.
      environ: this process's own.

    Returns:
      0, or what the process ended with that failed first.

    Raises:
      OptionError: this is not inside an allocation, or there is no such script.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"\d+", job):
        raise OptionError(
            "there is no allocation of SLURM here: SLURM_JOB_ID is not set.\n"
            "    fix: spmd launch --slurm, which submits a job; or salloc --nodes 2 first."
        )
    check_script(words)
    if settings.stall and environ.get("SLURM_NTASKS", environ.get("SLURM_NNODES")) == "1":
        raise OptionError("a process that is alone waits for nobody, so stall would do nothing.", fix="leave it out, or 2 tasks.")
    return repeated(lambda number: _attempt(words, settings, number, job, environ, say), settings.max_restarts, say)


def _attempt(
    words: Sequence[str], settings: Settings, number: int, job: str, environ: Mapping[str, str], say: Callable[[str], None]
) -> Attempt:
    """One step, with all its processes."""
    reports = Path.cwd() / REPORTS
    try:
        reports.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{reports} cannot be made: {error.strerror}.", fix="a working folder that can be written to.") from error
    try:
        with report_folder(reports, f"{job}.{number}") as folder:
            own = {name: value for name, value in environ.items() if name != "SPMD_LAUNCHER"}  # a task's parent is SLURM's daemon
            own |= {**settings.environment(), **_meeting(number, folder)}
            group = Group({})
            send = lambda number: _signal(group, number, _step(folder, job), say)
            with forwarded(group, send), started({ALL: (command(words, environ), own)}, lambda _: "", group=group):
                try:
                    codes = group.wait(settings.grace, send)
                finally:
                    if not group.ended():  # whatever ends this, tasks do not go on: their parent is not this process
                        send(signal.SIGKILL)
            told = {rank: _plain(code) for rank, code in codes.items()}
            return attempted(records(folder), told, told, group.asked)
    finally:
        with contextlib.suppress(OSError):  # another attempt has its folder there
            reports.rmdir()


def command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The step. What `sbatch` was told of CPUs for each task is not passed on by itself."""
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    options = ["--label", "--export=ALL", "--kill-on-bad-exit=0", f"--wait={WAIT}", *([f"--cpus-per-task={cpus}"] if cpus else [])]
    return ["srun", *options, *runner(words)]


def _meeting(number: int, folder: Path) -> dict[str, str]:
    """What processes are told besides what SLURM tells them: a token, and where they leave reports."""
    return {
        "SPMD_TOKEN": secrets.token_hex(16),
        "SPMD_REPORT": str(folder),
        "SPMD_ATTEMPT": str(number),
        "PYTHONUNBUFFERED": "1",
    }


def _plain(code: int) -> int:
    """A signal as Python has it; of SIGTERM nobody knows whether it ended a process that had saved, so it stays the code of one."""
    return -(code - 128) if 128 < code < 128 + signal.NSIG and code != TERMINATED else code


def _step(folder: Path, job: str) -> str | None:
    """The step's name, as one of its processes has told it; None: none has begun."""
    told = (str(record.get("id")) for record in records(folder) if record["name"] == "srun")
    return next((step for step in told if re.fullmatch(rf"{job}\.\d+", step)), None)


def _signal(group: Group, number: int, step: str | None, say: Callable[[str], None]) -> None:
    """Send a signal to the step's processes. `srun` itself would end them at once for SIGTERM; it is asked where none runs yet."""
    if step is None:
        group.signal(signal.SIGTERM if number != signal.SIGKILL else number)
        return
    name = signal.Signals(number).name.removeprefix("SIG")
    try:
        code = subprocess.run(["scancel", f"--signal={name}", step], stdin=subprocess.DEVNULL, timeout=30, check=False).returncode
        problem = f"it ended with code {code}" if code else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        say(f"scancel --signal={name} {step}: {problem}; srun is asked instead, which ends all at once")
        group.signal(signal.SIGTERM)
