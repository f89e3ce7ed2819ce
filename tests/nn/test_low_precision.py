"""Products in bfloat16, float8 and int8: what is rounded, by which scale, and that nothing else
is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import OptionError
from spmd.nn.low_precision import low_precision_product
from tests.compare import assert_close

DIMS = {  # of jax.lax.dot_general, with shapes
    "a layer": ((4, 6), (6, 5), (((1,), (0,)), ((), ()))),
    "rows and positions": ((2, 3, 6), (6, 5), (((2,), (0,)), ((), ()))),
    "two contracted dims": ((2, 3, 6), (3, 6, 5), (((1, 2), (0, 1)), ((), ()))),
    "contracted first": ((6, 4), (5, 6), (((0,), (1,)), ((), ()))),
    "batch dims": ((3, 4, 6), (6, 3, 5), (((2,), (0,)), ((0,), (1,)))),
}
LARGEST = {"int8": 127.0, "float8": 448.0}


def factors(name, seed=0):
    random, (left, right, dims) = np.random.default_rng(seed), DIMS[name]
    return (
        jnp.asarray(random.normal(size=left), "float32"),
        jnp.asarray(random.normal(size=right), "float32"),
        dims,
    )


def rounded(x, contracted, dtype):
    """In float64: what a factor becomes."""
    x = np.asarray(x, np.float64)
    if dtype == jnp.bfloat16:
        return np.asarray(x, dtype).astype(np.float64)
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scale = np.float32(np.abs(x).max(tuple(contracted), keepdims=True)) / np.float32(largest)
    scaled = (np.float32(x) / scale).astype(np.float32)
    return (np.rint(scaled) if dtype == jnp.int8 else np.asarray(scaled, dtype)).astype(
        np.float64
    ) * scale


def product(x, w, dims, of_x, of_w):
    """In float64: the product of the rounded factors."""
    (contracted, _), (batch, _) = dims
    left = [chr(97 + dim) for dim in range(x.ndim)]
    right = [chr(110 + dim) for dim in range(w.ndim)]
    for one, other in zip((*contracted, *batch), (*dims[0][1], *dims[1][1]), strict=True):
        right[other] = left[one]
    kept = [left[dim] for dim in batch] + [
        letter for letter in left + right if (letter in left) != (letter in right)
    ]
    equation = f"{''.join(left)},{''.join(right)}->{''.join(kept)}"
    return np.einsum(equation, rounded(x, contracted, of_x), rounded(w, dims[0][1], of_w))


@pytest.mark.sampled(quick=15, system=4)
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize(
    ("products", "dtype"),
    [("bfloat16", jnp.bfloat16), ("int8", jnp.int8), ("float8", jnp.float8_e4m3fn)],
)
def test_product_is_that_of_rounded_factors(name, products, dtype):
    x, w, dims = factors(name)
    ours, exact = low_precision_product(products)(x, w, dims), jax.lax.dot_general(x, w, dims)
    assert (ours.shape, ours.dtype) == (exact.shape, exact.dtype)
    wanted = product(x, w, dims, dtype, dtype)
    assert_close(ours, wanted)
    assert np.abs(wanted - exact).max() > 1e-4, "it rounds"


@pytest.mark.system
@pytest.mark.parametrize("products", LARGEST)
def test_numbers_that_the_dtype_has_are_multiplied_exactly(products):
    random, largest = np.random.default_rng(0), LARGEST[products]
    x, w = (jnp.asarray(random.integers(-8, 9, shape), "float32") for shape in ((16, 32), (32, 24)))
    x, w = x.at[:, 0].set(largest), w.at[1].set(-largest)
    ours = low_precision_product(products)(x, w, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(ours, np.asarray(x, np.int64) @ np.asarray(w, np.int64))


@pytest.mark.system
@pytest.mark.parametrize(
    ("products", "of_gradient", "of_factor"),
    [("float8", jnp.float8_e5m2, jnp.float8_e4m3fn), ("bfloat16",) * 3],
)
def test_gradients_are_products_of_rounded_factors(products, of_gradient, of_factor):
    of_gradient, of_factor = (
        jnp.bfloat16 if dtype == "bfloat16" else dtype for dtype in (of_gradient, of_factor)
    )
    x, w, dims = factors("a layer")
    out, back = jax.vjp(lambda x, w: low_precision_product(products)(x, w, dims), x, w)
    given = jnp.sin(3 * out)
    dx, dw = back(given)
    np.testing.assert_allclose(
        dx, product(given, w, (((1,), (1,)), ((), ())), of_gradient, of_factor), rtol=0, atol=2e-6
    )
    np.testing.assert_allclose(
        dw, product(x, given, (((0,), (0,)), ((), ())), of_factor, of_gradient), rtol=0, atol=2e-6
    )


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("name", DIMS)
def test_gradients_of_int8_are_those_of_a_plain_product(name):
    x, w, dims = factors(name)
    out, back = jax.vjp(lambda x, w: low_precision_product("int8")(x, w, dims), x, w)
    _, plain = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, dims), x, w)
    for ours, wanted in zip(back(out), plain(out), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("products", ["bfloat16", "float8", "int8"])
def test_a_row_does_not_depend_on_others(products):
    x, w, dims = factors("a layer")
    run = low_precision_product(products)
    np.testing.assert_array_equal(run(x, w, dims)[:2], run(x[:2], w, dims))


@pytest.mark.system
@pytest.mark.parametrize("products", LARGEST)
def test_rows_of_zeros_and_rows_that_are_not_finite(products):
    x, w, dims = factors("a layer")
    x = x.at[0].set(0.0).at[1, 2].set(jnp.nan).at[2, 3].set(jnp.inf)
    ours = low_precision_product(products)(x, w, dims)
    assert (ours[0] == 0).all() and jnp.isnan(ours[1:3]).all() and jnp.isfinite(ours[3]).all()
    empty = low_precision_product(products)(x[:0], w, dims)
    assert empty.shape == (0, 5)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("products", LARGEST)
def test_a_value_that_is_not_finite_reaches_all_of_its_products(products, contracted, value):
    """Of factors so large that XLA:CPU computes a maximum in which a NaN is lost."""
    x, w = np.random.default_rng(0).normal(size=(2, 128, 128)).astype("float32")
    dims, expected = (((contracted,), (1 - contracted,)), ((), ())), np.zeros((128, 128), bool)
    x[(5, 70) if contracted else (70, 5)] = w[(99, 3) if contracted else (3, 99)] = value
    expected[5], expected[:, 3] = True, True
    np.testing.assert_array_equal(
        np.isnan(jax.jit(low_precision_product(products), static_argnums=2)(x, w, dims)), expected
    )


def test_result_has_the_dtype_of_a_plain_product():
    x, w, dims = factors("a layer")
    run = low_precision_product("float8")
    assert run(x.astype("bfloat16"), w.astype("bfloat16"), dims).dtype == jnp.bfloat16
    assert (
        run(
            x.astype("bfloat16"), w.astype("bfloat16"), dims, preferred_element_type=jnp.float32
        ).dtype
        == jnp.float32
    )


def test_arguments_that_it_cannot_honour():
    x, w, dims = factors("a layer")
    with pytest.raises(
        OptionError, match="products in int8 take no precision, and the model says highest"
    ):
        low_precision_product("int8")(x, w, dims, precision="highest")
