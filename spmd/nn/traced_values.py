"""Values of a traced program that are known before it runs: constants, causal masks and windows,
and the arrays that others repeat.

Every function asks about an array as some outer array has it: `dims` says, for each dim of the
outer array, which dim of the array it is; None where the array is repeated.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Dims = tuple[int | None, ...]
# A sum of indices, by outer dim with their factors, and a number.
Position = tuple[dict[int, int], int]

_SCALARS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "pow": np.power,
    "log": np.log,
}
# Operations that do not change a number.
_SAME_SCALAR = ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy")
# A comparison holds where (left - right), times the sign, plus the number, is at least 0.
_ORDER = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}


@dataclasses.dataclass(frozen=True)
class View:
    """An array of the program, as an outer array has it.

    Attributes:
      negated: it stands for its logical negation.
    """

    atom: Any
    dims: Dims
    negated: bool = False


@dataclasses.dataclass(frozen=True)
class Band:
    """True where the index along dim `plus` minus that along dim `minus`, plus `more`, is at least
    0.
    """

    plus: int
    minus: int
    more: int


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """The equations of a jaxpr, by what they compute.

    Attributes:
      inputs: of the jaxpr, and its constants.
      constants: values that are known, by variable.
      outer: of inputs of an inner jaxpr that do not change from call to call: the values around it,
        and what they are there.
    """

    equations: Mapping[Any, Any]
    inputs: frozenset[Any]
    constants: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    outer: Mapping[Any, tuple["Values", Any]] = dataclasses.field(default_factory=dict)

    def equation(self, atom: Any) -> Any:
        """The one that computes a value; None: it is an input or a constant."""
        if hasattr(atom, "val"):
            return None
        return self.equations.get(atom)

    def constant(self, atom: Any) -> np.ndarray | None:
        """The value of a literal, a constant or a slice of one; None if it is not known."""
        if hasattr(atom, "val"):
            return np.asarray(atom.val)
        if atom in self.constants:
            return np.asarray(self.constants[atom])
        equation = self.equations.get(atom)
        if equation is None or equation.primitive.name != "slice":
            return None
        source = self.constant(equation.invars[0])
        params = equation.params
        limits = zip(
            params["start_indices"],
            params["limit_indices"],
            params["strides"] or (1,) * len(params["start_indices"]),
            strict=True,
        )
        if source is None:
            return None
        return source[tuple(slice(*limit) for limit in limits)]

    def scalar(self, atom: Any) -> Any:
        """The number that a scalar is, or that all entries of an array are; None if it is not
        known.
        """
        value = self.constant(atom)
        equation = self.equation(atom)
        if value is not None:
            if value.size != 1:
                return None
            return value.reshape(())[()]
        if equation is None:
            around = self.outer.get(atom)
            if not around:
                return None
            return around[0].scalar(around[1])
        name = equation.primitive.name
        if name not in _SCALARS and name not in _SAME_SCALAR and name != "integer_pow":
            return None
        inputs = [self.scalar(x) for x in equation.invars]
        if any(x is None for x in inputs):
            return None
        number = inputs[0]
        if name == "integer_pow":
            number = np.power(number, equation.params["y"])
        elif name in _SCALARS:
            number = _SCALARS[name](*inputs)
        return np.asarray(number, atom.aval.dtype)[()]

    def source(
        self, atom: Any, dims: Dims, through: Callable[[Any], bool] | None = None
    ) -> tuple[Any, Dims]:
        """Return the array that `atom` only repeats, reorders, or adds dims of 1 to; `through`:
        other equations of one input to look through.
        """
        while (equation := self.equation(atom)) is not None:
            inner = dims
            if not (through is not None and through(equation)):
                inner = moved(equation, dims)
            if inner is None:
                break
            atom = equation.invars[0]
            dims = inner
        return atom, dims

    def narrower(self, atom: Any, dtype: Any) -> Any:
        """Return a value of this dtype that `atom` is, or is converted from; None if there is
        none.
        """
        if atom.aval.dtype == dtype:
            return atom
        equation = self.equation(atom)
        if equation is not None and equation.primitive.name == "convert_element_type":
            source = equation.invars[0]
            if source.aval.dtype == dtype:
                return source
        return None

    def masked(self, atom: Any, dims: Dims, most: float) -> list[View | Band] | None:
        """Return the mask of an array of zeros, and of numbers of at most `most` where a key is not
        seen, as `visible` does; None for another array.
        """
        atom, dims = self.source(atom, dims, _keeps_truth)
        equation = self.equation(atom)
        if equation is None:
            around = self.outer.get(atom)
            parts = None
            if around:
                parts = around[0].masked(around[1], dims, most)
            # Arrays of the program around this one are none of this one.
            if parts and all(isinstance(part, Band) for part in parts):
                return parts
            return None
        if equation.primitive.name == "select_n" and len(equation.invars) == 3:
            which, *cases = equation.invars
            on_false, on_true = map(self.scalar, cases)
            for hidden, shown, negated in ((on_false, on_true, False), (on_true, on_false, True)):
                if hidden is not None and shown is not None and shown == 0 and hidden <= most:
                    return self.visible(which, self._which(which, dims), negated)
        if equation.primitive.name == "mul":
            for x, factor in (equation.invars, equation.invars[::-1]):
                number = self.scalar(factor)
                if number is not None and number <= most:
                    return self._hidden(x, dims)
        return None

    def _hidden(self, atom: Any, dims: Dims) -> list[View | Band] | None:
        """Return the mask of an array of ones where a key is not seen, and zeros."""
        atom, dims = self.source(atom, dims, _keeps_truth)
        equation = self.equation(atom)
        negated = True
        if equation is not None and equation.primitive.name == "sub":
            one, subtracted = equation.invars
            if self.scalar(one) == 1:
                atom = subtracted
                negated = False
        if not self._is_indicator(atom):
            return None
        return self.visible(atom, dims, negated)

    def visible(self, atom: Any, dims: Dims, negated: bool = False) -> list[View | Band]:
        """Return a mask as a conjunction of others: bands, and arrays."""
        # Masks are read symbolically: to compute and compare them would take gigabytes for long
        # sequences.
        opaque: list[View | Band] = [View(*self.source(atom, dims), negated)]
        parts = self._parts(atom, dims, negated)
        if parts is None:
            return opaque
        bands = [part for part in parts if isinstance(part, Band)]
        atoms = [part.atom for part in parts if isinstance(part, View)]
        # A variable of an outer or inner program cannot be an input of an equation here.
        if all(part in self.equations or part in self.inputs for part in atoms):
            return parts
        return [*bands, *opaque]

    def _parts(self, atom: Any, dims: Dims, negated: bool) -> list[View | Band] | None:
        """Return the parts of `visible`; None: nothing is known."""
        atom, dims = self.source(atom, dims, _keeps_truth)
        equation = self.equation(atom)
        number = self.scalar(atom)
        if number is not None:
            if bool(number) is not negated:
                return []
            return None
        if equation is None:
            around = self.outer.get(atom)
            if around is not None:
                return around[0]._parts(around[1], dims, negated)
            return self._triangle(atom, dims, negated) or [View(atom, dims, negated)]
        name = equation.primitive.name
        inputs = equation.invars
        if name == "not":
            return self._parts(inputs[0], dims, not negated)
        if (name in ("and", "mul") and not negated) or (name == "or" and negated):
            return self._all(*((x, dims, negated) for x in inputs))
        if name in ("ne", "gt", "eq") and self.scalar(inputs[1]) == 0:
            if name == "ne" or self._is_indicator(inputs[0]):
                return self._parts(inputs[0], dims, negated is not (name == "eq"))
        if name == "slice" and not equation.params["strides"]:
            bands = self._sliced_bands(equation, dims, negated)
            if bands:
                return bands
        if name in _ORDER:
            band = self._band(name, inputs, dims, negated)
            if band is not None:
                return band
            return [View(atom, dims, negated)]
        if name == "select_n" and len(inputs) == 3:
            which, *cases = inputs
            which_dims = self._which(which, dims)
            numbers = [self.scalar(case) for case in cases]
            # One case is zeros: the mask is the other case where that is chosen.
            for number in (0, 1):
                other = numbers[1 - number]
                if other is None or other != 0:
                    continue
                if numbers[number] is not None and numbers[number] == 1:
                    return self._parts(which, which_dims, negated is not (number == 0))
                if not negated:
                    chosen = (which, which_dims, number == 0)
                    return self._all(chosen, (cases[number], dims, False))
        return self._triangle(atom, dims, negated) or [View(atom, dims, negated)]

    def _sliced_bands(self, equation: Any, dims: Dims, negated: bool) -> list[View | Band]:
        """Return the parts of a slice of a mask that consists of bands; none for another mask."""
        starts = []
        for dim in dims:
            start = 0
            if dim is not None:
                start = equation.params["start_indices"][dim]
            starts.append(start)
        bands: list[View | Band] = []
        for part in self._parts(equation.invars[0], dims, negated) or ():
            if not isinstance(part, Band):
                return []
            more = part.more + starts[part.plus] - starts[part.minus]
            bands.append(Band(part.plus, part.minus, more))
        return bands

    def _all(self, *masks: tuple[Any, Dims, bool]) -> list[View | Band]:
        all_parts: list[View | Band] = []
        for mask in masks:
            parts = self._parts(*mask)
            if parts is None:
                parts = [View(*mask)]
            all_parts += parts
        return all_parts

    def _which(self, which: Any, dims: Dims) -> Dims:
        """Return dims of the first input of a select, which may be a scalar."""
        if which.aval.shape:
            return dims
        return (None,) * len(dims)

    def _is_indicator(self, atom: Any) -> bool:
        """Return whether an array holds zeros and ones only."""
        if atom.aval.dtype == bool:
            return True
        equation = self.equation(atom)
        number = self.scalar(atom)
        if number is not None:
            return number in (0, 1)
        if equation is None:
            around = self.outer.get(atom)
            return around is not None and around[0]._is_indicator(around[1])
        name = equation.primitive.name
        inputs = equation.invars
        if name in ("mul", "select_n"):
            return all(map(self._is_indicator, inputs[-2:]))
        return name in (
            "broadcast_in_dim",
            "reshape",
            "squeeze",
            "transpose",
            "convert_element_type",
            "slice",
        ) and self._is_indicator(inputs[0])

    def _band(
        self, name: str, inputs: list[Any], dims: Dims, negated: bool
    ) -> list[View | Band] | None:
        """Return the mask of a comparison of positions."""
        left = self._position(inputs[0], dims)
        right = self._position(inputs[1], dims)
        if left is None or right is None:
            return None
        sign, more = _ORDER[name]
        steps, number = _sum(left, right, -1)
        more += sign * number
        if negated:
            sign = -sign
            more = -more - 1
        return _of_steps({dim: sign * step for dim, step in steps.items()}, more)

    def _position(self, atom: Any, dims: Dims) -> Position | None:
        """Return an array of integers as a position; None for another array."""
        atom, dims = self.source(atom, dims, _keeps_integers)
        number = self.scalar(atom)
        equation = self.equation(atom)
        if number is not None:
            if not float(number).is_integer():
                return None
            return {}, int(number)
        if equation is None:
            around = self.outer.get(atom)
            value = self.constant(atom)
            if around is not None:
                return around[0]._position(around[1], dims)
            if value is None:
                return None
            return _of_line(value, dims)
        name = equation.primitive.name
        inputs = equation.invars
        if name == "iota":
            outer = [place for place, dim in enumerate(dims) if dim == equation.params["dimension"]]
            return dict.fromkeys(outer, 1), 0
        if name == "slice" and all(step == 1 for step in equation.params["strides"] or ()):
            position = self._position(inputs[0], dims)
            if position is None:
                return None
            steps, more = position
            for place, dim in enumerate(dims):
                if dim is not None:
                    more += steps.get(place, 0) * equation.params["start_indices"][dim]
            return steps, more
        if name not in ("add", "sub"):
            return None
        left, right = (self._position(x, self._which(x, dims)) for x in inputs)
        if left is None or right is None:
            return None
        if name == "add":
            return _sum(left, right, 1)
        return _sum(left, right, -1)

    def _triangle(self, atom: Any, dims: Dims, negated: bool) -> list[View | Band] | None:
        """Return the mask of a constant array that is a causal mask; None for another one."""
        value = self.constant(atom)
        if value is None:
            return None
        places = [
            place for place, dim in enumerate(dims) if dim is not None and value.shape[dim] > 1
        ]
        if len(places) != 2:
            return None
        queries, keys = places if dims[places[0]] < dims[places[1]] else places[::-1]  # type: ignore[operator]
        square = value.reshape([size for size in value.shape if size > 1]).astype(bool) ^ negated
        if (square == _lower(square.shape)).all():
            return [Band(queries, keys, 0)]
        if not (square == ~_lower(square.shape, -1)).all():
            return None
        return [Band(keys, queries, 0)]


def _keeps_truth(equation: Any) -> bool:
    """Return whether an equation maps zeros, and no other numbers, to zeros."""
    if equation.primitive.name != "convert_element_type":
        return equation.primitive.name == "stop_gradient"
    old = equation.invars[0].aval.dtype
    new = equation.outvars[0].aval.dtype
    # A conversion to integers makes 0 of 0.5.
    return bool in (old, new) or not np.issubdtype(new, np.integer)


def _keeps_integers(equation: Any) -> bool:
    """Return whether an equation keeps integers as they are."""
    if equation.primitive.name != "convert_element_type":
        return False
    return all(
        np.issubdtype(x.aval.dtype, np.integer) for x in (equation.invars[0], equation.outvars[0])
    )


def _sum(left: Position, right: Position, sign: int) -> Position:
    """Return `left` plus `sign` times `right`."""
    left_steps, left_number = left
    right_steps, right_number = right
    steps = {}
    for dim in left_steps.keys() | right_steps.keys():
        steps[dim] = left_steps.get(dim, 0) + sign * right_steps.get(dim, 0)
    return steps, left_number + sign * right_number


@functools.lru_cache(maxsize=4)
def _lower(shape: tuple[int, int], more: int = 0) -> np.ndarray:
    return np.tri(*shape, more, dtype=bool)


def _of_steps(steps: dict[int, int], more: int) -> list[View | Band] | None:
    """Return the mask of a sum of indices that is at least 0."""
    steps = {dim: step for dim, step in steps.items() if step}
    if not steps:
        if more >= 0:
            return []
        return None
    by_step = {step: dim for dim, step in steps.items()}
    if not (len(steps) == 2 and by_step.keys() == {1, -1}):
        return None
    return [Band(by_step[1], by_step[-1], more)]


def _of_line(value: np.ndarray, dims: Dims) -> tuple[dict[int, int], int] | None:
    """A constant array of evenly spaced integers along one dim."""
    line = value.reshape(-1)
    places = [place for place, dim in enumerate(dims) if dim is not None and value.shape[dim] > 1]
    if (
        len(places) != 1
        or not np.issubdtype(value.dtype, np.integer)
        or line.size < 2
        or line.size != max(value.shape)
    ):
        return None
    step = int(line[1]) - int(line[0])
    if not (np.diff(line) == step).all():
        return None
    return {places[0]: step}, int(line[0])


def moved(equation: Any, dims: Dims) -> Dims | None:
    """The dims of an equation's input, from those of its output; None: it does more than to repeat,
    reorder or add dims of 1.
    """
    if len(equation.invars) != 1:
        return None
    name = equation.primitive.name
    source = equation.invars[0].aval
    params = equation.params
    if name == "broadcast_in_dim":
        places = tuple(params["broadcast_dimensions"])
        inner: dict[int, int | None] = {
            int(place): number for number, place in enumerate(places) if source.shape[number] > 1
        }
    elif name == "transpose":
        inner = dict(enumerate(params["permutation"]))
    elif name in ("reshape", "squeeze"):
        new = equation.outvars[0].aval.shape
        old_dims = [dim for dim, size in enumerate(source.shape) if size > 1]
        new_dims = [dim for dim, size in enumerate(new) if size > 1]
        if [source.shape[dim] for dim in old_dims] != [new[dim] for dim in new_dims]:
            return None
        inner = dict(zip(new_dims, old_dims, strict=True))
    elif name == "copy":
        return dims
    else:
        return None
    return tuple(dim if dim is None else inner.get(dim) for dim in dims)
