"""A loss may call several methods of a Linen module: their parameters are those of plain flax, and
so is what is trained.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import spmd
from spmd.errors import ModelError

ROWS, WIDTH = 16, 4
RANDOM = np.random.default_rng(0)
BATCHES = [{"x": RANDOM.normal(size=(ROWS, WIDTH)).astype("f")} for _ in range(3)]


class Coder(linen.Module):
    width: int = 3

    def setup(self):
        self.inner, self.outer = linen.Dense(self.width), linen.Dense(WIDTH)
        self.norm = linen.BatchNorm(momentum=0.5)
        self.scale = self.param("scale", linen.initializers.normal(1.0), (WIDTH,))

    def encode(self, x, train: bool):
        return self.norm(self.inner(x), use_running_average=not train)

    def decode(self, z):
        return self.outer(z) * self.scale

    def __call__(self, x, train: bool):
        return self.decode(self.encode(x, train))


def rest(out, x):
    return ((out - x) ** 2).mean(-1)


def by_name(model, batch):
    return rest(model(model(batch["x"], method="encode"), method="decode"), batch["x"])


def by_function(model, batch):
    return rest(
        model(
            model(batch["x"], method=Coder.encode),
            method=lambda coder, z: coder.outer(z) * coder.scale,
        ),
        batch["x"],
    )


def by_attribute(model, batch):
    assert model.width == 3
    return rest(model.decode(model.encode(batch["x"])), batch["x"])


def trainer_of(model, loss, devices=1):
    mesh = spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    return spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh)


def refused(model, loss):
    with pytest.raises(ModelError) as raised:
        trainer = trainer_of(model, loss)
        trainer.step(trainer.init(BATCHES[0]), BATCHES[0])
    return str(raised.value)


def close(ours, right):
    assert jax.tree.structure(ours) == jax.tree.structure(right)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        jax.device_get(ours),
        right,
    )


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    "loss, devices",
    [(by_name, 1), (by_name, 8), (by_function, 1), (by_attribute, 1), (by_attribute, 8)],
)
def test_loss_of_several_methods_trains_as_in_plain_flax(loss, devices, bound):
    module = Coder()
    variables = module.init(jax.random.key(0), BATCHES[0]["x"], True)
    params, stats, right = variables["params"], variables["batch_stats"], []

    def value(params, stats, x):
        out, changed = module.apply(
            {"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"]
        )
        return rest(out, x).mean(), changed["batch_stats"]

    for batch in BATCHES:
        (number, stats), grads = jax.value_and_grad(value, has_aux=True)(params, stats, batch["x"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        right.append(number)
    trainer = trainer_of(module.bind(variables) if bound else module, loss, devices)
    state, losses = trainer.init(BATCHES[0]), []
    close(state.params, variables["params"])  # those of one call of all, by the same key
    for batch in BATCHES:
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses, right, rtol=2e-5)
    close(state.params, params)
    close(state.stats["batch_stats"], stats)
    out = module.apply({"params": params, "batch_stats": stats}, BATCHES[0]["x"], False)
    np.testing.assert_allclose(
        trainer.evaluate(state, BATCHES[0], batch_size=ROWS)["loss"],
        rest(out, BATCHES[0]["x"]).mean(),
        rtol=1e-4,
    )


def test_bound_module_keeps_arrays_that_the_loss_does_not_use():
    module = Coder()
    variables = module.init(jax.random.key(1), BATCHES[0]["x"], True)
    trainer = trainer_of(
        module.bind(variables), lambda model, batch: (model.encode(batch["x"]) ** 2).mean(-1)
    )
    state, _ = trainer.step(trainer.init(BATCHES[0]), BATCHES[0])
    close(state.params["outer"], variables["params"]["outer"])
    assert not np.allclose(state.params["inner"]["kernel"], variables["params"]["inner"]["kernel"])
    assert trainer.rebuild(state)(BATCHES[0]["x"], False).shape == (ROWS, WIDTH)


def test_attribute_that_is_no_method_is_named_with_a_fix_that_works():
    text = refused(Coder(), lambda model, batch: (model.inner(batch["x"]) ** 2).mean(-1))
    assert "Coder has no method and no field 'inner'; a module that it makes is called by" in text
    trainer = trainer_of(
        Coder(),
        lambda model, batch: (
            model(batch["x"], method=lambda module, x: module.inner(x)) ** 2
        ).mean(-1),
    )
    assert {*trainer.init(BATCHES[0]).params} == {"inner", "scale"}


class Sized(linen.Module):
    """Keeps a mean of its inputs, whose shape is another one in training."""

    @linen.compact
    def __call__(self, x, train: bool = False):
        mean = self.variable("means", "x", jnp.zeros, (WIDTH,) if train else (1, WIDTH))
        mean.value = 0.5 * mean.value + 0.5 * x.mean(0)
        return linen.Dense(WIDTH)(x - mean.value)


class Overwrites(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        mean = self.variable("means", "x", jnp.zeros, (1, WIDTH))
        mean.value = x.mean(0) if train else mean.value
        return linen.Dense(WIDTH)(x - mean.value)


def plain(model, batch):
    return rest(model(batch["x"]), batch["x"])


@pytest.mark.parametrize("devices", [1, 8])
def test_statistics_of_a_bound_module_keep_their_shapes(devices):
    module = Sized()
    variables = module.init(jax.random.key(0), BATCHES[0]["x"], train=False)
    trainer = trainer_of(module.bind(variables), plain, devices)
    state, metrics = trainer.step(trainer.init(BATCHES[0]), BATCHES[0])
    out, changed = module.apply(variables, BATCHES[0]["x"], train=True, mutable=["means"])
    np.testing.assert_allclose(metrics["loss"], rest(out, BATCHES[0]["x"]).mean(), rtol=1e-5)
    close(state.stats["means"], changed["means"])
    assert state.stats["means"]["x"].shape == (1, WIDTH)


def test_statistics_that_training_gives_another_shape_are_named_with_a_fix_that_works():
    module = Overwrites()
    text = refused(module.bind(module.init(jax.random.key(0), BATCHES[0]["x"])), plain)
    assert (
        "  means/x\n      the bound module has float32[1, 4], Overwrites.__call__(float32[16, 4], "
        "train=True) makes float32[4]" in text
    )
    assert "module.init(key, x, train=True)" in text
    trainer = trainer_of(
        module.bind(module.init(jax.random.key(0), BATCHES[0]["x"], train=True)), plain
    )
    state, _ = trainer.step(trainer.init(BATCHES[0]), BATCHES[0])
    assert state.stats["means"]["x"].shape == (WIDTH,)


def test_calls_that_make_one_array_in_two_shapes_are_both_named():
    text = refused(
        Sized(),
        lambda model, batch: plain(model, batch) + rest(model(batch["x"], train=False), batch["x"]),
    )
    assert text.startswith(
        "calls of the linen module in the loss make one array in two shapes\n1 problem:\n\n  "
        "means/x\n"
    )
    assert (
        "Sized.__call__(float32[16, 4], train=True) makes float32[4], Sized.__call__(float32[16, "
        "4], train=False) makes" in text
    )
