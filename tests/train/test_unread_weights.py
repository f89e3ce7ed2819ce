"""A weight or a mask in a batch that neither the loss nor a metric reads is noted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd

MODEL = spmd.FunctionalModel(
    lambda key: {"w": jnp.zeros((3, 2))}, lambda params, x: x @ params["w"]
)
DATA = {
    "x": np.ones((16, 3), np.float32),
    "y": np.ones((16, 2), np.float32),
    "id": np.arange(16),
    "loss_mask": np.ones((16, 2), np.float32),
    "sample_weight": np.ones(16, np.float32),
}
NOTE = (
    "note: neither the loss nor a metric reads {} of the batch, so every row and token counts "
    "alike."
)
BOTH = '"loss_mask" (float32[8, 2]), "sample_weight" (float32[8])'
WEIGHT = '"sample_weight" (float32[8])'


def per_row(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(-1)


def reads_mask(model, batch):
    return (jnp.square(model(batch["x"]) - batch["y"]) * batch["loss_mask"]).mean(-1)


def reads_both(model, batch):
    return reads_mask(model, batch) * batch["sample_weight"]


def reads_mask_in_a_jit_that_takes_both(model, batch):
    @jax.jit
    def weighted(squares, mask, weight):
        return (squares * mask).mean(-1)

    return weighted(
        jnp.square(model(batch["x"]) - batch["y"]), batch["loss_mask"], batch["sample_weight"]
    )


def computes_what_nothing_uses(model, batch):
    (batch["sample_weight"] * 2).sum()
    return reads_mask(model, batch)


def weighted_error(model, batch):
    return (per_row(model, batch) * batch["sample_weight"]).sum(), batch["sample_weight"].sum()


def reads_another_key(model, batch):
    return per_row(model, batch) * batch["only in evaluations"]


@pytest.mark.parametrize("mesh", ["data=1", "data=4"])
@pytest.mark.parametrize(
    ("loss", "metrics", "named"),
    [
        (per_row, {}, BOTH),
        (reads_mask, {}, WEIGHT),
        (reads_both, {}, None),
        (reads_mask_in_a_jit_that_takes_both, {}, WEIGHT),
        (computes_what_nothing_uses, {}, WEIGHT),
        (reads_mask, {"error": per_row}, WEIGHT),
        (reads_mask, {"error": weighted_error}, None),
        (reads_mask, {"error": reads_another_key}, None),
    ],
)
def test_unread_weights_are_noted(loss, metrics, named, mesh):
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: int(mesh[-1])])
    trainer = spmd.Trainer(MODEL, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh, metrics=metrics)
    trainer.step(trainer.init(), {name: array[:8] for name, array in DATA.items()})
    assert [line for line in trainer.notes() if "reads" in line] == (
        [] if named is None else [NOTE.format(named)]
    )


def test_note_of_fit_is_info(caplog):
    spmd.fit(MODEL, DATA, loss=per_row, optimizer=optax.sgd(0.1), batch_size=8, steps=1)
    assert [
        (one.levelname, one.getMessage()) for one in caplog.records if "reads" in one.getMessage()
    ] == [("INFO", NOTE.format(BOTH))]
