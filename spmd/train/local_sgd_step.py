"""A step of workers that train independently and synchronize with the servers now and then: local SGD, DiLoCo and EASGD.

Each worker has its own parameters and optimizer state. When they synchronize, and which parameters, is data
(`spmd.wire.server.sync_schedule`). They send a difference of parameters, with the codecs that gradients use.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from spmd.sync.gradient_sync import CODEC, OUTER, OWN, READ, RESIDUAL
from spmd.sync.parameter_sync import gather_packed_params
from spmd.train.per_worker_step import PerWorkerStep
from spmd.train.state import State
from spmd.train.step import REPLICATED, step_metrics
from spmd.tree import Tree, flatten, map_paths
from spmd.wire import collectives


@dataclasses.dataclass(frozen=True)
class LocalSGDStep(PerWorkerStep):
    """Every worker takes a step alone; then the parameters whose turn it is are synchronized."""

    def update(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """The next state, and the step's metrics, as `Step.update` returns them: each worker's loss is at its own parameters."""
        params = self.map_params(lambda place, _: self._data_spec(place.spec), state.params)
        opt = jax.tree.map(lambda _: PartitionSpec(self.mesh_axes.data_axes), state.opt)
        out_specs = (self._state_specs(state, params=params, opt=opt), REPLICATED)
        run = self._shard_map(self._update_position, out_specs, params=params, opt=opt)
        state, metrics = run(state, batch, weights, events)
        return state, step_metrics(metrics, jnp.zeros((2, 0)), events)

    def _update_position(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """`update` at one position along the data axes."""
        state, metrics = self._local_step(state, batch, weights, events)
        for number, paths in enumerate(self.exchange.fragments):
            state = self._sync_fragment(state, paths, number, events)
        with jax.named_scope("metrics"):
            return dataclasses.replace(state, step=state.step + 1), collectives.all_reduce(metrics, self.mesh_axes.data_axes)

    def _local_step(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """One optimizer step of each of this position's workers; and the sum of their metrics."""
        params = map_paths(lambda path, _: state.exchange[path][OWN], state.params)
        grads, stats, metrics = self._per_worker_grads(params, state, batch, weights, events)

        def optimize(grads: Tree, opt: Any, params: Tree, loss: jax.Array) -> tuple[Tree, Any]:
            return self.optimizer.update(grads, opt, params, value=loss)

        losses = self._mean_loss(metrics)
        updates, opt = jax.vmap(optimize)(grads, state.opt, params, losses)
        where_present = functools.partial(jax.tree.map, functools.partial(_where, self._present(events)))
        opt, flat = where_present(opt, state.opt), flatten(where_present(optax.apply_updates(params, updates), params))
        memory = {path: entry | {OWN: flat[path]} for path, entry in state.exchange.items()}
        return dataclasses.replace(state, opt=opt, stats=stats, exchange=memory), metrics.sum(0)

    def _sync_fragment(self, state: State, paths: list[str], number: int, events: Tree) -> State:
        """These parameters sent to the servers, and received from them, if it is their turn."""
        local = self.resolved.layout.parameter_server.mode == "local"
        flat = flatten(state.params)
        fragment = {path: flat[path] for path in paths}, {path: state.exchange[path] for path in paths}
        send = functools.partial(self._send if local else self._average_elastically, state.step)
        with jax.named_scope(f"send/{number}"):
            fragment = lax.cond(events["sends"][number], send, _unchanged, *fragment)
        if local:
            with jax.named_scope(f"receive/{number}"):
                fragment = lax.cond(events["receives"][number], self._receive, _unchanged, *fragment)
        params = map_paths(lambda path, old: fragment[0].get(path, old), state.params)
        return dataclasses.replace(state, params=params, exchange=state.exchange | fragment[1])

    def _send(self, step: Any, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The servers' step: the mean parameter delta since the last sync is a gradient for Nesterov momentum (DiLoCo,
        algorithm 1, lines 11 and 12)."""
        declared = self.resolved.layout.parameter_server
        deltas = {path: (entry[READ] - entry[OWN]).mean(0) for path, entry in memory.items()}
        mean, memory = self._reduce_deltas(step, deltas, memory)
        after = {}
        for path, delta in mean.items():
            delta = delta.astype(jnp.float32)
            if declared.outer_momentum:
                velocity = declared.outer_momentum * memory[path][OUTER] + delta
                memory[path], delta = memory[path] | {OUTER: velocity}, delta + declared.outer_momentum * velocity
            after[path] = (rows[path] - declared.outer_rate * delta).astype(rows[path].dtype)
        return after, memory

    def _receive(self, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """Every worker takes the servers' parameters, mixed with the fraction of its own that it keeps."""
        mix, after = self.resolved.layout.parameter_server.mix, {}
        for path, gathered in gather_packed_params(self.exchange, rows).items():
            own = memory[path][OWN]
            if mix:
                own = (mix * own + (1 - mix) * gathered).astype(own.dtype)
            else:
                own = jnp.broadcast_to(gathered, own.shape)
            after[path] = memory[path] | {READ: gathered, OWN: own}
        return rows, after

    def _average_elastically(self, step: Any, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """x_i -= a (x_i - z) and z += sum_i a (x_i - z): their sum does not change (EASGD, equations 5 and 6)."""
        declared, workers = self.resolved.layout.parameter_server, self.exchange.worker_count
        rate = 0.9 / workers if declared.moving_rate is None else declared.moving_rate
        gathered = gather_packed_params(self.exchange, rows)
        deltas = {path: (rate * (entry[OWN] - gathered[path])).astype(entry[OWN].dtype) for path, entry in memory.items()}
        memory = {path: entry | {OWN: entry[OWN] - deltas[path]} for path, entry in memory.items()}
        mean, memory = self._reduce_deltas(step, {path: delta.mean(0) for path, delta in deltas.items()}, memory)
        return {path: rows[path] + workers * mean[path] for path in rows}, memory

    def _reduce_deltas(self, step: Any, deltas: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """This server's rows of the mean over all workers, and the next memory, by path."""
        codecs = {path: {kind: entry[kind] for kind in (RESIDUAL, CODEC) if kind in entry} for path, entry in memory.items()}
        mean, after, _ = self.exchange.reduce_gradients(deltas, {path: entry for path, entry in codecs.items() if entry}, step)
        return mean, {path: entry | after.get(path, {}) for path, entry in memory.items()}


def _unchanged(*fragment: Tree) -> tuple[Tree, ...]:
    return fragment


def _where(present: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` [m, ...] for workers that are present, and `old` for the others."""
    return jnp.where(present.reshape(-1, *[1] * (new.ndim - 1)), new, old)
