"""Statistics of a model over workers and microbatches are those of plain Flax on the full batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from served import served

import spmd
from tests.compare import assert_close

ROWS, STEPS = 64, 4


class Average(nnx.Variable):
    """What the training step updates."""


class Net(nnx.Module):
    """A number of calls, an average of weights, a centre that the loss reads, a power iteration,
    and BatchNorm behind all of them.
    """

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, use_scale=False, rngs=rngs)
        self.calls = Average(jnp.zeros((), jnp.int32))
        self.times = Average(jnp.zeros((), jnp.bfloat16))
        self.teacher = Average(self.layer.kernel[...] + 0)
        self.centre = Average(jnp.zeros(8))
        self.vector = Average(jnp.ones(8) / 8**0.5)
        self.key = Average(jax.random.key(7))


def loss(model, batch):
    """One value for each row."""
    kernel = jax.lax.stop_gradient(model.layer.kernel[...])
    seen = model.layer(batch["x"])
    targets = jax.nn.softmax(
        (jax.lax.stop_gradient(seen) - model.centre[...]) / 0.5 + batch["x"] @ model.teacher[...]
    )
    vector = kernel.T @ (kernel @ model.vector[...])
    model.calls[...] += 1
    model.times[...] += 1
    model.teacher[...] = 0.9 * model.teacher[...] + 0.1 * kernel
    model.centre[...] = 0.9 * model.centre[...] + 0.1 * jax.lax.stop_gradient(seen).mean(0)
    model.vector[...] = vector / jnp.linalg.norm(vector)
    model.key[...] = jax.random.split(model.key[...])[0]
    model.norm(seen)  # its average is kept, and its result, which depends on all rows, is not used
    return -(targets * jax.nn.log_softmax(seen / jnp.linalg.norm(kernel @ model.vector[...]))).sum(
        1
    )


def batches():
    random = np.random.default_rng(0)
    return [{"x": (1 + random.normal(size=(ROWS, 8))).astype(np.float32)} for _ in range(STEPS)]


@functools.cache
def reference():
    """Losses and the final state of a loop without spmd, on one device."""
    model = Net()
    optimizer, losses = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), []
    for batch in batches():
        value, gradients = nnx.value_and_grad(lambda model, batch: loss(model, batch).mean())(
            model, batch
        )
        optimizer.update(model, gradients)
        losses.append(float(value))
    return losses, model


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    ("devices", "accumulate", "layout"),
    [
        (1, 1, None),
        (1, 2, None),
        (1, 4, None),
        (8, 1, None),
        (8, 2, None),
        (8, 4, None),
        (8, 1, served(workers=32)),
        (8, 2, served(workers=16)),
    ],
    ids=[
        "one device",
        "2 parts",
        "4 parts",
        "8 workers",
        "8 workers of 2",
        "8 workers of 4",
        "server of 32",
        "server of 16, of 2 each",
    ],
)
def test_statistics_are_those_of_the_full_batch(devices, accumulate, layout):
    mesh = spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    options = {
        "loss": loss,
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "batch_size": None,
        "progress": False,
    }
    options |= {} if layout is None else {"layout": layout}
    result = spmd.fit(lambda: Net(), batches(), mesh=mesh, accumulate=accumulate, **options)
    losses, model = reference()
    assert_close(np.asarray(result.history["loss"]), np.asarray(losses), 1e-6)
    for name in ("calls", "times"):
        assert getattr(result.model, name)[...] == getattr(model, name)[...] == STEPS
    assert jnp.array_equal(*(jax.random.key_data(each.key[...]) for each in (result.model, model)))
    for name in ("teacher", "centre", "vector"):
        assert_close(
            np.asarray(getattr(result.model, name)[...]),
            np.asarray(getattr(model, name)[...]),
            1e-6,
        )
    assert_close(np.asarray(result.model.norm.mean[...]), np.asarray(model.norm.mean[...]), 1e-6)
    assert_close(
        np.asarray(result.model.layer.kernel[...]), np.asarray(model.layer.kernel[...]), 1e-6
    )
