"""`spmd profile SCRIPT`: train a few steps of a script on the devices that are here, and show where
their time goes.
"""

import argparse
from collections.abc import Callable
from typing import Any

from spmd.launch.script_fit import call_at_fit

NO_PROFILE = 1  # the exit code if the profiler failed, for a reason that was logged
# of the script's arguments
LEFT_OUT = ("eval_data", "eval_every", "eval_average", "checkpoint", "resume", "epochs", "watch")


def add_to(commands: Any) -> None:
    """Declare `spmd profile`."""
    parser = commands.add_parser(
        "profile",
        help="train a few steps of a script, and show where their time goes",
        description="Run SCRIPT up to its call of spmd.fit, train up to the last traced step on "
        "the "
        "devices that are here, and print where "
        "the time of a traced step goes, by kind and by layer, beside what is predicted. Nothing "
        "is evaluated, saved or logged.",
        epilog="Arguments after -- are passed to the script:  spmd profile train.py --steps 10:15 "
        "-- "
        "--width 768",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that calls spmd.fit")
    parser.add_argument(
        "--steps",
        default="10:15",
        metavar="10:15",
        help="trace the steps after the 10th up to the 15th (default: 10:15)",
    )
    parser.add_argument(
        "--target",
        metavar="8xmine.toml",
        help="predict for this target (default: the shipped one of these devices)",
    )
    parser.add_argument(
        "--folder", metavar="FOLDER", help="where the trace goes (default: a new temporary folder)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="how long to wait for the profiler (default: 60)",
    )
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> str | int:
    from spmd.planner.cluster import Cluster
    from spmd.run.callback_calls import as_callbacks, watched_metrics
    from spmd.run.step_profiler import Profile

    # before the script runs
    profile = Profile(options.steps, options.folder, options.target, options.seconds)
    if options.target is not None:
        Cluster.parse(options.target)

    def needs_evaluation(hook: Any) -> bool:
        return any(name.startswith("eval_") for name in watched_metrics(hook))

    def fit_traced_steps(fit: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        hooks = as_callbacks(arguments.get("callbacks", ()))
        options = {name: value for name, value in arguments.items() if name not in LEFT_OUT}
        options["callbacks"] = [hook for hook in hooks if not needs_evaluation(hook)]
        options |= {"steps": profile.end, "loggers": (), "progress": False, "profile": profile}
        return fit(**options).profile

    result = call_at_fit(options.script, options.script_arguments, fit_traced_steps, to="profile")
    return NO_PROFILE if result is None else str(result)
