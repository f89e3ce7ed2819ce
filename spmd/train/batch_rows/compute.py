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
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from spmd.jaxpr import scanned
from spmd.nn import gathered_blocks, gathered_scan, parallel_context
from spmd.rng import at_worker, counts_rows, data_at_worker, worker_key
from spmd.train.batch_rows.kinds import ELEMENTWISE, Fixed, Kind, Local, PerRow, Summed
from spmd.train.batch_rows.rules import OVER_ROWS, numbers_row, rows_of_index
from spmd.train.batch_rows.scatters import RowDims, row_dims
from spmd.train.batch_rows.walk import (
    CALLS,
    OWN_GRADIENT,
    Held,
    Shared,
    Unreadable,
    Walk,
    defined_in,
    evaluated,
)
from spmd.wire import collectives

Shape = tuple[int, ...]
# they and elementwise functions look at no two entries together
MOVES = ("broadcast_in_dim", "reshape", "transpose", "squeeze")


@dataclasses.dataclass(frozen=True)
class Place:
    """The rows of the batch that a part of it holds, and what its worker knows of the others.

    Attributes:
      axes: mesh axes over which the batch is split, in order.
      workers: the number of workers that have rows of their own; several may be simulated at one
        position of the mesh.
      worker: the number of this one, or a tracer.
      microbatches: the number of parts into which the rows of a worker are split, with a stride
        (`spmd.train.accumulate`).
      microbatch: the number of this one, or a tracer.
      known: the arrays that all rows share, in the order in which they are needed. None: there is
        one part at each position of the mesh, so that workers share them by collectives.
    """

    axes: tuple[str, ...] = ()
    workers: int = 1
    worker: Any = 0
    microbatches: int = 1
    microbatch: Any = 0
    known: list[Any] | None = None

    def key_of_rows(self, batch: Any) -> Callable[[Any], Any]:
        """Return a function from a random key to one of which `Compute` makes that of a worker with
        as many rows as `batch` has.
        """
        if self.workers == 1:
            return lambda key: key
        return functools.partial(
            worker_key,
            worker=np.zeros((), np.uint32),
            rows=jax.tree.leaves(batch)[0].shape[0],
            workers=self.workers,
        )


@dataclasses.dataclass(frozen=True)
class Compute(Walk):
    """`Walk` with arrays, inside `jax.shard_map`.

    Every `Held.array` has the shape that `_shape_of` says.

    Attributes:
      here: the number of rows here; the second trace may be one of two rows where there is one.
      place: where they are in the batch.
      row_wise: whether the layers that a layout computes in ways of its own are row by row.
      known: goes through `place.known`.
      record: takes the arrays that workers share.
      constants: the captured arrays of the second trace, by the identity of those of the first; a
        pipeline's schedule is one.
    """

    here: int = 0
    place: Place = Place()
    row_wise: bool = False
    known: Iterator[Any] | None = None
    record: list[Any] | None = None
    constants: dict[int, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def parts(self) -> int:
        """Return the number of parts of the batch, of which this is one."""
        return self.rows // self.here

    # what workers share ---------------------------------------------------------------------------

    def converted(self, value: Held, kind: Kind, one: Any, variables: tuple[Any, Any]) -> Held:
        """Return an input of an equation as another kind: workers share it."""
        held = super().converted(value, kind, one, variables)
        if held.kind is value.kind:
            return value
        full, part = _shape(variables[0]), _shape(variables[1])
        return held._replace(array=self.shared(lambda: self.coerced(value, kind, full, part)))

    def shared(self, together: Callable[[], Any]) -> Any:
        """Return an array that workers find together, or have found before."""
        if self.known is not None:
            return next(self.known)
        array = together()
        if self.record is not None:
            self.record.append(array)
        return array

    def coerced(self, value: Held, kind: Kind, full: Shape, part: Shape) -> Any:
        """Return the array of a value as one of another kind. `full` and `part` are its shapes in
        the two traces.
        """
        if isinstance(kind, PerRow):
            return self._rows_of(value, kind.dim, kind.inner, full)
        if isinstance(kind, Summed):
            return (
                value.array
                if isinstance(value.kind, Summed)
                else self._as_part(self._full(value, full))
            )
        return _narrowed(self._full(value, full), full, _shape_of(self, kind, full, part))

    def _as_part(self, array: Any) -> Any:
        """Return the part of an array, the same on all workers, that the sum over parts makes
        it.
        """
        if jnp.issubdtype(array.dtype, jnp.inexact):
            return array / self.parts
        return jnp.where(
            (jnp.asarray(self.place.worker) == 0) & (jnp.asarray(self.place.microbatch) == 0),
            array,
            jnp.zeros_like(array),
        )

    def _full(self, value: Held, full: Shape) -> Any:
        """Return the value of the full batch, on every worker."""
        kind, array = value.kind, value.array
        if isinstance(kind, Summed):
            return collectives.all_reduce(array, self.place.axes)
        if isinstance(kind, PerRow):
            outer = full[kind.dim] // (self.rows * kind.inner)
            split_up = jnp.reshape(
                array,
                (
                    *array.shape[: kind.dim],
                    outer,
                    self.here * kind.inner,
                    *array.shape[kind.dim + 1 :],
                ),
            )
            return jnp.reshape(_gather(split_up, self.place.axes, kind.dim + 1), full)
        if jnp.shape(array) == full:
            return array
        # along these all entries are equal
        for dim, (size, wanted) in enumerate(zip(array.shape, full, strict=True)):
            if size != wanted:
                array = jnp.broadcast_to(
                    lax.slice_in_dim(array, 0, 1, axis=dim),
                    (*array.shape[:dim], wanted, *array.shape[dim + 1 :]),
                )
        return array

    def _rows_of(self, value: Held, dim: int, inner: int, full: Shape) -> Any:
        """Return this worker's rows of a value."""
        wanted = _shape_of(self, PerRow(dim, inner), full, full)
        if isinstance(value.kind, PerRow) and value.kind.dim == dim:
            return value.array
        if isinstance(value.kind, Fixed) and jnp.shape(value.array) == wanted:
            return value.array
        array = self._full(value, full)
        if isinstance(value.kind, Fixed) and dim in value.kind.uniform:
            return lax.slice_in_dim(array, 0, wanted[dim], axis=dim)
        split = (
            full[dim] // (self.rows * inner),
            self.place.workers,
            self.here,
            self.place.microbatches,
            inner,
        )
        split_up = jnp.reshape(array, (*full[:dim], *split, *full[dim + 1 :]))
        of_worker = lax.dynamic_index_in_dim(
            split_up, jnp.asarray(self.place.worker), dim + 1, keepdims=False
        )
        return jnp.reshape(
            lax.dynamic_index_in_dim(
                of_worker, jnp.asarray(self.place.microbatch), dim + 2, keepdims=False
            ),
            wanted,
        )

    # a layout's own functions ---------------------------------------------------------------------

    def constant(self, first: Any, second: Any) -> Held:
        """Return a captured array, or a literal, of the full batch."""
        self.constants[id(first)] = second
        return super().constant(first, second)

    def equation(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of an equation."""
        if _of_layout(one):
            return self.of_layout(one, other, values)
        if one.primitive.name in CALLS or not any(
            isinstance(value.kind, Local) for value in values
        ):
            return super().equation(one, other, values)
        if any(isinstance(value.kind, PerRow | Summed) for value in values):
            raise Unreadable("it joins rows with something else that layers return")
        return [
            Held(Local(), True, array) for array in evaluated(other, self.on_rows(other, values))
        ]

    def of_layout(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of a layout's own function, such as a pipeline, on this worker's
        rows.
        """
        if not self.row_wise or self.here != self.others:
            raise Unreadable(
                "it joins rows in layers that this layout computes in parts"
                if self.here == self.others
                else "it has one row here"
            )
        if any(isinstance(value.kind, Summed) for value in values):
            raise Unreadable("a stack of layers gets a sum over rows")
        found = [
            self.by_shape(a.aval, b.aval) for a, b in zip(one.outvars, other.outvars, strict=True)
        ]
        if None in found:
            raise Unreadable("a stack of layers has other dims on few rows than on many")
        arrays = evaluated(other, self.on_rows(other, values))
        kinds = [kind if isinstance(kind, PerRow) else Local() for kind in found]
        return [Held(kind, True, array) for kind, array in zip(kinds, arrays, strict=True)]

    def on_rows(self, other: Any, values: list[Held]) -> list[Any]:
        """Return inputs as they are on this worker's rows: of random keys, those of the worker."""
        arrays = []
        for value, var in zip(values, other.invars, strict=True):
            array, shape = self.constants.get(id(value.array), value.array), _shape(var)
            if isinstance(value.kind, Fixed):
                differs = {
                    dim
                    for dim, (a, b) in enumerate(zip(jnp.shape(array), shape, strict=True))
                    if a != b
                }
                array = (
                    _narrowed(array, jnp.shape(array), shape)
                    if differs <= value.kind.uniform
                    else array
                )
                array = self.own_key(array) if value.kind.key else array
            if jnp.shape(array) != shape:
                raise Unreadable(f"layers get {jnp.shape(array)} in place of {shape}")
            arrays.append(array)
        return arrays

    def own_key(self, key: Any) -> Any:
        """Return a random key, or its data, as this worker's, whose draws are those of its rows."""
        worker = jnp.asarray(self.place.worker)
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return (
                data_at_worker(key, worker)
                if key.dtype == jnp.uint32 and key.shape[-1:] == (3,)
                else key
            )
        if counts_rows(key):
            return at_worker(key, worker)
        return worker_key(key, worker, rows=self.here, workers=self.place.workers)

    # equations ------------------------------------------------------------------------------------

    def results(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Held]:
        """Return the outputs of an equation, whose inputs are now of the kinds that it needs."""
        held = super().results(one, other, values, kinds)
        arrays = self.run(one, other, values, kinds)
        return [each._replace(array=array) for each, array in zip(held, arrays, strict=True)]

    def run(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Any]:
        """Return the output arrays of an equation."""
        name, inputs = one.primitive.name, [value.kind for value in values]
        if name == "optimization_barrier":
            return evaluated(other, [value.array for value in values])
        if name in OVER_ROWS and isinstance(inputs[0], PerRow) and isinstance(kinds[0], Fixed):
            return [self.shared(lambda: self._over_rows(one, values[0]))]
        if name == "random_bits" and isinstance(inputs[0], Fixed) and isinstance(kinds[0], PerRow):
            own = self.own_key(values[0].array)
            shape = _shape_of(self, kinds[0], _shape(one.outvars[0]), _shape(other.outvars[0]))[
                own.ndim :
            ]
            return evaluated(other.replace(params={**other.params, "shape": shape}), [own])
        if all(isinstance(kind, Fixed) for kind in inputs):
            return self._of_fixed(one, other, values, kinds)
        if name.startswith("scatter") and (rows := row_dims(one, other, inputs)) is not None:
            return self._scattered(one, values, rows)
        if any(isinstance(kind, Summed) for kind in inputs):
            adds = len(inputs) if name in ("add", "sub", "add_any") else 0
            # inputs that are added up
            summed = range(1, len(inputs)) if name == "select_n" else range(adds)
            shapes = [
                (a.aval.shape, b.aval.shape) for a, b in zip(one.invars, other.invars, strict=True)
            ]
            wanted = [Summed() if number in summed else Fixed() for number in range(len(inputs))]
            triples = zip(values, wanted, shapes, strict=True)
            return evaluated(
                one,
                [
                    v.array if isinstance(v.kind, Summed) else self.coerced(v, kind, *shape)
                    for v, kind, shape in triples
                ],
            )
        return self._of_rows(one, other, values, kinds)

    def _of_fixed(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Any]:
        """Return the output arrays of an equation whose inputs are the same on every worker."""
        shapes = [(_shape(a), _shape(b)) for a, b in zip(one.outvars, other.outvars, strict=True)]
        wanted = [_shape_of(self, kind, *shape) for kind, shape in zip(kinds, shapes, strict=True)]
        local = all(
            jnp.shape(v.array) == _shape(var) for v, var in zip(values, other.invars, strict=True)
        )
        if (
            local
            and wanted == [part for _, part in shapes]
            and one.primitive.name in (*ELEMENTWISE, *MOVES)
        ):
            return evaluated(other, [value.array for value in values])
        arrays = evaluated(
            one,
            [self._full(value, _shape(var)) for value, var in zip(values, one.invars, strict=True)],
        )
        return [
            self._rows_of(Held(Fixed(), array=array), kind.dim, kind.inner, full)
            if isinstance(kind, PerRow)
            else _narrowed(array, full, shape)
            for array, kind, shape, (full, _) in zip(arrays, kinds, wanted, shapes, strict=True)
        ]

    def _of_rows(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Any]:
        """Return the output arrays of an equation on this worker's rows."""
        name, full = one.primitive.name, [_shape(var) for var in one.invars]
        if name == "gather" and isinstance(kinds[0], Summed):
            return [self._looked_up(one, values[0], values[1], values[0].kind)]
        if (
            name == "gather"
            and (column := numbers_row(one, [value.kind for value in values])) is not None
        ):
            return evaluated(
                other,
                [
                    values[0].array,
                    self._numbered(values[1], rows_of_index(values[1].kind), column, full[1]),
                ],
            )
        first, rows = next(
            (n, value.kind) for n, value in enumerate(values) if isinstance(value.kind, PerRow)
        )
        along = {n: (rows.dim, rows.inner) for n in range(len(values)) if full[n] and n != first}
        if name == "dot_general":
            along = _partners(one, values)
        if name == "gather" and isinstance(values[0].kind, PerRow):
            numbers = one.params["dimension_numbers"]
            pairs = dict(
                zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
            )
            along = (
                {1: (pairs[values[0].kind.dim], values[0].kind.inner)}
                if values[0].kind.dim in pairs
                else {}
            )
        arrays = []
        for number, value in enumerate(values):
            shape = full[number]
            # which is meant for all rows
            single = name in ELEMENTWISE and (not shape or shape[along.get(number, (0, 1))[0]] == 1)
            if isinstance(value.kind, PerRow) or shape == _shape(other.invars[number]) or single:
                arrays.append(value.array)
            elif number in along and (
                name in ("dot_general", "gather") or len(shape) == len(full[first])
            ):
                arrays.append(self._rows_of(value, *along[number], shape))
            else:
                arrays.append(self._full(value, shape))
        wanted = [
            _shape_of(self, k, _shape(a), _shape(b))
            for k, a, b in zip(kinds, one.outvars, other.outvars, strict=True)
        ]
        local = all(
            jnp.shape(array) == _shape(var) for array, var in zip(arrays, other.invars, strict=True)
        )
        if local and wanted == [_shape(var) for var in other.outvars]:
            return evaluated(other, arrays)
        if name in ELEMENTWISE:
            return evaluated(other, arrays)
        if name in RESIZED:
            params = {**one.params, **RESIZED[name](one, arrays, wanted[0])}
            found = evaluated(one.replace(params=params), arrays)
            if [jnp.shape(array) for array in found] == wanted:
                return found
        if self.place.known is not None:
            raise Unreadable(f"its {name} needs all rows at once")
        # all rows on every worker, which keeps those that it needs
        on_all_rows = evaluated(
            one, [self._full(value, shape) for value, shape in zip(values, full, strict=True)]
        )
        shapes = [(_shape(a), _shape(b)) for a, b in zip(one.outvars, other.outvars, strict=True)]
        return [
            self.coerced(Held(Fixed(), array=array), kind, *s)
            for array, kind, s in zip(on_all_rows, kinds, shapes, strict=True)
        ]

    def _numbered(self, index: Held, along: int, column: int, full: Shape) -> Any:
        """Return the rows of an index whose `column` holds the number of the row, which is here its
        place in the part.
        """
        of_rows = self._rows_of(index, along, 1, full)
        shape = [1] * of_rows.ndim
        shape[along] = self.here
        place = jnp.arange(self.here, dtype=of_rows.dtype).reshape(shape)[..., 0]
        return of_rows.at[..., column].set(jnp.broadcast_to(place, of_rows.shape[:-1]))

    def _scattered(self, one: Any, values: list[Held], rows: RowDims) -> list[Any]:
        """Return the rows that are written here, or what the rows here add."""
        full = [_shape(var) for var in one.invars]
        arrays = [
            self._full(value, shape)
            if dim is None
            else self._rows_of(value, dim, rows.inner, shape)
            for value, dim, shape in zip(values[1:], rows[1:3], full[1:], strict=True)
        ]
        if rows.column is not None and rows.index is not None:
            arrays[0] = self._numbered(values[1], rows.index, rows.column, full[1])
        if rows.operand is None:
            return evaluated(one, [self.coerced(values[0], Summed(), full[0], full[0]), *arrays])
        return evaluated(
            one, [self._rows_of(values[0], rows.operand, rows.inner, full[0]), *arrays]
        )

    def _looked_up(self, one: Any, table: Held, index: Held, kind: Any) -> Any:
        """Return the entries of a table that are in the rows here, and 0 for those that are not: a
        part of the sum over workers.
        """
        numbers, (shape, of_index) = (
            one.params["dimension_numbers"],
            [_shape(var) for var in one.invars],
        )
        column = list(numbers.start_index_map).index(kind.dim)
        places, size = self._full(index, of_index), shape[kind.dim]
        at = places[..., column]
        at = jnp.clip(at, 0, size - 1) if one.params["mode"] == GatherScatterMode.CLIP else at
        outside = (at < 0) | (at >= size)
        # rows are split into [outer, worker, row of the part, microbatch, inner]
        rest, inner = jnp.divmod(at, kind.inner)
        rest, microbatch = jnp.divmod(rest, self.place.microbatches)
        rest, row = jnp.divmod(rest, self.here)
        outer, worker = jnp.divmod(rest, self.place.workers)
        first = (jnp.asarray(self.place.worker) == 0) & (jnp.asarray(self.place.microbatch) == 0)
        here = jnp.where(
            outside, first, (worker == self.place.worker) & (microbatch == self.place.microbatch)
        )
        local = jnp.where(
            here & ~outside,
            (outer * self.here + row) * kind.inner + inner,
            jnp.where(outside, size, 0),
        )
        (found,) = evaluated(
            one, [table.array, places.at[..., column].set(local.astype(places.dtype))]
        )
        looked = [dim for dim in range(found.ndim) if dim not in numbers.offset_dims]
        mine = lax.broadcast_in_dim(here, found.shape, looked)
        return jnp.where(mine, found, jnp.zeros_like(found))

    def _over_rows(self, one: Any, value: Held) -> Any:
        """Return the largest, or smallest, over the rows of all workers; equal ones get equal parts
        of the gradient, as in JAX.
        """
        dims, axes, largest = (
            tuple(one.params["axes"]),
            self.place.axes,
            OVER_ROWS[one.primitive.name] == "max",
        )

        def reduced(x: jax.Array) -> jax.Array:
            return (
                collectives.maximum(x.max(dims), axes)
                if largest
                else collectives.minimum(x.min(dims), axes)
            )

        if value.array.dtype == jnp.bool_:
            return reduced(value.array.astype(jnp.int32)) > 0
        if not jnp.issubdtype(value.array.dtype, jnp.inexact):
            return reduced(value.array)
        over_rows = jax.custom_jvp(reduced)  # JAX has no derivative of a maximum over devices

        @over_rows.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple:
            (x,), (tangent,) = primals, tangents
            found = over_rows(x)
            equal = (x == jnp.expand_dims(found, dims)).astype(x.dtype)
            sums = [
                collectives.all_reduce(terms.sum(dims), axes) for terms in (equal * tangent, equal)
            ]
            return found, sums[0] / sums[1]

        return over_rows(value.array)

    # functions of functions -----------------------------------------------------------------------

    def call(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of a function that is called once; one that is recomputed is
        recomputed here, too.
        """
        # arrays in it are gone outside
        if one.primitive.name not in ("remat", "remat2", "checkpoint") or self.record is not None:
            return super().call(one, other, values)
        kinds: list[Held] = []

        def body(*arrays: Any) -> list[Any]:
            inputs = [
                value._replace(array=array) for value, array in zip(values, arrays, strict=True)
            ]
            kinds[:] = super(Compute, self).call(one, other, inputs)
            return [held.array for held in kinds]

        again = jax.checkpoint(
            body, policy=one.params["policy"], prevent_cse=one.params["prevent_cse"]
        )
        arrays = again(*(value.array for value in values))
        return [held._replace(array=array) for held, array in zip(kinds, arrays, strict=True)]

    def routed(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of a mixture of experts; its means over its own tokens are parts of
        those over all.
        """
        held = super().routed(one, other, values)
        if self.here != self.others:
            raise Unreadable("a mixture of experts routes the tokens of one row alone")
        y, chosen, *means = evaluated(other, [value.array for value in values])
        arrays = [y, chosen, *(mean / self.parts for mean in means)]
        return [each._replace(array=array) for each, array in zip(held, arrays, strict=True)]

    def of_jax(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of a function of JAX, which keeps its derivative if workers share
        nothing in it.
        """
        reader = Walk(self.rows, self.others)
        found = Walk.of_jax(reader, one, other, [value._replace(array=None) for value in values])
        by_row = any(isinstance(value.kind, PerRow) for value in values) and all(
            isinstance(held.kind, PerRow) for held in found
        )
        if reader.shares or not by_row:
            return super().of_jax(one, other, values)
        if all(
            jnp.shape(value.array) == _shape(var)
            for value, var in zip(values, other.invars, strict=True)
        ):
            arrays = evaluated(other, [value.array for value in values])
        else:
            # as many rows as in the other trace, because its derivative is for arrays of those
            # shapes
            repeated = [
                self._repeated(value, _shape(var))
                for value, var in zip(values, one.invars, strict=True)
            ]
            on_full = zip(evaluated(one, repeated), found, one.outvars, strict=True)
            arrays = [
                self._first_rows(array, cast(PerRow, held.kind), _shape(var))
                for array, held, var in on_full
            ]
        return [held._replace(array=array) for held, array in zip(found, arrays, strict=True)]

    def _repeated(self, value: Held, full: Shape) -> Any:
        """Return an array in its shape on all rows, in which this worker's rows stand again and
        again.
        """
        if not isinstance(value.kind, PerRow):
            return self._full(value, full)
        dim, inner = value.kind.dim, value.kind.inner
        split = jnp.reshape(
            value.array,
            (*full[:dim], full[dim] // (self.rows * inner), self.here, inner, *full[dim + 1 :]),
        )
        return jnp.reshape(jnp.take(split, np.arange(self.rows) % self.here, axis=dim + 1), full)

    def _first_rows(self, array: Any, kind: PerRow, full: Shape) -> Any:
        """Return the rows of an array that `_repeated` did not add."""
        split = jnp.reshape(
            array,
            (
                *full[: kind.dim],
                full[kind.dim] // (self.rows * kind.inner),
                self.rows,
                kind.inner,
                *full[kind.dim + 1 :],
            ),
        )
        return jnp.reshape(
            lax.slice_in_dim(split, 0, self.here, axis=kind.dim + 1),
            _shape_of(self, kind, full, full),
        )

    def looped(
        self,
        one: Any,
        other: Any,
        values: list[Held],
        carry: list[Held],
        ys: list[Held],
        shares: list[Shared],
    ) -> list[Held]:
        """Return the outputs of a scan whose body carries these kinds, and returns others."""
        held = super().looped(one, other, values, carry, ys, shares)
        (consts, carried), bodies = (
            scanned(one.params),
            (one.params["jaxpr"], other.params["jaxpr"]),
        )
        reader = dataclasses.replace(self, shares=[])  # the loop's are in `shares`
        shapes = [(_shape(a), _shape(b)) for a, b in zip(one.invars, other.invars, strict=True)]
        start = [
            self.coerced(value, each.kind, *shape)
            for value, each, shape in zip(
                values[consts:], carry, shapes[consts : consts + carried], strict=False
            )
        ]
        inner = bodies[0].jaxpr.outvars, bodies[1].jaxpr.outvars
        outputs = [(_shape(a), _shape(b)) for a, b in zip(*inner, strict=True)]
        entries = Walk.scan_entries(values[consts + carried :])

        def body(carried_arrays: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            at = [
                each._replace(array=array)
                for each, array in zip(carry, carried_arrays, strict=True)
            ]
            of = [each._replace(array=array) for each, array in zip(entries, slices, strict=True)]
            found = reader.closed(*bodies, [*values[:consts], *at, *of])
            wanted = [*carry, *ys]
            arrays = [
                reader.coerced(f, w.kind, *shape)
                for f, w, shape in zip(found, wanted, outputs, strict=True)
            ]
            return arrays[:carried], arrays[carried:]

        params = one.params
        xs = [value.array for value in values[consts + carried :]]
        last, stacked = lax.scan(
            body,
            start,
            xs,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [
            each._replace(array=array) for each, array in zip(held, [*last, *stacked], strict=True)
        ]

    def chosen(
        self, one: Any, other: Any, index: Held, inputs: list[Held], kinds: list[Held]
    ) -> list[Held]:
        """Return the outputs of branches that agree on these kinds."""
        shapes = [(_shape(a), _shape(b)) for a, b in zip(one.outvars, other.outvars, strict=True)]

        def branch(pair: tuple[Any, Any]) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                given = [
                    value._replace(array=array) for value, array in zip(inputs, arrays, strict=True)
                ]
                found = self.closed(*pair, given)
                return [
                    self.coerced(f, k.kind, *shape)
                    for f, k, shape in zip(found, kinds, shapes, strict=True)
                ]

            return run

        branches = [
            branch(pair)
            for pair in zip(one.params["branches"], other.params["branches"], strict=True)
        ]
        arrays = lax.switch(index.array, branches, *(value.array for value in inputs))
        return [each._replace(array=array) for each, array in zip(kinds, arrays, strict=True)]


OWN_FILES = (gathered_scan.__file__, gathered_blocks.__file__)


def _of_layout(one: Any) -> bool:
    """Return whether an equation is a layout's own function: layers whose parameters are gathered
    in it, or a region of several devices.
    """
    name = one.primitive.name
    return (name in OWN_GRADIENT and defined_in(one) in OWN_FILES) or (
        name == "shard_map" and defined_in(one) == parallel_context.__file__
    )


def _shape(var: Any) -> Shape:
    return tuple(getattr(var.aval, "shape", ()))


def _shape_of(sizes: Compute, kind: Kind, full: Shape, part: Shape) -> Shape:
    """Return the shape of a worker's array of a value, whose shapes in the two traces are `full`
    and `part`.
    """
    if isinstance(kind, PerRow):
        return (*full[: kind.dim], full[kind.dim] // sizes.rows * sizes.here, *full[kind.dim + 1 :])
    sized = {dim for dim, (a, b) in enumerate(zip(full, part, strict=True)) if a != b}
    return part if isinstance(kind, Fixed) and sized <= kind.uniform else full


def _narrowed(array: Any, full: Shape, wanted: Shape) -> Any:
    """Return as many entries of an array as wanted, along dims where all entries are equal; a trace
    on more rows may want more.
    """
    for dim, (size, wants) in enumerate(zip(full, wanted, strict=True)):
        if size != wants:
            array = lax.slice_in_dim(array, 0, min(size, wants), axis=dim)
        if size < wants:
            array = jnp.repeat(lax.slice_in_dim(array, 0, 1, axis=dim), wants, axis=dim)
    return array


def _gather(array: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = collectives.all_gather(jax.random.key_data(array), axes, dim)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return collectives.all_gather(array, axes, dim)


def _partners(one: Any, values: list[Held]) -> dict[int, tuple[int, int]]:
    """Return the dim of an operand that is summed, or paired, with the rows of the other one, by
    the number of the operand.
    """
    contracted, batched = one.params["dimension_numbers"]
    found = {}
    for side, value in enumerate(values):
        if isinstance(value.kind, PerRow):
            for pairs in (contracted, batched):
                mine, theirs = list(pairs[side]), list(pairs[1 - side])
                if value.kind.dim in mine:
                    found[1 - side] = (int(theirs[mine.index(value.kind.dim)]), value.kind.inner)
    return found


def _sliced(one: Any, arrays: list[Any], wanted: Shape) -> dict[str, Any]:
    def scaled(places: Shape) -> Shape:
        return tuple(
            place * n // size if size else 0
            for place, n, size in zip(places, arrays[0].shape, _shape(one.invars[0]), strict=True)
        )

    return {key: scaled(one.params[key]) for key in ("start_indices", "limit_indices")}


def _split(one: Any, arrays: list[Any], wanted: Shape) -> dict[str, Any]:
    axis = one.params["axis"]
    size, here = _shape(one.invars[0])[axis], arrays[0].shape[axis]
    return {"sizes": tuple(part * here // size for part in one.params["sizes"])}


def _taken(one: Any, arrays: list[Any], wanted: Shape) -> dict[str, Any]:
    full, sizes = _shape(one.invars[0]), one.params["slice_sizes"]
    return {
        "slice_sizes": tuple(
            n if size == most else size
            for size, most, n in zip(sizes, full, arrays[0].shape, strict=True)
        )
    }


def _same(one: Any, arrays: list[Any], wanted: Shape) -> dict[str, Any]:
    return {}


# Parameters of an equation, from its inputs and the shape of its result.
RESIZED: dict[str, Callable[..., dict[str, Any]]] = {
    "broadcast_in_dim": lambda one, arrays, wanted: {"shape": wanted},
    "reshape": lambda one, arrays, wanted: {"new_sizes": wanted},
    "slice": _sliced,
    "split": _split,
    "dot_general": _same,
    "gather": _taken,
    **dict.fromkeys(
        "conv_general_dilated pad stack random_fold_in random_wrap random_unwrap random_split "
        "random_bits".split(),
        _same,
    ),
    **dict.fromkeys("reduce_window_sum reduce_window_max reduce_window_min".split(), _same),
    **dict.fromkeys(
        "transpose squeeze argmax argmin cumsum cumprod cummax cummin cumlogsumexp sort "
        "concatenate rev".split(),
        _same,
    ),
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split(), _same
    ),
}
