"""`spmd.nn.max_pool2` against flax's own."""

import jax
import numpy as np
import pytest
from flax import nnx

import spmd


@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (1, 7, 5, 2), (3, 2, 2, 1)], ids=str)
def test_equals_nnx_max_pool(shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    theirs = lambda x: nnx.max_pool(x, (2, 2), (2, 2))
    np.testing.assert_array_equal(spmd.nn.max_pool2(x), theirs(x))
    weighted = lambda pool: jax.grad(lambda x: (pool(x) * np.arange(pool(x).size).reshape(pool(x).shape)).sum())(x)
    np.testing.assert_array_equal(weighted(spmd.nn.max_pool2), weighted(theirs))
