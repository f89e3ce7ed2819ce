"""Finds, in a traced update of an optimizer, what needs a parameter's matrix in one place: products, factorizations, and what is between them.

Everything else of an update is element-wise, or sums, which are as exact on shards.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spmd.jaxpr import equations, inner_jaxprs

ELEMENTWISE = frozenset(
    "abs add add_any and cbrt ceil clamp conj convert_element_type copy cos div eq exp exp2 expm1 floor ge gt imag integer_pow is_finite le"
    " log log1p logistic lt max min mul ne neg not or pow real reduce_precision rem round rsqrt select_n sign sin sqrt square stop_gradient"
    " sub tan tanh xor".split()
)
FACTORIZATIONS = frozenset("cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd triangular_solve tridiagonal".split())


class DependentLayersError(Exception):
    """The layers of a stack are not updated independently of each other, as far as is known."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of an update that is computed from one parameter's arrays, and needs its matrix.

    Attributes:
      path: the parameter.
      equations: their places in the program, in order.
      inputs, outputs: variables that it takes from other equations, and that others take from it.
      shared: those of the inputs that are no arrays of the parameter, such as counters.
    """

    path: str
    equations: tuple[int, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    shared: frozenset[Any]

    def program(self, found: Sequence[Any], around: Any) -> Any:
        """The region as a jaxpr; `found` are the equations of the jaxpr `around`."""
        named = {"eqns": [found[place] for place in self.equations], "debug_info": around.debug_info.with_unknown_names()}
        return around.replace(constvars=[], invars=list(self.inputs), outvars=list(self.outputs), **named)


def needs_matrix(equation: Any) -> bool:
    """Whether an equation multiplies or factorizes matrices; a product that is a scalar is a sum."""
    name = equation.primitive.name
    if name == "dot_general":
        return equation.outvars[0].aval.ndim > 0
    return name in FACTORIZATIONS or any(needs_matrix(inner) for jaxpr in inner_jaxprs(equation) for inner in equations(jaxpr))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [atom for atom in atoms if not hasattr(atom, "val")]


def find_regions(found: Sequence[Any], owners: Mapping[Any, str], outputs: Iterable[Any]) -> list[Region]:
    """The regions of a program.

    What is computed from arrays of several parameters, such as a global norm, is in none; what uses it is in another region than what it
    is computed from, so that each region can be computed at once.

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
    return [region for (path, _), places in parts.items() if (region := _region(found, path, places, owner, needed_in))]


def _region(found: Sequence[Any], path: str, places: list[int], owner: Mapping[Any, str], needed_in: Mapping[Any, set[int]]) -> Region | None:
    """The region among these equations of one parameter: what needs the matrix, what is between, and what only moves or sums elements on
    the way there, so that arrays pass its borders in the parameter's own shape."""
    seeds = {place for place in places if needs_matrix(found[place])}
    if not seeds:
        return None
    near = _reached(found, places, seeds) | _reaching(found, places, seeds)
    ends = seeds | {place for place in near if not _is_elementwise(found[place])}
    inside = sorted(_reached(found, places, ends) & _reaching(found, places, ends))
    made = {x for place in inside for x in found[place].outvars}
    inputs = dict.fromkeys(x for place in inside for x in variables(found[place].invars) if x not in made)
    outputs = [x for place in inside for x in found[place].outvars if needed_in.get(x, set()) - set(inside)]
    return Region(path, tuple(inside), tuple(inputs), tuple(outputs), frozenset(x for x in inputs if x not in owner))


def _is_elementwise(equation: Any) -> bool:
    name = equation.primitive.name
    return name in ELEMENTWISE or (name == "broadcast_in_dim" and not equation.invars[0].aval.ndim)


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


def check_layers(found: Sequence[Any], of_one: Sequence[Any], layers: int) -> None:
    """Check that equations on a stack of layers do to each layer what `of_one`, the same equations on a stack of one, do to it.

    Raises:
      DependentLayersError: they do not, or it is not known.
    """
    if len(found) != len(of_one):
        raise DependentLayersError
    for stacked, single in zip(found, of_one, strict=True):
        _check_equation(stacked, single, layers)


def layer_dim(stacked: Any, single: Any, layers: int) -> int | None:
    """The dim along which an array of a stack has its layers; None if it has none. `single` is the same array of a stack of one."""
    shape, other = stacked.aval.shape, single.aval.shape
    if len(shape) != len(other):
        raise DependentLayersError
    dims = [dim for dim, sizes in enumerate(zip(shape, other, strict=True)) if sizes[0] != sizes[1]]
    if not dims:
        return None
    if len(dims) > 1 or (shape[dims[0]], other[dims[0]]) != (layers, 1):
        raise DependentLayersError
    return dims[0]


def _check_equation(stacked: Any, single: Any, layers: int) -> None:
    name, params, atoms = stacked.primitive.name, stacked.params, (*stacked.invars, *stacked.outvars)
    others = (*single.invars, *single.outvars)
    if single.primitive.name != name or len(atoms) != len(others):
        raise DependentLayersError
    dims = [layer_dim(x, y, layers) for x, y in zip(atoms, others, strict=True)]
    same = [not hasattr(x, "val") or (hasattr(y, "val") and bool(x.val == y.val)) for x, y in zip(atoms, others, strict=True)]
    before, after = dims[: len(stacked.invars)], dims[len(stacked.invars) :]
    inside = list(inner_jaxprs(stacked))
    if not all(same) or (name == "scan" and params["length"] != single.params["length"]):
        raise DependentLayersError
    if inside:
        for inner, other in zip(inside, inner_jaxprs(single), strict=True):
            check_layers(inner.eqns, other.eqns, layers)
    elif any(dim is not None for dim in dims) and not _keeps_layers(name, params, stacked.invars, stacked.outvars[0], before, after):
        raise DependentLayersError


def _keeps_layers(name: str, params: Mapping[str, Any], inputs: Sequence[Any], output: Any, before: list, after: list) -> bool:
    """Whether an equation computes each layer of its outputs from that layer of its inputs; layers are along these dims."""
    moved = [dim for dim in before if dim is not None]
    if not moved:
        return name == "broadcast_in_dim"
    if None in after:
        return False
    dim, rank = before[0], inputs[0].aval.ndim
    if name in ELEMENTWISE or name in ("broadcast_in_dim", "squeeze", "transpose"):
        return True
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        if len(moved) == 1:
            return all(dim not in summed for dim, summed in zip(before, contracted, strict=True))
        return (before[0], before[1]) in zip(*batch, strict=True)
    if name == "reshape":
        return math.prod(inputs[0].aval.shape[:dim]) == math.prod(output.aval.shape[: after[0]])
    if name.startswith(("reduce_", "arg")):
        return all(dim not in params["axes"] for dim in moved)
    if name == "slice":
        return params["start_indices"][dim] == 0 and output.aval.shape[after[0]] == inputs[0].aval.shape[dim]
    return name in FACTORIZATIONS and all(dim is None or dim < rank - 2 for dim in before)
