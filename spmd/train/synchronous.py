"""Synchronous training: every step is one update with the mean of all workers' gradients."""

import dataclasses
from typing import Any

import jax
import optax

from spmd.base.tree import Tree
from spmd.sync.parameter_sync import gather_updates
from spmd.train.host_memory import back_to_host, to_device
from spmd.train.skipped_updates import LOSS_SCALE, skipped
from spmd.train.state import State
from spmd.train.step import REPLICATED, Reduced, UpdateRule


@dataclasses.dataclass(frozen=True)
class Synchronous(UpdateRule):
    """The mean gradients of all workers are an update."""

    per_worker = False

    @property
    def axes(self) -> tuple[str, ...]:
        """All data axes; none if the compiler chooses the collectives."""
        return self.sync.mesh_axes.data_axes if self.sync.reduction.manual else ()

    def params(self, state: State) -> Tree:
        """This worker's shards."""
        return state.params

    def reduce(self, state: State, grads: Tree, metrics: jax.Array, events: Tree) -> Reduced:
        """The mean gradients, as shards or replicated, as the layout says."""
        del events
        grads, comm_state, measured = self.sync.reduce_gradients(grads, state.exchange, state.step)
        return Reduced(grads, comm_state, metrics, measured)

    def update(
        self, state: State, reduced: Reduced, loss: jax.Array, events: Tree
    ) -> tuple[Tree, Any, Tree]:
        """The optimizer's step."""
        extra = {"value": loss}
        if LOSS_SCALE in events:
            extra["factor"] = events[LOSS_SCALE] * reduced.metrics[1, 0]
        updates, opt = self.optimizer.update(
            reduced.values, to_device(state.opt), state.params, **extra
        )
        params = optax.apply_updates(state.params, gather_updates(self.sync, updates))
        return params, back_to_host(opt, state.opt), reduced.comm_state

    def skipped(self, opt: Any) -> Any:
        """As the optimizer's state says."""
        return skipped(opt)

    def specs(self, state: State) -> tuple[dict[str, Any], Reduced]:
        """Parameters and gradients as the layout shards them; workers do not see the optimizer's
        state.
        """
        mean_spec, data_spec = self.sync.reduction.mean_spec, self.sync.data_spec
        params = self.sync.map_params(lambda place, _: data_spec(place.spec), state.params)
        grads: Tree = self.sync.map_params(
            lambda place, _: data_spec(mean_spec(place)), state.params
        )
        return {"params": params, "opt": None}, Reduced(
            grads, self.sync.data_specs(state.exchange), REPLICATED, REPLICATED
        )
