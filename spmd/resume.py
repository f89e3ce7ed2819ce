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
from spmd.train.state import State, place_copy, seed_data
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
            fix = f"{option('checkpoint', quoted('runs/name'))}."
            raise OptionError("resume=True without a checkpoint folder.", fix=fix)
        return None
    store = CheckpointStore(config.checkpoint)
    opened.callback(store.release)
    if store.latest() is not None and not config.resumes:
        why = f"{store.folder} already holds a run, up to step {store.latest()}."
        raise CheckpointError(why, fix="resume=True to continue it, or another folder.")
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
    step = newest_step(store.folder)
    if step > _or_before(store.latest()):
        why = (
            "step %d of this run is in memory, and is not used: Checkpoint has no "
            "memory_every. The next save forgets it."
        )
        logging.getLogger("spmd").warning(why, step)


def _or_before(step: int | None) -> int:
    """Return a step; -1, which is before every step, for None."""
    if step is None:
        return -1
    return step


@dataclasses.dataclass(frozen=True)
class _NewestStates:
    """The newest states of a run.

    Attributes:
      on_disk: the newest step on disk, undamaged unless `in_memory` is newer; None if there is
        none.
      damaged: what is wrong with each newer step on disk; empty where the disk was not checked.
      in_memory: a newer state in memory; None if there is none.
    """

    on_disk: int | None
    damaged: dict[int, str]
    in_memory: MemoryState | None

    @property
    def step(self) -> int | None:
        """Return the step of the newest state; None if there is none."""
        if self.in_memory is not None:
            return self.in_memory.step
        return self.on_disk

    @property
    def memory_source(self) -> str:
        """Return where in memory the state was, and how much newer it is than the disk's; "" for
        one on disk.
        """
        if self.in_memory is None:
            return ""
        than_disk = "there is none on disk"
        if self.on_disk is not None:
            steps = self.in_memory.step - self.on_disk
            than_disk = f"{steps} steps after the newest checkpoint on disk"
        return f"memory ({self.in_memory.source}), {than_disk}"


def _newest(
    store: CheckpointStore, memory: MemoryCheckpoints | None, meta: dict[str, Any]
) -> _NewestStates:
    """Return the newest states of a run."""
    if memory is None:
        step, damaged = store.newest_intact()
        return _NewestStates(step, damaged, None)
    latest = store.latest()
    in_memory = newest_in_memory(memory, meta, after=_or_before(latest))
    if in_memory is not None:
        # A later save finds out whether the disk's is damaged.
        return _NewestStates(latest, {}, in_memory)
    step, damaged = store.newest_intact()
    if damaged:
        in_memory = newest_in_memory(memory, meta, after=_or_before(step))
    return _NewestStates(step, damaged, in_memory)


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
    """Return the newest state as the starting point; None if there is none."""
    newest = _newest(store, memory, meta)
    step = newest.step
    if step is None:
        if newest.damaged:
            raise _all_damaged(store, newest.damaged)
        return None
    if newest.in_memory is None:
        saved = store.meta(step)
    else:
        saved = newest.in_memory.meta
    with store.naming_errors(step):
        callbacks = saved.get("callbacks", [])
        changes = option_changes(saved, meta)
        owes_evaluation = saved.get("owes_evaluation") is True
        evaluated = saved.get("evaluated") is True
        account.resume(saved.get("pace"))
    now = meta["data"]
    # a state that `Trainer.save` got without a `StepInfo`
    alone = "position" not in saved
    if alone and changed_data:
        position = Position()
        data = now
    else:
        fix = f'or  resume="{CHANGED_DATA}"  to begin with the first epoch of the data.'
        position, data = saved_position(saved, step, store, fix)
    problems = data_changes(data, now)
    headline = f"the run in {store.folder} cannot be resumed: its data is not the same"
    if not changed_data:
        _check_order(headline, problems)
    if is_hashed(now) and not is_hashed(data):
        changes.append(
            "the checkpoint has no hash of its data, so the contents of the data were not compared"
        )
    if alone:
        changes.append(
            "the checkpoint does not say where in its data the loop was: its first epoch begins"
        )
    # So that the restored state finds their memory free.
    trainer.placed.spec.release()
    if newest.in_memory is None:
        state, state_changes = trainer.load(store, step)
    else:
        built = newest.in_memory.build()
        numbers = saved_numbers(saved, trainer.abstract_state)
        state, state_changes = trainer.script_numbers.update(built, numbers)
    if changed_data:
        position, lines = resumed_position(position, data, now, list(problems))
        changes += lines
        if "seed" in problems:
            state = _with_seed(state, now["seed"])
            changes.append("random numbers, such as those of dropout, are drawn from the new seed")
    else:
        # raised last: if the model has changed too, that error is more useful
        _check_data(headline, problems)
    # Only now is it certain that the run resumes.
    store.move_damaged(newest.damaged)
    return StartPoint(
        state,
        position,
        callbacks,
        [*changes, *state_changes],
        owes_evaluation,
        evaluated,
        newest.memory_source,
    )


def _all_damaged(store: CheckpointStore, damaged: dict[int, str]) -> CheckpointError:
    """Return the error for a run of which no checkpoint can be read."""
    problems = [Problem(f"step {step}", [why]) for step, why in damaged.items()]
    fix = (
        f"use another copy of the folder, or remove {store.folder}/checkpoints to start at step 0."
    )
    text = problems_text(f"every checkpoint in {store.folder} is damaged", problems)
    return CheckpointError(f"{text}\n", fix=fix, problems=problems)


def _with_seed(state: State, seed: Any) -> State:
    """Return a state whose random numbers are drawn from another seed."""
    key = place_copy(seed_data(seed), state.key.sharding)
    return dataclasses.replace(state, key=key)


def _check_data(headline: str, problems: dict[str, Problem]) -> None:
    """Refuse data that differs from the saved run's."""
    fix = (
        f'use the data that the run began with, or resume="{CHANGED_DATA}" to resume on this data.'
    )
    fixed = [dataclasses.replace(problem, fix=fix) for problem in problems.values()]
    raise_problems(CheckpointError, headline, fixed)


def _check_order(headline: str, problems: dict[str, Problem]) -> None:
    """Refuse data in other batches or another order; contents alone are compared later."""
    of_order = [problem for name, problem in problems.items() if not name.startswith("contents")]
    if of_order:
        keeps = "which keeps weights, optimizer and step, and says what of the order is lost"
        fix = f'data, batches and order as the run began; or resume="{CHANGED_DATA}", {keeps}.'
        of_order[-1] = dataclasses.replace(of_order[-1], fix=fix)
        raise_problems(CheckpointError, headline, of_order)
