"""The compiled functions with which a placed model trains on batches of one shape, and the step of
such a program as text, as a log of collectives, or exported.

Nothing is compiled before the first step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd.base.specs import Spec, pspec
from spmd.base.tree import Tree, abstract, map_paths
from spmd.data.batches import check_leaves
from spmd.errors import DataError, LossError
from spmd.layout.gradients import Gradients
from spmd.nn.schedule import Schedule
from spmd.train.accumulate import choose_gathering
from spmd.train.batch_rows.loss import read_training_loss
from spmd.train.batch_rows.reading import BY_COMPILER, FullBatchError
from spmd.train.compiled_functions import CompiledFunctions, FunctionKey, export_step
from spmd.train.evaluation import EvaluationProgram
from spmd.train.histograms import count_tree
from spmd.train.loss_trace import trace_loss
from spmd.train.losses import check_masks, check_targets
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LEAKS
from spmd.train.own_derivatives import nonlinear_backward
from spmd.train.precision import compute_dtype
from spmd.train.program_checks import (
    BATCH_CHECKS,
    LOSS_CHECKS,
    OUTPUT_CHECKS,
    STEP_CHECKS,
    step_metrics,
)
from spmd.train.program_notes import loss_notes, reading_notes
from spmd.train.state import State
from spmd.train.static_metrics import StaticMetrics
from spmd.train.step import Step, UpdateRule, scan_steps, step_and_gradients, train_step
from spmd.train.update_rules import Asynchronous, LocalSGD, Synchronous
from spmd.train.worker_gradients import WorkerGradients
from spmd.wire.comm_log import CommLog, read_collectives
from spmd.wire.server.events import Events


class TrainingProgram:
    """The compiled functions with which a placed model trains on batches of one shape.

    Attributes:
      loss: the traced loss.
      sync: how gradients are reduced, and which parameters are gathered layer by layer.
      reading: whether workers that see rows in parts get the loss of the full batch.
      own_backward: a function of the loss with a backward pass that is not linear; "" without.
      names: of the metrics of a step.
      notes: lines on what was decided.
      functions: the compiled functions; those of evaluation too, where batches are alike.
      donate_argnums: the arguments of a step that are donated.
    """

    def __init__(self, placed: PlacedModel, sample: Tree):
        self.placed = placed
        self.sample = sample
        self.loss = trace_loss(placed, sample)
        for check in LOSS_CHECKS:
            check(self.loss)
        self.sync, gather_notes = choose_gathering(self.loss)
        notes = loss_notes(self.loss, gather_notes)
        self.own_backward = nonlinear_backward(self.loss.jaxpr.jaxpr)
        self.reading = read_training_loss(self.loss, self.sync, self.own_backward)
        self.notes = [*notes, *reading_notes(self.reading, self.loss)]
        for check in OUTPUT_CHECKS:
            check(self.loss)
        self.names = (*self.loss.names, *step_metrics(placed))
        self.donate_argnums = (0,)
        if self.loss.unrolls:
            # XLA:CPU copies donated kernels of convolutions at the start of a step: see
            # `TracedLoss.unrolls`.
            self.donate_argnums = ()
        self.functions = CompiledFunctions(placed, self.rows, layerwise=bool(self.sync.layerwise))
        self.functions.builders |= {
            "step": self._jit_step,
            "watched_step": self._jit_watched_step,
            "scan_steps": self._jit_scan_steps,
            "parameters": self._jit_counts,
        }
        self._checked_first_batch = False

    @property
    def rows(self) -> int:
        """The number of rows of a full batch."""
        return self.loss.rows

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The pipeline schedule of a step on a full batch, by stack."""
        return self.loss.schedules

    @property
    def accumulated(self) -> str | None:
        """The gradients of weights gathered layer by layer that microbatches add up, "local" or
        "reduced"; None if there are none.
        """
        trained = self.sync.layerwise & self.sync.resolved.placements.keys()
        if self.placed.config.accumulate == 1 or not trained:
            return None
        if self.sync.sums_layers:
            return "local"
        return "reduced"

    @functools.cached_property
    def evaluation(self) -> EvaluationProgram:
        """The program that evaluates on such batches."""
        return EvaluationProgram(self.loss, self.sync, self.functions)

    @functools.cached_property
    def static_metrics(self) -> StaticMetrics:
        """The metrics of each step that are known without measuring."""
        return StaticMetrics(self.placed, lambda: self.wire)

    # steps ----------------------------------------------------------------------------------------

    @LEAKS
    def step(
        self, state: State, batch: Tree, weights: jax.Array, events: Tree, *, split: bool = True
    ) -> tuple[State, jax.Array]:
        """Make one update; `state` is donated (except with convolutions on a CPU). Metrics are
        float32[2, names], sums over counts.
        """
        self._check_batch(state, batch, weights, events, split=split)
        key = FunctionKey("step", weights.shape[0], split)
        return self.functions.dispatch(key, state, batch, weights, events)

    @LEAKS
    def watched_step(
        self, state: State, batch: Tree, weights: jax.Array, events: Tree, *, split: bool = True
    ) -> tuple[State, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
        """Make one update, as `step` does by another program, and return counts of the gradients
        (`count_tree`) too, replicated over all devices.
        """
        self._check_batch(state, batch, weights, events, split=split)
        key = FunctionKey("watched_step", weights.shape[0], split)
        return self.functions.dispatch(key, state, batch, weights, events)

    @LEAKS
    def scan_steps(
        self, state: State, data: Tree, rows: jax.Array, weights: jax.Array, events: Tree
    ) -> tuple[State, jax.Array]:
        """Make `rows.shape[0]` updates in one call on resident data; metrics are float32[steps, 2,
        names].
        """
        self._check_first_batch(state, data, rows)
        key = FunctionKey("scan_steps", weights.shape[1], True)
        return self.functions.dispatch(key, state, data, rows, weights, events)

    def count_parameters(self, state: State) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Return counts of the parameters that are trained (`count_tree`), replicated over all
        devices.
        """
        return self.functions.dispatch(FunctionKey("parameters"), state.params)

    def make_step(self, rows: int, split: bool) -> Step:
        """Return the step for a batch of `rows` rows; see `WorkerGradients.split`."""
        placed = self.placed
        exchange = self.sync
        rule: type[UpdateRule] = Synchronous
        if exchange.asynchronous:
            rule = Asynchronous
        elif exchange.local:
            rule = LocalSGD
        worker_rows = rows
        workers_per_position = 1
        if split:
            worker_rows = rows // exchange.worker_count
            workers_per_position = exchange.worker_count // placed.resolved.workers
        reading = None
        if not self.reading.mean:
            reading = self.reading
        counts = range(1, placed.config.accumulate + 1)
        worker = WorkerGradients(
            placed.model,
            self.loss.objective,
            self.loss.names,
            exchange,
            gathers=not rule.per_worker,
            microbatches=max(count for count in counts if worker_rows % count == 0),
            workers_per_position=workers_per_position,
            unroll=self.loss.unrolls,
            dtype=compute_dtype(placed.config.precision),
            products=placed.products,
            rowwise=self.loss.rowwise,
            split=split,
            parallel=self.loss.parallel,
            reading=reading,
            scaled=bool(self.own_backward),
        )
        return Step(worker, rule(exchange, placed.optimizer))

    def _check_batch(
        self, state: State, batch: Tree, weights: jax.Array, events: Tree, *, split: bool
    ) -> None:
        if split:
            self._check_first_batch(state, batch)
        if "present" in events and not split:
            raise DataError(
                f"a batch of {weights.shape[0]} rows, which {self.placed.exchange.worker_count} "
                "workers do not divide, "
                "while not all count.",
                fix="a loss with one value per example and no batch statistics, which can leave "
                "padding out; or drop the batch.",
            )

    def _check_first_batch(self, state: State, batch: Tree, rows: jax.Array | None = None) -> None:
        """Check the targets and masks of the first batch: of `batch`, or of those `rows`,
        int32[steps, rows], of it.

        Raises:
          DataError: targets that are no class, or masks that are not 0 and 1.
        """
        if self._checked_first_batch:
            return
        self._checked_first_batch = True
        objective = self.loss.objective
        # The checks move a few numbers to the host, also where the user's guard refuses transfers.
        with self.placed.compiling(), jax.transfer_guard("allow"):
            if rows is not None:
                batch = jax.jit(lambda data, rows: jax.tree.map(lambda x: x[rows[0]], data))(
                    batch, rows
                )
            check_masks((objective.loss, *objective.metrics.values()), batch)
            for shape in objective.outputs:
                check_targets(objective.loss, shape[-1], batch)

    # their jitted functions -----------------------------------------------------------------------

    def _jit_step(self, key: FunctionKey) -> Callable:
        step = functools.partial(train_step, self.make_step(key.rows, key.split))
        return self._jit_update(step)

    def _jit_watched_step(self, key: FunctionKey) -> Callable:
        step = self.make_step(key.rows, key.split)

        def watched_step(*arguments: Any) -> tuple:
            state, metrics, gradients = step_and_gradients(step, *arguments)
            return state, metrics, self._counts(gradients)

        return self._jit_update(watched_step, self._replicated)

    def _jit_scan_steps(self, key: FunctionKey) -> Callable:
        step = functools.partial(train_step, self.make_step(key.rows, key.split))

        def constrained_step(
            state: State, batch: Tree, weights: jax.Array, events: Tree
        ) -> tuple[State, jax.Array]:
            state, metrics = step(state, self._constrain_batch(batch), weights, events)
            # inside a loop the state keeps its sharding from step to step
            return jax.lax.with_sharding_constraint(state, self.placed.shardings), metrics

        steps = functools.partial(scan_steps, constrained_step, unroll=self.loss.unrolls)
        return self._jit_update(steps)

    def _jit_counts(self, key: FunctionKey) -> Callable:
        del key
        return self.functions.jit(self._counts, out_shardings=self._replicated)

    def _jit_update(self, update: Callable, *others: NamedSharding) -> Callable:
        """Jit a function of a state that returns the next one, metrics, and others."""
        return self.functions.jit(
            update,
            donate_argnums=self.donate_argnums,
            # Without these, XLA could choose other shardings for the next state: it could not take
            # the donated memory, and the next step would be compiled again.
            out_shardings=(self.placed.shardings, self._replicated, *others),
        )

    def _counts(self, params: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Return counts of parameters, or of their gradients, as the state keeps them; by the
        model's paths.
        """
        packing = self.placed.packing
        if packing is not None:
            params = packing.unpack(params)
        return count_tree(params, self.placed.given.stacks())

    def _constrain_batch(self, batch: Tree) -> Tree:
        return map_paths(
            lambda path, x: jax.lax.with_sharding_constraint(
                x, self._sharding(self.placed.resolved.batch_spec(path))
            ),
            batch,
        )

    def _sharding(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.placed.mesh, pspec(spec))

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.placed.mesh, PartitionSpec())

    # the step on a full batch ---------------------------------------------------------------------

    @property
    def arguments(self) -> tuple[State, Tree, jax.ShapeDtypeStruct, Tree]:
        """The arguments of a step on a full batch: state, batch, weights and events, as shapes with
        shardings.
        """
        resolved = self.placed.resolved

        def with_sharding(path: str, x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=self._sharding(resolved.batch_spec(path))
            )

        weights = jax.ShapeDtypeStruct(
            (self.rows,), jnp.float32, sharding=self._sharding((resolved.data_axes,))
        )
        return (
            self.placed.abstract_state,
            map_paths(with_sharding, self.sample),
            weights,
            self.abstract_events,
        )

    @property
    def traced(self) -> Any:
        """A step on a full batch as JAX has traced it; `step` then compiles that trace."""
        return self.functions.jitted(self._full_step).trace(*self.arguments)

    @property
    def _full_step(self) -> FunctionKey:
        return FunctionKey("step", self.rows, True)

    @property
    def step_jaxpr(self) -> Any:
        """The jaxpr of a step on a full batch."""
        return self.traced.jaxpr.jaxpr

    @functools.cached_property
    def wire(self) -> CommLog:
        """Every collective of a step on a full batch, read from `step_jaxpr`."""
        return read_collectives(
            self.step_jaxpr,
            self.placed.mesh.shape,
            self.placed.resolved.layout.gradients.start_step,
        )

    def compile(self) -> Any:
        """A step on a full batch, compiled; on several devices, or one that is not a CPU, `step`
        then runs this program.
        """
        return self.functions.compile_by(
            self._full_step, self.arguments, lambda: self.traced.lower().compile()
        )

    def compiled_text(self) -> str:
        """A step on a full batch as XLA has compiled it; "" if none was compiled yet."""
        if not self.functions.is_ready(self._full_step):
            return ""
        return self.traced.lower().compile().as_text()

    def text(self) -> str:
        """A step on a full batch as StableHLO; `step` then compiles this lowering."""
        return self.traced.lower().as_text()

    def export(self, platform: str) -> tuple[jax.export.Exported, tuple[int, ...]]:
        """A step on a full batch for a platform, as `export_step` returns it, and which of its flat
        arguments are donated.
        """
        out_shardings = (self.placed.shardings, self._replicated)
        step = functools.partial(train_step, self.make_step(self.rows, True))
        exported = export_step(step, self.arguments, out_shardings, platform)
        donated = 0
        if self.donate_argnums:
            # the state is the first argument
            donated = len(jax.tree.leaves(self.arguments[0]))
        return exported, tuple(range(donated))

    # the parameter server's clock -----------------------------------------------------------------

    @property
    def clock(self) -> Events | None:
        """The parameter server's simulated clock; None without one."""
        return self.placed.events

    @property
    def drops_remainder(self) -> bool:
        """Return whether a short last batch is dropped."""
        return self.clock is not None and self.clock.declared.drop_remainder

    def events(self, step: int, rows: int, have: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the values of the parameter server's clock for a step on a batch of `rows` rows,
        which the compiled step gets as data.
        """
        clock, workers = self.placed.events, self.placed.exchange.worker_count
        if clock is None:
            return {}
        # the last workers have padding
        if have is None and rows < self.rows and self.loss.pads:
            have = np.arange(workers) * (self.rows // workers) < rows
        return clock.step_inputs(step, have)

    @property
    def abstract_events(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of `events`, replicated over all devices."""
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(()))
            for name, x in self.events(0, self.rows).items()
        }


def prepare_program(placed: PlacedModel, sample: Tree) -> TrainingProgram:
    """The program for full batches like `sample`, which is checked against the layout's axes.

    Its `placed` is another one where the loss is such that XLA must place the collectives.

    Raises:
      SpmdError: the layout does not fit the model, the batch does not fit the layout, or the loss
        fails on it.
    """
    sample = abstract(sample)
    check_leaves(sample, "the batch")
    placed.spec.learn(sample)
    for check_batch in BATCH_CHECKS:
        check_batch(placed, sample)
    try:
        program = TrainingProgram(placed, sample)
    except FullBatchError as error:
        program = _with_all_rows(placed, sample, error)
    for check_step in STEP_CHECKS:
        check_step(program.loss, lambda: program.step_jaxpr)
    return program


def _with_all_rows(placed: PlacedModel, sample: Tree, error: FullBatchError) -> TrainingProgram:
    """The program of a loss that workers cannot compute from their rows: XLA sees all of them, and
    places the collectives.

    Raises:
      LossError: the layout's gradients are not exact, or not in one piece, or the state would have
        other shardings.
    """
    layout = placed.resolved.layout
    if layout.gradients.reduction not in (
        "all_reduce",
        "reduce_scatter",
    ) or layout.gradients != Gradients(layout.gradients.reduction):
        raise LossError(error.message, fix=error.fix) from None
    other = placed.with_layout(
        placed.mesh, dataclasses.replace(layout, gradients=Gradients("compiler"))
    )
    other.compiling = placed.compiling
    if placed.shardings != other.shardings:
        raise LossError(error.message, fix=error.fix) from None
    program = TrainingProgram(other, sample)
    seen = (
        f"XLA sees all rows and places the collectives, as with {BY_COMPILER}, and trainer.wire "
        "cannot list them"
    )
    if not program.own_backward:
        seen += (
            "; a loss that returns (sum, count), or one value per row that depends on no other "
            "row, keeps those of the layout"
        )
    program.notes.append(f"note: {error.message.rstrip('.')}. So {seen}.")
    return program
