"""Read a run's checkpoints. Nothing in the folder is changed, and another process may write to it
meanwhile.
"""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.base.path_match import covering, matches, suggest
from spmd.base.ranking import best
from spmd.base.tree import Tree, abstract, describe, flatten, map_paths
from spmd.base.user_paths import as_path, blocking_file, check_characters
from spmd.distributed.consistency import first_nonempty
from spmd.errors import (
    CheckpointError,
    OptionError,
    SpmdError,
    did_you_mean,
    option,
    raise_problems,
    short_repr,
)
from spmd.models.frozen import join
from spmd.run.checkpoint_meta import META, check_meta
from spmd.run.manifest import MANIFEST_FILE, find_damage, read_json
from spmd.run.reshard_checkpoint import (
    FROZEN,
    OPT,
    PARAMS,
    Packing,
    Repacking,
    Unpacked,
    describe_packing,
    find_mismatches,
    find_param_mismatches,
    mismatch_table,
    packing_from_meta,
)
from spmd.run.restore_comm_state import (
    STATE,
    checkpoint_item,
    comm_state_to_read,
    resplit_residuals,
)
from spmd.run.rewrap_optimizer import Rewrapping
from spmd.train.state import State

FORMAT = 3
WITHOUT_MANIFEST = 2  # the previous format, which is still read
MANY = 40  # arrays that do not fit and are listed by difference, not one by one
STATS = "stats"
MODEL_KINDS = (PARAMS, STATS, FROZEN)  # the first part of the paths of a model's arrays
OTHER_MODEL = (
    "the model, and the optimizer, that the run was trained with; or another folder, for a run of "
    "this one."
)
RESTORE_PARAMS = (
    'parameters and batch statistics fit. Trainer.restore(folder, only="params") puts them into a '
    "new state of this optimizer, at step 0; "
    "fit(trainer.rebuild(state), ...) trains from there, into another folder."
)
RESTORE_PART = (
    '{count} arrays of the model fit. Trainer.restore(folder, only="{pattern}") puts them into a '
    "new state, at step 0; "
    "fit(trainer.rebuild(state), ...) trains from there, into another folder."
)


class CheckpointReader:
    """A run's checkpoints on disk, read-only."""

    def __init__(self, folder: str | Path):
        self.folder = as_path(folder, "folder").absolute()

    def steps(self) -> list[int]:
        """Return all steps on disk, oldest first. A checkpoint that is still being written has
        another name.
        """
        try:
            entries = os.scandir(self.folder / "checkpoints")
            names = [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}/checkpoints cannot be read: {error.strerror}.",
                fix="see whether the disk of that folder works.",
            ) from error
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))

    def latest(self) -> int | None:
        """Return the newest step on disk."""
        return max(self.steps(), default=None)

    def find_damage(self, step: int) -> str | None:
        """Return what is wrong with the files of a step; None if they are as they were written.
        Processes share the reading.
        """
        why = find_damage(self._path(step), jax.process_index(), jax.process_count())
        try:
            meta = read_json(self._path(step) / META)
            if why is not None:
                has_manifest = (self._path(step) / MANIFEST_FILE).exists()
                if not has_manifest and meta["format"] == WITHOUT_MANIFEST:
                    why = None
            # A folder that was renamed by hand has an intact manifest.
            if why is None and meta["step"] != step:
                why = f"{META} is of step {meta['step']!r}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = why or f"{META} cannot be read: {error}"
        # Each process has read its part of the files: all come to the same result.
        return first_nonempty(why or "") or None

    def newest_intact(self) -> tuple[int | None, dict[int, str]]:
        """Return the newest undamaged step, and what is wrong with each newer one."""
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
        """Name the step in errors from reading its files in the block.

        Raises:
          CheckpointError: in place of any exception that is not an `SpmdError`.
        """
        try:
            yield
        except SpmdError:
            raise
        except Exception as error:
            where = f"the checkpoint of step {step} in {self.folder}"
            # The owner of the run removes old checkpoints while others read.
            if not self._path(step).exists():
                raise CheckpointError(
                    f"{where} was removed while it was being read.", fix='step="latest".'
                ) from error
            lines = str(error).strip().splitlines()
            line = lines[0] if lines else ""
            why = f"{type(error).__name__}: {line[:300]}"
            raise CheckpointError(
                f"{where} cannot be read: {why}",
                fix="try another step, or another copy of the folder.",
            ) from error

    def step(self, which: int | str) -> int:
        """Return the step that "latest", "best" or a number refers to; its files are undamaged.

        Raises:
          CheckpointError: there is none, it is damaged, or the run was not configured to rank
            checkpoints.
        """
        chosen = self._chosen(which)
        why = self.find_damage(chosen)
        if why is not None:
            others = ", ".join(str(other) for other in self.steps() if other != chosen) or "none"
            raise CheckpointError(
                f"the checkpoint of step {chosen} in {self.folder} is damaged: {why}.",
                fix=f"another: {others}.",
            )
        return chosen

    def _chosen(self, which: int | str) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(
                f"there is no checkpoint in {self.folder}.",
                fix="the folder of a run that has saved one.",
            )
        if which == "latest":
            return steps[-1]
        if which != "best":
            if which not in steps:
                raise CheckpointError(
                    f"there is no checkpoint of step {which!r} in {self.folder}.",
                    fix=f"{', '.join(map(str, steps))}.",
                )
            return int(which)
        ranking = self.meta(steps[-1])["best"]
        if ranking is None:
            raise CheckpointError(
                f"the run in {self.folder} does not rank checkpoints.",
                fix="fit(checkpoint=Checkpoint(..., best=...)).",
            )
        metric, mode = ranking
        scores = {}
        for step in steps:
            value = self.metrics(step).get(metric)
            if value is not None:
                scores[step] = value
        if not scores:
            raise CheckpointError(
                f'no checkpoint in {self.folder} has a value of "{metric}".', fix='step="latest".'
            )
        return best(scores, 1, mode)[0]

    def metrics(self, step: int) -> dict[str, float]:
        """Return the evaluation's metrics at a step; empty if the run does not rank checkpoints."""
        path = self._path(step) / "metrics" / "metrics"
        if not path.exists():
            return {}
        with self.naming_errors(step):
            return {str(name): float(value) for name, value in read_json(path).items()}

    def meta(self, step: int) -> dict[str, Any]:
        """Return the metadata of a checkpoint.

        Raises:
          CheckpointError: it cannot be read, has another format, or is malformed.
        """
        with self.naming_errors(step):
            meta = read_json(self._path(step) / META)
            if meta["format"] not in (WITHOUT_MANIFEST, FORMAT):
                message = (
                    f"the checkpoint of step {step} in {self.folder} has format "
                    f"{meta['format']!r}; this version reads {FORMAT}."
                )
                raise CheckpointError(message, fix="use the version of spmd that wrote it.")
            check_meta(meta)
        return meta

    def restore(
        self,
        step: int,
        target: State,
        memory: Callable[[Tree], Tree] = lambda params: {},
        packing: Packing | None = None,
        opening: Callable[[Tree, Collection[str]], dict[str, jax.Array]] = lambda params, paths: {},
    ) -> tuple[State, list[str]]:
        """Return the state of a step, every array placed as in `target` (shapes, dtypes and
        shardings; no data).

        The state of gradient communication depends on the number of workers and on codecs.
        Residuals are redistributed over another number of workers; entries that are no longer used
        are ignored, and missing ones start as in `memory(params)`. If parameters are packed
        differently now, they and their moments are repacked, and all communication state starts
        from scratch.

        Of an optimizer with other wrappers, such as `skip_spikes`, the state inside of them is
        restored, and that of new ones starts as in `opening(params, paths)`.

        Args:
          packing: how the parameters of `target` are packed or ordered; None: not at all.

        Returns:
          The state, and text about wrappers and communication state that did not fit.

        Raises:
          CheckpointError: arrays that are missing, unexpected, or of another shape or dtype; all of
            them, in a table.
        """
        meta = self.meta(step)
        with self.naming_errors(step):
            arrays = arrays_by_path(target)
            mesh = target.step.sharding.mesh
            rewrapping = Rewrapping(meta["arrays"], arrays)
            meta = {**meta, "arrays": rewrapping.renamed(meta["arrays"])}
            try:
                repacking = self._repacking(
                    step, meta, target, packing, of="model and optimizer", without=rewrapping.new
                )
            except CheckpointError as error:
                fix = self._mismatch_fix(step, meta, target, packing)
                raise CheckpointError(error.message, fix=fix, problems=error.problems) from None
            comm_state, fitting, comm_changes = comm_state_to_read(
                meta["arrays"], arrays, mesh, repacked=repacking.moves_params
            )
            state = {rewrapping.names[path]: leaf for path, leaf in repacking.to_read().items()}
            restored = self._read_arrays(step, {**comm_state, STATE: state})
            flat = repacking.move(rewrapping.renamed(restored.pop(STATE)))
            for leaves in restored.values():
                flat |= {path: leaf for path, leaf in leaves.items() if path in fitting}
            for path, leaf in flat.items():
                if leaf.shape != arrays[path].shape:
                    flat[path] = resplit_residuals(leaf, arrays[path])
            params = map_paths(
                lambda path, leaf: restored_array(flat, f"{PARAMS}/{path}", leaf), target.params
            )
            if rewrapping.new:
                flat |= opening(params, rewrapping.new)
            if any(path not in flat for path in arrays):
                new_memory = flatten(memory(params))
                flat = {f"exchange/{path}": leaf for path, leaf in new_memory.items()} | flat
            changes = [*rewrapping.changes]
            if repacking.moves_params and comm_changes:
                changes.append(str(repacking))
            changes += comm_changes
            return map_paths(functools.partial(restored_array, flat), target), changes

    def _mismatch_fix(
        self, step: int, meta: dict[str, Any], target: State, packing: Packing | None
    ) -> str:
        """Return a fix for a checkpoint that does not fit: what of it can be restored."""
        with contextlib.suppress(CheckpointError):
            self._repacking(step, meta, target, packing, of="model")
            return RESTORE_PARAMS
        if packing is not None or meta.get("storage") is not None:
            return OTHER_MODEL
        return _restore_part(meta["arrays"], arrays_by_path(target)) or OTHER_MODEL

    def restore_params(
        self, step: int, target: State, packing: Packing | None = None
    ) -> tuple[Tree, Tree, Tree]:
        """Return only parameters, batch statistics and frozen parameters, placed as in `target`,
        whatever the optimizer was.

        Raises:
          CheckpointError: arrays of the model that are missing, unexpected, or of another shape or
            dtype; all of them, in a table.
        """
        meta = self.meta(step)
        with self.naming_errors(step):
            repacking = self._repacking(step, meta, target, packing, of="model")
            flat = repacking.move(self._read_arrays(step, {STATE: repacking.to_read()})[STATE])

            def restored_tree(kind: str, tree: Tree) -> Tree:
                return map_paths(
                    lambda path, leaf: restored_array(flat, f"{kind}/{path}", leaf), tree
                )

            return (
                restored_tree(PARAMS, target.params),
                restored_tree(STATS, target.stats),
                restored_tree(FROZEN, target.frozen),
            )

    def restore_matching(
        self, step: int, target: State, pattern: str, *, packed: bool
    ) -> dict[str, jax.Array]:
        """Return the parameters, batch statistics and frozen parameters whose paths a pattern
        matches, placed as in `target`, by path in a state.

        Args:
          packed: parameters of `target` are packed or ordered.

        Raises:
          CheckpointError: arrays of these that are missing, unexpected, or of another shape or
            dtype; or packed ones.
          OptionError: the pattern matches no parameter that both have.
        """
        meta = self.meta(step)
        with self.naming_errors(step):
            saved_arrays = _of_model(meta["arrays"])
            model_arrays = _of_model(arrays_by_path(target))
            common = [path.partition("/")[2] for path in model_arrays if path in saved_arrays]
            if not matches(pattern, common):
                near = suggest(pattern, common)
                if near is None:
                    fix = did_you_mean(pattern, [PARAMS])
                else:
                    fix = f'"{near[0]}", which matches {near[1]}.'
                raise OptionError(
                    f"only={pattern!r} matches no parameter that both the checkpoint and this "
                    "model have.",
                    fix=fix,
                )
            if packed or meta.get("storage") is not None:
                packed_one = "model" if packed else "checkpoint"
                why = (
                    f"only={pattern!r}: parameters of the {packed_one} are packed, or in the order "
                    "of stages"
                )
                raise CheckpointError(
                    f"{why}.",
                    fix='only="params" and the model as it was; then replace the part in '
                    "trainer.rebuild(state).",
                )
            repacking = self._repacking(step, meta, target, None, of="model", pattern=pattern)
            return self._read_arrays(step, {STATE: repacking.to_read()})[STATE]

    def _repacking(
        self,
        step: int,
        meta: dict[str, Any],
        target: State,
        packing: Packing | None,
        of: str,
        without: Collection[str] = (),
        pattern: str = "**",
    ) -> Repacking:
        """Return how to read a state without some arrays, or only the model's part, or what of it a
        pattern matches.

        Raises:
          CheckpointError: the checkpoint does not fit.
        """

        def is_selected(path: str) -> bool:
            if of == "model":
                kind, _, below = path.partition("/")
                return kind in MODEL_KINDS and bool(matches(pattern, [below]))
            return checkpoint_item(path) == STATE and path not in without

        saved = {path: text for path, text in meta["arrays"].items() if is_selected(path)}
        arrays = {path: leaf for path, leaf in arrays_by_path(target).items() if is_selected(path)}
        packed = meta.get("storage")
        if packing is None:
            params = target.params
            if "stages" in (packed or {}):
                # The order of stages is that of stacks, which may be frozen.
                params = join(target.params, target.frozen)
            new: Packing = Unpacked(abstract(params))
        else:
            new = packing
        old = packing_from_meta(packed, new.like)
        repacking = Repacking(saved, arrays, old, new, target.step.sharding.mesh)
        headline = f"the checkpoint of step {step} in {self.folder}"
        problems = []
        is_packed = packed is not None or repacking.is_needed
        if is_packed:
            headline += f", {describe_packing(old)},"
            problems = find_param_mismatches(saved, packed, old, {*flatten(target.frozen)})
            if problems:
                # Moments of another model would only repeat what its parameters say.
                described = {path: describe(leaf) for path, leaf in arrays.items()}
                problems += find_mismatches(_without_params(saved), _without_params(described))
        if not problems:
            problems = repacking.problems()
        note = "" if is_packed else f"{len({*saved, *arrays}) - len(problems)} arrays fit"
        headline += f" does not fit this {of}"
        if len(problems) > MANY and not any(problem.fix for problem in problems):
            text = mismatch_table(headline, problems, note)
            raise CheckpointError(f"{text}\n", fix=OTHER_MODEL, problems=problems)
        raise_problems(CheckpointError, headline, problems, note, OTHER_MODEL)
        return repacking

    def _read_arrays(
        self, step: int, targets: Mapping[str, Tree]
    ) -> dict[str, dict[str, jax.Array]]:
        """Return arrays of a checkpoint, by item and path, placed as in `targets`; an item may
        contain more.
        """
        # TensorStore (0.1) reads a backslash in a path as a slash.
        check_characters(self.folder, "\\", "cannot be read")
        ocp = import_orbax()
        options = ocp.options.MultiprocessingOptions(active_processes=active_processes())
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=options)
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args
        args = {
            item: ocp.args.PyTreeRestore(leaves, restore_args(leaves), partial_restore=True)
            for item, leaves in targets.items()
        }
        with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
            restored = checkpointer.restore(self._path(step), args=ocp.args.Composite(**args))
        # Orbax returns the request itself for an entry that it does not find.
        for item, leaves in targets.items():
            entries = restored[item]
            missing = [path for path in leaves if not isinstance(entries.get(path), jax.Array)]
            if missing:
                raise ValueError(f"{item}: {', '.join(missing[:5])} is missing")
        return {item: dict(restored[item]) for item in targets}


def _restore_part(saved: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """Return a fix that reads the part of a model that fits; "" if no pattern describes it."""
    saved_arrays = _of_model(saved)
    model_arrays = _of_model(arrays)
    fitting = []
    for path, leaf in model_arrays.items():
        if saved_arrays.get(path) == describe(leaf):
            fitting.append(path.partition("/")[2])
    if not fitting:
        return ""
    all_paths = {path.partition("/")[2] for path in (*saved_arrays, *model_arrays)}
    pattern = covering(fitting, all_paths)
    if pattern is None:
        return ""
    return RESTORE_PART.format(count=len(fitting), pattern=pattern)


def _of_model(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of the model, trained or not, without those of the optimizer."""
    return {path: arrays[path] for path in arrays if path.partition("/")[0] in MODEL_KINDS}


def _without_params(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that are neither parameters nor the optimizer's, which mirrors them."""
    mirrored = (PARAMS, FROZEN, OPT)
    return {path: arrays[path] for path in arrays if path.partition("/")[0] not in mirrored}


def check_run_folder(path: str | Path) -> None:
    """Check that a path is a run's folder.

    Raises:
      CheckpointError: it does not exist, is a file, is inside a file's place, or is the
        `checkpoints` of a run or a step in there; the error names the run that it belongs to, if
        any.
    """
    here = as_path(path, "checkpoint").absolute()
    shown = option("checkpoint", short_repr(str(path)))
    if here.is_dir():
        runs = []
        for parent in here.parents[:2]:
            is_inside = here.is_relative_to(parent / "checkpoints")
            if is_inside and CheckpointReader(parent).steps():
                runs.append(parent)
        if runs and not (here / "checkpoints").is_dir():
            why = f"{shown} is inside of the folder of a run, and not that folder."
            raise CheckpointError(why, fix=f"{runs[0]}, which it is in.")
        return
    blocked = blocking_file(here)
    if not blocked:
        raise CheckpointError(
            f"{shown}: there is no such folder.",
            fix="the folder of a run, which fit(checkpoint=...) was given.",
        )
    for parent in here.parents:
        if (parent / "checkpoints").is_dir():
            raise CheckpointError(
                f"{shown}: {blocked}, and not the folder of a run.",
                fix=f"{parent}, which it is in.",
            )
    raise CheckpointError(
        f"{shown}: {blocked}.", fix="the folder of a run, which fit(checkpoint=...) was given."
    )


def restored_array(arrays: Mapping[str, Any], path: str, like: Any) -> Any:
    """Return an array by path; one without elements is created, since it is not saved."""
    if like.size:
        return arrays[path]
    return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)


def import_orbax() -> Any:
    """Return Orbax, imported only where checkpoints are read or written."""
    # The import takes 0.2 seconds.
    import orbax.checkpoint as ocp

    # Orbax reports every save at INFO and WARNING.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return ocp


def arrays_by_path(state: State) -> dict[str, Any]:
    """Return all arrays by path, but for those without elements, which Orbax cannot write."""
    return {path: leaf for path, leaf in flatten(state).items() if leaf.size}


def active_processes() -> set[int] | None:
    """Return the ranks of all processes for Orbax; None if there is one process."""
    if jax.process_count() == 1:
        return None
    # Given explicitly, Orbax synchronizes through JAX's coordination service, not with device
    # programs, which a thread must not start.
    return set(range(jax.process_count()))
