"""Settings that a checkpoint was saved with, compared with those of a run that resumes."""

from collections.abc import Mapping
from typing import Any

from spmd.data.sources import RECORDS_SEED
from spmd.data.work_assignment import Position
from spmd.errors import CheckpointError, Problem
from spmd.run.checkpoint_reader import CheckpointReader, arrays_by_path
from spmd.run.rewrap_optimizer import Rewrapping
from spmd.train.state import State


def saved_position(
    meta: Mapping[str, Any], step: int, reader: CheckpointReader, fix: str
) -> tuple[Position, dict[str, Any]]:
    """The position in the data of a checkpoint, and the description of the data.

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


def saved_numbers(meta: Mapping[str, Any], wanted: State) -> dict[str, Any] | None:
    """The numbers that the script gave the optimizer of a checkpoint (`ScriptNumbers`), by their
    paths in the wanted state; None if the checkpoint, of an earlier version, does not say.
    """
    numbers = meta.get("optimizer")
    return (
        None
        if numbers is None
        else Rewrapping(meta["arrays"], arrays_by_path(wanted)).renamed(numbers)
    )


def option_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed of mesh, options and layout between two runs, but for an optimizer's
    wrappers that are new, or gone.
    """
    old, new = ({"mesh": meta["mesh"], **meta["options"]} for meta in (saved, now))
    of_wrappers = [
        {name.partition("(")[0] for name in options if "(" in name} for options in (old, new)
    ]
    rewrapped = of_wrappers[0] ^ of_wrappers[1]  # of which a line says so
    names = [
        name
        for name in {**old, **new}
        if old.get(name) != new.get(name) and name.partition("(")[0] not in rewrapped
    ]
    changes = [f"{name} was {old.get(name)}, is {new.get(name)}" for name in names]
    return changes + (["the layout has changed"] if saved["layout"] != now["layout"] else [])


def data_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Problem]:
    """Where the descriptions of two runs' data differ, by name."""
    unknown = set() if is_hashed(saved) else {name for name in now if name.startswith("contents")}
    unknown |= {RECORDS_SEED} - saved.keys()
    different = [
        name
        for name in dict.fromkeys([*saved, *now])
        if name not in unknown and saved.get(name) != now.get(name)
    ]
    return {
        name: Problem(name, [f"saved {saved.get(name)!r}, now {now.get(name)!r}"])
        for name in different
    }


def is_hashed(data: Mapping[str, Any]) -> bool:
    """Whether a description of data has a hash of its contents; those in checkpoints of earlier
    versions have none.
    """
    return any(name.startswith("contents") for name in data)
