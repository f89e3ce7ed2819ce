"""The programs that an equation runs: scans, loops, branches, calls.

Only this file knows the names of the params in which JAX keeps them. A *program* is a jaxpr, or a
closed one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from spmd.jaxpr.primitives import Kind, of_kind

Part = TypeVar("Part")
CALLS = of_kind(Kind.CALL)
# of one program, with a derivative of its own
CUSTOM = of_kind(Kind.CUSTOM)
# where equations that run one program once keep it
CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def is_program(value: Any) -> bool:
    """Return whether a value is a jaxpr, or a closed one."""
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def is_closed(program: Any) -> bool:
    """Return whether a program holds its constants."""
    return hasattr(program, "consts") and hasattr(program, "jaxpr")


def opened(program: Any) -> Any:
    """Return the jaxpr of a program."""
    return getattr(program, "jaxpr", program)


def inner_programs(equation: Any) -> list[Any]:
    """Return the programs that an equation runs, or may run."""
    leaves = jax.tree.leaves([*equation.params.values()], is_leaf=is_program)
    return [leaf for leaf in leaves if hasattr(opened(leaf), "eqns")]


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs that an equation runs, or may run."""
    return map(opened, inner_programs(equation))


def called_program(equation: Any) -> Any | None:
    """Return the program that an equation runs once, with the equation's inputs and outputs; None
    if the equation is no such call.

    Example:
      >>> [equation] = jax.make_jaxpr(jax.jit(lambda x: 2 * x))(1.0).eqns
      >>> called_program(equation).jaxpr.eqns[0].primitive.name
      'mul'
    """
    if equation.primitive.name not in CALLS | CUSTOM:
        return None
    programs = [equation.params[key] for key in CALLED if key in equation.params]
    for program in programs:
        # `custom_vjp_call` of some versions keeps functions beside its program
        if hasattr(opened(program), "eqns"):
            return program
    return None


class Scan(NamedTuple):
    """A `lax.scan`.

    Attributes:
      program: of one step, from constants, what is carried, and slices.
      constants: the number of inputs that are the same in every step.
      carried: the number of inputs, after the constants, that a step gets from the one before.
      length: the number of steps.
    """

    program: Any
    constants: int
    carried: int
    length: int

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return constants, what is carried, and what is sliced, of values of the scan's inputs."""
        carried_end = self.constants + self.carried
        return (
            list(values[: self.constants]),
            list(values[self.constants : carried_end]),
            list(values[carried_end:]),
        )


def scan_of(equation: Any) -> Scan:
    """Return the parts of an equation that is a `lax.scan`."""
    params = equation.params
    # jax 0.11 has trees of inputs, of another class in a backward pass; earlier releases have
    # numbers of them.
    if hasattr(params.get("ft_in"), "elts"):
        constants, carried, _ = (len(list(tree)) for tree in params["ft_in"].elts)
    elif "ft_in" in params:
        constants, carried, _ = (part.num_leaves for part in params["ft_in"].tree.children())
    else:
        constants, carried = params["num_consts"], params["num_carry"]
    return Scan(params["jaxpr"], constants, carried, params["length"])


class While(NamedTuple):
    """A `lax.while_loop`. Its inputs are the constants of the condition, those of the body, and
    what is carried.

    Attributes:
      condition: the program from constants and what is carried to a bool[].
      body: the program from constants and what is carried to what is carried next.
    """

    condition: Any
    condition_constants: int
    body: Any
    body_constants: int


def while_of(equation: Any) -> While:
    """Return the parts of an equation that is a `lax.while_loop`."""
    params = equation.params
    return While(
        params["cond_jaxpr"],
        params["cond_nconsts"],
        params["body_jaxpr"],
        params["body_nconsts"],
    )


def branches_of(equation: Any) -> tuple[Any, ...]:
    """Return the programs of a `lax.cond` or `lax.switch`. The first input of the equation is the
    number of the branch, and the others are those of each branch.
    """
    return equation.params["branches"]


def repeats(equation: Any) -> int:
    """Return how often an equation runs its programs: the length of a scan, or the size of the grid
    of a kernel of Pallas; a `while` loop counts as one iteration.

    Example:
      >>> step = lambda x, _: (x + 1, None)
      >>> [equation] = jax.make_jaxpr(lambda x: jax.lax.scan(step, x, length=5))(1.0).eqns
      >>> repeats(equation)
      5
    """
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "pallas_call":
        # a size that is not known before the kernel runs counts as 1
        return int(np.prod([n for n in params["grid_mapping"].grid if isinstance(n, int)]))
    return 1


def counted_parts(
    equation: Any, parts: Sequence[Part], size: Callable[[Part], float]
) -> Sequence[Part]:
    """Return the parts of an equation, one for each of its `inner_jaxprs`, that a count of what a
    program does adds up: of branches only the largest one.

    Example:
      >>> branches = lambda x: jax.lax.cond(x > 0, lambda x: x, lambda x: 2 * x + 1, x)
      >>> equation = jax.make_jaxpr(branches)(1.0).eqns[-1]
      >>> counted_parts(equation, [len(jaxpr.eqns) for jaxpr in inner_jaxprs(equation)], float)
      [2]
    """
    if equation.primitive.name == "cond":
        return [max(parts, key=size)]
    return parts


def constant_inputs(equation: Any) -> Mapping[str, Sequence[Any]] | None:
    """Return, by the param that holds a program, what the first inputs of the program are each time
    that it runs; None of an equation that is not a loop, branches, or a call without a derivative
    of its own.
    """
    name, inputs = equation.primitive.name, equation.invars
    if name == "scan":
        return {"jaxpr": inputs[: scan_of(equation).constants]}
    if name == "while":
        loop = while_of(equation)
        end = loop.condition_constants + loop.body_constants
        return {
            "cond_jaxpr": inputs[: loop.condition_constants],
            "body_jaxpr": inputs[loop.condition_constants : end],
        }
    if name == "cond":
        return {"branches": inputs[1:]}
    if name in CALLS:
        return dict.fromkeys(CALLED, inputs)
    return None


def with_programs(equation: Any, change: Callable[..., Any], *others: Any) -> Any:
    """Return an equation that runs other programs; the same one if none is another.

    Args:
      change: from the name of the param that holds a program, the program, and those of `others`,
        to a jaxpr with the same constants.
      others: equations of the same primitive.
    """
    changed = {}
    for param, value in equation.params.items():
        programs = _programs(value)
        if not programs:
            continue
        twins = [_programs(other.params[param]) for other in others]
        after = []
        for program, *those_of_others in zip(programs, *twins, strict=True):
            jaxpr = change(param, program, *those_of_others)
            after.append(_with_jaxpr(program, jaxpr))
        if any(new is not program for new, program in zip(after, programs, strict=True)):
            changed[param] = after[0]
            if isinstance(value, tuple):
                changed[param] = tuple(after)
    if not changed:
        return equation
    return equation.replace(params={**equation.params, **changed})


def _programs(value: Any) -> tuple[Any, ...]:
    """Return the programs that a param holds: one, or several as a tuple."""
    values = value
    if not isinstance(value, tuple):
        values = (value,)
    if all(map(is_program, values)):
        return values
    return ()


def _with_jaxpr(program: Any, jaxpr: Any) -> Any:
    if jaxpr is opened(program):
        return program
    if is_closed(program):
        return program.replace(jaxpr=jaxpr)
    return jaxpr
