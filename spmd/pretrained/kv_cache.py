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
      cache: keys and values of all layers, and the number of this layer.
      positions: int32[rows, length], where new keys and values are stored; nothing is stored at the
        cache's length or after it.
      window: keys that a query sees, its own included; None: all at its position and before.
      options: of `spmd.nn.attention`.

    Returns:
      The result, shaped like the query, and the cache for the next layer.
    """
    keys, values, number = cache
    keys = _store(keys, key, number, positions)
    values = _store(values, value, number, positions)
    # Places that are not filled yet are behind every query, so this mask hides them, too.
    distance = positions[:, :, None] - jnp.arange(keys.shape[2])
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    key, value = keys[number].astype(query.dtype), values[number].astype(query.dtype)
    result = attention(query, key, value, mask=mask[:, None], **options)
    return result, (keys, values, number + 1)


def _store(stored: jax.Array, new: jax.Array, number: jax.Array, positions: jax.Array) -> jax.Array:
    """Return all layers' keys or values with new ones."""
    # Rows are batching dims, which the partitioner leaves where they are: with
    # `stored.at[number, rows, positions].set(new)` it gathers the new ones of all rows on every
    # device (jax 0.10).
    at = jnp.stack([jnp.broadcast_to(number, positions.shape), positions], axis=-1)
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(
        stored, at, new.astype(stored.dtype), dims, mode=jax.lax.GatherScatterMode.FILL_OR_DROP
    )
