"""Callbacks: which events they get, when, and what they may do."""

import inspect
import itertools
import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import Recorder, fit, fit_net, host, labelled, numbers, same

import spmd
from spmd import callbacks
from spmd.base.ranking import best
from spmd.errors import CallbackError, DivergedError, OptionError

BUILT_IN = {
    "Callback": lambda: callbacks.Callback(),
    "Each": lambda: callbacks.Each(lambda info: None, every=2),
    "TerminateOnNaN": lambda: callbacks.TerminateOnNaN(("loss",)),
    "EarlyStopping": lambda: callbacks.EarlyStopping("eval_loss", patience=100),
    "CheckReplicas": lambda: callbacks.CheckReplicas(every=2),
    "StopAt": lambda: callbacks.StopAt(step=1000, seconds=1000),
}
# continues prompts, which only a model of text can: tests/inference/test_samples.py
NEEDS_TEXT = {"Samples"}


# the contract -------------------------------------------------------------------------------------


def test_every_built_in_callback_joins_the_contract():
    names = {
        name
        for name, kind in vars(callbacks).items()
        if inspect.isclass(kind) and issubclass(kind, callbacks.Callback)
    }
    assert names == set(BUILT_IN) | NEEDS_TEXT


@pytest.fixture(scope="module")
def undisturbed():
    options = {"epochs": 2, "eval_data": numbers(40, 1)}
    return options, fit(**options)


@pytest.mark.sampled(quick=8)
@pytest.mark.parametrize("make", [*BUILT_IN.values(), Recorder], ids=[*BUILT_IN, "a user's"])
def test_a_callback_that_only_looks_changes_nothing(make, undisturbed, tmp_path):
    options, plain = undisturbed
    watched = fit(**options, callbacks=[make()], checkpoint=tmp_path)
    assert same(watched.state, plain.state)
    assert (
        watched.history["loss"] == plain.history["loss"]
        and watched.history["eval_loss"] == plain.history["eval_loss"]
    )
    assert watched.stop_reason is None


def test_the_order_of_events(tmp_path):
    """3 steps per epoch, an evaluation every 2, a checkpoint every 3. A step's metrics are known
    one step later, or before whatever looks at the state: then nothing about an earlier step is
    still to come.
    """
    recorder = Recorder()
    fit(
        epochs=2,
        callbacks=[recorder],
        eval_data=numbers(40, 1),
        eval_every=2,
        checkpoint=spmd.Checkpoint(tmp_path, every=3),
    )
    assert recorder.events == [
        ("start", 0),
        *[("step", 1), ("step", 2), ("eval", 2)],
        *[("step", 3), ("checkpoint", 3)],
        *[("step", 4), ("eval", 4)],
        *[("step", 5), ("step", 6), ("eval", 6), ("checkpoint", 6)],
        ("stop", 6),
    ]


def test_evaluation_and_checkpoint_at_the_end_of_each_epoch(tmp_path):
    recorder = Recorder()
    fit(epochs=2, callbacks=[recorder], eval_data=numbers(40, 1), checkpoint=tmp_path)
    events = [event for event in recorder.events if event[0] != "step"]
    assert events == [
        ("start", 0),
        ("eval", 3),
        ("checkpoint", 3),
        ("eval", 6),
        ("checkpoint", 6),
        ("stop", 6),
    ]
    assert [info.epoch for info in recorder.infos if "eval_loss" in info.metrics] == [0, 1]
    assert [
        (info.step, info.epoch)
        for (event, _), info in zip(recorder.events, recorder.infos, strict=True)
        if event == "step"
    ] == [(step, (step - 1) // 3) for step in range(1, 7)]


@pytest.mark.system
def test_every_and_metrics():
    recorder = Recorder(every=4)
    result = fit_net(
        labelled(80),
        epochs=3,
        callbacks=[recorder],
        metrics={"accuracy": spmd.metrics.accuracy},
        eval_data=labelled(40, 1),
    )
    assert recorder.steps("step") == [4, 8]
    for (event, step), info in zip(recorder.events, recorder.infos, strict=True):
        if event == "step":
            assert info.metrics == {
                name: result.history[name][step - 1] for name in ("loss", "accuracy", "wire_bytes")
            }
            assert info.rows == (16 if step % 3 == 0 else 32)
        if event == "eval":
            assert info.metrics == {
                name: result.history[name][step // 3 - 1] for name in ("eval_loss", "eval_accuracy")
            }


def test_callbacks_are_called_in_the_order_they_were_given():
    order = []
    fit(
        steps=2,
        callbacks=[
            lambda info: order.append(("a", info.step)),
            lambda info: order.append(("b", info.step)),
        ],
    )
    assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


# the state ----------------------------------------------------------------------------------------


def test_the_state_of_a_step_that_has_passed_is_refused():
    with pytest.raises(OptionError) as raised:
        fit(epochs=1, callbacks=[lambda info: info.state])
    assert str(raised.value) == (
        "info.state at step 1: metrics are read one step late, so this state was already donated "
        "to the next step.\n"
        "    fix: give the callback  every = 10  (or more), or  exact = True, which makes the "
        "device wait."
    )


class Keep(callbacks.Callback):
    def __init__(self, every, exact=None):
        self.every, self.exact, self.kept = every, exact, {}

    def on_step(self, info):
        self.kept[info.step] = host(info.state)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("every, exact", [(4, None), (1, True), (3, True)])
def test_the_state_belongs_to_the_step(every, exact):
    keep = Keep(every, exact)
    result = fit(epochs=3, callbacks=[keep])
    assert list(keep.kept) == list(range(every, 10, every))
    assert all(state.step == step for step, state in keep.kept.items())
    step = max(keep.kept)
    assert same(keep.kept[step], fit(steps=step).state)
    assert same(result.state, fit(epochs=3).state)  # having looked changes nothing
    assert len({state.params["w"].tobytes() for state in keep.kept.values()}) == len(keep.kept)


def test_without_exact_a_rare_callback_gets_no_state_either():
    class Loose(Keep):
        def on_step(self, info):
            if info.step == 2:
                super().on_step(info)

    with pytest.raises(OptionError, match=r"info\.state at step 2"):
        fit(epochs=1, callbacks=[Loose(2, exact=False)])


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("event", ["on_start", "on_eval", "on_checkpoint", "on_stop"])
def test_elsewhere_the_state_is_there(event, tmp_path):
    seen = []
    callback = callbacks.Callback()
    setattr(callback, event, lambda info: seen.append((info.step, int(info.state.step))))
    fit(epochs=2, callbacks=[callback], eval_data=numbers(40, 1), checkpoint=tmp_path)
    assert seen and all(step == count for step, count in seen)


# metrics ------------------------------------------------------------------------------------------


def test_what_on_eval_adds_to_metrics_is_recorded(tmp_path):
    def add(info):
        info.metrics["eval_bleu"] = np.float32(0.5 * info.step)

    callback, seen = callbacks.Callback(), callbacks.Callback()
    callback.on_eval = add
    scores = []
    seen.on_eval = lambda info: scores.append(info.metrics["eval_bleu"])
    result = fit(
        epochs=2,
        eval_data=numbers(40, 1),
        callbacks=[callback, seen],
        checkpoint=spmd.Checkpoint(tmp_path, best="eval_loss"),
    )
    assert result.history["eval_bleu"] == scores == [1.5, 3.0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval_bleu"] for line in lines if "eval_loss" in line] == [1.5, 3.0]
    assert (
        json.loads((tmp_path / "checkpoints" / "6" / "metrics" / "metrics").read_text())[
            "eval_bleu"
        ]
        == 3.0
    )


def test_what_on_eval_adds_that_is_no_number_is_refused():
    callback = callbacks.Callback()
    callback.on_eval = lambda info: info.metrics.update(note="good")
    with pytest.raises(
        OptionError, match=r"step 3: on_eval has put 'good' into info\.metrics\['note'\]"
    ):
        fit(epochs=1, eval_data=numbers(40, 1), callbacks=[callback])


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_stop"])
@pytest.mark.parametrize(
    "change",
    [lambda metrics: metrics.update(mine=1.0), lambda metrics: metrics.setdefault("mine", 1.0)],
)
def test_metrics_that_would_show_nowhere_are_refused(event, change):
    kind = type("Adds", (callbacks.Callback,), {event: lambda self, info: change(info.metrics)})
    with pytest.raises(
        spmd.SpmdError, match=r"info\.metrics cannot be changed here: the change would be lost"
    ):
        fit(steps=2, callbacks=[kind()])


# stopping -----------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("step", [1, 3, 5])
def test_stop_at_a_step_is_exact(step):
    result = fit(epochs=3, callbacks=[callbacks.StopAt(step=step)])
    assert int(result.state.step) == len(result.history) == step
    assert result.stop_reason == f"step {step} reached"
    assert same(result.state, fit(steps=step).state)


def test_stop_at_a_step_is_exact_with_many_steps_per_call():
    result = fit(
        spmd.data.resident(numbers(), steps_per_call=3),
        epochs=3,
        callbacks=[callbacks.StopAt(step=5)],
    )
    assert int(result.state.step) == 5


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "event, at, stop", [("on_eval", 8, 9), ("on_checkpoint", 8, 10), ("on_step", 8, 11)]
)
def test_stop_at_asked_for_between_calls_of_many_steps_is_exact(event, at, stop, tmp_path):
    """The next call of 8 steps was decided before the evaluation that wants the run to end."""
    callback = callbacks.Callback()
    callback.every = at
    setattr(callback, event, lambda info: info.stop_at(stop) if info.step == at else None)
    if event == "on_step":
        callback = callbacks.Each(
            lambda info: info.stop_at(stop) if info.step == at else None, every=at
        )
    data, checkpoint = (
        spmd.data.resident(numbers(32 * 24), steps_per_call=8),
        spmd.Checkpoint(tmp_path, every=8),
    )
    result = fit(
        data,
        epochs=3,
        eval_data=numbers(40, 1),
        eval_every=8,
        checkpoint=checkpoint,
        callbacks=[callback],
    )
    assert int(result.state.step) == len(result.history) == stop


def test_stop_at_a_step_that_has_passed_trains_no_further(tmp_path):
    fit(steps=4, checkpoint=tmp_path)
    result = fit(epochs=3, checkpoint=tmp_path, resume=True, callbacks=[callbacks.StopAt(step=2)])
    assert int(result.state.step) == 4 and len(result.history) == 0


def test_stop_after_seconds():
    result = fit(epochs=1000, callbacks=[callbacks.StopAt(seconds=0.0)])
    assert result.stop_reason == "0 seconds have passed"
    assert 1 <= int(result.state.step) <= 2


def test_a_callback_stops_the_run_and_the_first_reason_counts():
    result = fit(
        epochs=1000,
        callbacks=[lambda info: info.stop("enough"), lambda info: info.stop("too late")],
    )
    assert result.stop_reason == "enough" and int(result.state.step) == 2


class Control:
    """Takes the place of the loop."""

    reason = None

    def stop(self, reason):
        self.reason = self.reason or reason


def look(stopping, metric, values, event="on_eval"):
    """How many values an `EarlyStopping` saw before it stopped, and its reason."""
    control = Control()
    stopping.on_start(callbacks.Info(control, 0, 0, {}, 0, exact=True))
    for count, value in enumerate(values, 1):
        getattr(stopping, event)(callbacks.Info(control, count, 0, {metric: value}, 1, exact=True))
        if control.reason:
            return count, control.reason
    return None, None


@pytest.mark.parametrize(
    "options, values, count",
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.0, 1.0, 1.5], 6),
        ({"patience": 1}, [3.0, 2.0, 2.0], 3),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.8, 2.4, 2.2, 2.1], 5),
        ({"patience": 2, "mode": "max"}, [0.1, 0.5, 0.4, 0.3], 4),
        ({"patience": 2, "mode": "max"}, [-3.0, -2.0, -1.0, -1.5, -0.5], None),
        ({"patience": 2}, [3.0, math.nan, math.nan], 3),
        ({"patience": 3, "mode": "max"}, [0.5, math.inf, 0.6, 0.6, 0.4, 0.5], 6),
        ({"patience": 3}, [4.0, 3.0, 2.0, 1.0], None),
    ],
)
def test_early_stopping_counts_looks_without_improvement(options, values, count):
    assert look(callbacks.EarlyStopping("eval_score", **options), "eval_score", values)[0] == count
    assert look(callbacks.EarlyStopping("score", **options), "score", values, "on_step")[0] == count
    # a training metric
    assert look(callbacks.EarlyStopping("score", **options), "score", values, "on_eval")[0] is None


@pytest.mark.parametrize("mode", ["min", "max"])
def test_early_stopping_ranks_as_the_best_checkpoint_is_ranked(mode):
    """The last improvement is the check whose checkpoint `Checkpoint(best=)` keeps: of equals the
    first, and one that is not finite only where none is finite.
    """
    finite = [1.0, 2.0, 2.0]
    for values in set(itertools.permutations([*finite, 1.0, math.nan, math.inf, -math.inf], 5)):
        numbers_of_checks = [number for number, value in enumerate(values) if value in finite]
        if not numbers_of_checks:
            continue
        first = numbers_of_checks[0]
        for number in numbers_of_checks:
            is_better = values[number] > values[first]
            if mode == "min":
                is_better = values[number] < values[first]
            if is_better:
                first = number
        stopping = callbacks.EarlyStopping("eval_score", patience=9, mode=mode)
        assert look(stopping, "eval_score", values)[0] is None
        assert stopping.save()["waited"] == len(values) - 1 - first, values
        assert best(dict(enumerate(values)), 1, mode) == [first], values


def test_early_stopping_says_why():
    assert look(
        callbacks.EarlyStopping("eval_score", patience=1, mode="max"), "eval_score", [0.5, 0.25]
    )[1] == ("eval_score has not improved in 1 checks; the best value is 0.5")
    assert look(callbacks.EarlyStopping("eval_score", patience=1), "eval_score", [math.nan])[1] == (
        "eval_score has not improved in 1 checks; none of its values is finite"
    )


def test_early_stopping_starts_afresh_in_each_run():
    stopping = callbacks.EarlyStopping("eval_score", patience=2)
    assert look(stopping, "eval_score", [1.0, 2.0, 3.0])[0] == 3
    assert look(stopping, "eval_score", [9.0, 8.0, 8.0, 8.0])[0] == 4


@pytest.mark.parametrize("metric, evaluations, steps", [("eval_loss", 3, 9), ("loss", 0, 4)])
def test_early_stopping_stops_a_run(metric, evaluations, steps):
    """With a learning rate of 0 nothing ever improves: the first look is the best, and `patience`
    more are waited for. The training metric is the same in each step, looked at every 2; the state
    stops at once, as such a look is exact.
    """
    data = {name: np.repeat(leaf[:1], 96, axis=0) for name, leaf in numbers().items()}
    stopping = callbacks.EarlyStopping(metric, patience=2 if evaluations else 1, every=2)
    result = fit(
        data,
        optimizer=optax.sgd(0.0),
        epochs=100,
        eval_data=data if evaluations else None,
        callbacks=[stopping],
    )
    assert result.stop_reason.startswith(f"{metric} has not improved in")
    assert int(result.state.step) == steps
    assert len(result.history.evaluations) == evaluations


@pytest.mark.parametrize("metric, near", [("eval_los", "eval_loss"), ("los", "loss")])
def test_early_stopping_on_a_metric_that_is_not_there(metric, near):
    with pytest.raises(OptionError) as raised:
        fit(epochs=1, eval_data=numbers(40, 1), callbacks=[callbacks.EarlyStopping(metric)])
    assert (
        str(raised.value)
        == f'EarlyStopping: there is no metric "{metric}".\n    fix: did you mean "{near}"?'
    )


# what cannot be meant -----------------------------------------------------------------------------

BAD = {
    "a class": (callbacks.StopAt, "is neither an spmd.callbacks.Callback nor a function of info."),
    "a number": (3, "callback 3 is neither an spmd.callbacks.Callback nor a function of info."),
    "every 0": (callbacks.Each(print, every=0), "every=0.\n    fix: a whole number from 1."),
    "every 1.5": (Recorder(every=1.5), "every=1.5.\n    fix: a whole number from 1."),
}


@pytest.mark.parametrize("bad, text", BAD.values(), ids=BAD.keys())
def test_what_is_no_callback(bad, text):
    with pytest.raises(OptionError) as raised:
        fit(callbacks=[bad])
    assert text in str(raised.value)


def test_a_mode_that_does_not_exist():
    with pytest.raises(
        OptionError, match=r'EarlyStopping: no mode "mni"\.\n    fix: did you mean "min"\?'
    ):
        callbacks.EarlyStopping(mode="mni")


@pytest.mark.parametrize("options", [{"patience": -1}, {"patience": 0}, {"patience": 1.5}])
def test_a_patience_that_never_waits(options):
    with pytest.raises(
        OptionError, match=r"EarlyStopping: patience=.*.\n    fix: a whole number from 1"
    ):
        callbacks.EarlyStopping(**options)


@pytest.mark.parametrize("options", [{}, {"step": 0}, {"seconds": -1.0}])
def test_a_stop_that_says_nothing(options):
    with pytest.raises(
        OptionError, match=r"StopAt\(.*\)\.\n    fix: step from 1, seconds from 0, or both"
    ):
        callbacks.StopAt(**options)


def test_callbacks_and_loggers_are_lists():
    for option in ("callbacks", "loggers"):
        with pytest.raises(
            OptionError, match=f"{option}=5 is an int.\n    fix: a list of {option}."
        ):
            fit(**{option: 5})


class Upload(callbacks.Callback):
    """Fails at some events, counted from 1."""

    def __init__(self, failing, may_fail=0):
        self.failing, self.may_fail, self.calls = failing, may_fail, 0

    def on_step(self, info):
        self.calls += 1
        if self.calls in self.failing:
            raise OSError("no route to host")

    on_stop = on_step

    def fail(self, info):
        raise OSError


def test_a_callback_may_fail_so_often_in_a_row(caplog):
    undisturbed, upload, later = fit(epochs=1), Upload({1, 2, 4}, may_fail=2), Recorder()
    assert same(fit(epochs=1, callbacks=[upload, later]).state, undisturbed.state)
    assert upload.calls == 4 and later.events[-1][0] == "stop"  # three steps, and the end
    wanted = (
        "step 2: callback Upload.on_step raises OSError: no route to host; training continues, "
        "failure 2 of at most 2 in a row."
    )
    assert [message for message in caplog.messages if "Upload" in message][1] == wanted
    with pytest.raises(CallbackError, match=r"step 3: callback Upload.on_step raises OSError"):
        fit(epochs=1, callbacks=[Upload({1, 2, 3}, may_fail=2)])


def test_failures_are_counted_for_each_event():
    """An evaluation between two steps does not make them begin anew."""
    with pytest.raises(CallbackError, match=r"step 3: callback Upload\.on_step"):
        fit(epochs=1, eval_data=numbers(), eval_every=1, callbacks=[Upload({1, 2, 3}, may_fail=2)])


def test_a_callback_may_have_any_attribute():
    callback = callbacks.Callback()
    callback.failures = []
    fit(epochs=1, callbacks=[callback])
    assert callback.failures == []


def test_what_may_not_fail():
    starting, together = Upload((), may_fail=2), Upload((), may_fail=2)
    starting.on_start, together.together = starting.fail, True
    with pytest.raises(CallbackError, match="on_start"):
        fit(epochs=1, callbacks=[starting])
    with pytest.raises(OptionError, match="may_fail=2, but all processes run it together"):
        fit(epochs=1, callbacks=[together])
    with pytest.raises(OptionError, match="may_fail"):
        fit(epochs=1, callbacks=[callbacks.Each(print, may_fail=-1)])
    with pytest.raises(DivergedError):
        fit(spoilt(2), shuffle=False, callbacks=[callbacks.Each(diverge, may_fail=9)])


def diverge(info):
    raise DivergedError("the sky is falling.")


# not a number -------------------------------------------------------------------------------------


def spoilt(step, batch_size=32, count=320):
    """Data in its own order whose batch `step` holds a NaN."""
    data = numbers(count)
    data["x"][(step - 1) * batch_size + 3, 2] = np.nan
    return data


@pytest.mark.system
def test_the_step_and_the_metric_are_named_and_the_checkpoint_before_stays_the_newest(tmp_path):
    """The NaN appears in step 5, where a checkpoint is due as well: it is not written."""
    recorder = Recorder()
    with pytest.raises(DivergedError) as raised:
        fit(
            spoilt(5),
            shuffle=False,
            checkpoint=spmd.Checkpoint(tmp_path, every=1, keep=100),
            callbacks=[recorder],
        )
    assert str(raised.value) == (
        f'step 5: metric "loss" is nan. The last checkpoint is step 4 in {tmp_path}.\n'
        "    fix: correct the data: x is nan in row 131 of the data. If that is intended, "
        "lower the learning rate, clip gradients (optax.clip_by_global_norm), or inspect the batch "
        "of this step."
    )
    assert not getattr(raised.value, "__notes__", [])
    store = spmd.run.checkpoint.CheckpointStore(spmd.Checkpoint(tmp_path, every=1, keep=100))
    assert store.steps() == [1, 2, 3, 4]
    store.close()
    assert recorder.events[-1][0] == "stop"
    repaired = {
        "checkpoint": spmd.Checkpoint(tmp_path, every=1, keep=100),
        "resume": "changed_data",
    }
    rest = fit(numbers(320), shuffle=False, **repaired)
    assert same(rest.state, fit(numbers(320), shuffle=False).state)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("masked", [False, True])
def test_terminate_on_nan_names_classes_of_cross_entropy(masked):
    mask, data = {"mask": np.ones(96, bool)} if masked else {}, numbers(96)
    data = {"x": data["x"], "y": np.zeros(96, np.int32), **mask}
    data["y"][70] = 7
    model = spmd.FunctionalModel(
        lambda key: {"w": np.ones((data["x"].shape[1], 3), np.float32)},
        lambda params, x: x @ params["w"],
    )
    loss = spmd.losses.cross_entropy.on(mask="mask") if masked else spmd.losses.cross_entropy
    with pytest.raises(DivergedError) as raised:
        spmd.fit(
            model,
            data,
            loss=loss,
            optimizer=optax.sgd(0.1),
            batch_size=32,
            epochs=1,
            shuffle=False,
            progress=False,
        )
    also = ', and where the mask "mask" is neither 0 nor 1' if masked else ""
    assert str(raised.value) == (
        'step 3: metric "loss" is nan. There is no checkpoint.\n'
        "    fix: lower the learning rate, clip gradients (optax.clip_by_global_norm), or inspect "
        "the batch of this step: "
        "spmd.losses.cross_entropy is NaN where a target is not one of the model's classes, 0 to "
        f"2{also}."
    )


def test_a_run_without_checkpoints_says_so():
    with pytest.raises(
        DivergedError, match=r'^step 3: metric "loss" is nan\. There is no checkpoint\.'
    ):
        fit(spoilt(3), shuffle=False)


def test_the_first_step_has_its_own_message():
    with pytest.raises(DivergedError) as raised:
        fit(spoilt(1), shuffle=False)
    usual = "a log of 0 or a division by 0 in the loss, or too large initial values."
    assert str(raised.value) == (
        "the loss is nan at the first step.\n"
        "    fix: correct the data: x is nan in row 3 of the data. If that is intended, look for "
        f"{usual}"
    )
    with pytest.raises(DivergedError) as raised:
        fit(loss=lambda model, batch: jnp.log(-jnp.abs(model(batch["x"])).sum(1)))
    assert raised.value.fix == f"look for a NaN or infinity in the data, {usual}"


def test_the_first_step_of_a_resumed_run_is_not_the_first(tmp_path):
    fit(spoilt(5), shuffle=False, steps=4, checkpoint=tmp_path)
    with pytest.raises(
        DivergedError, match=r'^step 5: metric "loss" is nan\. The last checkpoint is step 4'
    ):
        fit(spoilt(5), shuffle=False, checkpoint=tmp_path, resume=True)


def test_any_metric_can_be_watched():
    def loss(model, batch):
        values = (model(batch["x"]) - batch["y"])[:, 0] ** 2
        return values, {"inverse": 1 / (batch["step"] - 3.0)}

    data = {**numbers(320), "step": np.repeat(np.arange(1, 11, dtype=np.float32), 32)}
    watching = callbacks.TerminateOnNaN(metrics=("loss", "inverse"))
    with pytest.raises(DivergedError, match=r'^step 3: metric "inverse" is inf\.'):
        fit(data, loss=loss, shuffle=False, callbacks=[watching])
    # the loss alone is watched by default
    assert math.isinf(fit(data, loss=loss, shuffle=False).history["inverse"][2])


def test_watching_can_be_turned_off_after_the_first_step():
    result = fit(spoilt(3), shuffle=False, callbacks=[callbacks.TerminateOnNaN(metrics=())])
    assert len(result.history) == 10 and math.isnan(result.history["loss"][2])


@pytest.mark.system
def test_what_would_do_nothing_is_refused():
    class Keras(spmd.callbacks.Callback):
        def on_step_end(self, info):
            pass

    with pytest.raises(
        spmd.SpmdError,
        match=r"callback Keras: nothing calls on_step_end.\n    fix: did you mean \"on_step\"",
    ):
        fit_net(labelled(32), epochs=1, callbacks=[Keras()])

    def stops(info):
        info.stop = True

    with pytest.raises(
        CallbackError, match=r"callback stops\.on_step raises AttributeError: .*stop"
    ):
        fit_net(labelled(32), epochs=1, callbacks=[stops])
