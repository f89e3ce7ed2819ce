"""Losses that fit the common shapes of batches; any function `(model, batch[, rng])` does as well."""

import jax
import jax.numpy as jnp

from spmd.train.metrics import PerExample, per_row, same_shape


def _cross_entropy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    same_shape("cross_entropy", outputs[..., 0], targets)
    logits, classes = outputs.astype(jnp.float32), jnp.arange(outputs.shape[-1])
    # compared, not looked up: XLA's partitioner aborts on a look-up in logits whose classes and rows are cut over two axes of a mesh
    chosen = jnp.where(classes == targets[..., None], logits, 0.0).sum(axis=-1)
    chosen = jnp.where((targets >= 0) & (targets < len(classes)), chosen, jnp.nan)
    return per_row(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _mean_squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    same_shape("mean_squared_error", outputs, targets)
    return per_row(jnp.square(outputs.astype(jnp.float32) - targets.astype(jnp.float32)))


cross_entropy = PerExample(_cross_entropy, "spmd.losses.cross_entropy")
"""Softmax cross-entropy of logits [batch, ..., classes] against integer targets [batch, ...], in float32."""

mean_squared_error = PerExample(_mean_squared_error, "spmd.losses.mean_squared_error")
"""Mean of (output - target)² over everything but dim 0, in float32."""
