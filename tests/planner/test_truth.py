"""What a plan says of memory and traffic is what XLA says of the program that a trainer then runs,
under every shipped layout.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from examples import gpt_pipeline
from spmd.layout.layout_files import shipped
from spmd.planner.cluster import Cluster
from spmd.planner.hlo import parse
from spmd.planner.planning import plan
from spmd.planner.traffic import traffic_of
from spmd.train.compiled_functions import FunctionKey
from tests.train.plain import MODELS, batches

pytestmark = [pytest.mark.optimized, pytest.mark.system]

ADAM = optax.adamw(1e-3)


class Experts(nnx.Module):
    """Attention and a mixture of experts between an embedding and logits."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.experts = spmd.nn.MixtureOfExperts(8, 16, 4, k=2, capacity_factor=2.0, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        heads = x[:, :, None]
        x = x + spmd.nn.attention(heads, heads, heads, causal=True)[:, :, 0]
        return self.embed.attend(self.experts(x)[0])


def deep():
    return gpt_pipeline.GPT(vocab=128, width=32, depth=4, heads=4, length=16, rngs=nnx.Rngs(0))


def small():
    return {"tokens": np.zeros((16, 16), np.int32), "targets": np.zeros((16, 16), np.int32)}


def case(layout):
    """A model for it, and a batch."""
    if layout in ("pipeline", "pipeline_1f1b", "fsdp_pipeline_tensor"):
        return deep, small()
    if layout == "expert_parallel":
        return lambda: Experts(nnx.Rngs(0)), small()
    name = {"conv_data_dense_model": "cnn", "spatial": "tiles"}.get(layout, "gpt")
    return MODELS[name], batches(name)[0]


FAST = ("fsdp_tensor_parallel",)


@functools.cache
def both(layout):
    """The plan, and the step that a trainer compiles for the same."""
    model, batch = case(layout)
    options = {"loss": spmd.losses.cross_entropy, "optimizer": ADAM, "layout": layout}
    planned = plan(
        model,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch),
        target="8xcpu",
        **options,
    )
    trainer = spmd.Trainer(model, **options)
    program, placer = trainer.prepare(batch)
    state, placed = trainer.init(), trainer.place(batch)
    events = placer.replicate_all(program.events(0, placed.rows, placed.has_rows))
    step = (
        program.functions.jitted(FunctionKey("step", placed.rows, True))
        .lower(state, placed.leaves, placed.weights, events)
        .compile()
    )
    return planned, state, step


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in shipped()],
)
def test_memory_and_traffic_are_those_of_the_program_that_runs(layout):
    planned, state, step = both(layout)
    analysis, memory = step.memory_analysis(), planned.memory
    for size, tree in (
        (memory.parameters, state.params),
        (memory.optimizer, state.opt),
        (memory.exchange, state.exchange),
    ):
        assert size == sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert memory.temporaries == analysis.temp_size_in_bytes
    assert planned.compiled.sizes["argument"] == analysis.argument_size_in_bytes
    assert memory.fresh == analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert (
        memory.peak
        == analysis.argument_size_in_bytes
        + memory.unread
        + analysis.temp_size_in_bytes
        + memory.fresh
        + memory.constants
    )
    module = parse(step.as_text())
    real = traffic_of(
        module, planned.mesh, Cluster.parse("8xcpu"), planned.program.placed.resolved.data_axes
    )
    named = [
        [dataclasses.replace(transfer, name="", where="") for transfer in traffic.transfers]
        for traffic in (planned.traffic, real)
    ]
    assert sorted(named[0], key=str) == sorted(named[1], key=str)
    assert planned.traffic.transfers, "something is sent"


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in shipped()],
)
def test_no_collective_of_the_program_is_overlooked(layout):
    """Counted separately, from the text alone."""
    planned, _, _ = both(layout)
    words = re.findall(
        r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
        planned.compiled.hlo,
    )
    bodies = parse(planned.compiled.hlo)
    alone = sum(
        1
        for lines in bodies.computations.values()
        for instr in lines
        if instr.op
        in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    )
    assert alone == len(words) >= len(planned.traffic.transfers) > 0


@pytest.mark.slow
def test_gradients_and_weights_are_the_wires_own():
    """Of what the step itself exchanges, the compiled program sends what the log of its trace
    says.
    """
    planned, _, _ = both("data_parallel_bf16")
    assert planned.traffic.bytes("gradients") == planned.program.wire.bytes(
        where="reduce_gradients"
    )
    assert planned.traffic.dtypes("gradients") == {"uint16"}


@pytest.mark.slow
def test_another_mesh_is_another_program():
    """Arguments fall as devices share them."""
    model, batch = case("fsdp")
    options = {"loss": spmd.losses.cross_entropy, "optimizer": ADAM, "layout": "fsdp"}
    four, eight = (plan(model, batch, target=target, **options) for target in ("4xcpu", "8xcpu"))
    assert four.memory.parameters == 2 * eight.memory.parameters
    assert four.traffic.bytes("gradients") < eight.traffic.bytes("gradients")
