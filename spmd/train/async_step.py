"""A step of the asynchronous parameter server: every worker computes at the parameters it last read, and every gradient is an
update of its own.

The order of arrival, who reads when, and what counts are data (`spmd.wire.server.events`). `spmd.wire.server.arrivals` does the
servers' part.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd.sync.param_server.async_exchange import fetch_params, send_gradients
from spmd.train.per_worker_step import PerWorkerStep
from spmd.train.state import State
from spmd.train.step import REPLICATED, step_metrics
from spmd.tree import Tree, flatten
from spmd.wire.server.arrivals import apply_arrivals, read_params


@dataclasses.dataclass(frozen=True)
class AsyncStep(PerWorkerStep):
    """A round: the gradients that can be computed at the same time, applied one after the other."""

    def update(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """The next state, and the round's metrics, as `Step.update` returns them. Absent workers' rows count for nothing."""
        memory = read_params(state.exchange, state.params, events["reads"][0])  # workers that began since the last arrival
        state = dataclasses.replace(state, exchange=memory)
        arrived, memory, stats, metrics = self._compute_round(state, batch, weights, events)
        params, opt, memory = self._apply_arrivals(state, arrived, memory, self._mean_loss(metrics), events)
        all_metrics = step_metrics(metrics.sum(0), jnp.zeros((2, 0)), events)
        return State(state.step + 1, params, opt, stats, state.rngs, state.key, memory), all_metrics

    def _compute_round(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[Tree, Tree, Tree, jax.Array]:
        """What arrives at the servers, by path [D, W, width]; the next memory; stats; metrics of each worker, [W, 2, names]."""
        structure, paths = jax.tree.structure(state.params), list(flatten(state.params))

        def position(state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[Tree, Tree, Tree, jax.Array]:
            fetched = fetch_params(self.exchange, state.exchange)
            params = jax.tree.unflatten(structure, [fetched[path] for path in paths])
            grads, stats, metrics = self._per_worker_grads(params, state, batch, weights, events)
            arrived, memory = send_gradients(self.exchange, flatten(grads), state.exchange, self._present(events))
            return arrived, memory, stats, metrics

        over_workers = PartitionSpec(self.mesh_axes.data_axes)
        out_specs = (over_workers, self._sync_specs(state), REPLICATED, over_workers)
        return self._shard_map(position, out_specs, params=None, opt=None)(state, batch, weights, events)

    def _apply_arrivals(self, state: State, arrived: Tree, memory: Tree, losses: jax.Array, events: Tree) -> tuple[Tree, Any, Tree]:
        """The servers' part, one arrival after the other, on global arrays, which are sharded over the servers."""
        declared = self.resolved.layout.parameter_server
        return apply_arrivals(declared, self.optimizer, state.params, state.opt, memory, arrived=arrived, events=events, losses=losses)
