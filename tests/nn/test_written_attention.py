"""Attention that a model writes out is computed in tiles under `[attention]`: equal numbers, and no
array of all scores.
"""

import dataclasses
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec as P

import spmd
from spmd.layout.model_parallel import Sequence
from spmd.nn import chunked_attention
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from spmd.nn.unchanged_models import CALLS
from spmd.nn.written_attention import fuse_attention
from spmd.nn.written_dims import arrange, reshaped
from tests.nn.test_attention_kernels import (
    GROUPS,
    HEADS,
    ROWS,
    SIZE,
    arrays_of,
    inputs,
    random_bias,
    random_mask,
    worst,
)

LENGTH = 13
SCORES = ROWS * HEADS * LENGTH * LENGTH
TRIL = np.tril(np.ones((LENGTH, LENGTH), bool))
SEEN = random_mask(ROWS, LENGTH) | (jnp.arange(LENGTH) == 0)  # keys, of which every query sees one
MASK = random_mask(ROWS, 1, LENGTH, LENGTH) | jnp.eye(LENGTH, dtype=bool)


def scope(**options):
    return parallel_scope(
        ParallelConfig(
            attention="chunked", platform="cpu", calls=CALLS, used=set(), notes={}, **options
        )
    )


def both(function, *arrays):
    """Results and gradients, as it is written and fused; all arrays of both programs; and the
    parallel context.
    """

    def with_gradients(function):
        def run(*arrays):
            out, back = jax.vjp(function, *arrays)
            grads = back(
                jax.tree.map(
                    lambda x: (
                        jnp.cos(jnp.arange(x.size, dtype=jnp.float32))
                        .reshape(x.shape)
                        .astype(x.dtype)
                    ),
                    out,
                )
            )
            return *jax.tree.leaves(out), *(
                x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0
            )

        return run

    written, plain = (
        jax.make_jaxpr(with_gradients(function))(*arrays),
        jax.jit(with_gradients(function))(*arrays),
    )
    with scope() as parallel:
        fused = with_gradients(fuse_attention(function))
        traced, ours = jax.make_jaxpr(fused)(*arrays), jax.jit(fused)(*arrays)
    return plain, ours, [list(arrays_of(jaxpr.jaxpr)) for jaxpr in (written, traced)], parallel


def largest(shapes):
    return max(map(math.prod, shapes))


def heads_first(*arrays):
    return [jnp.moveaxis(x, 2, 1) for x in arrays]


def attention(q, k, v, *, before=lambda q: q, scores=lambda s: s, after=lambda w: w):
    """Heads in the products' batch, softmax over keys."""
    s = scores(jnp.einsum("bqhd,bkhd->bhqk", before(q), jnp.repeat(k, HEADS // GROUPS, 2)))
    return jnp.einsum(
        "bhqk,bkhd->bqhd", after(jax.nn.softmax(s, axis=-1)), jnp.repeat(v, HEADS // GROUPS, 2)
    )


def grouped(q, k, v):
    """Grouped queries, and scores with joined heads in between, as in Gemma."""
    q = q.reshape(ROWS, LENGTH, GROUPS, HEADS // GROUPS, SIZE)
    s = jnp.einsum("BTKGH,BSKH->BTKGS", q * 0.3, k).reshape(ROWS, LENGTH, HEADS, LENGTH)
    s = jnp.where(
        jnp.expand_dims(jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None] & SEEN[:, None, :], -2),
        s,
        -2.3819763e38,
    )
    w = (
        jax.nn.softmax(s, axis=-1)
        .astype(k.dtype)
        .reshape(ROWS, LENGTH, GROUPS, HEADS // GROUPS, LENGTH)
    )
    return jnp.einsum("BTKGS,BSKH->BTKGH", w, v).reshape(ROWS, LENGTH, HEADS, SIZE)


def matmuls(q, k, v):
    """Products of arrays whose heads come first, a division by a number that is computed, a mask
    that is added, a softmax by hand.
    """
    q, k, v = heads_first(q, *(jnp.repeat(x, HEADS // GROUPS, 2) for x in (k, v)))
    s = q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1])
    i = jnp.arange(LENGTH)
    s = s + jnp.where(i[:, None] >= i, 0.0, -1e9)
    w = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.moveaxis(w / w.sum(-1, keepdims=True) @ v, 1, 2)


def one_row(q, k, v, seen):
    s = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, HEADS // GROUPS, 1))
    return jnp.einsum(
        "hqk,khd->qhd",
        jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1),
        jnp.repeat(v, HEADS // GROUPS, 1),
    )


def one_head(q, k, v):
    """Vectors of one position, one head."""
    return jax.nn.softmax(k @ q / math.sqrt(SIZE)) @ v


by_position = jax.vmap(jax.vmap(jax.vmap(one_head, (0, None, None)), (1, 1, 1), 1))


def one_key_head(q, k, v):
    return jnp.einsum(
        "BTNS,BSH->BTNH", jax.nn.softmax(jnp.einsum("BTNH,BSH->BTNS", q, k[:, :, 0])), v[:, :, 0]
    )


def sliding(s):
    ones = jnp.ones((1, LENGTH, LENGTH), jnp.int32)
    return jnp.where((jnp.triu(ones, -3) * jnp.tril(ones, 2))[:, None] > 0, s, -1e30)


def alibi(s):
    distance = jnp.arange(LENGTH) - jnp.arange(LENGTH)[:, None]
    slopes = 2.0 ** -jnp.arange(1.0, HEADS + 1)
    return jnp.where(distance <= 0, s + slopes[:, None, None] * distance, -1e10)


def in_scan(q, k, v):
    """Two layers, with a mask that is made outside of them, recomputed in the backward pass."""
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    @jax.checkpoint
    def layer(x, scale):
        return attention(
            x, k, v, before=lambda q: q * scale, scores=lambda s: jnp.where(seen, s, -1e9)
        ), None

    return jax.lax.scan(layer, q, jnp.array([0.4, 0.6]))[0]


def in_branches(q, k, v):
    x = jax.jit(attention)(q, k, v)
    x = jax.lax.cond(
        k[0, 0, 0, 0] > 0, lambda x: attention(x, k, v), lambda x: -attention(x, v, k), x
    )
    return jax.checkpoint(attention, policy=jax.checkpoint_policies.dots_saveable)(x, k, v)


WRITTEN = {
    "heads": (attention, ""),
    "scaled queries": (
        lambda q, k, v: attention(q, k, v, before=lambda q: q / math.sqrt(SIZE)),
        "",
    ),
    "scaled scores": (lambda q, k, v: attention(q, k, v, scores=lambda s: 0.3 * s * 0.5), ""),
    "grouped": (grouped, "a causal mask, a key mask"),
    "one key head": (one_key_head, ""),
    "matmuls": (matmuls, "a causal mask"),
    "constant": (
        lambda q, k, v: attention(q, k, v, scores=lambda s: jnp.where(~TRIL, -1e9, s)),
        "a causal mask",
    ),
    "sliced": (
        lambda q, k, v: attention(
            q, k, v, scores=lambda s: jnp.where(jnp.tri(20, dtype=bool)[:13, :13], s, -1e9)
        ),
        "a causal mask",
    ),
    "sliding": (lambda q, k, v: attention(q, k, v, scores=sliding), "a window"),
    "mask": (
        lambda q, k, v: attention(q, k, v, scores=lambda s: jnp.where(MASK, s, -1e9)),
        "a mask",
    ),
    "additive mask": (
        lambda q, k, v: attention(
            q, k, v, scores=lambda s: s + (1.0 - MASK.astype(s.dtype)) * -1e9
        ),
        "a mask",
    ),
    "padding": (
        lambda q, k, v: attention(
            q, k, v, scores=lambda s: jnp.where(SEEN[:, None, None], s, -1e9)
        ),
        "a key mask",
    ),
    "soft cap": (
        lambda q, k, v: attention(q, k, v, scores=lambda s: 5.0 * jnp.tanh(0.7 * s / 5.0)),
        "a soft cap",
    ),
    "alibi": (lambda q, k, v: attention(q, k, v, scores=alibi), "a causal mask, a bias"),
    "bias": (lambda q, k, v, b: attention(q, k, v, scores=lambda s: (s + b) * 0.5), "a bias"),
    "rows by vmap": (lambda q, k, v: jax.vmap(one_row)(q, k, v, MASK), "a mask"),
    "heads by vmap": (lambda q, k, v: by_position(q[:, :, :GROUPS], k, v), ""),
    "scan": (in_scan, "a causal mask"),
    "branches": (in_branches, ""),
}


@pytest.mark.sampled(quick=10, system=3)
@pytest.mark.parametrize("name", WRITTEN)
def test_is_computed_in_tiles(name, monkeypatch):
    """With the same numbers and gradients."""
    monkeypatch.setattr(chunked_attention, "TILE", 5)
    function, options = WRITTEN[name]
    arrays = [*inputs()[:3], random_bias(HEADS, LENGTH, LENGTH)] if name == "bias" else inputs()[:3]
    plain, ours, (written, tiled), parallel = both(function, *arrays)
    assert worst(ours, plain) < 1e-5
    assert [x.dtype for x in ours] == [x.dtype for x in plain]
    assert parallel.used == {"attention", "fused attention"}
    scores = max(math.prod(shape) for shape in written if shape.count(LENGTH) > 1)
    assert scores >= SCORES / 2 and not any(
        shape.count(LENGTH) > 1 and math.prod(shape) >= scores for shape in tiled
    )
    calls = [note for note in parallel.notes if not note.endswith("is replaced.")]
    assert calls and all(
        note.partition("float32")[2].partition(": ")[0].removeprefix(", ") == options
        for note in calls
    ), calls
    assert list(parallel.notes)[-1] == "attention in the model is written out, and is replaced."


@pytest.mark.system
def test_bfloat16_with_a_softmax_in_float32():
    """Rounded as the model rounds: inputs, weights and results; in the backward pass, gradients of
    scores too.
    """
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs()[:3])

    def written(q, k, v):
        return attention(
            q, k, v, scores=lambda s: s.astype(jnp.float32) * 0.5, after=lambda w: w.astype(v.dtype)
        )

    def widened(q, k, v):
        s = 0.5 * jnp.einsum(
            "bqhd,bkhd->bhqk", q[:, :, :GROUPS].astype(jnp.float32), k.astype(jnp.float32)
        )
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s).astype(v.dtype), v)

    for function in (written, widened):
        plain, ours, _, parallel = both(function, q, k, v)
        exact = both(
            lambda *x, function=function: function(*x), *(x.astype(jnp.float32) for x in (q, k, v))
        )[0]
        assert all(x.dtype == jnp.bfloat16 for x in ours)
        assert "bfloat16" in next(iter(parallel.notes))
        assert 0 < worst(plain, exact) < 0.02 and worst(ours, exact) < 0.02


def sharded(s):
    mesh = jax.make_mesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    return with_sharding_constraint(s, NamedSharding(mesh, P()))


def with_weights(q, k, v):
    kept = []
    return attention(q, k, v, after=lambda w: kept.append(w) or w), kept[0]


def with_entropy(q, k, v):
    kept = []
    out = attention(q, k, v, scores=lambda s: kept.append(s.max()) or s)
    return out, kept[0]


def over_queries(q, k, v):
    w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q[:, :, :GROUPS], k), axis=2)
    return jnp.einsum("bhqk,bkhd->bqhd", w, v)


@jax.custom_vjp
def with_a_gradient(q, k, v):
    return attention(q, k, v)


with_a_gradient.defvjp(
    lambda *x: (attention(*x), x), lambda x, grad: jax.vjp(attention, *x)[1](grad)
)

ALONE = {
    "weights": (with_weights, "its weights are used elsewhere"),
    "scores": (with_entropy, "its scores are used elsewhere"),
    "queries": (over_queries, "its softmax is over another dim than the sum of its weights"),
    "square": (lambda *x: attention(*x, scores=jnp.square), "square is between its products"),
    "constraint": (lambda *x: attention(*x, scores=sharded),
        "sharding_constraint is between its products"),
    "dropout": (lambda *x: attention(*x, after=lambda w: jnp.where(MASK, w / 0.5, 0.0)),
        "div is between its softmax and the values"),
    "weak mask": (lambda *x: attention(*x, scores=lambda s: jnp.where(MASK, s, -5.0)),
        "its mask sets scores to -5, above -10000"),
    "late cap": (lambda *x: attention(*x, scores=lambda s: jnp.tanh(s + random_bias(13, 13))),
        "tanh is between its products"),
    "gradient": (with_a_gradient, "it is in a function with a gradient of its own"),
}  # fmt: skip


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("name", ALONE)
def test_is_left_as_it_is_written(name):
    """And a note says why."""
    function, why = ALONE[name]
    plain, ours, (written, traced), parallel = both(function, *inputs()[:3])
    assert worst(ours, plain) < 1e-6
    assert largest(traced) == largest(written)
    assert list(parallel.notes) == [
        f"note: attention in the model is computed as it is written, with all scores: {why}."
    ]
    assert not parallel.used


@pytest.mark.system
def test_other_softmaxes_say_nothing():
    """Of logits, and of a mixture's router."""

    def run(x, w, v):
        logits = x @ w
        return jax.nn.softmax(logits, axis=-1), jax.nn.softmax(jax.nn.softmax(logits, axis=-1) @ v)

    x, w, v = (jnp.ones(shape) for shape in ((2, 5, 8), (8, 6), (6, 4)))
    plain, ours, _, parallel = both(run, x, w, v)
    assert not parallel.notes and all((a == b).all() for a, b in zip(ours, plain, strict=True))


def test_what_the_model_asks_for_comes_first():
    """`implementation="xla"` in the model's own call."""

    def run(q, k, v):
        return spmd.nn.attention(q, k, v, implementation="xla") + jax.nn.dot_product_attention(
            q, k, v, implementation="xla"
        )

    _, _, (written, traced), parallel = both(run, *inputs()[:3])
    assert largest(traced) == largest(written)
    assert not any("written out" in note for note in parallel.notes)


def test_a_query_without_keys_gets_zeros():
    """The softmax of equal scores is the mean of the values; rows that see a key are equal."""
    seen = jnp.asarray(np.arange(LENGTH) >= np.array([[5], [0]]))[:, None, None]
    plain, ours, _, _ = both(
        lambda *x: attention(*x, scores=lambda s: jnp.where(seen & TRIL, s, -1e9)), *inputs()[:3]
    )
    assert (ours[0][0, :5] == 0).all() and (plain[0][0, :5] != 0).all()
    assert worst([ours[0][0, 5:], ours[0][1]], [plain[0][0, 5:], plain[0][1]]) < 1e-5


@pytest.mark.system
def test_a_sharded_sequence_goes_around_the_ring():
    """No device holds all keys."""
    mesh = jax.make_mesh(
        (2,), ("context",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )

    def run(q, k, v):
        return attention(q, k, v, scores=lambda s: jnp.where(jnp.tri(16, dtype=bool), s, -1e9))

    arrays = inputs(16, 16)[:3]
    with scope(mesh=mesh, sequence=Sequence("context")) as parallel:
        ours = jax.jit(fuse_attention(run))(*arrays)
        program = jax.jit(fuse_attention(run)).lower(*arrays).as_text()
    assert worst([ours], [run(*arrays)]) < 1e-5
    assert parallel.used >= {"attention", "sequence"} and "collective_permute" in program


def test_without_the_table_nothing_is_traced_again():
    calls = []

    def run(x):
        calls.append(x)
        return x

    for attention in ("auto", "as_written"):
        with parallel_scope(ParallelConfig(attention=attention)):
            assert fuse_attention(run)(1) == 1
    assert calls == [1, 1]


def test_dims_are_split_where_they_were_joined():
    sizes = {0: 2, 1: 1, 2: 3, 3: 5}
    assert reshaped([(0,), (2,), (3,)], sizes, (6, 1, 5)) == ((0, 2), (), (3,))
    assert reshaped([(0, 2), (3,)], sizes, (3, 2, 5)) is None
    x = jnp.arange(15).reshape(5, 3)
    assert (
        arrange(x, [(3,), (2,)], sizes, [(0, 2), (1,), (3,)]) == jnp.tile(x.T, (2, 1))[:, None]
    ).all()


# models -------------------------------------------------------------------------------------------


class Attention(nnx.Module):
    """Grouped queries with a soft cap, as in Gemma 2; a sliding window in every other layer."""

    def __init__(self, window, *, rngs):
        self.window = window
        self.query = nnx.Einsum("BTD,DNH->BTNH", (16, 4, 8), rngs=rngs)
        self.pair = nnx.Einsum("BTD,CDKH->CBTKH", (2, 16, 2, 8), rngs=rngs)
        self.out = nnx.Einsum("BTNH,NHD->BTD", (4, 8, 16), rngs=rngs)

    def __call__(self, x, mask):
        q, (k, v) = self.query(x) * 8**-0.5, self.pair(x)
        rows, length = x.shape[:2]
        s = jnp.einsum("BTKGH,BSKH->BTKGS", q.reshape(rows, length, 2, 2, 8), k).reshape(
            rows, length, 4, length
        )
        s = jnp.tanh(s / 30.0) * 30.0
        if self.window:
            ones = jnp.ones_like(mask)
            mask = jnp.triu(ones, 1 - self.window) * jnp.tril(ones, self.window - 1) * mask
        w = jax.nn.softmax(jnp.where(mask[:, :, None], s, -2.3819763e38), axis=-1).astype(v.dtype)
        out = jnp.einsum("BTKGS,BSKH->BTKGH", w.reshape(rows, length, 2, 2, length), v)
        return self.out(out.reshape(rows, length, 4, 8))


class Block(nnx.Module):
    def __init__(self, window, *, rngs):
        self.norm, self.attn, self.mlp = (
            nnx.RMSNorm(16, rngs=rngs),
            Attention(window, rngs=rngs),
            nnx.Linear(16, 16, rngs=rngs),
        )

    def __call__(self, x, mask):
        x = x + self.attn(self.norm(x), mask)
        return x + nnx.gelu(self.mlp(x))


class Unrolled(nnx.Module):
    """A list of blocks, of which one is recomputed."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(32, 16, rngs=rngs)
        self.layers = nnx.List([Block(5, rngs=rngs), Block(None, rngs=rngs)])

    def __call__(self, tokens):
        mask = (tokens > 0)[:, None, :] * jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        x = self.tokens(tokens)
        x = self.layers[0](x, mask)
        return self.tokens.attend(nnx.remat(Block.__call__)(self.layers[1], x, mask))


class Blocks(nnx.Module):
    """A list of blocks, which fsdp gathers one by one."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(32, 16, rngs=rngs)
        self.layers = nnx.List([Block(None, rngs=rngs) for _ in range(3)])

    def __call__(self, tokens):
        mask, x = jnp.tril(jnp.ones((1, *(tokens.shape[1],) * 2), bool)), self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.tokens.attend(x)


class Stacked(nnx.Module):
    """A stack, which fsdp gathers layer by layer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(32, 16, rngs=rngs)
        self.blocks = spmd.nn.LayerStack(
            spmd.nn.repeat(4, lambda rngs: Block(None, rngs=rngs), rngs)
        )

    def __call__(self, tokens):
        mask = (tokens > 0)[:, None, :] * jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        return self.tokens.attend(self.blocks(self.tokens(tokens), mask))


def step_arrays(trainer):
    """Shapes of the arrays in a traced step."""
    program, _ = trainer.prepare(BATCH)
    return arrays_of(program.traced.jaxpr.jaxpr)


TOKENS = np.random.default_rng(0).integers(1, 32, (16, 25)).astype("int32")
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def loss(model, batch):
    logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean(axis=-1)


def trained(model, layout, mesh, implementation, **options):
    """Losses of three steps and of an evaluation after them, parameters, and the trainer."""
    layout = dataclasses.replace(
        spmd.Layout.load(layout), attention=spmd.Attention(implementation), **options
    )
    trainer = spmd.Trainer(
        lambda: model(), loss=loss, optimizer=optax.sgd(0.3), mesh=mesh, layout=layout
    )
    state = trainer.init(BATCH)
    losses = []
    for _ in range(3):
        state, metrics = trainer.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    losses.append(float(trainer.evaluate(state, BATCH)["loss"]))
    return losses, jax.tree.leaves(jax.device_get(state.params)), trainer


BY_LAYER = dataclasses.replace(spmd.Layout.load("fsdp").gradients, gather="layer")
CASES = [
    (Unrolled, "data_parallel", "data=8", {"gradients": spmd.Gradients("compiler")}),
    (Unrolled, "fsdp", "data=8", {}),
    (
        Stacked,
        "fsdp",
        "data=8",
        {"remat": spmd.Remat(modules=("blocks/layers",)), "gradients": BY_LAYER},
    ),
    (Blocks, "fsdp", "data=8", {"gradients": BY_LAYER}),
    (Stacked, "pipeline", "data=2,stage=4", {}),
    (Stacked, "pipeline_1f1b", "data=2,stage=4", {}),
]


@pytest.mark.sampled(system=6)
@pytest.mark.parametrize(
    ("model", "layout", "mesh", "options"), CASES, ids=lambda case: str(case)[:40]
)
def test_training_equals_that_without_the_table(model, layout, mesh, options, monkeypatch):
    """On eight devices, with several tiles; the notes name the attention."""
    monkeypatch.setattr(chunked_attention, "TILE", 7)
    (ours, ours_after, trainer), (plain, plain_after, plain_trainer) = (
        trained(model, layout, mesh, name, **options) for name in ("chunked", "as_written")
    )
    assert ours == pytest.approx(plain, abs=2e-6) and plain[0] > plain[2] + 0.1
    assert worst(ours_after, plain_after) < 1e-5
    assert any((a != b).any() for a, b in zip(ours_after, plain_after, strict=True)), (
        "the arms differ"
    )
    names = {
        Unrolled: "attn, layers/0/attn",
        Blocks: "layers/0/attn, layers/1/attn and 1 more",
        Stacked: "blocks/layers/attn",
    }[model]
    names = "layers/attn" if "stage" in mesh else names
    assert f"attention in {names} is written out, and is replaced." in trainer.notes()
    if layout == "fsdp":
        shapes = [list(step_arrays(each)) for each in (trainer, plain_trainer)]
        assert [
            any(math.prod(shape) >= 2 * 4 * 24 * 24 and shape.count(24) > 1 for shape in arrays)
            for arrays in shapes
        ] == [False, True]
    if model is Blocks:
        assert any(
            note.endswith("float32, a causal mask, a soft cap: chunked.")
            for note in trainer.notes()
        )
        assert (2, 24, 24) not in shapes[0] and (1, 1, 24, 24) not in shapes[0], (
            "the mask, which is made outside of the blocks, is not used"
        )


class Causal(nnx.Module):
    """Attention in the simplest form that has a causal mask."""

    def __init__(self):
        self.all, self.out = (
            nnx.Linear(256, 768, rngs=nnx.Rngs(0)),
            nnx.Linear(256, 4, rngs=nnx.Rngs(1)),
        )

    def __call__(self, x):
        q, k, v = (
            part.reshape(*x.shape[:2], 4, 64).swapaxes(1, 2)
            for part in jnp.split(self.all(x), 3, axis=-1)
        )
        s = jnp.where(
            jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), q @ k.swapaxes(-1, -2) / 8, -jnp.inf
        )
        return self.out((jax.nn.softmax(s) @ v).swapaxes(1, 2).reshape(x.shape).mean(axis=1))


@pytest.mark.system
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="XLA's compiler for GPUs: pip install '.[gpu-compiler]'",
)
def test_a_plan_for_gpus_has_no_array_of_all_scores():
    """cuDNN's attention, planned without a GPU."""
    batch = np.zeros((8, 1024, 256), np.float32), np.zeros(8, np.int32)
    peaks = {}
    for name in ("as_written", "auto"):
        layout = dataclasses.replace(spmd.Layout.load("fsdp"), attention=spmd.Attention(name))
        options = {
            "loss": spmd.losses.cross_entropy,
            "optimizer": optax.sgd(0.1),
            "precision": "bfloat16",
        }
        plan = spmd.plan(lambda: Causal(), batch, target="8xh100", layout=layout, **options)
        scores = [array for _, array, _ in plan.memory.largest if array.count("1024") > 1]
        peaks[name] = plan.memory.peak
        assert bool(scores) is (name == "as_written")
    assert any(note.endswith("a causal mask: cudnn.") for note in plan.notes)
    assert peaks["auto"] < peaks["as_written"]


def test_a_layout_with_nothing_to_replace_says_why(golden):
    class Kept(nnx.Module):
        def __init__(self):
            self.out = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            w = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x), axis=-1)
            return self.out(jnp.einsum("bqk,bkd->bqd", w, x)).mean(axis=1) + w.max()

    layout = spmd.Layout(attention=spmd.Attention("chunked"), source="mine.toml")
    trainer = spmd.Trainer(
        lambda: Kept(), loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.1), layout=layout
    )
    with pytest.raises(spmd.errors.LayoutError) as caught:
        trainer.prepare((np.ones((8, 5, 8), np.float32), np.zeros(8, np.int32)))
    golden("attention_table_with_nothing_to_replace", str(caught.value))
