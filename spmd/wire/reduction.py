"""The mean of gradients over workers: in buckets, encoded, with error feedback.

Everything here is per worker, inside a region where the axes of the workers are manual. Gradients
and memory are dicts by parameter path.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.specs import keep_axes, pspec, spec_axes
from spmd.base.tree import Tree
from spmd.wire import collectives
from spmd.wire.codec.base import Bucket
from spmd.wire.codec.exact import exact_mean
from spmd.wire.comm_log import WARM_UP
from spmd.wire.region import on_local_shards
from spmd.wire.transfer import (
    BUCKET_BYTES,
    CODEC,
    RESIDUAL,
    Leaves,
    Memory,
    Transfer,
    init_memory,
    make_buckets,
    memory_specs,
)

# What `Averaging` measures in every step: the norm of a worker's residuals (root mean square over
# workers), and |mean - exact mean| / |exact mean| of the codecs' inputs (gradients plus residuals).
DIAGNOSTICS = ("residual_norm", "mean_error")


@dataclasses.dataclass(frozen=True)
class Averaging:
    """The plan by which the gradients of a model are averaged over workers.

    A layout's `[gradients]` builds one, and each transformation of `spmd.wire` that averages makes
    one of the shapes that it is given.

    Attributes:
      axes: mesh axes of the workers, outermost first.
      transfers: how each gradient is communicated, by parameter path.
      bucket_bytes: gradients are sent in buckets of at most this many bytes, as float32.
      inside: axes along which gradients are reduced exactly first; codecs are used along the
        others.
      start_step: steps before this one are exact.
      model_axes: the number of devices along each mesh axis that is not manual here. Of a gradient
        whose transfer is `nested`, each device reduces its local shard along them.
      idle_axes: those of `model_axes` along which all devices compute the same.
      diagnostics: whether `DIAGNOSTICS` are measured.
    """

    axes: tuple[str, ...]
    transfers: Mapping[str, Transfer]
    bucket_bytes: int = BUCKET_BYTES
    inside: tuple[str, ...] = ()
    start_step: int = 0
    model_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    idle_axes: tuple[str, ...] = ()
    diagnostics: bool = False

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the measurements of `reduce`."""
        if not self.diagnostics:
            return ()
        return DIAGNOSTICS

    def init_memory(self, key: jax.Array, params: Mapping[str, Any], workers: int) -> Memory:
        """Return the memory of `workers` workers at step 0; `params` is not used."""
        del params
        return init_memory(self.transfers, workers, key=key)

    def memory_specs(self, memory: Memory) -> Tree:
        """Return the spec of every array of a memory."""
        model_specs = {
            path: transfer.model_spec
            for path, transfer in self.transfers.items()
            if transfer.nested
        }
        return memory_specs(memory, self.axes, model_specs)

    def reduce(
        self, grads: Leaves, memory: Memory, step: Any = 0
    ) -> tuple[Leaves, Memory, jax.Array]:
        """Return this worker's shards of the mean gradients, the next memory, and measurements.

        Args:
          grads: of all transfers or of some; each worker's own, not yet averaged; full where
            workers share the mean.
          memory: this worker's, residuals [1, ...].

        Returns:
          The measurements are float32[2, diagnostics], values and counts (1), equal on all workers.
        """
        means: Leaves = {}
        after: Memory = {}
        measured = jnp.zeros(3)
        for nested in (False, True):
            part = {
                path: self._as_sent(path, grad)
                for path, grad in grads.items()
                if self.transfers[path].nested == nested
            }
            if not part:
                continue
            part_memory = {path: entry for path, entry in memory.items() if path in part}
            reduce_part = self._reduce
            if nested:
                reduce_part = self._nested(part, part_memory)
            part_means, part_after, part_measured = reduce_part(part, part_memory, step)
            means |= part_means
            after |= part_after
            # A nested region returns what each device along its axes has measured, one after the
            # other.
            measured += part_measured.reshape(-1, 3).sum(0)
        means = {path: means[path].astype(grad.dtype) for path, grad in grads.items()}
        next_memory = {path: after.get(path, entry) for path, entry in memory.items()}
        return means, next_memory, self._summed(measured)

    def _as_sent(self, path: str, grad: jax.Array) -> jax.Array:
        dtype = self.transfers[path].dtype
        if dtype is None:
            return grad
        return grad.astype(dtype)

    def _nested(self, grads: Leaves, memory: Memory) -> Callable[..., Any]:
        """Return `_reduce` on each device's local shard along the model axes."""
        # Where only some mesh axes are manual, XLA's partitioner would gather a model-sharded
        # gradient before it reduces it (jax 0.10): a region over the other axes prevents that.
        axes = tuple(self.model_axes)
        grad_specs = {path: pspec(self.transfers[path].model_spec) for path in grads}
        specs_of_memory = jax.tree.map(
            lambda spec: pspec(keep_axes(spec, axes)),
            self.memory_specs(memory),
            is_leaf=lambda node: isinstance(node, tuple),
        )
        specs = (grad_specs, specs_of_memory)
        outputs = (*specs, PartitionSpec(self._measured_axes))
        return on_local_shards(self._reduce, axes, (*specs, PartitionSpec()), outputs)

    def _reduce(self, grads: Leaves, memory: Memory, step: Any) -> tuple[Leaves, Memory, jax.Array]:
        """Return the means, the next memory, and what this device measures, float32[3]."""
        if self.start_step:
            # The number of the step is the same on all workers, so all take the same branch: in
            # different branches they would wait for each other forever.
            with jax.named_scope(WARM_UP):
                means, after = lax.cond(
                    step < self.start_step, self._exactly, self._encoded, grads, memory
                )
        else:
            means, after = self._encoded(grads, memory)
        measured = jnp.zeros(3)
        if self.diagnostics:
            with jax.named_scope("measure"):
                for path, grad in grads.items():
                    before = memory.get(path, {})
                    measured += self._measured(path, grad, before, after.get(path, {}), means[path])
        return means, after, measured

    def _exactly(self, grads: Leaves, memory: Memory) -> tuple[Leaves, Memory]:
        with jax.named_scope("reduce_gradients/exact"):
            means = {
                path: exact_mean(self.transfers[path].shard_layout, grad)
                for path, grad in grads.items()
            }
        return means, memory

    def _encoded(self, grads: Leaves, memory: Memory) -> tuple[Leaves, Memory]:
        transfers = {path: self.transfers[path] for path in grads}
        return reduce_buckets(
            transfers, grads, memory, bucket_bytes=self.bucket_bytes, inside=self.inside
        )

    @property
    def _measured_axes(self) -> tuple[str, ...]:
        """Return the model axes whose devices add up what they measure: along others all have the
        same.
        """
        return tuple(axis for axis in self.model_axes if axis not in self.idle_axes)

    def _measured(
        self,
        path: str,
        grad: jax.Array,
        before: dict[str, Any],
        after: dict[str, Any],
        mean: jax.Array,
    ) -> jax.Array:
        """Return, of one gradient, squares of the residual, of the error of the mean, and of the
        exact mean, float32[3]. They are divided by the number of devices that add the same value to
        the sum.
        """
        transfer = self.transfers[path]
        layout = transfer.shard_layout
        codec_input = grad.astype(jnp.float32)
        residual = jnp.zeros(())
        if transfer.error_feedback:
            codec_input = codec_input + before[RESIDUAL][0]
            residual = after[RESIDUAL][0]
        exact = exact_mean(layout, codec_input)
        parts = (residual, mean - exact, exact)
        squares = jnp.stack([jnp.sum(x.astype(jnp.float32) ** 2) for x in parts])
        copies = collectives.worker_count(layout.replicated_axes)
        model_copies = 1
        if transfer.nested:
            other_axes = set(self._measured_axes) - set(spec_axes(transfer.model_spec))
            model_copies = math.prod(self.model_axes[axis] for axis in other_axes)
        devices = jnp.array([layout.workers, copies, copies], jnp.float32)
        return squares / devices / model_copies

    def _summed(self, measured: jax.Array) -> jax.Array:
        """Return the diagnostics as (value, 1), float32[2, 2], from each worker's part."""
        if not self.diagnostics:
            return jnp.zeros((2, 0))
        with jax.named_scope("measure"):
            residual, error, exact = collectives.all_reduce(measured, self.axes)
        residual_norm = jnp.sqrt(residual)
        # gradients that are all zero have no relative error
        mean_error = jnp.sqrt(error / jnp.where(exact == 0, 1.0, exact))
        values = jnp.stack([residual_norm, mean_error])
        return jnp.stack([values, jnp.ones_like(values)])


def reduce_buckets(
    transfers: Mapping[str, Transfer],
    grads: Leaves,
    memory: Memory,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    inside: tuple[str, ...] = (),
    numbered: bool = True,
) -> tuple[Leaves, Memory]:
    """Return this worker's shards of the mean gradients, and the next memory.

    Args:
      transfers: of these gradients.
      numbered: whether the scope of a bucket, in the log of collectives, has its number.
    """
    means: Leaves = {}
    after = dict(memory)
    for number, paths in enumerate(make_buckets(transfers, bucket_bytes)):
        chosen = [transfers[path] for path in paths]
        # Logs, plans and profiles read from this scope what a collective is for.
        scope = f"reduce_gradients/{chosen[0].codec_name}"
        if numbered:
            scope = f"{scope}/{number}"
        with jax.named_scope(scope):
            bucket = Bucket(tuple(transfer.shard_layout for transfer in chosen), inside)
            entries = [memory.get(path, {}) for path in paths]
            reduced = reduce_bucket(chosen, [grads[path] for path in paths], entries, bucket)
        for path, mean, entry in zip(paths, *reduced, strict=True):
            means[path] = mean.astype(grads[path].dtype)
            if entry:
                after[path] = entry
    return {path: means[path] for path in grads}, after


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
    residuals: list[jax.Array | None] = []
    for transfer, grad, entry in zip(transfers, grads, memory, strict=True):
        residual = None
        if transfer.error_feedback:
            residual = entry[RESIDUAL][0].reshape(grad.shape)
        residuals.append(residual)
    inputs = list(grads)
    for number, residual in enumerate(residuals):
        if residual is not None:
            inputs[number] = grads[number].astype(jnp.float32) + residual
    codec_states = [jax.tree.map(lambda leaf: leaf[0], entry.get(CODEC, {})) for entry in memory]
    means, kept, codec_states = transfers[0].codec.mean(inputs, codec_states, bucket)
    after = []
    for x, x_kept, codec_state, residual in zip(inputs, kept, codec_states, residuals, strict=True):
        entry: dict[str, Any] = {}
        if residual is not None:
            lost = (x - x_kept).astype(residual.dtype)
            entry[RESIDUAL] = where_finite(lost, residual)[None]
        if codec_state:
            entry[CODEC] = {name: leaf[None] for name, leaf in codec_state.items()}
        after.append(entry)
    return means, after


def where_finite(new: Any, old: Any) -> jax.Array:
    """Return `new`, or `old` where that is not finite: a step that the optimizer skips must not
    spoil the residuals of all later ones.
    """
    return jnp.where(jnp.isfinite(new), new, old)
