"""Functions with a backward pass of their own, in a loss: the gradients are those of plain JAX on
the full batch, or it is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.errors import LossError
from tests.compare import assert_close

ROWS, STEPS = 32, 3
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def with_backward(backward):
    """A function that returns its first argument, with this backward pass: from (the arguments, the
    gradient) to their gradients.
    """
    function = jax.custom_vjp(lambda x, *others: x)
    function.defvjp(lambda *arguments: (arguments[0], arguments), backward)
    return function


clip = with_backward(lambda arguments, g: (jnp.clip(g, -0.005, 0.005),))
clip_norm = with_backward(lambda arguments, g: (g * jnp.minimum(1, 0.05 / jnp.linalg.norm(g)),))
with_auxiliary = with_backward(lambda arguments, g: (g, jnp.ones_like(arguments[1])))
rounded = with_backward(lambda arguments, g: (jnp.round(g * 256) / 256,))
without_noise = with_backward(lambda arguments, g: (jnp.where(jnp.abs(g) < 1e-3, 0, g),))
in_a_loop = with_backward(
    lambda arguments, g: (
        jax.lax.scan(lambda total, x: (total + jnp.tanh(x), None), 0 * g[0], g)[0] + 0 * g,
    )
)


def capturing(value):
    """A function of one argument that uses another value, which is traced."""
    function = jax.custom_vjp(lambda x: x + 0 * value)
    function.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.005, 0.005),))
    return function


reverse = with_backward(lambda arguments, g: (-g,))
masked = with_backward(lambda arguments, g: (jnp.where(arguments[0] > 0, g, 0.1 * g),))
mixed = with_backward(
    lambda arguments, g: (
        g @ jnp.outer(jnp.arange(8.0), jnp.ones(8)) / (1 + jnp.exp(arguments[0])),
        jnp.zeros(8),
    )
)

NONLINEAR = {
    "clip of results": lambda model, b: cross_entropy(clip(model(b["x"])), b["y"]),
    "clip, mean": lambda model, b: cross_entropy(clip(model(b["x"])), b["y"]).mean(),
    "clip of a weight": lambda model, b: cross_entropy(
        b["x"] @ clip(model.kernel[...]), b["y"]
    ).mean(),
    "norm of all rows": lambda model, b: cross_entropy(clip_norm(model(b["x"])), b["y"]),
    "auxiliary": lambda model, b: cross_entropy(
        with_auxiliary(model(b["x"]), 1e-3 * (model(b["x"]) ** 2).mean()), b["y"]
    ).mean(),
    "rounded": lambda model, b: cross_entropy(rounded(model(b["x"])), b["y"]),
    "without noise": lambda model, b: cross_entropy(without_noise(model(b["x"])), b["y"]),
    "in a loop": lambda model, b: cross_entropy(in_a_loop(model(b["x"])), b["y"]),
    "under jit and remat": lambda model, b: cross_entropy(
        jax.jit(jax.checkpoint(clip))(model(b["x"])), b["y"]
    ),
    "captures a value": lambda model, b: cross_entropy(
        capturing(b["mask"].mean())(model(b["x"])), b["y"]
    ),
    "sum and count": lambda model, b: (
        (cross_entropy(clip(model(b["x"])), b["y"]) * b["mask"]).sum(),
        b["mask"].sum(),
    ),
}
LINEAR = {
    "reverse": lambda model, b: cross_entropy(reverse(model(b["x"])), b["y"]),
    "masked": lambda model, b: cross_entropy(masked(model(b["x"])), b["y"]).mean(),
    "mixed": lambda model, b: cross_entropy(mixed(model(b["x"]), jnp.ones(8)), b["y"]),
}


def batches():
    random = np.random.default_rng(0)

    def batch():
        mask = (random.random(ROWS) < 0.7).astype(np.float32)
        return {
            "x": random.normal(size=(ROWS, 8)).astype(np.float32),
            "y": random.integers(0, 8, ROWS).astype(np.int32),
            "mask": mask,
        }

    return [batch() for _ in range(STEPS)]


def make():
    return nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))


@functools.cache
def reference(name):
    """Losses and the weight of a loop without spmd."""
    loss = (NONLINEAR | LINEAR)[name]
    graph, params = nnx.split(make())
    optimizer = optax.sgd(1.0)
    state, losses = optimizer.init(params), []

    @jax.jit
    def gradient(params, batch):
        def mean(params):
            value = loss(nnx.merge(graph, params), batch)
            return value[0] / value[1] if isinstance(value, tuple) else value.mean()

        return jax.value_and_grad(mean)(params)

    for batch in batches():
        value, grads = gradient(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, np.asarray(params["kernel"][...])


def train(name, devices=8, **options):
    mesh = spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    options |= {
        "loss": (NONLINEAR | LINEAR)[name],
        "optimizer": optax.sgd(1.0),
        "batch_size": None,
        "progress": False,
        "mesh": mesh,
    }
    return spmd.fit(make, batches(), **options)


def assert_equals_reference(name, result):
    losses, kernel = reference(name)
    assert_close(np.asarray(result.history["loss"]), np.asarray(losses), 1e-6)
    assert_close(np.asarray(result.model.kernel[...]), kernel, 1e-5)


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize(
    ("devices", "layout"),
    [(1, "data_parallel"), (8, "data_parallel"), (8, "fsdp")],
    ids=["one device", "8", "fsdp"],
)
@pytest.mark.parametrize("name", NONLINEAR)
def test_nonlinear_backward_passes(name, devices, layout):
    assert_equals_reference(name, train(name, devices, layout=layout))


@pytest.mark.parametrize(
    "name", ["clip of results", "clip of a weight", "norm of all rows", "auxiliary", "in a loop"]
)
def test_what_computes_gradients_in_parts_is_refused(name):
    compressed = spmd.Layout(gradients=spmd.Gradients("all_reduce", "bfloat16"))
    for options in ({"accumulate": 2}, {"devices": 1, "accumulate": 2}, {"layout": compressed}):
        with pytest.raises(
            LossError,
            match=r"backward pass of its own at test_own_derivatives\.py:\d+ that is not linear",
        ) as raised:
            train(name, **options)
        assert raised.value.fix.startswith(("accumulate=1", '[gradients] reduction = "compiler"'))


def test_the_fix_trains():
    with pytest.raises(LossError) as raised:
        train("clip of results", devices=1, accumulate=2)
    assert raised.value.fix.startswith(
        "accumulate=1; or a function whose backward pass is a multiple of the gradient that it is "
        "given"
    )
    assert_equals_reference("clip of results", train("clip of results", devices=1, accumulate=1))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_backward_passes_stay_with_the_layout(name, caplog):
    assert_equals_reference(name, train(name))
    assert "not linear" not in caplog.text
    assert_equals_reference(name, train(name, accumulate=2))
