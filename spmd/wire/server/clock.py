"""`server_clock`: the simulated clock of a parameter server, for a loop of one's own."""

import dataclasses
import math
from typing import Any

from spmd.errors import OptionError, check_integer, did_you_mean, short_repr
from spmd.wire.server.declaration import (
    ASYNCHRONOUS,
    LOCAL,
    MODES,
    OF_MODE,
    ParameterServer,
    declared_problems,
    worker_problems,
)
from spmd.wire.server.events import Events

# options that say where a layout stores parameters, and how `fit` reads data
ELSEWHERE = ("placement", "servers", "drop_remainder")


def server_clock(
    workers: int, *, bytes: tuple[float, float] = (0.0, 0.0), **options: Any
) -> Events:
    """The simulated clock of a parameter server: which gradients arrive when, and who reads which
    version of the parameters.

    `clock.step_inputs(n)` are the events of step `n`, from 0, as data for `parameter_server`;
    `clock.metrics(n)` is the simulated time. The same options always give the same events, so a
    resumed loop continues with the next number.

    Args:
      workers: positions along the axes of `parameter_server`.
      bytes: bytes that a worker sends to one server with a gradient, and receives from it; only
        with `network`.
      options: as of `spmd.ParameterServer`: `mode` "synchronous", "asynchronous", "bounded" or
        "softsync", with `spares`, `bound`, `splits`, `compute_time`, `network`, `staleness_scale`,
        `max_staleness`, `delay_compensation`, `delay_decay`, `warmup_steps`, `fetch_every` and
        `seed`.

    Returns:
      The clock: `step_inputs(n)`, `metrics(n)` and `round(n)` of step n.

    Raises:
      OptionError: an option that is unknown, has an invalid value, or contradicts another. All are
        reported at once.

    Example:
      >>> clock = server_clock(workers=3, spares=1, compute_time=(3.0, 1.0, 2.0))
      >>> clock.step_inputs(0)["present"].tolist(), clock.metrics(0)["simulated_seconds"]
      ([False, True, True], 2.0)
    """
    check_integer(workers, "workers")
    of_local = [name for name, modes in OF_MODE.items() if set(modes) <= set(LOCAL)]
    declared_fields = [field.name for field in dataclasses.fields(ParameterServer)]
    names = [name for name in declared_fields if name not in (*ELSEWHERE, "workers", *of_local)]
    local = options.get("mode") in LOCAL
    for name in options:
        if name not in names and not (name in of_local and local):
            raise OptionError(f"server_clock: nothing reads {name}.", fix=did_you_mean(name, names))
    declared = ParameterServer(workers=int(workers), **options)
    if declared.mode not in MODES:
        why = f"server_clock: mode={short_repr(declared.mode)}."
        raise OptionError(why, fix=did_you_mean(declared.mode, ("synchronous", *ASYNCHRONOUS)))
    if declared.local:
        why = (
            f'in mode "{declared.mode}" workers have optimizers of their own, and no clock is '
            "needed."
        )
        raise OptionError(f"server_clock: {why}", fix=local_fix(declared.mode))
    problems = [*declared_problems(declared), *worker_problems(declared, workers)]
    if problems:
        lines = [f"{problem.key}: {problem.why}" for problem in problems]
        for number, problem in enumerate(problems[:-1]):
            lines[number] += f"\n    fix: {problem.fix}"
        raise OptionError("server_clock: " + "\n  ".join(lines), fix=problems[-1].fix)
    check_bytes("server_clock", bytes)
    if any(bytes) and not declared.network:
        raise OptionError(
            f"server_clock: bytes={short_repr(bytes)} without network: sending takes no time.",
            fix='network={"bandwidth": "10Gb/s", "latency": "50us"}; else leave bytes out.',
        )
    return Events(declared, int(workers), (float(bytes[0]), float(bytes[1])))


def local_fix(mode: str) -> str:
    """Return the setting to use in place of a mode without servers."""
    if mode == "elastic":
        return (
            'spmd.fit, with mode = "elastic" in [parameter_server] of its layout: spmd.wire has no '
            "elastic averaging."
        )
    return "wire.local_sgd(axes, inner=..., outer=..., every=...)."


def check_bytes(where: str, value: Any) -> None:
    """Refuse what is not bytes sent and received, two numbers from 0."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(map(_is_size, value)):
        fix = "bytes=(sent, received), such as (4e6, 4e6)."
        raise OptionError(
            f"{where}: bytes={short_repr(value)} is not a pair of numbers from 0.", fix=fix
        )


def _is_size(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # an int may be larger than any float
    try:
        return math.isfinite(value) and value >= 0
    except OverflowError:
        return False
