"""Programs compiled by XLA:GPU, without a GPU: what is sent while something is computed, and
kernels of attention.
"""

import importlib.util
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import spmd
from spmd.train.compiled_functions import FunctionKey

pytestmark = [
    pytest.mark.system,
    pytest.mark.usefixtures("without_compilation_cache"),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="package jax_cuda13_plugin is missing, XLA's compiler for GPUs (no GPU is needed): "
        "pip "
        "install '.[gpu-compiler]'",
    ),
]


class Deep(nnx.Module):
    """Eight LSTM layers."""

    def __init__(self):
        self.stack = spmd.nn.RNNStack(
            [nnx.OptimizedLSTMCell(512, 512, rngs=nnx.Rngs(number)) for number in range(8)]
        )

    def __call__(self, x):
        return self.stack(x)


def scheduled(overlap):
    """The scheduled program of a training step on 8 stages, line by line."""
    from jax.experimental import topologies

    from benchmarks.fsdp_wire import H100

    chips = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x8"
    ).devices
    trainer = spmd.Trainer(
        lambda: Deep(),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(axis=(1, 2)),
        optimizer=optax.sgd(0.1),
        mesh=Mesh(
            np.array(chips).reshape(1, 8), ("data", "stage"), axis_types=(AxisType.Auto,) * 2
        ),
        layout=spmd.Layout(pipeline=spmd.Pipeline("stage", time_chunk=4, overlap=overlap)),
    )
    rows = 32
    program, _ = trainer.prepare({"x": np.zeros((rows, 64, 512), np.float32)})

    replicated = NamedSharding(trainer.mesh, PartitionSpec())

    def at(shape):
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=replicated)

    step = program.functions.jitted(FunctionKey("step", rows, True))
    traced = step.trace(trainer.abstract_state, {"x": at((rows, 64, 512))}, at((rows,)), {})
    return traced.lower().compile().as_text().splitlines()


def hidden(lines):
    """For every permute, how many loops over a chunk's steps are scheduled between its start and
    its end.
    """
    loops_inside, open_ = [], {}
    for line in lines:
        if start := re.match(r"\s*(%?[\w.-]+) = .* collective-permute-start\(", line):
            open_[start.group(1)] = 0
        elif done := re.search(r" collective-permute-done\((%?[\w.-]+)\)", line):
            loops_inside.append(open_.pop(done.group(1)))
        elif " while(" in line:
            open_ = {name: count + 1 for name, count in open_.items()}
    return loops_inside


@pytest.mark.xfail(
    jax.__version_info__ >= (0, 11),
    reason="jaxlib 0.11's XLA:GPU sends after the loop, with latency hiding too",
    strict=True,
)
def test_permutes_overlap_compute():
    """Forward and backward, a chunk's loop is between start and end. Without `overlap` only the
    stores of results are there.
    """
    assert hidden(scheduled(overlap=True)) == [1, 1]
    assert hidden(scheduled(overlap=False)) == [0, 0]


def test_layers_compute_while_others_are_gathered_and_reduced():
    from benchmarks.gpu_steps import Case, plan

    program = plan(Case("7B", 4, "8x8xh100", depth=4)).compiled.hlo
    hidden: dict[str, list[int]] = {"all-gather": [], "reduce-scatter": []}
    for body in re.split(r"\n}\n", program):
        lines = body.splitlines()
        for first, line in enumerate(lines):
            started = re.search(r"(%(all-gather|reduce-scatter)-start\S*) = .*/while/body", line)
            if started:
                last = next(
                    number for number, later in enumerate(lines) if f"-done({started[1]})" in later
                )
                hidden[started[2]].append(
                    sum(
                        "gemm_fusion" in inner or "custom-call(" in inner
                        for inner in lines[first:last]
                    )
                )
    # of each loop's large gathers and reductions, at least one is under way during several products
    assert max(hidden["all-gather"]) >= 3 and max(hidden["reduce-scatter"]) >= 3
    # scores, logits of all tokens
    assert "[4,32,2048,2048]" not in program and not re.search(r"\[(8192|4,2048),50304\]", program)


LENGTH = 1280
SIZES = [
    ("1xh100", "bfloat16", 128, LENGTH),
    ("1xrtx4090", "bfloat16", 128, 1000),
    ("1xrtx4090", "float32", 256, LENGTH),
    ("1xb200", "float16", 72, 999),
]


@pytest.mark.system
@pytest.mark.parametrize("options", ["causal", "all"])
@pytest.mark.parametrize(("target", "dtype", "size", "length"), SIZES)
def test_flash_kernels_fit_a_gpu(target, dtype, size, length, options):
    """In shared memory, forward and backward; and temporaries are a few numbers for each query."""
    from jax.experimental import topologies

    from spmd.nn.flash_kernel import FLASH
    from spmd.nn.scoring import Inputs, ScoreArrays, Scoring, tiled_attention
    from spmd.planner.cluster import Cluster
    from spmd.planner.compile import topology
    from spmd.planner.gpu_kernels import gpu_of

    devices = topologies.get_topology_desc(**topology(Cluster.parse(target))).devices
    replicated = NamedSharding(Mesh(np.array(devices), ("gpu",)), PartitionSpec())

    def array(*shape, of=dtype):
        return jax.ShapeDtypeStruct(shape, of, sharding=replicated)

    query, key = array(2, length, 8, size), array(2, length, 2, size)
    scoring, arrays, bias = Scoring(0.1, causal=True), ScoreArrays(), None
    if options == "all":
        scoring = Scoring(
            0.1, True, (200, None), 3.0, 0.1, (8 * length * length, length * length, length)
        )
        ids = array(2, length, of="int32")
        arrays = ScoreArrays(
            array(2, 1, length, length, of="bool"),
            None,
            array(2, length, of="bool"),
            array(2, of="int32"),
            (ids, ids),
        )
        arrays, bias = arrays._replace(count=array(4, of="uint32")), array(1, 8, length, length)

    def forward_and_backward(query, key, value, bias, arrays, grad):
        out, back = jax.vjp(
            lambda *x: tiled_attention(FLASH, scoring, Inputs(*x[:3], arrays._replace(bias=x[3]))),
            query,
            key,
            value,
            bias,
        )
        return out, back(grad)

    with gpu_of(Cluster.parse(target).target):
        compiled = (
            jax.jit(forward_and_backward).lower(query, key, key, bias, arrays, query).compile()
        )
    calls = len(re.findall(r"custom_call_target=.__gpu.xla.gpu.triton", compiled.as_text()))
    assert calls == 3 + (options == "all"), "the bias has a kernel of its own"
    assert (
        compiled.memory_analysis().temp_size_in_bytes
        < 4 * 2 * 8 * length * np.dtype("float32").itemsize
    )
