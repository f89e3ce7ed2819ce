"""The wire: the only file that calls `lax` collectives. Arrays are per worker: this device's own piece.

What each call costs is read from the traced step by `spmd.wire.comm_log`, which states the formulas.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """Sum over all workers along `axes`; every worker gets the whole sum, same shape as `x`."""
    return _sum(lambda x: lax.psum(x, axes), x) if axes else x


def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over all workers along `axes`, of which each keeps its own slice of `dim`, in the order of the axes."""
    return _sum(lambda x: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True), x) if axes else x


def _sum(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A sum over devices; of bfloat16 as float32 where other axes are left to the partitioner: XLA:CPU aborts the process on one there."""
    mesh = jax.sharding.get_abstract_mesh()
    wide = x.dtype == jnp.bfloat16 and set(mesh.axis_names) > set(mesh.manual_axes)
    return collective(x.astype(jnp.float32)).astype(x.dtype) if wide else collective(x)


def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The slices of all workers along `axes`, joined along `dim` in the order of the axes."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def all_to_all(x: jax.Array, axes: Axes) -> jax.Array:
    """Row j of `x` [workers, ...] goes to worker j along `axes`; row i of the result came from worker i."""
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x


def maximum(x: jax.Array, axes: Axes) -> jax.Array:
    """The largest value over all workers along `axes`."""
    return lax.pmax(x, axes) if axes else x


def worker_index(axes: Axes) -> jax.Array:
    """This worker's number, a scalar int32: positions along `axes`, the first one slowest."""
    return lax.axis_index(axes) if axes else jax.numpy.int32(0)


def worker_count(axes: Axes) -> int:
    """How many workers there are along `axes`."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def shift(x: jax.Array, axis: str, by: int = 1, *, around: bool = False) -> jax.Array:
    """What the neighbour `by` positions before along `axis` holds; `around`: the first one gets what the last one holds, else zeros."""
    count = lax.axis_size(axis)
    pairs = [(i, (i + by) % count) for i in range(count) if around or 0 <= i + by < count]
    return lax.ppermute(x, axis, pairs) if count > 1 or not around else x


def permute(x: jax.Array, axis: str, to: tuple[int, ...]) -> jax.Array:
    """What position i along `axis` holds goes to position `to[i]`; each position gets one."""
    return lax.ppermute(x, axis, list(enumerate(to)))
