"""Synchronous training: every step is one update with the mean of all workers' gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd.sync.parameter_sync import gather_updates
from spmd.train.host_memory import back_to_host, to_device
from spmd.train.state import State
from spmd.train.step import REPLICATED, Reduced, UpdateRule
from spmd.tree import Tree


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

    def update(self, state: State, reduced: Reduced, loss: jax.Array, events: Tree) -> tuple[Tree, Any, Tree]:
        """The optimizer's step. One that it skips changes no residual."""
        del events
        updates, opt = self.optimizer.update(reduced.values, to_device(state.opt), state.params, value=loss)
        comm_state = jax.tree.map(functools.partial(jnp.where, skipped(opt)), state.exchange, reduced.comm_state)
        return optax.apply_updates(state.params, gather_updates(self.sync, updates)), back_to_host(opt, state.opt), comm_state

    def specs(self, state: State) -> tuple[dict[str, Any], Reduced]:
        """Parameters and gradients as the layout shards them; workers do not see the optimizer's state."""
        mean_spec, data_spec = self.sync.reduction.mean_spec, self.sync.data_spec
        params = self.sync.map_params(lambda place, _: data_spec(place.spec), state.params)
        grads: Tree = self.sync.map_params(lambda place, _: data_spec(mean_spec(place)), state.params)
        return {"params": params, "opt": None}, Reduced(grads, self.sync.data_specs(state.exchange), REPLICATED, REPLICATED)


def skipped(opt: Any) -> Any:
    """Whether the optimizer, by its new state, ignored the gradients; then the communication keeps its old state, too.

    Known are `optax.apply_if_finite` and `optax.MultiSteps` with a `should_skip_update_fn`.
    """
    applied = [~flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "should_skip")]
    applied += [flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "last_finite")]
    return ~jnp.stack(applied).all() if applied else False
