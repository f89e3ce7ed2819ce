"""A run's checkpoints, read: nothing in the folder is changed, whoever writes there at the same time."""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.distributed.consistency import first_nonempty
from spmd.errors import CheckpointError, SpmdError, raise_problems, short_repr
from spmd.run.manifest import MANIFEST_FILE, find_damage, read_json
from spmd.run.reshard_checkpoint import (
    OPT,
    PARAMS,
    Packing,
    Repacking,
    Unpacked,
    describe_packing,
    find_mismatches,
    find_param_mismatches,
    packing_from_meta,
)
from spmd.run.restore_comm_state import STATE, checkpoint_item, comm_state_to_read, resplit_residuals
from spmd.train.state import State
from spmd.tree import Tree, abstract, describe, flatten, map_paths
from spmd.user_paths import blocking_file
from spmd.wire.param_server.packing import Storage

FORMAT = 3
WITHOUT_MANIFEST = 2  # the format before; its checkpoints are read as they are
META, STATS = "meta/metadata", "stats"
NEEDED = ("step", "arrays")
KINDS = {  # what stands there
    "step": int,
    "arrays": dict,
    "best": list | None,
    "data": dict,
    "layout": str,
    "mesh": str,
    "options": dict,
    "storage": dict | None,
    "position": dict,
    "callbacks": list,
    "pace": list | None,
}
MODEL_FITS = (
    'parameters and batch statistics fit. Trainer.restore(folder, only="params") gives them in a new state of this optimizer, at step 0; '
    "fit(trainer.rebuild(state), ...) trains from there, into another folder."
)
SHAPE = r"\w+\[(\d+(, \d+)*)?\]"


class CheckpointReader:
    """A run's checkpoints on disk, to be read."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).absolute()

    def steps(self) -> list[int]:
        """All steps that are on disk, oldest first. What is still being written has another name."""
        try:
            names = [entry.name for entry in os.scandir(self.folder / "checkpoints") if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.folder}/checkpoints cannot be read: {error.strerror}.") from error
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))

    def latest(self) -> int | None:
        """The newest of them."""
        return max(self.steps(), default=None)

    def find_damage(self, step: int) -> str | None:
        """What is wrong with the files of a step; None where they are as they were written. Processes share the reading."""
        why = find_damage(self._path(step), jax.process_index(), jax.process_count())
        try:
            meta = read_json(self._path(step) / META)
            if why is not None and not (self._path(step) / MANIFEST_FILE).exists() and meta["format"] == WITHOUT_MANIFEST:
                why = None
            if why is None and meta["step"] != step:
                why = f"{META} is of step {meta['step']!r}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = why or f"{META} cannot be read: {error}"
        return first_nonempty(why or "") or None

    def newest_intact(self) -> tuple[int | None, dict[int, str]]:
        """The newest step whose files are as they were written, and what is wrong with each newer one."""
        damaged = {}
        for step in reversed(self.steps()):
            why = self.find_damage(step)
            if why is None:
                return step, damaged
            damaged[step] = why
        return None, damaged

    def _path(self, step: int) -> Path:
        return self.folder / "checkpoints" / str(step)

    @contextlib.contextmanager
    def naming_errors(self, step: int) -> Iterator[None]:
        """In the block errors of whoever reads this step's files name the step, in words of ours.

        Raises:
          CheckpointError: in place of any exception that is not one of ours.
        """
        try:
            yield
        except SpmdError:
            raise
        except Exception as error:
            where = f"the checkpoint of step {step} in {self.folder}"
            if not self._path(step).exists():
                raise CheckpointError(f"{where} was removed while it was read.", fix='step="latest".') from error
            why = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"
            raise CheckpointError(f"{where} cannot be read: {why}", fix="another step, or another copy.") from error

    def step(self, which: int | str) -> int:
        """The step that is meant by "latest", "best" or a number, its files as they were written.

        Raises:
          CheckpointError: there is none, it is damaged, or the run did not say what is best.
        """
        chosen = self._chosen(which)
        if (why := self.find_damage(chosen)) is not None:
            others = ", ".join(str(other) for other in self.steps() if other != chosen) or "none"
            raise CheckpointError(f"the checkpoint of step {chosen} in {self.folder} is damaged: {why}.", fix=f"another: {others}.")
        return chosen

    def _chosen(self, which: int | str) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.folder}.")
        if which == "latest":
            return steps[-1]
        if which != "best":
            if which not in steps:
                raise CheckpointError(f"there is no checkpoint of step {which!r} in {self.folder}.", fix=f"{', '.join(map(str, steps))}.")
            return int(which)
        judged = self.meta(steps[-1])["best"]
        if judged is None:
            raise CheckpointError(f"the run in {self.folder} did not say what is best.", fix="fit(checkpoint=Checkpoint(..., best=...)).")
        metric, mode = judged
        known = {step: value for step in steps if (value := self.metrics(step).get(metric)) is not None}
        if not known:
            raise CheckpointError(f'no checkpoint in {self.folder} has a value of "{metric}".', fix='step="latest".')
        return (max if mode == "max" else min)(known, key=lambda step: known[step])

    def metrics(self, step: int) -> dict[str, float]:
        """What was measured at a step; nothing where the run is not judged by a metric."""
        path = self._path(step) / "metrics" / "metrics"
        if not path.exists():
            return {}
        with self.naming_errors(step):
            return {str(name): float(value) for name, value in read_json(path).items()}

    def meta(self, step: int) -> dict[str, Any]:
        """What stands beside the arrays of a checkpoint.

        Raises:
          CheckpointError: it cannot be read, is of another format, or is not what a run has written.
        """
        with self.naming_errors(step):
            meta = read_json(self._path(step) / META)
            if meta["format"] not in (WITHOUT_MANIFEST, FORMAT):
                raise CheckpointError(
                    f"the checkpoint of step {step} in {self.folder} is of format {meta['format']!r}; this version reads {FORMAT}.\n"
                    "    fix: the version of spmd that wrote it."
                )
            wrong = [name for name, kind in KINDS.items() if (name in meta or name in NEEDED) and not isinstance(meta[name], kind)]
            best = meta.get("best") or ["", "min"]
            wrong += [] if len(best) == 2 and isinstance(best[0], str) and best[1] in ("min", "max") else ["best"]
            kept = meta.get("callbacks", [])
            wrong += [] if all(isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) for one in kept) else ["callbacks"]
            wrong += [f"array {path}" for path, text in meta["arrays"].items() if not re.fullmatch(SHAPE, str(text))]
            if wrong:
                raise ValueError(f"{META}: {', '.join(wrong[:5])}")
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
        meta = self.meta(step)
        with self.naming_errors(step):
            return self._restored(step, meta, wanted, memory, packing)

    def restore_params(self, step: int, wanted: State, packing: Packing | None = None) -> tuple[Tree, Tree]:
        """Parameters and batch statistics alone, placed as `wanted` says, whatever the optimizer was.

        Raises:
          CheckpointError: arrays of the model that are missing, too many, or of another shape or dtype; all of them, in a table.
        """
        meta = self.meta(step)
        with self.naming_errors(step):
            reading, move, *_ = self._state(step, meta, wanted, packing, of="model")
            flat = move(self._read(step, {STATE: reading})[STATE])
            found = {
                part: map_paths(lambda path, leaf, part=part: _take(flat, f"{part}/{path}", leaf), tree)
                for part, tree in ((PARAMS, wanted.params), (STATS, wanted.stats))
            }
            return found[PARAMS], found[STATS]

    def _restored(
        self, step: int, meta: dict[str, Any], wanted: State, memory: Callable[[Tree], Tree], packing: Packing | None
    ) -> tuple[State, list[str]]:
        arrays, mesh = arrays_by_path(wanted), wanted.step.sharding.mesh
        try:
            reading, move, repacked, words = self._state(step, meta, wanted, packing, of="model and optimizer")
        except CheckpointError as error:
            with contextlib.suppress(CheckpointError):
                self._state(step, meta, wanted, packing, of="model")
                error = CheckpointError(f"{error}\n", fix=MODEL_FITS)
            raise error from None
        remembered, fitting, told = comm_state_to_read(meta["arrays"], arrays, mesh, repacked=repacked)
        restored = self._read(step, {**remembered, STATE: reading})
        flat = move(restored.pop(STATE))
        flat |= {path: leaf for leaves in restored.values() for path, leaf in leaves.items() if path in fitting}
        flat |= {path: resplit_residuals(leaf, arrays[path]) for path, leaf in flat.items() if leaf.shape != arrays[path].shape}
        params = map_paths(lambda path, leaf: _take(flat, f"{PARAMS}/{path}", leaf), wanted.params)
        fresh = memory(params) if any(path not in flat for path in arrays) else {}
        flat = {f"exchange/{path}": leaf for path, leaf in flatten(fresh).items()} | flat
        return map_paths(functools.partial(_take, flat), wanted), [words, *told] if repacked and told else told

    def _state(
        self, step: int, meta: dict[str, Any], wanted: State, packing: Packing | None, of: str
    ) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]], bool, str]:
        """How to read the arrays of a state, all or those of the model; what places them as wanted; whether it packs them anew."""
        model = lambda path: path.partition("/")[0] in (PARAMS, STATS)
        kept = model if of == "model" else lambda path: checkpoint_item(path) == STATE
        mine = lambda given: {path: it for path, it in given.items() if kept(path)}
        saved, arrays, packed = mine(meta["arrays"]), mine(arrays_by_path(wanted)), meta.get("storage")
        new = packing or Unpacked(abstract(wanted.params))
        old = packing_from_meta(packed, new.like)
        moves = Repacking(saved, arrays, old, new, wanted.step.sharding.mesh) if old != new else None
        self._check_fit(step, saved, {path: describe(leaf) for path, leaf in arrays.items()}, packed, old, moves, of)
        words = f"parameters were {describe_packing(old)}, and are now {describe_packing(new)}"
        return (arrays, lambda flat: flat, False, words) if moves is None else (moves.to_read(), moves.move, True, words)

    def _read(self, step: int, wanted: Mapping[str, Tree]) -> dict[str, dict[str, jax.Array]]:
        """Arrays of a checkpoint, by item and path, placed as `wanted` says; there may be more in an item."""
        ocp = import_orbax()
        options = ocp.options.MultiprocessingOptions(active_processes=active_processes())
        handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=options))
        how = ocp.checkpoint_utils.construct_restore_args
        args = {item: ocp.args.PyTreeRestore(leaves, how(leaves), partial_restore=True) for item, leaves in wanted.items()}
        with ocp.Checkpointer(handler, multiprocessing_options=options) as opened:
            found = opened.restore(self._path(step), args=ocp.args.Composite(**args))
        for item, leaves in wanted.items():  # what Orbax finds no entry for it gives back as it was asked for
            lost = [path for path in leaves if not isinstance(found[item].get(path), jax.Array)]
            if lost:
                raise ValueError(f"{item}: {', '.join(lost[:5])} is not in it")
        return {item: dict(found[item]) for item in wanted}

    def _check_fit(
        self, step: int, saved: dict[str, str], wanted: dict[str, str], packed: Any, old: Packing, moves: Repacking | None, of: str
    ) -> None:
        what = f"the checkpoint of step {step} in {self.folder}" + (
            "" if packed is None and moves is None else f", {describe_packing(old)},"
        )
        problems = [] if packed is None and moves is None else find_param_mismatches(saved, packed, old)
        if problems:  # of another model's moments there is nothing to say that its parameters do not
            rest = lambda given: {path: text for path, text in given.items() if path.partition("/")[0] not in (PARAMS, OPT)}
            problems += find_mismatches(rest(saved), rest(wanted))
        else:
            problems = find_mismatches(saved, wanted, served=isinstance(old, Storage)) if moves is None else moves.problems()
        fits = len(set(saved) | set(wanted)) - len(problems)
        note = f"{fits} arrays fit" if moves is None and not packed else ""
        raise_problems(CheckpointError, f"{what} does not fit this {of}", problems, note)


def check_run_folder(path: str | Path) -> None:
    """Refuse as a run's folder what is none.

    Raises:
      CheckpointError: it is a file, or in a file's place, and the text names the run that it is part of; or there is nothing.
    """
    if Path(path).is_dir():
        return
    why = blocking_file(Path(path))
    run = next((place for place in Path(path).absolute().parents if (place / "checkpoints").is_dir()), None) if why else None
    what = f"checkpoint={short_repr(str(path))}: {why or 'there is no such folder'}"
    raise CheckpointError(f"{what}, and not the folder of a run.\n    fix: {run}, which it is in." if run else f"{what}.")


def _take(flat: Mapping[str, Any], path: str, like: Any) -> Any:
    """An array by path; one without elements is made, since it is not saved."""
    return flat[path] if like.size else jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)


def import_orbax() -> Any:
    """The package, which takes a fifth of a second to import: only where checkpoints are read or written."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # it reports every save at INFO and WARNING
    return ocp


def arrays_by_path(state: State) -> dict[str, Any]:
    """All arrays by path. Orbax cannot write an array without elements; there is nothing to write."""
    return {path: leaf for path, leaf in flatten(state).items() if leaf.size}


def active_processes() -> set[int] | None:
    """Named, Orbax lets them meet at JAX's coordination service and not in programs of the devices, which a thread must not start."""
    return set(range(jax.process_count())) if jax.process_count() > 1 else None
