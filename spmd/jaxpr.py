"""Looks into traced programs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

ONE_CALL = ("jit", "pjit", "remat2", "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")  # of an inner jaxpr


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs."""
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner


def has_convolution(found: Iterable[Any]) -> bool:
    """Whether one of these equations is a convolution."""
    return any(equation.primitive.name == "conv_general_dilated" for equation in found)


def uses(jaxpr: Any, inputs: Sequence[int], name: str) -> list[list[str]]:
    """How each of these inputs of a jaxpr is used: once as `name` for every `checkpoint_name(x, name)`, else by the primitive's name.

    Changes of dtype are followed, and so are functions that are called once.
    """
    found: list[list[str]] = [[] for _ in inputs]
    owner = {jaxpr.invars[number]: place for place, number in enumerate(inputs)}
    for equation in jaxpr.eqns:
        primitive, inner = equation.primitive.name, [jaxpr for jaxpr in inner_jaxprs(equation) if len(jaxpr.invars) == len(equation.invars)]
        taken = [(number, owner[v]) for number, v in enumerate(equation.invars) if not hasattr(v, "val") and v in owner]
        if not taken:
            continue
        if primitive == "convert_element_type":
            owner[equation.outvars[0]] = taken[0][1]
        elif primitive == "name" and equation.params["name"] == name:
            found[taken[0][1]].append(name)
        elif primitive in ONE_CALL and len(inner) == 1:
            for (_, place), more in zip(taken, uses(inner[0], [number for number, _ in taken], name), strict=True):
                found[place] += more
        else:
            for _, place in taken:
                found[place].append(primitive)
    for v in jaxpr.outvars:
        if not hasattr(v, "val") and v in owner:
            found[owner[v]].append("output")
    return found
