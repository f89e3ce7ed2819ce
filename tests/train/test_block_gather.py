"""Parameters of a list of blocks gathered block by block, and their gradients reduced in the backward pass of each."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd.errors import LayoutError
from spmd.wire.reduction import RESIDUAL
from tests.train.test_layer_gather import WIDTH, assert_close, batch, gathered_by_layer, loss, params, sharded, train, trainer_of

HIDDEN = 28
KERNEL = "blocks/1/down/kernel"
TENSOR_PARALLEL = (
    spmd.Rule("blocks/*/up/kernel", ("data", "model")),
    spmd.Rule("blocks/*/down/kernel", ("model", "data")),
    spmd.Rule("blocks/*/up/bias", ("model",)),
)


class Block(nnx.Module):
    def __init__(self, rngs, dropout=0.0, normed=False):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if normed else nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, scale=None, *, gain=1):
        return x + gain * self.drop(self.down(nnx.gelu(self.up(self.norm(x))))) * (1 if scale is None else scale)


class Net(nnx.Module):
    def __init__(self, blocks=4, order=None, **options):
        rngs = nnx.Rngs(0, dropout=1)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, **options) for _ in range(blocks)])
        self.out, self.order = nnx.Linear(WIDTH, 3, rngs=rngs), range(blocks) if order is None else order

    def __call__(self, x):
        scale = jnp.tanh(self.first(x))
        for number in self.order:
            x = self.blocks[number](x, scale, gain=2)
        return self.out(x)


class LinenBlock(linen.Module):
    dropout: float = 0.0
    normed: bool = False

    @linen.compact
    def __call__(self, x, scale, train=True):
        x0 = x
        x = linen.BatchNorm(use_running_average=not train)(x) if self.normed else linen.LayerNorm()(x)
        x = linen.Dense(WIDTH, name="down")(linen.gelu(linen.Dense(HIDDEN, name="up")(x)))
        return x0 + linen.Dropout(self.dropout, rng_collection="params", deterministic=not train)(x) * scale


class LinenNet(linen.Module):
    dropout: float = 0.0
    normed: bool = False

    @linen.compact
    def __call__(self, x, train=True):
        scale = jnp.tanh(linen.Dense(WIDTH)(x))
        for number in range(3):
            x = LinenBlock(self.dropout, self.normed, name=f"layers_{number}")(x, scale, train=train)
        return linen.Dense(3)(x)


RECOMPUTED = spmd.Remat(modules=("blocks/*",))
CASES = {
    "plain": {},
    "another order": {"net": lambda: Net(order=(2, 0, 1, 3))},
    "a block without influence": {"net": lambda: Detached()},
    "accumulation": {"accumulate": 2},
    "dropout and accumulation": {"net": lambda: Net(dropout=0.5), "accumulate": 2},
    "batch statistics": {"net": lambda: Net(normed=True)},
    "everything recomputed": {"remat": spmd.Remat("nothing")},
    "blocks recomputed": {"remat": RECOMPUTED},
    "blocks recomputed, dropout": {"remat": RECOMPUTED, "net": lambda: Net(dropout=0.5)},
    "products kept": {"remat": spmd.Remat("dots")},
    "tensor parallel": {"params": TENSOR_PARALLEL, "mesh": "data=4,model=2"},
    "linen": {"net": lambda: LinenNet()},
    "linen, dropout": {"net": lambda: LinenNet(0.5), "accumulate": 2},
    "linen, batch statistics": {"net": lambda: LinenNet(normed=True)},
    "linen, recomputed": {"net": lambda: LinenNet(0.5), "remat": spmd.Remat(modules=("layers_*",))},
}


class Detached(Net):
    def __call__(self, x):
        for number in (0, 1):
            x = self.blocks[number](x)
        y = self.blocks[2](x)
        return self.out(x) + 0 * jax.lax.stop_gradient(self.blocks[3](y)).sum(-1, keepdims=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_blocks_gathered_one_by_one_train_as_on_one_device(case):
    options = {"net": lambda: Net()} | CASES[case]
    rules, remat = options.pop("params", ()), options.pop("remat", None)
    layer, full = (trainer_of(sharded(gather, params=rules, remat=remat), **options) for gather in ("layer", "full"))
    one = trainer_of("data_parallel", **options | {"mesh": "data=1"})
    states = [start(trainer) for trainer in (layer, full, one)]
    path = "layers_1/down/kernel" if "linen" in case else KERNEL
    assert path in gathered_by_layer(layer) and path not in gathered_by_layer(full)
    assert_close(params(states[0]), params(states[2]))
    for ours, theirs in zip(*(jax.tree.leaves(jax.device_get(state.stats)) for state in states[::2]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def start(trainer, steps=3):
    state = trainer.init(batch())
    for number in range(steps):
        state, _ = trainer.step(state, batch(number))
    return state
