"""Communication between workers and servers: parameters as packed rows, each worker's version of
them, and its gradients.

Per worker, inside the manual region. The D positions along the data axes are servers and hold m
simulated workers each, W = D m. A parameter is packed as [D, width], a row for each server.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.wire import collectives
from spmd.wire.codec.base import RowCodec, packed_collective
from spmd.wire.codec.bfloat16 import send_rounded
from spmd.wire.reduction import where_finite
from spmd.wire.transfer import HELD, RESIDUAL, Leaves, Memory, Transfer

Buckets = Sequence[Sequence[str]]  # paths that are communicated together


def gather_rows(
    rows: Leaves, buckets: Buckets, axes: tuple[str, ...], *, rounded: bool = False
) -> Leaves:
    """Packed parameters, by path [D, width], from this server's row of them, [1, width]: one
    all-gather per bucket.

    Args:
      rows: of all parameters, or of all those of some buckets.
      rounded: whether float32 is sent as bfloat16.
    """
    gathered: Leaves = {}
    all_gather = functools.partial(collectives.all_gather, axes=axes, dim=0)
    with jax.named_scope("gather_params"):
        for paths in buckets:
            if paths[0] in rows:
                sent = [rows[path] for path in paths]
                received = _send_params(sent, 1, all_gather, rounded)
                gathered.update(zip(paths, received, strict=True))
    return {path: gathered[path] for path in rows}


def fetch_params(
    memory: Memory, buckets: Buckets, axes: tuple[str, ...], *, rounded: bool = False
) -> Leaves:
    """The parameters that this position's workers have read, by path [m, D, width]: one all-to-all
    per bucket.
    """
    fetched: Leaves = {}
    positions = collectives.worker_count(axes)
    all_to_all = functools.partial(collectives.all_to_all, axes=axes)

    def by_position(held: jax.Array) -> jax.Array:
        workers, width = held.shape
        return held.reshape(positions, workers // positions, width)

    with jax.named_scope("gather_params"):
        for paths in buckets:
            held = [memory[path][HELD][0] for path in paths]  # [W, width]
            sent = [by_position(leaf) for leaf in held]
            received = _send_params(sent, positions, all_to_all, rounded)
            for path, leaf in zip(paths, received, strict=True):
                fetched[path] = leaf.swapaxes(0, 1)
    return fetched


def _send_params(
    params: list[jax.Array], rows: int, collective: Callable[[jax.Array], jax.Array], rounded: bool
) -> list[jax.Array]:
    """Send parameters [rows, ...] in one collective."""

    def send(leaves: list[jax.Array]) -> list[jax.Array]:
        return packed_collective(leaves, rows, collective)

    return send_rounded(params, send, rounded=rounded)


def send_gradients(
    grads: Leaves,
    transfers: Mapping[str, Transfer],
    buckets: Buckets,
    memory: Memory,
    present: jax.Array,
) -> tuple[Leaves, Memory]:
    """Send gradients to the servers of their parameters, encoded: one all-to-all per bucket.

    Args:
      grads: by path [m, D, width], of this position's workers.
      present: bool[m], whose gradient counts; the residuals of the others do not change.

    Returns:
      By path [1, W, width], what arrived at this server, in order of the workers' numbers; and the
      next memory.
    """
    arrived: Leaves = {}
    after = {path: dict(entry) for path, entry in memory.items()}
    axes = next(iter(transfers.values())).shard_layout.axes
    positions = collectives.worker_count(axes)
    index = collectives.worker_index(axes)
    all_to_all = functools.partial(collectives.all_to_all, axes=axes)
    for number, paths in enumerate(buckets):
        codec_name = transfers[paths[0]].codec_name
        with jax.named_scope(f"reduce_gradients/{codec_name}/{number}"):
            inputs = [_with_residual(transfers[path], grads[path], memory[path]) for path in paths]
            sent = [_encode(transfers[path], x) for path, x in zip(paths, inputs, strict=True)]
            received = packed_collective(sent, positions, all_to_all)
            for path, x, sent_part, part in zip(paths, inputs, sent, received, strict=True):
                transfer = transfers[path]
                rows = _decode(transfer, part, x.shape[-1])
                own_rows = lax.dynamic_index_in_dim(x, index, 1, keepdims=False)
                # rows to this position itself are not sent, and so not rounded
                if not transfer.codec.lossless:
                    exact_rows = own_rows.astype(rows.dtype)
                    start = index * x.shape[0]
                    rows = lax.dynamic_update_slice_in_dim(rows, exact_rows, start, axis=0)
                arrived[path] = rows[None].astype(grads[path].dtype)
                if transfer.error_feedback:
                    kept = _decode(transfer, sent_part, x.shape[-1])
                    kept = kept.reshape(positions, x.shape[0], x.shape[-1]).swapaxes(0, 1)
                    kept = lax.dynamic_update_index_in_dim(kept, own_rows, index, 1)
                    before = memory[path][RESIDUAL]
                    is_present = present[:, None, None]
                    lost = where_finite((x - kept).astype(before.dtype), before)
                    after[path][RESIDUAL] = jnp.where(is_present, lost, before)
    return arrived, after


def _with_residual(transfer: Transfer, grad: jax.Array, entry: dict[str, Any]) -> jax.Array:
    """The input of the codec: the gradient plus what it lost before."""
    if not transfer.error_feedback:
        return grad
    return grad.astype(jnp.float32) + entry[RESIDUAL].astype(jnp.float32)


def _encode(transfer: Transfer, x: jax.Array) -> Any:
    """The payload of [m, D, width]: a tree of [D, m, ...]."""
    workers, positions, width = x.shape
    payload = x.swapaxes(0, 1).reshape(workers * positions, width)
    if isinstance(transfer.codec, RowCodec):
        payload = transfer.codec.encode(payload.astype(jnp.float32))
    # the barrier makes XLA decode exactly what is sent
    payload = lax.optimization_barrier(payload)
    return jax.tree.map(lambda leaf: leaf.reshape(positions, workers, *leaf.shape[1:]), payload)


def _decode(transfer: Transfer, payload: Any, width: int) -> jax.Array:
    """From [D, m, ...] the rows, [D m, width]."""
    rows = jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), payload
    )
    if not isinstance(transfer.codec, RowCodec):
        return rows
    return transfer.codec.decode(rows, width)
