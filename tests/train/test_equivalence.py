"""Every shipped layout that says where parameters live, on several meshes, in both steps, trains
like a plain loop on one device.

Five steps on the same batches must give the same losses, and the same parameters, to 1e-5 of the
largest number in each (`plain.py`).
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import spmd
from spmd.train.compiled_functions import FunctionKey
from tests.train.plain import MODELS, OPTIMIZER, batches, equal

LAYOUTS = ["data_parallel", "fsdp", "zero1", "tensor_parallel", "fsdp_tensor_parallel"]
MESHES = {
    **{"8": "data=8", "4r": "replica=2,data=4"},
    **{
        "8x1": "data=8,model=1",
        "4x2": "data=4,model=2",
        "2x4": "data=2,model=4",
        "2x2x2": "replica=2,data=2,model=2",
    },
}


def layout_for(name, mesh, step):
    """The shipped layout with the reduction of the arm; with replicas, the batch goes over both
    data axes.
    """
    layout = spmd.Layout.load(name)
    if step == "auto":
        layout = dataclasses.replace(layout, gradients=spmd.Gradients("compiler"))
    if "replica" in mesh:
        layout = dataclasses.replace(
            layout, batch=dataclasses.replace(layout.batch, spec=(("replica", "data"),))
        )
    return layout


QUICK = ("gpt-tensor_parallel-4x2-auto",)
SYSTEM = (  # each layout, each mesh, each model, and both ways to reduce gradients
    "cnn-data_parallel-8-manual",
    "cnn-fsdp_tensor_parallel-4x2-manual",
    "lstm-fsdp-8-manual",
    "lstm-data_parallel-4r-manual",
    "gpt-fsdp-8-manual",
    "gpt-zero1-8-manual",
    "gpt-tensor_parallel-2x4-manual",
    "gpt-fsdp_tensor_parallel-4x2-auto",
    "gpt-fsdp_tensor_parallel-2x2x2-manual",
)


def cases():
    for model, layout, mesh, step in itertools.product(
        ("cnn", "lstm", "gpt"), LAYOUTS, MESHES, ("auto", "manual")
    ):
        if ("tensor" in layout) != ("model" in MESHES[mesh]):
            continue  # a mesh axis has a use
        name = f"{model}-{layout}-{mesh}-{step}"
        marks = [pytest.mark.optimized] * (model == "cnn")  # ties in its pools and gates
        if name not in QUICK:
            marks.append(pytest.mark.system if name in SYSTEM else pytest.mark.slow)
        yield pytest.param(model, layout, mesh, step, id=name, marks=marks)


def test_chosen_cases_exist():
    assert {*QUICK, *SYSTEM} <= {case.id for case in cases()}


@pytest.mark.parametrize(("name", "layout", "mesh", "step"), list(cases()))
def test_equals_one_device(name, layout, mesh, step):
    chosen = layout_for(layout, MESHES[mesh], step)
    trainer = spmd.Trainer(
        MODELS[name],
        loss=spmd.losses.cross_entropy,
        optimizer=OPTIMIZER,
        mesh=MESHES[mesh],
        layout=chosen,
    )
    state, ours = trainer.init(), []
    for batch in batches(name):
        state, metrics = trainer.step(state, batch)
        ours.append(metrics["loss"])
    equal(state, ours, name)
    arms_differ(trainer, state, layout, MESHES[mesh], step)


def arms_differ(trainer, state, layout, mesh, step):
    """The arrays lie where the layout says, and the two steps are two programs."""
    model_axis = spmd.MeshSpec.parse(mesh).sizes.get("model", 1)
    sharded = [
        leaf for leaf in jax.tree.leaves(state.params) if not leaf.sharding.is_fully_replicated
    ]
    assert bool(sharded) == (
        layout in ("fsdp", "fsdp_tensor_parallel")
        or (layout == "tensor_parallel" and model_axis > 1)
    )
    moments = [
        leaf
        for leaf in jax.tree.leaves(state.opt)
        if leaf.ndim and not leaf.sharding.is_fully_replicated
    ]
    assert bool(moments) == (
        layout != "data_parallel" and (layout != "tensor_parallel" or model_axis > 1)
    )
    program = trainer.prepare(None)[0]
    batch = trainer.place(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), program.sample))
    jaxpr = str(
        program.functions.jitted(FunctionKey("step", batch.weights.shape[0], True))
        .trace(state, batch.leaves, batch.weights, {})
        .jaxpr
    )
    assert ("shard_map" in jaxpr) == (step == "manual")
    if step == "manual":
        scattered = "reduce_scatter" in jaxpr
        assert scattered == (layout in ("fsdp", "zero1", "fsdp_tensor_parallel")), (
            "the reduction that the layout names"
        )
