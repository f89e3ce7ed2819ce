"""Each family of open models against `transformers`: logits, loss, gradient norm and greedy
decoding, on one device and under layouts.

What `transformers` computes is in fixtures/*/expected.npz, with the script that made it.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.pretrained.folders import load, save
from spmd.pretrained.safetensors_files import open_files, write_file

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = ["llama", "llama2", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2"]
LAYOUTS = {  # and their meshes; after a colon, which of several meshes
    "fsdp": "data=8",
    "tensor_parallel": "data=2,model=4",
    "fsdp_tensor_parallel": "data=4,model=2",
    "pipeline": "data=4,stage=2",
    "pipeline_1f1b": "data=4,stage=2",
    "fsdp_pipeline_tensor": "data=2,stage=2,model=2",
    "transformer_parallel": "stage=2,replica=1,data=2,context=1,model=2",
    "transformer_parallel:sequences": "stage=1,replica=1,data=2,context=2,model=2",
    "tensor_parallel:more_devices_than_heads": "data=1,model=8",
}


@functools.cache
def expected(name):
    with np.load(FIXTURES / name / "expected.npz") as file:
        return dict(file)


def batch_of(name, copies=1):
    """The fixture's rows as `next_token` takes them: padding is another segment, and no target."""
    values = expected(name)
    tokens, segment_ids = (np.tile(values[key], (copies, 1)) for key in ("tokens", "segment_ids"))
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    mask = np.pad(segment_ids[:, 1:] == 1, ((0, 0), (0, 1))).astype("float32")
    return {"tokens": tokens, "targets": targets, "mask": mask, "segment_ids": segment_ids}


def same_logits(name, logits):
    values = expected(name)
    counted = values["segment_ids"] == 1
    assert np.abs(np.asarray(logits) - values["logits"])[counted].max() < 1e-4
    assert values["logits"][counted].std(axis=0).mean() > 0.1, "they differ from token to token"


@functools.cache
def loaded(name):
    return load(FIXTURES / name)


@jax.jit
def all_at_once(model, tokens, segment_ids=None):
    return model(tokens, segment_ids=segment_ids)


@jax.jit
def with_cache(model, tokens, positions, cache):
    return model(tokens, positions=positions, cache=cache)


@jax.jit
def loss_and_norm(model, batch):
    def mean(model):
        total, count = spmd.losses.next_token(model, batch)
        return total / count

    loss, grads = nnx.value_and_grad(mean)(model)
    return loss, optax.tree.norm(nnx.to_pure_dict(grads))


def decode(model, prompt, lengths, new):
    """Greedy decoding, token by token, of prompts that are padded at the end."""
    rows, width = prompt.shape
    cache = model.init_cache(rows, width + new)
    logits, cache = with_cache(
        model, prompt, jnp.broadcast_to(jnp.arange(width), prompt.shape), cache
    )
    tokens = jnp.argmax(logits[jnp.arange(rows), lengths - 1], axis=-1)[:, None]
    generated = [tokens]
    for step in range(new - 1):
        logits, cache = with_cache(model, tokens, lengths[:, None] + step, cache)
        tokens = jnp.argmax(logits[:, 0], axis=-1)[:, None]
        generated.append(tokens)
    return np.concatenate(generated, axis=1)


def quick(names, some):
    return [pytest.param(name, marks=[] if name in some else pytest.mark.system) for name in names]


@pytest.mark.sampled(quick=9, system=2)
@pytest.mark.parametrize("name", quick(FAMILIES, ("llama", "gemma3", "gpt2")))
def test_one_device_equals_transformers(name):
    model, values, batch = loaded(name), expected(name), batch_of(name)
    same_logits(name, all_at_once(model, values["tokens"], values["segment_ids"]))
    loss, norm = loss_and_norm(model, batch)
    np.testing.assert_allclose([loss, norm], [values["loss"], values["grad_norm"]], rtol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize("name", quick(FAMILIES, ("mistral", "gemma3")))
def test_greedy_decoding_equals_transformers(name):
    values = expected(name)
    assert (np.diff(values["lengths"]) != 0).any(), "prompts of different lengths"
    generated = decode(
        loaded(name), values["prompt"], values["lengths"], values["generated"].shape[1]
    )
    np.testing.assert_array_equal(generated, values["generated"])


@pytest.mark.sampled(quick=3, system=2)
@pytest.mark.parametrize("name", quick(FAMILIES, ("gemma3",)))
def test_cached_logits_equal_uncached_ones(name):
    """Row by row in parts of 1 to 9 tokens, with windows that end inside of the cache."""
    model, tokens = loaded(name), expected(name)["tokens"]
    cache, parts, start = model.init_cache(*tokens.shape), [], 0
    for size in (9, 1, 6, 1, 1, 6):
        part = tokens[:, start : start + size]
        logits, cache = with_cache(
            model, part, jnp.broadcast_to(jnp.arange(start, start + size), part.shape), cache
        )
        parts.append(logits)
        start += size
    assert start == tokens.shape[1]
    logits = np.asarray(all_at_once(model, tokens))
    assert np.abs(np.concatenate(parts, axis=1) - logits).max() < 1e-5 * np.abs(logits).max()


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize("layout", ["fsdp", "tensor_parallel", "pipeline"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gpt2"])
def test_greedy_decoding_of_sharded_weights(name, layout):
    values, model = expected(name), load(FIXTURES / name, mesh=LAYOUTS[layout], layout=layout)
    assert any(
        not leaf.sharding.is_fully_replicated
        for leaf in jax.tree.leaves(nnx.state(model.stack, nnx.Param))
    )
    generated = decode(model, values["prompt"], values["lengths"], values["generated"].shape[1])
    np.testing.assert_array_equal(generated, values["generated"])


def test_cache_stays_where_it_lies():
    """Rows over `data` and heads over `model`: a step communicates the sums of attention, MLP and
    embedding, and no keys or values.
    """
    mesh = spmd.make_mesh("data=4,model=2")
    model = load(FIXTURES / "mistral", mesh=mesh, layout="tensor_parallel")
    at = NamedSharding(mesh, PartitionSpec(None, "data", None, "model"))
    cache = jax.device_put(model.init_cache(8, 64), at)
    tokens = jax.device_put(
        jnp.zeros((8, 1), jnp.int32), NamedSharding(mesh, PartitionSpec("data"))
    )
    program = with_cache.lower(model, tokens, tokens, cache).compile()
    assert set(program.output_shardings[1].values()) == {at}
    communicated = re.findall(
        r"= \S+ (all-gather|all-to-all|collective-permute|all-reduce)\(", program.as_text()
    )
    assert set(communicated) == {"all-reduce"} and len(communicated) <= 4


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_files_equal_those_loaded(name, tmp_path):
    save(load(FIXTURES / name), tmp_path / "saved")
    ours, theirs = (open_files(folder).tensors for folder in (tmp_path / "saved", FIXTURES / name))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key].dtype, ours[key].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(ours[key]) == bytes_of(tensor), key


def bytes_of(tensor):
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


def test_gpt2_without_the_prefix_of_its_names(tmp_path):
    """As OpenAI's folder has them, with the causal masks."""
    folder = FIXTURES / "gpt2"
    tensors = {
        name.removeprefix("transformer."): as_array(tensor)
        for name, tensor in open_files(folder).tensors.items()
    }
    tensors["h.0.attn.bias"] = np.tri(64, dtype=np.float32)[None, None]
    write_file(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    ours, theirs = (
        jax.tree.leaves(nnx.state(load(each), nnx.Param)) for each in (tmp_path, folder)
    )
    assert (
        all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
        and len(ours) == len(theirs) > 10
    )


def as_array(tensor):
    return np.frombuffer(bytes_of(tensor), tensor.dtype).reshape(tensor.shape)


def norm_only():
    """An optimizer that keeps the norm of the gradient, and changes nothing."""

    def update(grads, state, params=None):
        return jax.tree.map(jnp.zeros_like, grads), {"norm": optax.tree.norm(grads)}

    return optax.GradientTransformation(lambda params: {"norm": jnp.zeros(())}, update)


@pytest.mark.sampled(system=10)  # each family once, and each layout
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_layouts_equal_transformers(name, layout):
    where = {"mesh": LAYOUTS[layout], "layout": layout.partition(":")[0]}
    values, batch = expected(name), batch_of(name, copies=4)
    trainer = spmd.Trainer(
        load(FIXTURES / name, **where), loss=spmd.losses.next_token, optimizer=norm_only(), **where
    )
    state, metrics = trainer.step(trainer.init(), batch)
    np.testing.assert_allclose(
        [metrics["loss"], state.opt["norm"]], [values["loss"], values["grad_norm"]], rtol=1e-5
    )
    same_logits(name, trainer.predict(state, batch["tokens"])[: len(values["tokens"])])
    sharded = {
        path
        for path, leaf in spmd.base.tree.flatten(state.params).items()
        if not leaf.sharding.is_fully_replicated
    }
    assert any(path.startswith("stack/layers/") for path in sharded), "layers are not replicated"
    if "model" in LAYOUTS[layout]:
        assert any(path.endswith("key/kernel") for path in sharded) and any(
            "embed/" in path for path in sharded
        )
