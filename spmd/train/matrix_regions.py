"""Finds in a traced update of an optimizer what needs a parameter's matrix in one place: products,
factorizations, what is between them.

Everything else of an update is element-wise, or sums, which are as exact on shards.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Var

from spmd.jaxpr.inner_programs import inner_jaxprs, inner_programs, opened, with_programs
from spmd.jaxpr.primitives import Kind, known, of_kind
from spmd.jaxpr.programs import equations, part_of, variables
from spmd.xla import printed

MOVES, FACTORIZATIONS = of_kind(Kind.MOVEMENT), of_kind(Kind.FACTORIZATION)


class DependentLayersError(Exception):
    """The layers of a stack are not updated independently of each other, as far as is known."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of an update that is computed from one parameter's arrays, and needs its matrix.

    Attributes:
      path: the parameter.
      level: how many values of several parameters follow one another before it. Regions of one
        level use nothing of each other.
      equations: their places in the program, in order.
      copied: those of equations that it computes as well, because their results need not be sent
        then: constants, and element-wise functions of other inputs.
      inputs, outputs: variables that it takes from other equations, and that others take from it.
      shared: those of the inputs that are no arrays of the parameter, such as counters; of each the
        first that is computed like it.
      without_sums: the region without sums that it begins with, such as a norm; None if it has
        none.
    """

    path: str
    level: int
    equations: tuple[int, ...]
    copied: tuple[int, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    shared: Mapping[Any, Any]
    without_sums: "Region | None" = None

    @property
    def places(self) -> list[int]:
        """Those of all its equations."""
        return sorted({*self.equations, *self.copied})

    def program(self, found: Sequence[Any], around: Any) -> Any:
        """The region as a jaxpr; `found` are the equations of the jaxpr `around`."""
        inside = [found[place] for place in self.places]
        return part_of(around, inside, self.inputs, self.outputs)


def needs_matrix(equation: Any) -> bool:
    """Whether an equation multiplies or factorizes matrices; a product that is a scalar is a
    sum.
    """
    name = equation.primitive.name
    if name == "dot_general":
        return equation.outvars[0].aval.ndim > 0
    return name in FACTORIZATIONS or any(
        needs_matrix(inner) for jaxpr in inner_jaxprs(equation) for inner in equations(jaxpr)
    )


def find_regions(
    found: Sequence[Any], owners: Mapping[Any, str], outputs: Iterable[Any]
) -> tuple[list[Region], Mapping[Any, str]]:
    """The regions of a program, and the parameter of every variable that is computed from arrays of
    one.

    What is computed from arrays of several parameters, such as a global norm, is in none; what uses
    it is in another region than what it is computed from, so that the regions of one level can be
    computed at once.

    Args:
      found: the equations of the program.
      owners: the parameter that an input of the program belongs to, by variable.
      outputs: of the program.
    """
    owner, stage = dict(owners), dict.fromkeys(owners, 0)
    parts: dict[tuple[str, int], list[int]] = {}
    for place, equation in enumerate(found):
        inputs = variables(equation.invars)
        paths = {owner[x] for x in inputs if x in owner}
        level = max((stage.get(x, 0) for x in inputs), default=0)
        if len(paths) == 1:
            path = paths.pop()
            parts.setdefault((path, level), []).append(place)
            owner |= dict.fromkeys(equation.outvars, path)
        stage |= dict.fromkeys(equation.outvars, level + (len(paths) > 1))
    needed_in: dict[Any, set[int]] = {x: {len(found)} for x in variables(outputs)}
    for place, equation in enumerate(found):
        for x in variables(equation.invars):
            needed_in.setdefault(x, set()).add(place)
    made_at = {x: place for place, equation in enumerate(found) for x in equation.outvars}
    constant: set[Any] = set()
    for equation in found:
        if not equation.effects and constant.issuperset(variables(equation.invars)):
            constant.update(equation.outvars)
    known = _Known(found, owner, constant, made_at, needed_in, _alike(found, owner))
    return [
        region
        for (path, level), places in parts.items()
        if (region := _region(known, path, level, places))
    ], owner


@dataclasses.dataclass(frozen=True)
class _Known:
    """A program: its equations, the parameter of each variable that has one, constants, who makes
    and uses a variable, and `_alike`.
    """

    found: Sequence[Any]
    owner: Mapping[Any, str]
    constant: set[Any]
    made_at: Mapping[Any, int]
    needed_in: Mapping[Any, set[int]]
    alike: Mapping[Any, Any]


def _alike(found: Sequence[Any], owner: Mapping[Any, str]) -> dict[Any, Any]:
    """Of every variable of no parameter that element-wise functions compute, the first that is
    computed alike.

    Each parameter's update may compute a scalar anew, such as the learning rate in the parameter's
    dtype.
    """
    alike: dict[Any, Any] = {}
    first: dict[tuple, Any] = {}
    for equation in found:
        if _is_elementwise(equation) and equation.outvars[0] not in owner:
            inputs = tuple(
                (x.aval, np.asarray(x.val).tobytes()) if hasattr(x, "val") else alike.get(x, x)
                for x in equation.invars
            )
            [x] = equation.outvars
            alike[x] = first.setdefault(
                (equation.primitive, printed(equation.params), inputs, x.aval), x
            )
    return alike


def _region(known: _Known, path: str, level: int, places: list[int]) -> Region | None:
    """The region among these equations of one parameter: what needs the matrix, what is between,
    sums of elements that it uses, and what moves elements on either side, so that arrays pass its
    borders in the parameter's own shape.
    """
    found = known.found
    seeds = {place for place in places if needs_matrix(found[place])}
    if not seeds:
        return None
    moving = {
        place
        for place in places
        if found[place].primitive.name in MOVES and not _is_elementwise(found[place])
    }
    plain = [place for place in places if place in seeds | moving or _is_elementwise(found[place])]
    # with no sum on the way
    moves = moving & (_reaching(found, plain, seeds) | _reached(found, plain, seeds))
    sums = {place for place in _reaching(found, places, seeds) if not _is_elementwise(found[place])}
    region, fewer = (
        _hull(known, path, level, places, ends) for ends in (seeds | moves | sums, seeds | moves)
    )
    return (
        region
        if fewer.equations == region.equations
        else dataclasses.replace(region, without_sums=fewer)
    )


def _hull(known: _Known, path: str, level: int, places: list[int], ends: set[int]) -> Region:
    """The region of these equations, and of what is between them."""
    found = known.found
    inside = sorted(_reached(found, places, ends) & _reaching(found, places, ends))
    inputs, copied = _inputs(known, path, inside)
    outputs = [
        x
        for place in inside
        for x in found[place].outvars
        if known.needed_in.get(x, set()) - set(inside)
    ]
    shared = {x: known.alike.get(x, x) for x in inputs if x not in known.owner}
    return Region(path, level, tuple(inside), copied, inputs, tuple(outputs), shared)


def _inputs(known: _Known, path: str, inside: list[int]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """What these equations take from others, and which others are copied: until no further one
    makes inputs fewer.
    """
    copied: set[int] = set()
    while True:
        places = sorted({*inside, *copied})
        made = {x for place in places for x in known.found[place].outvars}
        inputs = dict.fromkeys(
            x for place in places for x in variables(known.found[place].invars) if x not in made
        )
        arrays = {x for x in inputs if x.aval.ndim}
        more = set()
        for x in inputs:
            place = known.made_at.get(x)
            if place is None:
                continue
            equation = known.found[place]
            taken = {y for y in variables(equation.invars) if y.aval.ndim}
            of_others = (
                known.owner.get(x) == path
                and taken
                and taken <= arrays - {x}
                and _is_elementwise(equation)
            )
            if x in known.constant or of_others:
                more.add(place)
        if not more:
            return tuple(inputs), tuple(sorted(copied))
        copied |= more


def _is_elementwise(equation: Any) -> bool:
    name = equation.primitive.name
    if name == "broadcast_in_dim":
        return not equation.invars[0].aval.ndim
    return known(name).is_elementwise


def _reached(found: Sequence[Any], places: Sequence[int], start: set[int]) -> set[int]:
    """Those of `places` that are in `start`, or use what comes of it."""
    reached, made = set(), set()
    for place in places:
        if place in start or not made.isdisjoint(variables(found[place].invars)):
            reached.add(place)
            made.update(found[place].outvars)
    return reached


def _reaching(found: Sequence[Any], places: Sequence[int], end: set[int]) -> set[int]:
    """Those of `places` that are in `end`, or that it uses."""
    reaching, used = set(), set()
    for place in reversed(places):
        if place in end or not used.isdisjoint(found[place].outvars):
            reaching.add(place)
            used.update(variables(found[place].invars))
    return reaching


def of_one_layer(stacked: Any, other: Any, layers: int) -> Any:
    """The program of one layer, of that of a stack: the same jaxpr on arrays with one layer.

    A dim may have several entries for each layer, one layer after the other, as where the experts
    of all layers are one batch.

    Args:
      stacked: a jaxpr on arrays with this many layers.
      other: the same one on arrays with one layer more, which shows the dims of layers.

    Raises:
      DependentLayersError: what it computes of a layer depends on the others, or it is not known.
    """
    names: dict[Any, Any] = {}

    def single(x: Any, y: Any) -> Any:
        dim = layer_dim(x, y, layers)
        if dim is None or x in names:
            return names.get(x, x) if dim is not None else x
        names[x] = Var(x.aval.update(shape=_of_one(x.aval.shape, dim, layers)))
        return names[x]

    def renamed(atoms: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        return [single(x, y) for x, y in zip(atoms, others, strict=True)]

    constants = zip(stacked.constvars, other.constvars, strict=True)
    if len(stacked.eqns) != len(other.eqns) or any(
        layer_dim(*pair, layers) is not None for pair in constants
    ):
        raise DependentLayersError
    found = []
    for equation, twin in zip(stacked.eqns, other.eqns, strict=True):
        params = _params_of_one_layer(equation, twin, layers)
        inputs, outputs = (
            renamed(equation.invars, twin.invars),
            renamed(equation.outvars, twin.outvars),
        )
        found.append(equation.replace(invars=inputs, outvars=outputs, params=params))
    return stacked.replace(
        eqns=found,
        invars=renamed(stacked.invars, other.invars),
        outvars=renamed(stacked.outvars, other.outvars),
    )


def layer_dim(stacked: Any, other: Any, layers: int) -> int | None:
    """The dim along which an array of a stack has its layers, by the same array of a stack of one
    more; None if it has none.
    """
    if hasattr(stacked, "val"):
        if not hasattr(other, "val") or bool(stacked.val != other.val):
            raise DependentLayersError
        return None
    shape, longer = stacked.aval.shape, other.aval.shape
    dims = [
        dim for dim, sizes in enumerate(zip(shape, longer, strict=False)) if sizes[0] != sizes[1]
    ]
    if len(shape) == len(longer) and not dims:
        return None
    if (
        len(shape) != len(longer)
        or len(dims) > 1
        or shape[dims[0]] * (layers + 1) != longer[dims[0]] * layers
    ):
        raise DependentLayersError
    return dims[0]


def _of_one(sizes: Sequence[int], dim: int, layers: int) -> tuple[int, ...]:
    return (*sizes[:dim], sizes[dim] // layers, *sizes[dim + 1 :])


def _params_of_one_layer(equation: Any, twin: Any, layers: int) -> dict[str, Any]:
    """An equation's parameters for one layer, if it computes each layer from the same layer of its
    inputs.
    """
    name, params = equation.primitive.name, dict(equation.params)
    before, after = (
        [layer_dim(x, y, layers) for x, y in zip(atoms, others, strict=True)]
        for atoms, others in ((equation.invars, twin.invars), (equation.outvars, twin.outvars))
    )
    if twin.primitive is not equation.primitive or (
        name == "scan" and params["length"] != twin.params["length"]
    ):
        raise DependentLayersError

    if inner_programs(equation):
        return with_programs(
            equation,
            lambda _, program, other: of_one_layer(opened(program), opened(other), layers),
            twin,
        ).params
    if {*before, *after} == {None}:
        return params
    if not _keeps_layers(name, params, equation.invars, equation.outvars[0], before, after):
        raise DependentLayersError
    resized = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}.get(
        name
    )
    dim = after[0]
    return (
        params
        if resized is None or dim is None
        else params | {resized: _of_one(params[resized], dim, layers)}
    )


def _keeps_layers(
    name: str,
    params: Mapping[str, Any],
    inputs: Sequence[Any],
    output: Any,
    before: list,
    after: list,
) -> bool:
    """Whether an equation computes each layer of its outputs from that layer of its inputs; layers
    are along these dims.
    """
    moved = [dim for dim in before if dim is not None]
    if not moved:
        return name == "broadcast_in_dim"
    if None in after:
        return False
    dim, rank = before[0], inputs[0].aval.ndim
    if known(name).is_elementwise or name in ("broadcast_in_dim", "squeeze", "transpose"):
        return True
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        if len(moved) == 1:
            return all(dim not in summed for dim, summed in zip(before, contracted, strict=True))
        return (before[0], before[1]) in zip(*batch, strict=True)
    if name == "reshape":
        in_order = params["dimensions"] in (None, tuple(range(rank)))  # and not column-major
        return in_order and math.prod(inputs[0].aval.shape[:dim]) == math.prod(
            output.aval.shape[: after[0]]
        )
    if "axes" in params and name.startswith(("reduce_", "arg")):  # and not reduce_window
        return all(dim not in params["axes"] for dim in moved)
    if name == "slice":
        return (
            params["start_indices"][dim] == 0
            and output.aval.shape[after[0]] == inputs[0].aval.shape[dim]
        )
    return name in FACTORIZATIONS and all(dim is None or dim < rank - 2 for dim in before)
