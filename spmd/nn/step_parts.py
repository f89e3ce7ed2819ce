"""The step of a loop over time in two parts: what can be computed for all steps at once, before the
loop, and what depends on the step before.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.jaxpr.inner_programs import Scan, inner_jaxprs, opened
from spmd.jaxpr.primitives import Kind, known
from spmd.jaxpr.programs import (
    equations,
    evaluated,
    inlined,
    is_literal,
    part_of,
    variables,
    without_unused,
)

# equations of a jit that is looked through: functions of jax.numpy are such
SMALL = 32
# What a compiler fuses into the operation that uses it.
CHEAP = (Kind.ELEMENTWISE, Kind.MOVEMENT, Kind.CREATION)
# What can be computed for all steps at once. Random numbers are not among it: those of some
# generators depend on the shape that is drawn.
MOVABLE = (
    *CHEAP,
    Kind.CUMULATIVE,
    Kind.FACTORIZATION,
    Kind.LOOKUP,
    Kind.ORDER,
    Kind.PRODUCT,
    Kind.REDUCTION,
    Kind.TRANSFORM,
    Kind.WINDOW,
)
SUMS = ("add", "add_any", "sub")
# A result with more than this many times the bytes of a step's inputs and of what is carried is not
# computed for all steps at once, such as the scores of attention inside of a cell.
LARGE = 16
# What a value depends on: nothing that changes from step to step, the step's inputs, the step
# before.
CONSTANT, INPUT, CARRY = range(3)


@dataclasses.dataclass(frozen=True)
class StepParts:
    """A step, without what is computed before the loop over it.

    Attributes:
      before: the program from constants of the scan, carried values that never change, and a step's
        inputs, to `constants` and `inputs`.
      constants, inputs: variables that the loop reads: the same in every step, or different.
      carried, next_carried: the carried variables that change, and what they become.
      outputs: of a step.
      loop: the equations that stay.
      weights: by the number of such an equation, the place of a constant among its inputs in which
        it is linear: its gradient is computed after the loop, from all steps.
      totals: products, or sums with them, that the forward pass saves for the backward pass, beside
        what is carried. Others are computed again.
      total_of: by the number of a product, the one of `totals` to which it is added.
      factors: by the number of a product with a weight, the program from `carried` to its other
        input, where that is quickly computed again.
      addends: places of inputs that are only added to products: the backward pass does not need
        them.
      output_of: by the place of a carried value, that of the output which is its next value.
      fixed: the places of carried values that never change; `changing`: those of the others.
      stuck: names of operations that stay though they do not depend on the step before.
    """

    before: Any
    constants: tuple[Any, ...]
    inputs: tuple[Any, ...]
    carried: tuple[Any, ...]
    next_carried: tuple[Any, ...]
    outputs: tuple[Any, ...]
    loop: tuple[Any, ...]
    weights: Mapping[int, int]
    totals: tuple[Any, ...]
    total_of: Mapping[int, Any]
    factors: Mapping[int, Any]
    addends: frozenset[int]
    output_of: Mapping[int, int]
    fixed: tuple[int, ...]
    changing: tuple[int, ...]
    stuck: tuple[str, ...]

    @property
    def is_recurrence(self) -> bool:
        """Return whether the loop multiplies a carried value and a constant, such as a recurrent
        weight; a loop over layers does not, each of which has weights of its own.
        """
        return not self.weights.keys().isdisjoint(self.total_of)

    def evaluate(
        self,
        carry: Sequence[Any],
        inputs: Sequence[Any],
        constants: Sequence[Any],
        compute: Callable[[int, Any, list[Any]], Sequence[Any]],
    ) -> dict[Any, Any]:
        """Return the value of each variable of the loop in one step.

        Args:
          compute: the outputs of an equation, from its number, itself and its inputs.
        """
        values = dict(zip(self.carried, carry, strict=True))
        values |= zip(self.inputs, inputs, strict=True)
        values |= zip(self.constants, constants, strict=True)
        for number, equation in enumerate(self.loop):
            arguments = values_of(values, equation.invars)
            values |= zip(equation.outvars, compute(number, equation, arguments), strict=True)
        return values


def values_of(values: Mapping[Any, Any], atoms: Iterable[Any]) -> list[Any]:
    """Return the values of variables and literals."""
    results = []
    for atom in atoms:
        if is_literal(atom):
            # A Python number would change the type of what a loop carries.
            results.append(np.asarray(atom.val, atom.aval.dtype))
        else:
            results.append(values[atom])
    return results


def split_step(scan: Scan) -> StepParts | None:
    """Return the parts of the step of a loop; None if nothing can be taken out of the loop."""
    jaxpr = opened(scan.program)
    flat, outputs = inlined(jaxpr, SMALL)
    # without those that have neither outputs nor effects
    flat = without_unused(flat, outputs)
    if any(equation.effects for equation in flat):
        return None
    flat, outputs = _with_split_products(jaxpr, scan, flat, outputs)
    levels, stuck = _levels(jaxpr, scan, flat, outputs)

    def level(equation: Any) -> int:
        return max([CONSTANT, *(levels[x] for x in equation.outvars)])

    fixed = tuple(_fixed(jaxpr, scan, outputs))
    changing = tuple(place for place in range(scan.carried) if place not in fixed)
    if not changing:
        return None
    results = [*(outputs[place] for place in changing), *outputs[scan.carried :]]
    moved = _moved(flat, levels)
    # What only repeats a constant is left to the loop: it is not worth its memory.
    early = [x for x in flat if level(x) == CONSTANT and not _repeats(x)]
    is_before = {id(equation) for equation in [*early, *moved]}
    loop = without_unused([x for x in flat if id(x) not in is_before], results)
    read = _read(loop, results)
    constants = [x for x in read if levels[x] == CONSTANT]
    inputs = [x for x in read if levels[x] == INPUT]
    weights = dict(_weights(loop, levels, constants))
    if not weights and all(map(_is_cheap, moved)):
        return None
    before = [x for x in flat if level(x) == CONSTANT or id(x) in is_before]
    carried = jaxpr.invars[scan.constants : scan.constants + scan.carried]
    arguments = [
        *jaxpr.constvars,
        *jaxpr.invars[: scan.constants],
        *(carried[place] for place in fixed),
        *jaxpr.invars[scan.constants + scan.carried :],
    ]
    paths = dict(_sums(loop, results))
    next_carried = [outputs[place] for place in changing]
    step_outputs = outputs[scan.carried :]
    output_of = {
        place: step_outputs.index(variable)
        for place, variable in enumerate(next_carried)
        if not is_literal(variable) and variable in step_outputs
    }
    return StepParts(
        before=part_of(
            jaxpr,
            without_unused(before, [*constants, *inputs]),
            arguments,
            [*constants, *inputs],
        ),
        constants=tuple(constants),
        inputs=tuple(inputs),
        carried=tuple(carried[place] for place in changing),
        next_carried=tuple(next_carried),
        outputs=tuple(step_outputs),
        loop=tuple(loop),
        weights=weights,
        totals=tuple(dict.fromkeys(path[-1] for path in paths.values())),
        total_of={number: path[-1] for number, path in paths.items()},
        factors=dict(_factors(jaxpr, loop, weights, [carried[place] for place in changing])),
        addends=frozenset(_addends(loop, inputs, paths.values(), results)),
        output_of=output_of,
        fixed=fixed,
        changing=changing,
        stuck=tuple(dict.fromkeys(stuck)),
    )


def _fixed(jaxpr: Any, scan: Scan, outputs: Sequence[Any]) -> Iterator[int]:
    """Yield the places of carried values that no step changes."""
    for place in range(scan.carried):
        if outputs[place] is jaxpr.invars[scan.constants + place]:
            yield place


def _levels(
    jaxpr: Any, scan: Scan, flat: Sequence[Any], outputs: Sequence[Any]
) -> tuple[dict[Any, int], list[str]]:
    """Return what each variable depends on, and the names of operations that must stay in the loop
    though they do not depend on the step before.
    """
    levels = dict.fromkeys(jaxpr.constvars, CONSTANT)
    constants, carried, inputs = scan.split(jaxpr.invars)
    levels |= dict.fromkeys(constants, CONSTANT)
    levels |= dict.fromkeys(inputs, INPUT)
    levels |= dict.fromkeys(carried, CARRY)
    for place in _fixed(jaxpr, scan, outputs):
        levels[carried[place]] = CONSTANT
    stuck = []
    step_bytes = sum(map(_bytes, {*carried, *inputs}))
    for equation in flat:
        level = max([CONSTANT, *(levels[x] for x in variables(equation.invars))])
        is_large = sum(map(_bytes, equation.outvars)) > LARGE * step_bytes
        if level == INPUT and (is_large or not _is_movable(equation)):
            stuck.append(equation.primitive.name)
            level = CARRY
        # Such a gradient need not be linear: that of each step is to be computed alone.
        if level == CONSTANT and _has_own_gradient(equation):
            stuck.append(equation.primitive.name)
            level = CARRY
        levels |= dict.fromkeys(equation.outvars, level)
    return levels, stuck


def _kinds(equation: Any) -> set[Kind]:
    """Return the kinds of the operations of an equation."""
    kind = known(equation.primitive.name).kind
    if kind not in (Kind.CALL, Kind.CUSTOM):
        return {kind}
    inner = [x for jaxpr in inner_jaxprs(equation) for x in equations(jaxpr)]
    return {known(x.primitive.name).kind for x in inner} - {Kind.CALL, Kind.CUSTOM}


def _has_own_gradient(equation: Any) -> bool:
    """Return whether an equation runs a function that has a backward pass of its own."""
    inner = [x for jaxpr in inner_jaxprs(equation) for x in equations(jaxpr)]
    return any(x.primitive.name.startswith("custom_vjp") for x in [equation, *inner])


def _is_movable(equation: Any) -> bool:
    return not _convolves(equation) and _kinds(equation).issubset(MOVABLE)


def _convolves(equation: Any) -> bool:
    """Return whether an equation convolves. For the convolution of all steps JAX merges the dims of
    time and rows, in which workers cannot find the rows, so convolutions stay.
    """
    inner = [x for jaxpr in inner_jaxprs(equation) for x in equations(jaxpr)]
    return any(x.primitive.name == "conv_general_dilated" for x in [equation, *inner])


def _is_cheap(equation: Any) -> bool:
    return _kinds(equation).issubset(CHEAP)


def _repeats(equation: Any) -> bool:
    """Return whether the results of an equation are larger than its inputs, and nothing but copies
    of them.
    """
    size = sum(x.aval.size for x in equation.invars)
    return _is_cheap(equation) and sum(x.aval.size for x in equation.outvars) > size


def _moved(flat: Sequence[Any], levels: Mapping[Any, int]) -> list[Any]:
    """Return the equations that are computed for all steps at once: those that take time, what they
    need, and what follows from them without more memory.
    """
    needed: set[Any] = set()
    chosen = set()
    for equation in reversed(flat):
        if levels[equation.outvars[0]] != INPUT:
            continue
        if not _is_cheap(equation) or not needed.isdisjoint(equation.outvars):
            chosen.add(id(equation))
            needed.update(variables(equation.invars))
    results: set[Any] = set()
    for equation in flat:
        if levels[equation.outvars[0]] != INPUT:
            continue
        if id(equation) not in chosen:
            inputs = [x for x in variables(equation.invars) if levels[x] == INPUT]
            size = sum(map(_bytes, set(inputs)))
            if not results.issuperset(inputs) or sum(map(_bytes, equation.outvars)) > size:
                continue
            chosen.add(id(equation))
        results.update(equation.outvars)
    return [equation for equation in flat if id(equation) in chosen]


def _bytes(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize


def _read(program: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the variables that equations read, or that are outputs, and that none of them
    computes.
    """
    atoms = [x for equation in program for x in variables(equation.invars)]
    computed = {x for equation in program for x in equation.outvars}
    return [x for x in dict.fromkeys([*atoms, *variables(outputs)]) if x not in computed]


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _weights(
    loop: Sequence[Any], levels: Mapping[Any, int], constants: Sequence[Any]
) -> Iterator[tuple[int, int]]:
    """Yield the numbers of equations that are linear in a constant, and its place among the inputs:
    products, and sums with a constant that is repeated.
    """
    known_constants = set(constants)
    for number, equation in enumerate(loop):
        name = equation.primitive.name
        is_bilinear = known(name).kind is Kind.PRODUCT and known(name).bilinear
        is_product = is_bilinear and not _convolves(equation)
        if not is_product and name not in SUMS and name != "broadcast_in_dim":
            continue
        size = equation.outvars[0].aval.size
        places = [
            place
            for place, atom in enumerate(equation.invars)
            if not is_literal(atom)
            and atom in known_constants
            and _is_inexact(atom)
            and (is_product or atom.aval.size < size)
        ]
        if len(places) == 1 and not (is_product and len(equation.invars) != 2):
            yield number, places[0]


def _factors(
    jaxpr: Any, loop: Sequence[Any], weights: Mapping[int, int], carried: Sequence[Any]
) -> Iterator[tuple[int, Any]]:
    """Yield the numbers of products with weights whose other input is cheaply computed from carried
    values alone, and the program that does so.
    """
    for number, place in weights.items():
        equation = loop[number]
        if known(equation.primitive.name).kind is not Kind.PRODUCT:
            continue
        factor = equation.invars[1 - place]
        if is_literal(factor):
            continue
        program = without_unused(loop, [factor])
        if all(map(_is_cheap, program)) and set(carried).issuperset(_read(program, [factor])):
            yield number, part_of(jaxpr, program, carried, [factor])


def _sums(loop: Sequence[Any], outputs: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number of each product, and what it is and the sums that it is added to, one after
    the other: where the last is known, none of what is added is needed again.
    """
    uses: dict[Any, list[Any]] = {}
    for equation in loop:
        for atom in variables(equation.invars):
            uses.setdefault(atom, []).append(equation)
    for atom in variables(outputs):
        uses.setdefault(atom, []).append(None)
    for number, equation in enumerate(loop):
        if known(equation.primitive.name).kind is not Kind.PRODUCT:
            continue
        result = equation.outvars[0]
        if not _is_inexact(result):
            continue
        path = [result]
        while len(uses[result]) == 1:
            [user] = uses[result]
            if user is None or user.primitive.name not in SUMS:
                break
            total = user.outvars[0]
            if (total.aval.shape, total.aval.dtype) != (result.aval.shape, result.aval.dtype):
                break
            result = total
            path.append(result)
        yield number, path


def _addends(
    loop: Sequence[Any], inputs: Sequence[Any], paths: Iterable[list[Any]], outputs: Sequence[Any]
) -> Iterator[int]:
    """Yield the places of inputs that only sums on these paths read."""
    sums = {variable for path in paths for variable in path[1:]}
    read = set(variables(outputs))
    for equation in loop:
        if equation.outvars[0] not in sums:
            read.update(variables(equation.invars))
    for place, variable in enumerate(inputs):
        if variable not in read:
            yield place


def _with_split_products(
    jaxpr: Any, scan: Scan, flat: Sequence[Any], outputs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return equations in which a product with inputs and carried values side by side, as in
    `concatenate([x, h]) @ w`, is a sum of products.
    """
    levels, _ = _levels(jaxpr, scan, flat, outputs)
    computed = {x: equation for equation in flat for x in equation.outvars}
    changed = [_split_product(equation, levels, computed) for equation in flat]
    return inlined(jaxpr.replace(eqns=changed, outvars=outputs), SMALL)


def _split_product(equation: Any, levels: Mapping[Any, int], computed: Mapping[Any, Any]) -> Any:
    """Return an equation that calls a sum of products, or the same one."""
    dims = _summed_dims(equation)
    for place, (dim, other_dim) in dims.items():
        atom = equation.invars[place]
        if is_literal(atom) or atom not in computed:
            continue
        joined = computed[atom]
        if joined.primitive.name != "concatenate":
            continue
        parts = joined.invars
        depends_on = {levels[x] for x in variables(parts)}
        if joined.params["dimension"] != dim or len(depends_on) < 2:
            continue
        sizes = [x.aval.shape[dim] for x in parts]

        def total(*arrays: Any, place=place, other_dim=other_dim, sizes=sizes) -> Any:
            *parts, other = arrays
            products = []
            start = 0
            for part, size in zip(parts, sizes, strict=True):
                piece = lax.slice_in_dim(other, start, start + size, axis=other_dim)
                pair = [part, piece] if place == 0 else [piece, part]
                products += evaluated(equation, pair)
                start += size
            return sum(products[1:], products[0])

        arguments = [*parts, equation.invars[1 - place]]
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in arguments]
        [call] = jax.make_jaxpr(jax.jit(total))(*shapes).eqns
        return call.replace(
            invars=arguments, outvars=equation.outvars, source_info=equation.source_info
        )
    return equation


def _summed_dims(equation: Any) -> dict[int, tuple[int, int]]:
    """Return by the place of an input of a product the dim of it that is summed, and that of the
    other input, where there is one such dim.
    """
    name = equation.primitive.name
    if name == "dot_general":
        (left, right), _ = equation.params["dimension_numbers"]
        if len(left) == 1:
            return {0: (left[0], right[0]), 1: (right[0], left[0])}
    return {}
