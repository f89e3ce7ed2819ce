"""Every shipped layout, on several meshes, in both steps, trains like a plain loop on one device.

The reference is written out below: `nnx`, `jax.value_and_grad` and `optax`, nothing of ours. Five steps on the same batches
must give the same losses, and the same parameters, to 1e-5 of the largest number in each. The optimizer clips by global
norm and carries momentum: the norm is right only if it is taken over whole arrays, and the moments are cut by the layout.
It is not Adam, which divides each gradient by its own size and so makes rounding noise as large as any gradient.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import char_lstm
import digits_cnn
import gpt

LAYOUTS = ["data_parallel", "fsdp", "zero1", "tensor_parallel", "fsdp_tensor_parallel"]
STEPS, ROWS, LENGTH = 5, 16, 16
MODELS = {
    "cnn": lambda: digits_cnn.CNN(channels=8, width=32, rngs=nnx.Rngs(0)),
    "lstm": lambda: char_lstm.CharLSTM(vocab=128, width=32, rngs=nnx.Rngs(0)),
    "gpt": lambda: gpt.GPT(vocab=128, width=32, depth=2, heads=4, length=LENGTH, dropout=0.0, rngs=nnx.Rngs(0)),
}
MESHES = {"8": "data=8,model=1", "4x2": "data=4,model=2", "2x4": "data=2,model=4", "2x2x2": "replica=2,data=2,model=2"}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


def batches(name):
    random = np.random.default_rng(0)
    if name == "cnn":
        digits = load_digits()
        rows = [random.permutation(len(digits.target))[:ROWS] for _ in range(STEPS)]
        return [{"image": (digits.images[r] / 16).astype("float32")[..., None], "label": digits.target[r].astype("int32")} for r in rows]
    tokens = [random.integers(0, 128, (ROWS, LENGTH + 1)).astype("int32") for _ in range(STEPS)]
    return [{"tokens": t[:, :-1], "targets": t[:, 1:]} for t in tokens]


@functools.cache
def reference(name):
    """Losses and parameters of the plain one-device loop."""
    with nnx.use_eager_sharding(False):
        model = MODELS[name]()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def loss(params, rest, batch):
        model = nnx.merge(graphdef, params, rest)
        inputs = batch["image"] if name == "cnn" else batch["tokens"]
        labels = batch["label"] if name == "cnn" else batch["targets"]
        value = optax.softmax_cross_entropy_with_integer_labels(model(inputs), labels).mean()
        return value, nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[2])

    @jax.jit
    def step(params, rest, opt, batch):
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return optax.apply_updates(params, updates), rest, opt, value

    opt, losses = OPTIMIZER.init(params), []
    for batch in batches(name):
        params, rest, opt, value = step(params, rest, opt, batch)
        losses.append(float(value))
    return losses, leaves(params), leaves(rest)


def leaves(tree):
    return {
        jax.tree_util.keystr(k, simple=True, separator="/"): np.asarray(v)
        for k, v in jax.tree_util.tree_leaves_with_path(tree)
        if not jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key)
    }


def layout_for(name, mesh, step):
    """The shipped layout with the reduction of the arm; on three axes, the batch goes over two of them."""
    layout = spmd.Layout.load(name)
    if step == "auto":
        layout = dataclasses.replace(layout, gradients=spmd.Gradients("compiler"))
    if "replica" in mesh:
        layout = dataclasses.replace(layout, batch=dataclasses.replace(layout.batch, spec=(("replica", "data"),)))
    return layout


def cases():
    for model in MODELS:
        for layout in LAYOUTS:
            for mesh in MESHES:
                if "tensor" not in layout and mesh in ("2x4",):
                    continue  # no parameter is cut over `model`: 4x2 shows all there is
                for step in ("auto", "manual"):
                    # the fast suite: by hand on 4x2, one model automatically too, and by hand on three axes; `make test-all`: every case
                    fast = [("4x2", "manual")] + [("4x2", "auto"), ("2x2x2", "manual")] * (model == "gpt")
                    slow = (mesh, step) not in fast
                    yield pytest.param(model, layout, mesh, step, id=f"{model}-{layout}-{mesh}-{step}", marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("name", "layout", "mesh", "step"), list(cases()))
def test_equals_one_device(name, layout, mesh, step):
    losses, params, stats = reference(name)
    chosen = layout_for(layout, MESHES[mesh], step)
    trainer = spmd.Trainer(MODELS[name], loss=spmd.losses.cross_entropy, optimizer=OPTIMIZER, mesh=MESHES[mesh], layout=chosen)
    state, ours = trainer.init(), []
    for batch in batches(name):
        state, metrics = trainer.step(state, batch)
        ours.append(metrics["loss"])
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    for path, value in leaves(state.params).items():
        np.testing.assert_allclose(value, params[path], rtol=0, atol=1e-5 * np.abs(params[path]).max(), err_msg=path)
    for path, value in leaves(state.stats).items():
        np.testing.assert_allclose(value, stats[path], rtol=1e-5, atol=1e-6, err_msg=path)
    arms_differ(trainer, state, layout, MESHES[mesh], step)


def arms_differ(trainer, state, layout, mesh, step):
    """The arrays lie where the layout says, and the two steps are two programs."""
    model_axis = spmd.MeshSpec.parse(mesh).sizes["model"]
    cut = [leaf for leaf in jax.tree.leaves(state.params) if not leaf.sharding.is_fully_replicated]
    assert bool(cut) == (layout in ("fsdp", "fsdp_tensor_parallel") or (layout == "tensor_parallel" and model_axis > 1))
    moments = [leaf for leaf in jax.tree.leaves(state.opt) if leaf.ndim and not leaf.sharding.is_fully_replicated]
    assert bool(moments) == (layout != "data_parallel" and (layout != "tensor_parallel" or model_axis > 1))
    program = trainer.prepare(None)[0]
    batch = trainer.place(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), program.sample))
    jaxpr = str(jax.make_jaxpr(program.step)(state, batch.leaves, batch.weights, {}))
    assert ("shard_map" in jaxpr) == (step == "manual")
    if step == "manual":
        scattered = "reduce_scatter" in jaxpr
        assert scattered == (layout in ("fsdp", "zero1", "fsdp_tensor_parallel")), "the reduction that the layout names"
