"""Every implementation of attention equals the plain softmax, forward and backward, with all
options; none holds an array of all scores.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.base.rng import advance, bits_at, first_count, threefry_rounds, worker_key
from spmd.errors import OptionError
from spmd.nn import attention_kernels, chunked_attention
from spmd.nn.attention_kernels import KERNELS, Attend
from spmd.nn.chunked_attention import CHUNKED
from spmd.nn.flash_blocks import Blocks
from spmd.nn.flash_kernel import INTERPRETED
from spmd.nn.scoring import (
    Inputs,
    ScoreArrays,
    Scoring,
    inner_products,
    merge,
    tiled_attention,
    with_dropout,
)

ROWS, HEADS, GROUPS, SIZE = 2, 4, 2, 8
KEY = jax.random.key(7)


def inputs(queries=13, keys=13, groups=GROUPS, rows=ROWS, heads=HEADS, size=SIZE, dtype="float32"):
    """Queries, keys, values, and a gradient for the result."""
    random = np.random.default_rng(0)
    shapes = [
        (rows, queries, heads, size),
        (rows, keys, groups, size),
        (rows, keys, groups, size),
        (rows, queries, heads, size),
    ]
    return [jnp.asarray(random.normal(size=shape), jnp.dtype(dtype)) for shape in shapes]


def reference(
    query,
    key,
    value,
    *,
    causal=False,
    window=None,
    key_mask=None,
    key_lengths=None,
    segment_ids=None,
    mask=None,
    bias=None,
    scale=None,
    soft_cap=None,
    dropout=0.0,
    dropout_key=None,
):
    """The textbook's formula, over an array of all scores; a query that sees no key gets zeros."""
    (_, queries, heads, size), keys = query.shape, key.shape[1]
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (size**-0.5 if scale is None else scale)
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = scores if bias is None else scores + bias
    seen = np.ones((1, 1, queries, keys), bool)
    at, behind = np.arange(queries)[:, None], np.arange(keys)
    if causal:
        seen = seen & (behind <= at)
    if window is not None:
        before, after = window if isinstance(window, tuple) else (window, window)
        seen = (
            seen
            & (before is None or behind >= at - before)
            & (after is None or behind <= at + after)
        )
    seen = seen if mask is None else seen & mask
    seen = seen if key_mask is None else seen & key_mask[:, None, None, :]
    seen = seen if key_lengths is None else seen & (behind < key_lengths[:, None])[:, None, None]
    if segment_ids is not None:
        of_query, of_key = (
            segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        )
        seen = seen & (of_query[:, None, :, None] == of_key[:, None, None, :])
    # No gradient through the largest score, which cancels: XLA:CPU may round the scores again
    # otherwise, so that none equals it, and jax divides by how many do. And no exponential of a
    # score that is not seen: it may overflow, and has no gradient then.
    largest = jax.lax.stop_gradient(jnp.where(seen, scores, -1e9).max(-1, keepdims=True))
    weights = jnp.exp(jnp.where(seen, scores - largest, -jnp.inf))
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    if dropout:
        weights = jnp.where(
            jax.random.bernoulli(dropout_key, 1 - dropout, weights.shape),
            weights / (1 - dropout),
            0.0,
        )
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def with_gradients(function, query, key, value, grad, **options):
    """The result and the gradients of all that have one, the bias too."""
    bias = {"bias": options.pop("bias")} if "bias" in options else {}

    @jax.jit
    def run(query, key, value, bias, grad):
        out, back = jax.vjp(
            lambda q, k, v, b: function(q, k, v, **b, **options), query, key, value, bias
        )
        return out, *jax.tree.leaves(back(grad))

    return run(query, key, value, bias, grad)


def worst(ours, theirs, least=1e-3):
    """The largest difference, as a share of the largest number in each array, or of `least` where
    all are smaller.
    """
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(ours, theirs, strict=True)
    ]
    return np.max([np.abs(a - b).max() / max(np.abs(b).max(), least) for a, b in pairs])


def random_mask(*shape):
    return jnp.asarray(np.random.default_rng(1).random(shape) < 0.6)


def random_bias(*shape):
    return jnp.asarray(np.random.default_rng(2).normal(size=shape), jnp.float32)


def ids(length, parts):
    return jnp.asarray(
        np.sort(np.random.default_rng(3).integers(0, parts, (ROWS, length)), axis=1), jnp.int32
    )


OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal window": {"causal": True, "window": 2},
    "window before": {"window": (4, None)},
    "window after": {"window": (None, 1)},
    "soft cap": {"causal": True, "soft_cap": 0.7, "scale": 1.3},
    "key mask": {"key_mask": random_mask(ROWS, 13)},
    "rows without keys": {
        "causal": True,
        "key_mask": jnp.asarray(np.arange(13) >= np.array([[5], [13]])),
    },
    "key lengths": {"key_lengths": jnp.array([0, 9], jnp.int32)},
    "segments": {"causal": True, "segment_ids": ids(13, 4)},
    "other segments": {"segment_ids": (ids(13, 3), ids(13, 4))},
    "mask": {"mask": random_mask(ROWS, 1, 13, 13)},
    "mask of heads": {"mask": random_mask(HEADS, 13, 13)},
    "mask of keys": {"mask": random_mask(ROWS, 1, 1, 13)},
    "bias": {"bias": random_bias(ROWS, HEADS, 13, 13), "causal": True},
    "bias of heads": {"bias": random_bias(HEADS, 13, 13), "soft_cap": 1.0},
    "bias of keys": {"bias": random_bias(ROWS, 1, 1, 13)},
    "dropout": {"causal": True, "dropout": 0.4, "dropout_key": KEY},
    "everything": {
        "causal": True,
        "window": (7, 0),
        "key_mask": random_mask(ROWS, 13),
        "segment_ids": ids(13, 2),
        "soft_cap": 2.0,
        "mask": random_mask(ROWS, HEADS, 13, 13),
        "bias": random_bias(1, 1, 13, 13),
        "dropout": 0.2,
        "dropout_key": KEY,
    },
}


@functools.cache
def expected(name):
    return with_gradients(reference, *inputs(), **OPTIONS[name])


@pytest.mark.sampled(quick=17, system=7)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("implementation", ["chunked", "xla"])
def test_equals_the_plain_softmax(name, implementation, monkeypatch):
    """13 queries and keys in tiles of 5 or so: the last is padded, and some are left out."""
    monkeypatch.setattr(chunked_attention, "TILE", 5)
    function = functools.partial(spmd.nn.attention, implementation=implementation)
    ours = with_gradients(function, *inputs(), **OPTIONS[name])
    assert worst(ours, expected(name)) < 1e-5
    if name != "none":
        assert worst(ours[:1], expected("none")[:1]) > 0.01, "the option does something"


@pytest.mark.sampled(quick=10)
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(1, 9, False), (20, 7, True), (7, 20, True), (16, 16, True), (3, 3, True)],
)
@pytest.mark.parametrize("groups", [1, 4])
def test_chunked_takes_any_lengths_and_groups(queries, keys, causal, groups, monkeypatch):
    monkeypatch.setattr(chunked_attention, "TILE", 6)
    arrays, options = inputs(queries, keys, groups), {"causal": causal, "window": (8, 3)}
    chunked = functools.partial(spmd.nn.attention, implementation="chunked")
    assert (
        worst(
            with_gradients(chunked, *arrays, **options),
            with_gradients(reference, *arrays, **options),
        )
        < 1e-5
    )


def test_queries_without_keys_get_zeros_and_no_gradient():
    key_mask = jnp.asarray(np.array([[True] * 13, [False] * 13]))
    for implementation in ("chunked", "xla"):
        function = functools.partial(spmd.nn.attention, implementation=implementation)
        for result in with_gradients(function, *inputs(), key_mask=key_mask, soft_cap=1.0):
            assert np.isfinite(result).all()
            assert not np.asarray(result)[1].any()
            assert np.asarray(result)[0].any()


def test_chunked_in_bfloat16():
    """Weights are rounded to bfloat16, 8 bits, before the product with values: 2 % of the largest
    number.
    """
    chunked = functools.partial(spmd.nn.attention, implementation="chunked")
    ours = with_gradients(chunked, *inputs(dtype="bfloat16"), causal=True)
    assert all(x.dtype == jnp.bfloat16 for x in ours)
    assert 1e-4 < worst(ours, expected("causal")) < 2e-2


def arrays_of(jaxpr):
    """The shapes of all arrays in a jaxpr."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from arrays_of(inner)


def test_chunked_holds_no_array_of_all_scores():
    """Of 2,048 queries and keys, forward and backward, also with dropout and masks; the plain one
    does.
    """
    arrays = [jax.ShapeDtypeStruct((1, 2048, 2, 8), jnp.float32)] * 4
    key_mask, segments = np.ones((1, 2048), bool), np.zeros((1, 2048), np.int32)

    def largest(implementation):
        function = functools.partial(
            spmd.nn.attention,
            implementation=implementation,
            dropout=0.1,
            dropout_key=KEY,
            soft_cap=3.0,
        )
        run = functools.partial(
            with_gradients,
            function,
            causal=True,
            key_mask=key_mask,
            segment_ids=segments,
            window=900,
        )
        return max(map(math.prod, arrays_of(jax.make_jaxpr(run)(*arrays).jaxpr)))

    tile = chunked_attention.TILE
    assert largest("chunked") == 2 * tile * tile
    assert largest("xla") == 2 * 2048 * 2048


def test_chunked_in_a_loop_over_layers_keeps_no_masks_of_all_tiles():
    """Forward and backward, recomputed or not; JAX would compute masks and random bits once for all
    layers.
    """
    x = jax.ShapeDtypeStruct((1, 2048, 2, 8), jnp.float32)
    chunked = functools.partial(
        spmd.nn.attention, implementation="chunked", causal=True, dropout=0.1, dropout_key=KEY
    )

    def layers(function, weights, x):
        return jax.lax.scan(lambda x, weight: (function(x * weight, x, x), None), x, weights)[
            0
        ].sum()

    for function in (chunked, jax.checkpoint(chunked)):
        run = jax.grad(functools.partial(layers, function), argnums=(0, 1))
        jaxpr = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((3, 8), jnp.float32), x).jaxpr
        assert max(map(math.prod, arrays_of(jaxpr))) == 2 * chunked_attention.TILE**2


def test_tiles_that_are_not_seen_are_left_out():
    def tiles(queries, keys, **options):
        x = jnp.zeros((1, queries, 1, 8)), jnp.zeros((1, keys, 1, 8))
        call = functools.partial(chunked_attention.chunked_attention, Scoring(1.0, **options))
        jaxpr = jax.make_jaxpr(lambda q, k: call(Inputs(q, k, k, ScoreArrays())))(*x)
        (found,) = (const for const in jaxpr.consts if const.dtype == jnp.int32)
        return found.tolist()

    grid = [list(pair) for pair in itertools.product(range(0, 2048, 512), repeat=2)]
    assert tiles(2048, 2048) == grid
    assert tiles(2048, 2048, causal=True) == [[q, k] for q, k in grid if k <= q]
    assert tiles(2048, 2048, causal=True, window=(512, None)) == [
        [q, k] for q, k in grid if q - 512 <= k <= q
    ]
    assert tiles(2048, 2048, window=(0, 1)) == [[q, k] for q, k in grid if k in (q, q + 512)]
    assert tiles(512, 1024, causal=True) == [[0, 0]]


def bits(key, shape, start, tile, **options):
    """Random bits of a part of an array, without the rest."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = advance(first_count(key, shape), *zip(start, strides, strict=True))
    places = [
        jnp.arange(size).reshape(-1, *[1] * (len(tile) - dim - 1)) for dim, size in enumerate(tile)
    ]
    return bits_at(count, *zip(places, strides, strict=True), **options)


@pytest.mark.system
@pytest.mark.parametrize("options", [{}, {"threefry": threefry_rounds}], ids=["xla", "kernel"])
def test_dropout_does_not_depend_on_tiles_or_the_worker(options):
    """A tile's bits are those of the array of all scores; a worker's are those of its rows in the
    batch's.
    """
    shape, start, tile = (4, 3, 50, 70), (0, 0, 8, 20), (4, 3, 16, 32)
    for key in (
        KEY,
        worker_key(KEY, jnp.uint32(2), rows=4, workers=5),
        worker_key(KEY, jnp.uint32(2), rows=3, workers=5),
    ):
        part = jax.jit(lambda query, key=key: bits(key, shape, (0, 0, query, 20), tile, **options))(
            8
        )
        assert (part == jax.random.bits(key, shape)[:, :, 8:24, 20:52]).all()
    other = jax.random.key(7, impl="rbg")
    assert (
        bits(other, shape, start, tile, **options)
        == bits(other, shape, (0, 0, 0, 0), shape)[:, :, 8:24, 20:52]
    ).all()


@pytest.mark.system
def test_dropout_takes_an_untyped_key():
    chunked = functools.partial(
        spmd.nn.attention, *inputs()[:3], implementation="chunked", dropout=0.4
    )
    assert (chunked(dropout_key=jax.random.PRNGKey(7)) == chunked(dropout_key=KEY)).all()


@pytest.mark.system
def test_counts_of_bits_have_64_bits():
    """Far into an array of more than 2**32 elements, whose bits are computed only there."""
    shape = (3, 70_000, 70_000)
    place = (2 * 70_000 + 69_999) * 70_000 + 5
    (found,) = bits(KEY, shape, (2, 69_999, 5), (1, 1, 1)).ravel()
    count = jnp.array([place >> 32, place & 0xFFFFFFFF], jnp.uint32)
    first, second = jax.extend.random.threefry_2x32(jax.random.key_data(KEY), count)
    assert place > 2**33 and found == first ^ second


@pytest.mark.system
def test_recomputation_and_vmap(monkeypatch):
    monkeypatch.setattr(chunked_attention, "TILE", 5)
    chunked = functools.partial(spmd.nn.attention, implementation="chunked", causal=True)
    assert worst(with_gradients(jax.checkpoint(chunked), *inputs()), expected("causal")) < 1e-5
    query, key, value, grad = (x[:, None] for x in inputs())
    assert (
        worst(
            [x[:, 0] for x in with_gradients(jax.vmap(chunked), query, key, value, grad)],
            expected("causal"),
        )
        < 1e-5
    )


BAD = {
    "unknown": {"implementation": "cuddn"},
    "dropout without a key": {"dropout": 0.1},
    "dropout of all": {"dropout": 1.0, "dropout_key": KEY},
    "window": {"window": (1, 2, 3)},
    "window below zero": {"window": -1},
    "mask": {"mask": jnp.ones((3, 1, 13, 13), bool)},
    "mask of numbers": {"mask": jnp.ones((13, 13))},
    "bias": {"bias": jnp.ones((ROWS, HEADS, 13, 12))},
    "key mask": {"key_mask": jnp.ones((ROWS, 12), bool)},
    "key lengths": {"key_lengths": jnp.ones((ROWS, 1), jnp.int32)},
    "segments": {"segment_ids": jnp.ones((ROWS, 13))},
    "scale of letters": {"scale": "x"},
    "soft cap of nothing": {"soft_cap": 0.0},
    "soft cap below zero": {"soft_cap": -1.0},
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_arguments_raise(name, golden):
    with pytest.raises(OptionError) as caught:
        spmd.nn.attention(*inputs()[:3], **BAD[name])
    golden(f"attention_{name.replace(' ', '_')}", str(caught.value))
    assert caught.value.fix


@pytest.mark.parametrize("implementation", ["xla", "chunked", None])
@pytest.mark.parametrize(
    ("dtypes", "shown"),
    [
        (
            ("bfloat16", "float32", "float32"),
            "query bfloat16[2, 13, 4, 8], key float32[2, 13, 2, 8], value float32[2, 13, 2, 8]",
        ),
        (
            ("int32", "int32", "int32"),
            "query int32[2, 13, 4, 8], key int32[2, 13, 2, 8], value int32[2, 13, 2, 8]",
        ),
    ],
)
def test_other_dtypes_are_refused_by_every_implementation(dtypes, shown, implementation):
    arrays = [x.astype(dtype) for x, dtype in zip(inputs()[:3], dtypes, strict=True)]
    with pytest.raises(OptionError) as caught:
        spmd.nn.attention(*arrays, implementation=implementation)
    fix = (
        "one dtype for all three: bfloat16, float16 or float32; key.astype(query.dtype) changes "
        "one."
    )
    assert str(caught.value) == f"attention: {shown}.\n    fix: {fix}"
    query, key, value = (x.astype("bfloat16") for x in arrays)
    scale = 1 / np.sqrt(8)  # of numpy: float64, which must not widen the result
    out = spmd.nn.attention(
        query, key, value, implementation=implementation, scale=scale, dropout_key=KEY
    )
    assert out.dtype == "bfloat16"


def interpreted(**options):
    """`spmd.nn.attention` by our kernels for GPUs, interpreted on the CPU."""

    def run(*arrays, **more):
        kernel = dataclasses.replace(
            KERNELS["triton"],
            compute=functools.partial(tiled, INTERPRETED),
            platforms=(),
            on_shards=False,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(KERNELS, "triton", kernel)
            return spmd.nn.attention(*arrays, implementation="triton", **options, **more)

    return run


def tiled(kernel, call):
    return tiled_attention(kernel, call.scoring, call.inputs)


QUICK = ("causal", "everything")


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in OPTIONS]
)
def test_flash_kernels_equal_the_plain_softmax(name):
    """13 queries and keys in one block, whose end is masked."""
    assert worst(with_gradients(interpreted(), *inputs(), **OPTIONS[name]), expected(name)) < 1e-5


BLOCKS = {  # in blocks of 16: several, the last one incomplete, and some that are left out
    "causal": ({"causal": True}, {"queries": 40, "keys": 40, "groups": 1}),
    "window of fewer keys": ({"window": (9, 3)}, {"queries": 70, "keys": 35, "groups": 4}),
    "more keys": ({"causal": True, "window": (20, None)}, {"queries": 35, "keys": 70}),
    "one query": ({"soft_cap": 2.0}, {"queries": 1, "keys": 40}),
    "lengths": (
        {"causal": True, "key_lengths": jnp.array([17, 33], jnp.int32)},
        {"queries": 48, "keys": 48},
    ),
    "heads of 24": ({"causal": True, "scale": 0.3}, {"queries": 32, "keys": 32, "size": 24}),
    "dropout": ({"causal": True, "dropout": 0.4, "dropout_key": KEY}, {"queries": 36, "keys": 36}),
    "bias": ({"causal": True, "bias": random_bias(1, HEADS, 40, 40)}, {"queries": 40, "keys": 40}),
    "bias of queries": (
        {"bias": random_bias(ROWS, 1, 40, 1), "window": 9},
        {"queries": 40, "keys": 24},
    ),
    "bias of heads": (
        {"bias": random_bias(HEADS, 1, 1), "mask": random_mask(1, 1, 40, 1)},
        {"queries": 40, "keys": 24},
    ),
}
# Adding one number to all scores of a query changes no weight: the gradient of such a bias is the
# rounding of a sum of numbers near 1.
EQUAL_FOR_KEYS = ("bias of queries", "bias of heads")


@pytest.mark.system
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "more keys")) for name in BLOCKS],
)
def test_blocks_of_flash_kernels(name, monkeypatch):
    monkeypatch.setattr(
        Blocks, "of", lambda row_bytes, *, backward: Blocks(16, 32 if backward else 16)
    )
    options, shape = BLOCKS[name]
    arrays = inputs(**shape)
    ours, plain = (
        with_gradients(interpreted(), *arrays, **options),
        with_gradients(reference, *arrays, **options),
    )
    least = 1.0 if name in EQUAL_FOR_KEYS else 1e-3
    assert worst(ours, plain, least) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flash_kernels_in_half_precision(dtype):
    """Weights are rounded before the product with values: as of `chunked`, 2 % of the largest
    number.
    """
    ours = with_gradients(interpreted(), *inputs(dtype=dtype), causal=True)
    assert all(x.dtype == dtype for x in ours)
    assert 1e-5 < worst(ours, expected("causal")) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [CHUNKED, INTERPRETED], ids=["chunked", "flash"])
def test_merged_tiles_are_the_attention_to_all_keys(kernel):
    """Two tiles of keys at traced positions, forward and backward, with a window and dropout."""
    query, key, value, grad = inputs(20, 40)
    scores = (ROWS, HEADS, 20, 40)
    scoring, arrays = with_dropout(
        Scoring(0.3, causal=True, window=(25, None), dropout=0.3), ScoreArrays(), KEY, scores
    )

    def tile(at):
        count = advance(arrays.count, (at, 1))
        return Inputs(
            query,
            *(jax.lax.dynamic_slice_in_dim(x, at, 20, 1) for x in (key, value)),
            arrays._replace(count=count),
        )

    @jax.jit
    def run(shift, firsts):
        parts = [kernel.forward(scoring, shift - at, tile(at), jnp.float32) for at in firsts]
        out, logs = merge(*parts)
        inner = inner_products(out, grad)
        grads = [
            kernel.backward(scoring, shift - at, tile(at), logs, inner, grad, jnp.float32)[:3]
            for at in firsts
        ]
        return (
            out,
            grads[0][0] + grads[1][0],
            *(
                jnp.concatenate([one, other], 1)
                for one, other in zip(*(x[1:] for x in grads), strict=True)
            ),
        )

    # positions of queries count from 20
    options = {"window": (5, 20), "scale": 0.3, "dropout": 0.3, "dropout_key": KEY}
    assert (
        worst(
            run(20, jnp.array([0, 20])),
            with_gradients(reference, query, key, value, grad, **options),
        )
        < 1e-5
    )


def by_splash(scoring_options, arrays=None):
    """`spmd.nn.attention`'s kernel for TPUs, interpreted on the CPU, of the options that it
    takes.
    """

    def run(query, key, value):
        scoring = Scoring(**{"scale": query.shape[-1] ** -0.5, **scoring_options})
        call = Attend(scoring, query, key, value, arrays or ScoreArrays())
        assert KERNELS["splash"].reason_against(call, "tpu") is None
        return attention_kernels._splash(call, interpret=True)

    return run


PALLAS = [
    ({"causal": True}, {"queries": 128, "keys": 128, "size": 128}),
    (
        {"causal": True, "window": (30, None), "soft_cap": 0.8},
        {"queries": 256, "keys": 256, "size": 128},
    ),
    ({"window": (30, 7)}, {"queries": 128, "keys": 128, "size": 128}),
    ({}, {"queries": 128, "keys": 256, "size": 128}),
]


@pytest.mark.system
@pytest.mark.parametrize(("options", "shape"), PALLAS)
def test_splash_equals_the_plain_softmax(options, shape):
    """With fewer heads of keys than of queries."""
    data = inputs(**shape)
    assert (
        worst(
            with_gradients(by_splash(options), *data), with_gradients(reference, *data, **options)
        )
        < 1e-5
    )


@pytest.mark.system
def test_splash_with_segment_ids():
    data, segments = inputs(128, 128, size=128), (ids(128, 5),) * 2
    ours = with_gradients(by_splash({"causal": True}, ScoreArrays(segments=segments)), *data)
    assert worst(ours, with_gradients(reference, *data, causal=True, segment_ids=segments)) < 1e-5
