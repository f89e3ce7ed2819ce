"""`cross_entropy_from_features`: equal to the plain loss, under every layout, without logits of all
tokens.
"""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from examples import gpt
from spmd.base.tree import flatten
from spmd.errors import LossError
from spmd.jaxpr.programs import equations
from spmd.losses import cross_entropy_from_features
from spmd.planner.hlo import arrays_of
from tests.compare import assert_close

ROWS, LENGTH, WIDTH, VOCAB = 4, 9, 8, 37  # 36 tokens
CLASSES = 96  # of the model that is trained


def plain(
    features,
    head,
    labels,
    *,
    weights=None,
    bias=None,
    label_smoothing=0.0,
    z_loss=0.0,
    soft_cap=None,
):
    """The same written out, for a head [width, vocab], in float32."""
    logits = features.astype(jnp.float32) @ head.astype(jnp.float32)
    logits = logits if bias is None else logits + bias
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, head.shape[1]), label_smoothing)
    losses = (
        optax.softmax_cross_entropy(logits, targets) + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    )
    weights = jnp.ones(labels.shape) if weights is None else weights.astype(jnp.float32)
    return jnp.sum(losses * weights), weights.sum()


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype)
    head, bias = (
        jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), dtype),
        jnp.asarray(rng.normal(size=VOCAB), dtype),
    )
    return features, head, bias, jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH)))


CASES = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "soft cap": {"soft_cap": 2.0},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0},
}


@pytest.mark.sampled(quick=25, system=3)
@pytest.mark.parametrize("chunk", [1, 7, 18, 36, 1000])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loss(case, chunk):
    features, head, bias, labels = arrays()
    weights = jnp.asarray(
        np.random.default_rng(1).uniform(size=labels.shape) * (labels % 3 > 0), jnp.float32
    )
    assert bool((weights == 0).any())

    def ours(features, head, bias, weights):
        total, count = cross_entropy_from_features(
            features, head, labels, bias=bias, weights=weights, chunk=chunk, **CASES[case]
        )
        return total / count

    def theirs(features, head, bias, weights):
        total, count = plain(features, head, labels, bias=bias, weights=weights, **CASES[case])
        return total / count

    given = (features, head, bias, weights)
    assert_close(jax.jit(ours)(*given), theirs(*given), 1e-6)
    assert_close(
        *(jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*given) for f in (ours, theirs)), 1e-5
    )


@pytest.mark.system
@pytest.mark.parametrize("dim", [0, 1])
def test_head_may_be_a_table_of_embeddings(dim):
    features, head, _, labels = arrays()
    turned = head if dim == 1 else head.T

    def loss(features, turned):
        return cross_entropy_from_features(features, turned, labels, chunk=5, vocab_dim=dim)[0]

    d_features, d_head = jax.grad(loss, argnums=(0, 1))(features, turned)
    wanted = jax.grad(lambda f, h: plain(f, h, labels)[0], argnums=(0, 1))(features, head)
    assert d_head.shape == turned.shape
    assert_close((d_features, d_head if dim == 1 else d_head.T), wanted, 1e-5)


@pytest.mark.system
def test_bfloat16_is_summed_in_float32():
    features, head, bias, labels = arrays(jnp.bfloat16)

    def loss(f, features, head):
        return f(features, head, labels, bias=bias)[0]

    run = jax.value_and_grad(
        lambda *given: loss(lambda *a, **k: cross_entropy_from_features(*a, chunk=4, **k), *given),
        argnums=(0, 1),
    )
    value, gradients = run(features, head)
    exact, wanted = jax.value_and_grad(lambda *given: loss(plain, *given), argnums=(0, 1))(
        features, head
    )
    assert value.dtype == jnp.float32 and all(g.dtype == jnp.bfloat16 for g in gradients)
    assert_close(value, exact, 1e-6)  # products of bfloat16 numbers are exact in float32
    assert_close(gradients, wanted, 2.0**-7)  # softmax and result are rounded to 8 bits each
    dots = [
        e
        for e in equations(jax.make_jaxpr(run)(features, head).jaxpr)
        if e.primitive.name == "dot_general"
    ]
    assert dots and {v.aval.dtype for e in dots for v in e.invars} == {jnp.dtype("bfloat16")}
    assert {v.aval.dtype for e in dots for v in e.outvars} == {jnp.dtype("float32")}


@pytest.mark.system
def test_labels_that_do_not_count_may_be_anything():
    features, head, _, labels = arrays()
    counted = labels % 3 > 0
    run = jax.value_and_grad(
        lambda f, y: cross_entropy_from_features(f, head, y, weights=counted, chunk=5)[0]
    )
    value, gradient = run(features.at[0, 0].set(features[0, 1]), jnp.where(counted, labels, -100))
    wanted = run(features.at[0, 0].set(features[0, 1]), labels)
    assert np.isfinite(value) and not np.asarray(gradient[~counted]).any()
    assert_close((value, gradient), wanted, 0.0)
    for wrong in (-1, VOCAB):
        assert np.isnan(
            cross_entropy_from_features(features, head, labels.at[1, 1].set(wrong), chunk=5)[0]
        )
    small = labels.astype(jnp.int8)  # fewer values than a large vocabulary has classes
    wide = jnp.tile(head, (1, 10))
    assert_close(
        cross_entropy_from_features(features, wide, small),
        cross_entropy_from_features(features, wide, labels),
        0.0,
    )


def largest(function, *given):
    return max(
        v.aval.size for e in equations(jax.make_jaxpr(function)(*given).jaxpr) for v in e.outvars
    )


def test_logits_of_all_tokens_never_exist():
    features, head, _, labels = arrays()
    ours, theirs = (
        jax.grad(lambda f, h, loss=loss: loss(f, h)[0], argnums=(0, 1))
        for loss in (
            lambda f, h: cross_entropy_from_features(f, h, labels, chunk=6),
            lambda f, h: plain(f, h, labels),
        )
    )
    assert largest(theirs, features, head) == ROWS * LENGTH * VOCAB
    assert largest(ours, features, head) == max(features.size, head.size, 6 * VOCAB)
    dots = [
        e
        for e in equations(jax.make_jaxpr(ours)(features, head).jaxpr)
        if e.primitive.name == "dot_general"
    ]
    assert len(dots) == 3  # recomputed in the backward pass there would be four


INVALID = {
    "head does not fit": ({"head": jnp.ones((5, 6))}, "features are float32"),
    "square head": ({"features": jnp.ones((2, 3, 4)), "head": jnp.ones((4, 4))}, "vocab_dim=1 for"),
    "wrong vocab_dim": ({"vocab_dim": 0}, "vocab_dim=0"),
    "labels of floats": ({"labels": jnp.ones((2, 3))}, "labels are float32"),
    "labels of another shape": ({"labels": jnp.ones((2, 4), int)}, "labels of shape [2, 3]"),
    "integer features": ({"features": jnp.ones((2, 3, 4), int)}, "floating-point"),
    "weights of another shape": ({"weights": jnp.ones(2)}, "weights of shape"),
    "bias of another shape": ({"bias": jnp.ones(4)}, "a bias of shape [10]"),
    "chunk of nothing": ({"chunk": 0}, "chunk=0"),
    "half a chunk": ({"chunk": 1.5}, "chunk=1.5"),
    "smoothing of everything": ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
    "negative z-loss": ({"z_loss": -1e-4}, "z_loss=-0.0001"),
    "no cap": ({"soft_cap": 0.0}, "soft_cap=0.0"),
    "several": ({"chunk": 0, "z_loss": -1}, "z_loss=-1; chunk=0"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_input_is_refused(case):
    given, said = INVALID[case]
    given = {
        "features": jnp.ones((2, 3, 4)),
        "head": jnp.ones((4, 10)),
        "labels": jnp.zeros((2, 3), int),
    } | given
    with pytest.raises(LossError, match=re.escape(said)) as caught:
        cross_entropy_from_features(
            given.pop("features"), given.pop("head"), given.pop("labels"), **given
        )
    assert caught.value.fix


class Net(nnx.Module):
    """A small GPT with its blocks in a stack; `tied`: the head is the table of embeddings."""

    def __init__(self, tied):
        rngs = nnx.Rngs(0)
        self.tokens = spmd.nn.Embed(
            CLASSES, 16, embedding_init=gpt.named("vocab", "embed"), rngs=rngs
        )
        self.blocks = spmd.nn.LayerStack(
            spmd.nn.repeat(4, lambda rngs: gpt.Block(16, 2, 0.0, rngs=rngs), rngs)
        )
        self.head = (
            None
            if tied
            else nnx.Linear(
                16, CLASSES, use_bias=False, kernel_init=gpt.named("embed", "vocab"), rngs=rngs
            )
        )

    def features(self, tokens):
        return self.blocks(self.tokens(tokens))

    def __call__(self, tokens):
        x = self.features(tokens)
        return self.tokens.attend(x) if self.head is None else self.head(x)


def from_features(model, batch):
    table = model.tokens.embedding if model.head is None else model.head.kernel
    weights = batch["mask"]
    return cross_entropy_from_features(
        model.features(batch["tokens"]),
        table[...],
        batch["targets"],
        weights=weights,
        z_loss=1e-2,
        chunk=12,
    )


def from_logits(model, batch):
    head = jnp.eye(CLASSES, dtype=jnp.float32)
    return plain(model(batch["tokens"]), head, batch["targets"], weights=batch["mask"], z_loss=1e-2)


def batches(steps=3):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, CLASSES, (16, 9)).astype("int32") for _ in range(steps)]
    return [{"tokens": t[:, :-1], "targets": t[:, 1:], "mask": t[:, 1:] % 5 > 0} for t in tokens]


def train(loss, tied=False, **options):
    trainer = spmd.Trainer(
        lambda: Net(tied), loss=loss, optimizer=optax.sgd(0.5, momentum=0.9), **options
    )
    state, losses = trainer.init(), []
    for batch in batches():
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    return (
        trainer,
        losses,
        {path: np.asarray(leaf) for path, leaf in flatten(jax.device_get(state.params)).items()},
    )


REFERENCE: dict = {}
LAYOUTS = {
    "data parallel": {"layout": "data_parallel"},
    "by the compiler": {
        "layout": dataclasses.replace(
            spmd.Layout.load("data_parallel"), gradients=spmd.Gradients("compiler")
        )
    },
    "fsdp": {"layout": "fsdp"},
    "fsdp by layer": {
        "layout": dataclasses.replace(
            spmd.Layout.load("fsdp"), gradients=spmd.Gradients("reduce_scatter", gather="layer")
        )
    },
    "accumulation": {"layout": "fsdp", "accumulate": 2},
    "tensor parallel": {"layout": "fsdp_tensor_parallel"},
    "tensor parallel, by the compiler": {
        "layout": dataclasses.replace(
            spmd.Layout.load("fsdp_tensor_parallel"), gradients=spmd.Gradients("compiler")
        )
    },
    "sequences": {"layout": "context_parallel", "mesh": "data=4,context=2"},
    "pipeline": {"layout": "pipeline", "mesh": "data=2,stage=4"},
    "1f1b pipeline": {"layout": "pipeline_1f1b", "mesh": "data=2,stage=4"},
    "everything": {"layout": "fsdp_pipeline_tensor"},
    "recomputed": {
        "layout": dataclasses.replace(spmd.Layout.load("fsdp"), remat=spmd.Remat("nothing"))
    },
}
QUICK = (
    "by the compiler",
    "fsdp by layer",
    "accumulation",
    "tensor parallel",
    "sequences",
    "1f1b pipeline",
    "everything",
)


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in LAYOUTS],
)
def test_trains_as_the_plain_loss_on_one_device(case, tied):
    if tied not in REFERENCE:
        mesh = spmd.make_mesh("data=1", devices=jax.devices()[:1])
        REFERENCE[tied] = train(from_logits, tied, layout="data_parallel", mesh=mesh)[1:]
    trainer, losses, params = train(from_features, tied, **LAYOUTS[case])
    wanted_losses, wanted = REFERENCE[tied]
    assert_close(losses, wanted_losses, 1e-5)
    assert_close(params, wanted, 1e-5)
    program = trainer.prepare(batches(1)[0])[0]
    assert program.reading.mean  # a mean over tokens, known without running the first batch twice
    assert len(trainer.mesh.devices.flat) == 8


@pytest.mark.system
def test_head_is_gathered_once_over_the_workers_and_never_over_the_model_axis():
    """In the compiled program: no chunk gathers the head, and no device holds its classes of other
    devices.
    """
    layout = spmd.Layout.load("fsdp_tensor_parallel")
    trainer = spmd.Trainer(
        lambda: Net(False),
        loss=from_features,
        optimizer=optax.sgd(0.5),
        mesh="data=4,model=2",
        layout=layout,
    )
    text = trainer.prepare(batches(1)[0])[0].compile().as_text()
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)}
    assert {(16, 48), (11, 48)} <= shapes, (
        "half of the classes, of the head and of a chunk: 32 tokens of a worker in three chunks"
    )
    assert not {(16, 96), (11, 96), (32, 96), (32, 48)} & shapes, (
        "no device has all classes, or logits of all its tokens"
    )
    gathers = [line for line in text.splitlines() if re.search(r"= \S+ all-gather\(", line)]
    assert gathers and not [line for line in gathers if "cross_entropy" in line], (
        "no chunk gathers anything"
    )


@pytest.mark.system
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="package jax_cuda13_plugin is missing, XLA's compiler for GPUs (no GPU is needed): pip "
    "install '.[gpu-compiler]'",
)
def test_program_for_gpus_holds_no_logits_of_all_tokens():
    """In the buffers that XLA:GPU assigns, of 16 x 8 tokens over two workers."""

    def sizes(loss):
        plan = spmd.plan(
            lambda: Net(False),
            batches(1)[0],
            loss=loss,
            optimizer=optax.sgd(0.5),
            target="2xh100",
            layout="fsdp",
        )
        return {
            array.size for line in plan.compiled.buffers.splitlines() for array in arrays_of(line)
        }

    assert 64 * CLASSES in sizes(from_logits)
    found = sizes(from_features)
    assert 11 * CLASSES in found, "logits of a chunk: 64 tokens of a worker in six chunks"
    assert 64 * CLASSES not in found
