"""Compute the loss of the full batch on workers that hold parts of its rows, from the two traces
that `spmd.train.batch_rows.walk` reads.

An equation runs as it was traced for a part, on this worker's rows; or, where its inputs are the
same on all workers, as it was traced for the batch. Numbers in it are always those of the batch: a
mean is a sum over rows, divided by the rows of the batch, and `len(x)` is their number. What `walk`
finds that workers have to share is summed, or gathered, here. All of it is differentiable: under
`jax.shard_map` with `check_vma=False` the mean over workers of the gradients of what comes out is
the gradient of the loss of the full batch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from spmd.base.xla import defined_in
from spmd.jaxpr.inner_programs import CUSTOM, branches_of, called_program, scan_of
from spmd.jaxpr.programs import evaluated
from spmd.nn import gathered_blocks, gathered_scan, parallel_context
from spmd.train.batch_rows.kinds import ELEMENTWISE, SUMS, Fixed, Kind, Local, PerRow, Summed
from spmd.train.batch_rows.lookups import numbers_row, rows_of_index
from spmd.train.batch_rows.pairs import PairedEquation, Unreadable
from spmd.train.batch_rows.resized import RESIZED
from spmd.train.batch_rows.row_arrays import RowArrays, Shape, traced_shape
from spmd.train.batch_rows.rules import OVER_ROWS
from spmd.train.batch_rows.scatters import RowDims, row_dims
from spmd.train.batch_rows.walk import Held, Shared, Walk
from spmd.wire import collectives

# they and elementwise functions look at no two entries together
MOVES = ("broadcast_in_dim", "reshape", "transpose", "squeeze")
# of JAX, for `jax.checkpoint`
RECOMPUTED = ("remat", "remat2", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Compute(RowArrays):
    """`Walk` that computes the loss of the batch, from this worker's rows."""

    def equation(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of an equation."""
        if _of_layout(equation.one):
            return self.of_layout(equation, inputs)
        is_local = any(isinstance(value.kind, Local) for value in inputs)
        is_call = called_program(equation) is not None and equation.primitive.name not in CUSTOM
        if is_call or not is_local:
            return super().equation(equation, inputs)
        if any(isinstance(value.kind, PerRow | Summed) for value in inputs):
            raise Unreadable("it joins rows with something else that layers return")
        arrays = evaluated(equation.other, self.on_rows(equation.other, inputs))
        return [Held(Local(), True, array) for array in arrays]

    def of_layout(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of a layout's own function, such as a pipeline, on this worker's
        rows.

        Raises:
          Unreadable: it needs more than the rows.
        """
        if self.here != self.others:
            raise Unreadable("it has one row here")
        if not self.row_wise:
            raise Unreadable("it joins rows in layers that this layout computes in parts")
        if any(isinstance(value.kind, Summed) for value in inputs):
            raise Unreadable("a stack of layers gets a sum over rows")
        pairs = zip(equation.one.outvars, equation.other.outvars, strict=True)
        kinds = [self.by_shape(one.aval, other.aval) for one, other in pairs]
        if None in kinds:
            raise Unreadable("a stack of layers has other dims on few rows than on many")
        arrays = evaluated(equation.other, self.on_rows(equation.other, inputs))
        outputs = []
        for kind, array in zip(kinds, arrays, strict=True):
            outputs.append(Held(kind if isinstance(kind, PerRow) else Local(), True, array))
        return outputs

    # operations -----------------------------------------------------------------------------------

    def results(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Held]:
        """Return the outputs of an equation, whose inputs are now of the kinds that it needs."""
        held = super().results(one, other, values, kinds)
        return _with_arrays(held, self.arrays(one, other, values, kinds))

    def arrays(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Any]:
        """Return the output arrays of an equation, which are of these kinds."""
        name, inputs = one.primitive.name, [value.kind for value in values]
        if name == "optimization_barrier":
            return evaluated(other, [value.array for value in values])
        if name in OVER_ROWS and isinstance(inputs[0], PerRow) and isinstance(kinds[0], Fixed):
            return [self.shared(lambda: self._over_rows(one, values[0]))]
        if name == "random_bits" and isinstance(inputs[0], Fixed) and isinstance(kinds[0], PerRow):
            return self._draws(one, other, values[0], kinds[0])
        if all(isinstance(kind, Fixed) for kind in inputs):
            return self._of_fixed(one, other, values, kinds)
        if name.startswith("scatter") and (rows := row_dims(one, other, inputs)) is not None:
            return self._scattered(one, values, rows)
        if any(isinstance(kind, Summed) for kind in inputs):
            return self._of_sums(one, other, values)
        return self._of_rows(one, other, values, kinds)

    def _draws(self, one: Any, other: Any, key: Held, kind: Kind) -> list[Any]:
        """Return the draws of a key for this worker's rows."""
        array = self.worker_key(key.array)
        shape = self.worker_shape(kind, *_traced_shapes(one.outvars, other.outvars)[0])
        # those of each key of an array of keys come after its dims
        params = {**other.params, "shape": shape[array.ndim :]}
        return evaluated(other.replace(params=params), [array])

    def _of_sums(self, one: Any, other: Any, values: list[Held]) -> list[Any]:
        """Return the output arrays of an equation that adds, moves or scales sums over rows."""
        name, shapes = one.primitive.name, _traced_shapes(one.invars, other.invars)
        arrays = []
        for number, (value, pair) in enumerate(zip(values, shapes, strict=True)):
            is_term = name in SUMS or (name == "select_n" and number > 0)
            if is_term or isinstance(value.kind, Summed):
                kind = Summed()
            else:
                kind = Fixed()
            arrays.append(self.coerced(value, kind, *pair))
        return evaluated(one, arrays)

    def _of_fixed(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Any]:
        """Return the output arrays of an equation whose inputs are the same on every worker."""
        shapes = _traced_shapes(one.outvars, other.outvars)
        here = [self.worker_shape(kind, *pair) for kind, pair in zip(kinds, shapes, strict=True)]
        arrays = [value.array for value in values]
        is_part = _have_shapes(arrays, other.invars) and here == [part for _, part in shapes]
        if is_part and one.primitive.name in (*ELEMENTWISE, *MOVES):
            return evaluated(other, arrays)
        inputs = zip(values, one.invars, strict=True)
        on_all_rows = [self.on_all_rows(value, traced_shape(x)) for value, x in inputs]
        return self._coerced_all(evaluated(one, on_all_rows), kinds, shapes)

    def _coerced_all(
        self, arrays: list[Any], kinds: list[Kind], shapes: list[tuple[Shape, Shape]]
    ) -> list[Any]:
        """Return arrays of all rows, the same on every worker, as arrays of these kinds."""
        coerced = []
        for array, kind, pair in zip(arrays, kinds, shapes, strict=True):
            coerced.append(self.coerced(Held(Fixed(), array=array), kind, *pair))
        return coerced

    def _of_rows(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Any]:
        """Return the output arrays of an equation on this worker's rows."""
        name = one.primitive.name
        if name == "gather" and isinstance(kinds[0], Summed):
            return [self._looked_up(one, values[0], values[1], values[0].kind)]
        if name == "gather":
            column = numbers_row(one, [value.kind for value in values])
            if column is not None:
                along = rows_of_index(values[1].kind)
                index = self._numbered(values[1], along, column, traced_shape(one.invars[1]))
                return evaluated(other, [values[0].array, index])
        arrays = self._inputs_on_rows(one, other, values)
        shapes = _traced_shapes(one.outvars, other.outvars)
        here = [self.worker_shape(kind, *pair) for kind, pair in zip(kinds, shapes, strict=True)]
        is_part = _have_shapes(arrays, other.invars) and here == [part for _, part in shapes]
        if is_part or name in ELEMENTWISE:
            return evaluated(other, arrays)
        if name in RESIZED:
            params = {**one.params, **RESIZED[name](one, arrays, here[0])}
            outputs = evaluated(one.replace(params=params), arrays)
            if [jnp.shape(array) for array in outputs] == here:
                return outputs
        if self.place.shared_arrays is not None:
            raise Unreadable(f"its {name} needs all rows at once")
        # all rows on every worker, which keeps those that it needs
        inputs = zip(values, one.invars, strict=True)
        on_all_rows = [self.on_all_rows(value, traced_shape(x)) for value, x in inputs]
        return self._coerced_all(evaluated(one, on_all_rows), kinds, shapes)

    def _inputs_on_rows(self, one: Any, other: Any, values: list[Held]) -> list[Any]:
        """Return the input arrays of an equation of which at least one is `PerRow`."""
        name, full = one.primitive.name, [traced_shape(x) for x in one.invars]
        first = next(n for n, value in enumerate(values) if isinstance(value.kind, PerRow))
        row_dims = _row_dims_of_others(one, values, first)
        # their operands have dims of their own
        is_product = name in ("dot_general", "gather")
        arrays = []
        for number, value in enumerate(values):
            shape = full[number]
            dim_and_inner = row_dims.get(number)
            along, _ = dim_and_inner or (0, 1)
            # one entry, which is meant for all rows
            is_single = name in ELEMENTWISE and (not shape or shape[along] == 1)
            is_part = shape == traced_shape(other.invars[number])
            if isinstance(value.kind, PerRow) or is_part or is_single:
                arrays.append(value.array)
            elif dim_and_inner and (is_product or len(shape) == len(full[first])):
                arrays.append(self.rows_of(value, *dim_and_inner, shape))
            else:
                arrays.append(self.on_all_rows(value, shape))
        return arrays

    def _numbered(self, index: Held, along: int, column: int, full: Shape) -> Any:
        """Return the rows of an index whose `column` holds the number of the row, which is here its
        place in the part.
        """
        of_rows = self.rows_of(index, along, 1, full)
        shape = [1] * of_rows.ndim
        shape[along] = self.here
        place = jnp.arange(self.here, dtype=of_rows.dtype).reshape(shape)[..., 0]
        return of_rows.at[..., column].set(jnp.broadcast_to(place, of_rows.shape[:-1]))

    def _scattered(self, one: Any, values: list[Held], rows: RowDims) -> list[Any]:
        """Return the rows that are written here, or what the rows here add."""
        operand_shape, *shapes = [traced_shape(x) for x in one.invars]
        operand, *others = values
        arrays = []
        for value, dim, shape in zip(others, rows[1:3], shapes, strict=True):
            if dim is None:
                arrays.append(self.on_all_rows(value, shape))
            else:
                arrays.append(self.rows_of(value, dim, rows.inner, shape))
        if rows.column is not None and rows.index is not None:
            arrays[0] = self._numbered(others[0], rows.index, rows.column, shapes[0])
        if rows.operand is None:
            written = self.coerced(operand, Summed(), operand_shape, operand_shape)
        else:
            written = self.rows_of(operand, rows.operand, rows.inner, operand_shape)
        return evaluated(one, [written, *arrays])

    def _looked_up(self, one: Any, table: Held, index: Held, kind: Any) -> Any:
        """Return the entries of a table that are in the rows here, and 0 for those that are not: a
        part of the sum over workers.
        """
        numbers, place = one.params["dimension_numbers"], self.place
        column = list(numbers.start_index_map).index(kind.dim)
        places = self.on_all_rows(index, traced_shape(one.invars[1]))
        size = traced_shape(one.invars[0])[kind.dim]
        at = places[..., column]
        if one.params["mode"] == GatherScatterMode.CLIP:
            at = jnp.clip(at, 0, size - 1)
        outside = (at < 0) | (at >= size)
        # rows are split into [outer, worker, row of the part, microbatch, inner]
        quotient, inner = jnp.divmod(at, kind.inner)
        quotient, microbatch = jnp.divmod(quotient, place.microbatches)
        quotient, row = jnp.divmod(quotient, self.here)
        outer, worker = jnp.divmod(quotient, place.workers)
        is_mine = (worker == place.worker) & (microbatch == place.microbatch)
        is_here = jnp.where(outside, self.is_first(), is_mine)
        place_here = (outer * self.here + row) * kind.inner + inner
        local = jnp.where(is_mine & ~outside, place_here, jnp.where(outside, size, 0))
        index_here = places.at[..., column].set(local.astype(places.dtype))
        (entries,) = evaluated(one, [table.array, index_here])
        index_dims = [dim for dim in range(entries.ndim) if dim not in numbers.offset_dims]
        is_entry_here = lax.broadcast_in_dim(is_here, entries.shape, index_dims)
        return jnp.where(is_entry_here, entries, jnp.zeros_like(entries))

    def _over_rows(self, one: Any, value: Held) -> Any:
        """Return the largest, or smallest, over the rows of all workers; equal ones get equal parts
        of the gradient, as in JAX.
        """
        dims, axes = tuple(one.params["axes"]), self.place.axes
        is_largest = OVER_ROWS[one.primitive.name] == "max"

        def reduced(x: jax.Array) -> jax.Array:
            if is_largest:
                return collectives.maximum(x.max(dims), axes)
            return collectives.minimum(x.min(dims), axes)

        if value.array.dtype == jnp.bool_:
            return reduced(value.array.astype(jnp.int32)) > 0
        if not jnp.issubdtype(value.array.dtype, jnp.inexact):
            return reduced(value.array)
        over_rows = jax.custom_jvp(reduced)  # JAX has no derivative of a maximum over devices

        @over_rows.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple:
            (x,), (tangent,) = primals, tangents
            extreme = over_rows(x)
            equal = (x == jnp.expand_dims(extreme, dims)).astype(x.dtype)
            total = collectives.all_reduce((equal * tangent).sum(dims), axes)
            return extreme, total / collectives.all_reduce(equal.sum(dims), axes)

        return over_rows(value.array)

    # programs in programs -------------------------------------------------------------------------

    def call(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of a function that is called once; one that is recomputed is
        recomputed here, too.
        """
        # arrays in it do not exist outside
        if equation.primitive.name not in RECOMPUTED or self.record is not None:
            return super().call(equation, inputs)
        outputs: list[Held] = []

        def body(*arrays: Any) -> list[Any]:
            outputs[:] = super(Compute, self).call(equation, _with_arrays(inputs, arrays))
            return [held.array for held in outputs]

        params = equation.params
        again = jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])
        arrays = again(*(value.array for value in inputs))
        return _with_arrays(outputs, arrays)

    def routed(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of a mixture of experts; its means over its own tokens are parts of
        those over all.
        """
        held = super().routed(equation, inputs)
        if self.here != self.others:
            raise Unreadable("a mixture of experts routes the tokens of one row alone")
        y, chosen, *means = evaluated(equation.other, [value.array for value in inputs])
        return _with_arrays(held, [y, chosen, *(mean / self.parts for mean in means)])

    def of_jax(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of a function of JAX, which keeps its derivative if workers share
        nothing in it.
        """
        (one, other), reader = equation, Walk(self.rows, self.others)
        outputs = reader.of_jax(equation, [value._replace(array=None) for value in inputs])
        is_by_row = any(isinstance(value.kind, PerRow) for value in inputs)
        is_by_row = is_by_row and all(isinstance(held.kind, PerRow) for held in outputs)
        if reader.shares or not is_by_row:
            return super().of_jax(equation, inputs)
        arrays = [value.array for value in inputs]
        if _have_shapes(arrays, other.invars):
            return _with_arrays(outputs, evaluated(other, arrays))
        # as many rows as in the other trace, because its derivative is for arrays of those shapes
        pairs = zip(inputs, one.invars, strict=True)
        on_full = evaluated(one, [self.repeated(value, traced_shape(x)) for value, x in pairs])
        arrays = []
        for array, held, variable in zip(on_full, outputs, one.outvars, strict=True):
            arrays.append(self.first_rows(array, cast(PerRow, held.kind), traced_shape(variable)))
        return _with_arrays(outputs, arrays)

    def looped(
        self,
        equation: PairedEquation,
        inputs: list[Held],
        carry: list[Held],
        ys: list[Held],
        shares: list[Shared],
    ) -> list[Held]:
        """Return the outputs of a scan whose body carries these kinds, and returns others."""
        (one, other), loop = equation, scan_of(equation)
        held = super().looped(equation, inputs, carry, ys, shares)
        constants, carried, xs = loop.split(inputs)
        entries = Walk.scan_entries(xs)
        programs = loop.program, scan_of(other).program
        body_outputs = [program.jaxpr.outvars for program in programs]
        output_shapes = _traced_shapes(*body_outputs)
        reader = dataclasses.replace(self, shares=[])  # the loop's are in `shares`

        def body(carried_arrays: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            of_step = [*_with_arrays(carry, carried_arrays), *_with_arrays(entries, slices)]
            outputs = reader.closed(*programs, [*constants, *of_step])
            arrays = []
            for value, agreed, pair in zip(outputs, [*carry, *ys], output_shapes, strict=True):
                arrays.append(reader.coerced(value, agreed.kind, *pair))
            return arrays[: loop.carried], arrays[loop.carried :]

        start = []
        _, carried_shapes, _ = loop.split(_traced_shapes(one.invars, other.invars))
        for value, agreed, pair in zip(carried, carry, carried_shapes, strict=True):
            start.append(self.coerced(value, agreed.kind, *pair))
        last, stacked = lax.scan(
            body,
            start,
            [value.array for value in xs],
            length=loop.length,
            reverse=one.params["reverse"],
            unroll=one.params["unroll"],
        )
        return _with_arrays(held, [*last, *stacked])

    def chosen(
        self, equation: PairedEquation, index: Held, arguments: list[Held], kinds: list[Held]
    ) -> list[Held]:
        """Return the outputs of branches that agree on these kinds."""
        shapes = _traced_shapes(equation.one.outvars, equation.other.outvars)

        def branch(programs: tuple[Any, Any]) -> Callable[..., list[Any]]:
            def coerced_outputs(*arrays: Any) -> list[Any]:
                outputs = self.closed(*programs, _with_arrays(arguments, arrays))
                coerced = []
                for value, agreed, pair in zip(outputs, kinds, shapes, strict=True):
                    coerced.append(self.coerced(value, agreed.kind, *pair))
                return coerced

            return coerced_outputs

        pairs = zip(*map(branches_of, equation), strict=True)
        branches = [branch(programs) for programs in pairs]
        arrays = lax.switch(index.array, branches, *(value.array for value in arguments))
        return _with_arrays(kinds, arrays)


OWN_FILES = (gathered_scan.__file__, gathered_blocks.__file__)


def _of_layout(equation: Any) -> bool:
    """Return whether an equation is a layout's own function: layers whose parameters are gathered
    in it, or a region of several devices.
    """
    if equation.primitive.name in CUSTOM:
        return defined_in(equation) in OWN_FILES
    is_region = equation.primitive.name == "shard_map"
    return is_region and defined_in(equation) == parallel_context.__file__


def _with_arrays(values: Sequence[Held], arrays: Sequence[Any]) -> list[Held]:
    """Return values with these arrays."""
    return [value._replace(array=array) for value, array in zip(values, arrays, strict=True)]


def _traced_shapes(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Shape, Shape]]:
    """Return the shapes of variables of the two traces, in pairs."""
    return list(zip(map(traced_shape, first), map(traced_shape, second), strict=True))


def _have_shapes(arrays: Sequence[Any], variables: Sequence[Any]) -> bool:
    """Return whether arrays have the shapes of variables."""
    return [jnp.shape(array) for array in arrays] == [traced_shape(x) for x in variables]


def _row_dims_of_others(one: Any, values: list[Held], first: int) -> dict[int, tuple[int, int]]:
    """Return the dim, and the entries for each row along it, that correspond to the rows of the
    first `PerRow` input, by number of other inputs.
    """
    rows: Any = values[first].kind
    if one.primitive.name == "dot_general":
        return _partners(one, values)
    if one.primitive.name == "gather" and isinstance(values[0].kind, PerRow):
        numbers, table = one.params["dimension_numbers"], values[0].kind
        if table.dim not in numbers.operand_batching_dims:
            return {}
        place = list(numbers.operand_batching_dims).index(table.dim)
        return {1: (numbers.start_indices_batching_dims[place], table.inner)}
    numbers_of_arrays = [n for n, x in enumerate(one.invars) if traced_shape(x) and n != first]
    return dict.fromkeys(numbers_of_arrays, (rows.dim, rows.inner))


def _partners(one: Any, values: list[Held]) -> dict[int, tuple[int, int]]:
    """Return the dim of an operand that is summed, or paired, with the rows of the other one, by
    the number of the operand.
    """
    partners = {}
    for side, value in enumerate(values):
        if not isinstance(value.kind, PerRow):
            continue
        for pairs in one.params["dimension_numbers"]:
            dims, dims_of_other = list(pairs[side]), list(pairs[1 - side])
            if value.kind.dim in dims:
                dim = int(dims_of_other[dims.index(value.kind.dim)])
                partners[1 - side] = dim, value.kind.inner
    return partners
