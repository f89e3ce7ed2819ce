"""Ensembles: in one compiled program, and as workers of which some come too late."""

import dataclasses
import logging
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from trained import Convolved, deadlines_pass_after, train, untrained

import spmd
from spmd.errors import DataError, EnsembleError, OptionError
from spmd.inference import uncertainty
from spmd.inference.stacked import combined
from tests.compare import assert_close


def mlp(width=32):
    """A functional model, whose initial values follow the run's seed."""

    def init(key):
        first, second = jax.random.split(key)
        return {
            "one": jax.random.normal(first, (64, width)) / 8,
            "two": jax.random.normal(second, (width, 10)) / width**0.5,
        }

    return spmd.FunctionalModel(
        init,
        lambda params, x: jax.nn.relu(x.reshape(x.shape[0], -1) @ params["one"]) @ params["two"],
    )


@pytest.fixture(scope="module")
def three(digits):
    """Three small networks of different seeds."""
    return [train(mlp(16), digits[0], seed=seed, steps=240, rate=2e-2) for seed in range(3)]


@pytest.fixture(scope="module")
def mixed(digits, three, tmp_path_factory):
    """Members of every kind: two equal ones, a wider one, one with a convolution, an exported
    one.
    """
    folder = three[1].export(tmp_path_factory.mktemp("member") / "model").folder
    return {
        "one": three[0],
        "two": (three[1].trainer, three[1].state),
        "wider": train(mlp(48), digits[0], steps=10),
        "convolved": train(lambda: Convolved(nnx.Rngs(1)), digits[0], steps=10),
        "exported": folder,
        "linen": train("linen", digits[0], steps=10),
    }


def softmax(logits):
    return np.exp(uncertainty.log_softmax(np.asarray(logits)))


@pytest.mark.system
@pytest.mark.parametrize("combine", ["mean", "logits", "vote"])
def test_what_the_members_say_together(three, digits, combine):
    images = digits[1]["image"]
    ensemble = spmd.Ensemble(three, combine=combine)
    logits = np.stack([result.predict(images) for result in three])
    members, together = ensemble.members(images), ensemble.predict(images)
    assert (
        members.shape == (3, 297, 10)
        and together.shape == (297, 10)
        and members.dtype == together.dtype == np.float32
    )
    np.testing.assert_allclose(members, softmax(logits), atol=1e-6)
    wanted = {
        "mean": softmax(logits).mean(0),
        "logits": softmax(logits.mean(0)),
        "vote": np.stack([(logits.argmax(-1) == at).mean(0) for at in range(10)], -1),
    }
    np.testing.assert_allclose(together, wanted[combine], atol=1e-6)
    others = [wanted[other] for other in wanted if other != combine]
    assert all(np.abs(together - other).max() > 1e-3 for other in others), (
        "the three ways differ here"
    )
    # the host's arithmetic
    np.testing.assert_allclose(
        np.exp(uncertainty.log_combined(logits, combine)), together, atol=1e-6
    )


@pytest.mark.system
@pytest.mark.parametrize("combine", ["mean", "logits"])
@pytest.mark.parametrize("count", [2, 4])
def test_duplicates_say_what_the_member_says(three, digits, combine, count):
    images = digits[1]["image"]
    ensemble = spmd.Ensemble([three[0]] * count, combine=combine)
    together, members = ensemble.predict(images), ensemble.members(images)
    assert np.array_equal(members[0], members[1])
    # float32 on the devices, float64 on the host
    np.testing.assert_allclose(together, members[0], atol=5e-7)
    np.testing.assert_allclose(ensemble.uncertainty(images)["disagreement"], 0, atol=1e-12)
    values = jnp.asarray(np.stack([three[0].predict(images)] * count))
    wanted = jax.nn.softmax(values)[0] if combine == "mean" else jax.nn.softmax(values[0])
    assert np.array_equal(combined(values, combine), wanted), "to the bit, where the sum is exact"


@pytest.mark.system
def test_equal_members_lie_over_the_devices_and_others_follow(mixed, digits):
    ensemble = spmd.Ensemble(mixed)
    assert ensemble.names == tuple(mixed)
    assert repr(ensemble) == "Ensemble of 6: mean; 2 members stacked over net=2, 4 run separately"
    images, each = digits[1]["image"], ensemble.members(digits[1]["image"], batch_size=128)
    exported = spmd.load_exported(mixed["exported"])
    wanted = [
        mixed["one"].predict(images),
        mixed["two"][0].predict(mixed["two"][1], images),
        mixed["wider"].predict(images),
    ]
    wanted += [
        mixed["convolved"].predict(images),
        exported.predict(images),
        mixed["linen"].predict(images),
    ]
    np.testing.assert_allclose(each, softmax(np.stack(wanted)), atol=2e-6)
    assert np.abs(each[0] - each[2]).max() > 0.01


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("members", "mesh", "shown"),
    [(3, None, "net=3"), (3, "net=2", "net=2"), (9, None, "net=5"), (3, "net=1", "net=1")],
)
def test_any_number_of_members_on_any_number_of_devices(three, digits, members, mesh, shown):
    images = digits[1]["image"][:16]
    ensemble = spmd.Ensemble([three[at % 3] for at in range(members)], mesh=mesh)
    assert shown in repr(ensemble)
    wanted = softmax(np.stack([three[at % 3].predict(images) for at in range(members)]))
    np.testing.assert_allclose(ensemble.members(images), wanted, atol=1e-6)


@pytest.mark.system
def test_convolutions_are_not_vectorised_and_dense_layers_are(three, mixed, digits):
    """Vectorised over members, a convolution would be a grouped one."""
    trainer, state = mixed["convolved"].trainer, mixed["convolved"].state
    states = [
        dataclasses.replace(state, params=jax.tree.map(lambda x: x * size, state.params))
        for size in (1.0, 0.9, 0.8, 0.7)
    ]
    convolved = [(trainer, each) for each in states]
    shape = jax.ShapeDtypeStruct((8, 8, 8, 1), jnp.float32)
    text = spmd.Ensemble(convolved, mesh="net=2")._stacked.text(shape)
    assert "feature_group_count" not in text and len(
        re.findall(r" convolution\(|custom_call_target=.*[Cc]onv", text)
    ) in (0, 2)
    ensemble = spmd.Ensemble(convolved, mesh="net=2")
    images = digits[1]["image"][:8]
    wanted = softmax(np.stack([trainer.predict(each, images) for each in states]))
    np.testing.assert_allclose(ensemble.members(images), wanted, atol=2e-6)
    assert np.abs(wanted[0] - wanted[3]).max() > 0.01
    dense = spmd.Ensemble([*three, three[0]], mesh="net=2")
    assert [group.vectorised for group in dense._groups] == [True] and [
        group.vectorised for group in ensemble._groups
    ] == [False]
    assert "all-gather" in dense._stacked.text(shape), "members' outputs are gathered"


def test_members_with_other_constants_are_not_stacked(digits):
    def member(value):
        shift = np.full((100, 10), value, np.float32)

        def apply(params, x):
            return x.reshape(len(x), -1) @ params["w"] + shift[7]

        return untrained(
            spmd.FunctionalModel(lambda key: {"w": jnp.ones((64, 10))}, apply), digits[0]
        )

    assert repr(spmd.Ensemble([member(1.0), member(2.0)])).endswith("2 run separately")
    assert repr(spmd.Ensemble([member(1.0), member(1.0)])).endswith("2 members stacked over net=2")


def test_three_are_better_than_the_best_of_them(three, digits):
    evaluation = spmd.Ensemble(three).evaluate(digits[1])
    best = min(member["log loss"] for member in evaluation.members.values())
    assert 0.1 < evaluation.ensemble["log loss"] < best < 1.0
    assert (
        evaluation.ensemble["disagreement"] > 0.01
        and evaluation.ensemble["entropy"] > evaluation.ensemble["disagreement"]
    )
    for at, member in enumerate(evaluation.members.values()):
        measured = three[at].evaluate(digits[1])
        np.testing.assert_allclose(
            [member["log loss"], member["accuracy"]],
            [measured["loss"], measured["accuracy"]],
            rtol=1e-5,
        )
    lines = str(evaluation).splitlines()
    assert lines[0].split("  ")[-1] == "disagreement" and [
        line.split()[0] for line in lines[1:]
    ] == ["ensemble", "0", "1", "2"]
    batches = [
        {name: values[at : at + 99] for name, values in digits[1].items()} for at in (0, 99, 198)
    ]
    assert_close(
        spmd.Ensemble(three).evaluate(batches).ensemble["log loss"], evaluation.ensemble["log loss"]
    )


@pytest.mark.system
def test_a_temperature_is_fitted_to_held_out_data(three, digits):
    """Of members whose logits are five times too large, it is five times the one that was."""
    images, labels = digits[1]["image"], digits[1]["label"]
    sharp = [
        spmd.FunctionalModel(
            lambda key: {"w": jnp.zeros(1)}, lambda p, x, r=r: 5 * r.model(x) + p["w"]
        )
        for r in three
    ]
    plain, sharper = (
        spmd.Ensemble(members, combine="logits")
        for members in (three, [train(m, digits[0], steps=1) for m in sharp])
    )
    calibrated = plain.calibrate(images, labels), sharper.calibrate(images, labels)
    np.testing.assert_allclose(
        calibrated[1].temperature / calibrated[0].temperature, 5, rtol=0.01
    )  # training has moved `w` for all classes
    for calibration in calibrated:
        assert calibration.after["log loss"] < calibration.before[
            "log loss"
        ] and "temperature" in str(calibration)
    assert calibrated[1].after["calibration error"] < calibrated[1].before["calibration error"]
    assert sharper.temperature == calibrated[1].temperature and "at temperature" in repr(sharper)
    np.testing.assert_allclose(sharper.predict(images), plain.predict(images), atol=2e-3)
    np.testing.assert_allclose(
        sharper.evaluate(digits[1]).ensemble["log loss"], calibrated[1].after["log loss"], rtol=1e-5
    )
    with pytest.raises(EnsembleError, match=r'share of 0 votes\.\n    fix: combine="mean"'):
        spmd.Ensemble(three, combine="vote").calibrate(images, labels)


def test_uncertainty_of_known_numbers():
    sure, even = np.array([30.0, 0, 0, 0]), np.zeros(4)
    logits = np.stack(
        [np.stack([sure, even, sure]), np.stack([sure, even, np.roll(sure, 1)])]
    )  # agree and sure, agree and unsure, disagree
    np.testing.assert_allclose(uncertainty.disagreement(logits), [0, 0, np.log(2)], atol=1e-9)
    np.testing.assert_allclose(
        uncertainty.entropy(softmax(logits).mean(0)), [0, np.log(4), np.log(2)], atol=1e-9
    )
    probabilities = np.array([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    np.testing.assert_allclose(
        uncertainty.calibration_error(probabilities, np.array([0, 1, 0, 0])),
        (0.3 * 2 + 0.4 * 2) / 4,
        rtol=1e-12,
    )
    labels = np.array([0, 0, 0, 1])
    logs = np.log(np.full((4, 2), [0.9, 0.1]))
    temperature = uncertainty.fit_temperature(logs, labels)
    np.testing.assert_allclose(
        np.exp(uncertainty.with_temperature(logs, temperature))[0], [0.75, 0.25], rtol=1e-9
    )


@pytest.mark.parametrize(
    ("members", "options", "error", "words"),
    [
        ([], {}, OptionError, r"an ensemble without members"),
        ([3], {}, OptionError, r"member 0 is an int\.\n    fix: a Result of fit"),
        (
            ["one"],
            {"combine": "median"},
            OptionError,
            r"combine='median'\.\n    fix: did you mean \"mean\"",
        ),
        (
            ["one"],
            {"mesh": "data=2"},
            OptionError,
            r'mesh="data=2": members need one axis, "net"\.\n    fix: mesh="net=1"',
        ),
        (
            ["one", "narrow"],
            {},
            EnsembleError,
            r"(?s)take different inputs.*0\n      takes float32\[.*8, 8, 1\].*1\n      takes "
            r"float32\[.*, 5\]",
        ),
        (
            ["one", "eleven"],
            {},
            EnsembleError,
            r"member 1 returns float32\[4, 11\] for 4 rows; the first returns float32\[4, 10\]",
        ),
        (
            ["flat"],
            {},
            EnsembleError,
            r"member 0 returns float32\[4\] for 4 rows; expected one array of logits",
        ),
    ],
    ids=["none", "int", "combine", "mesh", "inputs", "classes", "no classes"],
)
def test_members_that_do_not_fit(three, digits, members, options, error, words):
    def made(name):
        columns, inputs, dims = {"eleven": (11, 64, 2), "narrow": (10, 5, 2), "flat": (1, 64, 1)}[
            name
        ]
        model = spmd.FunctionalModel(
            lambda key: {"w": jnp.ones((inputs, columns)[:dims])},
            lambda p, x: x.reshape(len(x), -1) @ p["w"],
        )
        data = (
            digits[0]
            if name != "narrow"
            else {"x": np.ones((128, 5), np.float32), "y": np.zeros(128, np.int32)}
        )
        return untrained(
            model,
            data,
            loss=spmd.losses.cross_entropy
            if dims == 2
            else lambda model, batch: model(batch["image"]),
        )

    members = [
        three[0] if member == "one" else made(member) if isinstance(member, str) else member
        for member in members
    ]
    with pytest.raises(error, match=words):
        spmd.Ensemble(members, **options)


def test_labels_and_inputs_that_do_not_fit(three, digits):
    ensemble, data = spmd.Ensemble(three), digits[1]
    with pytest.raises(
        DataError,
        match=r"the labels are int64\[297\]; the members.* 10 classes\.\n    fix: integers \[297\] "
        r"from 0 to 9",
    ):
        ensemble.evaluate((data["image"], np.full(297, 10)))
    with pytest.raises(DataError, match=r"(?s)inputs and labels: .*fix: a pair \(inputs, labels\)"):
        ensemble.evaluate({"picture": data["image"], "label": data["label"]})
    with pytest.raises(DataError, match=r"the model takes float32\[rows, 8, 8, 1\]"):
        ensemble.predict(data["image"][..., 0])


def test_a_checkpoint_is_a_member(digits, tmp_path):
    result = train(mlp(), digits[0], steps=4, checkpoint=tmp_path / "run")
    images = digits[1]["image"]
    probabilities = spmd.Ensemble([(result.trainer, tmp_path / "run")]).members(images)
    np.testing.assert_allclose(probabilities[0], softmax(result.predict(images)), atol=1e-6)


class Slow:
    """A member that answers when it is released, and counts."""

    def __init__(self, logits):
        self.logits, self.go, self.began, self.asked, self.done = (
            logits,
            threading.Event(),
            threading.Event(),
            [],
            threading.Event(),
        )

    def __call__(self, inputs):
        self.asked.append(float(inputs[0, 0]))
        self.began.set()
        assert self.go.wait(60)
        self.done.set()
        return self.logits[: len(inputs)] + inputs


def sure_of(at, rows=4):
    return np.eye(3, dtype=np.float32)[[at] * rows] * 9


def threads():
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("spmd member")
    ]


ZERO, ONE = np.zeros((4, 1), np.float32), np.ones((4, 1), np.float32)


def test_ask_leaves_out_late_members_and_ignores_what_they_say_later(monkeypatch):
    slow, quick = Slow(sure_of(0)), lambda inputs: sure_of(1) + inputs
    ensemble = spmd.Ensemble({"slow": slow, "quick": quick})
    deadlines_pass_after(monkeypatch, answers=1, began=slow.began)
    answer = ensemble.ask(ZERO, deadline=5.0)
    assert (
        answer.members == ("quick",)
        and answer.late == ("slow",)
        and answer.failed == {}
        and answer.seconds == 5.0
    )
    np.testing.assert_allclose(answer.probabilities, softmax(sure_of(1)), rtol=1e-12)
    again = ensemble.ask(ONE, deadline=5.0)  # the slow one is still at the first question
    assert again.late == ("slow",)
    slow.go.set()
    ensemble.close(60)
    assert threads() == [] and slow.asked == [0.0], "a question that was over is not asked"
    with ensemble:
        third = ensemble.ask(ONE)
        assert third.members == ("slow", "quick") and third.late == ()
        np.testing.assert_allclose(
            third.probabilities, (softmax(sure_of(0)) + softmax(sure_of(1))) / 2, rtol=1e-12
        )
        ensemble.ask(ONE)
        assert slow.asked == [0.0, 1.0, 1.0] and again.members == ("quick",), (
            "what came later has not changed it"
        )
        assert sorted(threads()) == ["spmd member quick", "spmd member slow"], (
            "one for each member, however often it is asked"
        )
    assert threads() == []


def test_ask_returns_at_the_deadline():
    slow = Slow(sure_of(0))
    with spmd.Ensemble({"slow": slow}) as ensemble:
        with pytest.raises(
            EnsembleError, match=r"none of the 1 members answered in 0\.01 s:\n    slow: late"
        ):
            ensemble.ask(ZERO, deadline=0.01)
        slow.go.set()


def test_a_member_that_fails_is_named_and_not_fatal(monkeypatch):
    def fails(inputs):
        raise ValueError("no route")

    members = {
        "broken": fails,
        "well": lambda inputs: sure_of(2),
        "short": lambda inputs: sure_of(2)[:1],
        "wide": lambda inputs: np.ones((4, 5)),
    }
    members["text"] = lambda inputs: np.array(["a"])
    with spmd.Ensemble({**members, "too": lambda inputs: sure_of(2)}) as ensemble:
        answer = ensemble.ask(ZERO)
        assert answer.members == ("well", "too") and answer.late == ()
        assert answer.failed["broken"] == "ValueError: no route"
        assert re.match(r"it returned float32\[1, 3\]; the others \[4, 3\]", answer.failed["short"])
        assert set(answer.failed) == {"broken", "short", "wide", "text"}
        with pytest.raises(
            EnsembleError,
            match=r"members that are functions cannot be compiled: broken, .*\n    fix: "
            r"ensemble\.ask",
        ):
            ensemble.predict(ZERO)
    slow = Slow(sure_of(0))
    deadlines_pass_after(monkeypatch, answers=1, began=slow.began)
    with spmd.Ensemble({"broken": fails, "slow": slow}) as ensemble:
        with pytest.raises(
            EnsembleError,
            match=r"none of the 2 members answered in 5 s:\n    broken ValueError: no route\n    "
            r"slow: late",
        ):
            ensemble.ask(ZERO, deadline=5)
        slow.go.set()
    with pytest.raises(OptionError, match="deadline=0"):
        ensemble.ask(ZERO, deadline=0)
    assert threads() == []


def test_close_names_members_that_do_not_end(caplog, monkeypatch):
    slow = Slow(sure_of(0))
    ensemble = spmd.Ensemble({"quick": lambda inputs: sure_of(1), "slow": slow})
    clock = deadlines_pass_after(monkeypatch, answers=1, began=slow.began)
    ensemble.ask(ZERO, deadline=5.0)
    quick, left = (
        next(thread for thread in threading.enumerate() if thread.name == f"spmd member {name}")
        for name in ("quick", "slow")
    )
    # all of the time goes by once the quick one has ended
    monkeypatch.setattr(clock, "monotonic", lambda: 0.0 if quick.is_alive() else 60.0)
    with caplog.at_level(logging.WARNING, logger="spmd"):
        ensemble.close(seconds=60.0)
    assert caplog.messages == [
        "members that are still running an earlier request, and end after it: slow"
    ]
    slow.go.set()
    left.join(60)
    assert threads() == [] and slow.done.is_set()
    assert ensemble.ask(ZERO).members == ("quick", "slow"), "asking again starts new threads"
    ensemble.close(60)


@pytest.mark.system
def test_models_are_asked_on_devices_of_their_own(mixed, digits):
    images = digits[1]["image"][:32]

    def far(inputs):
        return np.log(spmd.Ensemble([mixed["one"]]).predict(inputs))

    with spmd.Ensemble({**mixed, "far": far}, combine="mean") as ensemble:
        answer = ensemble.ask(images)
    assert answer.members == (*mixed, "far")
    each = spmd.Ensemble(mixed).members(images)
    np.testing.assert_allclose(
        answer.probabilities, np.concatenate([each, each[:1]]).mean(0), atol=2e-6
    )
