"""Matrix products of weights in bfloat16, float8 or int8, for layers that take a `dot_general`.

A factor in 8 bits is divided by a scale for every row along the contracted dims: its largest
magnitude over the largest number of the dtype (current scaling). A row of activations is a token,
so what it becomes does not depend on the mesh or on other rows. Sources: arXiv:2209.05433 (e4m3
forward, e5m2 for gradients), arXiv:2105.03536, appendix (int8 with a scale per row and column).
"""

import functools
import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base.xla import largest_magnitude
from spmd.errors import OptionError

# By `Precision.products`: dtypes of the factors forward, and of a gradient in the backward pass;
# None: as it is. A gradient has a larger range and needs less precision (Micikevicius et al., FP8
# formats for deep learning, arXiv:2209.05433).
DTYPES = {
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "float8": (jnp.float8_e4m3fn, jnp.float8_e5m2),
    "int8": (jnp.int8, None),
}


def scope_of(layer: str) -> str:
    """Return the name that operations of a layer's products have in a compiled program, by the
    layer's path.
    """
    return f"low_precision_product.{layer.replace('/', '.')}"


@functools.cache
def low_precision_product(products: str) -> Callable[..., jax.Array]:
    """Return a function with the arguments of `jax.lax.dot_general`, whose products, and those of
    its gradients, are computed in `products`.

    Factors are float32 or bfloat16; sums are float32 (int32 for int8), and so nothing but the
    factors is rounded. The result has the dtype that `jax.lax.dot_general` gives it. The gradients
    of an int8 product are computed in the dtype of its factors.

    Raises:
      OptionError: by the function: a `precision` or `out_sharding` is given.

    Example:
      >>> product = low_precision_product("int8")
      >>> product(jnp.array([[127.0, 1.4]]), jnp.eye(2), (((1,), (0,)), ((), ()))).tolist()
      [[127.0, 1.0]]
    """
    forward, of_gradients = DTYPES[products]

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def product(
        lhs: jax.Array, rhs: jax.Array, letters: tuple[str, str, str], dtype: Any
    ) -> jax.Array:
        return _contract(lhs, rhs, letters, (forward, forward)).astype(dtype)

    def run_forward(
        lhs: jax.Array, rhs: jax.Array, letters: tuple[str, str, str], dtype: Any
    ) -> tuple[jax.Array, tuple]:
        return product(lhs, rhs, letters, dtype), (lhs, rhs)

    def backward(
        letters: tuple[str, str, str], dtype: Any, factors: tuple, gradient: jax.Array
    ) -> tuple:
        lhs, rhs = factors
        left, right, out = letters
        dtypes = (None, None)
        if of_gradients is not None:
            dtypes = (of_gradients, forward)
        of_lhs = _contract(gradient, rhs, (out, right, left), dtypes)
        of_rhs = _contract(gradient, lhs, (out, left, right), dtypes)
        return of_lhs.astype(lhs.dtype), of_rhs.astype(rhs.dtype)

    product.defvjp(run_forward, backward)

    def dot_general(
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        for name, value in (("precision", precision), ("out_sharding", out_sharding)):
            if value is not None:
                raise OptionError(
                    f"products in {products} take no {name}, and the model says {value}.",
                    fix=f"a layer without {name}=.",
                )
        dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        return product(lhs, rhs, _letters(dimension_numbers, lhs.ndim, rhs.ndim), jnp.dtype(dtype))

    return dot_general


def _letters(dimension_numbers: Any, lhs_dims: int, rhs_dims: int) -> tuple[str, str, str]:
    """Return dims of `jax.lax.dot_general` as the letters that einsum has for the factors and the
    result.

    >>> _letters((((2,), (0,)), ((), ())), 3, 2)
    ('abc', 'cd', 'abd')
    """
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    left = [chr(ord("a") + dim) for dim in range(lhs_dims)]
    right = [chr(ord("a") + lhs_dims + dim) for dim in range(rhs_dims)]
    lhs_shared = (*lhs_contracted, *lhs_batch)
    rhs_shared = (*rhs_contracted, *rhs_batch)
    for lhs_dim, rhs_dim in zip(lhs_shared, rhs_shared, strict=True):
        right[rhs_dim] = left[lhs_dim]
    batch = [left[dim] for dim in lhs_batch]
    free = [letter for letter in (*left, *right) if (letter in left) != (letter in right)]
    # Letters without gaps.
    names = dict(zip(dict.fromkeys([*left, *right]), string.ascii_lowercase, strict=False))

    def renamed(letters: list[str]) -> str:
        return "".join(names[letter] for letter in letters)

    return renamed(left), renamed(right), renamed(batch + free)


def _contract(
    lhs: jax.Array, rhs: jax.Array, letters: tuple[str, str, str], dtypes: tuple[Any, Any]
) -> jax.Array:
    """Return the product in float32, its factors rounded to `dtypes`."""
    left, right, out = letters
    contracted = [letter for letter in left if letter in right and letter not in out]
    if dtypes == (None, None):
        dtypes = (jnp.result_type(lhs, rhs), jnp.result_type(lhs, rhs))
    left_dims = [left.index(letter) for letter in contracted]
    right_dims = [right.index(letter) for letter in contracted]
    lhs, lhs_scale = _rounded(lhs, left_dims, dtypes[0])
    rhs, rhs_scale = _rounded(rhs, right_dims, dtypes[1])
    batch = [letter for letter in left if letter in right and letter in out]
    batch_dims = (tuple(map(left.index, batch)), tuple(map(right.index, batch)))
    # Sums of int8 products are exact in int32.
    sums = jnp.float32
    if dtypes[0] == jnp.int8:
        sums = jnp.int32
    dims = ((tuple(left_dims), tuple(right_dims)), batch_dims)
    value = lax.dot_general(lhs, rhs, dims, preferred_element_type=sums).astype(jnp.float32)
    # The order of dims in a result of `dot_general`.
    made = [
        *batch,
        *(letter for letter in left if letter not in right),
        *(letter for letter in right if letter not in left),
    ]
    for scale, of_factor in ((lhs_scale, left), (rhs_scale, right)):
        if scale is not None:
            scale_letters = [letter for letter in of_factor if letter not in contracted]
            order = []
            shape = []
            for letter in made:
                size = 1
                if letter in scale_letters:
                    dim = scale_letters.index(letter)
                    order.append(dim)
                    size = scale.shape[dim]
                shape.append(size)
            value *= lax.transpose(scale, order).reshape(shape)
    return lax.transpose(value, [made.index(letter) for letter in out])


def _rounded(x: jax.Array, contracted: list[int], dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return `x` in `dtype`, and the float32 scale by which it was divided, without the contracted
    dims; no scale for 16 bits and more.

    A row with a NaN or an infinity has the scale NaN, and so has its product.
    """
    if jnp.dtype(dtype).itemsize > 1:
        return x.astype(dtype), None
    if dtype == jnp.int8:
        largest = float(jnp.iinfo(dtype).max)
    else:
        largest = float(jnp.finfo(dtype).max)
    values = x.astype(jnp.float32)
    peak = largest_magnitude(values, contracted)
    # A row of zeros would be divided by 0.
    scale = jnp.where(peak == 0, 1.0, peak / largest)
    # In a row of tiny numbers the scale is subnormal, and is flushed to 0: the quotient is
    # infinite, of which float8_e4m3fn, which has no infinity, would make NaN.
    scaled = jnp.clip(values / scale, -largest, largest)
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    finite = jnp.isfinite(scale)
    scale = lax.squeeze(jnp.where(finite, scale, jnp.nan), contracted)
    # An int8 has no NaN, so the scale alone carries it.
    return jnp.where(finite, scaled, 0.0).astype(dtype), scale
