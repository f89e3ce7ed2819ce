"""A loss that sees rows in parts is that of the whole batch, or is refused with both numbers and a fix that works."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.errors import LossError
from spmd.train import row_proof, whole_batch
from spmd.train.row_values import PerRow
from tests.train import plain

ROWS, FEATURES, CLASSES = 32, 4, 3
CE = optax.softmax_cross_entropy_with_integer_labels


def data(seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 6, ROWS)
    return {
        "x": random.normal(size=(ROWS, FEATURES)).astype("float32"),
        "y": random.integers(0, CLASSES, ROWS).astype("int32"),
        "reward": random.normal(size=ROWS).astype("float32"),
        "tokens": random.integers(0, CLASSES, (ROWS, 6)).astype("int32"),
        "mask": (np.arange(6) < lengths[:, None]).astype("float32"),
    }


MODEL = spmd.FunctionalModel(
    lambda key: {"w": jax.random.normal(key, (FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)}, lambda params, x: x @ params["w"] + params["b"]
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


def weighted_pair(model, batch):
    weights = 1.0 + batch["y"]
    return (CE(model(batch["x"]), batch["y"]) * weights).sum(), weights.sum()


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


def trainer_of(loss, model=MODEL, layout="data_parallel", mesh="data=8", reduction=None, **options):
    layout = spmd.Layout.load(layout)
    if reduction is not None:
        layout = dataclasses.replace(layout, gradients=spmd.Gradients(reduction))
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    return spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.5), mesh=mesh, layout=layout, **options)


def trained(trainer, steps=3):
    state, losses = trainer.init(data()), []
    for seed in range(steps):
        state, metrics = trainer.step(state, data(seed))
        losses.append(metrics["loss"])
    return losses, jax.device_get(state.params)


def numbers(error):
    """Losses seen in parts and at once, and the norm of the gradients' difference, as the error gives them."""
    matches = re.findall(r"loss (\S+), norm|of the gradients: (\S+)\n", str(error))
    return [float(loss or norm) for loss, norm in matches]


JOINING = {
    "in-batch negatives": (contrastive, None),
    "one value per row that joins rows": (contrastive_rows, None),
    "a sum": (summed, None),
    "a sum over a number of rows written into it": (divided, None),
    "a weighted mean": (weighted, weighted_pair),
    "a mean over tokens": (token_mean, token_pair),
    "normalised over the batch": (normalised, None),
}


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize("case", JOINING)
def test_compare_refuses_loss_that_joins_rows(case):
    loss, _ = JOINING[case]
    trainer = trainer_of(loss)
    state = trainer.init()
    with pytest.raises(LossError) as raised:
        trainer.step(state, data())
    params, batch = jax.device_get(state.params), data()  # the state was not consumed

    def value(rows):
        return np.mean(loss(lambda x: MODEL.apply(params, x), jax.tree.map(lambda leaf: leaf[rows], batch)))

    parts = np.mean([value(slice(first, first + ROWS // 8)) for first in range(0, ROWS, ROWS // 8)])
    np.testing.assert_allclose(numbers(raised.value)[:2], [parts, value(slice(None))], rtol=1e-4)
    assert numbers(raised.value)[2] > 1e-3
    assert '[gradients] reduction = "compiler", which was tried' in str(raised.value)


def test_a_loss_that_is_meant_for_parts_is_not_compared():
    trainer = trainer_of(spmd.losses.of_parts(normalised))
    _, metrics = trainer.step(trainer.init(), data())
    plainly = trainer_of(normalised, reduction="compiler")
    assert abs(metrics["loss"] - plainly.step(plainly.init(), data())[1]["loss"]) > 1e-3


def test_a_comparison_without_memory_is_reported(monkeypatch, caplog):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(whole_batch.Comparison, "check", full)
    trainer = trainer_of(normalised)
    trainer.step(trainer.init(), data())
    assert [text for text in caplog.messages if "no memory to see the batch at once" in text]


def noisy(model, batch, rng):
    """A mean over tokens, with noise in the inputs that is the same however many workers there are."""
    return token_mean(model, {**batch, "x": batch["x"] + 3 * jax.random.normal(rng, batch["x"].shape)})


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(("loss", "options"), [(token_mean, {"precision": "bfloat16"}), (weighted, {"precision": "bfloat16"}), (noisy, {})])
def test_compare_sees_through_rounding_and_noise(loss, options):
    with pytest.raises(LossError, match="no mean over rows"):
        trained(trainer_of(loss, **options), 1)


def test_draw_with_as_many_entries_as_a_part_has_rows_is_not_believed():
    """Workers take it for the draws of their rows (`spmd.rng`), so they do not share it."""

    def masked(model, batch, rng):
        return CE(model(batch["x"] * jax.random.normal(rng, (FEATURES,))), batch["y"]).mean()

    comparison = trainer_of(masked).prepare(data())[0].comparison
    assert comparison.needed
    assert comparison.draws
    assert not trainer_of(masked, mesh="data=4").prepare(data())[0].comparison.needed


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("case", ["in-batch negatives", "a sum", "a mean over tokens"])
def test_fixes_that_compare_offers_train_as_one_device(case):
    loss, pair = JOINING[case]
    losses, params = trained(trainer_of(loss, mesh="data=1"))
    fixed = [trainer_of(loss, reduction="compiler"), *([] if pair is None else [trainer_of(pair)])]
    for trainer in fixed:
        fixed_losses, weights = trained(trainer)
        np.testing.assert_allclose(fixed_losses, losses, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), weights, params)


@pytest.mark.system
def test_compare_refuses_accumulation_and_offers_what_works():
    with pytest.raises(LossError, match=r"seen in 4 microbatches:(.|\n)*fix: accumulate=1, which was tried"):
        trained(trainer_of(token_mean, mesh="data=1", accumulate=4))
    with pytest.raises(LossError, match=r"seen by 2 workers, in 2 microbatches:(.|\n)*fix: .*compiler\" and accumulate=1, which was tried"):
        trained(trainer_of(token_mean, mesh="data=2", accumulate=2))
    trained(trainer_of(token_pair, mesh="data=1", accumulate=4), 1)


@pytest.mark.system
def test_compare_refuses_simulated_workers():
    layout = dataclasses.replace(spmd.Layout.load("parameter_server"), parameter_server=spmd.ParameterServer(workers=8))
    with pytest.raises(LossError, match=r"seen by 8 workers:(.|\n)*fix: \[gradients\] reduction = \"compiler\", which was tried"):
        trained(trainer_of(token_mean, layout=layout, mesh="data=1"))


def test_compare_sees_what_equal_rows_hide():
    """With a head of zeros, and as many tokens everywhere, every way to take the mean gives the same loss."""
    model = dataclasses.replace(MODEL, init=lambda key: jax.tree.map(jnp.zeros_like, MODEL.init(key)))
    with pytest.raises(LossError) as raised:
        trained(trainer_of(weighted, model))
    in_parts, at_once, difference = numbers(raised.value)
    assert in_parts == at_once == pytest.approx(np.log(CLASSES), abs=1e-5)
    assert difference > 1e-2


class Net(nnx.Module):
    def __init__(self, dropout=0.0, norm=False, experts=False, dtype=None, rngs=None):
        self.hidden = nnx.Linear(FEATURES, 8, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.experts = spmd.nn.MixtureOfExperts(8, 16, 4, k=1, capacity_factor=1.0, rngs=rngs) if experts else None
        self.drop, self.out = nnx.Dropout(dropout, rngs=rngs), nnx.Linear(8, CLASSES, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.hidden(x))
        x = self.norm(x) if self.norm is not None else x
        x = self.experts(x)[0] if self.experts is not None else x
        return self.out(self.drop(x))


def looked_up(model, batch):
    """A mean over rows which the proof does not know."""
    return -jax.nn.log_softmax(model(batch["x"]).astype("float32"))[jnp.arange(len(batch["y"])), batch["y"]].mean()


KINDS = {
    "plain": ({}, {}),
    "statistics": ({"norm": True}, {}),
    "statistics of microbatches": ({"norm": True}, {"accumulate": 2}),
    "dropout of microbatches": ({"dropout": 0.5}, {"accumulate": 2}),
    "half precision": ({"dtype": jnp.bfloat16}, {}),
    "experts of microbatches": ({"experts": True}, {"accumulate": 2}),
}


@pytest.mark.sampled(system=5)
@pytest.mark.parametrize("kind", KINDS)
def test_compare_accepts_mean_over_rows_that_is_not_proved(kind, caplog):
    model, options = KINDS[kind]
    caplog.set_level("INFO", "spmd")
    trained(trainer_of(looked_up, lambda: Net(**model, rngs=nnx.Rngs(0)), mesh="data=4", **options), 1)
    assert "compared on the first batch" in caplog.text
    assert re.search(r"equal but for rounding, gradients too \(\d+\.\d s", caplog.text)


@pytest.mark.system
@pytest.mark.parametrize("resident", [False, True])
def test_fit_refuses_before_training_and_says_what_was_compared(resident, capsys, tmp_path):
    train_data = spmd.data.resident(data(), steps_per_call=2) if resident else data()
    options = {"optimizer": optax.sgd(0.1), "mesh": "data=8", "batch_size": 16, "steps": 2, "shuffle": False, "progress": True}
    with pytest.raises(LossError, match="the 16 rows of a batch"):
        spmd.fit(MODEL, train_data, loss=token_mean, checkpoint=tmp_path / "run", **options)
    assert not list((tmp_path / "run").glob("[0-9]*"))  # nothing was trained, and nothing saved
    spmd.fit(MODEL, train_data, loss=looked_up, **options)
    assert "compared on the first batch, seen by 8 workers" in capsys.readouterr().err


@pytest.mark.system
def test_sweep_refuses_loss_that_joins_rows():
    with pytest.raises(LossError, match="seen by 4 workers"):
        spmd.sweep(
            lambda: MODEL,
            data(),
            loss=token_mean,
            optimizer=lambda rate: optax.sgd(rate),
            space={"rate": [0.1, 0.2]},
            search="grid",
            steps=1,
            batch_size=16,
            mesh="net=2,data=4",
        )


# the proof -----------------------------------------------------------------------------------------------------------


def is_proved(loss, *names):
    """Of a function of leaves of the batch."""
    batch = [data()[name] for name in names]

    def trace(count):
        return jax.make_jaxpr(loss)(*[jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype) for leaf in batch])

    first, second = trace(16), trace(4)  # of a batch and of a part
    return row_proof.proved(first, second, [PerRow(0)] * len(batch), 16, 4, len(first.out_avals))


@jax.custom_vjp
def clipped_together(x):
    """What goes back is divided by its norm over all rows."""
    return x


clipped_together.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


@jax.custom_jvp
def centred_tangents(x):
    """Its own gradient joins rows, too."""
    return x


centred_tangents.defjvp(lambda x, t: (x[0], t[0] - t[0].mean(0)))


def grown(count):
    """A number that a loop without data finds from another."""
    return jax.lax.while_loop(lambda at: at[0] < count, lambda at: (at[0] + 1, at[1] * 1.1), (0, 1.0))[1]


W = np.arange(FEATURES * CLASSES, dtype=np.float32).reshape(FEATURES, CLASSES)


def attention(x, keys=None, rows=None, **options):
    """Of tokens [rows, 6], in tiles; `rows` is the dim of the rows in queries, keys and values."""
    query, key = (jnp.moveaxis(y[..., None, None], 0, rows or 0) for y in (x, x if keys is None else keys))
    return spmd.nn.attention(query, key, key, implementation="chunked", **options).mean()


MEANS = {
    "one value per row": (lambda x, y: CE(x @ W, y), "x", "y"),
    "their mean": (lambda x, y: CE(x @ W, y).mean(), "x", "y"),
    "a sum over the number of rows": (lambda x: jnp.square(x).sum() / len(x), "x"),
    "a pair with the number of rows": (lambda x: (jnp.square(x).sum(), 1.0 * x.size), "x"),
    "a pair with a sum of weights": (lambda x, m: ((x.sum(1)[:, None] * m).sum(), m.sum()), "x", "mask"),
    "a pair with a sum of ones": (lambda x: (x.sum(), jnp.ones_like(x).sum()), "x"),
    "with a penalty of weights": (lambda x: jnp.square(x).mean() + (W**2).sum(), "x"),
    "a product of two columns": (lambda x, r: (x[:, 0] @ r) / len(r), "x", "reward"),
    "a loop over time": (lambda t: jax.lax.scan(lambda c, x: (c + x, c * x), jnp.zeros(t.shape[0]), t.T)[0].mean(), "mask"),
    "row by row": (lambda x: jax.vmap(lambda row: jnp.sort(row)[::-1] @ row)(x), "x"),
    "flattened": (lambda m: m.reshape(-1).reshape(m.shape).T.mean(), "mask"),
    "recomputed": (lambda x: jax.checkpoint(jnp.sin)(x).mean(), "x"),
    "a branch": (lambda x: jax.lax.cond(W.sum() > 0, jnp.sin, jnp.cos, x).mean(), "x"),
    "a function of JAX with a gradient of its own": (lambda x: jax.nn.relu(x).mean(), "x"),
    "attention": (lambda m: attention(m, causal=True, key_mask=m > 0, soft_cap=2.0), "mask"),
    "attention with a mask for all": (lambda m: attention(m, mask=np.tri(6, dtype=bool), segment_ids=m.astype(int)), "mask"),
    "an embedding": (lambda t: jnp.asarray(W)[t].mean(), "tokens"),
}
OTHERS = {
    "a sum": (lambda x: jnp.square(x).sum(), "x"),
    "a sum over a number": (lambda x: jnp.square(x).sum() / 16, "x"),
    "rows times their number": (lambda x: x.sum(1) * len(x), "x"),
    "rows by their place": (lambda r: r * jnp.linspace(0.0, 1.0, len(r)), "reward"),
    "rows in another order": (lambda r: r[::-1], "reward"),
    "rows by their neighbours": (lambda r: r - jnp.roll(r, 1), "reward"),
    "sorted rows": (lambda r: jnp.sort(r), "reward"),
    "running sums": (lambda r: jnp.cumsum(r), "reward"),
    "centred rows": (lambda r: r - r.mean(), "reward"),
    "a variance": (lambda x: jnp.var(x), "x"),
    "the square of a mean": (lambda x: x.mean() ** 2, "x"),
    "the largest row": (lambda r: r.max(), "reward"),
    "a ratio of sums": (lambda x, m: x.sum() / m.sum(), "x", "mask"),
    "a pair with a number": (lambda x: (x.sum(), 64.0), "x"),
    "products of rows": (lambda x: (x @ x.T).mean(), "x"),
    "a loop over rows": (lambda r: jax.lax.scan(lambda c, x: (c * x, c), 1.0, r)[0], "reward"),
    "a branch by the data": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x).mean(), "x"),
    "rows over at least 8": (lambda x: x.mean(1).sum() / max(len(x), 8), "x"),
    "another temperature for few rows": (lambda x: (x * (0.1 if len(x) >= 8 else 1.0)).mean(), "x"),
    "a loop as long as there are rows": (lambda x: x.mean() * grown(len(x)), "x"),
    "an entry by the number of rows": (lambda x: x.mean() * jnp.linspace(1.0, 2.0, 64)[len(x)], "x"),
    "more ones than rows": (lambda x: x.mean() * jnp.ones(len(x) + 1).sum(), "x"),
    "ones for all pairs": (lambda x: x.mean() * jnp.ones(len(x) ** 2).sum(), "x"),
    "a gradient of its own": (lambda x: clipped_together(x).mean(), "x"),
    "tangents of its own": (lambda x: jnp.square(centred_tangents(x)).mean(), "x"),
    "attention between rows": (lambda m: attention(m, rows=1), "mask"),
    "attention to other rows": (lambda m: attention(m, m[::-1]), "mask"),
    "attention with a bias for each place": (lambda m: attention(m, bias=jnp.arange(len(m))[:, None, None, None] * 1.0), "mask"),
    "attention with numbers of its own": (lambda m: attention(m, dropout=0.5, dropout_key=jax.random.key(0)), "mask"),
    "its own random numbers": (lambda x: (x * jax.random.normal(jax.random.key(0), x.shape)).mean(), "x"),
}


@pytest.mark.parametrize("case", MEANS)
def test_proved_knows_mean_over_rows(case):
    assert is_proved(*MEANS[case])


@pytest.mark.parametrize("case", OTHERS)
def test_proved_does_not_believe(case):
    assert not is_proved(*OTHERS[case])


@pytest.mark.parametrize("name", plain.MODELS)
def test_shipped_loss_is_proved_for(name):
    """So nothing is compared, and nothing more compiled."""
    trainer = trainer_of(spmd.losses.cross_entropy, plain.MODELS[name])
    program, _ = trainer.prepare(plain.batches(name)[0])
    assert not program.comparison.needed


def test_proof_is_made_only_where_rows_are_seen_in_parts(monkeypatch):
    monkeypatch.setattr(whole_batch, "proof_of", lambda *args: pytest.fail("nothing is seen in parts"))
    for trainer in (trainer_of(summed, mesh="data=1"), trainer_of(summed, reduction="compiler")):
        assert not trainer.prepare(data())[0].comparison.needed


# targets that do not count, and that are no class ----------------------------------------------------------------------


class PerToken(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(CLASSES, CLASSES, rngs=rngs)

    def __call__(self, tokens):
        return self.table(tokens)


def token_batch(ignore=None):
    batch = data()
    targets = np.roll(batch["tokens"], 1, axis=1)
    targets = targets if ignore is None else np.where(batch["mask"] > 0, targets, ignore).astype("int32")
    return {"tokens": batch["tokens"], "targets": targets, **({"mask": batch["mask"]} if ignore is None else {})}


@pytest.mark.system
@pytest.mark.parametrize("ignore", [None, -100])
def test_cross_entropy_leaves_out_tokens_that_do_not_count(ignore):
    loss = spmd.losses.cross_entropy.on(mask="mask") if ignore is None else spmd.losses.cross_entropy.on(ignore=ignore)
    right = spmd.metrics.accuracy.on(mask=loss.mask, ignore=loss.ignore)
    plain, batch = token_batch(), token_batch(ignore)
    logits = np.asarray(PerToken(nnx.Rngs(0))(plain["tokens"]))
    wanted = (np.asarray(CE(logits, plain["targets"])) * plain["mask"]).sum() / plain["mask"].sum()
    hits = ((logits.argmax(-1) == plain["targets"]) * plain["mask"]).sum() / plain["mask"].sum()
    trainer = trainer_of(loss, lambda: PerToken(nnx.Rngs(0)), metrics={"right": right})
    assert not trainer.prepare(batch)[0].comparison.needed
    state, metrics = trainer.step(trainer.init(), batch)
    np.testing.assert_allclose([metrics["loss"], metrics["right"]], [wanted, hits], rtol=1e-5)
    assert np.isfinite(trainer.evaluate(state, batch)["loss"])


@pytest.mark.parametrize("where", ["loss", "metric"])
@pytest.mark.parametrize(("value", "said"), [(np.nan, "nan"), (0.5, "0.5"), (2, "2"), (-np.inf, "-inf")])
def test_step_refuses_masks_that_are_not_0_and_1(value, said, where):
    masked = spmd.losses.cross_entropy.on(mask="mask"), spmd.metrics.accuracy.on(mask="mask")
    loss, right = (masked[0], spmd.metrics.accuracy) if where == "loss" else (spmd.losses.cross_entropy, masked[1])
    trainer, batch = trainer_of(loss, lambda: PerToken(nnx.Rngs(0)), metrics={"right": right}), token_batch()
    batch["mask"] = batch["mask"].astype("float32")
    batch["mask"][3, 2] = batch["mask"][5, 1] = value
    with pytest.raises(spmd.errors.DataError) as raised:
        trainer.step(trainer.init(), batch)
    name = masked[0].name if where == "loss" else masked[1].name
    assert str(raised.value).startswith(
        f'{name}: 2 of the {batch["mask"].size} entries of the mask "mask", float32{list(batch["mask"].shape)}, are neither 0 nor 1, '
        f"such as {said}.\n    fix: a mask of bool, or of 0 and 1."
    ), raised.value


def test_loss_is_nan_where_mask_of_later_batch_is_not_0_and_1():
    loss = spmd.losses.cross_entropy.on(mask="mask")
    trainer, batch = trainer_of(loss, lambda: PerToken(nnx.Rngs(0))), token_batch()
    state, metrics = trainer.step(trainer.init(), {**batch, "mask": batch["mask"].astype("float32")})
    assert np.isfinite(metrics["loss"])
    assert np.isnan(trainer.step(state, {**batch, "mask": np.where(batch["mask"] > 0, 1.0, 0.5).astype("float32")})[1]["loss"])


@pytest.mark.parametrize("ignore", ["-100", -100.0, True])
def test_on_refuses_ignore_that_is_no_whole_number(ignore):
    with pytest.raises(spmd.errors.OptionError, match=r"^spmd.losses.cross_entropy.on\(ignore=.*\): a target is a whole number"):
        spmd.losses.cross_entropy.on(ignore=ignore)


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("dtype", "ignore", "fits"), [("uint8", -100, False), ("uint8", 255, True), ("int8", -100, True), ("int8", 200, False)]
)
def test_step_refuses_ignore_that_targets_cannot_hold(dtype, ignore, fits):
    trainer = trainer_of(spmd.losses.cross_entropy.on(ignore=ignore), lambda: PerToken(nnx.Rngs(0)))
    batch = {
        name: value.astype(dtype if name == "targets" else value.dtype) for name, value in token_batch(ignore if fits else None).items()
    }
    limits = np.iinfo(dtype)
    words = rf"ignore={ignore}\): the targets are {dtype}\[.*\], from {limits.min} to {limits.max}, so none can be {ignore}"
    with contextlib.nullcontext() if fits else pytest.raises(spmd.errors.LossError, match=words):
        assert np.isfinite(trainer.step(trainer.init(), batch)[1]["loss"])


@pytest.mark.parametrize(("value", "range_"), [(7, "targets from 0 to 7"), (-100, r"targets from -100 to 2(.|\n)*on\(ignore=-100\)")])
def test_step_refuses_targets_that_are_no_class(value, range_):
    trainer, batch = trainer_of(spmd.losses.cross_entropy, lambda: PerToken(nnx.Rngs(0))), token_batch()
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
    with contextlib.nullcontext() if words is None else pytest.raises(spmd.errors.DataError, match=words):
        assert np.isfinite(trainer.step(trainer.init(), batch)[1]["loss"])


# metrics that join rows ------------------------------------------------------------------------------------------------


def f1(model, batch):
    guess, right = model(batch["x"]).argmax(-1) == 1, batch["y"] == 1
    return 2 * (guess & right).sum() / (guess.sum() + right.sum())


def hits(model, batch):
    return (model(batch["x"]).argmax(-1) == batch["y"]).astype("float32")


METRICS = {
    "f1": (f1, True),
    "largest": (lambda model, batch: model(batch["x"]).max(), True),
    "sum": (lambda model, batch: hits(model, batch).sum(), True),
    "ranks": (lambda model, batch: model(batch["x"])[:, 0].argsort().astype("float32") * jnp.arange(len(batch["x"])), True),
    "of parts": (spmd.losses.of_parts(f1), False),
    "rows": (hits, False),
    "mean": (lambda model, batch: hits(model, batch).mean(), False),
    "pair": (lambda model, batch: ((hits(model, batch) * batch["y"]).sum(), batch["y"].sum()), False),
    "measured mean": (lambda model, batch: jnp.sort(hits(model, batch)).mean(), False),
    "shipped": (spmd.metrics.accuracy.on(inputs="x", targets="y"), False),
}


def warned(caplog):
    return [record.getMessage() for record in caplog.records if "is no mean over rows" in record.getMessage()]


@pytest.mark.system
def test_evaluate_warns_of_metrics_that_join_rows(caplog):
    metrics = {name: metric for name, (metric, _) in METRICS.items()}
    trainer, batch = trainer_of(spmd.losses.cross_entropy.on(inputs="x", targets="y"), metrics=metrics), data(1)
    state = trainer.init(batch)
    trainer.evaluate(state, batch, batch_size=ROWS)
    assert not warned(caplog)  # one batch is all of the data
    halves = trainer.evaluate(state, batch, batch_size=ROWS // 2)
    lines = warned(caplog)
    assert {line.split('"')[1] for line in lines} == {name for name, (_, joins) in METRICS.items() if joins}
    full, parts = (float(number) for number in re.search(r"of 16 rows it is (\S+), and .* is (\S+)\.\n", lines[0]).groups())
    assert full != parts and np.isfinite(halves["f1"])
    trainer.evaluate(state, batch, batch_size=ROWS // 2)
    assert warned(caplog) == lines  # once


@pytest.mark.system
@pytest.mark.parametrize("joins", [True, False])
def test_step_warns_of_losses_metrics_that_join_rows(caplog, joins):
    def loss(model, batch):
        return CE(model(batch["x"]), batch["y"]), {"f1": f1(model, batch) if joins else hits(model, batch)}

    trainer, batch = trainer_of(loss), data(1)
    trainer.step(trainer.init(batch), batch)
    lines = warned(caplog)
    assert len(lines) == joins
    if joins:
        wanted = r'^the metric "f1" is no mean over rows, but the mean over parts of a batch, by 8 workers, is taken: of 32 rows it is '
        assert re.match(wanted, lines[0])
    caplog.clear()
    trainer = trainer_of(loss, reduction="compiler")
    trainer.step(trainer.init(batch), batch)
    assert not warned(caplog)
