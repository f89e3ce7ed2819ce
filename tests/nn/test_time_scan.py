"""Loops over time with less in them: values and gradients are those of `jax.lax.scan`, computed in
float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd.jaxpr.inner_programs import opened, scan_of
from spmd.jaxpr.programs import equations
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from spmd.nn.step_parts import split_step
from spmd.nn.time_scan import scan_time
from tests.compare import assert_close, relative_difference

TIME, ROWS, WIDTH = 6, 3, 4
PRODUCTS = ("dot_general", "conv_general_dilated")


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def nnx_cell(kind):
    """A step of a flax nnx cell, its parameters, and its first carry."""
    # dtype None: that of the inputs
    cell = kind(WIDTH, WIDTH, dtype=None, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(cell, nnx.Param, ...)

    def step(params, carry, x):
        cell = nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))
        return cell(carry, x)

    carry = nnx.merge(graph, params, rest).initialize_carry((ROWS, WIDTH), nnx.Rngs(0))
    return step, nnx.to_pure_dict(params), carry, random(1, TIME, ROWS, WIDTH)


def linen_cell(cell, *features):
    xs = random(1, TIME, ROWS, *features)
    carry = cell.initialize_carry(jax.random.key(0), xs.shape[1:])
    params = cell.init(jax.random.key(0), carry, xs[0])
    return cell.apply, params, carry, xs


def own_cell(step, *names):
    params = {name: 0.5 * random(number, WIDTH, WIDTH) for number, name in enumerate(names)}
    params["bias"] = random(8, WIDTH)
    params["scale"] = random(9, WIDTH)
    return step, params, np.zeros((ROWS, WIDTH)), random(1, TIME, ROWS, WIDTH)


def side_by_side(params, h, x):
    """As hand-written cells are: one product of input and carry."""
    weights = jnp.concatenate([params["of_x"], params["of_h"]])
    h = jnp.tanh(jnp.concatenate([x, h], axis=-1) @ weights + params["bias"])
    return h, h


def normalized(params, h, x):
    """Layer normalization of the sum of both products; an output that needs no carry."""
    z = x @ params["of_x"] + h @ params["of_h"]
    z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + 1e-3)
    h = jnp.tanh(z * params["scale"] + params["bias"])
    return h, (h, jnp.sin(x @ params["of_x"]))


def one_weight_for_all(params, h, x):
    """A weight of three products, of which one is with a value computed from the carry."""
    z = jnp.tanh(x @ params["w"] + h @ params["w"])
    h = jnp.tanh((z * h) @ params["w"] + params["bias"] - z)
    return h, h


def carry_by_carry(params, h, x):
    """A product whose inputs both depend on the step before."""
    h = jnp.tanh(x @ params["of_x"] + h @ params["of_h"] + 0.1 * (h @ h.T @ h))
    return h, h


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, grad: (jnp.clip(grad, -0.1, 0.1),))


def gradients_of_its_own(params, h, x):
    """A function whose gradient of a sum is not the sum of its gradients, of a constant, of a
    weight, and of inputs.
    """
    weights = clipped_gradient(params["of_h"])
    h = jnp.tanh(clipped_gradient(x @ params["of_x"]) + h @ weights)
    h = h + 0.1 * clipped_gradient(params["bias"])
    return h, h


def sums_with_constants(params, h, x):
    """After the products, of several shapes."""
    z = x @ params["of_x"] + h @ params["of_h"] + params["bias"]
    h = jnp.tanh(0.3 * (params["scale"] - z + params["bias"][0]))
    return h + 0.1 * params["bias"].reshape(1, -1), h - 0.1 * params["of_x"].sum()


def no_products(params, h, x):
    """Without a weight matrix, as in quasi-recurrent networks."""
    gate = jax.nn.sigmoid(x * params["scale"] + params["bias"])
    h = gate * h + (1 - gate) * x
    return h, jnp.sin(h)


def with_reset(params, h, x):
    """Where the first feature is positive, a new sequence begins."""
    h = jnp.where(x[:, :1] > 0, 0.0, h)
    h = jnp.tanh(x @ params["of_x"] + h @ params["of_h"] + params["bias"])
    return h, h


CELLS = {
    "nnx.LSTMCell": lambda: nnx_cell(nnx.LSTMCell),
    "nnx.OptimizedLSTMCell": lambda: nnx_cell(nnx.OptimizedLSTMCell),
    "nnx.GRUCell": lambda: nnx_cell(nnx.GRUCell),
    "nnx.SimpleCell": lambda: nnx_cell(nnx.SimpleCell),
    "linen.LSTMCell": lambda: linen_cell(linen.LSTMCell(WIDTH), WIDTH),
    "linen.OptimizedLSTMCell": lambda: linen_cell(linen.OptimizedLSTMCell(WIDTH), WIDTH),
    "linen.GRUCell": lambda: linen_cell(linen.GRUCell(WIDTH), WIDTH),
    "linen.MGUCell": lambda: linen_cell(linen.MGUCell(WIDTH), WIDTH),
    "linen.SimpleCell": lambda: linen_cell(linen.SimpleCell(WIDTH), WIDTH),
    "linen.ConvLSTMCell": lambda: linen_cell(linen.ConvLSTMCell(2, (3, 3)), 5, 5, 2),
    "side by side": lambda: own_cell(side_by_side, "of_x", "of_h"),
    "normalized": lambda: own_cell(normalized, "of_x", "of_h"),
    "one weight for all": lambda: own_cell(one_weight_for_all, "w"),
    "carry by carry": lambda: own_cell(carry_by_carry, "of_x", "of_h"),
    "gradients of its own": lambda: own_cell(gradients_of_its_own, "of_x", "of_h"),
    "sums with constants": lambda: own_cell(sums_with_constants, "of_x", "of_h"),
    "with reset": lambda: own_cell(with_reset, "of_x", "of_h"),
}


def values_and_gradients(scan, step, params, carry, xs):
    """The last carry, all outputs, and the gradients of a function of both."""

    def loss(params, carry, xs):
        results = scan(functools.partial(step, params), carry, xs)
        leaves = jax.tree.leaves(results)
        return sum(jnp.sin((1 + n) * leaf).sum() for n, leaf in enumerate(leaves)), results

    gradients, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(params, carry, xs)
    return {"results": results, "gradients": gradients}


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def in_float64(step, arguments, **options):
    """What JAX's own scan makes of them."""
    with jax.enable_x64(True):
        scan = functools.partial(lax.scan, **options)
        results = values_and_gradients(scan, step, *cast(arguments, jnp.float64))
        return jax.tree.map(np.asarray, results)


@pytest.mark.sampled(quick=16)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "options", [{}, {"reverse": True, "unroll": 4}], ids=["forward", "reverse"]
)
@pytest.mark.parametrize("name", CELLS)
def test_values_and_gradients_are_those_of_a_plain_scan(name, options, platform):
    """On a CPU, and, computed by it, as on a GPU: totals take the place of addends."""
    step, *arguments = CELLS[name]()
    scan = functools.partial(scan_time, **options)
    with parallel_scope(ParallelConfig(platform=platform)):
        found = values_and_gradients(scan, step, *cast(arguments, jnp.float32))
    assert_close(found, in_float64(step, arguments, **options), 1e-6)


def in_chunks(steps):
    """`scan_time` under a layout with `[recurrence] time_chunk`."""

    def scan(*arguments, **options):
        with parallel_scope(ParallelConfig(recurrence=spmd.Recurrence(time_chunk=steps))):
            return scan_time(*arguments, **options)

    return scan


@pytest.mark.sampled(quick=8)
@pytest.mark.parametrize("steps", [1, 3, 4, 5])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", [*CELLS, "no products"])
def test_chunks_of_time_have_the_values_and_gradients_of_a_plain_scan(name, reverse, steps):
    """6 steps in chunks of 1 and 3, and of 4 and 5, which do not divide them."""
    cells = {**CELLS, "no products": lambda: own_cell(no_products)}
    step, *arguments = cells[name]()
    scan = functools.partial(in_chunks(steps), reverse=reverse)
    computed = values_and_gradients(scan, step, *cast(arguments, jnp.float32))
    assert_close(computed, in_float64(step, arguments, reverse=reverse), 1e-6)


def test_chunks_of_time_take_less_memory():
    """64 steps of 32 rows of 64 features keep sums of 4 x 64 for the backward pass; in chunks of 8
    an eighth of that, and what is carried from chunk to chunk.
    """
    cell = nnx.OptimizedLSTMCell(64, 64, rngs=nnx.Rngs(0))
    graph, params = nnx.split(cell)
    xs = jnp.asarray(random(1, 64, 32, 64), jnp.float32)

    def bytes_of(scan):
        def loss(params, xs):
            cell = nnx.merge(graph, params)
            carry = cell.initialize_carry(xs.shape[1:], nnx.Rngs(0))
            (_, h), _ = scan(lambda carry, x: (cell(carry, x)[0], None), carry, xs)
            return h.sum()

        program = jax.jit(jax.grad(loss)).lower(params, xs).compile()
        return program.memory_analysis().temp_size_in_bytes

    sums = 64 * 32 * 4 * 64 * 4
    assert bytes_of(scan_time) > sums
    assert bytes_of(in_chunks(8)) < sums / 2


@pytest.mark.parametrize("name", ["nnx.OptimizedLSTMCell", "linen.GRUCell", "normalized"])
def test_bfloat16_is_as_near_to_float64_as_a_plain_scan(name):
    step, *arguments = CELLS[name]()
    # The same numbers for all: those that bfloat16 has.
    arguments = cast(cast(arguments, jnp.bfloat16), jnp.float32)
    expected = in_float64(step, arguments)

    def error(scan):
        found = values_and_gradients(scan, step, *cast(arguments, jnp.bfloat16))
        return relative_difference(cast(found, jnp.float32), expected)

    assert error(scan_time) <= max(error(lax.scan), 2**-6)


def test_gradient_of_a_bias_in_bfloat16_is_added_up_in_float32():
    def step(bias, h, x):
        h = jnp.tanh(h * x + bias)
        return h, h

    def gradient(scan, bias, xs):
        def loss(bias):
            return scan(functools.partial(step, bias), jnp.zeros(xs.shape[1:], xs.dtype), xs)[
                1
            ].sum()

        return jax.grad(loss)(bias)

    bias, xs = cast((random(0, WIDTH), random(1, 2000, ROWS, WIDTH)), jnp.bfloat16)
    with jax.enable_x64(True):
        expected = np.asarray(gradient(lax.scan, *cast((bias, xs), jnp.float64)))
    assert relative_difference(cast(gradient(scan_time, bias, xs), jnp.float32), expected) < 2**-6


def products_by_place(function, *arguments):
    """How many products a program has in loops that have no others inside, and elsewhere."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    inside = 0
    for equation in equations(jaxpr):
        if equation.primitive.name == "scan":
            names = [x.primitive.name for x in equations(opened(scan_of(equation).program))]
            inside += sum(map(names.count, PRODUCTS)) * ("scan" not in names)
    names = [x.primitive.name for x in equations(jaxpr)]
    return inside, sum(map(names.count, PRODUCTS)) - inside


@pytest.mark.parametrize(
    ("name", "plain", "in_loop", "outside"),
    [
        # x W, h W, and of each the gradients by both factors; in the loops are left h W and its
        # gradient by h
        ("nnx.OptimizedLSTMCell", 6, 2, 4),
        ("nnx.GRUCell", 6, 2, 4),
        # convolutions stay; the two of the forward pass are computed again
        ("linen.ConvLSTMCell", 6, 8, 0),
        ("side by side", 3, 2, 4),
        # h (h^T h) is four products backward, and its two are computed again
        ("carry by carry", 12, 10, 4),
    ],
)
def test_what_needs_no_carry_leaves_the_loops(name, plain, in_loop, outside):
    step, *arguments = CELLS[name]()
    arguments = cast(arguments, jnp.float32)
    found = {}
    for scan in (lax.scan, scan_time):
        run = functools.partial(values_and_gradients, scan, step)
        found[scan] = products_by_place(run, *arguments)
    assert found == {lax.scan: (plain, 0), scan_time: (in_loop, outside)}


def test_steps_that_carry_integers_and_constants():
    def step(weights, carry, x):
        h, count, kept = carry
        h = jnp.tanh(x @ weights["x"] + h @ weights["h"] + kept) / (1 + count % 2)
        return (h, count + 1, kept), (h, count)

    weights = {"x": random(0, WIDTH, WIDTH), "h": 0.5 * random(1, WIDTH, WIDTH)}
    floats = cast((weights, random(2, ROWS, WIDTH), random(3, TIME, ROWS, WIDTH)), jnp.float32)

    def run(scan, weights, kept, xs):
        def loss(weights, kept, xs):
            carry = jnp.zeros((ROWS, WIDTH)), jnp.int32(3), kept
            carry, (y, counts) = scan(functools.partial(step, weights), carry, xs)
            return (y**2).sum() + carry[0].sum(), (carry, y, counts)

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(weights, kept, xs)

    assert_close(run(scan_time, *floats), run(lax.scan, *floats), 1e-6)


def test_random_numbers_are_drawn_step_by_step():
    """Of some generators those of all steps at once would be others."""
    weights = jnp.asarray(random(0, WIDTH, WIDTH), jnp.float32)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), TIME)
    xs = keys, jnp.asarray(random(1, TIME, ROWS, WIDTH), jnp.float32)

    def step(h, inputs):
        key, x = inputs
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        h = jnp.tanh(x @ weights + mask * (h @ weights))
        return h, h

    plain, ours = (scan(step, jnp.ones((ROWS, WIDTH)), xs)[1] for scan in (lax.scan, scan_time))
    assert_close(ours, plain, 1e-6)
    [loop] = jax.make_jaxpr(lambda h: lax.scan(step, h, xs))(jnp.ones((ROWS, WIDTH))).eqns[-1:]
    assert split_step(scan_of(loop)).stuck == ("random_bits",)


def test_frozen_weights_and_a_carry_without_a_gradient():
    """What is not asked for has no gradient, and no place in the program."""
    step, params, carry, xs = CELLS["nnx.OptimizedLSTMCell"]()
    params, carry, xs = cast((params, carry, xs), jnp.float32)

    def loss(scan, xs):
        return (scan(functools.partial(step, params), carry, xs)[1] ** 2).sum()

    ours, plain = (jax.grad(functools.partial(loss, scan))(xs) for scan in (scan_time, lax.scan))
    assert_close(ours, plain, 1e-6)


def test_under_transformations_of_jax():
    step, params, carry, _ = CELLS["nnx.GRUCell"]()
    params, carry = cast((params, carry), jnp.float32)
    batch = jnp.asarray(random(5, 2, TIME, ROWS, WIDTH), jnp.float32)

    def gradient(scan, params, xs):
        def loss(params):
            run = jax.checkpoint(lambda params: scan(functools.partial(step, params), carry, xs)[1])
            return (run(params) ** 2).sum()

        return jax.grad(loss)(params)

    def per_example(scan):
        return jax.jit(jax.vmap(functools.partial(gradient, scan), (None, 0)))(params, batch)

    assert_close(per_example(scan_time), per_example(lax.scan), 1e-6)

    def of_gradients(scan):
        def norm(params):
            return sum(
                (leaf**2).sum() for leaf in jax.tree.leaves(gradient(scan, params, batch[0]))
            )

        return jax.jit(jax.grad(norm))(params)

    assert_close(of_gradients(scan_time), of_gradients(lax.scan), 1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", ["nnx.OptimizedLSTMCell", "sums with constants"])
def test_on_shards_of_rows(name, check_vma):
    step, params, carry, xs = CELLS[name]()
    params = cast(params, jnp.float32)
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    carry, xs = cast((carry, xs), jnp.float32)

    def gradient(scan, params, carry, xs):
        def loss(params):
            return (scan(functools.partial(step, params), carry, xs)[1] ** 2).sum()

        return jax.tree.map(lambda x: lax.psum(x, "data"), jax.grad(loss)(params))

    def mapped(scan):
        run = jax.shard_map(
            functools.partial(gradient, scan),
            mesh=mesh,
            in_specs=(P(), P("data"), P(None, "data")),
            out_specs=P(),
            check_vma=check_vma,
        )
        return jax.jit(run)(params, carry, xs)

    assert_close(mapped(scan_time), mapped(lax.scan), 1e-6)


def test_step_that_changes_its_carry_is_an_error_of_jax():
    def grow(h, x):
        return jnp.concatenate([h, x]), h

    with pytest.raises(TypeError, match="carry input and carry output must have equal types"):
        scan_time(grow, jnp.zeros(2), jnp.zeros((TIME, 2)))


def test_loop_without_anything_to_take_out_stays():
    def step(h, x):
        return h + x, h * x

    run = functools.partial(scan_time, step)
    [loop] = jax.make_jaxpr(run)(jnp.float32(0), jnp.ones(TIME)).eqns
    assert loop.primitive.name == "scan"


@pytest.mark.parametrize("reverse", [0, 1, np.bool_(True)])
def test_reverse_may_be_a_number(reverse):
    step, *arguments = CELLS["nnx.GRUCell"]()
    scan = functools.partial(scan_time, reverse=reverse)
    found = values_and_gradients(scan, step, *cast(arguments, jnp.float32))
    assert_close(found, in_float64(step, arguments, reverse=bool(reverse)), 1e-6)


def test_literals_that_a_step_carries_and_returns():
    weights = jnp.asarray(random(0, WIDTH, WIDTH), jnp.float32)
    xs = jnp.asarray(random(1, TIME, ROWS, WIDTH), jnp.float32)

    def gradient(scan):
        def loss(weights):
            def step(carry, x):
                h, is_first = carry
                h = jnp.tanh(x @ weights + jnp.where(is_first, 2 * x, h @ weights))
                return (h, False), (h, 0.0)

            (h, _), (y, zeros) = scan(step, (jnp.zeros((ROWS, WIDTH)), True), xs)
            return (h * y).sum() + zeros.sum()

        return jax.grad(loss)(weights)

    assert_close(gradient(scan_time), gradient(lax.scan), 1e-6)


def test_products_with_results_of_another_dtype():
    arguments = cast((random(0, WIDTH, WIDTH), random(1, TIME, ROWS, WIDTH)), jnp.bfloat16)

    def gradient(scan, dtype):
        def loss(weights, xs):
            def step(h, x):
                z = jnp.dot(h, weights, preferred_element_type=jnp.float32) + x
                h = jnp.tanh(z).astype(weights.dtype)
                return h, h

            return scan(step, jnp.zeros_like(xs[0]), xs)[1].astype(jnp.float32).sum()

        return jax.grad(loss)(*cast(arguments, dtype))

    expected = gradient(lax.scan, jnp.float32)
    ours, plain = (
        cast(gradient(scan, jnp.bfloat16), jnp.float32) for scan in (scan_time, lax.scan)
    )
    error = relative_difference(ours, expected)
    assert error <= max(relative_difference(plain, expected), 2**-6)


def test_carry_that_is_cast_for_its_product_is_not_kept_twice():
    """A cell in bfloat16 with a carry in float32, as flax's: the backward pass casts all carries
    after its loop.
    """
    cell = nnx.OptimizedLSTMCell(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, params = nnx.split(cell)
    carry = cell.initialize_carry((ROWS, WIDTH), nnx.Rngs(0))
    xs = jnp.asarray(random(1, TIME, ROWS, WIDTH), jnp.bfloat16)

    def gradient(scan):
        def loss(params):
            cell = nnx.merge(graph, params)
            return (scan(cell, carry, xs)[1].astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)

    error = relative_difference(gradient(scan_time)(params), gradient(lax.scan)(params))
    assert error < 2**-6
    in_bfloat16 = []
    # As on a GPU, where totals, in bfloat16 too, are no results of the loop.
    with parallel_scope(ParallelConfig(platform="cuda")):
        jaxpr = jax.make_jaxpr(gradient(scan_time))(params).jaxpr
    for equation in equations(jaxpr):
        if equation.primitive.name == "scan":
            stacked = equation.outvars[scan_of(equation).carried :]
            in_bfloat16 += [x.aval.shape for x in stacked if x.aval.dtype == jnp.bfloat16]
    assert in_bfloat16 == []


def test_no_loop_is_for_numbers_of_steps_and_masks():
    """As JAX would make one of what does not depend on the parameters, where the loop over a
    stack's layers is differentiated.
    """
    stack = spmd.nn.RNNStack([nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))])
    graph, params, rest = nnx.split(stack, nnx.Param, ...)
    x = jnp.ones((ROWS, TIME, WIDTH))
    lengths = jnp.array([4, 6, 1])

    def loss(params):
        return (nnx.merge(graph, params, rest)(x, lengths=lengths) ** 2).mean()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    loops = [x for x in equations(jaxpr) if x.primitive.name == "scan"]
    # over the layer, and over time, forward and backward
    assert len(loops) == 4
    for loop in loops:
        assert any(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in loop.outvars)


def test_loop_without_steps():
    step, params, carry, xs = CELLS["nnx.OptimizedLSTMCell"]()
    arguments = cast((params, carry, xs[:0]), jnp.float32)
    ours = values_and_gradients(scan_time, step, *arguments)
    plain = values_and_gradients(lax.scan, step, *arguments)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def test_complex_numbers():
    decay = jnp.asarray(random(0, WIDTH) + 1j * random(1, WIDTH), jnp.complex64)
    weights = jnp.asarray(random(2, WIDTH, WIDTH), jnp.complex64)
    xs = jnp.asarray(random(3, TIME, ROWS, WIDTH), jnp.float32)

    def gradient(scan):
        def loss(decay, weights):
            def step(h, x):
                h = 0.3 * h @ weights + h * decay * 0.1 + x @ weights
                return h, h.real

            return (scan(step, jnp.zeros((ROWS, WIDTH), jnp.complex64), xs)[1] ** 2).sum()

        return jax.grad(loss, (0, 1))(decay, weights)

    assert_close(gradient(scan_time), gradient(lax.scan), 1e-5)


def test_large_results_are_not_computed_for_all_steps_at_once():
    """Scores of additive attention over a memory."""
    memory = jnp.asarray(random(0, 64, WIDTH), jnp.float32)
    weights = jnp.asarray(random(1, WIDTH, WIDTH), jnp.float32)

    def step(h, x):
        scores = jnp.tanh(x[:, None] @ weights + memory).sum(-1)
        h = jnp.tanh(h @ weights + jax.nn.softmax(scores) @ memory)
        return h, h

    xs = jnp.asarray(random(2, TIME, ROWS, WIDTH), jnp.float32)

    def run(h):
        return lax.scan(step, h, xs)

    [loop] = jax.make_jaxpr(run)(jnp.zeros((ROWS, WIDTH))).eqns[-1:]
    parts = split_step(scan_of(loop))
    assert max(x.aval.size for x in parts.inputs) < ROWS * 64 * WIDTH
    assert "add" in parts.stuck
    plain, ours = (scan(step, jnp.zeros((ROWS, WIDTH)), xs) for scan in (lax.scan, scan_time))
    assert_close(ours, plain, 1e-6)
