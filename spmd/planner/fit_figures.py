"""Finds the figures of a target with which its predictions are the times that were measured.
Nothing here measures or compiles.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from spmd.planner.target import Spread, Target

PASSES = 3  # over all figures, because a program's time depends on several
WIDEST = 1e3  # the largest factor between a figure before and after
EXACT = 1e-4  # of the logarithm of predicted / measured
SHOWS = 1.02  # a program whose time changes less when a figure is doubled says nothing about it
SPREADS = {
    "flops": "matmul",
    "first_touch": "memory",
    "inside": "link",
    "attention_backward": "attention",
}  # of [spread], if named otherwise


@dataclasses.dataclass(frozen=True)
class Observation:
    """One program's time.

    Attributes:
      figure: the key of the target's file that it shows, such as "achieved.matmul" or
        "first_touch".
      predict: the program's time in seconds on a target.
      seconds: the median time.
      noise: half of the distance between the quartiles, as a share of the median.
    """

    figure: str
    predict: Callable[[Target], float]
    seconds: float
    noise: float = 0.0


def figure_of(target: Target, path: str) -> float:
    """A figure by its key.

    >>> from spmd.planner.target import load
    >>> figure_of(load("h100"), "achieved.launch"), figure_of(load("h100"), "flops.bfloat16")
    (4e-06, 989000000000000.0)
    """
    name, _, key = path.partition(".")
    value = getattr(target, name)
    return value if not key else value[key] if isinstance(value, Mapping) else getattr(value, key)


def with_figure(target: Target, path: str, number: float) -> Target:
    """The target with another figure.

    >>> from spmd.planner.target import load
    >>> figure_of(with_figure(load("h100"), "inside.latency", 1e-6), "inside.latency")
    1e-06
    """
    name, _, key = path.partition(".")
    value = getattr(target, name)
    changed = (
        number
        if not key
        else {**value, key: number}
        if isinstance(value, Mapping)
        else dataclasses.replace(value, **{key: number})
    )
    return dataclasses.replace(target, **{name: changed})


def fit(
    target: Target, observations: Sequence[Observation], *, most_share: float = 1.0
) -> tuple[Target, tuple[str, ...]]:
    """A target that predicts what was observed, and the figures that could not be fitted because no
    program depends on them.

    For each figure the geometric mean of predicted / measured of its programs becomes 1, in the
    order of the observations.

    Args:
      target: the figures to start with; those that no observation shows stay.
      most_share: the largest share in `[achieved]`.
    """
    by_figure: dict[str, list[Observation]] = {}
    for one in observations:
        by_figure.setdefault(one.figure, []).append(one)
    unknown = [
        path for path, group in by_figure.items() if not any(_shows(target, one) for one in group)
    ]
    for _ in range(PASSES):
        for path, group in by_figure.items():
            if path not in unknown:
                most = (
                    most_share
                    if path.startswith("achieved.") and path != "achieved.launch"
                    else math.inf
                )
                target = _solve(target, path, group, most)
    return target, tuple(unknown)


def spread_of(target: Target, observations: Sequence[Observation]) -> Spread:
    """How far off the figures may be: the errors of each kind's programs, and the noise of their
    times, added as squares.
    """
    squares: dict[str, list[float]] = {}
    for one in observations:
        name, _, key = one.figure.partition(".")
        kind = SPREADS.get(name, SPREADS.get(key, key))
        squares.setdefault(kind, []).append(
            math.log(one.predict(target) / one.seconds) ** 2 + one.noise**2
        )
    shares = {
        kind: round(min(max(math.sqrt(sum(values) / len(values)), 0.01), 1.0), 3)
        for kind, values in squares.items()
    }
    return dataclasses.replace(target.spread, **shares)


def _shows(target: Target, one: Observation) -> bool:
    doubled = with_figure(target, one.figure, 2 * figure_of(target, one.figure))
    return not 1 / SHOWS < one.predict(doubled) / one.predict(target) < SHOWS


def _solve(target: Target, path: str, group: Sequence[Observation], most: float) -> Target:
    """The target with the figure for which the mean logarithm of predicted / measured is 0;
    otherwise with the nearest that it may have.
    """

    def error(logarithm: float) -> float:
        changed = with_figure(target, path, math.exp(logarithm))
        return sum(math.log(one.predict(changed) / one.seconds) for one in group) / len(group)

    start = math.log(figure_of(target, path))
    low, high = start - math.log(WIDEST), min(start + math.log(WIDEST), math.log(most))
    return with_figure(target, path, math.exp(_root(error, low, min(start, high), high)))


def _root(error: Callable[[float], float], low: float, start: float, high: float) -> float:
    """Where a monotone function is 0 in an interval, or the end where it is nearest to 0: by
    secants that keep a bracket (Illinois).
    """
    rises = error(high) > error(low)
    here, there = start, low if (error(start) > 0) == rises else high
    at_here, at_there = error(here), error(there)
    if at_here * at_there > 0:
        return there
    for _ in range(40):
        if abs(at_here) < EXACT:
            break
        new = here - at_here * (there - here) / (at_there - at_here)
        at_new = error(new)
        if at_new * at_here < 0:
            there, at_there = here, at_here
        else:
            at_there /= 2
        here, at_here = new, at_new
    return here
