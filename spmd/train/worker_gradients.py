"""The forward and backward pass of a worker: from parameters and rows to gradients and metric sums.

`WorkerGradients` reads from top to bottom: the workers of a position, one worker's microbatches,
one microbatch, its loss.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base.rng import part_key, worker_key
from spmd.base.tree import Tree, flatten, map_paths
from spmd.models.base import Call, Model, Variables
from spmd.nn.gathered_blocks import GatheredBlocks
from spmd.nn.inner_program import Saved
from spmd.nn.layer_stack import layers_per_stage, split_microbatches
from spmd.nn.parallel_context import UNSHARDED, ParallelConfig, current, parallel_scope
from spmd.nn.pipeline_1f1b import run_1f1b
from spmd.nn.written_loops import rewritten
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.layer_gather import LayerGather
from spmd.sync.parameter_sync import gather_again, gather_packed_params, gather_params
from spmd.train.accumulate import accumulate, microbatches, split_workers
from spmd.train.activations import Activations
from spmd.train.batch_rows.loss import full_batch_loss, shared_arrays
from spmd.train.batch_rows.reading import Reading
from spmd.train.batch_rows.row_arrays import Place
from spmd.train.batch_statistics import add_stats, no_stats
from spmd.train.metrics import Sums, pack
from spmd.train.objective import LOSS, Objective, check_worker
from spmd.train.precision import cast, cast_like
from spmd.train.remat import forward_policy, module_policies
from spmd.train.skipped_updates import LOSS_SCALE
from spmd.train.state import State
from spmd.wire import collectives
from spmd.wire.transfer import RESIDUAL, Memory


class Carried(NamedTuple):
    """The values that one microbatch hands to the next.

    Attributes:
      stats: the total of the statistics of the parts so far, of which each begins at those from
        before the step.
      layers: of the gradients in `GradientSync.layerwise`, which are reduced in the backward pass,
        by path.
    """

    stats: Tree
    layers: Memory


@dataclasses.dataclass(frozen=True)
class WorkerGradients:
    """Everything about the forward and backward pass that is known before it is compiled."""

    model: Model
    objective: Objective
    names: tuple[str, ...]  # of the loss and the metrics, the loss first
    sync: GradientSync
    # whether parameters are this worker's shards; False: full, and layers average no batch
    # statistics
    gathers: bool = True
    microbatches: int = 1
    workers_per_position: int = 1  # simulated workers at each position along the data axes
    unroll: bool = False
    dtype: Any = None
    rowwise: bool = False  # the loss gives one value per row
    # False: every worker computes all rows (a last batch that the workers do not divide)
    split: bool = True
    parallel: ParallelConfig = UNSHARDED  # how the forward pass is sharded
    # of layers, by path and what they have as their dot_general
    products: Callable[[str, Any], Any] = Call.products
    training: bool = True  # False: the model in evaluation mode
    reading: Reading | None = None  # of a loss that is not a mean over rows; None: it is one
    # whether backward passes of the user's are given the gradient of the mean loss, not of its sum
    # over rows
    scaled: bool = False

    def position_gradients(
        self,
        params: Tree,
        state: State,
        batch: Tree,
        weights: jax.Array,
        events: Tree,
        axes: tuple[str, ...],
    ) -> tuple[Tree, Carried, jax.Array]:
        """Return gradients of one position, the next stats, and metrics float32[2, names], which
        are those of the batch.

        The gradients are full and not yet averaged: their mean over workers is the gradient of the
        mean loss over the batch. Those of `GradientSync.layerwise` are reduced already.
        """
        first = collectives.worker_index(axes) * self.workers_per_position
        scale = events.get(LOSS_SCALE)
        common = self._common_arrays(params, state, batch, axes)
        # XLA:CPU (jaxlib 0.10) ends the process where collectives of a loop run beside these
        if common is not None:
            params, common = lax.optimization_barrier((params, common))

        def worker_grads(carried: Carried, rows: tuple, index: jax.Array) -> tuple[tuple, Carried]:
            grads, after = self._of_worker(
                params, state, carried, rows, first + index, axes, scale, common
            )
            if "present" not in events:
                return grads, after
            # never by multiplying: 0 * NaN
            where_present = functools.partial(jnp.where, events["present"][first + index])
            grads = jax.tree.map(lambda x: where_present(x, jnp.zeros_like(x)), grads)
            return grads, jax.tree.map(where_present, after, carried)

        layers = self.sync.layer_carries(state.exchange, sums=self._sums_layers)
        stats = no_stats(state.stats)
        # gradients that layers reduce are those of the scaled loss, and so are their residuals
        # meanwhile
        if scale is not None:
            layers = jax.tree.map(lambda x: x * scale, layers)
        carried = Carried(stats, layers)
        count = self.workers_per_position
        if count == 1:
            (grads, sums), carried = worker_grads(carried, (batch, weights), jnp.int32(0))
        else:
            rows = split_workers((batch, weights), count)
            (grads, sums), carried = accumulate(
                worker_grads, carried, rows, count, unroll=self.unroll
            )
        # a sum over rows was differentiated: divided by the workers' mean count, its average over
        # workers is the mean
        with jax.named_scope("metrics"):
            rows_counted = collectives.all_reduce(sums[LOSS][1], axes)
            divisor = nonzero(rows_counted / collectives.worker_count(axes))
            metrics = pack(sums, self.names)
            if self.split:
                metrics = collectives.all_reduce(metrics, axes)
        if scale is not None:
            carried = carried._replace(layers=jax.tree.map(lambda x: x / scale, carried.layers))
            divisor = divisor * scale
        grads = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), grads)
        return grads, carried, metrics

    def worker_gradients(
        self,
        params: Tree,
        state: State,
        batch: Tree,
        weights: jax.Array,
        events: Tree,
        axes: tuple[str, ...],
    ) -> tuple[Tree, Carried, jax.Array]:
        """Return mean gradients of each simulated worker of one position over its rows, [m, ...],
        at parameters [m, ...] of its own; the next stats; and metrics float32[m, 2, names]. An
        absent worker has gradients of zero and counts for nothing.
        """
        count = self.workers_per_position
        first = collectives.worker_index(axes) * count
        common = self._common_arrays(jax.tree.map(lambda x: x[0], params), state, batch, axes)

        def worker_grads(carried: Carried, inputs: tuple) -> tuple[Carried, tuple]:
            index, present, params, rows = inputs
            (grads, sums), after = self._of_worker(
                params, state, carried, rows, first + index, axes, common=common
            )

            def where_present(x: jax.Array) -> jax.Array:
                return jnp.where(present, x, jnp.zeros_like(x))  # never by multiplying: 0 * NaN

            rows_counted = nonzero(sums[LOSS][1])
            grads = jax.tree.map(lambda g: where_present((g / rows_counted).astype(g.dtype)), grads)
            after = jax.tree.map(lambda new, old: jnp.where(present, new, old), after, carried)
            return after, (grads, where_present(pack(sums, self.names)))

        inputs = (
            jnp.arange(count),
            present_workers(events, axes, count),
            params,
            split_workers((batch, weights), count),
        )
        carried = Carried(no_stats(state.stats), {})
        unroll_count = 1
        if self.unroll:
            unroll_count = count
        carried, (grads, metrics) = lax.scan(worker_grads, carried, inputs, unroll=unroll_count)
        return grads, carried, metrics

    def _of_worker(
        self,
        params: Tree,
        state: State,
        carried: Carried,
        rows: tuple,
        worker: Any,
        axes: tuple[str, ...],
        scale: Any = None,
        common: list[jax.Array] | None = None,
    ) -> tuple[tuple[Tree, Sums], Carried]:
        """Return gradients of one worker, by its number over all workers, of the loss summed over
        its rows, times `scale`, and metric sums; and what the next one begins with.
        """
        step_key = self._step_key(state)
        localize = self._localizer(worker, rows[1].shape[0] // self.microbatches, axes)
        policy = forward_policy(self.sync.resolved.layout.remat)
        sync_axes: tuple[str, ...] = ()
        if self.gathers:
            sync_axes = axes

        def microbatch_grads(
            carried: Carried, rows: tuple, index: jax.Array, only_sums: bool = False
        ) -> tuple[tuple, Carried]:
            key = jax.random.fold_in(step_key, index)
            if self.parallel.manual_backward:
                return self._of_pipeline(params, state, rows, key, worker, axes, scale), carried
            loss = functools.partial(
                self._loss,
                stats=state.stats,
                rngs=state.rngs,
                localize=localize,
                sync_axes=sync_axes,
                only_sums=only_sums,
                scale=scale,
                place=self._place(worker, index, axes, common),
            )
            if policy is not None:
                loss = jax.checkpoint(loss, policy=policy)
            return self._of_microbatch(loss, params, state.frozen, carried, rows, key)

        count = self.microbatches
        if count == 1:
            return microbatch_grads(carried, rows, jnp.int32(0))
        parts = microbatches(rows, count)
        if not self._sums_layers:
            return accumulate(microbatch_grads, carried, parts, count, unroll=self.unroll)
        # the last one, apart from the loop, reduces what all have added up while it computes
        earlier = jax.tree.map(lambda x: x[:-1], parts)
        last = jax.tree.map(lambda x: x[-1], parts)
        add_up = functools.partial(microbatch_grads, only_sums=True)
        total, carried = accumulate(add_up, carried, earlier, count - 1, unroll=self.unroll)
        summed, carried = microbatch_grads(carried, last, jnp.int32(count - 1))
        return jax.tree.map(jnp.add, total, summed), carried

    def _place(
        self, worker: Any, index: Any, axes: tuple[str, ...], common: list[jax.Array] | None
    ) -> Place | None:
        """Return where the rows of a worker's microbatch are in the batch, for a loss that is not a
        mean over rows; None for other losses, and where it sees all rows at once.
        """
        if self.reading is None:
            return None
        if self.split:
            return Place(axes, self._workers(axes), worker, self.microbatches, index, common)
        if self.microbatches > 1:
            return Place((), 1, worker, self.microbatches, index, common)
        return None

    def _step_key(self, state: State) -> jax.Array:
        key = jax.random.wrap_key_data(state.key, impl="threefry2x32")
        # By the number of the step, so that a resumed run draws what an undisturbed one draws.
        return jax.random.fold_in(key, state.step)

    def _common_arrays(
        self, params: Tree, state: State, batch: Tree, axes: tuple[str, ...]
    ) -> list[jax.Array] | None:
        """Return the arrays that all rows of the batch share, if the rows of one position are seen
        in parts.
        """
        if self.reading is None or self.workers_per_position * self.microbatches == 1:
            return None
        gather = self._layer_gather()
        layers = self.sync.layer_carries(state.exchange, sums=self._sums_layers)
        full = self._gather(params)
        frozen = gather_params(self.sync, self._cast(state.frozen))
        variables = Variables((full, layers), state.stats, state.rngs, frozen)
        keys = jax.random.split(jax.random.fold_in(self._step_key(state), 0))
        if not self.split:
            axes = ()
        parallel = dataclasses.replace(self.parallel, gather_layer=gather, residuals=layers)
        with parallel_scope(parallel):
            place = Place(axes, collectives.worker_count(axes), collectives.worker_index(axes))
            on_rows = self._on_rows(gather, place.key_of_rows(batch))
            return shared_arrays(on_rows, variables, batch, keys, place, self.reading)

    def _layer_gather(self, *, only_sums: bool = False) -> LayerGather | None:
        if not self.sync.layerwise:
            return None
        remat = module_policies(self.sync.resolved.layout.remat)
        return LayerGather(self.sync, dtype=self.dtype, remat=remat, only_sums=only_sums)

    def _workers(self, axes: tuple[str, ...]) -> int:
        return collectives.worker_count(axes) * self.workers_per_position

    @property
    def _sums_layers(self) -> bool:
        return self.sync.sums_layers and self.microbatches > 1

    def _of_microbatch(
        self, loss: Callable, params: Tree, frozen: Tree, carried: Carried, rows: tuple, key: Any
    ) -> tuple[tuple[Tree, Sums], Carried]:
        """Gradients with respect to the full parameters, and metric sums; what follows."""
        full = self._gather(params), gather_params(self.sync, self._cast(frozen))
        loss = functools.partial(loss, frozen=full[1], rows=rows, key=key)
        # `jax.vjp` returns what it keeps for the backward pass as the leaves of a tree, among which
        # gathered parameters are found; `jax.grad` shows none of it.
        value, backward, (sums, stats) = jax.vjp(loss, full[0], carried.layers, has_aux=True)
        if self.gathers and not self.sync.reduction.keeps_params:
            # Gathered parameters are not kept from the forward to the backward pass. They are
            # gathered again from values that depend on the loss, so the compiler cannot merge the
            # two gathers into one.
            sharded, value = lax.optimization_barrier(((params, frozen), value))
            saved = Saved.of(backward, full)
            again = []
            for gathered, shards, used in zip(full, sharded, saved.used(full), strict=True):
                again.append(gather_again(self.sync, gathered, self._cast(shards), used))
            backward = functools.partial(saved.gradients, tuple(again))
        # Reduced in the backward pass, the gradient of a residual is the next one. There it is that
        # of a mean over rows, as elsewhere.
        has_residuals = any(RESIDUAL in carry for carry in carried.layers.values())
        scale: Any = 1
        if has_residuals:
            scale = rows[1].shape[0] * self.microbatches
        if self.scaled:
            scale = nonzero(sums[LOSS][1])
        grads, layers = backward(jnp.full_like(value, 1 / scale))
        if has_residuals or self.scaled:
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        return (cast_like(grads, params), sums), Carried(add_stats(carried.stats, stats), layers)

    def _gather(self, params: Tree) -> Tree:
        """Full parameters in the dtype of the computation; cast before they are sent, so they are
        sent in that dtype.
        """
        params = self._cast(params)
        if not self.gathers:
            return params
        if self.sync.reduction.keeps_params:
            rows = gather_packed_params(self.sync, flatten(params))
            return jax.tree.unflatten(jax.tree.structure(params), list(rows.values()))
        return gather_params(self.sync, params)

    def _cast(self, params: Tree) -> Tree:
        """Cast parameters to the dtype of the computation; those of `GradientSync.layerwise` are
        cast where they are gathered.
        """

        def cast_param(path: str, leaf: jax.Array) -> jax.Array:
            if path in self.sync.layerwise or self.sync.of_quantized(path):
                return leaf
            return cast(leaf, self.dtype)

        return map_paths(cast_param, params)

    def _of_pipeline(
        self,
        params: Tree,
        state: State,
        rows: tuple,
        key: Any,
        worker: Any,
        axes: tuple[str, ...],
        scale: Any,
    ) -> tuple[Tree, Sums]:
        """`_of_microbatch` of a 1F1B pipeline, which splits the rows into microbatches of its own
        and keeps no stats.
        """
        parts = split_microbatches(self.parallel, rows)
        count = parts.count * math.prod(map(self.parallel.axis_size, parts.row_axes))

        def loss(
            params: Tree, rows: tuple, part: Any, parallel: ParallelConfig, consts: Tree
        ) -> tuple[jax.Array, Sums]:
            frozen, stats, rngs, key_data, worker, scale = consts
            worker_localize = self._localizer(worker, parts.rows * parts.count, axes)
            value, (sums, _) = self._loss(
                params,
                {},
                frozen=frozen,
                stats=stats,
                rngs=rngs,
                rows=rows,
                key=jax.random.wrap_key_data(key_data, impl="threefry2x32"),
                localize=lambda k: part_key(worker_localize(k), part, count, rows=parts.rows),
                sync_axes=(),
                parallel=parallel,
                scale=scale,
            )
            return value, sums

        sharded = self.sync.resolved.layout.stage_axis is not None
        stacks = self.model.stacks()

        def of_stage(tree: Tree) -> Tree:
            return map_paths(lambda path, _: sharded and path in stacks, tree)

        stage_layers = None
        if not sharded:
            stage_layers = functools.partial(layers_per_stage, self.parallel)
        frozen = self._cast(state.frozen)
        full = self._gather(params)
        consts = (
            gather_params(self.sync, frozen),
            state.stats,
            state.rngs,
            jax.random.key_data(key),
            jnp.asarray(worker),
            scale,
        )
        grads, sums = run_1f1b(
            self.parallel,
            loss,
            full,
            rows,
            consts,
            of_stage(params),
            (of_stage(frozen), False, False, False, False, False),
            parts,
            layers_per_stage=stage_layers,
        )
        return cast_like(grads, params), sums

    def _loss(
        self,
        params: Tree,
        layers: Memory,
        *,
        frozen: Tree,
        stats: Tree,
        rngs: Tree,
        rows: tuple,
        key: Any,
        localize: Callable[[Any], Any],
        sync_axes: tuple[str, ...],
        parallel: ParallelConfig | None = None,
        only_sums: bool = False,
        scale: Any = None,
        place: Place | None = None,
    ) -> tuple[jax.Array, tuple[Sums, Tree]]:
        """The loss summed over these rows, times `scale`; beside it all metric sums and the next
        stats.
        """
        batch, weights = rows
        keys = jax.random.split(key)
        gather = self._layer_gather(only_sums=only_sums)
        parallel = parallel or self.parallel
        parallel = dataclasses.replace(parallel, gather_layer=gather, residuals=layers)
        variables = Variables((params, layers), stats, rngs, frozen)
        with parallel_scope(parallel):
            if place is None or self.reading is None:
                on_rows = self._on_rows(gather, localize, sync_axes)
                value, extra, after, tapped = on_rows(variables, batch, keys)
            else:
                on_rows = self._on_rows(gather, place.key_of_rows(batch))
                value, extra, after, tapped = full_batch_loss(
                    on_rows, variables, batch, keys, place, self.reading
                )
        if parallel.tap is not None:
            parallel.tap.recorded = tapped
        check_worker(value, weights.shape[0], rowwise=self.rowwise)
        sums = self.objective.sums(value, extra, weights)
        total, _ = sums[LOSS]
        if scale is not None:
            total = total * scale
        return total, (sums, cast_like(after, stats))

    def _on_rows(
        self,
        gather: Any,
        localize: Callable[[Any], Any] = lambda key: key,
        sync_axes: tuple[str, ...] = (),
    ) -> Callable[[Variables, Tree, jax.Array], tuple[Any, ...]]:
        """Return a function of `Variables`, whose params are (params, layers), of rows, and of two
        keys. It returns the loss, metrics, the next statistics, and what a pipeline's tap has seen.
        """
        remat = module_policies(self.sync.resolved.layout.remat)
        activations = Activations(self.sync.resolved, self.sync.mesh_axes.mesh)

        def forward(variables: Variables, batch: Tree, keys: jax.Array) -> tuple[Any, ...]:
            params, layers = variables.params
            variables = dataclasses.replace(variables, params=params)
            blocks = None
            if gather is not None and self.sync.blocks:
                of_blocks = dataclasses.replace(gather, stacked=False)
                blocks = GatheredBlocks(of_blocks, chain(*self.sync.blocks), layers)
            call = Call(
                self.training,
                keys[0],
                localize,
                sync_axes,
                remat,
                self.dtype,
                activations,
                self.products,
                blocks,
            )
            bound = self.model.bind(variables, call)
            value, extra = self.objective(bound, batch, localize(keys[1]))
            tap = current().tap
            return value, extra, self.model.get_stats(bound), tap and tap.recorded

        return rewritten(forward)

    def _localizer(self, worker: Any, rows: int, axes: tuple[str, ...]) -> Callable[[Any], Any]:
        """From a dropout key that is the same on all workers to that of `worker`, which has this
        many rows.
        """
        workers = self._workers(axes)
        if workers == 1 or not self.split:
            return lambda key: key
        return functools.partial(worker_key, worker=worker, rows=rows, workers=workers)


def present_workers(events: Tree, axes: tuple[str, ...], count: int) -> jax.Array:
    """bool[m], which of the `count` workers of this position take part in the step."""
    first = collectives.worker_index(axes) * count
    return lax.dynamic_slice_in_dim(events["present"], first, count)


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and zero where the count is zero: a gradient of 0 / 0 would make every
    parameter NaN.
    """
    return total / nonzero(count)


def nonzero(count: jax.Array) -> jax.Array:
    """A count to divide by, with infinity in place of zero.

    The choice is made here and not in the quotient, so the division rounds as it does by any
    number.
    """
    return lax.optimization_barrier(jnp.where(count == 0, jnp.inf, count))
