"""The table of primitives, against those of the installed JAX and what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives as of_jax

from spmd.jaxpr.primitives import ALL, BILINEAR, CURVED, FLAT, LINEAR, NAMES, TABLE, Kind, known

X, Y, SQUARE = jnp.asarray([0.3, 0.7, 0.2]), jnp.asarray([0.6, 0.1, 0.4]), jnp.eye(3) * 2 + 0.1
PLACES = jnp.asarray([[2], [0]])
SCATTER = lax.ScatterDimensionNumbers((), (0,), (0,))
GATHER = lax.GatherDimensionNumbers((), (0,), (0,))
# a call for each name that is said to be linear or curved, and that plain functions of arrays have
UNARY = {
    name: getattr(lax, name)
    for name in """
        abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh cumlogsumexp
        cummax cummin cumprod cumsum digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma
        log log1p logistic neg round rsqrt sign sin sinh sort sqrt square stop_gradient tan
        tanh""".split()
} | {
    "abs": lambda x: lax.abs(x - x[::-1]),
    "acosh": lambda x: lax.acosh(20 * x),
    "floor": lambda x: lax.floor(8 * x),
    "round": lambda x: lax.round(8 * x),
    "conj": lambda x: lax.conj(lax.complex(x, x)).imag,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 23),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.complex64).real,
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_prod": jnp.prod,
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 0, jnp.int32),
    "reshape": lambda x: lax.reshape(x, (3, 1)),
    "rev": lambda x: lax.rev(x, (0,)),
    "slice": lambda x: lax.slice(x, (1,), (3,)),
    "squeeze": lambda x: lax.squeeze(lax.reshape(x, (3, 1)), (1,)),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 3), (1,)),
    "transpose": lambda x: lax.transpose(jnp.stack([x, 2 * x]), (1, 0)),
    "split": lambda x: lax.split(x, (1, 2))[1],
    "fft": lambda x: jnp.fft.fft(x).real,
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "VALID"),
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "VALID"),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "polygamma": lambda x: lax.polygamma(jnp.ones(3), x + 1),
}
SEVERAL = {
    "add": (lax.add, (X, Y)),
    "sub": (lax.sub, (X, Y)),
    "mul": (lax.mul, (X, Y)),
    "div": (lax.div, (X, Y)),
    "max": (lax.max, (X, Y)),
    "min": (lax.min, (X, Y)),
    "pow": (lax.pow, (X, Y)),
    "rem": (lax.rem, (X, Y)),
    "atan2": (lax.atan2, (X, Y)),
    "complex": (lambda x, y: lax.complex(x, y).imag, (X, Y)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), (X, Y)),
    "pad": (lambda x, y: lax.pad(x, y, [(1, 1, 0)]), (X, jnp.asarray(0.5))),
    "dot_general": (lambda x, y: x @ y, (SQUARE, SQUARE.T + 1)),
    "conv_general_dilated": (
        lambda x, y: lax.conv_general_dilated(x, y, (1,), "SAME"),
        (X.reshape(1, 1, 3), Y.reshape(1, 1, 3)),
    ),
    "dynamic_slice": (lambda x, at: lax.dynamic_slice(x, (at,), (2,)), (X, jnp.int32(1))),
    "dynamic_update_slice": (
        lambda x, y, at: lax.dynamic_update_slice(x, y[:2], (at,)),
        (X, Y, jnp.int32(1)),
    ),
    "gather": (lambda x, at: lax.gather(x, at, GATHER, (1,)), (X, PLACES)),
    "scatter-add": (lambda x, at, y: lax.scatter_add(x, at, y[:2], SCATTER), (X, PLACES, Y)),
    "scatter": (lambda x, at, y: lax.scatter(x, at, y[:2], SCATTER), (X, PLACES, Y)),
}
CALLS = {name: (call, (X,)) for name, call in UNARY.items()} | SEVERAL


def test_every_primitive_of_this_jax_is_in_the_table():
    names = {value.name for value in vars(of_jax).values() if isinstance(value, Primitive)}
    assert len(names) > 150
    assert sorted(names - TABLE.keys()) == []


def test_a_name_is_of_one_kind_and_either_linear_or_not():
    names = [name for group in NAMES.values() for name in group.split()]
    assert len(names) == len(set(names))
    linear = [name for group in LINEAR.values() for name in group.split()]
    curved, flat = CURVED.split(), FLAT.split()
    assert len(linear) == len(set(linear)) and not set(linear) & set(curved)
    assert {*linear, *curved, *flat, *BILINEAR.split()} <= {*names}
    assert set(linear) & set(flat) == {"stop_gradient"}  # its value is linear, its derivative zero


@pytest.mark.parametrize("name", CALLS)
def test_linear_inputs_are_those_of_which_sums_give_sums(name):
    call, inputs = CALLS[name]
    jaxpr = str(jax.make_jaxpr(call)(*inputs))
    assert name in jaxpr
    primitive = known(name)
    assert primitive.kind is not Kind.UNKNOWN
    floats = [n for n, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]
    if primitive.bilinear:
        groups = [(number,) for number in floats]
    elif primitive.linear:
        groups = [tuple(floats) if primitive.linear == ALL else primitive.linear]
    else:
        groups = []
    for group in groups:
        assert _is_linear(call, inputs, group), group
    if not groups:
        assert not _is_linear(call, inputs, tuple(floats))


def _is_linear(call, inputs, group) -> bool:
    """Whether f(2 x + y) = 2 f(x) + f(y) in the inputs of a group, the others being fixed."""
    random = np.random.default_rng(0)

    def drawn():
        return {n: jnp.asarray(random.uniform(0.1, 0.3, inputs[n].shape)) for n in group}

    def at(chosen):
        return np.asarray(call(*(chosen.get(n, x) for n, x in enumerate(inputs))), np.float64)

    for _ in range(3):
        one, other = drawn(), drawn()
        of_sum = at({n: 2 * one[n] + other[n] for n in group})
        assert np.isfinite(of_sum).all()
        if not np.allclose(of_sum, 2 * at(one) + at(other), rtol=1e-5, atol=1e-5):
            return False
    return True


@pytest.mark.parametrize("name", sorted(set(FLAT.split()) & CALLS.keys()))
def test_flat_primitives_have_no_gradient(name):
    call, inputs = CALLS[name]
    gradient = jax.grad(lambda x: jnp.sum(call(x).astype(jnp.float32)))(*inputs)
    assert not np.any(gradient)
