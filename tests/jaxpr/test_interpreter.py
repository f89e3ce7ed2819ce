"""The walk over traced programs, the programs that equations run, and parts of programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from spmd.jaxpr.inner_programs import (
    called_program,
    constant_inputs,
    inner_jaxprs,
    repeats,
    scan_of,
    while_of,
    with_programs,
)
from spmd.jaxpr.interpreter import Interpreter
from spmd.jaxpr.programs import equations, evaluated, inlined, read_inputs, uses, without_unused

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
X = jnp.asarray([0.2, -1.0, 3.0])


@jax.custom_vjp
def clipped(x):
    return jnp.tanh(x)


clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g, -1, 1),))


def scanned(x):
    def step(carry, row):
        return carry + row @ carry, carry.sum()

    return lax.scan(step, x, jnp.stack([W, 2 * W]))


# each with whether its result depends on the second of two inputs
PROGRAMS = {
    "jit": (lambda x, y: jax.jit(jnp.sin)(x) + 1, False),
    "jit of both": (lambda x, y: jax.jit(lambda a, b: a * b)(x, y), True),
    "checkpoint": (lambda x, y: jax.checkpoint(lambda a: a * 2)(y), True),
    "custom": (lambda x, y: clipped(x) - clipped(2 * x), False),
    "carried": (lambda x, y: lax.fori_loop(0, 3, lambda n, c: c * 2 + y, x), True),
    "carried on": (
        # y reaches the first value that is carried in the third step
        lambda x, y: lax.scan(lambda c, _: ((c[1], c[2], y), None), (x, x, x), length=3)[0][0],
        True,
    ),
    "constant of a scan": (lambda x, y: lax.scan(lambda c, _: (c * y, c), x, length=2)[1], True),
    "slices": (lambda x, y: lax.scan(lambda c, s: (c + s, None), x, jnp.stack([x, x]))[0], False),
    "branch": (lambda x, y: lax.cond(x[0] < 0, lambda: x, lambda: y), True),
    "no branch": (lambda x, y: lax.cond(x[0] > 0, lambda: x, lambda: 2 * x), False),
    "while": (lambda x, y: lax.while_loop(lambda c: c[0] < 5, lambda c: c + abs(y), abs(x)), True),
}


class Reached(Interpreter[bool]):
    """Whether a value depends on the second input."""

    def constant(self, value):
        return False

    def joined(self, first, second):
        return first or second

    def operation(self, equation, inputs):
        return [any(inputs)] * len(equation.outvars)


@pytest.mark.parametrize("name", PROGRAMS)
def test_walk_follows_what_derivatives_show(name):
    function, depends = PROGRAMS[name]
    closed = jax.make_jaxpr(function)(X, X)
    [reached] = Reached().outputs(closed, [False, True])
    moved = np.any(np.asarray(function(X, X)) != np.asarray(function(X, X + 1)))
    assert reached == depends == moved


def test_methods_that_a_subclass_needs_say_so():
    closed = jax.make_jaxpr(lambda x: x + 1)(1.0)
    with pytest.raises(TypeError, match="Interpreter has no"):
        Interpreter().outputs(closed, [0])


def test_repeats_multiply_to_what_runs():
    count = []

    def counted(x):
        jax.debug.callback(lambda: count.append(1))
        return x

    def program(x):
        def outer(c, _):
            return lax.fori_loop(0, 3, lambda _, c: counted(c), c), None

        return lax.scan(outer, x, length=4)[0]

    def runs(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            total += equation.primitive.name == "debug_callback"
            total += repeats(equation) * sum(map(runs, inner_jaxprs(equation)))
        return total

    closed = jax.make_jaxpr(program)(1.0)
    jax.block_until_ready(jax.jit(program)(1.0))
    jax.effects_barrier()
    assert runs(closed.jaxpr) == len(count) == 12


def test_scan_and_while_parts_compute_the_loop():
    closed = jax.make_jaxpr(scanned)(X)
    [equation] = [each for each in closed.jaxpr.eqns if each.primitive.name == "scan"]
    scan, arrays = scan_of(equation), [X, jnp.stack([W, 2 * W])]
    constants, carried, slices = scan.split(arrays)
    assert (len(constants), scan.carried, scan.length) == (0, 1, 2)
    for row in slices[0]:
        carried = jaxpr_as_fun(scan.program)(*constants, *carried, row)[:1]
    np.testing.assert_allclose(carried[0], X + W @ X + 2 * W @ (X + W @ X), rtol=1e-5, atol=1e-6)

    closed = jax.make_jaxpr(lambda x: lax.while_loop(lambda c: c < 9, lambda c: c * 2, x))(1.5)
    loop, value = while_of(closed.jaxpr.eqns[0]), 1.5
    while jaxpr_as_fun(loop.condition)(value)[0]:
        [value] = jaxpr_as_fun(loop.body)(value)
    assert value == 12


def test_constant_inputs_are_those_of_each_run():
    def program(x, y):
        return lax.scan(lambda c, s: (c * y + s, None), x, jnp.stack([x, x]))[0]

    jaxpr = jax.make_jaxpr(program)(X, X).jaxpr
    [equation] = [each for each in jaxpr.eqns if each.primitive.name == "scan"]
    assert constant_inputs(equation) == {"jaxpr": [jaxpr.invars[1]]}
    assert constant_inputs(jax.make_jaxpr(jnp.add)(X, X).jaxpr.eqns[0]) is None


def test_with_programs_changes_what_runs():
    closed = jax.make_jaxpr(lambda x: lax.cond(x > 0, lambda: x * 2, lambda: x * 3))(1.0)
    equation = closed.jaxpr.eqns[-1]
    assert with_programs(equation, lambda _, program: program.jaxpr) is equation

    def swapped(param, program):
        eqns = [
            each.replace(primitive=lax.add_p) if each.primitive is lax.mul_p else each
            for each in program.jaxpr.eqns
        ]
        return program.jaxpr.replace(eqns=eqns)

    changed = with_programs(equation, swapped)
    jaxpr = closed.jaxpr.replace(eqns=[*closed.jaxpr.eqns[:-1], changed])
    assert [jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(x)[0] for x in (5.0, -5.0)] == [7, -2]


def test_inlined_program_computes_the_same():
    twice = jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2)

    def program(x, y):
        return twice(twice(x)) + twice(y), y

    closed = jax.make_jaxpr(program)(X, X + 1)
    flat, outputs = inlined(closed.jaxpr, 32)
    assert all(called_program(equation) is None for equation in flat)
    jaxpr = closed.jaxpr.replace(eqns=flat, outvars=outputs)
    ours = jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(X, X + 1)
    for one, other in zip(ours, program(X, X + 1), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    alone, _ = inlined(closed.jaxpr, 1)
    assert any(called_program(equation) is not None for equation in alone)


def test_unused_equations_are_left_out():
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(jnp.exp(x))))(X).jaxpr
    names = [each.primitive.name for each in without_unused(jaxpr.eqns, jaxpr.outvars[1:])]
    assert names == ["exp", "cos"]


def test_read_inputs_are_those_that_outputs_need():
    jaxpr = jax.make_jaxpr(lambda x, y, z: jax.jit(lambda a, b, c: a + c)(x, y, z))(X, X, X).jaxpr
    assert read_inputs(jaxpr) == {jaxpr.invars[0], jaxpr.invars[2]}


def test_uses_follow_calls_and_changes_of_dtype():
    def program(x, y):
        named = checkpoint_name(x.astype(jnp.bfloat16), "layer")
        return named, jax.jit(lambda a: jnp.sin(a) + jnp.exp(a))(y), jax.jit(lambda a: a)(y)

    jaxpr = jax.make_jaxpr(program)(X, X).jaxpr
    assert uses(jaxpr, [0, 1], "layer") == [["layer"], ["sin", "exp", "output"]]


def test_evaluated_takes_other_shapes():
    [equation] = jax.make_jaxpr(jnp.sin)(X).jaxpr.eqns
    longer = jnp.arange(7.0)
    np.testing.assert_array_equal(evaluated(equation, [longer])[0], jnp.sin(longer))


def test_equations_are_found_at_any_depth():
    names = {each.primitive.name for each in equations(jax.make_jaxpr(scanned)(X).jaxpr)}
    assert {"scan", "dot_general", "reduce_sum"} <= names


def test_scan_of_a_backward_pass():
    """jax 0.11 describes its inputs by another class."""

    def total(w):
        return lax.scan(lambda x, w: (jnp.tanh(w * x), x), 1.0, w)[0]

    closed = jax.make_jaxpr(jax.grad(total))(jnp.ones(3))
    scans = [scan_of(each) for each in closed.jaxpr.eqns if each.primitive.name == "scan"]
    assert [(scan.carried, scan.length) for scan in scans] == [(1, 3), (1, 3)]
