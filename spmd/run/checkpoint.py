"""Write checkpoints with Orbax: the state, the position in the data, and the layout, atomically.

One folder per step. `state` holds every array under its path; `meta` holds their shapes, so that a
mismatch with the model is reported in a table before anything is read, the data position, and the
layout as TOML.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from spmd.base.output_files import sync_tree
from spmd.base.tracebacks import trims_tracebacks
from spmd.base.tree import describe, format_bytes
from spmd.base.user_paths import as_path, check_characters, make_folder
from spmd.distributed import watchdog
from spmd.distributed.consistency import first_nonempty
from spmd.errors import (
    CheckpointError,
    OptionError,
    SpmdError,
    check_integer,
    did_you_mean,
    first_line,
    option,
    short_repr,
    type_name,
)
from spmd.run.checkpoint_reader import (
    FORMAT,
    CheckpointReader,
    active_processes,
    arrays_by_path,
    import_orbax,
)
from spmd.run.device_snapshot import StateCopier, fits_on_devices
from spmd.run.manifest import write_manifest
from spmd.run.memory_folder import forget_run
from spmd.run.owner import FolderOwnership
from spmd.run.restore_comm_state import COMM_STATE, STATE, checkpoint_item
from spmd.run.retention import kept_steps, remove_checkpoint, remove_leftovers
from spmd.train.state import State

# Characters with a meaning of their own in a pattern of paths. Orbax (0.12) finds the arrays that
# it has just written by such a pattern.
PATTERN = "[]*?\\"
MERGED = "manifest.ocdbt"  # Orbax's list of the arrays of all processes, once it has merged them
HEADROOM = 1.2  # times the size of a checkpoint that must be free on disk before it is written


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The folder of a run's checkpoints, how often to save, and how many to keep.
    `fit(checkpoint="runs/digits")` is `Checkpoint("runs/digits")`.

    Training continues while a checkpoint is written. If each device has room for a second state
    beyond its peak usage, the state is copied there and a thread does the rest; otherwise training
    waits until the state is in host memory. On CPU devices the copy stays in memory until the run
    ends.

    Args:
      path: a folder; checkpoints are in its `checkpoints/`, a record for every `log_every` steps in
        `metrics.jsonl`, every step in `history.bin` (`History.read`).
      every: steps between two checkpoints; None saves at the end of each epoch. The last step is
        always saved.
      keep: how many of the newest checkpoints to keep; None: all.
      best: metric whose best checkpoint is kept as well, such as "eval_accuracy"; None keeps only
        the newest.
      mode: whether the best value is the "min" or the "max".
      memory_every: steps between two checkpoints in the memory of the hosts, from which a restarted
        run resumes where they are newer than those on disk; None: none are made (docs/clusters.md).
      memory_folder: where these are; None: $SPMD_MEMORY_FOLDER, or /dev/shm.

    Example:
      >>> Checkpoint("runs/digits", every=500, best="eval_accuracy", mode="max").keep
      2
    """

    path: str | Path
    every: int | None = None
    keep: int | None = 2
    best: str | None = None
    mode: str = "min"
    memory_every: int | None = None
    memory_folder: str | Path | None = None

    def __post_init__(self):
        object.__setattr__(self, "path", as_path(self.path, "checkpoint"))
        if self.mode not in ("min", "max"):
            raise OptionError(
                f'Checkpoint: no mode "{self.mode}".', fix=did_you_mean(self.mode, ("min", "max"))
            )
        check_integer(self.every, "Checkpoint: every", optional=True)
        check_integer(self.keep, "Checkpoint: keep", optional=True)
        check_integer(self.memory_every, "Checkpoint: memory_every", optional=True)
        if self.memory_folder is not None:
            object.__setattr__(
                self, "memory_folder", as_path(self.memory_folder, "Checkpoint: memory_folder")
            )
            if self.memory_every is None:
                raise OptionError(
                    "Checkpoint: memory_folder has no effect without memory_every.",
                    fix="memory_every=20, or leave it out.",
                )


LOOK_AT_DISK = (
    "see whether the disk of that folder works; resume=True resumes from the newest checkpoint."
)
RAISE_MEMORY_LIMIT = (
    "raise the limit of the process's memory or threads (`ulimit -v`, `ulimit -u`); resume=True "
    "resumes from the newest checkpoint."
)


def as_checkpoint(value: Any) -> Checkpoint | None:
    """Return a `Checkpoint` from the argument of `fit`: a folder, a `Checkpoint`, or None."""
    if value is None or isinstance(value, Checkpoint):
        return value
    if isinstance(value, str | os.PathLike):
        return Checkpoint(as_path(value, "checkpoint"))
    raise OptionError(
        f"{option('checkpoint', short_repr(value))} is {type_name(value)}.",
        fix="a folder, or an spmd.Checkpoint.",
    )


class _Failures(logging.Handler):
    """A handler of logs that ends a process of several whose save fails. Orbax only logs the
    failure, then waits for the other processes, which wait for it.

    Attributes:
      folder: of the run that was saved last.
    """

    folder = Path()

    def emit(self, record: logging.LogRecord) -> None:
        """Report the error to the other processes, and exit."""
        error = record.exc_info[1] if record.exc_info else None
        # Orbax's name of the thread that writes.
        if error is not None and record.threadName == "async_save":
            _report_failure(self.folder, error)


def _report_failure(folder: Path, error: BaseException) -> None:
    if jax.process_count() > 1:
        failure = _not_written(folder, error)
        watchdog.print_error(failure)
        watchdog.current().report_failure(failure)


def _not_written(folder: Path, error: BaseException) -> CheckpointError:
    why = f"a checkpoint could not be written to {folder}: {first_line(error)}"
    # Python has no exception of its own for a thread that did not get its stack (3.11).
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return CheckpointError(why, fix=RAISE_MEMORY_LIMIT)
    return CheckpointError(why, fix=LOOK_AT_DISK)


def _handlers() -> Any:
    """Return Orbax's handlers of the parts of a checkpoint."""
    ocp = import_orbax()
    options = ocp.options.MultiprocessingOptions(active_processes=active_processes())
    arrays = ocp.type_handlers.get_type_handler(jax.Array)
    if jax.process_count() == 1:
        # Orbax (0.12) divides a replicated array among its replicas, by slices on the devices: each
        # process writes a part, and a program for each shape and device is compiled while the first
        # checkpoint is saved. One process would write all parts itself, so it divides nothing.
        # By default an ArrayHandler has no store of metadata.
        store = getattr(arrays, "_array_metadata_store", None)
        arrays = ocp.type_handlers.ArrayHandler(
            use_replica_parallel=False, array_metadata_store=store
        )
    types = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    handlers = ocp.DefaultCheckpointHandlerRegistry()
    for item in (STATE, *COMM_STATE):
        handlers.add(
            item,
            ocp.args.PyTreeSave,
            ocp.PyTreeCheckpointHandler(
                type_handler_registry=types, multiprocessing_options=options
            ),
        )
    handlers.add(
        "meta", ocp.args.JsonSave, ocp.JsonCheckpointHandler(multiprocessing_options=options)
    )
    return handlers


_failures = _Failures()
_nothing_to_write = futures.Future[Any]()
_nothing_to_write.set_result(None)


def _daemon_executor() -> futures.ThreadPoolExecutor:
    """Return an executor for saves, with one thread: a daemon, and so are those that Orbax starts
    in it.
    """
    # After a failed save Orbax's threads wait for minutes for one another (300 s in 0.12), and a
    # process ends only when all threads that are not daemons have ended. A save that goes well is
    # waited for: Python waits for what executors do.
    executor = futures.ThreadPoolExecutor(1, thread_name_prefix="spmd save")
    # An executor starts its thread at the first task, and a thread is a daemon if the one that
    # starts it is.
    starter = threading.Thread(target=executor.submit, args=(int,), daemon=True)
    starter.start()
    starter.join()
    return executor


def check_name(folder: Path) -> None:
    """Refuse a folder whose path is read as a pattern where Orbax looks for the arrays that it has
    just written: it finds none, without an error.

    Raises:
      CheckpointError: names the characters, and a path without them.
    """
    check_characters(folder.absolute(), PATTERN, "could not be read again")


class CheckpointStore(CheckpointReader):
    """A run's checkpoints on disk, read and written by their one owner. Saving is asynchronous;
    `close` waits and raises any failure.

    Raises:
      CheckpointError: the folder belongs to another process that is still running.
    """

    def __init__(self, config: Checkpoint):
        super().__init__(config.path)
        self.config = config
        check_name(self.folder)
        self._acquire_ownership()
        self._writing = 0
        self._written = _nothing_to_write
        # Decided by the first save: later the copy itself raises the peak usage.
        self._threaded: bool | None = None
        self._copier: StateCopier | None = None
        # At most one, by step: made, but not handed to the thread yet.
        self._copies: dict[int, State] = {}
        # Of the checkpoints on disk, by step, once there is a manager.
        self._scores: dict[int, float | None] = {}
        self._bytes = 0  # size of a state, once one is saved
        # Seconds that the last checkpoint took to be written; 0 before the first.
        self.write_seconds = 0.0
        self._thread = _daemon_executor()
        try:
            self._saved = self.latest()
        except BaseException:
            self.release()
            raise

    def _acquire_ownership(self) -> None:
        """Acquire ownership of the folder; process 0 does so for all processes of a run."""
        self._ownership: FolderOwnership | None = None
        make_folder(self.folder / "checkpoints", CheckpointError)
        error = None
        if jax.process_index() == 0:
            try:
                self._ownership = FolderOwnership(self.folder)
                # In case the store is never closed, as after an error in a notebook.
                weakref.finalize(self, self._ownership.release)
            except CheckpointError as raised:
                error = raised
        message = first_nonempty("" if error is None else str(error))
        if message:
            raise error or CheckpointError(message)

    @functools.cached_property
    def _manager(self) -> Any:
        """Orbax's manager, which only an owner that saves may create."""
        from orbax.checkpoint import checkpoint_managers as policies

        ocp = import_orbax()
        config = self.config
        # A checkpoint whose metrics cannot be read could not be ranked.
        unreadable = {step: first_nonempty(self._unreadable_metrics(step)) for step in self.steps()}
        self.move_damaged({step: why for step, why in unreadable.items() if why})
        self.remove_leftovers()
        # Added once: `addHandler` ignores a handler that a logger has, as with several stores.
        logging.getLogger("absl").addHandler(_failures)
        self._scores = dict.fromkeys(self.steps())
        if config.best:
            for step in self._scores:
                self._scores[step] = self.metrics(step).get(config.best)
        options = ocp.CheckpointManagerOptions(
            # All: Orbax would remove an older one before the newest is on disk.
            preservation_policy=policies.LatestN(None),
            # Only with a best_fn does Orbax write metrics to disk, where a resumed run finds them.
            best_fn=None if config.best is None else lambda metrics: metrics[config.best],
            best_mode=config.mode,
            enable_async_checkpointing=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=active_processes()
            ),
        )
        return ocp.CheckpointManager(
            self.folder / "checkpoints", options=options, handler_registry=_handlers()
        )

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left. A run that has begun does so though it may save
        nothing; one that is refused does not.
        """
        if jax.process_index() == 0:
            remove_leftovers(self.folder)

    def _unreadable_metrics(self, step: int) -> str:
        try:
            self.metrics(step)
        except CheckpointError as error:
            return str(error.__cause__)
        return ""

    def steps(self) -> list[int]:
        """All steps on disk, oldest first; waits for the one being written."""
        futures.wait([self._written])
        return super().steps()

    def move_damaged(self, damaged: Mapping[int, str]) -> None:
        """Move damaged checkpoints, given as {step: what is wrong}, to another folder, with a
        warning that says where.
        """
        for step, why in damaged.items():
            if jax.process_index() == 0:
                folder = self.folder / "damaged"
                numbered = (folder / f"{step}-{number}" for number in itertools.count(1))
                candidates = itertools.chain([folder / f"{step}"], numbered)
                target = next(path for path in candidates if not path.exists())
                folder.mkdir(exist_ok=True)
                self._path(step).rename(target)
                logging.getLogger("spmd").warning(
                    "the checkpoint of step %d is damaged (%s): it was moved to %s.",
                    step,
                    why,
                    target,
                )
            # A barrier: from here the step is gone for all processes.
            first_nonempty("")
        self._saved = self.latest()

    def _seal(self) -> None:
        """Write the manifest. Orbax calls this when everything is written, before it commits the
        checkpoint.
        """
        if jax.process_index() != 0:
            return
        self._check_owner()
        # Orbax writes a step into a folder of this name, and renames it at the end.
        pattern = f"{self._writing}.orbax-checkpoint-tmp*"
        folders = [*(self.folder / "checkpoints").glob(pattern)]
        if not folders:
            raise CheckpointError(
                f"the temporary folder of step {self._writing} is missing in {self.folder}.",
                fix=LOOK_AT_DISK,
            )
        folder = folders[0]
        # Orbax (0.12) does not fail where it finds no arrays to merge.
        if not (folder / STATE / MERGED).exists():
            raise CheckpointError(
                f"the arrays of step {self._writing} were written, and not merged: "
                f"{folder / STATE / MERGED} is missing.",
                fix=LOOK_AT_DISK,
            )
        write_manifest(folder)
        # Before Orbax gives the folder its name: after a loss of power, a checkpoint with a name is
        # complete.
        sync_tree(folder)

    def save(
        self, state: State, step: int, meta: dict[str, Any], metrics: dict[str, float]
    ) -> bool:
        """Start to write a checkpoint; returns False if this step was saved already."""
        if self._saved == step:
            return False
        # For the previous save: its failure must be raised now, not at the end of the run.
        self.wait()
        began = time.monotonic()
        self._check_owner()
        self._check_disk_space(state)
        if self.config.memory_every is None and jax.process_index() == 0:
            # A state in memory is of another course of the run from now on.
            forget_run(self.folder)
        if self._threaded is None:
            # All processes decide the same: a copy is a program on the devices of all.
            self._threaded = not first_nonempty("" if fits_on_devices(state) else "full")
        # Created here, by all processes together, and not in the thread: it has barriers.
        _ = self._manager
        _failures.folder = self.folder
        self._writing = step
        if self._threaded:
            self.copy(state, step)
            self._written = self._thread.submit(
                self._write_copy, [self._copies.pop(step)], step, meta, metrics
            )
        else:
            self._thread.submit(self._write, state, step, meta, metrics).result()
            self._written = self._thread.submit(self._finish)
        self._written.add_done_callback(
            lambda _: setattr(self, "write_seconds", time.monotonic() - began)
        )
        self._saved = step
        return True

    def _check_owner(self) -> None:
        if self._ownership is not None:
            self._ownership.check()

    def copy(self, state: State, step: int) -> None:
        """Queue a copy of the state on the devices, behind their current step; `save` hands it to a
        thread.

        Called before the host waits for that step, so that the devices need not wait for the host.
        It does nothing before the first save, which finds out whether there is room, nor while the
        previous save runs or if it failed; `save` waits for that and raises.
        """
        if (
            self._threaded
            and step not in (self._saved, *self._copies)
            and self._written.done()
            and not self._written.exception()
        ):
            # Drop the copy of a step that was not saved, before there are two.
            self._copies = {}
            self._copier = self._copier or StateCopier(state)
            self._copies = {step: self._copier(state)}

    def _write_copy(self, copy: list[State], *more: Any) -> None:
        """Write the one copy in the list, and empty the list, so that the copy is freed while its
        bytes go to disk.
        """
        try:
            jax.block_until_ready(copy)
            self._write(copy.pop(), *more)
        except BaseException as error:
            _report_failure(self.folder, error)
            raise
        self._finish()

    def _finish(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        if jax.process_index() == 0:
            self._keep_few()

    def _keep_few(self) -> None:
        """Remove the checkpoints that the options do not keep, once the newest is on disk."""
        # The name that Orbax has given the folder must be on disk, too, before others are removed.
        sync_tree(self._path(self._writing))
        # Without the steps whose save has failed. The reader's `steps`: this class's own would wait
        # for the save being written, which is this one.
        self._scores = {step: self._scores.get(step) for step in CheckpointReader.steps(self)}
        keeping = kept_steps(self._scores, self.config.keep, self.config.mode)
        for step in sorted(self._scores.keys() - keeping):
            remove_checkpoint(self._path(step))

    def _write(
        self, state: State, step: int, meta: dict[str, Any], metrics: dict[str, float]
    ) -> None:
        ocp = import_orbax()
        arrays = arrays_by_path(state)
        items = {}
        for item in (STATE, *COMM_STATE):
            leaves = {path: leaf for path, leaf in arrays.items() if checkpoint_item(path) == item}
            if leaves:
                items[item] = ocp.args.PyTreeSave(leaves)
        shapes = {path: describe(leaf) for path, leaf in arrays.items()}
        best = None if self.config.best is None else [self.config.best, self.config.mode]
        meta = {"format": FORMAT, "step": step, "arrays": shapes, "best": best, **meta}
        args = ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta))
        # Orbax copies the state to the host, and the loop has JAX's transfer guard on.
        with jax.transfer_guard_device_to_host("allow"):
            saved = self._manager.save(step, args=args, metrics=metrics or None, force=True)
        if not saved:
            raise CheckpointError(
                f"the checkpoint of step {step} was not written to {self.folder}.", fix=LOOK_AT_DISK
            )
        self._scores[step] = metrics.get(self.config.best or "")

    def _check_disk_space(self, state: State) -> None:
        self._bytes = self._bytes or sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        size = self._bytes
        free = shutil.disk_usage(self.folder).free
        if free < HEADROOM * size:
            why = f"{format_bytes(free)} are free, {HEADROOM} times its size is needed"
            fix = f"free some disk space, or lower Checkpoint(keep={self.config.keep})."
            raise CheckpointError(
                f"a checkpoint of {format_bytes(size)} does not fit in {self.folder}: {why}.",
                fix=fix,
            )

    def wait(self) -> None:
        """Wait until everything that was saved is on disk.

        Raises:
          CheckpointError: a checkpoint could not be written.
        """
        try:
            self._written.result()
        except Exception as error:
            # The error is raised once: a later save may succeed.
            self._written = _nothing_to_write
            # Orbax raises it once in each thread: here for this one.
            with contextlib.suppress(Exception):
                self._manager.wait_until_finished()
            self._saved = self.latest()
            if isinstance(error, SpmdError):
                raise
            raise _not_written(self.folder, error) from error
        if self._saved is not None and not self._path(self._saved).exists():
            missing = self._saved
            self._saved = None
            raise CheckpointError(
                f"the checkpoint of step {missing} is not on disk in {self.folder}; there are "
                f"{self.steps()}.",
                fix=LOOK_AT_DISK,
            )

    def release(self) -> None:
        """Release the folder, even if Ctrl-C interrupts the wait. A save that has failed is a
        warning: an error would take the place of the one that ends the run.
        """
        if error := self._close():
            logging.getLogger("spmd").warning(
                "a checkpoint could not be written to %s: %s", self.folder, first_line(error)
            )

    def _close(self) -> BaseException | None:
        """Release the folder; returns the error of a save that was not raised yet."""
        error = None
        try:
            self._thread.shutdown()
            if "_manager" in vars(self):
                # Orbax raises the error of a save once in each thread, and closes only after that:
                # first that of the arrays, then that of its own metadata.
                with contextlib.suppress(Exception):
                    self._manager.wait_until_finished()
                try:
                    self._manager.close()
                except Exception as of_metadata:
                    error = of_metadata
                    with contextlib.suppress(Exception):
                        self._manager.close()
            return self._written.exception() or error
        finally:
            if self._ownership is not None:
                self._ownership.release()

    def close(self) -> None:
        """Wait, and release the folder.

        Raises:
          CheckpointError: a checkpoint could not be written.
        """
        try:
            self.wait()
        except BaseException:
            self.release()
            raise
        if error := self._close():
            raise _not_written(self.folder, error) from error
