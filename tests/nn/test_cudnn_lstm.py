"""LSTM layers by JAX's binding of cuDNN, with JAX's own reference (`rnn.lstm_ref`) in the place of
cuDNN: values and gradients are those of flax's cells.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import rnn
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import LayoutError, ModelError
from spmd.nn import cudnn_lstm
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from tests.compare import assert_close

LAYERS, ROWS, TIME, WIDTH = 4, 8, 6, 4
CUDNN = spmd.Recurrence("cudnn")
KINDS = [nnx.OptimizedLSTMCell, nnx.LSTMCell]


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def reference(x, h, c, weights, lengths, *sizes):
    """`rnn.lstm` as JAX's tests compute it."""
    unpacked = rnn.unpack_lstm_weights(weights, *sizes[:3], sizes[4])
    return rnn.lstm_ref(x, h, c, *unpacked, lengths, *sizes)


@pytest.fixture
def gpu(monkeypatch):
    """The process has a GPU, on which cuDNN computes what JAX's reference computes."""
    monkeypatch.setattr(cudnn_lstm.rnn, "lstm", reference)
    monkeypatch.setattr(cudnn_lstm, "_other_device", lambda parallel: None)


def cells(kind=nnx.OptimizedLSTMCell, count=LAYERS, inputs=WIDTH, **options):
    made = [kind(inputs, WIDTH, rngs=nnx.Rngs(seed), **options) for seed in range(count)]
    for seed, cell in enumerate(made):
        # flax begins with zeros
        dense = [cell.dense_h] if kind is nnx.OptimizedLSTMCell else [cell.hi, cell.hg]
        for number, layer in enumerate(dense):
            layer.bias[...] = random(10 * seed + number, *layer.bias.shape)
    return made


def on_gpu(mesh=None, **options):
    """The context of a layout with `[recurrence] implementation = "cudnn"`."""
    return ParallelConfig(mesh, ("data",), recurrence=CUDNN, platform="cuda", **options)


def values_and_gradients(function, *arguments):
    def loss(*arguments):
        y = function(*arguments)
        return jnp.sum(jnp.sin(y) * random(5, *y.shape)), y

    places = tuple(range(len(arguments)))
    (_, y), gradients = jax.jit(jax.value_and_grad(loss, places, has_aux=True))(*arguments)
    return y, gradients


def by_flax(made, x, carry=None, residual_from=LAYERS):
    """The outputs of cells on top of each other, by `nnx.RNN`."""
    for number, cell in enumerate(made):
        initial = None
        if carry is not None:
            initial = jax.tree.map(lambda leaf, number=number: leaf[number], carry)
        y = nnx.RNN(cell, rngs=nnx.Rngs(0))(x, initial_carry=initial)
        x = x + y if number >= residual_from else y
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_layers_equal_those_of_flax(gpu, kind):
    made = cells(kind)
    graph, params, rest = nnx.split(nnx.List(made), nnx.Param, ...)
    carry = random(1, LAYERS, ROWS, WIDTH), random(2, LAYERS, ROWS, WIDTH)
    x = random(3, ROWS, TIME, WIDTH)

    def merged(params):
        return nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))

    def ours(params, carry, x):
        return spmd.nn.RNNStack([*merged(params)], residual_from=2)(x, initial=carry)

    def flax(params, carry, x):
        return by_flax([*merged(params)], x, carry, residual_from=2)

    expected = values_and_gradients(flax, params, carry, x)
    with parallel_scope(on_gpu()):
        assert_close(values_and_gradients(ours, params, carry, x), expected, 1e-6)


def test_input_beside_that_of_a_layer_and_the_carry_afterwards(gpu):
    [cell] = cells(count=1, inputs=WIDTH + 2)
    x, beside = random(1, ROWS, TIME, WIDTH), random(2, ROWS, TIME, 2)
    run = nnx.RNN(cell, return_carry=True, rngs=nnx.Rngs(0))
    carry, y = run(jnp.concatenate([x, beside], axis=-1))
    stack = spmd.nn.RNNStack([cell])
    with parallel_scope(on_gpu()):
        ours, carries = stack(x, beside=beside, return_carry=True)
    assert_close((ours, carries), (y, jax.tree.map(lambda leaf: leaf[None], carry)), 1e-6)


def test_both_directions(gpu):
    forward, backward = cells(count=2)
    x = random(1, ROWS, TIME, WIDTH)
    expected = nnx.Bidirectional(
        nnx.RNN(forward, rngs=nnx.Rngs(0)), nnx.RNN(backward, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)
    )(x)
    with parallel_scope(on_gpu()):
        assert_close(spmd.nn.Bidirectional(forward, backward)(x), expected, 1e-6)


@pytest.mark.parametrize("axes", ["data=4", "data=2,stage=2", "data=1,stage=4"])
def test_rows_and_layers_over_devices(gpu, axes):
    mesh = spmd.make_mesh(axes, devices=jax.devices()[:4])
    options = {}
    if "stage" in axes:
        options["pipeline"] = spmd.Pipeline("stage", time_chunk=2)
    stack = spmd.nn.RNNStack(cells())
    x = random(1, ROWS, TIME, WIDTH)
    expected = values_and_gradients(lambda x: by_flax(cells(), x), x)
    with parallel_scope(on_gpu(mesh, **options)), jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        assert_close(values_and_gradients(stack, x), expected, 1e-6)


def test_binding_takes_what_it_is_given(monkeypatch):
    """JAX's own primitives, with the sizes that it would ask cuDNN for."""
    sizes = types.SimpleNamespace(
        compute_rnn_workspace_reserve_space_sizes=lambda *arguments: (1, 2)
    )
    monkeypatch.setattr(cudnn_lstm.rnn, "gpu_rnn", sizes)
    monkeypatch.setattr(cudnn_lstm, "_other_device", lambda parallel: None)
    stack = spmd.nn.RNNStack(cells())
    with parallel_scope(on_gpu()):
        program = jax.make_jaxpr(jax.grad(lambda x: stack(x).sum()))(random(1, ROWS, TIME, WIDTH))
    # in the loops over layers, forward and backward
    text = str(program)
    assert text.count("rnn_fwd[") == text.count("rnn_bwd[") == 1
    assert "num_layers=1" in text and f"hidden_size={WIDTH}" in text


def with_layer(name, layer):
    [cell] = cells(count=1)
    setattr(cell, name, layer)
    return [cell]


def linear(kind=nnx.Linear, **options):
    return kind(WIDTH, 4 * WIDTH, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("made", "options", "why"),
    [
        (
            with_layer("dense_i", linear(nnx.LoRALinear, lora_rank=2, use_bias=False)),
            {},
            "LoRALinear here",
        ),
        (with_layer("dense_i", linear()), {}, "has a bias, where flax makes none"),
        (with_layer("dense_h", linear(use_bias=False)), {}, "has no bias, where flax makes one"),
        (with_layer("dense_h", linear(precision="highest")), {}, "a precision of its own"),
        ([nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))], {}, "not GRUCell"),
        (cells(activation_fn=nnx.relu), {}, "activations with tanh alone"),
        (cells(dtype=jnp.bfloat16), {}, "takes float32, not bfloat16"),
        (cells(), {"lengths": jnp.full(ROWS, 2)}, "rows of one length"),
    ],
    ids=["adapter", "bias", "no bias", "precision", "cell", "activation", "dtype", "lengths"],
)
def test_what_cudnn_does_not_take(gpu, made, options, why):
    stack = spmd.nn.RNNStack(made)
    with (
        parallel_scope(on_gpu()),
        pytest.raises(LayoutError, match=f'implementation = "cudnn": .*{why}'),
    ):
        stack(random(1, ROWS, TIME, WIDTH), **options)


def test_other_features_than_those_of_the_cell_are_refused(gpu):
    stack = spmd.nn.RNNStack(cells(count=2, inputs=WIDTH + 2))
    with (
        parallel_scope(on_gpu()),
        pytest.raises(ModelError, match="gets 4 features, and its cell takes 6"),
    ):
        stack(random(1, ROWS, TIME, WIDTH))


@pytest.mark.parametrize("shape", [(ROWS, TIME, 2, WIDTH), (ROWS, 0, WIDTH)], ids=len)
def test_other_inputs_are_refused(gpu, shape):
    with (
        parallel_scope(on_gpu()),
        pytest.raises(
            LayoutError,
            match=r"takes x as \[time, rows, features\], none of them empty, not float32",
        ),
    ):
        jax.eval_shape(spmd.nn.RNNStack(cells()), random(1, *shape))


def test_chunk_of_time_that_is_not_full_is_refused(gpu):
    mesh = spmd.make_mesh("data=1,stage=4", devices=jax.devices()[:4])
    parallel = on_gpu(mesh, pipeline=spmd.Pipeline("stage", time_chunk=4))
    with (
        parallel_scope(parallel),
        jax.set_mesh(mesh),
        pytest.raises(LayoutError, match="a last chunk of time that is not full"),
    ):
        jax.eval_shape(spmd.nn.RNNStack(cells()), random(1, ROWS, TIME, WIDTH))


def test_without_a_gpu_it_is_refused():
    stack = spmd.nn.RNNStack(cells())
    with (
        parallel_scope(on_gpu()),
        pytest.raises(LayoutError, match="needs a GPU, even to plan"),
    ):
        stack(random(1, ROWS, TIME, WIDTH))


FIT = {
    "loss": lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2),
    "optimizer": optax.sgd(0.1),
    "batch_size": ROWS,
    "steps": 1,
    "progress": False,
    "mesh": "data=8",
    "layout": spmd.Layout(recurrence=CUDNN),
}


@pytest.mark.parametrize("layout", ["data_parallel", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_that_of_flax(gpu, kind, layout):
    x, y = random(1, ROWS, TIME, WIDTH), random(2, ROWS, TIME, WIDTH)
    layout = dataclasses.replace(spmd.Layout.load(layout), recurrence=CUDNN)
    mesh = spmd.make_mesh("data=4", devices=jax.devices()[:4])
    options = FIT | {"mesh": mesh, "layout": layout, "steps": 3}
    result = spmd.fit(spmd.nn.RNNStack(cells(kind)), (x, y), **options)

    graph, params, rest = nnx.split(nnx.List(cells(kind)), nnx.Param, ...)

    @jax.jit
    def step(params):
        def loss(params):
            made = nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))
            return jnp.mean((by_flax([*made], x) - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    losses = []
    for _ in range(3):
        value, params = step(params)
        losses.append(value)
    assert_close(np.asarray(result.history["loss"]), np.asarray(losses), 1e-6)


def test_training_on_a_cpu_is_refused():
    x = random(1, ROWS, TIME, WIDTH)
    with pytest.raises(LayoutError, match="runs on NVIDIA GPUs, not on cpu") as caught:
        spmd.fit(spmd.nn.RNNStack(cells()), (x, x), **FIT)
    assert caught.value.fix == 'implementation = "auto".'
    spmd.fit(spmd.nn.RNNStack(cells()), (x, x), **(FIT | {"layout": spmd.Layout()}))


def test_model_without_such_layers_is_refused():
    x = random(1, ROWS, TIME, WIDTH)
    model = nnx.RNN(cells(count=1)[0], rngs=nnx.Rngs(0))
    with pytest.raises(LayoutError, match=r"calls no spmd\.nn\.RNNStack"):
        spmd.fit(model, (x, x), **FIT)
    layout = spmd.Layout(recurrence=spmd.Recurrence("hoisted"))
    spmd.fit(model, (x, x), **(FIT | {"layout": layout}))
