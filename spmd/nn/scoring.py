"""The scores of attention, from queries and keys, and the interface of kernels that compute them
tile by tile.

Sources: the backward pass from the log of the normaliser alone, also with dropout (Dao et al.,
FlashAttention, arXiv:2205.14135, algorithm 4).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base.rng import advance, first_count
from spmd.wire import collectives


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The static part of an attention: how scores come from products of queries and keys.

    Attributes:
      scale: the products are multiplied by it.
      causal: a query sees keys at its own position and before, both counted from 0.
      window: keys that a query sees before and after its own position; None: no bound.
      soft_cap: scaled products x become soft_cap * tanh(x / soft_cap), before a bias is added
        (Gemma 2, arXiv:2408.00118).
      dropout: the share of a query's weights that are set to zero, the others growing by 1 / (1 -
        dropout).
      strides: how many random numbers further the next row, the next head and the next query begin;
        0 where all lose the same weights.
      precision: of all products, as `jax.lax.dot_general` takes it.
    """

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    dropout: float = 0.0
    strides: tuple[int, int, int] = (0, 0, 0)
    precision: Any = None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """`window`, with the causal mask as a bound of what comes after.

        >>> Scoring(1.0, causal=True, window=(5, 3)).reach
        (5, 0)
        """
        before, after = self.window
        if self.causal:
            after = min(0, after or 0)
        return before, after

    @property
    def threshold(self) -> int:
        """The bound of random numbers of 23 bits below which weights stay: those that
        `jax.random.bernoulli` leaves.
        """
        return math.ceil(float(np.float32(1.0 - self.dropout)) * 2**23)


class ScoreArrays(NamedTuple):
    """Arrays that change scores; None where there is none.

    Attributes:
      mask: bool[rows, heads, queries, keys], dims of 1 for all; False where a key is not seen.
      bias: added to scores, of such a shape.
      key_mask: bool[rows, keys], False at keys that nothing sees.
      key_lengths: int[rows], the number of keys of each row, the others behind them.
      segments: int[rows, queries] and int[rows, keys]: a query sees keys of its own segment.
      count: `spmd.base.rng.first_count` of dropout's random numbers, of which there is one for each
        score.
    """

    mask: jax.Array | None = None
    bias: jax.Array | None = None
    key_mask: jax.Array | None = None
    key_lengths: jax.Array | None = None
    segments: tuple[jax.Array, jax.Array] | None = None
    count: jax.Array | None = None

    def lengths_as_mask(self, keys: int) -> "ScoreArrays":
        """Return these arrays with `key_lengths` in `key_mask`."""
        if self.key_lengths is None:
            return self
        key_mask = jnp.arange(keys) < self.key_lengths[:, None]
        if self.key_mask is not None:
            key_mask = self.key_mask & key_mask
        return self._replace(key_lengths=None, key_mask=key_mask)


def with_dropout(
    scoring: Scoring,
    arrays: ScoreArrays,
    key: jax.Array,
    scores: tuple[int, int, int, int],
    *,
    shared: bool = False,
) -> tuple[Scoring, ScoreArrays]:
    """Return scoring and arrays that drop the weights that `jax.random.bernoulli(key, 1 - dropout,
    scores)` drops.

    Args:
      scores: [rows, heads, queries, keys].
      shared: all rows and heads lose the same weights, as flax's `broadcast_dropout` says.
    """
    rows, heads, queries, keys = scores
    strides = (heads * queries * keys, queries * keys, keys)
    if shared:
        strides = (0, 0, keys)
        rows = heads = 1
    count = first_count(key, (rows, heads, queries, keys))
    return dataclasses.replace(scoring, strides=strides), arrays._replace(count=count)


class Inputs(NamedTuple):
    """Arrays of one attention: query [rows, queries, heads, head_dim], key [rows, keys, groups,
    head_dim], value [rows, keys, groups, width].
    """

    query: Any
    key: Any
    value: Any
    arrays: ScoreArrays


def on_this_device(
    scoring: Scoring, inputs: Inputs, rows: tuple[str, ...], heads: tuple[str, ...]
) -> Inputs:
    """Return a device's shards, with the count of its first row and head in place of that of all;
    rows and heads are sharded over these axes.
    """
    arrays = inputs.arrays
    if arrays.count is None:
        return inputs
    row_stride, head_stride, _ = scoring.strides
    steps = []
    if rows:
        steps.append((collectives.worker_index(rows) * inputs.query.shape[0], row_stride))
    if heads:
        steps.append((collectives.worker_index(heads) * inputs.query.shape[2], head_stride))
    count = advance(arrays.count, *steps)
    return inputs._replace(arrays=arrays._replace(count=count))


@dataclasses.dataclass(frozen=True)
class TileKernel:
    """Attention of some queries to some keys, parts of longer sequences, with what is needed to
    merge it with other keys.

    Both functions take (scoring, shift, inputs, ..., dtype). `shift` is the position of the first
    query less that of the first key, a number or a traced one; `dtype` is that of arrays that they
    return. `ScoreArrays.count` is that of the tile's first score.

    Attributes:
      forward: (scoring, shift, inputs, dtype) -> the result [rows, queries, heads, width], zeros
        where a query sees no key; the log of every query's normaliser float32[rows, heads,
        queries], minus infinity there.
      backward: (scoring, shift, inputs, logs, inner, grad, dtype) -> gradients of query, key, value
        and the bias, None without one, from the logs of the normalisers of all keys, the inner
        products of results and their gradients [rows, heads, queries], and `grad`, the gradient of
        the result.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]]


def tiled_attention(kernel: TileKernel, scoring: Scoring, inputs: Inputs) -> jax.Array:
    """Return attention by a kernel; a query that sees no key gets zeros.

    The backward pass keeps the inputs, the result and one number per query and head, and computes
    scores again. There is no second derivative, and no forward-mode one.

    Returns:
      [rows, queries, heads, width] in the dtype of the query.
    """
    query, key, value, _ = inputs
    if not query.size or not key.size or not value.size:
        return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
    return _attention(kernel, scoring, inputs)


# JAX's own derivative of a loop over tiles would keep the scores of every tile.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(kernel: TileKernel, scoring: Scoring, inputs: Inputs) -> jax.Array:
    return kernel.forward(scoring, 0, inputs, inputs.query.dtype)[0]


def _forward_vjp(kernel: TileKernel, scoring: Scoring, inputs: Inputs) -> tuple[jax.Array, tuple]:
    out, logs = kernel.forward(scoring, 0, inputs, inputs.query.dtype)
    return out, (inputs, out, logs)


def _backward(
    kernel: TileKernel, scoring: Scoring, residuals: tuple, grad: jax.Array
) -> tuple[Inputs]:
    inputs, out, logs = residuals
    *grads, dbias = kernel.backward(
        scoring, 0, inputs, logs, inner_products(out, grad), grad, inputs.query.dtype
    )
    # In the dtypes of the inputs: `jax.custom_vjp` passes on whatever dtype its rule returns (jax
    # 0.10), and JAX's rules for the operations before it fail on another.
    dquery, dkey, dvalue = (x.astype(like.dtype) for x, like in zip(grads, inputs[:3], strict=True))
    bias = inputs.arrays.bias
    if bias is None:
        dbias = None
    elif dbias is not None:
        dbias = dbias.astype(bias.dtype)
    # None is a cotangent of zero: masks, lengths and segments have no gradient.
    return (Inputs(dquery, dkey, dvalue, ScoreArrays(bias=dbias)),)


_attention.defvjp(_forward_vjp, _backward)


def inner_products(out: jax.Array, grad: jax.Array) -> jax.Array:
    """[rows, heads, queries], of results [rows, queries, heads, width] and their gradients; at
    least float32.
    """
    dtype = jnp.promote_types(grad.dtype, jnp.float32)
    return jnp.moveaxis(jnp.sum(out.astype(dtype) * grad.astype(dtype), axis=-1), 1, 2)


def merge(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Results and logs of the normalisers of the same queries with two sets of keys, as with both
    (Dao et al., Flash-Decoding, 2023).

    >>> out, logs = merge(
    ...     (jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1))),
    ...     (3 * jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1))),
    ... )
    >>> out.ravel().tolist(), round(float(logs[0, 0, 0]), 3)
    ([2.0, 2.0], 0.693)
    """
    logs = jnp.logaddexp(one[1], other[1])
    # Where neither part sees a key, inf - inf would be NaN.
    base = jnp.where(logs == -jnp.inf, 0.0, logs)
    shares = [jnp.moveaxis(jnp.exp(x - base), 1, 2)[..., None] for x in (one[1], other[1])]
    return one[0] * shares[0] + other[0] * shares[1], logs
