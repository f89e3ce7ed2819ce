"""Models written for other loops: their own sharding constraints, boxed parameters, axis names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import spmd
from tests.compare import assert_close

X = np.random.default_rng(0).normal(size=(16, 8, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 16).astype("int32")
BATCH = (X, Y)


def trained(model, layout="data_parallel", mesh="data=8", *, reduction=None, steps=2, **options):
    """The trainer and its parameters after some steps, on as many of the 8 devices as the mesh
    has.
    """
    layout = spmd.Layout.load(layout)
    if reduction is not None:
        layout = dataclasses.replace(layout, gradients=spmd.Gradients(reduction))
    devices = jax.devices()[: spmd.MeshSpec.parse(mesh).size]
    options = {"loss": spmd.losses.cross_entropy, "optimizer": optax.sgd(0.1)} | options
    trainer = spmd.Trainer(
        model, mesh=spmd.make_mesh(mesh, devices=devices), layout=layout, **options
    )
    state = trainer.init(BATCH)
    for _ in range(steps):
        state, _ = trainer.step(state, BATCH)
    return trainer, state


def assert_as_on_one_device(model, layout, mesh, reduction=None, plain=None):
    """Trained like a model without constraints on one device, and moved by it."""
    single = trained(plain or model, mesh="data=1")[1].params
    start = trained(plain or model, mesh="data=1", steps=0)[1].params
    many = trained(model, layout, mesh, reduction=reduction)[1].params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), many, single)
    assert any(
        not np.allclose(a, b)
        for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(single), strict=True)
    )


# boxed parameters ---------------------------------------------------------------------------------


class Attention(linen.Module):
    """Kernels are initialised flat, with names for the dims that they have afterwards."""

    wrap: object = linen.with_partitioning
    names: tuple = ("embed", "heads", "kv")

    @linen.compact
    def __call__(self, x):
        init = self.wrap(linen.initializers.xavier_uniform(), self.names)
        x = x + linen.MultiHeadDotProductAttention(
            2, kernel_init=init, out_kernel_init=linen.initializers.xavier_uniform()
        )(x)
        return linen.Dense(4)(x.mean(1))


KV = dataclasses.replace(spmd.Layout.load("tensor_parallel"), default=spmd.Default())
KV = dataclasses.replace(KV, axes=(*KV.axes, ("kv", None)))


@pytest.mark.system
@pytest.mark.parametrize(
    "wrap, layout, mesh",
    [
        (linen.with_partitioning, "data_parallel", "data=8"),
        (linen.with_partitioning, "fsdp", "data=8"),
        (linen.with_logical_partitioning, KV, "data=4,model=2"),
    ],
    ids=["data parallel", "fsdp", "logical"],
)
def test_boxed_kernels_that_are_initialised_flat(wrap, layout, mesh):
    assert_as_on_one_device(Attention(wrap), layout, mesh)


@pytest.mark.system
def test_boxes_that_name_mesh_axes():
    assert_as_on_one_device(Attention(names=(None, "data", None)), "data_parallel", "data=8")


# constraints of the model's own -------------------------------------------------------------------


class Constrained(nnx.Module):
    def __init__(self, spec, rngs):
        self.up, self.out, self.spec = (
            nnx.Linear(8, 16, rngs=rngs),
            nnx.Linear(16, 4, rngs=rngs),
            spec,
        )

    def __call__(self, x):
        x = self.up(x)
        x = x if self.spec is None else jax.lax.with_sharding_constraint(x, self.spec)
        return self.out(nnx.relu(x).mean(1))


class LogicallyConstrained(linen.Module):
    @linen.compact
    def __call__(self, x):
        with linen.logical_axis_rules([("batch", "data"), ("mlp", "model")]):
            x = linen.with_logical_constraint(linen.Dense(16)(x), ("batch", None, "mlp"))
        return linen.Dense(4)(linen.relu(x).mean(1))


TWO = "data=4,model=2"
OVER = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.system
@pytest.mark.parametrize(
    "spec, mesh, reduction",
    [
        (P("data"), "data=8", "all_reduce"),
        (P("data", None, "model"), TWO, "reduce_scatter"),
        (P("data", None, "model"), TWO, "compiler"),
        (P(("data", "model")), TWO, "all_reduce"),
        (P(None, P.UNCONSTRAINED, "model"), TWO, "compiler"),
        (NamedSharding(OVER, P("data", "model")), TWO, "all_reduce"),
    ],
)
def test_own_constraints_are_given_to_the_compiler(spec, mesh, reduction):
    def of(spec):
        return lambda: Constrained(spec, nnx.Rngs(0))

    assert_as_on_one_device(of(spec), "data_parallel", mesh, reduction, plain=of(None))


@pytest.mark.system
def test_own_constraints_shard_the_axes_that_are_left():
    """Half of the hidden units on each device, which is what the constraint asks for."""
    texts, four = [], spmd.make_mesh("data=4", devices=jax.devices()[:4])
    for spec, mesh in ((P("data", None, "model"), TWO), (None, four)):
        trainer, _ = trained(lambda spec=spec: Constrained(spec, nnx.Rngs(0)), mesh=mesh, steps=0)
        texts.append(trainer.prepare(BATCH)[0].compile().as_text())
    assert "f32[4,8,8]" in texts[0] and "f32[4,8,16]" not in texts[0] and "f32[4,8,16]" in texts[1]


@pytest.mark.system
def test_logical_constraints():
    assert_as_on_one_device(LogicallyConstrained(), "data_parallel", TWO)


@pytest.mark.system
def test_own_constraints_hold_in_evaluation_and_prediction():
    trainer, state = trained(lambda: Constrained(P("data", None, "model"), nnx.Rngs(0)), mesh=TWO)
    plain, same = trained(lambda: Constrained(None, nnx.Rngs(0)), mesh="data=8")
    assert_close(trainer.evaluate(state, BATCH)["loss"], plain.evaluate(same, BATCH)["loss"])
    np.testing.assert_allclose(trainer.predict(state, X), plain.predict(same, X), atol=1e-6)


def test_a_constraint_over_an_axis_that_the_mesh_lacks():
    with pytest.raises(spmd.errors.ModelError) as caught:
        trained(lambda: Constrained(P("dta"), nnx.Rngs(0)))
    assert str(caught.value) == (
        'the model calls with_sharding_constraint with mesh axis "dta", which mesh data=8 does not '
        "have.\n"
        '    fix: did you mean "data"? Or a mesh and a layout with that axis.'
    )


def test_a_constraint_that_was_imported_by_name():
    imported = jax.lax.with_sharding_constraint

    class Model(nnx.Module):
        def __init__(self):
            self.out = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return imported(self.out(x.mean(1)), P("data"))

    with pytest.raises(
        spmd.errors.LossError,
        match=r"fix: call it as jax\.lax\.with_sharding_constraint, or take it out\.",
    ):
        trained(lambda: Model())


def test_explicit_sharding_is_named_as_the_cause():
    class Model(nnx.Module):
        def __init__(self):
            self.out = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.out(x.mean(1), out_sharding=P("fsdp", None))

    with pytest.raises(
        spmd.errors.LossError, match=r"by out_sharding, which needs a mesh with explicit axes"
    ) as caught:
        trained(lambda: Model())
    assert "fix: the model without shardings of its own" in str(caught.value)


def test_outside_of_a_step_constraints_are_those_of_jax():
    before = jax.lax.with_sharding_constraint, linen.Partitioned.unbox
    trained(lambda: Constrained(P("data"), nnx.Rngs(0)))
    assert (jax.lax.with_sharding_constraint, linen.Partitioned.unbox) == before


# axis names ---------------------------------------------------------------------------------------


class LinenNorm(linen.Module):
    axis_name: str | None = "batch"

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(
            linen.Dense(16)(x)
        )
        return linen.Dense(4)(x.mean(1))


class NnxNorm(nnx.Module):
    def __init__(self, axis_name, rngs):
        self.up, self.out = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(self.up(x)).mean(1))


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    "make, reduction",
    [
        (lambda name: LinenNorm(name), "all_reduce"),
        (lambda name: lambda: NnxNorm(name, nnx.Rngs(0)), "compiler"),
    ],
    ids=["linen", "nnx"],
)
def test_the_axis_name_of_batch_norm_is_bound_to_the_workers(make, reduction):
    assert_as_on_one_device(make("batch"), "data_parallel", "data=8", reduction, plain=make(None))


def test_another_collective_of_the_model_is_named_as_the_cause():
    class Summed(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return jax.lax.pmean(self.out(x.mean(1)), "batch")

    with pytest.raises(spmd.errors.LossError) as caught:
        trained(lambda: Summed(nnx.Rngs(0)))
    assert str(caught.value) == (
        'the model or the loss runs a collective over an axis "batch" (such as jax.lax.pmean), '
        "which is not bound here.\n"
        "    fix: take it out: gradients, metrics and the statistics of BatchNorm are averaged "
        "over the workers already."
    )


# functional models with state ---------------------------------------------------------------------


def normed(params, state, x, *, train, axis_name=None):
    """A layer with batch statistics, and a counter of calls in training."""
    x = (x @ params["up"]).mean(1)
    mean = x.mean(0) if axis_name is None else jax.lax.pmean(x.mean(0), axis_name)
    mean = mean if train else state["mean"]
    after = {"mean": 0.5 * state["mean"] + 0.5 * mean, "calls": state["calls"] + 1}
    return (x - mean) @ params["out"], after


def normed_init(key):
    params = {"up": jax.random.normal(key, (8, 16)), "out": jax.random.normal(key, (16, 4))}
    return params, {"mean": jnp.zeros(16), "calls": jnp.int32(0)}


NORMED = spmd.FunctionalModel(normed_init, normed, stateful=True)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "layout, reduction", [("data_parallel", None), ("fsdp", None), ("data_parallel", "compiler")]
)
def test_a_functional_model_with_state(layout, reduction):
    assert_as_on_one_device(NORMED, layout, "data=8", reduction)
    trainer, state = trained(NORMED, layout, reduction=reduction)
    wanted = trained(NORMED, mesh="data=1")[1].stats
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), state.stats, wanted
    )
    assert state.stats["calls"] == 2 and np.abs(np.asarray(state.stats["mean"])).max() > 0
    before = trainer.evaluate(state, BATCH)["loss"]
    assert trainer.evaluate(state, BATCH)["loss"] == before, "evaluation changes no state"


def test_rebuilt_functional_model_with_state_can_be_trained_again():
    trainer, state = trained(NORMED, steps=1)
    model = trainer.rebuild(state)
    np.testing.assert_allclose(model(X), trainer.predict(state, X), atol=1e-6)
    again = trained(model, steps=0)[1]
    jax.tree.map(
        np.testing.assert_array_equal, (again.params, again.stats), (state.params, state.stats)
    )
    assert trained(NORMED.bind(state.params, state.stats), steps=0)[1].stats["calls"] == 1


def test_state_of_one_workers_rows_alone_is_refused():
    alone = spmd.FunctionalModel(
        normed_init,
        lambda params, state, x, train: normed(params, state, x, train=train),
        stateful=True,
    )
    with pytest.raises(
        spmd.errors.ModelError, match="batch statistics would be of these rows alone"
    ) as caught:
        trained(alone)
    assert "fix: a keyword axis_name=None of apply" in str(
        caught.value
    ) and 'reduction = "compiler"' in str(caught.value)
    assert_as_on_one_device(alone, "data_parallel", "data=8", "compiler")


@pytest.mark.parametrize(
    "init, apply, expected",
    [
        (
            lambda key: {"w": jnp.ones(4)},
            normed,
            "init of a stateful model returned a dict.\n    fix: (params, state), a tuple of two.",
        ),
        (normed_init, lambda p, s, x, axis_name: x, "apply of a stateful model returned"),
        (
            normed_init,
            lambda p, s, x, axis_name: (x, {"calls": s["calls"]}),
            "a state with mean = float32[16], and returned one with nothing.",
        ),
        (
            normed_init,
            lambda p, s, x, axis_name: (x, s | {"mean": x[0, 0]}),
            "mean = float32[16], and returned one with float32[8].",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused(init, apply, expected):
    with pytest.raises(spmd.errors.ModelError) as caught:
        trained(spmd.FunctionalModel(init, apply, stateful=True))
    assert expected in str(caught.value)


def test_binding_wants_state_where_there_is_some():
    with pytest.raises(spmd.errors.ModelError, match=r"fix: model\.bind\(params, state\)"):
        NORMED.bind({})
