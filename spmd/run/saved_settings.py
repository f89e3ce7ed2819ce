"""The settings of a run, as a checkpoint keeps them, compared with those of a run that resumes; and
the position of a run that resumes on other data, or on the same data in other batches or another
order.
"""

from collections.abc import Collection, Mapping
from typing import Any

from spmd.data.sources import RECORDS_SEED, Source
from spmd.data.work_assignment import Position
from spmd.errors import CheckpointError, Problem
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.run.checkpoint_reader import CheckpointReader, arrays_by_path
from spmd.run.reshard_checkpoint import packing_meta
from spmd.run.rewrap_optimizer import Rewrapping
from spmd.run.script_numbers import ScriptNumbers
from spmd.train.adapt_optimizer import options_of
from spmd.train.compiled_step import TrainingProgram
from spmd.train.model_setup import PlacedModel
from spmd.train.state import State

SIZES = {"batch_size", "batches"}  # facts of data that say nothing about the order of its examples


def describe_run(
    placed: PlacedModel,
    layout: Layout,
    source: Source | None,
    program: TrainingProgram | None,
    numbers: ScriptNumbers,
) -> dict[str, Any]:
    """Return the description of a run in its checkpoints, besides the arrays and the position.

    Args:
      layout: as it was declared.
      source: of the data; without `data` if there is none.
      numbers: of the optimizer.
    """
    config = placed.config
    options = {"precision": config.precision, "accumulate": config.accumulate}
    if program is not None and program.accumulated:
        options["accumulated gradients of stacks"] = program.accumulated
    if program is not None and program.sync.layerwise:
        options["parameters gathered by layer"] = len(program.sync.layerwise)
    meta = {
        "layout": layout.to_toml(),
        "mesh": str(MeshSpec.parse(placed.mesh)),
        "options": {**options, **options_of(placed.given_optimizer)},
        "storage": packing_meta(placed.packing),
        "optimizer": numbers.to_json(),
    }
    if source is None:
        return meta
    return {"data": describe_data(source, config.seed), **meta}


def describe_data(source: Source, seed: int) -> dict[str, Any]:
    """Return the description of a run's data in its checkpoints."""
    return {**source.fingerprint(), "seed": seed}


def saved_position(
    meta: Mapping[str, Any], step: int, reader: CheckpointReader, fix: str
) -> tuple[Position, dict[str, Any]]:
    """Return the position in the data of a checkpoint, and the description of the data.

    Raises:
      CheckpointError: `Trainer.save` got a state alone; `fix` says what else can be done.
    """
    if "position" not in meta:
        why = (
            f"the checkpoint of step {step} in {reader.folder} is a state alone, and does not say "
            "where in its data the loop was"
        )
        raise CheckpointError(
            f"{why}.", fix=f"trainer.save(info, folder), with what trainer.steps yields; {fix}"
        )
    with reader.naming_errors(step):
        return Position(**meta["position"]), meta["data"]


def saved_numbers(meta: Mapping[str, Any], target: State) -> dict[str, Any] | None:
    """Return the numbers that the script gave the optimizer of a checkpoint (`ScriptNumbers`), by
    their paths in the state to restore; None if the checkpoint, of an earlier version, does not
    say.
    """
    numbers = meta.get("optimizer")
    if numbers is None:
        return None
    return Rewrapping(meta["arrays"], arrays_by_path(target)).renamed(numbers)


def option_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return lines on the changes of mesh, options and layout between two runs, but for an
    optimizer's wrappers that are new, or gone.
    """
    old = {"mesh": saved["mesh"], **saved["options"]}
    new = {"mesh": now["mesh"], **now["options"]}
    # Another line says which wrappers are new, or gone: `Rewrapping.changes`.
    rewrapped = _wrapper_names(old) ^ _wrapper_names(new)
    changes = []
    for name in {**old, **new}:
        if old.get(name) != new.get(name) and name.partition("(")[0] not in rewrapped:
            changes.append(f"{name} was {old.get(name)}, is {new.get(name)}")
    if saved["layout"] != now["layout"]:
        changes.append("the layout has changed")
    return changes


def _wrapper_names(options: Mapping[str, Any]) -> set[str]:
    """Return the names of wrappers of the optimizer, whose options are called NAME(...)."""
    return {name.partition("(")[0] for name in options if "(" in name}


def data_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Problem]:
    """Return the differences between the descriptions of two runs' data, by name."""
    # Checkpoints of earlier versions do not have these: that they are missing is no difference.
    unsaved = {RECORDS_SEED} - saved.keys()
    if not is_hashed(saved):
        unsaved |= {name for name in now if name.startswith("contents")}
    problems = {}
    for name in dict.fromkeys([*saved, *now]):
        if name not in unsaved and saved.get(name) != now.get(name):
            text = f"saved {saved.get(name)!r}, now {now.get(name)!r}"
            problems[name] = Problem(name, [text])
    return problems


def is_hashed(data: Mapping[str, Any]) -> bool:
    """Return whether a description of data has a hash of its contents; those in checkpoints of
    earlier versions have none.
    """
    return any(name.startswith("contents") for name in data)


def resumed_position(
    at: Position, saved: Mapping[str, Any], now: Mapping[str, Any], changed: Collection[str]
) -> tuple[Position, list[str]]:
    """Return the position of a run in changed data, and lines that say what has changed and what of
    the order is lost.

    If only the size of batches has changed, the run continues behind the examples that it took;
    where that is inside a batch, at the beginning of this batch. In another order the epoch begins
    again. The number of the epoch is kept.

    Args:
      at: the position in the data of the checkpoint.
      saved, now: what describes both.
      changed: names of what differs.

    Example:
      >>> saved = {"examples": 96, "batch_size": 32, "seed": 0}
      >>> resumed_position(Position(1, 2), saved, {**saved, "batch_size": 16}, ["batch_size"])[0]
      Position(epoch=1, batch=4, reader=None, parts=0, workers=0)
    """
    order = [name for name in changed if not name.startswith("contents")]
    lines = [f"{name} of the data have changed" for name in changed if name not in order]
    lines += [f"{name} was {saved.get(name)}, is {now.get(name)}" for name in order]
    streamed = "batches" in now
    epoch = f"epoch {at.epoch + 1}"
    if streamed or RECORDS_SEED in now:
        # The seed is that of the order of arrays; records have their own.
        order = [name for name in order if name != "seed"]
    if not order:
        return at, lines
    old_size = saved.get("batch_size", 0)
    new_size = now.get("batch_size", 0)
    examples = now.get("examples", float("inf"))
    trained = min(at.batch * old_size, examples)
    # A reader's own position, and parts of batches by worker, are only valid for one batch size.
    only_sizes_differ = SIZES.issuperset(order)
    if only_sizes_differ and not at.workers and not (streamed and at.reader is not None):
        repeated = 0
        again = ""
        if trained == examples:
            position = Position(at.epoch + 1)
        else:
            repeated = trained % new_size
            position = Position(at.epoch, trained // new_size, at.reader)
        if repeated:
            again = (
                f"; {repeated} that were taken are taken again, because no batch of {new_size} "
                f"ends after {trained}"
            )
        if streamed:
            again += ", if the data yields the same examples in the same order"
        lines.append(
            f"it continues behind the first {trained - repeated} examples of {epoch}{again}"
        )
        return position, lines
    if not (at.batch or at.parts):
        return Position(at.epoch), [*lines, f"{epoch} begins, in the new order"]
    if at.workers:
        begun = f"{at.parts} parts of batches"
    else:
        begun = f"{at.batch} batches ({trained} examples)"
    lines.append(
        f"{epoch} begins again, in the new order: what it had taken before, {begun}, is taken again"
    )
    return Position(at.epoch), lines
