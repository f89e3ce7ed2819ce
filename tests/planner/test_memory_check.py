"""`fit` does not start what has no room. CPUs do not say what they have, so here the tests say it
for them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import DeviceMemoryError
from spmd.train.device_memory import memory_limit

pytestmark = pytest.mark.optimized

MODEL = spmd.FunctionalModel(
    lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 8))},
    lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"],
)
DATA = {"x": np.ones((64, 64), np.float32), "y": np.ones((64, 8), np.float32)}


def fit(**options):
    options = {
        "optimizer": optax.sgd(0.1),
        "batch_size": 32,
        "steps": 2,
        "mesh": "data=8",
    } | options
    return spmd.fit(MODEL, DATA, loss=spmd.losses.mean_squared_error, **options)


def has(monkeypatch, limit):
    monkeypatch.setattr("spmd.planner.memory.memory_limit", lambda mesh: limit)


@pytest.mark.system
def test_memory_limit_of_cpus_is_unknown():
    assert memory_limit(spmd.make_mesh("data=8")) is None


@pytest.mark.system
def test_fit_raises_before_allocating_what_does_not_fit(monkeypatch):
    has(monkeypatch, 100_000)
    monkeypatch.setattr(spmd.Trainer, "init", lambda self: pytest.fail("something was allocated"))
    with pytest.raises(DeviceMemoryError) as caught:
        fit()
    first, second, *_, fix = str(caught.value).splitlines()
    assert (
        first.startswith("a step needs ")
        and first.endswith(" of temporaries.")
        and " of 97.7 KiB on each cpu (" in first
    )
    assert second.endswith(" too much on each of 8 devices.") and fix.startswith(
        "    fix: `spmd plan` shows"
    )


@pytest.mark.system
def test_check_memory_false_starts_anyway(monkeypatch):
    has(monkeypatch, 100_000)
    assert int(fit(check_memory=False).state.step) == 2


@pytest.mark.system
def test_fit_reports_memory_and_compiles_once(monkeypatch, capsys):
    has(monkeypatch, 10_000_000)
    result = fit(progress=True)
    assert "a step needs " in capsys.readouterr().err
    assert result.trainer.prepare(None)[0].functions.compilations() == 1


def test_check_agrees_with_plan(monkeypatch):
    has(monkeypatch, 1)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((32, *x.shape[1:]), x.dtype), DATA)
    plan = spmd.plan(
        MODEL,
        batch,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.1),
        target="8xcpu",
        mesh="data=8",
    )
    with pytest.raises(DeviceMemoryError, match=f"^a step needs {plan.memory.peak / 1024:.1f} KiB"):
        fit()
