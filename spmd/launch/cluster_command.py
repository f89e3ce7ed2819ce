"""`spmd launch` on several hosts, or under a scheduler: its options, which modes each applies to, and how they are run."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spmd.errors import OptionError
from spmd.launch.settings import Settings

HERE, HOSTS, SLURM, SRUN, KUBERNETES = "on one machine", "--hosts", "--slurm", "--srun", "--kubernetes"
BOTH = (SLURM, KUBERNETES)
APPLIES_TO = {  # the modes that an option applies to; options that are not listed apply to all
    "processes": (HERE,),
    "devices": (HERE,),
    "dry_run": (SLURM,),
    "nodes": BOTH,
    "processes_per_node": (SLURM,),
    "gpus_per_node": BOTH,
    "cpus": BOTH,
    "memory": BOTH,
    "name": BOTH,
    "env": (HOSTS, *BOTH),
    "python": (HOSTS, *BOTH),
    "min_hosts": (HOSTS,),
    "ssh": (HOSTS,),
    "folder": (HOSTS,),
    "time": (SLURM,),
    "partition": (SLURM,),
    "account": (SLURM,),
    "output": (SLURM,),
    "requeue": (SLURM,),
    "sbatch": (SLURM,),
    "image": (KUBERNETES,),
    "namespace": (KUBERNETES,),
    "claim": (KUBERNETES,),
    "shm": (KUBERNETES,),
}
ALTERNATIVES = {  # the fix for an option that does not apply to a mode
    ("processes", HOSTS): "processes=N after a host's name in the file",
    ("devices", HOSTS): "leave it out: all GPUs of a host are shared among its processes",
    ("processes", SLURM): "--nodes; also --processes-per-node, unless it is one for each GPU",
    ("processes", SRUN): "salloc --ntasks N: the allocation sets the number",
    ("processes", KUBERNETES): "--nodes: a pod is one process",
    ("processes_per_node", KUBERNETES): "--nodes: a pod is one process, which uses all of its GPUs",
    ("devices", SLURM): "--gpus-per-node",
    ("devices", KUBERNETES): "--gpus-per-node",
    ("dry_run", KUBERNETES): "leave it out: the manifest is only printed in any case",
    ("partition", KUBERNETES): "--namespace, which has another meaning, or leave it out",
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of hosts and schedulers to the parser of `spmd launch`."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--hosts", metavar="FILE", help="run on these hosts over ssh: one per line, or jobs and their tasks (.toml)")
    ways.add_argument("--slurm", action="store_true", help="submit an sbatch script to SLURM")
    ways.add_argument("--srun", action="store_true", help="inside a SLURM allocation: run in all of its tasks")
    ways.add_argument("--kubernetes", action="store_true", help="print the manifest of a Kubernetes Job")
    far = parser.add_argument_group("with --hosts")
    far.add_argument("--min-hosts", type=int, metavar="M", help="restart with as few as M hosts if the others do not answer")
    far.add_argument("--ssh", metavar="COMMAND", help="the ssh command and its options")
    far.add_argument("--folder", metavar="PATH", help="working folder on the hosts (default: this path)")
    any_of = parser.add_argument_group("with --hosts, --slurm or --kubernetes")
    any_of.add_argument("--env", action="append", metavar="NAME=VALUE", help="an environment variable of all processes; repeatable")
    any_of.add_argument("--python", metavar="PATH", help="the interpreter (default: this one; with --kubernetes: python)")
    both = parser.add_argument_group("with --slurm or --kubernetes")
    both.add_argument("--nodes", type=int, metavar="N", help="number of nodes or pods (default: 1)")
    both.add_argument("--gpus-per-node", type=int, metavar="G", help="GPUs of each node or pod")
    both.add_argument("--cpus", type=int, metavar="C", help="CPUs of each process")
    both.add_argument("--memory", metavar="M", help="memory of each node or pod, such as 64G (SLURM) or 64Gi (Kubernetes)")
    both.add_argument("--name", help="name of the job (default: the script's)")
    slurm = parser.add_argument_group("with --slurm")
    slurm.add_argument("--dry-run", action="store_true", help="only print the sbatch script")
    slurm.add_argument("--processes-per-node", type=int, metavar="P", help="processes on each node (default: one for each GPU, or 1)")
    slurm.add_argument("--time", metavar="T", help="time limit, such as 30, 12:00:00 or 1-12:00:00")
    slurm.add_argument("--partition", metavar="NAME", help="partition of the job")
    slurm.add_argument("--account", metavar="NAME", help="account to charge")
    slurm.add_argument("--output", metavar="PATH", help="file for the output, such as runs/%%j.log")
    slurm.add_argument("--requeue", action="store_true", help="requeue a job that saved after SIGTERM")
    slurm.add_argument("--sbatch", action="append", metavar="OPTION", help="another sbatch option, such as constraint=a100; repeatable")
    pods = parser.add_argument_group("with --kubernetes")
    pods.add_argument("--image", help="container image with Python, spmd and the script")
    pods.add_argument("--namespace", help="namespace of the job")
    pods.add_argument("--claim", metavar="NAME:/PATH", help="PersistentVolumeClaim for checkpoints, and its mount path")
    pods.add_argument("--shm", metavar="SIZE", help="size of /dev/shm, such as 8Gi")


def launch_mode(options: argparse.Namespace) -> str:
    """The mode that the options select. Options that do not apply to it are refused, with an alternative."""
    chosen = {HOSTS: options.hosts is not None, SLURM: options.slurm, SRUN: options.srun, KUBERNETES: options.kubernetes}
    mode = next((name for name, is_chosen in chosen.items() if is_chosen), HERE)
    for name, ways in APPLIES_TO.items():
        value = getattr(options, name)
        if value is not None and value is not False and mode not in ways:
            instead = ALTERNATIVES.get((name, mode), " or ".join(["leave it out", *(word for word in ways if word != HERE)]))
            raise OptionError(f"--{name.replace('_', '-')} has no effect {_with(mode)}.", fix=f"{instead}.")
    return mode


def _with(mode: str) -> str:
    return mode if mode == HERE else f"with {mode}"


def run(argv: Sequence[str], options: argparse.Namespace, settings: Settings, log: Callable[[str], None]) -> int | str:
    """Launch in the mode that the options select.

    Returns:
      An exit code, or a text to print.
    """
    if options.srun:
        from spmd.launch import srun

        return srun.launch(argv, settings, log)
    if options.hosts is not None:
        return _hosts(argv, options, settings, log)
    return _slurm(argv, options, settings) if options.slurm else _kubernetes(argv, options, settings)


def _hosts(argv: Sequence[str], options: argparse.Namespace, settings: Settings, log: Callable[[str], None]) -> int:
    from spmd.launch.hostfile import read_hosts
    from spmd.launch.ssh_launcher import SshConfig, launch_on_hosts

    paths = {name: value for name in ("ssh", "python", "folder") if (value := getattr(options, name)) is not None}
    config = SshConfig(read_hosts(Path(options.hosts)), options.min_hosts, variables=tuple(options.env or ()), settings=settings, **paths)
    return launch_on_hosts(argv, config, log)


def _shared(options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """The options that both schedulers take."""
    names = ("gpus_per_node", "cpus", "memory", "name", "nodes", "python")
    options_given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return {**options_given, "env": tuple(map(_pair, options.env or ())), "settings": settings}


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--env {text!r} has no value.", fix="--env NAME=VALUE.")
    return name, value


def _slurm(argv: Sequence[str], options: argparse.Namespace, settings: Settings) -> int | str:
    from spmd.launch.slurm import SlurmJob, script, submit

    mode_options = {name: getattr(options, name) for name in ("processes_per_node", "time", "partition", "account", "output", "requeue")}
    extra = tuple(option if option.startswith("-") else f"--{option}" for option in options.sbatch or ())
    config = SlurmJob(**mode_options, **_shared(options, settings), extra=extra)
    return script(argv, config) if options.dry_run else submit(argv, config)


def _kubernetes(argv: Sequence[str], options: argparse.Namespace, settings: Settings) -> str:
    from spmd.launch.kubernetes import KubernetesJob, manifest

    if options.image is None:
        raise OptionError("--kubernetes needs an image.", fix="--image registry.example/train:1.")
    mode_options = {name: getattr(options, name) for name in ("image", "namespace", "claim", "shm")}
    return manifest(argv, KubernetesJob(**mode_options, **_shared(options, settings)))
