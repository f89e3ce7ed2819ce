"""A step of the asynchronous parameter server: every worker computes at the parameters it last read, and every gradient is an
update of its own.

The order of arrival, who reads when, and what counts are data (`spmd.sync.param_server.events`); the updates are real. Algorithms:
Downpour (Dean et al. 2012), staleness-aware and n-softsync (Zhang et al., arXiv:1511.05950), SSP (Ho et al. 2013), DC-ASGD
(Zheng et al., arXiv:1609.08326).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from spmd.sync.gradient_sync import GATHERED, HELD, SQUARES, SUM
from spmd.sync.param_server.async_exchange import fetch_params, send_gradients
from spmd.train.per_worker_step import PerWorkerStep
from spmd.train.state import State
from spmd.train.step import REPLICATED, step_metrics
from spmd.tree import Tree, flatten


@dataclasses.dataclass(frozen=True)
class AsyncStep(PerWorkerStep):
    """A round: the gradients that can be computed at the same time, applied one after the other."""

    def update(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """The next state, and the round's metrics, as `Step.update` returns them. Absent workers' rows count for nothing."""
        memory = _read_params(state.exchange, state.params, events["reads"][0])  # workers that began since the last arrival
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
        workers = self.exchange.worker_count
        share, accumulates = 1 / workers if declared.mode == "bounded" else 1.0, declared.per_update(workers) > 1

        def apply_arrival(carry: tuple, event: Tree) -> tuple[tuple, None]:
            params, opt, memory = carry
            worker, flat = event["worker"], flatten(params)

            def of_worker(x: jax.Array) -> jax.Array:
                return lax.dynamic_index_in_dim(x, worker, 1, keepdims=False)

            grads = {path: of_worker(arrived[path]) for path in flat}
            if declared.delay_compensation:
                read = {path: of_worker(memory[path][HELD]) for path in flat}
                grads, memory = self._compensate_delay(grads, flat, read, memory, event["applied"])
            # 1. accumulate until an update is complete; where every gradient is an update, that is at once
            mean, rate, due, left = (_accumulate if accumulates else _single_gradient)(memory, grads, event)
            # 2. the update, which counts when it is due
            mean = jax.tree.unflatten(jax.tree.structure(params), list(mean.values()))
            mean = lax.optimization_barrier(mean)  # fused with it, the update would be rounded otherwise
            updates, new_opt = self.optimizer.update(mean, opt, params, value=losses[worker])
            if declared.staleness_scale != "none" or share < 1:
                updates = jax.tree.map(lambda u: (rate * share * u).astype(u.dtype), updates)

            def commit(new: Tree, old: Tree) -> Tree:
                return jax.tree.map(lambda a, b: jnp.where(due, a, b), new, old)

            params, opt = commit(optax.apply_updates(params, updates), params), commit(new_opt, opt)
            memory = {path: entry | left.get(path, {}) for path, entry in memory.items()}
            # 3. workers that read now read these parameters
            return (params, opt, _read_params(memory, params, event["reads"])), None

        inputs = {name: events[name] for name in ("worker", "applied", "weight", "commit")}
        inputs |= {"reads": events["reads"][1:]}
        carry, _ = lax.scan(apply_arrival, (state.params, state.opt, memory), inputs)
        return carry

    def _compensate_delay(self, grads: Tree, params: Tree, read: Tree, memory: Tree, applied: Any) -> tuple[Tree, Tree]:
        """g + lambda g g (w - w_read), by path: to first order the gradient at today's parameters (Zheng et al., eq. 10).

        Adaptive, lambda is divided by the root of the servers' moving mean of g g, this one included (their DC-ASGD-a).
        """
        declared, compensated, after = self.resolved.layout.parameter_server, {}, dict(memory)
        for path, g in grads.items():
            strength = jnp.asarray(declared.delay_compensation, g.dtype)
            if declared.delay_decay is not None:
                old, m = memory[path][SQUARES], declared.delay_decay
                squares = m * old + (1 - m) * jnp.square(g.astype(jnp.float32))
                strength = (strength / jnp.sqrt(squares + 1e-7)).astype(g.dtype)
                after[path] = memory[path] | {SQUARES: jnp.where(applied, squares, old)}
            compensated[path] = g + strength * g * g * (params[path] - read[path])
        return compensated, after


def _single_gradient(memory: Tree, grads: dict[str, jax.Array], event: Tree) -> tuple[dict[str, jax.Array], Any, Any, Tree]:
    """`_accumulate` where every gradient is an update, and no sum is kept; the same products, and so the same bits."""
    del memory
    weight = event["weight"]
    mean = {path: (1 / weight * (weight * g.astype(jnp.float32))).astype(g.dtype) for path, g in grads.items()}
    return mean, weight, event["applied"] & event["commit"], {}


def _accumulate(memory: Tree, grads: dict[str, jax.Array], event: Tree) -> tuple[dict[str, jax.Array], Any, Any, Tree]:
    """The weighted mean of the accumulated gradients, the rate for their mean weight, whether it is due, and what is left."""
    added = {path: memory[path][SUM] + event["weight"] * g.astype(jnp.float32) for path, g in grads.items()}
    total = {path: jnp.where(event["applied"], x, memory[path][SUM]) for path, x in added.items()}
    this = jnp.where(event["applied"], jnp.stack([event["weight"], jnp.float32(1)]), 0.0)
    weight, count = weight_and_count = next(iter(memory.values()))[GATHERED] + this
    due = event["commit"] & (count > 0)  # where the data ends there may be nothing
    norm, rate = 1 / jnp.where(weight == 0, 1.0, weight), weight / jnp.maximum(count, 1)

    def left(x: jax.Array) -> jax.Array:
        return jnp.where(due, jnp.zeros_like(x), x)

    mean = {path: (norm * total[path]).astype(g.dtype) for path, g in grads.items()}
    return mean, rate, due, {path: {SUM: left(x), GATHERED: left(weight_and_count)} for path, x in total.items()}


def _read_params(memory: Tree, params: Tree, readers: jax.Array) -> Tree:
    """These workers now hold the servers' parameters. One at a time: there are rarely several."""
    flat, order = flatten(params), jnp.argsort(~readers)

    def read(number: Any, held: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: lax.dynamic_update_index_in_dim(x, flat[path], order[number], 1) for path, x in held.items()}

    held = lax.fori_loop(0, readers.sum(), read, {path: entry[HELD] for path, entry in memory.items()})
    return {path: entry | {HELD: held[path]} for path, entry in memory.items()}
