"""Attention for models whose sequences a layout may shard."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import DataError, OptionError
from spmd.layout.fixes import near_multiples
from spmd.nn.parallel_context import ParallelConfig, current
from spmd.nn.ring_attention import Ring, into_ring, out_of_ring, ring_attention
from spmd.tree import describe


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    key_mask: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention: for every query, the mean of the values, weighted by the softmax of the scores of its key.

    On one device, and under a layout that does not shard sequences, it is `jax.nn.dot_product_attention`. Under  [sequence] axis =
    "context"  the sequence is sharded over the devices of that axis. Keys and values are passed around the ring of devices, and no device
    ever holds the full sequence or its score matrix (`spmd.nn.ring_attention`, with sources). The result is the same up to the order of
    sums, in float32.

    Args:
      query: [rows, length, heads, head_dim].
      key, value: [rows, length of keys, heads, head_dim]; fewer heads if they divide those of the queries (grouped queries).
      causal: a position sees itself and those before it.
      key_mask: bool[rows, length of keys], False at keys that are masked out (padding). A query without any key gets zeros.
      scale: of the scores; 1 / sqrt(head_dim) by default.

    Returns:
      [rows, length, heads, head_dim], in the dtype and sharding of the query.

    Raises:
      OptionError: shapes do not match.
      DataError: the devices of the axis (twice that in balanced order) do not divide a length.

    Example:
      >>> x = jnp.arange(24.0).reshape(1, 3, 2, 4)
      >>> attention(x, x, x, causal=True)[0, 0, 0]  # the first position sees only itself
      Array([0., 1., 2., 3.], dtype=float32)
    """
    _check(query, key, value, key_mask)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    parallel = current()
    axis = parallel.sequence.axis
    if axis is None:
        return _unsharded(query, key, value, causal, key_mask, scale)
    parallel.used.add("sequence")
    if parallel.axis_size(axis) == 1:
        return _unsharded(query, key, value, causal, key_mask, scale)
    balanced = causal and parallel.sequence.order == "balanced"
    ring = Ring(parallel, axis, parallel.auto_row_axes(query.shape[0]), causal, 2 if balanced else 1, scale)
    _check_lengths(parallel, ring, query, key)
    (rows, length, _, size), groups = query.shape, key.shape[2]
    arrays = (query.reshape(rows, length, groups, -1, size), key, value, key_mask)
    out: Any = ring_attention(ring, *(ring.run(into_ring, *arrays) if balanced else arrays))
    return (ring.run(out_of_ring, out) if balanced else out).reshape(query.shape)


def _unsharded(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, mask: jax.Array | None, scale: float) -> jax.Array:
    """Attention on unsharded arrays."""
    if mask is None:
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=causal)
    visible = mask[:, None, None, :]
    out = jax.nn.dot_product_attention(query, key, value, mask=visible, scale=scale, is_causal=causal)
    if causal:
        visible = visible & jnp.tri(query.shape[1], key.shape[1], dtype=bool)
    return jnp.where(visible.any(axis=-1).swapaxes(1, 2)[..., None], out, jnp.zeros_like(out))


def _check(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> None:
    """Check that shapes match."""
    matches = query.ndim == key.ndim == 4 and key.shape == value.shape
    matches = matches and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3] and query.shape[2] % max(key.shape[2], 1) == 0
    if not matches:
        shown = f"query {describe(query)}, key {describe(key)}, value {describe(value)}"
        fix = "[rows, length, heads, head_dim] each; keys and values alike, with the query's rows and head_dim, "
        raise OptionError(f"attention: {shown}.", fix=f"{fix}and heads that divide the query's.")
    if mask is not None and (mask.shape != key.shape[:2] or mask.dtype != bool):
        raise OptionError(f"attention: key_mask is {describe(mask)}.", fix=f"bool[{key.shape[0]}, {key.shape[1]}], one for each key.")


def _check_lengths(parallel: ParallelConfig, ring: Ring, query: jax.Array, key: jax.Array) -> None:
    """Check that the ring can shard the lengths."""
    where, unit = f'[sequence] axis = "{ring.axis}", {ring.count} devices', ring.count * ring.parts
    if ring.causal and query.shape[1] != key.shape[1]:
        why = f"attention ({where}): {query.shape[1]} queries and {key.shape[1]} keys under a causal mask."
        raise DataError(why, fix="as many of each, or a layout that does not shard sequences.")
    for length in (query.shape[1], key.shape[1]):
        if length % unit:
            parts = f"{unit} parts, two for each device in balanced order" if ring.parts == 2 else f"{unit} devices"
            why = f"a sequence of {length} is not divisible by {parts}: {length} / {unit} leaves {length % unit}."
            raise DataError(f"attention ({where}): {why}", fix=f"sequences of {near_multiples(length, unit)}, padded if need be.")
