"""A step of the asynchronous parameter server: every worker at the weights it has read, every gradient an update of its own.

The order of arrival, who reads when, and what counts are data (`spmd.wire.param_server.events`); the updates are real. Algorithms:
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

from spmd.layout.resolve import pspec
from spmd.layout.schema import keep_axes
from spmd.train.state import State
from spmd.train.step import Step, batch_spec, measurements
from spmd.tree import Tree, flatten, map_paths
from spmd.wire.gradient_sync import GATHERED, HELD, SQUARES, SUM
from spmd.wire.param_server.async_exchange import deliver, fetch
from spmd.xla import shard_map


@dataclasses.dataclass(frozen=True)
class ServedStep(Step):
    """A round: the gradients that can be computed at once, applied one after the other."""

    held: bool = True

    def update(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """The next state, and the round's metrics, as `Step.update` gives them. Absent workers' rows count for nothing."""
        memory = _read(state.exchange, state.params, events["reads"][0])  # those who began since the last arrival
        arrived, memory, stats, sums = self._round(dataclasses.replace(state, exchange=memory), batch, weights, events)
        losses = self._losses(sums)
        params, opt, memory = self._serve(state, arrived, memory, losses, events)
        metrics = measurements(sums.sum(0), jnp.zeros((2, 0)), events)
        return State(state.step + 1, params, opt, stats, state.rngs, state.key, memory), metrics

    def _round(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[Tree, Tree, Tree, jax.Array]:
        """What arrives at the servers, by path [D, W, width]; the next memory; stats; metrics of each worker, [W, 2, names]."""
        exchange, data, whole = self.exchange, self.mesh_axes.data_axes, PartitionSpec()
        cut = lambda spec: pspec(keep_axes(spec, data))
        memory = jax.tree.map(cut, exchange.specs(state.exchange), is_leaf=lambda x: isinstance(x, tuple))
        rows = map_paths(lambda path, x: cut(batch_spec(self.resolved, path)), batch)
        specs = dataclasses.replace(jax.tree.map(lambda _: whole, state), params=None, opt=None, exchange=memory)

        structure, paths = jax.tree.structure(state.params), list(flatten(state.params))

        def position(state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[Tree, Tree, Tree, jax.Array]:
            found = fetch(exchange, state.exchange)
            held = jax.tree.unflatten(structure, [found[path] for path in paths])
            grads, stats, sums = self._each(state, held, batch, weights, events)
            arrived, memory = deliver(exchange, flatten(grads), state.exchange, self._present(events))
            return arrived, memory, stats, sums

        return shard_map(
            position,
            mesh=self.mesh_axes.mesh,
            in_specs=(specs, rows, PartitionSpec(data), whole),
            out_specs=(PartitionSpec(data), memory, whole, PartitionSpec(data)),
            axis_names=data,
        )(dataclasses.replace(state, params=None, opt=None), batch, weights, events)

    def _serve(self, state: State, arrived: Tree, memory: Tree, losses: jax.Array, events: Tree) -> tuple[Tree, Any, Tree]:
        """One arrival after the other: the server's part, on whole arrays, which live cut over the servers."""
        declared = self.resolved.layout.parameter_server
        workers = self.exchange.worker_count
        share, gathers = 1 / workers if declared.mode == "bounded" else 1.0, declared.per_update(workers) > 1

        def one(carry: tuple, event: Tree) -> tuple[tuple, None]:
            params, opt, memory = carry
            who, now = event["worker"], flatten(params)
            pick = lambda x: lax.dynamic_index_in_dim(x, who, 1, keepdims=False)
            grads = {path: pick(arrived[path]) for path in now}
            if declared.delay_compensation:
                was = {path: pick(memory[path][HELD]) for path in now}
                grads, memory = self._compensated(grads, now, was, memory, event["applied"])
            # 1. gathered until an update is full; one by one that is at once
            mean, rate, due, left = (_gather if gathers else _alone)(memory, grads, event)
            # 2. the update, which counts when it is due
            mean = jax.tree.unflatten(jax.tree.structure(params), list(mean.values()))
            mean = lax.optimization_barrier(mean)  # fused with it, the update would be rounded otherwise
            updates, moved = self.optimizer.update(mean, opt, params, value=losses[who])
            if declared.staleness_scale != "none" or share < 1:
                updates = jax.tree.map(lambda u: (rate * share * u).astype(u.dtype), updates)
            commit = lambda new, old: jax.tree.map(lambda a, b: jnp.where(due, a, b), new, old)
            params, opt = commit(optax.apply_updates(params, updates), params), commit(moved, opt)
            memory = {path: entry | left.get(path, {}) for path, entry in memory.items()}
            # 3. who reads, reads what there is now
            return (params, opt, _read(memory, params, event["reads"])), None

        inputs = {name: events[name] for name in ("worker", "applied", "weight", "commit")}
        carry, _ = lax.scan(one, (state.params, state.opt, memory), inputs | {"reads": events["reads"][1:]})
        return carry

    def _compensated(self, grads: Tree, now: Tree, was: Tree, memory: Tree, applied: Any) -> tuple[Tree, Tree]:
        """g + lambda g g (w - w_read), by path: to first order the gradient of today's weights (Zheng et al., arXiv:1609.08326, eq. 10).

        Adaptive, lambda is divided by the root of the servers' moving mean of g g, this one included (their DC-ASGD-a).
        """
        declared, found, after = self.resolved.layout.parameter_server, {}, dict(memory)
        for path, g in grads.items():
            strength = jnp.asarray(declared.delay_compensation, g.dtype)
            if declared.delay_decay is not None:
                old, m = memory[path][SQUARES], declared.delay_decay
                squares = m * old + (1 - m) * jnp.square(g.astype(jnp.float32))
                strength = (strength / jnp.sqrt(squares + 1e-7)).astype(g.dtype)
                after[path] = memory[path] | {SQUARES: jnp.where(applied, squares, old)}
            found[path] = g + strength * g * g * (now[path] - was[path])
        return found, after


def _alone(memory: Tree, grads: dict[str, jax.Array], event: Tree) -> tuple[dict[str, jax.Array], Any, Any, Tree]:
    """`_gather` where every gradient is an update, and nothing has to be remembered; the same products, and so the same bits."""
    del memory
    mean = {path: (1 / event["weight"] * (event["weight"] * g.astype(jnp.float32))).astype(g.dtype) for path, g in grads.items()}
    return mean, event["weight"], event["applied"] & event["commit"], {}


def _gather(memory: Tree, grads: dict[str, jax.Array], event: Tree) -> tuple[dict[str, jax.Array], Any, Any, Tree]:
    """The mean by weight of what has been gathered, the rate that its mean weight gives it, whether it is due, and what is left."""
    added = {path: memory[path][SUM] + event["weight"] * g.astype(jnp.float32) for path, g in grads.items()}
    total = {path: jnp.where(event["applied"], x, memory[path][SUM]) for path, x in added.items()}
    own = jnp.where(event["applied"], jnp.stack([event["weight"], jnp.float32(1)]), 0.0)
    weight, count = gathered = next(iter(memory.values()))[GATHERED] + own
    due = event["commit"] & (count > 0)  # where the data ends there may be nothing
    norm, rate = 1 / jnp.where(weight == 0, 1.0, weight), weight / jnp.maximum(count, 1)
    left = lambda x: jnp.where(due, jnp.zeros_like(x), x)
    mean = {path: (norm * total[path]).astype(g.dtype) for path, g in grads.items()}
    return mean, rate, due, {path: {SUM: left(x), GATHERED: left(gathered)} for path, x in total.items()}


def _read(memory: Tree, params: Tree, readers: jax.Array) -> Tree:
    """The weights that these workers hold from now on are the servers' own. One by one: hardly ever are there several."""
    now, order = flatten(params), jnp.argsort(~readers)

    def one(number: Any, held: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: lax.dynamic_update_index_in_dim(x, now[path], order[number], 1) for path, x in held.items()}

    held = lax.fori_loop(0, readers.sum(), one, {path: entry[HELD] for path, entry in memory.items()})
    return {path: entry | {HELD: held[path]} for path, entry in memory.items()}
