"""The GPT of the examples under `context_parallel` trains as on one device, and its compiled
program communicates nothing else.
"""

import collections
import dataclasses
import math
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from examples import gpt
from spmd.errors import DataError, LayoutError
from spmd.train.compiled_functions import FunctionKey
from tests.compare import assert_close
from tests.train.plain import LENGTH, MODELS, OPTIMIZER, ROWS, batches, leaves, reference

LAYOUT = spmd.Layout.load("context_parallel")


def trainer_of(mesh, gradients, layout=LAYOUT, model=MODELS["gpt"]):
    layout = dataclasses.replace(layout, gradients=gradients)
    return spmd.Trainer(
        model,
        loss=spmd.losses.cross_entropy,
        optimizer=OPTIMIZER,
        mesh=spmd.make_mesh(mesh, devices=devices(mesh)),
        layout=layout,
    )


def devices(mesh):
    return jax.devices()[: spmd.MeshSpec.parse(mesh).size]


def trained(trainer):
    """Losses, and parameters, after the five batches of the equivalence tests."""
    state, losses = trainer.init(), []
    for batch in batches("gpt"):
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    return losses, leaves(state.params)


def compiled(trainer):
    """The text of the compiled step."""
    state, batch = trainer.init(), trainer.place(batches("gpt")[0])
    return (
        trainer.prepare(None)[0]
        .functions.jitted(FunctionKey("step", ROWS, True))
        .lower(state, batch.leaves, batch.weights, {})
        .compile()
        .as_text()
    )


CASES = [
    pytest.param("data=2,context=4", "all_reduce", "balanced", id="all_reduce"),
    pytest.param(
        "data=4,context=2",
        "reduce_scatter",
        "contiguous",
        id="reduce_scatter",
        marks=pytest.mark.slow,
    ),
    pytest.param("data=2,context=4", "compiler", "balanced", id="compiler", marks=pytest.mark.slow),
    pytest.param(
        "data=1,context=8", "all_reduce", "balanced", id="sequence-only", marks=pytest.mark.slow
    ),
]


@pytest.mark.system
@pytest.mark.parametrize(("mesh", "reduction", "order"), CASES)
def test_trains_as_on_one_device(mesh, reduction, order):
    """To 1e-5 of the largest number of each parameter, as every layout."""
    layout = dataclasses.replace(LAYOUT, sequence=spmd.Sequence("context", order))
    trainer = trainer_of(mesh, spmd.Gradients(reduction), layout)
    losses, params = trained(trainer)
    plain = reference("gpt")
    assert_close(losses, plain[0], 1e-5)
    assert_close(params, plain[1], 1e-5)
    if reduction == "compiler":
        assert trainer.evaluate(trainer.init(), batches("gpt")[0])["loss"] == pytest.approx(
            plain[0][0], rel=1e-5
        )


@pytest.mark.system
def test_trains_with_a_gradient_codec():
    """bfloat16 rounds each gradient by at most 2^-8 of it, momentum sums ten times that: 5 % of the
    distance that parameters moved.
    """
    trainer = trainer_of("data=4,context=2", spmd.Gradients("reduce_scatter", "bfloat16"))
    start, plain = leaves(trainer.init().params), reference("gpt")[1]
    far = {
        path: np.abs(value - plain[path]).max() / np.abs(start[path] - plain[path]).max()
        for path, value in trained(trainer)[1].items()
    }
    assert 1e-4 < max(far.values()) < 5e-2


CONTEXT, DATA = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"
SPELLED = {
    "[2,4]<=[8]": CONTEXT,
    "mesh['data'=2,'context'=4] {'context'}": CONTEXT,
    "mesh['data'=2,'context'=4] {'data'}": DATA,
}


@pytest.mark.system
def test_collectives_of_compiled_step():
    """Keys and values around the ring, one reduction of gradients over `context` and one over
    `data`; no activation is gathered.
    """

    def shallow():
        return gpt.GPT(vocab=128, width=32, depth=1, heads=4, length=LENGTH, rngs=nnx.Rngs(0))

    trainer = trainer_of("data=2,context=4", spmd.Gradients("all_reduce"), model=shallow)
    # (kind, devices) -> how often each number of floats is sent
    sizes_sent = collections.defaultdict(collections.Counter)
    for shape, kind, groups in re.findall(
        r" = (.+?) (all-gather|all-to-all|all-reduce)\(.*?replica_groups=(mesh\[.*?\] "
        r"\{.*?\}|\S+?),? ",
        compiled(trainer),
    ):
        sizes = [
            math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", shape)
        ]
        sizes_sent[kind, SPELLED.get(groups, groups)].update(sizes)
    context, data, positions = CONTEXT, DATA, LENGTH * 32
    assert sizes_sent.pop(("all-gather", context)) == {positions: 1}, (
        "of the table of positions, as long as a sequence, and no rows"
    )
    gradients = collections.Counter(leaf.size for leaf in jax.tree.leaves(trainer.init().params))
    assert sizes_sent.pop(("all-reduce", context)) == gradients - collections.Counter(
        [positions]
    ) + collections.Counter([ROWS // 2]), "each gradient once, and the losses of a worker's rows"
    assert sizes_sent.pop(("all-reduce", data)) == gradients + collections.Counter([2]), (
        "and the metrics"
    )
    assert not sizes_sent
    ring = [op for op in trainer.wire.ops if op.where.endswith("/ring")]
    assert {(op.kind, op.axes, op.group) for op in ring} == {
        ("collective_permute", ("context",), 4)
    }
    # query, key and value in two parts each into the order of the ring, the result out of it;
    # gradients likewise
    moves = 2 * (3 + 1)
    # keys and values, past the three others; backward once more, and their gradients all the way
    # around
    turns = 2 * 3
    assert sum(op.count for op in ring) == 2 * moves + turns + turns + 2 * 4
    assert [(op.kind, op.shape) for op in trainer.wire.ops if op.where == "tokens/embed"] == [
        ("all_reduce", (128, 32))
    ]


def test_layout_whose_axis_is_never_used_raises():
    class Plain(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(128, 128, rngs=nnx.Rngs(0))

        def __call__(self, tokens):
            return self.embed(tokens)

    trainer = trainer_of("data=4,context=2", spmd.Gradients("all_reduce"), model=lambda: Plain())
    with pytest.raises(LayoutError) as caught:
        trainer.prepare(batches("gpt")[0])
    assert str(caught.value) == (
        'layouts/context_parallel.toml: [sequence] axis = "context", but the loss never calls '
        "spmd.nn.attention, so nothing is sharded "
        'over "context".\n    fix: spmd.nn.attention in the model, or a layout without [sequence].'
    )


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (
            "contxt",
            '  [sequence] axis\n      mesh axis "contxt" does not exist on mesh data=4, '
            'context=2.\n      fix: did you mean "context"?',
        ),
        (
            "data",
            '  [sequence] axis\n      "data" is a data axis: it splits the batch among workers, '
            "and cannot shard the data of one.\n"
            "      fix: another axis than data.",
        ),
    ],
)
def test_invalid_axes_raise(axis, expected):
    layout = dataclasses.replace(LAYOUT, sequence=spmd.Sequence(axis))
    with pytest.raises(LayoutError) as caught:
        trainer_of("data=4,context=2", spmd.Gradients("all_reduce"), layout).prepare(
            batches("gpt")[0]
        )
    assert str(caught.value).split("\n\n", 1)[1] == expected


def test_a_leaf_without_a_sequence_needs_a_rule():
    """One number per row raises an error; adding the rule that it suggests fixes it."""
    batch = {**batches("gpt")[0], "weight": np.ones(ROWS, np.float32)}

    def loss(model, batch):
        return (
            optax.softmax_cross_entropy_with_integer_labels(
                model(batch["tokens"]), batch["targets"]
            ).mean(1)
            * batch["weight"]
        )

    def make(layout):
        return spmd.Trainer(
            MODELS["gpt"], loss=loss, optimizer=OPTIMIZER, mesh="data=4,context=2", layout=layout
        )

    with pytest.raises(DataError) as caught:
        make(LAYOUT).prepare(batch)
    assert 'fix: add [[batch.rules]]  path = "weight"  spec = ["data"].' in str(caught.value)
    rules = (spmd.Rule("weight", ("data",)),)
    make(dataclasses.replace(LAYOUT, batch=dataclasses.replace(LAYOUT.batch, rules=rules))).prepare(
        batch
    )


@pytest.mark.system
def test_embed_equals_flax_embed():
    tokens = np.arange(12).reshape(2, 6) % 5
    ours, theirs = spmd.nn.Embed(5, 3, rngs=nnx.Rngs(0)), nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    assert (ours(tokens) == theirs(tokens)).all()
    with nnx.use_eager_sharding(False):
        assert isinstance(gpt.GPT(rngs=nnx.Rngs(0)).tokens, spmd.nn.Embed)


class Stacked(nnx.Module):
    """An embedding, two blocks of the GPT as a stack, and logits."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.tokens, self.head = spmd.nn.Embed(128, 16, rngs=rngs), nnx.Linear(16, 128, rngs=rngs)
        self.blocks = spmd.nn.LayerStack([gpt.Block(16, 2, 0.0, rngs=rngs) for _ in range(2)])

    def __call__(self, tokens):
        return self.head(self.blocks(self.tokens(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_context_parallel_inside_a_pipeline(schedule):
    """Idle stages take part in the ring: in a separate branch, the ring would exchange wrong
    numbers.
    """
    pipe = spmd.Pipeline("stage", schedule, microbatches=2)
    pipelined = dataclasses.replace(LAYOUT, pipeline=pipe)
    results = []
    for mesh, layout in (
        ("data=2,stage=2,context=2", pipelined),
        ("data=1", spmd.Layout.load("data_parallel")),
    ):
        trainer = trainer_of(mesh, spmd.Gradients("all_reduce"), layout, model=lambda: Stacked())
        state, metrics = trainer.step(trainer.init(), batches("gpt")[0])
        results.append((metrics["loss"], leaves(state.params)))
    (ours, params), (loss, plain) = results
    assert_close(ours, loss, 1e-5)
    assert_close(params, plain, 1e-5)
