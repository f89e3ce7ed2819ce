"""Logical axis names for a model that carries none: dims of parameters that are used together in
the traced loss are one axis.

A dim of a kernel and the dim of the array that it multiplies are one axis, and so are the dims of
what is added, reshaped or transposed. So the hidden dim of two layers of an MLP is one axis, which
their kernels share, and the heads of attention are one, through scores and softmax. Sharding such
an axis needs one sum over devices where it is contracted, as in Shoeybi et al. 2019
(arXiv:1909.08053, section 3).
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.base.path_match import match_all
from spmd.base.specs import Spec
from spmd.base.tree import flatten
from spmd.jaxpr.inner_programs import inner_programs
from spmd.jaxpr.interpreter import Interpreter
from spmd.jaxpr.primitives import Kind, of_kind
from spmd.layout.resolve import Names, each_name, named_spec
from spmd.layout.schema import Layout, Rule
from spmd.planner.model_flops import trace_model
from spmd.train.compiled_step import TrainingProgram

# names that shipped layouts have in their [axes]
STREAM, HIDDEN, HEADS, VOCABULARY = "embed", "mlp", "heads", "vocab"
# that have the axis of most parameters, if they add to a stream; the hidden axis of an MLP has two
# or three
STREAM_MATRICES = 4
EVEN = 8  # devices that must divide an axis other than heads: few divide classes or colours

Dims = tuple[int, ...]  # of an array: a number for each dim


class Axes:
    """Numbers of dims, of which some are one axis: a union-find.

    Attributes:
      batches: dims over which products are computed side by side, such as heads.
      looked_up: dims from which rows are looked up, such as a vocabulary's.
      scored: dims over which two activations are multiplied and summed, as queries and keys are.
      weights: dims of parameters, and of what is computed from them alone.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._gcd: list[int] = []
        self._members: list[int] = []
        self.batches: set[int] = set()
        self.looked_up: set[int] = set()
        self.scored: set[int] = set()
        self.weights: set[int] = set()

    def new(self, shape: Sequence[int]) -> Dims:
        """Return numbers of the dims of another array."""
        first = len(self._parent)
        self._parent += range(first, first + len(shape))
        self._gcd += shape
        self._members += [1] * len(shape)
        return tuple(range(first, len(self._parent)))

    def find(self, dim: int) -> int:
        """Return the axis of a dim."""
        while self._parent[dim] != dim:
            # Path halving. Python assigns from left to right: the parent of the old `dim`, and then
            # `dim`.
            self._parent[dim] = dim = self._parent[self._parent[dim]]
        return dim

    def gcd(self, dim: int) -> int:
        """Return the greatest common divisor of the sizes of an axis' dims: as many shards as
        divide it divide all of them.
        """
        return self._gcd[self.find(dim)]

    def is_shared(self, dim: int) -> bool:
        """Return whether an axis is that of several arrays, or is looked up; the height of a
        convolution's kernel is not.
        """
        return self._members[self.find(dim)] > 1 or dim in self.looked_up

    def join(self, one: int, other: int) -> None:
        """Make two dims one axis."""
        one, other = self.find(one), self.find(other)
        if one != other:
            self._parent[other] = one
            self._gcd[one] = math.gcd(self._gcd[one], self._gcd[other])
            self._members[one] += self._members[other]

    def join_all(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make the two dims of each pair one axis."""
        for one, other in pairs:
            self.join(one, other)


def names_of(program: TrainingProgram) -> dict[str, Names]:
    """Return logical axis names by path of a parameter, of those that have any: "embed" for the
    axis of most parameters, and "mlp", "heads" or "vocab" for axes of which each matrix has one at
    most; {} if there are none.

    Example: of an MLP, {"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed")}.
    """
    state = program.placed.abstract_state
    params = {**flatten(state.params), **flatten(state.frozen)}
    axes, jaxpr = Axes(), trace_model(program)
    inputs = [axes.new(variable.aval.shape) for variable in jaxpr.invars]
    inputs_of_params = inputs[: len(params)]
    axes.weights = set(itertools.chain.from_iterable(inputs_of_params))
    DimReader(axes).outputs(jaxpr, inputs)
    dims, sizes = {}, {}
    for (path, leaf), numbers in zip(params.items(), inputs_of_params, strict=True):
        dims[path] = tuple(map(axes.find, numbers))
        sizes[path] = leaf.size * leaf.dtype.itemsize
    return name_axes(axes, dims, sizes)


def name_axes(axes: Axes, dims: Mapping[str, Dims], sizes: Mapping[str, int]) -> dict[str, Names]:
    """Return names of dims from the axes of parameters, and their bytes."""
    matrices = _Matrices(
        {path: frozenset(each) for path, each in dims.items() if len(each) > 1}, sizes
    )
    bytes_of = matrices.bytes_by_axis()
    batches, looked_up = set(map(axes.find, axes.batches)), set(map(axes.find, axes.looked_up))
    scored = set(map(axes.find, axes.scored))
    shared = [axis for axis in bytes_of if axes.is_shared(axis) and axis not in scored]
    ordered = sorted(shared, key=lambda axis: (-bytes_of[axis], axis))
    stream = None
    if ordered and matrices.count(ordered[0]) >= STREAM_MATRICES:
        stream = ordered[0]
    even = [axis for axis in ordered if axes.gcd(axis) % (2 if axis in batches else EVEN) == 0]
    sharded = matrices.separate(axis for axis in even if axis != stream)
    if stream is None:
        # of layers one after the other, every second axis
        every_second = matrices.separate(even[1:])
        if matrices.bytes_with(every_second) >= matrices.bytes_with(sharded):
            stream, sharded = next(iter(even), None), every_second
    names: dict[int, str] = {}
    for axis in sharded:
        if axis in looked_up:
            names[axis] = VOCABULARY
        elif axis in batches:
            names[axis] = HEADS
        else:
            names[axis] = HIDDEN
    if stream is not None and stream in even:
        names[stream] = STREAM
    named = {}
    for path, axes_of_array in dims.items():
        entries = tuple(_last_of_each([names.get(axis) for axis in axes_of_array]))
        # a vector of the stream has a layout's default
        if any(entries) and entries != (STREAM,):
            named[path] = entries
    return named


class _Matrices(NamedTuple):
    """The axes of each parameter with several dims, and the bytes of each parameter, by path."""

    axes: Mapping[str, frozenset[int]]
    sizes: Mapping[str, int]

    def bytes_by_axis(self) -> dict[int, int]:
        """Return the bytes of all matrices with an axis, by axis."""
        total: dict[int, int] = {}
        for path, axes in self.axes.items():
            for axis in axes:
                total[axis] = total.get(axis, 0) + self.sizes[path]
        return total

    def count(self, axis: int) -> int:
        """Return the number of matrices with an axis."""
        return sum(axis in axes for axes in self.axes.values())

    def separate(self, candidates: Iterable[int]) -> list[int]:
        """Return axes of which no matrix has two, the first candidates first."""
        chosen: set[int] = set()
        separate = []
        for axis in candidates:
            if all(chosen.isdisjoint(axes) for axes in self.axes.values() if axis in axes):
                chosen.add(axis)
                separate.append(axis)
        return separate

    def bytes_with(self, chosen: Collection[int]) -> int:
        """Return the bytes of the matrices that have one of some axes."""
        with_axes = [path for path, axes in self.axes.items() if not axes.isdisjoint(chosen)]
        return sum(self.sizes[path] for path in with_axes)


def _last_of_each(entries: Sequence[str | None]) -> list[str | None]:
    """Return names of which the last of several equal ones is kept: a mesh axis shards one dim of
    an array.
    """
    return [None if name in entries[place + 1 :] else name for place, name in enumerate(entries)]


def without_names(layouts: Sequence[Layout], program: TrainingProgram) -> tuple[Layout, ...]:
    """Return layouts for a model whose parameters have no name of their `[axes]`: those tables
    become rules by path, as `names_of` says.
    """
    placed = program.placed
    declared = {name for layout in layouts for name, _ in layout.axes}
    for names in placed.spec.axis_names.values():
        if not declared.isdisjoint(each_name(names)):
            return tuple(layouts)
    names = names_of(program)
    paths = [*flatten(placed.abstract_state.params), *flatten(placed.abstract_state.frozen)]
    return tuple(with_rules(layout, names, paths) if layout.axes else layout for layout in layouts)


def with_rules(layout: Layout, names: Mapping[str, Names], paths: Sequence[str]) -> Layout:
    """Return a layout with rules by path in place of its `[axes]`; the same one without `[axes]`,
    or if it names none of these.
    """
    table = dict(layout.axes)
    alike: dict[tuple[Spec, str], list[str]] = {}  # by spec, and path without numbers
    for path, entries in names.items():
        spec = named_spec(entries, table)
        if any(spec):
            alike.setdefault((spec, _without_numbers(path)), []).append(path)
    patterns = [_pattern(similar) for similar in alike.values()]
    matched, rules = match_all(patterns, paths), []
    for ((spec, _), similar), pattern in zip(alike.items(), patterns, strict=True):
        chosen = similar
        if matched[pattern] == similar:
            chosen = [pattern]
        rules += [Rule(path, spec) for path in chosen]
    if not rules:
        return layout
    description = (
        f"{layout.name}, with rules by path for a model whose parameters have no logical axis "
        "names."
    )
    words = {"name": f"{layout.name}_by_path", "description": description, "use_when": ""}
    return dataclasses.replace(layout, **words, axes=(), params=(*rules, *layout.params))


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _pattern(paths: Sequence[str]) -> str:
    """Return a pattern of paths that differ in numbers: `*` where they do."""
    levels = []
    for level in zip(*(path.split("/") for path in paths), strict=True):
        is_same = len({*level}) == 1
        levels.append(level[0] if is_same else _without_numbers(level[0]))
    return "/".join(levels)


class DimReader(Interpreter[Dims]):
    """A walk that joins the dims that the equations of a program make one axis."""

    def __init__(self, axes: Axes):
        self.axes = axes

    def constant(self, value: Any) -> Dims:
        """Return the dims of a constant array."""
        return self.axes.new(np.shape(value))

    def unknown(self, variable: Any) -> Dims:
        """Return the dims of a constant of a program that is not closed."""
        return self.axes.new(variable.aval.shape)

    def joined(self, first: Dims, second: Dims) -> Dims:
        """Return the dims of an array, after each is one axis with that of another array."""
        self.axes.join_all(zip(first, second, strict=True))
        return first

    def entry(self, value: Dims) -> Dims:
        """Return the dims of one slice of an array."""
        return value[1:]

    def stacked(self, value: Dims, length: int) -> Dims:
        """Return the dims of an array of slices with these dims."""
        return (*self.axes.new((length,)), *value)

    def operation(self, equation: Any, inputs: list[Dims]) -> list[Dims]:
        """Return the dims of the outputs of an operation."""
        axes, name = self.axes, equation.primitive.name
        # on a mesh of one device, as that of `trace_model`, shards are the arrays
        if name == "shard_map":
            [program] = inner_programs(equation)
            return self.outputs(program, inputs)
        results = [axes.new(variable.aval.shape) for variable in equation.outvars]
        rule = _RULES.get(name, _elementwise)
        axes.join_all(rule(axes, equation, inputs, results))
        read = set(itertools.chain.from_iterable(inputs))
        if read and axes.weights.issuperset(read):
            axes.weights.update(itertools.chain.from_iterable(results))
        return results


Pairs = Iterable[tuple[int, int]]


# Each rule yields pairs of dims, of inputs and results, that an equation makes one axis.


def _elementwise(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    """Join dims of one place and size, as of any operation on arrays of one shape."""
    for output, result in zip(equation.outvars, results, strict=True):
        for variable, dims in zip(equation.invars, inputs, strict=True):
            if len(dims) != len(result):
                continue
            shapes = zip(variable.aval.shape, output.aval.shape, strict=True)
            for place, (size, size_after) in enumerate(shapes):
                if size == size_after > 1:
                    yield dims[place], result[place]


def _broadcast(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    shape, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    for dim, place in enumerate(equation.params["broadcast_dimensions"]):
        if shape[dim] == after[place]:
            yield inputs[0][dim], results[0][place]


def _transpose(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    for dim, place in zip(results[0], equation.params["permutation"], strict=True):
        yield inputs[0][place], dim


def _reduce(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    for dims in inputs:
        yield from zip(_without(dims, equation.params["axes"]), results[0], strict=False)


def _reshape(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    """Join, of dims that are split or merged, the outermost: a shard of it is a shard of all."""
    before = _wide_dims(inputs[0], equation.invars[0].aval.shape)
    after = _wide_dims(results[0], equation.outvars[0].aval.shape)
    while before and after:
        (one, size_before), (other, size_after) = before.pop(0), after.pop(0)
        yield one, other
        # what one side has merged takes several dims of the other
        while size_before != size_after:
            shorter = after
            if size_before < size_after:
                shorter = before
            if not shorter:
                return
            _, size = shorter.pop(0)
            if shorter is before:
                size_before *= size
            else:
                size_after *= size


def _wide_dims(dims: Dims, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return the dims of more than one entry, with their sizes."""
    return [(dim, size) for dim, size in zip(dims, shape, strict=True) if size > 1]


def _without(dims: Dims, places: Collection[int]) -> list[int]:
    return [dim for place, dim in enumerate(dims) if place not in places]


def _dot(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    contracted, batches = equation.params["dimension_numbers"]
    left, right = inputs
    for one, other in zip(*contracted, strict=True):
        yield left[one], right[other]
        # Scores sum over the width of a head. If that were sharded, devices would add up every
        # score.
        if axes.weights.isdisjoint((*left, *right)):
            axes.scored.add(left[one])
    for one, other in zip(*batches, strict=True):
        yield left[one], right[other]
        axes.batches.add(left[one])
    # A result of `lax.dot_general` has batch dims first, then those of the left side, then the
    # right.
    outer = [left[place] for place in batches[0]]
    for side, dims in enumerate(inputs):
        outer += _without(dims, (*contracted[side], *batches[side]))
    yield from zip(outer, results[0], strict=True)


def _ragged_dot(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    left, right = inputs[:2]
    # rows, each times the matrix of its group
    if (len(left), len(right), len(results[0])) == (2, 3, 2):
        yield left[1], right[1]
        yield left[0], results[0][0]
        yield right[2], results[0][1]


def _convolution(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]
    image, kernel = inputs
    batch, features = numbers.lhs_spec[:2]
    features_out, features_in = numbers.rhs_spec[:2]
    yield image[batch], results[0][numbers.out_spec[0]]
    yield kernel[features_out], results[0][numbers.out_spec[1]]
    # With groups, a kernel has the input features of one group alone, and its output features are
    # divided among the groups.
    yield image[features], kernel[features_in if groups == 1 else features_out]


def _gather(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    (table, index, *_), (result, *_) = inputs, results
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    sliced = [place for place in range(len(shape)) if place not in dropped]
    for place, place_after in zip(sliced, numbers.offset_dims, strict=True):
        if sizes[place] == shape[place]:
            yield table[place], result[place_after]
    yield from zip(index[:-1], _without(result, numbers.offset_dims), strict=False)
    axes.looked_up |= {table[place] for place in numbers.start_index_map}


def _concatenate(axes: Axes, equation: Any, inputs: list[Dims], results: list[Dims]) -> Pairs:
    along = (equation.params["dimension"],)
    for dims in inputs:
        yield from zip(_without(dims, along), _without(results[0], along), strict=True)


_RULES = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "concatenate": _concatenate,
    # `lax.reduce` has a computation of the user's, and its dims under another name.
    **dict.fromkeys(of_kind(Kind.REDUCTION) - {"reduce"}, _reduce),
}
