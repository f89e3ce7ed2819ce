"""A run that averages weights: stopped and resumed, on any mesh, and its best average kept."""

import json

import jax
import optax
import pytest
from small import fit, numbers, same

import spmd
from spmd.optimizers import average_weights, skip_spikes

OPTIMIZERS = {
    "ema": average_weights(optax.adam(0.05), decay=0.8),
    "swa": average_weights(optax.adam(0.05), decay=None, start=2, every=3),
}


@pytest.mark.system
@pytest.mark.parametrize("name", [pytest.param("ema", marks=pytest.mark.system), "swa"])
def test_resumed_average_matches_uninterrupted_average(name, tmp_path):
    options = {
        "optimizer": OPTIMIZERS[name],
        "layout": "fsdp",
        "eval_data": numbers(40),
        "eval_every": 4,
        "eval_average": True,
    }
    uninterrupted = fit(steps=12, **options)
    first = fit(steps=4, checkpoint=tmp_path, **options)
    rest = fit(steps=12, checkpoint=tmp_path, resume=True, **options)
    assert int(first.state.opt.updates) == 4
    assert same(rest.state, uninterrupted.state) and same(
        rest.averaged.state, uninterrupted.averaged.state
    )
    assert not same(rest.averaged.state.params, rest.state.params)
    assert (
        rest.history["eval_loss"]
        == uninterrupted.history["eval_loss"][-len(rest.history["eval_loss"]) :]
    )


@pytest.mark.system
def test_average_is_restored_on_another_mesh(tmp_path):
    result = fit(
        steps=4, checkpoint=tmp_path, optimizer=OPTIMIZERS["ema"], layout="fsdp", mesh="data=8"
    )
    mesh = spmd.make_mesh("data=2", devices=jax.devices()[:2])
    other = spmd.Trainer(
        result.trainer.placed.config.model,
        loss=spmd.losses.mean_squared_error,
        optimizer=OPTIMIZERS["ema"],
        mesh=mesh,
    )
    assert same(other.averaged(other.restore(tmp_path)).params, result.averaged.state.params)


@pytest.mark.system
def test_best_checkpoint_is_that_of_the_average(tmp_path):
    options = {
        "optimizer": OPTIMIZERS["ema"],
        "eval_data": numbers(40),
        "eval_average": True,
        "epochs": 3,
    }
    result = fit(checkpoint=spmd.Checkpoint(tmp_path, best="eval_loss", keep=1), **options)
    trainer = result.trainer
    losses = result.history["eval_loss"]
    best = trainer.averaged(trainer.restore(tmp_path, step="best"))
    assert trainer.evaluate(best, numbers(40))["loss"] == min(losses)


@pytest.mark.system
def test_resume_with_other_numbers_is_reported(tmp_path):
    def optimizer(decay, sigmas):
        return skip_spikes(average_weights(optax.adam(0.05), decay=decay), sigmas=sigmas, window=4)

    fit(steps=2, checkpoint=tmp_path, optimizer=optimizer(0.8, 6))
    fit(steps=3, checkpoint=tmp_path, resume=True, optimizer=optimizer(0.8, 6))
    fit(steps=4, checkpoint=tmp_path, resume=True, optimizer=optimizer(None, 7))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record.get("changed") for record in records if record.get("event") == "resumed"] == [
        None, ["average_weights(decay) was 0.8, is None", "skip_spikes(sigmas) was 6.0, is 7.0"]
    ]  # fmt: skip
