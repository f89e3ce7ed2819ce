"""A step that sees rows in parts trains with the loss of the full batch, as plain JAX does, or is
refused with a fix that works.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.base.tree import flatten
from spmd.errors import LossError, SpmdError
from spmd.nn import LayerStack, RNNStack
from tests.train import plain

ROWS, FEATURES, CLASSES, WIDTH = 32, 8, 3, 16
CE = optax.softmax_cross_entropy_with_integer_labels


def data(seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 6, ROWS)
    lengths[4:9] = 0 if seed else 6  # from the second batch on, a worker has no token that counts
    return {
        "x": random.normal(size=(ROWS, FEATURES)).astype("float32"),
        "y": random.integers(0, CLASSES, ROWS).astype("int32"),
        "reward": random.normal(size=ROWS).astype("float32"),
        "tokens": random.integers(0, CLASSES, (ROWS, 6)).astype("int32"),
        "mask": (np.arange(6) < lengths[:, None]).astype("float32"),
    }


MODEL = spmd.FunctionalModel(
    lambda key: {"w": jax.random.normal(key, (FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)},
    lambda params, x: x @ params["w"] + params["b"],
)


def contrastive(model, batch):
    z = model(batch["x"])
    return CE(z @ jnp.roll(z, 1, axis=1).T, jnp.arange(len(z))).mean()


def contrastive_rows(model, batch):
    z = model(batch["x"])
    return CE(z @ jnp.roll(z, 1, axis=1).T, jnp.arange(len(z)))


def summed(model, batch):
    return CE(model(batch["x"]), batch["y"]).sum()


def divided(model, batch):
    return CE(model(batch["x"]), batch["y"]).sum() / ROWS


def weighted(model, batch):
    return jnp.average(CE(model(batch["x"]), batch["y"]), weights=1.0 + batch["y"])


def per_token(model, batch):
    logits = jnp.broadcast_to(model(batch["x"])[:, None], (*batch["tokens"].shape, CLASSES))
    return CE(logits, batch["tokens"]) * batch["mask"]


def token_mean(model, batch):
    return per_token(model, batch).sum() / batch["mask"].sum()


def token_pair(model, batch):
    return per_token(model, batch).sum(), batch["mask"].sum()


def normalised(model, batch):
    advantage = (batch["reward"] - batch["reward"].mean()) / (batch["reward"].std() + 1e-6)
    return -(advantage * jax.nn.log_softmax(model(batch["x"]))[:, 0]).mean()


def root_mean_square(model, batch):
    return jnp.sqrt(jnp.square(CE(model(batch["x"]), batch["y"])).mean())


def with_metrics(model, batch):
    guess, right = model(batch["x"]).argmax(-1) == 1, batch["y"] == 1
    return token_mean(model, batch), {
        "f1": 2 * (guess & right).sum() / (guess.sum() + right.sum()),
        "largest": model(batch["x"]).max(),
    }


def trainer_of(loss, model=MODEL, layout="data_parallel", mesh="data=8", reduction=None, **options):
    layout = spmd.Layout.load(layout) if isinstance(layout, str) else layout
    if reduction is not None:
        layout = dataclasses.replace(layout, gradients=spmd.Gradients(reduction))
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    return spmd.Trainer(
        model, loss=loss, optimizer=optax.sgd(0.5), mesh=mesh, layout=layout, **options
    )


def trained(trainer, steps=3):
    """Losses, parameters, and other metrics."""
    state, losses, metrics = trainer.init(data()), [], {}
    for seed in range(steps):
        state, metrics = trainer.step(state, data(seed))
        losses.append(metrics["loss"])
    return losses, jax.device_get(state.params), dict(metrics)


def plainly(loss, params, steps=3):
    """The same by a loop in plain JAX on one device."""
    losses, extra = [], {}
    for seed in range(steps):

        def value(params, batch):
            returned = loss(lambda x: MODEL.apply(params, x), batch)
            found, extra = (
                returned
                if isinstance(returned, tuple) and isinstance(returned[1], dict)
                else (returned, {})
            )
            return jnp.mean(found), extra

        (found, extra), grads = jax.value_and_grad(value, has_aux=True)(params, data(seed))
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        losses.append(found)
    return losses, params, extra


def check(loss, **options):
    """A trainer's losses, parameters and metrics are those of plain JAX."""
    trainer = trainer_of(loss, **options)
    losses, params, metrics = trained(trainer)
    right, weights, extra = plainly(
        loss, jax.device_get(trainer_of(loss, mesh="data=1").init(data()).params)
    )
    np.testing.assert_allclose(losses, right, rtol=2e-5)
    if jax.tree.map(np.shape, params) == jax.tree.map(np.shape, weights):  # servers pack them
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), params, weights
        )
    for name, metric in extra.items():
        np.testing.assert_allclose(metrics[name], metric, rtol=1e-5)
    return trainer


JOINING = {
    "in-batch negatives": contrastive,
    "one value per row that joins rows": contrastive_rows,
    "a sum": summed,
    "a sum over a number of rows written into it": divided,
    "a weighted mean": weighted,
    "a mean over tokens": token_mean,
    "normalised over the batch": normalised,
    "a root mean square": root_mean_square,
    "metrics that join rows": with_metrics,
}


@pytest.mark.sampled(quick=9)
@pytest.mark.parametrize("case", JOINING)
def test_workers_train_as_plain_jax_does(case):
    trainer = check(JOINING[case])
    assert [
        note for note in trainer.notes() if note.startswith("the loss is that of the full batch")
    ]


SERVERS = dataclasses.replace(
    spmd.Layout.load("parameter_server"), parameter_server=spmd.ParameterServer(workers=8)
)
WAYS = {
    "fsdp": {"layout": "fsdp"},
    "zero1": {"layout": "zero1"},
    "microbatches": {"mesh": "data=1", "accumulate": 4},
    "microbatches of workers": {"mesh": "data=4", "accumulate": 2},
    "servers": {"layout": SERVERS, "mesh": "data=4"},
    "one row for each worker": {"mesh": "data=8", "accumulate": 4},
}


@pytest.mark.sampled(quick=9)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", [token_mean, weighted, normalised])
def test_sums_that_weights_do_not_change_are_exact_everywhere(loss, way):
    check(loss, **WAYS[way])


@pytest.mark.parametrize(("codec", "error"), [("int8", 1e-2), ("bfloat16", 4e-3)])
def test_codecs_get_the_gradients_of_the_full_batch(codec, error):
    """Up to what they round: an entry of a gradient, and so of an update, by this part of the
    largest one.
    """
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"),
        gradients=spmd.Gradients("all_reduce", codec, error_feedback=True),
    )
    trainer = trainer_of(token_mean, layout=layout)
    start = jax.device_get(trainer.init(data()).params)
    (first, *_), params, _ = trained(trainer, 1)
    (right, *_), weights, _ = plainly(token_mean, start, 1)
    np.testing.assert_allclose(first, right, rtol=1e-5)
    for name, weight in weights.items():
        update = np.abs(weight - start[name]).max()
        np.testing.assert_allclose(params[name], weight, rtol=0, atol=error * update, err_msg=name)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("loss", [contrastive, root_mean_square])
@pytest.mark.parametrize(
    ("mesh", "accumulate", "seen"),
    [("data=1", 4, "in 4 microbatches"), ("data=2", 2, "by 2 workers, in 2 microb")],
)
def test_microbatches_of_a_loss_that_joins_rows_are_refused_with_a_fix(
    loss, mesh, accumulate, seen
):
    wanted = (
        r"^the loss joins rows with .* at test_full_batch.py:\d+, which depends on the weights, "
        rf"and .* sees the 32 rows of a batch {seen}"
    )
    with pytest.raises(LossError, match=wanted) as raised:
        trainer_of(loss, mesh=mesh, accumulate=accumulate).prepare(data())
    assert "accumulate=1" in raised.value.fix
    check(loss, mesh=mesh, reduction="compiler" if "compiler" in raised.value.fix else None)


def all_rows_at_once(model, batch):
    """Contrastive, written for this number of rows."""
    z = model(batch["x"])
    return CE(z @ z.T, jnp.arange(ROWS)).mean()


@pytest.mark.parametrize("layout", ["data_parallel", "fsdp", "zero1"])
def test_loss_for_one_number_of_rows_is_left_to_xla(layout):
    trainer = trainer_of(all_rows_at_once, layout=layout)
    start = jax.device_get(trainer.init(data()).params)
    losses, params, _ = trained(trainer)
    right, weights, _ = plainly(all_rows_at_once, start)
    np.testing.assert_allclose(losses, right, rtol=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(params[name], weight, rtol=0, atol=1e-5, err_msg=name)
    assert trainer.resolved.layout.gradients.reduction == "compiler"
    note = next(note for note in trainer.notes() if "mean over rows" in note)
    assert (
        "Incompatible shapes" in note
        and "So XLA sees all rows and places the collectives" in note
        and "returns (sum, count)" in note
    )


@pytest.mark.parametrize("layout", ["data_parallel_bf16", "parameter_server", "gathered by layer"])
def test_loss_for_one_number_of_rows_is_refused_where_workers_compute_gradients(layout):
    with pytest.raises(
        LossError,
        match=r"not known to be a mean over rows, and .* sees the 32 rows of a batch by 8 workers",
    ) as raised:
        trainer_of(
            all_rows_at_once, layout=BY_LAYER if layout == "gathered by layer" else layout
        ).prepare(data())
    assert (
        type(raised.value) is LossError and '[gradients] reduction = "compiler"' in raised.value.fix
    )


class Block(nnx.Module):
    def __init__(self, rngs, joins=False):
        self.up, self.down, self.joins = (
            nnx.Linear(WIDTH, 32, rngs=rngs),
            nnx.Linear(32, WIDTH, rngs=rngs),
            joins,
        )

    def __call__(self, x):
        x = x - x.mean(0) if self.joins else x
        return x + self.down(nnx.gelu(self.up(x)))


class Layered(nnx.Module):
    """A head on a stack of layers, on a list of blocks, or on recurrent layers."""

    def __init__(self, body):
        rngs = nnx.Rngs(0)
        self.embed, self.head = (
            nnx.Linear(FEATURES, WIDTH, rngs=rngs),
            nnx.Linear(WIDTH, CLASSES, rngs=rngs),
        )
        self.body = body(rngs)

    def __call__(self, x):
        x = self.embed(x)
        if isinstance(self.body, RNNStack):
            return self.head(self.body(x[:, None] * jnp.arange(1.0, 5.0)[:, None]).sum(1))
        for block in self.body if isinstance(self.body, nnx.List) else [self.body]:
            x = block(x)
        return self.head(x)


def stack(rngs):
    return LayerStack([Block(rngs) for _ in range(4)])


def blocks(rngs):
    return nnx.List([Block(rngs) for _ in range(4)])


def recurrent(rngs):
    return RNNStack([nnx.GRUCell(WIDTH, WIDTH, rngs=rngs) for _ in range(4)], rngs=rngs)


def joining(rngs):
    return LayerStack([Block(rngs, joins=True) for _ in range(4)])


def class_mean(model, batch):
    counts = (batch["y"] > 0).astype("float32") * (batch["reward"] > 0)
    return (CE(model(batch["x"]), batch["y"]) * counts).sum() / counts.sum()


BY_LAYER = dataclasses.replace(
    spmd.Layout.load("fsdp"),
    params=(),
    default=spmd.Default("shard:data"),
    gradients=spmd.Gradients("reduce_scatter", gather="layer"),
)
STACKS = {
    "layers are gathered one by one": (stack, BY_LAYER, "data=8"),
    "blocks are gathered one by one": (blocks, BY_LAYER, "data=8"),
    "recurrent layers are gathered one by one": (recurrent, BY_LAYER, "data=8"),
    "a pipeline": (stack, "pipeline", "data=2,stage=4"),
    "a wavefront": (recurrent, "pipeline", "data=2,stage=4"),
}


class Normed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden, self.norm = (
            nnx.Linear(FEATURES, WIDTH, rngs=rngs),
            nnx.BatchNorm(WIDTH, rngs=rngs),
        )
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.hidden(x))))


def train_plainly(make, loss, steps=3):
    """Losses of a loop in plain JAX and flax on one device."""
    graph, params, rest = nnx.split(make(), nnx.Param, ...)
    losses = []
    for seed in range(steps):
        value, grads = jax.value_and_grad(
            lambda params, batch: loss(nnx.merge(graph, params, rest, copy=True), batch)
        )(params, data(seed))
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        losses.append(value)
    return losses


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("layout", ["data_parallel", "fsdp"])
def test_batch_statistics_beside_a_loss_that_joins_rows_are_those_of_the_full_batch(layout):
    losses, _, _ = trained(trainer_of(class_mean, lambda: Normed(), layout))
    np.testing.assert_allclose(losses, train_plainly(Normed, class_mean), rtol=2e-5)


def test_batch_statistics_of_microbatches_beside_such_a_loss_are_refused_with_a_fix():
    with pytest.raises(
        LossError, match="such as BatchNorm averages over the rows of each part"
    ) as raised:
        trained(trainer_of(class_mean, lambda: Normed(), accumulate=2))
    assert "accumulate=1" in raised.value.fix and "(sum, count)" in raised.value.fix


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_statistics_of_microbatches_are_noted(accumulate):
    trainer = trainer_of(PER_ROW, lambda: Normed(), mesh="data=2", accumulate=accumulate)
    trainer.prepare(data())
    said = [
        note
        for note in trainer.notes()
        if "BatchNorm averages over the 16 rows of a microbatch, not over the 32 of the batch"
        in note
    ]
    assert len(said) == accumulate - 1


@pytest.mark.sampled(quick=8)
@pytest.mark.parametrize("case", STACKS)
def test_layers_that_a_layout_computes_in_its_own_way_train_as_plain_jax_does(case):
    """With a loss that divides by a number of all rows: layers are row by row, so workers share
    that number alone.
    """
    body, layout, mesh = STACKS[case]
    trainer = trainer_of(class_mean, lambda: Layered(body), layout, mesh)
    losses, _, _ = trained(trainer)
    np.testing.assert_allclose(losses, train_plainly(lambda: Layered(body), class_mean), rtol=2e-5)
    shares = trainer.prepare(data())[0].reading.shares
    assert shares and {share.how for share in shares} == {"sum"}


PER_ROW = spmd.losses.cross_entropy.on(inputs="x", targets="y")
JOINED_LAYERS = {
    "gathered one by one": (class_mean, BY_LAYER, "data=8"),
    "in a pipeline": (class_mean, "pipeline", "data=2,stage=4"),
    "in a pipeline, with one value per row": (PER_ROW, "pipeline", "data=1,stage=4"),
    "in a pipeline, by the compiler": (
        class_mean,
        dataclasses.replace(spmd.Layout.load("pipeline"), gradients=spmd.Gradients("compiler")),
        "data=1,stage=4",
    ),
}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("case", JOINED_LAYERS)
def test_layers_that_join_rows_are_refused_with_a_fix(case):
    loss, layout, mesh = JOINED_LAYERS[case]
    with pytest.raises(LossError, match="layers join rows") as raised:
        trained(trainer_of(loss, lambda: Layered(joining), layout, mesh), 1)
    mended = dataclasses.replace(BY_LAYER, gradients=spmd.Gradients("compiler"))
    assert ("such as fsdp" if "pipeline" in case else 'reduction = "compiler"') in raised.value.fix
    losses, _, _ = trained(trainer_of(loss, lambda: Layered(joining), mended, "data=8"), 1)
    assert losses[0] == pytest.approx(float(jnp.mean(loss(Layered(joining), data(0)))), rel=2e-5)


def test_a_recurrent_stack_with_dropout_needs_no_other_rows():
    """Its masks are those of the full batch at each time step, whichever rows a worker holds."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0, dropout=1)
            self.stack = RNNStack(
                [nnx.GRUCell(CLASSES, CLASSES, rngs=rngs) for _ in range(2)], dropout=0.5, rngs=rngs
            )

        def __call__(self, x):
            return self.stack(x)

    def loss(model, batch):
        return CE(model(batch["mask"][..., None] * jnp.ones(CLASSES)), batch["tokens"]).mean()

    reading = trainer_of(loss, lambda: Net()).prepare(data())[0].reading
    assert reading.mean and not reading.shares


def test_microbatches_of_sums_in_a_loop_are_refused():
    def loss(model, batch):
        weights = jax.lax.scan(
            lambda w, _: (w / w.sum(), None), batch["mask"].sum(1), None, length=2
        )[0]
        return (CE(model(batch["x"]), batch["y"]) * weights).sum()

    check(loss)
    with pytest.raises(
        LossError,
        match=r"joins rows with a sum over rows for div at .*, in a loop or a branch, and .* in 4 "
        r"microbatches",
    ):
        trainer_of(loss, mesh="data=1", accumulate=4).prepare(data())


def test_microbatches_share_sums_of_what_is_recomputed():
    def loss(model, batch):
        @jax.checkpoint
        def mean(x):
            return (CE(model(x), batch["y"]) * batch["mask"][:, 0]).sum() / batch["mask"][
                :, 0
            ].sum()

        return mean(batch["x"])

    check(loss)
    check(loss, mesh="data=2", accumulate=2)


@pytest.mark.parametrize("layout", ["diloco", "parameter_server_async"])
def test_workers_with_weights_of_their_own_share_nothing_that_depends_on_them(layout):
    with pytest.raises(
        LossError,
        match=r"joins rows with a sum over rows for sqrt at .* workers have weights of their own",
    ):
        trainer_of(root_mean_square, layout=layout).prepare(data())


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_resident_data_are_batches_of_the_full_loss(steps_per_call):
    rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(data(seed) for seed in range(3)))
    resident = spmd.data.resident(rows, steps_per_call=steps_per_call)
    result = spmd.fit(
        MODEL,
        resident,
        loss=token_mean,
        optimizer=optax.sgd(0.5),
        mesh="data=8",
        batch_size=ROWS,
        shuffle=False,
        epochs=1,
        progress=False,
    )
    right, _, _ = plainly(
        token_mean, jax.device_get(trainer_of(token_mean, mesh="data=1").init(data()).params)
    )
    np.testing.assert_allclose(result.history["loss"], right, rtol=2e-5)


@pytest.mark.system
def test_trials_of_a_sweep_have_the_loss_of_the_full_batch():
    rates = [0.1, 0.5]
    found = spmd.sweep(
        lambda: MODEL,
        data(),
        loss=token_mean,
        optimizer=lambda rate: optax.sgd(rate),
        space={"rate": rates},
        search="grid",
        steps=2,
        batch_size=ROWS,
        shuffle=False,
        mesh="net=2,data=4",
    )
    for trial in found.trials:
        params, losses = MODEL.init(jax.random.key(0)), []
        for _ in range(2):
            value, grads = jax.value_and_grad(
                lambda p: token_mean(lambda x: MODEL.apply(p, x), data())
            )(params)
            params = jax.tree.map(lambda p, g: p - trial.values["rate"] * g, params, grads)
            losses.append(value)
        np.testing.assert_allclose(trial.history["loss"], losses, rtol=2e-5)


def test_a_loss_that_is_meant_for_parts_is_one():
    trainer = trainer_of(spmd.losses.of_parts(normalised))
    assert trainer.prepare(data())[0].reading.mean
    _, metrics = trainer.step(trainer.init(), data())
    assert (
        abs(metrics["loss"] - plainly(normalised, jax.device_get(trainer.init().params), 1)[0][0])
        > 1e-3
    )


def test_a_draw_with_as_many_entries_as_a_worker_has_rows_is_one_for_all():
    """Workers alone take it for the draws of their rows (`spmd.base.rng`)."""

    def masked(model, batch, rng):
        return CE(model(batch["x"] * jax.random.normal(rng, (4,)).repeat(2)), batch["y"]).mean()

    assert not trainer_of(masked).prepare(data())[0].reading.mean
    assert trainer_of(masked, mesh="data=4").prepare(data())[0].reading.mean
    for mesh in ("data=8", "data=4"):
        trainer = trainer_of(masked, mesh=mesh)
        state = trainer.init(data())
        params, key = jax.device_get(state.params), loss_key(state)
        right = masked(lambda x: MODEL.apply(params, x), data(), key)
        np.testing.assert_allclose(trainer.step(state, data())[1]["loss"], right, rtol=1e-5)


def loss_key(state):
    """The key that the loss gets in the first step."""
    step = jax.random.fold_in(
        jax.random.wrap_key_data(jax.device_get(state.key), impl="threefry2x32"), 0
    )
    return jax.random.split(jax.random.fold_in(step, 0))[1]


DRAWS = {
    "for all rows": lambda rng, rows: jax.random.uniform(rng, (rows,)),
    "with a key for each row": lambda rng, rows: jax.vmap(jax.random.uniform)(
        jax.random.split(rng, rows)
    ),
    "with a key for each row's number": lambda rng, rows: jax.vmap(
        lambda n: jax.random.uniform(jax.random.fold_in(rng, n))
    )(jnp.arange(rows)),
    "with a key for each row, one after the other": lambda rng, rows: jax.lax.map(
        jax.random.uniform, jax.random.split(rng, rows)
    ),
    "of a beta distribution": lambda rng, rows: jax.random.beta(rng, 1.5, 1.0, (rows,)),
}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("draw", DRAWS)
def test_rows_draw_what_plain_jax_draws(draw):
    def loss(model, batch, rng):
        drawn = DRAWS[draw](rng, len(batch["y"]))
        own = {f"row {n}": jnp.where(batch["number"] == n, drawn, 0.0) * ROWS for n in range(ROWS)}
        return drawn * CE(model(batch["x"]), batch["y"]), own

    batch = data() | {"number": np.arange(ROWS, dtype="int32")}
    trainer = trainer_of(loss)
    state = trainer.init(batch)
    right = np.asarray(DRAWS[draw](loss_key(state), ROWS))
    _, metrics = trainer.step(state, batch)
    found = [metrics[f"row {n}"] for n in range(ROWS)]
    np.testing.assert_allclose(found, right, rtol=1e-5)
    assert len(set(found)) == ROWS


# statistics ---------------------------------------------------------------------------------------


class Counting(nnx.Module):
    """Statistics of all kinds: averages of sums and of means, a counter of rows, a maximum, a
    choice by load.
    """

    def __init__(self, rngs):
        self.out = nnx.Linear(FEATURES, CLASSES, rngs=rngs)
        self.load, self.mean = nnx.BatchStat(jnp.zeros(CLASSES)), nnx.BatchStat(jnp.zeros(FEATURES))
        self.rows, self.peak = nnx.BatchStat(jnp.zeros((), jnp.int32)), nnx.BatchStat(jnp.zeros(()))
        self.bias = nnx.BatchStat(jnp.zeros(CLASSES))

    def __call__(self, x):
        logits = self.out(x) + self.bias[...]
        chosen = jax.nn.one_hot(logits.argmax(-1), CLASSES).sum(0)
        self.load[...] = 0.9 * self.load[...] + 0.1 * chosen
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        self.rows[...] = self.rows[...] + x.shape[0]
        self.peak[...] = jnp.maximum(self.peak[...], jnp.abs(x).max())
        self.bias[...] = self.bias[...] + 0.01 * jnp.sign(chosen.mean() - chosen)
        return logits


def stats_plainly(steps):
    model = Counting(nnx.Rngs(0))
    graph, params, stats = nnx.split(model, nnx.Param, ...)

    def value(params, stats, batch):
        model = nnx.merge(graph, params, jax.tree.map(lambda x: x, stats))
        return CE(model(batch["x"]), batch["y"]).mean(), nnx.split(model, nnx.Param, ...)[2]

    for seed in range(steps):
        grads, stats = jax.grad(value, has_aux=True)(params, stats, data(seed))
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    return nnx.to_pure_dict(stats)


@pytest.mark.parametrize("layout", ["data_parallel", "fsdp"])
def test_statistics_are_those_of_the_whole_batch(layout):
    trainer = trainer_of(
        spmd.losses.cross_entropy.on(inputs="x", targets="y"), lambda: Counting(nnx.Rngs(0)), layout
    )
    state = trainer.init(data())
    for seed in range(3):
        state, _ = trainer.step(state, data(seed))
    right, ours = flatten(stats_plainly(3)), flatten(jax.device_get(state.stats))
    assert ours.keys() == right.keys()
    for name in right:
        np.testing.assert_allclose(ours[name], right[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_microbatches_of_statistics_that_are_no_means_are_refused():
    with pytest.raises(
        SpmdError, match=r"for sign at test_full_batch.py:\d+, .* in 2 microbatches"
    ) as raised:
        trainer_of(
            spmd.losses.cross_entropy.on(inputs="x", targets="y"),
            lambda: Counting(nnx.Rngs(0)),
            accumulate=2,
        ).prepare(data())
    assert "accumulate=1" in raised.value.fix


class Net(nnx.Module):
    def __init__(self, dropout=0.0, norm=False, experts=False, dtype=None, rngs=None):
        self.hidden = nnx.Linear(FEATURES, 8, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.experts = (
            spmd.nn.MixtureOfExperts(8, 16, 4, k=1, capacity_factor=1.0, rngs=rngs)
            if experts
            else None
        )
        self.drop, self.out = (
            nnx.Dropout(dropout, rngs=rngs),
            nnx.Linear(8, CLASSES, dtype=dtype, rngs=rngs),
        )

    def __call__(self, x):
        x = nnx.relu(self.hidden(x))
        x = self.norm(x) if self.norm is not None else x
        x = self.experts(x)[0] if self.experts is not None else x
        return self.out(self.drop(x))


def looked_up(model, batch):
    return -jax.nn.log_softmax(model(batch["x"]).astype("float32"))[
        jnp.arange(len(batch["y"])), batch["y"]
    ].mean()


KINDS = {
    "plain": ({}, {}),
    "statistics": ({"norm": True}, {}),
    "statistics of microbatches": ({"norm": True}, {"accumulate": 2}),
    "dropout": ({"dropout": 0.5}, {}),
    "dropout of microbatches": ({"dropout": 0.5}, {"accumulate": 2}),
    "half precision": ({"dtype": jnp.bfloat16}, {}),
    "experts": ({"experts": True}, {}),
    "experts of microbatches": ({"experts": True}, {"accumulate": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_share_nothing_of_a_mean_over_rows(kind):
    model, options = KINDS[kind]
    program, _ = trainer_of(
        looked_up, lambda: Net(**model, rngs=nnx.Rngs(0)), mesh="data=4", **options
    ).prepare(data())
    assert program.reading.mean, program.reading


@pytest.mark.parametrize("name", plain.MODELS)
def test_shipped_loss_is_proved_for(name):
    trainer = trainer_of(spmd.losses.cross_entropy, plain.MODELS[name])
    assert trainer.prepare(plain.batches(name)[0])[0].reading.mean


def test_loss_is_read_only_where_rows_are_seen_in_parts(monkeypatch):
    monkeypatch.setattr(
        "spmd.train.batch_rows.loss.read_objective",
        lambda *args: pytest.fail("nothing is seen in parts"),
    )
    for trainer in (trainer_of(summed, mesh="data=1"), trainer_of(summed, reduction="compiler")):
        assert trainer.prepare(data())[0].reading.mean


# targets that do not count, and that are no class -------------------------------------------------


class PerToken(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(CLASSES, CLASSES, rngs=rngs)

    def __call__(self, tokens):
        return self.table(tokens)


def token_batch(ignore=None):
    batch = data()
    targets = np.roll(batch["tokens"], 1, axis=1)
    targets = (
        targets if ignore is None else np.where(batch["mask"] > 0, targets, ignore).astype("int32")
    )
    return {
        "tokens": batch["tokens"],
        "targets": targets,
        **({"mask": batch["mask"]} if ignore is None else {}),
    }


@pytest.mark.system
@pytest.mark.parametrize("ignore", [None, -100])
def test_cross_entropy_leaves_out_tokens_that_do_not_count(ignore):
    loss = (
        spmd.losses.cross_entropy.on(mask="mask")
        if ignore is None
        else spmd.losses.cross_entropy.on(ignore=ignore)
    )
    right = spmd.metrics.accuracy.on(mask=loss.mask, ignore=loss.ignore)
    plain, batch = token_batch(), token_batch(ignore)
    logits = np.asarray(PerToken(nnx.Rngs(0))(plain["tokens"]))
    wanted = (np.asarray(CE(logits, plain["targets"])) * plain["mask"]).sum() / plain["mask"].sum()
    hits = ((logits.argmax(-1) == plain["targets"]) * plain["mask"]).sum() / plain["mask"].sum()
    trainer = trainer_of(loss, lambda: PerToken(nnx.Rngs(0)), metrics={"right": right})
    assert trainer.prepare(batch)[0].reading.mean
    state, metrics = trainer.step(trainer.init(), batch)
    np.testing.assert_allclose([metrics["loss"], metrics["right"]], [wanted, hits], rtol=1e-5)
    assert np.isfinite(trainer.evaluate(state, batch)["loss"])


@pytest.mark.parametrize("where", ["loss", "metric"])
@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "nan"), (0.5, "0.5"), (2, "2"), (-np.inf, "-inf")]
)
def test_step_refuses_masks_that_are_not_0_and_1(value, said, where):
    masked = spmd.losses.cross_entropy.on(mask="mask"), spmd.metrics.accuracy.on(mask="mask")
    loss, right = (
        (masked[0], spmd.metrics.accuracy)
        if where == "loss"
        else (spmd.losses.cross_entropy, masked[1])
    )
    trainer, batch = (
        trainer_of(loss, lambda: PerToken(nnx.Rngs(0)), metrics={"right": right}),
        token_batch(),
    )
    batch["mask"] = batch["mask"].astype("float32")
    batch["mask"][3, 2] = batch["mask"][5, 1] = value
    with pytest.raises(spmd.errors.DataError) as raised:
        trainer.step(trainer.init(), batch)
    name = masked[0].name if where == "loss" else masked[1].name
    assert str(raised.value).startswith(
        f'{name}: 2 of the {batch["mask"].size} entries of the mask "mask", '
        f"float32{list(batch['mask'].shape)}, are neither 0 nor 1, "
        f"such as {said}.\n    fix: a mask of bool, or of 0 and 1."
    ), raised.value


def test_loss_is_nan_where_mask_of_later_batch_is_not_0_and_1():
    loss = spmd.losses.cross_entropy.on(mask="mask")
    trainer, batch = trainer_of(loss, lambda: PerToken(nnx.Rngs(0))), token_batch()
    state, metrics = trainer.step(
        trainer.init(), {**batch, "mask": batch["mask"].astype("float32")}
    )
    assert np.isfinite(metrics["loss"])
    assert np.isnan(
        trainer.step(
            state, {**batch, "mask": np.where(batch["mask"] > 0, 1.0, 0.5).astype("float32")}
        )[1]["loss"]
    )


@pytest.mark.parametrize("ignore", ["-100", -100.0, True])
def test_on_refuses_ignore_that_is_no_whole_number(ignore):
    with pytest.raises(
        spmd.errors.OptionError,
        match=r"^spmd.losses.cross_entropy.on\(ignore=.*\): a target is a whole number",
    ):
        spmd.losses.cross_entropy.on(ignore=ignore)


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("dtype", "ignore", "fits"),
    [("uint8", -100, False), ("uint8", 255, True), ("int8", -100, True), ("int8", 200, False)],
)
def test_step_refuses_ignore_that_targets_cannot_hold(dtype, ignore, fits):
    trainer = trainer_of(spmd.losses.cross_entropy.on(ignore=ignore), lambda: PerToken(nnx.Rngs(0)))
    batch = {
        name: value.astype(dtype if name == "targets" else value.dtype)
        for name, value in token_batch(ignore if fits else None).items()
    }
    limits = np.iinfo(dtype)
    words = (
        rf"ignore={ignore}\): the targets are {dtype}\[.*\], from {limits.min} to {limits.max}, so "
        rf"none can be {ignore}"
    )
    with contextlib.nullcontext() if fits else pytest.raises(spmd.errors.LossError, match=words):
        assert np.isfinite(trainer.step(trainer.init(), batch)[1]["loss"])


@pytest.mark.parametrize(
    ("value", "range_"),
    [(7, "targets from 0 to 7"), (-100, r"targets from -100 to 2(.|\n)*on\(ignore=-100\)")],
)
def test_step_refuses_targets_that_are_no_class(value, range_):
    trainer, batch = (
        trainer_of(spmd.losses.cross_entropy, lambda: PerToken(nnx.Rngs(0))),
        token_batch(),
    )
    batch["targets"][3, 2] = value
    with pytest.raises(spmd.errors.DataError, match=range_):
        trainer.step(trainer.init(), {name: batch[name] for name in ("tokens", "targets")})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.5, "a target is 1.5, which is no"),
        (np.inf, "to inf"),
        (np.nan, "1 targets are NaN"),
        (-0.5, "from -1 to"),
        (7.0, "0 to 7"),
        (2.0, None),
    ],
)
def test_step_takes_whole_numbers_as_targets(value, words):
    trainer, batch = trainer_of(spmd.losses.cross_entropy), data()
    batch = {"x": batch["x"], "y": batch["y"].astype("float32")}
    batch["y"][3] = value
    with (
        contextlib.nullcontext()
        if words is None
        else pytest.raises(spmd.errors.DataError, match=words)
    ):
        assert np.isfinite(trainer.step(trainer.init(), batch)[1]["loss"])
