"""`fit`, which most users call: it checks its arguments, assembles a trainer, a data source and a
loop, and runs them.
"""

import contextlib
import dataclasses
import functools
import html
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.base.tracebacks import trims_tracebacks
from spmd.base.tree import Tree
from spmd.data.device_dataset import Resident, replicate_arrays
from spmd.data.sources import Source, as_source, bind_rows
from spmd.data.work_assignment import check_source
from spmd.distributed.initialize import join, shrink_factor
from spmd.distributed.launcher_protocol import TERMINATED, report_to_launcher
from spmd.distributed.replica_check import check_replicas
from spmd.distributed.shared_cache import agree_on_folder
from spmd.distributed.watchdog import current
from spmd.errors import first_line
from spmd.inference.exporter import ExportReport, export
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, outside_of_mesh
from spmd.planner.auto_layout import AUTO, auto_layout, check_auto
from spmd.planner.cluster import of_device
from spmd.planner.flop_shares import executed_flops
from spmd.planner.hlo import parse
from spmd.planner.memory import check_step_memory
from spmd.planner.model_flops import main_dtype, model_flops, trace_model
from spmd.planner.step_profile import StepProfile, check_target, profile_of
from spmd.planner.target import Target
from spmd.program_cache.counts import Compilations, compilations
from spmd.program_cache.folder import choose_folder
from spmd.resume import open_checkpoints_in_memory, open_store, start
from spmd.run.begin_outputs import begin_outputs
from spmd.run.callback_calls import as_callbacks
from spmd.run.checkpoint import Checkpoint, as_checkpoint
from spmd.run.config import LoopParts, RunConfig, check_numbers
from spmd.run.fit_checks import (
    check_metrics,
    check_processes_agree,
    check_watch,
    warn_of_unsynced_steps,
)
from spmd.run.goodput import COMPILING, Goodput
from spmd.run.history import History
from spmd.run.loggers import check_loggers
from spmd.run.loop import Loop
from spmd.run.progress import NoProgress, make_progress
from spmd.run.report_cycles import report_unfinished
from spmd.run.signals import SIGTERM_REASON, interruptible
from spmd.run.step_profiler import Profile, StepProfiler, as_profile
from spmd.run.time_account import TimeAccount
from spmd.run.watch import Watch, as_watch
from spmd.run.work import PeakSeconds, Work, tokens_per_row
from spmd.train.compiled_step import TrainingProgram
from spmd.train.state import State
from spmd.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of `fit`.

    Attributes:
      state: the last state, on the mesh, sharded by the layout.
      history: metrics of every step and evaluation of this call; `History` says how long runs are
        summarised.
      stop_reason: why the run stopped early, or None.
      trainer: the `Trainer` that ran it.
      goodput: seconds of the run by phase (`spmd.run.goodput.Goodput`); None for a trial of a
        sweep.
      compilations: how many programs this process compiled for the run, and how many it loaded from
        the compilation cache; None for a trial of a sweep.
      profile: of the steps of `fit(profile=...)`; None without it, and if the profiler failed.
      samples_per_second: examples in a second of training and of waiting for data, of all devices;
        compiling, evaluating, saving and profiling do not count. None for a trial of a sweep, and
        if nothing was left to train.

    Example:
      >>> import optax, spmd
      >>> import numpy as np
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": np.ones((4, 1), np.float32)}, lambda params, x: x @ params["w"]
      ... )
      >>> data = {"x": np.ones((32, 4), np.float32), "y": np.full((32, 1), 4.0, np.float32)}
      >>> result = fit(
      ...     model,
      ...     data,
      ...     loss=spmd.losses.mean_squared_error,
      ...     optimizer=optax.sgd(0.1),
      ...     batch_size=8,
      ...     steps=3,
      ... )
      >>> result.evaluate(data)["loss"], result.predict(data["x"]).shape
      (0.0, (32, 1))
    """

    state: State
    history: History
    stop_reason: str | None
    trainer: Trainer
    goodput: Goodput | None = None
    compilations: Compilations | None = None
    profile: StepProfile | None = None
    samples_per_second: float | None = None

    @functools.cached_property
    def model(self) -> Any:
        """The user's kind of model, holding the trained arrays: an nnx module, a bound linen
        module, or a callable.
        """
        return self.trainer.rebuild(self.state)

    def __repr__(self) -> str:
        ended = ""
        if self.stop_reason is not None:
            ended = f", stopped: {self.stop_reason}"
        return f"Result after step {int(self.state.step)}{ended}; {self.history!r}"

    def _repr_html_(self) -> str:
        """The last step, the curves and the profile, for a notebook."""
        summary, _, _ = repr(self).partition(";")
        shown = f"<p>{html.escape(summary)}</p>{self.history._repr_html_()}"
        if self.profile is not None:
            shown += self.profile._repr_html_()
        return shown

    @functools.cached_property
    @trims_tracebacks
    def averaged(self) -> "Result":
        """The same with the average of the weights, as `Trainer.averaged`, in place of the last
        weights.

        So `result.averaged.model` has them, `result.averaged.export(folder)` writes them, and so
        on. Its history is that of the run.

        Raises:
          OptimizerError: the optimizer keeps no average.
        """
        return dataclasses.replace(self, state=self.trainer.averaged(self.state))

    @trims_tracebacks
    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Return the loss and metrics on all rows of `data`, in evaluation mode; see
        `Trainer.evaluate`.

        Args:
          data: as for `fit`.
          batch_size: rows of a batch; None: as many as a step had.

        Returns:
          "loss" and each metric, by name.
        """
        return self.trainer.evaluate(self.state, data, batch_size=batch_size)

    @trims_tracebacks
    def predict(self, inputs: Tree) -> Tree:
        """The model's outputs for every row of `inputs`, as numpy arrays on the host.

        Args:
          inputs: what the model is called with: an array [rows, ...] or a tree of them.

        Returns:
          A tree of arrays [rows, ...], as the model returns it.
        """
        return self.trainer.predict(self.state, inputs)

    @trims_tracebacks
    def export(self, folder: str | Path, **options: Any) -> ExportReport:
        """Write the trained model to a folder that `spmd.load_exported` reads without the model's
        code.

        Args:
          folder: is created; a folder that is not empty is an error.
          options: as for `spmd.export`: `weights`, `platforms`, `batch`, `inputs`, `check`.

        Returns:
          How each array is stored; printed, a table.
        """
        return export(self.trainer, self.state, folder, **options)


@outside_of_mesh(default=True)
@interruptible()
def fit(
    model: Any,
    data: Any,
    *,
    loss: Callable[..., Any],
    optimizer: Any,
    mesh: Any = None,
    layout: str | Path | Layout = "data_parallel",
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    eval_data: Any = None,
    eval_every: int | None = None,
    eval_average: bool = False,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    resume: bool | str = False,
    callbacks: Sequence[Any] = (),
    loggers: Sequence[Any] = (),
    log_every: int = 10,
    progress: bool | str = "auto",
    precision: str = "float32",
    accumulate: int = 1,
    shuffle: bool | None = None,
    prefetch: int = 2,
    data_retries: int = 0,
    seed: int = 0,
    check_memory: bool = True,
    compile_cache: str | Path | bool | None = None,
    profile: str | Profile | None = None,
    watch: int | Watch | None = None,
) -> Result:
    """Train a Flax model over a mesh of devices, sharded by a layout file, as one compiled step.

    Args:
      model: a function without arguments that builds an `nnx.Module` (its arrays are then created
        directly on the mesh), an `nnx.Module`, a `linen.Module` or a `FunctionalModel`. A model
        that holds weights (an `nnx.Module`, `linen_module.bind(variables)`,
        `functional_model.bind(params)`, `result.model`) starts from a copy of them; only the arrays
        of a module of `spmd.pretrained.load` are used themselves.
      data: dict or tuple of arrays [examples, ...]; an iterable of batches, or a function that
        returns one; a grain data set; or `spmd.data.resident(arrays)`.
      loss: `loss(model, batch)` or `loss(model, batch, rng)`. It returns one value per example, a
        scalar (the mean over its rows), or a pair (sum, count) for a mean over something other than
        rows, such as tokens; alone or as `(value, {name: metric})`. It is called on each worker's
        rows. With one value per example, a short last batch is padded and masked; with a scalar it
        runs at its own size, as a second compiled program.
      optimizer: an optax gradient transformation; it sees full arrays, so clipping by global norm
        is global.
      mesh: "data=4,model=2", a dict, a jax `Mesh`, or None: the layout's own mesh, or every device
        on `data`.
      layout: a shipped name (`spmd layouts` lists them), a path to a TOML file, or a `Layout`; or
        "auto": the fastest that `spmd.search` finds in 12 programs for the devices that are here,
        with its mesh and microbatches. It is kept as `layout.toml` in the run's folder.
      batch_size: examples per update over all workers and microbatches, for data that are not
        batched yet.
      epochs, steps: the length of the run; give one of them, or neither for one epoch.
      eval_data, eval_every: evaluate every `eval_every` steps, or at the end of each epoch when
        None; and at the end of the run.
      eval_average: evaluate the average of the weights, which `spmd.optimizers.average_weights` or
        `optax.contrib.schedule_free` keeps, or the slow weights of `optax.lookahead`, and not the
        newest weights.
      metrics: `{name: function(model, batch)}`, measured in evaluation; metrics that share the
        loss's forward pass (`spmd.metrics`) are measured in training too.
      checkpoint: a folder, or a `Checkpoint` with more options.
      resume: True resumes from the newest checkpoint there, on the same data; "changed_data" also
        when the data have changed, such as a repaired row, their number, the batch size, `shuffle`
        or the seed: a line says what of the order is lost.
      callbacks: `spmd.callbacks.Callback`s or functions of `info`.
      loggers: in addition to the JSON lines in `metrics.jsonl` of the checkpoint folder.
      log_every: steps per record; each record is the mean over them, with rates such as tokens per
        second.
      progress: True, False, or "auto" (in a terminal or a notebook).
      precision: "float32"; or "bfloat16" or "float16": forward and backward in these, parameters
        and optimizer in float32. For float16, `spmd.optimizers.scale_loss` is put around the
        optimizer, unless it is there.
      accumulate: microbatches per update; gradients are reduced once per update.
      shuffle: whether to reshuffle arrays in each epoch (True for arrays); the order depends on
        `seed`.
      prefetch: batches of an iterable to read ahead.
      data_retries: how often in a row a batch that could not be read, in training or evaluation, is
        read again: after 1, 2, 4, 8, 8, ... seconds, each with a warning. Other processes wait
        meanwhile, as for any batch. The first batch of an iterable is not.
      seed: sets the order of the data, the dropout masks and, for linen and functional models, the
        initial values.
      check_memory: ask the compiler, before anything is allocated, whether a step fits the devices;
        raise if not. CPUs do not report their memory; with resident data the check is skipped.
      compile_cache: a folder that keeps compiled programs, so that a restart loads them. None:
        `programs/` in the folder of `checkpoint`, or in the user's cache folder ($SPMD_CACHE
        chooses another). False or "off": none. If JAX's own cache is configured, that one is used.
      profile: such as "10:15": trace the steps after the 10th up to the 15th by `jax.profiler`, and
        summarise them by kind and by layer beside what is predicted (`result.profile`); or a
        `Profile` with more options.
      watch: such as 100: every 100 steps, loggers get histograms of each parameter and of its
        gradient; or a `Watch` with more options.

    Returns:
      A `Result`: the model, the history, the state, and `evaluate` and `predict`.

    Raises:
      SpmdError: one of its subclasses, before anything is compiled; all problems at once, each with
        a fix.
      ClusterError: the processes of a run of several do not agree, or do not arrive in time.
      SystemExit: with 143 after SIGTERM, SIGHUP, and the signals in $SPMD_STOP_SIGNALS; with a
        checkpoint folder, once the state is saved.
      DeviceMemoryError: a step needs more memory than a device has.
      DivergedError: the loss is not finite, or too many updates in a row were skipped
        (`spmd.optimizers.skip_spikes`).

    Example:
      >>> import optax, spmd
      >>> import jax.numpy as jnp
      >>> x = jnp.linspace(-1, 1, 64)[:, None]
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((1, 1))}, lambda params, x: x @ params["w"]
      ... )
      >>> result = fit(
      ...     model,
      ...     (x, 3 * x),
      ...     loss=spmd.losses.mean_squared_error,
      ...     optimizer=optax.sgd(0.5),
      ...     batch_size=16,
      ...     epochs=20,
      ... )
      >>> round(float(result.state.params["w"][0, 0]), 3)
      3.0
    """
    check_numbers(epochs, steps, eval_every, log_every, prefetch, data_retries)
    checkpoint = as_checkpoint(checkpoint)
    folder = _folder_of(checkpoint)
    profile = as_profile(profile, folder)
    account = TimeAccount.open(folder)
    programs, factor = _join_cluster(compile_cache, folder)
    before = compilations()
    config = RunConfig(
        epochs=epochs,
        steps=steps,
        eval_every=eval_every,
        eval_average=eval_average,
        evaluates=eval_data is not None,
        log_every=log_every,
        prefetch=prefetch,
        data_retries=data_retries,
        checkpoint=checkpoint,
        resume=resume,
        callbacks=as_callbacks(callbacks),
        loggers=check_loggers(loggers),
        profile=profile,
        watch=as_watch(watch),
    )
    source = as_source(_arrays_of(data), batch_size=batch_size, shuffle=shuffle, seed=seed)
    display = make_progress(progress)
    trained: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "metrics": metrics}
    trained |= {"precision": precision, "seed": seed}
    searched = None
    if isinstance(layout, str) and layout == AUTO:
        check_auto(mesh, precision, accumulate)
        layout, accumulate, searched = _search_layout(model, source, trained, config, display)
    elif factor > 1:
        accumulate *= factor
    visible = _shown_here(display)
    with visible.doing("tracing"):
        trainer = Trainer(
            model,
            mesh=mesh,
            layout=layout,
            accumulate=accumulate,
            compile_cache=programs or False,
            **trained,
        )
        target = _target_of(profile, trainer)
        trainer.placed.compiling = functools.partial(_compiling, account, visible)
        program, placer = bind_rows(source, trainer.prepare(source.sample()))
    check_source(source, program.clock, pad=program.loss.pads, steps=steps, epochs=epochs)
    check_metrics(config, program, trainer, eval_data)
    check_watch(config, program)
    meta = trainer.about(source, program)
    # Before compiling: processes with different programs would wait for each other in a collective.
    check_processes_agree(program, config.shared_facts(meta))
    room = None
    with visible.doing("compiling"):
        # Before the state is made: otherwise XLA would run out of memory while it makes the state,
        # or in the first step, with an error that names no fix.
        if check_memory and not isinstance(data, Resident):
            room = check_step_memory(program)
    # until the loop takes over, any failure releases the folder
    with contextlib.ExitStack() as opened:
        store = open_store(config, opened)
        memory = open_checkpoints_in_memory(config, store, trainer, opened)
        start_point = start(config, store, trainer, meta, account, memory)
        if jax.process_count() > 1:
            check_replicas(start_point.state, "before the first step")
        outputs, display = begin_outputs(
            config, store, trainer, display, start_point, meta, program.rows, room, searched
        )
        parts = LoopParts(
            config=config,
            program=program,
            source=source,
            placer=placer,
            evaluate=_evaluate_by(config, trainer, eval_data),
            loggers=outputs,
            progress=display,
            store=store,
            meta=meta,
            memory=memory,
            profiler=_make_profiler(config, program, target, display),
            work=work_of(program),
            **_data_on_devices(data, trainer),
        )
        if config.watch is not None:
            display.say(f"{config.watch}.")
        loop = Loop(parts, start_point, account)
        opened.pop_all()
    loop.train()
    return _result(loop, parts, trainer, compilations() - before)


def _folder_of(checkpoint: Checkpoint | None) -> Path | None:
    """Return the folder of a run; None if it keeps no checkpoints."""
    if checkpoint is None:
        return None
    return Path(checkpoint.path)


def _arrays_of(data: Any) -> Any:
    """Return data in the form that a source accepts."""
    if isinstance(data, Resident):
        return data.arrays
    return data


def _shown_here(display: Any) -> Any:
    """Return the progress display of this process; of several processes, only the first has one."""
    if jax.process_index() == 0:
        return display
    return NoProgress()


def _target_of(profile: Profile | None, trainer: Trainer) -> Any:
    """Return the target with whose predictions a profile is compared; None without a profile."""
    if profile is None:
        return None
    return check_target(profile.target, trainer.placed)


def _join_cluster(
    compile_cache: str | Path | bool | None, run_folder: Path | None
) -> tuple[Path | None, int]:
    """Join the other processes of a run; return the folder of compiled programs, and by how many
    times fewer processes it was restarted.
    """
    join()
    folder = choose_folder(compile_cache, run_folder)
    # the first look at devices waits for all processes
    with current().in_phase("compile"):
        folder = agree_on_folder(folder)
        # a run that restarted with fewer processes makes more microbatches, so that a device's rows
        # stay as many
        return folder, shrink_factor()


def _search_layout(
    model: Any, source: Source, trained: dict[str, Any], config: RunConfig, display: Any
) -> tuple[Layout, int, str]:
    """Search for the fastest layout; return it, its number of microbatches, and it as TOML."""
    # a folder that cannot be used is an error before the search
    with contextlib.ExitStack() as opened:
        open_store(config, opened)
    saved = None
    if config.folder is not None and config.resumes:
        saved = config.folder / "layout.toml"
    layout, accumulate, toml, line = auto_layout(
        model, source.sample(), **trained, saved=saved, say=display.say
    )
    if jax.process_index() == 0:
        display.note(line)
    return layout, accumulate, toml


def _evaluate_by(
    config: RunConfig, trainer: Trainer, eval_data: Any
) -> Callable[..., dict[str, float] | None] | None:
    """Return the function that evaluates a state of the run; None without data."""
    if not config.evaluates:
        return None
    measure = trainer.measure
    if config.eval_average:
        measure = trainer.measure_averaged
    return functools.partial(measure, data=eval_data, retries=config.data_retries)


def _make_profiler(
    config: RunConfig, program: TrainingProgram, target: Any, display: Any
) -> StepProfiler | None:
    """Return the profiler of steps, which compares them with the prediction for a target."""
    if config.profile is None:
        return None
    summarize = functools.partial(
        profile_of, placed=program.placed, target=target, rows=program.rows
    )
    return StepProfiler(config.profile, config.folder, display, summarize)


def _data_on_devices(data: Any, trainer: Trainer) -> dict[str, Any]:
    """Return the parts of a loop on data that live on the devices; {} for other data."""
    if not isinstance(data, Resident):
        return {}
    return {
        "device_data": replicate_arrays(data.arrays, trainer.mesh),
        "steps_per_call": data.steps_per_call,
    }


def _result(loop: Loop, parts: LoopParts, trainer: Trainer, compiled: Compilations) -> Result:
    """Return the result of a run that has ended; a run that SIGTERM has ended exits."""
    run = loop.run
    store = parts.store
    declared = None
    if parts.program.clock is not None:
        declared = parts.program.clock.declared
    warn_of_unsynced_steps(declared, run.step)
    if run.stop_reason == SIGTERM_REASON:
        if store is not None and jax.process_index() == 0:
            report_to_launcher("saved", {"step": run.step})
        raise SystemExit(TERMINATED)
    report_unfinished(run.state.opt, run.step, saved=store is not None)
    profile = None
    if parts.profiler is not None:
        profile = parts.profiler.profile
    seconds = run.pace.seconds - run.began.seconds
    rate = None
    if run.samples and seconds > 0:
        rate = (run.samples - run.began.samples) / seconds
    return Result(
        run.state,
        run.history,
        run.stop_reason,
        trainer,
        goodput=run.account.goodput,
        compilations=compiled,
        profile=profile,
        samples_per_second=rate,
    )


@contextlib.contextmanager
def _compiling(account: TimeAccount, display: Any) -> Iterator[None]:
    """Around the compilation of a program."""
    with display.doing("compiling"), account(COMPILING):
        yield


def work_of(program: TrainingProgram) -> Work:
    """Return the work of a row for the devices of a program; their peak is known for GPUs that a
    shipped target describes.
    """
    mesh = program.placed.mesh
    target = of_device(mesh.devices.flat[0].device_kind)
    if target is None:
        return Work(tokens_per_row(program), None)
    return Work(tokens_per_row(program), functools.partial(_peak_seconds, program, target))


def _peak_seconds(program: TrainingProgram, target: Target) -> PeakSeconds:
    """Return the seconds of a row at the peak of all devices: of the model's FLOPs, and of those
    that are executed.
    """
    mesh = program.placed.mesh
    jaxpr = trace_model(program)
    executed = 0.0
    try:
        compiled = parse(program.compiled_text())
        executed = mesh.size * executed_flops(compiled, MeshSpec.parse(mesh))
    except Exception as error:
        # whatever a program has that is not expected; training does not depend on it
        logging.getLogger("spmd").warning(
            "HFU is not known: the compiled step cannot be read: %s", first_line(error)
        )
    model = model_flops(jaxpr)
    peak = program.rows * mesh.size * target.rate(main_dtype(jaxpr))
    return PeakSeconds(min(model, executed or model) / peak, executed / peak)
