"""The mean of gradients over workers: in buckets, encoded, with error feedback.

Everything here is per worker, inside a region where `axes` are manual. Gradients and memory are
dicts by parameter path.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.wire.codec import CODECS
from spmd.wire.codec.base import Bucket, Codec
from spmd.wire.codec.exact import exact_mean
from spmd.wire.comm_log import WARM_UP
from spmd.wire.shard_layout import ShardLayout

# keys of a gradient's memory, as stored in checkpoints
# what a worker's codec has lost so far: [workers, *gradient], sharded over workers on dim 0
RESIDUAL = "residual"
CODEC = "codec"  # the codec's own state, equal on all workers

BUCKET_BYTES = 25 * 2**20
MAX_EXACT_BUCKET = 2**20  # bytes; a larger exact gradient has a collective of its own

Memory = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """How one gradient is communicated: who owns which part of its mean, and what is sent."""

    shard_layout: ShardLayout
    codec: Codec
    error_feedback: bool

    @property
    def codec_name(self) -> str:
        """The registered name of the codec, or that of its class."""
        kind = type(self.codec)
        return next(
            (name for name, registered in CODECS.items() if registered is kind), kind.__name__
        )


def make_buckets(transfers: Mapping[str, Transfer], limit: int) -> list[list[str]]:
    """Paths of the gradients that are communicated together: same codec, same axes, up to `limit`
    bytes as float32.

    Exact gradients would be copied into a bucket without getting smaller, so their limit is lower.
    """
    buckets: list[list[str]] = []
    filling: dict[tuple, tuple[list[str], int]] = {}
    for path, transfer in transfers.items():
        layout = transfer.shard_layout
        key, size = (transfer.codec, layout.replicated_axes), 4 * math.prod(layout.shape)
        paths, filled = filling.get(key, ([], 0))
        if not paths or filled + size > (
            min(limit, MAX_EXACT_BUCKET) if transfer.codec.lossless else limit
        ):
            paths, filled = [], 0
            buckets.append(paths)
        paths.append(path)
        filling[key] = (paths, filled + size)
    return buckets


def reduce_mean(
    transfers: Mapping[str, Transfer],
    grads: dict[str, jax.Array],
    memory: Memory,
    step: Any = 0,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    inside: tuple[str, ...] = (),
    start_step: int = 0,
) -> tuple[dict[str, jax.Array], Memory]:
    """This worker's shards of the mean gradients, and the next memory.

    Args:
      grads: each worker's own, not yet averaged; full where workers share the mean.
      memory: this worker's, residuals [1, ...].
      inside: axes along which gradients are reduced exactly first; codecs are used along the
        others.
      start_step: steps before this one are exact.
    """

    def exactly(grads: dict[str, jax.Array], memory: Memory) -> tuple[dict[str, jax.Array], Memory]:
        with jax.named_scope("reduce_gradients/exact"):
            return {
                path: exact_mean(transfers[path].shard_layout, grad) for path, grad in grads.items()
            }, memory

    def encoded(grads: dict[str, jax.Array], memory: Memory) -> tuple[dict[str, jax.Array], Memory]:
        means, after = {}, dict(memory)
        for number, paths in enumerate(
            make_buckets({path: transfers[path] for path in grads}, bucket_bytes)
        ):
            with jax.named_scope(f"reduce_gradients/{transfers[paths[0]].codec_name}/{number}"):
                bucket = Bucket(tuple(transfers[path].shard_layout for path in paths), inside)
                entries = [memory.get(path, {}) for path in paths]
                reduced = reduce_bucket(
                    [transfers[path] for path in paths],
                    [grads[path] for path in paths],
                    entries,
                    bucket,
                )
            for path, mean, entry in zip(paths, *reduced, strict=True):
                means[path] = mean.astype(grads[path].dtype)
                after |= {path: entry} if entry else {}
        return {path: means[path] for path in grads}, after

    if not start_step:
        return encoded(grads, memory)
    with jax.named_scope(WARM_UP):
        return lax.cond(step < start_step, exactly, encoded, grads, memory)


def reduce_bucket(
    transfers: list[Transfer], grads: list[jax.Array], memory: list[dict[str, Any]], bucket: Bucket
) -> tuple[list[jax.Array], list[dict[str, Any]]]:
    """Reduce a bucket, and add what the codec lost to the next gradient (Karimireddy et al. 2019,
    arXiv:1901.09847).

    Summed over steps, the applied gradients plus the mean residual are the sum of the true mean
    gradients. The residual is that of the gradient, not of the update: a changing learning rate
    does not rescale it. (If the parameter itself is bfloat16, its mean is rounded once more at the
    end, and no residual keeps that.)
    """
    residuals = [
        entry[RESIDUAL][0].reshape(grad.shape) if transfer.error_feedback else None
        for transfer, grad, entry in zip(transfers, grads, memory, strict=True)
    ]
    inputs = [
        grad if residual is None else grad.astype(jnp.float32) + residual
        for grad, residual in zip(grads, residuals, strict=True)
    ]
    codec_states = [
        {name: leaf[0] for name, leaf in entry.get(CODEC, {}).items()} for entry in memory
    ]
    means, kept, codec_states = transfers[0].codec.mean(inputs, codec_states, bucket)
    after = []
    for x, x_kept, codec_state, residual in zip(inputs, kept, codec_states, residuals, strict=True):
        entry: dict[str, Any] = (
            {}
            if residual is None
            else {RESIDUAL: where_finite((x - x_kept).astype(residual.dtype), residual)[None]}
        )
        after.append(
            entry
            | (
                {CODEC: {name: leaf[None] for name, leaf in codec_state.items()}}
                if codec_state
                else {}
            )
        )
    return means, after


def where_finite(new: Any, old: Any) -> jax.Array:
    """`new`, or `old` where that is not finite: a step that the optimizer skips must not spoil the
    residuals of all later ones.
    """
    return jnp.where(jnp.isfinite(new), new, old)
