"""Functions with a derivative of their own (`jax.custom_vjp`, `jax.custom_jvp`), as equations of
traced programs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from spmd.jaxpr.programs import evaluated


def differentiated(equation: Any) -> list[int]:
    """Return the numbers of the inputs by which a function with a derivative of its own has one:
    not those that it captures.
    """
    # `custom_jvp` and `custom_vjp` put the arrays that the function closes over first.
    captured = equation.params.get("num_consts", 0)
    floats = []
    for number, variable in enumerate(equation.invars):
        if number >= captured and jnp.issubdtype(variable.aval.dtype, jnp.floating):
            floats.append(number)
    return floats


def both_passes(equation: Any) -> ClosedJaxpr:
    """Return the jaxpr of a function with a derivative of its own: from its inputs and the gradient
    of its outputs to its outputs, and to the gradients of its `differentiated` inputs.
    """
    floats = differentiated(equation)

    def passes(inputs: list[Any], cotangents: list[Any]) -> Any:
        def forward(*floats_only: Any) -> list[Any]:
            arrays = list(inputs)
            for number, array in zip(floats, floats_only, strict=True):
                arrays[number] = array
            return evaluated(equation, arrays)

        results, backward = jax.vjp(forward, *(inputs[number] for number in floats))
        return results, backward(cotangents)

    return jax.make_jaxpr(passes)(_shapes(equation.invars), _shapes(equation.outvars))


def _shapes(variables: list[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in variables]
