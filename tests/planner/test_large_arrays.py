"""Notes of plans on scores of attention and logits that a step stores, and on what computes them in
parts.
"""

import dataclasses

import jax
import optax
import pytest
from flax import nnx

import spmd
from examples import gpt_pipeline

LENGTH, VOCAB = 768, 2048


def notes(attention, loss, vocab=VOCAB):
    batch = {name: jax.ShapeDtypeStruct((4, LENGTH), "int32") for name in ("tokens", "targets")}
    plan = spmd.plan(
        lambda: gpt_pipeline.GPT(
            vocab=vocab, width=64, depth=1, heads=4, length=LENGTH, rngs=nnx.Rngs(0)
        ),
        batch,
        loss=loss,
        optimizer=optax.sgd(0.1),
        mesh="data=2",
        layout=dataclasses.replace(spmd.Layout.load("fsdp"), attention=spmd.Attention(attention)),
        target="2xh100",
    )
    return [note for note in plan.notes if "stored" in note]


def penalized(model, batch):
    """With a product of two vectors, whose result has no dims."""
    scale = model.norm.scale[...]
    return spmd.losses.cross_entropy(model, batch) + 0.01 * scale @ scale


@pytest.mark.system
def test_what_the_notes_name_removes_them():
    scores, logits = notes("as_written", penalized)
    assert (
        scores.startswith("note: all scores of attention are stored: float32[")
        and f"{LENGTH}, {LENGTH}]" in scores
    )
    assert scores.endswith('[attention] implementation = "auto" computes them in parts.')
    assert (
        logits.startswith("note: the logits of all tokens are stored: float32[")
        and str(VOCAB) in logits
    )
    assert logits.endswith("spmd.losses.cross_entropy_from_features computes them in parts.")
    assert notes("chunked", gpt_pipeline.cross_entropy) == []


@pytest.mark.system
def test_each_note_is_about_its_own_array():
    (scores,) = notes("as_written", gpt_pipeline.cross_entropy)
    assert "scores" in scores
    (logits,) = notes("chunked", spmd.losses.cross_entropy)
    assert "logits" in logits
    assert notes("chunked", spmd.losses.cross_entropy, vocab=64) == [], (
        "logits as small as features"
    )
