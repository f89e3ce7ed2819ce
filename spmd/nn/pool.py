"""Max pooling whose gradient is fast on a CPU, and which the partitioner shards like an
element-wise function.
"""

import jax
import jax.numpy as jnp
import numpy as np

# The four pixels of a window, in the order of rows.
_PIXELS = np.arange(4, dtype=np.int8).reshape(2, 1, 2, 1)


def max_pool2(x: jax.Array) -> jax.Array:
    """Return the largest of every 2 x 2 pixels of `x` [rows, height, width, channels]; equals
    `nnx.max_pool(x, (2, 2), (2, 2))`.

    Its gradient is equal, too, also where pixels tie: the first of them gets it. But it selects by
    the index (0 to 3) of the largest pixel, where the gradient of reduce-window searches again,
    which is an order of magnitude slower on a CPU. An odd last row or column is left out, as in
    `nnx.max_pool`.

    Args:
      x: [rows, height, width, channels].

    Returns:
      [rows, height // 2, width // 2, channels].

    Example:
      >>> float(max_pool2(jnp.arange(16.0).reshape(1, 4, 4, 1)).sum())  # 5 + 7 + 13 + 15
      40.0
    """
    return _largest(_windows(x))


def _windows(x: jax.Array) -> jax.Array:
    """Return windows [rows, height // 2, 2, width // 2, 2, channels]."""
    rows, height, width, channels = x.shape
    even = x[:, : height // 2 * 2, : width // 2 * 2]
    return even.reshape(rows, height // 2, 2, width // 2, 2, channels)


# The gradient of reduce-window, `select_and_scatter`, searches each window again: on a CPU that is
# an order of magnitude slower.
@jax.custom_jvp
def _largest(windows: jax.Array) -> jax.Array:
    a, b, c, d = _pixels(windows)
    return jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, d))


@_largest.defjvp
def _largest_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    a, b, c, d = _pixels(*primals)
    upper = jnp.maximum(a, b)
    lower = jnp.maximum(c, d)
    chosen = jnp.where(lower > upper, 2 + (d > c).astype(jnp.int8), (b > a).astype(jnp.int8))
    tangent = jnp.where(chosen[:, :, None, :, None] == _PIXELS, *tangents, 0)
    return jnp.maximum(upper, lower), tangent.sum((2, 4), dtype=tangent.dtype)


def _pixels(windows: jax.Array) -> list[jax.Array]:
    """Return the four pixels of every window, in the order of rows, each [rows, height // 2,
    width // 2, channels].
    """
    return [windows[:, :, row, :, column] for row in (0, 1) for column in (0, 1)]
