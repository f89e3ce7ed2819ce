"""Attention over a sharded sequence equals attention on one device, forward and backward; work and
memory are per shard.
"""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.errors import DataError, OptionError
from spmd.nn import chunked_attention, ring_attention
from spmd.nn.attention_kernels import KERNELS
from spmd.nn.flash_kernel import INTERPRETED
from spmd.nn.parallel_context import ParallelConfig, parallel_scope

ROWS, LENGTH, HEADS, GROUPS, SIZE = 4, 32, 4, 2, 8


def inputs(length=LENGTH, dtype="float32", rows=ROWS):
    """Queries, fewer heads of keys and values, and a gradient for the result."""
    random = np.random.default_rng(0)
    return [
        random.normal(size=(rows, length, heads, SIZE)).astype(jnp.dtype(dtype))
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    ]


def parallel_config(mesh, order="balanced"):
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    return ParallelConfig(
        mesh,
        tuple(axis for axis in mesh.axis_names if axis == "data"),
        sequence=spmd.Sequence("context", order),
    )


def program(parallel, **options):
    """Result and gradients of all three inputs, as one compiled function."""

    def run(query, key, value, grad):
        with parallel_scope(parallel):
            out, back = jax.vjp(functools.partial(spmd.nn.attention, **options), query, key, value)
        return out, *back(grad)

    return jax.jit(run)


def worst(ours, theirs):
    """The largest difference, as a share of the largest number in each array."""

    def exact(x):
        return np.asarray(x).astype("float32")

    return np.max(
        [
            np.abs(exact(a) - exact(b)).max() / np.abs(exact(b)).max()
            for a, b in zip(ours, theirs, strict=True)
        ]
    )


@functools.cache
def unsharded(causal):
    return program(ParallelConfig(), causal=causal)(*inputs())


FAST = [
    ("context=2", True, "balanced"),
    ("context=8", True, "balanced"),
    ("data=2,context=4", True, "contiguous"),
]
EVERY = [
    (mesh, causal, order)
    for mesh in ("context=2", "context=4", "context=8", "data=2,context=4")
    for causal, order in ((True, "balanced"), (True, "contiguous"), (False, "balanced"))
]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("mesh", "causal", "order"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{'causal' if case[1] else 'all'}-{case[2]}",
            marks=[pytest.mark.slow] * (case not in FAST),
        )
        for case in EVERY
    ],
)
def test_equals_attention_on_one_device(mesh, causal, order):
    """To a few float32 rounding errors: sums are taken in another order."""
    parallel = parallel_config(mesh, order)
    sharded = program(parallel, causal=causal)
    outputs = sharded(*inputs())
    assert worst(outputs, unsharded(causal)) < 2e-6
    assert parallel.used >= {"attention", "sequence"}
    jaxpr = str(sharded.trace(*inputs()).jaxpr)
    assert "ppermute" in jaxpr, "the arms differ"
    assert "all_gather" not in jaxpr
    assert not set(outputs[0].sharding.spec) - {"data", "context", ("data",), ("context",), None}


@pytest.mark.system
def test_padding_and_rows_that_see_nothing():
    """Padding before one row, after another, and a row of padding only; with data axes, and one
    tile per key.
    """
    mask = np.ones((ROWS, LENGTH), bool)
    mask[0, :9], mask[1, 20:], mask[2] = False, False, False
    arrays = inputs()
    plain = program(ParallelConfig(), causal=True, key_mask=mask)(*arrays)
    sharded = program(parallel_config("data=2,context=4"), causal=True, key_mask=mask)(*arrays)
    assert worst(sharded, plain) < 2e-6
    assert worst(sharded[:1], unsharded(True)[:1]) > 0.1, "the mask does something"
    for out in (np.asarray(plain[0]), np.asarray(sharded[0])):
        assert not out[0, :9].any()
        assert not out[2].any()
    assert all(np.isfinite(np.asarray(x)).all() for x in (*plain, *sharded))


@pytest.mark.system
def test_bfloat16():
    """Result and gradients are rounded to bfloat16, 8 bits, and the shares of values before that: 2
    % of the largest number.
    """
    sharded = program(parallel_config("context=4"), causal=True)(*inputs(dtype="bfloat16"))
    assert all(x.dtype == jnp.bfloat16 for x in sharded)
    assert worst(sharded, unsharded(True)) < 2e-2
    assert worst(sharded, unsharded(True)) > 1e-4, "the arms differ"


@pytest.mark.system
def test_keys_of_another_sequence():
    """Twice as many keys as queries, which a ring without a mask may have."""
    query, _, _, grad = inputs()
    _, key, value, _ = inputs(2 * LENGTH)
    sharded, plain = (
        program(parallel)(query, key, value, grad)
        for parallel in (parallel_config("context=4"), ParallelConfig())
    )
    assert worst(sharded, plain) < 2e-6


SEGMENTS = jnp.asarray(
    np.sort(np.random.default_rng(1).integers(0, 3, (ROWS, LENGTH)), axis=1), jnp.int32
)
SEEN = jnp.asarray(np.random.default_rng(2).random((ROWS, LENGTH)) < 0.7)
OPTIONS = {
    "causal window": {"causal": True, "window": (9, None)},
    "window": {"window": (6, 3)},
    "segments": {"causal": True, "segment_ids": SEGMENTS},
    "lengths": {"key_lengths": jnp.array([32, 9, 0, 17], jnp.int32)},
    "dropout": {"causal": True, "dropout": 0.3, "dropout_key": jax.random.key(5)},
    "everything": {
        "causal": True,
        "window": (13, None),
        "segment_ids": SEGMENTS,
        "key_mask": SEEN,
        "soft_cap": 0.8,
        "scale": 0.7,
        "dropout": 0.2,
        "dropout_key": jax.random.key(5),
    },
}
OPTION_CASES = [
    (name, order, kernel)
    for name in OPTIONS
    for order in ("balanced", "contiguous")
    for kernel in ("chunked", "flash")
]
FAST_OPTIONS = [("causal window", "balanced", "chunked"), ("window", "contiguous", "flash")]


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "order", "kernel"),
    [
        pytest.param(
            *case, id="-".join(case), marks=[pytest.mark.slow] * (case not in FAST_OPTIONS)
        )
        for case in OPTION_CASES
    ],
)
def test_options_in_a_ring(name, order, kernel, monkeypatch):
    """By tiles in XLA, with rows and heads over other axes, and by the kernels for GPUs,
    interpreted.
    """
    if kernel == "flash":
        monkeypatch.setitem(
            KERNELS, "chunked", dataclasses.replace(KERNELS["chunked"], tiles=INTERPRETED)
        )
    options, arrays = OPTIONS[name], inputs()
    sharded = program(
        parallel_config("context=4" if kernel == "flash" else "data=2,context=2,model=2", order),
        **options,
    )
    outputs = sharded(*arrays)
    assert worst(outputs, program(ParallelConfig(), **options)(*arrays)) < 5e-6
    assert worst(outputs[:1], unsharded(options.get("causal", False))[:1]) > 0.01, (
        "the option does something"
    )
    jaxpr = str(sharded.trace(*arrays).jaxpr)
    assert "ppermute" in jaxpr and ("flash_attention_dkv" in jaxpr) == (kernel == "flash"), (
        "the arms differ"
    )


def test_tiles_of_keys(monkeypatch):
    """Several tiles in each block, which a length of 32 does not need."""
    monkeypatch.setattr(chunked_attention, "TILE", 2)
    assert (
        worst(program(parallel_config("context=2"), causal=True)(*inputs()), unsharded(True)) < 2e-6
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_pair_is_seen_once(devices, parts):
    """By the schedule: all pairs under the mask, none besides; in two parts, all devices have the
    same work.
    """
    place = (
        (lambda device, part: device)
        if parts == 1
        else (lambda device, part: (device, 2 * devices - 1 - device)[part])
    )
    seen, work = collections.Counter(), collections.Counter()
    for me in range(devices):
        for source in range(devices):
            for block in ring_attention.blocks(
                me, source, local=me == source, causal=True, parts=parts
            ):
                if block.visible:
                    seen[place(me, block.query), place(source, block.key)] += 1
                    work[me] += 1
    assert seen == {(q, k): 1 for q in range(devices * parts) for k in range(q + 1)}
    assert [work[me] for me in range(devices)] == (
        [2 * devices + 1] * devices if parts == 2 else list(range(1, devices + 1))
    )


def flops(jaxpr):
    """Of all matrix products, each as often as it runs; of a conditional, its costlier branch."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted, _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted[0])
            total += 2 * inner * equation.outvars[0].aval.size
        inside = [
            getattr(x, "jaxpr", x)
            for value in equation.params.values()
            for x in (value if isinstance(value, tuple) else (value,))
        ]
        counts = [flops(x) for x in inside if hasattr(x, "eqns")]
        total += (
            (max(counts) if equation.primitive.name == "cond" else sum(counts))
            * equation.params.get("length", 1)
            if counts
            else 0
        )
    return total


@pytest.mark.system
def test_balanced_causal_attention_does_half_the_work():
    """Read from the program: of n devices each computes 2n + 1 blocks, where without a mask it
    would be 4n.
    """

    def work(order, causal):
        return flops(
            program(parallel_config("context=8", order), causal=causal).trace(*inputs()).jaxpr.jaxpr
        )

    everything, balanced, contiguous = (
        work("balanced", False),
        work("balanced", True),
        work("contiguous", True),
    )
    assert balanced * 4 * 8 == everything * (2 * 8 + 1)
    assert contiguous == everything, "the last device's share, for which all wait"


def temporaries(parallel, length):
    """Bytes of one device, to compute the gradients of a causal attention."""
    shape = jax.ShapeDtypeStruct((1, length, 2, SIZE), "float32")
    return (
        program(parallel, causal=True)
        .lower(*[shape] * 4)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


@pytest.mark.system
def test_memory_grows_as_the_shard():
    """Four times the sequence on four times the devices needs the same memory; on one device it
    needs more than ten times that.
    """
    two, eight = (
        temporaries(parallel_config("context=2"), 1024),
        temporaries(parallel_config("context=8"), 4096),
    )
    assert eight < 1.1 * two
    assert temporaries(ParallelConfig(), 4096) > 10 * temporaries(ParallelConfig(), 1024) > 10 * two


@pytest.mark.slow
def test_memory_grows_with_the_length_of_the_shard_and_not_its_square():
    short, long = (temporaries(parallel_config("context=2"), length) for length in (4096, 16384))
    assert long < 4.2 * short


def test_a_single_device_along_the_axis_is_plain_attention():
    parallel = parallel_config("context=1")
    assert "ppermute" not in str(program(parallel, causal=True).trace(*inputs()).jaxpr)
    assert parallel.used >= {"attention", "sequence"}


def error_text(error, *arrays, mesh="data=2,context=4", order="balanced", **options):
    with pytest.raises(error) as caught, parallel_scope(parallel_config(mesh, order)):
        spmd.nn.attention(*arrays, **options)
    return str(caught.value)


def test_lengths_that_cannot_be_sharded():
    query, key, value, _ = inputs(28)
    assert error_text(DataError, query, key, value, causal=True) == (
        'attention ([sequence] axis = "context", 4 devices): a sequence of 28 is not divisible by '
        "8 parts, two for each device in balanced "
        "order: 28 / 8 leaves 4.\n    fix: sequences of 24 or 32, padded if need be."
    )
    query, key, value, _ = inputs(30)
    assert error_text(DataError, query, key, value) == (
        'attention ([sequence] axis = "context", 4 devices): a sequence of 30 is not divisible by '
        "4 devices: 30 / 4 leaves 2.\n"
        "    fix: sequences of 28 or 32, padded if need be."
    )
    assert error_text(DataError, inputs(16)[0], *inputs(32)[1:3], causal=True) == (
        'attention ([sequence] axis = "context", 4 devices): 16 queries and 32 keys under a causal '
        "mask.\n"
        "    fix: as many of each, or a layout that does not shard sequences."
    )


def test_mismatched_shapes_raise():
    query, key, value, _ = inputs()
    assert error_text(OptionError, query, key, value[:, 1:]) == (
        "attention: query float32[4, 32, 4, 8], key float32[4, 32, 2, 8], value float32[4, 31, 2, "
        "8].\n"
        "    fix: [rows, length, heads, head_dim] each; keys and values alike, with the query's "
        "rows and head_dim, and heads that divide "
        "the query's."
    )
    assert error_text(OptionError, query, key, value, key_mask=jnp.ones((4, 32))) == (
        "attention: key_mask is float32[4, 32].\n    fix: bool[4, 32], one for each key."
    )
