"""Finds NaN and infinities in a batch, on the host or on the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spmd.base.tree import flatten
from spmd.data.batches import Batch, HostBatch


def find_nonfinite(batch: Batch | HostBatch) -> str:
    """The first NaN, or else the first infinity, in the rows of a batch that this process has, by
    key and row; "" if there is none.

    >>> find_nonfinite(HostBatch({"x": np.array([[1.0], [np.nan], [2.0]])}, 2, np.array([2, 1])))
    'x is nan in row 1 of the data'
    """
    selects = isinstance(batch, HostBatch) and batch.index is not None
    for is_odd in (np.isnan, np.isinf):
        for path, leaf in flatten(batch.leaves).items():
            # numpy does not count bfloat16 as inexact, and jax.numpy does.
            if not jax.numpy.issubdtype(leaf.dtype, np.inexact):
                continue
            if selects:
                leaf = leaf[batch.index]
            odd_values = _odd_values(leaf, batch.rows, is_odd)
            if odd_values:
                return _describe_odd(path, odd_values, batch.index)
    return ""


def _describe_odd(path: str, odd_values: dict[int, Any], index: np.ndarray | None) -> str:
    """Return the first odd value of a leaf, and its row, in words."""
    row = min(odd_values)
    where = f"row {row} of the batch"
    if index is not None:
        where = f"row {index[row]} of the data"
    more = ""
    if len(odd_values) > 1:
        more = f", and in {len(odd_values) - 1} more"
    name = path or "the array"
    if path.isdigit():
        name = f"array {path}"
    return f"{name} is {odd_values[row]} in {where}{more}"


def _odd_values(leaf: Any, rows: int, is_odd: Callable[[np.ndarray], np.ndarray]) -> dict[int, Any]:
    """The first odd value of each of the first rows that has one, by row."""
    parts = [(0, leaf)]
    if isinstance(leaf, jax.Array):
        # `start` is None where a device has all rows.
        parts = [(shard.index[0].start or 0, shard.data) for shard in leaf.addressable_shards]
    odd_values = {}
    for first, part in parts:
        # an error may read devices, whatever guard the user has set
        with jax.transfer_guard_device_to_host("allow"):
            values = np.asarray(part)
        odd = is_odd(values.reshape(len(values), -1))
        for row in np.flatnonzero(odd.any(axis=1)).tolist():
            if first + row < rows:
                odd_values[first + row] = values[row].flat[odd[row].argmax()]
    return odd_values
