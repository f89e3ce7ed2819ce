"""Arrays that an nnx module keeps as attributes are constants of the model, as in a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd

ROWS, WIDTH = 16, 8


class Block(nnx.Module):
    def __init__(self, mask, rngs):
        self.mask, self.linear = mask, nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) * self.mask[0]


class Net(nnx.Module):
    def __init__(self, rngs, kind):
        self.mask, self.places = jnp.tril(jnp.ones((WIDTH, WIDTH))), jnp.arange(WIDTH)
        angles = jnp.arange(WIDTH) * 0.1
        self.tables = nnx.data((jnp.cos(angles), jnp.sin(angles))) if kind == "tuple" else None
        block = Block(self.mask[::-1], rngs)
        self.inner = {"list": nnx.List([block]), "sequential": nnx.Sequential(block)}.get(
            kind, block
        )
        self.kind = kind

    def __call__(self, x):
        x = x * self.mask[-1] + self.places
        x = x if self.tables is None else x * self.tables[0] + self.tables[1]
        return (self.inner[0] if self.kind == "list" else self.inner)(x)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def batches():
    random = np.random.default_rng(0)
    return [
        {
            "x": random.normal(size=(ROWS, WIDTH)).astype("float32"),
            "y": random.integers(0, WIDTH, ROWS),
        }
        for _ in range(3)
    ]


def plainly(kind):
    graph, params, rest = nnx.split(Net(nnx.Rngs(0), kind), nnx.Param, ...)
    losses = []
    for batch in batches():
        value, grads = jax.value_and_grad(
            lambda params, batch: loss(nnx.merge(graph, params, rest), batch).mean()
        )(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(value)
    return losses


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("layout", ["data_parallel", "fsdp"])
@pytest.mark.parametrize("kind", ["module", "list", "sequential", "tuple"])
def test_a_model_of_a_function_keeps_its_arrays(kind, layout):
    trainer = spmd.Trainer(
        lambda: Net(nnx.Rngs(0), kind),
        loss=loss,
        optimizer=optax.sgd(0.1),
        mesh="data=8",
        layout=layout,
    )
    state, losses = trainer.init(batches()[0]), []
    for batch in batches():
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses, plainly(kind), rtol=1e-5)
