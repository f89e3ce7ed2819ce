"""Optimizers of optax whose interface or rhythm is their own: lookahead, SAM and MultiSteps,
against a plain loop of optax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import OptimizerError
from tests.compare import assert_close
from tests.run.small import FEATURES, fit, numbers

CLIP = optax.clip_by_global_norm(1.0)


def lookahead():
    return optax.lookahead(optax.adam(0.05), sync_period=3, slow_step_size=0.5)


def sam(outer=None, inner=None, **options):
    inner = optax.chain(optax.contrib.normalize(), optax.sgd(0.05)) if inner is None else inner
    return optax.contrib.sam(optax.adam(0.05) if outer is None else outer, inner, **options)


def gradients(weights, step):
    """Gradients of a step's batch: 32 of 96 rows, in order."""
    data, rows = numbers(), slice(step % 3 * 32, step % 3 * 32 + 32)
    return jax.grad(lambda p: ((data["x"][rows] @ p["w"] - data["y"][rows]) ** 2).mean())(weights)


def plain(optimizer, steps, weights=None, fast=lambda weights: weights):
    weights = {"w": jnp.zeros((FEATURES, 1))} if weights is None else weights
    opt = optimizer.init(weights)
    for step in range(steps):
        updates, opt = optimizer.update(gradients(fast(weights), step), opt, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lookahead, "data_parallel"),
        (lambda: optax.chain(CLIP, lookahead()), "fsdp"),
        (lookahead, "parameter_server"),
    ],
    ids=["alone", "in a chain", "server"],
)
def test_lookahead_trains_fast_and_slow_weights(make, layout):
    pair = optax.LookaheadParams.init_synced({"w": jnp.zeros((FEATURES, 1))})
    wanted = plain(make(), 5, pair, fast=lambda weights: weights.fast)
    assert np.abs(wanted.fast["w"] - wanted.slow["w"]).max() > 1e-3
    result = fit(optimizer=make(), layout=layout, mesh="data=8", shuffle=False, steps=5)
    assert_close(np.ravel(result.model(jnp.eye(FEATURES))), np.ravel(wanted.fast["w"]))
    assert_close(np.ravel(result.averaged.model(jnp.eye(FEATURES))), np.ravel(wanted.slow["w"]))


def test_lookahead_resumes(tmp_path):
    straight = fit(optimizer=lookahead(), shuffle=False, steps=5)
    fit(optimizer=lookahead(), shuffle=False, steps=2, checkpoint=tmp_path)
    resumed = fit(optimizer=lookahead(), shuffle=False, steps=5, checkpoint=tmp_path, resume=True)
    assert_close(resumed.state.opt.slow, straight.state.opt.slow, 0)


@pytest.mark.parametrize("layout", ["data_parallel", "fsdp"])
def test_sam_is_that_of_a_plain_loop(layout):
    with jax.numpy_dtype_promotion("standard"):  # it multiplies numbers by bools
        result = fit(optimizer=sam(), layout=layout, shuffle=False, steps=6)
        assert_close(result.state.params, plain(sam(), 6))


def test_sam_reports_perturbed_weights(caplog):
    with jax.numpy_dtype_promotion("standard"):
        fit(optimizer=sam(), shuffle=False, steps=4, eval_data=numbers(), eval_every=2)
        assert "perturbed" not in caplog.text
        fit(optimizer=sam(), shuffle=False, steps=5, eval_data=numbers(), eval_every=3)
    assert (
        "step 3: perturbed weights are evaluated, of the last step within an update of "
        "optax.contrib.sam" in caplog.text
    )
    assert (
        "the run ends within an update of optax.contrib.sam: the last step moved the weights"
        in caplog.text
    )
    assert (
        "fix: steps=4, which ends with an update." in caplog.text
        and caplog.text.count("are evaluated") == 1
    )


def test_other_interfaces_are_refused_with_a_fix_that_works():
    """Each fix is applied, and trains as a plain loop does."""
    clipped = sam(
        optax.chain(CLIP, optax.adam(0.05)),
        optax.chain(CLIP, optax.contrib.normalize(), optax.sgd(0.05)),
    )
    half = optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation()
    outside = optax.MultiSteps(lookahead(), 2).gradient_transformation()
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(
            OptimizerError, match=r"fix: optax\.contrib\.sam\(\.\.\., opaque_mode=False\)"
        ):
            fit(optimizer=sam(opaque_mode=True), steps=2)
        with pytest.raises(OptimizerError, match=r"fix: optax\.contrib\.sam around all else"):
            fit(optimizer=optax.chain(CLIP, sam()), steps=2)
        assert_close(
            fit(optimizer=clipped, shuffle=False, steps=4).state.params,
            plain(optax.chain(CLIP, sam()), 4),
        )
        with pytest.raises(OptimizerError, match=r"fix: optax\.lookahead around all else"):
            fit(optimizer=outside, steps=2)
        fixed = optax.lookahead(half, sync_period=4, slow_step_size=0.5)
        pair = optax.LookaheadParams.init_synced({"w": jnp.zeros((FEATURES, 1))})
        wanted = plain(fixed, 6, pair, fast=lambda weights: weights.fast)
        assert_close(fit(optimizer=fixed, shuffle=False, steps=6).state.params, wanted.fast)
        with pytest.raises(
            OptimizerError,
            match=r"optax\.contrib\.sam inside it moves the weights to perturbed ones",
        ):
            fit(optimizer=spmd.optimizers.average_weights(sam()), steps=2)


def test_multi_steps_reports_steps_without_an_update(caplog, tmp_path):
    def accumulated():
        return optax.MultiSteps(optax.sgd(0.1), 3)

    result = fit(optimizer=accumulated(), shuffle=False, steps=8, checkpoint=tmp_path)
    line = (
        "the gradients of the last 2 steps came after the last update of optax.MultiSteps: they "
        "are not in the model; a run that resumes"
    )
    assert line in caplog.text and "fix: steps=6, which ends with an update." in caplog.text
    assert_close(result.state.params, plain(accumulated(), 6))
    caplog.clear()
    assert_close(
        fit(optimizer=accumulated(), shuffle=False, steps=6).state.params, plain(accumulated(), 6)
    )
    fit(optimizer=accumulated(), shuffle=False, steps=9, checkpoint=tmp_path, resume=True)
    assert "MultiSteps" not in caplog.text
    fit(
        optimizer=optax.chain(CLIP, accumulated().gradient_transformation()),
        layout="diloco",
        steps=2,
    )
    assert (
        "the gradients of the last 2 steps came after" in caplog.text
        and "fix: more steps: none has made an update." in caplog.text
    )


def test_multi_steps_reports_a_short_batch(caplog):
    """Of 80 rows the third batch has 16, which count as much as 32; `accumulate` counts each row
    alike.
    """
    data = {name: rows[:80] for name, rows in numbers().items()}
    result = fit(data, optimizer=optax.MultiSteps(optax.sgd(0.1), 3), shuffle=False, steps=3)
    assert (
        "step 3: a batch of 16 rows counts in optax.MultiSteps as much as one of 32: each of its "
        "rows weighs 2 times as much" in caplog.text
    )

    def of_rows(weights):
        loss = (data["x"] @ jnp.zeros((FEATURES, 1)) - data["y"])[:, 0]
        return {"w": -0.1 * jnp.asarray(2 * data["x"].T @ (weights * loss)[:, None])}

    assert_close(result.state.params, of_rows(np.where(np.arange(80) < 64, 1 / 96, 1 / 48)))
    caplog.clear()
    fixed = fit(
        data, optimizer=optax.sgd(0.1), batch_size=96 - 16, accumulate=2, shuffle=False, steps=1
    )
    assert_close(fixed.state.params, of_rows(np.full(80, 1 / 80)))
    fit(data, optimizer=optax.MultiSteps(optax.sgd(0.1), 2), batch_size=40, shuffle=False, steps=2)
    assert "MultiSteps" not in caplog.text
