"""The choices of hyper-parameters, the values that each trial has, and the steps that it gets."""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.base.tracebacks import trims_tracebacks
from spmd.base.tree import describe
from spmd.errors import OptionError, check_integer, type_name

SEED = "seed"  # a hyper-parameter that every trial has
MANY = 10_000  # combinations of a grid without an explicit number of trials
# The compiled program takes hyper-parameters as float32.
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Between:
    """A number between two others, evenly or in its logarithm."""

    low: float
    high: float
    log: bool

    def at(self, place: float) -> float:
        """The value at a place from 0 to 1, as float32 has it, so that it is the same wherever it
        goes.
        """
        if self.log:
            low = math.log(self.low)
            value = math.exp(low + place * (math.log(self.high) - low))
        else:
            value = self.low + place * (self.high - self.low)
        return float(np.float32(value))

    def __str__(self) -> str:
        name = "uniform"
        if self.log:
            name = "log_uniform"
        return f"{name}({self.low:g}, {self.high:g})"


def uniform(low: float, high: float) -> Between:
    """A hyper-parameter that is drawn evenly from low to high.

    Args:
      low, high: the bounds.

    Returns:
      What `space=` of `sweep` takes.

    Raises:
      OptionError: not two finite numbers, the smaller one first.

    Example:
      >>> print(uniform(0.0, 0.5))
      uniform(0, 0.5)
    """
    return _between("uniform", low, high, log=False)


def log_uniform(low: float, high: float) -> Between:
    """A hyper-parameter whose logarithm is drawn evenly, as a learning rate's is.

    Args:
      low, high: the bounds, above 0.

    Returns:
      What `space=` of `sweep` takes.

    Raises:
      OptionError: not two finite numbers above 0, the smaller one first.

    Example:
      >>> log_uniform(1e-4, 1e-2).at(0.5)
      0.0010000000474974513
    """
    return _between("log_uniform", low, high, log=True)


def _between(name: str, low: float, high: float, *, log: bool) -> Between:
    numbers = all(
        isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
        for x in (low, high)
    )
    if (
        not numbers
        or not low < high
        or not abs(low) <= LARGEST >= abs(high)
        or (log and not low >= SMALLEST)
    ):
        bounds = "two finite numbers"
        if log:
            bounds += " above 0"
        raise OptionError(
            f"{name}({low!r}, {high!r}).",
            fix=f"{bounds}, the smaller one first, as float32 has them.",
        )
    return Between(float(low), float(high), log)


def check_space(space: Any) -> dict[str, Any]:
    """The space as values to choose from and distributions, by name.

    Raises:
      OptionError: no space, or something in it that has no values.
    """
    if not isinstance(space, Mapping) or not space:
        fix = 'such as {"learning_rate": spmd.log_uniform(1e-4, 1e-1), "width": [64, 128]}.'
        raise OptionError(f"space={space!r}: wanted names and what each may be.", fix=fix)
    checked = {name: _check_choices(name, choices) for name, choices in space.items()}
    seeds = checked.get(SEED, [0])
    if isinstance(seeds, Between) or not all(
        type(seed) is int and 0 <= seed < 2**32 for seed in seeds
    ):
        raise OptionError(
            f"space: seed={seeds}.", fix="whole numbers from 0 to 2**32 - 1, such as range(64)."
        )
    return checked


def _check_choices(name: Any, choices: Any) -> Between | list:
    """The choices of one hyper-parameter: a distribution, or values, floats as float32 has them."""
    if not isinstance(name, str) or not name.isidentifier():
        raise OptionError(
            f"space: {name!r} is no name of an argument.",
            fix='such as {"learning_rate": [0.1, 0.01]}.',
        )
    if isinstance(choices, Between):
        return choices
    if (
        not isinstance(choices, Sequence | np.ndarray)
        or isinstance(choices, str)
        or not len(choices)
    ):
        fix = "a list of values, spmd.uniform(...) or spmd.log_uniform(...)."
        raise OptionError(f"space: {name}={choices!r} is {type_name(choices)}.", fix=fix)
    values = []
    for value in choices:
        # numpy 2 writes np.float64(0.1), and trials are compared by text, too.
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and (math.isnan(value) or LARGEST < abs(value) < math.inf):
            raise OptionError(
                f"space: {name}={value!r} is no number that float32 has.",
                fix="leave it out of the list.",
            )
        if isinstance(value, np.ndarray | jax.Array):
            raise OptionError(
                f"space: a value of {name} is an array, {describe(value)}.",
                fix="numbers, names, tuples.",
            )
        if isinstance(value, float):
            value = float(np.float32(value))
        values.append(value)
    return values


def grid(space: Mapping[str, Any], count: int | None) -> list[dict[str, Any]]:
    """Every combination, the last name's values changing fastest.

    Args:
      count: the number of combinations that the user expects; None: not given.

    Raises:
      OptionError: a name has a distribution and no values; or `count` is not the number of
        combinations, or missing where they are many.
    """
    for name, choices in space.items():
        if isinstance(choices, Between):
            raise OptionError(
                f'search="grid" wants values, and {name} is {choices}.',
                fix='a list of them, or search="random".',
            )
    size = math.prod(len(choices) for choices in space.values())
    if count not in (None, size):
        raise OptionError(
            f"trials={count}, and the grid has {size} combinations.", fix="leave trials out."
        )
    if count is None and size > MANY:
        how = " x ".join(f"{len(choices)} of {name}" for name, choices in space.items())
        fix = f'trials={size}, if so many are wanted; or search="random" and fewer'
        raise OptionError(f"the grid has {size:,} combinations: {how}.", fix=f"{fix}.")
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def draw(space: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` trials at random. The values of trial i depend on the seed, on i and on each name,
    and on nothing else in the space.
    """

    def value(name: str, choices: Any, trial: int) -> Any:
        # crc32, because Python's hash of a text differs from process to process.
        key = np.array([seed, (trial << 32) | zlib.crc32(name.encode())], np.uint64)
        place = np.random.Generator(np.random.Philox(key=key)).random()
        if isinstance(choices, Between):
            return choices.at(place)
        return choices[int(place * len(choices))]

    settings = []
    for trial in range(count):
        settings.append({name: value(name, choices, trial) for name, choices in space.items()})
    return settings


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Halving:
    """Successive halving, for `spmd.sweep(search=Halving(...))` (Jamieson and Talwalkar 2016,
    algorithm 1).

    All trials train for the first part of the steps; the best of them, one in `factor`, train
    `factor` times as long, and so on, until the last rung has had all steps. A trial's score at a
    rung is that of `spmd.sweep`.

    Args:
      factor: one trial in `factor` continues.
      rungs: how many there are; None: as many as leave one trial in the last.

    Example:
      >>> Halving(factor=4).plan(trials=16, steps=800)
      [(16, 50), (4, 200), (1, 800)]
    """

    factor: int = 3
    rungs: int | None = None

    def __post_init__(self):
        check_integer(self.factor, "Halving: factor", 2)
        check_integer(self.rungs, "Halving: rungs", 2, optional=True)

    def plan(self, trials: int, steps: int) -> list[tuple[int, int]]:
        """The number of trials of each rung, and the step at which it ends.

        Raises:
          OptionError: more rungs than the trials or the steps allow.
        """
        # log(243) / log(3) is a little below 5, which the 1e-9 corrects.
        most = 1 + int(math.log(trials) / math.log(self.factor) + 1e-9)
        count = self.rungs
        if count is None:
            count = most
        least = self.factor ** (count - 1)
        if count > most or least > steps:
            needed = f"{count} rungs of factor {self.factor} want {least} trials and steps"
            raise OptionError(
                f"Halving: {needed}; there are {trials} and {steps}.",
                fix="fewer rungs, more trials, or more steps.",
            )
        plan = []
        for rung in range(count):
            trials_of_rung = max(1, trials // self.factor**rung)
            plan.append((trials_of_rung, steps // self.factor ** (count - 1 - rung)))
        return plan
