"""Starts a run: at step 0 in an empty folder, or from its newest checkpoint."""

import contextlib
import dataclasses
import logging
from typing import Any

import jax

from spmd.data.work_assignment import Position
from spmd.distributed.watchdog import current
from spmd.errors import (
    CheckpointError,
    OptionError,
    Problem,
    option,
    problems_text,
    quoted,
    raise_problems,
)
from spmd.run.checkpoint import CheckpointStore
from spmd.run.config import CHANGED_DATA, RunConfig, StartPoint
from spmd.run.goodput import RESTORING
from spmd.run.memory_checkpoint import MemoryCheckpoints, open_memory
from spmd.run.memory_folder import newest_step
from spmd.run.memory_restore import MemoryState, newest_in_memory
from spmd.run.saved_settings import (
    data_changes,
    is_hashed,
    option_changes,
    resumed_position,
    saved_numbers,
    saved_position,
)
from spmd.run.time_account import TimeAccount
from spmd.train.state import place_copy, seed_data
from spmd.trainer import Trainer


def open_store(config: RunConfig, opened: contextlib.ExitStack) -> CheckpointStore | None:
    """Return the run's checkpoints. Existing ones are resumed or are an error; they are never
    overwritten.
    """
    watch = current()
    # from here on all processes run in step, and waiting for each other has a time limit
    watch.record_progress("compile", 0)
    opened.callback(watch.record_progress, "script", 0)
    if config.checkpoint is None:
        if config.resumes:
            raise OptionError(
                "resume=True without a checkpoint folder.",
                fix=f"{option('checkpoint', quoted('runs/name'))}.",
            )
        return None
    store = CheckpointStore(config.checkpoint)
    opened.callback(store.release)
    if store.latest() is not None and not config.resumes:
        fix = "resume=True to continue it, or another folder."
        raise CheckpointError(
            f"{store.folder} already holds a run, up to step {store.latest()}.", fix=fix
        )
    return store


def open_checkpoints_in_memory(
    config: RunConfig,
    store: CheckpointStore | None,
    trainer: Trainer,
    opened: contextlib.ExitStack,
) -> MemoryCheckpoints | None:
    """Return the run's checkpoints in memory, if it makes any. Those of an earlier run in the same
    folder are forgotten, if this one does not resume.
    """
    if config.checkpoint is None or store is None:
        return None
    if config.memory_every is None:
        if config.resumes and jax.process_index() == 0:
            _warn_of_unused_memory(store)
        return None
    folder = config.checkpoint.memory_folder
    memory = open_memory(folder, store.folder, trainer.abstract_state, resume=config.resumes)
    if memory is not None:
        opened.callback(memory.close, remove=False)
    return memory


def _warn_of_unused_memory(store: CheckpointStore) -> None:
    latest = store.latest()
    step = newest_step(store.folder)
    if step > (-1 if latest is None else latest):
        why = (
            "step %d of this run is in memory, and is not used: Checkpoint has no "
            "memory_every. The next save forgets it."
        )
        logging.getLogger("spmd").warning(why, step)


def _newest(
    store: CheckpointStore, memory: MemoryCheckpoints | None, meta: dict[str, Any]
) -> tuple[int | None, dict[int, str], MemoryState | None]:
    """The newest undamaged step on disk, what is wrong with each newer one, and a state in memory
    that is newer, if there is one.
    """
    latest = store.latest()
    in_memory = (
        None
        if memory is None
        else newest_in_memory(memory, meta, after=-1 if latest is None else latest)
    )
    if in_memory is not None:
        return latest, {}, in_memory  # a later save finds out whether the disk's is damaged
    step, damaged = store.newest_intact()
    if memory is not None and damaged:
        in_memory = newest_in_memory(memory, meta, after=-1 if step is None else step)
    return step, damaged, in_memory


def start(
    config: RunConfig,
    store: CheckpointStore | None,
    trainer: Trainer,
    meta: dict[str, Any],
    account: TimeAccount,
    memory: MemoryCheckpoints | None = None,
) -> StartPoint:
    """Return the starting point of a run: the newest state in memory or undamaged checkpoint on
    disk, or step 0 if there is none.

    Raises:
      CheckpointError: the data differs from the saved run's, or comes in other batches or another
        order, without `resume="changed_data"`.
    """
    start_point = None
    if store is not None and (store.latest() is not None or memory is not None):
        with account(RESTORING):
            changed_data = config.resume == CHANGED_DATA
            start_point = _restore(store, trainer, meta, account, memory, changed_data=changed_data)
    if start_point is None:
        account.resume(None)
        return StartPoint(trainer.init())
    return start_point


def _restore(
    store: CheckpointStore,
    trainer: Trainer,
    meta: dict[str, Any],
    account: TimeAccount,
    memory: MemoryCheckpoints | None,
    *,
    changed_data: bool,
) -> StartPoint | None:
    """The newest state as the starting point; None if there is none."""
    on_disk, damaged, in_memory = _newest(store, memory, meta)
    if on_disk is None and in_memory is None and damaged:
        problems = [Problem(f"step {step}", [why]) for step, why in damaged.items()]
        fix = (
            f"use another copy of the folder, or remove {store.folder}/checkpoints to start at "
            "step 0."
        )
        text = problems_text(f"every checkpoint in {store.folder} is damaged", problems)
        raise CheckpointError(f"{text}\n", fix=fix, problems=problems)
    step = on_disk if in_memory is None else in_memory.step
    if step is None:
        return None
    saved = store.meta(step) if in_memory is None else in_memory.meta
    with store.naming_errors(step):
        callbacks, changes = saved.get("callbacks", []), option_changes(saved, meta)
        owes, evaluated = (saved.get(name) is True for name in ("owes_evaluation", "evaluated"))
        account.resume(saved.get("pace"))
    now = meta["data"]
    alone = "position" not in saved  # a state that `Trainer.save` got
    if alone and changed_data:
        position, data = Position(), now
    else:
        position, data = saved_position(
            saved,
            step,
            store,
            f'or  resume="{CHANGED_DATA}"  to begin with the first epoch of the data.',
        )
    problems = data_changes(data, now)
    headline = f"the run in {store.folder} cannot be resumed: its data is not the same"
    of_order = [problem for name, problem in problems.items() if not name.startswith("contents")]
    if of_order and not changed_data:
        keeps = "which keeps weights, optimizer and step, and says what of the order is lost"
        of_order[-1] = dataclasses.replace(
            of_order[-1],
            fix=f'data, batches and order as the run began; or resume="{CHANGED_DATA}", {keeps}.',
        )
        raise_problems(CheckpointError, headline, of_order)
    if is_hashed(now) and not is_hashed(data):
        changes.append(
            "the checkpoint has no hash of its data, so the contents of the data were not compared"
        )
    changes += (
        ["the checkpoint does not say where in its data the loop was: its first epoch begins"]
        if alone
        else []
    )
    trainer.placed.spec.release()  # so that the restored state finds their memory free
    if in_memory is None:
        state, state_changes = trainer.load(store, step)
    else:
        state, state_changes = trainer.script_numbers.update(
            in_memory.build(), saved_numbers(saved, trainer.abstract_state)
        )
    if changed_data:
        position, lines = resumed_position(position, data, now, list(problems))
        changes += lines
        if "seed" in problems:
            state = dataclasses.replace(
                state, key=place_copy(seed_data(now["seed"]), state.key.sharding)
            )
            changes.append("random numbers, such as those of dropout, are drawn from the new seed")
    else:  # raised last: if the model has changed too, that error is more useful
        fix = (
            f'use the data that the run began with, or resume="{CHANGED_DATA}" to resume on this '
            "data."
        )
        raise_problems(
            CheckpointError,
            headline,
            [dataclasses.replace(problem, fix=fix) for problem in problems.values()],
        )
    store.move_damaged(damaged)  # only now is it certain that the run resumes
    source = ""
    if in_memory is not None:
        than_disk = (
            "there is none on disk"
            if on_disk is None
            else f"{step - on_disk} steps after the newest checkpoint on disk"
        )
        source = f"memory ({in_memory.source}), {than_disk}"
    return StartPoint(
        state, position, callbacks, [*changes, *state_changes], owes, evaluated, source
    )
