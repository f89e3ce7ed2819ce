"""A stack that a circular pipeline keeps in the order of its stages is exported in the network's,
each layer with its own scales.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from trained import by_hand, says_what

import spmd


class Layer(nnx.Module):
    """One of a stack."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.dense(x))


class Deep(nnx.Module):
    """Eight layers."""

    def __init__(self, rngs):
        self.layers = spmd.nn.LayerStack([Layer(rngs) for _ in range(8)])

    def __call__(self, x):
        return self.layers(x)


@pytest.mark.system
def test_layers_in_the_order_of_stages(tmp_path):
    layout = spmd.Layout.load("pipeline")
    layout = dataclasses.replace(
        layout,
        pipeline=dataclasses.replace(
            layout.pipeline, schedule="circular", microbatches=4, groups=2
        ),
    )
    trainer = spmd.Trainer(
        lambda: Deep(nnx.Rngs(0)),
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.1),
        layout=layout,
        mesh="data=4,stage=2",
    )
    data = {
        "x": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32),
        "y": np.ones((32, 8), np.float32),
    }
    trainer.prepare(data)
    state, plain = trainer.init(data), Deep(nnx.Rngs(0))
    exact = spmd.export(trainer, state, tmp_path / "exact")
    kernel = np.asarray(jax.tree.leaves(nnx.state(plain, nnx.Param))[1])
    read = {
        stored.path: array
        for stored, array in zip(exact.arrays, spmd.load_exported(exact.folder).arrays, strict=True)
    }
    (path,) = (path for path in read if path.endswith("kernel"))
    assert kernel.shape == (8, 8, 8) and np.array_equal(read[path], kernel)
    assert not np.array_equal(jax.tree.leaves(state.params)[1], kernel), (
        "the state keeps another order"
    )
    np.testing.assert_allclose(
        spmd.load_exported(exact.folder).predict(data["x"]), plain(data["x"]), atol=1e-6
    )
    small = spmd.load_exported(
        spmd.export(trainer, state, tmp_path / "int8", weights="int8").folder
    )
    scales = [array[1].shape for array in small.arrays if isinstance(array, tuple)]
    assert scales == [(8, 1, 8)], "a layer's bias is one of eight, and no matrix"
    nnx.update(
        plain,
        jax.tree.map(
            lambda leaf: by_hand(leaf, layers=8) if leaf.ndim == 3 else leaf,
            nnx.state(plain, nnx.Param),
        ),
    )
    rounded = spmd.Trainer(
        lambda: plain, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1)
    )
    same = spmd.load_exported(spmd.export(rounded, rounded.init(data), tmp_path / "by hand").folder)
    says_what(small, same, spmd.load_exported(exact.folder), data["x"])
