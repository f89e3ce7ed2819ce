"""SLURM from outside: the script of a job, and its way to `sbatch`. What the script does inside is in `srun.py`."""

import dataclasses
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from spmd.distributed.watchdog import TERMINATED
from spmd.errors import OptionError
from spmd.launch.local_launcher import MOST, check_script
from spmd.launch.settings import Settings, whole_number
from spmd.launch.validation import check_words, matching, printable, script_name, variables

NAME = r"[\w.+-]{1,200}"
TIME = r"\d{1,6}(:[0-5]?\d){0,2}|\d{1,4}-\d\d?(:[0-5]?\d){0,2}"
PATH = r"[\w./%+@=,:-]{1,1000}"  # sbatch reads these lines with rules of its own: nothing in them is quoted


@dataclasses.dataclass(frozen=True)
class Slurm:
    """What a job asks SLURM for.

    Args:
      nodes: how many.
      processes_per_node: None: one for each GPU, or 1 where there is none.
      gpus_per_node: None: as the partition has it.
      cpus: for each process; None: as the partition has it.
      memory: of each node, such as "64G".
      time: the limit, such as "1-12:00:00".
      partition: where it runs.
      account: who pays.
      name: of the job; None: the script's.
      output: the file for what it prints, such as "runs/%j.log".
      requeue: whether a job that was asked to end, and has saved, goes back into the queue.
      extra: other options of sbatch, such as "--constraint=a100".
      env: variables of all processes, as pairs.
      python: the interpreter, at the same place on all nodes; None: this one.
      settings: how processes are started.

    Example:
      >>> print(script(["train.py"], Slurm(nodes=2, time="30", python="python3")))
      #!/bin/bash
      #SBATCH --job-name=train
      #SBATCH --nodes=2
      #SBATCH --ntasks-per-node=1
      #SBATCH --time=30
      #SBATCH --signal=TERM@30
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
    env: tuple[tuple[str, str], ...] = ()
    python: str | None = None
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self):
        whole_number("nodes", self.nodes, 10**5)
        for name, most in (("processes_per_node", MOST), ("gpus_per_node", MOST), ("cpus", 4096)):
            whole_number(name, getattr(self, name), most)
        whole_number("grace", self.grace, 65535)
        if self.gpus_per_node is not None:
            self.settings.no_simulation("gpus_per_node")
            if self.gpus_per_node % self.tasks:
                raise OptionError(
                    f"{self.gpus_per_node} GPUs of a node cannot be shared by {self.tasks} processes.", fix="as many, or a divisor."
                )
        if self.settings.stall and self.nodes * self.tasks == 1:
            raise OptionError("a process that is alone waits for nobody, so stall would do nothing.", fix="leave it out, or 2 processes.")
        matching("memory", self.memory, r"\d{1,9}[KMGT]?", "of each node, such as 64G; 0 for all of it")
        matching("time", self.time, TIME, "minutes, or such as 12:00:00 or 1-12:00:00")
        if self.time is not None and 0 < (limit := _seconds(self.time)) <= self.grace:  # 0: no limit
            raise OptionError(
                f"grace={self.grace} seconds to save and leave, of a job that has {limit} (time={self.time}).", fix="a longer time."
            )
        matching("output", self.output, PATH, "a path of letters, digits and ./%+@=,:-")
        for name in ("partition", "account", "name"):
            matching(name, getattr(self, name), NAME + r"(,[\w.+-]+)*" if name == "partition" else NAME, "letters, digits and _.+-")
        if self.python is not None:
            printable("python", self.python)
        variables(self.env, self.settings.environment())
        self._check_extra()

    def _check_extra(self) -> None:
        """Refuse options of sbatch that say again, or otherwise, what this one says."""
        own = {option.split("=")[0] for option, _ in self._options("x")} | {"--output", "--requeue", "--no-requeue", "--open-mode"}
        taken = own | {"--gpus-per-node", "--cpus-per-task", "--mem", "--time", "--partition", "--account", "--ntasks", "--wrap"}
        short = {"-J", "-N", "-n", "-c", "-t", "-p", "-A", "-o"}
        for option in self.extra:
            printable("sbatch", option)
            name = re.split(r"[=\s]", option)[0]
            if name == "--array" or name[:2] == "-a":
                raise OptionError(f'sbatch option "{option}" makes jobs that do not meet.', fix="--nodes, or a job for each.")
            if name in taken or name[:2] in short:
                raise OptionError(f'sbatch option "{option}": {name} has an option of its own, or is set already.', fix="leave it out.")
            if not re.fullmatch(r"--[a-z][a-z-]*|-[A-Za-z]", name):
                raise OptionError(f'sbatch option "{option}".', fix="as sbatch has it, such as --constraint=a100.")

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def grace(self) -> int:
        """Seconds before the limit of time at which processes are asked to save and end."""
        return math.ceil(self.settings.grace) if math.isfinite(self.settings.grace) else 0

    def _options(self, name: str) -> list[tuple[str, object]]:
        found = [
            ("--job-name", name),
            ("--nodes", self.nodes),
            ("--ntasks-per-node", self.tasks),
            ("--gpus-per-node", self.gpus_per_node),
            ("--cpus-per-task", self.cpus),
            ("--mem", self.memory),
            ("--time", self.time),
            ("--partition", self.partition),
            ("--account", self.account),
            ("--output", self.output),
            ("--signal", f"TERM@{self.grace}"),
        ]
        return [(option, value) for option, value in found if value is not None]


def _seconds(time: str) -> int:
    """How long a limit of time is.

    >>> _seconds("30"), _seconds("1:30"), _seconds("2:00:00"), _seconds("1-12"), _seconds("1-0:30:05")
    (1800, 90, 7200, 129600, 88205)
    """
    days, dash, rest = time.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    first = 3600 if dash or len(numbers) == 3 else 60  # after days the first is hours; else minutes, or hours where there are three
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, (first, first // 60, 1), strict=False))


def script(words: Sequence[str], how: Slurm) -> str:
    """The text of the job's script, for `sbatch`.

    Args:
      words: the script and its arguments; or "-m", a module and its arguments.
      how: what the job asks for.

    Raises:
      OptionError: there is nothing to run, or a word has a control character.
    """
    check_words(words, "--slurm --nodes 2")
    name = how.name or re.sub(r"[^\w.+-]", "-", script_name(words), flags=re.ASCII)
    lines = [f"#SBATCH {option}={value}" for option, value in how._options(name)]
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"] if how.requeue else []
    lines += [f"#SBATCH {option}" for option in how.extra]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in how.env]
    launch = shlex.join([how.python or sys.executable, "-m", "spmd", "launch", "--srun", *_options(how.settings), *words])
    ending = _REQUEUE.format(launch=launch, code=TERMINATED) if how.requeue else f"exec {launch}"
    return "\n".join(["#!/bin/bash", *lines, "", *exports, ending])


_REQUEUE = """\
code=0
{launch} || code=$?
# asked to end, and saved; a job that somebody has cancelled is not RUNNING any more
if [ "$code" -eq {code} ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code\""""


def _options(settings: Settings) -> list[str]:
    """Settings as options of `spmd launch`; those that say what is so anyway are left out."""
    given = {
        "--simulate": settings.simulate,
        "--max-restarts": settings.max_restarts or None,
        "--grace": settings.grace if settings.grace != Settings().grace else None,
        "--stall": settings.stall or None,
        "--memory-fraction": settings.memory_fraction,
    }
    shown = lambda value: f"{value:g}" if isinstance(value, float) else str(value)
    found = [word for name, value in given.items() if value is not None for word in (name, shown(value))]
    return found if settings.preallocate else [*found, "--no-preallocate"]


def submit(words: Sequence[str], how: Slurm) -> int:
    """Give the job to SLURM, which prints its number, and return what `sbatch` ends with.

    Raises:
      OptionError: there is no such script, no folder for what it prints, or no `sbatch` here.
    """
    check_script(words)
    text = script(words, how)
    folder = Path(how.output or "").parent
    if "%" not in str(folder) and not folder.is_dir():
        raise OptionError(f"output={how.output!r}: there is no folder {folder}, and SLURM makes none.", fix=f"mkdir -p {folder}")
    try:
        return subprocess.run(["sbatch"], input=text + "\n", text=True, check=False).returncode
    except FileNotFoundError:
        raise OptionError(
            "there is no sbatch here.", fix="a machine of the cluster that has it; or --dry-run, which prints the script."
        ) from None
