"""What one GPU computes, against float64, plain JAX on the CPU, and itself after a restart.

`SPMD_TEST_GPU=gpu python -m pytest tests/gpu -m gpu` on a machine with a GPU;
`SPMD_TEST_GPU=rehearse` runs the same on a CPU, where the kernels for GPUs are left out.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from benchmarks.gpu import cases, codecs
from benchmarks.gpu.measure import distance, on_cpu
from examples.gpt_pipeline import GPT
from spmd.wire.codec.base import RowCodec

pytestmark = pytest.mark.gpu
ON_GPU = os.environ.get("SPMD_TEST_GPU") == "gpu"
RANDOM = np.random.default_rng(0)


def test_the_device_is_what_was_asked_for():
    assert (jax.default_backend() == "gpu") is ON_GPU


def reference(query, key, value, cotangent, seen, bias):
    """Output and gradients of attention in float64: the formulas of a softmax, in numpy."""
    query, key, value, cotangent = (
        np.asarray(x, np.float64) for x in (query, key, value, cotangent)
    )
    repeats, scale = query.shape[2] // key.shape[2], query.shape[3] ** -0.5
    keys, values = (np.repeat(x, repeats, axis=2) for x in (key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, keys) * scale + bias
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bkhd->bqhd", weights, values)
    of_weights = np.einsum("bqhd,bkhd->bhqk", cotangent, values)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True))
    of_query = np.einsum("bhqk,bkhd->bqhd", of_scores, keys) * scale
    of_key = np.einsum("bhqk,bqhd->bkhd", of_scores, query) * scale
    of_value = np.einsum("bhqk,bqhd->bkhd", weights, cotangent)
    of_key, of_value = (
        x.reshape(*key.shape[:2], key.shape[2], repeats, key.shape[3]).sum(3)
        for x in (of_key, of_value)
    )
    return out, of_query, of_key, of_value


LENGTH = 256
ATTENTIONS = {  # options; groups of keys; the size of a head; what takes it
    "causal": ({"causal": True}, 4, 64, ("cudnn", "triton", "chunked", "xla")),
    "grouped, heads of 128": ({"causal": True}, 2, 128, ("cudnn", "triton", "chunked", "xla")),
    "all keys": ({}, 4, 64, ("cudnn", "triton", "chunked", "xla")),
    "a window": ({"causal": True, "window": (40, 0)}, 4, 64, ("cudnn", "triton", "chunked")),
    "packed": ({"causal": True, "segments": True}, 4, 64, ("triton", "chunked")),
    "padding": ({"padding": True}, 4, 64, ("triton", "chunked", "xla")),
    "a bias": ({"bias": True}, 4, 64, ("cudnn", "triton", "chunked")),
}
CALLS = [
    pytest.param(case, name, dtype, id=f"{case}-{name}-{dtype}")
    for case, (*_, names) in ATTENTIONS.items()
    for name in names
    for dtype in ("bfloat16", "float32")
    if not (name == "cudnn" and dtype == "float32") and (ON_GPU or name not in ("cudnn", "triton"))
]


@pytest.mark.parametrize(("case", "implementation", "dtype"), CALLS)
def test_attention_equals_float64_forward_and_backward(case, implementation, dtype):
    options, groups, size, _ = ATTENTIONS[case]
    options = dict(options)
    query, cotangent = (RANDOM.normal(size=(2, LENGTH, 4, size)) for _ in range(2))
    key, value = (RANDOM.normal(size=(2, LENGTH, groups, size)) for _ in range(2))
    inputs = [jnp.asarray(x, dtype) for x in (query, key, value, cotangent)]
    at = np.arange(LENGTH)
    seen = np.ones((1, 1, LENGTH, LENGTH), bool)
    bias = np.zeros((1, 4, LENGTH, LENGTH))
    if options.get("causal"):
        seen = seen & (at[:, None] >= at)
    if "window" in options:
        seen = seen & (at[:, None] - at <= options["window"][0])
    if options.pop("segments", False):
        ids = np.sort(RANDOM.integers(0, 4, (2, LENGTH)), axis=1).astype(np.int32)
        options["segment_ids"], seen = (
            jnp.asarray(ids),
            seen & (ids[:, None, :, None] == ids[:, None, None, :]),
        )
    if options.pop("padding", False):
        mask = at < np.array([[LENGTH], [LENGTH // 3]])
        options["key_mask"], seen = jnp.asarray(mask), seen & mask[:, None, None, :]
    if options.pop("bias", False):
        options["bias"] = jnp.asarray(RANDOM.normal(size=bias.shape), dtype)
        bias = np.asarray(options["bias"], np.float64)

    def both_passes(query, key, value, cotangent):
        out, back = jax.vjp(
            lambda *x: spmd.nn.attention(*x, implementation=implementation, **options),
            query,
            key,
            value,
        )
        return out, *back(cotangent)

    results = jax.jit(both_passes)(*inputs)
    bound = 1e-2 if dtype == "bfloat16" else 2e-3  # products of float32 may be in TF32 on a GPU
    for ours, right in zip(results, reference(*inputs, seen, bias), strict=True):
        assert distance(ours, right) < bound


class Convolutional(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


GPT_SIZES = {"vocab": 64, "width": 64, "depth": 2, "heads": 4, "length": 64}
FAMILIES = {
    "mlp": cases.Step(
        lambda: cases.MLP(32, 64, 64, 8, rngs=nnx.Rngs(0)),
        cases.squares,
        {"x": cases.Array((8, 32))},
    ),
    "convolutions": cases.Step(
        lambda: Convolutional(nnx.Rngs(0)),
        cases.image_loss,
        {"image": cases.Array((8, 16, 16, 3)), "label": cases.Array((8,), 10)},
    ),
    "gpt": cases.Step(
        lambda: GPT(**GPT_SIZES, tied=True, rngs=nnx.Rngs(0)),
        cases.next_token_loss,
        cases.tokens(8, 64, 64),
    ),
    "lstm": cases.Step(
        lambda: cases.Recurrent("LSTM", 32, 2), cases.squares, {"x": cases.Array((8, 16, 32))}
    ),
}
LAYOUTS = {  # what one device can have, with its mesh
    "data_parallel": "data=1",
    "data_parallel_bf16": "data=1",
    "zero1": "data=1",
    "fsdp": "data=1",
    "fsdp_bf16": "data=1",
    "tensor_parallel": "data=1,model=1",
    "fsdp_tensor_parallel": "data=1,model=1",
    "parameter_server": "data=1",
    "power_sgd": "data=1",
}
LOSSY = ("data_parallel_bf16", "fsdp_bf16", "power_sgd")
STEPS = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if family == "mlp" or layout in ("data_parallel", "fsdp")
]


@pytest.mark.parametrize(("family", "layout"), STEPS)
def test_a_step_equals_plain_jax_on_the_cpu(family, layout):
    step = dataclasses.replace(
        FAMILIES[family],
        layout=spmd.Layout.load(layout),
        precision="float32",
        optimizer=optax.sgd(0.1),
    )
    options = {**step.options, "mesh": spmd.make_mesh(LAYOUTS[layout], devices=jax.devices()[:1])}
    trainer = spmd.Trainer(step.model, **options)
    batch = step.data()
    before = trainer.init(batch)
    start = jax.tree.map(
        np.asarray, nnx.to_pure_dict(nnx.state(trainer.rebuild(before), nnx.Param))
    )
    state, metrics = trainer.step(before, batch)
    ours = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(trainer.rebuild(state), nnx.Param)))
    hand = cases.ByHand(step)
    params, others, optimizer_state = hand.init()
    assert distance(nnx.to_pure_dict(params), start) < 1e-6, "the same model"
    after, _, _, loss = on_cpu(hand.update, params, others, optimizer_state, batch)
    assert abs(metrics["loss"] - float(loss)) < 5e-3 * abs(float(loss)) + 1e-6
    moved, right = (
        jax.tree.map(lambda a, b: np.asarray(a) - b, tree, start)
        for tree in (ours, nnx.to_pure_dict(after))
    )
    assert distance(moved, right) < (0.05 if layout in LOSSY else 5e-3), (
        "TF32 in the products, at most"
    )


@pytest.mark.parametrize(
    "name", [name for name, codec in codecs.CODECS.items() if isinstance(codec, RowCodec)]
)
def test_codecs_have_the_codes_of_the_cpu(name):
    codec = codecs.CODECS[name]
    rows = jnp.asarray(
        RANDOM.normal(size=(8, 5000)) * 10.0 ** RANDOM.integers(-6, 6, (8, 1)), jnp.float32
    )
    payload, right = jax.jit(codec.encode)(rows), on_cpu(codec.encode, rows)
    for ours, expected in zip(jax.tree.leaves(payload), jax.tree.leaves(right), strict=True):
        ours, expected = np.asarray(ours), np.asarray(expected)
        if name in ("int8", "float8") and expected.dtype.itemsize == 1:
            # GPUs do not round divisions correctly: a quotient between two codes may get the other
            # one
            steps = np.abs(ours.astype(int) - expected.astype(int))
            assert steps.max() <= 1 and steps.mean() <= 1e-3
        elif name in ("int8", "float8", "sign") and expected.dtype == np.float32:
            # scales: quotients, and means in the compiler's order
            np.testing.assert_allclose(ours, expected, rtol=1e-5 if name == "sign" else 1e-6)
        else:
            assert ours.tobytes() == expected.tobytes()
    sent = jax.tree.map(np.asarray, payload)
    decoded = jax.jit(lambda payload: codec.decode(payload, 5000))(sent)
    with jax.default_device(jax.devices("cpu")[0]):
        assert np.asarray(decoded).tobytes() == np.asarray(codec.decode(sent, 5000)).tobytes()


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path):
    step = FAMILIES["gpt"]
    options = {**step.options, "mesh": spmd.make_mesh("data=1", devices=jax.devices()[:1])}

    def fit(folder, steps, **more):
        chosen = {
            "batch_size": step.rows,
            "steps": steps,
            "progress": False,
            "checkpoint": spmd.Checkpoint(folder, every=2),
        }
        return spmd.fit(step.model, step.data(8), **chosen, **more, **options)

    undisturbed, again = (fit(tmp_path / name, 6) for name in ("one", "another"))
    fit(tmp_path / "two", 4)
    resumed = fit(tmp_path / "two", 6, resume=True)

    # Sums on a GPU may have no fixed order: then two undisturbed runs differ, and a resumed one by
    # as little. Else all have the same bits.
    noise = distance(again.state.params, undisturbed.state.params)
    assert distance(resumed.state.params, undisturbed.state.params) <= 10 * noise


def test_a_profile_has_the_kernels_of_the_step(tmp_path):
    step = FAMILIES["gpt"]
    options = {**step.options, "mesh": spmd.make_mesh("data=1", devices=jax.devices()[:1])}
    result = spmd.fit(
        step.model,
        step.data(8),
        batch_size=step.rows,
        steps=8,
        progress=False,
        checkpoint=tmp_path,
        profile="4:7",
        **options,
    )
    text = str(result.profile)
    assert "blocks" in text, "time by layer"
    assert result.profile is not None
