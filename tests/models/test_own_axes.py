"""BatchNorm averages over the axes that the model itself binds, and over the workers, as plain flax
does on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd

ROWS, LENGTH, WIDTH = 16, 3, 5
LINEN_AXES = {"params": None, "batch_stats": None}


class Row(linen.Module):
    """Of one row, [time, features], whose statistics are those of all rows (as in S5)."""

    @linen.compact
    def __call__(self, x, train):
        norm = linen.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="batch")
        return linen.Dense(2)(norm(linen.Dense(4)(x))).mean(0)


Rows = linen.vmap(
    Row,
    in_axes=(0, None),
    variable_axes=LINEN_AXES,
    split_rngs={"params": False},
    axis_name="batch",
)


class Member(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        norm = linen.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="members")
        return linen.Dense(2)(norm(linen.Dense(4)(x.mean(1))))


Members = linen.vmap(
    Member,
    in_axes=(None, None),
    axis_size=3,
    variable_axes={"params": 0, "batch_stats": 0},
    split_rngs={"params": True},
    axis_name="members",
)


class NnxRows(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(WIDTH, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, axis_name="batch", rngs=rngs)

    def __call__(self, x):
        hidden = self.inner(x)
        norm = nnx.vmap(lambda norm, row: norm(row), in_axes=(None, 0), axis_name="batch")
        return self.outer(norm(self.norm, hidden)).mean(1)


def batches():
    random = np.random.default_rng(0)
    return [
        {
            "x": random.normal(size=(ROWS, LENGTH, WIDTH)).astype("float32"),
            "y": random.integers(0, 2, ROWS),
        }
        for _ in range(3)
    ]


def cross_entropy(out, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        out if out.ndim == 2 else out.mean(0), batch["y"]
    )


def plainly(module, variables):
    params, stats, losses = variables["params"], variables["batch_stats"], []

    def value(params, stats, batch):
        out, changed = module.apply(
            {"params": params, "batch_stats": stats}, batch["x"], True, mutable=["batch_stats"]
        )
        return cross_entropy(out, batch).mean(), changed["batch_stats"]

    for batch in batches():
        (loss, stats), grads = jax.value_and_grad(value, has_aux=True)(params, stats, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(loss)
    return losses, stats


def trained(model, loss, devices):
    mesh = spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    trainer = spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh)
    state, losses = trainer.init(batches()[0]), []
    for batch in batches():
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    return losses, jax.device_get(state.stats)


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("module", [Rows(), Members()], ids=["rows", "members"])
def test_axes_of_linen_vmap_are_kept(module, devices):
    variables = module.init(jax.random.key(0), batches()[0]["x"][:2], True)
    losses, stats = trained(
        module.bind(variables),
        lambda model, batch: cross_entropy(model(batch["x"], True), batch),
        devices,
    )
    right, right_stats = plainly(module, variables)
    np.testing.assert_allclose(losses, right, rtol=2e-5)
    ours = stats["batch_stats"]
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right_stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("devices", [1, 8])
def test_axes_of_nnx_vmap_are_kept(devices):
    graph, params, rest = nnx.split(NnxRows(nnx.Rngs(0)), nnx.Param, ...)
    right = []
    for batch in batches():

        def value(params, rest, batch):
            model = nnx.merge(graph, params, jax.tree.map(jnp.array, rest))
            return cross_entropy(model(batch["x"]), batch).mean(), nnx.split(model, nnx.Param, ...)[
                2
            ]

        (loss, rest), grads = jax.value_and_grad(value, has_aux=True)(params, rest, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        right.append(loss)
    losses, _ = trained(
        lambda: NnxRows(nnx.Rngs(0)),
        lambda model, batch: cross_entropy(model(batch["x"]), batch),
        devices,
    )
    np.testing.assert_allclose(losses, right, rtol=2e-5)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_an_axis_that_the_model_does_not_bind_is_noted(kind):
    """As in code for `jax.pmap`; one that it binds is not."""

    class Alone(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            return linen.Dense(2)(
                linen.BatchNorm(use_running_average=not train, axis_name="devices")(x.mean(1))
            )

    class AloneNnx(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.out = (
                nnx.BatchNorm(WIDTH, axis_name="devices", rngs=rngs),
                nnx.Linear(WIDTH, 2, rngs=rngs),
            )

        def __call__(self, x):
            return self.out(self.norm(x.mean(1)))

    def loss(model, batch):
        logits = model(batch["x"], True) if kind == "linen" else model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    def notes(model):
        trainer = spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1), mesh="data=8")
        trainer.step(trainer.init(batches()[0]), batches()[0])
        return [note for note in trainer.notes() if "axis_name" in note]

    bound, unbound = (
        (Rows(), Alone())
        if kind == "linen"
        else (lambda: NnxRows(nnx.Rngs(0)), lambda: AloneNnx(nnx.Rngs(0)))
    )
    assert notes(bound) == []
    assert notes(unbound) == [
        'note: BatchNorm(axis_name="devices"): the model binds no such axis; it averages over the '
        "workers."
    ]
