"""A scan over time that computes as much as it can outside of its loop: the results and gradients
of `lax.scan`, in reverse mode.

The products of a recurrent cell with its inputs are one product for all steps, before the loop. In
the backward pass the gradient of the recurrent weights is one product over all steps, after the
loop, where JAX's derivative of `lax.scan` adds up a product in each step (what cuDNN does for its
own cells: Appleyard et al., arXiv:1604.01946, sections 3.2 and 3.3). Under `[recurrence]
time_chunk` all that is done chunk by chunk (`time_chunks.py`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from spmd.base.tree import Tree
from spmd.base.xla import in_scope, varying_alike
from spmd.jaxpr.inner_programs import scan_of
from spmd.jaxpr.programs import evaluated, variables
from spmd.nn.gathered_scan import complete, differentiable
from spmd.nn.parallel_context import current
from spmd.nn.step_parts import StepParts, split_step, values_of
from spmd.nn.time_chunks import run_in_chunks

# the scope of a loop that is hoisted already
HOISTED = "hoisted_loop"


def scan_time(
    step: Callable[[Tree, Tree], tuple[Tree, Tree]], carry: Tree, xs: Tree, **options: Any
) -> tuple[Tree, Tree]:
    """Return what `lax.scan(step, carry, xs, **options)` returns.

    Its gradient is one of reverse mode: `jax.jvp` through it raises a TypeError of JAX's.

    Example:
      >>> w = jnp.full((2, 2), 0.5)
      >>> step = lambda h, x: (jnp.tanh(x @ w + h @ w),) * 2
      >>> h, y = scan_time(step, jnp.zeros((1, 2)), jnp.ones((3, 1, 2)))
      >>> y.shape, round(float(h[0, 0]), 4)
      ((3, 1, 2), 0.9597)
    """
    scan = functools.partial(lax.scan, step, **options)
    closed, shapes = jax.make_jaxpr(scan, return_shape=True)(carry, xs)
    changed = [hoisted(equation) for equation in closed.jaxpr.eqns]
    program = closed.replace(jaxpr=closed.jaxpr.replace(eqns=changed))
    results = jaxpr_as_fun(program)(*jax.tree.leaves((carry, xs)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def hoisted(equation: Any, *, recurrences_only: bool = False) -> Any:
    """Return an equation in place of a `lax.scan`, with all that can be before and after its loop
    there; the same equation if that is nothing, or if it is no scan.

    Args:
      recurrences_only: only a loop with a product of what it carries and a constant, such as a
        recurrent weight; not a loop over layers, each of which has its own.
    """
    if equation.primitive.name != "scan":
        return equation
    scan = scan_of(equation)
    # without steps there is nothing to compute
    if not scan.length:
        return equation
    parts = split_step(scan)
    parallel = current()
    chunk = parallel.recurrence.time_chunk
    if recurrences_only and (parts is None or not parts.is_recurrence):
        return equation
    parallel.loop_lengths.add(scan.length)
    if parts is not None:
        parallel.used.add("hoisted")
    if chunk is not None and chunk >= scan.length:
        chunk = None
    if parts is None and chunk is None:
        return equation
    if parts is not None and parts.stuck:
        why = (
            f"note: a loop over {scan.length} steps computes {', '.join(parts.stuck)} in each "
            "step, though that does not depend on the step before: it draws random numbers, has a "
            "gradient of its own, runs a program, is a convolution, or takes much more memory for "
            "all steps at once."
        )
        parallel.notes[why] = None

    def loop_over_time(*arguments: Any) -> list[Any]:
        if parts is None:
            run_loop = functools.partial(_run_unsplit_steps, equation)
        else:
            run_loop = functools.partial(_run_split_steps, equation, parts)
        if chunk is not None:
            run_loop = functools.partial(run_in_chunks, equation, chunk, run_loop)
        carried, outputs = run_loop(scan.length, *scan.split(arguments))
        return [*carried, *outputs]

    [call] = jax.make_jaxpr(jax.jit(loop_over_time))(*(x.aval for x in equation.invars)).eqns
    call = call.replace(
        invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info
    )
    return in_scope(call, HOISTED)


def _run_unsplit_steps(
    equation: Any, length: int, constants: list[Any], carried: list[Any], xs: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return what a scan of `length` steps carries after the last one, and its outputs."""
    scan = scan_of(equation)
    run_step = jaxpr_as_fun(scan.program)

    def step(carried: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run_step(*constants, *carried, *xs)
        return results[: scan.carried], results[scan.carried :]

    reverse, unroll = equation.params["reverse"], equation.params["unroll"]
    return lax.scan(step, carried, xs, length=length, reverse=reverse, unroll=unroll)


def _run_split_steps(
    equation: Any,
    parts: StepParts,
    length: int,
    constants: list[Any],
    carried: list[Any],
    xs: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Return what `_run_unsplit_steps` returns, with less in the loop."""
    consts = getattr(scan_of(equation).program, "consts", ())
    fixed = [carried[place] for place in parts.fixed]
    # `lax.scan` takes numbers, too
    reverse = bool(equation.params["reverse"])
    # XLA:CPU (jax 0.10) would copy a buffer of all steps in each step.
    on_cpu = (current().platform or jax.default_backend()).startswith("cpu")
    unroll = equation.params["unroll"]
    loop = _Loop(parts, length, reverse, unroll, totals_in_place=not on_cpu)
    before = jaxpr_as_fun(ClosedJaxpr(parts.before, []))
    shared = [*consts, *constants, *fixed]
    computed = jax.vmap(
        before,
        in_axes=[None] * len(shared) + [0] * len(xs),
        out_axes=[None] * len(parts.constants) + [0] * len(parts.inputs),
        axis_size=length,
    )(*shared, *xs)
    changing = [carried[place] for place in parts.changing]
    # JAX does so inside of a loop, but not where a function has a gradient of its own.
    values = iter(varying_alike([*changing, *computed]))
    carry = [next(values) for _ in changing]
    loop_constants = [next(values) for _ in parts.constants]
    results: Any = _run_loop(loop, carry, [*values], loop_constants)
    after, outputs = results
    after_all = list(carried)
    for place, value in zip(parts.changing, after, strict=True):
        after_all[place] = value
    return after_all, outputs


@dataclasses.dataclass(frozen=True, eq=False)
class _Loop:
    """A loop over the parts of a step; the other attributes are as of `lax.scan`.

    Attributes:
      totals_in_place: whether the forward pass writes totals over what is added to them.
    """

    parts: StepParts
    length: int
    reverse: bool
    unroll: int
    totals_in_place: bool

    def scan(
        self,
        body: Callable[..., tuple[Tree, Tree, list[Any]]],
        carry: Tree,
        xs: Tree,
        buffers: Sequence[Any] = (),
        *,
        backward: bool = False,
    ) -> tuple[Tree, Tree, list[Any]]:
        """Return what is carried after the last step, all outputs, and the buffers.

        Args:
          body: from what is carried, the slices of a step of `xs`, and those of `buffers`, to what
            is carried next, outputs, and what takes the place of the slices of buffers: they are
            changed in place, so that a loop needs no memory of its own for these results.
        """

        def step(state: tuple, inputs: tuple) -> tuple[tuple, Tree]:
            carry, buffers = state
            number, xs = inputs
            slices = [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in buffers]
            carry, outputs, slices = body(carry, xs, slices)
            buffers = [
                lax.dynamic_update_index_in_dim(buffer, value, number, 0)
                for buffer, value in zip(buffers, slices, strict=True)
            ]
            return (carry, buffers), outputs

        numbers_and_xs = _tied((jnp.arange(self.length), xs), jax.tree.leaves(buffers))
        (carry, buffers), outputs = lax.scan(
            step,
            (carry, list(buffers)),
            numbers_and_xs,
            reverse=self.reverse != backward,
            unroll=self.unroll,
        )
        return carry, outputs, buffers


def _tied(xs: Tree, floats: Sequence[Any]) -> Tree:
    """Return the same arrays; for JAX the integers among them depend on floats.

    Where a loop is in a function that is differentiated, JAX (0.10) otherwise computes what depends
    on integers alone in a loop of its own, such as copies of the numbers of steps, and masks.
    """
    leaves, treedef = jax.tree.flatten(xs)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    floats = [*floats, *itertools.compress(leaves, is_float)]
    if floats:
        for place, leaf in enumerate(leaves):
            if jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_:
                leaves[place], _ = lax.optimization_barrier((leaf, floats[0]))
    return jax.tree.unflatten(treedef, leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_loop(
    loop: _Loop, carry: list[Any], inputs: list[Any], constants: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return what is carried after the last step, and the outputs of all steps."""
    parts = loop.parts

    def body(carry: list[Any], inputs: list[Any], _: list[Any]) -> tuple[list, list, list]:
        values = parts.evaluate(carry, inputs, constants, _as_it_is)
        return _next_carried(parts, values, carry), values_of(values, parts.outputs), []

    after, outputs, _ = loop.scan(body, carry, inputs)
    return after, outputs


def _next_carried(parts: StepParts, values: Mapping[Any, Any], carry: list[Any]) -> list[Any]:
    """Return what a step carries to the next one; a literal varies along mesh axes as the value
    before does.
    """
    return varying_alike([*values_of(values, parts.next_carried), *carry])[: len(carry)]


def _as_it_is(number: int, equation: Any, arguments: list[Any]) -> list[Any]:
    return evaluated(equation, arguments)


class _Saved(NamedTuple):
    """What the forward pass saves for the backward pass; arrays of all steps are [time, ...].

    Attributes:
      first: the carried values before the first step.
      carries: those before each step, without those that are outputs.
      outputs: by the place of an output, those that are also carried.
      totals: as in `StepParts`.
      inputs: None in place of an addend.
      constants: of the loop.
    """

    first: list[Any]
    carries: list[Any]
    outputs: dict[int, Any]
    totals: list[Any]
    inputs: list[Any]
    constants: list[Any]


def _forward(
    loop: _Loop, carry: list[Any], inputs: list[Any], constants: list[Any]
) -> tuple[tuple[list[Any], list[Any]], _Saved]:
    parts = loop.parts
    addends: dict[int, int] = {}
    if loop.totals_in_place:
        addends = _addends_of_totals(parts)

    def body(carry: list[Any], inputs: list[Any], slices: list[Any]) -> tuple[list, tuple, list]:
        step_inputs = list(inputs)
        for place, value in zip(addends.values(), slices, strict=True):
            step_inputs[place] = value
        values = parts.evaluate(carry, step_inputs, constants, _as_it_is)
        totals = values_of(values, parts.totals)
        other_totals = _without(totals, addends)
        carries = _without(carry, parts.output_of)
        results = values_of(values, parts.outputs), carries, other_totals
        return _next_carried(parts, values, carry), results, [totals[n] for n in addends]

    buffers = [inputs[place] for place in addends.values()]
    others = _without(inputs, addends.values())
    after, (outputs, carries, totals), in_place = loop.scan(body, carry, others, buffers)
    for number, total in zip(addends, in_place, strict=True):
        totals[number] = total
    carried_outputs = {place: outputs[place] for place in parts.output_of.values()}
    needed = _without(inputs, parts.addends)
    return (after, outputs), _Saved(carry, carries, carried_outputs, totals, needed, constants)


def _backward(loop: _Loop, saved: _Saved, cotangents: tuple) -> tuple:
    parts = loop.parts
    constants = saved.constants
    carries = _all_carries(loop, saved)
    dcarry, doutputs = cotangents
    shared = _shared_constants(parts)
    # The gradient of a total takes its place.
    results = _results_of_totals(parts)
    # For each gradient or factor that is needed of all steps, its number among what a step returns.
    # JAX gives the terms of a sum one array as their gradient, which is returned once.
    numbers: list[tuple] = []

    def body(state: tuple, step: tuple, slices: list[Any]) -> tuple[tuple, list, list]:
        dcarry, dshared = state
        carry, totals, inputs, doutputs = step
        totals = list(totals)
        for number, value in zip(results, slices, strict=True):
            totals[number] = value
        zeros = [jnp.zeros(x.aval.shape, x.aval.dtype) for x in parts.inputs]
        weighted = [parts.loop[number].outvars[0].aval for number in parts.weights]
        taps = [jnp.zeros(result.shape, result.dtype) for result in weighted]
        *alike, _ = varying_alike([*_filled(inputs, zeros), *taps, carry[0]])
        inputs = alike[: len(inputs)]
        taps = alike[len(inputs) :]

        def evaluate_again(
            carry_floats: list[Any], input_floats: list[Any], shared_floats: list[Any], taps: list
        ) -> tuple[tuple[list[Any], list[Any]], dict[int, Any]]:
            again = _StepAgain(parts, constants, totals, taps)
            values = parts.evaluate(
                _filled(carry_floats, carry),
                _filled(input_floats, inputs),
                _filled(shared_floats, constants),
                again.compute,
            )
            next_carried = _floats(values_of(values, parts.next_carried))
            outputs = _floats(values_of(values, parts.outputs))
            return (next_carried, outputs), again.factors

        primals = _floats(carry), _floats(inputs), _those(shared, constants), taps
        _, gradients_of, factors = jax.vjp(evaluate_again, *primals, has_aux=True)
        dcarry, dinputs, more, dtaps = gradients_of((dcarry, doutputs))
        of_all_steps = dinputs, dtaps, factors
        in_place = [dtaps[place] for place in results.values()]
        number_of = {id(leaf): number for number, leaf in enumerate(in_place)}
        returned = []
        for leaf in jax.tree.leaves(of_all_steps):
            if id(leaf) not in number_of:
                number_of[id(leaf)] = len(in_place) + len(returned)
                returned.append(leaf)
        numbers.append(jax.tree.map(lambda leaf: number_of[id(leaf)], of_all_steps))
        return (dcarry, jax.tree.map(jnp.add, dshared, more)), returned, in_place

    state = differentiable(dcarry), jax.tree.map(jnp.zeros_like, _those(shared, constants))
    steps = carries, _without(saved.totals, results), saved.inputs, differentiable(doutputs)
    buffers = [saved.totals[number] for number in results]
    (dcarry, dshared), returned, in_place = loop.scan(body, state, steps, buffers, backward=True)
    stacked = [*in_place, *returned]
    dinputs, dresults, factors = jax.tree.map(lambda number: stacked[number], numbers[-1])
    dconstants = complete(dshared, constants)
    for (number, weight_place), dresult in zip(parts.weights.items(), dresults, strict=True):
        equation = parts.loop[number]
        factor = None
        if number in factors:
            factor = factors[number]
        elif number in parts.factors:
            program = jaxpr_as_fun(ClosedJaxpr(parts.factors[number], []))
            [factor] = jax.vmap(program)(*carries)
        place = parts.constants.index(equation.invars[weight_place])
        gradient = _weight_gradient(equation, weight_place, constants[place], factor, dresult)
        dconstants[place] = dconstants[place] + gradient
    return complete(dcarry, saved.first), complete(dinputs, saved.inputs), dconstants


_run_loop.defvjp(_forward, _backward)


def _without(values: Sequence[Any], places: Collection[int]) -> list[Any]:
    """Return values with None at some places."""
    return [None if place in places else value for place, value in enumerate(values)]


def _addends_of_totals(parts: StepParts) -> dict[int, int]:
    """Return for totals, by number, the place of an addend of the same shape."""
    free = sorted(parts.addends)
    places = {}
    for number, total in enumerate(parts.totals):
        for place in free:
            aval = parts.inputs[place].aval
            if (aval.shape, aval.dtype) == (total.aval.shape, total.aval.dtype):
                places[number] = place
                free.remove(place)
                break
    return places


def _results_of_totals(parts: StepParts) -> dict[int, int]:
    """Return for totals, by number, the place in `weights` of a product that is added to it: both
    have the same gradient.
    """
    places: dict[int, int] = {}
    for place, number in enumerate(parts.weights):
        if number in parts.total_of:
            places.setdefault(parts.totals.index(parts.total_of[number]), place)
    return places


def _all_carries(loop: _Loop, saved: _Saved) -> list[Any]:
    """Return what each step took from the one before, [time, ...] each."""
    carries = list(saved.carries)
    for place, output in loop.parts.output_of.items():
        results = saved.outputs[output]
        start = saved.first[place][None]
        if loop.reverse:
            carries[place] = jnp.concatenate([results[1:], start])
        else:
            carries[place] = jnp.concatenate([start, results[:-1]])
    return carries


class _StepAgain:
    """Computes a step once more, for its derivative, from what the forward pass has saved.

    Attributes:
      factors: takes the other inputs of products with weights, by the number of the product, but
        not those of `StepParts.factors`.
    """

    def __init__(self, parts: StepParts, constants: list[Any], totals: list[Any], taps: list[Any]):
        self._parts = parts
        self._weights = dict(zip(parts.constants, constants, strict=True))
        self._totals = dict(zip(parts.totals, totals, strict=True))
        self._taps = dict(zip(parts.weights, taps, strict=True))
        self.factors: dict[int, Any] = {}

    def compute(self, number: int, equation: Any, arguments: list[Any]) -> list[Any]:
        """Return the outputs of an equation of the loop."""
        place = self._parts.weights.get(number)
        if place is None:
            results = evaluated(equation, arguments)
        else:
            # Its gradient comes from the tap, after the loop.
            arguments[place] = self._weights[equation.invars[place]]
            results = [self._weighted(number, equation, arguments)]
        if equation.outvars[0] in self._totals:
            results[0] = _with_value(self._totals[equation.outvars[0]], results[0])
        return results

    def _weighted(self, number: int, equation: Any, arguments: list[Any]) -> Any:
        tap = self._taps[number]
        if number not in self._parts.total_of:
            return _tapped(evaluated(equation, arguments)[0], tap)
        place = 1 - self._parts.weights[number]
        if number not in self._parts.factors:
            self.factors[number] = arguments[place]

        def product(x: Any) -> Any:
            others = list(arguments)
            others[place] = x
            return evaluated(equation, others)[0]

        like = self._totals[self._parts.total_of[number]]
        return _tapped(_linear(product, arguments[place], like), tap)


@jax.custom_jvp
def _tapped(value: Any, tap: Any) -> Any:
    """Return `value`; its gradient is also that of `tap`, which is zeros."""
    return value


@_tapped.defjvp
def _tapped_derivative(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    value, _ = primals
    dvalue, dtap = tangents
    return value, dvalue + dtap


@jax.custom_jvp
def _with_value(value: Any, computed: Any) -> Any:
    """Return `value`, with the derivative of `computed`: what computes that alone is left out."""
    return value


@_with_value.defjvp
def _with_value_derivative(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return primals[0], tangents[1]


def _linear(function: Callable[[Any], Any], x: Any, like: Any) -> Any:
    """Return `like`, with the derivative of a linear function at x, which is not computed."""

    @jax.custom_jvp
    def call(x: Any) -> Any:
        return like

    @call.defjvp
    def derivative(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        return like, function(tangents[0])

    return call(x)


def _weight_gradient(equation: Any, place: int, weight: Any, factor: Any, dresult: Any) -> Any:
    """Return the gradient of a weight, from those of the equation's results in all steps.

    Args:
      place: of the weight among the inputs of the equation.
      factor: [time, ...], the other input of a product; None: the equation adds or repeats.
      dresult: [time, ...].
    """

    def of_all_steps(weight: Any) -> Any:
        def of_step(factor: Any) -> Any:
            arguments = [jnp.zeros(x.aval.shape, weight.dtype) for x in equation.invars]
            arguments[place] = weight
            if factor is not None:
                arguments[1 - place] = factor
            return evaluated(equation, varying_alike(arguments))[0]

        return jax.vmap(of_step, axis_size=dresult.shape[0])(factor)

    like = weight
    # XLA adds up in float32 in a product, but in the array's dtype in a sum.
    if factor is None:
        like = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
        dresult = dresult.astype(like.dtype)
    # Of a product of all steps JAX makes one product over steps and rows.
    (gradient,) = jax.linear_transpose(of_all_steps, like)(dresult)
    return gradient.astype(weight.dtype)


def _shared_constants(parts: StepParts) -> set[int]:
    """Return the places of constants whose gradient is added up in the loop."""
    read = set(variables([*parts.next_carried, *parts.outputs]))
    for number, equation in enumerate(parts.loop):
        weight = parts.weights.get(number)
        others = [x for place, x in enumerate(equation.invars) if place != weight]
        read.update(variables(others))
    return {place for place, x in enumerate(parts.constants) if x in read}


def _those(places: set[int], values: list[Any]) -> list[Any]:
    """Return the floats at some places, and None at all others."""
    return [value if place in places else None for place, value in enumerate(_floats(values))]


def _floats(values: Sequence[Any]) -> list[Any]:
    """Return values with None in place of what has no gradient."""
    floats = []
    for value in values:
        is_float = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        floats.append(value if is_float else None)
    return floats


def _filled(floats: list[Any], values: list[Any]) -> list[Any]:
    """Return floats, and in place of each None the value."""
    return [
        value if number is None else number for number, value in zip(floats, values, strict=True)
    ]
