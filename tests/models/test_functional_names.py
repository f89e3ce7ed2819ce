"""Arguments of `FunctionalModel.apply` that spmd passes stand after the inputs; elsewhere they are
named, with a fix that works.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import ModelError

RANDOM = np.random.default_rng(0)
BATCH = {"x": RANDOM.normal(size=(16, 4)).astype("f"), "y": RANDOM.normal(size=(16, 2)).astype("f")}
WEIGHTS = {"w": RANDOM.normal(size=(4, 2)).astype("f")}
RIGHT = ((BATCH["x"].astype("d") @ WEIGHTS["w"] - BATCH["y"]) ** 2).mean()


def rng_first(params, rng, x):
    return x @ params["w"]


def train_first(params, train, x, *, axis_name):
    return x @ params["w"]


def with_state(params, state, rng, x):
    return x @ params["w"], state


def rng_required(params, x, rng):
    return x @ params["w"]


def losses_of(apply, stateful=False, inputs=("x",)):
    def init(key):
        return (WEIGHTS, {"count": jnp.zeros(())}) if stateful else WEIGHTS

    def loss(model, batch):
        return ((model(*(batch[name] for name in inputs)) - batch["y"]) ** 2).mean(-1)

    mesh = spmd.make_mesh("data=1", devices=jax.devices()[:1])
    model = spmd.FunctionalModel(init, apply, stateful=stateful)
    trainer = spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.0), mesh=mesh)
    state, metrics = trainer.step(trainer.init(BATCH), BATCH)
    return metrics["loss"], trainer.evaluate(state, BATCH, batch_size=16)["loss"]


@pytest.mark.parametrize(
    "apply, reserved, stateful",
    [
        (rng_first, "rng", False),
        (train_first, "train, axis_name", False),
        (with_state, "rng", True),
        (rng_required, "rng", False),
    ],
)
def test_reserved_names_are_named_with_a_fix_that_works(apply, reserved, stateful):
    with pytest.raises(ModelError) as raised:
        losses_of(apply, stateful)
    text = str(raised.value)
    assert f"spmd itself passes {reserved} by name; reserved are rng, axis_name, train, " in text
    fixed = eval(text.rpartition("apply=")[2], {"apply": apply})
    np.testing.assert_allclose(losses_of(fixed, stateful), RIGHT, rtol=1e-5)


def test_reserved_name_that_the_loss_gives_by_position_is_an_input():
    def apply(params, train, x):
        return train @ params["w"] + 0.0 * x.sum()

    np.testing.assert_allclose(losses_of(apply, inputs=("x", "y")), RIGHT, rtol=1e-5)


def test_reserved_names_after_the_inputs_are_passed():
    seen = []

    def apply(params, x, training, deterministic, axis_name, rng=None):
        seen.append((training, deterministic, axis_name, rng is not None))
        return x @ params["w"]

    np.testing.assert_allclose(losses_of(apply), RIGHT, rtol=1e-5)
    assert {*seen} == {(True, False, None, True), (False, True, None, False)}
