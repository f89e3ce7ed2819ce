"""A step of the asynchronous parameter server: every worker computes at the parameters it last
read, and every gradient is an update of its own.

The order of arrival, who reads when, and what counts are data (`spmd.wire.server.events`).
`spmd.wire.server.arrivals` does the servers' part.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd.base.tree import Tree, flatten, map_paths
from spmd.train.state import State
from spmd.train.step import REPLICATED, Reduced, UpdateRule
from spmd.train.worker_gradients import present_workers
from spmd.wire.server.arrivals import apply_arrivals, read_params
from spmd.wire.server.exchange import fetch_params, send_gradients


@dataclasses.dataclass(frozen=True)
class Asynchronous(UpdateRule):
    """A step is a round of gradients that can be computed at the same time; they are applied one
    after the other.
    """

    per_worker = True

    def begin(self, state: State, events: Tree) -> State:
        """Workers that began since the last arrival read the servers' parameters."""
        return dataclasses.replace(
            state, exchange=read_params(state.exchange, state.params, events["reads"][0])
        )

    def params(self, state: State) -> Tree:
        """The parameters that this position's workers have read, [m, ...]."""
        fetched = fetch_params(
            state.exchange, self.sync.buckets, self.axes, rounded=self.sync.rounds_params
        )
        return map_paths(lambda path, _: fetched[path], state.params)

    def reduce(self, state: State, grads: Tree, metrics: jax.Array, events: Tree) -> Reduced:
        """What arrives at the servers, by path [D, W, width]; metrics of each worker, [W, 2,
        names].
        """
        present = present_workers(events, self.axes, metrics.shape[0])
        arrived, memory = send_gradients(
            flatten(grads), self.sync.transfers, self.sync.buckets, state.exchange, present
        )
        return Reduced(arrived, memory, metrics, jnp.zeros((2, 0)))

    def specs(self, state: State) -> tuple[dict[str, Any], Reduced]:
        """Everything over the servers, or over the workers that they hold."""
        over_workers = PartitionSpec(self.axes)
        params = self.sync.map_params(
            lambda place, _: self.sync.data_spec(place.spec), state.params
        )
        reduced: Any = Reduced(
            over_workers, self.sync.data_specs(state.exchange), over_workers, REPLICATED
        )
        return {"params": params, "opt": None}, reduced

    def update(
        self, state: State, reduced: Reduced, loss: jax.Array, events: Tree
    ) -> tuple[Tree, Any, Tree]:
        """The servers' part, one arrival after the other, on global arrays, which are sharded over
        the servers.

        `loss` [W]: of each worker.
        """
        return apply_arrivals(
            self.sync.resolved.layout.parameter_server,
            self.optimizer,
            state.params,
            state.opt,
            reduced.comm_state,
            arrived=reduced.values,
            events=events,
            losses=loss,
        )
