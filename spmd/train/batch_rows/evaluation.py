"""Find a loss or metric of an evaluation on all rows of the data, from sums over the rows of each
batch.

A masked mean, an F1, a root mean square: scalars that are functions of sums over rows. The program
of each batch gives these sums, as many columns as it needs; they are added up over batches, and the
function of them is computed once, at the end. What is computed from a sum is the same for all rows,
until it is joined with rows again (advantages that are normalised, say): then the rows of all
batches would have to be seen twice, and the result is that of a batch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd.jaxpr.inner_programs import CALLS, CUSTOM
from spmd.jaxpr.programs import evaluated, is_literal, part_of, without_unused
from spmd.train.batch_rows.kinds import Fixed, Kind, PerRow, Summed, is_mean
from spmd.train.batch_rows.pairs import PairedEquation, Unreadable
from spmd.train.batch_rows.walk import Held, Walk
from spmd.train.objective import LOSS

HALF = (jnp.bfloat16, jnp.float16)
# params of equations
DTYPES = ("new_dtype", "preferred_element_type")
# of a layout's own functions; each worker has its rows in it
SHARD_MAP = "shard_map"


@dataclasses.dataclass(frozen=True)
class OfAllRows(Fixed):
    """An array that is computed from sums over the rows of all batches."""


@dataclasses.dataclass(frozen=True)
class OfBatch(Fixed):
    """An array that is known for one batch, and not for all rows."""


@dataclasses.dataclass(frozen=True)
class BatchSums(Walk):
    """`Walk` with the arrays of one batch, `rows` of them, or with sums over `total_rows` rows of
    several batches.

    Arrays of kinds other than `OfAllRows` are those of the batch, or None where there are `totals`.

    Attributes:
      sums: takes the arrays to be added up over batches, float32[k] each.
      totals: gives the next k of their sums over all batches, float32[k], where the function of
        them is computed.
      total_rows: the number of rows of all batches.
    """

    sums: list[Any] = dataclasses.field(default_factory=list, compare=False)
    totals: Callable[[int], Any] | None = None
    total_rows: Any = None

    def equation(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of an equation."""
        if any(isinstance(value.kind, OfBatch) for value in inputs):
            return _of_batch(equation)
        if not any(isinstance(value.kind, OfAllRows) for value in inputs):
            return super().equation(equation, inputs)
        if equation.primitive.name in CALLS | CUSTOM:
            return self.called(equation, inputs)
        return self.of_sums(equation, inputs)

    def of_sums(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of a function of sums over all rows, and of what all rows share."""
        one, other = equation
        has_rows = any(isinstance(value.kind, PerRow) for value in inputs)
        if has_rows or not self.is_same(one, other):
            return _of_batch(one)
        of_all = []
        for value, variable in zip(inputs, one.invars, strict=True):
            of_all.append(self.of_all_rows(value, variable))
        if any(isinstance(value.kind, OfBatch) for value in of_all):
            return _of_batch(one)
        kinds = self.without_rows(one, other, [value.kind for value in of_all])
        params = dict(one.params)
        for key in DTYPES:
            # the inputs have float32 in place of it
            if params.get(key) in HALF:
                params[key] = jnp.float32
        arrays = evaluated(one.replace(params=params), [value.array for value in of_all])
        outputs = []
        for kind, array in zip(kinds, arrays, strict=True):
            outputs.append(Held(OfAllRows(power=kind.power), array=array))
        return outputs

    def of_all_rows(self, value: Held, variable: Any) -> Held:
        """Return a sum over the rows of a batch, or an array that all batches share, as that of all
        rows.
        """
        if isinstance(value.kind, OfAllRows):
            return value
        kind, aval = value.kind, variable.aval
        dtype = aval.dtype
        # A sum over many batches is too large for few bits.
        if aval.dtype in HALF:
            dtype = jnp.dtype("float32")
        if is_literal(variable) and kind.power == 0:
            return Held(OfAllRows(), array=jnp.asarray(variable.val, dtype))
        is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
        if kind.power is None or isinstance(kind, PerRow) or is_key:
            return Held(OfBatch())
        power = kind.power
        # of what is the same for all batches the mean over rows is taken
        if not isinstance(kind, Summed):
            power -= 1
        kind_of_all = OfAllRows(power=power + 1)
        if self.totals is None:
            # a sum over n of N rows grows as n ** -power
            scaled = jnp.ravel(value.array).astype(jnp.float32) * float(self.rows) ** -power
            self.sums.append(scaled)
            return Held(kind_of_all, array=value.array.astype(dtype))
        total = (self.totals(aval.size) * self.total_rows**power).reshape(aval.shape)
        if not jnp.issubdtype(dtype, jnp.inexact):
            total = jnp.round(total)
        return Held(kind_of_all, array=total.astype(dtype))

    def with_arrays(self, one: Any, values: list[Held], held: list[Held]) -> list[Held]:
        """Return the outputs of an equation, of known kinds, with the arrays of the batch."""
        if self.totals is not None:
            return held
        arrays = evaluated(one, [value.array for value in values])
        return [each._replace(array=array) for each, array in zip(held, arrays, strict=True)]

    def operation(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of an equation; sums that it needs of all rows are added up."""
        one, other = equation
        kinds = self.checked_kinds(one, other, [value.kind for value in inputs])
        if one.primitive.name == SHARD_MAP:
            outputs = zip(one.outvars, other.outvars, strict=True)
            kinds = [self.by_shape(first.aval, second.aval) for first, second in outputs]
        # such as a sum, and 1 more
        is_mixed = any(isinstance(kind, Summed) and kind.power is None for kind in kinds)
        has_rows = any(isinstance(value.kind, PerRow) for value in inputs)
        is_known = all(value.kind.power is not None for value in inputs)
        if is_mixed and is_known and not has_rows:
            return self.of_sums(equation, inputs)
        if None not in kinds:
            held = [Held(kind) for kind in kinds if kind is not None]
            return self.with_arrays(one, inputs, held)
        # nothing is differentiated here
        if one.primitive.name in CUSTOM:
            return self.called(equation, inputs)
        if has_rows:
            return _of_batch(one)
        return self.of_sums(equation, inputs)

    def routed(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of a mixture of experts, which routes each group of tokens
        separately.
        """
        return self.with_arrays(equation.one, inputs, super().routed(equation, inputs))

    def looped(
        self,
        equation: PairedEquation,
        inputs: list[Held],
        carry: list[Held],
        ys: list[Held],
        shares: list[Any],
    ) -> list[Held]:
        """Return the outputs of a scan whose body carries these kinds, and returns others."""
        held = super().looped(equation, inputs, carry, ys, shares)
        if shares:
            return _of_batch(equation)
        return self.with_arrays(equation.one, inputs, held)

    def cond(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of branches; a batch may take another one than all rows would."""
        branch = inputs[0].kind
        if not isinstance(branch, Fixed) or branch.power != 0:
            return _of_batch(equation)
        before = len(self.shares)
        held = list(super().cond(equation, inputs))
        if len(self.shares) > before:
            return _of_batch(equation)
        return self.with_arrays(equation.one, inputs, held)


def _of_batch(one: Any) -> list[Held]:
    """Return the outputs of an equation as known for one batch only."""
    return [Held(OfBatch(power=None)) for _ in one.outvars]


@dataclasses.dataclass(frozen=True)
class FromBatches:
    """The relation of a loss's or metric's value on all rows to its values on batches.

    Attributes:
      mean: the mean of its values, weighted by rows, is right.
      sums: the number of sums over rows of which it is a function; 0: it is none of sums.
      scales: whether it is known that the function does not depend on how many rows there are.
    """

    mean: bool = False
    sums: int = 0
    scales: bool = True


@dataclasses.dataclass(frozen=True)
class Traces:
    """A loss or metric of an evaluation, traced for the rows of a batch and for another number of
    rows.

    Attributes:
      first: the closed jaxpr for `rows` rows.
      second: that for `others`.
      inputs: with their arrays or without.
      shape: of the first output.
    """

    rows: int
    others: int
    first: Any
    second: Any
    inputs: Sequence[Held]
    shape: tuple[int, ...]

    def from_batches(self) -> FromBatches:
        """Return how the value on all rows follows from batches."""
        sizes: list[int] = []
        outputs: list[Held] = []

        def zeros(size: int) -> jax.Array:
            sizes.append(size)
            return jnp.zeros(size)

        def follow() -> None:
            outputs[:] = self._outputs(totals=zeros, total_rows=jnp.float32(self.rows))

        try:
            jax.eval_shape(follow)
        except (Unreadable, TypeError, ValueError):  # two traces that do not correspond
            return FromBatches()
        kinds = [held.kind for held in outputs]
        if any(isinstance(kind, OfBatch) for kind in kinds):
            return FromBatches()
        if not any(isinstance(kind, OfAllRows) for kind in kinds):
            return FromBatches(mean=is_mean(kinds, self.shape))
        is_scalar = len(kinds) == 1 and not self.shape
        power = kinds[0].power
        if not is_scalar or power not in (0, None):
            return FromBatches()
        return FromBatches(sums=sum(sizes), scales=power == 0)

    def of_batch(self) -> jax.Array:
        """Return the sums of this batch, float32[k]."""
        sums: list[jax.Array] = []
        self._outputs(sums=sums)
        return jnp.concatenate(sums)

    def of_all(self, totals: jax.Array, total_rows: Any) -> jax.Array:
        """Return the value on all rows, from the sums of the sums of batches, float32[k], and the
        number of all rows.
        """
        start = 0

        def next_totals(size: int) -> jax.Array:
            nonlocal start
            start += size
            return totals[start - size : start]

        (output,) = self._outputs(totals=next_totals, total_rows=total_rows)
        return output.array

    def _outputs(self, **options: Any) -> list[Held]:
        reader = BatchSums(self.rows, self.others, **options)
        return reader.closed(self.first, self.second, self.inputs)


def traces_by_name(
    trace: Callable[[int], tuple[Any, tuple]],
    rows: int,
    kinds: Sequence[Kind],
    arrays: Sequence[Any] | None = None,
) -> dict[str, Traces]:
    """Return the loss and metrics of an evaluation by name, each with only the equations that it
    needs.

    Args:
      trace: from a number of rows to the closed jaxpr, and the shapes of (loss, metrics by name).
      kinds: of the inputs.
      arrays: the inputs for a batch of `rows` rows.
    """
    others = 2 * rows
    (first, shapes), (second, _) = trace(rows), trace(others)
    inputs = []
    for kind, array in zip(kinds, arrays or [None] * len(kinds), strict=True):
        inputs.append(Held(kind, array=array))
    leaves, structure = jax.tree.flatten(shapes)
    loss, metrics = jax.tree.unflatten(structure, range(len(leaves)))
    traces = {}
    for name, output in {LOSS: loss, **metrics}.items():
        numbers = jax.tree.leaves(output)
        traces[name] = Traces(
            rows,
            others,
            _outputs_of(first, numbers),
            _outputs_of(second, numbers),
            inputs,
            tuple(leaves[numbers[0]].shape),
        )
    return traces


def _outputs_of(closed: Any, numbers: Sequence[int]) -> Any:
    """Return a closed jaxpr with some of the outputs, and only the equations that they need."""
    jaxpr = closed.jaxpr
    outputs = [jaxpr.outvars[number] for number in numbers]
    needed = without_unused(jaxpr.eqns, outputs)
    return closed.replace(jaxpr=part_of(jaxpr, needed, jaxpr.invars, outputs, jaxpr.constvars))
