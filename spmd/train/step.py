"""One training step as one compiled program.

Read `Step.update` first: gradients, then optax on whole arrays. `_gradients` is the part that differs between the
auto step (the compiler sees the whole batch) and the manual step (each worker sees its own rows, under
`jax.shard_map`); both call the same `_worker`, with another `pull` and another way to average.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from spmd.layout.resolve import Placement, Resolved, owners, pspec
from spmd.layout.schema import Spec, keep_axes
from spmd.models.base import Call, Model, Variables
from spmd.nn.layer_stack import layers_per_stage, split_microbatches
from spmd.nn.parallel_context import UNSHARDED, ParallelConfig, parallel_scope
from spmd.nn.pipeline_1f1b import run_1f1b
from spmd.rng import part_key, worker_key
from spmd.train.accumulate import accumulate, apart, microbatches
from spmd.train.activations import Activations
from spmd.train.metrics import Sums, pack
from spmd.train.objective import LOSS, Objective, check_worker
from spmd.train.precision import cast, cast_like
from spmd.train.state import State
from spmd.tree import Tree, flatten, map_paths
from spmd.wire import collectives
from spmd.wire.gradient_sync import GradientSync
from spmd.wire.parameter_sync import gather_packed_params, gather_params, gather_updates, needs_gather
from spmd.wire.strategies import MeshAxes
from spmd.xla import shard_map


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
    simulated: int = 1  # workers at each position along the data axes
    unroll: bool = False
    dtype: Any = None
    rowwise: bool = False  # the loss gives one value per row
    split: bool = True  # False: every worker computes all rows (a last batch that the workers do not divide)
    held: bool = False  # each worker computes at weights that it holds, whole and its own
    parallel: ParallelConfig = UNSHARDED  # how the forward pass is cut
    training: bool = True  # False: the model in evaluation mode

    @property
    def mesh_axes(self) -> MeshAxes:
        """The mesh as the reduction sees it."""
        return self.exchange.mesh_axes

    def update(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """The next state, and the step's metrics as float32[2, names] (sums, counts), equal on every device.

        Args:
          batch: leaves [rows, ...], dim 0 cut over the workers.
          weights: float32[rows], 1 for a row of data and 0 for padding, cut likewise.
          events: what the parameter server's clock says of this step; empty without one.
        """
        return self._applied(state, events, *self._gradients(state, batch, weights, events))

    def update_here(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """`update` by each worker inside a manual region over all axes of the mesh: `batch` and `weights` are its own rows, and
        every parameter and moment is whole."""
        return self._applied(state, events, *self._together(state, batch, weights, events))

    def loss_and_gradients(self, state: State, batch: Tree, weights: jax.Array) -> tuple[jax.Array, Tree]:
        """The mean loss and its gradients, before the optimizer; without a parameter server's clock."""
        grads, _, _, _, sums = self._gradients(state, batch, weights, {})
        return mean(*sums[:, self.names.index(LOSS)]), grads

    def _applied(
        self, state: State, events: Tree, grads: Tree, memory: Tree, measured: jax.Array, stats: Tree, sums: jax.Array
    ) -> tuple[State, jax.Array]:
        """The optimizer's step with the gradients that have met."""
        updates, opt = self.optimizer.update(grads, state.opt, state.params, value=mean(*sums[:, self.names.index(LOSS)]))
        memory = jax.tree.map(functools.partial(jnp.where, skipped(opt)), state.exchange, memory)
        params = optax.apply_updates(state.params, gather_updates(self.exchange, updates))
        return State(state.step + 1, params, opt, stats, state.rngs, state.key, memory), measurements(sums, measured, events)

    def _gradients(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[Tree, Tree, jax.Array, Tree, jax.Array]:
        """Mean gradients over the batch, the exchange's next memory and measurements, new stats, packed metrics."""
        exchange = self.exchange
        if not exchange.reduction.manual:
            return self._together(state, batch, weights, events)
        data = self.mesh_axes.data_axes
        cut = lambda spec: pspec(keep_axes(spec, data))  # the manual region's specs name the data axes only
        whole = PartitionSpec()
        params = self._map(lambda place, p: cut(place.spec), state.params)
        pushed = self._map(lambda place, p: cut(exchange.reduction.mean_spec(place)), state.params)
        memory = jax.tree.map(cut, exchange.specs(state.exchange), is_leaf=lambda x: isinstance(x, tuple))
        rows = map_paths(lambda path, x: cut(batch_spec(self.resolved, path)) if self.split else whole, batch)
        specs = dataclasses.replace(jax.tree.map(lambda _: whole, state), params=params, opt=None, exchange=memory)

        return shard_map(
            self._together,
            mesh=self.mesh_axes.mesh,
            in_specs=(specs, rows, PartitionSpec(data) if self.split else whole, whole),
            out_specs=(pushed, memory, whole, whole, whole),
            axis_names=data,
        )(dataclasses.replace(state, opt=None), batch, weights, events)

    def _together(self, state: State, batch: Tree, weights: jax.Array, events: Tree) -> tuple[Tree, Tree, jax.Array, Tree, jax.Array]:
        """What `_gradients` returns, of one worker among the others."""
        data = self.mesh_axes.data_axes if self.exchange.reduction.manual else ()
        grads, stats, sums = self._worker(state, batch, weights, events, axes=data)
        packed = pack(sums, self.names)
        with jax.named_scope("metrics"):
            packed = collectives.all_reduce(packed, data) if self.split else packed
        with jax.named_scope("stats"):
            stats = agree(stats, data, self._present(events).any() if "present" in events else None, state.stats) if data else stats
        return *self.exchange.reduce_gradients(grads, state.exchange, state.step), stats, packed

    def _worker(self, state: State, batch: Tree, weights: jax.Array, events: Tree, *, axes: tuple[str, ...]) -> tuple[Tree, Tree, Sums]:
        """Gradients of the mean loss over these rows (whole, not yet averaged over workers), new stats, metric sums."""
        first = collectives.worker_index(axes) * self.simulated

        def one(stats: Tree, rows: tuple, index: jax.Array) -> tuple[tuple, Tree]:
            found, after = self._simulated(state.params, state, stats, rows, first + index, axes)
            if "present" not in events:
                return found, after
            kept = functools.partial(jnp.where, events["present"][first + index])  # never by multiplying: 0 * NaN
            return jax.tree.map(lambda x: kept(x, jnp.zeros_like(x)), found), jax.tree.map(kept, after, stats)

        if self.simulated == 1:
            (grads, sums), stats = one(state.stats, (batch, weights), jnp.int32(0))
        else:
            parts = apart((batch, weights), self.simulated)
            (grads, sums), stats = accumulate(one, state.stats, parts, self.simulated, unroll=self.unroll)
        # what was differentiated is a sum over rows: divided by the workers' mean count it becomes, averaged over workers, the mean
        with jax.named_scope("metrics"):
            count = nonzero(collectives.all_reduce(sums[LOSS][1], axes) / (collectives.worker_count(axes) if axes else 1))
        return jax.tree.map(lambda g: (g / count).astype(g.dtype), grads), stats, sums

    def _present(self, events: Tree) -> jax.Array:
        """bool[m], which of this position's workers take part in the step."""
        return lax.dynamic_slice_in_dim(
            events["present"], collectives.worker_index(self.mesh_axes.data_axes) * self.simulated, self.simulated
        )

    def _each(self, state: State, held: Tree, batch: Tree, weights: jax.Array, events: Tree) -> tuple[Tree, Tree, jax.Array]:
        """This position's workers, each at weights of its own: mean gradients over its rows, the next stats, and metrics.

        Args:
          held: parameters [m, ...]. Who is absent counts for nothing, and has gradients of zero.

        Returns:
          Gradients as `held`, stats equal everywhere, and float32[m, 2, names].
        """
        data = self.mesh_axes.data_axes
        first = collectives.worker_index(data) * self.simulated

        def one(stats: Tree, inputs: tuple) -> tuple[Tree, tuple]:
            number, here, pieces, rows = inputs
            (grads, sums), after = self._simulated(pieces, state, stats, rows, first + number, data)
            kept = lambda x: jnp.where(here, x, jnp.zeros_like(x))  # never by multiplying: 0 * NaN
            count = nonzero(sums[LOSS][1])
            grads = jax.tree.map(lambda g: kept((g / count).astype(g.dtype)), grads)
            return jax.tree.map(lambda new, old: jnp.where(here, new, old), after, stats), (grads, kept(pack(sums, self.names)))

        inputs = (jnp.arange(self.simulated), self._present(events), held, apart((batch, weights), self.simulated))
        stats, (grads, sums) = lax.scan(one, state.stats, inputs, unroll=self.simulated if self.unroll else 1)
        with jax.named_scope("stats"):
            return grads, agree(stats, data, self._present(events).any(), state.stats), sums

    def _losses(self, sums: jax.Array) -> jax.Array:
        """Every worker's mean loss, of their metrics [workers, 2, names]."""
        return mean(*jnp.moveaxis(sums[:, :, self.names.index(LOSS)], 1, 0))

    def _simulated(
        self, pieces: Tree, state: State, stats: Tree, rows: tuple, number: Any, axes: tuple[str, ...]
    ) -> tuple[tuple[Tree, Sums], Tree]:
        """One worker: gradients of the loss summed over its rows, at the weights that `pieces` are of, and metric sums; new stats.

        `number` is the worker's, from 0 over all of them.
        """
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl="threefry2x32"), state.step)
        localize = self._localizer(number, rows[1].shape[0] // self.microbatches, axes)
        loss = functools.partial(self._loss, state, localize, () if self.held else axes)  # its batch statistics are its own, too
        remat = self.resolved.layout.remat
        if self.parallel.manual_backward:
            by_hand = functools.partial(self._by_hand, state, number, axes, pieces)
            return self._accumulated(lambda stats, rows, index: (by_hand(rows, jax.random.fold_in(key, index)), stats), stats, rows)
        if remat.saves != "everything" and not remat.modules:
            loss = jax.checkpoint(loss, policy=remat_policy(remat.saves))

        def one(stats: Tree, rows: tuple, index: jax.Array) -> tuple[tuple, Tree]:
            call = functools.partial(loss, stats=stats, rows=rows, key=jax.random.fold_in(key, index))
            value, backward, (sums, stats) = jax.vjp(call, self._pull(pieces), has_aux=True)
            # whole weights are not kept from the forward to the backward pass: they are gathered again, once the loss is
            # known. What the compiler sees depends on the loss, so it cannot merge the two gathers into one.
            if not (self.held or self.exchange.reduction.keeps_params):
                later, value = lax.optimization_barrier((pieces, value))
                backward.args_res[0] = self._again(backward.args_res[0], later)
            (grads,) = backward(jnp.ones_like(value))
            return (cast_like(grads, pieces), sums), stats

        return self._accumulated(one, stats, rows)

    def _accumulated(self, one: Callable, stats: Tree, rows: tuple) -> tuple[Any, Tree]:
        """`one(stats, rows, index)` over this worker's microbatches."""
        if self.microbatches == 1:
            return one(stats, rows, jnp.int32(0))
        return accumulate(one, stats, microbatches(rows, self.microbatches), self.microbatches, unroll=self.unroll)

    def _localizer(self, number: Any, rows: int, axes: tuple[str, ...]) -> Callable[[Any], Any]:
        """From a key for all workers to that of worker `number`, which holds so many rows."""
        workers = (collectives.worker_count(axes) if axes else 1) * self.simulated
        return (lambda k: worker_key(k, number, rows=rows, workers=workers)) if workers > 1 and self.split else lambda k: k

    def _by_hand(self, state: State, number: Any, axes: tuple, pieces: Tree, rows: tuple, key: Any) -> tuple[Tree, Sums]:
        """Gradients and metric sums of a pipeline whose stages go back as soon as they can."""
        parallel, stacks = self.parallel, self.model.stacks()
        parts, held = split_microbatches(parallel, rows), (state.stats, state.rngs, jax.random.key_data(key), jnp.asarray(number))
        count = parts.count * math.prod(map(parallel.axis_size, parts.row_axes))

        def loss(params: Tree, rows: tuple, part: Any, parallel: ParallelConfig, held: tuple) -> tuple[jax.Array, Sums]:
            stats, rngs, data, number = held
            localize = self._localizer(number, parts.rows * parts.count, axes)
            own = lambda k: part_key(localize(k), part, count, rows=parts.rows)
            within = dataclasses.replace(state, stats=stats, rngs=rngs)
            key = jax.random.wrap_key_data(data, impl="threefry2x32")
            value, (sums, _) = self._loss(within, own, (), params, stats=stats, rows=rows, key=key, parallel=parallel)
            return value, sums

        cut = self.resolved.layout.stage_axis is not None
        at_stage = map_paths(lambda path, _: cut and path in stacks, pieces)
        own = None if cut else functools.partial(layers_per_stage, parallel)
        grads, sums = run_1f1b(parallel, loss, self._pull(pieces), rows, held, at_stage, parts, layers_per_stage=own)
        return cast_like(grads, pieces), sums

    def _loss(
        self,
        state: State,
        localize: Callable,
        axes: tuple,
        params: Tree,
        *,
        stats: Tree,
        rows: tuple,
        key: Any,
        parallel: ParallelConfig | None = None,
    ) -> tuple[jax.Array, tuple]:
        """The sum of the loss over these rows; all metric sums and new stats beside it."""
        batch, weights = rows
        layout = self.resolved.layout
        model_key, loss_key = jax.random.split(key)
        activations = Activations(self.resolved, self.mesh_axes.mesh)
        call = Call(
            self.training, model_key, localize, axes, layout.remat.modules, remat_policy(layout.remat.saves), self.dtype, activations
        )
        with parallel_scope(parallel or self.parallel):
            bound = self.model.bind(Variables(params, stats, state.rngs), call)
            value, extra = self.objective(bound, batch, localize(loss_key))
        check_worker(value, weights.shape[0], rowwise=self.rowwise)
        sums = self.objective.sums(value, extra, weights)
        return sums[LOSS][0], (sums, cast_like(self.model.stats_of(bound), state.stats))

    def _pull(self, params: Tree) -> Tree:
        """Whole weights in the dtype of the computation; cast before they travel, so what travels is what is used."""
        params = cast(params, self.dtype)
        if self.held:
            return params
        if self.exchange.reduction.keeps_params:
            return jax.tree.unflatten(jax.tree.structure(params), list(gather_packed_params(self.exchange, flatten(params)).values()))
        return self._map(lambda place, piece: gather_params(self.exchange, place, piece), params)

    def _again(self, kept: Any, pieces: Tree) -> list[Any]:
        """The weights that the backward pass needs, leaf by leaf: those that were gathered, gathered anew."""
        leaves = jax.tree.leaves(kept, is_leaf=lambda x: not isinstance(x, tuple | list | dict))

        def again(place: Placement, leaf: Any, piece: jax.Array) -> Any:
            # jax marks a weight that the backward pass does not need by something that is no array
            wanted = needs_gather(place, self.mesh_axes) and hasattr(leaf, "shape")
            return gather_params(self.exchange, place, cast(piece, self.dtype)) if wanted else leaf

        places = [self.resolved.placements[path] for path in flatten(pieces)]
        return [again(*found) for found in zip(places, leaves, jax.tree.leaves(pieces), strict=True)]

    def _map(self, function: Callable, *trees: Tree) -> Tree:
        """`function(placement, leaf, ...)` over trees of parameters."""
        return map_paths(lambda path, *leaves: function(self.resolved.placements[path], *leaves), *trees)


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """A sum over its count; of nothing that counts it is zero: a gradient of 0 / 0 would make every weight NaN."""
    return total / nonzero(count)


def nonzero(count: jax.Array) -> jax.Array:
    """A count to divide by: infinity in place of zero. It is chosen here and not in what divides, which then rounds as by any number."""
    return lax.optimization_barrier(jnp.where(count == 0, jnp.inf, count))


def measurements(sums: jax.Array, measured: jax.Array, events: Tree) -> jax.Array:
    """All metrics of a step: the loss's and the user's, the exchange's, and what the parameter server's clock has counted."""
    return jnp.concatenate([sums, measured, *([events["counted"]] if "counted" in events else [])], axis=1)


def skipped(opt: Any) -> Any:
    """Whether the optimizer, by its new state, made no use of the gradients: then nothing of what was exchanged was applied.

    Known are `optax.apply_if_finite` and `optax.MultiSteps` with a `should_skip_update_fn`.
    """
    fine = [~flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "should_skip")]
    fine += [flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "last_finite")]
    return ~jnp.stack(fine).all() if fine else False


def remat_policy(save: str) -> Callable[..., bool] | None:
    """The `jax.checkpoint` policy of a layout's `[remat] save`; None keeps nothing."""
    return {"everything": jax.checkpoint_policies.everything_saveable, "dots": jax.checkpoint_policies.dots_saveable}.get(save)


def batch_spec(resolved: Resolved, path: str) -> Spec:
    """The spec of one batch leaf: its rule's, or the batch's own."""
    claimed = owners(resolved.layout.batch.rules, path)
    return resolved.layout.batch.rules[claimed[0]].spec if claimed else resolved.layout.batch.spec


def agree(stats: Tree, axes: tuple[str, ...], here: Any = None, before: Tree = None) -> Tree:
    """Stats that every worker holds alike: the mean of floats, the largest of counters.

    `here`: whether this position took part, where that may be otherwise; the mean is over those that did, and if none did `before` stays.
    """
    if not jax.tree.leaves(stats):
        return stats
    if here is None:
        workers = collectives.worker_count(axes)
        mean = lambda x, old: collectives.all_reduce(x, axes) / workers
    else:
        count = collectives.all_reduce(here.astype(jnp.float32), axes)
        sum_of = lambda x: collectives.all_reduce(jnp.where(here, x, jnp.zeros_like(x)), axes)
        mean = lambda x, old: jnp.where(count > 0, sum_of(x) / jnp.maximum(count, 1).astype(x.dtype), old)
    leaf = lambda x, old: mean(x, old) if jnp.issubdtype(x.dtype, jnp.floating) else collectives.maximum(x, axes)
    return jax.tree.map(leaf, stats, stats if before is None else before)


def many(
    step: Callable[..., tuple[State, jax.Array]],
    state: State,
    data: Tree,
    rows: jax.Array,
    weights: jax.Array,
    events: Tree,
    *,
    unroll: bool,
) -> tuple[State, jax.Array]:
    """Several steps in one call on a data set that lies on the devices: `rows` int32[steps, batch] picks each batch."""

    def body(state: State, inputs: tuple) -> tuple[State, jax.Array]:
        picked, weights, events = inputs
        return step(state, jax.tree.map(lambda x: x[picked], data), weights, events)

    return lax.scan(body, state, (rows, weights, events), unroll=rows.shape[0] if unroll else 1)
