"""The trainer: a model sharded on a mesh, with one call per step, for users who write their own
loop.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from spmd.base.log_info import log_info
from spmd.base.tree import Tree, abstract
from spmd.data.batches import (
    Batch,
    HostBatch,
    Placer,
    as_arrays,
    check_leaves,
    check_matches,
    with_rows,
)
from spmd.data.prefetch import prefetch
from spmd.data.sources import Source, as_source, bind_rows
from spmd.data.work_assignment import Position, check_participation, epoch_batches
from spmd.distributed import uneven_batches
from spmd.errors import (
    DataError,
    OptionError,
    check_integer,
)
from spmd.layout.resolve import Resolved
from spmd.layout.schema import Layout
from spmd.layout.summary import summary
from spmd.mesh import make_mesh, outside_of_mesh
from spmd.nn.schedule import Schedule
from spmd.program_cache.activate import active_folder, use_folder
from spmd.program_cache.folder import choose_folder
from spmd.run.checkpoint import Checkpoint
from spmd.run.checkpoint_reader import CheckpointReader
from spmd.run.evaluations import Evaluations, make_placer
from spmd.run.loop_checkpoints import (
    LoopCheckpoints,
    as_loop_checkpoint,
    open_newest,
    position_of_loop,
    position_to_save,
)
from spmd.run.reshard_checkpoint import packing_meta
from spmd.run.restore_state import open_checkpoint, restore_only, restore_state
from spmd.run.saved_settings import describe_run
from spmd.run.script_numbers import ScriptNumbers, find_script_numbers
from spmd.train.compiled_step import TrainingProgram, prepare_program
from spmd.train.evaluation import EvaluationProgram
from spmd.train.metrics import IN_FLIGHT, Metrics
from spmd.train.model_setup import PlacedModel, TrainConfig
from spmd.train.program_checks import check_collectives_known
from spmd.train.program_notes import trainer_notes
from spmd.train.state import State, StepNumbers, check_alive, check_placed
from spmd.wire.comm_log import CommLog
from spmd.wire.server.statistics import ServerStatistics


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """The number of an update that `Trainer.steps` has made, its metrics, and the state after it;
    and for `Trainer.save`, the position in the data, and the data.
    """

    step: int
    metrics: Mapping[str, float]
    state: State
    position: Position = dataclasses.field(default_factory=Position, repr=False)
    source: Source | None = dataclasses.field(default=None, repr=False)


class Trainer:
    """A model, a loss and an optimizer, sharded on a mesh and ready to step.

    `fit` uses one; use it directly to write your own loop. The arguments are those of `fit`. With
    `compile_cache=None`, the folder of the newest `fit` stays in use, else it is the user's; a
    trainer in several processes has none then, since only `fit` makes sure that all of them see the
    same one.

    Args:
      model, loss, optimizer, mesh, layout, metrics, precision, accumulate, seed: as in `fit`.
      compile_cache: as in `fit`, except as above.

    Example:
      >>> import optax, spmd
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"]
      ... )
      >>> trainer = Trainer(model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1))
      >>> state = trainer.init()
      >>> batch = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}
      >>> state, metrics = trainer.step(state, batch)
      >>> metrics["loss"]
      1.0
    """

    @outside_of_mesh(default=True)
    def __init__(
        self,
        model: Any,
        *,
        loss: Callable[..., Any],
        optimizer: Any,
        mesh: Any = None,
        layout: str | Path | Layout = "data_parallel",
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        precision: str = "float32",
        accumulate: int = 1,
        seed: int = 0,
        compile_cache: str | Path | bool | None = None,
    ):
        folder = choose_folder(compile_cache, None)
        if compile_cache is not None or (active_folder() is None and jax.process_count() == 1):
            use_folder(folder)
        config = TrainConfig(model, loss, optimizer, metrics, precision, accumulate, seed)
        self.layout = Layout.load(layout)
        if mesh is None:
            mesh = dict(self.layout.mesh) or None
        self.mesh: Mesh = make_mesh(mesh)
        self._placed = PlacedModel(config, self.mesh, self.layout)
        self._program: TrainingProgram | None = None
        self._placer: Placer | None = None
        self._evaluations = Evaluations()
        self._in_flight: collections.deque[Metrics] = collections.deque()
        self._checkpoints = LoopCheckpoints()
        self._numbers = StepNumbers()

    @property
    def placed(self) -> PlacedModel:
        """The model on the mesh: its variables, their shardings, and the loss."""
        return self._placed

    @property
    def resolved(self) -> Resolved:
        """The placement of every parameter, and the rule that decided it."""
        return self._placed.resolved

    def summary(self) -> str:
        """The layout applied to this model, as a table."""
        return summary(self.resolved)

    @property
    def wire(self) -> CommLog:
        """The collectives of a step: every one of the manual step, with axes, payload and bytes;
        prints as a table.

        Raises:
          OptionError: no batch was seen yet, or XLA places the collectives.
        """
        if self._program is None:
            raise OptionError(
                "trainer.wire before the first batch: what is sent depends on it.",
                fix="trainer.prepare(batch) first.",
            )
        check_collectives_known(self._program.loss)
        return self._program.wire

    def notes(self) -> list[str]:
        """Notes on what is replicated, repeated work, codec state, and moments that could not be
        sharded.
        """
        program_notes = self._program.notes if self._program else []
        return trainer_notes(self._placed, program_notes, self.schedules)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedule of each pipelined stack, by path; known from the first batch on.
        `spmd.viz.schedule` draws them.
        """
        return self._program.schedules if self._program else {}

    def simulate(self, steps: int) -> ServerStatistics:
        """Simulate the parameter server's clock for `steps` steps: time, waiting, staleness,
        dropped gradients; prints as a table.

        Raises:
          OptionError: there is no parameter server, `steps` is not a number, or the trace of times
            is too short.
        """
        if self._placed.events is None:
            why = f"trainer.simulate: {self.layout.source} has no parameter server, so no clock."
            raise OptionError(why, fix='[gradients] reduction = "parameter_server".')
        return ServerStatistics.of(self._placed.events, steps)

    @outside_of_mesh()
    def init(self, batch: Tree = None) -> State:
        """A new state, each array made in place on the mesh. A linen model needs a `batch` (arrays
        or their shapes).

        Raises:
          LayoutError: the layout does not fit the model on this mesh.
          ModelError: the model cannot be traced without data.
        """
        if batch is not None:
            self._placed.spec.learn(abstract(as_arrays(batch, "the batch")))
        return self._placed.states.init()

    @property
    def abstract_state(self) -> State:
        """Shape, dtype and sharding of the state; nothing is allocated."""
        return self._placed.abstract_state

    @outside_of_mesh()
    def restore(
        self,
        checkpoint: str | Path | Checkpoint,
        *,
        step: int | str = "latest",
        only: str | None = None,
    ) -> State:
        """The state of a checkpoint of `fit` or `save`, laid out for this trainer's mesh and
        layout. Nothing in the folder is changed.

        Args:
          checkpoint: the run's folder.
          step: "latest", "best" (for a run with `Checkpoint(best=...)`), or a number.
          only: "params": parameters and batch statistics alone, in a new state at step 0 of this
            trainer's optimizer, whatever the run's optimizer was. `fit(trainer.rebuild(state),
            ...)` trains from there. Or a pattern of their paths, such as "encoder/**": all others,
            such as another head, are those of `trainer.init()`, and a line names them.

        Returns:
          The state, on this trainer's mesh.

        Raises:
          CheckpointError: there is no such checkpoint, or it does not fit this model and optimizer
            (a table says where).

        Example:
          state = trainer.restore("runs/digits", step="best")
          trainer.evaluate(state, test_data, batch_size=128)
        """
        reader = open_checkpoint(checkpoint, only)
        number = reader.step(step)
        if only is not None:
            return restore_only(self._placed, reader, number, only)
        state, warnings = self.load(reader, number)
        for line in warnings:
            log_info(f"restored from step {state.step}: {line}")
        self._checkpoints.restored(reader.folder, number, state, reader.steps()[-1])
        return state

    @outside_of_mesh()
    def save(
        self,
        state: "State | StepInfo",
        checkpoint: str | Path | Checkpoint,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save a checkpoint of your own loop, which `restore` reads, on any mesh and layout, and
        wait until it is complete on disk.

        Every process of several calls it.

        Args:
          state: the newest of this trainer, which is not consumed; or what `steps` yields: then the
            position in the data is saved too, for `steps(resume=...)` and `fit(resume=True)`. A
            state alone does not say where in its data a loop is: its `step` must be enough to find
            out.
          checkpoint: a folder, or a `Checkpoint`, of which `keep`, `best` and `mode` are used.
          metrics: values of an evaluation of this state, for `Checkpoint(best=...)`.

        Raises:
          CheckpointError: the folder holds another run, that this trainer did not restore, or a
            step that is not before this one; it ranks checkpoints, and this save does not; or the
            checkpoint cannot be written.
          OptionError: the state has other arrays, or other shardings, than this trainer's; metrics
            that are no numbers, that nothing ranks, or that `Checkpoint(best=...)` lacks; or an
            option that only `fit` has.

        Example:
          for info in trainer.steps(data, batch_size=128, epochs=3, resume="runs/loop"):
              if info.step % 500 == 0:
                  trainer.save(info, "runs/loop")
        """
        source = None
        position = Position()
        if isinstance(state, StepInfo):
            source = state.source
            position = state.position
            state = state.state
        config = as_loop_checkpoint(checkpoint)
        check_alive(state)
        check_placed(state, self.abstract_state)
        meta = self.about(source, self._program)
        if source is not None:
            drop = self.layout.parameter_server.drop_remainder
            meta |= position_to_save(source, position, drop=drop)
        self._checkpoints.save(config, state, int(state.step), meta, metrics or {})

    def about(
        self, source: Source | None, program: TrainingProgram | None = None
    ) -> dict[str, Any]:
        """The description of a run in its checkpoints, besides the arrays and the position; without
        `data` if there is no source.
        """
        return describe_run(self._placed, self.layout, source, program, self.script_numbers)

    @functools.cached_property
    def script_numbers(self) -> ScriptNumbers:
        """The numbers that the script gave the optimizer and that the state keeps."""
        return find_script_numbers(
            self._placed.optimizer.init,
            self._placed.stored_variables.params,
            self._placed.optimized,
        )

    @outside_of_mesh()
    def load(self, reader: CheckpointReader, step: int) -> tuple[State, list[str]]:
        """The state of a step; and in words the numbers of the optimizer that the script has
        changed, and what of the optimizer's wrappers and of the codecs' memory did not fit.
        """
        return restore_state(self._placed, self.layout, self.script_numbers, reader, step)

    @property
    def packing(self) -> dict[str, Any] | None:
        """The form in which a state keeps parameters, for a checkpoint; None where it is that of
        the model.
        """
        return packing_meta(self._placed.packing)

    @outside_of_mesh()
    def rebuild(self, state: State) -> Any:
        """The user's kind of model, holding the arrays of `state`.

        Args:
          state: which is not consumed; a later step from it deletes arrays that the model holds.

        Returns:
          An nnx module, a bound linen module, or a callable.
        """
        check_alive(state)
        return self._placed.model.rebuild(state.variables)

    @outside_of_mesh()
    def prepare(self, sample: Tree) -> tuple[TrainingProgram, Placer]:
        """The compiled functions for full batches shaped like `sample`; checked now, compiled at
        the first call.
        """
        if self._program is None or self._placer is None:
            program = prepare_program(self._placed, sample)
            self._program = program
            self._placed = program.placed
            workers = self._placed.exchange.worker_count
            self._placer = make_placer(
                self._placed, program.rows, pad=program.loss.pads, workers=workers
            )
        return self._program, self._placer

    @outside_of_mesh()
    def place(self, batch: Tree) -> Batch:
        """A host batch on the mesh. Buffers are copied, so they may be reused at once.

        Args:
          batch: arrays [rows, ...], of each process its own rows.

        Returns:
          The batch for `step`, padded and with a weight for each row.

        Raises:
          DataError: it does not fit the first batch, or has more rows.
        """
        batch = as_arrays(batch, "the batch")
        rows = check_leaves(batch, "the batch")
        global_rows = rows * jax.process_count()  # each process passes its part
        program, placer = self.prepare(with_rows(abstract(batch), global_rows))
        if global_rows > program.rows:
            why = f"a batch of {global_rows} rows, after a first one of {program.rows}."
            raise DataError(why, fix="the first batch must be the largest.")
        check_matches(batch, program.sample, "this batch")
        return placer(HostBatch(batch, rows))

    @outside_of_mesh()
    def step(self, state: State, batch: Tree | Batch) -> tuple[State, Metrics]:
        """One update. `state` is consumed; use the one returned.

        Args:
          state: from `init`, `restore` or a step; it is consumed.
          batch: arrays [rows, ...] on the host, or a `Batch` from `place`. The first one fixes the
            full batch's size; a smaller one is padded and masked (or run at its own size, when the
            loss cannot be masked).

        Returns:
          The next state, and metrics that wait for the device only when they are read. At most 2
          steps are in flight.
        """
        if not isinstance(batch, Batch):
            batch = self.place(batch)
        check_alive(state)
        program, placer = self.prepare(batch.leaves)
        # where all steps are alike, their numbers do not matter
        number = self._numbers.find(state) if self._counts else 0
        check_participation(program.clock, number, batch)
        with placer.allow_row_transfers():
            events = placer.replicate_all(program.events(number, batch.rows, batch.has_rows))
            state, packed = program.step(
                state, batch.leaves, batch.weights, events, split=batch.split
            )
        if self._counts:
            self._numbers.record(state, number + 1)
        metrics = Metrics(program.names, packed, program.static_metrics.at(number))
        self._in_flight.append(metrics)
        if len(self._in_flight) >= IN_FLIGHT:
            self._in_flight.popleft().wait()
        return state, metrics

    @property
    def _counts(self) -> bool:
        """True if steps differ by their number."""
        return self.layout.gradients.start_step > 0 or self._placed.events is not None

    def steps(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        state: State | None = None,
        shuffle: bool | None = None,
        resume: str | Path | Checkpoint | None = None,
    ) -> Iterator[StepInfo]:
        """Train over `data`, yielding after every update; the loop's body is yours.

        Args:
          data: as for `fit`.
          batch_size: examples per update over all workers, for data that are not batched yet.
          epochs: passes over the data.
          state: to train from; it is consumed. None: a new one.
          shuffle: as for `fit`.
          resume: a folder: begin with the newest checkpoint in it, at its position in the data, if
            there is one yet.

        Returns:
          An iterator of the number of the step, its metrics, which wait for the device when they
          are read, and the state. `save` saves it.

        Raises:
          CheckpointError: the checkpoint to resume from does not fit, is of other data, or has no
            position in the data.

        Example:
          for info in trainer.steps(data, batch_size=128, epochs=3):
              if info.step % 100 == 0:
                  print(info.step, info.metrics["loss"])
        """
        seed = self._placed.config.seed
        source = as_source(data, batch_size=batch_size, shuffle=shuffle, seed=seed)
        check_integer(epochs, "epochs", 0)
        program, placer = bind_rows(source, self.prepare(source.sample()))
        at = Position()
        if resume is not None:
            if state is not None:
                why = "steps: state and resume both say where to begin."
                raise OptionError(why, fix="one of them.")
            checkpoints = open_newest(resume)
            if checkpoints is not None:
                state = self.restore(resume)
                meta = self.about(source, self._program)
                at = position_of_loop(checkpoints, int(state.step), meta)
        if state is None:
            state = self.init()
        check_alive(state)
        count = int(state.step)
        ahead = 2 if source.threaded else 0
        while (epoch := at.epoch) < epochs:
            rounds = epoch_batches(source, program.clock, at, count, pad=program.loss.pads)
            with prefetch(rounds, placer, ahead) as batches:
                if source.threaded:
                    what = f"epoch {epoch + 1}"
                    batches = uneven_batches.require_equal_counts(batches, what)
                for batch in batches:
                    state, metrics = self.step(state, batch)
                    count += 1
                    at.advance(batch.has_rows)
                    at.reader = batch.position
                    yield StepInfo(count, metrics, state, dataclasses.replace(at), source)
            at = Position(epoch + 1)

    @outside_of_mesh()
    def averaged(self, state: State) -> State:
        """The state with the average of the weights in place of the weights: that which
        `spmd.optimizers.average_weights` keeps, or the one of `optax.contrib.schedule_free`
        (`schedule_free_eval_params`), whose optimizers are to be evaluated with it; or the slow
        weights of `optax.lookahead`.

        It can be evaluated, exported, rebuilt as a model, and passed to `predict`. All but the
        weights is that of `state`, in the same arrays, which a step from either of the two
        consumes.

        Raises:
          OptimizerError: the optimizer keeps no average, or not that of all weights.

        Example:
          trainer.evaluate(trainer.averaged(state), test_data, batch_size=128)
        """
        check_alive(state)
        return self._placed.states.averaged(state)

    @outside_of_mesh()
    def evaluate(
        self, state: State, data: Any, *, batch_size: int | None = None
    ) -> dict[str, float]:
        """Return the loss and metrics on all rows of `data`, in evaluation mode; the last batch may
        be short.

        The value of a loss or metric that is neither a mean over rows nor a function of sums over
        rows is the mean over batches, and a warning names it.

        What is not finite is returned as it is, with a warning that names the metric and the first
        batch at fault.

        Args:
          state: whose parameters are used; it is not consumed.
          data: as for `fit`.
          batch_size: rows of a batch, for data that are not batched yet; None: as many as a step
            has.

        Returns:
          "loss" and each metric, by name.

        Raises:
          DataError: the loss or a metric fails on such batches, and they differ from those that are
            trained on.
        """
        return self.measure(state, lambda batch: False, data=data, batch_size=batch_size) or {}

    @outside_of_mesh()
    def measure(
        self,
        state: State,
        stops: Callable[[int], bool],
        data: Any,
        *,
        batch_size: int | None = None,
        retries: int = 0,
        draws: dict[str, Callable[[], Any]] | None = None,
    ) -> dict[str, float] | None:
        """Return what `evaluate` does; None where `stops`, asked before each batch by its number
        from 1, has ended it. A batch that cannot be read is tried again `retries` times. `draws` is
        filled with functions that draw metrics, by name.
        """
        return self._evaluations.measure(
            self._placed,
            self._trained_evaluation,
            state,
            stops,
            data,
            batch_size=batch_size,
            retries=retries,
            draws=draws,
        )

    @outside_of_mesh()
    def measure_averaged(
        self, state: State, stops: Callable[[int], bool], data: Any, **options: Any
    ) -> dict[str, float] | None:
        """Measure with the average of the weights; arguments and result are those of `measure`."""
        return self.measure(self.averaged(state), stops, data, **options)

    @outside_of_mesh()
    def check_evaluation(self, data: Any) -> tuple[str, ...]:
        """Names of what evaluation measures on arrays or records, which is traced: what does not
        fit is raised before training.
        """
        return self._evaluations.names(self._placed, self._trained_evaluation, data)

    @property
    def _trained_evaluation(self) -> EvaluationProgram | None:
        """The program that evaluates batches of training; None before the first."""
        return self._program.evaluation if self._program else None

    @outside_of_mesh()
    def predict(self, state: State, inputs: Tree) -> Tree:
        """The model's outputs for every row of `inputs`, in evaluation mode, as numpy arrays [rows,
        ...] on the host.

        Args:
          state: whose parameters are used; it is not consumed.
          inputs: what the model is called with: an array [rows, ...] or a tree of them.

        Returns:
          A tree of arrays [rows, ...], as the model returns it.

        Raises:
          OptionError: the batch size is not known: there was no step and no evaluation yet, and no
            `prepare`.
          DataError: the model fails on inputs of these shapes.
        """
        return self._evaluations.predict(self._placed, self._trained_evaluation, state, inputs)
