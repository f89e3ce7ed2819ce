"""What a codec is, and the frame that most of them share.

A codec takes a *bucket*: gradients of some parameters, each whole on this worker and not yet averaged. It gives three
things for each: the mean over workers (the piece that `Cut` says), what became of this worker's own gradient (`kept`),
and its next state. The contract that makes error feedback exact, for every codec: **the mean over workers of `kept` is
the mean that was given.** What a worker lost is then `gradient - kept`, whoever rounded it.
"""

import abc
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd.tree import nbytes
from spmd.wire import collectives
from spmd.wire.shard_layout import ShardLayout

State = dict[str, jax.Array]
Means = tuple[list[jax.Array], list[jax.Array], list[State]]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """How a bucket's gradients are cut, over which data axes they meet, and which of these reduce exactly first."""

    shard_layouts: tuple[ShardLayout, ...]
    inside: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All data axes, outermost first."""
        return self.shard_layouts[0].axes

    @property
    def across(self) -> tuple[str, ...]:
        """The data axes that the codec crosses."""
        return tuple(axis for axis in self.axes if axis not in self.inside)

    @property
    def left(self) -> tuple[str, ...]:
        """The data axes along which all workers get the same piece; one bucket, one answer."""
        return self.shard_layouts[0].left

    @functools.cached_property
    def _order(self) -> list[int]:
        """The gradients by the width of their rows, so that those of one width lie side by side."""
        return sorted(range(len(self.shard_layouts)), key=lambda n: self.shard_layouts[n].width)

    @property
    def widths(self) -> list[int]:
        """Each width that there is, once."""
        return sorted({cut.width for cut in self.shard_layouts})

    def rows(self, grads: list[jax.Array]) -> jax.Array:
        """All gradients side by side, float32[workers, elements that each worker owns]."""
        return jnp.concatenate([self.shard_layouts[n].rows(grads[n]) for n in self._order], axis=1)

    def columns(self, rows: jax.Array) -> list[jax.Array]:
        """The columns of `rows` that belong to each gradient."""
        ends = list(itertools.accumulate(self.shard_layouts[n].width for n in self._order))
        parts = jnp.split(rows, ends[:-1], axis=1)
        return [parts[self._order.index(n)] for n in range(len(self.shard_layouts))]

    def alike(self, rows: jax.Array) -> list[jax.Array]:
        """For each width, float32[rows times gradients, width]: what a codec may encode in one call, gradients apart."""
        counts = collections.Counter(cut.width for cut in self.shard_layouts)
        ends = list(itertools.accumulate(width * counts[width] for width in self.widths))
        return [part.reshape(-1, width) for part, width in zip(jnp.split(rows, ends[:-1], axis=1), self.widths, strict=True)]

    def joined(self, parts: list[jax.Array]) -> jax.Array:
        """The inverse of `alike`."""
        counts = collections.Counter(cut.width for cut in self.shard_layouts)
        sizes = [width * counts[width] for width in self.widths]
        return jnp.concatenate([part.reshape(-1, size) for part, size in zip(parts, sizes, strict=True)], axis=1)


class Codec(abc.ABC):
    """One format in which gradients travel. Options are the fields of the frozen dataclass that each codec is."""

    lossless: ClassVar[bool] = False

    @abc.abstractmethod
    def compresses(self, cut: ShardLayout, whole: tuple[int, ...]) -> bool:
        """Whether a gradient that is cut so gets smaller; one that does not travels exactly. `whole` is its parameter's shape."""

    def init(self, key: jax.Array, shape: tuple[int, ...], whole: tuple[int, ...]) -> State:
        """What the codec remembers of one gradient from step to step, the same on every worker."""
        del key, shape, whole
        return {}

    @property
    @abc.abstractmethod
    def error(self) -> float:
        """A bound on |x - decoded x| / |x| (Euclidean) for one encoding, which the contract suite holds the codec to."""

    @abc.abstractmethod
    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """The means, what became of this worker's own gradients, and the next states; one of each per gradient."""


class RowCodec(Codec):
    """A codec that shortens rows of numbers: all-to-all, sum in float32 at the owner, all-gather.

    Each row of each gradient is encoded by itself and all of a bucket travel together, so buckets change no number. (Rows of one
    width are encoded in one call: a model has few widths, and a program of few operations is compiled sooner.)
    Each element is rounded at most twice whatever the number of workers: once on its way to the owner, once on the way back. A ring
    rounds once per hop. All workers decode the same bytes, so they end bit-equal. A worker's own row does not travel and is not
    rounded; the second rounding, the owner's, is charged to the owner's `kept`. (One-shot exchange as in Megatron's
    reduce-scatter with float32 accumulation; two error memories as in 1-bit Adam, arXiv:2102.02888, here in one array.)
    """

    @abc.abstractmethod
    def encode(self, rows: jax.Array) -> Any:
        """float32[n, width] as what travels: a tree of arrays [n, ...]."""

    @abc.abstractmethod
    def decode(self, payload: Any, width: int) -> jax.Array:
        """What travelled as float32[n, width]."""

    def compresses(self, cut: ShardLayout, whole: tuple[int, ...]) -> bool:
        """Whether all rows together, encoded, are fewer bytes than the gradient as float32."""
        payload = jax.eval_shape(self.encode, jax.ShapeDtypeStruct((cut.workers, cut.width), jnp.float32))
        return sum(map(nbytes, jax.tree.leaves(payload))) < 4 * math.prod(cut.shape)

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """One exchange for the whole bucket."""
        rows, kept = self.exchange(bucket.rows(grads), bucket)
        pick = lambda back, parts: [back(cut, part) for cut, part in zip(bucket.shard_layouts, parts, strict=True)]
        return pick(ShardLayout.join, bucket.columns(rows)), pick(ShardLayout.unrows, bucket.columns(kept)), states

    def exchange(self, rows: jax.Array, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
        """From float32[workers, width]: the mean rows along `left`, and what became of each of this worker's rows."""
        axes, inside, across = bucket.axes, bucket.inside, bucket.across
        # 1. inside a node exactly: each worker sums up the rows that it owns for the whole node
        grid = _moved(rows.reshape(*map(_size, axes), -1), axes, (*across, *inside))
        grid = grid.reshape(collectives.worker_count(across), collectives.worker_count(inside), -1)
        node = collectives.reduce_scatter(grid, inside, 1)[:, 0] / grid.shape[1]
        # 2. across nodes as the codec says: to the owner, who sums in float32
        width, me = node.shape[1], collectives.worker_index(across)
        encode = lambda rows: lax.optimization_barrier([self.encode(part) for part in bucket.alike(rows)])  # what travels is decoded
        decode = lambda parts: bucket.joined([self.decode(p, width) for p, width in zip(parts, bucket.widths, strict=True)])
        payload, own = encode(node), lax.dynamic_index_in_dim(node, me)
        received = decode(packed_collective(payload, node.shape[0], lambda part: collectives.all_to_all(part, across)))
        mean = lax.dynamic_update_index_in_dim(received, own, me, 0).sum(0, keepdims=True) / node.shape[0]
        kept = lax.dynamic_update_index_in_dim(decode(payload), own, me, 0)
        # 3. back to all who need it, those across nodes first; the owner answers for this rounding
        outer = tuple(axis for axis in bucket.left if axis in across)
        inner = tuple(axis for axis in bucket.left if axis in inside)
        if outer:
            payload = encode(mean)
            lost = (mean - decode(payload)) * node.shape[0]
            kept = lax.dynamic_update_index_in_dim(kept, own - lost, me, 0)
            mean = decode(packed_collective(payload, 1, lambda part: collectives.all_gather(part, outer, 0)))
        mean = collectives.all_gather(mean[:, None], inner, 1)
        mean = _moved(mean.reshape(*map(_size, (*outer, *inner)), width), (*outer, *inner), bucket.left)
        # 4. what the node lost, charged to the worker who summed for it
        lost = (node - kept)[:, None] * grid.shape[1]
        own = lax.dynamic_slice_in_dim(grid, collectives.worker_index(inside), 1, axis=1)
        kept = lax.dynamic_update_slice_in_dim(grid, own - lost, collectives.worker_index(inside), axis=1) if inside else kept[:, None]
        kept = _moved(kept.reshape(*map(_size, (*across, *inside)), width), (*across, *inside), axes)
        return mean.reshape(-1, width), kept.reshape(-1, width)


def packed_collective(payload: Any, rows: int, move: Callable[[jax.Array], jax.Array]) -> Any:
    """A payload of so many rows moved by one collective: its arrays side by side, as bytes unless all are of one dtype."""
    leaves, structure = jax.tree.flatten(payload)
    alike = len({leaf.dtype for leaf in leaves}) == 1
    as_sent = leaves if alike else [lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in leaves]
    parts = [leaf.reshape(rows, leaf.size // rows) for leaf in as_sent]  # there may be none
    moved = move(jnp.concatenate(parts, axis=1))
    ends = itertools.accumulate(part.shape[1] for part in parts[:-1])
    apart = zip(jnp.split(moved, list(ends), axis=1), as_sent, strict=True)
    back = [part.reshape(leaf.shape[0] * moved.shape[0] // rows, *leaf.shape[1:]) for part, leaf in apart]
    if not alike:
        back = [lax.bitcast_convert_type(part, leaf.dtype) for part, leaf in zip(back, leaves, strict=True)]
    return jax.tree.unflatten(structure, back)


def _size(axis: str) -> int:
    return collectives.worker_count((axis,))


def _moved(grid: jax.Array, before: tuple[str, ...], after: tuple[str, ...]) -> jax.Array:
    """The grid [*before, width] with its leading dims in another order."""
    return grid.transpose(*(before.index(axis) for axis in after), len(before))


def blocks(rows: jax.Array, size: int) -> jax.Array:
    """[n, width] as [n, blocks, size], the last block filled up with zeros."""
    count = -(-rows.shape[1] // size)
    return jnp.pad(rows, ((0, 0), (0, count * size - rows.shape[1]))).reshape(rows.shape[0], count, size)


def unblocks(values: jax.Array, width: int) -> jax.Array:
    """The inverse of `blocks`."""
    return values.reshape(values.shape[0], -1)[:, :width]
