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
    """Causal attention to new keys and values and to those of the cache, where the new ones are stored first.

    Args:
      query: [rows, length, heads, head_dim]; key and value: [rows, length, kv_heads, head_dim].
      cache: keys and values of all layers, and the number of this one.
      positions: int32[rows, length], where new keys and values are stored; nothing is stored at the cache's length or after it.
      window: keys that a query sees, its own included; None: all at its position and before.
      options: of `spmd.nn.attention`.

    Returns:
      The result, shaped like the query, and the cache for the next layer.
    """
    keys, values, number = cache
    at = (number, jnp.arange(query.shape[0])[:, None], positions)
    keys, values = (kept.at[at].set(new.astype(kept.dtype)) for kept, new in ((keys, key), (values, value)))
    distance = positions[:, :, None] - jnp.arange(keys.shape[2])
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    key, value = (kept[number].astype(query.dtype) for kept in (keys, values))
    return attention(query, key, value, mask=seen[:, None], **options), (keys, values, number + 1)
