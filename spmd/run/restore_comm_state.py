"""What the exchange of gradients remembers, brought from a checkpoint to another number of workers, or to other codecs.

In a checkpoint it is apart from the rest of the state, in an item for each kind, so that a run may leave it or lack it.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.errors import CheckpointError
from spmd.layout.schema import spec_axes
from spmd.layout.server import ParameterServer
from spmd.run.reshard_checkpoint import abstract_from_text, parse_dtype, parse_shape
from spmd.tree import describe
from spmd.wire.gradient_sync import CODEC, GATHERED, HELD, OUTER, OWN, READ, RESIDUAL, SQUARES, SUM
from spmd.wire.param_server.sync_schedule import has_pending_sync

STATE = "state"
COMM_STATE = {  # items of a checkpoint, and in words
    RESIDUAL: "residuals",
    CODEC: "arrays of codecs",
    HELD: "weights as workers had read them",
    SUM: "sums of gradients",
    GATHERED: "weights of these sums",
    SQUARES: "means of gradients squared",
    OWN: "weights of workers' own",
    READ: "weights as all workers took them last",
    OUTER: "momenta of the outer optimizer",
}
RESET_EFFECTS = {  # what it means that they start anew in the middle of a run
    RESIDUAL: "what codecs had lost so far is not made up for",
    HELD: "every worker reads the servers' weights anew",
    SUM: "what was gathered for the next update, if anything, is dropped",
    OWN: "every worker takes the servers' weights for its own",
}


def checkpoint_item(path: str) -> str:
    """In which item of a checkpoint an array is.

    >>> checkpoint_item("params/dense/kernel"), checkpoint_item("exchange/dense/kernel/residual")
    ('state', 'residual')
    """
    if not path.startswith("exchange/"):
        return STATE
    kind = path.rpartition("/")[2]
    return kind if kind in COMM_STATE else CODEC


def comm_state_to_read(
    saved: dict[str, str], wanted: dict[str, Any], mesh: Mesh, *, repacked: bool = False
) -> tuple[dict[str, dict[str, jax.ShapeDtypeStruct]], set[str], list[str]]:
    """How to read what was remembered, which paths of it are of use, and in words what does not fit.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path.
      wanted: the arrays of the new state (shapes, dtypes, shardings), by path.
      repacked: parameters are packed in another way, so that nothing of it means what it did, even where shapes are equal.

    Returns:
      Arrays to read, by item and path: Orbax reads an item whole, so what is not wanted is read with the rest.
    """
    if repacked:
        return {}, set(), _all_anew(saved, wanted)
    reading, fitting, told = {}, set(), []
    for item, words in COMM_STATE.items():
        found = {path: _as_saved(wanted.get(path), text, mesh, item) for path, text in saved.items() if checkpoint_item(path) == item}
        kept = {path for path, (_, fits) in found.items() if fits}
        fitting |= kept
        if kept:
            reading[item] = {path: leaf for path, (leaf, _) in found.items()}
        lacking = sum(checkpoint_item(path) == item for path in wanted) - len(kept)
        told += [f"{len(found) - len(kept)} {words} are left behind"] if len(found) > len(kept) else []
        told += [f"{lacking} {words} start anew"] if lacking else []
        others = [wanted[path].shape[0] for path in kept if found[path][0].shape != wanted[path].shape]
        told += [f"{words} of other workers, split over {others[0]}"] if others else []
    return reading, fitting, told


def _all_anew(saved: dict[str, str], wanted: dict[str, Any]) -> list[str]:
    told = []
    for item, words in COMM_STATE.items():
        before, now = (any(checkpoint_item(path) == item for path in given) for given in (saved, wanted))
        meaning = f": {RESET_EFFECTS[item]}" if item in RESET_EFFECTS and (before or item in (HELD, OWN)) else ""
        told += [f"{words} start anew{meaning}"] if now else [f"{words} are left behind"] if before else []
    return told


def _as_saved(wanted: Any, saved: str, mesh: Mesh, item: str) -> tuple[jax.ShapeDtypeStruct, bool]:
    """How to read an array that was saved with this dtype and shape, and whether it fits what is wanted now (None: nothing is).

    Only what belongs to workers can be split anew; of a codec's own arrays every dim is fixed.
    Residuals of another number of workers are cut over dim 0 if the workers divide it, else along another dim, else whole.
    """
    shape, dtype = parse_shape(saved), parse_dtype(saved)
    if wanted is not None and describe(wanted) == saved:
        return wanted, True
    if wanted is None or item != RESIDUAL or dtype != str(wanted.dtype) or shape[1:] != wanted.shape[1:]:
        return abstract_from_text(saved, mesh), False  # to be left
    spec = (*wanted.sharding.spec, *[None] * (len(shape) - len(wanted.sharding.spec)))
    over, rest = math.prod(mesh.shape[axis] for axis in spec_axes(spec[:1])), list(spec[1:])
    free = [dim for dim, entry in enumerate(rest) if entry is None and shape[dim + 1] % over == 0]
    if shape[0] % over and free:
        rest[free[0]] = spec[0]
    spec = PartitionSpec(None if shape[0] % over else spec[0], *rest)
    return jax.ShapeDtypeStruct(shape, wanted.dtype, sharding=NamedSharding(mesh, spec)), True


def resplit_residuals(residual: jax.Array, wanted: Any) -> jax.Array:
    """Residuals [workers, ...] for another number of workers, with the same mean, which is all that error feedback needs.

    Fewer workers: each takes the mean of a group. More: each of a group takes a copy. Neither divides the other: all take the mean.
    """
    before, now = residual.shape[0], wanted.shape[0]

    def split(x: jax.Array) -> jax.Array:
        if before % now == 0:
            return x.reshape(now, before // now, *x.shape[1:]).mean(1)
        return jnp.repeat(x if now % before == 0 else x.mean(0, keepdims=True), now // before if now % before == 0 else now, axis=0)

    return jax.jit(split, out_shardings=wanted.sharding)(residual)


def check_sync_schedule(before: ParameterServer, now: ParameterServer, step: int) -> None:
    """Whether workers may go on from this step by themselves, with other turns than before or after another mode.

    Raises:
      CheckpointError: something is on its way back that would not come, or would be taken back and was never sent.
    """
    turns = lambda server: f"every = {server.every}, fragments = {server.fragments}, overlap = {server.overlap}"
    same = before.mode == "local" and turns(before) == turns(now)
    between = lambda number: has_pending_sync(now, number) or (before.mode == "local" and has_pending_sync(before, number))
    if now.mode == "local" and not same and between(step):
        free = next(number for number in itertools.count(step) if not between(number))
        was = turns(before) if before.mode == "local" else f'mode = "{before.mode}"'
        raise CheckpointError(
            (
                f"the checkpoint of step {step} lies between a send and its receive, and the schedule has changed: {was} before, "
                f"{turns(now)} now."
            ),
            fix=f"first go on to step {free} with what it had.",
        )
