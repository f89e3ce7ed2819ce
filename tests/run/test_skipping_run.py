"""A run that skips updates: what it logs, when it ends, and that it resumes bit for bit."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import FEATURES, Recorder, fit, fit_net, labelled, numbers, same

import spmd
from spmd.errors import DivergedError
from spmd.optimizers import average_weights, scale_loss, skip_spikes

SPIKES = skip_spikes(average_weights(optax.adam(0.05), decay=0.8), window=4, max_in_a_row=3)
ROWS = 8  # of a batch


def spiky(*steps, by=1e4, count=96):
    """Data of which each of these steps of the first epoch has one bad row."""
    data = numbers(count)
    for step in steps:
        data["y"][step * ROWS - 3] *= by
    return data


def run(data, steps=12, **options):
    return fit(
        data,
        batch_size=ROWS,
        shuffle=False,
        steps=steps,
        **{"optimizer": SPIKES, "layout": "fsdp", **options},
    )


@pytest.mark.system
@pytest.mark.parametrize(
    "optimizer, precision, left",
    [
        (SPIKES, "float32", 1.0),
        pytest.param(
            scale_loss(SPIKES, 2.0**12, every=3), "float16", 30.0, marks=pytest.mark.system
        ),
    ],
    ids=["spikes", "spikes and float16"],
)
def test_resumed_run_matches_uninterrupted_run_in_the_middle_of_a_row(
    optimizer, precision, left, tmp_path
):
    """Stopped after 2 and after 7 updates: while the window fills, and after the first of two that
    are skipped in a row.
    """
    options = {"optimizer": optimizer, "precision": precision}
    uninterrupted = run(spiky(7, 8), **options)
    assert [
        step + 1 for step, skipped in enumerate(uninterrupted.history["skipped"]) if skipped
    ] == [7, 8]
    for steps in (2, 7, 12):
        rest = run(spiky(7, 8), steps, checkpoint=tmp_path, resume=steps > 2, **options)
    assert same(rest.state, uninterrupted.state) and same(
        rest.averaged.state, uninterrupted.averaged.state
    )
    assert rest.history["skipped"] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert rest.history["skips_left"][0] == left, (
        "of 3, or 32, of which one was used before the stop"
    )


def test_skipped_update_is_logged(caplog, tmp_path):
    seen = Recorder()
    with caplog.at_level(logging.WARNING, logger="spmd"):
        result = run(spiky(7), checkpoint=tmp_path, log_every=4, callbacks=[seen])
    lines = [record.message for record in caplog.records if "skipped" in record.message]
    loss, norm = result.history["loss"][6], result.history["grad_norm"][6]
    limits = [result.history[name][6] for name in ("loss_limit", "grad_norm_limit")]
    assert lines == [
        f"step 7: the update was skipped: the loss is {loss:.4g}, and the limit {limits[0]:.4g}; "
        f"the norm of the gradients is {norm:.4g}, and the limit {limits[1]:.4g}. 2 more may be, "
        "in a row."
    ]
    assert [info.metrics.get("skips_left") for info in seen.infos if info.step in (6, 7)] == [
        None,
        2.0,
    ]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [
        (record["step"], record["skipped"], "grad_norm_limit" in record) for record in records
    ] == [(4, 0.0, False), (8, 0.25, True), (12, 0.0, False)]
    assert int(result.state.opt.skipped) == 1 and int(result.state.step) == 12


@pytest.mark.system
def test_spike_on_resident_data_is_skipped_and_logged(caplog):
    data = spiky(7)
    with caplog.at_level(logging.WARNING, logger="spmd"):
        result = run(spmd.data.resident(data, steps_per_call=4))
    assert sum("step 7: the update was skipped" in record.message for record in caplog.records) == 1
    assert result.history["skipped"] == run(data).history["skipped"]


def test_too_many_in_a_row_end_the_run(tmp_path, golden):
    with pytest.raises(DivergedError) as caught:
        run(spiky(7, 8, 9), checkpoint=spmd.Checkpoint(tmp_path, every=5))
    golden("skipped_updates_in_a_row", str(caught.value).replace(str(tmp_path), "FOLDER"))


@pytest.mark.system
def test_fix_of_more_in_a_row_lets_the_run_resume(tmp_path):
    """From a checkpoint in the middle of the row."""
    with pytest.raises(DivergedError, match="larger sigmas or max_in_a_row"):
        run(spiky(7, 8, 9), checkpoint=spmd.Checkpoint(tmp_path, every=4))
    larger = skip_spikes(average_weights(optax.adam(0.05), decay=0.8), window=4, max_in_a_row=4)
    rest = run(
        spiky(7, 8, 9), checkpoint=spmd.Checkpoint(tmp_path, every=4), resume=True, optimizer=larger
    )
    assert rest.history["skips_left"][0] == 1 and rest.history["skipped"] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.system
def test_overflow_that_no_scale_helps_ends_the_run(golden):
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.ones((FEATURES, 1))}, lambda params, x: jnp.sqrt(0 * x @ params["w"])
    )
    loss, how = (
        spmd.losses.mean_squared_error,
        {"batch_size": 8, "epochs": 20, "precision": "float16"},
    )
    with pytest.raises(DivergedError) as caught:
        spmd.fit(model, numbers(), loss=loss, optimizer=optax.sgd(0.1), **how)
    golden("skipped_updates_that_no_scale_helps", str(caught.value))


def test_loss_that_is_not_finite_in_float16_is_named(caplog):
    with caplog.at_level(logging.WARNING, logger="spmd"):
        run(spiky(3, by=np.nan), 4, precision="float16", optimizer=scale_loss(SPIKES, 2.0**12))
    lines = [
        record.message for record in caplog.records if "the update was skipped" in record.message
    ]
    why = (
        "the loss itself, and so gradients in float16, are not finite; the loss is now scaled by "
        "2048"
    )
    assert lines == [f"step 3: the update was skipped: {why}. 31 more may be, in a row."]


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("step, error", [(1, "at the first step"), (3, "step 3")])
def test_batch_with_a_nan_is_skipped(step, error):
    """Without the wrapper it ends the run."""
    result = run(spiky(step, by=np.nan))
    assert [number + 1 for number, loss in enumerate(result.history["loss"]) if np.isnan(loss)] == [
        step
    ]
    assert result.history["skipped"][step - 1] == 1 and np.isfinite(result.state.params["w"]).all()
    with pytest.raises(DivergedError, match=error):
        run(spiky(step, by=np.nan), optimizer=optax.adam(0.05))


@pytest.mark.system
def test_float16_run_learns_and_exports(tmp_path):
    """With batch statistics and dropout; evaluation and the exported model compute in float16."""
    result = fit_net(epochs=20, precision="float16", eval_data=labelled(seed=1))
    assert result.history["eval_loss"][-1] < 0.75 * result.history["eval_loss"][0]
    assert set(result.history["skipped"][10:]) == {0.0}
    exported = spmd.load_exported(result.export(tmp_path / "half").folder)
    inputs = labelled()["x"][:8]
    np.testing.assert_allclose(
        exported.predict(inputs), result.predict(inputs), rtol=2e-3, atol=2e-3
    )
    assert "float16" in str(exported.predict(inputs).dtype)
