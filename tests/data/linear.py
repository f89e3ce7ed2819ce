"""A model small enough to reason about, buffers that CPU devices share, and exact comparison of
trees.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.base.tree import flatten

FEATURES = 16  # a row of float32 is 64 bytes: every shard of an aligned buffer is aligned as well


def model():
    return spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((FEATURES, 1))}, lambda params, x: x @ params["w"]
    )


def examples(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": x, "y": x[:, :1] - 2 * x[:, 1:2]}


def trainer(**options):
    return spmd.Trainer(
        model(), **{"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(0.1), **options}
    )


def fit(data, **options):
    return spmd.fit(
        model(),
        data,
        **{"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(0.1), **options},
    )


def aligned(shape, dtype=np.float32):
    """An uninitialised array whose memory starts at a multiple of 64 bytes: what CPU devices use
    without a copy.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def same(left, right):
    """Whether two trees hold the same bits under the same paths."""
    left, right = flatten(jax.device_get(left)), flatten(jax.device_get(right))
    return left.keys() == right.keys() and all(
        np.asarray(left[k]).tobytes() == np.asarray(right[k]).tobytes() for k in left
    )
