"""Models that call JAX's or flax's attention get the layout's, unchanged: equal numbers, and no
array of all scores.
"""

import dataclasses
import functools
import math

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.nn import chunked_attention, model_calls
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from spmd.nn.unchanged_models import CALLS
from tests.nn.test_attention_kernels import arrays_of, inputs, random_bias, random_mask, worst

KEY = jax.random.key(5)
LENGTH, WIDTH, HEADS = 24, 16, 4
CAUSAL = nnx.make_causal_mask(jnp.ones((2, 13)))


def scope(implementation="chunked"):
    parallel = ParallelConfig(attention=implementation, calls=CALLS, used=set(), notes={})
    return parallel_scope(parallel)


def both(function, *arrays):
    """Results and gradients, as it is written and under `[attention]`; the largest arrays of both;
    and the parallel context.
    """

    def run(*arrays):
        out, back = jax.vjp(function, *arrays)
        return out, *jax.tree.leaves(
            back(jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)))
        )

    written, plain = jax.make_jaxpr(run)(*arrays), jax.jit(run)(*arrays)
    with scope() as parallel:
        traced, ours = (
            jax.make_jaxpr(lambda *x: run(*x))(*arrays),
            jax.jit(lambda *x: run(*x))(*arrays),
        )
    sizes = [max(map(math.prod, arrays_of(jaxpr.jaxpr))) for jaxpr in (written, traced)]
    return plain, ours, sizes, parallel


CALLED = {
    "jax": lambda q, k, v: jax.nn.dot_product_attention(q, k, v),
    "jax options": lambda q, k, v: jax.nn.dot_product_attention(
        q,
        k,
        v,
        random_bias(4, 13, 13),
        random_mask(2, 1, 13, 13) | jnp.eye(13, dtype=bool),
        scale=0.4,
        is_causal=True,
    ),
    "jax window": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, local_window_size=(3, 2)),
    "jax lengths": lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, query_seq_lengths=jnp.array([13, 4]), key_value_seq_lengths=jnp.array([7, 13])
    ),
    "jax one row": lambda q, k, v: jax.nn.dot_product_attention(
        q[0], k[0], v[0], mask=random_mask(4, 13, 13) | jnp.eye(13, dtype=bool)
    ),
    "nnx": lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=CAUSAL),
    "nnx dropout": lambda q, k, v: nnx.dot_product_attention(
        q, k, v, is_causal=True, dropout_rng=KEY, dropout_rate=0.3
    ),
    "nnx dropout of rows": lambda q, k, v: nnx.dot_product_attention(
        q, k, v, dropout_rng=KEY, dropout_rate=0.3, broadcast_dropout=False
    ),
    "linen": lambda q, k, v: linen.dot_product_attention(
        q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), random_bias(13, 13), CAUSAL
    ),
    "linen dropout": lambda q, k, v: linen.dot_product_attention(
        q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), dropout_rng=KEY, dropout_rate=0.3
    ),
    "linen batch dims": lambda q, k, v: linen.dot_product_attention(
        *(jnp.stack([x, 2 * x]) for x in (q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2))),
        mask=random_mask(2, 1, 13, 13) | (CAUSAL > 0),
    ),
    "linen precision": lambda q, k, v: linen.dot_product_attention(
        q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), precision="highest"
    ),
}


@pytest.mark.sampled(quick=12)
@pytest.mark.parametrize("name", CALLED)
def test_a_call_is_computed_in_tiles(name, monkeypatch):
    """With the same numbers, those of dropout too."""
    monkeypatch.setattr(chunked_attention, "TILE", 5)
    plain, ours, _, parallel = both(CALLED[name], *inputs()[:3])
    assert worst(ours, plain) < 1e-5
    assert parallel.used == {"attention", "fused attention"}
    assert [note.rpartition(": ")[2] for note in parallel.notes] == ["chunked."]


@pytest.mark.system
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_modules_hold_no_array_of_all_scores(kind, dropout):
    """Also with dropout, which flax computes elsewhere."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1040, 8)), jnp.float32)
    if kind == "nnx":
        module = nnx.MultiHeadAttention(
            4, 8, decode=False, dropout_rate=dropout, broadcast_dropout=False, rngs=nnx.Rngs(0)
        )
        graph, state, rest = nnx.split(module, nnx.Param, ...)

        def run(params, x):
            return nnx.merge(graph, params, rest)(
                x, is_causal=dropout == 0, deterministic=False, rngs=nnx.Rngs(dropout=KEY)
            )
    else:
        linen_module = linen.MultiHeadDotProductAttention(
            4, dropout_rate=dropout, broadcast_dropout=False, deterministic=False
        )
        state = linen_module.init({"params": KEY, "dropout": KEY}, x)

        def run(params, x):
            return linen_module.apply(params, x, rngs={"dropout": KEY})

    plain, ours, (largest, in_tiles), parallel = both(run, state, x)
    assert (
        worst(
            [np.concatenate([np.ravel(x) for x in ours])],
            [np.concatenate([np.ravel(x) for x in plain])],
        )
        < 1e-5
    )
    assert largest == 4 * 1040 * 1040
    assert in_tiles == 4 * 352 * 352
    assert len(parallel.notes) == 1


@pytest.mark.system
def test_sown_weights_need_all_scores():
    module = linen.MultiHeadDotProductAttention(4)
    params = module.init(KEY, jnp.ones((2, 6, 8)))

    def run(x):
        return module.apply(params, x, sow_weights=True, mutable=["intermediates"])[0]

    plain, ours, _, parallel = both(run, jnp.ones((2, 6, 8)))
    assert all((a == b).all() for a, b in zip(ours, plain, strict=True))
    expected = (
        "note: flax's linen attention is computed as it is written, with all scores: its weights "
        "are sown."
    )
    assert list(parallel.notes) == [expected]


def test_names_are_restored():
    """Also after an error; and one's own attention_fn stays."""

    def names():
        return jax.nn.dot_product_attention, nnx.dot_product_attention, linen.dot_product_attention

    before, classes = (
        names(),
        [dict(vars(kind)).get("attention_fn") for kind in model_calls._MODULES],
    )
    own = functools.partial(nnx.dot_product_attention, broadcast_dropout=False)
    module = nnx.MultiHeadAttention(4, 8, decode=False, attention_fn=own, rngs=nnx.Rngs(0))
    with pytest.raises(ZeroDivisionError), scope(), scope():
        assert not set(names()) & set(before)
        assert module.attention_fn is own
        inside = nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0))
        assert inside.attention_fn is nnx.dot_product_attention is not before[1]
        raise ZeroDivisionError
    assert names() == before == tuple(model_calls.ORIGINALS.values())
    assert inside.attention_fn is before[1]
    assert [dict(vars(kind)).get("attention_fn") for kind in model_calls._MODULES] == classes


def test_errors_are_those_of_jax_and_flax():
    query, key, value, _ = inputs()
    for call in (jax.nn.dot_product_attention, nnx.dot_product_attention):
        with pytest.raises(ValueError, match=r"shape should be|must match") as plain:
            call(query, key[:1], value)
        with scope(), pytest.raises(ValueError, match=r"shape should be|must match") as ours:
            (jax.nn if "_src" in call.__module__ else nnx).dot_product_attention(
                query, key[:1], value
            )
        assert str(ours.value) == str(plain.value)


class NnxBlock(nnx.Module):
    """Attention of flax with a mask and dropout."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, dropout_rate=0.1, rngs=rngs
        )

    def __call__(self, x):
        return x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))


class NnxModel(nnx.Module):
    """A stack of them."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = spmd.nn.LayerStack(spmd.nn.repeat(2, NnxBlock, rngs=rngs))
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.blocks(x).mean(axis=1))


class LinenModel(linen.Module):
    """Two layers of flax's attention; dropout as linen modules get it."""

    @linen.compact
    def __call__(self, x, train=False):
        for _ in range(2):
            x = x + linen.MultiHeadDotProductAttention(
                HEADS, dropout_rate=0.1, deterministic=not train
            )(linen.LayerNorm()(x))
        return linen.Dense(3)(x.mean(axis=1))


class JaxModel(nnx.Module):
    """`jax.nn.dot_product_attention`, with as many heads of keys as of queries."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.projections = nnx.LinearGeneral(WIDTH, (3, HEADS, WIDTH // HEADS), rngs=rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        query, key, value = jnp.moveaxis(self.projections(x), 2, 0)
        return self.head(
            jax.nn.dot_product_attention(query, key, value, is_causal=True)
            .reshape(x.shape)
            .mean(axis=1)
        )


MODELS = {"nnx": NnxModel, "linen": LinenModel, "jax": JaxModel}


def fitted(model, layout, implementation, mesh="data=8", **options):
    """Parameters and losses after three steps."""
    random = np.random.default_rng(0)
    data = (
        random.normal(size=(16, LENGTH, WIDTH)).astype("float32"),
        random.integers(0, 3, 16).astype("int32"),
    )
    layout = dataclasses.replace(
        spmd.Layout.load(layout), attention=spmd.Attention(implementation), **options
    )
    build = MODELS[model]
    model = build() if model == "linen" else lambda: build()
    fit = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.sgd(0.5, momentum=0.9),
        "batch_size": 8,
        "progress": False,
    }
    result = spmd.fit(model, data, mesh=mesh, layout=layout, steps=3, **fit)
    return jax.tree.leaves(jax.device_get(result.state.params)), result


BY_HEAD = (
    spmd.Rule("**/attention/{query,key,value}/kernel", (None, "model")),
    spmd.Rule("**/attention/out/kernel", ("model",)),
)
CASES = [
    ("nnx", "fsdp", "data=8", {}),
    (
        "nnx",
        "tensor_parallel",
        "data=2,model=4",
        {"remat": spmd.Remat(modules=("blocks/layers",)), "params": BY_HEAD},
    ),
    ("linen", "data_parallel", "data=8", {}),
    ("jax", "data_parallel", "data=8", {"gradients": spmd.Gradients("compiler")}),
]


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize(
    ("model", "layout", "mesh", "options"), CASES, ids=lambda case: str(case)[:20]
)
def test_fit_equals_fit_without_the_table(model, layout, mesh, options, monkeypatch):
    """On eight devices, with several tiles; to 1e-5 of the largest number of each parameter."""
    monkeypatch.setattr(chunked_attention, "TILE", 7)
    ours, plain = (
        fitted(model, layout, implementation, mesh, **options)[0]
        for implementation in ("chunked", "as_written")
    )
    assert worst(ours, plain) < 1e-5
    assert any((a != b).any() for a, b in zip(ours, plain, strict=True)), "the arms differ"
