"""Inside a SLURM job: run all processes of the allocation in one `srun` step, and restart them in
another step after a failure.
"""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spmd.distributed.coordination import SHUTDOWN_TIMEOUT
from spmd.distributed.launcher_protocol import TERMINATED
from spmd.distributed.launchers import task_counts
from spmd.errors import OptionError
from spmd.launch.failure_cause import failures
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
from spmd.launch.step_watch import StepWatch
from spmd.launch.validation import check_printable, check_scheduler_option

# seconds from the first exit to the last: processes exit on their own, and log why
WAIT = SHUTDOWN_TIMEOUT + 60
# that are set here, or by an option of `spmd launch`
TAKEN = (
    *("--label", "--export", "--kill-on-bad-exit", "--wait", "--cpus-per-task"),
    *("--cpus-per-gpu", "--tres-per-task", "--nodes", "--ntasks", "--ntasks-per-node"),
    *("--ntasks-per-gpu", "--multi-prog", "--pty", "--jobid", "--het-group", "--test-only"),
    *("--help", "--usage", "--version", "-l", "-K", "-W", "-c", "-N", "-n", "-h", "-V"),
)
# of a process, at which a message says how to get more: one core, of one or two threads
FEW_CPUS = 2
# In the working folder, which all nodes share; /tmp is each node's own.
REPORTS = ".spmd"
# Seconds between two tries to start processes on nodes of which one was lost, and for all of them:
# SLURM gives a node up after 300 s (SlurmdTimeout), and the job with it.
TRY_SECONDS, START_SECONDS = 10.0, 600.0
# states of a job, in which no step can begin
ENDED = (
    *("COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
    *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"),
)


def launch(
    argv: Sequence[str],
    settings: Settings,
    log: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
    options: Sequence[str] = (),
) -> int:
    """Like `local_launcher.launch`, in all tasks of this allocation, which `environ` describes.

    Args:
      options: of srun, such as "--container-image=train.sqsh" of pyxis.

    Raises:
      OptionError: this is not inside an allocation, or there is no such script; or options of srun
        that are set here.
    """
    check_srun_options(options)
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
    cpus = _cpus_per_task(environ)
    if cpus is not None and cpus <= FEW_CPUS:
        log(
            f"each process has {cpus} of its node's CPUs, on which it reads data and feeds its "
            "devices. For more: spmd launch --slurm --cpus 8, or salloc --cpus-per-task=8"
        )
    step = command(argv, environ, options)
    allocation = Allocation(job, log)
    return run_with_restarts(
        lambda times: allocation.attempt(step, settings, times, environ),
        settings.max_restarts,
        log,
    )


class Allocation:
    """The nodes of a job, in which steps of `srun` run one after another.

    Where a node was lost for a while, `srun` may wait without limit for tasks that have ended: a
    node's daemon reports an end once. The launcher does not, since the processes leave records.

    Args:
      job: its id.
      log: called with lines about what happens.
      clock, wait: a monotonic clock and a sleep, in seconds.
    """

    def __init__(
        self,
        job: str,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ):
        self._job, self._log = job, log
        self._clock, self._wait = clock, wait
        # A step was ended whose tasks SLURM may take for running.
        self._has_old_step = False

    def attempt(
        self,
        step: Sequence[str],
        settings: Settings,
        times: Sequence[float],
        environ: Mapping[str, str],
    ) -> Attempt:
        """Run one step, with all its processes; again, while it starts none."""
        # The CPUs and GPUs of the old step count as taken.
        words = [*step[:1], "--overlap", *step[1:]] if self._has_old_step else step
        began = self._clock()
        while True:
            result, has_begun = self._run(words, settings, times, environ)
            if not any(result.codes.values()) or result.stop_signal is not None:
                return result
            if not self._is_running():
                why = f"SLURM has ended job {self._job}: a node failed, or its time is over"
                return dataclasses.replace(result, final=why)
            is_late = self._clock() - began > START_SECONDS
            if has_begun or not self._has_old_step or is_late:
                return result
            self._log(f"no process has started; another try in {TRY_SECONDS:.0f} s")
            try:
                self._wait(TRY_SECONDS)
            except KeyboardInterrupt:
                return dataclasses.replace(result, final="it was interrupted")

    def _is_running(self) -> bool:
        """Return whether SLURM still has the job; True where it does not say."""
        # the unique id of an element of an array, and the state
        command = ["squeue", "--noheader", "--format=%A %T", f"--jobs={self._job}"]
        # A user's SQUEUE_STATES would hide states.
        environ = {name: text for name, text in os.environ.items() if "SQUEUE_" not in name}
        try:
            shown = subprocess.run(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return True
        if shown.returncode:
            return "Invalid job id" not in shown.stderr
        states = dict(line.split()[:2] for line in shown.stdout.splitlines() if " " in line)
        return states.get(self._job, ENDED[0]) not in ENDED

    def _run(
        self,
        step: Sequence[str],
        settings: Settings,
        times: Sequence[float],
        environ: Mapping[str, str],
    ) -> tuple[Attempt, bool]:
        """Run one step; and whether one of its processes has begun."""
        job = self._job
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
                    _signal(group, signal_number, _step(folder, job), self._log)

                with (
                    forward_signals(group, send),
                    start_processes({ALL: (step, step_environ)}, lambda _: "", group=group),
                ):
                    watch = StepWatch(folder, self._clock)
                    ended = False

                    def is_over() -> bool:
                        nonlocal ended
                        if watch.is_over() and not ended:
                            ended = self._has_old_step = True
                            self._log(
                                "all processes have ended, and srun has not, as when a node was "
                                "lost for a while: its step is ended"
                            )
                        return ended

                    try:
                        codes = group.wait(settings.grace, send, is_over)
                    finally:
                        # end the tasks in any case: they are not children of this process
                        if not group.ended():
                            send(signal.SIGKILL)
                exit_codes = {rank: _exit_code(code) for rank, code in codes.items()}
                records = read_records(folder)
                # That of srun says how the launcher has ended it.
                if ended and failures(records):
                    exit_codes = {}
                elif ended and watch.is_done:
                    exit_codes = {ALL: 0}
                result = summarize_attempt(
                    records, exit_codes, exit_codes, group.stop_signal, group.failed_at
                )
                # Process 0 leaves the step's id before it joins.
                return result, any(record["name"] != "srun" for record in records)
        finally:
            # rmdir fails where the folder has that of another attempt.
            with contextlib.suppress(OSError):
                reports.rmdir()


def check_srun_options(options: Sequence[str]) -> None:
    """Refuse options of srun that are set here.

    Raises:
      OptionError: such an option, or what is none.
    """
    for text in options:
        check_printable("srun", text)
        # Each is one word of the command, unlike a line of sbatch's script.
        if re.match(r"[^=]* ", text):
            raise OptionError(
                f'srun option "{text}" is more than one word.',
                fix="= between the option and its value, and one --srun-option for each.",
            )
        check_scheduler_option("srun", text, TAKEN, "--container-image=train.sqsh")


def command(
    argv: Sequence[str], environ: Mapping[str, str], options: Sequence[str] = ()
) -> list[str]:
    """The `srun` command, with the CPUs of each task in this allocation."""
    # A site may set --kill-on-bad-exit or a short --wait, which would kill the others before they
    # can say why they exit.
    words = ["srun", "--label", "--export=ALL", "--kill-on-bad-exit=0", f"--wait={WAIT}"]
    if cpus := _cpus_per_task(environ):
        # Since SLURM 22.05 srun does not take it over from the allocation; without it, a task of
        # srun has one core, also where a node has been allocated as a whole.
        words.append(f"--cpus-per-task={cpus}")
    return [*words, *options, *worker_command(argv)]


def _cpus_per_task(environ: Mapping[str, str]) -> int | None:
    """The CPUs of each task: those that were asked for, or else an equal share of those that the
    allocation has on each node; None if that is not known.
    """
    if asked := environ.get("SLURM_CPUS_PER_TASK"):
        return int(asked)
    cpus = task_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    tasks = [1] * len(cpus)  # as srun starts them where no number was asked for
    if "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ:
        tasks = task_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    if not cpus or len(cpus) != len(tasks):
        return None
    return min(of_node // max(here, 1) for of_node, here in zip(cpus, tasks, strict=True)) or None


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
    group.signal(signal.SIGKILL if number == signal.SIGKILL else signal.SIGTERM)
