"""Attention over a sequence that is cut over a mesh axis: each device keeps its queries, and keys and values go around.

Sources: Ring Attention (Liu et al., arXiv:2310.01889); the running maximum and normaliser of a softmax (Milakov and Gimelshein,
arXiv:1805.02867); the backward pass from the log of the normaliser alone (Dao et al., FlashAttention, arXiv:2205.14135, algorithm 4).
Under a causal mask devices with late positions would have all the work; so each takes a part from the front and one from the back (as
Brandon et al., Striped Attention, arXiv:2311.09431, deal out single positions).

Arrays here are one device's own: queries [rows, length, groups, heads per group, head_dim], keys and values [rows, length, groups,
head_dim]. What belongs to scores is [rows, groups, heads per group, queries, ...].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd.nn.parallel_context import ParallelConfig
from spmd.wire import collectives

TILE = 512  # keys at a time: scores take memory as queries times this, not as the square of a shard
UNSEEN = -jnp.inf
QUERIES = 3  # the dim of queries in what belongs to scores


class Block(NamedTuple):
    """Scores of one part of the queries with one part of the keys, by their numbers on the two devices; `key` may be traced.

    `wanted`, which may be traced too: whether any of the scores counts.
    """

    query: Any
    key: Any
    wanted: Any = True


def blocks(me: Any, source: Any, *, own: bool, causal: bool, parts: int) -> list[Block]:
    """What device `me` computes while it holds the keys of device `source`; `own`: its own. Numbers, or traced ones.

    With two parts, device i of n has parts i and 2n - 1 - i of the sequence. Its back part comes after every front part, and of an earlier
    device's keys only the front part counts: besides, the two fronts count if they come from an earlier device, else the two backs. So
    every device has two blocks for each of the others, and three for itself.

    >>> blocks(2, 1, own=False, causal=True, parts=2)
    [Block(query=1, key=0, wanted=True), Block(query=0, key=0, wanted=True)]
    """
    if parts == 1:
        return [Block(0, 0, own or not causal or source < me)]
    if own:
        return [Block(0, 0), Block(1, 0), Block(1, 1)]
    late = (source > me) * 1
    return [Block(1, 0), Block(late, late)]


@dataclasses.dataclass(frozen=True)
class Ring:
    """How one call of attention goes around.

    Attributes:
      axis: the mesh axis of the sequence; `rows`: those of the rows.
      parts: of the sequence that each device has; 2 in balanced order.
    """

    parallel: ParallelConfig
    axis: str
    rows: tuple[str, ...]
    causal: bool
    parts: int
    scale: float

    @property
    def count(self) -> int:
        """Devices of the ring."""
        return self.parallel.axis_size(self.axis)

    def run(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """`function(self, ...)` on each device's own piece: of every array, in and out, dim 0 is rows and dim 1 the sequence."""
        spec = PartitionSpec(self.rows or None, self.axis)
        with jax.named_scope("ring"):
            return self.parallel.shard_map((self.axis, *self.rows), functools.partial(function, self), spec, spec)(*arrays)

    def shift(self, held: Any) -> Any:
        """What the device before holds."""
        return jax.tree.map(lambda x: collectives.shift(x, self.axis, around=True), held)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """A device's parts of the sequence."""
        return jnp.split(x, self.parts, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Attention as `spmd.nn.attention` gives it, of arrays that lie in the order of the ring.

    The backward pass keeps the inputs, the result and one number per query, and goes around once more: gradients of keys and values travel
    with them, in float32.
    """
    return ring.run(_forward, query, key, value, mask)[0]


def _kept(ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, tuple]:
    out, log_total = ring.run(_forward, query, key, value, mask)
    return out, (query, key, value, mask, out, log_total)


def _gradients(ring: Ring, kept: tuple, grad: jax.Array) -> tuple:
    return (*ring.run(_backward, *kept, grad), None)


ring_attention.defvjp(_kept, _gradients)


def _around(ring: Ring, turn: Callable[..., Any], carry: Any, held: Any) -> Any:
    """`carry` after `turn(carry, held, blocks, own)` with what each device holds, one's own first; what comes next travels meanwhile."""
    me = collectives.worker_index((ring.axis,))

    def one(carry: Any, held: Any, step: Any, *, own: bool = False) -> Any:
        return turn(carry, held, blocks(me, (me - step) % ring.count, own=own, causal=ring.causal, parts=ring.parts), own)

    def loop(both: tuple, step: jax.Array) -> tuple:
        carry, held = both
        return (one(carry, held, step), ring.shift(held)), None

    carry, held = one(carry, held, 0, own=True), ring.shift(held)
    if ring.count > 2:
        (carry, held), _ = lax.scan(loop, (carry, held), jnp.arange(1, ring.count - 1))
    return one(carry, held, ring.count - 1)


def _each_tile(ring: Ring, todo: list[Block], lengths: tuple[int, int], function: Callable[..., Any], carry: Any) -> Any:
    """`carry` after `function(carry, first query, queries, first key, keys)` for every tile of the blocks: numbers on the devices.

    Tiles are the longest that divide a part of the keys; where there are only short ones, the part is one tile.
    """
    queries, part = (length // ring.parts for length in lengths)
    size = max(size for size in range(1, min(TILE, part) + 1) if part % size == 0)
    size = size if size >= min(TILE // 8, part) else part
    tiles = jnp.array([[block.query * queries, block.key * part + start] for block in todo for start in range(0, part, size)])

    def one(carry: Any, tile: jax.Array) -> tuple:
        return function(carry, tile[0], queries, tile[1], size), None

    every = lambda carry: lax.scan(one, carry, tiles)[0]
    wanted = todo[0].wanted
    return every(carry) if wanted is True else lax.cond(wanted, every, lambda carry: carry, carry)


def _forward(ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The result, and the log of every query's normaliser [rows, length, groups, heads per group]; 0 where there is nothing to see."""
    rows, length, groups, heads, size = query.shape
    shape = (rows, groups, heads, length)
    start = (jnp.full(shape, UNSEEN, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, size), jnp.float32))

    def turn(state: tuple, held: tuple, todo: list[Block], own: bool) -> tuple:
        def tile(state: tuple, at: jax.Array, queries: int, first: jax.Array, keys: int) -> tuple:
            most, total, mixed = _cut(state, at, queries, QUERIES)
            key, value, mask = _cut(held, first, keys, 1)
            scores = _scores(ring, own, at, first, _cut(query, at, queries, 1), key, mask)
            now = jnp.maximum(most, scores.max(axis=-1))
            base = jnp.where(now == UNSEEN, 0.0, now)  # where nothing was seen yet: no difference of infinities
            shares, fade = jnp.exp(scores - base[..., None]), jnp.exp(most - base)
            more = _dot("bkgqs,bskh->bkgqh", shares.astype(value.dtype), value)
            return _put(state, (now, total * fade + shares.sum(axis=-1), mixed * fade[..., None] + more), at, QUERIES)

        return _each_tile(ring, todo, (query.shape[1], held[0].shape[1]), tile, state)

    most, total, mixed = _around(ring, turn, start, (key, value, mask))
    nothing = total == 0
    total = jnp.where(nothing, 1.0, total)
    out = jnp.moveaxis(mixed / total[..., None], QUERIES, 1).astype(query.dtype)
    return out, jnp.moveaxis(jnp.where(nothing, 0.0, most + jnp.log(total)), QUERIES, 1)


def _backward(
    ring: Ring,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    out: jax.Array,
    log_total: jax.Array,
    grad: jax.Array,
) -> tuple[jax.Array, ...]:
    """Gradients of queries, keys and values. Those of keys and values arrive one turn behind the keys, so that no sum is waited for."""
    inner = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1)
    by_score = tuple(jnp.moveaxis(x, 1, QUERIES) for x in (log_total, inner))

    def turn(carry: tuple, held: tuple, todo: list[Block], own: bool) -> tuple:
        def tile(carry: tuple, at: jax.Array, queries: int, first: jax.Array, keys: int) -> tuple:
            of_query, of_held = carry
            (query_, grad_), (log_total, inner) = _cut((query, grad), at, queries, 1), _cut(by_score, at, queries, QUERIES)
            key, value, mask = _cut(held, first, keys, 1)
            shares = jnp.exp(_scores(ring, own, at, first, query_, key, mask) - log_total[..., None])
            slopes = shares * (_dot("bqkgh,bskh->bkgqs", grad_, value) - inner[..., None]) * ring.scale
            shares, slopes = shares.astype(grad.dtype), slopes.astype(query.dtype)
            more = (_dot("bkgqs,bqkgh->bskh", slopes, query_), _dot("bkgqs,bqkgh->bskh", shares, grad_))
            return _add(of_query, _dot("bkgqs,bskh->bqkgh", slopes, key), at), _add(of_held, more, first)

        carry = (carry[0], carry[1] if own else ring.shift(carry[1]))
        return _each_tile(ring, todo, (query.shape[1], held[0].shape[1]), tile, carry)

    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
    of_query, of_held = _around(ring, turn, (zeros(query), (zeros(key), zeros(value))), (key, value, mask))
    return tuple(x.astype(like.dtype) for x, like in zip((of_query, *ring.shift(of_held)), (query, key, value), strict=True))


def _scores(ring: Ring, own: bool, at: jax.Array, first: jax.Array, query: jax.Array, key: jax.Array, mask: jax.Array | None) -> jax.Array:
    """float32[rows, groups, heads per group, queries, keys], of queries from `at` on and keys from `first` on; minus infinity where unseen.

    A device's own keys lie in the order of its queries; of another's, `blocks` has left out what a causal mask hides.
    """
    scores = _dot("bqkgh,bskh->bkgqs", query, key) * ring.scale
    if own and ring.causal:
        scores = jnp.where((at + jnp.arange(query.shape[1]))[:, None] >= first + jnp.arange(key.shape[1]), scores, UNSEEN)
    return scores if mask is None else jnp.where(mask[:, None, None, None, :], scores, UNSEEN)


def _dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


def _cut(tree: Any, start: jax.Array, size: int, dim: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, dim), tree)


def _put(tree: Any, values: Any, start: jax.Array, dim: int) -> Any:
    return jax.tree.map(lambda x, value: lax.dynamic_update_slice_in_dim(x, value, start, dim), tree, values)


def _add(tree: Any, values: Any, start: jax.Array) -> Any:
    old = jax.tree.map(lambda x, value: lax.dynamic_slice_in_dim(x, start, value.shape[1], 1), tree, values)
    return _put(tree, jax.tree.map(jnp.add, old, values), start, 1)


def into_ring(ring: Ring, *arrays: Any) -> Any:
    """Arrays in the order of the ring: device i has parts i and 2n - 1 - i of 2n, side by side. Gradients come back the same way."""
    return ring.run(_into, *arrays)


def out_of_ring(ring: Ring, x: jax.Array) -> jax.Array:
    """The sequence in its own order."""
    return ring.run(_out_of, x)


def _homes(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where each device's two parts go, the first ones and the second ones: each of them to one device.

    >>> _homes(4)
    ((0, 2, 3, 1), (1, 3, 2, 0))
    """
    home = lambda part: part if part < count else 2 * count - 1 - part
    return tuple(home(2 * i) for i in range(count)), tuple(home(2 * i + 1) for i in range(count))


def _into(ring: Ring, *arrays: Any) -> Any:
    firsts, seconds = _homes(ring.count)

    def one(x: jax.Array) -> jax.Array:
        first, second = ring.split(x)
        return _sorted(ring, collectives.permute(first, ring.axis, firsts), collectives.permute(second, ring.axis, seconds))

    return jax.tree.map(one, arrays)


def _out_of(ring: Ring, x: jax.Array) -> jax.Array:
    parts = _sorted(ring, *ring.split(x))
    back = [tuple(homes.index(i) for i in range(ring.count)) for homes in _homes(ring.count)]
    return jnp.concatenate([collectives.permute(part, ring.axis, to) for part, to in zip(ring.split(parts), back, strict=True)], axis=1)


def _sorted(ring: Ring, first: jax.Array, second: jax.Array) -> jax.Array:
    """What came as first and second part, as front and back, or the reverse.

    First parts have even numbers. A front part has the number of its device, so on an even device it came as a first one.
    """
    even = collectives.worker_index((ring.axis,)) % 2 == 0
    return jnp.concatenate([jnp.where(even, first, second), jnp.where(even, second, first)], axis=1)
