"""Checks of a traced loss: that it has a gradient, and that its products compile."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.errors import LossError, option, quoted
from spmd.jaxpr.interpreter import Interpreter
from spmd.jaxpr.primitives import known
from spmd.jaxpr.programs import equations


class GradientFlow(Interpreter[bool]):
    """A walk that finds from which values a gradient can flow to some inputs; what is not known
    lets it through.
    """

    def constant(self, value: Any) -> bool:
        """Return False: nothing flows to a constant."""
        return False

    def unknown(self, variable: Any) -> bool:
        """Return False: nothing flows to a constant."""
        return False

    def joined(self, first: bool, second: bool) -> bool:
        """Return whether a gradient can flow from a value that may be either of two."""
        return first or second

    def equation(self, equation: Any, inputs: list[bool]) -> Sequence[bool]:
        """Return whether a gradient can flow from each output: only from floats."""
        flows = super().equation(equation, inputs)
        return [flow and _is_inexact(x) for flow, x in zip(flows, equation.outvars, strict=True)]

    def operation(self, equation: Any, inputs: list[bool]) -> Sequence[bool]:
        """Return whether a gradient can flow through an operation."""
        flows = any(inputs) and not known(equation.primitive.name).flat
        return [flows] * len(equation.outvars)

    # the derivative of such a function need not be that of what it computes
    custom = operation


def _is_inexact(variable: Any) -> bool:
    return jnp.issubdtype(getattr(variable.aval, "dtype", jnp.int32), jnp.inexact)


def check_gradient(jaxpr: Any, params: int) -> None:
    """Check that a loss, the first output of a jaxpr, depends on one of its first `params`
    inputs.

    Raises:
      LossError: every gradient would be zero.
    """
    trained = [number < params for number in range(len(jaxpr.invars))]
    if params and not GradientFlow().outputs(jaxpr, trained)[0]:
        raise LossError(
            f"the loss has no gradient: by none of the {params} parameters does it change "
            "smoothly, so nothing would be trained.",
            fix="a loss computed from what the model returns, with no stop_gradient, argmax, "
            "rounding or comparison in between.",
        )


def check_products(jaxpr: Any, platform: str) -> None:
    """Check that there are no products of float16 that XLA:CPU does not have: those of
    `jax.nn.dot_product_attention`, and so of Flax's attention.

    Raises:
      LossError: the loss has some.
    """
    if platform != "cpu":
        return
    # jax.nn asks for it where queries are float16 (jax 0.10.2)
    algorithm = lax.DotAlgorithmPreset.F16_F16_F32
    if any(equation.params.get("precision") is algorithm for equation in equations(jaxpr)):
        raise LossError(
            "the model computes jax.nn.dot_product_attention in float16, which JAX does not "
            "compile for CPUs.",
            fix=f'{option("precision", quoted("bfloat16"))} or "float32" on CPUs; plans for a GPU '
            "(--target) and runs on one take float16.",
        )
