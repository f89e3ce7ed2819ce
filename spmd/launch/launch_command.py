"""`spmd launch`: one command, many processes, on this machine, on several hosts, or under a
scheduler.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from spmd.base.user_paths import as_path
from spmd.errors import OptionError
from spmd.launch.settings import Settings

HERE = "on one machine"
HOSTS = "--hosts"
SLURM = "--slurm"
SRUN = "--srun"
KUBERNETES = "--kubernetes"
# by the modes that they apply to; all others apply to every mode
OPTIONS: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {
    (HERE,): {
        "--processes": {
            "type": int,
            "metavar": "N",
            "help": "how many processes (default: one for each GPU)",
        },
        "--devices": {"metavar": "0,1", "help": "GPUs to use (default: all)"},
    },
    (HOSTS,): {
        "--min-hosts": {
            "type": int,
            "metavar": "M",
            "help": "restart with as few as M hosts if the others do not answer",
        },
        "--ssh": {"metavar": "COMMAND", "help": "the ssh command and its options"},
        "--folder": {"metavar": "PATH", "help": "working folder on the hosts (default: this path)"},
    },
    (HERE, HOSTS): {
        "--spares": {
            "action": "store_true",
            "help": "keep a spare process beside each, so that a restart need not start Python",
        },
    },
    (HOSTS, SLURM, KUBERNETES): {
        "--env": {
            "action": "append",
            "metavar": "NAME=VALUE",
            "help": "an environment variable of all processes; repeatable",
        },
        "--python": {
            "metavar": "PATH",
            "help": "the interpreter (default: this one; with --kubernetes: python)",
        },
    },
    (SLURM, KUBERNETES): {
        "--nodes": {"type": int, "metavar": "N", "help": "number of nodes or pods (default: 1)"},
        "--gpus-per-node": {"type": int, "metavar": "G", "help": "GPUs of each node or pod"},
        "--cpus": {"type": int, "metavar": "C", "help": "CPUs of each process"},
        "--memory": {
            "metavar": "M",
            "help": "memory of each node or pod, such as 64G (SLURM) or 64Gi (Kubernetes)",
        },
        "--name": {"help": "name of the job (default: the script's)"},
    },
    (SLURM,): {
        "--dry-run": {"action": "store_true", "help": "only print the sbatch script"},
        "--processes-per-node": {
            "type": int,
            "metavar": "P",
            "help": "processes on each node (default: one for each GPU, or 1)",
        },
        "--time": {"metavar": "T", "help": "time limit, such as 30, 12:00:00 or 1-12:00:00"},
        "--partition": {"metavar": "NAME", "help": "partition of the job"},
        "--account": {"metavar": "NAME", "help": "account to charge"},
        "--output": {"metavar": "PATH", "help": "file for the output, such as runs/%%j.log"},
        "--requeue": {"action": "store_true", "help": "requeue a job that saved after SIGTERM"},
        "--sbatch": {
            "action": "append",
            "metavar": "OPTION",
            "help": "another sbatch option, such as constraint=a100; repeatable",
        },
    },
    (SLURM, SRUN): {
        "--srun-option": {
            "action": "append",
            "metavar": "OPTION",
            "help": "an option of the srun that starts the processes, such as "
            "container-image=train.sqsh of pyxis; repeatable",
        },
    },
    (KUBERNETES,): {
        "--image": {"help": "container image with Python, spmd and the script"},
        "--namespace": {"help": "namespace of the job"},
        "--claim": {
            "metavar": "NAME:/PATH",
            "help": "PersistentVolumeClaim for checkpoints, and its mount path",
        },
        "--shm": {"metavar": "SIZE", "help": "size of /dev/shm, such as 8Gi"},
        "--jobset": {
            "action": "store_true",
            "help": "a JobSet, which replaces all pods at once, instead of an Indexed Job",
        },
        "--queue": {"metavar": "NAME", "help": "LocalQueue of Kueue that starts the job"},
        "--exclusive-topology": {
            "metavar": "LABEL",
            "help": "with --jobset: all pods on nodes with one value of this label, such as "
            "cloud.google.com/gke-nodepool, which no other such set uses",
        },
    },
}
ALTERNATIVES = {  # the fix for an option that does not apply to a mode
    ("--processes", HOSTS): "processes=N after a host's name in the file",
    ("--devices", HOSTS): "leave it out: all GPUs of a host are shared among its processes",
    ("--processes", SLURM): "--nodes; also --processes-per-node, unless it is one for each GPU",
    ("--processes", SRUN): "salloc --ntasks N: the allocation sets the number",
    ("--processes", KUBERNETES): "--nodes: a pod is one process",
    ("--spares", SLURM): "leave it out: a restart is another step of srun, with new processes",
    ("--spares", SRUN): "leave it out: a restart is another step of srun, with new processes",
    ("--spares", KUBERNETES): "leave it out: a restart is another pod",
    (
        "--processes-per-node",
        KUBERNETES,
    ): "--nodes: a pod is one process, which uses all of its GPUs",
    ("--devices", SLURM): "--gpus-per-node",
    ("--devices", KUBERNETES): "--gpus-per-node",
    ("--dry-run", KUBERNETES): "leave it out: the manifest is only printed in any case",
    ("--partition", KUBERNETES): "--namespace, which has another meaning, or leave it out",
}


def add_to(commands: Any) -> None:
    """Add the command to the parser of `spmd`."""
    parser = commands.add_parser(
        "launch",
        help="run a script in several processes",
        description="Run a script in several processes that train together, on this machine or on "
        "a "
        "cluster, and restart all of them when "
        "one fails.",
        # else an argument of the script, such as --mem, could be refused as ambiguous
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--simulate",
        type=int,
        metavar="K",
        help="simulate K CPU devices in each process, instead of GPUs",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="R",
        help="restart at most R times after failures (default: 0)",
    )
    add(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to save and exit after SIGTERM (default: 30)",
    )
    add(
        "--stall",
        default="",
        metavar="step=60,…",
        help="seconds without progress by phase: compile, step, eval, save; inf: never",
    )
    add(
        "--memory-fraction",
        type=float,
        metavar="F",
        help="fraction of a GPU's memory for each process",
    )
    add(
        "--no-preallocate",
        dest="preallocate",
        action="store_false",
        help="allocate GPU memory as needed instead of at the start",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--hosts",
        metavar="FILE",
        help="run on these hosts over ssh: one per line, or jobs and their tasks (.toml)",
    )
    modes.add_argument("--slurm", action="store_true", help="submit an sbatch script to SLURM")
    modes.add_argument(
        "--srun", action="store_true", help="inside a SLURM allocation: run in all of its tasks"
    )
    modes.add_argument(
        "--kubernetes", action="store_true", help="print the manifest of a Kubernetes Job or JobSet"
    )
    for applies_to, options in OPTIONS.items():
        group = parser.add_argument_group(" or ".join(map(_with, applies_to)))
        for flag, details in options.items():
            group.add_argument(flag, **details)
    add(
        "-m",
        dest="module",
        # All that follows is the module's, options of the same names too.
        nargs=argparse.REMAINDER,
        metavar="MODULE ...",
        help="a module and its arguments",
    )
    add(
        "argv",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="a Python file and its arguments",
    )
    parser.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int | str:
    mode = _mode(options)
    settings = Settings(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    )
    argv = [*options.argv]
    if options.module is not None:
        argv = ["-m", *options.module]
    if options.script_arguments:
        argv += ["--", *options.script_arguments]
    if mode == SRUN:
        from spmd.launch import srun

        return srun.launch(argv, settings, _log, options=_with_dashes(options.srun_option))
    launchers = {
        HERE: _launch_here,
        HOSTS: _launch_on_hosts,
        SLURM: _launch_slurm,
        KUBERNETES: _launch_kubernetes,
    }
    return launchers[mode](argv, options, settings)


def _mode(options: argparse.Namespace) -> str:
    """The mode that the options select. Options that do not apply to it are refused, with an
    alternative.
    """
    selected = {
        HOSTS: options.hosts is not None,
        SLURM: options.slurm,
        SRUN: options.srun,
        KUBERNETES: options.kubernetes,
    }
    mode = next((name for name, is_selected in selected.items() if is_selected), HERE)
    for applies_to, flags in OPTIONS.items():
        if mode in applies_to:
            continue
        modes = [name for name in applies_to if name != HERE]
        for flag in flags:
            value = getattr(options, flag.removeprefix("--").replace("-", "_"))
            if value is not None and value is not False:
                fix = ALTERNATIVES.get((flag, mode), " or ".join(["leave it out", *modes]))
                raise OptionError(f"{flag} has no effect {_with(mode)}.", fix=f"{fix}.")
    return mode


def _with(mode: str) -> str:
    return mode if mode == HERE else f"with {mode}"


def _config(kind: Any, options: argparse.Namespace, **others: Any) -> Any:
    """A config whose fields are the given options of the same names, and others."""
    names = {field.name for field in dataclasses.fields(kind)} - set(others)
    values = {name: getattr(options, name, None) for name in names}
    return kind(**{name: value for name, value in values.items() if value is not None}, **others)


def _launch_here(argv: Sequence[str], options: argparse.Namespace, settings: Settings) -> int:
    from spmd.launch.local_launcher import LocalConfig, launch

    devices = None
    try:
        if options.devices is not None:
            devices = tuple(int(word) for word in options.devices.split(","))
    except ValueError:
        raise OptionError(
            f'--devices "{options.devices}".', fix="GPU numbers, such as 0,1."
        ) from None
    return launch(argv, LocalConfig(options.processes, devices, settings, options.spares), _log)


def _launch_on_hosts(argv: Sequence[str], options: argparse.Namespace, settings: Settings) -> int:
    from spmd.launch.hostfile import read_hosts
    from spmd.launch.ssh_launcher import SshConfig, launch_on_hosts

    others = {
        "least": options.min_hosts,
        "variables": tuple(options.env or ()),
        "settings": settings,
    }
    return launch_on_hosts(
        argv,
        _config(SshConfig, options, hosts=read_hosts(as_path(options.hosts, "hosts")), **others),
        _log,
    )


def _launch_slurm(
    argv: Sequence[str], options: argparse.Namespace, settings: Settings
) -> int | str:
    from spmd.launch.slurm import SlurmJob, script, submit

    job = _config(
        SlurmJob,
        options,
        env=_variables(options),
        extra=_with_dashes(options.sbatch),
        srun_options=_with_dashes(options.srun_option),
        settings=settings,
    )
    if options.dry_run:
        return script(argv, job)
    return submit(argv, job)


def _launch_kubernetes(argv: Sequence[str], options: argparse.Namespace, settings: Settings) -> str:
    from spmd.launch.kubernetes import KubernetesJob, manifest

    if options.image is None:
        raise OptionError("--kubernetes needs an image.", fix="--image registry.example/train:1.")
    return manifest(
        argv, _config(KubernetesJob, options, env=_variables(options), settings=settings)
    )


def _with_dashes(options: Sequence[str] | None) -> tuple[str, ...]:
    """Options of another program, which may be typed without their dashes."""
    return tuple(text if text.startswith("-") else f"--{text}" for text in options or ())


def _variables(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """The pairs of --env."""
    pairs = []
    for text in options.env or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--env {text!r} has no value.", fix="--env NAME=VALUE.")
        pairs.append((name, value))
    return tuple(pairs)


def _log(text: str) -> None:
    # in one write: print writes the line end separately, and a process may print before it
    sys.stderr.write(f"spmd launch: {text}\n")
    sys.stderr.flush()
