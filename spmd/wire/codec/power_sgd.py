"""PowerSGD: a low-rank approximation of the gradient."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd.wire import collectives
from spmd.wire.codec.base import Bucket, Codec, Means, State, flat_mean, option, whole_number
from spmd.wire.shard_layout import ShardLayout

# At JAX's default precision, GPUs multiply float32 as tensorfloat32 and TPUs as bfloat16
# (`jax.lax.Precision`), and every step's approximation would carry that rounding.
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
        if len(full_shape) < 2 or n * m == 0:
            return False
        sent = self._rank(n, m) * (n + m)
        return n * m / sent >= self.min_compression

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
        inside_count = collectives.worker_count(bucket.inside)
        across = bucket.across
        old_qs = [state["q"] for state in states]
        # inside a node, exactly (all-reduced: a low-rank factor is too small to be worth sharding)
        nodes = []
        for grad in grads:
            total = collectives.all_reduce(grad.astype(jnp.float32), bucket.inside)
            nodes.append(total / inside_count)
        matrices = [x.reshape(-1, q.shape[0]) for x, q in zip(nodes, old_qs, strict=True)]
        # Vogels et al., algorithm 1. P is orthonormal before Q is computed: with Q = M^T P, the
        # product P Q^T is the projection of M.
        local_ps = [matmul(m, q) for m, q in zip(matrices, old_qs, strict=True)]
        ps = [orthonormal(p) for p in _mean(local_ps, across)]
        local_qs = [matmul(m.T, p) for m, p in zip(matrices, ps, strict=True)]
        qs = _mean(local_qs, across)
        means = _products(ps, qs, grads)
        # P is the same on all workers, so the mean of P Q_i^T over them is P Q^T, as the contract
        # asks.
        kept = _products(ps, local_qs, nodes)
        if bucket.inside:
            # each worker of the node lost what the node lost
            parts = zip(grads, nodes, kept, strict=True)
            kept = [grad - (node - part) for grad, node, part in parts]
        next_qs = old_qs
        if self.warm_start:
            next_qs = [_valid(q, old) for q, old in zip(qs, old_qs, strict=True)]
        layouts = zip(bucket.shard_layouts, means, strict=True)
        shards = [layout.local_shard(mean) for layout, mean in layouts]
        return shards, kept, [{"q": q} for q in next_qs]


def _products(ps: list[jax.Array], qs: list[jax.Array], like: list[jax.Array]) -> list[jax.Array]:
    """Return P Q^T of each gradient, in its shape."""
    return [matmul(p, q.T).reshape(x.shape) for p, q, x in zip(ps, qs, like, strict=True)]


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
    means = zip(flat_mean(parts, axes), parts, strict=True)
    return [mean.reshape(part.shape) for mean, part in means]
