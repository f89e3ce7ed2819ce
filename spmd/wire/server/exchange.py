"""Communication between workers and servers: parameters as packed rows, each worker's version of
them, and its gradients.

Per worker, inside the manual region. The D positions along the data axes are servers and hold m
simulated workers each, W = D m. A parameter is packed as [D, width], a row for each server.
"""

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

    def all_gather(x: jax.Array) -> jax.Array:
        return collectives.all_gather(x, axes, 0)

    with jax.named_scope("gather_params"):
        for paths in buckets:
            if paths[0] in rows:
                gathered |= dict(
                    zip(
                        paths,
                        _send_params([rows[path] for path in paths], 1, all_gather, rounded),
                        strict=True,
                    )
                )
    return {path: gathered[path] for path in rows}


def fetch_params(
    memory: Memory, buckets: Buckets, axes: tuple[str, ...], *, rounded: bool = False
) -> Leaves:
    """The parameters that this position's workers have read, by path [m, D, width]: one all-to-all
    per bucket.
    """
    fetched: Leaves = {}
    positions = collectives.worker_count(axes)

    def all_to_all(part: jax.Array) -> jax.Array:
        return collectives.all_to_all(part, axes)

    with jax.named_scope("gather_params"):
        for paths in buckets:
            held = [memory[path][HELD][0] for path in paths]  # [W, width]
            held = [
                leaf.reshape(positions, leaf.shape[0] // positions, leaf.shape[-1]) for leaf in held
            ]
            received = _send_params(held, positions, all_to_all, rounded)
            fetched |= {
                path: leaf.swapaxes(0, 1) for path, leaf in zip(paths, received, strict=True)
            }
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
    arrived, after = {}, {path: dict(entry) for path, entry in memory.items()}
    axes = next(iter(transfers.values())).shard_layout.axes
    positions, index = collectives.worker_count(axes), collectives.worker_index(axes)
    for number, paths in enumerate(buckets):
        specs = [transfers[path] for path in paths]
        with jax.named_scope(f"reduce_gradients/{specs[0].codec_name}/{number}"):
            inputs = [
                _with_residual(spec, grads[path], memory[path])
                for spec, path in zip(specs, paths, strict=True)
            ]
            payload = [_encode(spec, x) for spec, x in zip(specs, inputs, strict=True)]
            all_received = packed_collective(
                payload, positions, lambda part: collectives.all_to_all(part, axes)
            )
            for path, spec, x, sent, received in zip(
                paths, specs, inputs, payload, all_received, strict=True
            ):
                rows = _decode(spec, received, x.shape[-1])
                own_rows = lax.dynamic_index_in_dim(x, index, 1, keepdims=False)
                if not spec.codec.lossless:  # rows to this position itself are not rounded
                    rows = lax.dynamic_update_slice_in_dim(
                        rows, own_rows.astype(rows.dtype), index * x.shape[0], axis=0
                    )
                arrived[path] = rows[None].astype(grads[path].dtype)
                if spec.error_feedback:
                    kept = (
                        _decode(spec, sent, x.shape[-1])
                        .reshape(positions, x.shape[0], x.shape[-1])
                        .swapaxes(0, 1)
                    )
                    kept = lax.dynamic_update_index_in_dim(kept, own_rows, index, 1)
                    before = memory[path][RESIDUAL]
                    after[path][RESIDUAL] = jnp.where(
                        present[:, None, None],
                        where_finite((x - kept).astype(before.dtype), before),
                        before,
                    )
    return arrived, after


def _with_residual(spec: Transfer, grad: jax.Array, entry: dict[str, Any]) -> jax.Array:
    """The input of the codec: the gradient plus what it lost before."""
    return (
        grad.astype(jnp.float32) + entry[RESIDUAL].astype(jnp.float32)
        if spec.error_feedback
        else grad
    )


def _encode(spec: Transfer, x: jax.Array) -> Any:
    """The payload of [m, D, width]: a tree of [D, m, ...]."""
    rows = x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], x.shape[-1])
    payload = (
        spec.codec.encode(rows.astype(jnp.float32)) if isinstance(spec.codec, RowCodec) else rows
    )
    # the barrier makes XLA decode exactly what is sent
    return jax.tree.map(
        lambda leaf: leaf.reshape(x.shape[1], x.shape[0], *leaf.shape[1:]),
        lax.optimization_barrier(payload),
    )


def _decode(spec: Transfer, payload: Any, width: int) -> jax.Array:
    """From [D, m, ...] the rows, [D m, width]."""
    flat = jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), payload
    )
    return spec.codec.decode(flat, width) if isinstance(spec.codec, RowCodec) else flat
