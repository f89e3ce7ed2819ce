"""Gradients as they are, by the collectives that every backend has."""

import dataclasses
from typing import ClassVar

import jax

from spmd.layout.schema import entry_axes
from spmd.wire import collectives
from spmd.wire.codec.base import Bucket, Codec, Means, State, packed_collective
from spmd.wire.shard_layout import ShardLayout


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """All-reduce, or reduce-scatter, in the gradient's own dtype; one call per gradient, or one for a bucket of rows.

    XLA merges all-reduces by itself; reduce-scatters only on GPUs.

    Example:
      >>> Exact().error
      0.0
    """

    lossless: ClassVar[bool] = True

    def compresses(self, cut: ShardLayout, whole: tuple[int, ...]) -> bool:
        """Nothing gets smaller."""
        return False

    @property
    def error(self) -> float:
        """None but float rounding."""
        return 0.0

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """The mean, dim by dim: summed and cut where the piece is cut, summed whole over what is left."""
        axes, workers = bucket.shard_layouts[0].axes, bucket.shard_layouts[0].workers
        by_rows = all(len(cut.spec) == 1 and entry_axes(cut.spec[0]) == axes for cut in bucket.shard_layouts)
        if by_rows and len({grad.dtype for grad in grads}) == 1:  # cut along dim 0 only, they can lie side by side as they are
            means = packed_collective(grads, workers, lambda rows: collectives.reduce_scatter(rows, axes, 0))
            return [mean / workers for mean in means], grads, states
        return [reduce(cut, grad) for cut, grad in zip(bucket.shard_layouts, grads, strict=True)], grads, states


def reduce(cut: ShardLayout, grad: jax.Array) -> jax.Array:
    """This worker's piece of the exact mean."""
    total = grad
    for dim, entry in enumerate(cut.spec):
        total = collectives.reduce_scatter(total, entry_axes(entry), dim)
    return collectives.all_reduce(total, cut.left) / cut.workers
