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
from spmd.run.checkpoint import Checkpoint, CheckpointStore
from spmd.run.config import StartPoint
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

# fit(resume=...): resume although the data, its batches or its order have changed
CHANGED_DATA = "changed_data"


def wants_resume(resume: bool | str) -> bool:
    """Whether `fit(resume=...)` asks to resume.

    Raises:
      OptionError: it is neither a bool nor "changed_data".
    """
    if not isinstance(resume, bool) and resume != CHANGED_DATA:
        fix = (
            f'True, False, or "{CHANGED_DATA}" to resume where the data, its batches or its order '
            "have changed."
        )
        raise OptionError(f"resume={resume!r}", fix=fix)
    return bool(resume)


def open_store(
    config: Checkpoint | None, opened: contextlib.ExitStack, *, resume: bool
) -> CheckpointStore | None:
    """The run's checkpoints. Existing ones are resumed or are an error; they are never
    overwritten.
    """
    watch = current()
    # from here on all processes run in step, and waiting for each other has a time limit
    watch.record_progress("compile", 0)
    opened.callback(watch.record_progress, "script", 0)
    if config is None:
        if resume:
            raise OptionError(
                "resume=True without a checkpoint folder.",
                fix=f"{option('checkpoint', quoted('runs/name'))}.",
            )
        return None
    store = CheckpointStore(config)
    opened.callback(store.release)
    if store.latest() is not None and not resume:
        fix = "resume=True to continue it, or another folder."
        raise CheckpointError(
            f"{store.folder} already holds a run, up to step {store.latest()}.", fix=fix
        )
    return store


def open_checkpoints_in_memory(
    config: Checkpoint | None,
    store: CheckpointStore | None,
    trainer: Trainer,
    opened: contextlib.ExitStack,
    *,
    resume: bool,
) -> MemoryCheckpoints | None:
    """The run's checkpoints in memory, if it makes any. Without `resume`, those of an earlier run
    in the same folder are forgotten.
    """
    if config is None or store is None:
        return None
    if config.memory_every is None:
        latest = store.latest()
        if (
            resume
            and jax.process_index() == 0
            and (step := newest_step(store.folder)) > (-1 if latest is None else latest)
        ):
            why = (
                "step %d of this run is in memory, and is not used: Checkpoint has no "
                "memory_every. The next save forgets it."
            )
            logging.getLogger("spmd").warning(why, step)
        return None
    memory = open_memory(config.memory_folder, store.folder, trainer.abstract_state, resume=resume)
    if memory is not None:
        opened.callback(memory.close, remove=False)
    return memory


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
    store: CheckpointStore | None,
    trainer: Trainer,
    meta: dict[str, Any],
    account: TimeAccount,
    memory: MemoryCheckpoints | None = None,
    *,
    changed_data: bool,
) -> StartPoint:
    """The starting point of a run: the newest state in memory or undamaged checkpoint on disk, or
    step 0 if there is none.

    Raises:
      CheckpointError: the data differs from the saved run's, or comes in other batches or another
        order, without `changed_data`.
    """
    start_point = None
    if store is not None and (store.latest() is not None or memory is not None):
        with account(RESTORING):
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
