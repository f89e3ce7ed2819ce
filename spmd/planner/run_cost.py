"""The cost of a run, by a plan of its step: hours, device-hours, and money at a price."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from spmd.base.tree import flatten
from spmd.errors import OptionError, option, short_repr
from spmd.planner.plan_data import PlanData
from spmd.render.html import aligned, filled

ONE = "one of tokens, rows and steps says how long the run is"


class Estimate(NamedTuple):
    """A figure, and the range that the plan gives it."""

    expected: float
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        """Return the figure and its range, multiplied."""
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
        """Hours of wall time."""
        return self.step.times(self.steps / 3600)

    @property
    def device_hours(self) -> Estimate:
        """Hours of all devices together."""
        return self.hours.times(self.devices)

    @property
    def money(self) -> Estimate | None:
        """Device-hours times the price; None without one."""
        if self.price is None:
            return None
        return self.device_hours.times(self.price)

    @property
    def figures(self) -> Mapping[str, Any]:
        """The figures for a script: each estimate as (expected, low, high)."""
        return {
            "rows": self.rows,
            "steps": self.steps,
            "devices": self.devices,
            "price": self.price,
            "fits": self.fits,
            "hours": self.hours,
            "device_hours": self.device_hours,
            "money": self.money,
        }

    def __str__(self) -> str:
        hours, device_hours, money = self.hours, self.device_hours, self.money
        rows = [
            ("hours", amount(hours.expected), _range(hours)),
            (
                "device-hours",
                amount(device_hours.expected),
                f"{_range(device_hours)}, of {self.devices} devices",
            ),
        ]
        if money is not None:
            price = f"at {self.price:,.6g} per device-hour"
            rows.append(("money", amount(money.expected), f"{_range(money)}, {price}"))
        lines = [f"{self.length}: {_count(self.steps, 'step')}", *aligned(rows)]
        lines.append("Data loading, evaluation, checkpoints and restarts are not included.")
        if not self.fits:
            lines.append("The step does not fit: on these devices the run is not possible.")
        return filled("\n".join(lines))

    __repr__ = __str__


def _range(estimate: Estimate) -> str:
    """Write the range of a figure."""
    return f"from {amount(estimate.low)} to {amount(estimate.high)}"


def _count(number: float, what: str) -> str:
    """Write how many of something there are.

    >>> _count(1, "step"), _count(1e12, "token"), _count(1954, "step")
    ('1 step', '1e+12 tokens', '1,954 steps')
    """
    if isinstance(number, int) and number < 10**15:
        shown = f"{number:,}"
    else:
        shown = f"{number:,.6g}"
    return f"{shown} {what}{'s' * (number != 1)}"


def amount(value: float) -> str:
    """Write three digits, without an exponent below 1e15.

    >>> amount(1234567.0), amount(12.345), amount(0.001234), amount(1e300)
    ('1,230,000', '12.3', '0.00123', '1e+300')
    """
    if 100 <= abs(value) < 1e15:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def run_cost(
    plan: PlanData,
    *,
    tokens: float | None = None,
    rows: float | None = None,
    steps: float | None = None,
    price: float | None = None,
) -> RunCost:
    """Return the cost of a run of so many tokens, rows or steps.

    Raises:
      OptionError: a number is not positive; not exactly one of the three is given; or the batch has
        no tokens.
    """
    check_run(tokens=tokens, rows=rows, steps=steps, price=price)
    length = f"batches of {_count(plan.rows, 'row')}"
    if tokens is not None:
        leaf, tokens_per_row = tokens_of_row(plan.program.sample)
        rows = tokens / tokens_per_row
        of_rows = f"{tokens_per_row:,} in each row of {leaf}"
        length = f"{_count(tokens, 'token')}, {of_rows}, in {length}"
    elif rows is not None:
        length = f"{_count(rows, 'row')}, in {length}"
    else:
        rows = (steps or 0) * plan.rows
    return RunCost(
        length,
        rows,
        math.ceil(rows / plan.rows),
        plan.cluster.count,
        Estimate(plan.period.seconds, *plan.period.range),
        price,
        plan.fits,
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
    lengths = {"tokens": tokens, "rows": rows, "steps": steps}
    lengths = {name: value for name, value in lengths.items() if value is not None}
    wrong = []
    for name, value in [*lengths.items(), ("price", price)]:
        if value is not None and not _is_positive(value):
            wrong.append(option(name, short_repr(value)))
    if wrong:
        raise OptionError(
            f"{', '.join(wrong)}: not a positive number.",
            fix=f"such as {option('tokens', '1e12')}, {option('price', 2.5)}.",
        )
    if steps is not None and steps != int(steps):
        raise OptionError(
            f"{option('steps', short_repr(steps))}: not a whole number.",
            fix=f"such as {option('steps', math.ceil(steps))}.",
        )
    if len(lengths) > 1:
        first, *_ = lengths
        raise OptionError(f"{' and '.join(lengths)} are given, and {ONE}.", fix=f"only {first}.")
    if not lengths and (price is not None or not optional):
        raise OptionError(f"{ONE}, and none is given.", fix=f"such as {option('tokens', '1e12')}.")


def _is_positive(value: Any) -> bool:
    """Return True for a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return 0 < float(value) < math.inf


def tokens_of_row(sample: Any) -> tuple[str, int]:
    """Return the names of the leaves of a batch that hold tokens, those of integers [rows, tokens],
    and the number of tokens in a row of them.

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
    lengths, shapes = {}, []
    for path, leaf in flatten(sample).items():
        shapes.append(f"{path or 'the only array'} {leaf.dtype}{list(leaf.shape)}")
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer):
            lengths[f'"{path}"' if path else "the only array"] = leaf.shape[1]
    fix = f"{option('rows', '...')} or {option('steps', '...')} instead of tokens."
    if not lengths:
        raise OptionError(
            "tokens of a row are not known: no array of the batch is one of integers [rows, "
            f"tokens] ({', '.join(shapes)}).",
            fix=fix,
        )
    if len(set(lengths.values())) > 1:
        several = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise OptionError(
            f"tokens of a row are not known: arrays differ ({several}).",
            fix=fix,
        )
    return " and ".join(lengths), next(iter(lengths.values()))
