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

from spmd.base.tracebacks import users_line
from spmd.base.xla import defined_in, is_of_jax, source_lines
from spmd.jaxpr.derivatives import both_passes
from spmd.jaxpr.interpreter import Interpreter
from spmd.jaxpr.primitives import ALL, known
from spmd.jaxpr.programs import equations

# this library's backward passes take gradients of any scale, or are layers that a layout asks for
LIBRARY = str(Path(__file__).parents[1])


class Part(enum.IntEnum):
    """The way in which a value depends on the gradient that a backward pass is given."""

    ZERO = 0
    FIXED = 1  # not at all
    LINEAR = 2
    OTHER = 3


def nonlinear_backward(jaxpr: Any) -> str:
    """Return a function in a loss whose backward pass is known not to be linear, with the user's
    line that calls it; "" if there is none.
    """
    for equation in equations(jaxpr):
        if not equation.primitive.name.startswith("custom_vjp_call"):
            continue
        is_of_user = not is_of_jax(equation) and not defined_in(equation).startswith(LIBRARY)
        if is_of_user and _is_nonlinear(equation):
            function = "a function with a backward pass of its own"
            line = users_line(source_lines(equation))
            if not line:
                return function
            return f"{function} at {line}"
    return ""


def _is_nonlinear(equation: Any) -> bool:
    if not all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in equation.outvars):
        return False
    try:
        closed = both_passes(equation)
    except Exception:
        # whatever the user's functions raise here, outside their loss, such as for a name of an
        # axis; the step decides
        return False
    inputs = [Part.FIXED] * len(equation.invars)
    cotangents = [Part.LINEAR] * len(equation.outvars)
    outputs = Dependence().outputs(closed, [*inputs, *cotangents])
    gradients = outputs[len(equation.outvars) :]
    return any(part in (Part.FIXED, Part.OTHER) for part in gradients)


class Dependence(Interpreter[Part]):
    """A walk that finds how outputs depend on the gradient, from how inputs do."""

    def constant(self, value: Any) -> Part:
        """Return `Part.ZERO` of zeros, and `Part.FIXED` of any other constant."""
        # a tracer is a constant of the function around the loss, and has no numbers yet; neither
        # have keys
        if isinstance(value, Tracer) or not jnp.issubdtype(jnp.result_type(value), jnp.number):
            return Part.FIXED
        if np.any(value):
            return Part.FIXED
        return Part.ZERO

    def unknown(self, variable: Any) -> Part:
        """Return the dependence of a constant of a program that is not closed."""
        return Part.FIXED

    def joined(self, first: Part, second: Part) -> Part:
        """Return the dependence of a value that may be either of two."""
        return _joined((first, second))

    def cond(self, equation: Any, inputs: list[Part]) -> Sequence[Part]:
        """Return the dependence of branches, one of which the first input chooses."""
        if inputs[0] > Part.FIXED:
            return [Part.OTHER] * len(equation.outvars)
        return super().cond(equation, inputs)

    def operation(self, equation: Any, inputs: list[Part]) -> Sequence[Part]:
        """Return the dependence of the results of an operation."""
        return [_of_operation(equation.primitive.name, inputs)] * len(equation.outvars)

    # no rule: of an operation that is not known, what it takes decides
    while_loop = operation


def _of_operation(name: str, parts: list[Part]) -> Part:
    """Return how the result of an operation depends on the gradient."""
    primitive = known(name)
    if primitive.bilinear and Part.ZERO in parts:
        return Part.ZERO
    if name == "select_n":
        choice, *cases = parts
        if choice > Part.FIXED:
            return Part.OTHER
        return _joined(cases)
    if max(parts, default=Part.FIXED) <= Part.FIXED:
        if primitive.linear == ALL and {*parts} == {Part.ZERO}:
            return Part.ZERO
        return Part.FIXED
    if Part.OTHER in parts:
        return Part.OTHER
    if primitive.bilinear:
        if parts.count(Part.LINEAR) == 1:
            return Part.LINEAR
        return Part.OTHER
    linear_inputs = primitive.linear_inputs(len(parts))
    if linear_inputs is None:
        # only what is known not to be linear counts
        return Part.LINEAR
    others = [part for number, part in enumerate(parts) if number not in linear_inputs]
    # such as a divisor
    if max(others, default=Part.FIXED) > Part.FIXED:
        return Part.OTHER
    return _joined([parts[number] for number in linear_inputs])


def _joined(parts: Sequence[Part]) -> Part:
    """Return the dependence of a value that may be, or is the sum of, any of some others."""
    distinct = set(parts) - {Part.ZERO}
    # a number that does not scale as the gradient does is added
    if len(distinct) > 1:
        return Part.OTHER
    return max(distinct, default=Part.ZERO)
