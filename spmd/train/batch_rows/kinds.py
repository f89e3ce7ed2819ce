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

    Attributes:
      dim: the dim of the array that has the rows.
      inner: the number of entries of each row that follow one another along `dim`.
      power: a worker that calls the loss on its own rows has here (rows of the batch / rows of the
        worker) ** -power times what the full batch has; None: something else.
      columns: of an index, places in the last dim that hold the number of the row.
    """

    dim: int
    inner: int = 1
    power: Power = 0
    columns: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same array on every worker, that of the full batch.

    Attributes:
      uniform: dims along which all entries are equal; other dims do not depend on the number of
        rows, unless `power` is None.
      power: as in `PerRow`.
      key: whether it is a random key, or made of one.
      number: a dim along which an entry is its own place, modulo the size of the dim.
      columns: of an array with `number`, the places in the last dim of which that is true; None:
        all of them.
      zero: whether all entries are 0.
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
    """A sum over rows: that of the full batch is the sum of what the workers hold.

    Attributes:
      power: as in `PerRow`; with -1 it is a mean over rows.
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
        if first == second or (math.isnan(first) and math.isnan(second)):
            return 0
        if not second or not math.isfinite(first) or not math.isfinite(second):
            return None
        ratio = self.rows / self.others
        for power in (1, -1):
            # a number such as 1 / rows may be rounded to float32
            if math.isclose(first / second, ratio**power, rel_tol=1e-6):
                return power
        return None


ELEMENTWISE = of_kind(primitives.Kind.ELEMENTWISE)
# sums of several operands, which need not all be sums over rows
SUMS = frozenset(["add", "add_any", "sub"])
# f(c x) = c f(x), of one operand
LINEAR = frozenset(name for name in ELEMENTWISE if known(name).linear == primitives.ALL)
LINEAR -= SUMS | {"complex"}
SCALING = LINEAR | {"abs"}
# of the power that all operands have
ALIKE = SUMS | {"max", "min", "select_n", "clamp"}
# of two values of the same power these have power 0
COMPARED = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])


def total(*powers: Power) -> Power:
    """Return the power of a product."""
    if None in powers:
        return None
    return sum(power for power in powers if power is not None)


def quotient(first: Power, second: Power) -> Power:
    """Return the power of a quotient."""
    if first is None or second is None:
        return None
    return first - second


def power_if(is_known: bool, power: Power = 0) -> Power:
    """Return a power, or None where it is not known."""
    if is_known:
        return power
    return None


def resized_dims(first: Sequence[int], second: Sequence[int]) -> set[int]:
    """Return the dims in which two shapes differ: those whose size depends on the number of
    rows.
    """
    pairs = zip(first, second, strict=True)
    return {dim for dim, (size, other_size) in enumerate(pairs) if size != other_size}


def with_power(kind: Any, power: Power) -> Any:
    """Return the kind with another power."""
    return dataclasses.replace(kind, power=power)


def keep_power_if(kind: Any, is_known: bool) -> Any:
    """Return the kind, without its power where that is not known."""
    if is_known:
        return kind
    return with_power(kind, None)


# elementwise functions ----------------------------------------------------------------------------


def elementwise(name: str, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of an elementwise result of operands of one shape, or scalars; None if
    workers have to share something first.
    """
    # the exponent of `integer_pow`
    if one.params.get("y") != other.params.get("y"):
        return None
    # to a dtype of another width it splits entries, or joins them
    is_resized = one.outvars[0].aval.shape != one.invars[0].aval.shape
    if name == "bitcast_convert_type" and is_resized:
        return None
    row_dims = {(kind.dim, kind.inner) for kind in kinds if isinstance(kind, PerRow)}
    if any(isinstance(kind, Summed) for kind in kinds):
        if row_dims:
            return None
        return _of_sums(name, one, kinds)
    power = _power(name, kinds, [getattr(variable, "val", None) for variable in one.invars])
    if any(kind.power != 0 for kind in kinds) and _truncates(name, one):
        power = None
    if not row_dims:
        return _of_fixed(name, one, kinds, power)
    # rows of one operand are not beside the same rows of another
    if len(row_dims) > 1:
        return None
    return _of_rows(one, kinds, power)


def _truncates(name: str, one: Any) -> bool:
    """Return whether an elementwise function rounds its result to an integer: half of what it was
    computed from need not give half of it.
    """
    # a comparison rounds nothing: of two values that scale alike it stays the same
    if name in COMPARED or jnp.issubdtype(one.outvars[0].aval.dtype, jnp.inexact):
        return False
    return name == "div" or jnp.issubdtype(one.invars[0].aval.dtype, jnp.inexact)


def _of_fixed(name: str, one: Any, kinds: list[Any], power: Power) -> Fixed:
    """Return the kind of an elementwise result of arrays that are the same on every worker."""
    uniform = frozenset(range(one.outvars[0].aval.ndim))
    key = any(kind.key for kind in kinds)
    is_zero = name == "convert_element_type" and kinds[0].zero
    return Fixed(
        uniform.intersection(*_uniform_dims(one, kinds)),
        power,
        key,
        _number(name, one, kinds),
        zero=is_zero,
    )


def _of_rows(one: Any, kinds: list[Kind], power: Power) -> PerRow | None:
    """Return the kind of an elementwise result of operands whose rows are along the same dim."""
    rows = next(kind for kind in kinds if isinstance(kind, PerRow))
    dim, size = rows.dim, one.outvars[0].aval.shape[rows.dim]
    for kind, variable in zip(kinds, one.invars, strict=True):
        if isinstance(kind, PerRow) and variable.aval.shape[dim] != size:
            return None
    # a worker that calls the loss on its own rows would pair them with the first entries
    if not all(dim in uniform for uniform in _uniform_dims(one, kinds)):
        power = None
    return PerRow(dim, rows.inner, power)


def _uniform_dims(one: Any, kinds: list[Kind]) -> list[frozenset[int]]:
    """Return the dims of an elementwise result along which its `Fixed` operands are the same."""
    uniform = []
    for kind, variable in zip(kinds, one.invars, strict=True):
        if not isinstance(kind, Fixed):
            continue
        shape = variable.aval.shape
        if shape:
            singles = {dim for dim, size in enumerate(shape) if size == 1}
            uniform.append(kind.uniform | singles)
        else:
            uniform.append(frozenset(range(one.outvars[0].aval.ndim)))
    return uniform


def _number(name: str, one: Any, kinds: list[Any]) -> int | None:
    """Return the dim along which an elementwise result is the number of an entry, modulo the size
    of the dim.
    """
    numbers = [kind.number for kind in kinds]
    if name == "convert_element_type":
        return numbers[-1]
    if name == "select_n" and len(set(numbers[1:])) == 1:
        return numbers[-1]
    # as jax.numpy counts negative indices from the end
    if name == "add" and numbers[0] is not None and numbers[1] is None:
        size = getattr(one.invars[1], "val", None)
        if size == one.outvars[0].aval.shape[numbers[0]]:
            return numbers[0]
    return None


def _of_sums(name: str, one: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of an elementwise result of sums over rows: a sum, if the function is linear
    in them.
    """
    # an integer is rounded, and the sum of rounded parts is not the rounded sum
    is_exact = jnp.issubdtype(one.outvars[0].aval.dtype, jnp.floating)
    if name in LINEAR | {"select_n"} and not is_exact:
        return None
    if name in LINEAR:
        return kinds[0]
    if name == "select_n":
        return _of_selected_sums(kinds)
    if name in SUMS:
        return _of_added_sums(kinds)
    classes, powers = [type(kind) for kind in kinds], [kind.power for kind in kinds]
    if name == "mul" and classes in ([Summed, Fixed], [Fixed, Summed]):
        return Summed(total(*powers))
    if name == "div" and classes == [Summed, Fixed]:
        return Summed(quotient(*powers))
    return None


def _of_selected_sums(kinds: list[Kind]) -> Summed | None:
    """Return the kind of `select_n` between sums over rows; its choice is the first operand."""
    choice, *cases = kinds
    result = joined_all(cases)
    # of no subclass of `Fixed`: what is local to a worker may choose differently there
    if type(choice) is not Fixed or not isinstance(result, Summed):
        return None
    return keep_power_if(result, choice.power == 0)


def _of_added_sums(kinds: list[Kind]) -> Summed:
    """Return the kind of a sum of sums over rows, and of arrays that are the same on every
    worker.
    """
    sums = [kind for kind in kinds if isinstance(kind, Summed)]
    constants = [kind for kind in kinds if not isinstance(kind, Summed)]
    # a worker adds a constant to its mean, and the mean over workers has it once
    are_means = all(kind.power == -1 for kind in sums)
    if are_means and all(kind.power == 0 for kind in constants):
        return sums[0]
    powers = {kind.power for kind in sums}
    return keep_power_if(sums[0], not constants and len(powers) == 1)


def _power(name: str, kinds: list[Kind], literals: list[Any]) -> Power:
    """Return the power of an elementwise result; None if it is not one power of the number of
    rows.
    """
    powers = [kind.power for kind in kinds]
    if name == "mul" and any(map(_is_zero, literals)):
        return 0
    if None in powers:
        return None
    if name == "mul":
        return total(*powers)
    if name == "div":
        return quotient(*powers)
    if name in SCALING:
        return powers[0]
    if name not in ALIKE | COMPARED:
        if any(powers):
            return None
        return 0
    if name == "select_n":
        choice, *powers = powers
        literals = literals[1:]
        if choice != 0:
            return None
    # 0 is of every power
    pairs = zip(powers, literals, strict=True)
    distinct = {power for power, literal in pairs if not _is_zero(literal)}
    if len(distinct) > 1:
        return None
    if name not in ALIKE:
        return 0
    return next(iter(distinct), 0)


def _is_zero(literal: Any) -> bool:
    return literal is not None and bool(literal == 0)


# kinds of several arrays --------------------------------------------------------------------------


def stacked(kind: Kind) -> Kind:
    """Return the kind of an array of arrays of a kind, along a new dim in front."""
    if isinstance(kind, PerRow):
        return dataclasses.replace(kind, dim=kind.dim + 1)
    if isinstance(kind, Fixed):
        uniform = frozenset(dim + 1 for dim in kind.uniform)
        return dataclasses.replace(kind, uniform=uniform, number=None, columns=None)
    return kind


def entry(kind: Kind) -> Kind:
    """Return the kind of an entry along dim 0, which has no rows."""
    if isinstance(kind, PerRow):
        return dataclasses.replace(kind, dim=kind.dim - 1)
    if isinstance(kind, Fixed):
        uniform = frozenset(dim - 1 for dim in kind.uniform if dim)
        return dataclasses.replace(kind, uniform=uniform, number=None, columns=None)
    return kind


def joined_all(kinds: Sequence[Kind]) -> Kind | None:
    """Return the kind that all of some kinds can become; None if there is none."""
    result: Kind | None = kinds[0]
    for kind in kinds[1:]:
        result = joined(result, kind)
    return result


def joined(first: Kind | None, second: Kind | None) -> Kind | None:
    """Return the kind that both can become; None if workers have to share something first."""
    if first == second:
        return first
    if first is None or second is None:
        return None
    power = power_if(first.power == second.power, first.power)
    if isinstance(first, Fixed) and isinstance(second, Fixed):
        return Fixed(first.uniform & second.uniform, power, first.key or second.key)
    if isinstance(second, Fixed):
        return _joined_with_fixed(first, second)
    if isinstance(first, Fixed):
        return _joined_with_fixed(second, first)
    if isinstance(first, PerRow) and isinstance(second, PerRow):
        has_same_rows = (first.dim, first.inner) == (second.dim, second.inner)
        if not has_same_rows:
            return None
        return with_power(first, power)
    if isinstance(first, Summed) and isinstance(second, Summed):
        return Summed(power)
    return None


def _joined_with_fixed(kind: Any, fixed: Fixed) -> Kind:
    """Return the kind that rows, or a sum over rows, and an array that is the same on every worker
    can become.
    """
    if isinstance(kind, Summed):
        # workers take the mean of what is the same on all of them, as of a mean over rows
        return keep_power_if(kind, (kind.power, fixed.power) == (-1, 0))
    return keep_power_if(kind, kind.dim in fixed.uniform and kind.power == fixed.power)


def is_mean(kinds: Sequence[Kind], shape: tuple[int, ...]) -> bool:
    """Return whether workers that call a loss on their own rows get the right mean, and so need to
    share nothing.

    Args:
      kinds: of a loss: one value per row, a scalar, or (sum, count), which may be of each row.
      shape: of the first one.
    """
    if shape:
        return all(
            isinstance(kind, PerRow) and (kind.dim, kind.inner, kind.power) == (0, 1, 0)
            for kind in kinds
        )
    if len(kinds) == 2:
        return _is_mean_of_pair(*kinds)
    return kinds[0] == Summed(-1) or (isinstance(kinds[0], Fixed) and kinds[0].power == 0)


def _is_mean_of_pair(total: Kind, count: Kind) -> bool:
    """Return whether the sum of the workers' sums over that of their counts is the right mean."""
    if total.power is None:
        return False
    if isinstance(total, Fixed) and isinstance(count, Fixed):
        return total.power == count.power
    if not isinstance(total, Summed):
        return False
    if isinstance(count, Summed):
        return count.power == total.power
    # such as `len(x)`, which each worker takes of its own rows
    return isinstance(count, Fixed) and count.power == total.power + 1
