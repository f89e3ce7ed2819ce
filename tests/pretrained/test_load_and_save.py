"""`load` gives each device what the layout says and reads no more; `save` writes the same bytes;
`fit` takes the arrays themselves.
"""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from weight_models import (
    HEADS,
    LAYERS,
    RULES,
    SIZE,
    VOCAB,
    WIDTH,
    Grouped,
    Listed,
    Stacked,
    expected,
    loss,
    make_tensors,
    name_map,
)

import spmd
from spmd.base.tree import flatten
from spmd.errors import ModelError, PretrainedError
from spmd.pretrained.folders import ORIGIN
from spmd.pretrained.safetensors_files import open_files, read_box, write_file
from tests.processes import room_for

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = (Stacked, Listed, Grouped)


def write_folder(folder, tensors, shards=1):
    folder.mkdir()
    names = list(tensors)
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
    else:
        files = {
            f"model-{n + 1:05}-of-{shards:05}.safetensors": names[n::shards] for n in range(shards)
        }
        for file, some in files.items():
            write_file(folder / file, {name: tensors[name] for name in some})
        index = {
            "metadata": {},
            "weight_map": {name: file for file, some in files.items() for name in some},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "small", "dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(kind, folder, **options):
    rules = options.pop("rules", RULES)
    return spmd.pretrained.load(
        folder, model=lambda: kind(rngs=nnx.Rngs(0)), name_map=name_map(kind, rules), **options
    )


def read_tensors(folder):
    """What the files hold, read by numpy alone."""
    tensors = {}
    for name, tensor in open_files(folder).tensors.items():
        raw = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        tensors[name] = np.frombuffer(raw, tensor.dtype).reshape(tensor.shape)
    return tensors


def layer_arrays(module, kind, layer):
    """The arrays of one layer of any of the three models, on the host."""
    params = flatten(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    if kind is Stacked:
        return {
            path.removeprefix("stack/layers/"): np.asarray(leaf)[layer]
            for path, leaf in params.items()
            if path.startswith("stack/")
        }
    home = (
        f"blocks/{layer}/"
        if kind is Listed
        else f"stack/layers/{layer % 2}/"
        if layer < LAYERS - 2
        else f"tail/{layer - LAYERS + 2}/"
    )
    inside = {
        path.removeprefix(home): np.asarray(leaf)
        for path, leaf in params.items()
        if path.startswith(home)
    }
    return (
        {path: leaf[layer // 2] for path, leaf in inside.items()}
        if home.startswith("stack")
        else inside
    )


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_load_gives_the_arrays_and_save_the_same_bytes(kind, dtype, tmp_path):
    tensors = make_tensors(dtype)
    folder = write_folder(
        tmp_path / "given", tensors | {"h.0.inv_freq": np.ones(3, np.float32)}, shards=3
    )
    module = load(kind, folder)
    assert np.array_equal(module.embed.embedding[...], tensors["embed.weight"].astype(np.float32))
    for layer in range(LAYERS):
        arrays = layer_arrays(module, kind, layer)
        wanted = expected(tensors, layer)
        assert arrays.keys() == wanted.keys()
        for path, values in wanted.items():
            assert arrays[path].dtype == np.float32 and np.array_equal(
                arrays[path], values.astype(np.float32)
            ), path
    saved = spmd.pretrained.save(module, tmp_path / "saved", max_shard="300KB")
    assert len(list(saved.glob("*.safetensors"))) > 1
    again = read_tensors(saved)
    assert again.keys() == tensors.keys()
    for name, values in tensors.items():
        assert again[name].dtype == values.dtype and again[name].tobytes() == values.tobytes(), name
    assert (saved / "tokenizer.json").read_text() == "{}"


@pytest.mark.system
def test_three_models_compute_the_same(tmp_path):
    folder = write_folder(tmp_path / "given", make_tensors())
    tokens = jnp.arange(16).reshape(2, 8)
    modules = [load(kind, folder) for kind in KINDS]
    modules[0].eval()
    outputs = [np.asarray(module(tokens)) for module in modules]
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs[2], outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "bert_masked"])
def test_models_compute_in_the_dtype_that_is_read(name):
    model = spmd.pretrained.load(FIXTURES / name, dtype="bfloat16")
    tokens = jnp.zeros((2, 4), int)
    assert jax.eval_shape(lambda model: model.features(tokens), model).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda model: model(tokens), model).dtype == jnp.float32


LAYOUTS = {
    "fsdp": ("data=8", "fsdp"),
    "tensor_parallel": ("data=4,model=2", "tensor_parallel"),
    "pipeline": ("data=2,stage=4", "pipeline"),
    "data_parallel": ("data=8", None),
}


@pytest.mark.sampled(quick=8)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "file"])
def test_load_under_layouts(name, dtype, tmp_path):
    """The values of one device, where `fit` keeps them; bytes are read once, and no others."""
    mesh, layout = LAYOUTS[name]
    folder = write_folder(tmp_path / "given", make_tensors(jnp.bfloat16))
    plain = load(Stacked, folder, dtype=dtype)
    module = load(Stacked, folder, mesh=mesh, layout=layout, dtype=dtype)
    trainer = spmd.Trainer(
        module, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh, layout=layout or "data_parallel"
    )
    wanted = trainer.abstract_state.params
    for (path, leaf), one, like in zip(
        flatten(nnx.to_pure_dict(nnx.state(module, nnx.Param))).items(),
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(plain, nnx.Param))),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        assert leaf.dtype == one.dtype == (jnp.bfloat16 if dtype == "file" else jnp.float32)
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim), path
        assert np.asarray(leaf).tobytes() == np.asarray(one).tobytes(), path
    assert any(not like.sharding.is_fully_replicated for like in jax.tree.leaves(wanted)) == (
        name != "data_parallel"
    )
    report = getattr(module, ORIGIN).report
    total = sum(tensor.nbytes for tensor in getattr(module, ORIGIN).files.tensors.values())
    assert report.bytes_kept == total <= report.bytes_read <= 1.05 * total
    saved = spmd.pretrained.save(module, tmp_path / "saved")
    assert all(
        np.array_equal(values, read_tensors(saved)[tensor])
        for tensor, values in read_tensors(folder).items()
    )


@pytest.mark.system
def test_fit_takes_the_arrays_themselves(tmp_path):
    """The buffers of the state are those of the module, which cannot be used after; a module that
    is not handed over is copied.

    Arrays that `load` made on a CPU lie in memory of numpy, which XLA does not take over; so here
    they are copied to memory of XLA first.
    """
    folder = write_folder(tmp_path / "given", make_tensors())
    mesh, layout = LAYOUTS["fsdp"]
    options = {"loss": loss, "optimizer": optax.sgd(0.1), "mesh": mesh, "layout": layout}

    def in_memory_of_xla(module):
        nnx.update(module, jax.tree.map(jnp.copy, nnx.state(module, nnx.Param)))
        return module

    def start(module):
        arrays = jax.tree.leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
        before = [
            shard.data.unsafe_buffer_pointer()
            for leaf in arrays
            for shard in leaf.addressable_shards
        ]
        state = spmd.Trainer(module, **options).init()
        after = [
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(state.params)
            for shard in leaf.addressable_shards
        ]
        return arrays, state, before == after

    loaded = in_memory_of_xla(load(Stacked, folder, mesh=mesh, layout=layout))
    arrays, state, same = start(loaded)
    assert same and all(leaf.is_deleted() for leaf in arrays)
    with pytest.raises(ModelError, match="handed over"):
        loaded(jnp.zeros((1, 4), int))
    with pytest.raises(ModelError, match="handed over"):
        spmd.Trainer(loaded, **options)
    # a clone is not handed over
    copied = in_memory_of_xla(nnx.clone(load(Stacked, folder, mesh=mesh, layout=layout)))
    arrays, other, same = start(copied)
    assert not same and not any(leaf.is_deleted() for leaf in arrays)
    assert all(map(np.array_equal, jax.tree.leaves(state.params), jax.tree.leaves(other.params)))


@pytest.mark.system
def test_fit_on_another_mesh_than_load(tmp_path):
    """Loaded on one device, trained on eight; and `save` takes the result."""
    folder = write_folder(tmp_path / "given", make_tensors())
    rng = np.random.default_rng(0)
    data = {
        "x": rng.integers(0, VOCAB, (16, 8)).astype(np.int32),
        "y": rng.integers(0, VOCAB, (16, 8)).astype(np.int32),
    }
    loaded = load(Listed, folder)
    result = spmd.fit(
        loaded,
        data,
        loss=loss,
        optimizer=optax.sgd(0.1),
        mesh="data=8",
        layout="fsdp",
        batch_size=16,
        steps=1,
        progress=False,
    )
    with pytest.raises(ModelError, match="handed over"):
        loaded(data["x"])
    saved = read_tensors(spmd.pretrained.save(result, tmp_path / "saved"))
    given = read_tensors(folder)
    assert saved.keys() == given.keys() and not np.array_equal(
        saved["embed.weight"], given["embed.weight"]
    )
    reloaded = load(Listed, tmp_path / "saved")
    assert np.array_equal(reloaded.embed.embedding[...], saved["embed.weight"])
    assert np.array_equal(result.model.embed.embedding[...], saved["embed.weight"])


@pytest.mark.system
def test_tied_tensor_is_read_checked_and_written_as_it_was(tmp_path):
    both = write_folder(tmp_path / "both", make_tensors(tied=True))
    module = load(Stacked, both)
    assert (
        read_tensors(spmd.pretrained.save(module, tmp_path / "saved")).keys()
        == make_tensors(tied=True).keys()
    )
    only_head = make_tensors(tied=True)
    del only_head["embed.weight"]
    rules = RULES.replace(
        'model = "embed/embedding"\n', 'model = "embed/embedding"\noptional = true\n', 1
    )
    module = load(Stacked, write_folder(tmp_path / "head", only_head), rules=rules)
    assert np.array_equal(module.embed.embedding[...], only_head["head.weight"])
    assert (
        read_tensors(spmd.pretrained.save(module, tmp_path / "saved head")).keys()
        == only_head.keys()
    )
    different = make_tensors(tied=True)
    different["head.weight"][-1, -1] += 1
    with pytest.raises(PretrainedError, match=r"embed\.weight and head\.weight are one array"):
        load(Stacked, write_folder(tmp_path / "different", different))


def test_save_in_another_dtype_and_like_another_folder(tmp_path):
    tensors = make_tensors()
    module = load(Stacked, write_folder(tmp_path / "given", tensors))
    saved = spmd.pretrained.save(module, tmp_path / "narrow", dtype="bfloat16")
    assert all(values.dtype == jnp.bfloat16 for values in read_tensors(saved).values())
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    like = spmd.pretrained.save(module, tmp_path / "like", like=saved)
    assert np.array_equal(
        read_tensors(like)["h.1.q.weight"], tensors["h.1.q.weight"].astype(jnp.bfloat16)
    )


def test_save_is_complete_or_not_there(tmp_path, monkeypatch):
    module = load(Stacked, write_folder(tmp_path / "given", make_tensors()))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(PretrainedError, match="is not empty"):
        spmd.pretrained.save(module, tmp_path / "full")

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(PretrainedError, match="No space left"):
            spmd.pretrained.save(module, tmp_path / "saved")
    assert {path.name for path in tmp_path.iterdir()} == {"given", "full"}
    shutil.rmtree(tmp_path / "given")
    with pytest.raises(PretrainedError, match="not there any more"):
        spmd.pretrained.save(module, tmp_path / "saved")


@pytest.mark.parametrize("count", [10, 1000, 3000])
def test_save_on_a_full_disk_names_its_file(count, tmp_path):
    module = load(Stacked, write_folder(tmp_path / "given", make_tensors()))
    with (
        room_for(count),
        pytest.raises(
            PretrainedError, match=r"saved cannot be written: .*File too large: '.*\.tmp/.*'"
        ),
    ):
        spmd.pretrained.save(module, tmp_path / "saved")
    assert {path.name for path in tmp_path.iterdir()} == {"given"}


def test_read_box_reads_any_box(tmp_path):
    """Against numpy's slices; runs of contiguous bytes, and short ones with what lies between
    them.
    """
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 40, 3, 6)).astype(np.float32)
    write_file(tmp_path / "a.safetensors", {"x": values})
    tensor = open_files(tmp_path / "a.safetensors").tensors["x"]
    with (tmp_path / "a.safetensors").open("rb") as file:
        for _ in range(100):
            box = [
                (0, size)
                if rng.random() < 0.5
                else tuple(sorted(map(int, rng.integers(0, size + 1, 2))))
                for size in values.shape
            ]
            out = np.empty([end - begin for begin, end in box], np.float32)
            count = read_box(file.fileno(), tensor, tuple(box), out)
            assert count >= out.nbytes and np.array_equal(
                out, values[tuple(slice(*part) for part in box)]
            ), box


def test_heads_are_sharded_in_three_dims(tmp_path):
    """Heads of a three-dim kernel over `model`: rows of the tensor."""
    module = load(
        Stacked,
        write_folder(tmp_path / "given", make_tensors()),
        mesh="data=4,model=2",
        layout="tensor_parallel",
    )
    kernel = nnx.state(module, nnx.Param)["stack"]["layers"]["query"]["kernel"][...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {
        (LAYERS, WIDTH, HEADS // 2, SIZE)
    }


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_load_of_weights_that_a_wrapper_of_pytorch_named(wrapper, tmp_path):
    tensors = make_tensors()
    plain = load(Listed, write_folder(tmp_path / "plain", tensors))
    module = load(
        Listed,
        write_folder(
            tmp_path / "wrapped", {f"{wrapper}{name}": leaf for name, leaf in tensors.items()}
        ),
    )
    assert all(
        map(
            np.array_equal,
            *(jax.tree.leaves(nnx.state(each, nnx.Param)) for each in (plain, module)),
        )
    )
    saved = read_tensors(spmd.pretrained.save(module, tmp_path / "saved"))
    assert saved.keys() == {f"{wrapper}{name}" for name in tensors}


def test_fix_for_a_missing_head_of_a_decoder(tmp_path):
    """Files without the head, and a config.json that does not say that it is the embedding's table,
    load once it does; the logits are those of files that hold the table twice.
    """
    tensors = read_tensors(FIXTURES / "llama")
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    twice = write_folder(
        tmp_path / "twice", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    head = tensors.pop("lm_head.weight")
    folder = write_folder(tmp_path / "without", tensors)
    for path in (twice, folder):
        (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PretrainedError, match=r"lm_head\.weight") as raised:
        spmd.pretrained.load(folder, progress=False)
    (problem,) = raised.value.problems
    name, value = re.match(r'("\w+": \w+) in config\.json, if', problem.fix)[1].split(": ")
    (folder / "config.json").write_text(json.dumps(config | {json.loads(name): json.loads(value)}))
    tokens = np.arange(12).reshape(1, 12)
    tied = spmd.pretrained.load(folder, progress=False)(tokens)
    table_twice = spmd.pretrained.load(twice, progress=False)(tokens)
    np.testing.assert_allclose(tied, table_twice, rtol=1e-5, atol=1e-5)
    # the fixture's own head is another array than its table, so that it cannot be what was used
    assert not np.array_equal(head, tensors["model.embed_tokens.weight"])
