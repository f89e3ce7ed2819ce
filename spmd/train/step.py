"""One training step, compiled as one program: `train_step`. Its numbers are those of the drawing in
docs/architecture.md.

What the variants do differently is handed to it as an `UpdateRule`: `Synchronous`, `Asynchronous`
(a parameter server) or `LocalSGD`.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.tree import Tree, map_paths
from spmd.base.xla import shard_map
from spmd.sync.gradient_sync import GradientSync
from spmd.train.batch_statistics import mean_stats
from spmd.train.optimizer_metrics import pack_measured
from spmd.train.skipped_updates import loss_scale
from spmd.train.state import State
from spmd.train.worker_gradients import WorkerGradients, mean, present_workers

REPLICATED = PartitionSpec()


class Reduced(NamedTuple):
    """The result that the workers have computed together.

    Attributes:
      values: what the rule's update needs. `Synchronous`: mean gradients, sharded as the reduction
        leaves them. `Asynchronous`: gradients as they arrived at the servers. `LocalSGD`: the next
        parameters and optimizer state of every worker.
      comm_state: the next `State.exchange`.
      metrics: float32[2, names], sums and counts of loss and metrics over the batch; or [workers,
        2, names].
      measured: float32[2, names], what the communication measured.
    """

    values: Any
    comm_state: Tree
    metrics: Any
    measured: Any


@dataclasses.dataclass(frozen=True)
class UpdateRule(abc.ABC):
    """The way in which the gradients of workers become an update."""

    sync: GradientSync
    optimizer: optax.GradientTransformationExtraArgs
    # whether `reduce` takes the gradients of each simulated worker of a position, [m, ...], or one
    # mean
    per_worker: ClassVar[bool]

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which `params` and `reduce` run per worker; none: they see the global
        batch, and XLA partitions it.
        """
        return self.sync.mesh_axes.data_axes

    def begin(self, state: State, events: Tree) -> State:
        """On global arrays: the state as the workers see it."""
        del events
        return state

    @abc.abstractmethod
    def params(self, state: State) -> Tree:
        """Per worker: the parameters that its gradients are computed at; where they are shards,
        each microbatch gathers them.
        """

    @abc.abstractmethod
    def reduce(self, state: State, grads: Tree, metrics: jax.Array, events: Tree) -> Reduced:
        """Per worker: communicate."""

    @abc.abstractmethod
    def update(
        self, state: State, reduced: Reduced, loss: jax.Array, events: Tree
    ) -> tuple[Tree, Any, Tree]:
        """On global arrays: the next parameters, optimizer state and communication state.
        (`LocalSGD` ran optax in `reduce`.)
        """

    def skipped(self, opt: Any) -> Any:
        """Return whether the update was skipped, by the optimizer's new state; communication and
        batch statistics then stay as they were.
        """
        del opt
        return False

    @abc.abstractmethod
    def specs(self, state: State) -> tuple[dict[str, Any], Reduced]:
        """Specs of fields of `State` (None: workers do not see it), and of what `reduce` returns.

        Of the other fields `State.exchange` is sharded as `GradientSync.data_specs` says; the rest
        is replicated.
        """


@dataclasses.dataclass(frozen=True)
class Step:
    """The parts that a step is made of; all are known before it is compiled."""

    worker: WorkerGradients
    rule: UpdateRule
    over_workers: Callable[..., Any] | None = None  # None: `shard_over_workers`


def train_step(
    step: Step, state: State, batch: Tree, weights: jax.Array, events: Tree
) -> tuple[State, jax.Array]:
    """The next state, and the step's metrics as float32[2, names] (sums, counts), equal on every
    device.
    """
    state, metrics, _ = step_and_gradients(step, state, batch, weights, events)
    return state, metrics


def step_and_gradients(
    step: Step, state: State, batch: Tree, weights: jax.Array, events: Tree
) -> tuple[State, jax.Array, Tree]:
    """Return the results of `train_step`, and the gradients that the optimizer got, which only
    `Synchronous` has.

    Args:
      state: its `key` never changes. Random numbers follow from the key, the step, the microbatch
        and the worker.
      batch: leaves [rows, ...], dim 0 sharded over the workers; replicated where `worker.split` is
        False.
      weights: float32[rows], 1 for a row of data and 0 for padding, sharded likewise.
      events: what the parameter server's clock says about this step; empty without one.
    """
    state = step.rule.begin(state, events)
    events = events | scale_of_sum(step, state, weights)
    # 1 to 6, on every worker: gather parameters, compute gradients, reduce them
    reduced, stats = reduced_gradients(step, state, batch, weights, events)
    # 7 and 8: the optimizer and its update, on global arrays, so that a norm of the gradients is
    # that of all of them
    loss = mean_loss(reduced.metrics)
    params, opt, comm_state = step.rule.update(state, reduced, loss, events)
    skipped = step.rule.skipped(opt)
    # A Python False: where an optimizer never skips, the program has no selects.
    if skipped is not False:
        before = (state.exchange, state.stats)
        # Chosen by `where`, never by a branch, which only some devices might take.
        unless_skipped = functools.partial(jnp.where, skipped)
        comm_state, stats = jax.tree.map(unless_skipped, before, (comm_state, stats))
    metrics = jnp.concatenate([all_metrics(reduced, events), pack_measured(opt)], axis=1)
    next_state = dataclasses.replace(
        state, step=state.step + 1, params=params, opt=opt, stats=stats, exchange=comm_state
    )
    return next_state, metrics, reduced.values


def scale_of_sum(step: Step, state: State, weights: jax.Array) -> dict[str, jax.Array]:
    """Return the factor of the sum over the rows of all workers, an event, where the optimizer
    keeps a scale of the mean loss.
    """
    rows = weights.shape[0]
    if step.over_workers is not None:
        rows *= step.rule.sync.resolved.workers
    power_of_two = 2.0 ** (rows - 1).bit_length()  # which rounds nothing
    return {name: scale / power_of_two for name, scale in loss_scale(state.opt).items()}


def reduced_gradients(
    step: Step, state: State, batch: Tree, weights: jax.Array, events: Tree
) -> tuple[Reduced, Tree]:
    """The reduced gradients of a batch, and the next `State.stats`."""
    rule = step.rule
    worker = step.worker
    gradients = worker.position_gradients
    if rule.per_worker:
        gradients = worker.worker_gradients
    # a loss that joins rows has computed statistics of the full batch already
    stats_axes = rule.axes
    if worker.reading is not None:
        stats_axes = ()

    def on_worker(
        state: State, batch: Tree, weights: jax.Array, events: Tree
    ) -> tuple[Reduced, Tree]:
        """One position along the data axes, with its rows."""
        # this worker's shards, which each microbatch gathers; or a full copy of its own
        params = rule.params(state)
        # 1 to 3: gathered parameters, value and gradient of the loss on this worker's rows, summed
        # over microbatches
        grads, carried, metrics = gradients(params, state, batch, weights, events, rule.axes)
        with jax.named_scope("stats"):
            workers: Any = worker.workers_per_position
            if "present" in events:
                workers = present_workers(events, rule.axes, worker.workers_per_position).sum()
            parts = workers * worker.microbatches
            stats = mean_stats(carried.stats, state.stats, parts, stats_axes)
        # 4 to 6: communicated as the rule says: the mean over workers, gradients to the servers,
        # or, in some steps, parameter deltas; encoded, in buckets, with error feedback where the
        # layout says so
        comm_state = rule.sync.with_layer_residuals(state.exchange, carried.layers)
        state = dataclasses.replace(state, exchange=comm_state)
        return rule.reduce(state, grads, metrics, events), stats

    over_workers = step.over_workers or shard_over_workers
    return over_workers(step, on_worker, state, batch, weights, events)


def shard_over_workers(
    step: Step, function: Callable, state: State, batch: Tree, weights: jax.Array, events: Tree
) -> Any:
    """`function` at every position along the data axes, under `jax.shard_map`; on the global batch
    if the compiler chooses collectives.
    """
    axes = step.rule.axes
    if not axes:
        return function(state, batch, weights, events)
    sync = step.rule.sync
    fields, reduced_specs = step.rule.specs(state)
    unseen = {name: None for name, spec in fields.items() if spec is None}
    state = dataclasses.replace(state, **unseen)

    def frozen_spec(path: str, leaf: Any) -> PartitionSpec:
        del leaf
        return sync.data_spec(sync.resolved.frozen[path].spec)

    def batch_spec(path: str, leaf: Any) -> PartitionSpec:
        del leaf
        if not step.worker.split:
            return REPLICATED
        return sync.data_spec(sync.resolved.batch_spec(path))

    state_specs = dataclasses.replace(
        jax.tree.map(lambda _: REPLICATED, state),
        exchange=sync.data_specs(state.exchange),
        frozen=map_paths(frozen_spec, state.frozen),
        **fields,
    )
    row_spec = REPLICATED
    if step.worker.split:
        row_spec = PartitionSpec(axes)
    mapped = shard_map(
        function,
        mesh=sync.mesh_axes.mesh,
        in_specs=(state_specs, map_paths(batch_spec, batch), row_spec, REPLICATED),
        out_specs=(reduced_specs, REPLICATED),
        axis_names=axes,
    )
    return mapped(state, batch, weights, events)


def already_in_shard_map(step: Step, function: Callable, *arguments: Any) -> Any:
    """`function` of a worker, inside the `jax.shard_map` over all mesh axes of a sweep, where each
    trial is replicated over its devices.
    """
    del step
    return function(*arguments)


def mean_loss(metrics: jax.Array) -> jax.Array:
    """The mean loss, from metrics [..., 2, names], of which it is the first."""
    return mean(metrics[..., 0, 0], metrics[..., 1, 0])


def all_metrics(reduced: Reduced, events: Tree) -> jax.Array:
    """The loss and the user's metrics, the communication's, and the counts of the parameter
    server's clock, float32[2, names].
    """
    metrics = reduced.metrics
    if metrics.ndim == 3:
        metrics = metrics.sum(0)
    parts = [metrics, reduced.measured]
    if "counted" in events:
        parts.append(events["counted"])
    return jnp.concatenate(parts, axis=1)


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
    """Several steps in one call on a dataset that is on the devices: `rows` int32[steps, batch]
    picks each batch.
    """

    def body(state: State, inputs: tuple) -> tuple[State, jax.Array]:
        batch_rows, weights, events = inputs
        batch = jax.tree.map(lambda x: x[batch_rows], data)
        return step(state, batch, weights, events)

    unroll_count = 1
    if unroll:
        unroll_count = rows.shape[0]
    return lax.scan(body, state, (rows, weights, events), unroll=unroll_count)
