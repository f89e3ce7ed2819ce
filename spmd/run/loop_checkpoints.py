"""Checkpoints of loops that users write. A trainer knows the steps that it has restored and saved,
so that two runs are never mixed in one folder.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmd.base.log_info import log_info
from spmd.data.sources import Source
from spmd.data.work_assignment import Position, epoch_ended
from spmd.distributed import watchdog
from spmd.errors import CheckpointError, OptionError, did_you_mean, raise_problems, short_repr
from spmd.run.checkpoint import Checkpoint, CheckpointStore, as_checkpoint
from spmd.run.checkpoint_reader import CheckpointReader, check_run_folder
from spmd.run.saved_settings import data_changes, option_changes, saved_position
from spmd.train.state import State


class LoopCheckpoints:
    """The checkpoints that one trainer restores and saves. A folder is owned while one is
    written.
    """

    def __init__(self):
        # By folder: the newest step that is this trainer's, and a weak reference to its state,
        # which must not stay in the devices' memory for this.
        self._newest: dict[Path, tuple[int, Callable[[], State | None]]] = {}

    def restored(self, folder: Path, step: int, state: State, newest: int) -> None:
        """Note that the trainer continues the run in a folder from this step, unless the newest one
        there is its already.
        """
        if self._newest.get(folder.resolve(), (None,))[0] != newest or step == newest:
            self._newest[folder.resolve()] = step, weakref.ref(state)

    def save(
        self,
        config: Checkpoint,
        state: State,
        step: int,
        meta: dict[str, Any],
        metrics: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint, and wait until it is complete on disk; of the same state it is there
        already.

        Raises:
          CheckpointError: the folder holds another run, steps that are not before this one, or this
            step with other metrics or another position; or this save would not rank checkpoints as
            those before it; or the checkpoint cannot be written.
          OptionError: an option or a metric that a loop of the user's cannot have.
        """
        values = check_config(config, metrics)
        with watchdog.current().in_phase("save"):
            store = CheckpointStore(config)
            try:
                if self._is_new(store, state, step, meta, values):
                    store.save(state, step, meta, values)
                    store.wait()
                    self._newest[store.folder.resolve()] = step, weakref.ref(state)
            finally:
                store.release()

    def _is_new(
        self,
        store: CheckpointStore,
        state: State,
        step: int,
        meta: dict[str, Any],
        metrics: dict[str, float],
    ) -> bool:
        """Return whether the folder lacks this step; raise if it is not a later step of its run."""
        newest = store.latest()
        if newest is None:
            return True
        continued, saved_state = self._newest.get(store.folder.resolve(), (None, lambda: None))
        if continued is None:
            fix = "trainer.restore(folder) to continue it, or another folder."
            raise CheckpointError(
                f"{store.folder} already holds a run, up to step {newest}.", fix=fix
            )
        if continued != newest:
            why = f"{store.folder} holds step {newest}, and this loop continues step {continued}"
            raise CheckpointError(
                f"{why}: a later restore would mix the two.", fix="another folder."
            )
        before = store.meta(newest)
        if before["best"] is not None and store.config.best is None:
            name, mode = before["best"]
            fix = (
                f'spmd.Checkpoint(folder, best="{name}", mode="{mode}"), and metrics={{"{name}": '
                f"...}}; or another folder."
            )
            raise CheckpointError(
                f'{store.folder} keeps the best checkpoint by "{name}", which this save would not '
                "rank.",
                fix=fix,
            )
        if step < newest or (step == newest and saved_state() is not state):
            raise CheckpointError(
                f"step {step} is not after step {newest}, the newest in {store.folder}.",
                fix="another folder.",
            )
        if step > newest:
            return True
        if (before.get("position"), store.metrics(step)) != (meta.get("position"), metrics):
            why = (
                f"step {step} is saved in {store.folder} already, with other metrics or another "
                "position in the data"
            )
            raise CheckpointError(f"{why}.", fix="save a step once, with all that belongs to it.")
        return False


def as_loop_checkpoint(checkpoint: str | Path | Checkpoint) -> Checkpoint:
    """Return the checkpoint that `Trainer.save` gets.

    Raises:
      CheckpointError: `checkpoint` is None.
    """
    config = as_checkpoint(checkpoint)
    if config is None:
        raise CheckpointError(
            "checkpoint=None: there is no folder to save in.", fix='such as "runs/loop".'
        )
    return config


def position_to_save(source: Source, position: Position, *, drop: bool) -> dict[str, Any]:
    """Return the description of a loop's position in its data, for its checkpoint.

    Args:
      drop: whether a short last batch is dropped.
    """
    if epoch_ended(source, position, drop=drop):
        position = Position(position.epoch + 1)
    return {"position": dataclasses.asdict(position), "callbacks": [], "pace": None}


def open_newest(checkpoint: str | Path | Checkpoint) -> CheckpointReader | None:
    """Return a reader of the checkpoints of a loop that resumes, after damaged ones were moved
    aside; None if there is none yet.
    """
    config = as_checkpoint(checkpoint)
    if config is None:
        return None
    reader = CheckpointReader(config.path)
    if reader.folder.exists():
        check_run_folder(config.path)
    newest, damaged = reader.newest_intact()
    if damaged:
        store = CheckpointStore(config)
        try:
            store.move_damaged(damaged)
        finally:
            store.release()
    return None if newest is None else reader


def position_of_loop(reader: CheckpointReader, step: int, meta: Mapping[str, Any]) -> Position:
    """Return the position in the data of a loop that resumes from a step; log which options have
    changed.

    Args:
      meta: describes the loop that resumes.

    Raises:
      CheckpointError: the step has no position, or the data has changed.
    """
    saved = reader.meta(step)
    for change in option_changes(saved, meta):
        log_info(f"resumed from step {step}: {change}")
    anew = "steps(data, state=trainer.restore(folder))"
    position, data = saved_position(
        saved, step, reader, f"or  {anew}  to begin with the first epoch of the data."
    )
    problems = data_changes(data, meta["data"])
    fix = f"use the data that the loop began with, or  {anew}  to begin on these."
    raise_problems(
        CheckpointError,
        f"the loop in {reader.folder} cannot be resumed: its data is not the same",
        [dataclasses.replace(problem, fix=fix) for problem in problems.values()],
    )
    return position


def check_config(config: Checkpoint, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats.

    Raises:
      OptionError: an option that only `fit` has, a missing metric, or one that is no number.
    """
    for name in ("every", "memory_every"):
        if getattr(config, name) is not None:
            raise OptionError(
                f"Checkpoint: {name} has no effect on Trainer.save: your loop decides when to "
                "save.",
                fix="leave it out.",
            )
    if not isinstance(metrics, Mapping):
        raise OptionError(
            f"metrics={short_repr(metrics)} is not a dict.", fix='such as {"eval_loss": 0.5}.'
        )
    if config.best is not None and config.best not in metrics:
        fix = f'trainer.save(..., metrics={{"{config.best}": ...}}).'
        if metrics:
            fix = did_you_mean(config.best, metrics)
        raise OptionError(f'Checkpoint: there is no metric "{config.best}".', fix=fix)
    if config.best is None and metrics:
        why = "metrics have no effect: nothing ranks the checkpoints."
        raise OptionError(
            why, fix=f'spmd.Checkpoint(folder, best="{next(iter(metrics))}"), or leave them out.'
        )
    values = {}
    for name, value in metrics.items():
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError):
            raise OptionError(
                f'metrics: "{name}" is {short_repr(value)}, not a number.',
                fix="a float, or a scalar array.",
            ) from None
    return values
