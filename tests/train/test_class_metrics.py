"""Metrics of classes: top-k, and precision, recall and F1, whose counts are added over batches and
workers before they are divided.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import LossError, OptionError
from tests.compare import assert_close

CLASSES = 5
METRICS = {
    "top": spmd.metrics.top_k(2),
    "precision": spmd.metrics.precision(3),
    "recall": spmd.metrics.recall(3),
    "f1": spmd.metrics.f1(3),
}


def data(rows):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.integers(0, CLASSES, rows).astype(np.int32),
    }


def expected(logits, targets):
    """The same by hand, over all rows at once."""
    found, true = logits.argmax(-1) == 3, targets == 3
    precision, recall = (found & true).sum() / found.sum(), (found & true).sum() / true.sum()
    top = (np.argsort(-logits, axis=-1)[:, :2] == targets[:, None]).any(-1).mean()
    return {
        "top": top,
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall),
    }


def model():
    start = np.random.default_rng(1).normal(size=(8, CLASSES)).astype(np.float32)
    return spmd.FunctionalModel(
        lambda key: {"w": jnp.asarray(start)}, lambda params, x: x @ params["w"]
    )


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [("data=1", "data_parallel"), ("data=8", "data_parallel"), ("data=8", "fsdp")],
)
def test_evaluation_is_that_of_all_rows_at_once(mesh, layout, caplog):
    devices = jax.devices()[: int(mesh.partition("=")[2])]
    trainer = spmd.Trainer(
        model(),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        mesh=spmd.make_mesh(mesh, devices=devices),
        layout=layout,
        metrics=METRICS,
    )
    state, rows = trainer.init(), data(203)  # the last batch is short, and padded
    found = trainer.evaluate(state, rows, batch_size=64)
    right = expected(rows["x"] @ np.asarray(jax.device_get(state.params)["w"]), rows["y"])
    assert_close({name: found[name] for name in right}, right)
    assert not caplog.text  # no warning that one is no mean over rows
    batch = data(64)
    right = expected(batch["x"] @ np.asarray(jax.device_get(state.params)["w"]), batch["y"])
    _, measured = trainer.step(state, batch)
    assert_close({name: measured[name] for name in right}, right)


@pytest.mark.system
def test_masked_positions_count_nothing():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(4, 6, CLASSES)), jnp.float32)
    targets, mask = (
        np.random.default_rng(3).integers(0, CLASSES, (4, 6)),
        np.arange(24).reshape(4, 6) % 3 > 0,
    )
    batch = {"x": logits, "y": jnp.asarray(targets), "mask": jnp.asarray(mask)}
    right = expected(np.asarray(logits)[mask], targets[mask])
    for name, metric in METRICS.items():
        total, count = metric.on(mask="mask")(lambda x: x, batch)
        assert_close(float(total / count), right[name])
        total = metric(lambda x: x, batch)  # one value, or two counts, of each row
        assert [value.shape for value in (total if isinstance(total, tuple) else [total])] in (
            [(4,)],
            [(4,), (4,)],
        )


def test_ratio_of_nothing_is_nan_and_is_named(caplog):
    data = {"x": np.ones((16, 8), np.float32), "y": np.zeros(16, np.int32)}
    trainer = spmd.Trainer(
        model(),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        mesh="data=8",
        metrics={"recall": spmd.metrics.recall(3)},
    )
    assert np.isnan(trainer.evaluate(trainer.init(), data, batch_size=16)["recall"])
    assert '"recall" counted nothing' in caplog.text


def test_one_logit_is_positive_above_zero():
    outputs, targets = jnp.array([2.0, 1.0, -1.0, -3.0]), jnp.array([1, 0, 1, 0])
    assert [value.tolist() for value in spmd.metrics.precision().function(outputs, targets)] == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
    ]
    assert [value.tolist() for value in spmd.metrics.recall(0).function(outputs, targets)] == [
        [0, 0, 0, 1],
        [0, 1, 0, 1],
    ]


@pytest.mark.system
def test_equal_logits_count_for_the_target_and_unknown_targets_never():
    assert spmd.metrics.top_k(1).function(jnp.zeros((3, 4)), jnp.array([0, 3, -1])).tolist() == [
        1.0,
        1.0,
        0.0,
    ]
    diverged = jnp.array([[jnp.nan, 1.0, 0.0], [jnp.nan, jnp.nan, jnp.nan]])
    assert spmd.metrics.top_k(1).function(diverged, jnp.array([1, 0])).tolist() == [0.0, 0.0]
    assert spmd.metrics.top_k(2).function(diverged, jnp.array([1, 0])).tolist() == [1.0, 0.0]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(OptionError, match="top_k: k"):
        spmd.metrics.top_k(0)
    with pytest.raises(
        LossError, match=r"top_k\(6\): the outputs are float32\[2, 5\]\.\n    fix: at most 5"
    ):
        spmd.metrics.top_k(6).function(jnp.zeros((2, 5)), jnp.zeros(2, int))
    with pytest.raises(LossError, match=r"f1\(positive=5\): the outputs are float32\[2, 5\]"):
        spmd.metrics.f1(5).function(jnp.zeros((2, 5)), jnp.zeros(2, int))
    with pytest.raises(
        LossError,
        match=r"f1\(positive=2\): the outputs are float32\[4\]\.\n    fix: a class from 0 to 1",
    ):
        spmd.metrics.f1(2).function(jnp.zeros(4), jnp.zeros(4, int))
    with pytest.raises(
        LossError,
        match=r"recall: the outputs are float32\[4, 1\], one class\.\n    fix: outputs\[\.\.\., "
        r"0\]",
    ):
        spmd.metrics.recall(0).function(jnp.zeros((4, 1)), jnp.zeros(4, int))
    with pytest.raises(OptionError, match="precision: positive"):
        spmd.metrics.precision([1])
    with pytest.raises(LossError, match='metric "pair" is a pair of'):
        trainer = spmd.Trainer(
            model(),
            loss=spmd.losses.cross_entropy,
            optimizer=optax.sgd(0.1),
            mesh="data=8",
            metrics={"pair": lambda m, b: (jnp.ones((3, 2)), jnp.ones(3))},
        )
        trainer.evaluate(trainer.init(), data(16), batch_size=16)
