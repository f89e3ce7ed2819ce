"""One training step, compiled as one program. `Step` reads from top to bottom:

1. the step: `update`;
2. the loss of one microbatch: `_loss`;
3. its gradient: `_microbatch_grads`, or `_pipeline_grads` under a 1F1B schedule;
4. the gradients of all microbatches, and their reduction over workers: `_worker_grads`, `_local_grads`, `_grads_and_sync`;
5. the optimizer: `_apply_updates`.

Under `reduction = "compiler"` the functions of 2 to 4 see the global batch, and XLA partitions them. Otherwise they run under
`jax.shard_map` over the data axes, and see the rows of one worker.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from spmd.layout.resolve import Placement, Resolved, matching_rules
from spmd.models.base import Call, Model, Variables
from spmd.nn.layer_stack import layers_per_stage, split_microbatches
from spmd.nn.parallel_context import UNSHARDED, ParallelConfig, parallel_scope
from spmd.nn.pipeline_1f1b import run_1f1b
from spmd.rng import part_key, worker_key
from spmd.specs import Spec, keep_axes, pspec
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.parameter_sync import gather_packed_params, gather_params, gather_updates, needs_gather
from spmd.sync.strategies import MeshAxes
from spmd.train.accumulate import accumulate, microbatches, split_workers
from spmd.train.activations import Activations
from spmd.train.metrics import Sums, pack
from spmd.train.objective import LOSS, Objective, check_worker
from spmd.train.precision import cast, cast_like
from spmd.train.state import State
from spmd.tree import Tree, flatten, map_paths
from spmd.wire import collectives
from spmd.xla import shard_map

REPLICATED = PartitionSpec()


class SyncedGrads(NamedTuple):
    """What the workers have computed together: mean gradients, and all else that a step needs of them.

    Attributes:
      grads: of the mean loss over the batch, sharded as the reduction leaves them.
      sync_state: the next `State.exchange`.
      sync_metrics: float32[2, names], what the gradient exchange measured.
      stats: the next `State.stats`, equal on all workers.
      metrics: float32[2, names], sums and counts of loss and metrics over the batch.
    """

    grads: Tree
    sync_state: Tree
    sync_metrics: Any
    stats: Tree
    metrics: Any


@dataclasses.dataclass(frozen=True)
class Step:
    """Everything about a step that is known before it is compiled."""

    model: Model
    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    resolved: Resolved
    exchange: GradientSync
    names: tuple[str, ...]
    microbatches: int = 1
    workers_per_position: int = 1  # simulated workers at each position along the data axes
    unroll: bool = False
    dtype: Any = None
    rowwise: bool = False  # the loss gives one value per row
    split: bool = True  # False: every worker computes all rows (a last batch that the workers do not divide)
    parallel: ParallelConfig = UNSHARDED  # how the forward pass is sharded
    training: bool = True  # False: the model in evaluation mode

    # 1. the step ------------------------------------------------------------------------------------------------------

    def update(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """The next state, and the step's metrics as float32[2, names] (sums, counts), equal on every device.

        Args:
          batch: leaves [rows, ...], dim 0 sharded over the workers.
          weights: float32[rows], 1 for a row of data and 0 for padding, sharded likewise.
          events: what the parameter server's clock says about this step; empty without one.
        """
        return self._apply_updates(state, events, self._synced_grads(state, batch, weights, events))

    def update_in_shard_map(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """`update`, called by each worker inside a `jax.shard_map` over all mesh axes.

        `batch` and `weights` are the worker's rows; every parameter and moment is replicated.
        """
        return self._apply_updates(state, events, self._grads_and_sync(state, batch, weights, events))

    def loss_and_gradients(self, state: State, batch: Tree, weights: jax.Array) -> tuple[jax.Array, Tree]:
        """The mean loss and its gradients, before the optimizer; without a parameter server's clock."""
        synced = self._synced_grads(state, batch, weights, {})
        return self._mean_loss(synced.metrics), synced.grads

    # 2. the loss of one microbatch ------------------------------------------------------------------------------------

    def _loss(
        self,
        params: Tree,
        *,
        stats: Tree,
        rngs: Tree,
        rows: tuple,
        key: Any,
        localize: Callable[[Any], Any],
        sync_axes: tuple[str, ...],
        parallel: ParallelConfig | None = None,
    ) -> tuple[jax.Array, tuple[Sums, Tree]]:
        """The loss summed over these rows; beside it all metric sums and the next stats."""
        batch, weights = rows
        remat = self.resolved.layout.remat
        model_key, loss_key = jax.random.split(key)
        policy, activations = remat_policy(remat.saves), Activations(self.resolved, self.mesh_axes.mesh)
        call = Call(self.training, model_key, localize, sync_axes, remat.modules, policy, self.dtype, activations)
        with parallel_scope(parallel or self.parallel):
            bound = self.model.bind(Variables(params, stats, rngs), call)
            value, extra = self.objective(bound, batch, localize(loss_key))
        check_worker(value, weights.shape[0], rowwise=self.rowwise)
        sums = self.objective.sums(value, extra, weights)
        return sums[LOSS][0], (sums, cast_like(self.model.get_stats(bound), stats))

    # 3. the gradient of one microbatch --------------------------------------------------------------------------------

    def _microbatch_grads(self, loss: Callable, params: Tree, stats: Tree, rows: tuple, key: Any) -> tuple[tuple[Tree, Sums], Tree]:
        """Gradients with respect to the full parameters, and metric sums; the next stats."""
        gathered = self._gather_params(params)
        value, backward, (sums, stats) = jax.vjp(functools.partial(loss, stats=stats, rows=rows, key=key), gathered, has_aux=True)
        if self._regathers:
            # Gathered parameters are not kept from the forward to the backward pass. They are gathered again from values that
            # depend on the loss, so the compiler cannot merge the two gathers into one.
            sharded, value = lax.optimization_barrier((params, value))
            backward = self._regather(backward, gathered, sharded)
        (grads,) = backward(jnp.ones_like(value))
        return (cast_like(grads, params), sums), stats

    def _gather_params(self, params: Tree) -> Tree:
        """Full parameters in the dtype of the computation; cast before they are sent, so they are sent in that dtype."""
        params = cast(params, self.dtype)
        if self.exchange.reduction.keeps_params:
            return jax.tree.unflatten(jax.tree.structure(params), list(gather_packed_params(self.exchange, flatten(params)).values()))
        return self.map_params(lambda place, shard: gather_params(self.exchange, place, shard), params)

    @property
    def _regathers(self) -> bool:
        """Whether the backward pass gathers parameters anew."""
        return not self.exchange.reduction.keeps_params

    def _regather(self, backward: Callable, gathered: Tree, params: Tree) -> Callable:
        """`backward` with those of its residuals that are gathered parameters gathered anew from `params`.

        What `jax.vjp` returns is a pytree of its residuals, and a parameter among them is the array that was passed in.
        """
        kept = {id(residual) for residual in jax.tree.leaves(backward)}

        def regather(place: Placement, old: jax.Array, shard: jax.Array) -> jax.Array:
            wanted = id(old) in kept and needs_gather(place, self.mesh_axes)
            return gather_params(self.exchange, place, cast(shard, self.dtype)) if wanted else old

        again = self.map_params(regather, gathered, params)
        replaced = {id(old): new for old, new in zip(jax.tree.leaves(gathered), jax.tree.leaves(again), strict=True)}
        return jax.tree.map(lambda residual: replaced.get(id(residual), residual), backward)

    def _pipeline_grads(self, params: Tree, state: State, rows: tuple, key: Any, worker: Any, axes: tuple[str, ...]) -> tuple[Tree, Sums]:
        """`_microbatch_grads` of a 1F1B pipeline, which splits the rows into microbatches of its own and keeps no stats."""
        parts = split_microbatches(self.parallel, rows)
        count = parts.count * math.prod(map(self.parallel.axis_size, parts.row_axes))

        def loss(params: Tree, rows: tuple, part: Any, parallel: ParallelConfig, consts: Tree) -> tuple[jax.Array, Sums]:
            stats, rngs, key_data, worker = consts
            worker_localize = self._localizer(worker, parts.rows * parts.count, axes)
            value, (sums, _) = self._loss(
                params,
                stats=stats,
                rngs=rngs,
                rows=rows,
                key=jax.random.wrap_key_data(key_data, impl="threefry2x32"),
                localize=lambda k: part_key(worker_localize(k), part, count, rows=parts.rows),
                sync_axes=(),
                parallel=parallel,
            )
            return value, sums

        sharded, stacks = self.resolved.layout.stage_axis is not None, self.model.stacks()
        grads, sums = run_1f1b(
            self.parallel,
            loss,
            self._gather_params(params),
            rows,
            (state.stats, state.rngs, jax.random.key_data(key), jnp.asarray(worker)),
            map_paths(lambda path, _: sharded and path in stacks, params),
            parts,
            layers_per_stage=None if sharded else functools.partial(layers_per_stage, self.parallel),
        )
        return cast_like(grads, params), sums

    # 4. the gradients of a worker, reduced over workers ---------------------------------------------------------------

    def _worker_grads(
        self, params: Tree, state: State, stats: Tree, rows: tuple, worker: Any, axes: tuple[str, ...]
    ) -> tuple[tuple[Tree, Sums], Tree]:
        """One worker: gradients of the loss summed over its rows, and metric sums; the next stats.

        `worker` counts from 0 over all workers.
        """
        step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl="threefry2x32"), state.step)
        localize = self._localizer(worker, rows[1].shape[0] // self.microbatches, axes)
        loss = functools.partial(self._loss, rngs=state.rngs, localize=localize, sync_axes=self._stats_axes(axes))
        remat = self.resolved.layout.remat
        if remat.saves != "everything" and not remat.modules:
            loss = jax.checkpoint(loss, policy=remat_policy(remat.saves))

        def microbatch_grads(stats: Tree, rows: tuple, index: jax.Array) -> tuple[tuple, Tree]:
            key = jax.random.fold_in(step_key, index)
            if self.parallel.manual_backward:
                return self._pipeline_grads(params, state, rows, key, worker, axes), stats
            return self._microbatch_grads(loss, params, stats, rows, key)

        if self.microbatches == 1:
            return microbatch_grads(stats, rows, jnp.int32(0))
        parts = microbatches(rows, self.microbatches)
        return accumulate(microbatch_grads, stats, parts, self.microbatches, unroll=self.unroll)

    def _local_grads(self, state: State, batch: Tree, weights: jax.Array, events: Tree, axes: tuple[str, ...]) -> tuple[Tree, Tree, Sums]:
        """Gradients of the mean loss over this position's rows (full, not yet averaged over workers), new stats, metric sums."""
        first = collectives.worker_index(axes) * self.workers_per_position

        def worker_grads(stats: Tree, rows: tuple, index: jax.Array) -> tuple[tuple, Tree]:
            grads, after = self._worker_grads(state.params, state, stats, rows, first + index, axes)
            if "present" not in events:
                return grads, after
            kept = functools.partial(jnp.where, events["present"][first + index])  # never by multiplying: 0 * NaN
            return jax.tree.map(lambda x: kept(x, jnp.zeros_like(x)), grads), jax.tree.map(kept, after, stats)

        if self.workers_per_position == 1:
            (grads, sums), stats = worker_grads(state.stats, (batch, weights), jnp.int32(0))
        else:
            rows = split_workers((batch, weights), self.workers_per_position)
            (grads, sums), stats = accumulate(worker_grads, state.stats, rows, self.workers_per_position, unroll=self.unroll)
        # a sum over rows was differentiated: divided by the workers' mean count, its average over workers is the mean
        with jax.named_scope("metrics"):
            count = collectives.all_reduce(sums[LOSS][1], axes) / (collectives.worker_count(axes) if axes else 1)
            count = nonzero(count)
        return jax.tree.map(lambda g: (g / count).astype(g.dtype), grads), stats, sums

    def _grads_and_sync(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> SyncedGrads:
        """The gradients of this position's rows, reduced with those of all others."""
        data_axes = self.mesh_axes.data_axes if self.exchange.reduction.manual else ()
        grads, stats, sums = self._local_grads(state, batch, weights, events, data_axes)
        metrics = pack(sums, self.names)
        with jax.named_scope("metrics"):
            metrics = collectives.all_reduce(metrics, data_axes) if self.split else metrics
        with jax.named_scope("stats"):
            if data_axes:
                present = self._present(events).any() if "present" in events else None
                stats = sync_stats(stats, data_axes, present, state.stats)
        grads, sync_state, sync_metrics = self.exchange.reduce_gradients(grads, state.exchange, state.step)
        return SyncedGrads(grads, sync_state, sync_metrics, stats, metrics)

    def _synced_grads(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> SyncedGrads:
        """`_grads_and_sync` of the global batch: under `jax.shard_map` over the data axes, or left to the compiler."""
        if not self.exchange.reduction.manual:
            return self._grads_and_sync(state, batch, weights, events)
        reduced = self.exchange.reduction.mean_spec
        grads = self.map_params(lambda place, _: self._data_spec(reduced(place)), state.params)
        out_specs = SyncedGrads(grads, self._sync_specs(state), REPLICATED, REPLICATED, REPLICATED)
        params = self.map_params(lambda place, _: self._data_spec(place.spec), state.params)
        return self._shard_map(self._grads_and_sync, out_specs, params=params, opt=None)(state, batch, weights, events)

    def _shard_map(self, function: Callable, out_specs: Any, **state_specs: Any) -> Callable:
        """`function(state, batch, weights, events)` of every position along the data axes.

        `state_specs`: of fields of the state; None for a field that is not passed. All others are replicated.
        """

        def run(state: State, batch: Tree, weights: jax.Array, events: Tree) -> Any:
            state = dataclasses.replace(state, **{name: None for name, spec in state_specs.items() if spec is None})
            specs = self._state_specs(state, **state_specs)
            rows = PartitionSpec(self.mesh_axes.data_axes) if self.split else REPLICATED
            batch_specs = map_paths(lambda path, _: self._data_spec(batch_spec(self.resolved, path)) if self.split else REPLICATED, batch)
            in_specs, axes = (specs, batch_specs, rows, REPLICATED), self.mesh_axes.data_axes
            mapped = shard_map(function, mesh=self.mesh_axes.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes)
            return mapped(state, batch, weights, events)

        return run

    # 5. the optimizer -------------------------------------------------------------------------------------------------

    def _apply_updates(self, state: State, events: Tree, synced: SyncedGrads) -> tuple[State, jax.Array]:
        """The optimizer's step with the reduced gradients."""
        loss = self._mean_loss(synced.metrics)
        updates, opt = self.optimizer.update(synced.grads, state.opt, state.params, value=loss)
        sync_state = jax.tree.map(functools.partial(jnp.where, skipped(opt)), state.exchange, synced.sync_state)
        params = optax.apply_updates(state.params, gather_updates(self.exchange, updates))
        after = State(state.step + 1, params, opt, synced.stats, state.rngs, state.key, sync_state)
        return after, step_metrics(synced.metrics, synced.sync_metrics, events)

    # shared -----------------------------------------------------------------------------------------------------------

    @property
    def mesh_axes(self) -> MeshAxes:
        """The mesh as the reduction sees it."""
        return self.exchange.mesh_axes

    def map_params(self, function: Callable, *trees: Tree) -> Tree:
        """`function(placement, leaf, ...)` over trees of parameters."""
        return map_paths(lambda path, *leaves: function(self.resolved.placements[path], *leaves), *trees)

    def _data_spec(self, spec: Spec) -> PartitionSpec:
        """The part of a spec that `jax.shard_map` over the data axes may name."""
        return pspec(keep_axes(spec, self.mesh_axes.data_axes))

    def _sync_specs(self, state: State) -> Tree:
        """The specs of `State.exchange` over the data axes."""
        specs = self.exchange.specs(state.exchange)
        return jax.tree.map(self._data_spec, specs, is_leaf=lambda x: isinstance(x, tuple))

    def _state_specs(self, state: State, **specs: Any) -> State:
        """The specs of a state over the data axes: these, the exchange's, and all other fields replicated."""
        replicated = jax.tree.map(lambda _: REPLICATED, state)
        return dataclasses.replace(replicated, exchange=self._sync_specs(state), **specs)

    def _stats_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The mesh axes over which layers average batch statistics."""
        return axes

    def _localizer(self, worker: Any, rows: int, axes: tuple[str, ...]) -> Callable[[Any], Any]:
        """From a key that is the same on all workers to that of `worker`, which has this many rows."""
        workers = (collectives.worker_count(axes) if axes else 1) * self.workers_per_position
        if workers == 1 or not self.split:
            return lambda key: key
        return functools.partial(worker_key, worker=worker, rows=rows, workers=workers)

    def _present(self, events: Tree) -> jax.Array:
        """bool[m], which of this position's workers take part in the step."""
        count = self.workers_per_position
        first = collectives.worker_index(self.mesh_axes.data_axes) * count
        return lax.dynamic_slice_in_dim(events["present"], first, count)

    def _mean_loss(self, metrics: jax.Array) -> jax.Array:
        """The mean loss, from metrics [..., 2, names]."""
        loss = metrics[..., self.names.index(LOSS)]
        return mean(*jnp.moveaxis(loss, -1, 0))


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and zero where the count is zero: a gradient of 0 / 0 would make every parameter NaN."""
    return total / nonzero(count)


def nonzero(count: jax.Array) -> jax.Array:
    """A count to divide by, with infinity in place of zero.

    The choice is made here and not in the quotient, so the division rounds as it does by any number.
    """
    return lax.optimization_barrier(jnp.where(count == 0, jnp.inf, count))


def step_metrics(metrics: jax.Array, sync_metrics: jax.Array, events: Tree) -> jax.Array:
    """All metrics of a step: the loss and the user's, the gradient exchange's, and the counts of the parameter server's clock."""
    return jnp.concatenate([metrics, sync_metrics, *([events["counted"]] if "counted" in events else [])], axis=1)


def skipped(opt: Any) -> Any:
    """Whether the optimizer, by its new state, ignored the gradients; then the exchange keeps its old state, too.

    Known are `optax.apply_if_finite` and `optax.MultiSteps` with a `should_skip_update_fn`.
    """
    applied = [~flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "should_skip")]
    applied += [flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "last_finite")]
    return ~jnp.stack(applied).all() if applied else False


def remat_policy(save: str) -> Callable[..., bool] | None:
    """The `jax.checkpoint` policy of a layout's `[remat] save`; None keeps nothing."""
    policies = {"everything": jax.checkpoint_policies.everything_saveable, "dots": jax.checkpoint_policies.dots_saveable}
    return policies.get(save)


def batch_spec(resolved: Resolved, path: str) -> Spec:
    """The spec of one batch leaf: its rule's, or the batch's default."""
    claimed = matching_rules(resolved.layout.batch.rules, path)
    return resolved.layout.batch.rules[claimed[0]].spec if claimed else resolved.layout.batch.spec


def sync_stats(stats: Tree, axes: tuple[str, ...], present: Any = None, before: Tree = None) -> Tree:
    """Stats that are equal on every worker: the mean of floats, the maximum of counters.

    Args:
      present: whether this position took part; None: all did. The mean is over those that did; if none did, `before` stays.
    """
    if not jax.tree.leaves(stats):
        return stats
    count = collectives.worker_count(axes) if present is None else collectives.all_reduce(present.astype(jnp.float32), axes)

    def sync(x: jax.Array, old: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return collectives.maximum(x, axes)
        if present is None:
            return collectives.all_reduce(x, axes) / count
        total = collectives.all_reduce(jnp.where(present, x, jnp.zeros_like(x)), axes)
        return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(x.dtype), old)

    return jax.tree.map(sync, stats, stats if before is None else before)


def scan_steps(
    step: Callable[..., tuple[State, jax.Array]],
    state: State,
    data: Tree,
    rows: jax.Array,
    weights: jax.Array,
    events: Tree,
    *,
    unroll: bool,
) -> tuple[State, jax.Array]:
    """Several steps in one call on a dataset that is on the devices: `rows` int32[steps, batch] picks each batch."""

    def body(state: State, inputs: tuple) -> tuple[State, jax.Array]:
        batch_rows, weights, events = inputs
        return step(state, jax.tree.map(lambda x: x[batch_rows], data), weights, events)

    return lax.scan(body, state, (rows, weights, events), unroll=rows.shape[0] if unroll else 1)
