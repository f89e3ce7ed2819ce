"""The parts of an optimizer's traced update that need a parameter's matrix in one place: products,
factorizations, and equations between them.

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
# the params of equations that hold sizes of an array
SIZES = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}


class DependentLayersError(Exception):
    """The layers of a stack are not updated independently of each other, as far as is known."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of an update that is computed from one parameter's arrays, and needs its matrix.

    Attributes:
      path: the parameter.
      level: the number of values of several parameters that follow one another before it. Regions
        of one level use nothing of each other.
      equations: places of the region's equations in the program, in order.
      copied: places of equations that it computes as well, because their results need not be sent
        then: constants, and element-wise functions of other inputs.
      inputs: variables that it uses of other equations.
      outputs: variables that other equations use of it.
      shared: inputs that are no arrays of the parameter, such as counters; by each, the first
        variable that is computed alike.
      without_sums: the region without the sums at its beginning, such as a norm; None if it has
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
        """The places of all its equations, copied ones too."""
        return sorted({*self.equations, *self.copied})

    def program(self, jaxpr: Any) -> Any:
        """Return the region, a part of a jaxpr, as a jaxpr."""
        inside = [jaxpr.eqns[place] for place in self.places]
        return part_of(jaxpr, inside, self.inputs, self.outputs)


def needs_matrix(equation: Any) -> bool:
    """Return whether an equation multiplies or factorizes matrices; a product that is a scalar is
    a sum.
    """
    name = equation.primitive.name
    if name == "dot_general":
        return equation.outvars[0].aval.ndim > 0
    if name in FACTORIZATIONS:
        return True
    return any(any(map(needs_matrix, equations(jaxpr))) for jaxpr in inner_jaxprs(equation))


def find_regions(
    equations: Sequence[Any], owners: Mapping[Any, str], outputs: Iterable[Any]
) -> tuple[list[Region], Mapping[Any, str]]:
    """Return the regions of a program, and the parameter of every variable that is computed from
    arrays of one.

    A value of arrays of several parameters, such as a global norm, is in no region. Equations that
    use it are in another region than those that it is computed from, so that the regions of one
    level can be computed at once.

    Args:
      equations: the equations of the program.
      owners: the parameter that an input of the program belongs to, by variable.
      outputs: variables that the program returns.
    """
    owner = dict(owners)
    levels = dict.fromkeys(owners, 0)
    places_by_region: dict[tuple[str, int], list[int]] = {}
    for place, equation in enumerate(equations):
        inputs = variables(equation.invars)
        paths = {owner[x] for x in inputs if x in owner}
        level = max((levels.get(x, 0) for x in inputs), default=0)
        if len(paths) == 1:
            path = paths.pop()
            places_by_region.setdefault((path, level), []).append(place)
            owner |= dict.fromkeys(equation.outvars, path)
        levels |= dict.fromkeys(equation.outvars, level + (len(paths) > 1))
    program = _Program(equations, owner, outputs)
    regions = []
    for (path, level), places in places_by_region.items():
        region = _region(program, path, level, places)
        if region is not None:
            regions.append(region)
    return regions, owner


class _Program:
    """The equations of a program, and facts of its variables.

    Attributes:
      owner: the parameter of a variable that has one.
      constants: variables that depend on no input.
      made_at: the place of the equation that makes a variable.
      used_at: the places of equations that use a variable; the end of the program, for an output.
      first_alike: by every variable of no parameter that element-wise functions compute, the first
        that is computed alike. Each parameter's update may compute a scalar anew, such as the
        learning rate in the parameter's dtype.
    """

    def __init__(self, equations: Sequence[Any], owner: Mapping[Any, str], outputs: Iterable[Any]):
        self.equations = equations
        self.owner = owner
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
            # an equation with effects must not be copied
            if not equation.effects and self.constants.issuperset(inputs):
                self.constants.update(equation.outvars)
            if is_elementwise(equation) and equation.outvars[0] not in owner:
                [result] = equation.outvars
                self.first_alike[result] = first.setdefault(self._computation(equation), result)

    def _computation(self, equation: Any) -> tuple:
        """Return a key that is equal for element-wise equations that compute the same."""
        inputs = []
        for atom in equation.invars:
            if is_literal(atom):
                inputs.append((atom.aval, np.asarray(atom.val).tobytes()))
            else:
                inputs.append(self.first_alike.get(atom, atom))
        params = printed(equation.params)
        return equation.primitive, params, tuple(inputs), equation.outvars[0].aval


def _region(program: _Program, path: str, level: int, places: list[int]) -> Region | None:
    """Return the region among these equations of one parameter: those that need the matrix, those
    between, sums of elements that they use, and movements of elements on either side, so that
    arrays pass the region's borders in the shape of the parameter.
    """
    equations = program.equations
    matrices = {place for place in places if needs_matrix(equations[place])}
    if not matrices:
        return None
    elementwise = {place for place in places if is_elementwise(equations[place])}
    moving = {place for place in places if equations[place].primitive.name in MOVES} - elementwise
    without_sums = [place for place in places if place in matrices | moving | elementwise]
    connected = _after(equations, without_sums, matrices)
    connected |= _before(equations, without_sums, matrices)
    moves = moving & connected
    sums = _before(equations, places, matrices) - elementwise
    region = _hull(program, path, level, places, matrices | moves | sums)
    fewer = _hull(program, path, level, places, matrices | moves)
    if fewer.equations == region.equations:
        return region
    return dataclasses.replace(region, without_sums=fewer)


def _hull(program: _Program, path: str, level: int, places: list[int], ends: set[int]) -> Region:
    """Return the region of some equations, `ends`, and of those between them."""
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
    """Return the variables that some equations use of others, and the places of others to copy:
    until no further copy makes inputs fewer.
    """
    copied: set[int] = set()
    while True:
        made: set[Any] = set()
        inputs: dict[Any, None] = {}
        for place in sorted({*inside, *copied}):
            equation = program.equations[place]
            inputs |= dict.fromkeys(x for x in variables(equation.invars) if x not in made)
            made.update(equation.outvars)
        more = set()
        for variable in inputs:
            if _can_be_copied(program, path, variable, inputs):
                more.add(program.made_at[variable])
        if not more:
            return tuple(inputs), tuple(sorted(copied))
        copied |= more


def _can_be_copied(program: _Program, path: str, variable: Any, inputs: Iterable[Any]) -> bool:
    """Return whether a region of a parameter can compute one of its inputs: a constant, or an
    element-wise function of its other inputs.
    """
    if variable not in program.made_at:
        return False
    if variable in program.constants:
        return True
    equation = program.equations[program.made_at[variable]]
    if program.owner.get(variable) != path or not is_elementwise(equation):
        return False
    arrays = {x for x in inputs if x.aval.ndim and x is not variable}
    sources = {x for x in variables(equation.invars) if x.aval.ndim}
    return bool(sources) and sources <= arrays


def is_elementwise(equation: Any) -> bool:
    """Return whether an equation is element-wise, or makes an array of a scalar."""
    name = equation.primitive.name
    if name == "broadcast_in_dim":
        return not equation.invars[0].aval.ndim
    return known(name).is_elementwise


def _after(equations: Sequence[Any], places: Sequence[int], start: set[int]) -> set[int]:
    """Return those of `places` that are in `start`, or use values that are computed there."""
    after: set[int] = set()
    made: set[Any] = set()
    for place in places:
        if place in start or not made.isdisjoint(variables(equations[place].invars)):
            after.add(place)
            made.update(equations[place].outvars)
    return after


def _before(equations: Sequence[Any], places: Sequence[int], end: set[int]) -> set[int]:
    """Return those of `places` that are in `end`, or compute values that are used there."""
    before: set[int] = set()
    used: set[Any] = set()
    for place in reversed(places):
        if place in end or not used.isdisjoint(equations[place].outvars):
            before.add(place)
            used.update(variables(equations[place].invars))
    return before


def of_one_layer(stacked: Any, other: Any, layers: int) -> Any:
    """Return the program of one layer from that of a stack: the same jaxpr on arrays with one
    layer.

    A dim may have several entries for each layer, one layer after the other, as where the experts
    of all layers are one batch.

    Args:
      stacked: a jaxpr on arrays with this many layers.
      other: the same jaxpr on arrays with one layer more, which shows the dims of layers.
      layers: the number of layers of `stacked`.

    Raises:
      DependentLayersError: a layer of its results depends on other layers, or it is not known.
    """
    variables_of_one: dict[Any, Any] = {}

    def single(atom: Any, twin: Any) -> Any:
        dim = layer_dim(atom, twin, layers)
        if dim is None:
            return atom
        # a variable keeps its aval, so another shape is another variable
        if atom not in variables_of_one:
            shape = _of_one(atom.aval.shape, dim, layers)
            variables_of_one[atom] = Var(atom.aval.update(shape=shape))
        return variables_of_one[atom]

    def singles(atoms: Sequence[Any], twins: Sequence[Any]) -> list[Any]:
        return [single(atom, twin) for atom, twin in zip(atoms, twins, strict=True)]

    if len(stacked.eqns) != len(other.eqns):
        raise DependentLayersError
    if _layer_dims(stacked.constvars, other.constvars, layers) != [None] * len(stacked.constvars):
        raise DependentLayersError
    of_one = []
    for equation, twin in zip(stacked.eqns, other.eqns, strict=True):
        params = _params_of_one_layer(equation, twin, layers)
        inputs = singles(equation.invars, twin.invars)
        outputs = singles(equation.outvars, twin.outvars)
        of_one.append(equation.replace(invars=inputs, outvars=outputs, params=params))
    return stacked.replace(
        eqns=of_one,
        invars=singles(stacked.invars, other.invars),
        outvars=singles(stacked.outvars, other.outvars),
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
    """Return the sizes of one layer."""
    return (*sizes[:dim], sizes[dim] // layers, *sizes[dim + 1 :])


def _params_of_one_layer(equation: Any, twin: Any, layers: int) -> dict[str, Any]:
    """Return an equation's params for one layer, if it computes each layer from the same layer of
    its inputs.

    Raises:
      DependentLayersError: it does not, or it is not known.
    """
    name = equation.primitive.name
    params = dict(equation.params)
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
    # these equations have the sizes of their results as params
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
    layer_dims = [dim for dim in before if dim is not None]
    if not layer_dims:
        return name == "broadcast_in_dim"
    if None in after:
        return False
    dim = before[0]
    shape = inputs[0].aval.shape
    if known(name).is_elementwise or name in ("broadcast_in_dim", "squeeze", "transpose"):
        return True
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        if len(layer_dims) == 1:
            return all(dim not in summed for dim, summed in zip(before, contracted, strict=True))
        return (before[0], before[1]) in zip(*batch, strict=True)
    if name == "reshape":
        # `dimensions` may be those of a column-major order
        in_order = params["dimensions"] in (None, tuple(range(len(shape))))
        return in_order and math.prod(shape[:dim]) == math.prod(output.aval.shape[: after[0]])
    # `reduce_window` has no `axes`
    if "axes" in params and name.startswith(("reduce_", "arg")):
        return set(layer_dims).isdisjoint(params["axes"])
    if name == "slice":
        has_all = output.aval.shape[after[0]] == shape[dim]
        return has_all and params["start_indices"][dim] == 0
    # the last two dims are those of a matrix
    return name in FACTORIZATIONS and max(layer_dims) < len(shape) - 2
