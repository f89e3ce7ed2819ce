"""Small stacks, and their values and gradients: sharded along a mesh axis, or on one device."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import spmd
from spmd.nn.parallel_context import ParallelConfig, parallel_scope

WIDTH = 8


class Block(nnx.Module):
    """A transformer's block: causal attention and an MLP."""

    def __init__(self, rngs, dropout=0.0):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mixed = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs),
            nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs),
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        query, key, value = jnp.split(self.mixed(self.norm(x))[:, :, None], 3, axis=-1)
        x = x + self.dropout(
            jax.nn.dot_product_attention(query, key, value, is_causal=True)[:, :, 0]
        )
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


class Conv(nnx.Module):
    """A convolution whose gradient is infinite at zeros: what an idle stage computes would be
    NaN.
    """

    def __init__(self, rngs):
        self.conv = nnx.Conv(WIDTH, WIDTH, (3, 3), rngs=rngs)

    def __call__(self, x):
        y = x + jnp.tanh(self.conv(x))
        return y / jnp.sqrt(jnp.square(x).sum(axis=(1, 2, 3), keepdims=True))


def layers(kind, count=8, dropout=0.0):
    """A stack of this kind, and an input of 16 rows."""
    rngs, rows = nnx.Rngs(0), np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rows.normal(size=(16, *shape)), jnp.float32)

    if kind in ("lstm", "gru"):
        cell = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}[kind]
        cells = [cell(WIDTH, WIDTH, rngs=rngs) for _ in range(count)]
        return spmd.nn.RNNStack(cells, residual_from=2, dropout=dropout, rngs=rngs), draw(12, WIDTH)
    if kind == "gpt":
        return spmd.nn.LayerStack([Block(rngs, dropout) for _ in range(count)]), draw(6, WIDTH)
    return spmd.nn.LayerStack([Conv(rngs) for _ in range(count)]), draw(6, 6, WIDTH)


def parallel_config(mesh, unroll=False, **pipeline):
    """A mesh of these sizes along `data` and `stage`, and a pipeline on it."""
    data, stage = mesh
    made = spmd.make_mesh(f"data={data},stage={stage}", devices=jax.devices()[: data * stage])
    return ParallelConfig(made, ("data",), spmd.Pipeline("stage", **pipeline), unroll=unroll)


def loss_of(stack, how, **inputs):
    """(params, x) -> a number that depends on every output, and the outputs."""
    graphdef, *parts = nnx.split(stack, nnx.Param, ...)
    params, rest = (nnx.to_pure_dict(part) for part in parts)

    def loss(params, x):
        with parallel_scope(how):
            y = nnx.merge(graphdef, params, rest)(x, **inputs)
        weights = [
            jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
            for leaf in jax.tree.leaves(y)
        ]
        return sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(y), weights, strict=True)), y

    return loss, params


def run(stack, x, how, **inputs):
    """Outputs, and gradients of parameters and of x."""
    loss, params = loss_of(stack, how, **inputs)
    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    return jax.device_get(y), jax.device_get(grads)
