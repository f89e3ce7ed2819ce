"""Checkpoints of loops that users write: which steps a trainer knows of, so that two runs are never mixed in one folder."""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmd.distributed import watchdog
from spmd.errors import CheckpointError, OptionError, did_you_mean
from spmd.run.checkpoint import Checkpoint, CheckpointStore
from spmd.train.state import State

_unfinished: "weakref.WeakSet[CheckpointStore]" = weakref.WeakSet()  # with a save that was not waited for


def _finish_at_exit() -> None:
    """Complete what is being written when a script ends; it is too late to raise."""
    for store in list(_unfinished):
        try:
            store.close()
        except Exception as error:
            logging.getLogger("spmd").error("%s", error)


# in an `atexit` function Orbax could no longer start the threads that it writes with
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]


class LoopCheckpoints:
    """The checkpoints that one trainer restores and saves. A folder is owned from a save until it is waited for."""

    def __init__(self):
        self._store: CheckpointStore | None = None  # of a save that was not waited for
        self._newest: dict[Path, tuple[int, Callable[[], State | None]]] = {}  # by folder: the step that is this trainer's, and its state

    def restored(self, folder: Path, step: int, state: State) -> None:
        """Note that the trainer continues the run in a folder from this step."""
        self._newest[folder] = step, weakref.ref(state)

    def save(self, config: Checkpoint, state: State, step: int, meta: dict[str, Any], metrics: Mapping[str, float], *, wait: bool) -> None:
        """Write a checkpoint; unless it is to be waited for, return as soon as a step may consume the state.

        Raises:
          CheckpointError: the folder holds another run, or steps that are not before this one; or this checkpoint, or the previous one,
            cannot be written.
        """
        check_config(config, metrics)
        with watchdog.current().in_phase("save"):
            store = self._open(config)
            try:
                store.wait()  # for the previous save, without which the next lines would find fault with this one
                self._check_step(store, state, step)
                store.save(state, step, meta, dict(metrics))
                self.restored(store.folder, step, state)
                _unfinished.add(store)
                if wait:
                    store.wait()
            except BaseException:
                self._discard(store)
                store.release()
                self._forget_lost(store)
                raise
            if wait:
                self._discard(store)
                store.close()

    def _discard(self, store: CheckpointStore) -> None:
        self._store = None
        _unfinished.discard(store)

    def _open(self, config: Checkpoint) -> CheckpointStore:
        if self._store is not None and self._store.config != config:
            before = self._store
            self._discard(before)
            try:
                before.close()
            except BaseException:
                self._forget_lost(before)
                raise
        self._store = self._store or CheckpointStore(config)
        return self._store

    def _forget_lost(self, store: CheckpointStore) -> None:
        """After a failure, continue from what is on disk."""
        with contextlib.suppress(CheckpointError):
            latest, (step, _) = store.latest(), self._newest.get(store.folder, (None, None))
            if step is not None and step != latest:
                del self._newest[store.folder]
                if latest is not None:
                    self._newest[store.folder] = latest, lambda: None

    def _check_step(self, store: CheckpointStore, state: State, step: int) -> None:
        newest = store.latest()
        if newest is None:
            return
        known, saved = self._newest.get(store.folder, (None, lambda: None))
        if known is None:
            fix = "trainer.restore(folder) to continue it, or another folder."
            raise CheckpointError(f"{store.folder} already holds a run, up to step {newest}.", fix=fix)
        if known != newest:
            why = f"{store.folder} holds step {newest}, and this loop continues step {known}"
            raise CheckpointError(f"{why}: a later restore would mix the two.", fix="another folder.")
        if step < newest or (step == newest and saved() is not state):
            raise CheckpointError(f"step {step} is not after step {newest}, the newest in {store.folder}.", fix="another folder.")


def check_config(config: Checkpoint, metrics: Mapping[str, float]) -> None:
    """Refuse options that a loop of the user's cannot have, and a missing metric.

    Raises:
      OptionError: such an option is given.
    """
    for name in ("every", "memory_every"):
        if getattr(config, name) is not None:
            raise OptionError(f"Checkpoint: {name} has no effect on Trainer.save: your loop decides when to save.", fix="leave it out.")
    if config.best is not None and config.best not in metrics:
        fix = did_you_mean(config.best, metrics) if metrics else f'trainer.save(..., metrics={{"{config.best}": ...}}).'
        raise OptionError(f'Checkpoint: there is no metric "{config.best}".', fix=fix)
