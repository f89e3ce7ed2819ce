"""Logical axis names that are found from how parameters are used, and layouts with rules by path
made of them.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import spmd
from spmd.base.tree import flatten
from spmd.planner.structure import Axes, names_of, with_rules, without_names

S, D, V, F = jax.ShapeDtypeStruct, 32, 48, 64
TEXT = {"tokens": S((8, 16), "int32"), "targets": S((8, 16), "int32")}
ROWS = {"x": S((8, 16), "float32"), "label": S((8,), "int32")}
IMAGES = {"image": S((8, 8, 8, 3), "float32"), "label": S((8,), "int32")}
SIZES = {"data": 2, "model": 4}


class Attention(nn.Module):
    """Grouped-query attention, written out: 8 heads, `kv` of them with keys and values."""

    kv: int = 8

    @nn.compact
    def __call__(self, x):
        q = nn.DenseGeneral((8, 4), use_bias=False, name="q")(x)
        k, v = (nn.DenseGeneral((self.kv, 4), use_bias=False, name=name)(x) for name in "kv")
        q = q.reshape(*q.shape[:2], self.kv, 8 // self.kv, 4)
        scores = jnp.einsum("blkgd,bmkd->bkglm", q, k)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        out = jnp.einsum("bkglm,bmkd->blkgd", jax.nn.softmax(scores), v)
        return nn.Dense(D, use_bias=False, name="out")(out.reshape(*x.shape[:2], 32))


class Block(nn.Module):
    kv: int = 8
    scanned: bool = False

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.kv, name="attention")(nn.LayerNorm(name="before")(x))
        h = nn.LayerNorm(name="after")(x)
        gate = nn.Dense(F, name="gate")(h)
        x = x + nn.Dense(D, name="down")(nn.silu(gate) * nn.Dense(F, name="up")(h))
        return (x, None) if self.scanned else x


class Transformer(nn.Module):
    kind: str = "list"
    kv: int = 8

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(V, D, name="embed")
        x = embed(tokens)
        if self.kind == "scan":
            stack = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = stack(self.kv, True, name="stack")(x)
        else:
            block = nn.remat(Block) if self.kind == "remat" else Block
            for number in range(2):
                x = block(self.kv, name=f"block_{number}")(x)
        x = nn.LayerNorm(name="last")(x)
        return embed.attend(x) if self.kind == "list" else nn.Dense(V, name="head")(x)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        sizes = (16, 64, 32, 64, 10)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class ConvNet(nn.Module):
    """Two residual blocks, whose 3 x 3 convolutions are between 1 x 1 ones."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (3, 3), name="stem")(x)
        for number in range(2):
            y = nn.relu(nn.Conv(64, (1, 1), name=f"in_{number}")(x))
            y = nn.relu(nn.Conv(64, (3, 3), feature_group_count=64, name=f"each_{number}")(y))
            x = nn.relu(x + nn.Conv(32, (1, 1), name=f"out_{number}")(y))
        return nn.Dense(10, name="head")(x.mean((1, 2)))


def program(model, batch):
    trainer = spmd.Trainer(
        model,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        mesh=spmd.make_mesh("data=1", devices=jax.devices()[:1]),
    )
    return trainer.prepare(batch)[0]


ATTENTION = {
    "attention/q/kernel": ("embed", "heads", None),
    "attention/k/kernel": ("embed", "heads", None),
    "attention/v/kernel": ("embed", "heads", None),
    "attention/out/kernel": ("heads", "embed"),
}
GATED = {f"{name}/kernel": ("embed", "mlp") for name in ("gate", "up")} | {
    f"{name}/bias": ("mlp",) for name in ("gate", "up")
}
BLOCK = {**ATTENTION, **GATED, "down/kernel": ("mlp", "embed")}
BLOCKS = {f"block_{number}/{path}": names for number in (0, 1) for path, names in BLOCK.items()}
HEAD = {"head/kernel": ("embed", "mlp"), "head/bias": ("mlp",)}
CASES = {
    "a transformer": (
        lambda: Transformer(),
        TEXT,
        {"embed/embedding": ("vocab", "embed"), **BLOCKS},
    ),
    "with grouped queries": (
        lambda: Transformer(kv=4),
        TEXT,
        {"embed/embedding": ("vocab", "embed"), **BLOCKS},
    ),
    "rematerialized, with a head": (
        lambda: Transformer("remat"),
        TEXT,
        {"embed/embedding": ("vocab", "embed"), **BLOCKS, **HEAD},
    ),
    "scanned": (
        lambda: Transformer("scan"),
        TEXT,
        {
            "embed/embedding": ("vocab", "embed"),
            **{f"stack/{path}": (None, *names) for path, names in BLOCK.items()},
            **HEAD,
        },
    ),
    "an MLP without residuals": (
        lambda: MLP(nnx.Rngs(0)),
        ROWS,
        {
            "layers/0/kernel": (None, "mlp"),
            "layers/0/bias": ("mlp",),
            "layers/1/kernel": ("mlp", "embed"),
            "layers/2/kernel": ("embed", "mlp"),
            "layers/2/bias": ("mlp",),
            "layers/3/kernel": ("mlp", None),
        },
    ),
}


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(("model", "batch", "expected"), CASES.values(), ids=CASES.keys())
def test_names(model, batch, expected):
    found = names_of(program(model(), batch))
    if "stack/gate/bias" in expected:  # a bias of all layers is a matrix
        expected = expected | {
            f"stack/{name}": (None, "embed")
            for name in ("after/bias", "after/scale", "before/bias", "before/scale", "down/bias")
        }
    assert found == expected


def test_two_layers_share_their_hidden_axis():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10, name="down")(nn.relu(nn.Dense(64, name="up")(x)))

    assert names_of(program(Two(), ROWS)) == {
        "up/kernel": (None, "mlp"),
        "up/bias": ("mlp",),
        "down/kernel": ("mlp", None),
    }


def test_a_stream_that_cannot_be_sharded_is_still_the_stream():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(V, 36, name="embed")(tokens)
            for number in range(2):
                x = x + nn.Dense(36, name=f"down_{number}")(
                    nn.relu(nn.Dense(64, name=f"up_{number}")(x))
                )
            return nn.Dense(V, name="head")(x)

    found = names_of(program(Odd(), TEXT))
    assert found["up_0/kernel"] == (None, "mlp") and found["down_1/kernel"] == ("mlp", None)


def test_matrices_of_groups_of_rows():
    def init(key):
        return {
            "up": jnp.ones((4, 16, 64)),
            "down": jnp.ones((4, 64, 16)),
            "out": jnp.ones((16, 10)),
        }

    def apply(params, x):
        sizes = jnp.full((4,), x.shape[0] // 4, "int32")
        hidden = jax.nn.relu(jax.lax.ragged_dot(x, params["up"], sizes))
        return jax.lax.ragged_dot(hidden, params["down"], sizes) @ params["out"]

    found = names_of(program(spmd.FunctionalModel(init, apply), ROWS))
    assert (
        found["up"] == (None, "mlp", "embed")
        and found["down"] == (None, "embed", "mlp")
        and found["out"] == ("mlp", None)
    )


def test_convolutions_share_channels():
    found = names_of(program(ConvNet(), IMAGES))
    for number in (0, 1):
        assert found[f"in_{number}/kernel"][2:] == ("embed", "mlp")
        # one filter for each channel
        assert found[f"each_{number}/kernel"] == (None, None, None, "mlp")
        assert found[f"out_{number}/kernel"][2:] == ("mlp", "embed")
    assert found["stem/kernel"][:2] == (None, None)  # heights and widths of kernels are no axes


def test_one_head_of_keys_is_replicated():
    found = names_of(program(Transformer(kv=1), TEXT))
    for number in (0, 1):
        # the heads of queries
        assert found[f"block_{number}/attention/q/kernel"] == ("embed", "mlp", None)
        # not the width of a head, over which scores are summed
        assert found[f"block_{number}/attention/k/kernel"] == ("embed", None, None)
        assert found[f"block_{number}/attention/out/kernel"] == ("mlp", "embed")


def test_rules_are_one_line_for_all_blocks():
    names = {f"blocks/{number}/up/kernel": ("embed", "mlp") for number in range(12)} | {
        "head/kernel": ("embed", "vocab")
    }
    layout = with_rules(
        spmd.Layout.load("fsdp_tensor_parallel"), names, [*names, "blocks/0/up/bias"]
    )
    assert [(rule.path, rule.spec) for rule in layout.params] == [
        ("blocks/*/up/kernel", ("data", "model")),
        ("head/kernel", ("data", "model")),
    ]
    assert layout.axes == () and layout.name == "fsdp_tensor_parallel_by_path"
    assert spmd.Layout.load("fsdp").axes == () and with_rules(
        spmd.Layout.load("fsdp"), names, [*names]
    ) == spmd.Layout.load("fsdp")


def test_paths_that_a_pattern_would_confuse_have_a_rule_each():
    names = {
        "a_0/kernel": ("embed", "mlp"),
        "a_2/kernel": ("embed", "mlp"),
        "a_1/kernel": ("mlp", "embed"),
    }
    layout = with_rules(spmd.Layout.load("tensor_parallel"), names, [*names])
    assert {rule.path for rule in layout.params} == {*names}


def test_a_model_with_names_keeps_the_tables():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(
                10,
                kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")),
            )(x)

    layouts = (spmd.Layout.load("tensor_parallel"),)
    assert without_names(layouts, program(Named(), ROWS)) == layouts


def batches(shapes):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 10, (8, 16)).astype("int32")
    made = {
        "tokens": tokens,
        "targets": tokens,
        "x": draw.normal(size=(8, 16)),
        "image": draw.normal(size=(8, 8, 8, 3)),
    }
    made["label"] = np.arange(8) % 10
    return {key: made[key].astype(shape.dtype) for key, shape in shapes.items()}


TRAINED = {
    "a transformer": CASES["a transformer"],
    "scanned": CASES["scanned"],
    "an MLP": CASES["an MLP without residuals"],
}
TRAINED["convolutions"] = (ConvNet, IMAGES, None)


@pytest.mark.sampled(system=8)
@pytest.mark.parametrize("name", ["tensor_parallel", "fsdp_tensor_parallel"])
@pytest.mark.parametrize(("model", "batch", "expected"), TRAINED.values(), ids=TRAINED.keys())
def test_training_equals_one_device(name, model, batch, expected):
    one = program(model(), batch)
    (layout,) = without_names([spmd.Layout.load(name)], one)
    data, options = (
        batches(batch),
        {"loss": spmd.losses.cross_entropy, "optimizer": optax.adam(1e-2)},
    )
    losses = []
    for mesh, under in (("data=1", "data_parallel"), (SIZES, layout)):
        devices = jax.devices()[: 1 if mesh == "data=1" else 8]
        trainer = spmd.Trainer(
            model(), mesh=spmd.make_mesh(mesh, devices=devices), layout=under, **options
        )
        state, found = trainer.init(data), []
        for _ in range(3):
            state, metrics = trainer.step(state, data)
            found.append(metrics["loss"])
        losses.append(found)
    sharded = [
        path for path, leaf in flatten(state.params).items() if "model" in str(leaf.sharding.spec)
    ]
    assert len(sharded) >= 3
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


def test_axes():
    axes = Axes()
    (a, b), (c, d) = axes.new((4, 6)), axes.new((8, 6))
    assert not axes.is_shared(a)
    axes.join(a, c)
    axes.join(b, d)
    assert axes.find(a) == axes.find(c) != axes.find(b) and axes.gcd(c) == 4 and axes.is_shared(a)
