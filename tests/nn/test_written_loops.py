"""Loops over time of models that are used unchanged, under `[recurrence]`: they train as a plain
loop of Flax and optax does, with less in their loops.
"""

import dataclasses
import functools
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import spmd
from spmd.base.tree import flatten
from spmd.errors import LayoutError, OptionError
from spmd.layout.toml_reader import loads
from spmd.layout.toml_writer import dumps
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from spmd.nn.written_loops import hoist_loops
from spmd.train.step import train_step
from tests.compare import assert_close
from tests.nn.test_time_scan import products_by_place

ROWS, TIME, WIDTH, OUT = 16, 5, 8, 3


class Recurrent(nnx.Module):
    """Flax's recurrent layers: one of nnx, of rows of different lengths, and a bidirectional one.

    `nnx.RNN` draws the carry's key when it is called, and a model may not change when it only
    predicts: here the carry is given.
    """

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.second = nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
            nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
            rngs=rngs,
        )
        self.head = nnx.Linear(2 * WIDTH, OUT, rngs=rngs)

    def __call__(self, x, lengths):
        return self.head(self.second(self.first(x, seq_lengths=lengths), seq_lengths=lengths))


class LinenRecurrent(linen.Module):
    @linen.compact
    def __call__(self, x, lengths):
        x = linen.RNN(linen.LSTMCell(WIDTH))(x, seq_lengths=lengths)
        return linen.Dense(OUT)(linen.RNN(linen.GRUCell(WIDTH))(x, seq_lengths=lengths))


class OwnLoop(nnx.Module):
    """A loop of the model's own, over layers, in a loop over time."""

    def __init__(self):
        draw = functools.partial(jax.random.normal, jax.random.key(0))
        self.of_x = nnx.Param(0.3 * draw((WIDTH, WIDTH)))
        self.of_h = nnx.Param(0.3 * draw((WIDTH, WIDTH)))
        self.layers = nnx.Param(0.3 * draw((3, WIDTH, OUT)))

    def __call__(self, x, lengths):
        of_x, of_h = self.of_x[...], self.of_h[...]

        def step(h, x):
            h = jnp.tanh(x @ of_x + h @ of_h)
            return h, h

        _, y = jax.lax.scan(step, jnp.zeros((x.shape[0], WIDTH)), jnp.swapaxes(x, 0, 1))

        def layer(total, kernel):
            return total + jnp.sin(y @ kernel), None

        total, _ = jax.lax.scan(layer, jnp.zeros((*y.shape[:2], OUT)), self.layers[...])
        return jnp.swapaxes(total, 0, 1)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(ROWS, TIME, WIDTH)).astype(np.float32),
        "lengths": rng.integers(1, TIME + 1, ROWS),
        "y": rng.normal(size=(ROWS, TIME, OUT)).astype(np.float32),
    }


def loss(model, batch):
    return ((model(batch["x"], batch["lengths"]) - batch["y"]) ** 2).mean()


def trainer_of(model, implementation, layout="data_parallel", mesh="data=8", time_chunk=None):
    """A trainer. With a `time_chunk`, all steps are one chunk of a wavefront."""
    layout = spmd.Layout.load(layout)
    if layout.pipeline.axis is not None and time_chunk is not None:
        pipeline = dataclasses.replace(layout.pipeline, time_chunk=TIME)
        layout = dataclasses.replace(layout, pipeline=pipeline)
    recurrence = spmd.Recurrence(implementation, time_chunk)
    return spmd.Trainer(
        model,
        loss=loss,
        optimizer=optax.sgd(0.3),
        mesh=mesh,
        layout=dataclasses.replace(layout, recurrence=recurrence, mesh=()),
    )


def trained(trainer):
    state = trainer.init(batch())
    before = jax.device_get(state.params)
    for seed in range(3):
        state, _ = trainer.step(state, batch(seed))
    return before, jax.device_get(state.params)


def plainly_trained(model, params):
    """Three steps of gradient descent on one device, from these parameters, without spmd."""
    if isinstance(model, nnx.Module):
        graph, state, rest = nnx.split(model, nnx.Param, ...)
        nnx.replace_by_pure_dict(state, nested(params))
        params = state

        def call(params, *inputs):
            return nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))(*inputs)
    else:
        params = {"params": nested(params)}
        call = model.apply

    @jax.jit
    def step(params, batch):
        def of_params(params):
            return loss(functools.partial(call, params), batch)

        return jax.tree.map(lambda p, g: p - 0.3 * g, params, jax.grad(of_params)(params))

    for seed in range(3):
        params = step(params, batch(seed))
    if isinstance(params, nnx.State):
        return nnx.to_pure_dict(params)
    return params["params"]


def nested(params):
    return flax.traverse_util.unflatten_dict(
        {tuple(path.split("/")): leaf for path, leaf in flatten(params).items()}
    )


MODELS = {"nnx": Recurrent, "linen": LinenRecurrent, "own loop": OwnLoop}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("layout", ["data_parallel", "zero1", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_plain_flax(name, layout):
    before, after = trained(trainer_of(MODELS[name](), "hoisted", layout))
    assert_close(nested(after), plainly_trained(MODELS[name](), before), 1e-6)


@pytest.mark.parametrize("name", ["linen", "own loop"])
def test_training_in_chunks_of_time_is_that_of_plain_flax(name):
    before, after = trained(trainer_of(MODELS[name](), "hoisted", "fsdp", time_chunk=2))
    assert_close(nested(after), plainly_trained(MODELS[name](), before), 1e-6)


def products_of(trainer):
    """Products of the step's program: in loops, and outside of them."""
    state, data = trainer.init(batch()), trainer.place(batch())
    step = trainer.prepare(batch())[0].make_step(ROWS, True)
    run = functools.partial(train_step, step)
    return products_by_place(run, state, data.leaves, data.weights, {})


@pytest.mark.parametrize(
    ("name", "as_it_is", "hoisted"),
    [
        # three layers: in the loops are left h W and its gradient by h, of each; outside are x W,
        # its gradients, and those of W; the head has three products
        ("nnx", (17, 3), (6, 14)),
        # the products of the loop over layers stay
        ("own loop", (8, 0), (5, 3)),
    ],
)
def test_only_recurrences_leave_their_loops(name, as_it_is, hoisted):
    found = {x: products_of(trainer_of(MODELS[name](), x)) for x in ("auto", "hoisted")}
    assert found == {"auto": as_it_is, "hoisted": hoisted}


class Stacked(nnx.Module):
    def __init__(self):
        cells = [nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(seed)) for seed in range(2)]
        self.stack = spmd.nn.RNNStack(cells)
        self.head = nnx.Linear(WIDTH, OUT, rngs=nnx.Rngs(5))

    def __call__(self, x, lengths):
        return self.head(self.stack(x, lengths=lengths))


class PlainStack(Stacked):
    """Flax's own layers, one after the other, without outputs after the end of a row."""

    def __call__(self, x, lengths):
        mask = jnp.arange(TIME)[:, None] < lengths[:, None, None]
        for number in range(2):
            cell = jax.tree.map(lambda leaf, number=number: leaf[number], self.stack.cells)
            x = jnp.where(mask, nnx.RNN(cell, rngs=nnx.Rngs(0))(x), 0)
        return self.head(x)


def test_stacks_have_all_implementations():
    trainers = {x: trainer_of(Stacked(), x) for x in ("auto", "as_written", "hoisted")}
    inside = {name: products_of(trainer)[0] for name, trainer in trainers.items()}
    assert inside == {"auto": 2, "as_written": 6, "hoisted": 2}
    for trainer in trainers.values():
        before, after = trained(trainer)
        assert_close(nested(after), plainly_trained(PlainStack(), before), 1e-6)


@pytest.mark.parametrize(
    ("layout", "mesh"), [("data_parallel", {"data": 8}), ("pipeline", {"data": 4, "stage": 2})]
)
def test_stacks_in_chunks_of_time(layout, mesh):
    """One layer after the other, and in a wavefront, whose chunks have more steps."""
    trainer = trainer_of(Stacked(), "auto", layout, mesh, time_chunk=2)
    before, after = trained(trainer)
    assert_close(nested(after), plainly_trained(PlainStack(), before), 1e-6)


@pytest.mark.system
def test_loops_in_the_layers_of_a_pipeline():
    class Layered(nnx.Module):
        def __init__(self):
            layers = []
            for seed in range(4):
                rngs = nnx.Rngs(seed)
                layers.append(nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs))
            self.stack = spmd.nn.LayerStack(layers)
            self.head = nnx.Linear(WIDTH, OUT, rngs=nnx.Rngs(5))

        def __call__(self, x, lengths):
            return self.head(self.stack(x))

    class Plain(Layered):
        def __call__(self, x, lengths):
            for number in range(4):
                x = self.stack.layer(number)(x)
            return self.head(x)

    trainer = trainer_of(Layered(), "hoisted", "pipeline", mesh={"data": 2, "stage": 4})
    before, after = trained(trainer)
    assert_close(nested(after), plainly_trained(Plain(), before), 1e-6)
    as_it_is = trainer_of(Layered(), "auto", "pipeline", mesh={"data": 2, "stage": 4})
    assert products_of(trainer)[0] < products_of(as_it_is)[0]


def test_model_without_a_loop_over_time():
    class Dense(nnx.Module):
        def __init__(self):
            self.head = nnx.Linear(WIDTH, OUT, rngs=nnx.Rngs(0))

        def __call__(self, x, lengths):
            return self.head(x)

    with pytest.raises(LayoutError, match="the loss has no loop over time"):
        trainer_of(Dense(), "hoisted").prepare(batch())
    why = "time_chunk = 2, but the loss calls no spmd.nn.RNNStack"
    with pytest.raises(LayoutError, match=why):
        trainer_of(OwnLoop(), "auto", time_chunk=2).prepare(batch())


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "stage": 2}])
def test_chunk_that_is_no_smaller_than_a_loop(mesh):
    """A wavefront divides time first; both fixes are tried."""
    layout = "pipeline" if "stage" in mesh else "data_parallel"
    with pytest.raises(LayoutError, match="the longest loop over time to which") as raised:
        trainer_of(Stacked(), "auto", layout, mesh, time_chunk=5).prepare(batch())
    most = int(re.match(r"at most (\d+), or leave it out.", raised.value.fix)[1])
    trainer_of(Stacked(), "auto", layout, mesh, time_chunk=most).prepare(batch())


def test_loops_that_are_not_computed_again_are_noted():
    class Mixed(OwnLoop):
        """Another loop, without a weight, and one of flax."""

        def __init__(self):
            super().__init__()
            self.rnn = nnx.RNN(nnx.GRUCell(OUT, OUT, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
            cells = [nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))]
            self.stack = spmd.nn.RNNStack(cells)

        def __call__(self, x, lengths):
            def step(h, x):
                h = 0.9 * h + 0.1 * x
                return h, h

            x = self.stack(x)
            _, x = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
            return self.rnn(super().__call__(jnp.swapaxes(x, 0, 1), lengths))

    notes = {}
    for implementation in ("auto", "hoisted"):
        trainer = trainer_of(Mixed(), implementation, time_chunk=2)
        trainer.prepare(batch())
        notes[implementation] = [note for note in trainer.notes() if "note: a loop over" in note]
    applies = 'it is not hoisted: "auto" applies to spmd.nn.RNNStack and spmd.nn.Bidirectional.'
    assert notes["auto"] == [f"note: a loop over 5 steps {applies.removeprefix('it ')}"]
    no_product = "is not computed again in chunks of time: it has no product of a weight and what"
    assert any(f"a loop over 5 steps {no_product}" in note for note in notes["hoisted"])


class ConvolutionalCell(nnx.RNNCellBase):
    def __init__(self):
        self.conv = nnx.Conv(2, 2, (3,), rngs=nnx.Rngs(0))

    def __call__(self, carry, x):
        carry = jnp.tanh(self.conv(carry + x))
        return carry, carry

    def initialize_carry(self, shape, rngs):
        return jnp.zeros(shape)

    @property
    def num_feature_axes(self):
        return 2


def test_rows_of_convolutional_cells_stay_on_their_workers():
    class Convolutional(nnx.Module):
        def __init__(self):
            self.stack = spmd.nn.RNNStack([ConvolutionalCell()])
            self.head = nnx.Linear(WIDTH, OUT, rngs=nnx.Rngs(5))

        def __call__(self, x, lengths):
            y = self.stack(x.reshape(*x.shape[:2], WIDTH // 2, 2))
            return self.head(y.reshape(*x.shape[:2], WIDTH))

    class Plain(Convolutional):
        def __call__(self, x, lengths):
            cell = jax.tree.map(lambda leaf: leaf[0], self.stack.cells)
            images = jnp.swapaxes(x.reshape(*x.shape[:2], WIDTH // 2, 2), 0, 1)
            _, y = jax.lax.scan(cell, jnp.zeros_like(images[0]), images)
            return self.head(jnp.swapaxes(y, 0, 1).reshape(*x.shape[:2], WIDTH))

    before, after = trained(trainer_of(Convolutional(), "auto"))
    assert_close(nested(after), plainly_trained(Plain(), before), 1e-6)


def test_loop_on_shards_of_the_model_stays():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)), jnp.float32)
    x = jnp.asarray(batch()["x"])

    def on_shards(weights, x):
        def step(h, x):
            h = jnp.tanh(x @ weights + h @ weights)
            return h, h

        return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[1]

    def total(weights):
        mapped = jax.shard_map(
            on_shards,
            mesh=mesh,
            in_specs=(P(), P("x")),
            out_specs=P(None, "x"),
        )
        return (mapped(weights, x) ** 2).sum()

    expected = jax.grad(total)(weights)
    parallel = ParallelConfig(recurrence=spmd.Recurrence("hoisted"))
    with parallel_scope(parallel):
        assert_close(jax.jit(jax.grad(hoist_loops(total)))(weights), expected, 1e-6)
    [note] = parallel.notes
    assert note.startswith("note: a loop over 5 steps is not hoisted: it is inside of a function")


def test_what_stays_in_a_loop_is_said():
    class Noisy(OwnLoop):
        def __call__(self, x, lengths):
            of_x, of_h = self.of_x[...], self.of_h[...]

            def step(h, inputs):
                x, key = inputs
                h = jnp.tanh(x @ of_x + h @ of_h + jax.random.normal(key, h.shape))
                return h, h[:, :OUT]

            keys = jax.random.split(jax.random.key(0), TIME)
            xs = jnp.swapaxes(x, 0, 1), keys
            _, y = jax.lax.scan(step, jnp.zeros((x.shape[0], WIDTH)), xs)
            return jnp.swapaxes(y, 0, 1)

    trainer = trainer_of(Noisy(), "hoisted")
    trainer.prepare(batch())
    [note] = [note for note in trainer.notes() if "a loop over" in note]
    assert note.startswith("note: a loop over 5 steps computes random_bits in each step, though")


def test_table_of_the_layout():
    layout = spmd.Layout(recurrence=spmd.Recurrence("hoisted", 64))
    assert '[recurrence]\nimplementation = "hoisted"\ntime_chunk = 64' in dumps(layout)
    assert loads(dumps(layout)) == layout
    with pytest.raises(OptionError, match="hoist") as raised:
        spmd.Recurrence("hoist")
    assert raised.value.fix == 'did you mean "hoisted"?'


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        ("time_chunk = 0", "a whole number from 1, or leave it out."),
        (
            'implementation = "as_written"\ntime_chunk = 8',
            'leave it out, or implementation = "hoisted".',
        ),
        ("time_chunk = 2.5", "such as 2."),
    ],
)
def test_chunk_that_cannot_be(lines, fix):
    with pytest.raises(LayoutError, match="time_chunk") as raised:
        loads(f"[recurrence]\n{lines}\n")
    assert fix in str(raised.value)
