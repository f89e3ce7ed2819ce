"""A proof, from the traced loss alone, that rows may be seen in parts: that the mean over parts is the mean over the batch.

The loss is traced for two numbers of rows, those of a batch and of a part, and both jaxprs are walked side by side. Each value is `PerRow`
(some dim holds the rows, and each entry depends on its own row only), `Fixed` (no data in it), `Summed` (a sum over rows of `PerRow`
values) or None, which is "not proved", never "wrong": such a loss is measured (`spmd.train.whole_batch`). Two traces, because
in one `loss.sum() / len(x)` and `loss.sum() / 64` look the same: the difference between two shows with which power of the number of rows
a value grows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.jaxpr import scanned
from spmd.nn import scoring
from spmd.train import chunked_cross_entropy
from spmd.train.row_rules import RULES
from spmd.train.row_values import SIMPLE, Fixed, PerRow, Sizes, Summed, Value, joined, moved_dim, simple

MOST_ELEMENTS = 4096  # of a captured array that is not one and the same object in both traces, to be compared by value
OWN_GRADIENT = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
JAX = str(Path(jax.__file__).parent)
CHUNKED = chunked_cross_entropy.__file__
ATTENTION = scoring.__file__
SIZED = ("shape", "sizes", "new_sizes", "limit_indices", "slice_sizes", "sharding", "out_sharding")  # the results' shapes determine these
INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclasses.dataclass(frozen=True)
class Walk(Sizes):
    """Two traces of one function, side by side.

    `draws`: of each draw, by its equation in the first trace, whether it is the same for a row on any worker, or for all rows.
    """

    draws: dict[int, bool] = dataclasses.field(default_factory=dict, compare=False)

    def jaxpr(self, first: Any, second: Any, given: Sequence[Value], consts: Sequence[Value]) -> Sequence[Value]:
        """What a jaxpr returns for these values."""
        if [e.primitive.name for e in first.eqns] != [e.primitive.name for e in second.eqns]:
            return [None] * len(first.outvars)
        seen: dict[Any, Value] = dict(zip([*first.constvars, *first.invars], [*consts, *given], strict=True))

        def read(one: Any, other: Any) -> Value:
            if hasattr(one, "val") and hasattr(other, "val"):
                return self.constant(one.val, other.val)
            return None if hasattr(one, "val") or hasattr(other, "val") else seen[one]

        for one, other in zip(first.eqns, second.eqns, strict=True):
            values = [read(a, b) for a, b in zip(one.invars, other.invars, strict=True)]
            found = [
                self.checked(v, a.aval, b.aval)
                for v, a, b in zip(self.equation(one, other, values), one.outvars, other.outvars, strict=True)
            ]
            seen.update(zip(one.outvars, found, strict=True))
        return [read(a, b) for a, b in zip(first.outvars, second.outvars, strict=True)]

    def closed(self, first: Any, second: Any, given: Sequence[Value]) -> Sequence[Value]:
        """`jaxpr` of a closed one, or of one without constants."""
        if not hasattr(first, "consts"):
            return self.jaxpr(first, second, given, [])
        if len(first.consts) != len(second.consts):
            return [None] * len(first.jaxpr.outvars)
        consts = [self.constant(a, b) for a, b in zip(first.consts, second.consts, strict=True)]
        return self.jaxpr(first.jaxpr, second.jaxpr, given, consts)

    def constant(self, first: Any, second: Any) -> Value:
        """A captured array or a literal."""
        if jax.dtypes.issubdtype(getattr(first, "dtype", np.dtype("float32")), jax.dtypes.extended):
            return Fixed() if first is second else None
        if np.shape(first) != np.shape(second):
            return None
        if np.ndim(first):
            same = first is second or (np.size(first) <= MOST_ELEMENTS and np.array_equal(np.asarray(first), np.asarray(second)))
            return Fixed() if same else None
        power = self.growth(float(np.real(first)), float(np.real(second)))
        return None if power is None else Fixed(power=power)

    def checked(self, value: Value, first: Any, second: Any) -> Value:
        """The value, if its shape depends on the number of rows in no other way than it says."""
        one, other = getattr(first, "shape", None), getattr(second, "shape", None)
        if value is None or one is None or other is None or len(one) != len(other):
            return None
        free = {value.dim} if isinstance(value, PerRow) else value.uniform if isinstance(value, Fixed) else set()
        if any(a != b and dim not in free for dim, (a, b) in enumerate(zip(one, other, strict=True))):
            return None
        if isinstance(value, PerRow):
            a, b = one[value.dim], other[value.dim]
            fits = a % (self.rows * value.inner) == 0 and a * self.others == b * self.rows
            return value if fits else None
        return value

    def equation(self, one: Any, other: Any, values: list[Value]) -> Sequence[Value]:
        """What an equation returns; None for what is not known."""
        name = one.primitive.name
        if name == "scan":
            return self.scan(one, other, values)
        if name == "cond":
            return self.cond(one, other, values)
        if name in OWN_GRADIENT and _defined_in(one) == CHUNKED and None not in values:
            return [_sum_over_tokens(values)]
        if name in OWN_GRADIENT and _defined_in(one) == ATTENTION:
            draws = any(var.aval.dtype == np.uint32 for var in one.invars)  # the count of its random numbers
            return [None if draws else _attention_of_rows(values)]
        if name in OWN_GRADIENT and not _row_by_row(one) and not all(isinstance(value, Fixed) for value in values):
            return [None] * len(one.outvars)  # its gradient is not in the trace
        inner = next((one.params[key] for key in INNER if hasattr(one.params.get(key), "eqns")), None)
        if inner is not None and name != "shard_map" and len(getattr(inner, "jaxpr", inner).invars) == len(values):
            return self.closed(inner, next(other.params[key] for key in INNER if key in other.params), values)
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return [None] * len(one.outvars)
        if name in SIMPLE:
            return [simple(name, one, other, known)] * len(one.outvars)
        if not self.alike(one.params, other.params):
            return [None] * len(one.outvars)
        if name in RULES:
            found = RULES[name](self, one, other, known)
            if name == "random_bits":
                own = isinstance(known[0], Fixed) and known[0].key and found is not None
                self.draws[id(one)] = own and self.draws.get(id(one), True)  # what is called twice is one equation
            return [found] * len(one.outvars)
        return self.unknown(one, other, values)

    def alike(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        """Whether an equation does the same in both traces, but for shapes; what it calls is compared as text, and by its constants."""

        def same(a: Any, b: Any) -> bool:
            return a is b or str(a) == str(b)

        def consts(params: Mapping[str, Any]) -> list[Any]:
            return [c for p in jax.tree.leaves([*params.values()], is_leaf=_closed) if _closed(p) for c in p.consts]

        pairs = zip(consts(first), consts(second), strict=False)
        return all(same(first[key], second.get(key)) for key in first if key not in SIZED) and all(
            isinstance(found, Fixed) and not found.power for found in (self.constant(a, b) for a, b in pairs)
        )

    def unknown(self, one: Any, other: Any, values: list[Value]) -> Sequence[Value]:
        """Whatever is computed without data, at shapes and numbers that are no function of the number of rows, is `Fixed`."""
        avals = [(a.aval, b.aval) for a, b in zip([*one.invars, *one.outvars], [*other.invars, *other.outvars], strict=True)]
        still = all(getattr(a, "shape", None) == getattr(b, "shape", None) for a, b in avals)
        if not still or not all(isinstance(value, Fixed) and not value.power for value in values):
            return [None] * len(one.outvars)
        return [Fixed(key=any(isinstance(value, Fixed) and value.key for value in values))] * len(one.outvars)

    def scan(self, one: Any, other: Any, values: list[Value]) -> Sequence[Value]:
        """A loop over some other dim than the rows; what it carries is looked at until it does not change."""
        consts, carried = scanned(one.params)
        none = [None] * len(one.outvars)
        if one.params["length"] != other.params["length"]:
            return none
        xs = [moved_dim(value, -1) for value in values[consts + carried :]]
        carry, ys = values[consts : consts + carried], []
        for _ in range(4):
            found = self.closed(one.params["jaxpr"], other.params["jaxpr"], [*values[:consts], *carry, *xs])
            after = [joined(a, b) for a, b in zip(carry, found[:carried], strict=True)]
            ys = [moved_dim(value, 1) for value in found[carried:]]
            if after == carry:
                return [*carry, *ys]
            carry = after
        return none

    def cond(self, one: Any, other: Any, values: list[Value]) -> Sequence[Value]:
        """Branches that are chosen without data."""
        if not isinstance(values[0], Fixed) or len(one.params["branches"]) != len(other.params["branches"]):
            return [None] * len(one.outvars)
        branches = zip(one.params["branches"], other.params["branches"], strict=True)
        first, *rest = [self.closed(a, b, values[1:]) for a, b in branches]
        for found in rest:
            first = [joined(a, b) for a, b in zip(first, found, strict=True)]
        return first


def _closed(value: Any) -> bool:
    return hasattr(value, "consts") and hasattr(value, "jaxpr")


def _row_by_row(equation: Any) -> bool:
    """Whether this is one of JAX's own functions with a rule of their own, such as relu, whose gradients join no rows."""
    return equation.primitive.name == "custom_jvp_call" and _defined_in(equation).startswith(JAX)


def _defined_in(equation: Any) -> str:
    """The file that defines a function with a derivative of its own."""
    defined = getattr(getattr(equation.params.get("call_jaxpr"), "jaxpr", None), "debug_info", None)
    return getattr(defined, "func_filename", None) or ""


def _sum_over_tokens(values: Sequence[Any]) -> Value:
    """What `cross_entropy_from_features` returns: a weighted sum over tokens, whatever the chunks, of what each token's features give."""
    features, *head, labels, weights = values
    at = (features.dim, features.inner) if isinstance(features, PerRow) and not features.power else None
    tokens = at is not None and isinstance(labels, PerRow) and (labels.dim, labels.inner) == at
    counted = isinstance(weights, Fixed) or (isinstance(weights, PerRow) and (weights.dim, weights.inner) == at)
    fixed = all(isinstance(value, Fixed) and not value.power for value in head)
    return Summed(weights.power) if tokens and counted and fixed else None


def _attention_of_rows(values: Sequence[Any]) -> Value:
    """What attention in tiles returns: each row's from that row of queries, keys, values and masks, if dim 0 of all has the rows."""
    by_row = [value for value in values if not (isinstance(value, Fixed) and not value.power)]
    along = [value for value in by_row if isinstance(value, PerRow) and value.dim == 0 and not value.power and value == by_row[0]]
    return along[0] if along and len(along) == len(by_row) else None


def walked(
    first: Any, second: Any, given: Sequence[Value], rows: int, others: int, draws: dict[int, bool] | None = None
) -> Sequence[Value]:
    """What each output is of a function that was traced for `rows` and for `others` rows.

    `given` says what the inputs are, `draws` takes what is found of these.
    """
    return Walk(rows, others, {} if draws is None else draws).closed(first, second, given)


def mean_over_rows(found: Sequence[Value], shape: tuple[int, ...]) -> bool:
    """Whether it may be taken in parts: one value per row or a scalar, of this shape, or (sum, count), which may be of each row."""
    if len(found) == 2 and not shape:
        total, count = found
        counted = isinstance(count, Summed) and isinstance(total, Summed) and count.power == total.power
        return counted or (isinstance(total, Summed) and isinstance(count, Fixed) and count.power == total.power + 1)
    return (
        all(value == PerRow(0) for value in found)
        if shape
        else found[0] == Summed(-1) or (isinstance(found[0], Fixed) and not found[0].power)
    )


def proved(
    first: Any, second: Any, given: Sequence[Value], rows: int, others: int, outputs: int, draws: dict[int, bool] | None = None
) -> bool:
    """Whether a loss, traced for `rows` and for `others` rows, is a mean over rows that may be taken in parts; see `walked`."""
    return mean_over_rows(walked(first, second, given, rows, others, draws)[:outputs], first.out_avals[0].shape)
