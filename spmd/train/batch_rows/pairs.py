"""Two traces of one program, side by side."""

from typing import Any, NamedTuple

from spmd.jaxpr.inner_programs import opened
from spmd.jaxpr.programs import is_literal


class Unreadable(Exception):
    """A loss of which two traces cannot be read side by side."""


class PairedLiteral(NamedTuple):
    """A literal, as both traces have it."""

    val: tuple[Any, Any]


class PairedEquation(NamedTuple):
    """An equation, as both traces have it; primitive, params and variables are those of `one`."""

    one: Any
    other: Any

    @property
    def primitive(self) -> Any:
        """Return the primitive."""
        return self.one.primitive

    @property
    def params(self) -> Any:
        """Return the params of the first trace."""
        return self.one.params

    @property
    def invars(self) -> list[Any]:
        """Return the inputs: variables of the first trace, and paired literals."""
        return _atoms(self.one.invars, self.other.invars)

    @property
    def outvars(self) -> list[Any]:
        """Return the outputs in the first trace."""
        return self.one.outvars


class PairedProgram:
    """A jaxpr, or a closed one, as both traces have it, for `spmd.jaxpr.interpreter.Interpreter`.

    Raises:
      Unreadable: the traces do not correspond.
    """

    def __init__(self, first: Any, second: Any):
        one, other = opened(first), opened(second)
        if _primitives(one) != _primitives(other):
            raise Unreadable("it does something else on few rows than on many")
        constants, other_constants = getattr(first, "consts", ()), getattr(second, "consts", ())
        if len(constants) != len(other_constants):
            raise Unreadable("it captures other arrays on few rows than on many")
        self.consts = list(zip(constants, other_constants, strict=True))
        self.constvars, self.invars = one.constvars, one.invars
        self.eqns = [PairedEquation(*pair) for pair in zip(one.eqns, other.eqns, strict=True)]
        self.outvars = _atoms(one.outvars, other.outvars)


def _primitives(jaxpr: Any) -> list[str]:
    return [equation.primitive.name for equation in jaxpr.eqns]


def _atoms(first: list[Any], second: list[Any]) -> list[Any]:
    """Return the inputs of an equation, or outputs of a program: variables of the first trace, and
    paired literals.
    """
    atoms: list[Any] = []
    for one, other in zip(first, second, strict=True):
        if is_literal(one) != is_literal(other):
            raise Unreadable("it uses a number in place of an array on few rows")
        atoms.append(PairedLiteral((one.val, other.val)) if is_literal(one) else one)
    return atoms
