"""BERT for each task against `transformers`: outputs, loss and gradient norm, on one device and
under layouts; and its config.json.

What `transformers` computes is in fixtures/bert_*/expected.npz, with the script that made it.
"""

import dataclasses
import functools
import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.errors import SpmdError
from spmd.layout.schema import Batch, Rule
from spmd.pretrained.architectures import find
from spmd.pretrained.encoder import Encoder, EncoderConfig
from spmd.pretrained.folders import load, save
from spmd.pretrained.safetensors_files import open_files

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = ["bert_masked", "bert_features", "bert_classes"]
LAYOUTS = {  # and their meshes; after a colon, which of several meshes
    "fsdp": "data=8",
    "tensor_parallel": "data=2,model=4",
    "pipeline": "data=4,stage=2",
    "fsdp_pipeline_tensor": "data=2,stage=2,model=2",
    "transformer_parallel:sequences": "stage=1,replica=1,data=2,context=2,model=2",
}
LOSS = spmd.losses.cross_entropy.on(ignore=-100)


@functools.cache
def expected(name):
    with np.load(FIXTURES / name / "expected.npz") as file:
        return dict(file)


def batch_of(name, copies=1):
    values = {
        key: np.tile(value, (copies, *[1] * (value.ndim - 1)))
        for key, value in expected(name).items()
        if value.ndim
    }
    return {
        "inputs": {key: values[key] for key in ("tokens", "mask", "token_types")},
        "targets": values["targets"],
    }


def same_outputs(name, outputs):
    values = expected(name)
    counted = values["mask"] == 1 if outputs.ndim == 3 else slice(None)
    assert np.abs(np.asarray(outputs) - values["outputs"])[counted].max() < 1e-4
    assert values["outputs"][counted].std(axis=0).mean() > 0.1, "they differ from row to row"


@functools.cache
def loaded(name):
    return load(FIXTURES / name)


@jax.jit
def run(model, inputs):
    return model(inputs)


@jax.jit
def loss_and_norm(model, batch):
    def mean(model):
        total, count = LOSS(model, batch)
        return total / count

    loss, grads = nnx.value_and_grad(mean)(model)
    return loss, optax.tree.norm(nnx.to_pure_dict(grads))


@pytest.mark.system
@pytest.mark.parametrize("name", KINDS)
def test_encoder_equals_transformers(name):
    model, values, batch = loaded(name), expected(name), batch_of(name)
    same_outputs(name, run(model, batch["inputs"]))
    np.testing.assert_allclose(
        loss_and_norm(model, batch), [values["loss"], values["grad_norm"]], rtol=1e-5
    )
    for left_out in ("mask", "token_types"):
        fewer = {key: value for key, value in batch["inputs"].items() if key != left_out}
        assert np.abs(np.asarray(run(model, fewer)) - values["outputs"])[1].max() > 0.1, (
            f"{left_out} does nothing"
        )


def test_pooled_features_equal_transformers():
    model, values = loaded("bert_features"), expected("bert_features")
    pooled = jax.jit(lambda model, inputs: model.pool(model(inputs)))(
        model, batch_of("bert_features")["inputs"]
    )
    assert np.abs(np.asarray(pooled) - values["pooled"]).max() < 1e-4
    assert values["pooled"].std(axis=0).mean() > 0.1


def norm_only():
    """An optimizer that keeps the norm of the gradient, and changes nothing."""

    def update(grads, state, params=None):
        return jax.tree.map(jnp.zeros_like, grads), {"norm": optax.tree.norm(grads)}

    return optax.GradientTransformation(lambda params: {"norm": jnp.zeros(())}, update)


@pytest.mark.sampled(system=8)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name,
            layout,
            marks=[]
            if (name, layout) == ("bert_classes", "fsdp_pipeline_tensor")
            else pytest.mark.system,
        )
        for name in KINDS
        for layout in LAYOUTS
    ],
)
def test_encoder_under_layouts_equals_transformers(name, layout):
    where: dict = {"mesh": LAYOUTS[layout], "layout": spmd.Layout.load(layout.partition(":")[0])}
    if layout.endswith("sequences") and name == "bert_classes":  # a label has no sequence
        of_rows = Rule("targets", (("replica", "data"),))
        where["layout"] = dataclasses.replace(
            where["layout"], batch=Batch((("replica", "data"), "context"), (of_rows,))
        )
    values, batch = expected(name), batch_of(name, copies=4)
    trainer = spmd.Trainer(
        load(FIXTURES / name, **where), loss=LOSS, optimizer=norm_only(), **where
    )
    state, metrics = trainer.step(trainer.init(), batch)
    np.testing.assert_allclose(
        [metrics["loss"], state.opt["norm"]], [values["loss"], values["grad_norm"]], rtol=1e-5
    )
    same_outputs(name, trainer.predict(state, batch["inputs"])[: len(values["tokens"])])
    sharded = {
        path
        for path, leaf in spmd.base.tree.flatten(state.params).items()
        if not leaf.sharding.is_fully_replicated
    }
    assert any(path.startswith("stack/layers/") for path in sharded), "layers are not replicated"
    if "model" in LAYOUTS[layout]:
        assert {"stack/layers/key/kernel", "stack/layers/up/kernel", "embed/embedding"} <= sharded


def bytes_of(tensor):
    return tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


def same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key].dtype, ours[key].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(ours[key]) == bytes_of(tensor), key


@pytest.mark.parametrize("name", KINDS)
def test_saved_encoder_equals_that_loaded(name, tmp_path):
    save(load(FIXTURES / name), tmp_path / "saved")
    theirs = open_files(FIXTURES / name).tensors
    others = (
        {key for key in theirs if key.startswith(("bert.pooler.", "cls.seq_relationship."))}
        if name == "bert_masked"
        else set()
    )
    same_tensors(
        open_files(tmp_path / "saved").tensors,
        {key: tensor for key, tensor in theirs.items() if key not in others},
    )


def of_another_task(tmp_path, name, architecture):
    """The folder of a fixture whose config.json asks for another head."""
    folder = shutil.copytree(FIXTURES / name, tmp_path / "given")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return folder


def test_other_heads_and_dropouts_are_logged(tmp_path, caplog):
    """The layers of an encoder of masked tokens are taken for features; what is ignored has a
    reason. Dropouts are a matter of training.
    """
    folder = of_another_task(tmp_path, "bert_masked", "BertModel")
    with caplog.at_level(logging.INFO, "spmd"):
        model = load(folder)
    messages = [
        (record.levelname, record.getMessage().replace(str(folder), "FOLDER"))
        for record in caplog.records
    ]
    assert not [text for level, text in messages if level == "WARNING"]
    ignored = [text for _, text in messages if "not read" in text]
    assert (
        len(ignored) == 2
        and "cls.seq_relationship.weight" in ignored[0]
        and "cls.predictions.bias" in ignored[1]
    ), ignored
    both = [
        jax.tree.leaves(nnx.state(each.stack, nnx.Param)) for each in (model, loaded("bert_masked"))
    ]
    assert all(map(np.array_equal, *both)) and model.predictions is None
    notes = spmd.Trainer(model, loss=LOSS, optimizer=optax.sgd(0.1), mesh="data=8").notes()
    assert [line.replace(str(folder), "FOLDER") for line in notes if "config.json" in line] == [
        "note: FOLDER/config.json: hidden_dropout_prob = 0.1 is not applied: the encoder drops "
        "nothing in training.",
        "note: FOLDER/config.json: attention_probs_dropout_prob = 0.1 is not applied: the encoder "
        "drops nothing in training.",
    ]


def test_missing_head(tmp_path, golden):
    """A folder without the head that config.json names."""
    folder = of_another_task(tmp_path, "bert_features", "BertForSequenceClassification")
    with pytest.raises(SpmdError) as caught:
        load(folder)
    golden(
        "weights_misfit_missing_head",
        str(caught.value)
        .replace(str(folder), "FOLDER")
        .replace(str(Path(spmd.__file__).parent), "SPMD"),
    )


@pytest.mark.system
@pytest.mark.parametrize("name", ["bert_masked", "bert_features"])
def test_new_classifier_is_trained_and_saved(name, tmp_path):
    """From an encoder of another task, under a layout; the folder that is written is a
    classifier's, as transformers reads it.
    """
    where = {"mesh": "data=8", "layout": "fsdp"}
    model = load(FIXTURES / name, labels=["no", "yes"], **where)
    before = np.asarray(model.classifier.kernel[...])
    assert before.shape == (32, 2) and 0.01 < before.std() < 0.03
    assert np.array_equal(
        before, load(FIXTURES / name, labels=["no", "yes"]).classifier.kernel[...]
    ), "on any mesh"
    batch = {"inputs": batch_of(name, 2)["inputs"], "label": np.arange(8, dtype=np.int32) % 2}
    options = {"optimizer": optax.sgd(0.1), "batch_size": 8, "steps": 1, "progress": False, **where}
    result = spmd.fit(model, batch, loss=spmd.losses.cross_entropy, **options)
    saved = save(result, tmp_path / "saved")
    tensors, given = open_files(saved).tensors, open_files(FIXTURES / name).tensors
    assert tensors.keys() - given.keys() == {"classifier.weight", "classifier.bias"} and tensors[
        "classifier.weight"
    ].shape == (2, 32)
    assert all(key.startswith("cls.") for key in given.keys() - tensors.keys())
    config = json.loads((saved / "config.json").read_text())
    assert (config["architectures"], config["id2label"]) == (
        ["BertForSequenceClassification"],
        {"0": "no", "1": "yes"},
    )
    again = load(saved)
    assert np.array_equal(again.classifier.kernel[...], result.model.classifier.kernel[...])
    assert not np.array_equal(again.classifier.kernel[...], before)


LABELS = {
    "text": ("bert_features", {"labels": "yes"}),
    "twice": ("bert_features", {"labels": ["yes", "yes"]}),
    "a classifier": ("bert_classes", {"labels": ["no", "yes"]}),
    "a decoder": ("gpt2", {"labels": ["no", "yes"]}),
    "a model": (
        "bert_features",
        {"labels": ["no", "yes"], "model": lambda: None, "name_map": "names.toml"},
    ),
}


def test_wrong_labels(golden):
    texts = []
    for name, (folder, options) in LABELS.items():
        with pytest.raises(SpmdError) as caught:
            load(FIXTURES / folder, **options)
        texts.append(f"{name}: {caught.value}".replace(str(FIXTURES), "FIXTURES"))
    golden("encoder_labels", "\n".join(texts))


BASE = {  # as published: bert-base-uncased
    **{
        "model_type": "bert",
        "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
    },
    **{
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
    },
    **{
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 0,
        "type_vocab_size": 2,
    },
    **{
        "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0",
        "use_cache": True,
        "vocab_size": 30522,
    },
}


@pytest.mark.parametrize(
    ("architecture", "parameters"),
    [
        ("BertModel", 109_482_240),
        ("BertForMaskedLM", 109_514_298),
        ("BertForSequenceClassification", 109_483_778),
    ],
)
def test_published_encoder(architecture, parameters):
    config = EncoderConfig.from_config(BASE | {"architectures": [architecture]})
    shapes = jax.eval_shape(lambda: nnx.state(Encoder(config, rngs=nnx.Rngs(0)), nnx.Param))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
    assert (
        find(BASE | {"architectures": [architecture]}).notes == config.notes
        and len(config.notes) == 2
    )


def test_activations():
    names = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "swish": "silu",
    }
    assert {
        name: EncoderConfig.from_config(BASE | {"hidden_act": name}).activation for name in names
    } == names


WRONG = {
    "encoder_of_another_task": BASE | {"architectures": ["BertForQuestionAnswering"]},
    "encoder_of_two_tasks": BASE | {"architectures": ["BertModel", "BertForMaskedLM"]},
    "encoder_everything_at_once": BASE
    | {
        "hidden_act": "quick_gelu",
        "position_embedding_type": "relative_key",
        "is_decoder": True,
        "type_vocab_size": 0,
        "rotary": True,
    }
    | {
        "id2label": {"0": "a", "1": "b", "2": "c"},
        "num_labels": 2,
        "num_attention_heads": 7,
        "add_cross_attention": True,
    },
    "encoder_with_another_head": BASE
    | {"architectures": ["BertForMaskedLM"], "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", WRONG)
def test_encoder_config_that_cannot_be_honoured(name, golden):
    with pytest.raises(SpmdError) as caught:
        find(WRONG[name])
    golden(f"config_{name}", str(caught.value))


SIZES = {"vocab": 10, "width": 8, "heads": 2, "mlp_width": 16, "depth": 2, "positions": 4}
TOKENS = np.ones((1, 3), np.int32)
CALLS = {
    "sizes": lambda model: EncoderConfig(**SIZES | {"depth": 0, "vocab": -1}),
    "heads": lambda model: EncoderConfig(**SIZES | {"heads": 3}),
    "task": lambda model: EncoderConfig(**SIZES, task="class"),
    "names of others": lambda model: model({"tokens": TOKENS, "attention_mask": TOKENS}),
    "no tokens": lambda model: model({"input_ids": TOKENS}),
    "long rows": lambda model: model(np.ones((1, 25), np.int32)),
    "no pooler": lambda model: model.pool(np.ones((1, 3, 32), np.float32)),
    "generation": lambda model: spmd.generate(model, [[1]], max_new_tokens=1),
}


def test_encoder_misuse(golden):
    model, texts = loaded("bert_masked"), []
    for name, call in CALLS.items():
        with pytest.raises(SpmdError) as caught:
            call(model)
        texts.append(f"{name}: {caught.value}")
    golden("encoder_misuse", "\n".join(texts))
