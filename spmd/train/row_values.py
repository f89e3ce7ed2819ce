"""What can be known of an array while a traced loss is walked: where its rows are, and how element-wise functions keep that."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class PerRow:
    """Dim `dim` is [..., rows, inner] flattened; each entry depends on the batch through its own row only.

    `power`: to which power of the number of rows the entries grow.
    """

    dim: int
    inner: int = 1
    power: int = 0


@dataclasses.dataclass(frozen=True)
class Fixed:
    """No data in it. Along dims in `uniform` all entries are equal; other dims do not depend on the number of rows. `key`: it draws."""

    uniform: frozenset[int] = frozenset()
    power: int = 0
    key: bool = False


@dataclasses.dataclass(frozen=True)
class Summed:
    """A sum over rows of `PerRow` values; with `power` -1 it is their mean."""

    power: int = 0


Known = PerRow | Fixed | Summed
Value = Known | None
KEY = Fixed(key=True)  # the step's own: what is drawn with it for a row does not depend on who holds the row


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many rows the two traces have."""

    rows: int
    others: int

    def growth(self, first: float, second: float) -> int | None:
        """The power of the number of rows by which two numbers differ; None when it is none of -1, 0 and 1."""
        if first == second or (first != first and second != second):
            return 0
        ratio = self.rows / self.others
        powers = (p for p in (1, -1) if second and math.isclose(first / second, ratio**p, rel_tol=1e-6))
        return next(powers, None) if math.isfinite(first) and math.isfinite(second) else None


SIMPLE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp conj copy copy_p cos cosh "
    "convert_element_type digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt "
    "max min mul ne neg nextafter not or pow population_count reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh name xor".split()
)
SCALING = frozenset(
    "neg abs copy copy_p convert_element_type reduce_precision stop_gradient sharding_constraint name".split()
)  # f(c x) = c f(x)
LINEAR = SCALING - {"abs"}
ALIKE = frozenset("add add_any sub max min select_n clamp".split())  # of the power that all operands have
COMPARED = frozenset("eq ne lt le gt ge".split())  # of two values of the same power it is of none


def simple(name: str, one: Any, other: Any, values: list[Known]) -> Value:
    """Element by element, where a scalar, or a dim of size 1, is meant for all."""
    shape = one.outvars[0].aval.shape
    if one.params.get("y") != other.params.get("y") or (name == "bitcast_convert_type" and shape != one.invars[0].aval.shape):
        return None
    fixed = [_uniform(value, var.aval.shape, shape) for value, var in zip(values, one.invars, strict=True) if isinstance(value, Fixed)]
    uniform = frozenset(range(len(shape))).intersection(*fixed)
    rows = {(value.dim, value.inner) for value in values if isinstance(value, PerRow)}
    if any(isinstance(value, Summed) for value in values):
        return None if rows else _summed(name, one, values)
    power = _power(name, values, [getattr(var, "val", None) for var in one.invars])

    def is_integer(aval: Any) -> bool:
        return not jnp.issubdtype(aval.dtype, jnp.inexact)

    truncated = is_integer(one.outvars[0].aval) and (name == "div" or not is_integer(one.invars[0].aval))
    if power is None or len(rows) > 1 or (truncated and any(value.power for value in values) and name not in COMPARED):
        return None
    if not rows:
        return Fixed(uniform, power, any(isinstance(value, Fixed) and value.key for value in values))
    ((dim, inner),) = rows
    straight = all(var.aval.shape[dim] == shape[dim] for var, value in zip(one.invars, values, strict=True) if isinstance(value, PerRow))
    return PerRow(dim, inner, power) if straight and all(dim in each for each in fixed) else None


def _summed(name: str, one: Any, values: list[Known]) -> Value:
    """Only what is linear keeps a sum over rows one; to a mean over rows something without data may be added."""
    if name in LINEAR:
        return values[0] if jnp.issubdtype(one.outvars[0].aval.dtype, jnp.floating) else None
    kinds, powers = [type(value) for value in values], [value.power for value in values]
    if name == "mul" and kinds in ([Summed, Fixed], [Fixed, Summed]):
        return Summed(sum(powers))
    if name == "div" and kinds == [Summed, Fixed]:
        return Summed(powers[0] - powers[1])
    if name in ("add", "sub", "add_any"):
        wanted = [(-1 if kind is Summed else 0) for kind in kinds]
        if (kinds == [Summed, Summed] and powers[0] == powers[1]) or powers == wanted:
            return Summed(next(value.power for value in values if isinstance(value, Summed)))
    return None


def _uniform(value: Fixed, own: tuple, shape: tuple) -> frozenset[int]:
    """Dims of `shape` along which this operand is the same."""
    if not own:
        return frozenset(range(len(shape)))
    return value.uniform | {dim for dim, size in enumerate(own) if size == 1}


def _power(name: str, values: list[Known], literals: list[Any]) -> int | None:
    """The power of an element-wise result; None where it is not one power of the number of rows."""
    powers = [value.power for value in values]
    if name == "mul":
        return sum(powers)
    if name == "div":
        return powers[0] - powers[1]
    if name in SCALING:
        return powers[0]
    if name in ALIKE or name in COMPARED:
        if name == "select_n":
            powers, literals = (powers[1:], literals[1:]) if powers[0] == 0 else ([0, 1], [None, None])
        left = {p for p, literal in zip(powers, literals, strict=True) if literal is None or literal != 0}  # 0 is of every power
        if len(left) > 1:
            return None
        return next(iter(left), 0) if name in ALIKE else 0
    return 0 if not any(powers) else None


def moved_dim(value: Value, by: int) -> Value:
    """The value with a dim more, or one less, in front."""
    if isinstance(value, PerRow):
        return dataclasses.replace(value, dim=value.dim + by) if value.dim + by >= 0 else None
    if isinstance(value, Fixed):
        return dataclasses.replace(value, uniform=frozenset(dim + by for dim in value.uniform if dim + by >= 0))
    return value if by < 0 else None


def joined(a: Value, b: Value) -> Value:
    """What holds of both."""
    if a == b:
        return a
    if isinstance(a, Fixed) and isinstance(b, Fixed):
        return Fixed(a.uniform & b.uniform, a.power, a.key or b.key) if a.power == b.power else None
    if isinstance(a, PerRow) and isinstance(b, Fixed):
        a, b = b, a
    if isinstance(a, Fixed) and isinstance(b, PerRow):
        return b if b.dim in a.uniform and a.power == b.power else None
    return None
