"""`spmd plan SCRIPT`: the plan of what a script would train, for hardware that need not be there.

The script runs as it would, up to its call of `spmd.fit`; what that was given is planned, and nothing is trained.
"""

import argparse
import contextlib
import inspect
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, SpmdError
from spmd.layout.toml import load
from spmd.preflight.target import Cluster, shipped
from spmd.preflight.target import load as load_target


class _Caught(BaseException):
    """Ends a script at its call of `fit`; not an Exception, so that a handler of errors does not take it."""


def add_to(commands: Any) -> None:
    """Declare `spmd plan` and `spmd targets`."""
    targets = commands.add_parser("targets", help="list the hardware that plans know", description="List the hardware that plans know.")
    targets.set_defaults(run=_targets)
    parser = commands.add_parser(
        "plan",
        help="say what a script's training will need, and how long a step will take",
        description="Run SCRIPT up to its call of spmd.fit, and plan that step for a target. Nothing is trained; no accelerator is used.",
        epilog="What comes after -- is given to the script:  spmd plan train.py --target 8xh100 -- --width 768",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that calls spmd.fit")
    parser.add_argument(
        "--target", required=True, metavar="8x8xh100", help="nodes x devices x kind (`spmd targets` lists kinds), or a TOML file"
    )
    parser.add_argument("--layout", metavar="LAYOUT", help="in place of the script's: a shipped name or a TOML file")
    parser.add_argument("--mesh", metavar="data=8,model=8", help="in place of the script's")
    parser.add_argument("--batch-size", type=int, metavar="ROWS", help="in place of the script's")
    parser.add_argument("--precision", metavar="bfloat16", help="in place of the script's")
    parser.add_argument("--accumulate", type=int, metavar="N", help="in place of the script's")
    parser.add_argument("--explain", metavar="PATH", help="print everything about this parameter instead")
    parser.add_argument("--placements", action="store_true", help="print every array and its devices instead")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON instead")
    parser.add_argument("--save", metavar="FILE", help="write the report there as well: .html or .txt")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="what the compiler may take (600)")
    parser.set_defaults(run=_plan)


def _targets(options: argparse.Namespace) -> str:
    del options
    from spmd.tree import format_bytes  # jax takes a second to import, and the other commands do without

    lines = []
    for name in shipped():
        one = load_target(name)
        speed = f"{one.rate('bfloat16') / 1e12:,.4g} TFLOP/s bfloat16, {one.memory_bandwidth / 1e9:,.0f} GB/s"
        lines.append(f"{name:<10}{one.title}: {format_bytes(one.memory)}, {speed}")
    return "\n".join(lines)


def _plan(options: argparse.Namespace) -> str:
    found = plan_of(options.script, options.rest, vars(options))
    if options.save:
        found.save(options.save)
    if options.explain:
        return found.explain(options.explain)
    if options.placements:
        return found.placements()
    return found.to_json() if options.json else str(found)


def plan_of(script: str, arguments: list[str], options: dict[str, Any]) -> Any:
    """The plan of the step that a script trains.

    Raises:
      SpmdError: an option that is not right, told before the script runs; there is no such script, or it does not call `spmd.fit`.
    """
    import jax

    from spmd.data.loader import source
    from spmd.data.resident import Resident
    from spmd.preflight.planned import plan
    from spmd.train.placed import Options

    cluster = Cluster.parse(options["target"])
    chosen = {name: options[name] for name in ("layout", "mesh", "precision", "accumulate", "batch_size") if options[name] is not None}
    Options(chosen.get("precision", "float32"), chosen.get("accumulate", 1))
    if "layout" in chosen:
        chosen["layout"] = load(chosen["layout"])
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # no accelerator is used, and the GPU compiler's plugin complains where there is none
    given = caught(script, arguments)
    if "layout" in chosen and "mesh" not in chosen:
        given.pop("mesh", None)  # it went with the script's layout
    given |= chosen
    data = given["data"].arrays if isinstance(given["data"], Resident) else given["data"]
    reader = source(data, batch_size=given.get("batch_size"), shuffle=given.get("shuffle"), seed=given.get("seed", 0))
    names = ("metrics", "seed", "loss", "optimizer", "layout", "mesh", "precision", "accumulate")
    kept = {name: given[name] for name in names if name in given}
    show = _progress if sys.stderr.isatty() else (lambda line: None)
    found = plan(given["model"], reader.sample(), **kept, target=cluster, timeout=options["timeout"], say=show)
    show("")
    return found


def caught(script: str, arguments: list[str]) -> dict[str, Any]:
    """What a script gives to `spmd.fit` the first time, by name. What it prints goes to standard error.

    Raises:
      OptionError: there is no such script, it fails, or it ends without a call.
    """
    from spmd import api

    path, public, given = Path(script), sys.modules["spmd"], {}
    if not path.is_file():
        raise OptionError(f'there is no file "{script}".\n    cure: a Python script that calls spmd.fit.')
    argv, paths, folder, real = sys.argv, sys.path[:], Path.cwd(), api.fit

    def fit(*args: Any, **options: Any) -> Any:
        try:
            given.update(inspect.signature(real).bind(*args, **options).arguments)
        except TypeError as error:
            raise OptionError(f"{script} calls spmd.fit as it cannot be called: {error}.") from error
        raise _Caught

    sys.argv, sys.path = [script, *arguments], [str(path.resolve().parent), *paths]
    api.fit = public.fit = fit  # type: ignore[attr-defined]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(script, run_name="__main__")
    except _Caught:
        pass
    except SpmdError:
        raise
    except (Exception, SystemExit) as error:
        if not given:  # otherwise what comes after the call does not matter
            why = f"ended ({error.code})" if isinstance(error, SystemExit) else f"fails, {type(error).__name__}: {error},"
            raise OptionError(f"{script} {why} before it called spmd.fit.") from error
    finally:
        sys.argv, sys.path = argv, paths
        os.chdir(folder)
        api.fit = public.fit = real  # type: ignore[attr-defined]
    if not given:
        cure = "spmd.plan(...) from Python, for a loop of one's own."
        raise OptionError(f"{script} never called spmd.fit, so there is nothing to plan.\n    cure: {cure}")
    return given


def _progress(line: str) -> None:
    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
