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
        description="Run a script in several processes that train together, on this machine or on a cluster; restart them together when "
        "one fails.",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many; one for each GPU when not given")
    parser.add_argument("--simulate", type=int, metavar="K", help="CPU devices in each process, where there is no GPU")
    parser.add_argument("--devices", metavar="0,1", help="which GPUs; all when not given")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="R", help="start again after a failure, at most so often (0)")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="seconds to save and leave after SIGTERM (30)")
    parser.add_argument(
        "--stall", default="", metavar="step=60,…", help="seconds without progress: compile, step, eval, save; inf for never"
    )
    parser.add_argument("--memory-fraction", type=float, metavar="F", help="of a GPU's memory for each process")
    parser.add_argument("--no-preallocate", action="store_true", help="take a GPU's memory as it is needed")
    cluster_command.add_to(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="a module and its arguments")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python file and its arguments")
    parser.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int | str:
    from spmd.launch.local_launcher import Machine, launch
    from spmd.launch.settings import Settings

    found = cluster_command.way(options)
    settings = Settings(
        options.simulate, options.max_restarts, options.grace, options.stall, options.memory_fraction, not options.no_preallocate
    )
    words = [*options.words] if options.module is None else ["-m", *options.module]
    words = [*words, *(["--", *options.rest] if options.rest else [])]
    if found != cluster_command.HERE:
        return cluster_command.run(words, options, settings, _say)
    return launch(words, Machine(options.processes, _numbers(options.devices), settings), _say)


def _say(text: str) -> None:
    print(f"spmd launch: {text}", file=sys.stderr, flush=True)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise OptionError(f'--devices "{text}".', fix="numbers, such as 0,1.") from None
