"""Loops over time that a model writes itself, or has from `nnx.RNN` and `linen.RNN`: under
`[recurrence] implementation = "hoisted"` they are computed as `spmd.nn.time_scan` does.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from spmd.jaxpr.inner_programs import opened, with_programs
from spmd.nn.parallel_context import current
from spmd.nn.time_scan import hoisted


def hoist_loops(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pure function of arrays, with less in its loops where the layout in force says so.

    Example:
      >>> import jax.numpy as jnp
      >>> double = hoist_loops(lambda x: 2 * x)
      >>> double(jnp.ones(2))  # outside of a step, the function itself
      Array([2., 2.], dtype=float32)
    """

    @functools.wraps(function)
    def call_rewritten(*args: Any) -> Any:
        parallel = current()
        if parallel.recurrence != "hoisted":
            return function(*args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        rewritten = jaxpr_as_fun(closed.replace(jaxpr=_rewritten(closed.jaxpr)))
        results = rewritten(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call_rewritten


def _rewritten(jaxpr: Any) -> Any:
    """Return a jaxpr with less in its loops, or the same one."""
    changed = [_rewritten_equation(equation) for equation in jaxpr.eqns]
    if all(new is old for new, old in zip(changed, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=changed)


def _rewritten_equation(equation: Any) -> Any:
    taken = hoisted(equation, recurrences_only=True)
    if taken is not equation:
        return taken
    # A function with a gradient of its own is differentiated by that, not by its program; and the
    # axes of a region of shards have no names here.
    if equation.primitive.name.startswith(("custom_vjp", "shard_map")):
        return equation
    return with_programs(equation, lambda _, program: _rewritten(opened(program)))
