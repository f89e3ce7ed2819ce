"""`spmd launch`: one command, many processes."""

import argparse
import sys
from typing import Any

from spmd.errors import OptionError
from spmd.launch import cluster_command


def add_to(commands: Any) -> None:
    """Add the command to the parser of `spmd`."""
    parser = commands.add_parser(
        "launch",
        help="run a script in several processes",
        description="Run a script in several processes that train together, on this machine or on a cluster, and restart all of them when "
        "one fails.",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many processes (default: one for each GPU)")
    parser.add_argument("--simulate", type=int, metavar="K", help="simulate K CPU devices in each process, instead of GPUs")
    parser.add_argument("--devices", metavar="0,1", help="GPUs to use (default: all)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="R", help="restart at most R times after failures (default: 0)")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="seconds to save and exit after SIGTERM (default: 30)")
    parser.add_argument(
        "--stall",
        default="",
        metavar="step=60,…",
        help="seconds without progress by phase: compile, step, eval, save; inf: never",
    )
    parser.add_argument("--memory-fraction", type=float, metavar="F", help="fraction of a GPU's memory for each process")
    parser.add_argument("--no-preallocate", action="store_true", help="allocate GPU memory as needed instead of at the start")
    cluster_command.add_to(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="a module and its arguments")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python file and its arguments")
    parser.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int | str:
    from spmd.launch.local_launcher import LocalConfig, launch
    from spmd.launch.settings import Settings

    mode = cluster_command.launch_mode(options)
    settings = Settings(
        options.simulate, options.max_restarts, options.grace, options.stall, options.memory_fraction, not options.no_preallocate
    )
    argv = [*options.argv] if options.module is None else ["-m", *options.module]
    argv = [*argv, *(["--", *options.rest] if options.rest else [])]
    if mode != cluster_command.HERE:
        return cluster_command.run(argv, options, settings, _log)
    return launch(argv, LocalConfig(options.processes, _numbers(options.devices), settings), _log)


def _log(text: str) -> None:
    print(f"spmd launch: {text}", file=sys.stderr, flush=True)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise OptionError(f'--devices "{text}".', fix="GPU numbers, such as 0,1.") from None
