"""Communication between workers and servers in asynchronous modes: each worker's version of the parameters, and its gradients.

Per worker, inside the manual region. The D positions along the data axes are servers and hold m simulated workers each, W = D m.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.sync.gradient_plan import GradientSpec
from spmd.sync.gradient_sync import HELD, RESIDUAL, GradientSync
from spmd.sync.parameter_sync import communicate_params
from spmd.wire import collectives
from spmd.wire.codec.base import RowCodec, packed_collective
from spmd.wire.reduction import where_finite


def fetch_params(sync: GradientSync, comm_state: dict[str, dict[str, Any]]) -> dict[str, jax.Array]:
    """The parameters that this position's workers have read, by path [m, D, width]: one all-to-all per bucket."""
    axes, fetched = sync.mesh_axes.data_axes, {}
    positions = collectives.worker_count(axes)

    def all_to_all(part: jax.Array) -> jax.Array:
        return collectives.all_to_all(part, axes)

    with jax.named_scope("gather_params"):
        for paths in sync.buckets:
            held = [comm_state[path][HELD][0] for path in paths]  # [W, width]
            held = [leaf.reshape(positions, leaf.shape[0] // positions, leaf.shape[-1]) for leaf in held]
            received = communicate_params(sync, held, positions, all_to_all)
            fetched |= {path: leaf.swapaxes(0, 1) for path, leaf in zip(paths, received, strict=True)}
    return fetched


def send_gradients(
    sync: GradientSync, grads: dict[str, jax.Array], comm_state: dict[str, dict[str, Any]], present: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, dict[str, Any]]]:
    """Send gradients to the servers of their parameters: one all-to-all per bucket, encoded as the layout says.

    Args:
      grads: by path [m, D, width], of this position's workers.
      present: bool[m], whose gradient counts; the residuals of the others do not change.

    Returns:
      By path [1, W, width], what arrived at this server, in order of the workers' numbers; and the next state.
    """
    axes, arrived, next_state = sync.mesh_axes.data_axes, {}, {path: dict(entry) for path, entry in comm_state.items()}
    positions, index = collectives.worker_count(axes), collectives.worker_index(axes)
    for number, paths in enumerate(sync.buckets):
        specs = [sync.gradient_specs[path] for path in paths]
        with jax.named_scope(f"reduce_gradients/{specs[0].codec_name}/{number}"):
            inputs = [_with_residual(spec, grads[path], comm_state) for spec, path in zip(specs, paths, strict=True)]
            payload = [_encode(spec, x) for spec, x in zip(specs, inputs, strict=True)]
            all_received = packed_collective(payload, positions, lambda part: collectives.all_to_all(part, axes))
            for path, spec, x, sent, received in zip(paths, specs, inputs, payload, all_received, strict=True):
                rows, own_rows = _decode(spec, received, x.shape[-1]), lax.dynamic_index_in_dim(x, index, 1, keepdims=False)
                if not spec.codec.lossless:  # rows to this position itself are not rounded
                    rows = lax.dynamic_update_slice_in_dim(rows, own_rows, index * x.shape[0], axis=0)
                arrived[path] = rows[None].astype(grads[path].dtype)
                if spec.error_feedback:
                    kept = _decode(spec, sent, x.shape[-1]).reshape(positions, x.shape[0], x.shape[-1]).swapaxes(0, 1)
                    kept = lax.dynamic_update_index_in_dim(kept, own_rows, index, 1)
                    before = comm_state[path][RESIDUAL]
                    next_state[path][RESIDUAL] = jnp.where(present[:, None, None], where_finite(x - kept, before), before)
    return arrived, next_state


def _with_residual(spec: GradientSpec, grad: jax.Array, comm_state: dict[str, dict[str, Any]]) -> jax.Array:
    """The input of the codec: the gradient plus what it lost before."""
    return grad.astype(jnp.float32) + comm_state[spec.placement.path][RESIDUAL] if spec.error_feedback else grad


def _encode(spec: GradientSpec, x: jax.Array) -> Any:
    """The payload of [m, D, width]: a tree of [D, m, ...]."""
    rows = x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], x.shape[-1])
    payload = spec.codec.encode(rows.astype(jnp.float32)) if isinstance(spec.codec, RowCodec) else rows
    # the barrier makes XLA decode exactly what is sent
    return jax.tree.map(lambda leaf: leaf.reshape(x.shape[1], x.shape[0], *leaf.shape[1:]), lax.optimization_barrier(payload))


def _decode(spec: GradientSpec, payload: Any, width: int) -> jax.Array:
    """From [D, m, ...] the rows, [D m, width]."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), payload)
    return spec.codec.decode(flat, width) if isinstance(spec.codec, RowCodec) else flat
