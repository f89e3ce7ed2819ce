"""Starts a run: at step 0 in an empty folder, or from its newest checkpoint."""

import contextlib
import dataclasses
from typing import Any

from spmd.data.work_assignment import Position
from spmd.distributed.watchdog import current
from spmd.errors import CheckpointError, OptionError, Problem, problems_text, raise_problems
from spmd.run.checkpoint import Checkpoint, CheckpointStore
from spmd.run.config import StartPoint
from spmd.run.goodput import RESTORING
from spmd.run.time_account import TimeAccount
from spmd.trainer import Trainer

CHANGED_DATA = "changed_data"  # fit(resume=...): resume although the contents of the data have changed


def wants_resume(resume: bool | str) -> bool:
    """Whether `fit(resume=...)` asks to resume.

    Raises:
      OptionError: it is neither a bool nor "changed_data".
    """
    if not isinstance(resume, bool) and resume != CHANGED_DATA:
        fix = f'True, False, or "{CHANGED_DATA}" to resume where the contents of the data have changed.'
        raise OptionError(f"resume={resume!r}", fix=fix)
    return bool(resume)


def open_store(config: Checkpoint | None, opened: contextlib.ExitStack, *, resume: bool) -> CheckpointStore | None:
    """The run's checkpoints. Existing ones are resumed or are an error; they are never overwritten."""
    watch = current()
    watch.record_progress("compile", 0)  # from here on all processes run in step, and waiting for each other has a time limit
    opened.callback(watch.record_progress, "script", 0)
    if config is None:
        if resume:
            raise OptionError("resume=True without a checkpoint folder.", fix='checkpoint="runs/name".')
        return None
    store = CheckpointStore(config)
    opened.callback(store.release)
    if store.latest() is not None and not resume:
        fix = "resume=True to continue it, or another folder."
        raise CheckpointError(f"{store.folder} already holds a run, up to step {store.latest()}.", fix=fix)
    return store


def start(store: CheckpointStore | None, trainer: Trainer, meta: dict[str, Any], account: TimeAccount, *, changed_data: bool) -> StartPoint:
    """The starting point of a run: the newest undamaged checkpoint, or step 0 if there is none.

    Raises:
      CheckpointError: the data differs from the saved run's, or comes in other batches or another order.
    """
    if store is None or store.latest() is None:
        account.resume(None)
        return StartPoint(trainer.init())
    with account(RESTORING):
        return _restore(store, trainer, meta, account, changed_data=changed_data)


def _restore(store: CheckpointStore, trainer: Trainer, meta: dict[str, Any], account: TimeAccount, *, changed_data: bool) -> StartPoint:
    """The newest undamaged checkpoint as the starting point."""
    step, damaged = store.newest_intact()
    if step is None and damaged:
        problems = [Problem(f"step {step}", [why]) for step, why in damaged.items()]
        fix = f"use another copy of the folder, or remove {store.folder}/checkpoints to start at step 0."
        text = problems_text(f"every checkpoint in {store.folder} is damaged", problems)
        raise CheckpointError(f"{text}\n", fix=fix, problems=problems)
    if step is None:
        account.resume(None)
        return StartPoint(trainer.init())
    saved = store.meta(step)
    with store.naming_errors(step):
        position, options = Position(**saved["position"]), {"mesh": saved["mesh"], **saved["options"]}
        data, layout, callbacks = saved["data"], saved["layout"], saved["callbacks"]
        owes = saved.get("owes_evaluation") is True
        account.resume(saved.get("pace"))
    now = meta["data"]
    hashed = any(name.startswith("contents") for name in data)  # checkpoints of earlier versions have no hashes
    unhashed = [] if hashed else [name for name in now if name.startswith("contents")]
    different = [name for name in dict.fromkeys([*data, *now]) if name not in unhashed and data.get(name) != now.get(name)]
    problems = {name: Problem(name, [f"saved {data.get(name)!r}, now {now.get(name)!r}"]) for name in different}
    headline = f"the run in {store.folder} cannot be resumed: its data is not the same"
    raise_problems(CheckpointError, headline, [problem for name, problem in problems.items() if not name.startswith("contents")])
    new_options = {"mesh": meta["mesh"], **meta["options"]}
    names = [name for name in {**options, **new_options} if options.get(name) != new_options.get(name)]
    changes = [f"{name} was {options.get(name)}, is {new_options.get(name)}" for name in names]
    changes += ["the layout has changed"] if layout != meta["layout"] else []
    changes += ["the checkpoint has no hash of its data, so the contents of the data were not compared"] if unhashed else []
    trainer.placed.release()  # so that the restored state finds their memory free
    state, comm_changes = trainer.load(store, step)
    if changed_data:
        changes += [f"{name} of the data have changed" for name in problems]
    else:  # raised last: if the model has changed too, that error is more useful
        fix = f'use the data that the run began with, or resume="{CHANGED_DATA}" to resume on this data.'
        raise_problems(CheckpointError, headline, [dataclasses.replace(problem, fix=fix) for problem in problems.values()])
    store.move_damaged(damaged)  # only now is it certain that the run resumes
    return StartPoint(state, position, callbacks, [*changes, *comm_changes], owes)
