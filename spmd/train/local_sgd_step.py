"""A step of workers that train by themselves and meet at the servers now and then: local SGD, DiLoCo and EASGD.

Each worker has weights and an optimizer state of its own. When they meet, and over which parameters, is data
(`spmd.wire.param_server.sync_schedule`). What they send is a difference of weights; it travels as gradients do, by the same codecs.
"""

import dataclasses
import functools
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
from spmd.wire import collectives
from spmd.wire.gradient_sync import CODEC, OUTER, OWN, READ, RESIDUAL
from spmd.wire.parameter_sync import gather_packed_params
from spmd.xla import shard_map


@dataclasses.dataclass(frozen=True)
class LocalStep(Step):
    """Every worker a step by itself; then those parameters meet whose turn it is."""

    held: bool = True

    def update(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """The next state, and the step's metrics, as `Step.update` gives them: the loss is that of each worker's own weights."""
        exchange, data, whole = self.exchange, self.mesh_axes.data_axes, PartitionSpec()
        cut = lambda spec: pspec(keep_axes(spec, data))
        memory = jax.tree.map(cut, exchange.specs(state.exchange), is_leaf=lambda x: isinstance(x, tuple))
        rows = map_paths(lambda path, x: cut(batch_spec(self.resolved, path)), batch)
        specs = jax.tree.map(lambda _: whole, dataclasses.replace(state, opt=None))
        params, opt = self._map(lambda place, p: cut(place.spec), state.params), jax.tree.map(lambda _: PartitionSpec(data), state.opt)
        specs = dataclasses.replace(specs, params=params, opt=opt, exchange=memory)

        def position(state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
            state, sums = self._alone(state, batch, weights, events)
            for number, paths in enumerate(exchange.fragments):
                state = self._met(state, paths, number, events)
            with jax.named_scope("metrics"):
                return dataclasses.replace(state, step=state.step + 1), collectives.all_reduce(sums, data)

        state, sums = shard_map(
            position,
            mesh=self.mesh_axes.mesh,
            in_specs=(specs, rows, PartitionSpec(data), whole),
            out_specs=(specs, whole),
            axis_names=data,
        )(state, batch, weights, events)
        return state, measurements(sums, jnp.zeros((2, 0)), events)

    def _alone(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """This position's workers, each with its own optimizer; and the sum of their metrics."""
        held = map_paths(lambda path, _: state.exchange[path][OWN], state.params)
        grads, stats, sums = self._each(state, held, batch, weights, events)
        losses = self._losses(sums)
        updates, opt = jax.vmap(lambda g, o, p, value: self.optimizer.update(g, o, p, value=value))(grads, state.opt, held, losses)
        here = functools.partial(jax.tree.map, functools.partial(_where, self._present(events)))
        opt, own = here(opt, state.opt), flatten(here(optax.apply_updates(held, updates), held))
        memory = {path: entry | {OWN: own[path]} for path, entry in state.exchange.items()}
        return dataclasses.replace(state, opt=opt, stats=stats, exchange=memory), sums.sum(0)

    def _met(self, state: State, paths: list[str], number: int, events: Tree) -> State:
        """These parameters sent to the servers, and taken back, if it is their turn."""
        params = flatten(state.params)
        part = {path: params[path] for path in paths}, {path: state.exchange[path] for path in paths}
        send = self._send if self.resolved.layout.parameter_server.mode == "local" else self._pull_together
        with jax.named_scope(f"send/{number}"):
            part = lax.cond(events["sends"][number], functools.partial(send, state.step), lambda *part: part, *part)
        if self.resolved.layout.parameter_server.mode == "local":
            with jax.named_scope(f"receive/{number}"):
                part = lax.cond(events["receives"][number], self._receive, lambda *part: part, *part)
        return dataclasses.replace(
            state, params=map_paths(lambda path, old: part[0].get(path, old), state.params), exchange=state.exchange | part[1]
        )

    def _send(self, step: Any, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The servers' step: the workers' mean way is a gradient, to Nesterov's momentum (DiLoCo, algorithm 1, lines 11 and 12)."""
        declared = self.resolved.layout.parameter_server
        mean, memory = self._pushed(step, {path: (entry[READ] - entry[OWN]).mean(0) for path, entry in memory.items()}, memory)
        after = {}
        for path, way in mean.items():
            way = way.astype(jnp.float32)
            if declared.outer_momentum:
                velocity = declared.outer_momentum * memory[path][OUTER] + way
                memory[path], way = memory[path] | {OUTER: velocity}, way + declared.outer_momentum * velocity
            after[path] = (rows[path] - declared.outer_rate * way).astype(rows[path].dtype)
        return after, memory

    def _receive(self, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """Every worker's weights are the servers', but for the share of its own that it keeps."""
        kept, after = self.resolved.layout.parameter_server.mix, {}
        for path, whole in gather_packed_params(self.exchange, rows).items():
            own = memory[path][OWN]
            own = jnp.broadcast_to(whole, own.shape) if not kept else (kept * own + (1 - kept) * whole).astype(own.dtype)
            after[path] = memory[path] | {READ: whole, OWN: own}
        return rows, after

    def _pull_together(self, step: Any, rows: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """x_i -= a (x_i - z) and z += sum_i a (x_i - z): their sum stays what it was (EASGD, equations 5 and 6)."""
        declared, workers = self.resolved.layout.parameter_server, self.exchange.worker_count
        rate, whole = 0.9 / workers if declared.moving_rate is None else declared.moving_rate, gather_packed_params(self.exchange, rows)
        ways = {path: (rate * (entry[OWN] - whole[path])).astype(entry[OWN].dtype) for path, entry in memory.items()}
        memory = {path: entry | {OWN: entry[OWN] - ways[path]} for path, entry in memory.items()}
        mean, memory = self._pushed(step, {path: way.mean(0) for path, way in ways.items()}, memory)
        return {path: rows[path] + workers * mean[path] for path in rows}, memory

    def _pushed(self, step: Any, ways: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """This server's rows of the mean over all workers, and the next memory, by path."""
        codecs = {path: {kind: entry[kind] for kind in (RESIDUAL, CODEC) if kind in entry} for path, entry in memory.items()}
        mean, after, _ = self.exchange.reduce_gradients(ways, {path: entry for path, entry in codecs.items() if entry}, step)
        return mean, {path: entry | after.get(path, {}) for path, entry in memory.items()}


def _where(present: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` [m, ...] for workers who are present, and `old` for the others."""
    return jnp.where(present.reshape(-1, *[1] * (new.ndim - 1)), new, old)
