"""Two thin matrices in place of a gradient."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.wire import collectives
from spmd.wire.codec.base import Bucket, Codec, Means, State
from spmd.wire.shard_layout import ShardLayout

HIGHEST = lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class PowerSgd(Codec):
    """The best rank-r approximation, followed from step to step (Vogels et al. 2019, arXiv:1905.13727).

    With M_i a worker's gradient as an n x m matrix and Q (m x r) from the step before: P = mean_i M_i Q, orthonormalised;
    Q_i = M_i^T P; the mean is P Q^T with Q = mean_i Q_i. A worker keeps P Q_i^T of its own gradient: with Q in place of
    Q_i, as in the paper's listing, the workers' residuals walk away from each other without bound.

    What is rows and what is columns is decided on the whole parameter; of one that is cut over a model axis every device
    approximates its own block, so nothing travels along that axis.

    Args:
      rank: columns of P and Q.
      min_compression: a gradient for which n m / (r (n + m)) is less travels exactly; so does one with a single dim.
      warm_start: go on from the Q of the step before; otherwise from a fixed random one.

    Example:
      >>> PowerSgd(rank=4).compresses(ShardLayout((512, 512), (), ("data",), (8,)), whole=(512, 512))
      True
    """

    rank: int = 4
    min_compression: float = 2.0
    warm_start: bool = True

    def compresses(self, cut: ShardLayout, whole: tuple[int, ...]) -> bool:
        """Whether the two thin matrices are smaller by `min_compression`."""
        n, m = view(cut.shape, best_split(whole))
        return len(whole) > 1 and n * m > 0 and n * m / (self._rank(n, m) * (n + m)) >= self.min_compression

    def _rank(self, n: int, m: int) -> int:
        return min(self.rank, n, m)

    @property
    def error(self) -> float:
        """A projection."""
        return 1.0

    def init(self, key: jax.Array, shape: tuple[int, ...], whole: tuple[int, ...]) -> State:
        """Q, float32[m, r], normal: every worker starts with the same."""
        n, m = view(shape, best_split(whole))
        return {"q": jax.random.normal(key, (m, self._rank(n, m)), jnp.float32)}

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """Two all-reduces for the whole bucket: all P, then all Q."""
        inner, across = collectives.worker_count(bucket.inside), bucket.across
        matmul = lambda a, b: jnp.matmul(a, b, precision=HIGHEST)
        # inside a node exactly (whole: a low-rank factor is too small to be worth cutting)
        nodes = [collectives.all_reduce(grad.astype(jnp.float32), bucket.inside) / inner for grad in grads]
        matrices = [node.reshape(-1, state["q"].shape[0]) for node, state in zip(nodes, states, strict=True)]
        ps = _mean([matmul(m, s["q"]) for m, s in zip(matrices, states, strict=True)], across)
        ps = [orthonormal(p) for p in ps]
        own = [matmul(m.T, p) for m, p in zip(matrices, ps, strict=True)]
        qs = _mean(own, across)
        means = [matmul(p, q.T).reshape(grad.shape) for p, q, grad in zip(ps, qs, grads, strict=True)]
        kept = [matmul(p, q.T).reshape(node.shape) for p, q, node in zip(ps, own, nodes, strict=True)]
        if bucket.inside:  # what the node lost is lost by each of its workers
            kept = [grad - (node - part) for grad, node, part in zip(grads, nodes, kept, strict=True)]
        # a column that a zero gradient has emptied would stay empty for ever, and a NaN would stay
        alive = lambda q, old: jnp.where((q == 0).all(0) | ~jnp.isfinite(q).all(), old, q)
        after = [{"q": alive(q, s["q"]) if self.warm_start else s["q"]} for q, s in zip(qs, states, strict=True)]
        return [cut.own(mean) for cut, mean in zip(bucket.shard_layouts, means, strict=True)], kept, after


def best_split(shape: tuple[int, ...]) -> int:
    """After how many dims the matrix view of a parameter breaks, so that n + m is smallest.

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
    """The mean over workers of several arrays, in one call."""
    total = collectives.all_reduce(jnp.concatenate([part.reshape(-1) for part in parts]), axes) / collectives.worker_count(axes)
    ends = np.cumsum([part.size for part in parts])[:-1].tolist()
    return [flat.reshape(part.shape) for flat, part in zip(jnp.split(total, ends), parts, strict=True)]
