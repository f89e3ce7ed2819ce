"""`fit(watch=...)`: histograms of the entire arrays under any layout, once for each watched step, and nothing else changes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small import fit, numbers, same

import spmd
from spmd import Gradients, Layout, Pipeline, Rule, Watch
from spmd.errors import OptionError

WIDTH, ROWS = 8, 32
RANDOM = np.random.default_rng(0)


class Line(nnx.Module):
    """A layer of whole numbers, whose gradients are so small that every sum of them is exact."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.round(jax.random.uniform(rngs.params(), (WIDTH, WIDTH), minval=-1.2, maxval=1.2)))

    def __call__(self, x):
        return x @ self.w[...]


class Net(nnx.Module):
    """A stack between two layers, of which one is used twice."""

    def __init__(self, rngs):
        self.up, self.stack = Line(rngs), spmd.nn.LayerStack([Line(rngs) for _ in range(4)])

    def __call__(self, x):
        return self.stack(self.up(x)) @ self.up.w[...].T


X = RANDOM.integers(-1, 2, (2 * ROWS, WIDTH)).astype(np.float32)
DATA = {"x": X, "y": np.roll(X, 1, 1)}
TENSOR = (Rule("up/w", ("data", "model")), Rule("stack/**", ("model", "data")))
LAYOUTS = {
    "zero1": ("data=8", "zero1"),
    "fsdp": ("data=8", "fsdp"),
    "fsdp and tensor": ("data=4,model=2", Layout(params=TENSOR, gradients=Gradients("reduce_scatter"))),
    "data_parallel": ("data=8", "data_parallel"),
    "compiler": ("data=4,model=2", Layout(gradients=Gradients("compiler"))),
    "parameter_server": ("data=8", "parameter_server"),
    "pipeline": ("data=2,stage=4", Layout(pipeline=Pipeline("stage", microbatches=4))),
    "circular pipeline": ("data=2,stage=2", Layout(pipeline=Pipeline("stage", microbatches=4, groups=2))),
}


def train(folder, mesh="data=1", layout="data_parallel", *, model=None, data=None, steps=2, **options):
    count = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    options = {"watch": 2, "optimizer": optax.sgd(2.0**-3), "shuffle": False, **options}
    return spmd.fit(
        model or (lambda: Net(nnx.Rngs(0))),
        DATA if data is None else data,
        loss=spmd.losses.mean_squared_error,
        mesh=spmd.make_mesh(mesh, devices=jax.devices()[:count]),
        layout=layout,
        batch_size=ROWS,
        steps=steps,
        checkpoint=folder,
        **options,
    )


def histograms(folder):
    """By step, from the run's records; each step has one record of them."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(record["step"], record["histograms"]) for record in records if "histograms" in record]
    assert len(dict(found)) == len(found)
    return dict(found)


def equals_numpy(entry, x):
    """Whether an entry is that of an array whose elements are all finite."""
    histogram = spmd.loggers.Histogram(**entry)
    x = np.asarray(x, np.float64).ravel()
    assert x.max() < histogram.edges[-1] and np.histogram(x, histogram.edges)[0].tolist() == histogram.counts
    assert sum(histogram.counts) == x.size
    return True


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The histograms of a run on one device, which equal those that numpy counts of gradients by `jax.grad`."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, steps=2, watch=1)
    graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    batch = {name: values[:ROWS] for name, values in DATA.items()}

    def loss(params):
        return ((nnx.merge(graphdef, params)(batch["x"]) - batch["y"]) ** 2).mean()

    grads = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    stack, entries = next(iter(jax.tree.leaves(grads["stack"]))), histograms(folder)[1]
    assert equals_numpy(entries["gradients/up/w"], grads["up"]["w"]) and len(np.unique(grads["up"]["w"])) > 20
    layers = [entry for name, entry in entries.items() if name.startswith("gradients/stack/")]
    assert len(layers) == 4 and all(equals_numpy(entry, layer) for entry, layer in zip(layers, stack, strict=True))
    assert len(entries) == 2 * (1 + 4)  # a weight that is used twice is counted once
    return histograms(folder)[1]


@pytest.mark.system
@pytest.mark.parametrize("name", LAYOUTS)
def test_histograms_are_those_of_one_device(name, plain, tmp_path):
    mesh, layout = LAYOUTS[name]
    result = train(tmp_path / "run", mesh, layout, steps=1, watch=1)
    assert histograms(tmp_path / "run") == {1: plain}
    sharded = [leaf for leaf in jax.tree.leaves((result.state.params, result.state.opt)) if not leaf.sharding.is_fully_replicated]
    assert bool(sharded) == (name not in ("data_parallel", "compiler", "zero1"))
