"""Small models, data and recorders for the tests of the loop, and exact comparison of trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmd
from spmd.base.tree import flatten

FEATURES = 8


class Net(nnx.Module):
    """Everything that has to survive a stop: parameters, batch statistics, and dropout's random
    stream.
    """

    def __init__(self, rngs, width=16):
        self.up = nnx.Linear(FEATURES, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.up(x)))))


def labelled(count=96, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": x, "y": (x[:, :3].argmax(1)).astype(np.int32)}


def fit_net(data=None, **options):
    options = {"batch_size": 32, "metrics": {"accuracy": spmd.metrics.accuracy}, **options}
    data = labelled() if data is None else data
    return spmd.fit(
        lambda: Net(nnx.Rngs(0)),
        data,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(1e-2),
        **options,
    )


def linear(width=FEATURES):
    return spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((width, 1))}, lambda params, x: x @ params["w"]
    )


def numbers(count=96, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": x, "y": x[:, :1] - 2 * x[:, 1:2]}


def fit(data=None, **options):
    """A linear model: it compiles fast."""
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.adam(0.05),
        "batch_size": 32,
        **options,
    }
    return spmd.fit(linear(), numbers() if data is None else data, **options)


def same(left, right):
    """Whether two trees hold the same bits under the same paths."""
    left, right = flatten(jax.device_get(left)), flatten(jax.device_get(right))
    return left.keys() == right.keys() and all(
        np.asarray(left[k]).tobytes() == np.asarray(right[k]).tobytes() for k in left
    )


def host(tree):
    """A copy on the host that nothing can change; of a copy, for jax 0.11 keeps an array from
    donation that numpy has looked at.
    """
    return jax.tree.map(lambda x: np.array(jnp.copy(x)), tree)


class Recorder(spmd.callbacks.Callback):
    """Notes every call as (event, step)."""

    def __init__(self, every=1, exact=None):
        self.every, self.exact, self.events, self.infos = every, exact, [], []

    def _note(self, event, info):
        self.events.append((event, info.step))
        self.infos.append(info)

    def on_start(self, info):
        self._note("start", info)

    def on_step(self, info):
        self._note("step", info)

    def on_eval(self, info):
        self._note("eval", info)

    def on_checkpoint(self, info):
        self._note("checkpoint", info)

    def on_stop(self, info):
        self._note("stop", info)

    def steps(self, event):
        return [step for name, step in self.events if name == event]


class Fail(spmd.callbacks.Callback):
    """Raises at one event of one step."""

    def __init__(self, event, step, error):
        self.at, self.error = (event, step), error
        for name in ("on_start", "on_step", "on_eval", "on_checkpoint", "on_stop"):
            setattr(self, name, lambda info, name=name: self._maybe(name, info))

    def on_step(self, info):
        """Overridden in the class as well, so that the loop calls it."""

    def _maybe(self, name, info):
        if (name, info.step) == self.at:
            raise self.error
