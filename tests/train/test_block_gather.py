"""Parameters of a list of blocks gathered block by block, and their gradients reduced in the
backward pass of each.
"""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd.errors import LayoutError
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.train.compiled_step import prepare_program
from spmd.train.model_setup import PlacedModel, TrainConfig
from tests.compare import assert_close
from tests.train.test_layer_gather import (
    WIDTH,
    Net as StackNet,
    batch,
    check_residual,
    gathered_by_layer,
    has_memory,
    loss,
    params,
    sharded,
    train,
    trainer_of,
)

HIDDEN = 28
KERNEL = "blocks/1/down/kernel"
TENSOR_PARALLEL = (
    spmd.Rule("blocks/*/up/kernel", ("data", "model")),
    spmd.Rule("blocks/*/down/kernel", ("model", "data")),
    spmd.Rule("blocks/*/up/bias", ("model",)),
)


class Block(nnx.Module):
    def __init__(self, rngs, dropout=0.0, normed=False):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if normed else nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(WIDTH, HIDDEN, rngs=rngs),
            nnx.Linear(HIDDEN, WIDTH, rngs=rngs),
        )
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, scale=None, *, gain=1):
        return x + gain * self.drop(self.down(nnx.gelu(self.up(self.norm(x))))) * (
            1 if scale is None else scale
        )


class Net(nnx.Module):
    def __init__(self, blocks=4, order=None, **options):
        rngs = nnx.Rngs(0, dropout=1)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, **options) for _ in range(blocks)])
        self.out, self.order = (
            nnx.Linear(WIDTH, 3, rngs=rngs),
            range(blocks) if order is None else order,
        )

    def __call__(self, x):
        scale = jnp.tanh(self.first(x))
        for number in self.order:
            x = self.blocks[number](x, scale, gain=2)
        return self.out(x)


class LinenBlock(linen.Module):
    dropout: float = 0.0
    normed: bool = False

    @linen.compact
    def __call__(self, x, scale, train=True):
        x0 = x
        x = (
            linen.BatchNorm(use_running_average=not train)(x)
            if self.normed
            else linen.LayerNorm()(x)
        )
        x = linen.Dense(WIDTH, name="down")(linen.gelu(linen.Dense(HIDDEN, name="up")(x)))
        return (
            x0
            + linen.Dropout(self.dropout, rng_collection="params", deterministic=not train)(x)
            * scale
        )


class LinenNet(linen.Module):
    dropout: float = 0.0
    normed: bool = False

    @linen.compact
    def __call__(self, x, train=True):
        scale = jnp.tanh(linen.Dense(WIDTH)(x))
        for number in range(3):
            x = LinenBlock(self.dropout, self.normed, name=f"layers_{number}")(
                x, scale, train=train
            )
        return linen.Dense(3)(x)


RECOMPUTED = spmd.Remat(modules=("blocks/*",))
CASES = {
    "plain": {},
    "another order": {"net": lambda: Net(order=(2, 0, 1, 3))},
    "a block without influence": {"net": lambda: Detached()},
    "accumulation": {"accumulate": 2},
    "accumulation of full gradients": {"accumulate": 4, "sums": "local", "mesh": "data=4"},
    "products in int8": {"precision": (spmd.Precision("blocks/**", "int8"),)},
    "linen, accumulation of full gradients": {
        "net": lambda: LinenNet(),
        "accumulate": 2,
        "sums": "local",
    },
    "dropout and accumulation": {"net": lambda: Net(dropout=0.5), "accumulate": 2},
    "batch statistics": {"net": lambda: Net(normed=True)},
    "everything recomputed": {"remat": spmd.Remat("nothing")},
    "blocks recomputed": {"remat": RECOMPUTED},
    "blocks recomputed, dropout": {"remat": RECOMPUTED, "net": lambda: Net(dropout=0.5)},
    "products kept": {"remat": spmd.Remat("dots")},
    "tensor parallel": {"params": TENSOR_PARALLEL, "mesh": "data=4,model=2"},
    "outputs placed": {
        "params": TENSOR_PARALLEL,
        "mesh": "data=4,model=2",
        "activations": (spmd.Rule("blocks/*", (None, "model")),),
    },
    "linen": {"net": lambda: LinenNet()},
    "linen, dropout": {"net": lambda: LinenNet(0.5), "accumulate": 2},
    "linen, batch statistics": {"net": lambda: LinenNet(normed=True)},
    "linen, recomputed": {"net": lambda: LinenNet(0.5), "remat": spmd.Remat(modules=("layers_*",))},
}


class Detached(Net):
    def __call__(self, x):
        for number in (0, 1):
            x = self.blocks[number](x)
        y = self.blocks[2](x)
        return self.out(x) + 0 * jax.lax.stop_gradient(self.blocks[3](y)).sum(-1, keepdims=True)


@pytest.mark.sampled(system=7)
@pytest.mark.parametrize("case", CASES)
def test_blocks_gathered_one_by_one_train_as_on_one_device(case):
    options = {"net": lambda: Net()} | CASES[case]
    rules, remat = options.pop("params", ()), options.pop("remat", None)
    declared = {
        "activations": options.pop("activations", ()),
        "precision": options.pop("precision", ()),
    }
    gradients = [{"gather": "layer", "accumulate": options.pop("sums", "auto")}, {"gather": "full"}]
    layouts = [
        dataclasses.replace(sharded(params=rules, remat=remat, **given), **declared)
        for given in gradients
    ]
    layer, full = (trainer_of(layout, **options) for layout in layouts)
    plain = dataclasses.replace(spmd.Layout.load("data_parallel"), precision=declared["precision"])
    one = trainer_of(plain, **options | {"mesh": "data=1"})
    states = [start(trainer) for trainer in (layer, full, one)]
    path = "layers_1/down/kernel" if "linen" in case else KERNEL
    assert path in gathered_by_layer(layer) and path not in gathered_by_layer(full)
    assert_close(params(states[0]), params(states[2]))
    for ours, theirs in zip(
        *(jax.tree.leaves(jax.device_get(state.stats)) for state in states[::2]), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    evaluated = [
        trainer.evaluate(state, batch(), batch_size=8)["loss"]
        for trainer, state in zip((layer, one), states[::2], strict=True)
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


def start(trainer, steps=3):
    state = trainer.init(batch())
    for number in range(steps):
        state, _ = trainer.step(state, batch(number))
    return state


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize(("accumulate", "mode"), [(1, "auto"), (2, "reduced"), (2, "local")])
def test_a_lossy_codec_keeps_what_it_loses_of_a_block(accumulate, mode):
    check_residual(KERNEL, lambda: Net(), "int8", accumulate, mode)


@pytest.mark.system
@pytest.mark.parametrize("rows", [16, 13])
def test_evaluation_gathers_block_by_block(rows):
    metrics = {"error": lambda m, b: jnp.abs(m(b["x"]) - b["y"]).mean(-1)}
    layer, full = (
        trainer_of(sharded(gather), net=lambda: Net(normed=True), metrics=metrics)
        for gather in ("layer", "full")
    )
    ours, theirs = (
        trainer.evaluate(trainer.init(), batch(rows=rows), batch_size=8)
        for trainer in (layer, full)
    )
    assert_close(ours, theirs)


@pytest.mark.system
def test_each_block_is_gathered_twice_and_reduced_once():
    trainer = trainer_of(sharded("layer", codec="bfloat16", weights="bfloat16"), net=lambda: Net())
    trainer.step(trainer.init(), batch())
    # kernels, scale and two biases of 16; that of 28 is replicated
    small = WIDTH * HIDDEN * 2 // 8 + WIDTH * 3 // 8
    gathers = [
        op.count
        for op in trainer.wire.ops
        if (op.where, op.kind, op.shape) == ("gather_params", "all_gather", (1, small))
    ]
    reductions = [
        op.count
        for op in trainer.wire.ops
        if op.where == "reduce_gradients/bfloat16" and op.shape == (8, small)
    ]
    assert sum(gathers) == 4 + 4
    assert sum(reductions) == 4


def penalised(model, batch):
    return loss(model, batch) + 1e-3 * jnp.sum(model.blocks[1].up.kernel.get_value() ** 2)


class Checkpointed(Net):
    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.out(x)


class Counting(Block):
    calls = 0

    def __call__(self, x, *args, **kwargs):
        self.calls += 1
        return super().__call__(x, *args, **kwargs)


class CountingNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nnx.List([Counting(nnx.Rngs(0)) for _ in range(4)])


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize(
    ("options", "why", "others"),
    [
        ({"loss": penalised}, "the loss reads it outside of its block, too (integer_pow)", True),
        ({"net": lambda: Net(order=(0, 1, 2, 3, 1))}, "blocks/1: it is called 2 times", True),
        ({"net": lambda: Net(order=(0, 2, 3))}, "blocks/1: it is called 0 times", True),
        ({"net": lambda: Checkpointed()}, "it is called inside of a transformation of JAX", False),
        ({"net": lambda: CountingNet()}, "its call changes attributes", False),
        (
            {"remat": spmd.Remat(modules=("blocks/*/up",))},
            "[remat] recomputes only a part of its layer, blocks/0/up",
            False,
        ),
        (
            {"codec": "int8", "start_step": 3},
            "[gradients] start_step is about full gradients",
            False,
        ),
    ],
)
def test_what_is_no_block_is_refused_or_gathered_in_full(options, why, others, monkeypatch):
    gradients = {
        key: value for key, value in options.items() if key not in ("loss", "net", "remat")
    }
    rest = {"net": lambda: Net()} | {
        key: value for key, value in options.items() if key in ("loss", "net")
    }
    with pytest.raises(LayoutError) as refused:
        trainer_of(sharded("layer", remat=options.get("remat"), **gradients), **rest).prepare(
            batch()
        )
    assert why in str(refused.value) and 'gather = "auto"' in str(refused.value)
    assert not gathered_by_layer(trainer_of(sharded("auto"), net=lambda: Net()))
    monkeypatch.setattr("spmd.sync.layer_gather.AUTO_BYTES", 0)
    trainer = trainer_of(sharded("auto", remat=options.get("remat"), **gradients), **rest)
    assert "blocks/1/up/kernel" not in gathered_by_layer(trainer)
    # the other blocks of the list are gathered one by one all the same
    assert ("blocks/0/up/kernel" in gathered_by_layer(trainer)) == others
    assert any(
        "parameters of blocks" in note and "gathered in full" in note for note in trainer.notes()
    )
    if set(options) & {"loss", "net"}:
        assert_close(
            params(train(trainer)[0]),
            params(train(trainer_of("data_parallel", mesh="data=1", **rest))[0]),
        )


class LinenCheckpointed(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        for number in range(3):
            x = linen.remat(LinenBlock)(name=f"layers_{number}")(x, 1.0)
        return linen.Dense(3)(x)


def refused(net, loss=loss, **declared):
    with pytest.raises(LayoutError) as error:
        trainer_of(sharded("layer", **declared), net=net, loss=loss).prepare(batch())
    return error.value


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("options", "where", "why"),
    [
        (
            {"net": lambda: Net(order=(0, 1, 2, 3, 1, 1))},
            "blocks/1, 5 parameters",
            "blocks/1: it is called 3 times.",
        ),
        (
            {"net": lambda: Net(), "loss": penalised},
            "blocks/1/up/kernel",
            "the loss reads it outside of its block",
        ),
        (
            {"net": lambda: Net(), "codec": "power_sgd", "error_feedback": True},
            "blocks/*, 8 parameters",
            "blocks/0/down/kernel: codec power_sgd keeps a state.",
        ),
        (
            {"net": lambda: StackNet(), "codec": "power_sgd", "error_feedback": True},
            "stack, 2 parameters",
            "stack/layers/down/kernel: codec power_sgd keeps a state.",
        ),
    ],
)
def test_one_cause_is_one_problem_of_a_list_of_blocks_or_a_stack(options, where, why):
    (problem,) = refused(**options).problems
    assert (
        problem.where == where
        and problem.why[0].startswith(why)
        and problem.fix == 'gather = "auto".'
    )


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    ("own", "without", "path"),
    [(Checkpointed, Net, KERNEL), (LinenCheckpointed, LinenNet, "layers_1/down/kernel")],
)
def test_blocks_that_the_model_recomputes_itself_are_gathered_once_the_layout_names_them(
    own, without, path
):
    (problem,) = refused(lambda: own()).problems
    (modules,) = re.findall(r'\[remat\] modules = \["(.*)"\] in place of', problem.fix)
    assert path in gathered_by_layer(
        trainer_of(sharded("layer", remat=spmd.Remat(modules=(modules,))), net=lambda: without())
    )


class NoBlocks(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, 3, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


NOTHING = "the loss calls no stack of layers and no list of equal blocks that is sharded over data"


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    ("net", "replicated", "mesh", "why"),
    [
        (lambda: NoBlocks(), False, "data=8", NOTHING),
        (lambda: Net(order=()), False, "data=8", NOTHING),
        (lambda: Net(), True, "data=8", NOTHING),
        (lambda: StackNet(), True, "data=8", NOTHING),
        (lambda: Net(), False, "data=1", "there is one worker"),
    ],
)
def test_a_gather_by_layer_that_applies_to_nothing_is_said(net, replicated, mesh, why):
    layout = sharded("layer")
    layout = (
        dataclasses.replace(layout, default=spmd.Layout.load("data_parallel").default)
        if replicated
        else layout
    )
    trainer = trainer_of(layout, mesh, net=net)
    assert not gathered_by_layer(trainer)
    assert f'note: [gradients] gather = "layer" is not used: {why}.' in trainer.notes()
    assert not any(
        "is not used" in note for note in trainer_of(sharded("layer"), net=lambda: Net()).notes()
    )


OF_ALL, LEAVES = "weights and gradients of all blocks", "leaves on a device"
# the memory of a device, the least bytes of a block, whether blocks are gathered one by one, and
# why
BLOCKS = [
    (None, 0, True, "devices do not say how much memory they have, and 0 B or more are gathered"),
    (None, 2**20, False, None),
    (
        300_000,
        2**20,
        False,
        f"a block has 3.7 KiB, less than 1.0 MiB, and {OF_ALL} fit into 33% of the 288.0 KiB that "
        f"the state {LEAVES}",
    ),
    (90_000, 2**20, True, f"{OF_ALL} exceed 33% of the 82.9 KiB that the state {LEAVES}"),
    (300_000, 2**10, True, "a block has 3.7 KiB, 1.0 KiB or more"),
]


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(("memory", "least", "one_by_one", "why"), BLOCKS)
def test_fit_and_plans_decide_alike_how_blocks_are_gathered(
    memory, least, one_by_one, why, monkeypatch
):
    monkeypatch.setattr("spmd.sync.layer_gather.AUTO_BYTES", least)
    has_memory(monkeypatch, memory)
    trained, _ = trainer_of(sharded("auto"), net=lambda: Net()).prepare(batch())
    config, mesh = (
        TrainConfig(lambda: Net(), loss, optax.sgd(0.05, momentum=0.9)),
        abstract_mesh(MeshSpec.parse("data=8")),
    )
    placed = PlacedModel(config, mesh, sharded("auto"), platform="cpu", device_memory=memory)
    planned = prepare_program(
        placed, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    )
    assert bool(trained.sync.blocks) == bool(planned.sync.blocks) == one_by_one
    way = (
        "block by block"
        if one_by_one
        else "in full, before the loss, and again for its backward pass"
    )
    expected = (
        [] if why is None else [f"20 parameters of blocks (14.8 KiB) are gathered {way}: {why}."]
    )
    assert trained.notes == planned.notes == expected


@pytest.mark.system
def test_stacks_are_gathered_by_layer_on_devices_that_say_how_much_memory_they_have(monkeypatch):
    assert not gathered_by_layer(trainer_of(sharded("auto"), net=lambda: StackNet()))
    has_memory(monkeypatch, 10**9)
    trainer = trainer_of(sharded("auto"), net=lambda: StackNet())
    assert any(path.startswith("stack/") for path in gathered_by_layer(trainer))
    assert any(
        "parameters of stacks" in note and note.endswith("are gathered one layer at a time.")
        for note in trainer.notes()
    )


@pytest.mark.system
def test_calls_in_an_order_that_changes_train_as_on_one_device():
    order, later = [0, 1, 2, 3], (0, 2, 1, 3)
    trainer = trainer_of(sharded("layer"), net=lambda: Net(order=order), loss=reordered(order))
    assert KERNEL in gathered_by_layer(trainer)
    order[:] = later
    one = trainer_of("data_parallel", mesh="data=1", net=lambda: Net(order=later))
    assert_close(params(train(trainer)[0]), params(train(one)[0]))


def reordered(order):
    def of(model, batch):
        model.order = tuple(order)
        return loss(model, batch)

    return of


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="package jax_cuda13_plugin is missing, XLA's compiler for GPUs (no GPU is needed): pip "
    "install '.[gpu-compiler]'",
)
def test_gpus_hold_weights_and_gradients_of_one_block():
    from examples.gpt import GPT

    width, rows, length = 1024, 2, 1024

    def planned(depth, gather):
        layout = dataclasses.replace(
            spmd.Layout.load("fsdp"), attention=spmd.Attention("auto"), remat=RECOMPUTED
        )
        layout = dataclasses.replace(
            layout, gradients=dataclasses.replace(layout.gradients, gather=gather)
        )
        tokens = jax.ShapeDtypeStruct((8 * rows, length), "int32")
        return spmd.plan(
            lambda: GPT(
                vocab=1024, width=width, depth=depth, heads=8, length=length, rngs=nnx.Rngs(0)
            ),
            {"tokens": tokens, "targets": tokens},
            loss=spmd.losses.cross_entropy,
            optimizer=optax.adamw(3e-4),
            target="8xh100",
            layout=layout,
            precision="bfloat16",
        )

    plans = {gather: [planned(depth, gather) for depth in (4, 8)] for gather in ("layer", "full")}
    grown = {
        gather: (eight.memory.temporaries - four.memory.temporaries) / 4
        for gather, (four, eight) in plans.items()
    }
    weights, carried = 12 * width**2, rows * length * width * 2  # of a block; bytes of its input
    assert grown["layer"] < carried + weights * 4 / 8 + 2**20 and grown["full"] > 2 * weights
