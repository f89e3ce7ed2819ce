"""Optimizers that need entire matrices train under every layout what they train on one device, and no collective is in their iterations."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import spmd
from spmd.errors import LayoutError
from spmd.jaxpr import equations
from spmd.layout.resolve import resolve
from spmd.layout.toml_reader import loads
from spmd.mesh import MeshSpec
from spmd.planner.compile import PLUGIN
from spmd.planner.hlo import collective_kind, parse
from spmd.train.matrix_owners import Group, update_by_owners
from tests.nn.pipes import relative_difference
from tests.train.test_pipelines import Tied, piped, tokens, weights

STEPS, ROWS = 4, 32
SYSTEM = pytest.mark.system

# optimizers -----------------------------------------------------------------------------------------------------------


def dims_of(params):
    """Muon for matrices, and for each layer of a stack."""

    def dims(leaf):
        return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if leaf.ndim > 1 else None

    return jax.tree.map(dims, params)


def shampoo(rate, decay=0.9, epsilon=0.05):
    """Shampoo (Gupta et al. 2018, arXiv:1802.09568, algorithm 1, with decayed statistics) for arrays of at least two dims."""

    def matrices(leaf):
        return leaf.reshape(-1, *leaf.shape[-2:])

    def init(params):
        def identities(size):
            return jax.tree.map(
                lambda p: epsilon * jnp.broadcast_to(jnp.eye(p.shape[size]), (*p.shape[:-2], *[p.shape[size]] * 2)) if p.ndim > 1 else None,
                params,
            )

        return {"momentum": jax.tree.map(jnp.zeros_like, params), "left": identities(-2), "right": identities(-1)}

    def root(statistics):
        values, vectors = jnp.linalg.eigh(statistics)
        return (vectors * values**-0.25) @ vectors.T

    def precondition(grad, momentum, left, right):
        if grad.ndim < 2:
            return momentum, left, right
        left = decay * left + (1 - decay) * grad @ jnp.swapaxes(grad, -1, -2)
        right = decay * right + (1 - decay) * jnp.swapaxes(grad, -1, -2) @ grad
        roots = [jax.vmap(root)(matrices(each)) for each in (left, right)]
        return (roots[0] @ matrices(momentum) @ roots[1]).reshape(grad.shape), left, right

    def update(grads, state, params=None):
        del params
        momentum = jax.tree.map(lambda m, g: decay * m + g, state["momentum"], grads)
        leaves, structure = jax.tree.flatten(grads)
        parts = zip(*(structure.flatten_up_to(tree) for tree in (momentum, state["left"], state["right"])), strict=True)
        done = [precondition(grad, *part) for grad, part in zip(leaves, parts, strict=True)]
        updates, left, right = (structure.unflatten(each) for each in zip(*done, strict=True))
        return jax.tree.map(lambda u: -rate * u, updates), {"momentum": momentum, "left": left, "right": right}

    return optax.GradientTransformation(init, update)


MUON = functools.partial(optax.contrib.muon, 0.02, muon_weight_dimension_numbers=dims_of)
OPTIMIZERS = {
    "muon": MUON(),
    "muon of matrices alone": optax.contrib.muon(0.02),
    "muon, clipped": optax.chain(optax.clip_by_global_norm(0.1), MUON(adaptive=True, weight_decay=0.01)),
    "muon, every 2": optax.MultiSteps(MUON(), 2),
    "muon, averaged": spmd.optimizers.average_weights(optax.apply_if_finite(MUON(ns_steps=3), 2)),
    "shampoo": shampoo(0.02),
    "adafactor": optax.adafactor(0.02, min_dim_size_to_factor=8),
    "lamb": optax.lamb(0.01),
}

# a model and its layouts ------------------------------------------------------------------------------------------------


def make(key):
    def drawn(*shape):
        return 0.4 * jax.random.normal(jax.random.fold_in(key, sum(shape) * len(shape)), shape) / shape[-1] ** 0.5 * 3

    blocks = [{"kernel": drawn(16, 16) * (1 + number)} for number in range(3)]
    return {"first": drawn(8, 16), "bias": jnp.full(16, 0.1), "blocks": blocks, "stack": drawn(4, 16, 16), "head": drawn(16, 8)}


def apply(params, x):
    x = x @ params["first"] + params["bias"]
    for kernel in [block["kernel"] for block in params["blocks"]] + list(params["stack"]):
        x = x + jnp.tanh(x @ kernel) / 4
    return x @ params["head"]


def batches():
    random = np.random.default_rng(0)
    return [
        {"x": random.normal(size=(ROWS, 8)).astype("float32"), "y": random.normal(size=(ROWS, 8)).astype("float32")} for _ in range(STEPS)
    ]


def layout(name, matrices):
    declared = LAYOUTS[name][1]
    return dataclasses.replace(declared, optimizer=dataclasses.replace(declared.optimizer, matrices=matrices))


TENSOR = (spmd.Rule("**/kernel", (None, "model")), spmd.Rule("stack", (None, "model", "data")), spmd.Rule("head", ("model", "data")))
LAYOUTS = {
    "data_parallel": ("data=8", spmd.Layout.load("data_parallel")),
    "zero1": ("data=8", spmd.Layout.load("zero1")),
    "fsdp": ("data=8", spmd.Layout.load("fsdp")),
    "fsdp, by the compiler": ("data=8", dataclasses.replace(spmd.Layout.load("fsdp"), gradients=spmd.Gradients())),
    "fsdp x tensor": (
        "data=4,model=2",
        spmd.Layout(params=TENSOR, default=spmd.Default("shard:data"), gradients=spmd.Gradients("reduce_scatter")),
    ),
    "a dim over both": ("data=4,model=2", spmd.Layout(params=(spmd.Rule("{blocks/*/kernel,stack}", (None, ("data", "model"))),))),
}


def trainer_of(optimizer, name, matrices):
    mesh, loss = LAYOUTS[name][0], spmd.losses.mean_squared_error
    return spmd.Trainer(spmd.FunctionalModel(make, apply), loss=loss, optimizer=optimizer, mesh=mesh, layout=layout(name, matrices))


@functools.cache
def reference(name):
    """Parameters of a plain loop on one device."""
    model, optimizer = spmd.FunctionalModel(make, apply), OPTIMIZERS[name]
    params = spmd.Trainer(model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), mesh=one_device()).init().params
    params = jax.tree.map(np.asarray, params)
    optimizer = optimizer if hasattr(optimizer, "init") else optimizer.gradient_transformation()

    @jax.jit
    def step(params, opt, batch):
        grads = jax.grad(lambda params: ((apply(params, batch["x"]) - batch["y"]) ** 2).mean())(params)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    opt = optimizer.init(params)
    for batch in batches():
        params, opt = step(params, opt, batch)
    return jax.device_get(params)


def one_device():
    return spmd.make_mesh("data=1", devices=jax.devices()[:1])


def steps(trainer):
    state = trainer.init()
    for batch in batches():
        state, _ = trainer.step(state, batch)
    return state


CASES = [(optimizer, name) for optimizer in OPTIMIZERS for name in LAYOUTS]


@pytest.mark.sampled(11)
@pytest.mark.parametrize("matrices", ["owner", "compiler"])
@pytest.mark.parametrize(("optimizer", "name"), CASES, ids=[f"{optimizer}-{name}" for optimizer, name in CASES])
def test_equals_one_device(optimizer, name, matrices):
    trainer = trainer_of(OPTIMIZERS[optimizer], name, matrices)
    state = steps(trainer)
    wanted = jax.tree_util.tree_leaves_with_path(reference(optimizer))
    for (path, leaf), got in zip(wanted, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(np.asarray(got), leaf, rtol=0, atol=1e-5 * np.abs(leaf).max(), err_msg=jax.tree_util.keystr(path))
