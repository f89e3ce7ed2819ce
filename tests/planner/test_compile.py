"""What is counted does not depend on the compiler: operations by hand, on XLA:CPU and, where it is
installed, on XLA:GPU without a GPU.
"""

import dataclasses
import importlib.util

import jax
import optax
import pytest
from flax import nnx

import spmd
from examples import gpt_pipeline
from spmd.errors import SpmdError
from spmd.planner.cluster import Cluster
from spmd.planner.compile import PLUGIN, compiler_of, topology
from spmd.planner.hlo import parse
from tests.planner.test_hlo import asynchronous
from tests.train.plain import MODELS, batches

pytestmark = pytest.mark.system

GPU = pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing, XLA's compiler for GPUs (no GPU is needed): pip install "
    "'.[gpu-compiler]'",
)
TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="package libtpu is missing, XLA's compiler for TPUs (no TPU is needed): pip install "
    "'.[tpu-compiler]'",
)
TARGETS = [
    "2xcpu",
    pytest.param("2xh100", marks=GPU),
    pytest.param("2xtpu_v5e", marks=TPU),
    pytest.param("2xtpu_v4", marks=TPU),
]
ROWS = 8


class Conv(nnx.Module):
    """Two convolutions, the second with a stride."""

    def __init__(self, rngs):
        self.first = nnx.Conv(4, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (5, 5), strides=2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class Deep(nnx.Module):
    """Six equal layers, which one loop goes through."""

    def __init__(self, rngs):
        self.stack = spmd.nn.LayerStack(
            spmd.nn.repeat(6, lambda rngs: nnx.Linear(64, 64, rngs=rngs), rngs)
        )

    def __call__(self, x):
        return self.stack(x)


class Recurrent(nnx.Module):
    """One cell over time."""

    def __init__(self, rngs):
        self.stack = spmd.nn.RNNStack([nnx.SimpleCell(32, 32, rngs=rngs)])

    def __call__(self, x):
        return self.stack(x)


def conv_flops(rows):
    # along a dim of 16 pixels 3 of the kernel fall on the image, except for 2 at the border
    first = rows * (16 * 3 - 2) ** 2 * 16 * 4
    second = rows * (8 * 5 - 1 - 2) ** 2 * 32 * 16
    return 2 * (2 * first + 3 * second), "the first needs no gradient of what it takes"


def deep_flops(rows):
    product = rows * 64 * 64
    return 2 * (18 * product), "a loop makes the gradient of what it takes in every turn"


def recurrent_flops(rows):
    forward = rows * 12 * 2 * 32 * 32
    return 2 * (
        3 * forward - rows * 12 * 32 * 32
    ), "twelve steps of two products; what comes in needs no gradient"


def mean_square(model, batch):
    y = model(batch["x"])
    return (y**2).mean(axis=tuple(range(1, y.ndim)))


CASES = {
    "convolutions": (Conv, (16, 16, 4), conv_flops),
    "layers": (Deep, (64,), deep_flops),
    "time": (Recurrent, (12, 32), recurrent_flops),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_operations_by_hand(name, target):
    """Exact, also of convolutions at borders and with strides, whose gradients XLA:CPU writes as
    dilated ones. cuDNN knows no uneven borders: XLA:GPU adds zeros to the image, which are
    multiplied like others; XLA:TPU does so along one dim of the first.
    """
    make, shape, flops = CASES[name]
    batch = {"x": jax.ShapeDtypeStruct((ROWS, *shape), "float32")}
    plan = spmd.plan(
        lambda: make(nnx.Rngs(0)),
        batch,
        loss=mean_square,
        optimizer=optax.sgd(0.1),
        target=target,
        layout="data_parallel",
    )
    wanted, why = flops(ROWS // 2)
    padded = name == "convolutions" and "cpu" not in target
    assert wanted <= plan.timeline.flops <= wanted * (1.1 if padded else 1.0), why


@TPU
@pytest.mark.parametrize("target", ["8xtpu_v4", "8xtpu_v5p", "8xtpu_v5e", "8xtpu_v6e"])
def test_a_pipelines_ticks_are_counted_in_the_program_of_tpus(target):
    """XLA:TPU does not say how often a loop runs; its counter does. 11 ticks for 8 microbatches on
    4 stages, there and back.
    """

    def make():
        return gpt_pipeline.GPT(vocab=256, width=64, depth=4, heads=4, length=32, rngs=nnx.Rngs(0))

    tokens = jax.ShapeDtypeStruct((32, 32), "int32")
    layout = spmd.Layout.load("pipeline")
    layout = dataclasses.replace(
        layout, pipeline=dataclasses.replace(layout.pipeline, microbatches=8)
    )
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.sgd(0.1),
        "target": target,
        "layout": layout,
    }
    plan = spmd.plan(make, {"tokens": tokens, "targets": tokens}, **options)
    assert (
        plan.compiled.exact
        and plan.compiled.compiler.startswith("XLA:TPU")
        and not any("trip count" in note for note in plan.notes)
    )
    permutes = [
        transfer for transfer in plan.traffic.transfers if transfer.kind == "collective_permute"
    ]
    assert {(transfer.axes, transfer.group, transfer.times) for transfer in permutes} == {
        (("stage",), 4, 11)
    } and len(permutes) == 2
    assert plan.memory.parameters + plan.memory.optimizer < plan.memory.peak <= plan.memory.capacity


@TPU
def test_slices_of_tpus():
    """Their shapes are those that there are; more than one is an estimate, and says so."""
    assert [
        topology(Cluster.parse(f"{count}xtpu_v5e"))["topology_name"] for count in (1, 2, 4, 8, 64)
    ] == [f"v5e:{shape}" for shape in ("1x1", "1x2", "2x2", "2x4", "8x8")]
    assert [
        topology(Cluster.parse(f"{count}xtpu_v5p"))["topology_name"] for count in (4, 8, 32)
    ] == ["v5p:2x2x1", "v5p:2x2x2", "v5p:4x4x2"]
    with pytest.raises(SpmdError, match=r'fix: "4xtpu_v5e" or "8xtpu_v5e"'):
        topology(Cluster.parse("6xtpu_v5e"))
    assert compiler_of(Cluster.parse("2x4xtpu_v4").target, 2)[1].startswith(
        "an ESTIMATE by XLA:CPU: XLA:TPU does not express communication between slices"
    )


@GPU
def test_bfloat16_gradients_are_two_bytes_on_the_wire_of_gpus():
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adamw(1e-3),
        "target": "8xh100",
    }
    half, full = (
        spmd.plan(MODELS["gpt"], batches("gpt")[0], layout=name, **options)
        for name in ("data_parallel_bf16", "data_parallel")
    )
    assert half.traffic.dtypes("gradients") == {"uint16"} and full.traffic.dtypes("gradients") == {
        "float32"
    }
    # XLA sends the sum and the count of the loss, 8 bytes in a ring of 8, along with exact
    # gradients
    sums = 2 * 7 * 8 // 8
    assert 2 * half.traffic.bytes("gradients") == full.traffic.bytes("gradients") - sums
    assert half.traffic.bytes("gradients") == half.program.wire.bytes(where="reduce_gradients")


@GPU
def test_plan_notes_low_precision_reduction_by_xla():
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), gradients=spmd.Gradients("compiler")
    )
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adamw(1e-3),
        "target": "8xh100",
        "precision": "bfloat16",
    }
    plan = spmd.plan(MODELS["gpt"], batches("gpt")[0], layout=layout, **options)
    assert any(note.startswith("note: XLA reduces gradients in bfloat16") for note in plan.notes)


@GPU
def test_collectives_of_gpus_are_asynchronous_with_something_between():
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adamw(1e-3),
        "target": "8xh100",
        "layout": "fsdp_bf16",
    }
    plan = spmd.plan(MODELS["gpt"], batches("gpt")[0], **options)
    assert any(count for _, count in asynchronous(parse(plan.compiled.hlo)))
    assert plan.timeline.hidden > 0 and plan.memory.capacity == 84_942_979_072


@pytest.mark.parametrize("target", ["1xcpu", pytest.param("1xh100", marks=GPU)])
def test_products_at_the_highest_precision_are_not_for_matrix_units(target):
    def make():
        return nnx.Linear(256, 256, rngs=nnx.Rngs(0), precision="highest")

    batch = {"x": jax.ShapeDtypeStruct((ROWS, 256), "float32")}
    plan = spmd.plan(
        make,
        batch,
        loss=mean_square,
        optimizer=optax.sgd(0.1),
        target=target,
        layout="data_parallel",
    )
    assert plan.timeline.peak == plan.cluster.target.flops["vector"]
