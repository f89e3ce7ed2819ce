"""Of jraph: a graph network that classifies graphs, as in its example for ogbg-molhiv, and a graph
convolution that classifies nodes.

A row is a batch of three graphs, padded; the loss is a sum and a count of what is no padding.
"""

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
import optax.contrib
from flax import linen

from benchmarks.public_models.case import ROWS, STEPS, Case, bound

GRAPHS, NODES, EDGES = 4, 16, 24  # of a row, with padding
FEATURES, CLASSES = 5, 3
SCHEDULE_FREE = optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2, eps=1e-3, weight_decay=1e-2)


class Perceptron(linen.Module):
    """Two layers."""

    size: int
    out: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.out)(linen.relu(linen.Dense(self.size)(x)))


class MessagePassing(linen.Module):
    """Two rounds of messages between embedded nodes, edges and graphs; logits of each graph."""

    size: int = 16

    @linen.compact
    def __call__(self, graphs):
        graphs = graphs._replace(globals=jnp.zeros((graphs.n_node.shape[0], 1)))
        graphs = jraph.GraphMapFeatures(
            linen.Dense(self.size), linen.Dense(self.size), linen.Dense(self.size)
        )(graphs)
        for out in (self.size, CLASSES):
            updates = [
                jraph.concatenated_args(Perceptron(self.size, size))
                for size in (self.size, self.size, out)
            ]
            graphs = jraph.GraphNetwork(*updates)(graphs)
        return graphs.globals


class Convolutions(linen.Module):
    """Two graph convolutions; logits of each node."""

    size: int = 16

    @linen.compact
    def __call__(self, graphs):
        graphs = jraph.GraphConvolution(linen.Dense(self.size), add_self_edges=True)(graphs)
        graphs = graphs._replace(nodes=linen.relu(graphs.nodes))
        return jraph.GraphConvolution(linen.Dense(CLASSES), add_self_edges=True)(graphs).nodes


class Attention(linen.Module):
    """Two graph attentions; logits of each node."""

    size: int = 16

    @linen.compact
    def __call__(self, graphs):
        for out in (self.size, CLASSES):
            query, logit = linen.Dense(out), linen.Dense(1)
            graphs = jraph.GAT(
                query, lambda sent, received, _, logit=logit: logit(linen.tanh(sent + received))
            )(graphs)
        return graphs.nodes


def padded(random):
    """Graphs of 2 to 4 nodes in one tuple, and their padding."""
    graphs = []
    for _ in range(GRAPHS - 1):
        nodes, edges = random.integers(2, 5), random.integers(2, 7)
        ends = random.integers(0, nodes, (2, edges))
        label = {"graph": random.integers(0, CLASSES, 1)}
        features = {
            "nodes": random.normal(size=(nodes, FEATURES)),
            "edges": random.normal(size=(edges, FEATURES)),
        }
        sizes = {"n_node": np.array([nodes]), "n_edge": np.array([edges])}
        graphs.append(
            jraph.GraphsTuple(
                **features, senders=ends[0], receivers=ends[1], globals=label, **sizes
            )
        )
    return jraph.pad_with_graphs(jraph.batch_np(graphs), NODES, EDGES, GRAPHS)


def graph_batches():
    random = np.random.default_rng(0)
    return [
        jax.tree.map(lambda *leaves: np.stack(leaves), *(padded(random) for _ in range(ROWS)))
        for _ in range(STEPS)
    ]


def of_graphs(model, batch):
    def of_one(graphs):
        real = jraph.get_graph_padding_mask(graphs)
        errors = optax.softmax_cross_entropy_with_integer_labels(
            model(graphs), graphs.globals["graph"]
        )
        return (errors * real).sum(), real.sum()

    total, count = jax.vmap(of_one)(batch)
    return total.sum(), count.sum()


def of_nodes(model, batch):
    """Nodes are of the class of their largest feature among the first."""

    def of_one(graphs):
        real = jraph.get_node_padding_mask(graphs)
        errors = optax.softmax_cross_entropy_with_integer_labels(
            model(graphs), graphs.nodes[:, :CLASSES].argmax(-1)
        )
        return (errors * real).sum(), real.sum()

    total, count = jax.vmap(of_one)(batch)
    return total.sum(), count.sum()


def cases():
    batches = graph_batches()
    one = jax.tree.map(lambda x: x[0], batches[0])
    left_out = {"bfloat16 codec": "that of SGD"}
    network = bound(MessagePassing(), one)
    return [
        Case("GraphNetwork", network, of_graphs, batches),
        Case(
            "GraphNetwork, schedule-free AdamW",
            network,
            of_graphs,
            batches,
            optimizer=SCHEDULE_FREE,
            left_out=left_out,
        ),
        Case("GraphConvolution", bound(Convolutions(), one), of_nodes, batches),
        Case("GAT", bound(Attention(), one), of_nodes, batches),
    ]
