"""Evaluation and prediction on data that differs from the training data: compiled separately, or
rejected with the differences.
"""

import logging

import numpy as np
import optax
import pytest
import written
from flax import nnx

import spmd
from spmd.errors import DataError, LossError, OptionError
from tests.compare import assert_close

WIDTH, ROWS = 4, 16


def rows(count=ROWS, width=WIDTH, **more):
    x = np.random.default_rng(count).normal(size=(count, width)).astype(np.float32)
    return {"x": x, "y": x[:, :1], **more}


def loss(model, batch):
    """Measures `far` where there is a weight."""
    errors = ((model(batch["x"]) - batch["y"]) ** 2)[:, 0]
    return errors, {"far": errors * batch["weight"]} if "weight" in batch else {}


def options(**more):
    return {"loss": loss, "optimizer": optax.sgd(0.1), "batch_size": 8, **more}


def net():
    return nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0))


def trained(data=None, **more):
    return spmd.fit(net, rows() if data is None else data, **options(**more))


def never(*arguments, **options):
    raise AssertionError("a step was made")


WIDER = r"""the data to evaluate does not fit: the loss fails on a batch of {x: float32\[8, 5\], y: float32\[8, 1\]}: .*
1 problem:

  x   float32\[8, 5\]
      is float32\[8, 4\] in training batches\.
    fix: batches like those for training, but for the number of rows\."""  # noqa: E501
OTHER_KEYS = r"""the data to evaluate does not fit: the loss reads the key 'x', and a batch has {image: .*, y: .*}\.
3 problems:

  image   float32\[8, 4\]
      is not in training batches\.

  y   int32\[8, 1\]
      is float32\[8, 1\] in training batches\.

  x
      is missing; training batches have float32\[8, 4\]\."""  # noqa: E501
BAD = {
    "another width": (rows(width=5), WIDER),
    "other keys": ({"image": rows()["x"], "y": np.zeros((ROWS, 1), np.int32)}, OTHER_KEYS),
}


@pytest.mark.parametrize("data, text", BAD.values(), ids=BAD.keys())
def test_arrays_to_evaluate_that_do_not_fit_are_refused_before_training(data, text, monkeypatch):
    monkeypatch.setattr("spmd.train.compiled_step.TrainingProgram.step", never)
    with pytest.raises(DataError, match=text):
        trained(eval_data=data)


def test_records_to_evaluate_that_do_not_fit_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("spmd.train.compiled_step.TrainingProgram.step", never)
    names = [f"x{at}" for at in range(5)]
    path = written.csv(tmp_path / "a.csv", [",".join(["1.5"] * 6)] * 9, ",".join([*names, "y"]))
    data = spmd.data.csv(path, columns={"x": names, "y": ["y"]}, batch_size=8)
    with pytest.raises(DataError, match=WIDER):
        trained(eval_data=data)


def test_batches_to_evaluate_that_do_not_fit_are_refused_at_the_first_evaluation():
    seen = []
    with pytest.raises(DataError, match=WIDER):
        trained(
            eval_data=[rows(8, 5)], callbacks=[lambda info: seen.append(info.step)], eval_every=1
        )
    assert len(seen) <= 1


def test_evaluation_of_other_keys_has_its_own_metrics(caplog):
    result = trained(rows(weight=np.full(ROWS, 2, np.float32)))
    with caplog.at_level(logging.WARNING, "spmd"):
        few = result.evaluate(rows(8), batch_size=8)
    assert (
        list(few) == ["loss"]
        and "evaluation does not measure far: the loss returns it for batches of weight, x, y"
        in caplog.text
    )
    many = result.evaluate(rows(8, weight=np.full(8, 3, np.float32)), batch_size=8)
    assert many["loss"] == few["loss"]
    assert_close(many["far"], 3 * few["loss"])


@pytest.mark.system
def test_evaluation_of_another_dtype_or_length_has_its_own_program():
    def error_of_mean(model, batch):
        return (
            model(batch["x"].astype(np.float32).mean(axis=1)[:, None])[:, 0] - batch["y"][:, 0]
        ) ** 2

    result = spmd.fit(
        lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0)), rows(), **options(loss=error_of_mean)
    )
    doubled = {**rows(), "x": np.repeat(rows()["x"], 2, axis=1)}
    integers = {"x": np.round(rows()["x"]).astype(np.int32), "y": rows()["y"]}
    rounded = {"x": integers["x"].astype(np.float32), "y": integers["y"]}
    assert_close(
        result.evaluate(doubled, batch_size=8)["loss"],
        result.evaluate(rows(), batch_size=8)["loss"],
    )
    assert (
        result.evaluate(integers, batch_size=8)
        == result.evaluate(rounded, batch_size=8)
        != result.evaluate(rows(), batch_size=8)
    )


def test_checkpoint_rejects_a_metric_that_evaluation_lacks(tmp_path):
    with pytest.raises(OptionError, match='Checkpoint: there is no metric "eval_far"'):
        trained(
            rows(weight=np.ones(ROWS, np.float32)),
            eval_data=rows(),
            checkpoint=spmd.Checkpoint(tmp_path, best="eval_far"),
        )


def test_inputs_to_predict_that_do_not_fit_are_refused():
    result = trained()
    text = (
        r"the model fails on float32\[8, 5\]: TypeError: .*\n    fix: what the loss calls the "
        r"model with; "
        r"the batches that it was trained on hold x float32\[8, 4\], y float32\[8, 1\]\."
    )
    batch = (
        r"its argument as it is, and the model fails on x float32\[8, 4\], y float32\[8, 1\]: .*\n "
        r"   fix: predict\(batch\['x'\]\)"
    )
    for inputs, expected in [(rows(width=5)["x"], text), (rows(), batch)]:
        with pytest.raises(DataError, match=expected):
            result.predict(inputs)
    assert result.predict(rows(20)["x"]).shape == (20, 1)


def test_evaluation_before_any_training_says_what_fails():
    trainer = spmd.Trainer(net, loss=loss, optimizer=optax.sgd(0.1))
    with pytest.raises(LossError, match=r"the loss fails on a batch of {x: float32\[8, 5\]"):
        trainer.evaluate(trainer.init(), rows(width=5), batch_size=8)
