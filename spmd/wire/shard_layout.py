"""The shares of workers in one gradient: the elements of the mean that each of them owns."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base.specs import Spec, entry_axes, spec_axes
from spmd.wire import collectives


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """The layout of a gradient that every worker holds in full, and the shard of its mean that each
    worker gets.

    `shape` is that of the array on one worker (its local shard along other mesh axes). `spec`
    shards it over some of the data axes `axes` (outermost first, of `sizes`). Workers along the
    other data axes, `replicated_axes`, get the same shard. Every worker owns one row of `to_rows`:
    1 / workers of the elements, a part of its shard.

    Example:
      >>> layout = ShardLayout((4, 6), ("data",), ("node", "data"), (2, 2))
      >>> layout.replicated_axes, layout.shard_shape, layout.width
      (('node',), (2, 6), 6)
    """

    shape: tuple[int, ...]
    spec: Spec
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def workers(self) -> int:
        """Positions along the data axes."""
        return math.prod(self.sizes)

    @functools.cached_property
    def sharded_axes(self) -> tuple[str, ...]:
        """The data axes that shard the gradient, in the order of `axes`."""
        used = spec_axes(self.spec)
        return tuple(axis for axis in self.axes if axis in used)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The data axes along which all workers get the same shard."""
        return tuple(axis for axis in self.axes if axis not in self.sharded_axes)

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of a shard."""
        dims = zip(self.shape, self._dim_axes, strict=True)
        return tuple(size // self._count(axes) for size, axes in dims)

    @property
    def width(self) -> int:
        """Elements of a row. If the number of workers does not divide a shard, the last rows are
        padded with zeros.
        """
        return -(-math.prod(self.shard_shape) // self._count(self.replicated_axes))

    def shards(self, x: jax.Array) -> jax.Array:
        """All shards of `x`, [positions along `sharded_axes`, elements of a shard]."""
        ordered = x.reshape(self._split_shape).transpose(self._order)
        return ordered.reshape(self._count(self.sharded_axes), -1)

    def local_shard(self, x: jax.Array) -> jax.Array:
        """This worker's shard of the replicated `x`."""
        if not self.sharded_axes:
            return x
        index = collectives.worker_index(self.sharded_axes)
        shard = lax.dynamic_index_in_dim(self.shards(x), index, keepdims=False)
        return shard.reshape(self.shard_shape)

    def to_rows(self, x: jax.Array) -> jax.Array:
        """`x` as float32[workers, width]; worker j owns row j."""
        shards = self.shards(x).astype(jnp.float32)
        copies = self._count(self.replicated_axes)
        padded = jnp.pad(shards, ((0, 0), (0, copies * self.width - shards.shape[1])))
        axes = (*self.sharded_axes, *self.replicated_axes)
        grid = padded.reshape(*self._sizes(axes), self.width)
        order = [axes.index(axis) for axis in self.axes]
        return grid.transpose(*order, len(axes)).reshape(self.workers, self.width)

    def from_rows(self, rows: jax.Array) -> jax.Array:
        """The inverse of `to_rows`."""
        axes = (*self.sharded_axes, *self.replicated_axes)
        order = [self.axes.index(axis) for axis in axes]
        grid = rows.reshape(*self.sizes, self.width).transpose(*order, len(self.axes))
        padded = grid.reshape(self._count(self.sharded_axes), -1)
        shards = padded[:, : math.prod(self.shard_shape)]
        split_shape = [self._split_shape[dim] for dim in self._order]
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return shards.reshape(split_shape).transpose(inverse).reshape(self.shape)

    def join_rows(self, rows: jax.Array) -> jax.Array:
        """The shard, from the rows [positions along `replicated_axes`, width] of all workers that
        get it.
        """
        return rows.reshape(-1)[: math.prod(self.shard_shape)].reshape(self.shard_shape)

    @functools.cached_property
    def _dim_axes(self) -> tuple[tuple[str, ...], ...]:
        """For every dim the axes that shard it."""
        unsharded = [None] * (len(self.shape) - len(self.spec))
        return tuple(map(entry_axes, (*self.spec, *unsharded)))

    @functools.cached_property
    def _split_shape(self) -> tuple[int, ...]:
        """The shape with every sharded dim split into one dim per axis and the rest."""
        shape: list[int] = []
        for axes, size in zip(self._dim_axes, self.shard_shape, strict=True):
            shape += [*self._sizes(axes), size]
        return tuple(shape)

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        """The order of these dims that puts the axes first, as in `sharded_axes`."""
        dim_of_axis = {}
        other_dims = []
        dim = 0
        for axes in self._dim_axes:
            for axis in axes:
                dim_of_axis[axis] = dim
                dim += 1
            other_dims.append(dim)
            dim += 1
        return (*(dim_of_axis[axis] for axis in self.sharded_axes), *other_dims)

    def _sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[self.axes.index(axis)] for axis in axes)

    def _count(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._sizes(axes))
