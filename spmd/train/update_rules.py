"""The ways in which the gradients of workers become an update: synchronous training, an
asynchronous parameter server, and local SGD.

`spmd.wire` does the communication; these classes say at which parameters a worker computes, and
where the optimizer runs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from spmd.base.tree import Tree, flatten, map_paths
from spmd.sync.parameter_sync import gather_updates
from spmd.train.host_memory import back_to_host, to_device
from spmd.train.skipped_updates import LOSS_SCALE, skipped
from spmd.train.state import State
from spmd.train.step import REPLICATED, Reduced, UpdateRule, mean_loss
from spmd.train.worker_gradients import present_workers
from spmd.wire import collectives
from spmd.wire.server.arrivals import apply_arrivals, read_params
from spmd.wire.server.exchange import fetch_params, send_gradients
from spmd.wire.transfer import OWN


@dataclasses.dataclass(frozen=True)
class Synchronous(UpdateRule):
    """The mean gradients of all workers are an update."""

    per_worker = False

    @property
    def axes(self) -> tuple[str, ...]:
        """Return all data axes; none if the compiler chooses the collectives."""
        if not self.sync.reduction.manual:
            return ()
        return self.sync.mesh_axes.data_axes

    def params(self, state: State) -> Tree:
        """Return this worker's shards."""
        return state.params

    def reduce(self, state: State, grads: Tree, metrics: jax.Array, events: Tree) -> Reduced:
        """Return the mean gradients, as shards or replicated, as the layout says."""
        del events
        grads, comm_state, measured = self.sync.reduce_gradients(grads, state.exchange, state.step)
        return Reduced(grads, comm_state, metrics, measured)

    def update(
        self, state: State, reduced: Reduced, loss: jax.Array, events: Tree
    ) -> tuple[Tree, Any, Tree]:
        """Return the parameters, optimizer state and communication state after the step."""
        extra = {"value": loss}
        if LOSS_SCALE in events:
            extra["factor"] = events[LOSS_SCALE] * reduced.metrics[1, 0]
        opt = to_device(state.opt)
        updates, opt = self.optimizer.update(reduced.values, opt, state.params, **extra)
        params = optax.apply_updates(state.params, gather_updates(self.sync, updates))
        return params, back_to_host(opt, state.opt), reduced.comm_state

    def skipped(self, opt: Any) -> Any:
        """Return whether the optimizer skipped the update, according to its new state."""
        return skipped(opt)

    def specs(self, state: State) -> tuple[dict[str, Any], Reduced]:
        """Return specs: parameters and gradients as the layout shards them; workers do not see the
        optimizer's state.
        """
        mean_spec = self.sync.reduction.mean_spec
        grads: Tree = self.sync.map_params(
            lambda place, _: self.sync.data_spec(mean_spec(place)), state.params
        )
        comm_state = self.sync.data_specs(state.exchange)
        reduced = Reduced(grads, comm_state, REPLICATED, REPLICATED)
        return {"params": _param_specs(self, state), "opt": None}, reduced


@dataclasses.dataclass(frozen=True)
class Asynchronous(UpdateRule):
    """A step is a round of gradients that can be computed at the same time; they are applied one
    after the other.
    """

    per_worker = True

    def begin(self, state: State, events: Tree) -> State:
        """Let workers that began since the last arrival read the servers' parameters."""
        memory = read_params(state.exchange, state.params, events["reads"][0])
        return dataclasses.replace(state, exchange=memory)

    def params(self, state: State) -> Tree:
        """Return the parameters that this position's workers have read, [m, ...]."""
        fetched = fetch_params(
            state.exchange, self.sync.buckets, self.axes, rounded=self.sync.rounds_params
        )
        return map_paths(lambda path, _: fetched[path], state.params)

    def reduce(self, state: State, grads: Tree, metrics: jax.Array, events: Tree) -> Reduced:
        """Return what arrives at the servers, by path [D, W, width]; metrics of each worker, [W, 2,
        names].
        """
        present = present_workers(events, self.axes, metrics.shape[0])
        arrived, memory = send_gradients(
            flatten(grads), self.sync.transfers, self.sync.buckets, state.exchange, present
        )
        return Reduced(arrived, memory, metrics, jnp.zeros((2, 0)))

    def specs(self, state: State) -> tuple[dict[str, Any], Reduced]:
        """Return specs: everything over the servers, or over the workers that they hold."""
        over_workers: Any = PartitionSpec(self.axes)
        comm_state = self.sync.data_specs(state.exchange)
        reduced = Reduced(over_workers, comm_state, over_workers, REPLICATED)
        return {"params": _param_specs(self, state), "opt": None}, reduced

    def update(
        self, state: State, reduced: Reduced, loss: jax.Array, events: Tree
    ) -> tuple[Tree, Any, Tree]:
        """Do the servers' part, one arrival after the other, on global arrays, which are sharded
        over the servers.

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


@dataclasses.dataclass(frozen=True)
class LocalSGD(UpdateRule):
    """Every worker takes a step alone; then the parameters whose turn it is are synchronized."""

    per_worker = True

    def params(self, state: State) -> Tree:
        """Return the parameters of each of this position's workers, [m, ...]."""
        return map_paths(lambda path, _: state.exchange[path][OWN], state.params)

    def reduce(self, state: State, grads: Tree, metrics: jax.Array, events: Tree) -> Reduced:
        """Take one optimizer step of each of this position's workers; then synchronize. Each
        worker's loss is at its own parameters.
        """

        def optimize(grads: Tree, opt: Any, params: Tree, loss: jax.Array) -> tuple[Tree, Any]:
            return self.optimizer.update(grads, opt, params, value=loss)

        params = self.params(state)
        updates, opt = jax.vmap(optimize)(grads, state.opt, params, mean_loss(metrics))
        present = present_workers(events, self.axes, metrics.shape[0])
        where_present = functools.partial(jax.tree.map, functools.partial(_where, present))
        opt = where_present(opt, state.opt)
        local = flatten(where_present(optax.apply_updates(params, updates), params))
        memory = {path: entry | {OWN: local[path]} for path, entry in state.exchange.items()}
        rows = flatten(state.params)
        local_training = self.sync.local_training
        for number, paths in enumerate(self.sync.fragments):
            fragment = {path: rows[path] for path in paths}
            fragment_memory = {path: memory[path] for path in paths}
            fragment, fragment_memory = local_training.synchronize(
                fragment, fragment_memory, state.step, number, events
            )
            rows |= fragment
            memory |= fragment_memory
        stored = map_paths(lambda path, _: rows[path], state.params)
        with jax.named_scope("metrics"):
            metrics = collectives.all_reduce(metrics.sum(0), self.axes)
        return Reduced((stored, opt), memory, metrics, jnp.zeros((2, 0)))

    def update(
        self, state: State, reduced: Reduced, loss: jax.Array, events: Tree
    ) -> tuple[Tree, Any, Tree]:
        """Return the values and the communication state of `reduced`, unchanged."""
        del state, loss, events
        return *reduced.values, reduced.comm_state

    def specs(self, state: State) -> tuple[dict[str, Any], Reduced]:
        """Return specs: parameters over the servers, optimizer states over their workers."""
        params = _param_specs(self, state)
        opt = jax.tree.map(lambda _: PartitionSpec(self.axes), state.opt)
        comm_state = self.sync.data_specs(state.exchange)
        reduced = Reduced((params, opt), comm_state, REPLICATED, REPLICATED)
        return {"params": params, "opt": opt}, reduced


def _param_specs(rule: UpdateRule, state: State) -> Tree:
    """Return the specs of the state's parameters along the axes of the workers."""
    sync = rule.sync
    return sync.map_params(lambda place, _: sync.data_spec(place.spec), state.params)


def _where(present: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return `new` [m, ...] for workers that are present, and `old` for the others."""
    other_dims = [1] * (new.ndim - 1)
    return jnp.where(present.reshape(-1, *other_dims), new, old)
