"""Every kind of bad folder, file and map is refused with a text that names the file and the tensor;
nothing is allocated for it.
"""

import json
import os
import shutil
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from weight_models import RULES, Stacked, make_tensors, name_map

import spmd
from spmd.errors import SpmdError
from spmd.pretrained import read_weights, safetensors_files
from spmd.pretrained.name_map import NameMap
from spmd.pretrained.safetensors_files import MOST_HEADER, open_files, write_file
from tests.counted import counted_names

FIXTURES = Path(__file__).parent / "fixtures"


def text_of(function, tmp_path):
    with pytest.raises(SpmdError) as caught:
        function()
    return str(caught.value).replace(str(tmp_path), "FOLDER")


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def packed(header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


FILES = {
    "empty": b"abc",
    "of_another_format": b"PK\x03\x04" + b"\x7f" * 40,
    "truncated_in_its_header": packed({"w": entry()})[:30],
    "with_an_endless_header": struct.pack("<Q", MOST_HEADER + 1) + b" " * 100,
    "with_a_header_that_is_not_json": packed(b"{'w': 1}"),
    "with_a_header_that_is_not_text": packed(b'{"w": "\xff"}'),
    "with_a_deep_header": packed(b"[" * 200_000),
    "with_a_list_for_a_header": packed([1, 2]),
    "with_a_tensor_twice": packed(b'{"w": 1, "v": 2, "w": 3}'),
    "with_a_key_of_a_tensor_twice": packed(
        b'{"w": {"dtype": "F32", "dtype": "F16", "shape": [2], "data_offsets": [0, 8]}}'
    ),
    "with_metadata_of_numbers": packed({"__metadata__": {"format": 1}, "w": entry()}),
    "truncated_in_its_data": packed({"w": entry(shape=(4,), offsets=(0, 16))}),
    "with_all_kinds_of_wrong_tensors": packed(
        {
            "no table": 3,
            "no offsets": {"dtype": "F32", "shape": [2]},
            "dtype": entry("F4"),
            "dtype of a list": entry(["F32"]),
            "negative": entry(shape=(-2,)),
            "fraction": entry(shape=(2.0,)),
            "truth": entry(shape=(True,), offsets=(0, 4)),
            "dims": entry(shape=(1,) * 40),
            "huge": entry(shape=(2**62, 2**62)),
            "size": entry(shape=(3,)),
            "backwards": entry(offsets=(8, 0)),
            "outside": entry(shape=(2**40,), offsets=(0, 2**42)),
        }
    ),
    "with_overlaps": packed(
        {"a": entry(), "b": entry(offsets=(4, 12)), "c": entry(offsets=(0, 8))}, b"\0" * 12
    ),
    "with_gaps": packed({"a": entry(offsets=(4, 12)), "b": entry(offsets=(16, 24))}, b"\0" * 28),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_file(name, tmp_path, golden):
    (tmp_path / "model.safetensors").write_bytes(FILES[name])
    golden(f"weights_file_{name}", text_of(lambda: open_files(tmp_path), tmp_path))


def test_huge_sizes_of_a_header_allocate_nothing(tmp_path, monkeypatch):
    """All checks are made before numpy is asked for memory."""

    def fail(*_, **__):
        raise AssertionError("allocated")

    monkeypatch.setattr(safetensors_files.np, "empty", fail)
    for name, contents in FILES.items():
        (tmp_path / "model.safetensors").write_bytes(contents)
        with pytest.raises(SpmdError):
            open_files(tmp_path)
        assert name


def index_of(folder, weight_map):
    write_file(folder / "a.safetensors", {"w": np.ones(2, np.float32)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("name", "shown", "why"),
    [
        ("../../etc/passwd", "../../etc/passwd", "a shard must lie in the folder itself."),
        ("/etc/passwd", "/etc/passwd", "a shard must lie in the folder itself."),
        ("a\0.safetensors", r"a\x00.safetensors", "a shard must lie in the folder itself."),
        ("x" * 300, "x" * 200 + "… (100 more)", "this shard is missing; it has w."),
        ("\ud800.safetensors", r"\ud800.safetensors", "this shard is missing; it has w."),
        ("\x1b[31m", r"\x1b[31m", "this shard is missing; it has w."),
    ],
    ids=["up", "absolute", "null", "too long for a file", "no text", "of a terminal"],
)
def test_names_of_shards_that_no_file_of_the_folder_has(tmp_path, name, shown, why):
    index_of(tmp_path, {"w": name})
    text = text_of(lambda: open_files(tmp_path), tmp_path)
    assert text.encode() and text.startswith(
        f"FOLDER/model.safetensors.index.json does not fit its folder\n1 problem:\n\n  {shown}\n   "
        f"   {why}"
    )


def test_cost_of_an_index_of_many_shards_is_linear(tmp_path, monkeypatch):
    index_of(tmp_path, {})
    name = counted_names()
    listed = {f"w{number}": name(f"../{number}") for number in range(2000)}
    monkeypatch.setattr(safetensors_files, "_parse", lambda *_: {"weight_map": listed})
    assert "2000 problems" in text_of(lambda: open_files(tmp_path), tmp_path)
    assert name.compared < 100_000


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "config.json"]
)
def test_pipe_in_place_of_a_file_is_an_error_and_not_waited_for(tmp_path, name, monkeypatch):
    if name == "config.json":
        shutil.copytree(FIXTURES / "gpt2", tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    # a writer, so that code that opens the pipe does not wait for one
    keep = os.open(tmp_path / name, os.O_RDWR)
    read = (
        open_files
        if name != "config.json"
        else lambda folder: spmd.pretrained.load(folder, progress=False)
    )
    try:
        with monkeypatch.context() as patched:
            for method in ("read_text", "read_bytes"):
                patched.setattr(Path, method, lambda path, **_: pytest.fail(f"{path} was opened"))
            assert f"FOLDER/{name} is no regular file." in text_of(lambda: read(tmp_path), tmp_path)
    finally:
        os.close(keep)


ATTACKS = {  # by what adapter_config.json says: what the error names
    "a huge rank": ({"r": 2**40}, "lora_A.weight [4, 48] is not [1099511627776, 48]"),
    "a huge rank of some": (
        {"rank_pattern": {"q_proj": 2**50}},
        "lora_A.weight [4, 32] is not [1125899906842624, 32]",
    ),
    "endless regex": ({"target_modules": "(a+)+$"}, "it has tensors, and adapter_config.json"),
    "endless regex of names": (
        {"target_modules": "(.*a){20}b"},
        "it has tensors, and adapter_config.json",
    ),
    "deep regex": ({"target_modules": "(" * 2000}, "target_modules"),
    "names of other folders": (
        {"target_modules": ["../../x"]},
        "it has tensors, and adapter_config.json",
    ),
    "modules of other folders": ({"modules_to_save": ["../x"]}, "modules_to_save"),
    "an infinite scale": ({"lora_alpha": 1e400}, "lora_alpha"),
}


@pytest.mark.parametrize("case", ATTACKS)
def test_adapters_that_attack(tmp_path, case):
    said, named = ATTACKS[case]
    shutil.copytree(FIXTURES / "adapters" / "llama", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | said
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = spmd.pretrained.load(FIXTURES / "llama", progress=False)
    assert named in text_of(lambda: spmd.pretrained.load_adapters(model, tmp_path), tmp_path)


def test_adapters_whose_header_claims_more_than_there_is(tmp_path):
    shutil.copytree(FIXTURES / "adapters" / "llama", tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    model = spmd.pretrained.load(FIXTURES / "llama", progress=False)
    text = text_of(lambda: spmd.pretrained.load_adapters(model, tmp_path), tmp_path)
    assert "its header should have 1,152,921,504,606,846,976 bytes; 2 bytes follow." in text


def write_shards(folder, weight_map, shards):
    for file, names in shards.items():
        write_file(folder / file, {name: np.ones(2, np.float32) for name in names})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def missing_shard(folder):
    write_shards(
        folder,
        {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"},
        {"model-1-of-2.safetensors": ["a"]},
    )


def shard_outside(folder):
    write_shards(
        folder,
        {"a": "../x.safetensors", "b": "/etc/passwd", "c": "sub/x", "d": "c:x", "e": ".."},
        {},
    )


def tensors_elsewhere(folder):
    listed = {
        "a": "1.safetensors",
        "b": "1.safetensors",
        "c": "2.safetensors",
        "e": "1.safetensors",
    }
    write_shards(folder, listed, {"1.safetensors": ["a", "c"], "2.safetensors": ["a", "d", "c"]})


def shard_that_is_no_name(folder):
    write_shards(folder, {"a": "1.safetensors", "b": 3}, {"1.safetensors": ["a"]})


def index_without_a_map(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def index_that_is_not_json(folder):
    (folder / "model.safetensors.index.json").write_text("{")


def both_kinds(folder):
    write_shards(folder, {"a": "model.safetensors"}, {"model.safetensors": ["a"]})


def other_files_only(folder):
    (folder / "pytorch_model.bin").touch()
    (folder / "modle.safetensors").touch()


FOLDERS = (
    missing_shard,
    shard_outside,
    tensors_elsewhere,
    shard_that_is_no_name,
    index_without_a_map,
    index_that_is_not_json,
    both_kinds,
)


@pytest.mark.parametrize("make", (*FOLDERS, other_files_only), ids=lambda make: make.__name__)
def test_folder_that_does_not_fit_its_index(make, tmp_path, golden):
    make(tmp_path)
    golden(f"weights_folder_{make.__name__}", text_of(lambda: open_files(tmp_path), tmp_path))


MAPS = {
    "of_a_syntax_error": "[[tensors]]\nfile = embed\n",
    "without_rules": 'model_types = ["small"]',
    "with_all_kinds_of_wrong_rules": """
architecture = ["x"]
model_types = [1]
[layers]
stack = "stack/layers"
list = "blocks"
tial = "tail"
[[tensors]]
file = "a.{layer}.x"
model = "layers.{lay}/b"
transpse = true
[[tensors]]
file = ["a", "b"]
model = "c"
[[tensors]]
file = ["a", "b"]
model = ["c", "d"]
concat = 0
[[tensors]]
file = "a"
model = "c"
concat = 0
[[tensors]]
file = "a.{layer}.{layer}"
model = "c"
[[tensors]]
file = "a.{layer"
model = "c"
[[tensors]]
file = "a.{layer}"
model = "stack/{layer}/c"
[[tensors]]
file = "a"
model = "c"
dims = "a b -> b c"
[[tensors]]
file = "a"
model = "c"
dims = "a b"
transpose = true
[[tensors]]
file = 3
transpose = "yes"
[[ignored]]
file = "q"
""",
}


@pytest.mark.parametrize("name", MAPS)
def test_name_map_that_cannot_be_read(name, golden, tmp_path):
    golden(f"weights_map_{name}", text_of(lambda: NameMap.loads(MAPS[name], "map.toml"), tmp_path))


def test_name_map_that_is_not_there(golden, tmp_path):
    golden(
        "weights_map_that_is_not_there",
        text_of(lambda: NameMap.load(tmp_path / "llama.toml"), tmp_path),
    )


def load(folder, rules=RULES, **options):
    return spmd.pretrained.load(
        folder,
        model=lambda: Stacked(rngs=nnx.Rngs(0)),
        name_map=name_map(Stacked, rules),
        **options,
    )


def reshaped(tensors):
    """Another width of one tensor, of one layer, and of the parts of joined ones."""
    tensors["embed.weight"] = tensors["embed.weight"][:, :8].copy()
    tensors["h.1.q.weight"] = tensors["h.1.q.weight"][:60].copy()
    tensors["h.2.kv.weight"] = tensors["h.2.kv.weight"][:100].copy()
    tensors["h.3.up.weight"] = tensors["h.3.up.weight"][:200].copy()
    return RULES


def unknown_tensors(tensors):
    tensors["lm_haed.weight"] = np.ones((2, 2), np.float32)
    for layer in range(4):
        tensors[f"h.{layer}.k.biased"] = tensors.pop(f"h.{layer}.k.bias")
    return RULES


def another_layer_and_one_less(tensors):
    for name in [name for name in tensors if name.startswith("h.3.")]:
        tensors[name.replace("h.3.", "h.7.")] = tensors.pop(name)
    return RULES


def rules_that_match_nothing(tensors):
    return RULES.replace("h.{layer}.down", "g.{layer}.down").replace("/norm/scale", "/nrom/scale")


def two_rules_for_one(tensors):
    more = """
[[tensors]]
file = "h.{layer}.k.bias"
model = "layers.{layer}/norm/scale"
[[tensors]]
file = "embed.{kind}"
model = "{kind}"
[[ignored]]
file = "h.0.norm.weight"
reason = "a test"
"""
    return RULES + more


def half_of_a_pair(tensors):
    del tensors["h.1.up.weight"]
    return RULES


def no_dim_to_join(tensors):
    return RULES.replace("concat = 1", "concat = 2")


MISFITS = (
    reshaped,
    unknown_tensors,
    another_layer_and_one_less,
    rules_that_match_nothing,
    two_rules_for_one,
    half_of_a_pair,
)


@pytest.mark.parametrize("change", (*MISFITS, no_dim_to_join), ids=lambda change: change.__name__)
def test_map_that_does_not_fit(change, tmp_path, golden):
    """All misfits at once, from headers and shapes alone."""
    tensors = make_tensors()
    rules = change(tensors)
    write_file(tmp_path / "model.safetensors", tensors)
    golden(f"weights_misfit_{change.__name__}", text_of(lambda: load(tmp_path, rules), tmp_path))


def test_options_of_load_and_save(tmp_path, golden):
    write_file(tmp_path / "model.safetensors", make_tensors())
    module = load(tmp_path)
    other, nothing = (
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        spmd.FunctionalModel(lambda key: {}, lambda params: 0),
    )
    texts = [
        text_of(call, tmp_path)
        for call in (
            lambda: spmd.pretrained.load(tmp_path / "nowhere"),
            lambda: spmd.pretrained.load(
                "/".join([str(tmp_path), "org", "name"]),
                model=lambda: other,
                name_map=name_map(Stacked),
            ),
            lambda: spmd.pretrained.load(tmp_path),
            lambda: load(tmp_path, dtype="flaot32"),
            lambda: spmd.pretrained.load(tmp_path, model=nothing, name_map=name_map(Stacked)),
            lambda: spmd.pretrained.save(other, tmp_path / "out"),
            lambda: spmd.pretrained.save({"w": 1}, tmp_path / "out"),
            lambda: spmd.pretrained.save(module, tmp_path / "out", max_shard="5 gigs"),
            lambda: spmd.pretrained.save(module, tmp_path),
        )
    ]
    golden("weights_options", "\n\n".join(texts))


@pytest.mark.parametrize(
    "config", ["{", "[]", "{}", '{"model_type": "lama", "architectures": ["LamaForCausalLM"]}']
)
def test_config_without_a_known_model(config, tmp_path):
    (tmp_path / "config.json").write_text(config)
    text = text_of(lambda: spmd.pretrained.load(tmp_path), tmp_path)
    assert "FOLDER/config.json" in text
    if "lama" in config:
        assert (
            'unknown model_type "lama" (architectures: LamaForCausalLM); known: ' in text
            and ", llama, " in text
        )
        assert 'did you mean "llama"?' in text


HUGE = {
    "bert_masked": {
        "num_hidden_layers": 9000,
        "max_position_embeddings": 10**9,
        "type_vocab_size": 10**6,
    },
    "gpt2": {"n_layer": 10**9, "n_embd": 10**12},
    "llama": {
        "vocab_size": 10**9,
        "intermediate_size": 10**7,
        "num_attention_heads": 10**6,
        "max_position_embeddings": 10**9,
    },
}


@pytest.mark.parametrize("family", HUGE)
def test_sizes_of_a_config_are_compared_with_headers_before_a_model_is_made(
    family, tmp_path, golden, monkeypatch
):
    monkeypatch.setattr(
        "spmd.pretrained.architectures._build", lambda *_: pytest.fail("a model was made")
    )
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | HUGE[family]))
    golden(f"weights_of_a_huge_{family}", text_of(lambda: spmd.pretrained.load(folder), tmp_path))


def test_tensors_of_several_dtypes_as_in_the_file(tmp_path, golden):
    tensors = make_tensors()
    tensors["h.1.q.weight"] = tensors["h.1.q.weight"].astype(jnp.bfloat16)
    write_file(tmp_path / "model.safetensors", tensors)
    golden("weights_of_several_dtypes", text_of(lambda: load(tmp_path, dtype="file"), tmp_path))


def test_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    write_file(tmp_path / "model.safetensors", make_tensors())
    read = read_weights.read_arrays

    def shrink(*arguments):
        os.truncate(tmp_path / "model.safetensors", 5000)
        return read(*arguments)

    monkeypatch.setattr("spmd.pretrained.folders.read_arrays", shrink)
    with pytest.raises(SpmdError, match=r"it ended while .* was read; has it been changed"):
        load(tmp_path)


def test_host_memory_is_bounded(tmp_path, monkeypatch):
    """Memory that is not on a device yet: the limit, or one shard if that is larger; not the
    model.
    """
    tensors = make_tensors()
    write_file(tmp_path / "model.safetensors", tensors)
    limit, held, most, largest = 40_000, 0, 0, 0
    make, place = read_weights.aligned, read_weights._on_devices

    def aligned(shape, dtype):
        nonlocal held, most, largest
        buffer = make(shape, dtype)
        held, largest = held + buffer.nbytes, max(largest, buffer.nbytes)
        most = max(most, held)
        return buffer

    def on_devices(buffer, devices):
        nonlocal held
        held -= buffer.nbytes
        return place(buffer, devices)

    monkeypatch.setattr(read_weights, "IN_FLIGHT", limit)
    monkeypatch.setattr(read_weights, "aligned", aligned)
    monkeypatch.setattr(read_weights, "_on_devices", on_devices)
    load(tmp_path, mesh="data=8", layout="fsdp")
    total = sum(values.nbytes for values in tensors.values())
    assert limit < largest == most < total / 8
