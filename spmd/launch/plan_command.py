"""`spmd plan SCRIPT` and `spmd search SCRIPT`: what a script would train, on hardware that need not be there.

The script runs as it would, up to its call of `spmd.fit`; what that was given is planned, and nothing is trained.
"""

import argparse
import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd.deprecated import warn
from spmd.errors import OptionError, SpmdError
from spmd.layout.toml_reader import load
from spmd.planner.target import Cluster, shipped
from spmd.planner.target import load as load_target


class _Caught(BaseException):
    """Ends a script at its call of `fit`; not an Exception, so that a handler of errors does not take it."""


def add_to(commands: Any) -> None:
    """Declare `spmd plan` and `spmd targets`."""
    targets = commands.add_parser("targets", help="list the hardware that plans know", description="List the hardware that plans know.")
    targets.set_defaults(run=_targets)
    parser = _script_parser(
        commands,
        "plan",
        "say what a script's training will need, and how long a step will take",
        "Run SCRIPT up to its call of spmd.fit, and plan that step for a target. Nothing is trained; no accelerator is used.",
    )
    parser.add_argument("--layout", metavar="LAYOUT", help="in place of the script's: a shipped name or a TOML file")
    parser.add_argument("--mesh", metavar="data=8,model=8", help="in place of the script's")
    parser.add_argument("--accumulate", type=int, metavar="N", help="in place of the script's")
    parser.add_argument("--explain", metavar="PATH", help="print everything about this parameter instead")
    parser.add_argument("--placements", action="store_true", help="print every array and its devices instead")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON instead")
    parser.add_argument("--fixes", action="store_true", help="where it does not fit, plan what would make it fit")
    parser.add_argument("--cures", action="store_true", help=argparse.SUPPRESS)  # the old name of --fixes
    parser.add_argument("--save", metavar="FILE", help="write the report there as well: .html or .txt")
    parser.set_defaults(run=_plan)
    parser = _script_parser(
        commands,
        "search",
        "find the fastest layout that fits for what a script trains",
        "Run SCRIPT up to its call of spmd.fit, and plan that step under many layouts and meshes. Nothing is trained.",
    )
    parser.add_argument(
        "--candidates", default="exact", metavar="LAYOUTS", help='"exact", "all", or layouts with commas between them ("exact")'
    )
    parser.add_argument("--compiles", type=int, default=24, metavar="N", help="programs that are compiled at most (24)")
    parser.add_argument("--save", metavar="FILE", help="write the best layout there: .toml")
    parser.set_defaults(run=_search)


def _script_parser(commands: Any, name: str, told: str, description: str) -> Any:
    """A command that runs a script up to its call of `fit`, with what all of these take."""
    epilog = f"What comes after -- is given to the script:  spmd {name} train.py --target 8xh100 -- --width 768"
    parser = commands.add_parser(name, help=told, description=description, epilog=epilog)
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that calls spmd.fit")
    parser.add_argument(
        "--target", required=True, metavar="8x8xh100", help="nodes x devices x kind (`spmd targets` lists kinds), or a TOML file"
    )
    parser.add_argument("--batch-size", type=int, metavar="ROWS", help="in place of the script's")
    parser.add_argument("--precision", metavar="bfloat16", help="in place of the script's")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="what the compiler may take for a program (600)")
    return parser


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
    others = [name for name in ("explain", "placements", "json") if getattr(options, name)]
    if options.cures:
        warn("--cures", "--fixes")
    options.fixes |= options.cures
    if options.fixes and others:
        raise OptionError(f"--fixes are printed behind the report, and --{others[0]} prints something else.", fix="one of the two.")
    found = plan_of(options.script, options.rest, vars(options))
    if options.save:
        found.save(options.save)
    if options.explain:
        return found.explain(options.explain)
    if options.placements:
        return found.placements()
    if options.json:
        return found.to_json()
    lines = [str(found)]
    if options.fixes and not found.fits:
        lines += ["", "FIXES, each planned with those before it that help", *map(str, found.fixes(timeout=options.timeout, say=_show()))]
        _show()("")
    return "\n".join(lines)


def _search(options: argparse.Namespace) -> str:
    from spmd.planner.candidates import chosen_layouts
    from spmd.planner.layout_search import search

    names = [name.strip() for name in options.candidates.split(",")]
    given = names[0] if names in (["exact"], ["all"]) else names
    chosen_layouts(given)  # before the script runs
    if options.save and not options.save.endswith(".toml"):
        raise OptionError(f'"{options.save}" is no name for a layout.', fix="one that ends in .toml.")
    model, sample, kept, cluster = _step_of(options.script, options.rest, vars(options))
    kept = {name: value for name, value in kept.items() if name not in ("layout", "mesh", "accumulate")}  # these are searched
    more = {"candidates": given, "compiles": options.compiles, "timeout": options.timeout, "say": _show()}
    found = search(model, sample, **kept, target=cluster, **more)
    _show()("")
    if options.save and not found.plans:
        raise OptionError(f"{found}\n\nNothing was written to {options.save}.")
    if options.save:
        found.save(options.save)
    return str(found)


def plan_of(script: str, arguments: list[str], options: dict[str, Any]) -> Any:
    """The plan of the step that a script trains.

    Raises:
      SpmdError: an option that is not right, told before the script runs; there is no such script, or it does not call `spmd.fit`.
    """
    from spmd.planner.planning import plan

    model, sample, kept, cluster = _step_of(script, arguments, options)
    found = plan(model, sample, **kept, target=cluster, timeout=options["timeout"], say=_show())
    _show()("")
    return found


def _step_of(script: str, arguments: list[str], options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any], Cluster]:
    """What a script trains: its model, the shapes of a batch, the options of `fit` that a plan takes, and the target."""
    import jax

    from spmd.data.device_dataset import Resident
    from spmd.data.sources import as_source
    from spmd.train.model_setup import check_numbers

    cluster = Cluster.parse(options["target"])
    names = ("layout", "mesh", "precision", "accumulate", "batch_size")
    chosen = {name: options[name] for name in names if options.get(name) is not None}
    check_numbers(chosen.get("precision", "float32"), chosen.get("accumulate", 1))
    if "layout" in chosen:
        chosen["layout"] = load(chosen["layout"])
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # no accelerator is used, and the GPU compiler's plugin complains where there is none
    given = caught(script, arguments)
    if "layout" in chosen and "mesh" not in chosen:
        given.pop("mesh", None)  # it went with the script's layout
    given |= chosen
    data = given["data"].arrays if isinstance(given["data"], Resident) else given["data"]
    reader = as_source(data, batch_size=given.get("batch_size"), shuffle=given.get("shuffle"), seed=given.get("seed", 0))
    taken = ("metrics", "seed", "loss", "optimizer", "layout", "mesh", "precision", "accumulate")
    return given["model"], reader.sample(), {name: given[name] for name in taken if name in given}, cluster


def caught(script: str, arguments: list[str]) -> dict[str, Any]:
    """What a script gives to `spmd.fit` the first time, by name. What it prints goes to standard error.

    Raises:
      OptionError: there is no such script, it fails, or it ends without a call.
    """
    from spmd import api

    path, public, given = Path(script), sys.modules["spmd"], {}
    if not path.is_file():
        raise OptionError(f'there is no file "{script}".', fix="a Python script that calls spmd.fit.")
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
        fix = "spmd.plan(...) from Python, for a loop of one's own."
        raise OptionError(f"{script} never called spmd.fit, so there is nothing to plan.", fix=fix)
    return given


def _show() -> Callable[[str], None]:
    """Says on a terminal what goes on, in one line."""
    if not sys.stderr.isatty():
        return lambda line: None
    return lambda line: print(f"\r\x1b[K{line[:120]}", end="", file=sys.stderr, flush=True)
