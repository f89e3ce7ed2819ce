"""`fit(watch=...)`: histograms of the entire arrays under any layout, once for each watched step,
and nothing else changes.
"""

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
        self.w = nnx.Param(
            jnp.round(jax.random.uniform(rngs.params(), (WIDTH, WIDTH), minval=-1.2, maxval=1.2))
        )

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
    "fsdp and tensor": (
        "data=4,model=2",
        Layout(params=TENSOR, gradients=Gradients("reduce_scatter")),
    ),
    "data_parallel": ("data=8", "data_parallel"),
    "compiler": ("data=8", Layout(gradients=Gradients("compiler"))),
    "parameter_server": ("data=8", "parameter_server"),
    "pipeline": ("data=2,stage=4", Layout(pipeline=Pipeline("stage", microbatches=4))),
    "circular pipeline": (
        "data=2,stage=2",
        Layout(pipeline=Pipeline("stage", microbatches=4, schedule="circular", groups=2)),
    ),
    "1f1b": ("data=2,stage=4", Layout(pipeline=Pipeline("stage", microbatches=4, schedule="1f1b"))),
}


def train(
    folder, mesh="data=1", layout="data_parallel", *, model=None, data=None, steps=2, **options
):
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
    assert (
        x.max() < histogram.edges[-1]
        and np.histogram(x, histogram.edges)[0].tolist() == histogram.counts
    )
    assert sum(histogram.counts) == x.size
    return True


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The histograms of a run on one device, which equal those that numpy counts of gradients by
    `jax.grad`.
    """
    folder = tmp_path_factory.mktemp("plain")
    train(folder, steps=2, watch=1)
    graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    batch = {name: values[:ROWS] for name, values in DATA.items()}

    def loss(params):
        return ((nnx.merge(graphdef, params)(batch["x"]) - batch["y"]) ** 2).mean()

    grads = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    stack, entries = next(iter(jax.tree.leaves(grads["stack"]))), histograms(folder)[1]
    assert (
        equals_numpy(entries["gradients/up/w"], grads["up"]["w"])
        and len(np.unique(grads["up"]["w"])) > 20
    )
    layers = [entry for name, entry in entries.items() if name.startswith("gradients/stack/")]
    assert len(layers) == 4 and all(
        equals_numpy(entry, layer) for entry, layer in zip(layers, stack, strict=True)
    )
    assert len(entries) == 2 * (1 + 4)  # a weight that is used twice is counted once
    return histograms(folder)[1]


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_histograms_are_those_of_one_device(name, plain, tmp_path):
    mesh, layout = LAYOUTS[name]
    result = train(tmp_path / "run", mesh, layout, steps=1, watch=1)
    assert histograms(tmp_path / "run") == {1: plain}
    sharded = [
        leaf
        for leaf in jax.tree.leaves((result.state.params, result.state.opt))
        if not leaf.sharding.is_fully_replicated
    ]
    assert bool(sharded) == (name not in ("data_parallel", "compiler", "zero1"))


def linear(folder, layout="data_parallel", *, data=None, steps=1, **options):
    """A linear model that starts at 0: after one step of size 1 its weights are minus the gradient,
    to the bit.
    """
    options = {
        "watch": 1,
        "optimizer": optax.sgd(1.0),
        "shuffle": False,
        "checkpoint": folder,
        **options,
    }
    return fit(numbers(192) if data is None else data, steps=steps, layout=layout, **options)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("codec", ["exact", "int8", "sign"])
def test_gradients_are_those_that_the_optimizer_gets(codec, tmp_path):
    result = linear(
        tmp_path,
        Layout(gradients=Gradients("all_reduce", codec=codec, allow_biased=codec == "sign")),
    )
    (entries,) = histograms(tmp_path).values()
    weights = np.asarray(result.state.params["w"])
    assert equals_numpy(entries["gradients/w"], -weights) and equals_numpy(
        entries["parameters/w"], weights
    )


@pytest.mark.system
def test_gradients_of_microbatches_in_float16_have_no_scale(tmp_path):
    linear(tmp_path / "a", accumulate=2)
    linear(
        tmp_path / "b",
        accumulate=2,
        precision="float16",
        optimizer=spmd.optimizers.scale_loss(optax.sgd(1.0), 2.0**6),
    )
    ours, half = (
        spmd.loggers.Histogram(**histograms(tmp_path / name)[1]["gradients/w"]) for name in "ab"
    )
    assert sum(half.counts) == 8 and half.edges[0] - half.width <= ours.edges[0] <= half.edges[1]


class WithEmpty(Line):
    """A layer with a parameter that has no elements."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.empty = nnx.Param(jnp.zeros((0, WIDTH)))


@pytest.mark.system
def test_a_parameter_without_elements_has_an_empty_histogram(tmp_path):
    train(tmp_path, "data=8", model=lambda: WithEmpty(nnx.Rngs(0)), watch=1, steps=1)
    (entries,) = histograms(tmp_path).values()
    assert [entries[f"{kind}/empty"]["counts"] for kind in ("parameters", "gradients")] == [
        [0],
        [0],
    ]
    assert sum(entries["parameters/w"]["counts"]) == WIDTH**2


@pytest.mark.system
def test_numbers_that_are_not_finite_are_counted_separately(tmp_path):
    data = {"x": np.full((32, 8), 3e38, np.float32), "y": np.ones((32, 1), np.float32)}
    data["x"][:, 0], data["x"][:, 1] = 1.0, np.nan
    loggers = [Memory()]
    with pytest.raises(spmd.errors.DivergedError):
        linear(tmp_path, data=data, steps=3, loggers=loggers)
    # of the step whose loss is NaN, which ends the run
    assert [step for step, _ in loggers[0].histograms] == [1]
    linear(tmp_path / "on", data=data, callbacks=[spmd.callbacks.TerminateOnNaN(())])
    (entries,) = histograms(tmp_path / "on").values()
    assert all(
        entry["nan"] + entry["inf"] + sum(entry["counts"]) == 8 and entry["nan"]
        for entry in entries.values()
    )


class Memory:
    """A user's logger."""

    def __init__(self):
        self.histograms = []

    def write(self, record):
        self.histograms += (
            [(record["step"], sorted(record["histograms"]))] if "histograms" in record else []
        )

    def close(self):
        pass


def jitted_kinds(result):
    """The kinds of functions that a run has jitted."""
    return {key.kind for key in result.trainer._program.functions._jitted}


def test_watching_changes_nothing_else(tmp_path):
    options = {"steps": 7, "optimizer": optax.adam(0.05), "shuffle": True}
    ours, plain = (
        linear(tmp_path / "a", watch=3, **options),
        linear(tmp_path / "b", watch=None, **options),
    )
    assert same(ours.state, plain.state) and list(ours.history["loss"]) == list(
        plain.history["loss"]
    )
    assert list(histograms(tmp_path / "a")) == [3, 6]
    compiled = [result.trainer._program.functions.compilations() for result in (ours, plain)]
    assert compiled == [3, 1]  # with the step that counts, and the count of parameters
    assert jitted_kinds(plain) == {"step"}


@pytest.mark.parametrize(
    ("watch", "kinds"),
    [(Watch(2, gradients=False), ["parameters/w"]), (Watch(2, parameters=False), ["gradients/w"])],
    ids=str,
)
def test_one_kind_alone(watch, kinds, tmp_path):
    logger = Memory()
    result = linear(None, steps=4, watch=watch, loggers=[logger])
    assert logger.histograms == [(2, kinds), (4, kinds)]
    assert ("watched_step" in jitted_kinds(result)) == watch.gradients


@pytest.mark.system
def test_data_on_the_devices(tmp_path):
    options = {"steps": 11, "optimizer": optax.adam(0.05), "watch": 5}
    ours = linear(
        tmp_path / "a", data=spmd.data.resident(numbers(192), steps_per_call=3), **options
    )
    plain = linear(tmp_path / "b", **options)
    assert histograms(tmp_path / "a") == histograms(tmp_path / "b") and list(
        histograms(tmp_path / "a")
    ) == [5, 10]
    assert jitted_kinds(ours) == {
        "step",
        "scan_steps",
        "watched_step",
        "parameters",
    }
    assert same(ours.state.params, plain.state.params)


@pytest.mark.system
def test_resumed_run_continues_to_watch(tmp_path):
    options = {"optimizer": optax.adam(0.05), "watch": 2, "resume": True}
    linear(tmp_path / "a", steps=3, **options)
    linear(tmp_path / "a", steps=6, **options)
    linear(tmp_path / "b", steps=6, **options)
    assert histograms(tmp_path / "a") == histograms(tmp_path / "b") and list(
        histograms(tmp_path / "a")
    ) == [2, 4, 6]


REFUSED = {
    "nothing": ({"watch": lambda: Watch(2, parameters=False, gradients=False)}, "watches nothing"),
    "every": ({"watch": lambda: Watch(0)}, "Watch: every=0"),
    "a flag": ({"watch": lambda: Watch(2, gradients=1)}, "Watch: gradients=1"),
    "a word": ({"watch": lambda: "often"}, "watch='often'"),
    "no logger": ({"checkpoint": None}, "neither loggers nor a folder"),
    "traced": (
        {"profile": "3:5", "watch": lambda: 4},
        "step 4 counts gradients in another program",
    ),
    "workers": ({"layout": "diloco"}, 'in mode "local" each worker'),
    "servers": ({"layout": "parameter_server_async"}, 'in mode "asynchronous" each worker'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_watched_is_refused(name, tmp_path):
    options, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        linear(tmp_path, steps=6, **{**options, "watch": options.get("watch", lambda: 2)()})


@pytest.mark.system
def test_parameters_of_local_workers_are_those_of_the_servers(tmp_path):
    result = linear(
        tmp_path, "diloco", watch=Watch(4, gradients=False), steps=4, optimizer=optax.sgd(0.1)
    )
    assert equals_numpy(
        histograms(tmp_path)[4]["parameters/w"], result.trainer.rebuild(result.state).params["w"]
    )
