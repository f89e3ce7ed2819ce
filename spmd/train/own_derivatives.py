"""Functions with a backward pass of their own (`jax.custom_vjp`) that is not linear, such as one
that clips the gradient.

A step scales gradients, and adds up those of the parts of a batch, where it likes; for linear
backward passes that is all one. One that is not linear needs the gradient of the mean over the full
batch. Only what is known not to be linear counts: what is unknown passes.
"""

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from spmd.jaxpr import ONE_CALL, equations, inner_jaxprs, scanned
from spmd.tracebacks import users_line
from spmd.train.batch_rows.walk import JAX, both_passes, defined_in

# our backward passes take gradients of any scale, or are layers that a layout asks for
OURS = str(Path(__file__).parents[1])


class Part(enum.IntEnum):
    """How a value depends on the gradient that a backward pass is given."""

    ZERO = 0
    FIXED = 1  # not at all
    LINEAR = 2
    OTHER = 3


PRODUCTS = ("mul", "dot_general", "conv_general_dilated")
# linear in the first input, where the others are fixed
OF_FIRST = ("div", "gather", "dynamic_slice")
SUMS = frozenset(  # linear in all inputs, or in those of `VALUES`
    "add add_any sub neg convert_element_type reduce_precision reshape transpose broadcast_in_dim "
    "squeeze expand_dims slice rev "
    "concatenate pad reduce_sum cumsum copy copy_p real imag psum reduce_window_sum "
    "dynamic_update_slice scatter scatter-add "
    "scatter_add".split()
)
# inputs that are not places
VALUES = {
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "scatter_add": (0, 2),
}
# keep 0
SAME = frozenset(
    "convert_element_type reshape transpose broadcast_in_dim squeeze expand_dims slice rev copy "
    "copy_p neg".split()
)
NEVER = frozenset(
    "max min clamp sign abs exp exp2 expm1 log log1p tanh logistic sqrt rsqrt cbrt erf sin cos "
    "integer_pow pow square reduce_max "
    "reduce_min reduce_and reduce_or reduce_prod argmax argmin sort top_k round floor ceil lt le "
    "gt ge eq ne is_finite atan2 rem "
    "cummax cummin cumprod cumlogsumexp".split()
)
# of a loop: each makes a carried value at least one step more dependent, and there are four
ROUNDS = 4


def nonlinear_backward(jaxpr: Any) -> str:
    """A function in a loss whose backward pass is known not to be linear, with the user's line that
    calls it; "" if there is none.
    """
    for equation in equations(jaxpr):
        if equation.primitive.name.startswith("custom_vjp_call") and not defined_in(
            equation
        ).startswith((JAX, OURS)):
            if _is_nonlinear(equation):
                traceback = equation.source_info.traceback
                line = users_line(
                    (frame.file_name, frame.line_num)
                    for frame in (traceback.frames if traceback else ())
                )
                return f"a function with a backward pass of its own{f' at {line}' if line else ''}"
    return ""


def _is_nonlinear(equation: Any) -> bool:
    if not all(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in equation.outvars):
        return False
    try:
        closed = both_passes(equation)
    except Exception:
        # whatever the user's functions raise here, outside their loss, such as for a name of an
        # axis; the step decides
        return False
    parts = dependence(
        closed.jaxpr,
        [Part.FIXED] * len(equation.invars) + [Part.LINEAR] * len(equation.outvars),
        closed.consts,
    )
    return any(part in (Part.FIXED, Part.OTHER) for part in parts[len(equation.outvars) :])


def dependence(jaxpr: Any, parts: Sequence[Part], consts: Sequence[Any] = ()) -> list[Part]:
    """How the outputs of a jaxpr depend on the gradient, from how its inputs do."""
    found = dict(zip(jaxpr.invars, parts, strict=True)) | {
        var: _of_constant(x) for var, x in zip(jaxpr.constvars, consts, strict=False)
    }

    def read(var: Any) -> Part:
        return _of_constant(var.val) if hasattr(var, "val") else found.get(var, Part.FIXED)

    for equation in jaxpr.eqns:
        found.update(
            zip(
                equation.outvars,
                _of_equation(equation, [read(var) for var in equation.invars]),
                strict=True,
            )
        )
    return [read(var) for var in jaxpr.outvars]


def _of_constant(value: Any) -> Part:
    known = not isinstance(value, Tracer) and jnp.issubdtype(jnp.result_type(value), jnp.number)
    return Part.ZERO if known and not np.any(value) else Part.FIXED


def _of_equation(equation: Any, parts: list[Part]) -> list[Part]:
    name, count = equation.primitive.name, len(equation.outvars)
    if name == "scan":
        return _of_scan(equation, parts)
    if name == "cond":
        branches = [_of_closed(branch, parts[1:]) for branch in equation.params["branches"]]
        return (
            [Part.OTHER] * count
            if parts[0] > Part.FIXED
            else [_joined(each) for each in zip(*branches, strict=True)]
        )
    inner = (
        [jaxpr for jaxpr in inner_jaxprs(equation) if len(jaxpr.invars) == len(parts)]
        if name in ONE_CALL
        else []
    )
    if inner:
        return dependence(inner[0], parts)
    return [_of_operation(name, parts)] * count


def _of_operation(name: str, parts: list[Part]) -> Part:
    if name in PRODUCTS and Part.ZERO in parts:
        return Part.ZERO
    if name == "select_n":
        return Part.OTHER if parts[0] > Part.FIXED else _joined(parts[1:])
    if max(parts, default=Part.FIXED) <= Part.FIXED:
        return Part.ZERO if name in SAME and parts[0] is Part.ZERO else Part.FIXED
    if name in NEVER or Part.OTHER in parts:
        return Part.OTHER
    if name in PRODUCTS:
        return Part.LINEAR if parts.count(Part.LINEAR) == 1 else Part.OTHER
    if name in OF_FIRST:
        return Part.LINEAR if max(parts[1:]) <= Part.FIXED else Part.OTHER
    if name in SUMS:
        return _joined([parts[number] for number in VALUES.get(name, range(len(parts)))])
    return Part.LINEAR  # of an operation that is not known


def _joined(parts: Sequence[Part]) -> Part:
    """A value that may be, or is the sum of, any of these."""
    kinds = set(parts) - {Part.ZERO}
    return Part.OTHER if len(kinds) > 1 else max(kinds, default=Part.ZERO)


def _of_closed(closed: Any, parts: Sequence[Part]) -> list[Part]:
    return dependence(closed.jaxpr, parts, closed.consts)


def _of_scan(equation: Any, parts: list[Part]) -> list[Part]:
    consts, carried = scanned(equation.params)
    state, outputs = parts[consts : consts + carried], list[Part]()
    for _ in range(ROUNDS):
        outputs = _of_closed(
            equation.params["jaxpr"], [*parts[:consts], *state, *parts[consts + carried :]]
        )
        state = [_joined(each) for each in zip(state, outputs, strict=False)]
    return [*state, *outputs[carried:]]
