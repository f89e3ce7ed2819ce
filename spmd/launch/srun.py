"""Inside a SLURM job: run all processes of the allocation in one `srun` step, and restart them in
another step after a failure.
"""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spmd.distributed.coordination import SHUTDOWN_TIMEOUT
from spmd.distributed.launcher_protocol import TERMINATED
from spmd.errors import OptionError
from spmd.launch.local_launcher import (
    attempt_environment,
    check_script,
    forward_signals,
    report_folder,
    worker_command,
)
from spmd.launch.process_group import ProcessGroup, start_processes
from spmd.launch.restart_policy import (
    ALL,
    Attempt,
    read_records,
    run_with_restarts,
    summarize_attempt,
)
from spmd.launch.settings import Settings

# seconds from the first exit to the last: processes exit on their own, and log why
WAIT = SHUTDOWN_TIMEOUT + 60
# In the working folder, which all nodes share; /tmp is each node's own.
REPORTS = ".spmd"


def launch(
    argv: Sequence[str],
    settings: Settings,
    log: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Like `local_launcher.launch`, in all tasks of this allocation, which `environ` describes.

    Raises:
      OptionError: this is not inside an allocation, or there is no such script.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"\d+", job):
        raise OptionError(
            "this is not inside a SLURM allocation: SLURM_JOB_ID is not set.",
            fix="spmd launch --slurm, which submits a job; or salloc --nodes 2 first.",
        )
    check_script(argv)
    if settings.stall and environ.get("SLURM_NTASKS", environ.get("SLURM_NNODES")) == "1":
        raise OptionError(
            "stall has no effect on a single process.", fix="leave it out, or use 2 tasks."
        )
    return run_with_restarts(
        lambda times: _attempt(argv, settings, times, job, environ, log), settings.max_restarts, log
    )


def _attempt(
    argv: Sequence[str],
    settings: Settings,
    times: Sequence[float],
    job: str,
    environ: Mapping[str, str],
    log: Callable[[str], None],
) -> Attempt:
    """Run one step, with all its processes."""
    reports = Path.cwd() / REPORTS
    try:
        reports.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"{reports} cannot be created: {error.strerror}.", fix="a writable working folder."
        ) from error
    try:
        with report_folder(reports, f"{job}.{len(times) // 2 - 1}") as folder:
            # a task's parent is slurmstepd
            step_environ = {
                name: value for name, value in environ.items() if name != "SPMD_LAUNCHER"
            }
            step_environ |= {
                **settings.environment(),
                **attempt_environment(times),
                "SPMD_REPORT": str(folder),
            }
            group = ProcessGroup({})

            def send(signal_number: int) -> None:
                _signal(group, signal_number, _step(folder, job), log)

            with (
                forward_signals(group, send),
                start_processes(
                    {ALL: (command(argv, environ), step_environ)}, lambda _: "", group=group
                ),
            ):
                try:
                    codes = group.wait(settings.grace, send)
                finally:
                    # end the tasks in any case: they are not children of this process
                    if not group.ended():
                        send(signal.SIGKILL)
            exit_codes = {rank: _exit_code(code) for rank, code in codes.items()}
            return summarize_attempt(
                read_records(folder), exit_codes, exit_codes, group.stop_signal, group.failed_at
            )
    finally:
        # rmdir fails where the folder has that of another attempt.
        with contextlib.suppress(OSError):
            reports.rmdir()


def command(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The `srun` command, with the CPUs of each task in this allocation."""
    # A site may set --kill-on-bad-exit or a short --wait, which would kill the others before they
    # can say why they exit.
    options = ["--label", "--export=ALL", "--kill-on-bad-exit=0", f"--wait={WAIT}"]
    if cpus := environ.get("SLURM_CPUS_PER_TASK"):
        # since SLURM 22.05 srun does not take it over from the allocation
        options.append(f"--cpus-per-task={cpus}")
    return ["srun", *options, *worker_command(argv)]


def _exit_code(code: int) -> int:
    """An exit code in Python's form, negative for signals. TERMINATED stays: it may be a signal, or
    the code of a process that saved.
    """
    if 128 < code < 128 + signal.NSIG and code != TERMINATED:
        return -(code - 128)
    return code


def _step(folder: Path, job: str) -> str | None:
    """The step's id, as recorded by one of its processes; None: none has started."""
    ids = (str(record.get("id")) for record in read_records(folder) if record["name"] == "srun")
    return next((step for step in ids if re.fullmatch(rf"{job}\.\d+", step)), None)


def _signal(group: ProcessGroup, number: int, step: str | None, log: Callable[[str], None]) -> None:
    """Send a signal to the step's processes. `srun` would kill them on SIGTERM, so it gets the
    signal only if none has started.
    """
    if step is None:
        group.signal(signal.SIGKILL if number == signal.SIGKILL else signal.SIGTERM)
        return
    name = signal.Signals(number).name.removeprefix("SIG")
    command = ["scancel", f"--signal={name}", step]
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=30, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if code == 0:
            return
        problem = f"exit code {code}"
    log(
        f"{' '.join(command)}: {problem}; signalling srun instead, which ends all processes "
        "immediately"
    )
    group.signal(signal.SIGTERM)
