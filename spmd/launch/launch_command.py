"""`spmd launch`: one command, many processes."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd.errors import OptionError

if TYPE_CHECKING:
    from spmd.launch.settings import Settings


def add_to(commands: Any) -> None:
    """Add the command to the parser of `spmd`."""
    parser = commands.add_parser(
        "launch",
        help="run a script in several processes",
        description="Run a script in several processes on this machine that train together; restart them together when one fails.",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many; one for each GPU when not given")
    parser.add_argument("--simulate", type=int, metavar="K", help="CPU devices in each process, where there is no GPU")
    parser.add_argument("--devices", metavar="0,1", help="which GPUs; all when not given")
    parser.add_argument("--hosts", metavar="FILE", help="on these hosts, by ssh: a line each, or jobs and their tasks (.toml)")
    parser.add_argument("--min-hosts", type=int, metavar="M", help="go on with so many where others do not answer at a restart")
    parser.add_argument("--ssh", metavar="COMMAND", help="which ssh, and its options")
    parser.add_argument("--python", metavar="PATH", help="the interpreter on the hosts; this one's path when not given")
    parser.add_argument("--folder", metavar="PATH", help="where the script is run on the hosts; this folder's path when not given")
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all hosts; may be repeated")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="R", help="start again after a failure, at most so often (0)")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="seconds to save and leave after SIGTERM (30)")
    parser.add_argument(
        "--stall", default="", metavar="step=60,…", help="seconds without progress: compile, step, eval, save; inf for never"
    )
    parser.add_argument("--memory-fraction", type=float, metavar="F", help="of a GPU's memory for each process")
    parser.add_argument("--no-preallocate", action="store_true", help="take a GPU's memory as it is needed")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python file, or -m and a module; and its arguments"
    )
    parser.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from spmd.launch.machine import Machine, launch
    from spmd.launch.settings import Settings

    settings = Settings(
        options.simulate, options.max_restarts, options.grace, options.stall, options.memory_fraction, not options.no_preallocate
    )
    words = [*options.words, *(["--", *options.rest] if options.rest else [])]
    if options.hosts is not None:
        return _on_hosts(options, words, settings)
    _refuse(options, ("min_hosts", "ssh", "python", "folder", "env"), "without --hosts")
    return launch(words, Machine(options.processes, _numbers(options.devices), settings), _say)


def _on_hosts(options: argparse.Namespace, words: list[str], settings: "Settings") -> int:
    from spmd.launch.cluster import read_hosts
    from spmd.launch.remote import Remote, launch_on

    _refuse(options, ("processes", "devices"), "with --hosts, whose file says it")
    given = {name: value for name in ("ssh", "python", "folder") if (value := getattr(options, name)) is not None}
    how = Remote(read_hosts(Path(options.hosts)), options.min_hosts, variables=tuple(options.env), settings=settings, **given)
    return launch_on(words, how, _say)


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Options that would say nothing are not ignored."""
    for name in names:
        if getattr(options, name) not in (None, []):
            raise OptionError(f"--{name.replace('_', '-')} says nothing {why}.\n    cure: leave it out.")


def _say(text: str) -> None:
    print(f"spmd launch: {text}", file=sys.stderr, flush=True)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise OptionError(f'--devices "{text}".\n    cure: numbers, such as 0,1.') from None
