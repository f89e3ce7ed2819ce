"""Samples during training: they change nothing, use one program, and are what `generate` writes;
prompts and their ends.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.data.generation_config import end_tokens
from spmd.data.prompts import Prompts
from spmd.errors import SpmdError

FOLDER = Path(__file__).parents[1] / "pretrained" / "fixtures" / "finetune"
PROMPTS = ["The cow says", "The owl has two"]


def fit(callbacks=(), **options):
    model = spmd.pretrained.load(FOLDER, mesh="data=8", layout="fsdp", progress=False)
    tokens = np.random.default_rng(0).integers(0, 300, (32, 16)).astype("int32")
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "mask": np.ones(tokens.shape, "float32"),
    }
    chosen = {
        "mesh": "data=8",
        "layout": "fsdp",
        "batch_size": 8,
        "steps": 4,
        "progress": False,
    } | options
    return spmd.fit(
        model,
        batch,
        loss=spmd.losses.next_token,
        optimizer=optax.adamw(1e-2),
        callbacks=callbacks,
        **chosen,
    )


@pytest.mark.system
def test_samples_change_no_bit_and_compile_once(capsys):
    samples = spmd.callbacks.Samples(PROMPTS, every=2, max_new_tokens=6, tokenizer=FOLDER)
    with_samples, without = fit([samples]), fit()
    assert with_samples.history["loss"] == without.history["loss"]
    assert [sample.step for sample in samples.written] == [0, 0, 2, 2, 4, 4]
    assert samples._generator._program._cache_size() == 1
    assert samples.written[0].text == ' "moo". The cow eats'
    assert samples.written[-1].text != samples.written[1].text, (
        "training has changed what it writes"
    )
    ids = [samples._coder.encode(prompt) for prompt in PROMPTS]
    last = spmd.generate(with_samples, ids, max_new_tokens=6, stop=[0])
    for sample, tokens in zip(samples.written[-2:], last, strict=True):
        np.testing.assert_array_equal(sample.tokens, tokens)
    assert capsys.readouterr().out.splitlines()[0] == 'step 0: The cow says ->  "moo". The cow eats'


@pytest.mark.system
def test_generator_of_a_trainer_writes_with_any_of_its_states():
    model = spmd.pretrained.load(FOLDER, progress=False)
    trainer = spmd.Trainer(
        nnx.clone(model), loss=spmd.losses.next_token, optimizer=optax.sgd(0.0), mesh="data=8"
    )
    generator = spmd.Generator(trainer)
    with pytest.raises(SpmdError, match="has no state"):
        generator([[1]], max_new_tokens=2)
    with pytest.raises(SpmdError, match="this one is of a module"):
        spmd.Generator(model)([[1]], max_new_tokens=2, state=1)
    with pytest.raises(SpmdError, match="state=1 is an int"):
        generator([[1]], max_new_tokens=2, state=1)
    written = generator([[1, 2]], max_new_tokens=3, state=trainer.init())
    np.testing.assert_array_equal(written, spmd.generate(model, [[1, 2]], max_new_tokens=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts=[] is a list"),
        ({"prompts": "abc"}, "prompts='abc' is a str"),
        ({"tokenizer": None}, "'The cow says' without a tokenizer"),
        ({"tokenizer": FOLDER.parent / "llama"}, "has no tokenizer.json"),
        ({"every": 0}, "Samples: every=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"chat": "llama3"}, "has no token <|begin_of_text|>"),
        ({"prompts": [""]}, "prompt '' has no tokens"),
        (
            {"chat": "chatml", "prompts": ["a<|im_end|>"]},
            'holds "<|im_end|>", which would be read as a special token',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_are_named_before_the_run(options, message):
    chosen = {"prompts": PROMPTS, "tokenizer": FOLDER} | options
    with pytest.raises(SpmdError) as caught:
        spmd.callbacks.Samples(chosen.pop("prompts"), **chosen)
    assert message in str(caught.value)


def test_prompts_of_a_chat_end_where_the_assistant_begins():
    shown = {}
    for chat in (None, "chatml", "template"):
        prompts = Prompts(FOLDER, chat)
        shown[chat] = (
            prompts.tokenizer.tokens.decode(prompts.encode("Hi?"), skip_special_tokens=False),
            prompts.stop,
        )
    asked = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    assert shown == {None: ("Hi?", (0,)), "chatml": (asked, (0, 2)), "template": (asked, (0, 2))}
    assert Prompts(FOLDER).decode([1, *Prompts(FOLDER).encode("a b"), 0]) == "a b"


def test_end_tokens_are_read_from_the_folder(tmp_path):
    assert end_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert end_tokens(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert end_tokens(tmp_path) == (5, 6)
    for bad, message in (
        ("{", "cannot be read"),
        ("[]", "holds a list"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x'"),
    ):
        (tmp_path / "generation_config.json").write_text(bad)
        with pytest.raises(SpmdError, match=f"generation_config.json.*{message}"):
            end_tokens(tmp_path)


def test_end_token_of_the_tokenizer_where_no_config_names_one(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    assert Prompts(tmp_path).stop == (0,)
