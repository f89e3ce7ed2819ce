"""Attention tile by tile: no array of all scores exists, in the forward or the backward pass.

Sources: the running maximum and normaliser of a softmax (Milakov and Gimelshein, arXiv:1805.02867); the backward pass from the log of
the normaliser alone, also with dropout (Dao et al., FlashAttention, arXiv:2205.14135, algorithms 2 and 4); the order of tiles is static,
and those that a causal mask or a window hides are left out (Dao, FlashAttention-2, arXiv:2307.08691).

Inside, queries are [rows, queries, groups, heads per group, head_dim], keys and values [rows, keys, groups, head_dim], and arrays derived
from scores [rows, groups, heads per group, queries, ...].
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.rng import tile_bits

TILE = 512  # queries and keys at a time: scores take memory as rows times heads times the square of this
MASKED = -jnp.inf
QUERIES = 3  # the dim of queries in arrays derived from scores


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How scores come from products of queries and keys; known when tracing.

    Attributes:
      scale: the products are multiplied by it.
      causal: a query sees keys at its own position and before, both counted from 0.
      window: keys that a query sees before and after its own position; None: no bound.
      soft_cap: scaled products x become soft_cap * tanh(x / soft_cap), before a bias is added (Gemma 2, arXiv:2408.00118).
      dropout: the share of a query's weights that are set to zero, the others growing by 1 / (1 - dropout).
      shared_dropout: all rows and heads lose the same weights, as flax's `broadcast_dropout` says.
      precision: of all products, as `jax.lax.dot_general` takes it.
    """

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    dropout: float = 0.0
    shared_dropout: bool = False
    precision: Any = None


class ScoreArrays(NamedTuple):
    """Arrays that change scores; None where there is none.

    Attributes:
      mask: bool[rows, heads, queries, keys], dims of 1 for all; False where a key is not seen.
      bias: added to scores, of such a shape.
      key_mask: bool[rows, keys], False at keys that nothing sees.
      key_lengths: int[rows], the number of keys of each row, the others behind them.
      segments: int[rows, queries] and int[rows, keys]: a query sees keys of its own segment.
      dropout_key: the key that dropout draws with.
    """

    mask: jax.Array | None = None
    bias: jax.Array | None = None
    key_mask: jax.Array | None = None
    key_lengths: jax.Array | None = None
    segments: tuple[jax.Array, jax.Array] | None = None
    dropout_key: jax.Array | None = None

    def in_groups(self, keys: int, groups: int) -> "ScoreArrays":
        """With heads as [groups, heads per group], lengths as a mask, and a typed key."""
        key_mask, dropout_key = self.key_mask, self.dropout_key
        if self.key_lengths is not None:
            within = jnp.arange(keys) < self.key_lengths[:, None]
            key_mask = within if key_mask is None else key_mask & within
        if dropout_key is not None and not jnp.issubdtype(dropout_key.dtype, jax.dtypes.prng_key):
            dropout_key = jax.random.wrap_key_data(dropout_key)  # of jax.random.PRNGKey
        return self._replace(
            dropout_key=dropout_key,
            mask=_split_heads(self.mask, groups),
            bias=_split_heads(self.bias, groups),
            key_mask=key_mask,
            key_lengths=None,
        )


class Tile(NamedTuple):
    """Of the scores of an attention: the first query and key, and how many there are of each; the firsts may be traced."""

    query: Any
    queries: int
    key: Any
    keys: int


def plain_attention(scoring: Scoring, query: jax.Array, key: jax.Array, value: jax.Array, arrays: ScoreArrays) -> jax.Array:
    """Attention from the array of all scores; a query that sees no key gets zeros. Arguments and result as of `chunked_attention`."""
    rows, length, heads, _ = query.shape
    groups, arrays = key.shape[2], arrays.in_groups(key.shape[1], key.shape[2])
    queries = query.reshape(rows, length, groups, -1, query.shape[3])
    tile = Tile(0, length, 0, key.shape[1])
    scores, _ = _scores(scoring, tile, queries, key, arrays)
    highest = scores.max(axis=-1, keepdims=True, initial=MASKED)
    exponentials = jnp.exp(scores - lax.stop_gradient(jnp.where(highest == MASKED, 0.0, highest)))
    total = exponentials.sum(axis=-1, keepdims=True)
    shares = exponentials / jnp.where(total == 0, 1.0, total)
    if scoring.dropout:
        shares = shares * _kept(scoring, arrays.dropout_key, scores.shape, tile)
    out = _dot(scoring, "bkgqs,bskh->bqkgh", shares.astype(value.dtype), value)
    return out.reshape(rows, length, heads, value.shape[3]).astype(query.dtype)


def chunked_attention(scoring: Scoring, query: jax.Array, key: jax.Array, value: jax.Array, arrays: ScoreArrays) -> jax.Array:
    """Attention that holds the scores of one tile at a time; a query that sees no key gets zeros.

    The backward pass keeps the inputs, the result and one number per query and head, and computes scores again. There is no second
    derivative, and no forward-mode one.

    Args:
      query: [rows, queries, heads, head_dim].
      key: [rows, keys, groups, head_dim]; the groups divide the heads.
      value: [rows, keys, groups, width].

    Returns:
      [rows, queries, heads, width] in the dtype of the query.
    """
    (rows, length, heads, _), (keys, groups), width = query.shape, key.shape[1:3], value.shape[3]
    if not query.size or not key.size or not value.size:
        return jnp.zeros((rows, length, heads, width), query.dtype)
    arrays = arrays.in_groups(keys, groups)
    queries = query.reshape(rows, length, groups, -1, query.shape[3])
    shape = _Shape((rows, *queries.shape[2:4], length, keys), _tile_size(length), _tile_size(keys))
    more = (-length % shape.tile_queries, -keys % shape.tile_keys)
    if any(more):
        queries, key, value = _pad(queries, more[0]), _pad(key, more[1]), _pad(value, more[1])
        arrays = _pad_arrays(arrays, rows, keys, more)
    out: Any = _attention(scoring, shape, queries, key, value, arrays)
    return out[:, :length].reshape(rows, length, heads, width)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The shape of all scores, [rows, groups, heads per group, queries, keys], before padding, and of a tile."""

    scores: tuple[int, ...]
    tile_queries: int
    tile_keys: int

    def tiles(self, scoring: Scoring) -> np.ndarray:
        """int32[tiles, 2]: the first query and key of every tile of which the causal mask and the window leave anything."""
        *_, queries, keys = self.scores
        before, after = scoring.window
        after = min(0, after or 0) if scoring.causal else after
        firsts = [
            (query, key)
            for query in range(0, queries, self.tile_queries)
            for key in range(0, keys, self.tile_keys)
            if (after is None or key < query + self.tile_queries + after) and (before is None or key + self.tile_keys > query - before)
        ]
        return np.array(firsts, np.int32).reshape(-1, 2)


def _tile_size(length: int) -> int:
    """At most `TILE`, a multiple of 8 if there are several, with little padding in the last."""
    count = math.ceil(length / TILE)
    return length if count == 1 else math.ceil(length / count / 8) * 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scoring: Scoring, shape: _Shape, query: jax.Array, key: jax.Array, value: jax.Array, arrays: ScoreArrays) -> jax.Array:
    return _forward(scoring, shape, query, key, value, arrays)[0]


def _forward(scoring: Scoring, shape: _Shape, query: jax.Array, key: jax.Array, value: jax.Array, arrays: ScoreArrays) -> tuple:
    """The result [rows, queries, groups, heads per group, width], and the log of every query's normaliser; 0 if it sees no key."""
    rows, length, groups, heads, _ = query.shape
    dtype, by_query = _wide(query.dtype), (rows, groups, heads, length)
    start = (jnp.full(by_query, MASKED, dtype), jnp.zeros(by_query, dtype), jnp.zeros((*by_query, value.shape[3]), dtype))

    def one_tile(state: tuple, tile: Tile) -> tuple:
        highest, total, weighted = (_slice(x, tile.query, tile.queries, QUERIES) for x in state)
        scores, _ = _scores_of_tile(scoring, tile, query, key, arrays)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        base = jnp.where(new_highest == MASKED, 0.0, new_highest)  # if all were masked so far: avoid inf - inf
        shares, decay = jnp.exp(scores - base[..., None]), jnp.exp(highest - base)
        total = total * decay + shares.sum(axis=-1)
        if scoring.dropout:
            shares = shares * _kept(scoring, arrays.dropout_key, shape.scores, tile)
        values = _slice(value, tile.key, tile.keys, 1)
        weighted = weighted * decay[..., None] + _dot(scoring, "bkgqs,bskh->bkgqh", shares.astype(value.dtype), values)
        parts = (new_highest, total, weighted)
        return tuple(lax.dynamic_update_slice_in_dim(x, part, tile.query, QUERIES) for x, part in zip(state, parts, strict=True))

    highest, total, weighted = _each_tile(scoring, shape, one_tile, start, query)
    unseen = total == 0
    total = jnp.where(unseen, 1.0, total)
    out = jnp.moveaxis(weighted / total[..., None], QUERIES, 1).astype(query.dtype)
    return out, jnp.where(unseen, 0.0, highest + jnp.log(total))


def _forward_vjp(scoring: Scoring, shape: _Shape, query: jax.Array, key: jax.Array, value: jax.Array, arrays: ScoreArrays) -> tuple:
    out, log_total = _forward(scoring, shape, query, key, value, arrays)
    return out, (query, key, value, arrays, out, log_total)


def _backward(scoring: Scoring, shape: _Shape, residuals: tuple, grad: jax.Array) -> tuple:
    """Gradients of queries, keys, values and the bias."""
    query, key, value, arrays, out, log_total = residuals
    dtype = _wide(query.dtype)
    inner = jnp.moveaxis(jnp.sum(out.astype(dtype) * grad.astype(dtype), axis=-1), 1, QUERIES)

    def one_tile(grads: tuple, tile: Tile) -> tuple:
        dquery, dkey, dvalue, dbias = grads
        query_, grad_ = (_slice(x, tile.query, tile.queries, 1) for x in (query, grad))
        key_, value_ = (_slice(x, tile.key, tile.keys, 1) for x in (key, value))
        log_total_, inner_ = (_slice(x, tile.query, tile.queries, QUERIES) for x in (log_total, inner))
        scores, slope = _scores_of_tile(scoring, tile, query, key, arrays)
        shares, dshares = jnp.exp(scores - log_total_[..., None]), _dot(scoring, "bqkgh,bskh->bkgqs", grad_, value_)
        weights = shares
        if scoring.dropout:
            kept = _kept(scoring, arrays.dropout_key, shape.scores, tile)
            weights, dshares = shares * kept, dshares * kept
        dscores = shares * (dshares - inner_[..., None])
        dbias = None if dbias is None else _add_bias(dbias, dscores, tile)
        dproducts = ((dscores if slope is None else dscores * slope) * scoring.scale).astype(query.dtype)
        dquery = _add(dquery, _dot(scoring, "bkgqs,bskh->bqkgh", dproducts, key_), tile.query)
        dkey = _add(dkey, _dot(scoring, "bkgqs,bqkgh->bskh", dproducts, query_), tile.key)
        dvalue = _add(dvalue, _dot(scoring, "bkgqs,bqkgh->bskh", weights.astype(grad.dtype), grad_), tile.key)
        return dquery, dkey, dvalue, dbias

    bias = arrays.bias
    start = (*(jnp.zeros(x.shape, dtype) for x in (query, key, value)), None if bias is None else jnp.zeros(bias.shape, dtype))
    *grads, dbias = _each_tile(scoring, shape, one_tile, start, query)
    dquery, dkey, dvalue = (x.astype(like.dtype) for x, like in zip(grads, (query, key, value), strict=True))
    return dquery, dkey, dvalue, ScoreArrays(bias=None if bias is None else dbias.astype(bias.dtype))


_attention.defvjp(_forward_vjp, _backward)


def _each_tile(scoring: Scoring, shape: _Shape, function: Any, carry: Any, anchor: jax.Array) -> Any:
    """`carry` after `function(carry, tile)` for every tile.

    Inside a loop over layers, JAX computes what depends on no layer before the loop, here the masks of all tiles; hence the barrier, after
    which tiles depend on `anchor`.
    """

    def step(carry: Any, first: jax.Array) -> tuple:
        return function(carry, Tile(first[0], shape.tile_queries, first[1], shape.tile_keys)), None

    tiles, _ = lax.optimization_barrier((jnp.asarray(shape.tiles(scoring)), anchor[(0,) * anchor.ndim]))
    return lax.scan(step, carry, tiles)[0]


def _scores_of_tile(scoring: Scoring, tile: Tile, query: jax.Array, key: jax.Array, arrays: ScoreArrays) -> tuple:
    """`_scores` of one tile of all queries and keys."""

    def both(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        x = x if x.shape[3] == 1 else _slice(x, tile.query, tile.queries, 3)
        return x if x.shape[4] == 1 else _slice(x, tile.key, tile.keys, 4)

    key_mask, segments = arrays.key_mask, arrays.segments
    arrays = arrays._replace(
        mask=both(arrays.mask),
        bias=both(arrays.bias),
        key_mask=None if key_mask is None else _slice(key_mask, tile.key, tile.keys, 1),
        segments=segments and (_slice(segments[0], tile.query, tile.queries, 1), _slice(segments[1], tile.key, tile.keys, 1)),
    )
    return _scores(scoring, tile, _slice(query, tile.query, tile.queries, 1), _slice(key, tile.key, tile.keys, 1), arrays)


def _scores(scoring: Scoring, tile: Tile, query: jax.Array, key: jax.Array, arrays: ScoreArrays) -> tuple[jax.Array, jax.Array | None]:
    """Scores of a tile's queries, keys and arrays, minus infinity where a key is not seen; and the slope of the soft cap."""
    scores, slope = _dot(scoring, "bqkgh,bskh->bkgqs", query, key) * scoring.scale, None
    if scoring.soft_cap is not None:
        capped = jnp.tanh(scores / scoring.soft_cap)
        scores, slope = capped * scoring.soft_cap, 1 - capped**2
    if arrays.bias is not None:
        scores = scores + arrays.bias.astype(scores.dtype)
    for seen in _seen(scoring, tile, arrays):
        scores = jnp.where(seen, scores, MASKED)
    return scores, slope


def _seen(scoring: Scoring, tile: Tile, arrays: ScoreArrays) -> list[jax.Array]:
    """Which keys of a tile its queries see, by every mask: each bool[rows, groups, heads per group, queries, keys] or with dims of 1."""
    distance = (tile.key + jnp.arange(tile.keys)) - (tile.query + jnp.arange(tile.queries))[:, None]  # of a key behind a query
    before, after = scoring.window
    seen = [distance <= 0] if scoring.causal else []
    seen += [distance >= -before] if before is not None else []
    seen += [distance <= after] if after is not None else []
    seen += [arrays.mask] if arrays.mask is not None else []
    seen += [arrays.key_mask[:, None, None, None, :]] if arrays.key_mask is not None else []
    if arrays.segments is not None:
        queries, keys = arrays.segments
        seen.append((queries[:, :, None] == keys[:, None, :])[:, None, None])
    return seen


def _kept(scoring: Scoring, key: Any, shape: tuple[int, ...], tile: Tile) -> jax.Array:
    """What dropout multiplies a tile's weights by: as `jax.random.bernoulli(key, 1 - dropout, [rows, heads, queries, keys])` is there."""
    rows, groups, heads, queries, keys = shape
    rows, heads_, groups_ = (1, 1, 1) if scoring.shared_dropout else (rows, groups * heads, groups)
    bits = tile_bits(key, (rows, heads_, queries, keys), (0, 0, tile.query, tile.key), (rows, heads_, tile.queries, tile.keys))
    uniform = lax.bitcast_convert_type((bits >> np.uint32(9)) | np.uint32(0x3F800000), jnp.float32) - 1.0  # as jax.random.uniform
    share = 1.0 - scoring.dropout
    kept = jnp.where(uniform < share, np.float32(1 / share), np.float32(0.0))
    return kept.reshape(rows, groups_, -1, tile.queries, tile.keys)


def _split_heads(x: jax.Array | None, groups: int) -> jax.Array | None:
    """[rows, heads, queries, keys] as [rows, groups, heads per group, queries, keys]; a single head stays one."""
    if x is None:
        return None
    return x.reshape(x.shape[0], *((1, 1) if x.shape[1] == 1 else (groups, -1)), *x.shape[2:])


def _pad(x: jax.Array, more: int, dim: int = 1) -> jax.Array:
    return jnp.pad(x, [(0, more if at == dim else 0) for at in range(x.ndim)])


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
    return arrays._replace(mask=both(arrays.mask), bias=both(arrays.bias), key_mask=key_mask, segments=segments)


def _wide(dtype: Any) -> Any:
    """The dtype of sums: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _dot(scoring: Scoring, subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    dtype = _wide(left.dtype)
    return jnp.einsum(subscripts, left, right, precision=scoring.precision, preferred_element_type=dtype)


def _slice(x: jax.Array, start: Any, size: int, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size, dim)


def _add(x: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, _slice(x, start, part.shape[1], 1) + part, start, 1)


def _add_bias(dbias: jax.Array, dscores: jax.Array, tile: Tile) -> jax.Array:
    """`dbias` with a tile's gradients added, summed over the dims that the bias does not have."""
    part = dscores.sum(axis=[dim for dim, size in enumerate(dbias.shape) if size == 1], keepdims=True)
    start = (0, 0, 0, 0 if dbias.shape[3] == 1 else tile.query, 0 if dbias.shape[4] == 1 else tile.key)
    return lax.dynamic_update_slice(dbias, lax.dynamic_slice(dbias, start, part.shape) + part, start)
