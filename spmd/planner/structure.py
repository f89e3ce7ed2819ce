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
from typing import Any

import numpy as np

from spmd.jaxpr.inner_programs import inner_programs
from spmd.jaxpr.interpreter import Interpreter
from spmd.layout.resolve import Names, each_name, named_spec
from spmd.layout.schema import Layout, Rule
from spmd.path_match import match_all
from spmd.planner.model_flops import trace_model
from spmd.specs import Spec
from spmd.train.compiled_step import Program
from spmd.tree import flatten

# names that shipped layouts have in their [axes]
STREAM, HIDDEN, HEADS, VOCABULARY = "embed", "mlp", "heads", "vocab"
# that have the axis of most parameters, if they add to a stream; the hidden axis of an MLP has two
# or three
STREAM_MATRICES = 4
EVEN = 8  # devices that must divide an axis other than heads: few divide classes or colours

Dims = tuple[int, ...]  # of an array: a number for each dim


class Axes:
    """Numbers of dims, of which some are found to be one axis (a union-find). `gcd` is that of the
    sizes of an axis' dims.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._gcd: list[int] = []
        self._members: list[int] = []
        self.batches: set[int] = set()  # dims over which products run side by side, such as heads
        self.looked_up: set[int] = set()  # dims from which rows are taken, such as a vocabulary's
        # dims over which two activations are multiplied and summed, as queries and keys are
        self.scored: set[int] = set()
        self.weights: set[int] = set()  # dims of parameters, and of what is computed of them alone

    def new(self, shape: Sequence[int]) -> Dims:
        """Dims of their own."""
        first = len(self._parent)
        self._parent += range(first, first + len(shape))
        self._gcd += shape
        self._members += [1] * len(shape)
        return tuple(range(first, len(self._parent)))

    def find(self, dim: int) -> int:
        """The axis of a dim."""
        while self._parent[dim] != dim:
            self._parent[dim] = dim = self._parent[self._parent[dim]]
        return dim

    def gcd(self, dim: int) -> int:
        """What sizes of all dims of an axis are multiples of: what shards one dim evenly shards
        all.
        """
        return self._gcd[self.find(dim)]

    def is_shared(self, dim: int) -> bool:
        """Whether anything is indexed by a dim but its own array, as a kernel's height is not."""
        return self._members[self.find(dim)] > 1 or dim in self.looked_up

    def join(self, one: int, other: int) -> None:
        """They are one axis."""
        one, other = self.find(one), self.find(other)
        if one != other:
            self._parent[other] = one
            self._gcd[one] = math.gcd(self._gcd[one], self._gcd[other])
            self._members[one] += self._members[other]

    def join_all(self, pairs: Iterable[tuple[int, int]]) -> None:
        """So is each pair."""
        for one, other in pairs:
            self.join(one, other)


def names_of(program: Program) -> dict[str, Names]:
    """Logical axis names by path of a parameter, for those that have any: "embed" for the axis of
    most parameters, and "mlp", "heads" or "vocab" for axes of which each matrix has one at most; {}
    where none is found.

    Example: of an MLP, {"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed")}.
    """
    state = program.placed.abstract_state
    params = {**flatten(state.params), **flatten(state.frozen)}
    axes, jaxpr = Axes(), trace_model(program)
    inputs = [axes.new(variable.aval.shape) for variable in jaxpr.invars]
    axes.weights = {dim for found in inputs[: len(params)] for dim in found}
    DimReader(axes).outputs(jaxpr, inputs)
    dims = {path: tuple(map(axes.find, found)) for path, found in zip(params, inputs, strict=False)}
    return name_axes(
        axes, dims, {path: leaf.size * leaf.dtype.itemsize for path, leaf in params.items()}
    )


def name_axes(axes: Axes, dims: Mapping[str, Dims], sizes: Mapping[str, int]) -> dict[str, Names]:
    """Names from the axes of parameters, and their bytes."""
    matrices = {path: found for path, found in dims.items() if len(found) > 1}
    weights: dict[int, int] = {}
    for path, found in matrices.items():
        for axis in {*found}:
            weights[axis] = weights.get(axis, 0) + sizes[path]
    batches, looked_up, scored = (
        {axes.find(dim) for dim in some} for some in (axes.batches, axes.looked_up, axes.scored)
    )
    shared = (axis for axis in weights if axes.is_shared(axis) and axis not in scored)
    ordered = sorted(shared, key=lambda axis: (-weights[axis], axis))
    stream = next(
        (
            axis
            for axis in ordered[:1]
            if sum(axis in found for found in matrices.values()) >= STREAM_MATRICES
        ),
        None,
    )
    even = [axis for axis in ordered if axes.gcd(axis) % (2 if axis in batches else EVEN) == 0]

    def separate(candidates: Iterable[int]) -> list[int]:
        """Axes of which no matrix has two; those of more bytes first."""
        chosen: list[int] = []
        for axis in candidates:
            if not any(
                axis in found and not {*chosen}.isdisjoint(found) for found in matrices.values()
            ):
                chosen.append(axis)
        return chosen

    def covered(chosen: Collection[int]) -> int:
        return sum(
            sizes[path] for path, found in matrices.items() if not {*chosen}.isdisjoint(found)
        )

    sharded = separate(axis for axis in even if axis != stream)
    # of layers one after the other, every second axis
    if stream is None and covered(separate(even[1:])) >= covered(sharded):
        stream, sharded = next(iter(even), None), separate(even[1:])
    names = {
        axis: VOCABULARY if axis in looked_up else HEADS if axis in batches else HIDDEN
        for axis in sharded
    }
    names |= {stream: STREAM} if stream in even else {}
    found = {
        path: tuple(_last_of_each([names.get(axis) for axis in own])) for path, own in dims.items()
    }
    # of a vector, a layout's default
    return {
        path: entries for path, entries in found.items() if any(entries) and entries != (STREAM,)
    }


def _last_of_each(entries: Sequence[str | None]) -> list[str | None]:
    """A mesh axis shards one dim of an array: of several of one name the last keeps it."""
    return [None if name in entries[place + 1 :] else name for place, name in enumerate(entries)]


def without_names(layouts: Sequence[Layout], program: Program) -> tuple[Layout, ...]:
    """Layouts for a model whose parameters have no name of their `[axes]`: those tables become
    rules by path, as `names_of` says.
    """
    placed = program.placed
    known = {name for layout in layouts for name, _ in layout.axes}
    if any(name in known for names in placed.axis_names.values() for name in each_name(names)):
        return tuple(layouts)
    names = names_of(program)
    paths = [*flatten(placed.abstract_state.params), *flatten(placed.abstract_state.frozen)]
    return tuple(with_rules(layout, names, paths) if layout.axes else layout for layout in layouts)


def with_rules(layout: Layout, names: Mapping[str, Names], paths: Sequence[str]) -> Layout:
    """The layout with rules by path in place of its `[axes]`; without `[axes]`, or if it names none
    of these, as it is.
    """
    table = dict(layout.axes)
    alike: dict[tuple[Spec, str], list[str]] = {}  # by spec, and path without numbers
    for path, entries in names.items():
        if any(spec := named_spec(entries, table)):
            alike.setdefault((spec, re.sub(r"\d+", "*", path)), []).append(path)
    patterns = []
    for found in alike.values():
        levels = zip(*(path.split("/") for path in found), strict=True)
        patterns.append(
            "/".join(
                level[0] if len({*level}) == 1 else re.sub(r"\d+", "*", level[0])
                for level in levels
            )
        )
    matched, rules = match_all(patterns, paths), []
    for ((spec, _), found), pattern in zip(alike.items(), patterns, strict=True):
        rules += [Rule(path, spec) for path in ([pattern] if matched[pattern] == found else found)]
    if not rules:
        return layout
    description = (
        f"{layout.name}, with rules by path for a model whose parameters have no logical axis "
        "names."
    )
    words = {"name": f"{layout.name}_by_path", "description": description, "use_when": ""}
    return dataclasses.replace(layout, **words, axes=(), params=(*rules, *layout.params))


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


def _elementwise(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    """Dims of one place and size, as of any operation whose inputs and outputs are shaped alike."""
    for variable, dims in zip(equation.outvars, results, strict=True):
        for other, own in zip(equation.invars, given, strict=True):
            if len(own) == len(dims):
                yield from (
                    (one, two)
                    for one, two, size, wanted in zip(
                        own, dims, other.aval.shape, variable.aval.shape, strict=True
                    )
                    if size == wanted > 1
                )


def _broadcast(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    shape, wanted = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    for dim, place in enumerate(equation.params["broadcast_dimensions"]):
        if shape[dim] == wanted[place]:
            yield given[0][dim], results[0][place]


def _transpose(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    return (
        (given[0][place], dim)
        for dim, place in zip(results[0], equation.params["permutation"], strict=True)
    )


def _reduce(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    for own in given:
        kept = [dim for place, dim in enumerate(own) if place not in equation.params["axes"]]
        yield from zip(kept, results[0], strict=False)


def _reshape(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    """Of dims that are split or joined, the outermost: a shard of it is a shard of all."""
    sides = [
        [(dim, size) for dim, size in zip(own, shape, strict=True) if size > 1]
        for own, shape in (
            (given[0], equation.invars[0].aval.shape),
            (results[0], equation.outvars[0].aval.shape),
        )
    ]
    while all(sides):
        (one, first), (other, second) = (side.pop(0) for side in sides)
        yield one, other
        while first != second and all(
            side or size for side, size in zip(sides, (first, second), strict=True)
        ):
            short = int(first > second)
            if not sides[short]:
                return
            size = sides[short].pop(0)[1]
            first, second = (first * size, second) if short == 0 else (first, second * size)


def _dot(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    contracted, batches = equation.params["dimension_numbers"]
    for (left, right), kind in ((contracted, "sum"), (batches, "batch")):
        for one, other in zip(left, right, strict=True):
            yield given[0][one], given[1][other]
            if kind == "batch":
                axes.batches.add(given[0][one])
            elif axes.weights.isdisjoint((*given[0], *given[1])):
                axes.scored.add(given[0][one])
    kept = [given[0][place] for place in batches[0]]
    for side in (0, 1):
        kept += [
            dim
            for place, dim in enumerate(given[side])
            if place not in contracted[side] and place not in batches[side]
        ]
    yield from zip(kept, results[0], strict=True)


def _ragged_dot(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    left, right = given[:2]
    # rows, each times the matrix of its group
    if (len(left), len(right), len(results[0])) == (2, 3, 2):
        yield from ((left[1], right[1]), (left[0], results[0][0]), (right[2], results[0][1]))


def _convolution(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]
    (batch, features), (out, into) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    yield given[0][batch], results[0][numbers.out_spec[0]]
    yield given[1][out], results[0][numbers.out_spec[1]]
    yield given[0][features], given[1][into if groups == 1 else out]


def _gather(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, left_out = (
        equation.invars[0].aval.shape,
        (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims),
    )
    kept = [place for place in range(len(shape)) if place not in left_out]
    for place, to in zip(kept, numbers.offset_dims, strict=True):
        if sizes[place] == shape[place]:
            yield given[0][place], results[0][to]
    rest = [dim for place, dim in enumerate(results[0]) if place not in numbers.offset_dims]
    yield from zip(given[1][:-1], rest, strict=False)
    axes.looked_up |= {given[0][place] for place in numbers.start_index_map}


def _concatenate(axes: Axes, equation: Any, given: list[Dims], results: list[Dims]) -> Pairs:
    for own in given:
        yield from (
            pair
            for place, pair in enumerate(zip(own, results[0], strict=True))
            if place != equation.params["dimension"]
        )


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
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "argmax",
            "argmin",
        ),
        _reduce,
    ),
}
