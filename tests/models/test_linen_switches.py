"""Linen modules train in training mode and evaluate in evaluation mode, however they say which, as
in plain flax.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import spmd
from spmd.errors import ModelError

ROWS, WIDTH = 16, 4
IN_TRAINING = {
    "training": True,
    "train": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
MASKS = {"dropout": jax.random.key(7)}


class Net(linen.Module):
    """Its switch is a field: that of a subclass, by the name of `SWITCH`."""

    SWITCH = ""

    @linen.compact
    def __call__(self, x):
        training = getattr(self, self.SWITCH) == IN_TRAINING[self.SWITCH]
        x = linen.BatchNorm(use_running_average=not training, momentum=0.5)(linen.Dense(8)(x))
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=not training)(x))


def with_field(name, default):
    return type(
        "Switched", (Net,), {"__annotations__": {name: bool}, name: default, "SWITCH": name}
    )


class Holder(linen.Module):
    inner: linen.Module

    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(self.inner(x))


def batches(count=3):
    random = np.random.default_rng(0)
    return [
        {
            "x": random.normal(size=(ROWS, WIDTH)).astype("f"),
            "y": random.normal(size=(ROWS, 2)).astype("f"),
        }
        for _ in range(count)
    ]


def squares(out, batch):
    return ((out - batch["y"]) ** 2).mean(-1)


def loss(model, batch):
    return squares(model(batch["x"], rngs=MASKS), batch)


def trainer_of(model, loss=loss, devices=1):
    mesh = spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    return spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh)


def plainly(training, evaluating, variables, arguments=({}, {})):
    """Losses, statistics, and the loss of the last batch in evaluation, of a loop in plain flax on
    the full batches.
    """
    params, stats, losses = (
        variables["params"],
        {"batch_stats": variables["batch_stats"]} if "batch_stats" in variables else {},
        [],
    )

    def value(params, stats, batch):
        variables = {"params": params, **stats}
        out, changed = training.apply(
            variables, batch["x"], rngs=MASKS, mutable=["batch_stats"], **arguments[0]
        )
        return squares(out, batch).mean(), dict(changed)

    for batch in batches():
        (number, stats), grads = jax.value_and_grad(value, has_aux=True)(params, stats, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(number)
    out = evaluating.apply({"params": params, **stats}, batches()[-1]["x"], **arguments[1])
    return losses, stats, squares(out, batches()[-1]).mean()


def check_trained(model, right, loss=loss):
    trainer = trainer_of(model, loss)
    state, losses = trainer.init(batches()[0]), []
    for batch in batches():
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses, right[0], rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        jax.device_get(state.stats),
        right[1],
    )
    np.testing.assert_allclose(
        trainer.evaluate(state, batches()[-1], batch_size=ROWS)["loss"], right[2], rtol=2e-5
    )
    assert abs(right[2] - right[0][-1]) > 1e-3  # the modes differ
    return trainer


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("name", IN_TRAINING)
def test_field_is_set_for_training_and_evaluation(name, default):
    module = with_field(name, default)()
    training, evaluating = (
        module.clone(**{name: IN_TRAINING[name]}),
        module.clone(**{name: not IN_TRAINING[name]}),
    )
    variables = training.init({"params": jax.random.key(0)}, batches()[0]["x"])
    trainer = check_trained(module.bind(variables), plainly(training, evaluating, variables))
    assert not [line for line in trainer.notes() if "frozen" in line or "dropout" in line]


def test_field_of_a_module_in_a_field_is_set():
    def make(training):
        return Holder(with_field("train", False)(training))

    variables = make(True).init(jax.random.key(0), batches()[0]["x"])
    check_trained(make(False).bind(variables), plainly(make(True), make(False), variables))


def test_fields_of_layers_in_a_list_are_set_and_shared_ones_stay_shared():
    def make(deterministic, average=False):
        dense, drop = linen.Dense(WIDTH), linen.Dropout(0.5, deterministic=deterministic)
        return linen.Sequential(
            [
                dense,
                drop,
                linen.BatchNorm(use_running_average=average, momentum=0.5),
                dense,
                linen.relu,
                linen.Dense(2),
            ]
        )

    variables = make(False).init(jax.random.key(0), batches()[0]["x"])
    assert len(variables["params"]) == 3  # of five layers with parameters two are one
    check_trained(make(True).bind(variables), plainly(make(False), make(True, True), variables))


class Merged(linen.Module):
    train: bool | None = None

    @linen.compact
    def __call__(self, x, train: bool | None = None):
        train = linen.merge_param("train", self.train, train)
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=not train)(x))


@pytest.mark.parametrize("given", [None, False, True])
def test_field_and_argument_of_one_name_are_not_both_set(given):
    variables = Merged(True).init(jax.random.key(0), batches()[0]["x"])
    check_trained(Merged(given).bind(variables), plainly(Merged(True), Merged(False), variables))


class Frozen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=True)(linen.Dense(8)(x))
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=True)(x))


FROZEN = "note: batch statistics are frozen, by use_running_average=True: {}."
IDLE = "note: dropout drops nothing in training, by deterministic=True: {} (rate 0.5)."


@pytest.mark.parametrize(
    "make, prefix",
    [(Frozen, ""), (lambda: linen.remat(Frozen)(), ""), (lambda: Holder(Frozen()), "inner/")],
)
def test_norm_and_dropout_that_stay_in_evaluation_mode_are_notes(make, prefix):
    trainer = trainer_of(make(), loss)
    state, _ = trainer.step(trainer.init(batches()[0]), batches()[0])
    assert {FROZEN.format(f"{prefix}BatchNorm_0"), IDLE.format(f"{prefix}Dropout_0")} <= {
        *trainer.notes()
    }
    assert (
        float(
            state.stats["batch_stats"].get("inner", state.stats["batch_stats"])["BatchNorm_0"][
                "var"
            ][0]
        )
        == 1.0
    )


class Unknown(linen.Module):
    @linen.compact
    def __call__(self, x, inference: bool = True, return_features: bool = False):
        x = linen.BatchNorm(use_running_average=inference, momentum=0.5)(linen.Dense(8)(x))
        out = linen.Dense(2)(linen.Dropout(0.5, deterministic=inference)(x))
        return (out, x) if return_features else out


class Required(linen.Module):
    @linen.compact
    def __call__(self, x, stochastic: bool):
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=not stochastic)(x))


class Quiet(linen.Module):
    """The switch has a name that says nothing, and what it does is seen in a trace."""

    @linen.compact
    def __call__(self, x, mode=False):
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=not mode)(x))


class Beside(linen.Module):
    """A switch beside a known one."""

    @linen.compact
    def __call__(self, x, deterministic, mode=False):
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=deterministic or not mode)(x))


class Follows(linen.Module):
    """A switch that follows a known one where it is left out."""

    @linen.compact
    def __call__(self, x, train, update: bool | None = None):
        x = linen.BatchNorm(
            use_running_average=not (train if update is None else update), momentum=0.5
        )(linen.Dense(8)(x))
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=not train)(x))


def test_switch_that_follows_another_is_no_error():
    module = Follows()
    switches = ({"train": True}, {"train": False})
    variables = module.init(jax.random.key(0), batches()[0]["x"], **switches[1])
    check_trained(module.bind(variables), plainly(module, module, variables, switches))


@pytest.mark.parametrize(
    "kind, name, in_training",
    [
        (Unknown, "inference", False),
        (Required, "stochastic", True),
        (Quiet, "mode", True),
        (Beside, "mode", True),
    ],
)
def test_unknown_switch_is_named_with_a_fix_that_works(kind, name, in_training):
    with pytest.raises(ModelError) as raised:
        trainer_of(kind()).init(batches()[0])
    text = str(raised.value)
    assert text.startswith(
        f'{kind.__name__}.__call__ has an argument "{name}" that may switch training'
    )
    assert f"Only with {name}={in_training} the call" in text and 'draws from "dropout"' in text
    lines = re.search(r"(?m)^        class Switched.*\n.*\n.*$", text)[0]
    scope = {kind.__name__: kind}
    exec("\n".join(line[8:] for line in lines.splitlines()), scope)
    fixed, module = scope[f"Switched{kind.__name__}"](), kind()
    training, evaluating = {name: in_training}, {name: not in_training}
    if kind is Beside:
        training, evaluating = (
            training | {"deterministic": False},
            evaluating | {"deterministic": True},
        )
    variables = module.init(jax.random.key(0), batches()[0]["x"], **evaluating)
    check_trained(fixed.bind(variables), plainly(module, module, variables, (training, evaluating)))


def test_unknown_switch_that_the_loss_gives_is_left_to_it():
    trainer = trainer_of(
        Unknown(), lambda model, batch: squares(model(batch["x"], inference=True), batch)
    )
    trainer.step(trainer.init(batches()[0]), batches()[0])
    assert FROZEN.format("BatchNorm_0") in trainer.notes()


class Decodes(linen.Module):
    @linen.compact
    def __call__(self, x, decode: bool = False, many=False):
        if decode:
            cache = self.variable("cache", "last", jnp.zeros, (WIDTH,))
            cache.value = x[0]
        return linen.Dense(2)(x)


def test_argument_that_switches_nothing_of_training_is_no_error():
    trainer = trainer_of(Decodes(), loss)
    trainer.step(trainer.init(batches()[0]), batches()[0])


@pytest.mark.parametrize("devices", [1, 8])
def test_switch_that_is_given_by_position_is_kept(devices):
    module = Required()
    variables = module.init(jax.random.key(0), batches()[0]["x"], False)
    trainer = trainer_of(
        module.bind(variables),
        lambda model, batch: squares(model(batch["x"], False), batch),
        devices,
    )
    _, metrics = trainer.step(trainer.init(batches()[0]), batches()[0])
    right = squares(module.apply(variables, batches()[0]["x"], False), batches()[0]).mean()
    np.testing.assert_allclose(metrics["loss"], right, rtol=1e-5)


def test_module_in_a_field_that_was_frozen_stays_so():
    """As in plain flax, where the outer module's switch does not reach it."""

    class Encoder(linen.Module):
        deterministic: bool = False

        @linen.compact
        def __call__(self, x):
            return linen.Dropout(0.5, deterministic=self.deterministic)(linen.Dense(4)(x))

    class Outer(linen.Module):
        encoder: linen.Module

        @linen.compact
        def __call__(self, x, train):
            return linen.Dense(2)(self.encoder(x))

    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    module = Outer(Encoder(deterministic=True))
    variables = module.init(jax.random.key(0), x, True)
    trainer = spmd.Trainer(
        module.bind(variables),
        loss=lambda model, batch: jnp.square(model(batch)).mean(-1),
        optimizer=optax.sgd(0.1),
        mesh="data=8",
    )
    _, metrics = trainer.step(trainer.init(x), x)
    assert metrics["loss"] == pytest.approx(
        float(jnp.square(module.apply(variables, x, True)).mean()), rel=1e-5
    )
