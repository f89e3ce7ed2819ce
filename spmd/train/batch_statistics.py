"""Statistics that layers keep beside their parameters, such as the averages of BatchNorm, over workers."""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.tree import Tree
from spmd.wire import collectives


def sync_stats(stats: Tree, axes: tuple[str, ...], present: Any = None, before: Tree = None) -> Tree:
    """Stats that are equal on every worker: the mean of floats, the maximum of counters.

    Args:
      present: whether this position took part; None: all did. The mean is over those that did; if none did, `before` stays.
    """
    if not jax.tree.leaves(stats):
        return stats
    count = collectives.worker_count(axes) if present is None else collectives.all_reduce(present.astype(jnp.float32), axes)

    def sync(x: jax.Array, old: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return collectives.maximum(x, axes)
        if present is None:
            return collectives.all_reduce(x, axes) / count
        total = collectives.all_reduce(jnp.where(present, x, jnp.zeros_like(x)), axes)
        return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(x.dtype), old)

    return jax.tree.map(sync, stats, stats if before is None else before)
