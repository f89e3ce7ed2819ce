"""How a run begins: in an empty folder at step 0, or where a checkpoint says that it stood."""

import contextlib
from typing import Any

import jax

from spmd.data.deal import Position
from spmd.errors import CheckpointError, OptionError, Problem, problems_text, raise_problems
from spmd.hosts.arrival import restarted
from spmd.hosts.guard import current
from spmd.hosts.replicas import check_replicas
from spmd.run.checkpoint import Checkpoint, Store
from spmd.run.pace import Pace
from spmd.train.state import State
from spmd.trainer import Trainer


def open_store(config: Checkpoint | None, opened: contextlib.ExitStack, *, resume: bool) -> Store | None:
    """The run's checkpoints; what is there already is gone on with, or is an error, never overwritten."""
    watch = current()
    watch.at("compile", 0)  # from here on all processes do the same, and none may be waited for without end
    opened.callback(watch.at, "script", 0)
    if config is None:
        if resume:
            raise OptionError('resume=True without a checkpoint folder.\n    cure: checkpoint="runs/name".')
        return None
    store = Store(config)
    opened.callback(store.release)
    if store.latest() is not None and not resume:
        raise CheckpointError(
            f"{store.folder} already holds a run, up to step {store.latest()}.\n    cure: resume=True to go on with it, or another folder."
        )
    return store


def start(store: Store | None, trainer: Trainer, meta: dict[str, Any]) -> tuple[State, Position, list, list[str], Pace]:
    """As `_begin`; copies that several processes have of the state are equal."""
    begun = _begin(store, trainer, meta)
    if jax.process_count() > 1:
        check_replicas(begun[0], "before the first step")
    return begun


def _begin(store: Store | None, trainer: Trainer, meta: dict[str, Any]) -> tuple[State, Position, list, list[str], Pace]:
    """The state to begin with, the place in the data where it stood, what callbacks had saved, which options changed, and the time spent.

    Raises:
      CheckpointError: the data is cut or ordered in another way than the saved run's, so it could not be gone on with.
    """
    step, damaged = store.intact() if store is not None else (None, {})
    if store is not None and step is None and damaged:
        problems = [Problem(f"step {step}", [why]) for step, why in damaged.items()]
        cure = f"\n\n    cure: another copy of the folder; or remove {store.folder}/checkpoints, and the run starts at step 0."
        raise CheckpointError(problems_text(f"every checkpoint in {store.folder} is damaged", problems) + cure)
    if store is None or step is None:
        return trainer.init(), Position(), [], [], Pace()
    saved = store.meta(step)
    with store.reading(step):
        position, options = Position(**saved["position"]), {"mesh": saved["mesh"], **saved["options"]}
        data, layout, callbacks = saved["data"], saved["layout"], saved["callbacks"]
        pace = Pace(saved.get("pace") if restarted() else None)  # a run that somebody has resumed may have rested for days
    problems = [
        Problem(name, [f"saved {data.get(name)!r}, now {meta['data'].get(name)!r}"])
        for name in dict.fromkeys([*data, *meta["data"]])
        if data.get(name) != meta["data"].get(name)
    ]
    raise_problems(CheckpointError, f"the run in {store.folder} cannot be gone on with: its data was cut in another way", problems)
    changed = [
        f"{name} was {options.get(name)}, is {now}"
        for name, now in {"mesh": meta["mesh"], **meta["options"]}.items()
        if options.get(name) != now
    ]
    changed += ["the layout was another"] if layout != meta["layout"] else []
    state, told = trainer.load(store, step)
    store.put_aside(damaged)  # not before it is certain that the run is resumed
    return state, position, callbacks, [*changed, *told], pace
