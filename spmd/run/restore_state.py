"""A state for a placed model from a checkpoint: all of it, or the arrays of the model that a
pattern matches.
"""

import dataclasses
from typing import Any

from spmd.base.log_info import log_info
from spmd.base.tree import flatten, map_paths
from spmd.errors import CheckpointError, OptionError, join_names, short_repr
from spmd.layout.schema import Layout
from spmd.layout.toml_reader import loads
from spmd.run.checkpoint import as_checkpoint
from spmd.run.checkpoint_reader import CheckpointReader, check_run_folder
from spmd.run.reshard_checkpoint import PARAMS
from spmd.run.restore_comm_state import check_sync_schedule
from spmd.run.saved_settings import saved_numbers
from spmd.run.script_numbers import ScriptNumbers
from spmd.train.choose_frozen import check_same_trained
from spmd.train.model_setup import PlacedModel
from spmd.train.state import State


def open_checkpoint(checkpoint: Any, only: Any) -> CheckpointReader:
    """Return a reader of the checkpoints from which `Trainer.restore` takes `only` some arrays.

    Raises:
      CheckpointError: there is no such folder, or it has no run.
      OptionError: `only` is no pattern.
    """
    config = as_checkpoint(checkpoint)
    if only is not None and not isinstance(only, str):
        raise OptionError(
            f"only={short_repr(only)}.",
            fix='"params", or a pattern of paths such as "encoder/**".',
        )
    if config is None:
        raise CheckpointError(
            f"checkpoint={short_repr(checkpoint)}: there is no such folder.",
            fix="the folder of a run.",
        )
    check_run_folder(config.path)
    return CheckpointReader(config.path)


def restore_state(
    placed: PlacedModel, layout: Layout, numbers: ScriptNumbers, reader: CheckpointReader, step: int
) -> tuple[State, list[str]]:
    """Return the state of a step; and in words the numbers of the optimizer that the script has
    changed, and the parts of the optimizer's wrappers and of the codecs' memory that did not fit.

    Raises:
      CheckpointError: it does not fit the model, the optimizer or the layout.
    """
    meta = reader.meta(step)
    with reader.naming_errors(step):
        saved = loads(meta["layout"])
    check_sync_schedule(saved.parameter_server, layout.parameter_server, step)
    check_same_trained(saved, layout, step)
    state, changes = reader.restore(
        step,
        placed.abstract_state,
        placed.states.init_memory,
        placed.packing,
        placed.states.init_optimizer,
    )
    with reader.naming_errors(step):
        state, changed = numbers.update(state, saved_numbers(meta, placed.abstract_state))
    return state, [*changed, *changes]


def restore_only(placed: PlacedModel, reader: CheckpointReader, step: int, pattern: str) -> State:
    """Return a new state at step 0, in which the arrays of the model that a pattern matches are
    those of the checkpoint; "params": all of them.

    A line names the arrays that begin as in a new state.

    Raises:
      CheckpointError: arrays do not fit.
      OptionError: the pattern matches none.
    """
    if pattern == PARAMS:
        params = reader.restore_params(step, placed.abstract_state, placed.packing)
        return placed.states.begin(*params)
    restored = reader.restore_matching(
        step, placed.abstract_state, pattern, packed=placed.packing is not None
    )
    state = placed.states.init()
    trees = {"params": state.params, "stats": state.stats, "frozen": state.frozen}
    new = []
    for name, tree in trees.items():
        new += [path for path in flatten(tree) if f"{name}/{path}" not in restored]
    others = join_names(new, 5) or "none"
    log_info(
        f"restored from step {step}: {len(restored)} arrays of the model that match {pattern}; "
        f"{others} begin as in a new state."
    )
    mixed = {}
    for name, tree in trees.items():
        mixed[name] = map_paths(
            lambda path, leaf, name=name: restored.get(f"{name}/{path}", leaf), tree
        )
    return placed.states.restart(dataclasses.replace(state, **mixed))
