"""What a step promises beyond equalling one device: random numbers, short batches, microbatches,
precision, donation.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd.base.tree import flatten
from spmd.errors import DivergedError, LossError, ModelError
from spmd.train.step import train_step
from tests.compare import assert_close

ROWS = 32
SGD = optax.sgd(0.1, momentum=0.9)


class MLP(nnx.Module):
    def __init__(self, width=16, dropout=0.0, norm=False, rngs=None):
        self.hidden = nnx.Linear(6, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        x = self.hidden(x)
        x = self.norm(x) if self.norm is not None else x
        return self.out(self.drop(nnx.relu(x)))


def data(rows=ROWS, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(rows, 6)).astype("float32"),
        "y": random.integers(0, 4, rows).astype("int32"),
    }


def trainer_of(
    model,
    layout="data_parallel",
    mesh="data=8",
    loss=spmd.losses.cross_entropy,
    reduction=None,
    **options,
):
    layout = spmd.Layout.load(layout)
    if reduction is not None:
        layout = dataclasses.replace(layout, gradients=spmd.Gradients(reduction))
    options = {"optimizer": SGD, **options}
    devices = jax.devices()[: spmd.MeshSpec.parse(mesh).size]
    return spmd.Trainer(
        model, loss=loss, mesh=spmd.make_mesh(mesh, devices=devices), layout=layout, **options
    )


def train(trainer, steps=3, batch=None):
    state, losses = trainer.init(batch), []
    for step in range(steps):
        state, metrics = trainer.step(state, data(seed=step) if batch is None else batch)
        losses.append(metrics["loss"])
    return state, losses


def assert_within(left, right, bound):
    """Raise unless numbers differ by at most a bound: a bias before a norm has no gradient but
    rounding, so its norm bounds nothing.
    """
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound), left, right)


# random numbers -----------------------------------------------------------------------------------


def draws(mesh, reduction, accumulate=1, seed=0, steps=2):
    """Every row's draw in two steps, read from the gradient of a parameter that each row scales by
    its own draw.
    """

    class Probe(nnx.Module):
        def __init__(self, rngs):
            self.rows = nnx.Param(jnp.zeros((ROWS,)))
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    def loss(model, batch, rng):
        bits = model.drop(jnp.ones((batch["row"].shape[0], 16))) @ (2.0 ** jnp.arange(16))
        return model.rows[...][batch["row"]] * (bits + jax.random.normal(rng, batch["row"].shape))

    trainer = trainer_of(
        lambda: Probe(nnx.Rngs(0)),
        mesh=mesh,
        loss=loss,
        reduction=reduction,
        optimizer=optax.sgd(1.0),
        accumulate=accumulate,
        seed=seed,
    )
    state, seen, before = trainer.init(), [], np.zeros(ROWS)
    for _ in range(steps):
        state, _ = trainer.step(state, {"row": np.arange(ROWS, dtype=np.int32)})
        after = np.asarray(state.params["rows"])
        seen.append(before - after)
        before = after
    return np.stack(seen)


@pytest.mark.system
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_random_numbers_are_the_same_on_every_mesh_and_differ_between_rows(accumulate):
    alone = draws("data=1", "compiler", accumulate)
    for mesh, reduction in [
        ("data=8", "compiler"),
        ("data=8", "all_reduce"),
        ("data=4", "all_reduce"),
        ("data=2", "all_reduce"),
    ]:
        np.testing.assert_array_equal(
            draws(mesh, reduction, accumulate), alone, err_msg=f"{mesh} {reduction}"
        )
    assert len(np.unique(alone)) == alone.size, "every row in every step draws for itself"


@pytest.mark.system
def test_another_seed_draws_other_numbers():
    assert not np.isin(draws("data=8", "all_reduce", seed=1), draws("data=8", "all_reduce")).any()


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mix, self.out = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.shared, self.rngs = nnx.Dropout(0.5, broadcast_dims=(0,), rngs=rngs), rngs

    def __call__(self, x):
        return self.out(self.shared(self.mix(x)))


def shared_mask(model, batch, rng):
    return spmd.losses.cross_entropy(model, batch)


def scalar_draw(model, batch, rng):
    return spmd.losses.cross_entropy(model, batch) * jax.random.uniform(rng)


def key_per_row(model, batch, rng):
    noise = jax.vmap(lambda key, x: jax.random.normal(key, x.shape))(
        jax.random.split(rng, len(batch["x"])), batch["x"]
    )
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"] + noise), batch["y"])


@pytest.mark.system
@pytest.mark.parametrize(
    "loss", [shared_mask, pytest.param(scalar_draw, marks=pytest.mark.slow), key_per_row]
)
def test_draws_that_do_not_hold_rows_are_the_same_on_every_mesh(loss):
    """A mask shared over the batch, a number for all, a key per row: with 16 rows on each of 2
    workers.
    """
    losses = [
        train(trainer_of(lambda: Block(nnx.Rngs(0)), mesh=mesh, reduction=reduction, loss=loss))[1]
        for mesh, reduction in [
            ("data=1", "compiler"),
            ("data=2", "compiler"),
            ("data=2", "all_reduce"),
        ]
    ]
    assert_close(losses[1:], [losses[0]] * 2, 2e-6)
    other = train(trainer_of(lambda: Block(nnx.Rngs(0)), mesh="data=2", loss=loss, seed=1))[1]
    assert np.abs(np.subtract(other, losses[0])).min() > 1e-3, "the draws do matter"


@pytest.mark.system
def test_the_loss_and_the_model_never_share_a_key():
    seen = []

    def apply(params, x, rng=None):
        noise = jax.random.normal(rng, x.shape)
        seen.append(noise)
        return x @ params["w"] + 0.0 * noise.sum()

    def loss(model, batch, rng):
        first, second = model(batch["x"]), model(batch["x"])
        drawn = jax.random.normal(rng, batch["x"].shape)
        differences = [
            jnp.abs(a - b).max()
            for a, b in ((drawn, seen[-1]), (drawn, seen[-2]), (seen[-1], seen[-2]))
        ]
        return (first + second).mean(axis=1), {"difference": jnp.stack(differences).min()}

    model = spmd.FunctionalModel(lambda key: {"w": jnp.ones((6, 4))}, apply)
    _, metrics = (trainer := trainer_of(model, loss=loss)).step(trainer.init(), data())
    assert metrics["difference"] > 0.1


@pytest.mark.system
@pytest.mark.parametrize("name", ["rng", "key"])
def test_rng_key_is_passed_by_argument_name(name):
    scope = {}
    exec(
        f"def loss(model, batch, *, {name}=None):\n    return ce(model, batch) * uniform({name})",
        {"ce": spmd.losses.cross_entropy, "uniform": jax.random.uniform},
        scope,
    )
    exec(
        "def third(model, batch, anything):\n    return ce(model, batch) * uniform(anything)",
        {"ce": spmd.losses.cross_entropy, "uniform": jax.random.uniform},
        scope,
    )

    def make():
        return MLP(rngs=nnx.Rngs(0))

    assert (
        train(trainer_of(make, loss=scope["loss"]))[1]
        == train(trainer_of(make, loss=scope["third"]))[1]
    )


# short batches ------------------------------------------------------------------------------------


def mean_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


# rows, reduction, loss, norm, programs; each of them in the fast suite once at least, all together
# in the slow one
SHORT = [
    pytest.param(
        rows, reduction, *loss, marks=[pytest.mark.slow] * ((number + place) % 3 > 0 and rows != 13)
    )
    for number, rows in enumerate((24, 13, 3))
    for place, loss in enumerate(
        ((spmd.losses.cross_entropy, False, 1), (mean_loss, False, 2), (mean_loss, True, 2))
    )
    for reduction in ("compiler", "all_reduce")
]


@pytest.mark.system
@pytest.mark.parametrize(("rows", "reduction", "loss", "norm", "programs"), SHORT)
def test_a_short_batch_is_exact(rows, reduction, loss, norm, programs):
    """Masked, or at its own size where it cannot be masked: the update is that of one device on
    those rows alone.
    """

    def make():
        return MLP(norm=norm, rngs=nnx.Rngs(0))

    full, short = data(), data(rows, seed=9)
    eight, single = (
        trainer_of(make, mesh=mesh, loss=loss, reduction=how)
        for mesh, how in (("data=8", reduction), ("data=1", "compiler"))
    )
    states = []
    for trainer in (eight, single):
        state, _ = trainer.step(trainer.init(), full)
        state, metrics = trainer.step(state, short)
        states.append((state.params, state.stats, metrics["loss"]))
    assert_within(states[0], states[1], 2e-6)
    assert eight.prepare(None)[0].functions.compilations() == programs
    without = eight.step(eight.init(), full)[0].params
    assert np.abs(np.asarray(without["out"]["bias"]) - states[0][0]["out"]["bias"]).max() > 1e-3, (
        "the short batch did train"
    )


def test_padding_cannot_spread_a_nan():
    def loss(model, batch):
        return jnp.log(batch["x"][:, 0]) * model(batch["x"])[:, 0]

    trainer = trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), loss=loss)
    good = {"x": np.ones((ROWS, 6), np.float32)}
    state, _ = trainer.step(trainer.init(), good)
    state, metrics = trainer.step(state, {"x": np.ones((5, 6), np.float32)})
    assert np.isfinite(metrics["loss"]) and all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)
    )


def token_mean(model, batch):
    """A mean over something else than rows: the pair (sum, count)."""
    value = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    weight = jnp.abs(batch["x"][:, 0])
    return (value * weight).sum(), weight.sum()


@pytest.mark.system
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_pair_is_an_exact_mean_over_what_it_counts(accumulate):
    def make():
        return MLP(rngs=nnx.Rngs(0))

    single = train(trainer_of(make, mesh="data=1", loss=token_mean))
    for reduction in ("compiler", "all_reduce"):
        eight = train(trainer_of(make, loss=token_mean, reduction=reduction, accumulate=accumulate))
        assert_close(eight[1], single[1])
        assert_close(eight[0].params, single[0].params, 1e-6)
    assert single[1] != train(trainer_of(make))[1]


# microbatches -------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("layout", ["data_parallel", "fsdp", "zero1"])
@pytest.mark.parametrize(
    "loss", [spmd.losses.cross_entropy, mean_loss], ids=["per-example", "scalar"]
)
def test_accumulation_equals_the_whole_batch(layout, loss):
    def make():
        return MLP(rngs=nnx.Rngs(0))

    full, parts = (train(trainer_of(make, layout, loss=loss, accumulate=count)) for count in (1, 4))
    assert_close(full[0].params, parts[0].params, 1e-6)
    assert_close(full[1], parts[1])


def collectives(trainer, kind):
    program = trainer.prepare(data())[0]
    batch = trainer.place(data())
    step = jax.jit(functools.partial(train_step, program.make_step(ROWS, True)))
    return len(
        re.findall(
            rf"stablehlo.{kind}\"",
            step.lower(trainer.init(), batch.leaves, batch.weights, {}).as_text(),
        )
    )


@pytest.mark.system
def test_gradients_are_reduced_once_per_step_not_once_per_microbatch():
    def make():
        return MLP(rngs=nnx.Rngs(0))

    for layout, kind in [("data_parallel", "all_reduce"), ("fsdp", "reduce_scatter")]:
        once, four = (
            collectives(trainer_of(make, layout, accumulate=count), kind) for count in (1, 4)
        )
        assert once == four > 0
    step = trainer_of(make, accumulate=4).prepare(data())[0].make_step(ROWS, True)
    jaxpr = jax.make_jaxpr(functools.partial(train_step, step))(
        trainer_of(make).init(), data(), np.ones(ROWS, np.float32), {}
    )
    loops = [str(body) for body in scans(jaxpr.jaxpr) if "dot_general" in str(body)]
    assert loops and not any("psum" in body or "reduce_scatter" in body for body in loops), (
        "no collective inside the loop"
    )


def scans(jaxpr):
    """The bodies of all scans in a jaxpr, however deep."""
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr"),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                if equation.primitive.name == "scan":
                    yield inner
                yield from scans(inner)


# precision, remat, donation -----------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("layout", ["data_parallel", "fsdp"])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32(layout):
    def make():
        return MLP(width=64, norm=True, rngs=nnx.Rngs(0))

    seen = []

    def loss(model, batch):
        logits = model(batch["x"])
        seen.append((logits.dtype, model.hidden.kernel.dtype))
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["y"]
        )

    (half, low), (single, high) = (
        train(trainer_of(make, layout, loss=loss, precision=p)) for p in ("bfloat16", "float32")
    )
    assert (jnp.bfloat16, jnp.bfloat16) in seen and (jnp.float32, jnp.float32) in seen
    for state in (half, single):
        assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt, state.stats))} == {
            jnp.dtype("float32")
        }
    assert low != high
    # bfloat16 keeps 8 bits: a relative rounding of 2**-8 per operation
    np.testing.assert_allclose(low, high, rtol=2e-2)


@pytest.mark.system
@pytest.mark.parametrize("kind", ["model", "modules", "dots"])
@pytest.mark.parametrize("layout", [pytest.param("data_parallel", marks=pytest.mark.slow), "fsdp"])
def test_remat_changes_memory_not_results(kind, layout):
    remat = {
        "model": spmd.Remat("nothing"),
        "modules": spmd.Remat("nothing", ("hidden",)),
        "dots": spmd.Remat("dots"),
    }[kind]

    def make():
        return MLP(dropout=0.5, norm=True, rngs=nnx.Rngs(0))

    chosen = dataclasses.replace(spmd.Layout.load(layout), remat=remat)
    plain, saved = trainer_of(make, layout), trainer_of(make, chosen)
    assert_close(train(plain)[0].params, train(saved)[0].params, 1e-6)
    programs = [
        functools.partial(train_step, t.prepare(data())[0].make_step(ROWS, True))
        for t in (plain, saved)
    ]
    counts = [
        str(jax.make_jaxpr(p)(plain.init(), data(), np.ones(ROWS, np.float32), {})).count("remat")
        for p in programs
    ]
    assert counts[1] > 0 and (counts[1] > counts[0] or kind != "modules")


def test_remat_of_a_module_that_is_not_there():
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), remat=spmd.Remat("nothing", ("block/*",))
    )
    with pytest.raises(spmd.SpmdError, match=r'"block/\*" matches no submodule of the model'):
        trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), layout).prepare(data())


def test_fsdp_gathers_again_in_the_backward_pass():
    """A gathered weight is not kept from the forward to the backward pass: it is gathered twice."""
    trainer = trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), "fsdp")
    program = trainer.prepare(data())[0]
    step = functools.partial(train_step, program.make_step(ROWS, True))
    jaxpr = str(jax.make_jaxpr(step)(trainer.init(), data(), np.ones(ROWS, np.float32), {}))
    sharded = sum(
        not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(trainer.init().params)
    )
    assert jaxpr.count("all_gather[") > sharded


@pytest.mark.system
def test_the_state_is_donated_and_the_users_model_lives_on():
    model = MLP(norm=True, rngs=nnx.Rngs(0))
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    trainer = trainer_of(model)
    state = trainer.init()
    after, _ = trainer.step(state, data())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    now = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    jax.tree.map(np.testing.assert_array_equal, before, now)
    assert not np.array_equal(after.params["out"]["kernel"], now["out"]["kernel"])
    assert model(jnp.ones((2, 6))).shape == (2, 4)


def test_no_array_of_a_factory_is_ever_replicated():
    trainer = trainer_of(lambda: MLP(width=64, rngs=nnx.Rngs(0)), "fsdp")
    kernel = trainer.init().params["hidden"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(6, 8)}
    placed = trainer._placed
    from spmd.train.state import make_state

    build = jax.jit(
        lambda: make_state(
            placed.model.make_variables(jax.random.key(0), placed.spec.call_on_zeros),
            placed.opening,
            0,
            placed.exchange.init,
        ),
        out_shardings=placed.shardings,
    )
    memory = build.lower().compile().memory_analysis()
    state_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(placed.abstract_state)
    )
    # an eighth, and arrays too small to be sharded
    assert memory.output_size_in_bytes < state_bytes / 6


# kinds of models ----------------------------------------------------------------------------------


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        x = linen.Dense(
            16,
            kernel_init=linen.with_partitioning(
                linen.initializers.lecun_normal(), ("embed", "mlp")
            ),
        )(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.3, deterministic=not train)(linen.relu(x))
        return linen.Dense(4)(x)


FUNCTIONAL = spmd.FunctionalModel(
    lambda key: {"layers": [{"w": jax.random.normal(key, (6, 16))}, {"w": jnp.zeros((16, 4))}]},
    lambda params, x: jax.nn.relu(x @ params["layers"][0]["w"]) @ params["layers"][1]["w"],
)


@pytest.mark.system
@pytest.mark.parametrize(
    "model",
    [pytest.param(LinenMLP(), marks=pytest.mark.system), FUNCTIONAL],
    ids=["linen", "functional"],
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("data_parallel", marks=pytest.mark.slow),
        "fsdp",
        pytest.param("zero1", marks=pytest.mark.slow),
    ],
)
def test_other_models_train_the_same_on_eight_devices_as_on_one(model, layout):
    single = train(trainer_of(model, mesh="data=1", reduction="compiler"), batch=data())
    for reduction in ("compiler", None):
        many = train(trainer_of(model, layout, reduction=reduction), batch=data())
        assert_within((many[0].params, many[0].stats), (single[0].params, single[0].stats), 2e-6)
    assert single[1][-1] != single[1][0]


def test_linen_logical_axes_are_laid_out():
    state = trainer_of(LinenMLP(), "tensor_parallel", "data=4,model=2").init(data())
    assert state.params["Dense_0"]["kernel"].sharding.spec == jax.P(None, "model")


def test_linen_batch_statistics_move_and_evaluation_uses_them():
    trainer = trainer_of(LinenMLP())
    state, _ = train(trainer, batch=data())
    assert np.abs(np.asarray(state.stats["batch_stats"]["BatchNorm_0"]["mean"])).max() > 0
    twice = [trainer.evaluate(state, data())["loss"] for _ in range(2)]
    assert twice[0] == twice[1], "no dropout in evaluation"


def test_remat_of_a_module_that_is_never_called():
    class Holder(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((8, 3)))

        def __call__(self, x):
            return x @ self.kernel[...]

    class Model(nnx.Module):
        def __init__(self):
            self.inner = Holder()

        def __call__(self, x):
            return x @ self.inner.kernel[...]  # past the call, so there is nothing to rematerialise

    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), remat=spmd.Remat("nothing", ("inner",))
    )
    trainer = spmd.Trainer(
        lambda: Model(), loss=lambda m, b: m(b).sum(1), optimizer=optax.sgd(0.1), layout=layout
    )
    with pytest.raises(ModelError, match=r'"inner" matches submodules that the model never calls'):
        trainer.prepare(np.ones((8, 8), np.float32))


@pytest.mark.system
def test_linen_remat_by_path():
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), remat=spmd.Remat("nothing", ("Dense_0",))
    )
    assert_close(
        train(trainer_of(LinenMLP(), layout), batch=data())[0].params,
        train(trainer_of(LinenMLP()), batch=data())[0].params,
        1e-6,
    )
    wrong = dataclasses.replace(layout, remat=spmd.Remat("nothing", ("Dense_9",)))
    with pytest.raises(spmd.SpmdError, match='"Dense_9" matches no submodule'):
        trainer_of(LinenMLP(), wrong).prepare(data())


@pytest.mark.system
def test_a_model_handed_over_in_evaluation_mode_is_trained_all_the_same():
    model = MLP(dropout=0.5, norm=True, rngs=nnx.Rngs(0))
    model.eval()
    sleeping, awake = (
        train(trainer_of(m)) for m in (model, lambda: MLP(dropout=0.5, norm=True, rngs=nnx.Rngs(0)))
    )
    assert np.abs(np.asarray(sleeping[0].stats["norm"]["mean"])).max() > 0
    assert_close(sleeping[1], awake[1])


class Frozen(nnx.Module):
    """Fine-tuning: the first BatchNorm keeps the averages that it came with."""

    def __init__(self, rngs, *, dropout=None):
        self.hidden, self.out = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.frozen = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
        self.moving = nnx.BatchNorm(16, rngs=rngs) if dropout is None else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout is not None else None

    def __call__(self, x):
        x = self.frozen(self.hidden(x))
        return self.out(self.moving(x) if self.moving is not None else self.dropout(x))


@pytest.mark.system
@pytest.mark.parametrize(
    "model",
    [
        lambda: Frozen(nnx.Rngs(0)),
        lambda: Frozen(nnx.Rngs(0), dropout=0.5),
        Frozen(nnx.Rngs(0)),
        Frozen(nnx.Rngs(0), dropout=0.5),
        nnx.Sequential(
            nnx.BatchNorm(6, use_running_average=True, rngs=nnx.Rngs(0)),
            nnx.Linear(6, 4, rngs=nnx.Rngs(0)),
        ),
    ],
    ids=["factory", "factory with dropout", "given", "given with dropout", "nothing but frozen"],
)
def test_frozen_batch_statistics_stay_frozen(model):
    trainer = trainer_of(model)
    before = flatten(trainer.init().stats)
    after = flatten(train(trainer, batch=data())[0].stats)
    moved = {path for path in before if not np.array_equal(before[path], after[path])}
    assert moved == {path for path in before if path.startswith("moving/")}
    assert "use_running_average=True" in next(line for line in trainer.notes() if "frozen" in line)


@pytest.mark.system
def test_a_model_put_in_evaluation_mode_moves_its_batch_statistics():
    model = Frozen(nnx.Rngs(0), dropout=0.5)
    model.eval()
    assert (
        np.abs(np.asarray(train(trainer_of(model), batch=data())[0].stats["frozen"]["mean"])).max()
        > 0
    )


def test_targets_are_not_rounded_by_bfloat16():
    def loss(model, batch):
        return (model(batch["x"])[:, 0].astype(jnp.float32) * 0 + batch["t"]) + 0.0

    trainer = trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), loss=loss, precision="bfloat16")
    _, metrics = trainer.step(
        trainer.init(), {"x": data()["x"], "t": np.full(ROWS, 1003, np.float32)}
    )
    assert metrics["loss"] == 1003.0  # bfloat16 would say 1004


def test_what_would_pass_in_silence():
    def make():
        return MLP(rngs=nnx.Rngs(0))

    def same(model, batch):
        return (spmd.losses.cross_entropy(model, batch), {"loss": jnp.float32(0)})

    with pytest.raises(spmd.errors.LossError, match='also returns a metric "loss"'):
        trainer_of(make, loss=same).prepare(data())
    flat = {"x": data()["x"], "y": np.zeros((ROWS, 1), np.float32)}
    with pytest.raises(
        spmd.errors.LossError,
        match=r"the targets are float32\[32, 1\], but the outputs ask for float32\[32, 4\]",
    ):
        trainer_of(make, loss=spmd.losses.mean_squared_error).prepare(flat)

    def squeezed(model, batch):
        return jnp.squeeze(spmd.losses.cross_entropy(model, batch))

    trainer = trainer_of(make, loss=squeezed)
    eight = {name: leaf[:8] for name, leaf in data().items()}
    with pytest.raises(
        spmd.errors.LossError, match=r"but float32\[\] for the 1 rows of one worker"
    ):
        trainer.step(trainer.init(), eight)
    counted = spmd.FunctionalModel(
        lambda key: {"n": jnp.int32(3), "w": jnp.ones((6, 4))}, lambda p, x: p["n"] * (x @ p["w"])
    )
    with pytest.raises(
        spmd.errors.ModelError, match=r"parameters that have no gradient: n \(int32\)"
    ):
        trainer_of(counted).init()
    with pytest.raises(
        spmd.errors.OptimizerError, match="a line search that calls the loss itself"
    ):
        trainer_of(make, optimizer=optax.lbfgs()).prepare(data())


def test_a_consumed_state_is_refused():
    trainer = trainer_of(lambda: MLP(rngs=nnx.Rngs(0)))
    state = trainer.init()
    trainer.step(state, data())
    for use in (
        lambda: trainer.step(state, data()),
        lambda: trainer.evaluate(state, data()),
        lambda: trainer.rebuild(state),
    ):
        with pytest.raises(spmd.errors.OptionError, match="this state was consumed by a step"):
            use()


def test_an_evaluation_fixes_nothing_about_training():
    trainer = trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), accumulate=4)
    trainer.evaluate(trainer.init(), data(), batch_size=10)
    assert trainer.prepare(data())[0].rows == ROWS
    with pytest.raises(spmd.errors.DataError, match="a batch of 64 rows, after a first one of 32"):
        trainer.step(trainer.init(), data(64))


# metrics and evaluation ---------------------------------------------------------------------------


def test_metrics_of_the_loss_and_shared_metrics_are_exact_means():
    def loss(model, batch):
        rows = spmd.losses.cross_entropy(model, batch)
        return rows, {
            "largest": rows,
            "mean": rows.mean(),
            "pair": (rows.sum(), jnp.float32(rows.shape[0])),
        }

    trainer = trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), loss=loss)
    _, metrics = trainer.step(trainer.init(), data())
    for name in ("largest", "mean", "pair"):
        assert_close(metrics[name], metrics["loss"])
    shared = trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), metrics={"accuracy": spmd.metrics.accuracy})
    state = shared.init()
    right = shared.evaluate(state, data(), batch_size=ROWS)["accuracy"]
    _, metrics = shared.step(state, data())
    assert_close(metrics["accuracy"], right)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("examples", [ROWS, 3 * ROWS + 5, 7])
def test_evaluation_is_the_exact_mean_over_all_rows(examples):
    trainer = trainer_of(
        lambda: MLP(norm=True, rngs=nnx.Rngs(0)),
        metrics={"accuracy": spmd.metrics.accuracy, "worst": lambda m, b: m(b["x"]).max()},
    )
    state, _ = train(trainer)
    batch = data(examples, seed=5)
    model = trainer.rebuild(state)
    model.eval()
    logits = model(batch["x"])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    result = trainer.evaluate(state, batch)
    assert result["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert_close(result["accuracy"], float((logits.argmax(-1) == batch["y"]).mean()))
    np.testing.assert_allclose(trainer.predict(state, batch["x"]), logits, atol=1e-5)


def test_steps_yields_the_loop_to_the_user():
    trainer = trainer_of(lambda: MLP(rngs=nnx.Rngs(0)))
    seen = [
        (info.step, info.metrics["loss"])
        for info in trainer.steps(data(70), batch_size=32, epochs=2)
    ]
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    result = spmd.fit(
        lambda: MLP(rngs=nnx.Rngs(0)),
        data(70),
        loss=spmd.losses.cross_entropy,
        optimizer=SGD,
        batch_size=32,
        epochs=2,
    )
    assert [loss for _, loss in seen] == result.history["loss"]


def test_nothing_is_compiled_after_the_first_step_and_nothing_moves_in_secret():
    trainer = trainer_of(lambda: MLP(dropout=0.1, rngs=nnx.Rngs(0)), "fsdp")
    program = trainer.prepare(data())[0]
    state = trainer.init()
    batches = [trainer.place(data(rows)) for rows in (ROWS, ROWS, 5, ROWS)]
    with jax.transfer_guard("disallow"):
        for batch in batches:
            state, _ = trainer.step(state, batch)
    assert program.functions.compilations() == 1


def test_moments_lie_as_their_own_parameters_do_whatever_those_are_called():
    """Adam's `mu/w` is of the parameter `w`, although there is a parameter `mu/w`, of another
    shape.
    """

    def draw(key):
        return {"mu": {"w": jnp.ones((16, 3))}, "w": jnp.ones((8, 5))}

    model = spmd.FunctionalModel(draw, lambda params, x: x @ params["w"])
    trainer = spmd.Trainer(
        model,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.adam(0.1),
        mesh="data=8",
        layout="fsdp",
    )
    moments = {
        path: leaf.sharding.spec
        for path, leaf in flatten(trainer.abstract_state.opt).items()
        if leaf.ndim
    }
    assert len(moments) == 4 and all(spec[0] == "data" for spec in moments.values())


# batches in which nothing counts ------------------------------------------------------------------


def masked(model, batch):
    return (spmd.losses.cross_entropy(model, batch) * batch["mask"]).sum(), batch["mask"].sum()


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(("mesh", "reduction"), [("data=1", "compiler"), ("data=8", "all_reduce")])
def test_step_that_counts_nothing_has_gradient_zero(mesh, reduction):
    trainer = trainer_of(
        lambda: MLP(rngs=nnx.Rngs(0)),
        mesh=mesh,
        loss=masked,
        reduction=reduction,
        optimizer=optax.sgd(0.1),
    )
    state = trainer.init()
    before = jax.device_get(state.params)
    state, metrics = trainer.step(state, data() | {"mask": np.zeros(ROWS, np.float32)})
    assert np.isnan(metrics["loss"])  # a mean over nothing
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    # one worker has all that counts
    state, metrics = trainer.step(state, data() | {"mask": (np.arange(ROWS) < 4).astype("float32")})
    assert np.isfinite(metrics["loss"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.params)))


@pytest.mark.system
def test_fit_leaves_mean_over_nothing_out_of_logs(tmp_path):
    batch = data(64) | {"mask": np.repeat(np.float32([0, 1]), 32)}
    result = spmd.fit(
        lambda: MLP(rngs=nnx.Rngs(0)),
        batch,
        loss=masked,
        optimizer=SGD,
        mesh="data=8",
        batch_size=32,
        shuffle=False,
        log_every=1,
        checkpoint=tmp_path,
        progress=False,
        callbacks=[spmd.callbacks.EarlyStopping("loss", patience=5)],
    )
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {
        record["step"]: np.isfinite(record["loss"]) for record in logged if "loss" in record
    } == {2: True}
    assert np.isnan(result.history["loss"][0])
    assert np.isfinite(result.history["loss"][1])


# losses without a gradient ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: (batch["x"] ** 2).mean(axis=1),
        lambda model, batch: jax.lax.stop_gradient(model(batch["x"])).mean(axis=1),
        lambda model, batch: (model(batch["x"]).argmax(axis=1) != batch["y"]).astype("float32"),
        lambda model, batch: jnp.round(model(batch["x"])).mean(),
    ],
    ids=["no parameter", "stopped", "argmax", "rounded"],
)
def test_prepare_refuses_loss_without_gradient(loss):
    with pytest.raises(LossError, match="the loss has no gradient: by none of the 4 parameters"):
        trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), loss=loss).prepare(data())


def test_prepare_accepts_straight_through_gradient():
    def loss(model, batch):
        out = model(batch["x"])
        return (out + jax.lax.stop_gradient(jnp.round(out) - out)).mean(axis=1)

    trainer_of(lambda: MLP(rngs=nnx.Rngs(0)), loss=loss).prepare(data())


@pytest.mark.system
def test_fit_raises_when_evaluation_is_not_finite():
    bad = data(8) | {"x": np.full((8, 6), np.nan, np.float32)}
    options = {
        "optimizer": SGD,
        "mesh": "data=8",
        "batch_size": 32,
        "steps": 1,
        "progress": False,
        "eval_data": bad,
    }

    def make():
        return MLP(rngs=nnx.Rngs(0))

    with pytest.raises(DivergedError, match='step 1: metric "eval_loss" is nan'):
        spmd.fit(make, data(), loss=spmd.losses.cross_entropy, **options)
    watch_nothing = [spmd.callbacks.TerminateOnNaN(metrics=())]
    assert np.isnan(
        spmd.fit(
            make, data(), loss=spmd.losses.cross_entropy, callbacks=watch_nothing, **options
        ).history["eval_loss"][-1]
    )


@pytest.mark.system
def test_evaluate_warns_of_first_batch_that_is_not_finite(caplog):
    bad = data(32)
    bad["x"][19] = np.nan
    trainer = trainer_of(
        lambda: MLP(rngs=nnx.Rngs(0)),
        metrics={"zero": lambda model, batch: (jnp.float32(0), jnp.float32(0))},
    )
    state = trainer.init()
    metrics = trainer.evaluate(state, bad, batch_size=8)
    assert np.isnan(metrics["loss"])
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == [
        'the evaluation is not finite: "loss" is nan, first in batch 3, rows 16 to 23 of the '
        'evaluation; "zero" counted nothing.'
    ]
    caplog.clear()
    assert (
        np.isfinite(
            trainer_of(lambda: MLP(rngs=nnx.Rngs(0))).evaluate(state, data(32), batch_size=8)[
                "loss"
            ]
        )
        and not caplog.records
    )
