"""`sweep`: train many networks in one compiled program."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from spmd.data.device_dataset import replicate_arrays
from spmd.data.sources import ArraySource, as_source, is_arrays
from spmd.distributed.consistency import check_consistency
from spmd.distributed.initialize import join, was_restarted
from spmd.distributed.shared_cache import agree_on_folder
from spmd.distributed.watchdog import current
from spmd.errors import DataError, MeshError, OptionError, SpmdError, check_integer, did_you_mean
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, make_mesh, outside_of_mesh
from spmd.program_cache.activate import use_folder
from spmd.program_cache.folder import choose_folder
from spmd.run.checkpoint import Checkpoint, as_checkpoint, check_name
from spmd.run.config import check_length
from spmd.run.progress import NoProgress, make_progress
from spmd.run.signals import interruptible
from spmd.sweeps.config import SweepConfig, Trial
from spmd.sweeps.memory_check import check_room
from spmd.sweeps.results import Sweep
from spmd.sweeps.scheduler import SweepRunner
from spmd.sweeps.search_space import SEED, Halving, check_space, draw, grid
from spmd.sweeps.storage import SweepStore, is_writer, owned, spelled
from spmd.sweeps.train_chunk import Piece, calls
from spmd.sweeps.vmapped_trials import DATA, NET, VmappedTrials
from spmd.train.compiled_step import TrainingProgram
from spmd.train.model_setup import TrainConfig
from spmd.train.program_facts import text_facts
from spmd.train.state import checksums


@outside_of_mesh()
@interruptible()
def sweep(
    make_model: Callable[..., Any],
    data: Any,
    *,
    space: Mapping[str, Any],
    loss: Callable[..., Any],
    optimizer: Callable[..., Any],
    trials: int | None = None,
    search: Any = "random",
    mesh: Any = None,
    layout: str | Path | Layout = "data_parallel",
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    eval_data: Any = None,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    score: str | None = None,
    mode: str = "min",
    keep: int = 3,
    at_once: int | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    resume: bool = False,
    precision: str = "float32",
    shuffle: bool = True,
    seed: int = 0,
    steps_per_call: int = 50,
    exact: bool = True,
    check_memory: bool = True,
    progress: bool | str = "auto",
    compile_cache: str | Path | bool | None = None,
) -> Sweep:
    """Train many networks that differ in hyper-parameters, those of equal shapes in one compiled
    program.

    Trial i trains exactly as `spmd.fit(lambda: make_model(...), data, optimizer=optimizer(...),
    seed=its seed, ...)` would, whatever trains beside it: the same initial values, the same batches
    in the same order, the same dropout. A trial that diverges neither stops nor changes the others.

    Args:
      make_model: `make_model(**hyperparameters)` builds the model. It receives the hyper-parameters
        that it has arguments for, and `seed`.
      data: dict or tuple of arrays [examples, ...]; a copy is kept on every device.
      space: the values of each hyper-parameter, by name: a list, `spmd.uniform` or
        `spmd.log_uniform`. Trials that differ only in floats of the optimizer share a program;
        every other value compiles its own. "seed" is a hyper-parameter too; without it all use
        `seed`.
      loss, layout, metrics, precision: as in `fit`; the layout must replicate parameters.
      optimizer: `optimizer(**hyperparameters)` gives an optax gradient transformation.
      trials: how many to draw; a grid has one for each combination.
      search: "random", "grid", or a `spmd.Halving`.
      mesh: such as "net=8", or "net=4,data=2" (each trial data-parallel over 2 devices, of one
        process); None: all devices of all processes on `net`.
      batch_size, epochs, steps, shuffle, seed: as in `fit`, for each trial.
      eval_data: arrays on which every trial is evaluated at its end and at each rung.
      score: the metric that ranks trials: "eval_loss", another evaluation metric as "eval_NAME", or
        "loss", the mean over the last epoch's steps; None: "eval_loss" with `eval_data`, else
        "loss".
      mode: whether "min" or "max" of it is best.
      keep: how many of the best trials to keep with their arrays; on disk in `best/` of
        `checkpoint`'s folder, one run each.
      at_once: at most this many trials in one program; None: all. The rest queue.
      checkpoint: a folder, or `spmd.Checkpoint(folder, every=steps)`; by default saved at the end
        of epochs.
      resume: whether to resume the sweep in that folder; a restart by `spmd launch` does in any
        case.
      steps_per_call: steps compiled into one call.
      exact: compute the trials on one device one after the other, each as if alone. False: vmapped,
        their matrices batched, which is faster where a small network leaves a device idle; sums are
        then taken in another order, which training can amplify. Networks with convolutions always
        run one after the other.
      check_memory: ask the compiler, before anything is allocated, whether the trials in one
        program fit the devices; raise if not. CPUs do not report their memory.
      compile_cache: as in `fit`.
      progress: True, False, or "auto" (in a terminal or a notebook).

    Returns:
      A `Sweep`: the table, and the best trials as results.

    Raises:
      SpmdError: one of its subclasses, before anything is compiled.
      ClusterError: the processes of a run of several do not agree.

    Example:
      >>> import optax, spmd
      >>> import jax.numpy as jnp
      >>> model = lambda: spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((1, 1))}, lambda params, x: x @ params["w"]
      ... )
      >>> x = jnp.linspace(-1, 1, 64)[:, None]
      >>> result = sweep(
      ...     model,
      ...     {"x": x, "y": 3 * x},
      ...     loss=spmd.losses.mean_squared_error,
      ...     space={"rate": [0.01, 0.5]},
      ...     search="grid",
      ...     optimizer=lambda rate: optax.sgd(rate),
      ...     batch_size=16,
      ...     epochs=5,
      ... )
      >>> result.best[0].values, result.programs
      ({'rate': 0.5}, 1)
    """
    checkpoint = _checkpoint(checkpoint, resume)
    join()
    space = check_space(space)
    if not isinstance(search, Halving) and search not in ("random", "grid"):
        raise OptionError(f"search={search!r}.", fix='"random", "grid" or spmd.Halving().')
    source = _arrays(data, "data", batch_size, shuffle, seed)
    eval_source = None
    if eval_data is not None:
        eval_source = _arrays(eval_data, "eval_data", batch_size, False, 0)
    config = TrainConfig(make_model, loss, optimizer, metrics, precision, seed=seed)
    study = SweepConfig(config, Layout.load(layout), source, eval_source, exact)
    study.check(space)
    check_length(epochs, steps)
    length = steps
    if length is None:
        length = (epochs or 1) * source.steps_per_epoch
    all_trials = _trials(space, trials, search, seed)
    plan = [(len(all_trials), length)]
    if isinstance(search, Halving):
        plan = search.plan(len(all_trials), length)
    check_integer(keep, "keep", 0, optional=True)
    check_integer(at_once, "at_once", optional=True)
    check_integer(steps_per_call, "steps_per_call")
    display = make_progress(progress)
    folder = None
    every = source.steps_per_epoch
    if checkpoint is not None:
        folder = Path(checkpoint.path).absolute()
        every = checkpoint.every or every
    devices = _mesh(mesh, batch_size)
    spelled_trials = ""
    if folder is not None:
        spelled_trials = f"[{', '.join(spelled(trial.all_values) for trial in all_trials)}]"
    about = {
        "trials": spelled_trials,
        "rungs": str(plan),
        "mesh": str(MeshSpec.parse(devices)),
        "at_once": str(at_once),
        "data": str(source.fingerprint()),
        "layout": study.layout.to_toml(),
        "evaluated": str(eval_source and eval_source.fingerprint()),
        "metrics": str(sorted(metrics or ())),
        "keep": str(keep),
        "precision": precision,
        "exact": str(exact),
    }
    # from here on all processes work in step, and waiting for each other has a time limit
    with current().in_phase("compile"):
        options = {
            "score": f"{score} {mode}",
            "steps_per_call": steps_per_call,
            "every": every,
            "folder": folder,
            "resume": resume,
        }
        _check_trials_agree(all_trials, {**about, "trials": len(all_trials), **options})
        if not is_writer():
            display = NoProgress()
        use_folder(agree_on_folder(choose_folder(compile_cache, folder)))
        # Called after `check_room`, which can then refuse before the data is on the devices.
        resident = functools.cache(lambda: replicate_arrays(source.arrays, devices))
        sharing: dict[tuple, list[Trial]] = {}  # trials by the program that they share
        for trial in all_trials:
            sharing.setdefault(study.constants(trial), []).append(trial)
        programs = {
            key: _packed(study, same[0], devices, resident) for key, same in sharing.items()
        }
        measure = _measure(score, mode, study, next(iter(programs.values())).program, space)
        for key, packed in programs.items():
            first = next(calls(packed, 0, plan[0][1], limit=steps_per_call, every=every))
            _check_programs_agree(packed, sharing[key][0], first)
            if check_memory:
                check_room(packed, sharing[key], at_once, first)
        # Before the folder is read, in which another sweep may still write.
        with owned(folder) as owner:
            about["score"] = " ".join(measure)
            storage = SweepStore(folder, about, resume=resume or was_restarted(), owner=owner)
            resident()
            runner = SweepRunner(
                study=study,
                programs=programs,
                storage=storage,
                plan=plan,
                measure=measure,
                at_once=at_once,
                keep=keep,
                steps_per_call=steps_per_call,
                every=every,
                progress=display,
            )
            return runner.run_rungs(all_trials, folder and folder / "best")


def _checkpoint(checkpoint: Any, resume: bool) -> Checkpoint | None:
    """The sweep's folder and the steps between two saves, as a `Checkpoint`.

    Raises:
      CheckpointError: checkpoints in that folder could not be read again.
      OptionError: other options of a `Checkpoint`, or `resume` without one.
    """
    config = as_checkpoint(checkpoint)
    if config is None:
        if resume:
            raise OptionError(
                "resume=True without a checkpoint folder.", fix='checkpoint="runs/name".'
            )
        return None
    if config != Checkpoint(config.path, every=config.every):
        raise OptionError(
            f"checkpoint={config!r}: a sweep uses only the path and `every` of a Checkpoint.",
            fix="sweep(score=..., mode=..., keep=...).",
        )
    check_name(Path(config.path))
    return config


def _arrays(data: Any, option: str, batch_size: int, shuffle: bool, seed: int) -> ArraySource:
    if not is_arrays(data):
        raise DataError(
            f"{option}: a sweep needs arrays, kept on the devices.",
            fix="a dict or tuple of arrays [examples, ...].",
        )
    short_ok = option == "eval_data"
    source = as_source(data, batch_size=batch_size, shuffle=shuffle, seed=seed, short_ok=short_ok)
    return cast(ArraySource, source)  # which it is for arrays


def _trials(space: Mapping[str, Any], count: int | None, search: Any, seed: int) -> list[Trial]:
    if search == "grid":
        settings = grid(space, count)
    else:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise OptionError(
                f"trials={count!r}.", fix='how many to draw, from 1; or search="grid".'
            )
        settings = draw(space, count, seed)
    return [Trial(number, values, values.get(SEED, seed)) for number, values in enumerate(settings)]


def _mesh(mesh: Any, batch_size: int) -> Mesh:
    if mesh is None:
        mesh = {NET: -1}
    devices = make_mesh(mesh)
    sizes = dict(devices.shape)
    if NET not in sizes or set(sizes) > {NET, DATA}:
        raise MeshError(
            f'mesh {MeshSpec.parse(devices)}: a sweep uses the axes "{NET}" (trials) and "{DATA}".',
            fix='"net=4,data=2".',
        )
    if batch_size % sizes.get(DATA, 1):
        raise DataError(
            f"batch_size={batch_size} does not divide by data={sizes[DATA]}.",
            fix=f"a multiple of {sizes[DATA]}.",
        )
    net_first = np.moveaxis(devices.devices, devices.axis_names.index(NET), 0)
    places = net_first.reshape(sizes[NET], -1)
    ranks = []
    for place in places:
        ranks.append(sorted({device.process_index for device in place}))
    flat = [rank for ranks_of_trial in ranks for rank in ranks_of_trial]
    if len(flat) > len(ranks) or flat != sorted(flat) or len(set(flat)) < jax.process_count():
        within = math.gcd(sizes.get(DATA, 1), jax.local_device_count())
        shown = ["+".join(map(str, ranks_of_trial)) for ranks_of_trial in ranks]
        why = f"the positions along {NET} are on processes {', '.join(shown)}"
        rule = "Each trial needs devices of one process; processes come in order, and all take part"
        raise MeshError(
            f"mesh {MeshSpec.parse(devices)}: {why}. {rule}.",
            fix=f'"{NET}={jax.device_count() // within},{DATA}={within}".',
        )
    return devices


def _check_trials_agree(trials: Sequence[Trial], options: Mapping[str, Any]) -> None:
    """Compare options, and every trial's hyper-parameters without the addresses of objects."""
    facts = {"devices of each process": str(jax.local_device_count())}
    facts |= {name: str(value) for name, value in options.items()}
    for trial in trials:
        facts[f"trial {trial.number}"] = re.sub(r" at 0x[0-9a-f]+", "", str(trial.all_values))
    check_consistency(facts)


def _check_programs_agree(packed: VmappedTrials, trial: Trial, call: Piece) -> None:
    """Compare a trial's initial values, and the program of its steps."""
    if jax.process_count() > 1:
        text = packed.lowered(packed.mesh.shape[NET], call.count, call.rows, shared=True).as_text()
        facts = checksums(packed.initial_state(trial).variables)
        check_consistency(facts | text_facts(text, f"the steps of trial {trial.number}"))


def _packed(
    study: SweepConfig, first: Trial, devices: Mesh, resident: Callable[[], Any]
) -> VmappedTrials:
    """The program of trials like this one; an error names the trial."""
    try:
        packed = VmappedTrials(study, first, devices, resident)
        packed.check_evaluation()
    except SpmdError as error:
        if study.constants(first):
            values = ", ".join(f"{name}={value!r}" for name, value in first.values.items())
            error.add_note(f"of trial {first.number}: {values}")
        raise
    return packed


def _measure(
    score: str | None,
    mode: str,
    study: SweepConfig,
    program: TrainingProgram,
    space: Mapping[str, Any],
) -> tuple[str, str]:
    """The name and mode of the metric that ranks trials; no hyper-parameter may have the name of a
    column of the table.
    """
    if mode not in ("min", "max"):
        raise OptionError(f'mode="{mode}".', fix=did_you_mean(mode, ("min", "max")))
    evaluated = [f"eval_{metric}" for metric in program.evaluation.outputs.names]
    scores = list(program.names)
    name = "loss"
    if study.eval_data is not None:
        scores += evaluated
        name = "eval_loss"
    if score is not None:
        name = score
    if name not in scores and name.startswith("eval_") and study.eval_data is None:
        raise OptionError(
            f'score="{name}": there is no evaluation.', fix="eval_data=..., which has it."
        )
    if name not in scores:
        raise OptionError(
            f'score="{name}": there is no such metric.', fix=did_you_mean(name, scores)
        )
    columns = ("trial", "steps", "ended", name, *evaluated)
    for hyperparameter in space:
        if hyperparameter in columns:
            fix = "another name for the hyper-parameter."
            raise OptionError(
                f'space: "{hyperparameter}" is a column of the table already.', fix=fix
            )
    return name, mode
