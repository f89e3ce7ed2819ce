"""One walk over traced programs: equation after equation, with a value for each variable, through
calls, loops and branches.

What a value is, and how those of an equation's outputs follow from those of its inputs, is a
subclass: the dims of an array, whether it has a gradient, which rows it holds.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from spmd.jaxpr.inner_programs import CUSTOM, branches_of, called_program, scan_of, while_of

Value = TypeVar("Value")


class Interpreter(Generic[Value]):
    """A walk over a program. The methods for operations, constants and joined values are a
    subclass's; others may be.

    Example:
      >>> import jax
      >>> class Depth(Interpreter[int]):
      ...     "The longest chain of operations from an input to a value."
      ...
      ...     def constant(self, value):
      ...         return 0
      ...
      ...     def joined(self, first, second):
      ...         return max(first, second)
      ...
      ...     def operation(self, equation, inputs):
      ...         return [1 + max(inputs)] * len(equation.outvars)
      >>> closed = jax.make_jaxpr(jax.jit(lambda x: jax.numpy.sin(2 * x) + x))(1.0)
      >>> Depth().outputs(closed, [0])
      [3]
    """

    def constant(self, value: Any) -> Value:
        """Return the value of a literal, or of a constant of a closed program."""
        raise TypeError(f"{type(self).__name__} has no constants")

    def unknown(self, variable: Any) -> Value:
        """Return the value of a constant of a program that is not closed."""
        raise TypeError(f"{type(self).__name__} has no unknown constants: close the program")

    def operation(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Return the outputs of an equation that runs no program of JAX's."""
        raise TypeError(f"{type(self).__name__} has no operations")

    def joined(self, first: Value, second: Value) -> Value:
        """Return the value of a variable that has either value: of two branches, or before and
        after a step of a loop. A loop is followed until the values that it carries stay, so a value
        must change finitely often when it is joined with others.
        """
        raise TypeError(f"{type(self).__name__} joins no values")

    def entry(self, value: Value) -> Value:
        """Return the value of one slice of an array along dim 0, as a step of a scan gets it."""
        return value

    def stacked(self, value: Value, length: int) -> Value:
        """Return the value of an array of `length` slices, each of which has this value."""
        return value

    # Programs ---------------------------------------------------------------------------------

    def outputs(self, program: Any, inputs: Sequence[Value]) -> list[Value]:
        """Return the values of a program's outputs for those of its inputs.

        Args:
          program: a jaxpr, or a closed one.
        """
        jaxpr = getattr(program, "jaxpr", program)
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        # A jaxpr that is not closed has variables for its constants, and no values.
        for variable, constant in zip(
            jaxpr.constvars, getattr(program, "consts", ()), strict=False
        ):
            values[variable] = self.constant(constant)

        def value_of(atom: Any) -> Value:
            # A literal has its value in the equation itself, and no variable.
            if hasattr(atom, "val"):
                return self.constant(atom.val)
            if atom not in values:
                values[atom] = self.unknown(atom)
            return values[atom]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [value_of(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    # Equations --------------------------------------------------------------------------------

    def equation(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Return the values of an equation's outputs."""
        name = equation.primitive.name
        if name == "scan":
            return self.scan(equation, inputs)
        if name == "while":
            return self.while_loop(equation, inputs)
        if name == "cond":
            return self.cond(equation, inputs)
        if name in CUSTOM:
            return self.custom(equation, inputs)
        if called_program(equation) is not None:
            return self.call(equation, inputs)
        return self.operation(equation, inputs)

    def call(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Return the outputs of an equation that runs one program once."""
        return self.outputs(called_program(equation), inputs)

    def custom(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Return the outputs of a call of a function with a derivative of its own."""
        return self.call(equation, inputs)

    def scan(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Return the outputs of a `lax.scan`."""
        scan = scan_of(equation)
        constants, carried, arrays = scan.split(inputs)
        entries = [self.entry(value) for value in arrays]
        while True:
            outputs = self.outputs(scan.program, [*constants, *carried, *entries])
            after = self._joined_all(carried, outputs[: scan.carried])
            if after == carried:
                break
            carried = after
        stacked = [self.stacked(value, scan.length) for value in outputs[scan.carried :]]
        return [*carried, *stacked]

    def while_loop(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Return the outputs of a `lax.while_loop`; its condition is not followed."""
        loop = while_of(equation)
        start = loop.condition_constants + loop.body_constants
        constants, carried = inputs[loop.condition_constants : start], inputs[start:]
        while True:
            outputs = self.outputs(loop.body, [*constants, *carried])
            after = self._joined_all(carried, outputs)
            if after == carried:
                return carried
            carried = after

    def cond(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Return the outputs of branches; the number of the branch is the first input."""
        first, *others = [self.outputs(branch, inputs[1:]) for branch in branches_of(equation)]
        for outputs in others:
            first = self._joined_all(first, outputs)
        return first

    def _joined_all(self, first: Sequence[Value], second: Sequence[Value]) -> list[Value]:
        return [self.joined(*pair) for pair in zip(first, second, strict=True)]
