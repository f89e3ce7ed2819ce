"""An evaluation in batches gives the loss and metrics of all rows at once, as plain JAX does, or
names those that it does not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.nn import LayerStack

CE = optax.softmax_cross_entropy_with_integer_labels
FEATURES, CLASSES, LENGTH = 8, 3, 6
MODEL = spmd.FunctionalModel(
    lambda key: {"w": jax.random.normal(key, (FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)},
    lambda params, x: x @ params["w"] + params["b"],
)


def data(rows):
    random = np.random.default_rng(0)
    lengths = random.integers(1, LENGTH + 1, rows)
    lengths[rows // 3 : rows // 2] = 0  # one batch has no token that counts
    return {
        "x": random.normal(size=(rows, FEATURES)).astype("float32"),
        "y": random.integers(0, CLASSES, rows).astype("int32"),
        "tokens": random.integers(0, CLASSES, (rows, LENGTH)).astype("int32"),
        "mask": (np.arange(LENGTH) < lengths[:, None]).astype("float32"),
    }


def logits_of_tokens(model, batch):
    return jnp.broadcast_to(model(batch["x"])[:, None], (*batch["tokens"].shape, CLASSES))


def token_mean(model, batch):
    return (CE(logits_of_tokens(model, batch), batch["tokens"]) * batch["mask"]).sum() / batch[
        "mask"
    ].sum()


def masked_sum(model, batch):
    return (model(batch["x"])[:, 0] * batch["mask"][:, 0]).sum()


def f1(model, batch):
    guess, right = model(batch["x"]).argmax(-1) == 1, batch["y"] == 1
    return 2 * (guess & right).sum() / (guess.sum() + right.sum())


def macro_recall(model, batch):
    hits = jnp.zeros(CLASSES).at[batch["y"]].add(model(batch["x"]).argmax(-1) == batch["y"])
    return (hits / jnp.maximum(jnp.bincount(batch["y"], length=CLASSES), 1)).mean()


def correlation(model, batch):
    first, second = model(batch["x"])[:, 0], batch["x"][:, 0]
    means = [
        first.mean(),
        second.mean(),
        (first * second).mean(),
        (first**2).mean(),
        (second**2).mean(),
    ]
    return (means[2] - means[0] * means[1]) / jnp.sqrt(
        (means[3] - means[0] ** 2) * (means[4] - means[1] ** 2)
    )


EXACT = {
    "a mean over tokens": token_mean,
    "a mean where": lambda model, batch: jnp.mean(
        CE(logits_of_tokens(model, batch), batch["tokens"]), where=batch["mask"] > 0
    ),
    "at least one": lambda model, batch: (
        (CE(model(batch["x"]), batch["y"]) * (batch["y"] > 0)).sum()
        / jnp.maximum((batch["y"] > 0).sum(), 1)
    ),
    "a count that is never 0": lambda model, batch: (
        masked_sum(model, batch) / (batch["mask"][:, 0].sum() + 1e-8)
    ),
    "f1": f1,
    "a root mean square": lambda model, batch: jnp.sqrt(
        (CE(model(batch["x"]), batch["y"]) ** 2).mean()
    ),
    "perplexity": lambda model, batch: jnp.exp(token_mean(model, batch)),
    "a sum over the number of rows": lambda model, batch: jnp.log(
        CE(model(batch["x"]), batch["y"]).sum() / len(batch["x"])
    ),
    "a root of a sum over rows": lambda model, batch: jnp.sqrt(
        (CE(model(batch["x"]), batch["y"]) ** 2).sum() / batch["x"].shape[0]
    ),
    "with a penalty of the outputs": lambda model, batch: (
        token_mean(model, batch) + 0.1 * jnp.abs(model(batch["x"]).mean())
    ),
    "of the model alone": lambda model, batch: (
        token_mean(model, batch) + (model(jnp.ones((1, FEATURES))) ** 2).sum()
    ),
    "recall of classes": macro_recall,
    "a correlation": correlation,
    "a jitted function": lambda model, batch: jax.jit(
        lambda logits, y: jnp.sqrt(CE(logits, y).mean())
    )(model(batch["x"]), batch["y"]),
}
JOINED = {
    "largest": lambda model, batch: model(batch["x"]).max(),
    "in-batch negatives": lambda model, batch: CE(
        model(batch["x"]) @ model(batch["x"]).T, jnp.arange(len(batch["x"]))
    ).mean(),
    "ranks": lambda model, batch: (
        model(batch["x"])[:, 0].argsort().astype("float32") * jnp.arange(len(batch["x"]))
    ),
    "centred": lambda model, batch: jnp.abs(model(batch["x"]) - model(batch["x"]).mean(0)).mean(),
    "a sum": lambda model, batch: CE(model(batch["x"]), batch["y"]).sum(),
    "a sum over a number": lambda model, batch: CE(model(batch["x"]), batch["y"]).sum() / 16,
    "a branch": lambda model, batch: jax.lax.cond(
        batch["x"].sum() > 0, jnp.sin, jnp.cos, model(batch["x"])
    ).mean(),
}
MEANS = {
    "rows": lambda model, batch: CE(model(batch["x"]), batch["y"]),
    "mean": lambda model, batch: CE(model(batch["x"]), batch["y"]).mean(),
    "pair": lambda model, batch: (
        (CE(model(batch["x"]), batch["y"]) * batch["y"]).sum(),
        batch["y"].sum(),
    ),
    "shipped": spmd.metrics.accuracy.on(inputs="x", targets="y"),
    "of parts": spmd.losses.of_parts(JOINED["largest"]),
}


def evaluated(loss, metrics, rows, batch_size, mesh="data=8", layout="data_parallel"):
    devices = jax.devices()[: spmd.MeshSpec.parse(mesh).size]
    trainer = spmd.Trainer(
        MODEL,
        loss=loss,
        metrics=metrics,
        optimizer=optax.sgd(0.1),
        mesh=spmd.make_mesh(mesh, devices=devices),
        layout=layout,
    )
    state, batch = trainer.init(data(8)), data(rows)
    found = trainer.evaluate(state, batch, batch_size=batch_size)
    params = jax.device_get(state.params)
    return found, lambda metric: metric(lambda x: MODEL.apply(params, x), batch)


def warnings(caplog):
    return [
        record.getMessage() for record in caplog.records if "the evaluation" in record.getMessage()
    ]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("rows", "batch_size", "mesh"),
    [(48, 16, "data=8"), (40, 16, "data=4"), (33, 16, "data=1")],
    ids=["even", "a short batch", "a single row"],
)
def test_functions_of_sums_are_those_of_all_rows(rows, batch_size, mesh, caplog):
    metrics = {name: metric for name, metric in EXACT.items() if metric is not token_mean}
    found, plain = evaluated(token_mean, metrics, rows, batch_size, mesh)
    assert found.pop("loss") == pytest.approx(float(plain(token_mean)), rel=1e-5)
    assert found == {
        name: pytest.approx(float(plain(metric)), rel=1e-5) for name, metric in metrics.items()
    }
    assert not warnings(caplog)


def test_what_joins_rows_is_named_once_and_the_rest_is_exact(caplog):
    metrics = JOINED | MEANS | {"f1": f1}
    found, plain = evaluated(JOINED["in-batch negatives"], metrics, 48, 16)
    (line,) = warnings(caplog)
    assert line.split('"')[1::2] == ["loss", *sorted(JOINED)]
    assert found["f1"] == pytest.approx(float(plain(f1)), rel=1e-5)
    for name in ("rows", "mean"):
        assert found[name] == pytest.approx(float(jnp.mean(plain(MEANS[name]))), rel=1e-5)
    total, count = plain(MEANS["pair"])
    assert found["pair"] == pytest.approx(float(total / count), rel=1e-5)


DEPENDENT = {
    "a mean and a sum": lambda model, batch: (
        token_mean(model, batch) + 1e-3 * (model(batch["x"]) ** 2).sum()
    ),
    "a root of a sum": lambda model, batch: jnp.sqrt((model(batch["x"]) ** 2).sum() / 16),
}


def test_functions_that_depend_on_the_number_of_rows_are_named(caplog):
    found, plain = evaluated(token_mean, DEPENDENT, 48, 16)
    lines = warnings(caplog)
    assert {line.split('"')[1] for line in lines} == {*DEPENDENT} and all(
        "fix:" in line for line in lines
    )
    root = DEPENDENT["a root of a sum"]
    assert found["a root of a sum"] == pytest.approx(float(plain(root)), rel=1e-5)
    assert found["loss"] == pytest.approx(float(plain(token_mean)), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_many_batches_keep_their_bits(dtype):
    """A count of 70,000 is too large for float16, and rounded in bfloat16."""

    def positive(model, batch):
        counts = jnp.ones_like(batch["x"], dtype=dtype)
        return (counts * (batch["x"] > 0)).sum() / counts.sum()

    rows = 70_016
    data = {
        "x": np.random.default_rng(0).normal(size=rows).astype("float32"),
        "y": np.zeros(rows, np.int32),
    }
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros(CLASSES)}, lambda params, x: x[:, None] * params["w"]
    )
    trainer = spmd.Trainer(
        model,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        mesh="data=8",
        metrics={"positive": positive},
    )
    found = trainer.evaluate(trainer.init(), data, batch_size=128)["positive"]
    assert found == pytest.approx(float((data["x"] > 0).mean()), abs=2e-3)


def test_batches_of_one_row_are_evaluated(caplog):
    found, plain = evaluated(token_mean, {"f1": f1}, 12, 1, "data=1")
    assert found["loss"] == pytest.approx(float(plain(token_mean)), rel=1e-5) and found[
        "f1"
    ] == pytest.approx(float(plain(f1)), rel=1e-5)


def test_losses_of_one_number_of_rows_are_evaluated_and_named(caplog):
    """Nothing can be read of a loss that takes no other number of rows; its mean over batches is
    right or not.
    """

    def fixed(model, batch):
        return CE(model(batch["x"]).reshape(16, CLASSES), batch["y"]).sum() / 16

    found, plain = evaluated(fixed, {}, 48, 16, "data=1")
    (line,) = warnings(caplog)
    assert line.split('"')[1] == "loss"
    assert found["loss"] == pytest.approx(
        float(plain(lambda model, batch: CE(model(batch["x"]), batch["y"]).mean())), rel=1e-5
    )


def test_one_batch_is_all_rows(caplog):
    found, plain = evaluated(token_mean, JOINED, 48, 48)
    assert found["in-batch negatives"] == pytest.approx(
        float(plain(JOINED["in-batch negatives"])), rel=1e-5
    )
    assert not warnings(caplog)


@pytest.mark.parametrize("layout", ["fsdp", "pipeline"])
def test_layouts_evaluate_functions_of_sums(layout, caplog):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

        def __call__(self, x):
            return x + nnx.tanh(self.linear(x))

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = LayerStack([Layer(rngs) for _ in range(4)])
            self.out = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.out(self.layers(x))

    batch, model = data(48), Net()
    mesh = "data=2,stage=4" if layout == "pipeline" else "data=8"
    trainer = spmd.Trainer(
        lambda: Net(), loss=token_mean, optimizer=optax.sgd(0.1), mesh=mesh, layout=layout
    )
    right = float(token_mean(model, batch))
    assert trainer.evaluate(trainer.init(data(16)), batch, batch_size=16)["loss"] == pytest.approx(
        right, rel=1e-5
    )
    assert not warnings(caplog)
