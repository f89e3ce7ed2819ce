"""A pool whose gradient is fast on a CPU, and which the partitioner cuts like any element-wise function."""

import jax
import jax.numpy as jnp


def max_pool2(x: jax.Array) -> jax.Array:
    """The largest of every 2 x 2 pixels of `x` [rows, height, width, channels]; equals `nnx.max_pool(x, (2, 2), (2, 2))`.

    By slices and maxima: the gradient of a reduce-window is an order of magnitude slower on a CPU. Where pixels tie they share the
    gradient; reduce-window gives it to one of them. An odd last row or column is left out, as there.

    Example:
      >>> float(max_pool2(jnp.arange(16.0).reshape(1, 4, 4, 1)).sum())  # 5 + 7 + 13 + 15
      40.0
    """
    rows, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2].reshape(rows, height // 2, 2, width // 2, 2, channels)
    return jnp.maximum(jnp.maximum(x[:, :, 0, :, 0], x[:, :, 0, :, 1]), jnp.maximum(x[:, :, 1, :, 0], x[:, :, 1, :, 1]))
