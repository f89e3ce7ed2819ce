"""Keys and values of the tokens before, for a decoder that is given one token after the other.

All layers' lie in two arrays, which a scan over layers carries and XLA updates in place.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmd.nn.attention import attention

Cache = dict[str, jax.Array]  # "keys" and "values", [layers, rows, length, kv_heads, head_dim]


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: tuple[jax.Array, ...],
    positions: jax.Array,
    window: int | None,
    **options: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Causal attention to new keys and values and to those of the cache, where the new ones are
    stored first.

    Args:
      query: [rows, length, heads, head_dim]; key and value: [rows, length, kv_heads, head_dim].
      cache: keys and values of all layers, and the number of this one.
      positions: int32[rows, length], where new keys and values are stored; nothing is stored at the
        cache's length or after it.
      window: keys that a query sees, its own included; None: all at its position and before.
      options: of `spmd.nn.attention`.

    Returns:
      The result, shaped like the query, and the cache for the next layer.
    """
    keys, values, number = cache
    keys, values = (
        _store(kept, new, number, positions) for kept, new in ((keys, key), (values, value))
    )
    distance = positions[:, :, None] - jnp.arange(keys.shape[2])
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    key, value = (kept[number].astype(query.dtype) for kept in (keys, values))
    return attention(query, key, value, mask=seen[:, None], **options), (keys, values, number + 1)


def _store(kept: jax.Array, new: jax.Array, number: jax.Array, positions: jax.Array) -> jax.Array:
    """All layers' keys or values with new ones. Each row is a batch of its own to the compiler,
    which then leaves rows where they lie: with `kept.at[number, rows, positions].set(new)` it
    gathers the new ones of all rows on every device.
    """
    at = jnp.stack([jnp.broadcast_to(number, positions.shape), positions], axis=-1)
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(
        kept, at, new.astype(kept.dtype), dims, mode=jax.lax.GatherScatterMode.FILL_OR_DROP
    )
