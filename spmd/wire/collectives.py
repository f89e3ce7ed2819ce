"""The only file that calls `lax` collectives. Arrays are per worker: this device's local shard.

`spmd.wire.comm_log` reads the cost of each call from the traced step, and states the formulas.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """Sum over all workers along `axes`, replicated, with the shape of `x`."""
    if not axes:
        return x
    return _sum(lambda x: lax.psum(x, axes), x)


def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over all workers along `axes`; each keeps its slice of `dim`, in the order of the
    axes.
    """
    if not axes:
        return x
    if uses_gloo():
        size = x.shape[dim] // worker_count(axes)
        total = all_reduce(x, axes)
        return lax.dynamic_slice_in_dim(total, worker_index(axes) * size, size, dim)
    return _sum(lambda x: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True), x)


def uses_gloo() -> bool:
    """Return whether devices are CPUs of several processes, between which Gloo communicates."""
    # Gloo sums arrays of tens of MB wrongly in a reduce-scatter, or waits forever
    # (https://github.com/jax-ml/jax/issues/40830, found with jax 0.10.2). Its all-reduce sends
    # twice the bytes, and is right.
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def _sum(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Sum over devices."""
    mesh = jax.sharding.get_abstract_mesh()
    # XLA:CPU (jax 0.10) aborts the process at a sum of bfloat16 in a partly manual region.
    if x.dtype == jnp.bfloat16 and set(mesh.axis_names) > set(mesh.manual_axes):
        return collective(x.astype(jnp.float32)).astype(x.dtype)
    return collective(x)


def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The slices of all workers along `axes`, concatenated along `dim` in the order of the axes."""
    if not axes:
        return x
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def all_to_all(x: jax.Array, axes: Axes) -> jax.Array:
    """Row j of `x` [workers, ...] goes to worker j along `axes`; row i of the result came from
    worker i.
    """
    if not axes:
        return x
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def maximum(x: jax.Array, axes: Axes) -> jax.Array:
    """The largest value over all workers along `axes`."""
    if not axes:
        return x
    return lax.pmax(x, axes)


def minimum(x: jax.Array, axes: Axes) -> jax.Array:
    """The smallest value over all workers along `axes`."""
    if not axes:
        return x
    return lax.pmin(x, axes)


def worker_index(axes: Axes) -> jax.Array:
    """This worker's index along `axes`, a scalar int32; the first axis varies slowest."""
    if not axes:
        return jnp.int32(0)
    return lax.axis_index(axes)


def worker_count(axes: Axes) -> int:
    """Number of workers along `axes`."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def is_bound(axis: str) -> bool:
    """Return whether a name is that of an axis here, of the mesh or of a `vmap`."""
    try:
        # jax 0.10 has no public function that asks.
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def shift(x: jax.Array, axis: str, by: int = 1, *, around: bool = False) -> jax.Array:
    """The value of the neighbour `by` positions before along `axis`; past the edge zeros, or with
    `around` the other end's.
    """
    count = lax.axis_size(axis)
    if around and count == 1:
        return x
    pairs = []
    for source in range(count):
        target = source + by
        if around or 0 <= target < count:
            pairs.append((source, target % count))
    return lax.ppermute(x, axis, pairs)


def permute(x: jax.Array, axis: str, to: tuple[int, ...]) -> jax.Array:
    """Send the value at position i along `axis` to position `to[i]`; `to` is a permutation."""
    return lax.ppermute(x, axis, list(enumerate(to)))
