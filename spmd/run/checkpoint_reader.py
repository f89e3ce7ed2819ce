"""Reads a run's checkpoints. It changes nothing in the folder and tolerates a concurrent writer."""

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
from spmd.nn.layer_order import StageOrder
from spmd.path_match import covering, matches, suggest
from spmd.ranking import best
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
from spmd.tree import Tree, abstract, describe, flatten, map_paths
from spmd.user_paths import as_path, blocking_file

FORMAT = 3
WITHOUT_MANIFEST = 2  # the previous format, which is still read
STATS = "stats"
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
        """All steps on disk, oldest first. A checkpoint that is still being written has another
        name.
        """
        try:
            names = [
                entry.name for entry in os.scandir(self.folder / "checkpoints") if entry.is_dir()
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}/checkpoints cannot be read: {error.strerror}.",
                fix="see whether the disk of that folder works.",
            ) from error
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))

    def latest(self) -> int | None:
        """The newest of them."""
        return max(self.steps(), default=None)

    def find_damage(self, step: int) -> str | None:
        """What is wrong with the files of a step; None if they are as they were written. Processes
        share the reading.
        """
        why = find_damage(self._path(step), jax.process_index(), jax.process_count())
        try:
            meta = read_json(self._path(step) / META)
            if (
                why is not None
                and not (self._path(step) / MANIFEST_FILE).exists()
                and meta["format"] == WITHOUT_MANIFEST
            ):
                why = None
            if why is None and meta["step"] != step:
                why = f"{META} is of step {meta['step']!r}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = why or f"{META} cannot be read: {error}"
        return first_nonempty(why or "") or None

    def newest_intact(self) -> tuple[int | None, dict[int, str]]:
        """The newest undamaged step, and what is wrong with each newer one."""
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
        """In the block, errors from reading this step's files name the step.

        Raises:
          CheckpointError: in place of any exception that is not an `SpmdError`.
        """
        try:
            yield
        except SpmdError:
            raise
        except Exception as error:
            where = f"the checkpoint of step {step} in {self.folder}"
            if not self._path(step).exists():
                raise CheckpointError(
                    f"{where} was removed while it was being read.", fix='step="latest".'
                ) from error
            why = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"
            raise CheckpointError(
                f"{where} cannot be read: {why}",
                fix="try another step, or another copy of the folder.",
            ) from error

    def step(self, which: int | str) -> int:
        """The step that "latest", "best" or a number refers to; its files are undamaged.

        Raises:
          CheckpointError: there is none, it is damaged, or the run was not configured to rank
            checkpoints.
        """
        chosen = self._chosen(which)
        if (why := self.find_damage(chosen)) is not None:
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
        known = {
            step: value for step in steps if (value := self.metrics(step).get(metric)) is not None
        }
        if not known:
            raise CheckpointError(
                f'no checkpoint in {self.folder} has a value of "{metric}".', fix='step="latest".'
            )
        return best(known, 1, mode)[0]

    def metrics(self, step: int) -> dict[str, float]:
        """The evaluation's metrics at a step; empty if the run does not rank checkpoints."""
        path = self._path(step) / "metrics" / "metrics"
        if not path.exists():
            return {}
        with self.naming_errors(step):
            return {str(name): float(value) for name, value in read_json(path).items()}

    def meta(self, step: int) -> dict[str, Any]:
        """The metadata of a checkpoint.

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
        wanted: State,
        memory: Callable[[Tree], Tree] = lambda params: {},
        packing: Packing | None = None,
        opening: Callable[[Tree, Collection[str]], dict[str, jax.Array]] = lambda params, paths: {},
    ) -> tuple[State, list[str]]:
        """The state of a step, every array placed as in `wanted` (shapes, dtypes and shardings; no
        data).

        The state of gradient communication depends on the number of workers and on codecs.
        Residuals are redistributed over another number of workers; entries that are no longer used
        are ignored, and missing ones start as in `memory(params)`. If parameters are packed
        differently now, they and their moments are repacked, and all communication state starts
        from scratch.

        Of an optimizer with other wrappers, such as `skip_spikes`, the state inside of them is
        restored, and that of new ones starts as in `opening(params, paths)`.

        Args:
          packing: how the parameters of `wanted` are packed or ordered; None: not at all.

        Returns:
          The state, and text about wrappers and communication state that did not fit.

        Raises:
          CheckpointError: arrays that are missing, unexpected, or of another shape or dtype; all of
            them, in a table.
        """
        meta = self.meta(step)
        with self.naming_errors(step):
            arrays, mesh = arrays_by_path(wanted), wanted.step.sharding.mesh
            rewrapping = Rewrapping(meta["arrays"], arrays)
            meta = {**meta, "arrays": rewrapping.renamed(meta["arrays"])}
            try:
                repacking = self._repacking(
                    step, meta, wanted, packing, of="model and optimizer", without=rewrapping.new
                )
            except CheckpointError as error:
                fix = (
                    ""
                    if packing is not None or meta.get("storage") is not None
                    else _restore_part(meta["arrays"], arrays)
                )
                with contextlib.suppress(CheckpointError):
                    self._repacking(step, meta, wanted, packing, of="model")
                    fix = RESTORE_PARAMS
                raise CheckpointError(
                    error.message, fix=fix or OTHER_MODEL, problems=error.problems
                ) from None
            comm_state, fitting, changes = comm_state_to_read(
                meta["arrays"], arrays, mesh, repacked=repacking.moves_params
            )
            state = {rewrapping.names[path]: leaf for path, leaf in repacking.to_read().items()}
            restored = self._read(step, {**comm_state, STATE: state})
            flat = repacking.move(rewrapping.renamed(restored.pop(STATE)))
            flat |= {
                path: leaf
                for leaves in restored.values()
                for path, leaf in leaves.items()
                if path in fitting
            }
            flat |= {
                path: resplit_residuals(leaf, arrays[path])
                for path, leaf in flat.items()
                if leaf.shape != arrays[path].shape
            }
            params = map_paths(
                lambda path, leaf: take(flat, f"{PARAMS}/{path}", leaf), wanted.params
            )
            flat |= opening(params, rewrapping.new) if rewrapping.new else {}
            fresh = memory(params) if any(path not in flat for path in arrays) else {}
            flat = {f"exchange/{path}": leaf for path, leaf in flatten(fresh).items()} | flat
            changes = [
                *rewrapping.changes,
                *([str(repacking)] if repacking.moves_params and changes else []),
                *changes,
            ]
            return map_paths(functools.partial(take, flat), wanted), changes

    def restore_params(
        self, step: int, wanted: State, packing: Packing | None = None
    ) -> tuple[Tree, Tree, Tree]:
        """Only parameters, batch statistics and frozen parameters, placed as in `wanted`, whatever
        the optimizer was.

        Raises:
          CheckpointError: arrays of the model that are missing, unexpected, or of another shape or
            dtype; all of them, in a table.
        """
        meta = self.meta(step)
        with self.naming_errors(step):
            repacking = self._repacking(step, meta, wanted, packing, of="model")
            flat = repacking.move(self._read(step, {STATE: repacking.to_read()})[STATE])
            trees = ((PARAMS, wanted.params), (STATS, wanted.stats), (FROZEN, wanted.frozen))
            return tuple(
                map_paths(lambda path, leaf, of=of: take(flat, f"{of}/{path}", leaf), tree)
                for of, tree in trees
            )  # type: ignore[return-value]

    def restore_matching(
        self, step: int, wanted: State, pattern: str, *, packed: bool
    ) -> dict[str, jax.Array]:
        """The parameters, batch statistics and frozen parameters whose paths a pattern matches,
        placed as in `wanted`, by path in a state.

        Args:
          packed: parameters of `wanted` are packed or ordered.

        Raises:
          CheckpointError: arrays of these that are missing, unexpected, or of another shape or
            dtype; or packed ones.
          OptionError: the pattern matches no parameter that both have.
        """
        meta = self.meta(step)
        with self.naming_errors(step):
            known, here = (_of_model(arrays) for arrays in (meta["arrays"], arrays_by_path(wanted)))
            common = [path.partition("/")[2] for path in here if path in known]
            if not matches(pattern, common):
                near = suggest(pattern, common)
                fix = (
                    did_you_mean(pattern, [PARAMS])
                    if near is None
                    else f'"{near[0]}", which matches {near[1]}.'
                )
                raise OptionError(
                    f"only={pattern!r} matches no parameter that both the checkpoint and this "
                    "model have.",
                    fix=fix,
                )
            if packed or meta.get("storage") is not None:
                why = (
                    f"only={pattern!r}: parameters of the {'model' if packed else 'checkpoint'} "
                    "are packed, or in the order of stages"
                )
                raise CheckpointError(
                    f"{why}.",
                    fix='only="params" and the model as it was; then replace the part in '
                    "trainer.rebuild(state).",
                )
            repacking = self._repacking(step, meta, wanted, None, of="model", pattern=pattern)
            return self._read(step, {STATE: repacking.to_read()})[STATE]

    def _repacking(
        self,
        step: int,
        meta: dict[str, Any],
        wanted: State,
        packing: Packing | None,
        of: str,
        without: Collection[str] = (),
        pattern: str = "**",
    ) -> Repacking:
        """How to read a state without some arrays, or only the model's part, or what of it a
        pattern matches; raises if it does not fit.
        """

        def select(arrays: Mapping[str, Any]) -> dict[str, Any]:
            if of == "model":
                return {
                    path: array
                    for path, array in _of_model(arrays).items()
                    if matches(pattern, [path.partition("/")[2]])
                }
            return {
                path: array
                for path, array in arrays.items()
                if checkpoint_item(path) == STATE and path not in without
            }

        saved, arrays, packed = (
            select(meta["arrays"]),
            select(arrays_by_path(wanted)),
            meta.get("storage"),
        )
        # of stacks, which may be frozen
        in_order = isinstance(packing, StageOrder) or "stages" in (packed or {})
        new = packing or Unpacked(
            abstract(join(wanted.params, wanted.frozen) if in_order else wanted.params)
        )
        old = packing_from_meta(packed, new.like)
        repacking = Repacking(saved, arrays, old, new, wanted.step.sharding.mesh)
        headline, problems, is_packed = (
            f"the checkpoint of step {step} in {self.folder}",
            [],
            packed is not None or repacking.is_needed,
        )
        if is_packed:
            headline += f", {describe_packing(old)},"
            problems = find_param_mismatches(saved, packed, old, {*flatten(wanted.frozen)})
        if problems:  # moments of another model would only repeat what its parameters say
            described = {path: describe(leaf) for path, leaf in arrays.items()}
            others = [
                {
                    path: tree[path]
                    for path in tree
                    if path.split("/")[0] not in (PARAMS, FROZEN, OPT)
                }
                for tree in (saved, described)
            ]
            problems += find_mismatches(*others)
        else:
            problems = repacking.problems()
        note = "" if is_packed else f"{len({*saved, *arrays}) - len(problems)} arrays fit"
        raise_problems(
            CheckpointError, f"{headline} does not fit this {of}", problems, note, OTHER_MODEL
        )
        return repacking

    def _read(self, step: int, wanted: Mapping[str, Tree]) -> dict[str, dict[str, jax.Array]]:
        """Arrays of a checkpoint, by item and path, placed as in `wanted`; an item may contain
        more.
        """
        ocp = import_orbax()
        options = ocp.options.MultiprocessingOptions(active_processes=active_processes())
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=options)
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args
        args = {
            item: ocp.args.PyTreeRestore(leaves, restore_args(leaves), partial_restore=True)
            for item, leaves in wanted.items()
        }
        with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
            restored = checkpointer.restore(self._path(step), args=ocp.args.Composite(**args))
        # Orbax returns the request itself for an entry that it does not find
        for item, leaves in wanted.items():
            missing = [
                path for path in leaves if not isinstance(restored[item].get(path), jax.Array)
            ]
            if missing:
                raise ValueError(f"{item}: {', '.join(missing[:5])} is missing")
        return {item: dict(restored[item]) for item in wanted}


def _restore_part(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """A fix that reads the part of a model that fits, if a pattern describes it."""
    saved, wanted = _of_model(saved), _of_model(wanted)
    fitting = [
        path.partition("/")[2] for path, leaf in wanted.items() if saved.get(path) == describe(leaf)
    ]
    pattern = (
        covering(fitting, {path.partition("/")[2] for path in (*saved, *wanted)})
        if fitting
        else None
    )
    return "" if pattern is None else RESTORE_PART.format(count=len(fitting), pattern=pattern)


def _of_model(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        path: array
        for path, array in arrays.items()
        if path.partition("/")[0] in (PARAMS, STATS, FROZEN)
    }


def check_run_folder(path: str | Path) -> None:
    """Check that a path is a run's folder.

    Raises:
      CheckpointError: it does not exist, is a file, is inside a file's place, or is the
        `checkpoints` of a run or a step in there; the error names the run that it belongs to, if
        any.
    """
    here = as_path(path, "checkpoint").absolute()
    if here.is_dir():
        runs = [
            parent
            for parent in here.parents[:2]
            if here.is_relative_to(parent / "checkpoints") and CheckpointReader(parent).steps()
        ]
        if runs and not (here / "checkpoints").is_dir():
            why = (
                f"{option('checkpoint', short_repr(str(path)))} is inside of the folder of a run, "
                "and not that folder."
            )
            raise CheckpointError(why, fix=f"{runs[0]}, which it is in.")
        return
    why = blocking_file(here)
    run = (
        next((parent for parent in here.parents if (parent / "checkpoints").is_dir()), None)
        if why
        else None
    )
    headline = f"{option('checkpoint', short_repr(str(path)))}: {why or 'there is no such folder'}"
    if run:
        raise CheckpointError(
            f"{headline}, and not the folder of a run.", fix=f"{run}, which it is in."
        )
    raise CheckpointError(
        f"{headline}.", fix="the folder of a run, which fit(checkpoint=...) was given."
    )


def take(flat: Mapping[str, Any], path: str, like: Any) -> Any:
    """An array by path; one without elements is created, since it is not saved."""
    return (
        flat[path] if like.size else jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
    )


def import_orbax() -> Any:
    """Orbax, imported only where checkpoints are read or written, since the import takes 0.2
    seconds.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # it reports every save at INFO and WARNING
    return ocp


def arrays_by_path(state: State) -> dict[str, Any]:
    """All arrays by path, but for those without elements, which Orbax cannot write."""
    return {path: leaf for path, leaf in flatten(state).items() if leaf.size}


def active_processes() -> set[int] | None:
    """All processes of several. Given explicitly, Orbax synchronizes through JAX's coordination
    service, not with device programs, which a thread must not start.
    """
    return set(range(jax.process_count())) if jax.process_count() > 1 else None
