"""Attention over a sequence that is sharded over a mesh axis: each device keeps its queries, and
keys and values go around the ring.

Sources: Ring Attention (Liu et al., arXiv:2310.01889); results with several sets of keys, merged by
the logs of their normalisers (Dao et al., Flash-Decoding, 2023), from which the backward pass is
computed, too (FlashAttention, arXiv:2205.14135, algorithm 4). Under a causal mask devices with late
positions would do most of the work. So each takes a part from the front and one from the back
(Brandon et al., Striped Attention, arXiv:2311.09431, distribute single positions).

Arrays here are one device's shards: queries [rows, length, heads, head_dim], keys and values [rows,
length, groups, head_dim], and arrays with a number for each query and head [rows, heads, length].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.rng import advance
from spmd.nn.parallel_context import ParallelConfig
from spmd.nn.scoring import (
    Inputs,
    ScoreArrays,
    Scoring,
    TileKernel,
    inner_products,
    merge,
    on_this_device,
)
from spmd.wire import collectives


class Block(NamedTuple):
    """Scores of one part of the queries with one part of the keys, by their numbers on the two
    devices.

    `wanted`: whether the mask leaves any of the scores. `query`, `key` and `wanted` may be traced.
    """

    query: Any
    key: Any
    wanted: Any = True


def blocks(device: Any, source: Any, *, local: bool, causal: bool, parts: int) -> list[Block]:
    """What `device` computes while it holds the keys of device `source` (`local`: its own). Device
    numbers may be traced.

    With two parts, device i of n has parts i and 2n - 1 - i of the sequence. Its back part comes
    after every front part. In addition, the two front parts count if the keys come from an earlier
    device, else the two back parts. So every device has two blocks for each of the others, and
    three for itself.

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
      axis: the mesh axis of the sequence; `rows` and `heads`: the mesh axes of these; `axes`: all
        that are not manual yet.
      parts: the number of parts of the sequence on each device; 2 in balanced order.
      kernel: computes each block of queries and keys.
    """

    parallel: ParallelConfig
    axis: str
    rows: tuple[str, ...]
    heads: tuple[str, ...]
    axes: tuple[str, ...]
    parts: int
    scoring: Scoring
    kernel: TileKernel

    @property
    def count(self) -> int:
        """Devices of the ring."""
        return self.parallel.axis_size(self.axis)

    def spec(self, x: Any) -> PartitionSpec:
        """Of an array [rows, length, heads, head_dim], [rows, heads, length], [rows, length], or of
        numbers for all.
        """
        rows, heads = self.rows or None, self.heads or None
        return (
            PartitionSpec(),
            PartitionSpec(rows, self.axis),
            PartitionSpec(rows, heads, self.axis),
            PartitionSpec(rows, self.axis, heads),
        )[max(0, x.ndim - 1)]

    def run(self, function: Callable[..., Any], like: Any, *arrays: Any) -> Any:
        """`function(self, ...)` on each device's shard; its results have the specs of `like`."""
        specs = tuple(jax.tree.map(self.spec, x) for x in arrays)
        with jax.named_scope("ring"):
            run = self.parallel.shard_map(
                self.axes, functools.partial(function, self), specs, jax.tree.map(self.spec, like)
            )
            return run(*arrays)

    def shift(self, tree: Any) -> Any:
        """The arrays of the previous device."""
        return jax.tree.map(lambda x: collectives.shift(x, self.axis, around=True), tree)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """The parts of a device's shard of the sequence."""
        return jnp.split(x, self.parts, axis=1)

    def place(self, device: Any, part: Any) -> Any:
        """Which part of the sequence a device's part is; device and part may be traced."""
        return (
            device if self.parts == 1 else jnp.where(part == 0, device, 2 * self.count - 1 - device)
        )


class _Keys(NamedTuple):
    """What goes around the ring: keys, values, and what is known of each key."""

    key: jax.Array
    value: jax.Array
    mask: jax.Array | None
    segments: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, inputs: Inputs) -> jax.Array:
    """Attention as in `spmd.nn.attention`, of arrays in ring order.

    The backward pass stores the inputs, the result and one number per query, and goes around the
    ring once more. Gradients of keys and values are sent along with them, in float32.
    """
    return _forward_vjp(ring, inputs)[0]


def _forward_vjp(ring: Ring, inputs: Inputs) -> tuple[jax.Array, tuple]:
    query = inputs.query
    logs = jax.ShapeDtypeStruct((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)
    out, logs = ring.run(_forward, (query, logs), inputs)
    return out, (inputs, out, logs)


def _gradients(ring: Ring, residuals: tuple, grad: jax.Array) -> tuple[Inputs]:
    inputs = residuals[0]
    dquery, dkey, dvalue = ring.run(_backward, tuple(inputs[:3]), *residuals, grad)
    return (Inputs(dquery, dkey, dvalue, ScoreArrays()),)


ring_attention.defvjp(_forward_vjp, _gradients)


def _around(ring: Ring, turn: Callable[..., Any], carry: Any, keys: Any) -> Any:
    """`carry` after `turn(carry, keys, source, local)` with the keys of each device, local ones
    first; the next keys arrive meanwhile.
    """
    device = collectives.worker_index((ring.axis,))

    def loop(state: tuple, step: jax.Array) -> tuple:
        carry, keys = state
        return (turn(carry, keys, (device - step) % ring.count, False), ring.shift(keys)), None

    carry, keys = turn(carry, keys, device, True), ring.shift(keys)
    if ring.count > 2:
        (carry, keys), _ = lax.scan(loop, (carry, keys), jnp.arange(1, ring.count - 1))
    return turn(carry, keys, (device - (ring.count - 1)) % ring.count, False)


class _Tile(NamedTuple):
    """One block as the kernel takes it: where its queries and keys begin on the devices, and how
    many there are.
    """

    scoring: Scoring
    shift: Any
    inputs: Inputs
    first: tuple[Any, Any]
    sizes: tuple[int, int]


def _each_tile(
    ring: Ring,
    inputs: Inputs,
    keys: _Keys,
    source: Any,
    local: bool,
    function: Callable[..., Any],
    carry: Any,
) -> Any:
    """`carry` after `function(carry, tile)` for every block of the device's queries with the keys
    of device `source`.
    """
    device = collectives.worker_index((ring.axis,))
    sizes = inputs.query.shape[1] // ring.parts, keys.key.shape[1] // ring.parts
    for block in blocks(device, source, local=local, causal=ring.scoring.causal, parts=ring.parts):
        scoring, shift, wanted = _positions(ring, block, device, source, local, sizes)

        def computed(
            carry: Any, block: Block = block, scoring: Scoring = scoring, shift: Any = shift
        ) -> Any:
            first = block.query * sizes[0], block.key * sizes[1]
            key, value, mask, of_key = _slice(keys, first[1], sizes[1], 1)
            arrays, count = ScoreArrays(key_mask=mask), inputs.arrays.count
            if inputs.arrays.segments is not None:
                arrays = arrays._replace(
                    segments=(_slice(inputs.arrays.segments[0], first[0], sizes[0], 1), of_key)
                )
            if count is not None:
                starts = (
                    ring.place(device, block.query) * sizes[0],
                    ring.place(source, block.key) * sizes[1],
                )
                arrays = arrays._replace(
                    count=advance(count, (starts[0], scoring.strides[2]), (starts[1], 1))
                )
            query = _slice(inputs.query, first[0], sizes[0], 1)
            return function(
                carry, _Tile(scoring, shift, Inputs(query, key, value, arrays), first, sizes)
            )

        carry = (
            computed(carry)
            if wanted is True
            else lax.cond(wanted, computed, lambda carry: carry, carry)
        )
    return carry


def _positions(
    ring: Ring, block: Block, device: Any, source: Any, local: bool, sizes: tuple[int, int]
) -> tuple[Scoring, Any, Any]:
    """The scoring of a block, how much further its first query is than its first key, and whether
    any query sees a key.

    Without a window only keys of the same part need a causal mask; of the others, `blocks` leaves
    out what the mask hides.
    """
    scoring, (before, after) = ring.scoring, ring.scoring.reach
    if local and block.query is block.key and sizes[0] == sizes[1]:
        return scoring, 0, True
    if scoring.window == (None, None):
        return dataclasses.replace(scoring, causal=False), 0, block.wanted
    shift = ring.place(device, block.query) * sizes[0] - ring.place(source, block.key) * sizes[1]
    wanted = block.wanted
    if after is not None:
        wanted &= shift + sizes[0] - 1 + after >= 0
    if before is not None:
        wanted &= shift - before < sizes[1]
    return scoring, shift, wanted


def _keys(inputs: Inputs) -> _Keys:
    arrays = inputs.arrays
    return _Keys(inputs.key, inputs.value, arrays.key_mask, arrays.segments and arrays.segments[1])


def _forward(ring: Ring, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The result, and the log of every query's normaliser; minus infinity if all keys are
    masked.
    """
    inputs = on_this_device(ring.scoring, inputs, ring.rows, ring.heads)
    rows, length, heads, _ = inputs.query.shape
    start = (
        jnp.zeros((rows, length, heads, inputs.value.shape[3]), jnp.float32),
        jnp.full((rows, heads, length), -jnp.inf, jnp.float32),
    )

    def tile(state: tuple, tile: _Tile) -> tuple:
        part = ring.kernel.forward(tile.scoring, tile.shift, tile.inputs, jnp.float32)
        old = (
            _slice(state[0], tile.first[0], tile.sizes[0], 1),
            _slice(state[1], tile.first[0], tile.sizes[0], 2),
        )
        new = merge(old, part)
        return tuple(
            lax.dynamic_update_slice_in_dim(x, y, tile.first[0], dim)
            for x, y, dim in zip(state, new, (1, 2), strict=True)
        )

    def turn(state: tuple, keys: _Keys, source: Any, local: bool) -> tuple:
        return _each_tile(ring, inputs, keys, source, local, tile, state)

    out, logs = _around(ring, turn, start, _keys(inputs))
    return out.astype(inputs.query.dtype), logs


def _backward(
    ring: Ring, inputs: Inputs, out: jax.Array, logs: jax.Array, grad: jax.Array
) -> tuple[jax.Array, ...]:
    """Gradients of queries, keys and values. Those of keys and values follow the keys one turn
    later, so that no turn waits for a sum.
    """
    inputs, inner = (
        on_this_device(ring.scoring, inputs, ring.rows, ring.heads),
        inner_products(out, grad),
    )

    def tile(carry: tuple, tile: _Tile) -> tuple:
        (query, key), (queries, _) = tile.first, tile.sizes
        logs_, inner_ = _slice((logs, inner), query, queries, 2)
        grad_ = _slice(grad, query, queries, 1)
        dquery, *dkeys, _ = ring.kernel.backward(
            tile.scoring, tile.shift, tile.inputs, logs_, inner_, grad_, jnp.float32
        )
        return _add(carry[0], dquery, query), _add(carry[1], tuple(dkeys), key)

    def turn(carry: tuple, keys: _Keys, source: Any, local: bool) -> tuple:
        return _each_tile(
            ring,
            inputs,
            keys,
            source,
            local,
            tile,
            (carry[0], carry[1] if local else ring.shift(carry[1])),
        )

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in inputs[:3]]
    dquery, dkeys = _around(ring, turn, (zeros[0], tuple(zeros[1:])), _keys(inputs))
    return tuple(
        x.astype(like.dtype)
        for x, like in zip((dquery, *ring.shift(dkeys)), inputs[:3], strict=True)
    )


def _slice(tree: Any, start: Any, size: int, dim: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, dim), tree)


def _add(tree: Any, values: Any, start: Any) -> Any:
    def add(x: jax.Array, value: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(
            x, lax.dynamic_slice_in_dim(x, start, value.shape[1], 1) + value, start, 1
        )

    return jax.tree.map(add, tree, values)


def _homes(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The devices to which each device sends its first part and its second part; both are
    permutations.

    >>> _homes(4)
    ((0, 2, 3, 1), (1, 3, 2, 0))
    """
    homes = [part if part < count else 2 * count - 1 - part for part in range(2 * count)]
    return tuple(homes[::2]), tuple(homes[1::2])


def into_ring(ring: Ring, arrays: Any) -> Any:
    """Arrays [rows, length, ...] in ring order: device i has parts i and 2n - 1 - i of 2n.
    Gradients are sent back the same way.
    """
    firsts, seconds = _homes(ring.count)

    def exchange(x: jax.Array) -> jax.Array:
        first, second = ring.split(x)
        return _sorted(
            ring,
            collectives.permute(first, ring.axis, firsts),
            collectives.permute(second, ring.axis, seconds),
        )

    return jax.tree.map(exchange, arrays)


def out_of_ring(ring: Ring, x: jax.Array) -> jax.Array:
    """The sequence in its original order."""
    parts = _sorted(ring, *ring.split(x))
    back = [tuple(homes.index(i) for i in range(ring.count)) for homes in _homes(ring.count)]
    return jnp.concatenate(
        [
            collectives.permute(part, ring.axis, to)
            for part, to in zip(ring.split(parts), back, strict=True)
        ],
        axis=1,
    )


def _sorted(ring: Ring, first: jax.Array, second: jax.Array) -> jax.Array:
    """The received first and second part in the order front, back.

    First parts have even numbers. A front part has the number of its device, so an even device
    received it as a first part.
    """
    even = collectives.worker_index((ring.axis,)) % 2 == 0
    return jnp.concatenate([jnp.where(even, first, second), jnp.where(even, second, first)], axis=1)
