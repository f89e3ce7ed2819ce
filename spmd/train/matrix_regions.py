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

from spmd.base.xla import printed
from spmd.jaxpr.inner_programs import inner_jaxprs, inner_programs, opened, repeats, with_programs
from spmd.jaxpr.primitives import Kind, known, of_kind
from spmd.jaxpr.programs import equations, is_literal, part_of, variables

MOVES = of_kind(Kind.MOVEMENT)
FACTORIZATIONS = of_kind(Kind.FACTORIZATION)
# the params that hold sizes
SIZES = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}


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
    equations: Sequence[Any], owners: Mapping[Any, str], outputs: Iterable[Any]
) -> tuple[list[Region], Mapping[Any, str]]:
    """Return the regions of a program, and the parameter of every variable that is computed from
    arrays of one.

    What is computed from arrays of several parameters, such as a global norm, is in none; what uses
    it is in another region than what it is computed from, so that the regions of one level can be
    computed at once.

    Args:
      equations: of the program.
      owners: the parameter that an input of the program belongs to, by variable.
      outputs: of the program.
    """
    owner, level_of = dict(owners), dict.fromkeys(owners, 0)
    places_by_region: dict[tuple[str, int], list[int]] = {}
    for place, equation in enumerate(equations):
        inputs = variables(equation.invars)
        paths = {owner[x] for x in inputs if x in owner}
        level = max((level_of.get(x, 0) for x in inputs), default=0)
        if len(paths) == 1:
            path = paths.pop()
            places_by_region.setdefault((path, level), []).append(place)
            owner |= dict.fromkeys(equation.outvars, path)
        level_of |= dict.fromkeys(equation.outvars, level + (len(paths) > 1))
    program = _Program(equations, owner, outputs)
    regions = []
    for (path, level), places in places_by_region.items():
        region = _region(program, path, level, places)
        if region is not None:
            regions.append(region)
    return regions, owner


class _Program:
    """The equations of a program, and what is known of its variables.

    Attributes:
      owner: the parameter of a variable that has one.
      constants: variables that depend on no input.
      made_at: the place of the equation that makes a variable.
      used_at: the places of those that use a variable; the end, for an output.
      first_alike: of every variable of no parameter that element-wise functions compute, the first
        that is computed alike. Each parameter's update may compute a scalar anew, such as the
        learning rate in the parameter's dtype.
    """

    def __init__(self, equations: Sequence[Any], owner: Mapping[Any, str], outputs: Iterable[Any]):
        self.equations, self.owner = equations, owner
        self.constants: set[Any] = set()
        self.made_at: dict[Any, int] = {}
        self.used_at: dict[Any, set[int]] = {x: {len(equations)} for x in variables(outputs)}
        self.first_alike: dict[Any, Any] = {}
        first: dict[tuple, Any] = {}
        for place, equation in enumerate(equations):
            inputs = variables(equation.invars)
            self.made_at |= dict.fromkeys(equation.outvars, place)
            for variable in inputs:
                self.used_at.setdefault(variable, set()).add(place)
            if not equation.effects and self.constants.issuperset(inputs):
                self.constants.update(equation.outvars)
            if is_elementwise(equation) and equation.outvars[0] not in owner:
                [result] = equation.outvars
                self.first_alike[result] = first.setdefault(self._computation(equation), result)

    def _computation(self, equation: Any) -> tuple:
        """Return what is equal for element-wise equations that compute the same."""
        inputs = []
        for atom in equation.invars:
            if is_literal(atom):
                inputs.append((atom.aval, np.asarray(atom.val).tobytes()))
            else:
                inputs.append(self.first_alike.get(atom, atom))
        params, aval = printed(equation.params), equation.outvars[0].aval
        return equation.primitive, params, tuple(inputs), aval


def _region(program: _Program, path: str, level: int, places: list[int]) -> Region | None:
    """Return the region among these equations of one parameter: what needs the matrix, what is
    between, sums of elements that it uses, and what moves elements on either side, so that arrays
    pass its borders in the parameter's own shape.
    """
    equations = program.equations
    matrices = {place for place in places if needs_matrix(equations[place])}
    if not matrices:
        return None
    elementwise = {place for place in places if is_elementwise(equations[place])}
    moving = {place for place in places if equations[place].primitive.name in MOVES} - elementwise
    without_sums = [place for place in places if place in matrices | moving | elementwise]
    around = _after(equations, without_sums, matrices) | _before(equations, without_sums, matrices)
    moves = moving & around
    sums = _before(equations, places, matrices) - elementwise
    region = _hull(program, path, level, places, matrices | moves | sums)
    fewer = _hull(program, path, level, places, matrices | moves)
    if fewer.equations == region.equations:
        return region
    return dataclasses.replace(region, without_sums=fewer)


def _hull(program: _Program, path: str, level: int, places: list[int], ends: set[int]) -> Region:
    """Return the region of some equations, `ends`, and of what is between them."""
    equations = program.equations
    inside = sorted(_after(equations, places, ends) & _before(equations, places, ends))
    inputs, copied = _inputs(program, path, inside)
    outputs = []
    for place in inside:
        for variable in equations[place].outvars:
            if program.used_at.get(variable, set()) - set(inside):
                outputs.append(variable)
    shared = {x: program.first_alike.get(x, x) for x in inputs if x not in program.owner}
    return Region(path, level, tuple(inside), copied, inputs, tuple(outputs), shared)


def _inputs(
    program: _Program, path: str, inside: list[int]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return what some equations take from others, and which others are copied: until no further
    one makes inputs fewer.
    """
    copied: set[int] = set()
    while True:
        chosen = [program.equations[place] for place in sorted({*inside, *copied})]
        made: set[Any] = set()
        inputs: dict[Any, None] = {}
        for equation in chosen:
            inputs |= dict.fromkeys(x for x in variables(equation.invars) if x not in made)
            made.update(equation.outvars)
        arrays = {x for x in inputs if x.aval.ndim}
        more = set()
        for variable in inputs:
            if variable not in program.made_at:
                continue
            place = program.made_at[variable]
            equation = program.equations[place]
            sources = {x for x in variables(equation.invars) if x.aval.ndim}
            is_of_inputs = bool(sources) and sources <= arrays - {variable}
            is_computed_again = (
                program.owner.get(variable) == path and is_of_inputs and is_elementwise(equation)
            )
            if variable in program.constants or is_computed_again:
                more.add(place)
        if not more:
            return tuple(inputs), tuple(sorted(copied))
        copied |= more


def is_elementwise(equation: Any) -> bool:
    """Return whether an equation is element-wise, or makes an array of a scalar."""
    name = equation.primitive.name
    if name == "broadcast_in_dim":
        return not equation.invars[0].aval.ndim
    return known(name).is_elementwise


def _after(equations: Sequence[Any], places: Sequence[int], start: set[int]) -> set[int]:
    """Return those of `places` that are in `start`, or use what is computed there."""
    after, made = set(), set()
    for place in places:
        if place in start or not made.isdisjoint(variables(equations[place].invars)):
            after.add(place)
            made.update(equations[place].outvars)
    return after


def _before(equations: Sequence[Any], places: Sequence[int], end: set[int]) -> set[int]:
    """Return those of `places` that are in `end`, or compute what is used there."""
    before, used = set(), set()
    for place in reversed(places):
        if place in end or not used.isdisjoint(equations[place].outvars):
            before.add(place)
            used.update(variables(equations[place].invars))
    return before


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

    if len(stacked.eqns) != len(other.eqns):
        raise DependentLayersError
    if _layer_dims(stacked.constvars, other.constvars, layers) != [None] * len(stacked.constvars):
        raise DependentLayersError
    of_one = []
    for equation, twin in zip(stacked.eqns, other.eqns, strict=True):
        params = _params_of_one_layer(equation, twin, layers)
        inputs = renamed(equation.invars, twin.invars)
        outputs = renamed(equation.outvars, twin.outvars)
        of_one.append(equation.replace(invars=inputs, outvars=outputs, params=params))
    return stacked.replace(
        eqns=of_one,
        invars=renamed(stacked.invars, other.invars),
        outvars=renamed(stacked.outvars, other.outvars),
    )


def layer_dim(stacked: Any, other: Any, layers: int) -> int | None:
    """Return the dim along which an array of a stack has its layers, by the same array of a stack
    of one more; None if it has none.

    Raises:
      DependentLayersError: the two arrays do not correspond.
    """
    if is_literal(stacked):
        if not is_literal(other) or bool(stacked.val != other.val):
            raise DependentLayersError
        return None
    shape, longer = stacked.aval.shape, other.aval.shape
    if len(shape) != len(longer):
        raise DependentLayersError
    pairs = zip(shape, longer, strict=True)
    dims = [dim for dim, (size, more) in enumerate(pairs) if size != more]
    if not dims:
        return None
    # a dim may have several entries for each layer
    if len(dims) > 1 or shape[dims[0]] * (layers + 1) != longer[dims[0]] * layers:
        raise DependentLayersError
    return dims[0]


def _layer_dims(atoms: Sequence[Any], others: Sequence[Any], layers: int) -> list[int | None]:
    """Return the `layer_dim` of each variable."""
    return [layer_dim(*pair, layers) for pair in zip(atoms, others, strict=True)]


def _of_one(sizes: Sequence[int], dim: int, layers: int) -> tuple[int, ...]:
    return (*sizes[:dim], sizes[dim] // layers, *sizes[dim + 1 :])


def _params_of_one_layer(equation: Any, twin: Any, layers: int) -> dict[str, Any]:
    """Return an equation's params for one layer, if it computes each layer from the same layer of
    its inputs.

    Raises:
      DependentLayersError: it does not, or it is not known.
    """
    name, params = equation.primitive.name, dict(equation.params)
    before = _layer_dims(equation.invars, twin.invars, layers)
    after = _layer_dims(equation.outvars, twin.outvars, layers)
    if twin.primitive is not equation.primitive or repeats(equation) != repeats(twin):
        raise DependentLayersError

    def inside(_: str, program: Any, other: Any) -> Any:
        return of_one_layer(opened(program), opened(other), layers)

    if inner_programs(equation):
        return with_programs(equation, inside, twin).params
    if {*before, *after} == {None}:
        return params
    if not _keeps_layers(name, params, equation.invars, equation.outvars[0], before, after):
        raise DependentLayersError
    dim = after[0]
    if name in SIZES and dim is not None:
        params[SIZES[name]] = _of_one(params[SIZES[name]], dim, layers)
    return params


def _keeps_layers(
    name: str,
    params: Mapping[str, Any],
    inputs: Sequence[Any],
    output: Any,
    before: list,
    after: list,
) -> bool:
    """Return whether an equation computes each layer of its outputs from that layer of its inputs;
    layers are along these dims.
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
        entries_before = math.prod(inputs[0].aval.shape[:dim])
        return in_order and entries_before == math.prod(output.aval.shape[: after[0]])
    if "axes" in params and name.startswith(("reduce_", "arg")):  # and not reduce_window
        return all(dim not in params["axes"] for dim in moved)
    if name == "slice":
        return (
            params["start_indices"][dim] == 0
            and output.aval.shape[after[0]] == inputs[0].aval.shape[dim]
        )
    return name in FACTORIZATIONS and all(dim is None or dim < rank - 2 for dim in before)
