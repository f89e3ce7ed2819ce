"""`spmd.nn.max_pool2` against flax's own."""

import jax
import numpy as np
import pytest
from flax import nnx

import spmd


def theirs(x):
    return nnx.max_pool(x, (2, 2), (2, 2))


def weighted(pool, x):
    """The gradient of a sum that weights every output pixel differently."""
    return jax.grad(lambda x: (pool(x) * np.arange(pool(x).size).reshape(pool(x).shape)).sum())(x)


@pytest.mark.sampled(quick=12)
@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (1, 7, 5, 2), (3, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("values", ["normal", "ties"])
def test_equals_nnx_max_pool(shape, dtype, values):
    random = np.random.default_rng(0)
    x = random.normal(size=shape) if values == "normal" else random.integers(0, 2, shape)
    x = jax.numpy.asarray(x, dtype)
    np.testing.assert_array_equal(spmd.nn.max_pool2(x), theirs(x))
    np.testing.assert_array_equal(weighted(spmd.nn.max_pool2, x), weighted(theirs, x))


def test_forward_mode():
    """Where pixels differ by more than the step, the pool is linear."""
    x = np.random.default_rng(0).permutation(2 * 6 * 6 * 3).reshape(2, 6, 6, 3).astype("float32")
    step = np.random.default_rng(1).integers(-3, 4, x.shape).astype("float32") / 8
    y, change = jax.jvp(spmd.nn.max_pool2, (x,), (step,))
    np.testing.assert_array_equal(y + change, spmd.nn.max_pool2(x + step))
