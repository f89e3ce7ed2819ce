"""Restores the state of gradient communication for another number of workers or other codecs.

A checkpoint stores it separately from the rest of the state, one item per kind, so that a run may
ignore or lack any of them.
"""

import itertools
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.specs import spec_axes
from spmd.base.tree import describe
from spmd.errors import CheckpointError
from spmd.run.reshard_checkpoint import abstract_from_text, parse_dtype, parse_shape
from spmd.wire.resplit_state import resplit_rows
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.schedule import has_pending_sync
from spmd.wire.transfer import CODEC, GATHERED, HELD, OUTER, OWN, READ, RESIDUAL, SQUARES, SUM

STATE = "state"
# The items of a checkpoint, and their names in reports.
COMM_STATE = {
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
# The effects of a reset in the middle of a run.
RESET_EFFECTS = {
    RESIDUAL: "compression errors so far are not compensated",
    HELD: "every worker reads the servers' weights again",
    SUM: "gradients collected for the next update, if any, are dropped",
    OWN: "every worker starts from the servers' weights",
}


def checkpoint_item(path: str) -> str:
    """Return the item of a checkpoint that an array belongs to.

    >>> checkpoint_item("params/dense/kernel"), checkpoint_item("exchange/dense/kernel/residual")
    ('state', 'residual')
    """
    if not path.startswith("exchange/"):
        return STATE
    kind = path.rpartition("/")[2]
    return kind if kind in COMM_STATE else CODEC


def comm_state_to_read(
    saved: dict[str, str], targets: dict[str, Any], mesh: Mesh, *, repacked: bool = False
) -> tuple[dict[str, dict[str, jax.ShapeDtypeStruct]], set[str], list[str]]:
    """Plan how to read communication state: arrays to read, the paths that are usable, and text
    about what does not fit.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path.
      targets: the arrays of the new state (shapes, dtypes, shardings), by path.
      repacked: parameters are packed differently, which invalidates communication state even where
        shapes are equal.

    Returns:
      Arrays to read, by item and path: Orbax reads an item completely, so arrays that the new state
        does not have are read as well.
    """
    if repacked:
        return {}, set(), _reset_all(saved, targets)
    to_read: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    fitting: set[str] = set()
    changes = []
    for item, name in COMM_STATE.items():
        leaves: dict[str, jax.ShapeDtypeStruct] = {}
        item_fitting = set()
        for path, text in saved.items():
            if checkpoint_item(path) == item:
                leaves[path], fits = _as_saved(targets.get(path), text, mesh, item)
                if fits:
                    item_fitting.add(path)
        fitting |= item_fitting
        if item_fitting:
            # Orbax reads an item completely: the arrays that will be dropped are named, too.
            to_read[item] = leaves
        dropped = len(leaves) - len(item_fitting)
        if dropped:
            changes.append(f"{dropped} {name} were dropped")
        missing = sum(checkpoint_item(path) == item for path in targets) - len(item_fitting)
        if missing:
            changes.append(f"{missing} {name} were reset")
        resplit = [path for path in item_fitting if leaves[path].shape != targets[path].shape]
        if resplit:
            workers = targets[resplit[0]].shape[0]
            changes.append(f"{name} were redistributed over {workers} workers")
    return to_read, fitting, changes


def _reset_all(saved: dict[str, str], targets: dict[str, Any]) -> list[str]:
    """Return text about communication state of which nothing is restored."""
    changes = []
    for item, name in COMM_STATE.items():
        before = any(checkpoint_item(path) == item for path in saved)
        now = any(checkpoint_item(path) == item for path in targets)
        effect = ""
        if item in RESET_EFFECTS and (before or item in (HELD, OWN)):
            effect = f": {RESET_EFFECTS[item]}"
        if now:
            changes.append(f"{name} were reset{effect}")
        elif before:
            changes.append(f"{name} were dropped")
    return changes


def _as_saved(target: Any, saved: str, mesh: Mesh, item: str) -> tuple[jax.ShapeDtypeStruct, bool]:
    """Return how to read an array saved with this dtype and shape, and whether it fits the one of
    the new state (None: the new state has none).

    Only residuals can be redistributed over workers; every dim of a codec's arrays is fixed.
    Residuals of another number of workers are sharded over dim 0 if the workers divide it, else
    over another dim, else replicated.
    """
    shape = parse_shape(saved)
    if target is not None and describe(target) == saved:
        return target, True
    if (
        target is None
        or item != RESIDUAL
        or parse_dtype(saved) != str(target.dtype)
        or shape[1:] != target.shape[1:]
    ):
        return abstract_from_text(saved, mesh), False
    spec = list(target.sharding.spec)
    # A PartitionSpec may leave out the last dims.
    spec += [None] * (len(shape) - len(spec))
    worker_entry, *others = spec
    workers = math.prod(mesh.shape[axis] for axis in spec_axes((worker_entry,)))
    # JAX shards a dim only over a number of devices that divides it.
    if shape[0] % workers:
        for dim, entry in enumerate(others):
            if entry is None and shape[dim + 1] % workers == 0:
                others[dim] = worker_entry
                break
        worker_entry = None
    sharding = NamedSharding(mesh, PartitionSpec(worker_entry, *others))
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=sharding), True


def resplit_residuals(residual: jax.Array, target: Any) -> jax.Array:
    """Return residuals [workers, ...] for another number of workers, with the same mean, which is
    all that error feedback needs.
    """
    return jax.jit(resplit_rows, static_argnums=1, out_shardings=target.sharding)(
        residual, target.shape[0]
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
        was = f'mode = "{before.mode}"'
        if before.mode == "local":
            was = schedule(before)
        why = (
            f"the checkpoint of step {step} lies between a send and its receive, and the schedule "
            "has changed"
        )
        raise CheckpointError(
            f"{why}: {was} before, {schedule(now)} now.",
            fix=f"first train to step {free} with the previous options.",
        )
