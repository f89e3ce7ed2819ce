"""Batches of padded graphs, and two networks with two optimizers, train on several devices as in
plain JAX loops.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.errors import DataError
from tests.compare import assert_close

NODES, EDGES, GRAPHS = 12, 16, 3


class Graphs(NamedTuple):
    """As jraph's."""

    nodes: Any
    edges: Any
    senders: Any
    receivers: Any
    n_node: Any
    n_edge: Any
    globals: Any


def padded(seed):
    random = np.random.default_rng(seed)
    n_node, n_edge = random.integers(2, 5, GRAPHS - 1), random.integers(3, 7, GRAPHS - 1)
    ends = np.full((2, EDGES), NODES - 1, np.int32)
    ends[:, : n_edge.sum()] = random.integers(0, n_node.sum(), (2, n_edge.sum()))
    sizes = [
        np.append(part, size - part.sum()).astype("int32")
        for part, size in ((n_node, NODES), (n_edge, EDGES))
    ]
    nodes = random.normal(size=(NODES, 4)).astype("float32")
    return Graphs(nodes, None, *ends, *sizes, random.normal(size=(GRAPHS, 1)).astype("float32"))


class Messages(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.message, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, graphs):
        sent = nnx.tanh(self.message(graphs.nodes))[graphs.senders]
        nodes = self.out(jax.ops.segment_sum(sent, graphs.receivers, NODES))
        owner = jnp.repeat(jnp.arange(GRAPHS), graphs.n_node, total_repeat_length=NODES)
        return jax.ops.segment_sum(nodes, owner, GRAPHS)


def squared_error(model, batch):
    def of_one(graphs):
        real = (jnp.arange(GRAPHS) < GRAPHS - 1).astype("float32") * (graphs.n_node > 2)
        return (jnp.square(model(graphs) - graphs.globals)[:, 0] * real).sum(), real.sum()

    total, count = jax.vmap(of_one)(batch)
    return total.sum() / count.sum()


def stacked(first, count=16):
    return jax.tree.map(
        lambda *leaves: np.stack(leaves), *(padded(seed) for seed in range(first, first + count))
    )


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("layout", ["data_parallel", "fsdp"])
def test_padded_graphs_are_rows(layout):
    trainer = spmd.Trainer(
        lambda: Messages(),
        loss=squared_error,
        optimizer=optax.adam(0.05),
        mesh="data=8",
        layout=layout,
    )
    state, losses = trainer.init(), []
    graph, params = nnx.split(Messages())
    moments, right = optax.adam(0.05).init(params), []
    for step in range(4):
        state, metrics = trainer.step(state, stacked(16 * step))
        losses.append(metrics["loss"])
        value, grads = jax.value_and_grad(
            lambda params, batch: squared_error(nnx.merge(graph, params), batch)
        )(params, stacked(16 * step))
        updates, moments = optax.adam(0.05).update(grads, moments)
        params = optax.apply_updates(params, updates)
        right.append(value)
    np.testing.assert_allclose(losses, right, rtol=1e-5)


def test_graphs_that_are_no_rows_are_refused_with_the_way_to_stack_them():
    trainer = spmd.Trainer(
        lambda: Messages(), loss=squared_error, optimizer=optax.adam(0.05), mesh="data=8"
    )
    with pytest.raises(DataError, match="one row for each padded batch of graphs"):
        trainer.step(trainer.init(), padded(0))


class Gan(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.generator, self.critic = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 1, rngs=rngs)


def constant(module):
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.lax.stop_gradient(state))


def of_critic(model, batch):
    fake = jax.lax.stop_gradient(model.generator(batch["noise"]))
    return jax.nn.softplus(-model.critic(batch["x"])[:, 0]) + jax.nn.softplus(
        model.critic(fake)[:, 0]
    )


def of_generator(model, batch):
    return jax.nn.softplus(-constant(model.critic)(model.generator(batch["noise"]))[:, 0])


def labels(params):
    return jax.tree.map_with_path(
        lambda path, leaf: "critic" if "critic" in jax.tree_util.keystr(path) else "generator",
        params,
    )


def test_two_networks_with_two_optimizers_train_as_in_a_plain_loop():
    """The plain loop has a gradient for each network, of its own loss, and an optimizer for
    each.
    """
    random = np.random.default_rng(0)
    batches = [
        {
            "x": random.normal(size=(16, 6)).astype("float32"),
            "noise": random.normal(size=(16, 4)).astype("float32"),
        }
        for _ in range(4)
    ]
    optimizers = {"critic": optax.adam(4e-3), "generator": optax.adam(1e-3)}
    trainer = spmd.Trainer(
        lambda: Gan(),
        loss=lambda model, batch: of_critic(model, batch) + of_generator(model, batch),
        optimizer=optax.partition(optimizers, labels),
        mesh=spmd.make_mesh("data=2", devices=jax.devices()[:2]),
    )
    state = trainer.init()
    graph, params = nnx.split(Gan())
    params = nnx.to_pure_dict(params)
    moments = {name: optimizer.init(params[name]) for name, optimizer in optimizers.items()}
    for batch in batches:
        state, _ = trainer.step(state, batch)
        after = {}
        for name, loss in (("critic", of_critic), ("generator", of_generator)):
            grads = jax.grad(
                lambda own, name=name, loss=loss: loss(
                    nnx.merge(graph, params | {name: own}), batch
                ).mean()
            )(params[name])
            updates, moments[name] = optimizers[name].update(grads, moments[name])
            after[name] = optax.apply_updates(params[name], updates)
        params = after
    assert_close(jax.device_get(state.params), jax.device_get(params))
