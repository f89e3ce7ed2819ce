"""Looks into traced programs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import NamedSharding, PartitionSpec

# of an inner jaxpr
ONE_CALL = (
    "jit",
    "pjit",
    "remat2",
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs."""
    for value in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
    ):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner


def closed_jaxprs(jaxpr: Any) -> Iterator[Any]:
    """Every closed jaxpr that equations of a jaxpr run, at any depth."""
    for equation in equations(jaxpr):
        leaves = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "consts")
        )
        yield from (leaf for leaf in leaves if hasattr(leaf, "consts"))


def mesh_axes(jaxpr: Any) -> set[str]:
    """Mesh axes that a program names: in the shardings of its values and of what it calls, and for
    collectives.
    """
    return {axis for equation in equations(jaxpr) for axis in named_axes(equation.params)}


def named_axes(params: Mapping[str, Any]) -> set[str]:
    """Mesh axes that the parameters of an equation name, other than those of the mesh itself."""
    values = [
        value for name, value in params.items() if name not in ("jaxpr", "call_jaxpr", "mesh")
    ]
    leaves = jax.tree.leaves(values, is_leaf=lambda value: isinstance(value, PartitionSpec))
    specs = [leaf.spec if isinstance(leaf, NamedSharding) else leaf for leaf in leaves]
    specs = [tuple(spec) for spec in specs if isinstance(spec, PartitionSpec)]
    return {
        axis
        for axis in jax.tree.leaves([specs, params.get("axes"), params.get("axis_name")])
        if isinstance(axis, str)
    }


def scanned(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried: numbers in jax 0.10, flat
    trees in 0.11.
    """
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = (len(list(tree)) for tree in params["ft_in"].elts)
    return consts, carried


def has_convolution(found: Iterable[Any]) -> bool:
    """Whether one of these equations is a convolution."""
    return any(equation.primitive.name == "conv_general_dilated" for equation in found)


def uses(jaxpr: Any, inputs: Sequence[int], name: str) -> list[list[str]]:
    """How each of these inputs of a jaxpr is used: once as `name` for every `checkpoint_name(x,
    name)`, else by the primitive's name.

    Changes of dtype are followed, and so are functions that are called once.
    """
    found: list[list[str]] = [[] for _ in inputs]
    owner = {jaxpr.invars[number]: place for place, number in enumerate(inputs)}
    for equation in jaxpr.eqns:
        primitive, inner = (
            equation.primitive.name,
            [
                jaxpr
                for jaxpr in inner_jaxprs(equation)
                if len(jaxpr.invars) == len(equation.invars)
            ],
        )
        taken = [
            (number, owner[v])
            for number, v in enumerate(equation.invars)
            if not hasattr(v, "val") and v in owner
        ]
        if not taken:
            continue
        if primitive == "convert_element_type":
            owner[equation.outvars[0]] = taken[0][1]
        elif primitive == "name" and equation.params["name"] == name:
            found[taken[0][1]].append(name)
        elif primitive in ONE_CALL and len(inner) == 1:
            for (_, place), more in zip(
                taken, uses(inner[0], [number for number, _ in taken], name), strict=True
            ):
                found[place] += more
        else:
            for _, place in taken:
                found[place].append(primitive)
    for v in jaxpr.outvars:
        if not hasattr(v, "val") and v in owner:
            found[owner[v]].append("output")
    return found


def read_inputs(jaxpr: Any) -> set[Any]:
    """The inputs of a jaxpr on which its outputs may depend; functions that are called once are
    followed.
    """
    read = {x for x in jaxpr.outvars if not hasattr(x, "val")}
    for equation in reversed(without_unused(jaxpr.eqns, jaxpr.outvars)):
        taken, inner = equation.invars, [*inner_jaxprs(equation)]
        if (
            equation.primitive.name in ONE_CALL
            and len(inner) == 1
            and len(inner[0].invars) == len(taken)
        ):
            of_inner = read_inputs(inner[0])
            taken = [
                outer for outer, x in zip(taken, inner[0].invars, strict=True) if x in of_inner
            ]
        read.update(x for x in taken if not hasattr(x, "val"))
    return read.intersection(jaxpr.invars)


def inlined(jaxpr: Any, most: int) -> tuple[list[Any], dict[Any, Any]]:
    """The equations of a jaxpr, those of inner jits of at most `most` equations in place of their
    calls, and what its outputs are now.

    Names of scopes are kept. A jit with effects, or with shardings, is left as it is.
    """
    found: list[Any] = []

    def visit(jaxpr: Any, known: dict[Any, Any], around: Any) -> None:
        for equation in jaxpr.eqns:
            inputs = [x if hasattr(x, "val") else known.get(x, x) for x in equation.invars]
            inner = equation.params.get("jaxpr")
            if (
                equation.primitive.name in ("jit", "pjit")
                and not equation.effects
                and _is_small(inner, most)
                and _is_plain(equation)
            ):
                names = dict(zip(inner.jaxpr.invars, inputs, strict=True))
                visit(inner.jaxpr, names, _source(equation, around))
                known.update(
                    (outer, x if hasattr(x, "val") else names.get(x, x))
                    for outer, x in zip(equation.outvars, inner.jaxpr.outvars, strict=True)
                )
                continue
            outputs = equation.outvars
            if around is not None:  # a jit may be called twice: each call has variables of its own
                outputs = [Var(x.aval) for x in outputs]
                known.update(zip(equation.outvars, outputs, strict=True))
            found.append(
                equation.replace(
                    invars=inputs, outvars=outputs, source_info=_source(equation, around)
                )
            )

    known: dict[Any, Any] = {}
    visit(jaxpr, known, None)
    return found, known


def _source(equation: Any, around: Any) -> Any:
    """The source of an equation inside a call from `around`."""
    source = equation.source_info
    return (
        source
        if around is None
        else source.replace(name_stack=around.name_stack + source.name_stack)
    )


def _is_small(closed: Any, most: int) -> bool:
    return not closed.consts and sum(1 for _ in equations(closed.jaxpr)) <= most


def _is_plain(equation: Any) -> bool:
    """Whether a jit says nothing but its function."""
    places = (*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ()))
    return all(type(place).__name__ == "UnspecifiedValue" for place in places) and not any(
        equation.params.get("donated_invars", ())
    )


def without_unused(found: list[Any], outputs: Iterable[Any]) -> list[Any]:
    """The equations that have effects, or that the outputs need."""
    needed, kept = {x for x in outputs if not hasattr(x, "val")}, []
    for equation in reversed(found):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(x for x in equation.invars if not hasattr(x, "val"))
            kept.append(equation)
    return kept[::-1]
