"""Metrics from sums over all rows: equal on one device and on eight, over uneven batches, padding
and masks.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import CallbackError, LossError, OptionError
from spmd.metrics import FromSums, auc, perplexity
from spmd.run.pictures import png
from tests.compare import assert_close

DRAW = np.random.default_rng(0)
ROWS = DRAW.normal(size=(50, 4)).astype("float32")
LABELS = (ROWS[:, 0] + DRAW.normal(size=50) > 0.5).astype("int32")
LOGITS = spmd.FunctionalModel(
    lambda key: {"w": jnp.array([1.0, -0.3, 0.2, 0.5])}, lambda params, x: x @ params["w"]
)
CLASSES = spmd.FunctionalModel(
    lambda key: {"w": jnp.array([1.0, -0.3, 0.2, 0.5])},
    lambda params, x: jnp.stack([-x @ params["w"] / 2, x @ params["w"] / 2], -1),
)
MESHES = [
    pytest.param("data=1", "data_parallel", id="one device"),
    pytest.param("data=8", "data_parallel", id="eight"),
]


def binary(outputs, targets):
    return optax.losses.sigmoid_binary_cross_entropy(outputs, targets.astype("float32"))


def evaluated(
    model, data, metrics, *, loss=None, mesh="data=8", layout="data_parallel", batch_size=16
):
    loss = spmd.losses.cross_entropy if loss is None else loss
    devices = jax.devices()[: math.prod(spmd.MeshSpec.parse(mesh).sizes.values())]
    trainer = spmd.Trainer(
        model,
        loss=loss,
        optimizer=optax.sgd(0.1),
        metrics=metrics,
        mesh=spmd.make_mesh(mesh, devices=devices),
        layout=layout,
    )
    return trainer.evaluate(trainer.init(data), data, batch_size=batch_size)


def area(logits, labels):
    """Of all pairs of a row of class 1 and one of class 0, the share in which the first has the
    larger logit; equal ones count half.
    """
    steps = np.floor(np.asarray(jnp.arcsinh(np.asarray(logits, "float32"))) * np.float32(96))
    positive, negative = steps[labels == 1], steps[labels == 0]
    return np.mean([(p > n) + (p == n) / 2 for p in positive for n in negative])


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(("mesh", "layout"), MESHES)
@pytest.mark.parametrize("batch_size", [50, 16])
@pytest.mark.parametrize("model", [LOGITS, CLASSES], ids=["one logit", "two classes"])
def test_area_under_the_curve(model, batch_size, mesh, layout):
    data = {"x": ROWS, "label": LABELS}
    loss = (
        spmd.losses.cross_entropy if model is CLASSES else spmd.metrics.PerExample(binary, "binary")
    )
    found = evaluated(
        model, data, {"auc": auc}, loss=loss, mesh=mesh, layout=layout, batch_size=batch_size
    )
    assert found["auc"] == pytest.approx(
        area(ROWS @ np.array([1.0, -0.3, 0.2, 0.5], "float32"), LABELS), abs=1e-12
    )
    assert 0.6 < found["auc"] < 0.95


@pytest.mark.parametrize("scale", [10, 1000])
def test_large_logits_are_ranked(scale):
    found = evaluated(CLASSES, {"x": scale * ROWS, "label": LABELS}, {"auc": auc})["auc"]
    assert found == pytest.approx(
        area(scale * ROWS @ np.array([1.0, -0.3, 0.2, 0.5], "float32"), LABELS), abs=1e-12
    )
    separable = np.zeros((50, 4), "float32")
    separable[:, 0] = scale * (2.0 + 0.1 * LABELS)
    assert evaluated(CLASSES, {"x": separable, "label": LABELS}, {"auc": auc})["auc"] == 1.0


@pytest.mark.parametrize("target", [2, -1])
def test_target_that_is_no_class_shows(target, caplog):
    labels = LABELS.copy()
    labels[20] = target
    loss = spmd.metrics.PerExample(binary, "binary")
    found = evaluated(LOGITS, {"x": ROWS, "label": labels}, {"auc": auc}, loss=loss)
    assert (
        math.isnan(found["auc"]) and '"auc" is nan, first in batch 2, rows 16 to 31' in caplog.text
    )
    assert not math.isnan(
        evaluated(LOGITS, {"x": ROWS, "label": labels}, {"auc": auc.on(ignore=target)}, loss=loss)[
            "auc"
        ]
    )


TOKENS = DRAW.integers(0, 7, (19, 5)).astype("int32")
TEXT = {
    "tokens": TOKENS,
    "targets": (TOKENS + 1) % 7,
    "mask": DRAW.integers(0, 2, (19, 5)).astype("int32"),
}
BIGRAM = spmd.FunctionalModel(
    lambda key: {"w": jax.random.normal(key, (7, 7))}, lambda params, tokens: params["w"][tokens]
)


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(("mesh", "layout"), MESHES)
@pytest.mark.parametrize(
    "options", [{}, {"mask": "mask"}, {"ignore": 3}], ids=["all", "mask", "ignore"]
)
def test_perplexity_is_exp_of_the_mean_loss(options, mesh, layout):
    loss = spmd.losses.cross_entropy.on(**options) if options else spmd.losses.cross_entropy
    metric = perplexity.on(**options) if options else perplexity
    found = evaluated(
        BIGRAM,
        TEXT,
        {"perplexity": metric, "accuracy": spmd.metrics.accuracy},
        loss=loss,
        mesh=mesh,
        layout=layout,
        batch_size=8,
    )
    assert_close(found["perplexity"], math.exp(found["loss"]))
    means = [
        evaluated(BIGRAM, {key: x[rows] for key, x in TEXT.items()}, {"p": metric}, loss=loss)["p"]
        for rows in (slice(0, 8), slice(8, 19))
    ]
    # what a mean over batches would be
    assert abs(np.mean(means) - found["perplexity"]) > 1e-4 * found["perplexity"]


def test_in_a_run_it_is_measured_in_evaluations_only():
    data = {"x": ROWS, "label": LABELS}
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adam(0.1),
        "metrics": {"auc": auc, "accuracy": spmd.metrics.accuracy},
    }
    result = spmd.fit(CLASSES, data, batch_size=16, epochs=2, eval_data=data, **options)
    assert len(result.history["eval_auc"]) == 2 and 0 < result.history["eval_auc"][0] <= 1
    assert "accuracy" in result.history and "auc" not in result.history


@pytest.mark.system
def test_a_sweep_has_it_for_each_trial():
    data = {"x": ROWS[:48], "label": LABELS[:48]}
    found = spmd.sweep(
        lambda: CLASSES,
        data,
        space={"learning_rate": [0.1, 0.01]},
        search="grid",
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd,
        batch_size=16,
        steps=3,
        eval_data=data,
        metrics={"auc": auc},
        score="eval_auc",
        mode="max",
        progress=False,
    )
    for trial in found.trials:
        alone = spmd.fit(
            CLASSES,
            data,
            loss=spmd.losses.cross_entropy,
            optimizer=optax.sgd(trial.values["learning_rate"]),
            batch_size=16,
            steps=3,
            eval_data=data,
            metrics={"auc": auc},
            seed=trial.trial.seed,
        )
        assert trial.metrics["eval_auc"] == pytest.approx(alone.history["eval_auc"][-1], abs=1e-12)


def test_one_class_has_no_area(caplog):
    found = evaluated(CLASSES, {"x": ROWS, "label": np.ones(50, "int32")}, {"auc": auc})
    assert math.isnan(found["auc"]) and '"auc": all rows are of one class.' in caplog.text


def test_sums_without_a_number_are_reported(caplog):
    metric = FromSums(columns, "m", finish=lambda sums: math.nan)
    assert (
        math.isnan(evaluated(CLASSES, DATA, {"mine": metric})["mine"])
        and '"mine": finish gives nan for its sums.' in caplog.text
    )


def test_a_logit_that_is_not_finite_shows(caplog):
    rows = ROWS.copy()
    rows[20] = np.nan
    found = evaluated(CLASSES, {"x": rows, "label": LABELS}, {"auc": auc})
    assert (
        math.isnan(found["auc"]) and '"auc" is nan, first in batch 2, rows 16 to 31' in caplog.text
    )


def test_a_metric_of_a_user():
    data = {"x": ROWS, "label": LABELS}

    def confusion(outputs, targets):
        return jax.nn.one_hot(2 * targets + outputs.argmax(-1), 4)

    mcc = FromSums(
        confusion,
        "mcc",
        finish=lambda c: (
            (c[3] * c[0] - c[1] * c[2])
            / np.sqrt((c[3] + c[1]) * (c[3] + c[2]) * (c[0] + c[1]) * (c[0] + c[2]))
        ),
    )
    found = evaluated(CLASSES, data, {"mcc": mcc})["mcc"]
    guesses = (ROWS @ np.array([1.0, -0.3, 0.2, 0.5], "float32") > 0).astype(int)
    assert_close(found, np.corrcoef(guesses, LABELS)[0, 1])


DATA = {"x": ROWS, "label": LABELS}


def with_auc(model, batch):
    return spmd.losses.cross_entropy(model, batch), {"area": auc(model, batch)}


def columns(outputs, targets):
    return outputs


BAD = {
    "three classes": (
        lambda: evaluated(BIGRAM, {"tokens": TOKENS, "targets": TEXT["targets"]}, {"auc": auc}),
        "auc: the outputs are",
    ),
    "one number": (
        lambda: evaluated(
            CLASSES,
            {"x": ROWS, "label": LABELS},
            {"m": FromSums(lambda o, t: o[..., 0], "m", finish=sum)},
        ),
        r"m: float32\[\d+\]\.\n    fix: \[rows, \.\.\., k\], k numbers for each row\.",
    ),
    "other rows": (
        lambda: evaluated(CLASSES, DATA, {"m": FromSums(lambda o, t: o[:1], "m", finish=sum)}),
        r"m: float32\[1, 2\] for 16 rows",
    ),
    "finish raises": (
        lambda: evaluated(
            CLASSES, DATA, {"mine": FromSums(columns, "m", finish=lambda sums: sums[2])}
        ),
        r'metric "mine": finish, given the sums float64\[2\], raised IndexError',
    ),
    "finish gives an array": (
        lambda: evaluated(
            CLASSES, DATA, {"mine": FromSums(columns, "m", finish=lambda sums: sums)}
        ),
        r'metric "mine": finish, .* returned ndarray',
    ),
    "finish gives a text": (
        lambda: evaluated(
            CLASSES, DATA, {"mine": FromSums(columns, "m", finish=lambda sums: "1.0")}
        ),
        r'metric "mine": finish, .* returned .*1\.0',
    ),
    "inside of a loss": (
        lambda: evaluated(CLASSES, DATA, {}, loss=with_auc),
        'metric "area" is called inside of a loss',
    ),
    "inside of a metric": (
        lambda: evaluated(CLASSES, DATA, {"area": lambda model, batch: auc(model, batch)}),
        'metric "area" is called inside of a loss or of another metric',
    ),
    "as a loss": (
        lambda: evaluated(CLASSES, DATA, {}, loss=auc),
        r"loss=spmd\.metrics\.auc is a function of sums",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_shapes_that_do_not_fit(call, message):
    with pytest.raises(LossError, match=message):
        call()


@pytest.mark.parametrize(
    "make",
    [
        lambda: FromSums(columns, "m"),
        lambda: FromSums(columns, "m", sum),
        lambda: FromSums(columns, "m", finish=3),
    ],
)
def test_metric_without_finish_is_refused(make):
    with pytest.raises(OptionError, match="finish") as refused:
        make()
    assert refused.value.fix == "FromSums(function, name, finish=...)."


def test_draw_that_is_no_function_is_refused():
    with pytest.raises(OptionError, match="FromSums 'm': draw=3 is no function"):
        FromSums(columns, "m", finish=sum, draw=3)


class Unsaved:
    """What matplotlib would raise for a text that it cannot draw."""

    def savefig(self, *args, **options):
        raise ValueError("no such symbol")


BAD_DRAWINGS = {
    "raises": (
        lambda sums: 1 // 0,
        LossError,
        r'metric "m": draw, given the sums float64\[2\], raised ZeroDivisionError.*\n.*line \d+',
    ),
    "gives floats": (
        lambda sums: np.zeros((2, 2)),
        OptionError,
        r'metric "m": draw: the picture is float64\[2, 2\]',
    ),
    "gives a figure that fails": (
        lambda sums: Unsaved(),
        CallbackError,
        'step 1: metric "m": draw raises ValueError: no such symbol',
    ),
}


def drawn(draw, **options):
    return spmd.fit(
        CLASSES,
        DATA,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.0),
        metrics={"m": FromSums(columns, "m", finish=lambda sums: float(sums[0]), draw=draw)},
        batch_size=16,
        steps=1,
        eval_data=DATA,
        **options,
    )


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("draw", "kind", "message"), BAD_DRAWINGS.values(), ids=BAD_DRAWINGS.keys()
)
def test_failing_picture_names_the_metric_after_the_results_are_recorded(
    draw, kind, message, tmp_path
):
    with pytest.raises(kind, match=message):
        drawn(draw, checkpoint=tmp_path)
    assert '"eval_m"' in (tmp_path / "metrics.jsonl").read_text()


def test_run_without_a_folder_draws_nothing():
    calls = []
    drawn(calls.append)
    assert not calls


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(("mesh", "layout"), MESHES)
def test_confusion_counts_every_row_once(mesh, layout, tmp_path):
    x = DRAW.normal(size=(50, 4)).astype("float32")
    # no row of class 3 but where it is largest
    y = np.where(DRAW.random(50) < 0.7, x.argmax(1), DRAW.integers(0, 3, 50)).astype("int32")
    model = spmd.FunctionalModel(lambda key: {"w": jnp.eye(4)}, lambda params, x: x @ params["w"])
    matrix = np.zeros((4, 4))
    np.add.at(matrix, (y, x.argmax(1)), 1)
    devices = jax.devices()[: math.prod(spmd.MeshSpec.parse(mesh).sizes.values())]
    spmd.fit(
        model,
        {"x": x, "y": y},
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.0),
        metrics={"confusion": spmd.metrics.confusion(4)},
        mesh=spmd.make_mesh(mesh, devices=devices),
        layout=layout,
        batch_size=16,
        eval_data={"x": x, "y": y},
        checkpoint=tmp_path,
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (found,) = [record["eval_confusion"] for record in records if "eval_confusion" in record]
    assert found == pytest.approx(np.mean(matrix.diagonal() / matrix.sum(1)), abs=1e-12)
    (path,) = [record["pictures"]["eval_confusion"] for record in records if "pictures" in record]
    assert (tmp_path / path).read_bytes() == png(spmd.metrics.confusion(4).draw(matrix.ravel()))


def test_confusion_is_drawn_by_the_share_of_a_row():
    picture = spmd.metrics.confusion(2).draw(np.array([3.0, 1.0, 0.0, 0.0]))
    assert picture.shape == (480, 480, 3) and picture.dtype == np.uint8
    assert picture[0, 0].tolist() == [87, 153, 199] and picture[0, 479].tolist() == [199, 221, 236]
    assert (picture[240:] == 255).all()  # a class without rows


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32"])
def test_cells_of_a_confusion_do_not_overflow(dtype):
    metric, targets = spmd.metrics.confusion(20), np.arange(20, dtype=dtype)
    cells = np.asarray(metric.function(jnp.eye(20), jnp.asarray(targets))).sum(0).reshape(20, 20)
    np.testing.assert_array_equal(cells, np.eye(20))


def test_confusion_of_what_is_no_class_is_nan(caplog):
    data = {"x": ROWS, "label": LABELS.copy()}
    data["label"][20] = 7
    loss = spmd.metrics.PerExample(lambda outputs, targets: (outputs[:, 0] - 1) ** 2, "square")
    found = evaluated(CLASSES, data, {"confusion": spmd.metrics.confusion(2)}, loss=loss)
    assert (
        math.isnan(found["confusion"])
        and '"confusion" is nan, first in batch 2, rows 16 to 31' in caplog.text
    )
    with pytest.raises(
        LossError, match=r"confusion: the outputs are float32\[50, 2\] for targets int32\[50\]"
    ):
        evaluated(
            CLASSES,
            data,
            {"confusion": spmd.metrics.confusion(3)},
            loss=loss,
            batch_size=50,
            mesh="data=1",
        )
    with pytest.raises(OptionError, match="confusion: classes=1"):
        spmd.metrics.confusion(1)
