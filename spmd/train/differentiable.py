"""Whether a loss has a gradient at all, and whether it compiles, from its jaxpr."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.errors import LossError, option, quoted
from spmd.jaxpr import equations

# gradient zero
FLAT = frozenset(
    "stop_gradient argmax argmin sign floor ceil round eq ne lt le gt ge is_finite not and or "
    "xor".split()
)
# not custom derivatives, which need not be those of what they compute
CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint")


def differentiable(jaxpr: Any, given: Sequence[bool]) -> list[bool]:
    """For each output whether a gradient can flow from it to an input that is `given` as True; what
    is not known lets it through.
    """
    flows = dict(zip(jaxpr.invars, given, strict=True))

    def read(var: Any) -> bool:
        return not hasattr(var, "val") and flows.get(var, False)

    for equation in jaxpr.eqns:
        sources = [read(var) for var in equation.invars]
        inner = equation.params.get("jaxpr") if equation.primitive.name in CALLS else None
        if inner is not None:
            found = differentiable(getattr(inner, "jaxpr", inner), sources)
        else:
            found = [any(sources) and equation.primitive.name not in FLAT] * len(equation.outvars)
        floating = [
            jnp.issubdtype(getattr(var.aval, "dtype", jnp.int32), jnp.inexact)
            for var in equation.outvars
        ]
        flows.update(
            {
                var: flow and floats
                for var, flow, floats in zip(equation.outvars, found, floating, strict=True)
            }
        )
    return [read(var) for var in jaxpr.outvars]


def check_gradient(jaxpr: Any, params: int) -> None:
    """Refuse a loss, the first output of a jaxpr, that does not depend on any of its first `params`
    inputs.

    Raises:
      LossError: every gradient would be zero.
    """
    if (
        params
        and not differentiable(jaxpr, [number < params for number in range(len(jaxpr.invars))])[0]
    ):
        raise LossError(
            f"the loss has no gradient: by none of the {params} parameters does it change "
            "smoothly, so nothing would be trained.",
            fix="a loss computed from what the model returns, with no stop_gradient, argmax, "
            "rounding or comparison in between.",
        )


def check_products(jaxpr: Any, platform: str) -> None:
    """Refuse products of float16 that XLA:CPU does not have: those of
    `jax.nn.dot_product_attention`, and so of Flax's attention.

    Raises:
      LossError: the loss has some.
    """
    asked = lax.DotAlgorithmPreset.F16_F16_F32
    if platform == "cpu" and any(
        found.params.get("precision") is asked for found in equations(jaxpr)
    ):
        why = (
            "the model computes jax.nn.dot_product_attention in float16, which JAX does not "
            "compile for CPUs."
        )
        raise LossError(
            why,
            fix=f'{option("precision", quoted("bfloat16"))} or "float32" on CPUs; plans for a GPU '
            "(--target) and runs on one take float16.",
        )
