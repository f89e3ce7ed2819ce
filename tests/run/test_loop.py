"""The loop itself: exact means, few steps in flight, one compilation, and the caller's things left
alone.
"""

import jax
import jax.monitoring
import numpy as np
import optax
import pytest
from flax import nnx
from small import FEATURES, Net, fit, fit_net, host, labelled, linear, numbers, same

import spmd
from spmd.data.sources import as_source
from spmd.errors import CheckpointError, OptionError
from spmd.run.history import History
from spmd.train.compiled_step import TrainingProgram
from spmd.train.metrics import Metrics
from tests.compare import assert_close

# means --------------------------------------------------------------------------------------------


def whole_numbers(count):
    """With parameters that stay 0, the loss of row i is i squared: every sum is a whole number,
    every mean exact.
    """
    return {
        "x": np.ones((count, FEATURES), np.float32),
        "y": np.arange(count, dtype=np.float32)[:, None],
    }


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    "count",
    [96, 88, 70],
    ids=["whole batches", "a short one that divides", "a short one that does not"],
)
@pytest.mark.parametrize("kept", [False, True], ids=["from the host", "resident"])
def test_a_short_last_batch_is_weighed_by_its_rows(count, kept):
    data = whole_numbers(count)
    batches = [
        np.arange(first, min(first + 32, count), dtype=np.float32) for first in range(0, count, 32)
    ]
    # one rounding, that of the division
    exact = [float((batch**2).sum() / np.float32(len(batch))) for batch in batches]
    source = spmd.data.resident(data, steps_per_call=3) if kept else data
    result = fit(source, optimizer=optax.sgd(0.0), shuffle=False, eval_data=data)
    assert result.history["loss"] == exact
    assert result.history["eval_loss"] == [
        pytest.approx(np.mean(np.arange(count) ** 2.0), rel=1e-15)
    ]
    if count != 96:
        # a mean of means is another number
        assert result.history["eval_loss"][0] != pytest.approx(np.mean(exact), rel=1e-3)


@pytest.mark.parametrize("count", [1, 7, 31, 33, 100])
def test_evaluation_of_any_size_is_exact(count):
    result = fit(optimizer=optax.sgd(0.0), eval_data=whole_numbers(count))
    exact = np.mean(np.arange(count) ** 2.0)
    assert result.history["eval_loss"] == [pytest.approx(exact, rel=1e-15)]
    assert result.evaluate(whole_numbers(count)) == {"loss": pytest.approx(exact, rel=1e-15)}
    assert result.evaluate(whole_numbers(count), batch_size=5) == {
        "loss": pytest.approx(exact, rel=1e-15)
    }


def test_a_loss_that_is_one_number_for_all_rows_is_weighed_too():
    def loss(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    data = whole_numbers(70)
    result = fit(data, loss=loss, optimizer=optax.sgd(0.0), shuffle=False, eval_data=data)
    assert_close(
        result.history["loss"],
        [np.mean(np.arange(a, b) ** 2.0) for a, b in ((0, 32), (32, 64), (64, 70))],
    )
    assert_close(result.history["eval_loss"], [np.mean(np.arange(70) ** 2.0)])


# in flight ----------------------------------------------------------------------------------------


def test_at_most_2_steps_are_in_flight_in_fit(monkeypatch):
    sent, late = [], []
    step = TrainingProgram.step
    monkeypatch.setattr(
        TrainingProgram,
        "step",
        lambda self, *given, **options: sent.append(1) or step(self, *given, **options),
    )
    fit(epochs=10, callbacks=[lambda info: late.append(len(sent) - info.step)])
    # when step k + 1 has been sent, k is waited for: no more than 2 are ever under way, and the
    # device is never idle
    assert late == [1] * 29 + [0]


def test_at_most_2_steps_are_in_flight_in_a_loop_of_ones_own(monkeypatch):
    waited = []
    wait = Metrics.wait
    monkeypatch.setattr(Metrics, "wait", lambda self: waited.append(1) or wait(self))
    trainer = spmd.Trainer(linear(), loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1))
    state, batch = trainer.init(), numbers(32)
    for sent in range(1, 11):
        state, _ = trainer.step(state, batch)
        assert sent - len(waited) <= 1


# compilation --------------------------------------------------------------------------------------


class Compilations:
    """Counts what XLA compiles while it is on."""

    def __init__(self):
        self.on, self.count = False, 0

    def __call__(self, event, duration, **rest):
        self.count += self.on and event == "/jax/core/compile/backend_compile_duration"

    def start(self, info):
        # known when step 3 has been sent: the first one is compiled
        self.on = self.on or info.step == 2

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self)
        return self

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self)


def program_of(result, rows=32):
    return result.trainer.prepare(labelled(rows))[0]


@pytest.mark.parametrize("layout", ["data_parallel", "fsdp"])
def test_nothing_is_compiled_after_the_first_step_not_even_for_a_short_batch(layout):
    with Compilations() as compilations:
        result = fit(numbers(104), epochs=3, layout=layout, callbacks=[compilations.start])
    assert len(result.history) == 12 and compilations.on
    assert program_of(result).functions.compilations() == 1
    assert compilations.count == 0


def test_saving_compiles_one_copy_and_no_slices(tmp_path):
    """One process writes all of a replicated array, which need not be divided on the devices that
    hold it.
    """
    jax.clear_caches()
    with Compilations() as compilations:
        fit(
            steps=4,
            layout="data_parallel",
            checkpoint=spmd.Checkpoint(tmp_path, every=4),
            callbacks=[compilations.start],
        )
    assert (tmp_path / "checkpoints" / "4").is_dir()
    assert compilations.count == 1


@pytest.mark.system
def test_the_counter_would_notice():
    """Batch statistics cannot leave padding out: the short batch is a second program, compiled
    once.
    """
    with Compilations() as compilations:
        result = fit_net(labelled(104), epochs=3, callbacks=[compilations.start])
    assert program_of(result).functions.compilations() == 2
    assert compilations.count == 1


def test_evaluation_is_one_program_also_with_a_short_batch():
    result = fit(epochs=2, eval_data=numbers(70, 1))
    assert program_of(result).functions.compilations() == 2  # the step and the evaluation
    result.evaluate(numbers(45, 2))
    assert program_of(result).functions.compilations() == 2


# the caller's things ------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("devices", [8, 1])
def test_the_users_own_model_lives_on_unchanged(devices):
    model, mesh = Net(nnx.Rngs(0)), spmd.make_mesh(devices=jax.devices()[:devices])
    before = (
        host(nnx.to_pure_dict(nnx.state(model, nnx.Param))),
        host(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))),
    )
    result = spmd.fit(
        model,
        labelled(),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(1e-2),
        batch_size=32,
        epochs=2,
        mesh=mesh,
    )
    after = (
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
    )
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(after))
    assert same(before, after)
    assert result.model is not model
    assert not same(result.state.params, before[0]) and not same(result.state.stats, before[1])
    assert model(labelled()["x"]).shape == (96, 3)


def test_the_users_own_parameters_live_on_unchanged():
    params = {"w": jax.numpy.ones((FEATURES, 1))}
    model = spmd.FunctionalModel(lambda key: params, lambda params, x: x @ params["w"])
    result = spmd.fit(
        model,
        numbers(),
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.1),
        batch_size=32,
    )
    assert not params["w"].is_deleted() and np.array_equal(params["w"], np.ones((FEATURES, 1)))
    assert not same(result.state.params, params)


def test_the_users_data_is_left_alone():
    data = numbers(70)
    before = host(data)
    fit(data, epochs=2)
    assert same(data, before)


# plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, steps", [({}, 3), ({"epochs": 4}, 12), ({"steps": 5}, 5), ({"steps": 3}, 3)]
)
def test_a_run_is_as_long_as_its_plan(plan, steps):
    result = fit(**plan)
    assert int(result.state.step) == len(result.history) == steps and result.stop_reason is None


@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"epochs": 1, "steps": 1},
            "epochs=1 and steps=1 both set the length of the run.\n    fix: give one of them.",
        ),
        ({"epochs": 0}, "epochs=0.\n    fix: a whole number from 1."),
        ({"steps": True}, "steps=True.\n    fix: a whole number from 1."),
        ({"eval_every": 0}, "eval_every=0.\n    fix: a whole number from 1."),
        ({"log_every": 0}, "log_every=0.\n    fix: a whole number from 1."),
        ({"prefetch": -1}, "prefetch=-1.\n    fix: a whole number from 0."),
        (
            {"resume": True},
            'resume=True without a checkpoint folder.\n    fix: checkpoint="runs/name".',
        ),
    ],
)
def test_invalid_run_options_are_refused(options, text):
    with pytest.raises(OptionError) as raised:
        fit(**options)
    assert str(raised.value) == text


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    fit(steps=4, checkpoint=tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as raised:
        fit(steps=5, checkpoint=tmp_path)
    assert (
        str(raised.value)
        == f"{tmp_path} already holds a run, up to step 4.\n    fix: resume=True to continue it, "
        "or another folder."
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_a_loop_of_ones_own_is_what_fit_does():
    trainer = spmd.Trainer(
        linear(), loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.05)
    )
    infos = list(trainer.steps(numbers(), batch_size=32, epochs=2))
    result = fit(epochs=2)
    assert same(infos[-1].state, result.state)
    assert_close([info.metrics["loss"] for info in infos], result.history["loss"])
    assert [info.step for info in infos] == [1, 2, 3, 4, 5, 6]


@pytest.mark.system
def test_batches_on_a_device_already_can_be_given():
    batches = [
        jax.tree.map(jax.numpy.asarray, {k: v[i : i + 32] for k, v in numbers(80).items()})
        for i in (0, 32, 64)
    ]
    for mesh in (None, spmd.make_mesh("data=1", devices=jax.devices()[:1])):
        for prefetch in (0, 2):
            result = fit(batches, batch_size=None, prefetch=prefetch, epochs=2, mesh=mesh)
            assert same(result.state, fit(numbers(80), shuffle=False, epochs=2, mesh=mesh).state)


def test_batches_on_another_device_are_moved():
    mesh_of_one = spmd.make_mesh("data=1", devices=jax.devices()[:1])
    batches = [jax.tree.map(lambda x: jax.device_put(x, jax.devices()[3]), numbers(32))]
    assert same(
        fit(batches, batch_size=None, mesh=mesh_of_one).state,
        fit(numbers(32), shuffle=False, mesh=mesh_of_one).state,
    )


def test_a_source_of_arrays_stays_in_the_main_thread():
    assert not as_source(numbers(), batch_size=32, shuffle=None, seed=0).threaded
    assert as_source([numbers(32)], batch_size=None, shuffle=None, seed=0).threaded


# history ------------------------------------------------------------------------------------------


def test_history_by_name_and_by_row():
    history = History(("loss", "accuracy"))
    history.add_steps(1, np.array([[[6.0, 3.0], [4.0, 4.0]]]))
    history.add_steps(2, np.array([[[1.0, 0.0], [2.0, 2.0]], [[5.0, 2.0], [2.0, 2.0]]]))
    history.add_evaluation(2, {"eval_loss": 0.25})
    assert (
        history["loss"] == [1.5, 0.5, 2.5]
        and history["accuracy"] == [0.75, 0.0, 1.0]
        and history["eval_loss"] == [0.25]
    )
    assert list(history.rows())[1:] == [
        {"step": 2, "loss": 0.5, "accuracy": 0.0},
        {"step": 3, "loss": 2.5, "accuracy": 1.0},
    ]
    assert history.names == ("loss", "accuracy", "eval_loss") and history.evaluations == [
        {"step": 2, "eval_loss": 0.25}
    ]
    assert len(history) == 3 and "eval_loss" in history and "eval_accuracy" not in history
    with pytest.raises(KeyError, match='no metric "los"; there are loss, accuracy, eval_loss'):
        history["los"]


@pytest.mark.system
def test_history_of_a_run():
    result = fit_net(labelled(80), epochs=2, eval_data=labelled(40, 1))
    assert result.history.names == ("loss", "accuracy", "wire_bytes", "eval_loss", "eval_accuracy")
    assert [row["step"] for row in result.history.rows()] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in result.history.evaluations] == [3, 6]
    assert result.evaluate(labelled(40, 1)) == {
        "loss": result.history["eval_loss"][-1],
        "accuracy": result.history["eval_accuracy"][-1],
    }
