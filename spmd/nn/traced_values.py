"""What is known of the values of a traced program before it runs: constants, causal masks and
windows, and what an array repeats.

Every function asks about an array as some outer array has it: `dims` says, for each dim of the
outer array, which dim of the array it is; None where the array is repeated.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Dims = tuple[int | None, ...]

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
# left - right, times a sign, plus a number, is at least 0
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
        return None if hasattr(atom, "val") else self.equations.get(atom)

    def constant(self, atom: Any) -> np.ndarray | None:
        """The value of a literal, a constant or a slice of one; None if it is not known."""
        if hasattr(atom, "val"):
            return np.asarray(atom.val)
        if atom in self.constants:
            return np.asarray(self.constants[atom])
        equation = self.equations.get(atom)
        if equation is None or equation.primitive.name != "slice":
            return None
        source, params = self.constant(equation.invars[0]), equation.params
        limits = zip(
            params["start_indices"],
            params["limit_indices"],
            params["strides"] or (1,) * len(params["start_indices"]),
            strict=True,
        )
        return None if source is None else source[tuple(slice(*limit) for limit in limits)]

    def scalar(self, atom: Any) -> Any:
        """The number that a scalar is, or that all entries of an array are; None if it is not
        known.
        """
        value, equation = self.constant(atom), self.equation(atom)
        if value is not None:
            return value.reshape(())[()] if value.size == 1 else None
        if equation is None:
            around = self.outer.get(atom)
            return around[0].scalar(around[1]) if around else None
        name, dtype = equation.primitive.name, atom.aval.dtype
        if name not in _SCALARS and name not in (
            "broadcast_in_dim",
            "reshape",
            "squeeze",
            "convert_element_type",
            "integer_pow",
            "copy",
        ):
            return None
        inputs = [self.scalar(x) for x in equation.invars]
        if any(x is None for x in inputs):
            return None
        if name == "integer_pow":
            return np.asarray(np.power(inputs[0], equation.params["y"]), dtype)[()]
        return np.asarray(_SCALARS[name](*inputs) if name in _SCALARS else inputs[0], dtype)[()]

    def source(
        self, atom: Any, dims: Dims, through: Callable[[Any], bool] | None = None
    ) -> tuple[Any, Dims]:
        """The array that `atom` only repeats, reorders, or adds dims of 1 to; `through`: other
        equations of one input to look through.
        """
        while (equation := self.equation(atom)) is not None:
            inner = dims if through is not None and through(equation) else moved(equation, dims)
            if inner is None:
                break
            atom, dims = equation.invars[0], inner
        return atom, dims

    def narrower(self, atom: Any, dtype: Any) -> Any:
        """A value of this dtype that `atom` is, or is converted from; None if there is none."""
        equation = self.equation(atom)
        if atom.aval.dtype == dtype:
            return atom
        source = (
            equation.invars[0]
            if equation is not None and equation.primitive.name == "convert_element_type"
            else None
        )
        return source if source is not None and source.aval.dtype == dtype else None

    def masked(self, atom: Any, dims: Dims, most: float) -> list[View | Band] | None:
        """Of an array of zeros, and numbers of at most `most` where a key is not seen: where it is
        seen, as `seen` says.
        """
        atom, dims = self.source(atom, dims, _keeps_truth)
        equation = self.equation(atom)
        if equation is None:
            around = self.outer.get(atom)
            found = around[0].masked(around[1], dims, most) if around else None
            return found if found and all(isinstance(part, Band) for part in found) else None
        if equation.primitive.name == "select_n" and len(equation.invars) == 3:
            which, *cases = equation.invars
            numbers = [self.scalar(x) for x in cases]
            for negated in (False, True):
                hidden, shown = numbers[::-1] if negated else numbers
                if hidden is not None and shown is not None and shown == 0 and hidden <= most:
                    return self.seen(which, self._which(which, dims), negated)
        if equation.primitive.name == "mul":
            for x, factor in (equation.invars, equation.invars[::-1]):
                number = self.scalar(factor)
                if number is not None and number <= most:
                    return self._hidden(x, dims)
        return None

    def _hidden(self, atom: Any, dims: Dims) -> list[View | Band] | None:
        """Of an array of ones where a key is not seen, and zeros."""
        atom, dims = self.source(atom, dims, _keeps_truth)
        equation = self.equation(atom)
        if (
            equation is not None
            and equation.primitive.name == "sub"
            and self.scalar(equation.invars[0]) == 1
        ):
            return (
                self.seen(equation.invars[1], dims)
                if self._is_indicator(equation.invars[1])
                else None
            )
        return self.seen(atom, dims, True) if self._is_indicator(atom) else None

    def seen(self, atom: Any, dims: Dims, negated: bool = False) -> list[View | Band]:
        """A mask as a conjunction of others, with what is known of each."""
        opaque: list[View | Band] = [View(*self.source(atom, dims), negated)]
        parts = self._parts(atom, dims, negated)
        if parts is None:
            return opaque
        bands = [part for part in parts if isinstance(part, Band)]
        inside = all(
            part.atom in self.equations or part.atom in self.inputs
            for part in parts
            if isinstance(part, View)
        )
        return parts if inside else [*bands, *opaque]

    def _parts(self, atom: Any, dims: Dims, negated: bool) -> list[View | Band] | None:
        """The parts of `seen`; None: nothing is known."""
        atom, dims = self.source(atom, dims, _keeps_truth)
        equation, number = self.equation(atom), self.scalar(atom)
        if number is not None:
            return [] if bool(number) is not negated else None
        if equation is None:
            around = self.outer.get(atom)
            if around is not None:
                return around[0]._parts(around[1], dims, negated)
            return self._triangle(atom, dims, negated) or [View(atom, dims, negated)]
        name, inputs = equation.primitive.name, equation.invars
        if name == "not":
            return self._parts(inputs[0], dims, not negated)
        if (name in ("and", "mul") and not negated) or (name == "or" and negated):
            return self._all(*((x, dims, negated) for x in inputs))
        if (
            name in ("ne", "gt", "eq")
            and self.scalar(inputs[1]) == 0
            and (name == "ne" or self._is_indicator(inputs[0]))
        ):
            return self._parts(inputs[0], dims, negated is not (name == "eq"))
        if name == "slice":
            parts = self._parts(inputs[0], dims, negated) or ()
            bands = [part for part in parts if isinstance(part, Band)]
            if parts and len(bands) == len(parts) and not equation.params["strides"]:
                starts = [
                    0 if dim is None else equation.params["start_indices"][dim] for dim in dims
                ]
                return [
                    Band(band.plus, band.minus, band.more + starts[band.plus] - starts[band.minus])
                    for band in bands
                ]
        if name in _ORDER:
            band = self._band(name, inputs, dims, negated)
            return [View(atom, dims, negated)] if band is None else band
        if name == "select_n" and len(inputs) == 3:
            which = self._which(inputs[0], dims)
            zeros = [number is not None and number == 0 for number in map(self.scalar, inputs[1:])]
            ones = [number is not None and number == 1 for number in map(self.scalar, inputs[1:])]
            for kept in (0, 1):
                if zeros[1 - kept] and ones[kept]:
                    return self._parts(inputs[0], which, negated is not (kept == 0))
                if zeros[1 - kept] and not negated:
                    return self._all((inputs[0], which, kept == 0), (inputs[1 + kept], dims, False))
        return self._triangle(atom, dims, negated) or [View(atom, dims, negated)]

    def _all(self, *masks: tuple[Any, Dims, bool]) -> list[View | Band]:
        found: list[View | Band] = []
        for mask in masks:
            parts = self._parts(*mask)
            found += [View(*mask)] if parts is None else parts
        return found

    def _which(self, which: Any, dims: Dims) -> Dims:
        """Dims of the first input of a select, which may be a scalar."""
        return dims if which.aval.shape else (None,) * len(dims)

    def _is_indicator(self, atom: Any) -> bool:
        """Whether an array holds zeros and ones only."""
        if atom.aval.dtype == bool:
            return True
        equation, number = self.equation(atom), self.scalar(atom)
        if number is not None:
            return number in (0, 1)
        if equation is None:
            around = self.outer.get(atom)
            return around is not None and around[0]._is_indicator(around[1])
        name, inputs = equation.primitive.name, equation.invars
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
        """A comparison of positions."""
        left, right = (self._position(x, dims) for x in inputs)
        if left is None or right is None:
            return None
        sign, more = _ORDER[name]
        steps = {
            dim: sign * (left[0].get(dim, 0) - right[0].get(dim, 0))
            for dim in left[0].keys() | right[0].keys()
        }
        more += sign * (left[1] - right[1])
        if negated:
            steps, more = {dim: -step for dim, step in steps.items()}, -more - 1
        return _of_steps(steps, more)

    def _position(self, atom: Any, dims: Dims) -> tuple[dict[int, int], int] | None:
        """An array of integers as a sum of indices, by outer dim with their factors, and a
        number.
        """
        atom, dims = self.source(atom, dims, _keeps_integers)
        number, equation = self.scalar(atom), self.equation(atom)
        if number is not None:
            return ({}, int(number)) if float(number).is_integer() else None
        if equation is None:
            around, value = self.outer.get(atom), self.constant(atom)
            if around is not None:
                return around[0]._position(around[1], dims)
            return None if value is None else _of_line(value, dims)
        name, inputs = equation.primitive.name, equation.invars
        if name == "iota":
            outer = [place for place, dim in enumerate(dims) if dim == equation.params["dimension"]]
            return dict.fromkeys(outer, 1), 0
        if name == "slice" and all(step == 1 for step in equation.params["strides"] or ()):
            found, starts = self._position(inputs[0], dims), equation.params["start_indices"]
            if found is None:
                return None
            return found[0], found[1] + sum(
                found[0].get(place, 0) * starts[dim]
                for place, dim in enumerate(dims)
                if dim is not None
            )
        if name not in ("add", "sub"):
            return None
        (left, right), sign = (
            (self._position(x, dims if x.aval.shape else (None,) * len(dims)) for x in inputs),
            1 if name == "add" else -1,
        )
        if left is None or right is None:
            return None
        return {
            dim: left[0].get(dim, 0) + sign * right[0].get(dim, 0)
            for dim in left[0].keys() | right[0].keys()
        }, left[1] + sign * right[1]

    def _triangle(self, atom: Any, dims: Dims, negated: bool) -> list[View | Band] | None:
        """A constant array that is a causal mask."""
        value = self.constant(atom)
        places = [
            place
            for place, dim in enumerate(dims)
            if dim is not None and value is not None and value.shape[dim] > 1
        ]
        if value is None or len(places) != 2:
            return None
        queries, keys = places if dims[places[0]] < dims[places[1]] else places[::-1]  # type: ignore[operator]
        square = value.reshape([size for size in value.shape if size > 1]).astype(bool) ^ negated
        if (square == _lower(square.shape)).all():
            return [Band(queries, keys, 0)]
        return [Band(keys, queries, 0)] if (square == ~_lower(square.shape, -1)).all() else None


def _keeps_truth(equation: Any) -> bool:
    """Whether what is not zero stays so."""
    if equation.primitive.name != "convert_element_type":
        return equation.primitive.name == "stop_gradient"
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return bool in (old, new) or not np.issubdtype(new, np.integer)


def _keeps_integers(equation: Any) -> bool:
    """Whether integers stay what they are."""
    if equation.primitive.name != "convert_element_type":
        return False
    return all(
        np.issubdtype(x.aval.dtype, np.integer) for x in (equation.invars[0], equation.outvars[0])
    )


@functools.lru_cache(maxsize=4)
def _lower(shape: tuple[int, int], more: int = 0) -> np.ndarray:
    return np.tri(*shape, more, dtype=bool)


def _of_steps(steps: dict[int, int], more: int) -> list[View | Band] | None:
    """The mask of a sum of indices that is at least 0."""
    steps = {dim: step for dim, step in steps.items() if step}
    if not steps:
        return [] if more >= 0 else None
    by_step = {step: dim for dim, step in steps.items()}
    return (
        [Band(by_step[1], by_step[-1], more)]
        if len(steps) == 2 and by_step.keys() == {1, -1}
        else None
    )


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
    return ({places[0]: step}, int(line[0])) if (np.diff(line) == step).all() else None


def moved(equation: Any, dims: Dims) -> Dims | None:
    """The dims of an equation's input, from those of its output; None: it does more than to repeat,
    reorder or add dims of 1.
    """
    if len(equation.invars) != 1:
        return None
    name, source, params = equation.primitive.name, equation.invars[0].aval, equation.params
    if name == "broadcast_in_dim":
        places = tuple(params["broadcast_dimensions"])
        inner: dict[int, int | None] = {
            int(place): number for number, place in enumerate(places) if source.shape[number] > 1
        }
    elif name == "transpose":
        inner = dict(enumerate(params["permutation"]))
    elif name in ("reshape", "squeeze"):
        new = equation.outvars[0].aval.shape
        kept, wide = (
            [number for number, size in enumerate(shape) if size > 1]
            for shape in (source.shape, new)
        )
        if [source.shape[number] for number in kept] != [new[number] for number in wide]:
            return None
        inner = dict(zip(wide, kept, strict=True))
    elif name == "copy":
        return dims
    else:
        return None
    return tuple(None if dim is None else inner.get(dim) for dim in dims)
