"""Rounding to 8 and 4 bits by blocks: against plain numpy, and through JAX's transformations."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.errors import OptionError
from spmd.models.quantized import KINDS, NF4_LEVELS, block_problem, dequantize, quantize

LAYERS, IN, OUT, BLOCK = 3, 128, 24, 32


@pytest.fixture
def kernel():
    values = np.random.default_rng(0).normal(size=(LAYERS, IN, OUT)).astype("float32")
    values[0, :BLOCK, 0] = 0
    return values


def by_block(values):
    return values.reshape(LAYERS, IN // BLOCK, BLOCK, OUT)


def test_levels_are_quantiles_of_a_normal_distribution():
    """Of 8 equal parts below zero and 9 above, as the paper has them, with the largest as 1."""
    quantile, outer = statistics.NormalDist().inv_cdf, 0.9677083
    above = [quantile(p) for p in np.linspace(outer, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(outer, 0.5, 8)[:-1]]
    levels = np.sort([*above, 0.0, *below])
    np.testing.assert_allclose(NF4_LEVELS, levels / levels.max(), atol=1e-6)


def test_int8_is_within_half_a_step(kernel):
    """Of a block's largest magnitude / 127; a float32 rounding of scale and product more."""
    restored = np.asarray(dequantize(quantize(kernel, "int8", BLOCK)))
    error, largest = (
        by_block(np.abs(restored - kernel)).max(axis=2),
        by_block(np.abs(kernel)).max(axis=2),
    )
    assert (error <= largest / 254 * (1 + 1e-4)).all() and error.max() > largest.max() / 500
    assert (restored[0, :BLOCK, 0] == 0).all()


def nf4_in_numpy(kernel):
    """The nearest level of each value by its block's largest magnitude, one value at a time."""
    restored, codes = np.empty_like(kernel), np.empty(kernel.shape, np.uint8)
    for at in np.ndindex(LAYERS, IN // BLOCK, OUT):
        layer, block, column = at
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        values = kernel[layer, rows, column]
        largest = np.abs(values).max()
        scaled = values / (largest if largest > 0 else np.float32(1))
        nearest = np.abs(scaled[:, None].astype("float64") - NF4_LEVELS.astype("float64")).argmin(
            axis=1
        )
        codes[layer, rows, column], restored[layer, rows, column] = (
            nearest,
            NF4_LEVELS[nearest] * largest,
        )
    return restored, codes[:, 0::2] | codes[:, 1::2] << 4


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("transform", ["none", "jit", "vmap", "scan"])
def test_nf4_equals_numpy(kernel, transform):
    restored, packed = nf4_in_numpy(kernel)

    def scanned(q):
        return jax.lax.scan(lambda carry, layer: (carry, dequantize(layer)), 0, q)[1]

    make = {"jit": jax.jit, "vmap": jax.vmap}.get(transform, lambda f: f)
    q = make(lambda x: quantize(x, "nf4", BLOCK))(kernel)
    assert (
        q.shape == kernel.shape
        and q.codes.dtype == jnp.uint8
        and q.codes.nbytes == kernel.size // 2
    )
    np.testing.assert_array_equal(q.codes, packed)
    np.testing.assert_array_equal(
        scanned(q) if transform == "scan" else make(dequantize)(q), restored
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 2])
def test_shards_hold_entire_blocks(kernel, kind, dim):
    """Sharded as the kernel is: each device restores its part from its codes and scales, and
    communicates nothing.
    """
    mesh = spmd.make_mesh("model=4,data=2")
    lies = NamedSharding(mesh, PartitionSpec(*[None] * dim, "model"))
    q = quantize(kernel, kind, BLOCK)
    sharded = jax.device_put(q, lies)
    program = jax.jit(dequantize, out_shardings=lies).lower(sharded).compile()
    assert "all-" not in program.as_text() and "collective" not in program.as_text()
    np.testing.assert_array_equal(program(sharded), dequantize(q))


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_values_that_are_not_finite(kernel, kind):
    q = quantize(jnp.asarray(kernel, jnp.bfloat16), kind, BLOCK)
    assert (
        q.dtype == jnp.bfloat16
        and dequantize(q).dtype == jnp.bfloat16
        and dequantize(q, jnp.float32).dtype == jnp.float32
    )
    for value in (np.nan, np.inf, -np.inf):
        broken = kernel.copy()
        broken[1, 3, 5] = value
        expected = np.isnan(np.zeros_like(kernel))
        expected[1, :BLOCK, 5] = True
        np.testing.assert_array_equal(np.isnan(dequantize(quantize(broken, kind, BLOCK))), expected)


CASES = [
    ((96, 8), "int8", 64),
    ((96, 8), "nf4", 5),
    ((7, 8), "nf4", 64),
    ((2, 50, 8), "nf4", 64),
    ((8,), "int8", 4),
]


def test_blocks_that_do_not_divide(golden):
    texts = []
    for shape, kind, block in [*CASES, ((8, 8), "nf5", 4)]:
        with pytest.raises(OptionError) as raised:
            quantize(jnp.zeros(shape), kind, block)
        texts.append(str(raised.value))
    golden("quantize", "\n".join(texts))
    assert block_problem((96, 8), "int8", 48) is None
