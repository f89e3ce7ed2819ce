"""Layers that `[[precision]]` matches, in training: on any mesh, in stacks, pipelines and
microbatches, and in what follows training.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd import Precision
from spmd.base.tree import flatten
from spmd.jaxpr.programs import equations

ROWS, LENGTH, WIDTH = 16, 8, 16
BY_MODEL = (
    spmd.Rule("stack/layers/up/kernel", (None, "model")),
    spmd.Rule("stack/layers/down/kernel", ("model",)),
)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.down(jnp.sin(self.up(x)))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stack, self.head = (
            spmd.nn.LayerStack([Block(rngs) for _ in range(2)]),
            nnx.Linear(WIDTH, 3, rngs=rngs),
        )

    def __call__(self, x):
        return self.head(self.stack(x)).mean(1)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = x + linen.MultiHeadDotProductAttention(4, name="attention")(x)
        return linen.Dense(3, name="head")(jnp.sin(linen.Dense(32, name="up")(x))).mean(1)


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)


def batch(number=0):
    random = np.random.default_rng(number)
    return {
        "x": random.normal(size=(ROWS, LENGTH, WIDTH)).astype("float32"),
        "y": random.normal(size=(ROWS, 3)).astype("float32"),
    }


def trainer_of(
    products, layout="data_parallel", mesh="data=8", model=lambda: Net(), path="**", **options
):
    layout = spmd.Layout.load(layout) if isinstance(layout, str) else layout
    layout = dataclasses.replace(
        layout, mesh=(), precision=(Precision(path, products),) if products else ()
    )
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    return spmd.Trainer(
        model,
        loss=loss,
        optimizer=optax.sgd(0.1, momentum=0.9),
        mesh=mesh,
        layout=layout,
        **options,
    )


def train(trainer):
    """Losses and parameters."""
    state, losses = trainer.init(batch()), []
    for number in range(2):
        state, metrics = trainer.step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return {"losses": np.array(losses)} | {
        path: np.asarray(leaf) for path, leaf in flatten(jax.device_get(state.params)).items()
    }


def furthest(one, other):
    return np.max([np.abs(one[path] - other[path]).max() for path in one])


def factor_dtypes(trainer):
    """Of all matrix products of a step."""
    program = trainer.prepare(batch())[0]
    products = [
        equation
        for equation in equations(program.traced.jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    return [
        tuple(variable.aval.dtype.name for variable in equation.invars) for equation in products
    ]


FSDP = dataclasses.replace(
    spmd.Layout.load("fsdp"), gradients=spmd.Gradients("reduce_scatter", gather="layer")
)
ONE, SAME = {"mesh": "data=1"}, 1e-6
QUICK = ("gathered by layer",)
MESHES = {
    "data": {},
    "compiler": {"layout": spmd.Layout()},
    "microbatches": {"mesh": "data=4", "accumulate": 2},
    "gathered by layer": {"layout": FSDP},
    "tensors": {
        "layout": dataclasses.replace(spmd.Layout.load("data_parallel"), params=BY_MODEL),
        "mesh": "data=4,model=2",
    },
    "pipeline": {"layout": "pipeline", "mesh": "data=4,stage=2"},
    "remat": {
        "layout": dataclasses.replace(spmd.Layout(), remat=spmd.Remat("nothing", ("stack/layers",)))
    },
}


@functools.cache
def alone(products):
    """Trained on one device."""
    return train(trainer_of(products, **ONE))


@pytest.mark.sampled(system=7)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.system) for name in MESHES],
)
def test_int8_does_not_depend_on_the_mesh(name):
    """Scales are of rows of activations, and of columns of weights; gradients are plain ones."""
    wanted, plain = alone("int8"), alone(None)
    assert (
        furthest(train(trainer_of("int8", **MESHES[name])), wanted)
        < SAME
        < 1e-4
        < furthest(wanted, plain)
    )


@pytest.mark.system
def test_float8_does_not_depend_on_where_weights_are():
    """Gradients have a scale for the rows of a worker, so meshes with other workers differ by what
    float8 rounds.
    """
    wanted, plain = (
        train(trainer_of("float8", mesh="data=4")),
        train(trainer_of(None, mesh="data=4")),
    )
    for sharded in ({"layout": FSDP, "mesh": "data=4"}, MESHES["tensors"]):
        assert (
            furthest(train(trainer_of("float8", **sharded)), wanted)
            < SAME
            < 1e-4
            < furthest(wanted, plain)
        )


@pytest.mark.system
@pytest.mark.parametrize(
    "model",
    [lambda: Net(), pytest.param(LinenNet(), marks=pytest.mark.system)],
    ids=["nnx", "linen"],
)
def test_every_layer_follows_the_rule(model):
    for products, (forward, backward) in {
        "float8": ("float8_e4m3fn", "float8_e5m2"),
        "int8": ("int8", "float32"),
        "bfloat16": ("bfloat16", "bfloat16"),
    }.items():
        found = set(factor_dtypes(trainer_of(products, model=model)))
        assert (forward, forward) in found and {(backward, forward), (backward, backward)} & found
    plain = factor_dtypes(trainer_of(None, model=model))
    assert set(plain) == {("float32", "float32")}
    only = factor_dtypes(trainer_of("int8", model=model, path="head"))
    assert only.count(("int8", "int8")) == 1 and len(only) == len(plain)


@pytest.mark.system
def test_evaluation_and_prediction_use_the_same_products():
    ours, one, plain = (
        predicted(trainer)
        for trainer in (trainer_of("int8"), trainer_of("int8", **ONE), trainer_of(None))
    )
    np.testing.assert_allclose(ours, one, rtol=0, atol=SAME)
    assert np.abs(ours - plain).max() > 1e-4


def predicted(trainer):
    trainer.prepare(batch())
    return trainer.predict(trainer.init(), batch()["x"])
