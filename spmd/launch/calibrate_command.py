"""`spmd calibrate`: measure the devices that are here, and write a target's file for `spmd plan
--target`.
"""

import argparse
from pathlib import Path
from typing import Any

from spmd.base.user_paths import output_path
from spmd.errors import OptionError
from spmd.render.terminal import show_progress


def add_to(commands: Any) -> None:
    """Declare `spmd calibrate`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the devices that are here, as a target for plans",
        description="Measure products, convolutions, attention, memory, collectives and launches "
        "on all "
        "devices at once, in about two "
        "minutes, and write a target's file. On a CPU the devices are simulated, and the target is "
        "one of them.",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the .toml file to write; plan with --target 8xFILE",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="simulate N devices on the CPU (default: the GPUs or TPUs that are here)",
    )
    parser.add_argument(
        "--like",
        metavar="TARGET",
        help="a target of a similar device, for what is not measured (default: found by name)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="how long programs run, once compiled (default: 60)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> str:
    import jax

    from spmd.mesh import simulate_devices
    from spmd.planner.calibration import calibrate

    # before two minutes of work
    path = output_path(options.out, "a target's file", (".toml",), overwrite=options.overwrite)
    if options.devices is not None and options.devices < 1:
        raise OptionError(
            f"--devices {options.devices}: not a number of devices, from 1.", fix="--devices 8."
        )
    if not 0 < options.seconds < float("inf"):
        raise OptionError(
            f"--seconds {options.seconds:g}: not a positive number of seconds.", fix="--seconds 60."
        )
    # Before JAX is asked for devices: the number of simulated ones is fixed when it first looks for
    # them.
    if options.devices is not None:
        simulate_devices(options.devices)
    elif jax.devices()[0].platform == "cpu":
        raise OptionError(
            "there is no GPU or TPU here.",
            fix="--devices 8 simulates devices on the CPU, and describes one of them.",
        )
    result = calibrate(like=options.like, seconds=options.seconds, say=show_progress)
    result.save(path, overwrite=options.overwrite)
    return (
        f"{result}\n\nwrote {path}: spmd plan SCRIPT --target {result.devices}x{Path(options.out)}"
    )
