"""Attention tile by tile: no array of all scores exists, in the forward or the backward pass.

Sources: the running maximum and normaliser of a softmax (Milakov and Gimelshein, arXiv:1805.02867);
the backward pass from the log of the normaliser alone, also with dropout (Dao et al.,
FlashAttention, arXiv:2205.14135, algorithms 2 and 4); the order of tiles is static, and those that
a causal mask or a window hides are left out (Dao, FlashAttention-2, arXiv:2307.08691).

Inside, queries are [rows, queries, groups, heads per group, head_dim], keys and values [rows, keys,
groups, head_dim], and arrays derived from scores [rows, groups, heads per group, queries, ...].
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base.rng import bits_at
from spmd.nn.scoring import Inputs, ScoreArrays, Scoring, TileKernel, tiled_attention

# Queries and keys at a time: scores take memory as rows times heads times the square of this.
TILE = 512
MASKED = -jnp.inf
# The dim of queries in arrays derived from scores.
QUERIES = 3


class Tile(NamedTuple):
    """A part of the scores of an attention: the first query and key, and how many there are of
    each; the firsts may be traced.
    """

    query: Any
    queries: int
    key: Any
    keys: int


def plain_attention(scoring: Scoring, inputs: Inputs) -> jax.Array:
    """Return attention from the array of all scores; a query that sees no key gets zeros. Arguments
    and result are those of `chunked_attention`.
    """
    queries, key, value, arrays = _in_groups(inputs)
    rows, length = queries.shape[:2]
    tile = Tile(0, length, 0, key.shape[1])
    scores, _ = _scores(scoring, tile, 0, queries, key, arrays)
    highest = scores.max(axis=-1, keepdims=True, initial=MASKED)
    # Where all keys are masked, inf - inf would be NaN. The maximum cancels in the quotient, so it
    # has no gradient.
    exponentials = jnp.exp(scores - lax.stop_gradient(jnp.where(highest == MASKED, 0.0, highest)))
    total = exponentials.sum(axis=-1, keepdims=True)
    # A query that sees no key has the sum 0, and 0 / 0 would be NaN.
    shares = exponentials / jnp.where(total == 0, 1.0, total)
    if scoring.dropout:
        shares = shares * _dropout_factors(scoring, arrays.count, scores.shape, tile)
    out = _dot(scoring, "bkgqs,bskh->bqkgh", shares.astype(value.dtype), value)
    return out.reshape(rows, length, -1, value.shape[3]).astype(queries.dtype)


def chunked_attention(scoring: Scoring, inputs: Inputs) -> jax.Array:
    """Return attention that holds the scores of one tile at a time; a query that sees no key gets
    zeros.

    Returns:
      [rows, queries, heads, width] in the dtype of the query.
    """
    return tiled_attention(CHUNKED, scoring, inputs)


def _in_groups(inputs: Inputs) -> Inputs:
    """Return inputs with heads as [groups, heads per group], and lengths as a mask."""
    query, key, value, arrays = inputs
    groups = key.shape[2]
    query = query.reshape(*query.shape[:2], groups, -1, query.shape[3])
    arrays = arrays.lengths_as_mask(key.shape[1])
    mask = _split_heads(arrays.mask, groups)
    bias = _split_heads(arrays.bias, groups)
    return Inputs(query, key, value, arrays._replace(mask=mask, bias=bias))


class _Tiles:
    """An attention in tiles: inputs in groups, and padded to multiples of a tile."""

    def __init__(self, scoring: Scoring, shift: Any, inputs: Inputs):
        self.scoring = scoring
        self.shift = shift
        self.queries = inputs.query.shape[1]
        self.keys = inputs.key.shape[1]
        self.size = (_tile_size(self.queries), _tile_size(self.keys))
        self.more = (-self.queries % self.size[0], -self.keys % self.size[1])
        query, key, value, arrays = _in_groups(inputs)
        self.arrays = _pad_arrays(arrays, key.shape[0], self.keys, self.more)
        self.query = self.pad(query)
        self.key = _pad(key, self.more[1])
        self.value = _pad(value, self.more[1])
        self.by_query = (*query.shape[:1], *query.shape[2:4], self.query.shape[1])

    def pad(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """Return an array of queries, padded."""
        return _pad(x, self.more[0], dim)

    def by_head(self, x: jax.Array) -> jax.Array:
        """Return [rows, heads, queries] as [rows, groups, heads per group, queries], padded."""
        return self.pad(x.reshape(*self.by_query[:3], -1), QUERIES)

    def each(self, function: Any, carry: Any) -> Any:
        """Return `carry` after `function(carry, tile)` for every tile of which the causal mask and
        the window leave anything.
        """
        # In a ring the shift is traced: then every tile is a branch of the program.
        is_static = isinstance(self.shift, int)
        firsts = []
        for query in range(0, self.queries, self.size[0]):
            for key in range(0, self.keys, self.size[1]):
                if not is_static or self._is_visible(query, key):
                    firsts.append((query, key))

        def step(carry: Any, first: jax.Array) -> tuple:
            tile = Tile(first[0], self.size[0], first[1], self.size[1])
            if is_static:
                return function(carry, tile), None
            carry = lax.cond(
                self._is_visible(*first),
                lambda carry: function(carry, tile),
                lambda carry: carry,
                carry,
            )
            return carry, None

        tiles = jnp.asarray(np.array(firsts, np.int32).reshape(-1, 2))
        # Inside a loop over layers, JAX computes what depends on no layer before the loop, here the
        # masks of all tiles. After the barrier tiles depend on the query.
        tiles, _ = lax.optimization_barrier((tiles, self.query[(0,) * self.query.ndim]))
        return lax.scan(step, carry, tiles)[0]

    def _is_visible(self, query: Any, key: Any) -> Any:
        """Return whether the queries of a tile that begins there see any of its keys, by their
        positions.
        """
        before, after = self.scoring.reach
        # The distance of the first key behind the first query.
        distance = key - query - self.shift
        visible = True
        if after is not None:
            visible = distance < self.size[0] + after
        if before is None:
            return visible
        return visible & (distance > -before - self.size[1])

    def scores(self, tile: Tile) -> tuple:
        """Return `_scores` of one tile of all queries and keys."""

        def of_queries(x: jax.Array, dim: int = 1) -> jax.Array:
            return _slice(x, tile.query, tile.queries, dim)

        def of_keys(x: jax.Array, dim: int = 1) -> jax.Array:
            return _slice(x, tile.key, tile.keys, dim)

        def of_scores(x: jax.Array | None) -> jax.Array | None:
            if x is None:
                return None
            if x.shape[3] != 1:
                x = of_queries(x, 3)
            if x.shape[4] != 1:
                x = of_keys(x, 4)
            return x

        arrays = self.arrays
        arrays = arrays._replace(mask=of_scores(arrays.mask), bias=of_scores(arrays.bias))
        if arrays.key_mask is not None:
            arrays = arrays._replace(key_mask=of_keys(arrays.key_mask))
        if arrays.segments is not None:
            queries, keys = arrays.segments
            arrays = arrays._replace(segments=(of_queries(queries), of_keys(keys)))
        query = of_queries(self.query)
        key = of_keys(self.key)
        return _scores(self.scoring, tile, self.shift, query, key, arrays)

    def dropout_factors(self, tile: Tile) -> jax.Array:
        """Return the factors by which dropout multiplies a tile's weights."""
        return _dropout_factors(self.scoring, self.arrays.count, (*self.by_query, self.keys), tile)


def _tile_size(length: int) -> int:
    """Return a size of at most `TILE`, a multiple of 8 if there are several tiles, with little
    padding in the last.
    """
    count = math.ceil(length / TILE)
    if count == 1:
        return length
    return math.ceil(length / count / 8) * 8


def _forward(
    scoring: Scoring, shift: Any, inputs: Inputs, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """`TileKernel.forward`."""
    tiles = _Tiles(scoring, shift, inputs)
    wide = _wide(inputs.query.dtype)
    by_query = tiles.by_query
    width = inputs.value.shape[3]
    start = (
        jnp.full(by_query, MASKED, wide),
        jnp.zeros(by_query, wide),
        jnp.zeros((*by_query, width), wide),
    )

    def one_tile(state: tuple, tile: Tile) -> tuple:
        highest, total, weighted = (_slice(x, tile.query, tile.queries, QUERIES) for x in state)
        scores, _ = tiles.scores(tile)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        # Where all keys were masked so far, inf - inf would be NaN.
        base = jnp.where(new_highest == MASKED, 0.0, new_highest)
        shares = jnp.exp(scores - base[..., None])
        decay = jnp.exp(highest - base)
        total = total * decay + shares.sum(axis=-1)
        if scoring.dropout:
            shares = shares * tiles.dropout_factors(tile)
        values = _slice(tiles.value, tile.key, tile.keys, 1)
        weighted = weighted * decay[..., None] + _dot(
            scoring, "bkgqs,bskh->bkgqh", shares.astype(values.dtype), values
        )
        parts = (new_highest, total, weighted)
        return tuple(
            lax.dynamic_update_slice_in_dim(x, part, tile.query, QUERIES)
            for x, part in zip(state, parts, strict=True)
        )

    highest, total, weighted = tiles.each(one_tile, start)
    # The logs of these queries are minus infinity, by which `merge` gives the other keys all
    # weight.
    unseen = total == 0
    total = jnp.where(unseen, 1.0, total)
    out = jnp.moveaxis(weighted / total[..., None], QUERIES, 1).astype(dtype)[:, : tiles.queries]
    out = out.reshape(*inputs.query.shape[:3], width)
    logs = jnp.where(unseen, MASKED, highest + jnp.log(total))[..., : tiles.queries]
    return out, logs.reshape(logs.shape[0], -1, tiles.queries)


def _backward(
    scoring: Scoring,
    shift: Any,
    inputs: Inputs,
    logs: jax.Array,
    inner: jax.Array,
    grad: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """`TileKernel.backward`."""
    tiles = _Tiles(scoring, shift, inputs)
    wide = _wide(inputs.query.dtype)
    bias = inputs.arrays.bias
    query = tiles.query
    key = tiles.key
    value = tiles.value
    # The scores of a query that sees no key are minus infinity too, and inf - inf would be NaN.
    logs = tiles.by_head(jnp.where(logs == MASKED, 0.0, logs))
    inner = tiles.by_head(inner)
    grad = tiles.pad(grad.reshape(*grad.shape[:2], *tiles.by_query[1:3], -1))

    def one_tile(grads: tuple, tile: Tile) -> tuple:
        dquery, dkey, dvalue, dbias = grads
        query_ = _slice(query, tile.query, tile.queries, 1)
        grad_ = _slice(grad, tile.query, tile.queries, 1)
        key_ = _slice(key, tile.key, tile.keys, 1)
        value_ = _slice(value, tile.key, tile.keys, 1)
        logs_ = _slice(logs, tile.query, tile.queries, QUERIES)
        inner_ = _slice(inner, tile.query, tile.queries, QUERIES)
        scores, slope = tiles.scores(tile)
        shares = jnp.exp(scores - logs_[..., None])
        dshares = _dot(scoring, "bqkgh,bskh->bkgqs", grad_, value_)
        weights = shares
        if scoring.dropout:
            factors = tiles.dropout_factors(tile)
            weights = shares * factors
            dshares = dshares * factors
        dscores = shares * (dshares - inner_[..., None])
        if dbias is not None:
            dbias = _add_bias(dbias, dscores, tile)
        if slope is not None:
            dscores = dscores * slope
        dproducts = (dscores * scoring.scale).astype(query.dtype)
        weights = weights.astype(grad.dtype)
        dquery = _add(dquery, _dot(scoring, "bkgqs,bskh->bqkgh", dproducts, key_), tile.query)
        dkey = _add(dkey, _dot(scoring, "bkgqs,bqkgh->bskh", dproducts, query_), tile.key)
        dvalue = _add(dvalue, _dot(scoring, "bkgqs,bqkgh->bskh", weights, grad_), tile.key)
        return dquery, dkey, dvalue, dbias

    dbias = None
    if tiles.arrays.bias is not None:
        dbias = jnp.zeros(tiles.arrays.bias.shape, wide)
    start = (*(jnp.zeros(x.shape, wide) for x in (query, key, value)), dbias)
    *grads, dbias = tiles.each(one_tile, start)
    grads = [
        x[:, : like.shape[1]].reshape(like.shape).astype(dtype)
        for x, like in zip(grads, inputs[:3], strict=True)
    ]
    if bias is not None:
        dbias = dbias[..., : bias.shape[2], : bias.shape[3]].reshape(bias.shape)
    return (*grads, dbias)


CHUNKED = TileKernel(_forward, _backward)


def _scores(
    scoring: Scoring, tile: Tile, shift: Any, query: jax.Array, key: jax.Array, arrays: ScoreArrays
) -> tuple:
    """Return scores of a tile's queries, keys and arrays, minus infinity where a key is not
    visible; and the slope of the soft cap.
    """
    scores = _dot(scoring, "bqkgh,bskh->bkgqs", query, key) * scoring.scale
    slope = None
    if scoring.soft_cap is not None:
        capped = jnp.tanh(scores / scoring.soft_cap)
        scores = capped * scoring.soft_cap
        slope = 1 - capped**2
    if arrays.bias is not None:
        scores = scores + arrays.bias.astype(scores.dtype)
    for mask in _masks(scoring, tile, shift, arrays):
        scores = jnp.where(mask, scores, MASKED)
    return scores, slope


def _masks(scoring: Scoring, tile: Tile, shift: Any, arrays: ScoreArrays) -> list[jax.Array]:
    """Return all masks of a tile's scores, False where a query does not see a key: each
    bool[rows, groups, heads per group, queries, keys] or with dims of 1.
    """
    keys = tile.key - shift + jnp.arange(tile.keys)
    queries = tile.query + jnp.arange(tile.queries)
    distance = keys - queries[:, None]
    before, after = scoring.reach
    masks = []
    if before is not None:
        masks.append(distance >= -before)
    if after is not None:
        masks.append(distance <= after)
    if arrays.mask is not None:
        masks.append(arrays.mask)
    if arrays.key_mask is not None:
        masks.append(arrays.key_mask[:, None, None, None, :])
    if arrays.segments is not None:
        queries, keys = arrays.segments
        masks.append((queries[:, :, None] == keys[:, None, :])[:, None, None])
    return masks


def _dropout_factors(scoring: Scoring, count: Any, shape: tuple[int, ...], tile: Tile) -> jax.Array:
    """Return the factors by which dropout multiplies a tile's weights, [rows, groups, heads per
    group, queries, keys] or with dims of 1.
    """
    rows, groups, heads, *_ = shape
    row_stride, head_stride, query_stride = scoring.strides
    # All rows and heads have the same numbers where they lose the same weights.
    if not row_stride:
        rows = 1
    head_numbers = jnp.zeros((1, 1, 1, 1), jnp.int32)
    if head_stride:
        head_numbers = jnp.arange(groups * heads).reshape(groups, heads, 1, 1)
    # Each has as many dims as scores have.
    row_numbers = jnp.arange(rows)[:, None, None, None, None]
    query_numbers = (tile.query + jnp.arange(tile.queries))[:, None]
    key_numbers = tile.key + jnp.arange(tile.keys)
    bits = bits_at(
        count,
        (row_numbers, row_stride),
        (head_numbers, head_stride),
        (query_numbers, query_stride),
        (key_numbers, 1),
    )
    # `jax.random.bernoulli` compares 23 bits, as a float32 has.
    stays = bits >> np.uint32(9) < np.uint32(scoring.threshold)
    return jnp.where(stays, np.float32(1 / (1 - scoring.dropout)), np.float32(0.0))


def _split_heads(x: jax.Array | None, groups: int) -> jax.Array | None:
    """Return [rows, heads, queries, keys] as [rows, groups, heads per group, queries, keys]; a
    single head stays one.
    """
    if x is None:
        return None
    if x.shape[1] == 1:
        groups = 1
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _pad(x: jax.Array, more: int, dim: int = 1) -> jax.Array:
    if not more:
        return x
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, more)
    return jnp.pad(x, widths)


def _pad_arrays(arrays: ScoreArrays, rows: int, keys: int, more: tuple[int, int]) -> ScoreArrays:
    """Return the arrays for padded queries and keys, of which nothing sees the added keys."""

    def padded(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        if x.shape[3] != 1:
            x = _pad(x, more[0], 3)
        if x.shape[4] != 1:
            x = _pad(x, more[1], 4)
        return x

    key_mask = arrays.key_mask
    if more[1]:
        if key_mask is None:
            key_mask = jnp.ones((rows, keys), bool)
        key_mask = _pad(key_mask, more[1])
    segments = arrays.segments
    segments = segments and (_pad(segments[0], more[0]), _pad(segments[1], more[1]))
    return arrays._replace(
        mask=padded(arrays.mask), bias=padded(arrays.bias), key_mask=key_mask, segments=segments
    )


def _wide(dtype: Any) -> Any:
    """Return the dtype of sums: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _dot(scoring: Scoring, subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    dtype = _wide(left.dtype)
    return jnp.einsum(
        subscripts, left, right, precision=scoring.precision, preferred_element_type=dtype
    )


def _slice(x: jax.Array, start: Any, size: int, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size, dim)


def _add(x: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, _slice(x, start, part.shape[1], 1) + part, start, 1)


def _add_bias(dbias: jax.Array, dscores: jax.Array, tile: Tile) -> jax.Array:
    """Return `dbias` with a tile's gradients added, summed over the dims that the bias does not
    have.
    """
    missing = [dim for dim, size in enumerate(dbias.shape) if size == 1]
    part = dscores.sum(axis=missing, keepdims=True)
    start = [0, 0, 0, tile.query, tile.key]
    for dim in missing:
        start[dim] = 0
    added = lax.dynamic_slice(dbias, start, part.shape) + part
    return lax.dynamic_update_slice(dbias, added, start)
