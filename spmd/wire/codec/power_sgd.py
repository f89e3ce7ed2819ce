"""PowerSGD: a low-rank approximation of the gradient."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.wire import collectives
from spmd.wire.codec.base import Bucket, Codec, Means, State, option, whole_number
from spmd.wire.shard_layout import ShardLayout

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class PowerSgd(Codec):
    """The best rank-r approximation, tracked from step to step (Vogels et al. 2019,
    arXiv:1905.13727).

    With M_i a worker's gradient as an n x m matrix and Q (m x r) from the previous step: P = mean_i
    M_i Q, orthonormalised; Q_i = M_i^T P; the mean is P Q^T with Q = mean_i Q_i. A worker keeps P
    Q_i^T of its own gradient. With Q in place of Q_i, as in the paper's listing, the workers'
    residuals drift apart from each other without bound.

    The split into rows and columns depends on the shape of the full parameter. If it is sharded
    over a model axis, every device approximates its own block, so nothing is sent along that axis.

    Args:
      rank: columns of P and Q.
      min_compression: a gradient whose n m / (r (n + m)) is less is sent exactly, and so is one
        with a single dim.
      warm_start: start from the Q of the previous step; otherwise from a fixed random one.

    Example:
      >>> PowerSgd(rank=4).compresses(
      ...     ShardLayout((512, 512), (), ("data",), (8,)), full_shape=(512, 512)
      ... )
      True
    """

    biased: ClassVar[bool] = True

    rank: int = whole_number(4)
    min_compression: float = option(
        2.0, lambda value: type(value) in (int, float) and value >= 1, "a number from 1"
    )
    warm_start: bool = option(True, lambda value: type(value) is bool, "true or false")

    def compresses(self, layout: ShardLayout, full_shape: tuple[int, ...]) -> bool:
        """Return whether P and Q are smaller by at least `min_compression`."""
        n, m = view(layout.shape, best_split(full_shape))
        return (
            len(full_shape) > 1
            and n * m > 0
            and n * m / (self._rank(n, m) * (n + m)) >= self.min_compression
        )

    def _rank(self, n: int, m: int) -> int:
        return min(self.rank, n, m)

    @property
    def error(self) -> float:
        """A projection."""
        return 1.0

    def init(self, key: jax.Array, shape: tuple[int, ...], full_shape: tuple[int, ...]) -> State:
        """Q, float32[m, r], normal: every worker starts with the same."""
        n, m = view(shape, best_split(full_shape))
        return {"q": jax.random.normal(key, (m, self._rank(n, m)), jnp.float32)}

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """Two all-reduces per bucket: all P, then all Q."""
        inner, across = collectives.worker_count(bucket.inside), bucket.across
        # inside a node, exactly (all-reduced: a low-rank factor is too small to be worth sharding)
        nodes = [
            collectives.all_reduce(grad.astype(jnp.float32), bucket.inside) / inner
            for grad in grads
        ]
        matrices = [
            node.reshape(-1, state["q"].shape[0]) for node, state in zip(nodes, states, strict=True)
        ]
        ps = _mean(
            [matmul(m, state["q"]) for m, state in zip(matrices, states, strict=True)], across
        )
        ps = [orthonormal(p) for p in ps]
        local_qs = [matmul(m.T, p) for m, p in zip(matrices, ps, strict=True)]
        qs = _mean(local_qs, across)
        means = [
            matmul(p, q.T).reshape(grad.shape) for p, q, grad in zip(ps, qs, grads, strict=True)
        ]
        kept = [
            matmul(p, q.T).reshape(node.shape)
            for p, q, node in zip(ps, local_qs, nodes, strict=True)
        ]
        if bucket.inside:  # each worker of the node lost what the node lost
            kept = [
                grad - (node - part) for grad, node, part in zip(grads, nodes, kept, strict=True)
            ]
        next_states = [
            {"q": _valid(q, s["q"]) if self.warm_start else s["q"]}
            for q, s in zip(qs, states, strict=True)
        ]
        return (
            [
                layout.local_shard(mean)
                for layout, mean in zip(bucket.shard_layouts, means, strict=True)
            ],
            kept,
            next_states,
        )


def _valid(q: jax.Array, old: jax.Array) -> jax.Array:
    """`q`, with `old` for columns that a zero gradient has made zero, and for all where one is not
    finite: neither would recover.
    """
    return jnp.where((q == 0).all(0) | ~jnp.isfinite(q).all(), old, q)


def best_split(shape: tuple[int, ...]) -> int:
    """The number of leading dims that are rows of a parameter's matrix view, so that n + m is
    smallest.

    >>> best_split((512, 8, 64)), best_split((5, 5, 32, 64)), best_split((10,))
    (1, 3, 0)
    """
    splits = range(1, len(shape))
    return min(splits, key=lambda s: math.prod(shape[:s]) + math.prod(shape[s:]), default=0)


def view(shape: tuple[int, ...], split: int) -> tuple[int, int]:
    """Rows and columns of the matrix view.

    >>> view((512, 8, 64), 1)
    (512, 512)
    """
    return math.prod(shape[:split]), math.prod(shape[split:])


def orthonormal(p: jax.Array) -> jax.Array:
    """An orthonormal basis of the columns of `p`, float32[n, r]."""
    return jnp.linalg.qr(p)[0]


def _mean(parts: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The mean over workers of several arrays, in one all-reduce."""
    total = collectives.all_reduce(
        jnp.concatenate([part.reshape(-1) for part in parts]), axes
    ) / collectives.worker_count(axes)
    ends = np.cumsum([part.size for part in parts])[:-1].tolist()
    return [
        flat.reshape(part.shape) for flat, part in zip(jnp.split(total, ends), parts, strict=True)
    ]
