"""Experts on different devices compute what they compute on one device; only tokens are sent to
them.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.errors import DataError, LayoutError, OptionError
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from tests.compare import assert_close

ROWS, LENGTH, WIDTH, HIDDEN, EXPERTS = 4, 16, 8, 12, 8
LAYOUT = spmd.Layout.load("expert_parallel")


@functools.cache
def moe_of(k=2, factor=100.0, experts=EXPERTS):
    return spmd.nn.MixtureOfExperts(
        WIDTH, HIDDEN, experts, k=k, capacity_factor=factor, rngs=nnx.Rngs(0)
    )


def parallel_config(mesh, sequence=None):
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    data = tuple(axis for axis in mesh.axis_names if axis == "data")
    return ParallelConfig(
        mesh, data, sequence=spmd.Sequence(sequence), experts=spmd.Experts("expert")
    )


def tokens(*shape):
    return np.random.default_rng(0).normal(size=shape or (ROWS, LENGTH, WIDTH)).astype("float32")


def program(parallel, moe):
    """Result, routing, and the gradients of parameters and tokens, as one compiled function of the
    two.
    """
    graph, params = nnx.split(moe)

    def loss(params, x):
        with parallel_scope(parallel):
            y, routing = nnx.merge(graph, params)(x)
        return (y**2).sum() + 3 * routing.loss, (y, routing)

    return functools.partial(
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)), params
    )


def by_hand(moe, x):
    """The equations in numpy, for tokens [tokens, features] that are all within capacity; and the
    loss.
    """
    router, up, down = (np.asarray(p[...], np.float64) for p in (moe.router, moe.up, moe.down))
    likely = np.exp(x @ router)
    likely /= likely.sum(axis=1, keepdims=True)
    y = np.zeros_like(x)
    best = np.argsort(-likely, axis=1)[:, : moe.k]
    for t, chosen in enumerate(best):
        total = likely[t, chosen].sum() if moe.k > 1 else 1.0
        for e in chosen:
            y[t] += likely[t, e] / total * (np.asarray(jax.nn.gelu(x[t] @ up[e])) @ down[e])
    shares = np.bincount(best[:, 0], minlength=likely.shape[1]) / len(x)
    return y, likely.shape[1] * (shares * likely.mean(axis=0)).sum(), best


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("k", [1, 2])
def test_equals_the_equations(k):
    moe, x = moe_of(k), tokens(ROWS * LENGTH, WIDTH)
    y, routing = nnx.jit(moe)(x)
    want, loss, _ = by_hand(moe, x)
    np.testing.assert_allclose(y, want, atol=1e-6)
    assert_close(routing.loss, loss)
    assert routing.dropped == 0


MESHES = [
    pytest.param("data=2,expert=4", 2, id="data=2,expert=4-k=2"),
    pytest.param("expert=8", 1, id="expert=8-k=1", marks=pytest.mark.slow),
    pytest.param("data=4,expert=2", 1, id="data=4,expert=2-k=1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "k"), MESHES)
def test_equals_one_device(mesh, k):
    """With capacity for all tokens, the result, the loss and all gradients are those of one
    device.
    """
    parallel, moe = parallel_config(mesh), moe_of(k)
    assert_close(program(parallel, moe)(tokens()), program(ParallelConfig(), moe)(tokens()))
    assert parallel.used == {"experts", "mixture"}


@pytest.mark.system
def test_tokens_are_dropped_per_group():
    """Short of capacity, a device assigns its tokens to experts as one device with these tokens
    alone does.
    """
    moe, x = moe_of(factor=0.5), tokens()
    run, one_device, dropped = program(parallel_config("data=2,expert=4"), moe), nnx.jit(moe), []
    y, routing = run(x)[0][1]
    for rows in range(2):
        for part in range(4):
            group = np.s_[2 * rows : 2 * rows + 2, 4 * part : 4 * part + 4]
            want, alone = one_device(x[group])
            assert_close(y[group], want)
            dropped.append(float(alone.dropped))
            best = by_hand(moe, x[group].reshape(-1, WIDTH))[2]
            room = 1  # ceil(2 choices * 8 tokens / 8 experts * 0.5)
            lost = sum(max(0, np.sum(best == e) - room) for e in range(EXPERTS))
            assert alone.dropped == lost / best.size
    assert_close(routing.dropped, np.mean(dropped))
    assert 0.2 < routing.dropped < 0.9
    assert (run(x)[0][1][0] == y).all()


def test_dropped_tokens_get_zeros():
    moe = moe_of(k=1, factor=1e-3)
    same = np.broadcast_to(tokens(1, WIDTH), (6, WIDTH))
    y, routing = jax.tree.map(np.asarray, nnx.jit(moe)(same))
    assert y[0].any()
    assert not y[1:].any()
    assert_close(routing.dropped, 5 / 6)
    assert routing.loss > 1, "one expert gets all"


def test_collectives_of_compiled_program():
    """Tokens that are already sharded go to the experts and back, also in the backward pass.
    Neither tokens nor weights are gathered.
    """
    parallel, moe = parallel_config("data=2,expert=4"), moe_of()

    def at(*spec):
        return NamedSharding(parallel.mesh, PartitionSpec(*spec))

    run = program(parallel, moe)
    params = jax.tree.map(
        lambda x: jax.device_put(x, at("expert") if x.ndim == 3 else at()), run.args[0]
    )
    lowered = run.func.lower(params, jax.device_put(tokens(), at("data", "expert")))
    text = lowered.compile().as_text()
    kinds = re.findall(
        r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\(", text
    )
    assert kinds.count("all-to-all") == 4
    assert set(kinds) == {"all-to-all", "all-reduce"}
    sharded = run.func(params, jax.device_put(tokens(), at("data", "expert")))
    assert sharded[1][0].up[...].sharding.spec[0] == "expert"


class Mixed(nnx.Module):
    """An embedding, attention, a mixture, and logits."""

    def __init__(self, rngs):
        self.tokens = spmd.nn.Embed(32, WIDTH, rngs=rngs)
        self.moe = moe_of.__wrapped__()
        self.head = nnx.Linear(WIDTH, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens)[:, :, None]
        y, routing = self.moe(spmd.nn.attention(x, x, x, causal=True)[:, :, 0])
        return self.head(y), routing


def mixed_loss(model, batch):
    logits, routing = model(batch["tokens"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    return loss + 0.01 * routing.loss, {"dropped": routing.dropped}


def trainer_of(layout, mesh, model=lambda: Mixed(nnx.Rngs(0))):
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    return spmd.Trainer(
        model, loss=mixed_loss, optimizer=optax.sgd(0.5, momentum=0.9), mesh=mesh, layout=layout
    )


def batch():
    random = np.random.default_rng(0)
    return {
        name: random.integers(0, 32, (8, LENGTH)).astype("int32") for name in ("tokens", "targets")
    }


@functools.cache
def trained(reduction, mesh, name):
    layout = spmd.Layout.load(name)
    trainer = trainer_of(dataclasses.replace(layout, gradients=spmd.Gradients(reduction)), mesh)
    state, losses = trainer.init(), []
    for _ in range(2):
        state, metrics = trainer.step(state, batch())
        losses.append(metrics["loss"])
    return trainer, losses, state


@pytest.mark.system
@pytest.mark.parametrize(
    "reduction",
    [
        "all_reduce",
        pytest.param("reduce_scatter", marks=pytest.mark.slow),
        pytest.param("compiler", marks=pytest.mark.slow),
    ],
)
def test_trains_as_on_one_device(reduction):
    """The balance of experts is taken over all workers, so it, too, is the same: to 1e-5 of the
    largest number of each parameter.
    """
    _, losses, state = trained("compiler", "data=1", "data_parallel")
    trainer, ours, sharded = trained(reduction, "data=2,expert=4", "expert_parallel")
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    assert_close(sharded.params, state.params, 1e-5)
    assert sharded.params["moe"]["up"].sharding.spec[0] == "expert"
    if reduction == "all_reduce":
        sent = [op for op in trainer.wire.ops if op.kind == "all_to_all"]
        assert {(op.axes, op.group) for op in sent} == {(("expert",), 4)}
        assert len(sent) == 4
        capacity = 4 * 4  # all of a group's tokens, as the factor is 100
        assert {op.shape for op in sent} == {(4, 2, capacity, WIDTH)}


@pytest.mark.parametrize("count", [1, 4])
def test_balance_of_microbatches_is_reported(count, caplog):
    """Under `accumulate` the loss is the mean over microbatches, every `count`-th row each; the
    numbers are those of the equations.
    """
    data = {"x": tokens(32, LENGTH, WIDTH)}
    options = {
        "batch_size": 32,
        "steps": 1,
        "shuffle": False,
        "mesh": "data=8",
        "optimizer": optax.sgd(0.1),
        "progress": False,
    }
    result = spmd.fit(
        moe_of(),
        data,
        loss=lambda model, batch: model(batch["x"])[1].loss,
        accumulate=count,
        **options,
    )
    parts = [
        data["x"][first::count].reshape(-1, WIDTH).astype(np.float64) for first in range(count)
    ]
    assert_close(result.history["loss"], [np.mean([by_hand(moe_of(), part)[1] for part in parts])])
    of_batch = by_hand(moe_of(), data["x"].reshape(-1, WIDTH).astype(np.float64))[1]
    assert (abs(result.history["loss"][0] - of_batch) > 1e-3) == (count > 1)
    line = (
        "note: MixtureOfExperts under accumulate=4: capacity and Routing.loss are computed for "
        "each of 4 microbatches of 8 rows, and not"
    )
    assert (line in caplog.text) == (count > 1)


def test_layout_with_experts_that_the_loss_never_calls():
    class Dense(nnx.Module):
        def __init__(self):
            self.tokens, self.moe = spmd.nn.Embed(32, 32, rngs=nnx.Rngs(0)), moe_of.__wrapped__()

        def __call__(self, tokens):
            x = self.tokens(tokens)[:, :, None]
            return spmd.nn.attention(x, x, x)[:, :, 0], spmd.nn.Routing(
                jnp.float32(0), jnp.float32(0)
            )

    with pytest.raises(LayoutError) as caught:
        trainer_of(LAYOUT, "data=2,expert=4", lambda: Dense()).prepare(batch())
    assert str(caught.value) == (
        'layouts/expert_parallel.toml: [experts] axis = "expert", but the loss never calls '
        "spmd.nn.MixtureOfExperts, so nothing is sharded "
        'over "expert".\n    fix: spmd.nn.MixtureOfExperts in the model, or a layout without '
        "[experts]."
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"axes": (("expert", None), ("embed", None), ("mlp", None))},
            '  [experts] axis\n      no parameter is sharded over "expert", so every device would '
            "keep all experts.\n"
            '      fix: [axes]  expert = "expert".',
        ),
        (
            {"experts": spmd.Experts("exprt")},
            '  [experts] axis\n      mesh axis "exprt" does not exist on mesh data=2, expert=4.\n  '
            '    fix: did you mean "expert"?',
        ),
        (
            {"experts": spmd.Experts("data")},
            '  [experts] axis\n      "data" is a data axis: it splits the batch among workers, and '
            "cannot shard the data of one.\n"
            "      fix: another axis than data.",
        ),
    ],
)
def test_invalid_axes_raise(change, expected):
    with pytest.raises(LayoutError) as caught:
        trainer_of(dataclasses.replace(LAYOUT, **change), "data=2,expert=4").prepare(batch())
    assert expected in str(caught.value)


def test_invalid_arguments_raise():
    def error_text(error, call):
        with pytest.raises(error) as caught, parallel_scope(parallel_config("data=2,expert=4")):
            call()
        return str(caught.value)

    assert (
        error_text(OptionError, lambda: moe_of(k=9))
        == "MixtureOfExperts: k=9 of 8 experts.\n    fix: from 1 to 8."
    )
    assert (
        error_text(OptionError, lambda: moe_of(factor=0))
        == "MixtureOfExperts: capacity_factor=0.\n    fix: above 0, such as 1.25."
    )
    assert error_text(OptionError, lambda: moe_of(experts=6)(tokens())) == (
        'MixtureOfExperts ([experts] axis = "expert"): 6 experts are not divisible by 4 devices: 6 '
        "/ 4 leaves 2.\n    fix: 8 experts."
    )
    assert error_text(DataError, lambda: moe_of()(tokens(ROWS, 18, WIDTH))) == (
        'MixtureOfExperts: a sequence of 18, not divisible by 4 devices along "expert": 18 / 4 '
        "leaves 2.\n    fix: 16 or 20."
    )
    assert error_text(DataError, lambda: moe_of()(tokens(12, WIDTH))) == (
        'MixtureOfExperts: rows of each worker: 6, not divisible by 4 devices along "expert": 6 / '
        "4 leaves 2.\n    fix: 4 or 8."
    )
    assert error_text(OptionError, lambda: moe_of()(tokens(ROWS, LENGTH, 5))) == (
        "MixtureOfExperts: x is float32[4, 16, 5].\n    fix: [rows, 8] or [rows, length, 8]."
    )
