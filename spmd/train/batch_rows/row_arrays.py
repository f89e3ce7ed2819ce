"""Arrays of a part of the rows of a batch, and how they become arrays of other kinds: what a worker
has of a value, in all shapes that equations need.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base.rng import at_worker, counts_rows, data_at_worker, worker_key
from spmd.train.batch_rows.kinds import Fixed, Kind, PerRow, Summed, resized_dims
from spmd.train.batch_rows.pairs import Unreadable
from spmd.train.batch_rows.walk import Held, Walk
from spmd.wire import collectives

Shape = tuple[int, ...]


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
      shared_arrays: the arrays that all rows share, in the order in which they are needed. None:
        there is one part at each position of the mesh, so that workers share them by collectives.
    """

    axes: tuple[str, ...] = ()
    workers: int = 1
    worker: Any = 0
    microbatches: int = 1
    microbatch: Any = 0
    shared_arrays: list[Any] | None = None

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
class RowArrays(Walk):
    """`Walk` with arrays, inside `jax.shard_map`: how one kind of them is made from another.

    Every `Held.array` has the shape that `worker_shape` says.

    Attributes:
      here: the number of rows here; the second trace may be one of two rows where there is one.
      place: where they are in the batch.
      row_wise: whether the layers that a layout computes in ways of its own are row by row.
      shared_arrays: goes through `place.shared_arrays`.
      record: takes the arrays that workers share.
      constants: the captured arrays of the second trace, by the identity of those of the first; a
        pipeline's schedule is one.
    """

    here: int = 0
    place: Place = Place()
    row_wise: bool = False
    shared_arrays: Iterator[Any] | None = None
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
        full, part = map(traced_shape, variables)
        return held._replace(array=self.shared(lambda: self.coerced(value, kind, full, part)))

    def shared(self, together: Callable[[], Any]) -> Any:
        """Return an array that workers compute together, or have computed before."""
        if self.shared_arrays is not None:
            return next(self.shared_arrays)
        array = together()
        if self.record is not None:
            self.record.append(array)
        return array

    def coerced(self, value: Held, kind: Kind, full: Shape, part: Shape) -> Any:
        """Return the array of a value as one of another kind. `full` and `part` are its shapes in
        the two traces.
        """
        if isinstance(kind, PerRow):
            return self.rows_of(value, kind.dim, kind.inner, full)
        if isinstance(kind, Fixed):
            return narrowed(self.on_all_rows(value, full), self.worker_shape(kind, full, part))
        if isinstance(value.kind, Summed):
            return value.array
        return self.part_of_sum(self.on_all_rows(value, full))

    def part_of_sum(self, array: Any) -> Any:
        """Return this worker's part of an array that all workers have; the sum over parts makes
        it.
        """
        if jnp.issubdtype(array.dtype, jnp.inexact):
            return array / self.parts
        return jnp.where(self.is_first(), array, jnp.zeros_like(array))

    def is_first(self) -> Any:
        """Return whether this is the first part of the batch."""
        place = self.place
        return (jnp.asarray(place.worker) == 0) & (jnp.asarray(place.microbatch) == 0)

    def on_all_rows(self, value: Held, full: Shape) -> Any:
        """Return the value of the full batch, on every worker; `full` is its shape."""
        kind, array = value.kind, value.array
        if isinstance(kind, Summed):
            return collectives.all_reduce(array, self.place.axes)
        if isinstance(kind, PerRow):
            outer = full[kind.dim] // (self.rows * kind.inner)
            split = jnp.reshape(array, _split(array.shape, kind.dim, outer, self.here * kind.inner))
            return jnp.reshape(_gather(split, self.place.axes, kind.dim + 1), full)
        # all entries are equal along dims of another size
        for dim, size in enumerate(full):
            if array.shape[dim] != size:
                entry = lax.slice_in_dim(array, 0, 1, axis=dim)
                array = jnp.broadcast_to(entry, _split(array.shape, dim, size))
        return array

    def rows_of(self, value: Held, dim: int, inner: int, full: Shape) -> Any:
        """Return this worker's rows of a value, which are along `dim`."""
        shape = self.worker_shape(PerRow(dim, inner), full, full)
        if isinstance(value.kind, PerRow) and value.kind.dim == dim:
            return value.array
        if isinstance(value.kind, Fixed) and jnp.shape(value.array) == shape:
            return value.array
        array, place = self.on_all_rows(value, full), self.place
        if isinstance(value.kind, Fixed) and dim in value.kind.uniform:
            return lax.slice_in_dim(array, 0, shape[dim], axis=dim)
        # `spmd.train.accumulate` splits rows with a stride
        outer = full[dim] // (self.rows * inner)
        sizes = outer, place.workers, self.here, place.microbatches, inner
        split = jnp.reshape(array, _split(full, dim, *sizes))
        of_worker = _entry(split, place.worker, dim + 1)
        return jnp.reshape(_entry(of_worker, place.microbatch, dim + 2), shape)

    # arrays of this worker's rows -----------------------------------------------------------------

    def constant(self, value: tuple[Any, Any]) -> Held:
        """Return a captured array, or a literal, of the full batch; `value`: in both traces."""
        self.constants[id(value[0])] = value[1]
        return super().constant(value)

    def on_rows(self, other: Any, values: list[Held]) -> list[Any]:
        """Return the inputs of an equation of the second trace as they are on this worker's rows:
        of random keys, those of the worker.

        Raises:
          Unreadable: the second trace has another shape.
        """
        arrays = []
        for value, variable in zip(values, other.invars, strict=True):
            array, shape = self.constants.get(id(value.array), value.array), traced_shape(variable)
            if isinstance(value.kind, Fixed):
                if resized_dims(jnp.shape(array), shape) <= value.kind.uniform:
                    array = narrowed(array, shape)
                if value.kind.key:
                    array = self.worker_key(array)
            if jnp.shape(array) != shape:
                raise Unreadable(f"layers get {jnp.shape(array)} in place of {shape}")
            arrays.append(array)
        return arrays

    def worker_key(self, key: Any) -> Any:
        """Return a random key, or its data, as this worker's, whose draws are those of its rows."""
        worker = jnp.asarray(self.place.worker)
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            counts = key.dtype == jnp.uint32 and key.shape[-1:] == (3,)
            if not counts:
                return key
            return data_at_worker(key, worker)
        if counts_rows(key):
            return at_worker(key, worker)
        return worker_key(key, worker, rows=self.here, workers=self.place.workers)

    def repeated(self, value: Held, full: Shape) -> Any:
        """Return an array in its shape on all rows, in which this worker's rows stand again and
        again.
        """
        if not isinstance(value.kind, PerRow):
            return self.on_all_rows(value, full)
        dim, inner = value.kind.dim, value.kind.inner
        outer = full[dim] // (self.rows * inner)
        split = jnp.reshape(value.array, _split(full, dim, outer, self.here, inner))
        again = jnp.take(split, np.arange(self.rows) % self.here, axis=dim + 1)
        return jnp.reshape(again, full)

    def first_rows(self, array: Any, kind: PerRow, full: Shape) -> Any:
        """Return the rows of an array that `repeated` did not add."""
        outer = full[kind.dim] // (self.rows * kind.inner)
        split = jnp.reshape(array, _split(full, kind.dim, outer, self.rows, kind.inner))
        rows = lax.slice_in_dim(split, 0, self.here, axis=kind.dim + 1)
        return jnp.reshape(rows, self.worker_shape(kind, full, full))

    def worker_shape(self, kind: Kind, full: Shape, part: Shape) -> Shape:
        """Return the shape of a worker's array of a value, whose shapes in the two traces are
        `full` and `part`.
        """
        if isinstance(kind, PerRow):
            return _split(full, kind.dim, full[kind.dim] // self.rows * self.here)
        is_part = isinstance(kind, Fixed) and resized_dims(full, part) <= kind.uniform
        if is_part:
            return part
        return full


def traced_shape(variable: Any) -> Shape:
    """Return the shape of a variable of a traced program; () of one that is no array."""
    return tuple(getattr(variable.aval, "shape", ()))


def narrowed(array: Any, shape: Shape) -> Any:
    """Return as many entries of an array as `shape` has, along dims where all entries are equal; a
    trace on more rows may have more.
    """
    for dim, (size, new_size) in enumerate(zip(jnp.shape(array), shape, strict=True)):
        if size > new_size:
            array = lax.slice_in_dim(array, 0, new_size, axis=dim)
        if size < new_size:
            array = jnp.repeat(lax.slice_in_dim(array, 0, 1, axis=dim), new_size, axis=dim)
    return array


def _split(shape: Shape, dim: int, *sizes: int) -> Shape:
    """Return a shape with dims of these sizes in place of one."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def _entry(array: jax.Array, number: Any, dim: int) -> jax.Array:
    return lax.dynamic_index_in_dim(array, jnp.asarray(number), dim, keepdims=False)


def _gather(array: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = collectives.all_gather(jax.random.key_data(array), axes, dim)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return collectives.all_gather(array, axes, dim)
