"""Checkpoints by Orbax: the state, the position in the data, and the layout, together or not at all.

One folder per step. `state` holds every array under its path; `meta` holds the shapes of all of them, so that a model that
does not fit is told so in a table before anything is read; the data position; and the layout as TOML.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.comm.server.storage import Storage
from spmd.errors import CheckpointError, OptionError, a_kind, did_you_mean, raise_problems, shown
from spmd.folders import as_path, make_folder
from spmd.hosts import guard
from spmd.hosts.handshake import first_of_all
from spmd.run.copies import Copier, has_room_for
from spmd.run.manifest import NAME, damage, seal
from spmd.run.remembered import REMEMBERED, STATE, item_of, memory_to_read, resplit
from spmd.run.repack import OPT, PARAMS, Packing, Plain, Repacking, in_words, misfits, misfits_of_parameters, packing_of
from spmd.train.state import State
from spmd.tree import Tree, abstract, describe, flatten, format_bytes, map_paths

FORMAT = 3
WITHOUT_MANIFEST = 2  # the format before; its checkpoints are read as they are
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
            raise OptionError(f'Checkpoint: no mode "{self.mode}".\n    cure: {did_you_mean(self.mode, ("min", "max"))}')
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
    raise OptionError(f"checkpoint={shown(given)} is {a_kind(given)}; a folder, or a spmd.Checkpoint.")


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
        guard.show(told)
        guard.current().failed(told)


_failures = _Failures()


class Store:
    """A run's checkpoints on disk. Saving is asynchronous; `close` waits and raises what went wrong."""

    def __init__(self, config: Checkpoint):
        import orbax.checkpoint as ocp  # a fifth of a second: only for a run that saves
        from orbax.checkpoint import checkpoint_managers as policies

        self.config, self._args = config, ocp.args
        self.folder = Path(config.path).absolute()
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every save at INFO and WARNING
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
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=_all_processes()),
        )
        make_folder(self.folder / "checkpoints", CheckpointError)
        self._writing, self._written = 0, _nothing()
        self._threaded: bool | None = None  # known from the first save on: with a copy beside it, peaks say no more
        self._copier: Copier | None = None
        self._copies: dict[int, State] = {}  # at most one, by its step: made, and not given to the thread yet
        self._bytes = 0  # of a state, once one is saved
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="spmd save")
        self._manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)
        self._saved = self.latest()

    def latest(self) -> int | None:
        """The newest step that is on disk, when what is being written is."""
        futures.wait([self._written])
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All of these steps, oldest first."""
        futures.wait([self._written])
        return sorted(self._manager.all_steps())

    def sound(self) -> int | None:
        """The newest step whose files are as they were written; newer ones that are not are put aside, with a warning each."""
        while (step := self.latest()) is not None:
            why = self.damage(step)
            if why is None:
                return step
            place = self.folder / "damaged" / f"{step}"
            if jax.process_index() == 0:
                others = (place.with_name(f"{step}-{at}") for at in itertools.count(1))
                place = next(path for path in itertools.chain([place], others) if not path.exists())
                place.parent.mkdir(exist_ok=True)
                self._path(step).rename(place)
                logging.getLogger("spmd").warning("the checkpoint of step %d is damaged (%s): it is put aside in %s.", step, why, place)
            first_of_all("")  # it is gone for all
            self._manager.reload()
            self._saved = self.latest()
        return None

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a step; None where they are as they were written. Processes share the reading."""
        why = damage(self._path(step), jax.process_index(), jax.process_count())
        if why is not None and not (self._path(step) / NAME).exists() and self._format(step) == WITHOUT_MANIFEST:
            why = None
        return first_of_all(why or "") or None

    def _path(self, step: int) -> Path:
        return self.folder / "checkpoints" / str(step)

    def _format(self, step: int) -> int | None:
        try:
            return int(json.loads((self._path(step) / "meta" / "metadata").read_text(encoding="utf-8"))["format"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _seal(self) -> None:
        """Called by Orbax when all is written, before it is committed."""
        if jax.process_index() != 0:
            return
        (folder,) = (self.folder / "checkpoints").glob(f"{self._writing}.orbax-checkpoint-tmp*")
        seal(folder)

    def step(self, which: int | str) -> int:
        """The step that is meant by "latest", "best" or a number.

        Raises:
          CheckpointError: there is none, or the run did not say what is best.
        """
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.folder}.")
        if which == "latest":
            return steps[-1]
        if which != "best":
            if which not in steps:
                raise CheckpointError(
                    f"there is no checkpoint of step {which!r} in {self.folder}.\n    cure: {', '.join(map(str, steps))}."
                )
            return int(which)
        judged = self.meta(steps[-1])["best"]
        if judged is None:
            raise CheckpointError(
                f"the run in {self.folder} did not say what is best.\n    cure: fit(checkpoint=Checkpoint(..., best=...))."
            )
        metric, mode = judged
        values = {step: (self._manager.metrics(step) or {}).get(metric) for step in steps}
        known = {step: value for step, value in values.items() if value is not None}
        return (max if mode == "max" else min)(known, key=lambda step: known[step])

    def save(self, state: State, step: int, meta: dict[str, Any], metrics: dict[str, float]) -> bool:
        """Start writing a checkpoint; False when this step is written already."""
        if self._saved == step:
            return False
        self.wait()  # for the one before, if it is still written: what has failed is told now, not with the last
        self._check_room(state)
        if self._threaded is None:
            self._threaded = not first_of_all("" if has_room_for(state) else "full")
        self._writing = step
        if self._threaded:
            self.copy(state, step)
            self._written = self._thread.submit(self._write_copy, [self._copies.pop(step)], step, meta, metrics)
        else:
            self._write(state, step, meta, metrics)
            self._written = self._thread.submit(self._finish)
        self._saved = step
        return True

    def copy(self, state: State, step: int) -> None:
        """Let devices copy, behind the step that they are at, what `save` will give to a thread.

        Called before the host waits for that step, it keeps them from waiting for the host. It does nothing before the first save, which
        finds out whether there is room; nor where the save before is not over, or has failed, which `save` waits for and tells.
        """
        if self._threaded and step not in (self._saved, *self._copies) and self._written.done() and not self._written.exception():
            self._copies = {}  # of a step that was not saved
            self._copier = self._copier or Copier(state)
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
        arrays = _by_path(state)
        items = {item: {path: leaf for path, leaf in arrays.items() if item_of(path) == item} for item in (STATE, *REMEMBERED)}
        items = {item: self._args.StandardSave(leaves) for item, leaves in items.items() if leaves}
        shapes = {path: describe(leaf) for path, leaf in arrays.items()}
        best = None if self.config.best is None else [self.config.best, self.config.mode]
        meta = {"format": FORMAT, "step": step, "arrays": shapes, "best": best, **meta}
        args = self._args.Composite(**items, meta=self._args.JsonSave(meta))
        with jax.transfer_guard_device_to_host("allow"):  # Orbax fetches the state
            saved = self._manager.save(step, args=args, metrics=metrics or None, force=True)
        if not saved:
            raise CheckpointError(f"the checkpoint of step {step} was not written to {self.folder}.")

    def _check_room(self, state: State) -> None:
        self._bytes = self._bytes or sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        size, free = self._bytes, shutil.disk_usage(self.folder).free
        if free < ROOM * size:
            has = f"{format_bytes(free)} are free, and {ROOM} times its size is wanted"
            cure = f"room; or a smaller Checkpoint(keep=...), which is {self.config.keep}"
            raise CheckpointError(f"a checkpoint of {format_bytes(size)} does not fit {self.folder}: {has}.\n    cure: {cure}.")

    def meta(self, step: int) -> dict[str, Any]:
        """What stands beside the arrays of a checkpoint."""
        meta = dict(self._manager.restore(step, args=self._args.Composite(meta=self._args.JsonRestore()))["meta"])
        if meta["format"] not in (WITHOUT_MANIFEST, FORMAT):
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} is of format {meta['format']}; this version reads {FORMAT}.\n"
                "    cure: the version of spmd that wrote it."
            )
        return meta

    def restore(
        self, step: int, wanted: State, memory: Callable[[Tree], Tree] = lambda params: {}, packing: Packing | None = None
    ) -> tuple[State, list[str]]:
        """The state of a step, every array placed as `wanted` says (shapes, dtypes and shardings; no data).

        What the exchange of gradients remembers belongs to a number of workers and to codecs. Residuals are split anew over another
        number of workers; what is not wanted any more is left, and what was not there starts as `memory(params)` has it. Where
        parameters are packed in another way than they were, they and their moments are packed anew, and all of that memory starts anew.

        Args:
          packing: how the parameters of `wanted` are packed or ordered; None: as the model has them.

        Returns:
          The state, and in words what of that memory did not fit.

        Raises:
          CheckpointError: arrays that are missing, too many, or of another shape or dtype; all of them, in a table.
        """
        meta, arrays, mesh = self.meta(step), _by_path(wanted), wanted.step.sharding.mesh
        saved, packed = meta["arrays"], meta.get("storage")
        new = packing or Plain(abstract(wanted.params))
        old = packing_of(packed, new.like)
        mine = lambda given: {path: it for path, it in given.items() if item_of(path) == STATE}
        moves = Repacking(mine(saved), mine(arrays), old, new, mesh) if old != new else None
        self._check_fit(step, mine(saved), {path: describe(leaf) for path, leaf in mine(arrays).items()}, packed, old, moves)
        reading, fitting, told = memory_to_read(saved, arrays, mesh, repacked=moves is not None)
        reading[STATE] = mine(arrays) if moves is None else moves.to_read()
        args = {item: self._args.StandardRestore(leaves) for item, leaves in reading.items()}
        restored = {item: dict(leaves) for item, leaves in self._manager.restore(step, args=self._args.Composite(**args)).items()}
        flat = restored.pop(STATE) if moves is None else moves.move(restored.pop(STATE))
        flat |= {path: leaf for leaves in restored.values() for path, leaf in leaves.items() if path in fitting}
        empty = lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        flat |= {path: resplit(leaf, arrays[path]) for path, leaf in flat.items() if leaf.shape != arrays[path].shape}
        params = map_paths(lambda path, leaf: flat[f"params/{path}"] if leaf.size else empty(leaf), wanted.params)
        fresh = memory(params) if any(path not in flat for path in arrays) else {}
        fresh = {f"exchange/{path}": leaf for path, leaf in flatten(fresh).items()}
        told = [f"parameters were {in_words(old)}, and are now {in_words(new)}", *told] if moves and told else told
        return map_paths(lambda path, leaf: {**fresh, **flat}[path] if leaf.size else empty(leaf), wanted), told

    def _check_fit(
        self, step: int, saved: dict[str, str], wanted: dict[str, str], packed: Any, old: Packing, moves: Repacking | None
    ) -> None:
        what = f"the checkpoint of step {step} in {self.folder}" + ("" if packed is None and moves is None else f", {in_words(old)},")
        problems = [] if packed is None and moves is None else misfits_of_parameters(saved, packed, old)
        if problems:  # of another model's moments there is nothing to say that its parameters do not
            rest = lambda given: {path: text for path, text in given.items() if path.partition("/")[0] not in (PARAMS, OPT)}
            problems += misfits(rest(saved), rest(wanted))
        else:
            problems = misfits(saved, wanted, served=isinstance(old, Storage)) if moves is None else moves.problems()
        fits = len(set(saved) | set(wanted)) - len(problems)
        note = f"{fits} arrays fit" if moves is None and not packed else ""
        raise_problems(CheckpointError, f"{what} does not fit this model and optimizer", problems, note)

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
            self._manager.reload()
            self._saved = self._manager.latest_step()
            raise CheckpointError(f"a checkpoint could not be written to {self.folder}: {type(error).__name__}: {error}") from error
        if self._saved is not None and not self._path(self._saved).exists():
            missing, self._saved = self._saved, None
            raise CheckpointError(f"the checkpoint of step {missing} is not on disk in {self.folder}; there are {self.steps()}.")

    def release(self) -> None:
        """Let go of the folder without a word about what is in it."""
        self._thread.shutdown()
        self._manager.close()

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            self.release()


def _by_path(state: State) -> dict[str, Any]:
    """All arrays by path. Orbax cannot write an array without elements; there is nothing to write."""
    return {path: leaf for path, leaf in flatten(state).items() if leaf.size}


def _nothing() -> futures.Future[Any]:
    """Nothing is being written."""
    found = futures.Future[Any]()
    found.set_result(None)
    return found


def _all_processes() -> set[int] | None:
    """Named, Orbax lets them meet at JAX's coordination service and not in programs of the devices, which a thread must not start."""
    return set(range(jax.process_count())) if jax.process_count() > 1 else None
