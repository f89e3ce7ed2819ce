"""Statistics that layers keep beside their parameters, such as the averages of BatchNorm, over the
parts of a batch.

A part is a microbatch of a worker. All parts begin at the statistics from before the step, as one
device does with the full batch; what they end with is averaged. So a statistic that is a mean over
rows comes out as that of the full batch, and one that no row changes, such as a counter or an
average of weights, advances once per step.
"""

import jax
import jax.numpy as jnp

from spmd.base.tree import Tree
from spmd.wire import collectives


def no_stats(stats: Tree) -> Tree:
    """Return the total of no parts: zeros for floats, in float32 or more, and the least value of
    other numbers.
    """

    def empty(x: jax.Array) -> jax.Array:
        if _is_key(x):
            return x
        # a sum in bfloat16 would lose small parts
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
        if x.dtype == bool:
            return jnp.full(x.shape, False, x.dtype)
        return jnp.full(x.shape, jnp.iinfo(x.dtype).min, x.dtype)

    return jax.tree.map(empty, stats)


def add_stats(total: Tree, stats: Tree) -> Tree:
    """Return the total with the statistics of one more part: the sum of floats, the maximum of
    counters, and the part's keys of random numbers.
    """

    def add(total: jax.Array, x: jax.Array) -> jax.Array:
        if _is_key(x):
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return total + x
        return jnp.maximum(total, x)

    return jax.tree.map(add, total, stats)


def mean_stats(total: Tree, before: Tree, parts: int | jax.Array, axes: tuple[str, ...]) -> Tree:
    """Return the next statistics, equal on every worker: the mean of floats, the maximum of
    counters.

    Args:
      total: the statistics of this position's parts, added.
      before: the statistics from before the step, which stay where no worker took part.
      parts: the number of parts that this position has added; an array where not all workers take
        part.
      axes: mesh axes along which positions differ.
    """
    if not jax.tree.leaves(before):
        return before
    all_take_part = isinstance(parts, int)
    if all_take_part:
        count = parts * collectives.worker_count(axes)
    else:
        count = collectives.all_reduce(parts.astype(jnp.float32), axes)

    def mean(x: jax.Array, old: jax.Array) -> jax.Array:
        if jnp.issubdtype(old.dtype, jnp.inexact):
            divisor = count
            x = collectives.all_reduce(x, axes)
            if not all_take_part:
                divisor = jnp.maximum(count, 1)
            x = x / divisor
        elif not _is_key(old):
            x = collectives.maximum(x, axes)
        if all_take_part:
            return x.astype(old.dtype)
        # without parts `x` is `no_stats`
        has_parts = count > 0
        return jnp.where(has_parts, x.astype(old.dtype), old)

    return jax.tree.map(mean, total, before)


def _is_key(x: jax.Array) -> bool:
    """Return whether a leaf is a key of random numbers, which no row changes."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
