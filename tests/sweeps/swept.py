"""Small networks, data and options for tests of sweeps."""

import numpy as np
import optax
from flax import nnx

import spmd
from tests.compare import relative_difference

FEATURES, CLASSES = 8, 3


class Net(nnx.Module):
    """Parameters, and if asked for batch statistics and dropout's random stream."""

    def __init__(self, width, seed, *, all_kinds=False):
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(
            FEATURES, width, use_bias=not all_kinds, rngs=rngs
        )  # before a norm its gradient is rounding, which Adam makes large
        self.norm = nnx.BatchNorm(width, rngs=rngs) if all_kinds else lambda x: x
        self.drop = nnx.Dropout(0.5, rngs=rngs) if all_kinds else lambda x: x
        self.out = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.up(x)))))


class Conv(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.conv = nnx.Conv(1, 2, (3,), rngs=rngs)
        self.out = nnx.Linear(2 * FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.conv(x[..., None])).reshape(x.shape[0], -1))


MODELS = {
    "plain": lambda width=16, seed=0: Net(width, seed),
    "statistics and dropout": lambda width=16, seed=0: Net(width, seed, all_kinds=True),
    "convolution": lambda seed=0: Conv(seed),
}
FEEDBACK = spmd.Layout(gradients=spmd.Gradients("all_reduce", codec="int8", error_feedback=True))
RATES = {"learning_rate": spmd.log_uniform(1e-3, 1e-1)}


def adam(learning_rate):
    return optax.adam(learning_rate)


def labelled(count=80, seed=0):
    """A short last batch, for 32 at a time."""
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int32)}


def options(**more):
    shared = {
        "loss": spmd.losses.cross_entropy,
        "metrics": {"accuracy": spmd.metrics.accuracy},
        "batch_size": 32,
    }
    return {**shared, "eval_data": labelled(50, 1), "epochs": 2, **more}


def sweep(kind="plain", **more):
    more = {"space": RATES, "trials": 6, "optimizer": adam, **more}
    return spmd.sweep(MODELS[kind], labelled(), **options(**more))


def close(left, right, tolerance=1e-6):
    return relative_difference(left, right) <= tolerance
