"""`spmd.wire` in training loops that know nothing of it but `tx`: written by hand, `nnx.Optimizer`,
linen's `TrainState`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import spmd
from spmd import wire
from spmd.wire.codec import CODECS as REGISTERED
from spmd.wire.comm_log import read_collectives
from tests.wire.test_transformations import (
    CODECS,
    MESH,
    assert_same_bits,
    distance,
    make_batches,
    make_params,
    make_step,
    pmean,
)

ADAM = optax.adam(1e-2)
EVERY_CODEC = {"exact": wire.exact(), **CODECS}


class ByHand:
    """`jax.value_and_grad`, `tx.update`, `optax.apply_updates`."""

    def __init__(self, tx):
        self.params, self.state = make_params(), wire.init(tx, make_params(), MESH)
        self.step = make_step(tx, self.state, MESH)

    def train(self, batch):
        self.params, self.state = self.step(self.params, self.state, batch)

    def program(self, batch):
        return jax.make_jaxpr(self.step)(self.params, self.state, batch)


class Module(nnx.Module):
    def __init__(self):
        self.up, self.bias, self.down = (
            nnx.Param(make_params()[name]) for name in ("up", "bias", "down")
        )

    def __call__(self, x):
        return jnp.tanh(x @ self.up + self.bias) @ self.down


class NnxOptimizer:
    """`nnx.value_and_grad`, `optimizer.update`."""

    def __init__(self, tx):
        self.model = Module()
        with jax.set_mesh(MESH):
            self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)

        split = nnx.StateSharding({nnx.PathContains("residual"): jax.P("data"), ...: jax.P()})

        @nnx.jit
        @nnx.shard_map(
            mesh=MESH, in_specs=(jax.P(), split, jax.P("data")), out_specs=None, check_vma=False
        )
        def step(model, optimizer, batch):
            grads = nnx.grad(lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2))(model)
            optimizer.update(model, grads)

        self.step = step

    def train(self, batch):
        self.step(self.model, self.optimizer, batch)

    def program(self, batch):
        graph, arrays = nnx.split((self.model, self.optimizer))
        return jax.make_jaxpr(lambda arrays: self.step(*nnx.merge(graph, arrays), batch))(arrays)

    @property
    def params(self):
        return {
            path[0]: variable[...] for path, variable in nnx.to_flat_state(nnx.state(self.model))
        }

    @property
    def state(self):
        return jax.tree.map(
            lambda leaf: leaf[...],
            self.optimizer.opt_state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        up, bias, down = (
            self.param(name, lambda key, n=name: make_params()[n])
            for name in ("up", "bias", "down")
        )
        return jnp.tanh(x @ up + bias) @ down


class LinenTrainState:
    """`state.apply_gradients`."""

    def __init__(self, tx):
        variables = Linen().init(jax.random.key(0), make_batches(1)[0][0])
        with jax.set_mesh(MESH):
            self.train_state = TrainState.create(
                apply_fn=Linen().apply, params=variables["params"], tx=tx
            )

        def step(state, batch):
            x, y = batch
            return state.apply_gradients(
                grads=jax.grad(
                    lambda params: jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)
                )(state.params)
            )

        specs = wire.specs(self.train_state)
        self.step = jax.jit(
            jax.shard_map(
                step, mesh=MESH, in_specs=(specs, jax.P("data")), out_specs=specs, check_vma=False
            )
        )

    def train(self, batch):
        self.train_state = self.step(self.train_state, batch)

    def program(self, batch):
        return jax.make_jaxpr(self.step)(self.train_state, batch)

    @property
    def params(self):
        return self.train_state.params

    @property
    def state(self):
        return self.train_state.opt_state


every_loop = pytest.mark.parametrize(
    "loop", [ByHand, NnxOptimizer, LinenTrainState], ids=lambda loop: loop.__name__
)


def train(loop, tx, steps=4):
    """The parameters and the optimizer state after some steps."""
    run = loop(tx)
    for batch in make_batches(steps):
        run.train(batch)
    return jax.tree.map(np.asarray, dict(run.params)), run.state


@pytest.mark.sampled(quick=3)
@every_loop
def test_exact_is_pmean_bit_for_bit(loop):
    ours, _ = train(loop, optax.chain(wire.all_reduce("data"), ADAM))
    plain, _ = train(loop, optax.chain(pmean("data"), ADAM))
    alone, _ = train(loop, ADAM)  # nothing reduced: device 0's own training
    assert_same_bits(ours, plain)
    assert distance(plain, alone) > 1e-3


def compare(codec):
    """The mean by `codec`; its state has, per parameter, the norm of what it lost and the workers'
    mean norm.
    """
    link = wire.all_reduce("data", codec, error_feedback=not codec.lossless)

    def init(params):
        zeros = jax.tree.map(lambda _: jnp.zeros(()), params)
        return {"link": link.init(params), "lost": zeros, "norm": zeros}

    def update(grads, state, params=None):
        means, link_state = link.update(grads, state["link"])
        lost = jax.tree.map(
            lambda mean, grad: jnp.linalg.norm(mean - jax.lax.pmean(grad, "data")), means, grads
        )
        norm = jax.tree.map(lambda grad: jax.lax.pmean(jnp.linalg.norm(grad), "data"), grads)
        return means, {"link": link_state, "lost": lost, "norm": norm}

    return optax.GradientTransformation(init, update)


@pytest.mark.sampled(system=4)
@every_loop
@pytest.mark.parametrize("name", EVERY_CODEC)
def test_codec_loses_at_most_its_bound(loop, name):
    codec = EVERY_CODEC[name]
    _, state = train(loop, optax.chain(compare(codec), ADAM), steps=1)
    lost, norm = (
        {path: float(x) for path, x in dict(state[0][key]).items()} for key in ("lost", "norm")
    )
    assert all(
        lost[path] <= codec.error * (2 + codec.error) * norm[path] + 1e-6 for path in norm
    ), (lost, norm)
    assert (max(lost.values()) > 1e-5) == (not codec.lossless)


def test_every_registered_codec_is_tested():
    assert {type(codec) for codec in EVERY_CODEC.values()} == {
        kind for kind in REGISTERED.values() if kind.__module__.startswith("spmd.")
    }


@pytest.fixture(scope="module")
def fitted():
    """Parameters and residuals after four steps of spmd's own trainer, by codec."""
    results = {}

    def fit(codec):
        if codec not in results:
            feedback = codec != "exact"
            gradients = spmd.Gradients(
                "all_reduce", codec, {"block": 16} if feedback else {}, error_feedback=feedback
            )
            trainer = spmd.Trainer(
                spmd.FunctionalModel(
                    lambda key: make_params(),
                    lambda params, x: jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"],
                ),
                loss=lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2),
                optimizer=ADAM,
                mesh="data=8",
                layout=spmd.Layout(gradients=gradients),
            )
            trainer.prepare(make_batches(1)[0])
            state = trainer.init()
            for batch in make_batches(4):
                state, _ = trainer.step(state, batch)
            results[codec] = jax.tree.map(np.asarray, (dict(state.params), dict(state.exchange)))
        return results[codec]

    return fit


@pytest.mark.sampled(quick=6)
@every_loop
@pytest.mark.parametrize("name", ["int8", "exact"])
def test_a_loop_equals_fit_to_the_last_bit(loop, name, fitted):
    codec = EVERY_CODEC[name]
    ours, state = train(
        loop, optax.chain(wire.all_reduce("data", codec, error_feedback=not codec.lossless), ADAM)
    )
    params, exchange = fitted(name)
    assert_same_bits(ours, params)
    assert set(exchange) == set(state[0].memory) and bool(exchange) == (name == "int8")
    for path, entry in exchange.items():
        np.testing.assert_array_equal(
            entry["residual"], np.asarray(state[0].memory[path]["residual"])
        )
        assert (entry["residual"][0] != entry["residual"][1]).any()  # of each worker its own
    other, _ = fitted("exact" if name == "int8" else "int8")
    assert distance(ours, other) > 1e-5


@pytest.mark.sampled(quick=4)
@every_loop
@pytest.mark.parametrize("name", EVERY_CODEC)
def test_bytes_sent_are_those_of_the_loops_own_program(loop, name):
    codec = EVERY_CODEC[name]
    tx = optax.chain(wire.all_reduce("data", codec, error_feedback=not codec.lossless), ADAM)
    counted = read_collectives(loop(tx).program(make_batches(1)[0]).jaxpr, {"data": 8}).bytes()
    assert counted == wire.bytes_sent(tx, make_params(), MESH) > 0
    if codec.lossless:
        assert counted == sum(-(-2 * 7 * leaf.size * 4 // 8) for leaf in make_params().values())
