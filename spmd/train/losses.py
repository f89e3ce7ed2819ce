"""Losses that fit the common shapes of batches; any function `(model, batch[, rng])` does as well."""

import jax
import jax.numpy as jnp
import optax

from spmd.train.metrics import PerExample, per_row, same_shape


def _cross_entropy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    same_shape("cross_entropy", outputs[..., 0], targets)
    logits = outputs.astype(jnp.float32)
    return per_row(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def _mean_squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    same_shape("mean_squared_error", outputs, targets)
    return per_row(jnp.square(outputs.astype(jnp.float32) - targets.astype(jnp.float32)))


cross_entropy = PerExample(_cross_entropy, "spmd.losses.cross_entropy")
"""Softmax cross-entropy of logits [batch, ..., classes] against integer targets [batch, ...], in float32."""

mean_squared_error = PerExample(_mean_squared_error, "spmd.losses.mean_squared_error")
"""Mean of (output - target)² over everything but dim 0, in float32."""
