"""A step of workers that train independently and synchronize with the servers now and then: local
SGD, DiLoCo and EASGD.

Each worker has its own parameters and optimizer state. When they synchronize, and which parameters,
is data (`spmd.wire.server.sync_schedule`). They send a difference of parameters, with the codecs
that gradients use.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.tree import Tree, flatten, map_paths
from spmd.sync.parameter_sync import gather_packed_params
from spmd.train.state import State
from spmd.train.step import REPLICATED, Reduced, UpdateRule, mean_loss
from spmd.train.worker_gradients import present_workers
from spmd.wire import collectives
from spmd.wire.transfer import CODEC, OUTER, OWN, READ, RESIDUAL


@dataclasses.dataclass(frozen=True)
class LocalSGD(UpdateRule):
    """Every worker takes a step alone; then the parameters whose turn it is are synchronized."""

    per_worker = True

    def params(self, state: State) -> Tree:
        """Those of each of this position's workers, [m, ...]."""
        return map_paths(lambda path, _: state.exchange[path][OWN], state.params)

    def reduce(self, state: State, grads: Tree, metrics: jax.Array, events: Tree) -> Reduced:
        """One optimizer step of each of this position's workers; then synchronization. Each
        worker's loss is at its own parameters.
        """

        def optimize(grads: Tree, opt: Any, params: Tree, loss: jax.Array) -> tuple[Tree, Any]:
            return self.optimizer.update(grads, opt, params, value=loss)

        params = self.params(state)
        updates, opt = jax.vmap(optimize)(grads, state.opt, params, mean_loss(metrics))
        present = present_workers(events, self.axes, metrics.shape[0])
        where_present = functools.partial(jax.tree.map, functools.partial(_where, present))
        opt, flat = (
            where_present(opt, state.opt),
            flatten(where_present(optax.apply_updates(params, updates), params)),
        )
        memory = {path: entry | {OWN: flat[path]} for path, entry in state.exchange.items()}
        state = dataclasses.replace(state, opt=opt, exchange=memory)
        for number, paths in enumerate(self.sync.fragments):
            state = self._sync_fragment(state, paths, number, events)
        with jax.named_scope("metrics"):
            metrics = collectives.all_reduce(metrics.sum(0), self.axes)
        return Reduced((state.params, state.opt), state.exchange, metrics, jnp.zeros((2, 0)))

    def update(
        self, state: State, reduced: Reduced, loss: jax.Array, events: Tree
    ) -> tuple[Tree, Any, Tree]:
        """As `reduce` left them."""
        del state, loss, events
        return *reduced.values, reduced.comm_state

    def specs(self, state: State) -> tuple[dict[str, Any], Reduced]:
        """Parameters over the servers, optimizer states over their workers."""
        params = self.sync.map_params(
            lambda place, _: self.sync.data_spec(place.spec), state.params
        )
        opt = jax.tree.map(lambda _: PartitionSpec(self.axes), state.opt)
        return {"params": params, "opt": opt}, Reduced(
            (params, opt), self.sync.data_specs(state.exchange), REPLICATED, REPLICATED
        )

    def _sync_fragment(self, state: State, paths: list[str], number: int, events: Tree) -> State:
        """These parameters sent to the servers, and received from them, if it is their turn."""
        local = self.sync.resolved.layout.parameter_server.mode == "local"
        flat = flatten(state.params)
        fragment = (
            {path: flat[path] for path in paths},
            {path: state.exchange[path] for path in paths},
        )
        send = functools.partial(self._send if local else self._average_elastically, state.step)
        with jax.named_scope(f"send/{number}"):
            fragment = lax.cond(events["sends"][number], send, _unchanged, *fragment)
        if local:
            with jax.named_scope(f"receive/{number}"):
                fragment = lax.cond(
                    events["receives"][number], self._receive, _unchanged, *fragment
                )
        params = map_paths(lambda path, old: fragment[0].get(path, old), state.params)
        return dataclasses.replace(state, params=params, exchange=state.exchange | fragment[1])

    def _send(self, step: Any, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The servers' step: the mean parameter delta since the last sync is a gradient for
        Nesterov momentum (DiLoCo, algorithm 1, lines 11 and 12).
        """
        declared = self.sync.resolved.layout.parameter_server
        deltas = {path: (entry[READ] - entry[OWN]).mean(0) for path, entry in memory.items()}
        mean, memory = self._reduce_deltas(step, deltas, memory)
        after = {}
        for path, delta in mean.items():
            delta = delta.astype(jnp.float32)
            if declared.outer_momentum:
                velocity = declared.outer_momentum * memory[path][OUTER] + delta
                memory[path], delta = (
                    memory[path] | {OUTER: velocity},
                    delta + declared.outer_momentum * velocity,
                )
            after[path] = (rows[path] - declared.outer_rate * delta).astype(rows[path].dtype)
        return after, memory

    def _receive(self, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """Every worker takes the servers' parameters, mixed with the fraction of its own that it
        keeps.
        """
        mix, after = self.sync.resolved.layout.parameter_server.mix, {}
        for path, gathered in gather_packed_params(self.sync, rows).items():
            own = memory[path][OWN]
            if mix:
                own = (mix * own + (1 - mix) * gathered).astype(own.dtype)
            else:
                own = jnp.broadcast_to(gathered, own.shape)
            after[path] = memory[path] | {READ: gathered, OWN: own}
        return rows, after

    def _average_elastically(self, step: Any, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """x_i -= a (x_i - z) and z += sum_i a (x_i - z): their sum does not change (EASGD,
        equations 5 and 6).
        """
        declared, workers = self.sync.resolved.layout.parameter_server, self.sync.worker_count
        rate = 0.9 / workers if declared.moving_rate is None else declared.moving_rate
        gathered = gather_packed_params(self.sync, rows)
        deltas = {
            path: (rate * (entry[OWN] - gathered[path])).astype(entry[OWN].dtype)
            for path, entry in memory.items()
        }
        memory = {path: entry | {OWN: entry[OWN] - deltas[path]} for path, entry in memory.items()}
        mean, memory = self._reduce_deltas(
            step, {path: delta.mean(0) for path, delta in deltas.items()}, memory
        )
        return {path: rows[path] + workers * mean[path] for path in rows}, memory

    def _reduce_deltas(self, step: Any, deltas: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """This server's rows of the mean over all workers, and the next memory, by path."""
        codecs = {
            path: {kind: entry[kind] for kind in (RESIDUAL, CODEC) if kind in entry}
            for path, entry in memory.items()
        }
        mean, after, _ = self.sync.reduce_gradients(
            deltas, {path: entry for path, entry in codecs.items() if entry}, step
        )
        return mean, {path: entry | after.get(path, {}) for path, entry in memory.items()}


def _unchanged(*fragment: Tree) -> tuple[Tree, ...]:
    return fragment


def _where(present: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` [m, ...] for workers that are present, and `old` for the others."""
    return jnp.where(present.reshape(-1, *[1] * (new.ndim - 1)), new, old)
