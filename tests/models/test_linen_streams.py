"""Random streams of linen modules are those of plain flax, on one device and on several, under
lifted transforms too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import spmd
from spmd.models.flax_linen import key_of_stream

ROWS, LENGTH, WIDTH = 16, 6, 32


class Row(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=False)(
            linen.Dense(WIDTH, kernel_init=linen.initializers.ones)(x)
        )


class Cell(linen.Module):
    @linen.compact
    def __call__(self, carry, x):
        return carry, Row()(x)


SPLIT = {"params": False, "dropout": True}
# as flax documents it
MappedRow = linen.vmap(Row, in_axes=0, out_axes=0, variable_axes={"params": None}, split_rngs=SPLIT)


class OverTime(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.scan(
            Cell, variable_broadcast="params", split_rngs=SPLIT, in_axes=1, out_axes=1
        )()(0.0, x)[1]


class Noisy(linen.Module):
    """Two streams at one place."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH, kernel_init=linen.initializers.ones)(x)
        return (
            jnp.stack(
                [jax.random.normal(self.make_rng(name), x.shape) for name in ("dropout", "noise")],
                axis=-1,
            )
            + 0 * x[..., None]
        )


MODELS = {
    "plain": (Row(), ()),
    "vmap": (MappedRow(), ()),
    "scan": (OverTime(), (LENGTH,)),
    "two streams": (Noisy(), ()),
}


def keys(state):
    """Of the first call of the model in the first step."""
    step = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl="threefry2x32"), 0)
    key = jax.random.fold_in(jax.random.split(jax.random.fold_in(step, 0))[0], 0)
    return {name: key_of_stream(key, name) for name in ("params", "dropout", "noise")}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_draws_are_those_of_plain_flax(kind, devices):
    module, more = MODELS[kind]
    batch = {"x": np.ones((ROWS, *more, 3), np.float32), "number": np.arange(ROWS, dtype=np.int32)}

    def loss(model, batch):
        out = model(batch["x"])
        rows = out.reshape(len(out), -1)
        marks = (rows * jnp.cos(jnp.arange(rows.shape[1]))).sum(1)  # differ for other masks
        return rows.mean(1), {
            f"row {n}": jnp.where(batch["number"] == n, marks, 0.0) * ROWS for n in range(ROWS)
        }

    mesh = spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    trainer = spmd.Trainer(module, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh)
    state = trainer.init(batch)
    params, rngs = jax.device_get(state.params), keys(state)
    _, metrics = trainer.step(state, batch)
    right, _ = module.apply({"params": params}, batch["x"], rngs=rngs, mutable=[])
    flat = np.asarray(right).reshape(ROWS, -1)
    marks = (flat * np.cos(np.arange(flat.shape[1], dtype=np.float32))).sum(1)
    np.testing.assert_allclose(
        [metrics[f"row {n}"] for n in range(ROWS)], marks, rtol=1e-4, atol=1e-4
    )
    assert len({round(float(mark), 3) for mark in marks}) == ROWS


def test_streams_at_one_place_draw_other_numbers():
    keys = [key_of_stream(jax.random.key(0), name) for name in ("params", "dropout", "noise")]
    assert len({float(jax.random.uniform(key)) for key in keys}) == 3


def test_a_loss_may_give_keys_of_its_own():
    def loss(model, batch):
        out = model(batch["x"], rngs={"dropout": jax.random.key(7)})
        return out.mean(1), {"sum": out.sum()}

    batch = {"x": np.ones((ROWS, 3), np.float32)}
    mesh = spmd.make_mesh("data=1", devices=jax.devices()[:1])
    trainer = spmd.Trainer(Row(), loss=loss, optimizer=optax.sgd(0.1), mesh=mesh)
    state = trainer.init(batch)
    params = jax.device_get(state.params)
    _, metrics = trainer.step(state, batch)
    right = Row().apply({"params": params}, batch["x"], rngs={"dropout": jax.random.key(7)})
    np.testing.assert_allclose(metrics["sum"], np.asarray(right).sum(), rtol=1e-5)
