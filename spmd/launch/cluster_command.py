"""`spmd launch` on several hosts, or under a scheduler: its options, which of them belong together, and what is done with them."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spmd.errors import OptionError
from spmd.launch.settings import Settings

HERE, HOSTS, SLURM, SRUN, KUBERNETES = "on one machine", "--hosts", "--slurm", "--srun", "--kubernetes"
BOTH = (SLURM, KUBERNETES)
MEANS = {  # what an option says something to; what is not here says something to all
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
INSTEAD = {  # what to say where an option means nothing
    ("processes", HOSTS): "processes=N after a host's name in the file",
    ("devices", HOSTS): "leave it out: all GPUs of a host are shared among its processes",
    ("processes", SLURM): "--nodes, and --processes-per-node where there is not one for each GPU",
    ("processes", SRUN): "salloc --ntasks N: the allocation says how many",
    ("processes", KUBERNETES): "--nodes: a pod is one process",
    ("processes_per_node", KUBERNETES): "--nodes: a pod is one process, which has all of its GPUs",
    ("devices", SLURM): "--gpus-per-node",
    ("devices", KUBERNETES): "--gpus-per-node",
    ("dry_run", KUBERNETES): "leave it out: the manifest is printed in any case, and nothing else is done",
    ("partition", KUBERNETES): "--namespace, which is not the same, or leave it out",
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of hosts and schedulers to the parser of `spmd launch`."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--hosts", metavar="FILE", help="on these hosts, by ssh: a line each, or jobs and their tasks (.toml)")
    ways.add_argument("--slurm", action="store_true", help="submit a job to SLURM by an sbatch script")
    ways.add_argument("--srun", action="store_true", help="inside an allocation of SLURM: run in all of its tasks")
    ways.add_argument("--kubernetes", action="store_true", help="print the manifest of a Job for Kubernetes")
    far = parser.add_argument_group("with --hosts")
    far.add_argument("--min-hosts", type=int, metavar="M", help="go on with so many where others do not answer at a restart")
    far.add_argument("--ssh", metavar="COMMAND", help="which ssh, and its options")
    far.add_argument("--folder", metavar="PATH", help="where the script is run on the hosts; this folder's path when not given")
    any_of = parser.add_argument_group("with --hosts, --slurm or --kubernetes")
    any_of.add_argument("--env", action="append", metavar="NAME=VALUE", help="a variable of all processes; may be repeated")
    any_of.add_argument("--python", metavar="PATH", help="the interpreter: this one (hosts, SLURM), python (Kubernetes)")
    both = parser.add_argument_group("with --slurm or --kubernetes")
    both.add_argument("--nodes", type=int, metavar="N", help="how many nodes, or pods (1)")
    both.add_argument("--gpus-per-node", type=int, metavar="G", help="of each node or pod")
    both.add_argument("--cpus", type=int, metavar="C", help="of each process")
    both.add_argument("--memory", metavar="M", help="of each node, such as 64G (SLURM) or 64Gi (Kubernetes)")
    both.add_argument("--name", help="of the job; the script's when not given")
    slurm = parser.add_argument_group("with --slurm")
    slurm.add_argument("--dry-run", action="store_true", help="print the script, and do no more")
    slurm.add_argument("--processes-per-node", type=int, metavar="P", help="one for each GPU when not given, or 1")
    slurm.add_argument("--time", metavar="T", help="the limit, such as 30 or 12:00:00 or 1-12:00:00")
    slurm.add_argument("--partition", metavar="NAME", help="where the job runs")
    slurm.add_argument("--account", metavar="NAME", help="who pays")
    slurm.add_argument("--output", metavar="PATH", help="the file for what it prints, such as runs/%%j.log")
    slurm.add_argument("--requeue", action="store_true", help="a job that was asked to end, and has saved, goes back into the queue")
    slurm.add_argument("--sbatch", action="append", metavar="OPTION", help="another of sbatch's, such as constraint=a100; may be repeated")
    pods = parser.add_argument_group("with --kubernetes")
    pods.add_argument("--image", help="the container's: Python, spmd, and the script")
    pods.add_argument("--namespace", help="where the job runs")
    pods.add_argument("--claim", metavar="NAME:/PATH", help="a volume claim for checkpoints, and where it is mounted")
    pods.add_argument("--shm", metavar="SIZE", help="of /dev/shm, such as 8Gi")


def way(options: argparse.Namespace) -> str:
    """Which way, if any. Options that would do nothing there are refused, with what takes their place."""
    chosen = {HOSTS: options.hosts is not None, SLURM: options.slurm, SRUN: options.srun, KUBERNETES: options.kubernetes}
    found = next((name for name, is_chosen in chosen.items() if is_chosen), HERE)
    for name, ways in MEANS.items():
        value = getattr(options, name)
        if value is not None and value is not False and found not in ways:
            instead = INSTEAD.get((name, found), " or ".join(["leave it out", *(word for word in ways if word != HERE)]))
            raise OptionError(f"--{name.replace('_', '-')} means nothing {_with(found)}.", fix=f"{instead}.")
    return found


def _with(found: str) -> str:
    return found if found == HERE else f"with {found}"


def run(words: Sequence[str], options: argparse.Namespace, settings: Settings, say: Callable[[str], None]) -> int | str:
    """Do what the chosen way of launching does.

    Returns:
      An exit code, or a text to print.
    """
    if options.srun:
        from spmd.launch import srun

        return srun.launch(words, settings, say)
    if options.hosts is not None:
        return _hosts(words, options, settings, say)
    return _slurm(words, options, settings) if options.slurm else _kubernetes(words, options, settings)


def _hosts(words: Sequence[str], options: argparse.Namespace, settings: Settings, say: Callable[[str], None]) -> int:
    from spmd.launch.hostfile import read_hosts
    from spmd.launch.ssh_launcher import Remote, launch_on

    given = {name: value for name in ("ssh", "python", "folder") if (value := getattr(options, name)) is not None}
    how = Remote(read_hosts(Path(options.hosts)), options.min_hosts, variables=tuple(options.env or ()), settings=settings, **given)
    return launch_on(words, how, say)


def _shared(options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """What both schedulers are told."""
    taken = ("gpus_per_node", "cpus", "memory", "name", "nodes", "python")
    given = {name: getattr(options, name) for name in taken if getattr(options, name) is not None}
    return {**given, "env": tuple(map(_pair, options.env or ())), "settings": settings}


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--env {text!r} has no value.", fix="--env NAME=VALUE.")
    return name, value


def _slurm(words: Sequence[str], options: argparse.Namespace, settings: Settings) -> int | str:
    from spmd.launch.slurm import Slurm, script, submit

    own = {name: getattr(options, name) for name in ("processes_per_node", "time", "partition", "account", "output", "requeue")}
    extra = tuple(option if option.startswith("-") else f"--{option}" for option in options.sbatch or ())
    how = Slurm(**own, **_shared(options, settings), extra=extra)
    return script(words, how) if options.dry_run else submit(words, how)


def _kubernetes(words: Sequence[str], options: argparse.Namespace, settings: Settings) -> str:
    from spmd.launch.kubernetes import Kubernetes, manifest

    if options.image is None:
        raise OptionError("--kubernetes runs an image, and none is given.", fix="--image registry.example/train:1.")
    own = {name: getattr(options, name) for name in ("image", "namespace", "claim", "shm")}
    return manifest(words, Kubernetes(**own, **_shared(options, settings)))
