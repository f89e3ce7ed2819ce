"""Data that resides on the devices trains like data that does not.

Two programs with the same arithmetic: XLA fuses the longer one differently, so that sums may be
rounded in another order. Over the steps here the parameters agree within 1e-6 relative (8 units in
the last place of float32). Runs that are split into the same calls agree bit for bit.
"""

import jax
import optax
import pytest
from flax import nnx
from linear import examples, fit, same

import spmd
from spmd.data.device_dataset import replicate_arrays
from spmd.errors import DataError, OptionError
from tests.compare import assert_close


class Normed(nnx.Module):
    """Batch statistics: padding cannot be left out, so a short batch runs at its own size."""

    def __init__(self, rngs):
        self.inner, self.norm, self.out = (
            nnx.Linear(16, 8, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Linear(8, 1, rngs=rngs),
        )

    def __call__(self, x):
        return self.out(nnx.tanh(self.norm(self.inner(x))))


def fit_normed(data, **options):
    options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1), **options}
    return spmd.fit(lambda: Normed(nnx.Rngs(0)), data, **options)


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
@pytest.mark.parametrize("count", [96, 88], ids=["whole batches", "short last batch"])
def test_resident_data_trains_like_arrays(count, steps_per_call):
    plain = fit(examples(count), batch_size=16, epochs=3)
    resident = fit(
        spmd.data.resident(examples(count), steps_per_call=steps_per_call), batch_size=16, epochs=3
    )
    assert int(resident.state.step) == int(plain.state.step) == 18
    assert_close(resident.state, plain.state)
    assert_close(resident.history["loss"], plain.history["loss"])
    assert not same(resident.state, fit(examples(count), batch_size=16, epochs=3, seed=1).state)


@pytest.mark.system
@pytest.mark.parametrize("count", [88, 96], ids=["short last batch", "whole batches"])
def test_resident_data_trains_like_arrays_without_padding(count):
    plain = fit_normed(examples(count), batch_size=16, epochs=2)
    resident = fit_normed(
        spmd.data.resident(examples(count), steps_per_call=3), batch_size=16, epochs=2
    )
    assert not resident.trainer.prepare(examples(16))[0].loss.pads
    assert len(resident.history) == 12
    assert_close(resident.state, plain.state)


def test_metrics_of_every_step_are_known():
    rows = []
    data = spmd.data.resident(examples(88), steps_per_call=3)
    result = fit(
        data,
        batch_size=16,
        epochs=2,
        callbacks=[lambda info: rows.append((info.step, info.epoch, info.rows))],
    )
    assert rows == [(step, (step - 1) // 6, 8 if step % 6 == 0 else 16) for step in range(1, 13)]
    assert len(result.history["loss"]) == 12


def test_many_steps_do_run_in_one_call(monkeypatch):
    from spmd.train.compiled_step import TrainingProgram

    calls, scan_steps = [], TrainingProgram.scan_steps
    monkeypatch.setattr(
        TrainingProgram,
        "scan_steps",
        lambda self, *arguments: calls.append(arguments[2].shape) or scan_steps(self, *arguments),
    )
    fit(spmd.data.resident(examples(96), steps_per_call=3), batch_size=16, epochs=2)
    assert calls == [(3, 16)] * 4


@pytest.mark.system
def test_calls_end_where_something_is_due(tmp_path):
    """Evaluations every 4 steps and at the end, checkpoints every 5, a callback every 7, and the
    end at 17 of 24: each at its own step.
    """
    seen = {"eval": [], "checkpoint": [], "step": []}

    class Look(spmd.callbacks.Callback):
        every = 7

        def on_step(self, info):
            seen["step"].append((info.step, int(info.state.step)))

        def on_eval(self, info):
            seen["eval"].append((info.step, int(info.state.step)))

        def on_checkpoint(self, info):
            seen["checkpoint"].append((info.step, int(info.state.step)))

    options = {"batch_size": 16, "steps": 17, "eval_data": examples(32, 1), "eval_every": 4}
    resident = fit(
        spmd.data.resident(examples(96), steps_per_call=3),
        callbacks=[Look()],
        checkpoint=spmd.Checkpoint(tmp_path, every=5),
        **options,
    )
    assert seen["step"] == [(7, 7), (14, 14)]
    assert seen["eval"] == [(step, step) for step in (4, 8, 12, 16, 17)]  # and at the end
    assert seen["checkpoint"] == [(step, step) for step in (5, 10, 15, 17)]
    plain = fit(examples(96), **options)
    assert_close(resident.state, plain.state)
    assert_close(resident.history["eval_loss"], plain.history["eval_loss"])


@pytest.mark.system
@pytest.mark.parametrize("stop", [6, 9], ids=["epoch's end", "mid-epoch"])
def test_resumed_run_equals_uninterrupted_run(tmp_path, stop):
    data = spmd.data.resident(examples(96), steps_per_call=3)
    uninterrupted = fit(data, batch_size=16, epochs=3)
    fit(data, batch_size=16, steps=stop, checkpoint=tmp_path)
    rest = fit(data, batch_size=16, epochs=3, checkpoint=tmp_path, resume=True)
    assert same(rest.state, uninterrupted.state)
    assert rest.history["loss"] == uninterrupted.history["loss"][stop:]


def test_every_device_holds_everything():
    arrays = examples(24)
    replicated = replicate_arrays(arrays, spmd.make_mesh("data=4,model=2"))
    assert same(replicated, arrays)
    assert all(
        leaf.sharding.is_fully_replicated and len(leaf.devices()) == 8
        for leaf in jax.tree.leaves(replicated)
    )


@pytest.mark.parametrize(
    "arrays, options, error, text",
    [
        (
            examples(8),
            {"steps_per_call": 0},
            OptionError,
            "steps_per_call=0.\n    fix: a whole number from 1.",
        ),
        (
            examples(8),
            {"steps_per_call": True},
            OptionError,
            "steps_per_call=True.\n    fix: a whole number from 1.",
        ),
        (
            [1, 2],
            {},
            DataError,
            "resident() takes arrays.\n    fix: a dict or tuple of arrays of shape [rows, ...].",
        ),
        (
            lambda: None,
            {},
            DataError,
            "resident() takes arrays.\n    fix: a dict or tuple of arrays of shape [rows, ...].",
        ),
    ],
)
def test_resident_rejects_bad_arguments(arrays, options, error, text):
    with pytest.raises(error) as raised:
        spmd.data.resident(arrays, **options)
    assert str(raised.value) == text
