"""A scan that gathers one layer ahead has the values and gradients of one that has all
parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.jaxpr.programs import equations
from spmd.nn.gathered_scan import Communication, Stack, scan_gathered
from spmd.nn.stacking import gathered_policy
from tests.compare import assert_close

WIDTH = 4
NO_COPIES = Communication(
    lambda shards: shards,
    lambda shards, grads, residuals: (grads, jax.tree.map(lambda x: x + 1, residuals)),
)


def values(layers):
    rng = np.random.default_rng(0)
    weights = {"w": jnp.asarray(rng.normal(size=(layers, WIDTH, WIDTH)), jnp.float32)}
    others = {
        "scale": jnp.asarray(rng.normal(size=(layers, WIDTH)), jnp.float32),
        "number": jnp.arange(layers),
    }
    table, x = (jnp.asarray(rng.normal(size=(3, WIDTH)), jnp.float32) for _ in range(2))
    return weights, others, table, x


def layer(table, x, weights, others):
    x = jnp.tanh(x @ weights["w"]) * others["scale"] + table * (others["number"] + 1)
    return x, {"mean": x.mean(), "calls": others["number"] + 1}


def keep_nothing(jaxpr):
    return None


def everything(jaxpr):
    return jax.checkpoint_policies.everything_saveable


def total(x, kept):
    return jnp.sum(x**2) + jnp.sum(jnp.sin(kept["mean"]) * jnp.arange(len(kept["mean"])))


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.everything_saveable], ids=["recomputed", "kept"]
)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_values_and_gradients_are_those_of_a_plain_scan(layers, policy):
    weights, others, table, x = values(layers)

    def plain(weights, scale, table, x):
        def body(x, inputs):
            return layer(table, x, *inputs)

        x, kept = jax.lax.scan(body, x, (weights, others | {"scale": scale}))
        return total(x, kept), kept

    def ahead(weights, scale, table, x, residuals):
        def run(x, weights, others):
            return layer(table, x, weights, others)  # the table is closed over

        stack = Stack(weights, others | {"scale": scale}, residuals)
        x, kept = scan_gathered(NO_COPIES, run, x, stack, policy_of=lambda jaxpr: policy)
        return total(x, kept), kept

    residuals = {"w": jnp.zeros((layers, WIDTH))}
    arguments = weights, others["scale"], table, x
    (expected, kept), grads = jax.jit(jax.value_and_grad(plain, range(4), has_aux=True))(*arguments)
    (value, ours), (*found, after) = jax.jit(jax.value_and_grad(ahead, range(5), has_aux=True))(
        *arguments, residuals
    )
    assert_close(float(value), float(expected))
    assert ours["calls"].tolist() == kept["calls"].tolist() == list(range(1, layers + 1))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(
            np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5
        ),
        tuple(found),
        grads,
    )
    np.testing.assert_array_equal(after["w"], np.ones((layers, WIDTH)))
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(grads)[:3])


@pytest.mark.system
def test_integers_are_handed_from_layer_to_layer():
    weights, others, table, x = values(3)

    def run(carry, weights, others):
        x, count = carry
        y, kept = layer(table, x, weights, others)
        return (y * (count + 1), count + 1), kept

    def plain(weights, x):
        (x, count), _ = jax.lax.scan(
            lambda carry, inputs: run(carry, *inputs), (x, jnp.int32(0)), (weights, others)
        )
        return jnp.sum(x**2), count

    def ahead(weights, x):
        (x, count), _ = scan_gathered(
            NO_COPIES, run, (x, jnp.int32(0)), Stack(weights, others, {}), policy_of=keep_nothing
        )
        return jnp.sum(x**2), count

    (_, count), grads = jax.value_and_grad(ahead, (0, 1), has_aux=True)(weights, x)
    expected = jax.grad(plain, (0, 1), has_aux=True)(weights, x)[0]
    assert count == 3
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(
            np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-4
        ),
        grads,
        expected,
    )


@pytest.mark.system
@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_may_close_over_the_first_input(layers):
    weights, others, _, x = values(layers)

    def plain(weights, x):
        last, _ = jax.lax.scan(lambda carry, inputs: layer(x, carry, *inputs), x, (weights, others))
        return jnp.sum(last**2)

    def ahead(weights, x):
        last, _ = scan_gathered(
            NO_COPIES,
            lambda *inputs: layer(x, *inputs),
            x,
            Stack(weights, others, {}),
            policy_of=keep_nothing,
        )
        return jnp.sum(last**2)

    grads, expected = (jax.grad(function, (0, 1))(weights, x) for function in (ahead, plain))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(
            np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-4
        ),
        grads,
        expected,
    )


def test_values_without_a_backward_pass():
    weights, others, table, x = values(3)
    y, kept = scan_gathered(
        NO_COPIES,
        lambda *inputs: layer(table, *inputs),
        x,
        Stack(weights, others, {}),
        policy_of=keep_nothing,
    )
    expected, means = jax.lax.scan(lambda x, inputs: layer(table, x, *inputs), x, (weights, others))
    assert_close(y, expected)
    assert_close(kept["mean"], means["mean"])


def in_a_loop(x, w):
    return jax.lax.scan(lambda x, w: (jax.nn.gelu(x @ w), None), x, w[None])[0]


@jax.custom_vjp
def with_a_gradient(x, w):
    return jax.nn.gelu(x @ w)


with_a_gradient.defvjp(
    lambda x, w: jax.vjp(lambda x, w: jax.nn.gelu(x @ w), x, w), lambda function, dy: function(dy)
)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("compute", "kept"),
    [(lambda x, w: jax.nn.gelu(x @ w), 2), (in_a_loop, None), (with_a_gradient, None)],
    ids=["products", "a loop", "products with a gradient of their own"],
)
def test_elementwise_results_are_computed_again(compute, kept):
    weights, _, _, x = values(3)

    def run(x, weights, others):
        return x + compute(x, weights["w"]), {}

    def gradient(policy_of):
        stack = Stack(weights, {"number": jnp.arange(3)}, {})
        return jax.grad(
            lambda x, w: jnp.sum(
                scan_gathered(NO_COPIES, run, x, stack._replace(shards=w), policy_of=policy_of)[0]
            ),
            (0, 1),
        )

    def saved(policy_of):
        """How many arrays of the size of x all layers but the last save."""
        loops = (
            one
            for one in equations(jax.make_jaxpr(gradient(policy_of))(x, weights).jaxpr)
            if one.primitive.name == "scan"
        )
        return sum(
            var.aval.shape[:1] + var.aval.shape[-2:] == (2, *x.shape) for var in next(loops).outvars
        )

    ours = gathered_policy({}, None)
    assert (
        (saved(ours) == kept < saved(everything))
        if kept
        else (saved(ours) == saved(everything) > 2)
    )
    jax.tree.map(
        lambda one, other: assert_close(one, other),
        *(gradient(of)(x, weights) for of in (ours, everything)),
    )
