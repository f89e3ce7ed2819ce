"""The kinds of arrays in a traced loss: where their rows are, and how elementwise functions keep
that.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from spmd.jaxpr import primitives
from spmd.jaxpr.primitives import known, of_kind

Power = int | None


@dataclasses.dataclass(frozen=True)
class PerRow:
    """Dim `dim` is [..., rows, inner] flattened, and each worker holds the entries of its own rows.

    `power`: a worker that calls the loss on its own rows has here (rows of the batch / rows of the
    worker) ** -power times what the full batch has; None: something else. `columns`: of an index,
    places in the last dim that hold the number of the row.
    """

    dim: int
    inner: int = 1
    power: Power = 0
    columns: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same array on every worker, that of the full batch.

    Along dims in `uniform` all entries are equal; other dims do not depend on the number of rows,
    unless `power` is None. `key`: a random key, or made of one. `power` is as in `PerRow`.
    `number`: a dim along which an entry is its own place, modulo the size of the dim; with
    `columns` only those places of the last dim are. `zero`: all entries are 0.
    """

    uniform: frozenset[int] = frozenset()
    power: Power = 0
    key: bool = False
    number: int | None = None
    columns: frozenset[int] | None = None
    zero: bool = False


@dataclasses.dataclass(frozen=True)
class Local(Fixed):
    """An array without rows that a layout's own function gives each worker, such as what layers
    keep.
    """


@dataclasses.dataclass(frozen=True)
class Summed:
    """A sum over rows: that of the full batch is the sum of what the workers hold. With `power` -1
    it is a mean over rows.
    """

    power: Power = 0


Kind = PerRow | Fixed | Summed
KEY = Fixed(key=True)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The numbers of rows of the two traces: of the full batch, and of a part."""

    rows: int
    others: int

    def growth(self, first: float, second: float) -> Power:
        """Return the power of the number of rows by which two numbers differ; None if it is not -1,
        0 or 1.
        """
        if first == second or (first != first and second != second):
            return 0
        ratio = self.rows / self.others
        powers = (
            p for p in (1, -1) if second and math.isclose(first / second, ratio**p, rel_tol=1e-6)
        )
        return next(powers, None) if math.isfinite(first) and math.isfinite(second) else None


ELEMENTWISE = of_kind(primitives.Kind.ELEMENTWISE)
# f(c x) = c f(x)
LINEAR = frozenset(name for name in ELEMENTWISE if known(name).linear == primitives.ALL) - {
    "add",
    "add_any",
    "complex",
    "sub",
}
SCALING = LINEAR | {"abs"}
# of the power that all operands have
ALIKE = frozenset("add add_any sub max min select_n clamp".split())
COMPARED = frozenset("eq ne lt le gt ge".split())  # of two values of the same power it is of none


def total(*powers: Power) -> Power:
    """Return the power of a product."""
    return None if None in powers else sum(power for power in powers if power is not None)


def quotient(first: Power, second: Power) -> Power:
    """Return the power of a quotient."""
    return None if first is None or second is None else first - second


def resized_dims(first: Sequence[int], second: Sequence[int]) -> set[int]:
    """Return the dims in which two shapes differ: those whose size depends on the number of
    rows.
    """
    return {
        dim for dim, sizes in enumerate(zip(first, second, strict=True)) if sizes[0] != sizes[1]
    }


def with_power(value: Any, power: Power) -> Any:
    """Return the kind with another power."""
    return dataclasses.replace(value, power=power)


def elementwise(name: str, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """Return the kind of an elementwise result of operands of one shape, or scalars; None if
    workers have to share something first.
    """
    shape = one.outvars[0].aval.shape
    if one.params.get("y") != other.params.get("y") or (
        name == "bitcast_convert_type" and shape != one.invars[0].aval.shape
    ):
        return None
    rows = {(value.dim, value.inner) for value in values if isinstance(value, PerRow)}
    if any(isinstance(value, Summed) for value in values):
        return None if rows else _summed(name, one, values)
    if len(rows) > 1:
        return None
    fixed = [
        _uniform(value, var.aval.shape, shape)
        for value, var in zip(values, one.invars, strict=True)
        if isinstance(value, Fixed)
    ]
    power = _power(name, values, [getattr(var, "val", None) for var in one.invars])

    def is_integer(aval: Any) -> bool:
        return not jnp.issubdtype(aval.dtype, jnp.inexact)

    truncated = is_integer(one.outvars[0].aval) and (
        name == "div" or not is_integer(one.invars[0].aval)
    )
    if truncated and any(value.power != 0 for value in values) and name not in COMPARED:
        power = None
    if not rows:
        uniform = frozenset(range(len(shape))).intersection(*fixed)
        key = any(isinstance(value, Fixed) and value.key for value in values)
        zero = name == "convert_element_type" and isinstance(values[0], Fixed) and values[0].zero
        return Fixed(uniform, power, key, _number(name, one, values), zero=zero)
    ((dim, inner),) = rows
    if any(
        var.aval.shape[dim] != shape[dim]
        for var, value in zip(one.invars, values, strict=True)
        if isinstance(value, PerRow)
    ):
        return None
    return PerRow(dim, inner, power if all(dim in each for each in fixed) else None)


def _number(name: str, one: Any, values: list[Any]) -> int | None:
    """Return the dim along which an elementwise result is the number of an entry, modulo the size
    of the dim.
    """
    numbers = [value.number for value in values]
    if name == "convert_element_type" or (
        name == "select_n" and numbers[1:] == [numbers[1]] * len(values[1:])
    ):
        return numbers[-1]
    # as jax.numpy counts negative indices from the end
    if name == "add" and numbers[0] is not None and numbers[1] is None:
        size = getattr(one.invars[1], "val", None)
        return numbers[0] if size == one.outvars[0].aval.shape[numbers[0]] else None
    return None


def _summed(name: str, one: Any, values: list[Kind]) -> Kind | None:
    """Return the kind of an elementwise result of sums over rows: a sum, if the function is linear
    in them.
    """
    if name in LINEAR:
        return values[0] if jnp.issubdtype(one.outvars[0].aval.dtype, jnp.floating) else None
    kinds, powers = [type(value) for value in values], [value.power for value in values]
    if name == "mul" and kinds in ([Summed, Fixed], [Fixed, Summed]):
        return Summed(total(*powers))
    if name == "div" and kinds == [Summed, Fixed]:
        return Summed(quotient(*powers))
    if (
        name == "select_n"
        and kinds[0] is Fixed
        and jnp.issubdtype(one.outvars[0].aval.dtype, jnp.floating)
    ):
        found = values[1]
        for value in values[2:]:
            found = joined(found, value)
        return (
            with_power(found, found.power if powers[0] == 0 else None)
            if isinstance(found, Summed)
            else None
        )
    if name in ("add", "sub", "add_any"):
        wanted = [(-1 if kind is Summed else 0) for kind in kinds]
        alike = (kinds == [Summed, Summed] and powers[0] == powers[1]) or powers == wanted
        return Summed(
            next(value.power for value in values if isinstance(value, Summed)) if alike else None
        )
    return None


def _uniform(value: Fixed, own: tuple, shape: tuple) -> frozenset[int]:
    """Return the dims of `shape` along which this operand is the same."""
    if not own:
        return frozenset(range(len(shape)))
    return value.uniform | {dim for dim, size in enumerate(own) if size == 1}


def _power(name: str, values: list[Kind], literals: list[Any]) -> Power:
    """Return the power of an elementwise result; None if it is not one power of the number of
    rows.
    """
    powers = [value.power for value in values]
    if name == "mul" and 0 in [literal for literal in literals if literal is not None]:
        return 0
    if None in powers:
        return None
    if name == "mul":
        return total(*powers)
    if name == "div":
        return quotient(*powers)
    if name in SCALING:
        return powers[0]
    if name in ALIKE or name in COMPARED:
        if name == "select_n":
            powers, literals = (
                (powers[1:], literals[1:]) if powers[0] == 0 else ([0, 1], [None, None])
            )
        # 0 is of every power
        left = {
            p
            for p, literal in zip(powers, literals, strict=True)
            if literal is None or literal != 0
        }
        if len(left) > 1:
            return None
        return next(iter(left), 0) if name in ALIKE else 0
    return 0 if not any(powers) else None


def stacked(kind: Kind) -> Kind:
    """Return the kind of an array of arrays of a kind, along a new dim in front."""
    if isinstance(kind, PerRow):
        return dataclasses.replace(kind, dim=kind.dim + 1)
    if isinstance(kind, Fixed):
        return dataclasses.replace(
            kind, uniform=frozenset(dim + 1 for dim in kind.uniform), number=None, columns=None
        )
    return kind


def entry(kind: Kind) -> Kind:
    """Return the kind of an entry along dim 0, which has no rows."""
    if isinstance(kind, PerRow):
        return dataclasses.replace(kind, dim=kind.dim - 1)
    if isinstance(kind, Fixed):
        return dataclasses.replace(
            kind,
            uniform=frozenset(dim - 1 for dim in kind.uniform if dim),
            number=None,
            columns=None,
        )
    return kind


def joined(a: Kind | None, b: Kind | None) -> Kind | None:
    """Return the kind that both can become; None if workers have to share something first."""
    if a == b or a is None or b is None:
        return a if a == b else None
    power = a.power if a.power == b.power else None
    if isinstance(a, Fixed) and isinstance(b, Fixed):
        return Fixed(a.uniform & b.uniform, power, a.key or b.key)
    if isinstance(a, Fixed):
        a, b = b, a
    if isinstance(a, PerRow) and isinstance(b, Fixed):
        return with_power(a, power if a.dim in b.uniform else None)
    if isinstance(a, Summed) and isinstance(b, Fixed):
        return Summed(-1 if (a.power, b.power) == (-1, 0) else None)
    if isinstance(a, PerRow) and isinstance(b, PerRow):
        return with_power(a, power) if (a.dim, a.inner) == (b.dim, b.inner) else None
    return Summed(power) if isinstance(a, Summed) and isinstance(b, Summed) else None


def is_mean(found: Sequence[Kind], shape: tuple[int, ...]) -> bool:
    """Return whether workers that call a loss on their own rows get the right mean, and so need to
    share nothing.

    Args:
      found: the kinds of a loss: one value per row, a scalar, or (sum, count), which may be of each
        row.
      shape: of the first one.
    """
    if len(found) == 2 and not shape:
        total, count = found
        if isinstance(total, Fixed) and isinstance(count, Fixed):
            return total.power is not None and total.power == count.power
        if not isinstance(total, Summed) or total.power is None:
            return False
        return (isinstance(count, Summed) and count.power == total.power) or (
            isinstance(count, Fixed) and count.power == total.power + 1
        )
    if shape:
        return all(
            isinstance(kind, PerRow) and (kind.dim, kind.inner, kind.power) == (0, 1, 0)
            for kind in found
        )
    return found[0] == Summed(-1) or (isinstance(found[0], Fixed) and found[0].power == 0)
