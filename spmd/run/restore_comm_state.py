"""Restores the state of gradient communication for another number of workers or other codecs.

A checkpoint stores it separately from the rest of the state, one item per kind, so that a run may
ignore or lack any of them.
"""

import itertools
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.errors import CheckpointError
from spmd.run.reshard_checkpoint import abstract_from_text, parse_dtype, parse_shape
from spmd.specs import spec_axes
from spmd.sync.gradient_sync import CODEC, GATHERED, HELD, OUTER, OWN, READ, RESIDUAL, SQUARES, SUM
from spmd.tree import describe
from spmd.wire.resplit_state import resplit_rows
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.sync_schedule import has_pending_sync

STATE = "state"
COMM_STATE = {  # items of a checkpoint, and how reports name them
    RESIDUAL: "residuals",
    CODEC: "arrays of codecs",
    HELD: "stale weights of workers",
    SUM: "sums of gradients",
    GATHERED: "weights of these sums",
    SQUARES: "means of squared gradients",
    OWN: "local weights of workers",
    READ: "weights of the last synchronization",
    OUTER: "momenta of the outer optimizer",
}
RESET_EFFECTS = {  # what a reset in the middle of a run means
    RESIDUAL: "compression errors so far are not compensated",
    HELD: "every worker reads the servers' weights again",
    SUM: "gradients collected for the next update, if any, are dropped",
    OWN: "every worker starts from the servers' weights",
}


def checkpoint_item(path: str) -> str:
    """The item of a checkpoint that an array belongs to.

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
    """Plans how to read communication state: arrays to read, the paths that are usable, and text
    about what does not fit.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path.
      wanted: the arrays of the new state (shapes, dtypes, shardings), by path.
      repacked: parameters are packed differently, which invalidates communication state even where
        shapes are equal.

    Returns:
      Arrays to read, by item and path: Orbax reads an item completely, so unwanted arrays are read
        with the rest.
    """
    if repacked:
        return {}, set(), _reset_all(saved, wanted)
    to_read, fitting, changes = {}, set(), []
    for item, name in COMM_STATE.items():
        arrays = {
            path: _as_saved(wanted.get(path), text, mesh, item)
            for path, text in saved.items()
            if checkpoint_item(path) == item
        }
        kept = {path for path, (_, fits) in arrays.items() if fits}
        fitting |= kept
        if kept:
            to_read[item] = {path: leaf for path, (leaf, _) in arrays.items()}
        missing = sum(checkpoint_item(path) == item for path in wanted) - len(kept)
        changes += (
            [f"{len(arrays) - len(kept)} {name} were dropped"] if len(arrays) > len(kept) else []
        )
        changes += [f"{missing} {name} were reset"] if missing else []
        workers = [
            wanted[path].shape[0] for path in kept if arrays[path][0].shape != wanted[path].shape
        ]
        changes += [f"{name} were redistributed over {workers[0]} workers"] if workers else []
    return to_read, fitting, changes


def _reset_all(saved: dict[str, str], wanted: dict[str, Any]) -> list[str]:
    changes = []
    for item, name in COMM_STATE.items():
        before, now = (
            any(checkpoint_item(path) == item for path in arrays) for arrays in (saved, wanted)
        )
        effect = (
            f": {RESET_EFFECTS[item]}"
            if item in RESET_EFFECTS and (before or item in (HELD, OWN))
            else ""
        )
        changes += (
            [f"{name} were reset{effect}"] if now else [f"{name} were dropped"] if before else []
        )
    return changes


def _as_saved(wanted: Any, saved: str, mesh: Mesh, item: str) -> tuple[jax.ShapeDtypeStruct, bool]:
    """How to read an array saved with this dtype and shape, and whether it fits the wanted one
    (None: unwanted).

    Only residuals can be redistributed over workers; every dim of a codec's arrays is fixed.
    Residuals of another number of workers are sharded over dim 0 if the workers divide it, else
    over another dim, else replicated.
    """
    shape, dtype = parse_shape(saved), parse_dtype(saved)
    if wanted is not None and describe(wanted) == saved:
        return wanted, True
    if (
        wanted is None
        or item != RESIDUAL
        or dtype != str(wanted.dtype)
        or shape[1:] != wanted.shape[1:]
    ):
        return abstract_from_text(saved, mesh), False  # to be dropped
    spec = (*wanted.sharding.spec, *[None] * (len(shape) - len(wanted.sharding.spec)))
    over, rest = math.prod(mesh.shape[axis] for axis in spec_axes(spec[:1])), list(spec[1:])
    free = [dim for dim, entry in enumerate(rest) if entry is None and shape[dim + 1] % over == 0]
    if shape[0] % over and free:
        rest[free[0]] = spec[0]
    spec = PartitionSpec(None if shape[0] % over else spec[0], *rest)
    return jax.ShapeDtypeStruct(shape, wanted.dtype, sharding=NamedSharding(mesh, spec)), True


def resplit_residuals(residual: jax.Array, wanted: Any) -> jax.Array:
    """Residuals [workers, ...] for another number of workers, with the same mean, which is all that
    error feedback needs.
    """
    return jax.jit(resplit_rows, static_argnums=1, out_shardings=wanted.sharding)(
        residual, wanted.shape[0]
    )


def check_sync_schedule(before: ParameterServer, now: ParameterServer, step: int) -> None:
    """Check that local SGD may resume from this step after a change of its schedule or of the mode.

    Raises:
      CheckpointError: a synchronization was started and would never be received, or would be
        received and was never started.
    """

    def schedule(server: ParameterServer) -> str:
        return f"every = {server.every}, fragments = {server.fragments}, overlap = {server.overlap}"

    def is_pending(step: int) -> bool:
        return has_pending_sync(now, step) or (
            before.mode == "local" and has_pending_sync(before, step)
        )

    same = before.mode == "local" and schedule(before) == schedule(now)
    if now.mode == "local" and not same and is_pending(step):
        free = next(number for number in itertools.count(step) if not is_pending(number))
        was = schedule(before) if before.mode == "local" else f'mode = "{before.mode}"'
        why = (
            f"the checkpoint of step {step} lies between a send and its receive, and the schedule "
            "has changed"
        )
        raise CheckpointError(
            f"{why}: {was} before, {schedule(now)} now.",
            fix=f"first train to step {free} with the previous options.",
        )
