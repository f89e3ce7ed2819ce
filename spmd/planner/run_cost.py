"""What a run costs, by a plan of its step: hours, device-hours, and money at a price."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from spmd.errors import OptionError, option, short_repr
from spmd.planner.plan_data import PlanData
from spmd.render.html import aligned, filled
from spmd.tree import flatten

ONE = "one of tokens, rows and steps says how long the run is"


class Estimate(NamedTuple):
    """A figure, and the range that the plan gives it."""

    expected: float
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        """The figure and its range, multiplied."""
        return Estimate(*(value * factor for value in self))


@dataclasses.dataclass(frozen=True)
class RunCost:
    """The cost of a number of steps; printed, a small table.

    Attributes:
      length: how long the run is, in words.
      rows: of all steps.
      steps, devices: how many.
      step: seconds of one, on average.
      price: of a device-hour; None if it is not known. Money is in the same currency.
      fits: whether the step fits the devices' memory.
    """

    length: str
    rows: float
    steps: int
    devices: int
    step: Estimate
    price: float | None
    fits: bool

    @property
    def hours(self) -> Estimate:
        """Of wall time."""
        return self.step.times(self.steps / 3600)

    @property
    def device_hours(self) -> Estimate:
        """Hours of all devices together."""
        return self.hours.times(self.devices)

    @property
    def money(self) -> Estimate | None:
        """Device-hours times the price; None without one."""
        return None if self.price is None else self.device_hours.times(self.price)

    @property
    def figures(self) -> Mapping[str, Any]:
        """For a script: each estimate as (expected, low, high)."""
        estimates = {"hours": self.hours, "device_hours": self.device_hours, "money": self.money}
        return {
            "rows": self.rows,
            "steps": self.steps,
            "devices": self.devices,
            "price": self.price,
            "fits": self.fits,
        } | estimates

    def __str__(self) -> str:
        rows = [
            ("hours", self.hours, ""),
            ("device-hours", self.device_hours, f", of {self.devices} devices"),
        ]
        rows += (
            [("money", self.money, f", at {self.price:,.6g} per device-hour")]
            if self.money is not None
            else []
        )
        lines = [f"{self.length}: {_count(self.steps, 'step')}"]
        lines += aligned(
            [
                (name, amount(of.expected), f"from {amount(of.low)} to {amount(of.high)}{more}")
                for name, of, more in rows
            ]
        )
        lines.append("Data loading, evaluation, checkpoints and restarts are not included.")
        return filled(
            "\n".join(
                lines
                + (
                    []
                    if self.fits
                    else ["The step does not fit: on these devices the run is not possible."]
                )
            )
        )

    __repr__ = __str__


def _count(number: float, what: str) -> str:
    """How many of something.

    >>> _count(1, "step"), _count(1e12, "token"), _count(1954, "step")
    ('1 step', '1e+12 tokens', '1,954 steps')
    """
    shown = f"{number:,}" if isinstance(number, int) and number < 10**15 else f"{number:,.6g}"
    return f"{shown} {what}{'s' * (number != 1)}"


def amount(value: float) -> str:
    """Three digits, without an exponent below 1e15.

    >>> amount(1234567.0), amount(12.345), amount(0.001234), amount(1e300)
    ('1,230,000', '12.3', '0.00123', '1e+300')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if 100 <= abs(value) < 1e15 else f"{value:.3g}"


def run_cost(
    plan: PlanData,
    *,
    tokens: float | None = None,
    rows: float | None = None,
    steps: float | None = None,
    price: float | None = None,
) -> RunCost:
    """The cost of a run of so many tokens, rows or steps.

    Raises:
      OptionError: a number is not positive; not exactly one of the three is given; or the batch has
        no tokens.
    """
    check_run(tokens=tokens, rows=rows, steps=steps, price=price)
    batch = _count(plan.rows, "row")
    if tokens is not None:
        leaf, length = tokens_of_row(plan.program.sample)
        rows, said = (
            tokens / length,
            f"{_count(tokens, 'token')}, {length:,} in each row of {leaf}, in batches of {batch}",
        )
    elif rows is not None:
        said = f"{_count(rows, 'row')}, in batches of {batch}"
    else:
        said, rows = f"batches of {batch}", (steps or 0) * plan.rows
    step = Estimate(plan.period.seconds, *plan.period.range)
    return RunCost(
        said, rows, math.ceil(rows / plan.rows), plan.cluster.count, step, price, plan.fits
    )


def check_run(
    *,
    tokens: Any = None,
    rows: Any = None,
    steps: Any = None,
    price: Any = None,
    optional: bool = False,
) -> None:
    """Refuse numbers that say nothing about a run.

    Args:
      optional: whether none of them need be given.

    Raises:
      OptionError: names each argument and its value.
    """
    numbers_ = {"tokens": tokens, "rows": rows, "steps": steps, "price": price}
    wrong = [
        option(name, short_repr(value))
        for name, value in numbers_.items()
        if value is not None and not _positive(value)
    ]
    if not wrong and steps is not None and steps != int(steps):
        raise OptionError(
            f"{option('steps', short_repr(steps))}: not a whole number.",
            fix=f"such as {option('steps', math.ceil(steps))}.",
        )
    if wrong:
        raise OptionError(
            f"{', '.join(wrong)}: not a positive number.",
            fix=f"such as {option('tokens', '1e12')}, {option('price', 2.5)}.",
        )
    given = [name for name in ("tokens", "rows", "steps") if numbers_[name] is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} are given, and {ONE}.", fix=f"only {given[0]}.")
    if not given and (price is not None or not optional):
        raise OptionError(f"{ONE}, and none is given.", fix=f"such as {option('tokens', '1e12')}.")


def _positive(value: Any) -> bool:
    return (
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and 0 < float(value) < math.inf
    )


def tokens_of_row(sample: Any) -> tuple[str, int]:
    """Tokens in a row of a batch, with the names of the leaves that hold them: those of integers,
    [rows, tokens].

    Padding counts.

    Raises:
      OptionError: there is no such leaf, or their lengths differ.

    >>> import jax
    >>> tokens_of_row(
    ...     {
    ...         "tokens": jax.ShapeDtypeStruct((8, 128), "int32"),
    ...         "label": jax.ShapeDtypeStruct((8,), "int32"),
    ...     }
    ... )
    ('"tokens"', 128)
    """
    leaves = flatten(sample)
    lengths = {
        path: leaf.shape[1]
        for path, leaf in leaves.items()
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)
    }
    named = {f'"{path}"' if path else "the only array": length for path, length in lengths.items()}
    if not lengths:
        shapes = ", ".join(
            f"{path or 'the only array'} {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in leaves.items()
        )
        why = (
            "tokens of a row are not known: no array of the batch is one of integers [rows, "
            f"tokens] ({shapes})."
        )
        raise OptionError(
            why, fix=f"{option('rows', '...')} or {option('steps', '...')} instead of tokens."
        )
    if len(set(lengths.values())) > 1:
        several = ", ".join(f"{path} {length:,}" for path, length in named.items())
        raise OptionError(
            f"tokens of a row are not known: arrays differ ({several}).",
            fix=f"{option('rows', '...')} or {option('steps', '...')} instead of tokens.",
        )
    return " and ".join(named), next(iter(lengths.values()))
