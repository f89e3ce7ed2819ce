"""Small trained models of every kind, on scikit-learn's digits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import spmd
from spmd.inference import workers


def init(key):
    first, second = jax.random.split(key)

    def dense(key, rows, columns):
        return jax.random.normal(key, (rows, columns)) / np.sqrt(rows)

    return {
        "one": dense(first, 64, 32),
        "two": dense(second, 32, 10),
        "bias": jnp.zeros(10, jnp.bfloat16),
    }


def apply(params, image):
    hidden = jax.nn.relu(image.reshape(image.shape[0], -1) @ params["one"])
    return hidden @ params["two"] + params["bias"].astype(jnp.float32)


class Convolved(nnx.Module):
    """A convolution, BatchNorm, dropout, and a dense layer."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, image):
        x = nnx.relu(self.norm(self.conv(image)))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


class Linen(linen.Module):
    """The same in linen, without a convolution."""

    @linen.compact
    def __call__(self, image, train: bool):
        x = linen.Dense(32)(image.reshape(image.shape[0], -1))
        x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
        return linen.Dense(10)(x)


KINDS = {
    "functional": lambda: spmd.FunctionalModel(init, apply),
    "nnx": lambda: lambda: Convolved(nnx.Rngs(0)),
    "linen": Linen,
}


def untrained(kind, data, *, loss=spmd.losses.cross_entropy, **options):
    """A trainer that has seen the shapes of a batch, and its first state."""
    model = KINDS[kind]() if isinstance(kind, str) else kind
    trainer = spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1), **options)
    batch = jax.tree.map(lambda x: x[:128], data)
    trainer.prepare(batch)
    return trainer, trainer.init(batch)


def train(kind, data, *, seed=0, steps=4, rate=3e-3, **options):
    """A few steps of Adam; the model is of a kind in `KINDS`, or is one."""
    options = {"mesh": spmd.make_mesh("data=1", devices=jax.devices()[:1]), **options}
    return spmd.fit(
        KINDS[kind]() if isinstance(kind, str) else kind,
        data,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(rate),
        metrics={"accuracy": spmd.metrics.accuracy},
        batch_size=128,
        steps=steps,
        progress=False,
        seed=seed,
        **options,
    )


def by_hand(values, layers=0):
    """Weights that int8 with a scale for each output channel stands for, in numpy, from what
    docs/export.md says.
    """
    if layers:
        return np.stack([by_hand(layer) for layer in values])
    rows = np.asarray(values).reshape(-1, values.shape[-1])
    scales = np.abs(rows).max(0) / np.float32(127)
    scales[scales == 0] = 1
    return (np.rint(rows / scales).astype(np.int8).astype(np.float32) * scales).reshape(
        values.shape
    )


def says_what(small, same, exact, inputs):
    """An int8 model says to the bit what one with the weights `by_hand` says, and not what the
    exact one says.
    """
    said, wanted = (model.predict(inputs) for model in (small, same))
    assert np.array_equal(said, wanted) and said.std() > 0
    assert not np.array_equal(said, exact.predict(inputs))


class Clock:
    """One that stands."""

    now = 0.0

    def monotonic(self):
        return self.now


def deadlines_pass_after(monkeypatch, answers, began):
    """A request with a deadline is over when `answers` members have answered and another one has
    begun, however long that takes.

    Returns:
      The clock; it stands otherwise.
    """
    clock, wait = Clock(), workers._Request.wait

    def waits(request, seconds):
        if seconds is None:
            return wait(request, 60)
        assert began.wait(60)
        with request._changed:
            assert request._changed.wait_for(lambda: len(request._results) >= answers, 60)
            clock.now += seconds
            return wait(request, 0.0)

    monkeypatch.setattr(workers, "time", clock)
    monkeypatch.setattr(workers._Request, "wait", waits)
    return clock
