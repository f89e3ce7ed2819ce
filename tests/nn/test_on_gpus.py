"""A wavefront compiled for H100s by XLA:GPU, without one: results are sent while the next tick is computed."""

import importlib.util
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import spmd

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="package jax_cuda13_plugin is missing, XLA's compiler for GPUs (no GPU is needed): pip install '.[gpu-compiler]'",
)


class Deep(nnx.Module):
    """Eight LSTM layers."""

    def __init__(self):
        self.stack = spmd.nn.RNNStack([nnx.OptimizedLSTMCell(512, 512, rngs=nnx.Rngs(number)) for number in range(8)])

    def __call__(self, x):
        return self.stack(x)


def scheduled(overlap):
    """The scheduled program of a training step on 8 stages, line by line."""
    from jax.experimental import topologies

    from benchmarks.fsdp_wire import H100

    chips = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x8").devices
    trainer = spmd.Trainer(
        lambda: Deep(),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(axis=(1, 2)),
        optimizer=optax.sgd(0.1),
        mesh=Mesh(np.array(chips).reshape(1, 8), ("data", "stage"), axis_types=(AxisType.Auto,) * 2),
        layout=spmd.Layout(pipeline=spmd.Pipeline("stage", time_chunk=4, overlap=overlap)),
    )
    rows = 32
    program, _ = trainer.prepare({"x": np.zeros((rows, 64, 512), np.float32)})

    replicated = NamedSharding(trainer.mesh, PartitionSpec())

    def at(shape):
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=replicated)

    step = program._function(("step", rows, True))
    traced = step.trace(trainer.abstract_state, {"x": at((rows, 64, 512))}, at((rows,)), {})
    return traced.lower().compile().as_text().splitlines()


def hidden(lines):
    """For every permute, how many loops over a chunk's steps are scheduled between its start and its end."""
    loops_inside, open_ = [], {}
    for line in lines:
        if start := re.match(r"\s*(%?[\w.-]+) = .* collective-permute-start\(", line):
            open_[start.group(1)] = 0
        elif done := re.search(r" collective-permute-done\((%?[\w.-]+)\)", line):
            loops_inside.append(open_.pop(done.group(1)))
        elif " while(" in line:
            open_ = {name: count + 1 for name, count in open_.items()}
    return loops_inside


def test_permutes_overlap_compute():
    """Forward and backward, a chunk's loop is between start and end. Without `overlap` only the stores of results are there."""
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
                last = next(number for number, later in enumerate(lines) if f"-done({started[1]})" in later)
                hidden[started[2]].append(sum("gemm_fusion" in inner or "custom-call(" in inner for inner in lines[first:last]))
    # of each loop's large gathers and reductions, at least one is under way during several products
    assert max(hidden["all-gather"]) >= 3 and max(hidden["reduce-scatter"]) >= 3
    assert "[4,32,2048,2048]" not in program and not re.search(r"\[(8192|4,2048),50304\]", program)  # scores, logits of all tokens
