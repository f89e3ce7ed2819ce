"""Checkpoints by Orbax: the state, the position in the data, and the layout, together or not at all.

One folder per step. `state` holds every array under its path; `meta` holds the shapes of all of them, so that a model that
does not fit is told so in a table before anything is read; the data position; and the layout as TOML.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import shutil
import weakref
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from spmd.distributed import watchdog
from spmd.distributed.consistency import first_nonempty
from spmd.errors import CheckpointError, OptionError, SpmdError, did_you_mean, first_line, short_repr, type_name
from spmd.run.checkpoint_reader import FORMAT, CheckpointReader, active_processes, arrays_by_path, import_orbax
from spmd.run.device_snapshot import StateCopier, fits_on_devices
from spmd.run.manifest import write_manifest
from spmd.run.owner import FolderOwnership
from spmd.run.restore_comm_state import COMM_STATE, STATE, checkpoint_item
from spmd.train.state import State
from spmd.tree import describe, format_bytes
from spmd.user_paths import as_path, make_folder

ROOM = 1.2  # of a checkpoint's bytes that must be free before it is written


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where, how often and how many. `fit(checkpoint="runs/digits")` is `Checkpoint("runs/digits")`.

    Training goes on while a checkpoint is written. Where each device has room for a second state beside all that it has ever held,
    the state is copied there, and a thread does the rest; where it has not, the steps wait until the state is in the host's memory.
    A copy in the memory of CPU devices stays there until the run ends.

    Args:
      path: a folder; checkpoints are in its `checkpoints/`, records of `log_every` steps in `metrics.jsonl`, every step in
        `history.bin` (`History.read`).
      every: steps between two checkpoints; None writes one at the end of each epoch. The last step is always written.
      keep: how many of the newest are kept.
      best: metric whose best checkpoint is kept as well, such as "eval_accuracy"; None keeps only the newest.
      mode: "min" or "max", what is best.

    Example:
      >>> Checkpoint("runs/digits", every=500, best="eval_accuracy", mode="max").keep
      2
    """

    path: str | Path
    every: int | None = None
    keep: int = 2
    best: str | None = None
    mode: str = "min"

    def __post_init__(self):
        as_path(self.path, "checkpoint")
        if self.mode not in ("min", "max"):
            raise OptionError(f'Checkpoint: no mode "{self.mode}".', fix=f"{did_you_mean(self.mode, ('min', 'max'))}")
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"Checkpoint: {name}={value!r}; a whole number from 1.")


def as_checkpoint(given: Any) -> Checkpoint | None:
    """What the user gave as `checkpoint`: a folder, a `Checkpoint`, or None."""
    if given is None or isinstance(given, Checkpoint):
        return given
    if isinstance(given, str | Path):
        return Checkpoint(given)
    raise OptionError(f"checkpoint={short_repr(given)} is {type_name(given)}; a folder, or a spmd.Checkpoint.")


class _Failures(logging.Handler):
    """Ends a process of several whose save fails: Orbax writes that into its log, and then waits for the others, who wait for it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Tell the others, and leave."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.threadName == "async_save":
            _tell(error)


def _tell(error: BaseException) -> None:
    if jax.process_count() > 1:
        told = CheckpointError(f"a checkpoint could not be written: {type(error).__name__}: {error}")
        watchdog.print_error(told)
        watchdog.current().report_failure(told)


_failures = _Failures()


class CheckpointStore(CheckpointReader):
    """A run's checkpoints on disk, read and written by their one owner. Saving is asynchronous; `close` waits and raises what went wrong.

    Raises:
      CheckpointError: the folder belongs to another process that still runs.
    """

    def __init__(self, config: Checkpoint):
        super().__init__(config.path)
        self.config = config
        self._own()
        self._writing, self._written = 0, _nothing()
        self._threaded: bool | None = None  # known from the first save on: with a copy beside it, peaks say no more
        self._copier: StateCopier | None = None
        self._copies: dict[int, State] = {}  # at most one, by its step: made, and not given to the thread yet
        self._bytes = 0  # of a state, once one is saved
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="spmd save")
        try:
            self._saved = self.latest()
        except BaseException:
            self.release()
            raise

    def _own(self) -> None:
        """Own the folder: process 0 for all processes of a run."""
        self._ownership: FolderOwnership | None = None
        make_folder(self.folder / "checkpoints", CheckpointError)
        error = None
        if jax.process_index() == 0:
            try:
                self._ownership = FolderOwnership(self.folder)
                weakref.finalize(self, self._ownership.release)  # of a store that nobody closes, as after an error in a notebook
            except CheckpointError as raised:
                error = raised
        told = first_nonempty("" if error is None else str(error))
        if told:
            raise error or CheckpointError(told)

    @functools.cached_property
    def _manager(self) -> Any:
        """Orbax, which sweeps away what was begun and is not complete; so only an owner that saves has it."""
        from orbax.checkpoint import checkpoint_managers as policies

        ocp, config = import_orbax(), self.config
        unreadable = {step: first_nonempty(self._unreadable_metrics(step)) for step in self.steps()}
        self.move_damaged({step: why for step, why in unreadable.items() if why})
        logging.getLogger("absl").addHandler(_failures)  # once, however many stores there are
        keep: list[Any] = [policies.LatestN(config.keep)]
        judge: Any = None  # Orbax writes metrics to disk, where a resumed run finds them, only for a run that has one
        if config.best is not None:
            judge = lambda metrics: metrics[config.best]
            sign = 1.0 if config.mode == "max" else -1.0
            keep.append(policies.BestN(get_metric_fn=lambda m: sign * m[config.best], n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(keep),
            best_fn=judge,
            best_mode=config.mode,
            enable_async_checkpointing=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
            cleanup_tmp_directories=True,
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=active_processes()),
        )
        return ocp.CheckpointManager(self.folder / "checkpoints", options=options)

    def _unreadable_metrics(self, step: int) -> str:
        try:
            self.metrics(step)
        except CheckpointError as error:
            return str(error.__cause__)
        return ""

    def steps(self) -> list[int]:
        """All steps that are on disk, oldest first, when what is being written is."""
        futures.wait([self._written])
        return super().steps()

    def move_damaged(self, damaged: Mapping[int, str]) -> None:
        """Move steps out of the way, with what is wrong with each; a warning says where they are."""
        for step, why in damaged.items():
            place = self.folder / "damaged" / f"{step}"
            if jax.process_index() == 0:
                others = (place.with_name(f"{step}-{at}") for at in itertools.count(1))
                place = next(path for path in itertools.chain([place], others) if not path.exists())
                place.parent.mkdir(exist_ok=True)
                self._path(step).rename(place)
                logging.getLogger("spmd").warning("the checkpoint of step %d is damaged (%s): it is put aside in %s.", step, why, place)
            first_nonempty("")  # it is gone for all
        self._saved = self.latest()

    def _seal(self) -> None:
        """Called by Orbax when all is written, before it is committed."""
        if jax.process_index() != 0:
            return
        self._check_owner()
        (folder,) = (self.folder / "checkpoints").glob(f"{self._writing}.orbax-checkpoint-tmp*")
        write_manifest(folder)

    def save(self, state: State, step: int, meta: dict[str, Any], metrics: dict[str, float]) -> bool:
        """Start writing a checkpoint; False when this step is written already."""
        if self._saved == step:
            return False
        self.wait()  # for the one before, if it is still written: what has failed is told now, not with the last
        self._check_owner()
        self._check_room(state)
        if self._threaded is None:
            self._threaded = not first_nonempty("" if fits_on_devices(state) else "full")
        self._writing, manager = step, self._manager  # made here: processes do so together
        del manager
        if self._threaded:
            self.copy(state, step)
            self._written = self._thread.submit(self._write_copy, [self._copies.pop(step)], step, meta, metrics)
        else:
            self._write(state, step, meta, metrics)
            self._written = self._thread.submit(self._finish)
        self._saved = step
        return True

    def _check_owner(self) -> None:
        if self._ownership is not None:
            self._ownership.check()

    def copy(self, state: State, step: int) -> None:
        """Let devices copy, behind the step that they are at, what `save` will give to a thread.

        Called before the host waits for that step, it keeps them from waiting for the host. It does nothing before the first save, which
        finds out whether there is room; nor where the save before is not over, or has failed, which `save` waits for and tells.
        """
        if self._threaded and step not in (self._saved, *self._copies) and self._written.done() and not self._written.exception():
            self._copies = {}  # of a step that was not saved
            self._copier = self._copier or StateCopier(state)
            self._copies = {step: self._copier(state)}

    def _write_copy(self, copy: list[State], *more: Any) -> None:
        """Of a list with one copy, which is emptied: nobody holds the copy while its bytes go to the disk."""
        try:
            jax.block_until_ready(copy)
            self._write(copy.pop(), *more)
        except BaseException as error:
            _tell(error)
            raise
        self._finish()

    def _finish(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def _write(self, state: State, step: int, meta: dict[str, Any], metrics: dict[str, float]) -> None:
        ocp, arrays = import_orbax(), arrays_by_path(state)
        items = {item: {path: leaf for path, leaf in arrays.items() if checkpoint_item(path) == item} for item in (STATE, *COMM_STATE)}
        items = {item: ocp.args.StandardSave(leaves) for item, leaves in items.items() if leaves}
        shapes = {path: describe(leaf) for path, leaf in arrays.items()}
        best = None if self.config.best is None else [self.config.best, self.config.mode]
        meta = {"format": FORMAT, "step": step, "arrays": shapes, "best": best, **meta}
        args = ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta))
        with jax.transfer_guard_device_to_host("allow"):  # Orbax fetches the state
            saved = self._manager.save(step, args=args, metrics=metrics or None, force=True)
        if not saved:
            raise CheckpointError(f"the checkpoint of step {step} was not written to {self.folder}.")

    def _check_room(self, state: State) -> None:
        self._bytes = self._bytes or sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        size, free = self._bytes, shutil.disk_usage(self.folder).free
        if free < ROOM * size:
            has = f"{format_bytes(free)} are free, and {ROOM} times its size is wanted"
            fix = f"room; or a smaller Checkpoint(keep=...), which is {self.config.keep}"
            raise CheckpointError(f"a checkpoint of {format_bytes(size)} does not fit {self.folder}: {has}.", fix=f"{fix}.")

    def wait(self) -> None:
        """Until everything handed over is on disk.

        Raises:
          CheckpointError: a checkpoint could not be written.
        """
        try:
            self._written.result()
        except Exception as error:
            self._written = _nothing()  # it is told once; who tries again, to save what there is, may be luckier
            with contextlib.suppress(Exception):
                self._manager.wait_until_finished()  # which raises to each thread once
            self._saved = self.latest()
            if isinstance(error, SpmdError):
                raise
            raise CheckpointError(f"a checkpoint could not be written to {self.folder}: {first_line(error)}") from error
        if self._saved is not None and not self._path(self._saved).exists():
            missing, self._saved = self._saved, None
            raise CheckpointError(f"the checkpoint of step {missing} is not on disk in {self.folder}; there are {self.steps()}.")

    def release(self) -> None:
        """Let go of the folder without a word about what is in it, also where Ctrl-C interrupts the waiting."""
        try:
            self._thread.shutdown()
            if "_manager" in vars(self):
                self._manager.close()
        finally:
            if self._ownership is not None:
                self._ownership.release()

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            self.release()


def _nothing() -> futures.Future[Any]:
    """Nothing is being written."""
    found = futures.Future[Any]()
    found.set_result(None)
    return found
