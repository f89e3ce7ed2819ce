"""The norm of the gradients and the learning rate among the metrics of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import LossError
from spmd.optimizers import measure_norm, skip_spikes
from tests.compare import assert_close

ROWS = np.random.default_rng(0).normal(size=(48, 16)).astype("float32")
DATA = {"x": ROWS, "y": (ROWS @ np.arange(16, dtype="float32"))[:, None]}
MODEL = spmd.FunctionalModel(
    lambda key: {"w": jnp.full((16, 8), 0.1), "v": jnp.full((8, 1), 0.1)},
    lambda p, x: x @ p["w"] @ p["v"],
)
RATE = optax.linear_schedule(0.01, 0.002, 4)


def optimizer():
    return optax.chain(
        measure_norm(),
        optax.clip_by_global_norm(0.5),
        optax.inject_hyperparams(optax.sgd)(learning_rate=RATE),
    )


def fit(made=None, **options):
    given = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optimizer() if made is None else made,
        "batch_size": 16,
        "epochs": 2,
    }
    return spmd.fit(MODEL, DATA, **{**given, **options})


def plain_norms():
    """Norms of the gradients of a loop on one device, over the same batches."""
    params, norms = {"w": jnp.full((16, 8), 0.1), "v": jnp.full((8, 1), 0.1)}, []
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(RATE))
    opt = tx.init(params)
    for _ in range(2):
        for rows in np.split(np.arange(48), 3):
            x, y = jnp.asarray(DATA["x"][rows]), jnp.asarray(DATA["y"][rows])
            grads = jax.grad(lambda p, x=x, y=y: ((x @ p["w"] @ p["v"] - y) ** 2).mean())(params)
            norms.append(float(optax.tree.norm(grads)))
            updates, opt = tx.update(grads, opt, params)
            params = optax.apply_updates(params, updates)
    return norms


@pytest.mark.system
@pytest.mark.parametrize("layout", ["data_parallel", "zero1", "fsdp", "parameter_server"])
def test_they_are_those_of_one_device(layout):
    history = fit(layout=layout, shuffle=False).history
    np.testing.assert_allclose(history["grad_norm"], plain_norms(), rtol=1e-5)
    assert_close(history["learning_rate"], [float(RATE(step)) for step in range(6)])


@pytest.mark.system
def test_of_microbatches_it_is_that_of_the_mean_gradient():
    np.testing.assert_allclose(
        fit(shuffle=False, accumulate=2).history["grad_norm"], plain_norms(), rtol=1e-5
    )


@pytest.mark.system
def test_workers_with_optimizers_of_their_own():
    history = fit(layout="diloco").history
    assert_close(history["learning_rate"], [float(RATE(step)) for step in range(6)])
    assert min(history["grad_norm"]) > 0


@pytest.mark.system
def test_with_skipped_updates_there_is_one_norm():
    history = fit(skip_spikes(optimizer()), shuffle=False).history
    np.testing.assert_allclose(history["grad_norm"], plain_norms(), rtol=1e-5)
    assert history["skipped"] == [0.0] * 6 and len(history["learning_rate"]) == 6


def test_without_either_there_is_none():
    assert {"grad_norm", "learning_rate"}.isdisjoint(fit(optax.sgd(1e-3)).history.names)


def test_a_metric_of_the_same_name_is_refused():
    def loss(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean(), {"grad_norm": jnp.float32(1)}

    with pytest.raises(LossError, match=r'a metric is named "grad_norm"'):
        fit(loss=loss)
