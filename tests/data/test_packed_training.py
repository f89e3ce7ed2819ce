"""Training on packed text: a packed batch is its documents one by one; `spmd.losses.next_token`;
runs that are stopped and resumed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import texts
from flax import nnx
from linear import same

import spmd
from spmd.base.tree import flatten
from spmd.data.packing import unpack
from spmd.errors import DataError
from tests.compare import assert_close

VOCABULARY, WIDTH, HEADS, LENGTH = 300, 32, 2, 64


class Transformer(nnx.Module):
    """Two causal blocks with learned positions."""

    def __init__(self, rngs):
        self.embed, self.position = (
            nnx.Embed(VOCABULARY, WIDTH, rngs=rngs),
            nnx.Embed(LENGTH, WIDTH, rngs=rngs),
        )
        self.qkv = nnx.List([nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs) for _ in range(2)])
        self.out = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def features(self, tokens, positions=None, segment_ids=None):
        x = self.embed(tokens) + self.position(
            jnp.arange(tokens.shape[1]) if positions is None else positions
        )
        for qkv, out, norm in zip(self.qkv, self.out, self.norm, strict=True):
            query, key, value = jnp.split(
                qkv(norm(x)).reshape(*tokens.shape, HEADS, -1), 3, axis=-1
            )
            x = x + out(
                spmd.nn.attention(query, key, value, causal=True, segment_ids=segment_ids).reshape(
                    x.shape
                )
            )
        return x

    def __call__(self, tokens, positions=None, segment_ids=None):
        return self.embed.attend(self.features(tokens, positions, segment_ids))


class Chunked(Transformer):
    """The same, and lets a loss use the features."""

    def output_head(self):
        return {"head": self.embed.embedding[...], "vocab_dim": 0, "chunk": 32}


def make():
    return Transformer(nnx.Rngs(0))


def make_chunked():
    return Chunked(nnx.Rngs(0))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("packed")
    texts.folder(place / "model")
    texts.json_lines(place / "a.jsonl", [{"text": document} for document in texts.sentences(90)])
    pairs = zip(texts.sentences(40, seed=1), texts.sentences(40, seed=2, longest=5), strict=True)
    texts.json_lines(
        place / "talks.jsonl", [texts.messages(prompt, answer) for prompt, answer in pairs]
    )
    return place


def read(place, **options):
    return spmd.data.text(
        place / "a.jsonl",
        **{"tokenizer": place / "model", "length": LENGTH, "batch_size": 8, **options},
    )


def mean_and_gradient(
    model, batch, names=("tokens", "targets", "mask", "segment_ids", "positions")
):
    def mean(model, batch):
        total, count = spmd.losses.next_token(model, batch)
        return total / count

    return nnx.jit(nnx.value_and_grad(mean))(model, {name: batch[name] for name in names})


def far(left, right):
    """The norm of the difference of two gradients over that of the second."""
    left, right = flatten(nnx.to_pure_dict(left)), flatten(nnx.to_pure_dict(right))
    norm = optax.tree.norm
    return float(norm({name: left[name] - right[name] for name in right}) / norm(right))


@pytest.mark.system
def test_packed_batch_has_the_loss_and_gradients_of_its_documents(place):
    """Each document alone, by a plain loss over its tokens."""
    model, batch = make(), next(iter(read(place)))
    documents = unpack(batch)
    assert len(documents) > 2 * len(batch["tokens"]), "several in a row"

    @nnx.jit
    @nnx.value_and_grad
    def alone(model, tokens, size):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(tokens[None])[0, :-1], tokens[1:]
        )
        return jnp.where(jnp.arange(len(losses)) < size - 1, losses, 0.0).sum()

    total, count, gradient = 0.0, 0, None
    for tokens in documents:
        value, one = alone(
            model, jnp.asarray(np.pad(tokens, (0, LENGTH - len(tokens)))), len(tokens)
        )
        total, count = total + float(value), count + len(tokens) - 1
        gradient = one if gradient is None else jax.tree.map(jnp.add, gradient, one)
    assert count == batch["mask"].sum()
    loss, packed = mean_and_gradient(model, batch)
    assert float(loss) == pytest.approx(total / count, rel=1e-5)
    gradient = jax.tree.map(lambda leaf: leaf / count, gradient)
    assert far(packed, gradient) < 1e-5
    for lacking in ("segment_ids", "positions"):  # either would be noticed
        names = {"tokens", "targets", "mask", "segment_ids", "positions"} - {lacking}
        other, wrong = mean_and_gradient(model, batch, names)
        assert abs(float(other) - total / count) > 1e-3 and far(wrong, gradient) > 1e-2


@pytest.mark.system
def test_loss_from_features_is_that_of_logits(place):
    batch = next(iter(read(place)))
    loss, gradient = mean_and_gradient(make(), batch)
    other, chunked = mean_and_gradient(make_chunked(), batch)
    assert_close(other, loss)
    assert far(chunked, gradient) < 1e-5
    shapes = [
        str(jax.make_jaxpr(lambda b, m=model: spmd.losses.next_token(m, b))(batch))
        for model in (make(), make_chunked())
    ]
    assert [f"f32[8,{LENGTH},{VOCABULARY}]" in text for text in shapes] == [True, False], (
        "one has the logits of all tokens"
    )


@pytest.mark.system
def test_targets_without_weight_may_be_anything(place):
    batch = dict(next(iter(read(place))))
    loss, _ = mean_and_gradient(make(), batch)
    ignored = {**batch, "targets": np.where(batch["mask"] == 0, -100, batch["targets"])}
    assert float(mean_and_gradient(make(), ignored)[0]) == float(loss)
    assert np.isnan(
        float(mean_and_gradient(make(), {**batch, "targets": batch["targets"] + VOCABULARY})[0])
    )
    with pytest.raises(
        DataError,
        match=r"next_token: the batch has no mask; it has tokens, targets\.\n    fix: batches as "
        r"of",
    ):
        spmd.losses.next_token(make(), {"tokens": 0, "targets": 0})


def fit(data, model=make, devices=8, **options):
    options = {
        "mesh": spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices]),
        **options,
    }
    return spmd.fit(
        model, data, **{"loss": spmd.losses.next_token, "optimizer": optax.adam(1e-2), **options}
    )


@pytest.mark.system
def test_mean_is_over_the_tokens_of_all_workers(place):
    """Rows hold unequal counts of answers: one device and eight workers, with microbatches, report
    the mean over tokens.
    """
    data = spmd.data.text(
        place / "talks.jsonl",
        tokenizer=place / "model",
        length=LENGTH,
        batch_size=16,
        chat="chatml",
        loss_on="answers",
        shuffle=False,
        seed=0,
    )
    batch = next(iter(data))
    counts = batch["mask"].sum(axis=1)
    assert len(set(counts)) > 3
    expected, _ = mean_and_gradient(make(), batch)
    total, _ = jax.vmap(
        lambda row: spmd.losses.next_token(make(), jax.tree.map(lambda leaf: leaf[None], row))
    )(dict(batch))
    assert abs(float((total / np.maximum(counts, 1)).mean()) - float(expected)) > 1e-3, (
        "the mean over rows is another"
    )
    # Adam would enlarge the rounding of gradients that are zero
    options = {"steps": 2, "optimizer": optax.sgd(0.1)}
    one, many = fit(data, devices=1, **options), fit(data, layout="fsdp", accumulate=2, **options)
    for result in (one, many):
        assert result.history["loss"][0] == pytest.approx(float(expected), rel=1e-5)
    for name, leaf in flatten(jax.device_get(one.state.params)).items():
        np.testing.assert_allclose(
            leaf, flatten(jax.device_get(many.state.params))[name], atol=1e-5
        )


@pytest.mark.system
def test_resumed_run_equals_uninterrupted_run(place, tmp_path):
    options = {"devices": 2}
    uninterrupted = fit(read(place), epochs=2, **options)
    steps = len(uninterrupted.history)
    fit(read(place, workers=2), steps=steps // 2 + 1, checkpoint=tmp_path / "run", **options)
    rest = fit(read(place), epochs=2, checkpoint=tmp_path / "run", resume=True, **options)
    assert same(rest.state, uninterrupted.state) and int(rest.state.step) == steps > 4
    assert rest.history["loss"] == uninterrupted.history["loss"][steps // 2 + 1 :]
    assert uninterrupted.history["loss"][-1] < uninterrupted.history["loss"][0]
    with pytest.raises(spmd.errors.CheckpointError, match="pack"):
        fit(read(place, pack=False), epochs=2, checkpoint=tmp_path / "run", resume=True, **options)
