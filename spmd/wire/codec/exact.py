"""Exact gradients, reduced by the backend's collectives."""

import dataclasses
from typing import ClassVar

import jax

from spmd.base.specs import entry_axes
from spmd.wire import collectives
from spmd.wire.codec.base import Bucket, Codec, Means, State, packed_collective
from spmd.wire.shard_layout import ShardLayout


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """All-reduce, or reduce-scatter, in the gradient's own dtype; one call per gradient, or one for
    a bucket of rows.

    XLA merges all-reduces automatically; reduce-scatters only on GPUs.

    Example:
      >>> Exact().error
      0.0
    """

    lossless: ClassVar[bool] = True

    def compresses(self, layout: ShardLayout, full_shape: tuple[int, ...]) -> bool:
        """Never."""
        return False

    @property
    def error(self) -> float:
        """Only float rounding."""
        return 0.0

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """The mean, dim by dim: reduce-scattered along sharded dims, then all-reduced along the
        replicated axes.
        """
        axes = bucket.axes
        layouts = bucket.shard_layouts
        workers = layouts[0].workers
        by_rows = all(
            len(layout.spec) == 1 and entry_axes(layout.spec[0]) == axes for layout in layouts
        )
        # sharded along dim 0 only: can be concatenated without a transpose
        if by_rows and len({grad.dtype for grad in grads}) == 1:
            totals = packed_collective(
                grads, workers, lambda rows: collectives.reduce_scatter(rows, axes, 0)
            )
            means = [total / workers for total in totals]
        else:
            means = [exact_mean(layout, x) for layout, x in zip(layouts, grads, strict=True)]
        return means, grads, states


EXACT = Exact()


def exact_mean(layout: ShardLayout, grad: jax.Array) -> jax.Array:
    """This worker's shard of the exact mean."""
    # Reduce-scatters come first: the all-reduce then sends a shard, and not the full gradient.
    total = grad
    for dim, entry in enumerate(layout.spec):
        total = collectives.reduce_scatter(total, entry_axes(entry), dim)
    return collectives.all_reduce(total, layout.replicated_axes) / layout.workers
