"""Numbers that the script gives its optimizer and a checkpoint also keeps: on resuming, a changed
script is obeyed, and a line says so.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.trainer import Trainer
from tests.compare import assert_close
from tests.run.small import FEATURES, fit, linear, numbers

# fixtures
from tests.run.test_memory_checkpoint import checkpoint, killed, none_left_out, start_and_kill  # noqa: F401

LOSS = spmd.losses.mean_squared_error


def injected(rate):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.5)


def nested(rate):
    """Deep inside, where only one group of the parameters is trained by it."""
    groups = {
        "a": optax.masked(optax.chain(optax.clip(1.0), injected(rate)), True),
        "b": optax.adam(0.01),
    }
    return optax.chain(optax.clip_by_global_norm(10.0), optax.partition(groups, {"w": "a"}))


def averaged(rate):
    return spmd.optimizers.average_weights(injected(rate), decay=0.9)


def plain(optimizer, steps):
    """The weights after some steps of one device over the rows in order."""
    data, weights = numbers(), {"w": jnp.zeros((FEATURES, 1))}
    opt = optimizer.init(weights)
    for step in range(steps):
        rows = slice(step % 3 * 32, step % 3 * 32 + 32)
        grads = jax.grad(
            lambda p, rows=rows: ((data["x"][rows] @ p["w"] - data["y"][rows]) ** 2).mean()
        )(weights)
        updates, opt = optimizer.update(grads, opt, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


def said(folder):
    """What the newest resumed run reports as changed."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record.get("changed", []) for record in records if record.get("event") == "resumed"][-1]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (injected, "opt/hyperparams/learning_rate"),
        (nested, "opt/1/inner_states/a/inner_state/inner_state/1/hyperparams/learning_rate"),
        (averaged, "opt/inner/hyperparams/learning_rate"),
    ],
    ids=["alone", "nested", "averaged"],
)
def test_resume_takes_a_changed_number_from_the_script(tmp_path, make, path):
    fit(optimizer=make(0.1), shuffle=False, steps=4, checkpoint=tmp_path)
    result = fit(optimizer=make(0.01), shuffle=False, steps=6, checkpoint=tmp_path, resume=True)
    wanted = plain(make(lambda step: jnp.where(step < 4, 0.1, 0.01)), 6)
    assert_close(result.state.params, wanted)
    assert said(tmp_path) == [f"{path} of optax.inject_hyperparams was 0.1, is 0.01"]
    fit(optimizer=make(0.01), shuffle=False, steps=7, checkpoint=tmp_path, resume=True)
    assert said(tmp_path) == [], "from then on the checkpoint has the new number"


def test_resume_keeps_the_count_of_a_schedule(tmp_path):
    def make(decay):
        schedule = optax.linear_schedule(0.1, 0.0, 10)
        return optax.inject_hyperparams(optax.adamw)(learning_rate=schedule, weight_decay=decay)

    fit(optimizer=make(0.0), steps=4, checkpoint=tmp_path)
    result = fit(optimizer=make(0.5), steps=6, checkpoint=tmp_path, resume=True)
    assert_close(result.history["learning_rate"], [0.06, 0.05])
    assert said(tmp_path) == [
        "opt/hyperparams/weight_decay of optax.inject_hyperparams was 0, is 0.5"
    ]


def plateau(folder, rate):
    """A loop of one's own that lowers the rate, as ReduceLROnPlateau does."""
    trainer = spmd.Trainer(linear(), loss=LOSS, optimizer=injected(0.1))
    state, metrics = trainer.step(
        trainer.init(), {name: rows[:32] for name, rows in numbers().items()}
    )
    del metrics
    lowered = jax.device_put(jnp.float32(rate), state.opt.hyperparams["learning_rate"].sharding)
    opt = state.opt._replace(hyperparams={**state.opt.hyperparams, "learning_rate": lowered})
    trainer.save(dataclasses.replace(state, opt=opt), folder)


def test_restore_keeps_a_number_that_training_has_changed(tmp_path, caplog):
    plateau(tmp_path, 0.025)
    state = spmd.Trainer(linear(), loss=LOSS, optimizer=injected(0.1)).restore(tmp_path)
    assert float(state.opt.hyperparams["learning_rate"]) == np.float32(0.025) and not caplog.text
    state = spmd.Trainer(linear(), loss=LOSS, optimizer=injected(0.05)).restore(tmp_path)
    assert float(state.opt.hyperparams["learning_rate"]) == np.float32(0.05)
    line = (
        "opt/hyperparams/learning_rate of optax.inject_hyperparams was 0.1, and 0.025 when it was "
        "saved, is 0.05"
    )
    assert line in caplog.text


def test_restore_of_an_earlier_version_takes_the_number_and_reports_it(
    tmp_path, caplog, monkeypatch
):
    about = Trainer.about
    with monkeypatch.context() as before:
        before.setattr(
            Trainer,
            "about",
            lambda *given: {
                name: part for name, part in about(*given).items() if name != "optimizer"
            },
        )
        plateau(tmp_path, 0.025)
    state = spmd.Trainer(linear(), loss=LOSS, optimizer=injected(0.1)).restore(tmp_path)
    assert float(state.opt.hyperparams["learning_rate"]) == np.float32(0.1)
    line = (
        "of optax.inject_hyperparams was 0.025, is 0.1, and the checkpoint, of an earlier version, "
        "does not record the script"
    )
    assert line in caplog.text and "momentum" not in caplog.text


def test_numbers_of_other_optimizers(tmp_path, caplog):
    """A constant that schedule_free keeps is the script's; Prodigy's estimate, which training
    makes, stays.
    """

    def trainer(optimizer):
        return spmd.Trainer(linear(), loss=LOSS, optimizer=optimizer)

    for name, before, after in (
        (
            "free",
            optax.contrib.schedule_free_sgd(0.1, b1=0.9),
            optax.contrib.schedule_free_sgd(0.1, b1=0.5),
        ),
        (
            "prodigy",
            optax.contrib.prodigy(1.0, estim_lr0=1e-6),
            optax.contrib.prodigy(1.0, estim_lr0=1e-5),
        ),
    ):
        first = trainer(before)
        state = first.init()
        for _ in range(10):
            state, _ = first.step(state, {key: rows[:32] for key, rows in numbers().items()})
        first.save(state, tmp_path / name)
        now = trainer(after).restore(tmp_path / name)
        if name == "free":
            assert float(now.opt.b1) == 0.5 and "opt/b1 was 0.9, is 0.5" in caplog.text
        else:
            assert float(now.opt.estim_lr) == float(state.opt.estim_lr) != np.float32(1e-6)
            held = f"{float(state.opt.estim_lr):.7g}"
            line = (
                f"opt/estim_lr began at 1e-06 and now begins at 1e-05; it stays {held}, which "
                "training made of it"
            )
            assert line in caplog.text


def test_each_worker_takes_the_number(tmp_path):
    """Under local SGD, whose workers have an optimizer each."""
    fit(optimizer=injected(0.1), layout="diloco", steps=2, checkpoint=tmp_path)
    result = fit(
        optimizer=injected(0.01), layout="diloco", steps=3, checkpoint=tmp_path, resume=True
    )
    assert_close(result.history["learning_rate"], [0.01])
    assert result.state.opt.hyperparams["learning_rate"].shape == (8,)
    assert (
        said(tmp_path)[0]
        == "opt/hyperparams/learning_rate of optax.inject_hyperparams was 0.1, is 0.01"
    )


def test_resume_from_memory_takes_the_number(tmp_path, killed):  # noqa: F811
    start_and_kill(tmp_path, killed, optimizer=injected(0.1), step=4)
    result = fit(optimizer=injected(0.01), steps=6, checkpoint=checkpoint(tmp_path), resume=True)
    assert len(result.history["learning_rate"]) < 6
    assert_close(result.history["learning_rate"][-1], 0.01)
    assert said(tmp_path / "run") == [
        "opt/hyperparams/learning_rate of optax.inject_hyperparams was 0.1, is 0.01"
    ]


def test_number_that_the_initial_state_computes(tmp_path):
    def make(rate):
        inner = optax.inject_hyperparams(optax.sgd)(1.0)

        def init(params):
            return inner.init(params)._replace(
                hyperparams={"learning_rate": jnp.float32(rate) * jnp.float32(2)}
            )

        return optax.GradientTransformationExtraArgs(init, inner.update)

    trainers = [spmd.Trainer(linear(), loss=LOSS, optimizer=make(rate)) for rate in (0.25, 0.125)]
    assert [
        trainer.script_numbers.to_json()["opt/hyperparams/learning_rate"] for trainer in trainers
    ] == [0.5, 0.25]
    trainers[0].save(trainers[0].init(), tmp_path)
    assert float(trainers[1].restore(tmp_path).opt.hyperparams["learning_rate"]) == 0.25
