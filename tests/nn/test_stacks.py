"""Stacks sharded along a mesh axis compute what they compute on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmd
from spmd.errors import ModelError
from spmd.models.base import STACKED
from spmd.nn.layer_order import stage_order
from spmd.nn.parallel_context import UNSHARDED, current, parallel_scope
from tests.compare import relative_difference
from tests.nn.pipes import WIDTH, layers, loss_of, parallel_config, run

SLOW = pytest.mark.slow
KINDS = {
    "lstm": {"time_chunk": 3},
    "gru": {"time_chunk": 4},
    "gpt": {"microbatches": 4},
    "cnn": {"microbatches": 4},
}


@pytest.fixture(scope="module")
def plain():
    """Outputs and gradients of every kind of stack on one device."""
    return {kind: run(*layers(kind), UNSHARDED) for kind in KINDS}


@pytest.mark.system
@pytest.mark.parametrize(
    "mesh", [(2, 4), pytest.param((4, 2), marks=SLOW), pytest.param((1, 8), marks=SLOW)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_is_the_stack(plain, kind, mesh):
    how = parallel_config(mesh, unroll=kind == "cnn", **KINDS[kind])
    y, grads = run(*layers(kind), how)
    assert np.isfinite(y).all()
    assert relative_difference(y, plain[kind][0]) <= 1e-6
    assert relative_difference(grads, plain[kind][1]) <= 1e-5
    (schedule,) = how.schedules.values()
    assert schedule.stages == mesh[1] and schedule.microbatches > 1
    parts = "chunks of time" if kind in ("lstm", "gru") else "microbatches"
    assert f", {schedule.microbatches} {parts}: " in str(schedule)


@pytest.mark.system
def test_layers_that_are_repeated_draw_as_a_list_of_them_and_are_one_program_however_many():
    """A layer's keys are split from those given; names, random streams and calls are those of a
    list.
    """

    def make(rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        return nnx.Sequential(
            nnx.Linear(WIDTH, WIDTH, kernel_init=kernel, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        )

    with nnx.use_eager_sharding(False):
        at_once = spmd.nn.LayerStack(spmd.nn.repeat(3, make, nnx.Rngs(0, dropout=1)))
        keys = {
            name: jax.random.split(stream(), 3)
            for name, stream in nnx.Rngs(params=0, dropout=1).items()
        }
        listed = spmd.nn.LayerStack(
            [
                make(nnx.Rngs(**{name: key[number] for name, key in keys.items()}))
                for number in range(3)
            ]
        )

        def size(count):
            return len(
                jax.make_jaxpr(
                    lambda: nnx.state(spmd.nn.repeat(count, make, nnx.Rngs(0)).module)
                )().eqns
            )

        assert size(6) == size(48)
    ours, theirs = (
        dict(nnx.to_flat_state(nnx.state(stack, nnx.Param))) for stack in (at_once, listed)
    )
    assert ours.keys() == theirs.keys()
    for path in ours:
        np.testing.assert_array_equal(ours[path].get_value(), theirs[path].get_value())
        assert ours[path].get_metadata()[STACKED] == 3
        assert ours[path].get_metadata().get("out_sharding") == theirs[path].get_metadata().get(
            "out_sharding"
        )
    x = jnp.ones((4, WIDTH))
    y = at_once(x)
    assert (
        len(np.unique(np.asarray(y != 0), axis=0)) > 1
        and relative_difference(at_once.eval() or at_once(x), listed.eval() or listed(x)) == 0
    )


class Noisy(nnx.Module):
    """Keeps the random streams that it was given."""

    def __init__(self, rngs):
        self.rngs, self.scale = rngs, nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x + self.scale * jax.random.normal(self.rngs.default(), x.shape)


@pytest.mark.parametrize("repeated", [False, True])
def test_layers_that_keep_their_streams_draw_different_values(repeated):
    rngs = nnx.Rngs(0)
    layers = spmd.nn.repeat(4, Noisy, rngs) if repeated else [Noisy(rngs) for _ in range(4)]
    stack = spmd.nn.LayerStack(layers)
    alone = [stack.layer(number)(jnp.zeros(3)) for number in range(4)]
    assert len({float(y[0]) for y in alone}) == 4
    np.testing.assert_allclose(stack(jnp.zeros((1, 3)))[0].std(), sum(alone).std(), rtol=1e-5)


def test_two_stacks_of_what_was_repeated_once_have_weights_of_their_own():
    made = spmd.nn.repeat(2, lambda rngs: nnx.Linear(4, 4, rngs=rngs), nnx.Rngs(0))
    first, second = spmd.nn.LayerStack(made), spmd.nn.LayerStack(made)
    assert first.layers.kernel is not second.layers.kernel
    np.testing.assert_array_equal(first.layers.kernel[...], second.layers.kernel[...])


@pytest.mark.system
@pytest.mark.parametrize("kind", ["lstm", pytest.param("gpt", marks=SLOW)])
def test_sends_overlap_the_next_tick(plain, kind):
    how = parallel_config((2, 4), overlap=True, **KINDS[kind])
    y, grads = run(*layers(kind), how)
    assert (
        relative_difference(y, plain[kind][0]) <= 1e-6
        and relative_difference(grads, plain[kind][1]) <= 1e-5
    )
    (schedule,) = how.schedules.values()
    assert schedule.forward.ticks == schedule.microbatches + 2 * (4 - 1)


@pytest.mark.system
@pytest.mark.parametrize("kind", ["gpt", pytest.param("cnn", marks=SLOW)])
def test_a_circular_pipeline_is_the_stack(plain, kind):
    how = parallel_config(
        (2, 2), unroll=kind == "cnn", schedule="circular", groups=2, microbatches=4
    )
    y, grads = run(*layers(kind), how)
    assert (
        relative_difference(y, plain[kind][0]) <= 1e-6
        and relative_difference(grads, plain[kind][1]) <= 1e-5
    )
    assert next(iter(how.schedules.values())).groups == 2


@pytest.mark.system
@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
def test_results_of_idle_stages_are_never_used(unroll):
    """Zeros, the input of an idle stage, have an infinite gradient here."""
    stack, x = layers("cnn", 4)
    loss, params = loss_of(stack, UNSHARDED)
    assert not np.isfinite(jax.grad(lambda x: loss(params, x)[0])(jnp.zeros_like(x))).all()
    y, grads = run(stack, x, parallel_config((1, 4), unroll=unroll, microbatches=2))
    assert np.isfinite(y).all() and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.system
@pytest.mark.parametrize("chunk", [12, 1, None, 5], ids=lambda chunk: f"chunk-{chunk}")
def test_chunks_of_time_change_nothing(plain, chunk):
    """One step; a length that leaves a remainder, which is masked; all steps at once; the library's
    choice.
    """
    how = parallel_config((1, 4), **({"time_chunk": chunk} if chunk else {}))
    y, grads = run(*layers("lstm"), how)
    # The products of a chunk with the inputs of its steps are one product, of other shapes.
    assert relative_difference(y, plain["lstm"][0]) <= 1e-6
    assert relative_difference(grads, plain["lstm"][1]) <= 1e-5
    (schedule,) = how.schedules.values()
    assert schedule.microbatches == {1: 12, 5: 3, 12: 1, None: 6}[chunk]


def test_one_stage_is_a_scan():
    """No region, no collective."""
    stack, x = layers("lstm", 4)
    loss, params = loss_of(stack, parallel_config((8, 1)))
    text = str(jax.make_jaxpr(loss)(params, x))
    assert "shard_map" not in text and "ppermute" not in text and text.count("scan[") == 2
    sharded, _ = loss_of(stack, parallel_config((2, 4)))
    assert "ppermute" in str(jax.make_jaxpr(sharded)(params, x))


@pytest.mark.system
@pytest.mark.parametrize(
    "how",
    [pytest.param(UNSHARDED, marks=SLOW), parallel_config((2, 4), time_chunk=5)],
    ids=["plain", "wavefront"],
)
@pytest.mark.parametrize("kind", ["lstm", pytest.param("gru", marks=SLOW)])
def test_lengths_states_and_dropout(kind, how):
    """Against flax's RNN, layer by layer: final carries, zeros after a row's end, states passed
    from call to call.
    """
    stack, x = layers(kind, 4)
    lengths = jnp.asarray([12, 3, 1, 7] * 4)
    (y, carry), _ = run(stack, x, how, lengths=lengths, return_carry=True)
    inner, carries = x, []
    for number in range(4):
        rnn = nnx.RNN(stack.cell(number), return_carry=True, rngs=nnx.Rngs(0))
        last, out = rnn(inner, seq_lengths=lengths)
        inner = jnp.where(
            jnp.arange(12)[None, :, None] < lengths[:, None, None],
            out + inner if number >= 2 else out,
            0,
        )
        carries.append(last)
    assert relative_difference(y, inner) < 1e-6
    assert (
        relative_difference(carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *carries)) < 1e-6
    )
    (front, half), _ = run(stack, x[:, :5], how, return_carry=True)
    (back, end), _ = run(stack, x[:, 5:], how, return_carry=True, initial=half)
    (y, carry), _ = run(stack, x, UNSHARDED, return_carry=True)
    assert (
        relative_difference(np.concatenate([front, back], 1), y) < 1e-6
        and relative_difference(end, carry) < 1e-6
    )


@pytest.mark.system
@pytest.mark.parametrize(
    "unroll", [False, pytest.param(True, marks=SLOW)], ids=["loop", "unrolled"]
)
def test_a_last_state_has_its_gradient(unroll):
    """Stages that finish early keep it through their idle ticks."""
    stack, x = layers("gru", 4)
    y, grads = run(stack, x, UNSHARDED, return_carry=True)
    sharded = run(stack, x, parallel_config((2, 4), unroll=unroll, time_chunk=4), return_carry=True)
    assert (
        relative_difference(sharded[0], y) < 1e-6 and relative_difference(sharded[1], grads) < 1e-5
    )


@pytest.mark.system
@pytest.mark.parametrize("kind", [pytest.param("lstm", marks=SLOW), "gpt"])
def test_dropout_draws_what_it_draws_on_one_device(kind):
    y, grads = run(*layers(kind, 4, dropout=0.3), UNSHARDED)
    sharded = run(*layers(kind, 4, dropout=0.3), parallel_config((2, 4), **KINDS[kind]))
    assert relative_difference(y, run(*layers(kind, 4), UNSHARDED)[0]) > 0.1, "something is dropped"
    assert (
        relative_difference(sharded[0], y) < 1e-6 and relative_difference(sharded[1], grads) < 1e-5
    )


@pytest.mark.system
def test_beside_reaches_every_layer():
    rngs = nnx.Rngs(0)
    stack = spmd.nn.RNNStack([nnx.GRUCell(WIDTH + 3, WIDTH, rngs=rngs) for _ in range(4)])
    rows = np.random.default_rng(1)
    x, beside = (jnp.asarray(rows.normal(size=(8, 6, size)), jnp.float32) for size in (WIDTH, 3))
    y, grads = run(stack, x, UNSHARDED, beside=beside)
    inner = x
    for number in range(4):
        inner = nnx.RNN(stack.cell(number), rngs=rngs)(jnp.concatenate([inner, beside], -1))
    assert relative_difference(y, inner) < 1e-6
    sharded = run(stack, x, parallel_config((2, 4), time_chunk=2), beside=beside)
    assert (
        relative_difference(sharded[0], y) < 1e-6 and relative_difference(sharded[1], grads) < 1e-5
    )


@pytest.mark.system
def test_bidirectional_equals_flax():
    rngs = nnx.Rngs(0)
    layer = spmd.nn.Bidirectional(*(nnx.OptimizedLSTMCell(3, WIDTH, rngs=rngs) for _ in range(2)))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 6, 3)), jnp.float32)
    lengths = jnp.asarray([6, 2, 5, 1] * 2)
    y, grads = run(layer, x, UNSHARDED, lengths=lengths)
    parts = [spmd.nn.stacking.unstack_module(layer.cells, number) for number in (0, 1)]
    both = nnx.Bidirectional(nnx.RNN(parts[0], rngs=rngs), nnx.RNN(parts[1], rngs=rngs), rngs=rngs)
    mask = jnp.arange(6)[None, :, None] < lengths[:, None, None]
    assert relative_difference(y, jnp.where(mask, both(x, seq_lengths=lengths), 0)) < 1e-6
    how = parallel_config((2, 4))
    sharded = run(layer, x, how, lengths=lengths)
    assert (
        relative_difference(sharded[0], y) < 1e-6 and relative_difference(sharded[1], grads) < 1e-5
    )


@pytest.mark.system
def test_a_wavefront_in_the_order_of_a_circular_pipeline(plain):
    """Parameters that the state keeps in stage order go to the right layers."""
    stack, x = layers("lstm")
    order = stage_order(8, 4, 2)
    nnx.update(stack.cells, jax.tree.map(lambda leaf: leaf[order], nnx.state(stack.cells)))
    how = dataclasses.replace(
        parallel_config((2, 4), schedule="circular", groups=2, time_chunk=3), in_stage_order=True
    )
    y, grads = run(stack, x, how)
    assert relative_difference(y, plain["lstm"][0]) <= 1e-6

    def back(tree):
        return jax.tree.map(lambda leaf: leaf[np.argsort(order)], tree)

    assert relative_difference((back(grads[0]), grads[1]), plain["lstm"][1]) <= 1e-5


@pytest.mark.system
def test_layers_keep_the_input_dtype():
    """Although flax's carries are float32."""
    for stack in (
        layers("gru", 4)[0],
        spmd.nn.Bidirectional(*(nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(2))),
    ):
        x = layers("gru", 4)[1].astype(jnp.bfloat16)
        for how in (UNSHARDED, parallel_config((2, 4), time_chunk=5)):
            for options in ({}, {"lengths": jnp.full(16, 7)}):
                loss, params = loss_of(stack, how, **options)
                assert jax.eval_shape(loss, params, x)[1].dtype == jnp.bfloat16


@pytest.mark.system
def test_extracted_layer_has_no_stack_metadata():
    named = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
    with nnx.use_eager_sharding(False):
        stack = spmd.nn.LayerStack(
            [nnx.Linear(4, 4, kernel_init=named, rngs=nnx.Rngs(0)) for _ in range(2)]
        )
        both = spmd.nn.Bidirectional(
            *(nnx.GRUCell(4, 4, kernel_init=named, rngs=nnx.Rngs(0)) for _ in range(2))
        )

    def sharding_and_depth(variable):
        return (variable.get_metadata().get("out_sharding"), variable.get_metadata().get(STACKED))

    assert sharding_and_depth(stack.layers.kernel) == (
        (None, "embed", "mlp"),
        2,
    ) and sharding_and_depth(stack.layer(1).kernel) == (
        ("embed", "mlp"),
        None,
    )
    assert sharding_and_depth(both.cells.dense_i.kernel) == ((None, "embed", "mlp"), None)


class ExtraInputs(nnx.Module):
    """A layer that takes more arguments than its input."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, scale, *, table, double):
        return x + jnp.tanh(self.linear(x)) * scale[:, None] + table * (2 if double else 1)


@pytest.mark.system
def test_extra_arguments_reach_every_layer():
    """Positional arrays are split into microbatches as x is, keyword arguments are not; all have
    gradients.
    """
    rngs = nnx.Rngs(0)
    stack = spmd.nn.LayerStack([ExtraInputs(rngs) for _ in range(4)])
    rows = np.random.default_rng(1)
    x, scale, table = (
        jnp.asarray(rows.normal(size=shape), jnp.float32)
        for shape in ((16, WIDTH), (16,), (WIDTH,))
    )
    graphdef, params = nnx.split(stack)

    def grads(how):
        def loss(params, *inputs):
            with parallel_scope(how):
                return jnp.sum(
                    jnp.cos(
                        nnx.merge(graphdef, params)(
                            inputs[0], inputs[1], table=inputs[2], double=True
                        )
                    )
                )

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(params, x, scale, table)

    assert (
        relative_difference(grads(parallel_config((2, 4), microbatches=4)), grads(UNSHARDED)) < 1e-5
    )


@pytest.mark.system
def test_a_stack_outside_of_a_step():
    """Outside of a step it is plain model code, and each layer can be extracted."""
    assert current() is UNSHARDED
    rngs = nnx.Rngs(0)
    made = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(5)]
    stack, x = spmd.nn.LayerStack(made), jnp.ones((3, WIDTH))
    y = x
    for layer in made:
        y = layer(y)
    assert (
        relative_difference(stack(x), y) < 1e-6
        and (stack.layer(3).kernel[...] == made[3].kernel[...]).all()
    )
    drawn = spmd.nn.LayerStack([nnx.Dropout(0.5, rngs=nnx.Rngs(seed)) for seed in range(2)])
    assert (drawn(jnp.ones((4, 64))) != drawn(jnp.ones((4, 64)))).any(), (
        "random streams advance from call to call"
    )
    kept = spmd.nn.LayerStack([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(2)])
    kept(jnp.arange(3.0 * WIDTH).reshape(3, WIDTH))
    assert (kept.layers.mean[...] != 0).any(axis=1).tolist() == [True, True] or (
        kept.layers.mean[0] != 0
    ).any()


@pytest.mark.system
def test_compiling_does_not_grow_with_depth():
    """The same program for 6 layers and 48, except for sizes."""

    def lines(depth):
        stack, x = layers("gpt", depth)
        loss, params = loss_of(stack, UNSHARDED)
        return len(str(jax.make_jaxpr(loss)(params, x)).splitlines())

    assert lines(48) == lines(6)


class Dropping(nnx.GRUCell):
    """A cell with dropout on its input."""

    def __init__(self, rngs):
        super().__init__(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, carry, x):
        return super().__call__(carry, self.drop(x))


class Pair(nnx.Module):
    """A layer of two arrays."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return jax.tree.map(lambda x: x * self.scale, x)


class Dilated(nnx.Module):
    """A layer whose arrays do not show what it computes."""

    def __init__(self, dilation, act):
        self.conv, self.act = nnx.Conv(4, 4, (3,), kernel_dilation=dilation, rngs=nnx.Rngs(0)), act


ERRORS = {
    "none": (
        lambda: spmd.nn.LayerStack([]),
        """LayerStack of no layers.
    fix: a list of at least one.""",
    ),
    "differ": (
        lambda: spmd.nn.LayerStack(
            [nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))]
        ),
        """LayerStack: layers 0 and 1 differ, and only equal ones can be stacked:
    bias: float32[4] and missing.
    kernel: float32[4, 4] and float32[4, 8].
    the layer itself: out_features is 4 and 8.
    the layer itself: use_bias is True and False.
    fix: call the layer that differs before or after the stack; an nnx.Linear first changes the width of inputs.""",  # noqa: E501
    ),
    "settings": (
        lambda: spmd.nn.LayerStack([Dilated((1,), nnx.relu), Dilated((2,), nnx.gelu)]),
        """LayerStack: layers 0 and 1 differ, and only equal ones can be stacked:
    conv: kernel_dilation is (1,) and (2,).
    the layer itself: act is 'jax._src.nn.functions.relu' and 'jax._src.nn.functions.gelu'.
    fix: call the layer that differs before or after the stack; an nnx.Linear first changes the width of inputs.""",  # noqa: E501
    ),
    "no list": (
        lambda: spmd.nn.LayerStack(nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
        """LayerStack(a Linear).
    fix: a list of layers, or spmd.nn.repeat.""",
    ),
    "number": (
        lambda: layers("gpt", 2)[0].layer(2),
        """layer 2 of a stack of 2.
    fix: a number from 0 to 1.""",
    ),
    "residual": (
        lambda: spmd.nn.RNNStack([nnx.GRUCell(4, 4, rngs=nnx.Rngs(0))], residual_from=-1),
        """RNNStack: residual_from=-1.
    fix: a layer's number, from 0, or None.""",
    ),
    "no cells": (
        lambda: spmd.nn.RNNStack([nnx.Linear(4, 4, rngs=nnx.Rngs(0))]),
        """RNNStack: its layers are Linear, no cells.
    fix: nnx.LSTMCell, or LayerStack.""",
    ),
    "a share": (
        lambda: spmd.nn.RNNStack([nnx.GRUCell(4, 4, rngs=nnx.Rngs(0))], dropout="0.1"),
        """RNNStack: dropout='0.1'.
    fix: from 0 to below 1.""",
    ),
    "dropout's rngs": (
        lambda: spmd.nn.RNNStack([nnx.GRUCell(4, 4, rngs=nnx.Rngs(0))], dropout=0.1, rngs=0),
        """RNNStack: dropout=0.1 needs random numbers, but rngs is an int.
    fix: rngs=nnx.Rngs(0).""",
    ),
    "repeat of none": (
        lambda: spmd.nn.repeat(0, lambda rngs: nnx.Linear(4, 4, rngs=rngs), nnx.Rngs(0)),
        """repeat: 0 layers.
    fix: a whole number from 1.""",
    ),
    "repeat of a layer": (
        lambda: spmd.nn.repeat(2, nnx.Linear(4, 4, rngs=nnx.Rngs(0)), 0),
        """repeat(2, a Linear, an int).
    fix: repeat(2, lambda rngs: ..., nnx.Rngs(0)).""",
    ),
    "repeat of split keys": (
        lambda: spmd.nn.repeat(2, lambda rngs: nnx.Linear(4, 4, rngs=rngs), nnx.Rngs(0).split(2)),
        """repeat: the keys of rngs are already split, and repeat splits them.
    fix: the rngs before the split.""",
    ),
    "repeat of what was there": (
        lambda: (
            lambda outer: spmd.nn.repeat(2, lambda rngs: nnx.Linear(4, 4, rngs=outer), nnx.Rngs(1))
        )(nnx.Rngs(0)),
        """repeat: make uses a module or random streams that were made outside of it.
    fix: a new layer at each call, from the rngs that make is given: lambda rngs: Block(512, rngs=rngs).""",  # noqa: E501
    ),
    "repeat makes": (
        lambda: spmd.nn.repeat(2, lambda rngs: 3, nnx.Rngs(0)),
        """repeat: make returned an int.
    fix: an nnx.Module.""",
    ),
    "repeat of nothing": (
        lambda: spmd.nn.repeat(2, lambda rngs: nnx.Dropout(0.0), nnx.Rngs(0)),
        """repeat: its layers have no arrays to stack.
    fix: call them one after the other.""",
    ),
    "empty": (
        lambda: spmd.nn.LayerStack([nnx.Dropout(0.0), nnx.Dropout(0.0)]),
        """LayerStack: its layers have no arrays to stack.
    fix: call them one after the other.""",
    ),
    "kind": (
        lambda: spmd.nn.RNNStack([nnx.GRUCell(4, 4, rngs=nnx.Rngs(0)), 3]),
        """RNNStack: layer 1 is an int.
    fix: an nnx.Module.""",
    ),
    "returns": (
        lambda: spmd.nn.LayerStack([nnx.Linear(4, 8, rngs=nnx.Rngs(0)) for _ in range(2)])(
            jnp.ones((2, 4))
        ),
        """a layer of a stack takes float32[2, 4] and returns float32[2, 8]; the output of a layer is the input of the next one.
    fix: layers that keep shape and dtype.""",  # noqa: E501
    ),
    "lengths": (
        lambda: layers("gru", 2)[0](jnp.ones((2, 5, WIDTH)), lengths=jnp.ones(3, jnp.int32)),
        """RNNStack: lengths is int32[3] for 2 rows.
    fix: an array, int32[2].""",
    ),
    "initial": (
        lambda: layers("lstm", 2)[0](jnp.ones((2, 5, WIDTH)), initial=(jnp.ones((2, 2, WIDTH)),)),
        """RNNStack: initial is a tuple of [2, 2, 8]; the cells have a tuple of [2, 2, 8], [2, 2, 8].
    fix: [layers, rows, ...] each.""",  # noqa: E501
    ),
    "dropout": (
        lambda: spmd.nn.RNNStack([nnx.GRUCell(4, 4, rngs=nnx.Rngs(0))], dropout=0.1),
        """RNNStack: dropout=0.1 needs random numbers, but rngs is None.
    fix: rngs=nnx.Rngs(0).""",
    ),
    "stages": (
        lambda: run(*layers("gpt", 6), parallel_config((2, 4))),
        """a stack of 6 layers over 4 stages (mesh axis "stage"): 6 / 4 leaves 2.
    fix: 4 or 8 layers.""",
    ),
    "cells that change": (
        lambda: spmd.nn.RNNStack([Dropping(nnx.Rngs(0)) for _ in range(2)])(jnp.ones((2, 5, 4))),
        """a recurrent cell changes drop/rngs/count when it is called, once for every time step.
    fix: RNNStack(dropout=...) in place of Dropout, LayerNorm in place of BatchNorm.""",
    ),
    "rows": (
        lambda: run(
            spmd.nn.LayerStack([Pair() for _ in range(4)]),
            (jnp.ones((8, 4)), jnp.ones(4)),
            parallel_config((2, 4)),
        ),
        """a stack of layers was called with float32[8, 4], float32[4]; a pipeline splits rows, which must be dim 0 of all.
    fix: pass arrays without rows by name: stack(x, table=...).""",  # noqa: E501
    ),
    "batch statistics": (
        lambda: run(
            spmd.nn.LayerStack([nnx.BatchNorm(4, rngs=nnx.Rngs(0)) for _ in range(4)]),
            jnp.ones((8, 4)),
            parallel_config((2, 4)),
        ),
        """a layer of a pipelined stack changes mean, var when it is called, and it is called once for every microbatch.
    fix: LayerNorm, RMSNorm or GroupNorm in place of BatchNorm; or a layout without [pipeline].""",  # noqa: E501
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_texts(case):
    make, text = ERRORS[case]
    with pytest.raises(ModelError) as caught:
        make()
    assert str(caught.value) == text


def test_cell_that_changes_its_carry():
    class Growing(nnx.GRUCell):
        def __call__(self, carry, inputs):
            carry, y = super().__call__(carry, inputs)
            return carry.astype(jnp.bfloat16), y

    stack = spmd.nn.RNNStack([Growing(WIDTH, WIDTH, rngs=nnx.Rngs(0))])
    with pytest.raises(ModelError, match=r"takes the carry float32\[2, 8\] and returns bfloat16"):
        stack(jnp.ones((2, 3, WIDTH)))
