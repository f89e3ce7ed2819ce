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

    `visible`: whether the mask leaves any of the scores. `query`, `key` and `visible` may be
    traced.
    """

    query: Any
    key: Any
    visible: Any = True


def blocks(device: Any, source: Any, *, local: bool, causal: bool, parts: int) -> list[Block]:
    """Return the blocks that `device` computes while it holds the keys of device `source` (`local`:
    they are its own). Device numbers may be traced.

    With two parts, device i of n has parts i and 2n - 1 - i of the sequence. Its back part comes
    after every front part. In addition, the two front parts count if the keys come from an earlier
    device, else the two back parts. So every device has two blocks for each of the others, and
    three for itself.

    >>> blocks(2, 1, local=False, causal=True, parts=2)
    [Block(query=1, key=0, visible=True), Block(query=0, key=0, visible=True)]
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
        """The number of devices of the ring."""
        return self.parallel.axis_size(self.axis)

    def spec(self, x: Any) -> PartitionSpec:
        """Return the spec of an array [rows, length, heads, head_dim], [rows, heads, length],
        [rows, length], or of numbers for all.
        """
        rows = self.rows or None
        heads = self.heads or None
        if x.ndim == 4:
            return PartitionSpec(rows, self.axis, heads)
        if x.ndim == 3:
            return PartitionSpec(rows, heads, self.axis)
        if x.ndim == 2:
            return PartitionSpec(rows, self.axis)
        return PartitionSpec()

    def map_shards(self, function: Callable[..., Any], like: Any, *arrays: Any) -> Any:
        """Return `function(self, ...)` on each device's shard; its results have the specs of
        `like`.
        """
        specs = tuple(jax.tree.map(self.spec, x) for x in arrays)
        with jax.named_scope("ring"):
            mapped = self.parallel.shard_map(
                self.axes, functools.partial(function, self), specs, jax.tree.map(self.spec, like)
            )
            return mapped(*arrays)

    def shift(self, tree: Any) -> Any:
        """Return the arrays of the previous device."""
        return jax.tree.map(lambda x: collectives.shift(x, self.axis, around=True), tree)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Return the parts of a device's shard of the sequence."""
        return jnp.split(x, self.parts, axis=1)

    def place(self, device: Any, part: Any) -> Any:
        """Return the number in the sequence of a device's part; device and part may be traced."""
        if self.parts == 1:
            return device
        return jnp.where(part == 0, device, 2 * self.count - 1 - device)


class _Keys(NamedTuple):
    """The arrays that go around the ring: keys, values, and masks and segments of each key."""

    key: jax.Array
    value: jax.Array
    mask: jax.Array | None
    segments: jax.Array | None


# JAX's own derivative of the loop would keep the keys and values of every turn, so all of them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, inputs: Inputs) -> jax.Array:
    """Return attention as in `spmd.nn.attention`, of arrays in ring order.

    The backward pass stores the inputs, the result and one number per query, and goes around the
    ring once more. Gradients of keys and values are sent along with them, in float32.
    """
    return _forward_vjp(ring, inputs)[0]


def _forward_vjp(ring: Ring, inputs: Inputs) -> tuple[jax.Array, tuple]:
    query = inputs.query
    logs = jax.ShapeDtypeStruct((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)
    out, logs = ring.map_shards(_forward, (query, logs), inputs)
    return out, (inputs, out, logs)


def _gradients(ring: Ring, residuals: tuple, grad: jax.Array) -> tuple[Inputs]:
    inputs = residuals[0]
    dquery, dkey, dvalue = ring.map_shards(_backward, tuple(inputs[:3]), *residuals, grad)
    return (Inputs(dquery, dkey, dvalue, ScoreArrays()),)


ring_attention.defvjp(_forward_vjp, _gradients)


def _around(ring: Ring, turn: Callable[..., Any], carry: Any, keys: Any) -> Any:
    """Return `carry` after `turn(carry, keys, source, local)` with the keys of each device, local
    ones first; the next keys arrive meanwhile.
    """
    device = collectives.worker_index((ring.axis,))

    def loop(state: tuple, step: jax.Array) -> tuple:
        carry, keys = state
        carry = turn(carry, keys, (device - step) % ring.count, False)
        return (carry, ring.shift(keys)), None

    # The first turn knows that its keys are local, and the last one sends none: the loop has the
    # others.
    carry = turn(carry, keys, device, True)
    keys = ring.shift(keys)
    if ring.count > 2:
        (carry, keys), _ = lax.scan(loop, (carry, keys), jnp.arange(1, ring.count - 1))
    return turn(carry, keys, (device - (ring.count - 1)) % ring.count, False)


class _Tile(NamedTuple):
    """One block for the kernel: the first of its queries and keys on the devices, and how many
    there are.
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
    """Return `carry` after `function(carry, tile)` for every block of the device's queries with the
    keys of device `source`.
    """
    device = collectives.worker_index((ring.axis,))
    queries = inputs.query.shape[1] // ring.parts
    sizes = (queries, keys.key.shape[1] // ring.parts)
    for block in blocks(device, source, local=local, causal=ring.scoring.causal, parts=ring.parts):
        scoring, shift, visible = _positions(ring, block, device, source, local, sizes)

        def computed(
            carry: Any, block: Block = block, scoring: Scoring = scoring, shift: Any = shift
        ) -> Any:
            first = (block.query * sizes[0], block.key * sizes[1])
            key, value, mask, key_segments = _slice(keys, first[1], sizes[1], 1)
            query = _slice(inputs.query, first[0], sizes[0], 1)
            arrays = ScoreArrays(key_mask=mask)
            if inputs.arrays.segments is not None:
                query_segments = _slice(inputs.arrays.segments[0], first[0], sizes[0], 1)
                arrays = arrays._replace(segments=(query_segments, key_segments))
            if inputs.arrays.count is not None:
                first_query = ring.place(device, block.query) * sizes[0]
                first_key = ring.place(source, block.key) * sizes[1]
                places = ((first_query, scoring.strides[2]), (first_key, 1))
                arrays = arrays._replace(count=advance(inputs.arrays.count, *places))
            tile = _Tile(scoring, shift, Inputs(query, key, value, arrays), first, sizes)
            return function(carry, tile)

        if visible is True:
            carry = computed(carry)
        else:
            carry = lax.cond(visible, computed, lambda carry: carry, carry)
    return carry


def _positions(
    ring: Ring, block: Block, device: Any, source: Any, local: bool, sizes: tuple[int, int]
) -> tuple[Scoring, Any, Any]:
    """Return the scoring of a block, the distance from its first key to its first query, and
    whether any query sees a key.

    Without a window only keys of the same part need a causal mask; of the others, `blocks` leaves
    out what the mask hides.
    """
    scoring = ring.scoring
    before, after = ring.scoring.reach
    if local and block.query is block.key and sizes[0] == sizes[1]:
        return scoring, 0, True
    if scoring.window == (None, None):
        return dataclasses.replace(scoring, causal=False), 0, block.visible
    shift = ring.place(device, block.query) * sizes[0] - ring.place(source, block.key) * sizes[1]
    visible = block.visible
    if after is not None:
        visible &= shift + sizes[0] - 1 + after >= 0
    if before is not None:
        visible &= shift - before < sizes[1]
    return scoring, shift, visible


def _keys(inputs: Inputs) -> _Keys:
    arrays = inputs.arrays
    return _Keys(inputs.key, inputs.value, arrays.key_mask, arrays.segments and arrays.segments[1])


def _forward(ring: Ring, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return the result, and the log of every query's normaliser; minus infinity if all keys are
    masked.
    """
    inputs = on_this_device(ring.scoring, inputs, ring.rows, ring.heads)
    rows, length, heads, _ = inputs.query.shape
    width = inputs.value.shape[3]
    # Results of several devices are merged in float32: in bfloat16 each turn would round once more.
    out = jnp.zeros((rows, length, heads, width), jnp.float32)
    logs = jnp.full((rows, heads, length), -jnp.inf, jnp.float32)

    def tile(state: tuple, tile: _Tile) -> tuple:
        out, logs = state
        query, _ = tile.first
        queries, _ = tile.sizes
        part = ring.kernel.forward(tile.scoring, tile.shift, tile.inputs, jnp.float32)
        before = (_slice(out, query, queries, 1), _slice(logs, query, queries, 2))
        new_out, new_logs = merge(before, part)
        return (
            lax.dynamic_update_slice_in_dim(out, new_out, query, 1),
            lax.dynamic_update_slice_in_dim(logs, new_logs, query, 2),
        )

    def turn(state: tuple, keys: _Keys, source: Any, local: bool) -> tuple:
        return _each_tile(ring, inputs, keys, source, local, tile, state)

    out, logs = _around(ring, turn, (out, logs), _keys(inputs))
    return out.astype(inputs.query.dtype), logs


def _backward(
    ring: Ring, inputs: Inputs, out: jax.Array, logs: jax.Array, grad: jax.Array
) -> tuple[jax.Array, ...]:
    """Return gradients of queries, keys and values. The gradients of keys and values follow the
    keys one turn later, so that no turn waits for a sum.
    """
    inputs = on_this_device(ring.scoring, inputs, ring.rows, ring.heads)
    inner = inner_products(out, grad)

    def tile(carry: tuple, tile: _Tile) -> tuple:
        query, key = tile.first
        queries, _ = tile.sizes
        logs_, inner_ = _slice((logs, inner), query, queries, 2)
        grad_ = _slice(grad, query, queries, 1)
        dquery, *dkeys, _ = ring.kernel.backward(
            tile.scoring, tile.shift, tile.inputs, logs_, inner_, grad_, jnp.float32
        )
        query_total, key_totals = carry
        return _add(query_total, dquery, query), _add(key_totals, tuple(dkeys), key)

    def turn(carry: tuple, keys: _Keys, source: Any, local: bool) -> tuple:
        dquery, dkeys = carry
        if not local:
            dkeys = ring.shift(dkeys)
        return _each_tile(ring, inputs, keys, source, local, tile, (dquery, dkeys))

    # Each device of the ring adds to these sums: in bfloat16 every addition would round.
    dquery, *dkeys = (jnp.zeros(x.shape, jnp.float32) for x in inputs[:3])
    dquery, dkeys = _around(ring, turn, (dquery, tuple(dkeys)), _keys(inputs))
    return tuple(
        x.astype(like.dtype)
        for x, like in zip((dquery, *ring.shift(dkeys)), inputs[:3], strict=True)
    )


def _slice(tree: Any, start: Any, size: int, dim: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, dim), tree)


def _add(tree: Any, values: Any, start: Any) -> Any:
    def add(x: jax.Array, value: jax.Array) -> jax.Array:
        added = lax.dynamic_slice_in_dim(x, start, value.shape[1], 1) + value
        return lax.dynamic_update_slice_in_dim(x, added, start, 1)

    return jax.tree.map(add, tree, values)


def _homes(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the devices to which each device sends its first part and its second part; both are
    permutations.

    >>> _homes(4)
    ((0, 2, 3, 1), (1, 3, 2, 0))
    """
    homes = [*range(count), *reversed(range(count))]
    return tuple(homes[::2]), tuple(homes[1::2])


def into_ring(ring: Ring, arrays: Any) -> Any:
    """Return arrays [rows, length, ...] in ring order: device i has parts i and 2n - 1 - i of 2n.
    Gradients are sent back the same way.
    """
    firsts, seconds = _homes(ring.count)

    def exchange(x: jax.Array) -> jax.Array:
        first, second = ring.split(x)
        first = collectives.permute(first, ring.axis, firsts)
        second = collectives.permute(second, ring.axis, seconds)
        return _sorted(ring, first, second)

    return jax.tree.map(exchange, arrays)


def out_of_ring(ring: Ring, x: jax.Array) -> jax.Array:
    """Return the sequence in its original order."""
    parts = []
    received = ring.split(_sorted(ring, *ring.split(x)))
    for part, homes in zip(received, _homes(ring.count), strict=True):
        senders = tuple(homes.index(device) for device in range(ring.count))
        parts.append(collectives.permute(part, ring.axis, senders))
    return jnp.concatenate(parts, axis=1)


def _sorted(ring: Ring, first: jax.Array, second: jax.Array) -> jax.Array:
    """The received first and second part in the order front, back.

    First parts have even numbers. A front part has the number of its device, so an even device
    received it as a first part.
    """
    even = collectives.worker_index((ring.axis,)) % 2 == 0
    return jnp.concatenate([jnp.where(even, first, second), jnp.where(even, second, first)], axis=1)
