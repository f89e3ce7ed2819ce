"""Between workers and servers when each gradient is applied by itself: weights of the version that is due, and gradients whole.

Per worker, inside the manual region. D positions along the data axes are servers and hold m simulated workers each, W = D m of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.wire import collectives
from spmd.wire.codec.base import RowCodec, packed_collective
from spmd.wire.gradient_plan import GradientSpec
from spmd.wire.gradient_sync import HELD, RESIDUAL, GradientSync, finite
from spmd.wire.parameter_sync import communicate_params


def fetch(exchange: GradientSync, memory: dict[str, dict[str, Any]]) -> dict[str, jax.Array]:
    """The weights that this position's workers have read, by path [m, D, width]: one all-to-all for each bucket."""
    axes, found = exchange.mesh_axes.data_axes, {}
    positions = collectives.worker_count(axes)
    with jax.named_scope("pull"):
        for paths in exchange.buckets:
            held = [memory[path][HELD][0] for path in paths]  # [W, width]
            held = [leaf.reshape(positions, leaf.shape[0] // positions, leaf.shape[-1]) for leaf in held]
            got = communicate_params(exchange, held, positions, lambda part: collectives.all_to_all(part, axes))
            found |= {path: leaf.swapaxes(0, 1) for path, leaf in zip(paths, got, strict=True)}
    return found


def deliver(
    exchange: GradientSync, grads: dict[str, jax.Array], memory: dict[str, dict[str, Any]], present: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, dict[str, Any]]]:
    """Gradients to the servers that keep their parameters: one all-to-all for each bucket, encoded as the layout says.

    Args:
      grads: by path [m, D, width], this position's workers' own.
      present: bool[m], whose gradient counts; the others' residuals stay as they are.

    Returns:
      By path [1, W, width], what arrived at this server, in order of the workers' numbers; and the next memory.
    """
    axes, arrived, after = exchange.mesh_axes.data_axes, {}, {path: dict(entry) for path, entry in memory.items()}
    positions, me = collectives.worker_count(axes), collectives.worker_index(axes)
    for number, paths in enumerate(exchange.buckets):
        items = [exchange.items[path] for path in paths]
        with jax.named_scope(f"push/{items[0].name}/{number}"):
            whole = [_fed(item, grads[path], memory) for item, path in zip(items, paths, strict=True)]
            payload = [_encoded(item, x) for item, x in zip(items, whole, strict=True)]
            got = packed_collective(payload, positions, lambda part: collectives.all_to_all(part, axes))
            for path, item, x, sent, received in zip(paths, items, whole, payload, got, strict=True):
                rows, own = _decoded(item, received, x.shape[-1]), lax.dynamic_index_in_dim(x, me, 1, keepdims=False)
                if not item.codec.lossless:  # what a worker sends to itself does not travel
                    rows = lax.dynamic_update_slice_in_dim(rows, own, me * x.shape[0], axis=0)
                arrived[path] = rows[None].astype(grads[path].dtype)
                if item.feedback:
                    kept = _decoded(item, sent, x.shape[-1]).reshape(positions, x.shape[0], x.shape[-1]).swapaxes(0, 1)
                    kept = lax.dynamic_update_index_in_dim(kept, own, me, 1)
                    lost, before = finite(x - kept, memory[path][RESIDUAL]), memory[path][RESIDUAL]
                    after[path][RESIDUAL] = jnp.where(present[:, None, None], lost, before)
    return arrived, after


def _fed(item: GradientSpec, grad: jax.Array, memory: dict[str, dict[str, Any]]) -> jax.Array:
    """What is sent: the gradient, and what was lost of those before."""
    return grad.astype(jnp.float32) + memory[item.place.path][RESIDUAL] if item.feedback else grad


def _encoded(item: GradientSpec, x: jax.Array) -> Any:
    """[m, D, width] as what travels: a tree of [D, m, ...]."""
    rows = x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], x.shape[-1])
    payload = item.codec.encode(rows.astype(jnp.float32)) if isinstance(item.codec, RowCodec) else rows
    # the barrier: what is decoded here is what travels
    return jax.tree.map(lambda leaf: leaf.reshape(x.shape[1], x.shape[0], *leaf.shape[1:]), lax.optimization_barrier(payload))


def _decoded(item: GradientSpec, payload: Any, width: int) -> jax.Array:
    """Of [D, m, ...] the rows again, [D m, width]."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), payload)
    return item.codec.decode(flat, width) if isinstance(item.codec, RowCodec) else flat
