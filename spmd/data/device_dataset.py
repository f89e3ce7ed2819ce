"""Data sets that are small enough to be replicated on every device, so that many steps run in one
call without transfers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.tree import Tree
from spmd.data.batches import HostBatch, as_arrays, check_leaves
from spmd.data.narrow import OutOfRange, narrow, raise_out_of_range
from spmd.errors import DataError, check_integer


@dataclasses.dataclass(frozen=True)
class Resident:
    """Arrays to be kept on the devices; `steps_per_call` steps are compiled into one call."""

    arrays: Tree
    steps_per_call: int


def resident(arrays: Any, *, steps_per_call: int = 50) -> Resident:
    """Keep a data set on the devices for the whole run, and compile many steps into one call.

    For a small model the host is the bottleneck: transferring a batch takes longer than training on
    it. Every device gets a copy of all arrays; each step picks its rows by number, in the same
    order as without `resident`. The arithmetic is the same, except for how XLA fuses a longer
    program.

    Args:
      arrays: dict or tuple of arrays [examples, ...].
      steps_per_call: steps in one call; checkpoints, evaluations and the end of an epoch shorten a
        call.

    Returns:
      What `fit(data=...)` takes.

    Example:
      >>> data = resident({"x": np.zeros((256, 4), np.float32), "y": np.zeros(256, np.int32)})
      >>> data.steps_per_call
      50
    """
    check_integer(steps_per_call, "steps_per_call")
    leaves = jax.tree.leaves(arrays)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        raise DataError(
            "resident() takes arrays.", fix="a dict or tuple of arrays of shape [rows, ...]."
        )
    arrays = as_arrays(arrays, "the data")
    check_leaves(arrays, "the data")
    return Resident(arrays, int(steps_per_call))


def replicate_arrays(arrays: Tree, mesh: Mesh) -> Tree:
    """A copy of every array on every device of the mesh."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> jax.Array:
        host = narrow(np.asarray(leaf), copy=True)
        # copied for each device: on a CPU, JAX uses an aligned buffer of the host itself
        return jax.make_array_from_callback(host.shape, replicated, lambda at: host[at].copy())

    try:
        return jax.tree.map(put, arrays)
    except OutOfRange:
        raise_out_of_range(arrays, None, "the data")


def row_indices(batches: Sequence[HostBatch], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers and weights [batches, size] of batches of resident data. A short batch is padded
    with its first row, at weight 0.
    """
    index = np.zeros((len(batches), size), np.int32)
    weights = np.ones((len(batches), size), np.float32)
    for row, batch in enumerate(batches):
        index[row, : len(cast(np.ndarray, batch.index))] = cast(np.ndarray, batch.index)
        if batch.weights is not None:
            weights[row] = batch.weights
        elif batch.rows < size:
            index[row, batch.rows :], weights[row, batch.rows :] = index[row, 0], 0.0
    return index, weights
