"""What steps share in which every worker computes at parameters of its own, and not at those of the state."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from spmd.train.accumulate import split_workers
from spmd.train.metrics import pack
from spmd.train.objective import LOSS
from spmd.train.precision import cast
from spmd.train.state import State
from spmd.train.step import Step, nonzero, sync_stats
from spmd.tree import Tree
from spmd.wire import collectives


@dataclasses.dataclass(frozen=True)
class PerWorkerStep(Step):
    """A step that gathers no parameters: each worker holds a full copy, and its layers average no batch statistics."""

    def _per_worker_grads(self, params: Tree, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[Tree, Tree, jax.Array]:
        """Of this position's workers: each one's mean gradients over its rows, the next stats, and metrics.

        Args:
          params: [m, ...], of each worker. An absent worker has gradients of zero and counts for nothing.

        Returns:
          Gradients as `params`, stats equal everywhere, and float32[m, 2, names].
        """
        data_axes, count = self.mesh_axes.data_axes, self.workers_per_position
        first = collectives.worker_index(data_axes) * count

        def worker_grads(stats: Tree, inputs: tuple) -> tuple[Tree, tuple]:
            index, present, params, rows = inputs
            (grads, sums), after = self._worker_grads(params, state, stats, rows, first + index, data_axes)

            def kept(x: jax.Array) -> jax.Array:
                return jnp.where(present, x, jnp.zeros_like(x))  # never by multiplying: 0 * NaN

            rows_counted = nonzero(sums[LOSS][1])
            grads = jax.tree.map(lambda g: kept((g / rows_counted).astype(g.dtype)), grads)
            after = jax.tree.map(lambda new, old: jnp.where(present, new, old), after, stats)
            return after, (grads, kept(pack(sums, self.names)))

        inputs = (jnp.arange(count), self._present(events), params, split_workers((batch, weights), count))
        stats, (grads, metrics) = lax.scan(worker_grads, state.stats, inputs, unroll=count if self.unroll else 1)
        with jax.named_scope("stats"):
            return grads, sync_stats(stats, data_axes, self._present(events).any(), state.stats), metrics

    def _gather_params(self, params: Tree) -> Tree:
        return cast(params, self.dtype)

    @property
    def _regathers(self) -> bool:
        return False

    def _stats_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return ()
