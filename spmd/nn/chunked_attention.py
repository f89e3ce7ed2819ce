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

# queries and keys at a time: scores take memory as rows times heads times the square of this
TILE = 512
MASKED = -jnp.inf
QUERIES = 3  # the dim of queries in arrays derived from scores


class Tile(NamedTuple):
    """Of the scores of an attention: the first query and key, and how many there are of each; the
    firsts may be traced.
    """

    query: Any
    queries: int
    key: Any
    keys: int


def plain_attention(scoring: Scoring, inputs: Inputs) -> jax.Array:
    """Attention from the array of all scores; a query that sees no key gets zeros. Arguments and
    result as of `chunked_attention`.
    """
    queries, key, value, arrays = _in_groups(inputs)
    rows, length = queries.shape[:2]
    tile = Tile(0, length, 0, key.shape[1])
    scores, _ = _scores(scoring, tile, 0, queries, key, arrays)
    highest = scores.max(axis=-1, keepdims=True, initial=MASKED)
    exponentials = jnp.exp(scores - lax.stop_gradient(jnp.where(highest == MASKED, 0.0, highest)))
    total = exponentials.sum(axis=-1, keepdims=True)
    shares = exponentials / jnp.where(total == 0, 1.0, total)
    if scoring.dropout:
        shares = shares * _kept(scoring, arrays.count, scores.shape, tile)
    out = _dot(scoring, "bkgqs,bskh->bqkgh", shares.astype(value.dtype), value)
    return out.reshape(rows, length, -1, value.shape[3]).astype(queries.dtype)


def chunked_attention(scoring: Scoring, inputs: Inputs) -> jax.Array:
    """Attention that holds the scores of one tile at a time; a query that sees no key gets zeros.

    Returns:
      [rows, queries, heads, width] in the dtype of the query.
    """
    return tiled_attention(CHUNKED, scoring, inputs)


def _in_groups(inputs: Inputs) -> Inputs:
    """With heads as [groups, heads per group], and lengths as a mask."""
    query, key, value, arrays = inputs
    groups, arrays = key.shape[2], arrays.lengths_as_mask(key.shape[1])
    arrays = arrays._replace(
        mask=_split_heads(arrays.mask, groups), bias=_split_heads(arrays.bias, groups)
    )
    return Inputs(query.reshape(*query.shape[:2], groups, -1, query.shape[3]), key, value, arrays)


class _Tiles:
    """An attention in tiles: inputs in groups, and padded to multiples of a tile."""

    def __init__(self, scoring: Scoring, shift: Any, inputs: Inputs):
        self.scoring, self.shift = scoring, shift
        self.queries, self.keys = inputs.query.shape[1], inputs.key.shape[1]
        self.size = (_tile_size(self.queries), _tile_size(self.keys))
        self.more = (-self.queries % self.size[0], -self.keys % self.size[1])
        query, key, value, arrays = _in_groups(inputs)
        self.arrays = _pad_arrays(arrays, key.shape[0], self.keys, self.more)
        self.query, self.key, self.value = (
            self.pad(query),
            _pad(key, self.more[1]),
            _pad(value, self.more[1]),
        )
        self.by_query = (*query.shape[:1], *query.shape[2:4], self.query.shape[1])

    def pad(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """An array of queries, padded."""
        return _pad(x, self.more[0], dim)

    def by_head(self, x: jax.Array) -> jax.Array:
        """[rows, heads, queries] as [rows, groups, heads per group, queries], padded."""
        return self.pad(x.reshape(*self.by_query[:3], -1), QUERIES)

    def each(self, function: Any, carry: Any) -> Any:
        """`carry` after `function(carry, tile)` for every tile of which the causal mask and the
        window leave anything.

        Inside a loop over layers, JAX computes what depends on no layer before the loop, here the
        masks of all tiles; hence the barrier, after which tiles depend on the query.
        """
        firsts = [
            (q, k)
            for q in range(0, self.queries, self.size[0])
            for k in range(0, self.keys, self.size[1])
        ]
        known = isinstance(self.shift, int)
        if known:
            firsts = [first for first in firsts if self._seen(*first)]

        def step(carry: Any, first: jax.Array) -> tuple:
            tile = Tile(first[0], self.size[0], first[1], self.size[1])
            if known:
                return function(carry, tile), None
            return lax.cond(
                self._seen(*first), lambda carry: function(carry, tile), lambda carry: carry, carry
            ), None

        tiles = jnp.asarray(np.array(firsts, np.int32).reshape(-1, 2))
        tiles, _ = lax.optimization_barrier((tiles, self.query[(0,) * self.query.ndim]))
        return lax.scan(step, carry, tiles)[0]

    def _seen(self, query: Any, key: Any) -> Any:
        """Whether the queries of a tile that begins there see any of its keys, by their
        positions.
        """
        before, after = self.scoring.reach
        distance = key - query - self.shift  # of the first key behind the first query
        seen = True if after is None else distance < self.size[0] + after
        return seen if before is None else seen & (distance > -before - self.size[1])

    def scores(self, tile: Tile) -> tuple:
        """`_scores` of one tile of all queries and keys."""

        def both(x: jax.Array | None) -> jax.Array | None:
            if x is None:
                return None
            x = x if x.shape[3] == 1 else _slice(x, tile.query, tile.queries, 3)
            return x if x.shape[4] == 1 else _slice(x, tile.key, tile.keys, 4)

        key_mask, segments = self.arrays.key_mask, self.arrays.segments
        arrays = self.arrays._replace(
            mask=both(self.arrays.mask),
            bias=both(self.arrays.bias),
            key_mask=None if key_mask is None else _slice(key_mask, tile.key, tile.keys, 1),
            segments=segments
            and (
                _slice(segments[0], tile.query, tile.queries, 1),
                _slice(segments[1], tile.key, tile.keys, 1),
            ),
        )
        query, key = (
            _slice(self.query, tile.query, tile.queries, 1),
            _slice(self.key, tile.key, tile.keys, 1),
        )
        return _scores(self.scoring, tile, self.shift, query, key, arrays)

    def kept(self, tile: Tile) -> jax.Array:
        """What dropout multiplies a tile's weights by."""
        return _kept(self.scoring, self.arrays.count, (*self.by_query, self.keys), tile)


def _tile_size(length: int) -> int:
    """At most `TILE`, a multiple of 8 if there are several, with little padding in the last."""
    count = math.ceil(length / TILE)
    return length if count == 1 else math.ceil(length / count / 8) * 8


def _forward(
    scoring: Scoring, shift: Any, inputs: Inputs, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """`TileKernel.forward`."""
    tiles, wide = _Tiles(scoring, shift, inputs), _wide(inputs.query.dtype)
    by_query, width = tiles.by_query, inputs.value.shape[3]
    start = (
        jnp.full(by_query, MASKED, wide),
        jnp.zeros(by_query, wide),
        jnp.zeros((*by_query, width), wide),
    )

    def one_tile(state: tuple, tile: Tile) -> tuple:
        highest, total, weighted = (_slice(x, tile.query, tile.queries, QUERIES) for x in state)
        scores, _ = tiles.scores(tile)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        # if all were masked so far: avoid inf - inf
        base = jnp.where(new_highest == MASKED, 0.0, new_highest)
        shares, decay = jnp.exp(scores - base[..., None]), jnp.exp(highest - base)
        total = total * decay + shares.sum(axis=-1)
        if scoring.dropout:
            shares = shares * tiles.kept(tile)
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
    unseen = total == 0
    total = jnp.where(unseen, 1.0, total)
    out = jnp.moveaxis(weighted / total[..., None], QUERIES, 1).astype(dtype)[:, : tiles.queries]
    logs = jnp.where(unseen, MASKED, highest + jnp.log(total))[..., : tiles.queries]
    return out.reshape(*inputs.query.shape[:3], width), logs.reshape(
        logs.shape[0], -1, tiles.queries
    )


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
    tiles, wide, bias = (
        _Tiles(scoring, shift, inputs),
        _wide(inputs.query.dtype),
        inputs.arrays.bias,
    )
    query, key, value = tiles.query, tiles.key, tiles.value
    logs, inner = tiles.by_head(jnp.where(logs == MASKED, 0.0, logs)), tiles.by_head(inner)
    grad = tiles.pad(grad.reshape(*grad.shape[:2], *tiles.by_query[1:3], -1))

    def one_tile(grads: tuple, tile: Tile) -> tuple:
        dquery, dkey, dvalue, dbias = grads
        query_, grad_ = (_slice(x, tile.query, tile.queries, 1) for x in (query, grad))
        key_, value_ = (_slice(x, tile.key, tile.keys, 1) for x in (key, value))
        logs_, inner_ = (_slice(x, tile.query, tile.queries, QUERIES) for x in (logs, inner))
        scores, slope = tiles.scores(tile)
        shares, dshares = (
            jnp.exp(scores - logs_[..., None]),
            _dot(scoring, "bqkgh,bskh->bkgqs", grad_, value_),
        )
        weights = shares
        if scoring.dropout:
            kept = tiles.kept(tile)
            weights, dshares = shares * kept, dshares * kept
        dscores = shares * (dshares - inner_[..., None])
        dbias = None if dbias is None else _add_bias(dbias, dscores, tile)
        dproducts = ((dscores if slope is None else dscores * slope) * scoring.scale).astype(
            query.dtype
        )
        dquery = _add(dquery, _dot(scoring, "bkgqs,bskh->bqkgh", dproducts, key_), tile.query)
        dkey = _add(dkey, _dot(scoring, "bkgqs,bqkgh->bskh", dproducts, query_), tile.key)
        dvalue = _add(
            dvalue, _dot(scoring, "bkgqs,bqkgh->bskh", weights.astype(grad.dtype), grad_), tile.key
        )
        return dquery, dkey, dvalue, dbias

    of_bias = None if tiles.arrays.bias is None else jnp.zeros(tiles.arrays.bias.shape, wide)
    start = (*(jnp.zeros(x.shape, wide) for x in (query, key, value)), of_bias)
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
    """Scores of a tile's queries, keys and arrays, minus infinity where a key is not seen; and the
    slope of the soft cap.
    """
    scores, slope = _dot(scoring, "bqkgh,bskh->bkgqs", query, key) * scoring.scale, None
    if scoring.soft_cap is not None:
        capped = jnp.tanh(scores / scoring.soft_cap)
        scores, slope = capped * scoring.soft_cap, 1 - capped**2
    if arrays.bias is not None:
        scores = scores + arrays.bias.astype(scores.dtype)
    for seen in _seen(scoring, tile, shift, arrays):
        scores = jnp.where(seen, scores, MASKED)
    return scores, slope


def _seen(scoring: Scoring, tile: Tile, shift: Any, arrays: ScoreArrays) -> list[jax.Array]:
    """Which keys of a tile its queries see, by every mask: each bool[rows, groups, heads per group,
    queries, keys] or with dims of 1.
    """
    # of a key behind a query
    distance = (tile.key - shift + jnp.arange(tile.keys)) - (tile.query + jnp.arange(tile.queries))[
        :, None
    ]
    before, after = scoring.reach
    seen = [distance >= -before] if before is not None else []
    seen += [distance <= after] if after is not None else []
    seen += [arrays.mask] if arrays.mask is not None else []
    seen += [arrays.key_mask[:, None, None, None, :]] if arrays.key_mask is not None else []
    if arrays.segments is not None:
        queries, keys = arrays.segments
        seen.append((queries[:, :, None] == keys[:, None, :])[:, None, None])
    return seen


def _kept(scoring: Scoring, count: Any, shape: tuple[int, ...], tile: Tile) -> jax.Array:
    """What dropout multiplies a tile's weights by, [rows, groups, heads per group, queries, keys]
    or with dims of 1.
    """
    rows, groups, heads, *_ = shape
    of_row, of_head, of_query = scoring.strides
    # each with as many dims as scores have; all rows and heads at once if they lose the same
    # weights
    places = (
        (jnp.arange(rows if of_row else 1)[:, None, None, None, None], of_row),
        (
            jnp.arange(groups * heads).reshape(groups, heads, 1, 1)
            if of_head
            else jnp.zeros((1, 1, 1, 1), jnp.int32),
            of_head,
        ),
        ((tile.query + jnp.arange(tile.queries))[:, None], of_query),
        (tile.key + jnp.arange(tile.keys), 1),
    )
    share = np.float32(1 / (1 - scoring.dropout))
    return jnp.where(
        bits_at(count, *places) >> np.uint32(9) < np.uint32(scoring.threshold),
        share,
        np.float32(0.0),
    )


def _split_heads(x: jax.Array | None, groups: int) -> jax.Array | None:
    """[rows, heads, queries, keys] as [rows, groups, heads per group, queries, keys]; a single head
    stays one.
    """
    if x is None:
        return None
    return x.reshape(x.shape[0], *((1, 1) if x.shape[1] == 1 else (groups, -1)), *x.shape[2:])


def _pad(x: jax.Array, more: int, dim: int = 1) -> jax.Array:
    return jnp.pad(x, [(0, more if at == dim else 0) for at in range(x.ndim)]) if more else x


def _pad_arrays(arrays: ScoreArrays, rows: int, keys: int, more: tuple[int, int]) -> ScoreArrays:
    """The arrays for padded queries and keys, of which nothing sees the added keys."""

    def both(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        x = x if x.shape[3] == 1 else _pad(x, more[0], 3)
        return x if x.shape[4] == 1 else _pad(x, more[1], 4)

    key_mask, segments = arrays.key_mask, arrays.segments
    if more[1]:
        key_mask = _pad(jnp.ones((rows, keys), bool) if key_mask is None else key_mask, more[1])
    segments = segments and (_pad(segments[0], more[0]), _pad(segments[1], more[1]))
    return arrays._replace(
        mask=both(arrays.mask), bias=both(arrays.bias), key_mask=key_mask, segments=segments
    )


def _wide(dtype: Any) -> Any:
    """The dtype of sums: at least float32."""
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
    """`dbias` with a tile's gradients added, summed over the dims that the bias does not have."""
    part = dscores.sum(
        axis=[dim for dim, size in enumerate(dbias.shape) if size == 1], keepdims=True
    )
    start = (
        0,
        0,
        0,
        0 if dbias.shape[3] == 1 else tile.query,
        0 if dbias.shape[4] == 1 else tile.key,
    )
    return lax.dynamic_update_slice(
        dbias, lax.dynamic_slice(dbias, start, part.shape) + part, start
    )
