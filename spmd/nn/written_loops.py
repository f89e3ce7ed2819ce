"""Loops over time that a model writes itself, or has from `nnx.RNN` and `linen.RNN`: under
`[recurrence] implementation = "hoisted"` they are computed as `spmd.nn.time_scan` does.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from spmd.base.xla import scope_of
from spmd.jaxpr.inner_programs import inner_jaxprs, opened, scan_of, with_programs
from spmd.nn.parallel_context import current
from spmd.nn.step_parts import split_step
from spmd.nn.time_scan import HOISTED, hoisted
from spmd.nn.written_attention import fuse_attention


def rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pure function of arrays, with its loops over time and the attention that it writes
    out as the layout in force says.

    Example:
      >>> import jax.numpy as jnp
      >>> double = rewritten(lambda x: 2 * x)
      >>> double(jnp.ones(2))  # outside of a step, the function itself
      Array([2., 2.], dtype=float32)
    """
    return fuse_attention(hoist_loops(function))


def hoist_loops(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pure function of arrays, with less in its loops where the layout in force says so;
    notes name loops that stay.
    """

    @functools.wraps(function)
    def call_rewritten(*args: Any) -> Any:
        recurrence = current().recurrence
        if recurrence.implementation == "auto" and recurrence.time_chunk is not None:
            why = '"auto" applies to spmd.nn.RNNStack and spmd.nn.Bidirectional'
            _note_loops(jax.make_jaxpr(function)(*args).jaxpr, why)
        if recurrence.implementation != "hoisted":
            return function(*args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        program = jaxpr_as_fun(closed.replace(jaxpr=_with_hoisted_loops(closed.jaxpr)))
        results = program(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call_rewritten


def _with_hoisted_loops(jaxpr: Any) -> Any:
    """Return a jaxpr with less in its loops, or the same one."""
    changed = [_with_less(equation) for equation in jaxpr.eqns]
    if all(new is old for new, old in zip(changed, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=changed)


def _with_less(equation: Any) -> Any:
    """Return an equation with less in its loops, or the same one."""
    # a loop of `RNNStack`, for example
    if HOISTED in scope_of(equation):
        return equation
    loop = hoisted(equation, recurrences_only=True)
    if loop is not equation:
        return loop
    if equation.primitive.name == "scan" and current().recurrence.time_chunk is not None:
        length = scan_of(equation).length
        why = "it has no product of a weight and what it carries"
        note = f"note: a loop over {length} steps is not computed again in chunks of time: {why}."
        current().notes[note] = None
    # A function with a gradient of its own is differentiated by that, not by its program; and the
    # axes of a region of shards have no names here.
    if equation.primitive.name.startswith(("custom_vjp", "shard_map")):
        why = "it is inside of a function with a gradient of its own, or of jax.shard_map"
        for jaxpr in inner_jaxprs(equation):
            _note_loops(jaxpr, why)
        return equation
    return with_programs(equation, lambda _, program: _with_hoisted_loops(opened(program)))


def _note_loops(jaxpr: Any, why: str) -> None:
    """Note the loops over time in a jaxpr that is left as it is."""
    for equation in jaxpr.eqns:
        if HOISTED in scope_of(equation):
            continue
        for inner in inner_jaxprs(equation):
            _note_loops(inner, why)
        if equation.primitive.name != "scan":
            continue
        scan = scan_of(equation)
        parts = split_step(scan)
        if parts is not None and parts.is_recurrence:
            current().notes[f"note: a loop over {scan.length} steps is not hoisted: {why}."] = None
