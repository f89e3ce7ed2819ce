"""Attention over a sequence that is sharded over a mesh axis: each device keeps its queries, and keys and values go around the ring.

Sources: Ring Attention (Liu et al., arXiv:2310.01889); the running maximum and normaliser of a softmax (Milakov and Gimelshein,
arXiv:1805.02867); the backward pass from the log of the normaliser alone (Dao et al., FlashAttention, arXiv:2205.14135, algorithm 4).
Under a causal mask devices with late positions would do most of the work. So each takes a part from the front and one from the back
(Brandon et al., Striped Attention, arXiv:2311.09431, distribute single positions).

Arrays here are one device's shards: queries [rows, length, groups, heads per group, head_dim], keys and values [rows, length, groups,
head_dim]. Arrays derived from scores are [rows, groups, heads per group, queries, ...].
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
MASKED = -jnp.inf
QUERIES = 3  # the dim of queries in arrays derived from scores


class Block(NamedTuple):
    """Scores of one part of the queries with one part of the keys, by their numbers on the two devices.

    `wanted`: whether the mask leaves any of the scores. `query`, `key` and `wanted` may be traced.
    """

    query: Any
    key: Any
    wanted: Any = True


def blocks(device: Any, source: Any, *, local: bool, causal: bool, parts: int) -> list[Block]:
    """What `device` computes while it holds the keys of device `source` (`local`: its own). Device numbers may be traced.

    With two parts, device i of n has parts i and 2n - 1 - i of the sequence. Its back part comes after every front part. In addition, the
    two front parts count if the keys come from an earlier device, else the two back parts. So every device has two blocks for each of the
    others, and three for itself.

    >>> blocks(2, 1, local=False, causal=True, parts=2)
    [Block(query=1, key=0, wanted=True), Block(query=0, key=0, wanted=True)]
    """
    if parts == 1:
        return [Block(0, 0, local or not causal or source < device)]
    if local:
        return [Block(0, 0), Block(1, 0), Block(1, 1)]
    late = (source > device) * 1
    return [Block(1, 0), Block(late, late)]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The options of one call of ring attention.

    Attributes:
      axis: the mesh axis of the sequence; `rows`: the mesh axes of the rows.
      parts: the number of parts of the sequence on each device; 2 in balanced order.
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
        """`function(self, ...)` on each device's shard; in all inputs and outputs dim 0 is rows and dim 1 the sequence."""
        spec = PartitionSpec(self.rows or None, self.axis)
        with jax.named_scope("ring"):
            return self.parallel.shard_map((self.axis, *self.rows), functools.partial(function, self), spec, spec)(*arrays)

    def shift(self, tree: Any) -> Any:
        """The arrays of the previous device."""
        return jax.tree.map(lambda x: collectives.shift(x, self.axis, around=True), tree)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """The parts of a device's shard of the sequence."""
        return jnp.split(x, self.parts, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Attention as in `spmd.nn.attention`, of arrays in ring order.

    The backward pass stores the inputs, the result and one number per query, and goes around the ring once more. Gradients of keys and
    values are sent along with them, in float32.
    """
    return ring.run(_forward, query, key, value, mask)[0]


def _forward_vjp(ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, tuple]:
    out, log_total = ring.run(_forward, query, key, value, mask)
    return out, ((query, key, value, mask), out, log_total)


def _gradients(ring: Ring, residuals: tuple, grad: jax.Array) -> tuple:
    return (*ring.run(_backward, *residuals, grad), None)


ring_attention.defvjp(_forward_vjp, _gradients)


def _around(ring: Ring, turn: Callable[..., Any], carry: Any, keys: Any) -> Any:
    """`carry` after `turn(carry, keys, blocks, local)` with the keys of each device, local ones first; the next keys arrive meanwhile."""
    device = collectives.worker_index((ring.axis,))

    def one_turn(carry: Any, keys: Any, step: Any, *, local: bool = False) -> Any:
        source = (device - step) % ring.count
        return turn(carry, keys, blocks(device, source, local=local, causal=ring.causal, parts=ring.parts), local)

    def loop(state: tuple, step: jax.Array) -> tuple:
        carry, keys = state
        return (one_turn(carry, keys, step), ring.shift(keys)), None

    carry, keys = one_turn(carry, keys, 0, local=True), ring.shift(keys)
    if ring.count > 2:
        (carry, keys), _ = lax.scan(loop, (carry, keys), jnp.arange(1, ring.count - 1))
    return one_turn(carry, keys, ring.count - 1)


def _each_tile(ring: Ring, todo: list[Block], lengths: tuple[int, int], function: Callable[..., Any], carry: Any) -> Any:
    """`carry` after `function(carry, first query, queries, first key, keys)` for every tile of the blocks, by local indices.

    Tiles are the longest that divide a part of the keys; if these are short, the part is one tile.
    """
    queries, part = (length // ring.parts for length in lengths)
    size = max(size for size in range(1, min(TILE, part) + 1) if part % size == 0)
    size = size if size >= min(TILE // 8, part) else part
    tiles = jnp.array([[block.query * queries, block.key * part + start] for block in todo for start in range(0, part, size)])

    def one_tile(carry: Any, tile: jax.Array) -> tuple:
        return function(carry, tile[0], queries, tile[1], size), None

    def all_tiles(carry: Any) -> Any:
        return lax.scan(one_tile, carry, tiles)[0]

    wanted = todo[0].wanted
    return all_tiles(carry) if wanted is True else lax.cond(wanted, all_tiles, lambda carry: carry, carry)


def _forward(ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The result, and the log of every query's normaliser [rows, length, groups, heads per group]; 0 if all keys are masked."""
    rows, length, groups, heads, size = query.shape
    shape = (rows, groups, heads, length)
    start = (jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, size), jnp.float32))

    def turn(state: tuple, keys: tuple, todo: list[Block], local: bool) -> tuple:
        def tile(state: tuple, at: jax.Array, queries: int, first: jax.Array, count: int) -> tuple:
            highest, total, weighted = _slice(state, at, queries, QUERIES)
            key, value, mask = _slice(keys, first, count, 1)
            scores = _scores(ring, local, at, first, _slice(query, at, queries, 1), key, mask)
            new_highest = jnp.maximum(highest, scores.max(axis=-1))
            base = jnp.where(new_highest == MASKED, 0.0, new_highest)  # if all were masked so far: avoid inf - inf
            shares, decay = jnp.exp(scores - base[..., None]), jnp.exp(highest - base)
            more = _dot("bkgqs,bskh->bkgqh", shares.astype(value.dtype), value)
            return _put(state, (new_highest, total * decay + shares.sum(axis=-1), weighted * decay[..., None] + more), at, QUERIES)

        return _each_tile(ring, todo, (query.shape[1], keys[0].shape[1]), tile, state)

    highest, total, weighted = _around(ring, turn, start, (key, value, mask))
    all_masked = total == 0
    total = jnp.where(all_masked, 1.0, total)
    out = jnp.moveaxis(weighted / total[..., None], QUERIES, 1).astype(query.dtype)
    return out, jnp.moveaxis(jnp.where(all_masked, 0.0, highest + jnp.log(total)), QUERIES, 1)


def _backward(ring: Ring, inputs: tuple, out: jax.Array, log_total: jax.Array, grad: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients of queries, keys and values. Those of keys and values follow the keys one turn later, so that no turn waits for a sum."""
    query, key, value, mask = inputs
    inner = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1)
    by_score = tuple(jnp.moveaxis(x, 1, QUERIES) for x in (log_total, inner))

    def turn(carry: tuple, keys: tuple, todo: list[Block], local: bool) -> tuple:
        def tile(carry: tuple, at: jax.Array, queries: int, first: jax.Array, count: int) -> tuple:
            dquery, dkeys = carry
            (query_, grad_), (log_total, inner) = _slice((query, grad), at, queries, 1), _slice(by_score, at, queries, QUERIES)
            key, value, mask = _slice(keys, first, count, 1)
            shares = jnp.exp(_scores(ring, local, at, first, query_, key, mask) - log_total[..., None])
            slopes = shares * (_dot("bqkgh,bskh->bkgqs", grad_, value) - inner[..., None]) * ring.scale
            shares, slopes = shares.astype(grad.dtype), slopes.astype(query.dtype)
            more = (_dot("bkgqs,bqkgh->bskh", slopes, query_), _dot("bkgqs,bqkgh->bskh", shares, grad_))
            return _add(dquery, _dot("bkgqs,bskh->bqkgh", slopes, key), at), _add(dkeys, more, first)

        carry = (carry[0], carry[1] if local else ring.shift(carry[1]))
        return _each_tile(ring, todo, (query.shape[1], keys[0].shape[1]), tile, carry)

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (query, key, value)]
    dquery, dkeys = _around(ring, turn, (zeros[0], tuple(zeros[1:])), (key, value, mask))
    return tuple(x.astype(like.dtype) for x, like in zip((dquery, *ring.shift(dkeys)), (query, key, value), strict=True))


def _scores(
    ring: Ring, local: bool, at: jax.Array, first: jax.Array, query: jax.Array, key: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """float32[rows, groups, heads per group, queries, keys], of queries from `at` on and keys from `first` on; minus infinity if masked.

    Only local keys need a causal mask; for those of other devices, `blocks` leaves out what the mask hides.
    """
    scores = _dot("bqkgh,bskh->bkgqs", query, key) * ring.scale
    if local and ring.causal:
        scores = jnp.where((at + jnp.arange(query.shape[1]))[:, None] >= first + jnp.arange(key.shape[1]), scores, MASKED)
    return scores if mask is None else jnp.where(mask[:, None, None, None, :], scores, MASKED)


def _dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


def _slice(tree: Any, start: jax.Array, size: int, dim: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, dim), tree)


def _put(tree: Any, values: Any, start: jax.Array, dim: int) -> Any:
    return jax.tree.map(lambda x, value: lax.dynamic_update_slice_in_dim(x, value, start, dim), tree, values)


def _add(tree: Any, values: Any, start: jax.Array) -> Any:
    old = jax.tree.map(lambda x, value: lax.dynamic_slice_in_dim(x, start, value.shape[1], 1), tree, values)
    return _put(tree, jax.tree.map(jnp.add, old, values), start, 1)


def _homes(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The devices to which each device sends its first part and its second part; both are permutations.

    >>> _homes(4)
    ((0, 2, 3, 1), (1, 3, 2, 0))
    """
    homes = [part if part < count else 2 * count - 1 - part for part in range(2 * count)]
    return tuple(homes[::2]), tuple(homes[1::2])


def into_ring(ring: Ring, *arrays: Any) -> Any:
    """Arrays in ring order: device i has parts i and 2n - 1 - i of 2n, concatenated. Gradients are sent back the same way."""
    firsts, seconds = _homes(ring.count)

    def exchange(x: jax.Array) -> jax.Array:
        first, second = ring.split(x)
        return _sorted(ring, collectives.permute(first, ring.axis, firsts), collectives.permute(second, ring.axis, seconds))

    return jax.tree.map(exchange, arrays)


def out_of_ring(ring: Ring, x: jax.Array) -> jax.Array:
    """The sequence in its original order."""
    parts = _sorted(ring, *ring.split(x))
    back = [tuple(homes.index(i) for i in range(ring.count)) for homes in _homes(ring.count)]
    return jnp.concatenate([collectives.permute(part, ring.axis, to) for part, to in zip(ring.split(parts), back, strict=True)], axis=1)


def _sorted(ring: Ring, first: jax.Array, second: jax.Array) -> jax.Array:
    """The received first and second part in the order front, back.

    First parts have even numbers. A front part has the number of its device, so an even device received it as a first part.
    """
    even = collectives.worker_index((ring.axis,)) % 2 == 0
    return jnp.concatenate([jnp.where(even, first, second), jnp.where(even, second, first)], axis=1)
