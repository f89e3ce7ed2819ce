"""Adapters against `peft`: logits and training with folders that it wrote, files written here, and
what is refused.

What `peft` computes is in fixtures/adapters/*/expected.npz, with the script that made it.
"""

import dataclasses
import functools
import json
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_families import FIXTURES, all_at_once, as_array, batch_of, bytes_of, expected
from weight_models import Listed, Stacked, make_tensors, name_map

import spmd
from spmd.api import Result
from spmd.base.tree import flatten
from spmd.errors import MissingExtraError, SpmdError
from spmd.layout.trained import Adapter, Train
from spmd.models.lora import NAMES, adapter_paths, add_adapters
from spmd.pretrained.adapter_config import AdapterConfig
from spmd.pretrained.adapters import load_adapters, save_adapters
from spmd.pretrained.folders import load, save
from spmd.pretrained.match_adapters import modules_of
from spmd.pretrained.safetensors_files import open_files, write_file

ADAPTERS = FIXTURES / "adapters"
# the model of each folder of adapters
BASES = {"llama": "llama", "llama_patterns": "llama", "gpt2": "gpt2"}


def with_adapters(name, **where):
    return load_adapters(load(FIXTURES / BASES[name], **where), ADAPTERS / name)


@functools.cache
def of_peft(name):
    with np.load(ADAPTERS / name / "expected.npz") as file:
        return dict(file)


def same_logits(name, model):
    values, theirs = expected(BASES[name]), of_peft(name)["logits"]
    counted = values["segment_ids"] == 1
    difference = np.asarray(all_at_once(model, values["tokens"], values["segment_ids"])) - theirs
    assert np.abs(difference)[counted].max() < 1e-4
    assert np.abs(theirs - values["logits"])[counted].max() > 0.1, "adapters change logits"


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("name", BASES)
def test_logits_equal_peft(name):
    same_logits(name, with_adapters(name))


@pytest.mark.system
def test_config_is_read():
    """Ranks and alphas by pattern, rsLoRA and dropout; each layer of the stack has its own
    matrices.
    """
    model = with_adapters("llama_patterns")
    attention = {"dropout": 0.1, "rslora": True, "rank": 8}
    assert adapter_paths(model) == {
        "head": Adapter("head", alpha=4.0, **attention),
        "stack/layers/attention/key": Adapter("stack/layers/attention/key", alpha=4.0, **attention),
        "stack/layers/attention/out": Adapter("stack/layers/attention/out", alpha=7.0, **attention),
        "stack/layers/mlp/up": Adapter("stack/layers/mlp/up", alpha=4.0, **attention | {"rank": 2}),
    }
    tensors = open_files(ADAPTERS / "llama_patterns", "adapter_model").tensors
    for layer in range(4):
        for matrix, name in zip(NAMES, "AB", strict=True):
            tensor = tensors[
                f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{name}.weight"
            ]
            np.testing.assert_array_equal(
                getattr(model.stack.layer(layer).attention.out, matrix)[...], as_array(tensor).T
            )


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("name", BASES)
def test_written_files_equal_pefts(name, tmp_path):
    """Every tensor of an adapter, and of the config what is not about training; peft also writes
    the head's weights.
    """
    save_adapters(with_adapters(name), tmp_path / "saved", base_model=BASES[name])
    ours, theirs = (
        open_files(folder, "adapter_model").tensors
        for folder in (tmp_path / "saved", ADAPTERS / name)
    )
    assert ours.keys() == {key for key in theirs if ".base_layer." not in key}
    for key, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[key].dtype, theirs[key].shape)
        assert bytes_of(tensor) == bytes_of(theirs[key]), key
    config, original = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "saved", ADAPTERS / name)
    )
    for key in (
        "peft_type",
        "task_type",
        "bias",
        "lora_dropout",
        "use_rslora",
        "fan_in_fan_out",
        "base_model_name_or_path",
    ):
        assert config[key] == original[key], key
    same_logits(name, load_adapters(load(FIXTURES / BASES[name]), tmp_path / "saved"))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("name", "task", "prefix"),
    [("classes", None, "bert."), ("features", "FEATURE_EXTRACTION", ""), ("masked", None, "bert.")],
)
def test_adapters_of_an_encoder(name, task, prefix, tmp_path):
    """PEFT's class for its task, and names of modules as `transformers` has them: a BertModel's
    have no prefix.
    """
    model = load(FIXTURES / f"bert_{name}")
    add_adapters(model, [Adapter("stack/layers/query", rank=2)], nnx.Rngs(0))
    folder = save_adapters(model, tmp_path / "saved")
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == task
    assert (
        f"base_model.model.{prefix}encoder.layer.0.attention.self.query.lora_A.weight"
        in open_files(folder, "adapter_model").tensors
    )
    again = load_adapters(load(FIXTURES / f"bert_{name}"), folder)
    both = [jax.tree.leaves(nnx.state(each, nnx.Param)) for each in (model, again)]
    assert all(map(np.array_equal, *both)) and len(both[0]) == len(both[1])


def test_config_names_modules_briefly(tmp_path):
    save_adapters(with_adapters("llama_patterns"), tmp_path / "saved")
    config = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "lm_head", "o_proj", "up_proj"]
    assert (config["r"], config["rank_pattern"]) == (8, {"up_proj": 2})
    assert (config["lora_alpha"], config["alpha_pattern"]) == (4, {"o_proj": 7})
    assert config["base_model_name_or_path"] == str(FIXTURES / "llama")


@pytest.mark.system
def test_adapters_of_some_layers_of_a_list(tmp_path, caplog):
    """Modules are named in full where others have the same last name. Of two dropouts one is
    written, with a warning.
    """
    tensors = make_tensors()
    write_file(tmp_path / "model.safetensors", tensors)

    def model():
        return load(tmp_path, model=lambda: Listed(rngs=nnx.Rngs(0)), name_map=name_map(Listed))

    adapted, chosen = model(), Adapter("blocks/{1,2}/down", rank=3, dropout=0.5)
    add_adapters(
        adapted, [chosen, Adapter("blocks/0/down", rank=2, alpha=3.5, rslora=True)], nnx.Rngs(1)
    )
    (tmp_path / "config.json").write_text("{}")
    for layer in range(3):
        b = adapted.blocks[layer].down.lora_b
        b.set_value(jnp.full_like(b.get_value(), layer + 1))
    save_adapters(adapted, tmp_path / "adapters")
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["target_modules"] == ["h.0.down", "h.1.down", "h.2.down"] and config[
        "rank_pattern"
    ] == {"h.0.down": 2}
    assert not config["use_rslora"] and config["lora_alpha"] == 16 and config["lora_dropout"] == 0.5
    assert (
        "adapter_config.json holds one dropout, 0.5: that of h.0.down 0.0 is lost." in caplog.text
    )
    assert config["alpha_pattern"]["h.0.down"] == pytest.approx(3.5 * 2**0.5, rel=1e-9)
    again = load_adapters(model(), tmp_path / "adapters")
    assert list(adapter_paths(again)) == ["blocks/0/down", "blocks/1/down", "blocks/2/down"]
    for layer in range(3):
        ours, theirs = (each.blocks[layer].down for each in (again, adapted))
        assert ours.adapter.scale == pytest.approx(theirs.adapter.scale, rel=1e-9)
        assert all(
            np.array_equal(getattr(ours, name)[...], getattr(theirs, name)[...]) for name in NAMES
        )


@pytest.mark.system
def test_merged_model_is_saved(tmp_path):
    """As a folder of the base model, which needs no adapters."""
    model = with_adapters("llama_patterns")
    save(model, tmp_path / "merged", merged=True)
    ours, theirs = (
        open_files(folder).tensors for folder in (tmp_path / "merged", FIXTURES / "llama")
    )
    changed = {name for name in theirs if bytes_of(ours[name]) != bytes_of(theirs[name])}
    assert ours.keys() == theirs.keys() and len(changed) == 4 * 3 + 1
    same_logits("llama_patterns", load(tmp_path / "merged"))
    same_logits("llama_patterns", model)


@pytest.mark.system
def test_adapters_of_sharded_weights(tmp_path):
    """They lie as kernels lie, and are written from where they lie."""
    model = with_adapters("llama", mesh="data=4,model=2", layout="fsdp_tensor_parallel")
    leaves = [
        variable.get_value()
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if path[-1] in NAMES
    ]
    assert len(leaves) == 6 and not any(leaf.sharding.is_fully_replicated for leaf in leaves)
    same_logits("llama", model)
    save_adapters(model, tmp_path / "saved")
    ours, theirs = (
        open_files(folder, "adapter_model").tensors
        for folder in (tmp_path / "saved", ADAPTERS / "llama")
    )
    assert ours.keys() == theirs.keys() and all(
        bytes_of(ours[key]) == bytes_of(theirs[key]) for key in ours
    )


@pytest.mark.system
def test_training_equals_peft():
    """20 steps of AdamW on adapters alone, on one device."""
    model, values = with_adapters("llama"), of_peft("llama")
    graphdef, adapters, others = nnx.split(model, lambda path, _: path[-1] in NAMES, ...)
    optimizer = optax.adamw(3e-3, weight_decay=0.01)

    @jax.jit
    def step(adapters, state, tokens):
        def mean(adapters):
            logits = nnx.merge(graphdef, adapters, others)(tokens)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(mean)(adapters)
        updates, state = optimizer.update(grads, state, adapters)
        return optax.apply_updates(adapters, updates), state, loss

    state, losses = optimizer.init(adapters), []
    for tokens in values["batches"]:
        adapters, state, loss = step(adapters, state, tokens)
        losses.append(loss)
    np.testing.assert_allclose(losses, values["losses"], rtol=1e-4)
    assert losses[-1] < losses[0] - 1 and len(losses) == 20


def losses_of_steps(model, batches, mesh, layout):
    """The loss of each step of AdamW, and the state after them; rows twice, for 8 devices."""

    def loss(model, batch):
        logits = model(batch["tokens"])[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean(
            axis=1
        )

    trainer = spmd.Trainer(
        model, loss=loss, optimizer=optax.adamw(3e-3, weight_decay=0.01), mesh=mesh, layout=layout
    )
    state, losses = trainer.init(), []
    for tokens in batches:
        state, metrics = trainer.step(state, {"tokens": np.tile(tokens, (2, 1))})
        losses.append(metrics["loss"])
    return losses, state


@pytest.mark.system
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("data=8", "fsdp"),
        ("data=4,model=2", "fsdp_tensor_parallel"),
        ("data=4,stage=2", "pipeline"),
    ],
)
def test_sharded_training_equals_peft(mesh, layout):
    """The same 20 steps under a layout; nothing but adapters has a state of the optimizer."""
    values, model = of_peft("llama"), with_adapters("llama", mesh=mesh, layout=layout)
    losses, state = losses_of_steps(model, values["batches"], mesh, layout)
    np.testing.assert_allclose(losses, values["losses"], rtol=1e-4)
    trained = {path for path, _ in flatten(state.params).items()}
    assert len(trained) == 6 and {path.rpartition("/")[2] for path in trained} == set(NAMES)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt)) < 2.1 * sum(
        leaf.size for leaf in jax.tree.leaves(state.params)
    )


@pytest.mark.system
def test_adapters_of_a_layout_are_saved(tmp_path):
    """From a layout's [[adapters]] to a folder for PEFT, and to one without adapters."""
    adapters = (Adapter("**/{query,value}", rank=2), Adapter("**/down", rank=3, alpha=3.0))
    layout = dataclasses.replace(spmd.Layout.load("fsdp"), adapters=adapters)
    tokens = expected("llama")["tokens"]
    batch = batch_of("llama", copies=4)
    model = load(FIXTURES / "llama", mesh="data=8", layout=layout)
    options = {
        "optimizer": optax.adam(1e-2),
        "mesh": "data=8",
        "layout": layout,
        "batch_size": 16,
        "steps": 2,
        "progress": False,
    }
    result = spmd.fit(model, batch, loss=spmd.losses.next_token, **options)
    save_adapters(result, tmp_path / "adapters")
    save(result, tmp_path / "merged", merged=True)
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (
        2,
        {"down_proj": 3},
        {"down_proj": 3},
    )
    logits = np.asarray(all_at_once(result.model, tokens))
    for other in (
        load_adapters(load(FIXTURES / "llama"), tmp_path / "adapters"),
        load(tmp_path / "merged"),
    ):
        assert np.abs(all_at_once(other, tokens) - logits).max() < 1e-4
    assert np.abs(all_at_once(load(FIXTURES / "llama"), tokens) - logits).max() > 0.1


def copy_of(name, tmp_path, change=None, **config):
    """A folder of adapters, with other tensors or another config."""
    folder = tmp_path / "adapters"
    shutil.copytree(ADAPTERS / name, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change is not None:
        tensors = {
            key: as_array(tensor)
            for key, tensor in open_files(folder, "adapter_model").tensors.items()
        }
        change(tensors)
        write_file(folder / "adapter_model.safetensors", tensors)
    return folder


def text_of(call, tmp_path):
    with pytest.raises(SpmdError) as caught:
        call()
    return str(caught.value).replace(str(tmp_path), "FOLDER")


CONFIGS = {
    "dora": {"use_dora": True},
    "several_keys": {
        "bias": "all",
        "modules_to_save": ["lm_head"],
        "init_lora_weights": "pissa",
        "use_dora": True,
        "from_the_future": 3,
    },
    "of_another_kind": {"peft_type": "IA3"},
    "wrong_values": {
        **{"r": 0, "lora_alpha": "16", "lora_dropout": 1.5, "use_rslora": 1},
        **{"rank_pattern": {"^(a|b)+$": 2}, "alpha_pattern": {"o_proj": -1}},
    },
    "another_rank": {"r": 5},
    "wrong_choices": {
        "target_modules": "(q_proj",
        "exclude_modules": r"(q)\1",
        "layers_to_transform": ["0"],
        "layers_pattern": "(h",
    },
    "modules_that_are_not_named": {"target_modules": ["q_proj", "k_proj", "proj"]},
    "modules_that_no_pattern_names": {"target_modules": r".*\.(q|k|v|down)_proj"},
    "excluded_modules": {"exclude_modules": ["v_proj"]},
    "layers_that_are_not_named": {
        "layers_to_transform": [0, 1, 3],
        "layers_pattern": ["h", "layers"],
    },
    "one_layer": {"layers_to_transform": 2},
}


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r"model\.layers\.\d+\.(self_attn\.[qv]|mlp\.down)_proj"},
        {
            "target_modules": ["q_proj", "self_attn.v_proj", "mlp.down_proj", "experts"],
            "layers_to_transform": [0, 1, 2, 3],
        },
        {
            "target_modules": r".*_proj",
            "exclude_modules": ["k_proj", "o_proj", "gate_proj", "up_proj"],
        },
        {"target_modules": "all-linear"},
        {"target_modules": None, "fan_in_fan_out": True},
    ],
)
def test_config_names_the_modules_with_tensors(config, tmp_path):
    """As a list of ends of names or a regular expression; with the numbers of layers, or all but
    those excluded.
    """
    again = load_adapters(load(FIXTURES / "llama"), copy_of("llama", tmp_path, **config))
    assert adapter_paths(again) == adapter_paths(with_adapters("llama"))


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    ("named", "warns"),
    [
        ("meta/Llama", False),
        ("/models/llama/", False),
        (None, False),
        ("mistral", True),
        ("org/code-llama", True),
    ],
)
def test_adapters_of_a_model_of_another_name(named, warns, tmp_path, caplog):
    load_adapters(
        load(FIXTURES / "llama"), copy_of("llama", tmp_path, base_model_name_or_path=named)
    )
    assert (
        f"adapter_config.json is for the model {named}, and its adapters are added to that of "
        f"{FIXTURES}" in caplog.text
    ) == warns


# for `re`
ENDLESS = (
    "(.+)+x",
    "(.|.)" * 40 + "x",
    "((((.*)*)*)*)*x",
    ".*" * 30 + "x",
    "(?:(.?){60}){15}x",
)


@pytest.mark.parametrize(
    "regex",
    [
        *ENDLESS,
        r".*\.(q|v)_proj",
        r"^(model|h)\.\d+\.[^.]+?$",
        r"(?:\bh\b|(a|)b*)+\.{2,}[]\d.]?",
        ".{3}|.{5,}",
        "(?P<end>ABC)|(?i:ABCD)",
        "",
    ],
)
def test_regex_is_matched_without_backtracking(regex):
    names = [
        "h.0.q_proj",
        "model.12.up",
        "h..0",
        "h.bab..",
        "abc",
        "abcd",
        "",
        "model.layers.0.self_attn.q_proj",
    ]
    config = AdapterConfig({"peft_type": "LORA", "target_modules": regex})
    assert not config.problems()
    expected_names = [False] * 8
    if regex not in ENDLESS:
        expected_names = [re.fullmatch(regex, name) is not None for name in names]
    assert [config.names(name) for name in names] == expected_names


@pytest.mark.parametrize(
    "regex",
    [
        r"(q)\1",
        "(?=q)q",
        "q**",
        "q++",
        "q{,3}",
        "[[:alpha:]]",
        r"\pL",
        "(q",
        "q)",
        "[q",
        "*q",
        "q{2000}",
        "(" * 900,
        "q{999}" * 1000,
        "\\",
    ],
)
def test_regex_that_re_and_re2_do_not_understand_alike_is_refused(regex):
    (problem,) = AdapterConfig({"peft_type": "LORA", "target_modules": regex}).problems()
    assert "known: names of modules, or a regular expression" in str(problem)


def test_a_regex_needs_an_extra_and_names_of_modules_do_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "re2", None)
    for modules in (["q_proj"], "all-linear", None):
        assert not AdapterConfig({"peft_type": "LORA", "target_modules": modules}).problems()
    with pytest.raises(MissingExtraError, match=r"re2 is not installed.*\n.*\.\[adapters\]"):
        AdapterConfig({"peft_type": "LORA", "target_modules": r".*\.unique_proj"}).problems()


@pytest.mark.parametrize("name", CONFIGS)
def test_config_that_is_refused(name, tmp_path, golden):
    folder, model = copy_of("llama", tmp_path, **CONFIGS[name]), load(FIXTURES / "llama")
    golden(f"adapter_config_{name}", text_of(lambda: load_adapters(model, folder), tmp_path))
    assert adapter_paths(model) == {}


def misfits(tensors):
    """One layer without, one module that is not there, a matrix without the other, another shape,
    another dtype, another name.
    """
    prefix = "base_model.model.model.layers"
    for matrix in "AB":
        del tensors[f"{prefix}.2.mlp.down_proj.lora_{matrix}.weight"]
        for layer in range(4):
            tensors[f"{prefix}.{layer}.self_attn.qproj.lora_{matrix}.weight"] = tensors[
                f"{prefix}.{layer}.self_attn.q_proj.lora_A.weight"
            ]
    del tensors[f"{prefix}.1.self_attn.q_proj.lora_B.weight"]
    tensors[f"{prefix}.0.self_attn.q_proj.lora_A.weight"] = np.zeros((4, 31), np.float32)
    tensors[f"{prefix}.3.self_attn.v_proj.lora_A.weight"] = np.zeros((4, 32), np.int32)
    tensors["model.norm.weight"] = np.zeros(32, np.float32)
    tensors["base_model.model.lm_head.lora_magnitude_vector"] = np.zeros(96, np.float32)


def fused(tensors):
    tensors |= {
        f"base_model.model.transformer.h.0.attn.c_attn.lora_{m}.weight": np.ones(s, np.float32)
        for m, s in (("A", (2, 32)), ("B", (96, 2)))
    }


def another_head(tensors):
    tensors["base_model.model.lm_head.base_layer.weight"] = (
        tensors["base_model.model.lm_head.base_layer.weight"] + 1
    )


CHANGES = {
    "misfits": ("llama", misfits, {}),
    "fused": ("gpt2", fused, {}),
    "another_head": ("llama_patterns", another_head, {}),
}
CHANGES["ranks_of_one_stack"] = (
    "llama",
    lambda tensors: None,
    {"alpha_pattern": {"layers.2.self_attn.q_proj": 3}},
)
CHANGES["no_tensors"] = ("llama", lambda tensors: tensors.clear(), {})


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_do_not_fit(name, tmp_path, golden):
    family, change, config = CHANGES[name]
    folder, model = copy_of(family, tmp_path, change, **config), load(FIXTURES / BASES[family])
    golden(f"adapter_tensors_{name}", text_of(lambda: load_adapters(model, folder), tmp_path))
    assert adapter_paths(model) == {}, "the model stays as it was"


@pytest.mark.system
def test_calls_that_are_refused(tmp_path, golden):
    """Missing files, models with and without adapters, and layers that PEFT's format does not
    have.
    """
    plain, adapted = load(FIXTURES / "llama"), with_adapters("llama")
    damaged, without, binary = tmp_path / "damaged", tmp_path / "without", tmp_path / "binary"
    for folder in (damaged, without, binary):
        shutil.copytree(ADAPTERS / "llama", folder)
    (damaged / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    (without / "adapter_config.json").unlink()
    (binary / "adapter_model.safetensors").rename(binary / "adapter_model.bin")
    gpt2 = load(FIXTURES / "gpt2")
    add_adapters(gpt2, [Adapter("**/{query,value,out}", rank=2)], nnx.Rngs(0))
    (tmp_path / "weights").mkdir()
    write_file(tmp_path / "weights/model.safetensors", make_tensors())
    stacked = load(
        tmp_path / "weights", model=lambda: Stacked(rngs=nnx.Rngs(0)), name_map=name_map(Stacked)
    )
    add_adapters(stacked, [Adapter("**/{key,both}", rank=2)], nnx.Rngs(0))
    texts = [
        text_of(call, tmp_path)
        for call in (
            lambda: load_adapters(plain, tmp_path / "nowhere"),
            lambda: load_adapters(plain, damaged),
            lambda: load_adapters(plain, without),
            lambda: load_adapters(plain, binary),
            lambda: load_adapters(adapted, ADAPTERS / "llama"),
            lambda: load_adapters(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ADAPTERS / "llama"),
            lambda: load(damaged),
            lambda: save_adapters(plain, tmp_path / "out"),
            lambda: save_adapters(gpt2, tmp_path / "out"),
            lambda: save_adapters(stacked, tmp_path / "out"),
            lambda: save_adapters(adapted, damaged),
            lambda: save(adapted, tmp_path / "out"),
            lambda: save(plain, tmp_path / "out", merged=True),
        )
    ]
    golden("adapter_calls", "\n\n".join(texts))
    assert not (tmp_path / "out").exists()


@pytest.mark.system
def test_weights_that_adapters_files_would_lose(tmp_path, golden):
    """Parameters that are trained beside adapters, and a classifier that `load` drew;
    `save(merged=True)` has both.
    """
    train, texts = Train(include="classifier/**"), []
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), adapters=(Adapter("stack/layers/{query,value}", rank=2),)
    )
    run = {"loss": spmd.losses.cross_entropy, "optimizer": optax.sgd(0.1), "mesh": "data=8"}
    for folder, labels in (("bert_classes", None), ("bert_features", ["no", "yes"])):
        model = load(FIXTURES / folder, labels=labels)
        trainer = spmd.Trainer(
            model,
            layout=dataclasses.replace(layout, train=train if labels is None else Train()),
            **run,
        )
        result = Result(trainer.init(), None, None, trainer)
        texts.append(
            text_of(lambda result=result: save_adapters(result, tmp_path / "out"), tmp_path)
        )
        if labels is not None:
            texts.append(
                text_of(
                    lambda result=result: save_adapters(result.model, tmp_path / "out"), tmp_path
                )
            )
    golden("adapter_weights_that_would_be_lost", "\n\n".join(texts))
    save(result, tmp_path / "merged", merged=True)
    assert (
        "classifier.weight" in open_files(tmp_path / "merged").tensors
        and not (tmp_path / "out").exists()
    )


@pytest.mark.system
def test_every_family_has_names_for_its_layers():
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2"):
        model = load(FIXTURES / family)
        modules = modules_of(model.pretrained_origin.name_map, model)
        names = {module.name for module in modules}
        layers = {
            "/".join(map(str, path))
            for path, sub in nnx.iter_modules(model)
            if isinstance(sub, nnx.Linear)
        }
        assert {module.layer for module in modules} == layers
        stored = {name.removesuffix(".weight") for name in model.pretrained_origin.files.tensors}
        assert names <= stored and any(module.slot for module in modules)
        refused = {module.name.rpartition(".")[2] for module in modules if module.refusal}
        assert refused == ({"c_attn"} if family == "gpt2" else set())
