"""`spmd plan SCRIPT` and `spmd search SCRIPT`: plan a script's training for hardware that need not
be present.

The script runs normally up to its call of `spmd.fit`; the arguments of that call are planned, and
nothing is trained.
"""

import argparse
import functools
import os
import sys
from typing import Any

from spmd.base.deprecated import warn
from spmd.base.user_paths import output_path
from spmd.errors import OptionError
from spmd.launch.script_fit import call_at_fit
from spmd.layout.layout_files import load_registered
from spmd.planner.cluster import Cluster
from spmd.planner.target import load as load_target, shipped
from spmd.render.terminal import paint, show_lines, show_progress

FOUND_NOTHING = 2  # the exit code of a search in which nothing fits
# the arguments of `fit` that are also arguments of `spmd.plan`
PLANNED = (
    "model",
    "metrics",
    "seed",
    "loss",
    "optimizer",
    "layout",
    "mesh",
    "precision",
    "accumulate",
)


def add_to(commands: Any) -> None:
    """Declare `spmd targets`, `spmd plan` and `spmd search`."""
    targets = commands.add_parser(
        "targets",
        help="list the known hardware",
        description="List the hardware that `spmd plan` knows.",
    )
    targets.set_defaults(run=_targets)
    parser = _script_parser(
        commands,
        "plan",
        "predict the memory and the step time of a script's training",
        "Run SCRIPT up to its call of spmd.fit, and plan that training step for a target. Nothing "
        "is trained; no accelerator is used.",
    )
    parser.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="replace the script's layout: a shipped name or a TOML file",
    )
    parser.add_argument("--mesh", metavar="data=8,model=8", help="replace the script's mesh")
    parser.add_argument(
        "--accumulate", type=int, metavar="N", help="replace the script's number of microbatches"
    )
    parser.add_argument("--explain", metavar="PATH", help="print only what concerns this parameter")
    parser.add_argument(
        "--placements", action="store_true", help="print only every array and its devices"
    )
    parser.add_argument("--json", action="store_true", help="print only the figures, as JSON")
    parser.add_argument(
        "--fixes", action="store_true", help="if it does not fit, plan changes that make it fit"
    )
    parser.add_argument(
        "--changes",
        action="store_true",
        help="plan known changes to the largest costs: up to 8 more programs",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        metavar="1e12",
        help="also print what a run of this many tokens costs",
    )
    parser.add_argument("--rows", type=float, metavar="N", help="the same, of N rows")
    parser.add_argument("--steps", type=float, metavar="N", help="the same, of N steps")
    parser.add_argument(
        "--price",
        type=float,
        metavar="2.50",
        help="the price of a device-hour, for the cost of the run in money",
    )
    # the old name of --fixes
    parser.add_argument("--cures", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="also write what is printed of the report to this .html or .txt file; an existing one "
        "is replaced",
    )
    parser.set_defaults(run=_plan)
    parser = _script_parser(
        commands,
        "search",
        "find the fastest layout that fits a script's training",
        "Run SCRIPT up to its call of spmd.fit, and plan that training step under many layouts and "
        "meshes. Nothing is trained.",
    )
    parser.add_argument(
        "--candidates",
        default="exact",
        metavar="LAYOUTS",
        help='"exact", "all", or a comma-separated list of layouts (default: exact)',
    )
    parser.add_argument(
        "--compiles",
        type=int,
        default=24,
        metavar="N",
        help="the most programs to compile (default: 24)",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        metavar="SECONDS",
        help="start no further program after this time",
    )
    parser.add_argument(
        "--compiler-options",
        action="store_true",
        help="also try options of XLA on the fastest layouts, for GPUs: up to 10 more programs",
    )
    parser.add_argument("--save", metavar="FILE", help="write the best layout to this .toml file")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.set_defaults(run=_search)


def _script_parser(commands: Any, name: str, summary: str, description: str) -> Any:
    """A command that runs a script up to its call of `fit`, with the options that all such commands
    take.
    """
    epilog = (
        f"Arguments after -- are passed to the script:  spmd {name} train.py --target 8xh100 -- "
        "--width 768"
    )
    parser = commands.add_parser(name, help=summary, description=description, epilog=epilog)
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that calls spmd.fit")
    parser.add_argument(
        "--target",
        required=True,
        metavar="8x8xh100",
        help="nodes x devices x kind (`spmd targets` lists kinds), or a TOML file;"
        " sites x nodes x devices x kind@1Gb/s,30ms for several sites",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="ROWS", help="replace the script's batch size"
    )
    parser.add_argument("--precision", metavar="bfloat16", help="replace the script's precision")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit for each compilation (default: 600)",
    )
    return parser


def _targets(options: argparse.Namespace) -> str:
    del options
    # jax takes a second to import, and the other commands do without
    from spmd.base.tree import format_bytes

    lines = []
    for name in shipped():
        target = load_target(name)
        speed = (
            f"{target.rate('bfloat16') / 1e12:,.4g} TFLOP/s bfloat16, "
            f"{target.memory_bandwidth / 1e9:,.0f} GB/s"
        )
        lines.append(f"{name:<10}{target.title}: {format_bytes(target.memory)}, {speed}")
    return "\n".join(lines)


def _plan(options: argparse.Namespace) -> str:
    from spmd.planner.planning import REPORT, plan
    from spmd.planner.run_cost import check_run
    from spmd.planner.text_report import with_sections

    others = [name for name in ("explain", "placements", "json") if getattr(options, name)]
    if options.cures:  # words: the old option
        warn("--cures", "--fixes")
    options.fixes |= options.cures  # words: the old option
    if len(others) > 1:
        raise OptionError(
            f"--{others[0]} and --{others[1]} both replace the report.", fix="one of the two."
        )
    for name in ("fixes", "changes"):
        if getattr(options, name) and others:
            raise OptionError(
                f"--{name} adds to the report, which --{others[0]} replaces.", fix="one of the two."
            )
    length = {name: getattr(options, name) for name in ("tokens", "rows", "steps", "price")}
    check_run(**length, optional=True)
    if any(length.values()) and others not in ([], ["json"]):
        raise OptionError(
            f"the cost of a run is printed after the report, which --{others[0]} replaces.",
            fix="one of the two.",
        )
    # before the script runs
    path = None
    if options.save:
        path = output_path(options.save, *REPORT, overwrite=True)
    step, script_steps = _step_arguments(options)
    result = plan(**step, timeout=options.timeout, say=show_progress)
    show_progress("")
    if not any(length.values()) and not others:
        length["steps"] = script_steps
    sections = {}
    figures = {}
    if any(length.values()):
        cost = result.cost(**length)
        sections["Cost of a run"] = str(cost)
        figures["cost"] = cost.figures
    if options.fixes:
        sections["Fixes"] = _describe_fixes(result, options.timeout)
        show_progress("")
    if options.changes:
        sections["Changes"] = str(
            result.changes(**length, timeout=options.timeout, say=show_progress)
        )
        show_progress("")
    if path is not None:
        # To standard error: standard output may be JSON that another program reads.
        print(f"wrote {result.save(path, sections)}", file=sys.stderr)
    if options.explain:
        return result.explain(options.explain)
    if options.placements:
        return result.placements()
    if options.json:
        return result.to_json(**figures)
    colour = {"fits": "green", "tight": "yellow", "DOES NOT FIT": "red"}[result.memory.word]
    return paint(with_sections(str(result), sections), {result.memory.word: colour}, sys.stdout)


def _describe_fixes(result: Any, timeout: float) -> str:
    fixes = result.fixes(timeout=timeout, say=show_progress)
    if fixes:
        first_line = "each planned with those before it that help:"
    elif result.fits:
        first_line = "the step fits: there is nothing to fix."
    else:
        first_line = "no change is known that would make it fit."
    return "\n".join([first_line, *map(str, fixes)])


def _search(options: argparse.Namespace) -> str | tuple[str, int]:
    from spmd.planner.candidates import chosen_layouts
    from spmd.planner.layout_search import search

    names = [name.strip() for name in options.candidates.split(",")]
    candidates = names[0] if names in (["exact"], ["all"]) else names
    # Before the script runs, which may take long.
    chosen_layouts(candidates)
    path = None
    if options.save:
        path = output_path(options.save, "a layout file", (".toml",), overwrite=options.overwrite)
    step, _ = _step_arguments(options)
    # The search chooses these itself.
    for name in ("layout", "mesh", "accumulate"):
        step.pop(name, None)
    result = search(
        **step,
        candidates=candidates,
        compiles=options.compiles,
        max_seconds=options.max_seconds,
        compiler_options=options.compiler_options,
        timeout=options.timeout,
        say=show_lines,
    )
    show_lines("")
    text = f"{result}\n\n{result.conclusion()}"
    if not result.plans:
        return paint(text, {result.verdict.partition(" ")[0]: "red"}, sys.stdout), FOUND_NOTHING
    if path is not None:
        print(f"wrote {result.save(path, overwrite=options.overwrite)}", file=sys.stderr)
    return paint(text, {"best": "green"}, sys.stdout)


def _step_arguments(options: argparse.Namespace) -> tuple[dict[str, Any], int | None]:
    """The step that a script trains on the target, as arguments of `spmd.plan`, and how many it
    trains, if that is known.

    Raises:
      SpmdError: an option is invalid; there is no such script, or it does not call `spmd.fit`.
        Options are checked before the script runs; a layout that names an unknown codec or
        reduction, which the script may register, after it.
    """
    import jax

    from spmd.data.device_dataset import Resident
    from spmd.data.sources import as_source
    from spmd.train.model_setup import check_numbers

    cluster = Cluster.parse(options.target)
    overrides = {}
    for name in ("layout", "mesh", "precision", "accumulate", "batch_size"):
        value = getattr(options, name, None)
        if value is not None:
            overrides[name] = value
    check_numbers(overrides.get("precision", "float32"), overrides.get("accumulate", 1))
    if not os.environ.get("JAX_PLATFORMS"):
        # no accelerator is used, and the GPU plugin logs errors if there is none
        jax.config.update("jax_platforms", "cpu")
    script = functools.partial(call_at_fit, options.script, options.script_arguments, _arguments)
    if "layout" in overrides:
        overrides["layout"], arguments = load_registered(overrides["layout"], script)
    else:
        arguments = script()
    if "layout" in overrides and "mesh" not in overrides:
        # The mesh of the script belongs to its layout.
        arguments.pop("mesh", None)
    arguments |= overrides
    data = arguments["data"]
    if isinstance(data, Resident):
        data = data.arrays
    reader = as_source(
        data,
        batch_size=arguments.get("batch_size"),
        shuffle=arguments.get("shuffle"),
        seed=arguments.get("seed", 0),
        # A plan needs only shapes.
        short_ok=True,
    )
    step = {name: arguments[name] for name in PLANNED if name in arguments}
    step |= {"batch": reader.sample(), "target": cluster}
    steps = arguments.get("steps")
    if not steps and reader.steps_per_epoch:
        steps = (arguments.get("epochs") or 1) * reader.steps_per_epoch
    return step, steps or None


def _arguments(fit: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `fit`, which is not made."""
    del fit
    return arguments
