"""Write the script of a SLURM job, and submit it with `sbatch`. What runs inside the job is in
`srun.py`.
"""

import dataclasses
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from spmd.distributed.launcher_protocol import TERMINATED
from spmd.errors import OptionError, option
from spmd.launch.local_launcher import MOST, check_script
from spmd.launch.settings import Settings, check_integer
from spmd.launch.srun import check_srun_options
from spmd.launch.validation import (
    check_environment_variables,
    check_pattern,
    check_printable,
    check_scheduler_option,
    check_script_args,
    script_name,
)

NAME = r"[\w.+-]{1,200}"
TIME = r"\d{1,6}(:[0-5]?\d){0,2}|\d{1,4}-\d\d?(:[0-5]?\d){0,2}"
# sbatch has its own rules for these lines, without quoting.
PATH = r"[\w./%+@=,:-]{1,1000}"
FIELDS = {  # the fields of `SlurmJob` that are passed to sbatch as they are
    "--gpus-per-node": "gpus_per_node",
    "--cpus-per-task": "cpus",
    "--mem": "memory",
    "--time": "time",
    "--partition": "partition",
    "--account": "account",
    "--output": "output",
}
OTHERS = (
    "--job-name",
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--signal",
    "--requeue",
    "--no-requeue",
    "--open-mode",
    "--wrap",
)
SHORT = ("-J", "-N", "-n", "-c", "-t", "-p", "-A", "-o")


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """The resources and options of a SLURM job.

    Args:
      nodes: number of nodes.
      processes_per_node: None: one for each GPU, or 1 without GPUs.
      gpus_per_node: None: the partition's default.
      cpus: for each process; None: the partition's default.
      memory: of each node, such as "64G".
      time: time limit, such as "1-12:00:00".
      partition: the partition.
      account: the account to charge.
      name: of the job; None: the script's.
      output: file for the output, such as "runs/%j.log".
      requeue: whether a job that has saved after SIGTERM is requeued.
      extra: other sbatch options, such as "--constraint=a100".
      srun_options: options of the `srun` that starts the processes, such as
        "--container-image=train.sqsh" of pyxis.
      env: environment variables of all processes, as pairs.
      python: the interpreter, at the same path on all nodes; None: this one.
      settings: how processes are started.

    Example:
      >>> print(script(["train.py"], SlurmJob(nodes=2, time="30", python="python3")))
      #!/bin/bash
      #SBATCH --job-name=train
      #SBATCH --nodes=2
      #SBATCH --ntasks-per-node=1
      #SBATCH --time=30
      #SBATCH --signal=TERM@30
      #SBATCH --open-mode=append
      <BLANKLINE>
      exec python3 -m spmd launch --srun train.py
    """

    nodes: int = 1
    processes_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    name: str | None = None
    output: str | None = None
    requeue: bool = False
    extra: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    python: str | None = None
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self):
        check_integer("nodes", self.nodes, 10**5)
        for name, most in (("processes_per_node", MOST), ("gpus_per_node", MOST), ("cpus", 4096)):
            check_integer(name, getattr(self, name), most)
        check_integer("grace", self.grace, 65535)
        if self.gpus_per_node is not None:
            self.settings.refuse_with_simulate("gpus_per_node")
            if self.gpus_per_node % self.tasks:
                raise OptionError(
                    f"{self.gpus_per_node} GPUs of a node cannot be shared equally by {self.tasks} "
                    "processes.",
                    fix="as many, or a divisor.",
                )
        if self.settings.stall and self.nodes * self.tasks == 1:
            raise OptionError(
                "stall has no effect on a single process.", fix="leave it out, or use 2 processes."
            )
        check_pattern(
            "memory", self.memory, r"\d{1,9}[KMGT]?", "of each node, such as 64G; 0 for all of it"
        )
        check_pattern("time", self.time, TIME, "minutes, or a time such as 12:00:00 or 1-12:00:00")
        # 0: no limit
        if self.time is not None and 0 < (limit := _seconds(self.time)) <= self.grace:
            raise OptionError(
                f"{option('grace', self.grace)} seconds of a job that has only {limit} "
                f"({option('time', self.time)}).",
                fix="a longer time limit.",
            )
        check_pattern("output", self.output, PATH, "a path of letters, digits and ./%+@=,:-")
        # sbatch accepts a list of partitions, and chooses the one that starts the job first
        names = {"partition": NAME + r"(,[\w.+-]+)*", "account": NAME, "name": NAME}
        for name, pattern in names.items():
            check_pattern(name, getattr(self, name), pattern, "letters, digits and _.+-")
        if self.python is not None:
            check_printable("python", self.python)
        check_environment_variables(self.env, self.settings.environment())
        self._check_extra()

    def _check_extra(self) -> None:
        """Refuse options of sbatch and srun that repeat or contradict the options of this class."""
        for extra in self.extra:
            if re.match(r"--array\b|-a", extra):
                raise OptionError(
                    f'sbatch option "{extra}" starts independent jobs.',
                    fix="--nodes, or submit each job separately.",
                )
            taken = (*FIELDS, *OTHERS, *SHORT)
            check_scheduler_option("sbatch", extra, taken, "--constraint=a100")
        check_srun_options(self.srun_options)

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def grace(self) -> int:
        """Seconds before the time limit at which SLURM sends SIGTERM, so that processes save and
        exit.
        """
        if not math.isfinite(self.settings.grace):
            return 0
        return math.ceil(self.settings.grace)


def _seconds(time: str) -> int:
    """A SLURM time limit in seconds.

    >>> (
    ...     _seconds("30"),
    ...     _seconds("1:30"),
    ...     _seconds("2:00:00"),
    ...     _seconds("1-12"),
    ...     _seconds("1-0:30:05"),
    ... )
    (1800, 90, 7200, 129600, 88205)
    """
    days, dash, clock = time.rpartition("-")
    numbers = [int(part) for part in clock.split(":")]
    # after days, or of three numbers, the first is hours; else minutes
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    seconds = sum(number * unit for number, unit in zip(numbers, units, strict=False))
    return int(days or 0) * 86400 + seconds


def script(argv: Sequence[str], config: SlurmJob) -> str:
    """The job's script, for `sbatch`.

    Args:
      argv: the script and its arguments; or "-m", a module and its arguments.
      config: the job.

    Raises:
      OptionError: there is nothing to run, or an argument has a control character.
    """
    check_script_args(argv, "--slurm --nodes 2")
    name = config.name or re.sub(r"[^\w.+-]", "-", script_name(argv), flags=re.ASCII)
    options = {"--job-name": name, "--nodes": config.nodes, "--ntasks-per-node": config.tasks}
    options |= {option: getattr(config, field) for option, field in FIELDS.items()}
    # Without "B:" SLURM signals the job's steps and not its shell, which would end at once.
    options["--signal"] = f"TERM@{config.grace}"
    lines = [f"#SBATCH {option}={value}" for option, value in options.items() if value is not None]
    python = config.python or sys.executable
    options_of_srun = [f"--srun-option={text}" for text in config.srun_options]
    words = [python, "-m", "spmd", "launch", "--srun", *options_of_srun]
    launch = shlex.join([*words, *_launch_options(config.settings), *argv])
    # With exec no shell stands between SLURM and the launcher.
    ending = f"exec {launch}"
    # SLURM starts a job again whose node has failed, too, and would truncate its output.
    lines.append("#SBATCH --open-mode=append")
    if config.requeue:
        lines.append("#SBATCH --requeue")
        ending = _REQUEUE.format(launch=launch, code=TERMINATED)
    lines += [f"#SBATCH {option}" for option in config.extra]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in config.env]
    return "\n".join(["#!/bin/bash", *lines, "", *exports, ending])


_STATE = '"$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)"'
_REQUEUE = f"""\
code=0
{{launch}} || code=$?
# it has saved after SIGTERM; a cancelled job is no longer RUNNING
if [ "$code" -eq {{code}} ] && [ {_STATE} = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code\""""


def _launch_options(settings: Settings) -> list[str]:
    """Settings as options of `spmd launch`, without those that have their default."""
    argv = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value == field.default or field.name == "preallocate":
            continue
        text = f"{value:g}" if isinstance(value, float) else str(value)
        argv += [f"--{field.name.replace('_', '-')}", text]
    if not settings.preallocate:
        argv.append("--no-preallocate")
    return argv


def submit(argv: Sequence[str], config: SlurmJob) -> int:
    """Submit the job to SLURM, which prints its id, and return the exit code of `sbatch`.

    Raises:
      OptionError: there is no such script, no folder for the output, or no `sbatch` on this
        machine.
    """
    check_script(argv)
    text = script(argv, config)
    folder = Path(config.output or "").parent
    # SLURM replaces %j and the like when the job starts, so such a folder cannot be checked here.
    if "%" not in str(folder) and not folder.is_dir():
        why = (
            f"{option('output', repr(config.output))}: there is no folder {folder}, and SLURM does "
            "not create it."
        )
        raise OptionError(why, fix=f"mkdir -p {shlex.quote(str(folder))}")
    try:
        return subprocess.run(["sbatch"], input=text + "\n", text=True, check=False).returncode
    except FileNotFoundError:
        raise OptionError(
            "this machine has no sbatch.",
            fix="run it on a login node of the cluster; or --dry-run, which prints the script.",
        ) from None
