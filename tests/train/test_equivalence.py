"""Every shipped layout that says where parameters live, on several meshes, in both steps, trains like a plain loop on one device.

Five steps on the same batches must give the same losses, and the same parameters, to 1e-5 of the largest number in each (`plain.py`).
"""

import dataclasses

import jax
import numpy as np
import pytest

import spmd
from tests.train.plain import MODELS, OPTIMIZER, batches, equal

LAYOUTS = ["data_parallel", "fsdp", "zero1", "tensor_parallel", "fsdp_tensor_parallel"]
MESHES = {"8": "data=8,model=1", "4x2": "data=4,model=2", "2x4": "data=2,model=4", "2x2x2": "replica=2,data=2,model=2"}


def layout_for(name, mesh, step):
    """The shipped layout with the reduction of the arm; on three axes, the batch goes over two of them."""
    layout = spmd.Layout.load(name)
    if step == "auto":
        layout = dataclasses.replace(layout, gradients=spmd.Gradients("compiler"))
    if "replica" in mesh:
        layout = dataclasses.replace(layout, batch=dataclasses.replace(layout.batch, spec=(("replica", "data"),)))
    return layout


def cases():
    for model in ("cnn", "lstm", "gpt"):
        for layout in LAYOUTS:
            for mesh in MESHES:
                if "tensor" not in layout and mesh in ("2x4",):
                    continue  # no parameter is sharded over `model`: 4x2 covers every case
                for step in ("auto", "manual"):
                    # with the system tests: one model by hand under every layout, another under the one that shards most; on three axes and
                    # by the compiler as well, and of these the quick suite has a sample; `make test-all`: every case
                    most, gpt = layout == "fsdp_tensor_parallel", model == "gpt"
                    by_hand = (mesh, step) == ("4x2", "manual") and layout != "zero1" and (gpt or (most and model == "cnn"))
                    slow = not (by_hand or (gpt and most and (mesh, step) in (("4x2", "auto"), ("2x2x2", "manual"))))
                    marks = [pytest.mark.slow] * slow
                    marks += [pytest.mark.optimized, pytest.mark.system] * (model == "cnn")  # ties in its pools and gates
                    yield pytest.param(model, layout, mesh, step, id=f"{model}-{layout}-{mesh}-{step}", marks=marks)


@pytest.mark.sampled(quick=7, system=2)
@pytest.mark.parametrize(("name", "layout", "mesh", "step"), list(cases()))
def test_equals_one_device(name, layout, mesh, step):
    chosen = layout_for(layout, MESHES[mesh], step)
    trainer = spmd.Trainer(MODELS[name], loss=spmd.losses.cross_entropy, optimizer=OPTIMIZER, mesh=MESHES[mesh], layout=chosen)
    state, ours = trainer.init(), []
    for batch in batches(name):
        state, metrics = trainer.step(state, batch)
        ours.append(metrics["loss"])
    equal(state, ours, name)
    arms_differ(trainer, state, layout, MESHES[mesh], step)


def arms_differ(trainer, state, layout, mesh, step):
    """The arrays lie where the layout says, and the two steps are two programs."""
    model_axis = spmd.MeshSpec.parse(mesh).sizes["model"]
    sharded = [leaf for leaf in jax.tree.leaves(state.params) if not leaf.sharding.is_fully_replicated]
    assert bool(sharded) == (layout in ("fsdp", "fsdp_tensor_parallel") or (layout == "tensor_parallel" and model_axis > 1))
    moments = [leaf for leaf in jax.tree.leaves(state.opt) if leaf.ndim and not leaf.sharding.is_fully_replicated]
    assert bool(moments) == (layout != "data_parallel" and (layout != "tensor_parallel" or model_axis > 1))
    program = trainer.prepare(None)[0]
    batch = trainer.place(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), program.sample))
    jaxpr = str(program._function(("step", batch.weights.shape[0], True)).trace(state, batch.leaves, batch.weights, {}).jaxpr)
    assert ("shard_map" in jaxpr) == (step == "manual")
    if step == "manual":
        scattered = "reduce_scatter" in jaxpr
        assert scattered == (layout in ("fsdp", "zero1", "fsdp_tensor_parallel")), "the reduction that the layout names"
