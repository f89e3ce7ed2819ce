"""Optimizers that need entire matrices train under every layout what they train on one device, and
no collective is in their iterations.
"""

import dataclasses
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import spmd
from spmd.errors import LayoutError
from spmd.jaxpr.programs import equations
from spmd.layout.resolve import resolve
from spmd.layout.toml_reader import loads
from spmd.mesh import MeshSpec
from spmd.planner.compile import PLUGIN
from spmd.planner.hlo import collective_kind, parse
from spmd.train.matrix_owners import Group, owner_notes, param_within, update_by_owners
from tests.compare import assert_close, relative_difference
from tests.train.test_pipelines import Tied, piped, tokens, weights

STEPS, ROWS = 4, 32
SYSTEM = pytest.mark.system

# optimizers ---------------------------------------------------------------------------------------


def dims_of(params):
    """Muon for matrices, and for each layer of a stack."""

    def dims(leaf):
        return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if leaf.ndim > 1 else None

    return jax.tree.map(dims, params)


def shampoo(rate, decay=0.9, epsilon=0.05):
    """Shampoo (Gupta et al. 2018, arXiv:1802.09568, algorithm 1, with decayed statistics) for
    arrays of at least two dims.
    """

    def matrices(leaf):
        return leaf.reshape(-1, *leaf.shape[-2:])

    def init(params):
        def identities(size):
            return jax.tree.map(
                lambda p: (
                    epsilon
                    * jnp.broadcast_to(
                        jnp.eye(p.shape[size]), (*p.shape[:-2], *[p.shape[size]] * 2)
                    )
                    if p.ndim > 1
                    else None
                ),
                params,
            )

        return {
            "momentum": jax.tree.map(jnp.zeros_like, params),
            "left": identities(-2),
            "right": identities(-1),
        }

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
        parts = zip(
            *(structure.flatten_up_to(tree) for tree in (momentum, state["left"], state["right"])),
            strict=True,
        )
        done = [precondition(grad, *part) for grad, part in zip(leaves, parts, strict=True)]
        updates, left, right = (structure.unflatten(each) for each in zip(*done, strict=True))
        return jax.tree.map(lambda u: -rate * u, updates), {
            "momentum": momentum,
            "left": left,
            "right": right,
        }

    return optax.GradientTransformation(init, update)


MUON = functools.partial(optax.contrib.muon, 0.02, muon_weight_dimension_numbers=dims_of)
OPTIMIZERS = {
    "muon": MUON(),
    "muon of matrices alone": optax.contrib.muon(0.02),
    "muon, clipped": optax.chain(
        optax.clip_by_global_norm(0.1), MUON(adaptive=True, weight_decay=0.01)
    ),
    "muon, every 2": optax.MultiSteps(MUON(), 2),
    "muon, averaged": spmd.optimizers.average_weights(optax.apply_if_finite(MUON(ns_steps=3), 2)),
    "muon, scaled": optax.chain(
        optax.clip_by_block_rms(0.01),
        MUON(adaptive=True),
        optax.scale_by_trust_ratio(),
        optax.scale(0.1),
    ),
    "shampoo": shampoo(0.02),
    "adafactor": optax.adafactor(0.02, min_dim_size_to_factor=8),
    "lamb": optax.lamb(0.01),
}

# a model and its layouts --------------------------------------------------------------------------


def make(key):
    def drawn(*shape):
        return (
            0.4
            * jax.random.normal(jax.random.fold_in(key, sum(shape) * len(shape)), shape)
            / shape[-1] ** 0.5
            * 3
        )

    blocks = [{"kernel": drawn(16, 16) * (1 + number)} for number in range(3)]
    return {
        "first": drawn(8, 16),
        "bias": jnp.full(16, 0.1),
        "blocks": blocks,
        "stack": drawn(4, 16, 16),
        "head": drawn(16, 8),
    }


def apply(params, x):
    x = x @ params["first"] + params["bias"]
    for kernel in [block["kernel"] for block in params["blocks"]] + list(params["stack"]):
        x = x + jnp.tanh(x @ kernel) / 4
    return x @ params["head"]


def batches():
    random = np.random.default_rng(0)
    return [
        {
            "x": random.normal(size=(ROWS, 8)).astype("float32"),
            "y": random.normal(size=(ROWS, 8)).astype("float32"),
        }
        for _ in range(STEPS)
    ]


def layout(name, matrices):
    declared = LAYOUTS[name][1]
    return dataclasses.replace(
        declared, optimizer=dataclasses.replace(declared.optimizer, matrices=matrices)
    )


TENSOR = (
    spmd.Rule("**/kernel", ("data", "model")),
    spmd.Rule("stack", (None, "model", "data")),
    spmd.Rule("head", ("model", "data")),
)


def SERVERS(placement, **options):
    gradients = spmd.Gradients("parameter_server")
    return spmd.Layout(
        gradients=gradients, parameter_server=spmd.ParameterServer(placement=placement, **options)
    )


LAYOUTS = {
    "data_parallel": ("data=8", spmd.Layout.load("data_parallel")),
    "zero1": ("data=8", spmd.Layout.load("zero1")),
    "fsdp": ("data=8", spmd.Layout.load("fsdp")),
    "fsdp, by the compiler": (
        "data=8",
        dataclasses.replace(spmd.Layout.load("fsdp"), gradients=spmd.Gradients()),
    ),
    "fsdp x tensor": (
        "data=4,model=2",
        spmd.Layout(
            params=TENSOR,
            default=spmd.Default("shard:data"),
            gradients=spmd.Gradients("reduce_scatter"),
        ),
    ),
    "servers, sliced": ("data=8", SERVERS("sliced")),
    "servers, largest first": ("data=8", SERVERS("largest_first", servers=3)),
    "a dim over both": (
        "data=4,model=2",
        spmd.Layout(params=(spmd.Rule("{blocks/*/kernel,stack}", (None, ("data", "model"))),)),
    ),
}


def trainer_of(optimizer, name, matrices):
    mesh, loss = LAYOUTS[name][0], spmd.losses.mean_squared_error
    return spmd.Trainer(
        spmd.FunctionalModel(make, apply),
        loss=loss,
        optimizer=optimizer,
        mesh=mesh,
        layout=layout(name, matrices),
    )


@functools.cache
def reference(name):
    """Parameters of a plain loop on one device."""
    model, optimizer = spmd.FunctionalModel(make, apply), OPTIMIZERS[name]
    params = (
        spmd.Trainer(
            model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), mesh=one_device()
        )
        .init()
        .params
    )
    params = jax.tree.map(np.asarray, params)

    @jax.jit
    def step(params, opt, batch):
        grads = jax.grad(lambda params: ((apply(params, batch["x"]) - batch["y"]) ** 2).mean())(
            params
        )
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


CASES = [
    (*case, matrices)
    for case in itertools.product(OPTIMIZERS, LAYOUTS)
    for matrices in ("owner", "compiler")
]
CASES = [
    case for case in CASES if case[2] == "owner" or "servers" not in case[1]
]  # servers have rows, of which most would compute otherwise


@pytest.mark.sampled(system=17)
@pytest.mark.parametrize(
    ("optimizer", "name", "matrices"), CASES, ids=["-".join(case) for case in CASES]
)
def test_equals_one_device(optimizer, name, matrices):
    trainer = trainer_of(OPTIMIZERS[optimizer], name, matrices)
    params = trainer.placed.states.unpacked(steps(trainer).params)
    assert_close(jax.tree.leaves(params), jax.tree.leaves(reference(optimizer)), 1e-5)


# what has an owner --------------------------------------------------------------------------------


def groups_of(optimizer, name, like=None):
    """The groups of matrices under a layout, and the traced update."""
    mesh, declared = LAYOUTS[name][0], layout(name, "owner")
    params = jax.eval_shape(make, jax.random.key(0)) if like is None else like
    resolved = resolve(declared, spmd.base.tree.flatten(params), {}, MeshSpec.parse(mesh))
    groups, state = [], jax.eval_shape(optimizer.init, params)
    update = update_by_owners(
        optax.with_extra_args_support(optimizer), resolved, spmd.make_mesh(mesh), groups
    ).update
    return groups, jax.make_jaxpr(update)(params, state, params)


def collectives_of(jaxpr):
    names = [equation.primitive.name for equation in equations(jaxpr.jaxpr)]
    return {
        name: names.count(name) for name in ("all_to_all", "all_gather", "psum") if name in names
    }


FIRST, KERNELS, LAYERS, HEAD = (
    Group((8, 16), 1, 1),
    Group((16, 16), 3, 1),
    Group((16, 16), 4, 1),
    Group((16, 8), 1, 1),
)


def test_equal_matrices_are_a_group():
    groups, program = groups_of(MUON(), "fsdp")
    assert groups == [KERNELS, FIRST, HEAD, LAYERS]
    assert collectives_of(program) == {"all_to_all": 2 * len(groups)}, "one way there, one way back"


def test_replicated_gradients_are_not_sent():
    groups, program = groups_of(MUON(), "data_parallel")
    assert collectives_of(program) == {"all_gather": len(groups)}


def test_each_sharded_dim_is_sent_once():
    groups, program = groups_of(MUON(), "fsdp x tensor")
    assert groups == [KERNELS, FIRST, HEAD, LAYERS]
    assert collectives_of(program) == {"all_to_all": 14, "all_gather": 1}, (
        "of `first` no dim is sharded over model"
    )


def test_statistics_are_sent_to_owners_and_back():
    groups, program = groups_of(shampoo(0.1), "fsdp")
    assert groups == [KERNELS, FIRST, HEAD, LAYERS]
    assert collectives_of(program) == {"all_to_all": 7 * len(groups)}, (
        "gradient, momentum, left and right; update, left and right"
    )


AROUND = {
    "clip": optax.chain(optax.clip_by_global_norm(0.1), MUON(), optax.clip_by_global_norm(0.1)),
    "every 2": OPTIMIZERS["muon, every 2"],
    "averaged": OPTIMIZERS["muon, averaged"],
}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("optimizer", AROUND.values(), ids=AROUND)
def test_what_is_around_an_optimizer_does_not_matter(optimizer):
    assert {*groups_of(optimizer, "fsdp")[0]} == {KERNELS, FIRST, HEAD, LAYERS}


def test_sums_over_all_layers_stay_outside():
    """`adaptive` scales the updates of a stack by a sum over it, and the clip divides by one."""
    optimizer = optax.chain(
        optax.clip_by_block_rms(0.01), MUON(adaptive=True), optax.scale_by_trust_ratio()
    )
    assert {*groups_of(optimizer, "fsdp")[0]} == {KERNELS, FIRST, HEAD, LAYERS}


@pytest.mark.parametrize(
    "optimizer", [optax.adamw(0.1), OPTIMIZERS["adafactor"], OPTIMIZERS["lamb"]]
)
def test_sums_and_norms_have_no_owner(optimizer):
    groups, program = groups_of(optimizer, "fsdp")
    assert not groups and not collectives_of(program)


def test_a_norm_of_all_gradients_divides_an_update():
    """Two products with a global norm between them: the second needs it of the results of the
    first.
    """

    def update(grads, state, params=None):
        first = jax.tree.map(lambda g: g @ g.T if g.ndim == 2 else g, grads)
        scale = 1 / optax.tree_utils.tree_norm(first)
        return jax.tree.map(lambda f, g: scale * f @ g if g.ndim == 2 else g, first, grads), state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    groups, _ = groups_of(
        optimizer,
        "fsdp",
        {
            "a": jax.ShapeDtypeStruct((8, 8), "float32"),
            "b": jax.ShapeDtypeStruct((8, 8), "float32"),
        },
    )
    assert groups == [Group((8, 8), 2, 1)] * 2


def updated(optimizer, grads):
    """An update by owners under `fsdp`, its groups, and the update without owners."""
    optimizer, groups = optax.with_extra_args_support(optimizer), []
    declared, state = layout("fsdp", "owner"), optimizer.init(grads)
    resolved = resolve(
        declared,
        spmd.base.tree.flatten(jax.eval_shape(lambda: grads)),
        {},
        MeshSpec.parse("data=8"),
    )
    by_owners = update_by_owners(optimizer, resolved, spmd.make_mesh("data=8"), groups).update
    return (
        jax.jit(by_owners)(grads, state, grads)[0],
        groups,
        jax.jit(optimizer.update)(grads, state, grads)[0],
    )


def normals(**shapes):
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}


SQUARES = normals(a=(8, 8), b=(8, 8))


def without_state(rule):
    return optax.GradientTransformation(
        lambda params: (), lambda grads, state, params=None: (rule(grads), state)
    )


def test_equal_programs_before_and_after_a_norm_are_two_groups():
    def rule(grads):
        first = jax.tree.map(lambda g: g @ g, grads)
        scaled = jax.tree.map(lambda f: f / optax.tree_utils.tree_norm(first), first)
        return jax.tree.map(lambda h: h @ h, scaled)

    updates, groups, wanted = updated(without_state(rule), SQUARES)
    assert_close(updates, wanted, 1e-5)
    assert groups == [Group((8, 8), 2, 1)] * 2


def test_empty_parameters_have_an_update():
    updates, groups, wanted = updated(
        without_state(lambda grads: {k: g @ g.T @ g for k, g in grads.items()}),
        normals(a=(0, 8), b=(8, 8)),
    )
    assert_close(updates, wanted, 1e-5)
    assert groups == [Group((8, 8), 1, 1)]


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    "optimizer",
    [optax.contrib.muon(0.02), optax.inject_hyperparams(optax.contrib.muon)(0.02)],
    ids=["muon", "injected"],
)
def test_scalars_that_are_computed_alike_are_one(optimizer):
    """Of bfloat16 parameters each converts the scalars that they share."""
    grads = {name: jnp.asarray(leaf, "bfloat16") for name, leaf in SQUARES.items()}
    assert updated(optimizer, grads)[1] == [Group((8, 8), 2, 1)]


def test_conditions_that_are_computed_alike_are_one():
    def update(grads, state, params=None):
        return jax.tree.map(
            lambda g: jax.lax.cond(state % 10 == 0, lambda g: g @ g @ g, lambda g: g @ g, g), grads
        ), state + 1

    updates, groups, wanted = updated(
        optax.GradientTransformation(lambda params: jnp.int32(3), update), SQUARES
    )
    assert_close(updates, wanted, 1e-5)
    assert groups == [Group((8, 8), 2, 1)]


def test_scalars_that_differ_are_two():
    def update(grads, state, params=None):
        return {
            name: (state + number) * (g @ g) @ g for number, (name, g) in enumerate(grads.items())
        }, state

    updates, groups, wanted = updated(
        optax.GradientTransformation(lambda params: jnp.float32(3), update), SQUARES
    )
    assert_close(updates, wanted, 1e-5)
    assert groups == [Group((8, 8), 1, 1)] * 2


def test_what_cannot_be_batched_is_left_to_the_compiler():
    def called(g):
        return jax.pure_callback(lambda x: 2 * np.asarray(x), g, g @ g.T @ g) @ g

    updates, groups, wanted = updated(
        without_state(lambda grads: {"a": called(grads["a"]), "b": grads["b"] @ grads["b"]}),
        SQUARES,
    )
    assert_close(updates, wanted, 1e-5)
    assert groups == [Group((8, 8), 1, 1)], "b has one"


def test_states_named_like_parameters_are_not_theirs():
    for path, names, wanted in (
        ("0/mu/w", ("mu", "w"), "w"),
        ("0/mu/mu", ("mu", "w"), "mu"),
        ("0/mu/w", ("mu/w", "w"), "mu/w"),
        ("0/L/w/left", ("L", "w"), "w"),
        ("0/count", ("0", "1"), None),
        ("inner/0/mu/1", ("0", "1"), "1"),
        ("0/0/kernel/left", ("0/kernel", "1/kernel"), "0/kernel"),
    ):
        assert param_within(path, dict.fromkeys(names)) == wanted, path


@pytest.mark.parametrize("names", ["L w v", "0 1 2"])
def test_parameters_named_like_states_are_one_batch(names):
    def update(grads, state, params=None):
        state = {name: left + grads[name] @ grads[name].T for name, left in state["L"].items()}
        return {name: state[name] @ grad for name, grad in grads.items()}, {"L": state}

    optimizer = optax.GradientTransformation(
        lambda params: {"L": jax.tree.map(jnp.zeros_like, params)}, update
    )
    updates, groups, wanted = updated(
        optax.chain(optimizer, optax.scale_by_adam()),
        normals(**dict.fromkeys(names.split(), (8, 8))),
    )
    assert_close(updates, wanted, 1e-5)
    assert groups == [Group((8, 8), 3, 1)]


@pytest.mark.parametrize("spec", [(), ("data",), (None, None, "data"), ("data", None, None)])
def test_stacks_of_several_depths_are_one_batch(spec):
    """Sharded along their layers, or along a matrix, and next to an array that all layers share."""

    def rule(grads, state, params=None):
        del params
        return {
            name: g @ g * jnp.linalg.norm(state[name] @ state[name]) for name, g in grads.items()
        }, state

    random, like = (
        np.random.default_rng(0),
        {name: jax.ShapeDtypeStruct((depth, 16, 16), "float32") for name, depth in DEPTHS.items()},
    )
    grads = {name: random.normal(size=leaf.shape).astype("float32") for name, leaf in like.items()}
    state = {name: random.normal(size=(8, 8)).astype("float32") for name in like}
    declared = spmd.Layout(
        params=(spmd.Rule("*", spec),), optimizer=spmd.OptimizerState(matrices="owner")
    )
    resolved, groups = resolve(declared, like, {}, MeshSpec.parse("data=8")), []
    optimizer = optax.GradientTransformation(lambda params: state, rule)
    update = update_by_owners(
        optax.with_extra_args_support(optimizer), resolved, spmd.make_mesh("data=8"), groups
    ).update
    updates, _ = jax.jit(update)(grads, state, grads)
    for name, wanted in rule(grads, state)[0].items():
        np.testing.assert_allclose(updates[name], wanted, rtol=1e-4)
    assert groups == [Group((16, 16), 24, 3)]


DEPTHS = {"shallow": 8, "deep": 16}


MIXING = {  # between two products
    "a sum over layers": lambda h: h - h.sum(0, keepdims=True),
    "a running sum": lambda h: jnp.cumsum(h, 0),
    "the order of layers": lambda h: h[::-1],
    "some layers": lambda h: jnp.concatenate([h[:1], h[:3]]),
    "a product of layers": lambda h: h @ jnp.einsum("lab,lbc->ac", h, h),
    "a number for each layer": lambda h: h * jnp.arange(4.0, dtype=h.dtype)[:, None, None],
    "layers as rows": lambda h: (h.reshape(64, 16) @ h[0]).reshape(h.shape),
    "windows": lambda h: jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, 3, 3), (1, 1, 1), "SAME"),
    "columns first": lambda h: h.reshape(h.shape[::-1], order="F").T,
    "layers moved": lambda h: jnp.moveaxis(h.reshape(16, 4, 16), 1, 0),
    "a loop over layers": lambda h: jax.lax.scan(lambda c, x: ((c + x) @ x, c @ x), h[0], h)[1],
    "how many layers": lambda h: h / len(h),
}


FACTORS = {  # of each layer
    "qr": lambda h: jnp.linalg.qr(h + 40 * jnp.eye(16))[0],
    "svd": lambda h: jnp.linalg.svd(h, compute_uv=False)[..., None, :] * h,
    "cholesky": lambda h: jnp.linalg.cholesky(h @ jnp.swapaxes(h, -1, -2) + 20 * jnp.eye(16)),
    "triangular": lambda h: jax.lax.linalg.triangular_solve(h + 40 * jnp.eye(16), h),
    "root": lambda h: jax.lax.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] @ c[1] / 9), (0, h / 9)
    )[1],
    "norm": lambda h: h / jnp.linalg.norm(h, axis=(-2, -1), keepdims=True),
    "symmetric": lambda h: h + h.mT,
}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("rule", "matrices"),
    [(rule, 4) for rule in FACTORS.values()] + [(rule, 1) for rule in MIXING.values()],
    ids=[*FACTORS, *MIXING],
)
def test_layers_are_separate_where_no_equation_joins_them(rule, matrices):
    """And the update is that of one device, whatever joins them."""

    def update(grads, state, params=None):
        return {"stack": rule(grads["stack"] @ grads["stack"]) @ grads["stack"]}, state

    optimizer, like = (
        optax.GradientTransformation(lambda params: (), update),
        {"stack": jax.ShapeDtypeStruct((4, 16, 16), "float32")},
    )
    resolved = resolve(
        layout("fsdp", "owner"), spmd.base.tree.flatten(like), {}, MeshSpec.parse("data=8")
    )
    grads, groups = (
        {"stack": np.random.default_rng(0).normal(size=(4, 16, 16)).astype("float32")},
        [],
    )
    by_owners = update_by_owners(
        optax.with_extra_args_support(optimizer), resolved, spmd.make_mesh("data=8"), groups
    ).update
    updates, wanted = (
        jax.jit(by_owners)(grads, (), grads)[0]["stack"],
        update(grads, ())[0]["stack"],
    )
    assert_close(updates, wanted, 1e-5)
    assert [group.matrices for group in groups] == [matrices]


# of [layers, experts, m, n], between two products: what is done, and how many matrices there are
# then
EXPERTS = {
    "nothing": (lambda h: h, 12),
    "one batch": (
        lambda h: jax.vmap(lambda x: x @ x.T / 16)(h.reshape(-1, 16, 16)).reshape(h.shape),
        12,
    ),
    "norms": (lambda h: h / jnp.linalg.norm(h, axis=(-2, -1), keepdims=True), 12),
    "factors": (lambda h: jnp.linalg.qr(h + 40 * jnp.eye(16))[0], 12),
    "rows of a layer": (
        lambda h: (h.reshape(len(h), -1, 16) @ jnp.full((16, 16), 0.5)).reshape(h.shape),
        12,
    ),
    "rows of all": (lambda h: (h.reshape(-1, 16) @ jnp.full((16, 16), 0.5)).reshape(h.shape), 12),
    "a sum over experts": (lambda h: h - h.sum(1, keepdims=True), 3),
    "some experts": (lambda h: h[:, :1] - h, 3),
    "a number for each expert": (
        lambda h: h * jnp.arange(float(h.shape[1]), dtype=h.dtype)[:, None, None],
        3,
    ),
    "how many experts": (lambda h: h / h.shape[1], 3),
    "one matrix of a layer": (
        lambda h: jnp.linalg.qr(h.reshape(len(h), -1, 16) + 1)[0].reshape(h.shape),
        3,
    ),
    "a sum over layers": (lambda h: h - h.sum(0, keepdims=True), 1),
    "a sum over all": (
        lambda h: (h.reshape(-1, 16, 16) - h.reshape(-1, 16, 16).sum(0)).reshape(h.shape),
        1,
    ),
    "the order of all": (lambda h: h.reshape(-1, 16, 16)[::-1].reshape(h.shape), 1),
    "a number for each": (
        lambda h: (
            h.reshape(-1, 16, 16) * jnp.arange(float(h.shape[0] * h.shape[1]))[:, None, None]
        ).reshape(h.shape),
        1,
    ),
    "experts outside": (lambda h: h.swapaxes(0, 1).reshape(h.shape), 1),
    "pairs": (lambda h: jnp.repeat(h.reshape(-1, 2, 16, 16).sum(1), 2, 0).reshape(h.shape), 3),
}


@pytest.mark.sampled(quick=17)
@pytest.mark.parametrize(("rule", "matrices"), EXPERTS.values(), ids=EXPERTS)
def test_experts_of_layers_are_separate_where_no_equation_joins_them(rule, matrices):
    def update(grads, state, params=None):
        return {"experts": rule(grads["experts"] @ grads["experts"]) @ grads["experts"]}, state

    optimizer, like = (
        optax.GradientTransformation(lambda params: (), update),
        {"experts": jax.ShapeDtypeStruct((3, 4, 16, 16), "float32")},
    )
    resolved = resolve(
        layout("fsdp", "owner"), spmd.base.tree.flatten(like), {}, MeshSpec.parse("data=8")
    )
    grads, groups = (
        {"experts": np.random.default_rng(0).normal(size=(3, 4, 16, 16)).astype("float32")},
        [],
    )
    by_owners = update_by_owners(
        optax.with_extra_args_support(optimizer), resolved, spmd.make_mesh("data=8"), groups
    ).update
    updates, wanted = (
        jax.jit(by_owners)(grads, (), grads)[0]["experts"],
        update(grads, ())[0]["experts"],
    )
    assert_close(updates, wanted, 1e-5)
    assert [group.matrices for group in groups] == [matrices]


PLACED = {  # experts of layers, on a mesh data=4,model=2: the most matrices of 24 that a device has
    "replicated": ((), 3),
    "layers": (("data",), 3),
    "experts": ((None, "model"), 3),
    "layers and experts": (("data", "model"), 3),
    "rows and columns": ((None, None, "data", "model"), 3),
    "experts and columns": ((None, "model", None, "data"), 3),
}


@pytest.mark.sampled(system=5)
@pytest.mark.parametrize(("spec", "most"), PLACED.values(), ids=PLACED)
@pytest.mark.parametrize(
    "optimizer", [MUON(), pytest.param(shampoo(0.02), marks=SYSTEM)], ids=["muon", "shampoo"]
)
def test_experts_of_layers_have_owners(optimizer, spec, most):
    """Stacks of two depths are one batch; the update is that of one device, and statistics keep
    their state.
    """
    like = {
        name: jax.ShapeDtypeStruct((depth, 2, 16, 16), "float32")
        for name, depth in {"shallow": 4, "deep": 8}.items()
    }
    declared = spmd.Layout(
        params=(spmd.Rule("*", spec),), optimizer=spmd.OptimizerState(matrices="owner")
    )
    mesh, groups = "data=4,model=2", []
    resolved, random = resolve(declared, like, {}, MeshSpec.parse(mesh)), np.random.default_rng(0)
    grads = {name: random.normal(size=leaf.shape).astype("float32") for name, leaf in like.items()}
    optimizer, state = optax.with_extra_args_support(optimizer), optimizer.init(grads)
    by_owners = update_by_owners(optimizer, resolved, spmd.make_mesh(mesh), groups).update
    for _ in range(2):
        (updates, after), wanted = (
            jax.jit(by_owners)(grads, state, grads),
            optimizer.update(grads, state, grads),
        )
        assert_close((updates, after), wanted, 1e-5)
        state = after
    assert groups[-1:] == [Group((16, 16), 24, most)]


@SYSTEM
def test_random_keys_of_an_optimizer_train():
    for rest in (optax.contrib.muon(0.02), optax.sgd(0.02)):
        optimizer = optax.chain(optax.add_noise(0.01, 0.5, key=jax.random.key(0)), rest)
        states = [
            steps(trainer_of(optimizer, "fsdp", matrices)) for matrices in ("owner", "compiler")
        ]
        assert relative_difference(*(jax.device_get(state.params) for state in states)) < 1e-5


def test_state_of_matrices_is_sharded():
    """Statistics, which have no parameter's shape, lie over the workers like moments."""
    for matrices, copies in (("owner", 1), ("compiler", 8)):
        right = trainer_of(OPTIMIZERS["shampoo"], "fsdp", matrices).abstract_state.opt["right"][
            "first"
        ]
        assert (
            right.shape == (16, 16)
            and np.prod(right.sharding.shard_shape(right.shape)) == 16 * 16 / 8 * copies
        )


def test_notes_say_which_matrices_have_owners():
    trainer = trainer_of(MUON(), "fsdp", "owner")
    trainer.prepare(batches()[0])
    [note] = [note for note in trainer.notes() if "matrices" in note]
    assert note == (
        "[optimizer] matrices: 9 have owners: 3 of [16, 16] (at most 1 on a device), 1 of [8, 16] "
        "(at most 1 on a device), "
        "1 of [16, 8] (at most 1 on a device), 4 of [16, 16] (at most 1 on a device)."
    )
    trainer = trainer_of(optax.adamw(0.1), "fsdp", "owner")
    trainer.prepare(batches()[0])
    assert any(
        "the optimizer multiplies and factorizes no matrices, so none has an owner" in note
        for note in trainer.notes()
    )


LEFT = (
    "products of several parameters' arrays, in a loop over them, or next to what cannot be "
    "batched, are left to the compiler"
)
ONE = "1 of [8, 16] (at most 1 on a device)"
NOTED = {  # of `first`, [8, 16], `head`, [16, 8], and others that have no product
    "products of two parameters": (
        lambda g, state: {"first": jnp.pad((h := g["first"] @ g["head"]) @ h, ((0, 0), (0, 8)))},
        [f'note: [optimizer] matrices = "owner": none has an owner: {LEFT}: 2.'],
    ),
    "products of one as well": (
        lambda g, state: {
            "head": (g["head"].T @ g["head"] @ g["first"]).T,
            "first": g["first"] @ g["first"].T @ g["first"],
        },
        [
            f"[optimizer] matrices: 2 have owners: 1 of [16, 8] (at most 1 on a device), {ONE}.",
            f"note: [optimizer] matrices: {LEFT}: 1.",
        ],
    ),
    "before and after a norm": (
        lambda g, state: {
            "first": (h := g["first"] @ g["first"].T)
            / optax.tree_utils.tree_norm((h, g["head"]))
            @ h
            @ g["first"]
        },
        [f"[optimizer] matrices: 1 have owners: {ONE}, {ONE}."],
    ),
    "scalars of each": (
        lambda g, state: {
            "first": (1 + state) * (g["first"] @ g["first"].T) @ g["first"],
            "blocks": scaled(state, g["blocks"]),
        },
        [
            "[optimizer] matrices: 4 have owners: "
            f"{', '.join([ONE, *['1 of [16, 16] (at most 1 on a device)'] * 3])}.",
            "note: [optimizer] matrices: batches of fewer matrices than the mesh has devices, "
            "because scalars that equal programs use "
            "differ: 3.",
        ],
    ),
}


def scaled(state, blocks):
    return [
        {"kernel": (number + state) * (k @ k) @ k}
        for number, k in enumerate(jax.tree.leaves(blocks))
    ]


@pytest.mark.parametrize(("rule", "wanted"), NOTED.values(), ids=NOTED)
def test_notes_say_what_owners_do_not_compute(rule, wanted):
    def update(grads, state, params=None):
        return grads | rule(grads, state), state

    optimizer = optax.GradientTransformation(lambda params: jnp.float32(3), update)
    placed = trainer_of(optimizer, "fsdp", "owner").placed
    assert (
        owner_notes(
            placed.given_optimizer,
            placed.abstract_state.params,
            placed.abstract_state.opt,
            placed.resolved,
            placed.mesh,
        )
        == wanted
    )


# collectives of compiled programs -----------------------------------------------------------------


def looped(text):
    """The loops of a program, and the collectives inside."""
    module = parse(text)

    def inside(name):
        for instr in module.computations.get(name, ()):
            if collective_kind(instr.op):
                yield collective_kind(instr.op)
            for called in instr.called:
                yield from inside(called)

    loops = [
        instr for lines in module.computations.values() for instr in lines if instr.op == "while"
    ]
    return loops, [kind for loop in loops for called in loop.called for kind in inside(called)]


def between_products(text):
    """How many products the optimizer has, and the collectives on the way from one to another."""
    module = parse(text)
    lines = module.computations[module.entry]

    def multiplies(instr):
        inside = [inner for name in instr.called for inner in module.computations.get(name, ())]
        product = any(
            part.op in ("dot", "convolution") or "gemm" in part.custom_call
            for part in (instr, *inside)
        )
        return product and "jvp" not in "".join(part.scope for part in (instr, *inside))

    products = {instr.name for instr in lines if multiplies(instr)}
    after, before = set(products), set(products)
    for instr in lines:
        if not after.isdisjoint(instr.operands):
            after.add(instr.name)
    for instr in reversed(lines):
        if instr.name in before:
            before.update(instr.operands)
    return len(products), [
        instr.op for instr in lines if collective_kind(instr.op) and instr.name in after & before
    ]


@SYSTEM
def test_no_collective_in_the_iterations_on_cpus():
    """With coefficients that differ from iteration to iteration, they are a loop."""
    found = {}
    for matrices in ("owner", "compiler"):
        trainer = trainer_of(MUON(ns_coeffs="dion"), "fsdp", matrices)
        loops, found[matrices] = looped(trainer.prepare(batches()[0])[0].compile().as_text())
        assert loops
    assert not found["owner"] and found["compiler"]


def drawn(key):
    kernels = [{"kernel": jax.random.normal(key, (1024, 1024))} for _ in range(4)]
    return {"blocks": kernels, "stack": jnp.ones((2, 1024, 1024)), "head": jnp.ones((1024, 1024))}


def forward(params, x):
    for kernel in [
        *(block["kernel"] for block in params["blocks"]),
        *params["stack"],
        params["head"],
    ]:
        x = jnp.tanh(x @ kernel)
    return x


@SYSTEM
@pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)
@pytest.mark.parametrize(
    "name", ["data_parallel", "zero1", "fsdp", "fsdp x tensor", "servers, largest first"]
)
def test_no_collective_in_the_iterations_on_gpus(name):
    """Neither in a loop, nor between the products of iterations that are unrolled."""
    rows, found, said = jax.ShapeDtypeStruct((64, 1024), "float32"), {}, {}
    servers = "servers" in name  # whose rows the compiler's Muon refuses
    for matrices in ("owner",) if servers else ("owner", "compiler"):
        for iterations in ("standard", "dion"):
            plan = spmd.plan(
                spmd.FunctionalModel(drawn, forward),
                {"x": rows, "y": rows},
                loss=spmd.losses.mean_squared_error,
                optimizer=MUON(ns_coeffs=iterations),
                target="8xh100",
                mesh=LAYOUTS[name][0],
                layout=layout(name, matrices),
            )
            among, found[matrices, iterations] = (
                looped if iterations == "dion" else between_products
            )(plan.compiled.hlo)
            assert among, "loops, or products"
            said[matrices] = plan.memory
    assert not found["owner", "standard"] and not found["owner", "dion"]
    # XLA gathers once, and each device multiplies all matrices
    replicated = name in ("data_parallel", "zero1")
    assert replicated or servers or (found["compiler", "standard"] and found["compiler", "dion"])
    assert servers or said["owner"].optimizer == said["compiler"].optimizer, (
        "momentum lies as the layout says, in both"
    )


# pipelines, checkpoints, frozen parameters --------------------------------------------------------

PIPELINES = {
    "gpipe": ("data=2,stage=4", piped()),
    "circular": ("data=4,stage=2", piped(schedule="circular", groups=2)),
    "1f1b, fsdp": (
        "data=4,stage=2",
        piped("reduce_scatter", schedule="1f1b", more={"default": spmd.Default("shard:data")}),
    ),
}


def piped_weights(mesh, declared, steps=3):
    count = MeshSpec.parse(mesh).size
    trainer = spmd.Trainer(
        lambda: Tied(nnx.Rngs(0)),
        loss=spmd.losses.cross_entropy,
        optimizer=MUON(),
        layout=declared,
        mesh=spmd.make_mesh(mesh, devices=jax.devices()[:count]),
    )
    state = trainer.init()
    for _ in range(steps):
        state, _ = trainer.step(state, tokens())
    return trainer, weights(trainer, state)


@pytest.mark.sampled(system=3)
@SYSTEM
@pytest.mark.parametrize("case", PIPELINES)
def test_layers_of_pipelines_have_owners_on_their_stage(case):
    mesh, declared = PIPELINES[case]
    declared = dataclasses.replace(declared, optimizer=spmd.OptimizerState(matrices="owner"))
    trainer, got = piped_weights(mesh, declared)
    _, wanted = piped_weights("data=1", "data_parallel")
    assert relative_difference(got, wanted) < 1e-5
    assert any("24 of" in note or "8 of [8, 24]" in note for note in trainer.notes())
    sent = [op for op in trainer.wire.ops if op.where.startswith("matrix_owners")]
    assert sent and all("stage" not in op.axes for op in sent if op.shape[-3:] == (1, 8, 24)), (
        "layers stay on their stage"
    )


@SYSTEM
def test_checkpoints_of_owners_are_those_of_any_layout(tmp_path):
    """Four steps, of which the last two are on another mesh, with and without owners."""

    def run(name, matrices, steps, folder):
        mesh, declared = LAYOUTS[name][0], layout(name, matrices)
        data = {key: np.concatenate([batch[key] for batch in batches()]) for key in ("x", "y")}
        model, options = (
            spmd.FunctionalModel(make, apply),
            {"optimizer": OPTIMIZERS["shampoo"], "mesh": mesh, "layout": declared},
        )
        options |= {
            "batch_size": ROWS,
            "shuffle": False,
            "resume": True,
            "checkpoint": spmd.Checkpoint(tmp_path / folder, every=2),
        }
        return spmd.fit(
            model, data, loss=spmd.losses.mean_squared_error, steps=steps, **options
        ).model.params

    wanted = reference("shampoo")
    for number, (first, then) in enumerate(
        [
            (("fsdp", "owner"), ("fsdp x tensor", "owner")),
            (("zero1", "owner"), ("fsdp", "compiler")),
            (("data_parallel", "compiler"), ("fsdp", "owner")),
            (("servers, sliced", "owner"), ("fsdp", "owner")),
            (("fsdp", "owner"), ("servers, largest first", "owner")),
            (("servers, largest first", "owner"), ("servers, sliced", "owner")),
        ]
    ):
        run(*first, 2, str(number))
        assert relative_difference(jax.device_get(run(*then, 4, str(number))), wanted) < 1e-5, (
            first,
            then,
        )


@SYSTEM
def test_updates_of_single_gradients_are_made_by_owners():
    """Of asynchronous servers, on eight devices and on one."""

    def weights(mesh):
        server = spmd.ParameterServer(
            mode="asynchronous", workers=8, servers=1, staleness_scale="inverse"
        )
        declared = dataclasses.replace(
            SERVERS("sliced"),
            parameter_server=server,
            optimizer=spmd.OptimizerState(matrices="owner"),
        )
        model, loss = spmd.FunctionalModel(make, apply), spmd.losses.mean_squared_error
        trainer = spmd.Trainer(model, loss=loss, optimizer=MUON(), mesh=mesh, layout=declared)
        return jax.device_get(trainer.placed.states.unpacked(steps(trainer).params)), trainer

    (one, _), (eight, trainer) = weights(one_device()), weights("data=8")
    assert relative_difference(eight, one) < 1e-5
    assert any("matrices: 9 have owners" in note for note in trainer.notes())


@SYSTEM
def test_average_of_weights_that_owners_update():
    averages = []
    for name in ("fsdp", "servers, largest first"):
        trainer = trainer_of(OPTIMIZERS["muon, averaged"], name, "owner")
        averages.append(
            jax.device_get(
                trainer.placed.states.unpacked(
                    trainer.placed.states.averaged(steps(trainer)).params
                )
            )
        )
    assert relative_difference(*averages) < 1e-5


@pytest.mark.sampled(system=2)
@SYSTEM
@pytest.mark.parametrize("matrices", ["owner", "compiler"])
def test_owners_of_a_resumed_run_change_nothing(matrices, tmp_path, caplog):
    """Of an asynchronous server the stale weights of workers stay, and of a codec the residuals."""
    server = spmd.ParameterServer(mode="asynchronous", compute_time="lognormal(1.0, 0.8)")
    gradients = spmd.Gradients("parameter_server", codec="int8", error_feedback=True)
    declared = spmd.Layout(gradients=gradients, parameter_server=server)
    other = dataclasses.replace(declared, optimizer=spmd.OptimizerState(matrices=matrices))
    data = {key: np.concatenate([batch[key] for batch in batches()]) for key in ("x", "y")}
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.adamw(0.01),
        "mesh": "data=8",
        "batch_size": ROWS,
    }
    fit = functools.partial(
        spmd.fit, spmd.FunctionalModel(make, apply), data, shuffle=False, **options
    )
    wanted = fit(layout=declared, steps=5).model.params
    checkpoint = spmd.Checkpoint(tmp_path, every=1)
    fit(layout=other, steps=3, checkpoint=checkpoint)
    got = fit(layout=declared, steps=5, checkpoint=checkpoint, resume=True).model.params
    assert relative_difference(*jax.device_get((got, wanted))) < 1e-5 and "reset" not in caplog.text


def test_frozen_parameters_have_no_owner():
    declared = dataclasses.replace(
        layout("fsdp", "owner"), train=spmd.Train(exclude=("stack", "first"))
    )
    model, loss = spmd.FunctionalModel(make, apply), spmd.losses.mean_squared_error
    trainer = spmd.Trainer(model, loss=loss, optimizer=MUON(), mesh="data=8", layout=declared)
    trainer.prepare(batches()[0])
    assert any("matrices: 4 have owners" in note for note in trainer.notes())


# what is refused ----------------------------------------------------------------------------------


def test_workers_with_parameters_of_their_own_have_no_owners(golden):
    text = (
        '[optimizer]\nmatrices = "owner"\n[gradients]\nreduction = "parameter_server"\n'
        '[parameter_server]\nmode = "local"\nevery = 5\n'
    )
    with pytest.raises(LayoutError) as caught:
        loads(text, "mine.toml")
    golden("matrices_of_local_workers", str(caught.value))
    loads(text.replace("parameter_server", "reduce_scatter", 1).partition("[parameter_server]")[0])


def test_unknown_owner(golden):
    with pytest.raises(LayoutError) as caught:
        loads('[optimizer]\nmatrices = "owners"\n', "mine.toml")
    golden("matrices_unknown", str(caught.value))
    with pytest.raises(LayoutError, match="no matrices"):
        spmd.Layout.load(spmd.Layout(optimizer=spmd.OptimizerState(matrices="owners")))


def test_what_cannot_be_rewritten_is_an_error_of_the_layout(monkeypatch, golden):
    monkeypatch.setattr("spmd.train.matrix_owners.find_regions", lambda *_: {}["axes"])
    with pytest.raises(LayoutError) as caught:
        groups_of(MUON(), "fsdp")
    golden("matrices_not_rewritten", str(caught.value))
