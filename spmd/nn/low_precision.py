"""Matrix products of weights in bfloat16, float8 or int8, for layers that take a `dot_general`.

A factor in 8 bits is divided by a scale for every row along the contracted dims: its largest
magnitude over the largest number of the dtype (current scaling). A row of activations is a token,
so what it becomes does not depend on the mesh or on other rows. Sources: arXiv:2209.05433 (e4m3
forward, e5m2 for gradients), arXiv:2105.03536, appendix (int8 with a scale per row and column).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base.xla import largest_magnitude
from spmd.errors import OptionError

# by `Precision.products`: of the factors forward, and of a gradient in the backward pass; None: as
# it is
DTYPES = {
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "float8": (jnp.float8_e4m3fn, jnp.float8_e5m2),
    "int8": (jnp.int8, None),
}


def scope_of(layer: str) -> str:
    """What the operations of a layer's products are named in a compiled program, by the layer's
    path.
    """
    return f"low_precision_product.{layer.replace('/', '.')}"


@functools.cache
def low_precision_product(products: str) -> Callable[..., jax.Array]:
    """A function with the arguments of `jax.lax.dot_general`, whose products, and those of its
    gradients, are computed in `products`.

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

    def run(
        lhs: jax.Array, rhs: jax.Array, letters: tuple[str, str, str], dtype: Any
    ) -> tuple[jax.Array, tuple]:
        return product(lhs, rhs, letters, dtype), (lhs, rhs)

    def backward(
        letters: tuple[str, str, str], dtype: Any, factors: tuple, gradient: jax.Array
    ) -> tuple:
        (lhs, rhs), (left, right, out) = factors, letters
        dtypes = (of_gradients, forward if of_gradients is not None else None)
        of_lhs = _contract(gradient, rhs, (out, right, left), dtypes)
        of_rhs = _contract(gradient, lhs, (out, left, right), dtypes)
        return of_lhs.astype(lhs.dtype), of_rhs.astype(rhs.dtype)

    product.defvjp(run, backward)

    def dot_general(
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        if precision is not None or out_sharding is not None:
            name, value = (
                ("precision", precision)
                if precision is not None
                else ("out_sharding", out_sharding)
            )
            raise OptionError(
                f"products in {products} take no {name}, and the model says {value}.",
                fix=f"a layer without {name}=.",
            )
        dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        return product(lhs, rhs, _letters(dimension_numbers, lhs.ndim, rhs.ndim), jnp.dtype(dtype))

    return dot_general


def _letters(dimension_numbers: Any, lhs_dims: int, rhs_dims: int) -> tuple[str, str, str]:
    """Dims of `jax.lax.dot_general` as the letters that einsum has for the factors and the result.

    >>> _letters((((2,), (0,)), ((), ())), 3, 2)
    ('abc', 'cd', 'abd')
    """
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    left = [chr(ord("a") + dim) for dim in range(lhs_dims)]
    right = [chr(ord("a") + lhs_dims + dim) for dim in range(rhs_dims)]
    for lhs_dim, rhs_dim in zip(
        (*lhs_contracted, *lhs_batch), (*rhs_contracted, *rhs_batch), strict=True
    ):
        right[rhs_dim] = left[lhs_dim]
    batch = [left[dim] for dim in lhs_batch]
    free = [letter for letter in (*left, *right) if (letter in left) != (letter in right)]
    names = dict(zip(dict.fromkeys([*left, *right]), "abcdefghijklmnopqrstuvwxyz", strict=False))
    first, second, out = (
        "".join(names[letter] for letter in letters) for letters in (left, right, batch + free)
    )
    return first, second, out


def _contract(
    lhs: jax.Array, rhs: jax.Array, letters: tuple[str, str, str], dtypes: tuple[Any, Any]
) -> jax.Array:
    """The product in float32, its factors rounded to `dtypes`."""
    left, right, out = letters
    contracted = [letter for letter in left if letter in right and letter not in out]
    if dtypes == (None, None):
        dtypes = jnp.result_type(lhs, rhs), jnp.result_type(lhs, rhs)
    lhs, lhs_scale = _rounded(lhs, [left.index(letter) for letter in contracted], dtypes[0])
    rhs, rhs_scale = _rounded(rhs, [right.index(letter) for letter in contracted], dtypes[1])
    batch = [letter for letter in left if letter in right and letter in out]
    made = [
        *batch,
        *(letter for letter in left if letter not in right),
        *(letter for letter in right if letter not in left),
    ]
    contraction = (tuple(map(left.index, contracted)), tuple(map(right.index, contracted)))
    batches = (tuple(map(left.index, batch)), tuple(map(right.index, batch)))
    sums = jnp.int32 if dtypes[0] == jnp.int8 else jnp.float32
    value = lax.dot_general(lhs, rhs, (contraction, batches), preferred_element_type=sums).astype(
        jnp.float32
    )
    for scale, of in ((lhs_scale, left), (rhs_scale, right)):
        if scale is not None:
            kept = [letter for letter in of if letter not in contracted]
            shape = [scale.shape[kept.index(letter)] if letter in kept else 1 for letter in made]
            value *= lax.transpose(
                scale, [kept.index(letter) for letter in made if letter in kept]
            ).reshape(shape)
    return lax.transpose(value, [made.index(letter) for letter in out])


def _rounded(x: jax.Array, contracted: list[int], dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """`x` in `dtype`, and the float32 scale by which it was divided, without the contracted dims;
    no scale for 16 bits and more.

    A row with a NaN or an infinity has the scale NaN, and so has its product.
    """
    if jnp.dtype(dtype).itemsize > 1:
        return x.astype(dtype), None
    largest = float(jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max)
    values = x.astype(jnp.float32)
    peak = largest_magnitude(values, contracted)
    scale = jnp.where(peak == 0, 1.0, peak / largest)
    scaled = jnp.clip(values / scale, -largest, largest)
    scaled = jnp.round(scaled) if dtype == jnp.int8 else scaled
    finite = jnp.isfinite(scale)
    return jnp.where(finite, scaled, 0.0).astype(dtype), lax.squeeze(
        jnp.where(finite, scale, jnp.nan), contracted
    )
