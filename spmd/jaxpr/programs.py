"""Traced programs: what they have, what they read, and parts of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from spmd.base.xla import has_shardings, joined_sources, with_others
from spmd.jaxpr.inner_programs import (
    called_program,
    inner_jaxprs,
    inner_programs,
    is_closed,
    opened,
)
from spmd.jaxpr.interpreter import Interpreter


def is_literal(atom: Any) -> bool:
    """Return whether an input of an equation is a literal, and not a variable."""
    return hasattr(atom, "val")


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return the inputs of an equation, or outputs of a program, that are no literals."""
    return [atom for atom in atoms if not is_literal(atom)]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr, and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def closed_jaxprs(jaxpr: Any) -> Iterator[Any]:
    """Yield every closed jaxpr that equations of a jaxpr run, at any depth."""
    for equation in equations(jaxpr):
        yield from filter(is_closed, inner_programs(equation))


def mesh_axes(jaxpr: Any) -> set[str]:
    """Return the mesh axes that a program names: in the shardings of its values and of what it
    calls, and for collectives.
    """
    return {axis for equation in equations(jaxpr) for axis in named_axes(equation.params)}


def named_axes(params: Mapping[str, Any]) -> set[str]:
    """Return the mesh axes that params of an equation name, other than those of the mesh itself."""
    axes = [params.get("axes"), params.get("axis_name")]
    values = [
        # Inner programs are visited on their own, and the mesh of a `shard_map` lists all axes.
        value
        for name, value in params.items()
        if name not in ("jaxpr", "call_jaxpr", "mesh")
    ]
    for leaf in jax.tree.leaves(values, is_leaf=lambda value: isinstance(value, PartitionSpec)):
        spec = leaf
        if isinstance(leaf, NamedSharding):
            spec = leaf.spec
        if isinstance(spec, PartitionSpec):
            axes.append(tuple(spec))
    return {axis for axis in jax.tree.leaves(axes) if isinstance(axis, str)}


def has_convolution(equations: Iterable[Any]) -> bool:
    """Return whether one of some equations is a convolution."""
    return any(equation.primitive.name == "conv_general_dilated" for equation in equations)


class _Uses(Interpreter[int | None]):
    """A walk that follows some inputs of a program: each value is the number of an input, or None.

    Attributes:
      by_input: takes the names of uses, by number of the input.
      label: of `checkpoint_name`, which counts as a use of this name.
    """

    def __init__(self, count: int, label: str):
        self.by_input: list[list[str]] = [[] for _ in range(count)]
        self.label = label

    def constant(self, value: Any) -> None:
        return None

    def unknown(self, variable: Any) -> None:
        return None

    def operation(self, equation: Any, inputs: list[int | None]) -> list[int | None]:
        name = equation.primitive.name
        # A parameter that is cast to the dtype of the computation is still that parameter.
        if name == "convert_element_type":
            return inputs
        if name == "name" and equation.params["name"] == self.label:
            name = self.label
        for number in inputs:
            if number is not None:
                self.by_input[number].append(name)
        return [None] * len(equation.outvars)

    # loops and branches may use it as often as they like
    scan = while_loop = cond = operation


def uses(jaxpr: Any, inputs: Sequence[int], label: str) -> list[list[str]]:
    """Return how each of some inputs of a jaxpr is used: as `label` for every `checkpoint_name(x,
    label)`, as "output", else as the primitive's name.

    Changes of dtype are followed, and so are functions that are called once.
    """
    reader = _Uses(len(inputs), label)
    numbers: list[int | None] = [None] * len(jaxpr.invars)
    for number, place in enumerate(inputs):
        numbers[place] = number
    for number in reader.outputs(jaxpr, numbers):
        if number is not None:
            reader.by_input[number].append("output")
    return reader.by_input


def read_inputs(jaxpr: Any) -> set[Any]:
    """Return the inputs of a jaxpr on which its outputs may depend; functions that are called once
    are followed.
    """
    read = set(variables(jaxpr.outvars))
    for equation in reversed(without_unused(jaxpr.eqns, jaxpr.outvars)):
        inputs, program = equation.invars, called_program(equation)
        if program is not None:
            inner = opened(program)
            read_inside = read_inputs(inner)
            pairs = zip(inputs, inner.invars, strict=True)
            inputs = [outer for outer, variable in pairs if variable in read_inside]
        read.update(variables(inputs))
    return read.intersection(jaxpr.invars)


def part_of(
    jaxpr: Any,
    equations: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Sequence[Any] = (),
) -> Any:
    """Return a jaxpr of some equations of another one, with these variables as inputs, outputs and
    constants.
    """
    return with_others(
        jaxpr,
        constvars=list(constants),
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
    )


def inlined(jaxpr: Any, most: int) -> tuple[list[Any], list[Any]]:
    """Return the equations of a jaxpr, with those of inner jits of at most `most` equations in
    place of their calls, and its outputs.

    Names of scopes are kept. A jit with effects, or with shardings, is left as it is.
    """
    flat: list[Any] = []

    def visit(jaxpr: Any, names: dict[Any, Any], caller: Any) -> list[Any]:
        """Add the equations of a jaxpr; returns its outputs. `names`: what stands for variables."""

        def renamed(atoms: Iterable[Any]) -> list[Any]:
            return [atom if is_literal(atom) else names.get(atom, atom) for atom in atoms]

        for equation in jaxpr.eqns:
            inputs, source = renamed(equation.invars), equation.source_info
            if caller is not None:
                source = joined_sources(caller, source)
            if _can_be_inlined(equation, most):
                inner = opened(called_program(equation))
                results = visit(inner, dict(zip(inner.invars, inputs, strict=True)), source)
                names.update(zip(equation.outvars, results, strict=True))
                continue
            outputs = equation.outvars
            # JAX traces a jit once for two equal calls, which would then share their variables.
            if caller is not None:
                outputs = [Var(variable.aval) for variable in outputs]
                names.update(zip(equation.outvars, outputs, strict=True))
            flat.append(equation.replace(invars=inputs, outvars=outputs, source_info=source))
        return renamed(jaxpr.outvars)

    outputs = visit(jaxpr, {}, None)
    return flat, outputs


def _can_be_inlined(equation: Any, most: int) -> bool:
    """Return whether an equation is a jit of few equations that says nothing but its function."""
    # "pjit" is the name of "jit" in older releases of JAX.
    if equation.primitive.name not in ("jit", "pjit") or equation.effects:
        return False
    closed: Any = called_program(equation)
    if closed.consts or sum(1 for _ in equations(closed.jaxpr)) > most:
        return False
    donated = equation.params.get("donated_invars", ())
    return not has_shardings(equation) and not any(donated)


def without_unused(equations: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
    """Return the equations that have effects, or that the outputs need."""
    needed = set(variables(outputs))
    used = []
    for equation in reversed(equations):
        # An equation with effects, such as a callback, may have no outputs at all.
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(variables(equation.invars))
            used.append(equation)
    return used[::-1]


def evaluated(equation: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation for these arrays; their shapes may differ from those that
    the equation was traced for.
    """
    # A jaxpr must not define a variable twice, and inputs of an equation may be literals, or one
    # variable in two places.
    inputs = [Var(variable.aval) for variable in equation.invars]
    outputs = [Var(variable.aval) for variable in equation.outvars]
    alone = equation.replace(invars=inputs, outvars=outputs)
    jaxpr = _NOTHING.replace(invars=inputs, outvars=outputs, eqns=[alone], effects=equation.effects)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*arrays)


_NOTHING = jax.make_jaxpr(lambda: ())().jaxpr
