"""Generation: what `transformers` writes greedily, under layouts and from results of `fit`; draws
by seed; bad input.
"""

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
from spmd.inference.generation import Generator, Sampling, generate
from spmd.launch.cli import main
from spmd.pretrained.folders import load

FIXTURES = Path(__file__).parents[1] / "pretrained" / "fixtures"
LAYOUTS = {"fsdp": "data=8", "tensor_parallel": "data=4,model=2", "pipeline": "data=4,stage=2"}


@functools.cache
def expected(name):
    with np.load(FIXTURES / name / "expected.npz") as file:
        return dict(file)


def prompts_of(name):
    values = expected(name)
    return [
        row[:length].tolist()
        for row, length in zip(values["prompt"], values["lengths"], strict=True)
    ]


@functools.cache
def model_of(name):
    return load(FIXTURES / name, progress=False)


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3", "mistral", "gemma2"])
def test_greedy_tokens_are_those_of_transformers(name):
    wanted = expected(name)["generated"]
    written = generate(model_of(name), prompts_of(name), max_new_tokens=wanted.shape[1])
    assert len({len(prompt) for prompt in prompts_of(name)}) > 1, "prompts differ in length"
    np.testing.assert_array_equal(written, wanted)


@pytest.mark.system
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_write_the_same(layout):
    """Of a result of `fit` with a learning rate of 0, so that its precision, layout and mesh are
    used.
    """
    model = load(FIXTURES / "llama", mesh=LAYOUTS[layout], layout=layout, progress=False)
    tokens = np.tile(expected("llama")["tokens"], (8, 1))[:8]
    batch = {"tokens": tokens, "targets": tokens, "mask": np.ones(tokens.shape, "float32")}
    options = {
        "mesh": LAYOUTS[layout],
        "layout": layout,
        "batch_size": 8,
        "steps": 1,
        "progress": False,
    }
    result = spmd.fit(
        model, batch, loss=spmd.losses.next_token, optimizer=optax.sgd(0.0), **options
    )
    written = generate(
        result, prompts_of("llama"), max_new_tokens=expected("llama")["generated"].shape[1]
    )
    np.testing.assert_array_equal(written, expected("llama")["generated"])


def test_a_row_ends_with_its_stop_token_and_others_continue():
    wanted = expected("llama")["generated"]
    stop = int(wanted[0, 3])
    written = generate(
        model_of("llama"), prompts_of("llama"), max_new_tokens=wanted.shape[1], stop=[stop]
    )
    for row, full in zip(written, wanted, strict=True):
        ends = np.flatnonzero(full == stop)
        np.testing.assert_array_equal(row, full[: ends[0] + 1] if len(ends) else full)
    assert len({len(row) for row in written}) > 1


@pytest.mark.system
def test_one_program_serves_prompts_of_like_lengths_and_draws_follow_the_seed():
    generator, prompts = Generator(model_of("llama")), prompts_of("llama")
    options = {"max_new_tokens": 8, "temperature": 1.5}
    first, again = (np.stack(generator(prompts, seed=3, **options)) for _ in range(2))
    other = np.stack(generator([prompt[::-1] for prompt in prompts], seed=4, **options))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and generator._program._cache_size() == 1
    alone = generator(prompts[:1], seed=3, **options)
    np.testing.assert_array_equal(alone[0], first[0])  # a row does not depend on the others


@pytest.mark.system
def test_draws_have_the_probabilities_that_are_asked_for():
    """Of 4,000 rows; what top_k and top_p leave out is never drawn."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    rows, keys = jnp.tile(logits, (4000, 1)), jax.random.split(jax.random.key(0), 4000)

    def share(**options):
        return np.bincount(Sampling(1.0, **options).choose(rows, keys), minlength=4) / 4000

    assert np.abs(share() - [0.4, 0.3, 0.2, 0.1]).max() < 0.05  # five standard deviations are 0.04
    assert (
        np.abs(share(top_k=2) - [4 / 7, 3 / 7, 0, 0]).max() < 0.05 and share(top_k=2)[2:].sum() == 0
    )
    assert (
        np.abs(share(top_p=0.71) - [4 / 9, 3 / 9, 2 / 9, 0]).max() < 0.05
        and share(top_p=0.71)[3] == 0
    )
    assert share(top_p=0.69)[2:].sum() == 0
    cold = np.bincount(Sampling(0.01).choose(rows, keys), minlength=4)
    assert cold[0] == 4000 == np.bincount(Sampling().choose(rows, keys), minlength=4)[0]


PENALTIES = json.loads((FIXTURES / "penalties.json").read_text())


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("penalty", ["1.3", "0.7"])
@pytest.mark.parametrize("name", PENALTIES)
def test_tokens_with_a_repetition_penalty_are_those_of_transformers(name, penalty):
    wanted = np.array(PENALTIES[name][penalty])
    written = generate(
        model_of(name),
        prompts_of(name),
        max_new_tokens=wanted.shape[1],
        repetition_penalty=float(penalty),
    )
    np.testing.assert_array_equal(written, wanted)
    assert (
        np.stack(generate(model_of(name), prompts_of(name), max_new_tokens=wanted.shape[1]))
        != wanted
    ).any()


def test_repetition_penalty_divides_logits_of_the_text_and_multiplies_negative_ones():
    """Against numpy, on the logits that draws are made of: what has a probability of almost 1 there
    is drawn.
    """
    rng = np.random.default_rng(0)
    logits, seen = rng.normal(size=(64, 12)).astype("float32"), rng.random((64, 12)) < 0.5
    expected = logits.copy()
    for row, column in zip(*np.nonzero(seen), strict=True):
        expected[row, column] *= 1.7 if logits[row, column] < 0 else 1 / 1.7
    keys = jax.random.split(jax.random.key(0), 64)
    for sampling in (
        Sampling(repetition_penalty=1.7),
        Sampling(1e-4, repetition_penalty=1.7),
        Sampling(1.0, 1, repetition_penalty=1.7),
    ):
        np.testing.assert_array_equal(
            sampling.choose(jnp.array(logits), keys, jnp.array(seen)), expected.argmax(axis=1)
        )
    assert (logits.argmax(axis=1) != expected.argmax(axis=1)).any()


@pytest.mark.system
@pytest.mark.parametrize("layout", ["fsdp", "tensor_parallel"])
def test_layouts_write_the_same_with_a_repetition_penalty(layout):
    model = load(FIXTURES / "llama", mesh=LAYOUTS[layout], layout=layout, progress=False)
    written = generate(
        model, prompts_of("llama"), max_new_tokens=24, repetition_penalty=1.3, layout=layout
    )
    np.testing.assert_array_equal(written, PENALTIES["llama"]["1.3"])


def folder_with(tmp_path, generation=None, **config):
    """A copy of the llama, whose generation_config.json and config.json say this."""
    folder = shutil.copytree(FIXTURES / "llama", tmp_path / "model")
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | config)
    )
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


ASKS = {  # by what a file says: what generation is asked for, and what it has no option for
    "draws": (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
        [],
    ),
    "draws as transformers does by default": (
        {"do_sample": True},
        {"temperature": 1.0, "top_k": 50},
        [],
    ),
    "draws from all": (
        {"do_sample": True, "top_k": 0, "temperature": None},
        {"temperature": 1.0},
        [],
    ),
    "greedy, with numbers that only draws read": (
        {"temperature": 0.6, "top_p": 0.9, "min_p": 0.1},
        {},
        [],
    ),
    "a penalty": ({"repetition_penalty": 1.05, "max_length": 20}, {"repetition_penalty": 1.05}, []),
    "nothing": (
        {
            "eos_token_id": 2,
            "num_beams": 1,
            "no_repeat_ngram_size": 0,
            "temperature": 1.0,
            "use_cache": True,
        },
        {},
        [],
    ),
    "options that are unknown": (
        {
            "do_sample": True,
            "top_k": 0,
            "min_p": 0.05,
            "num_beams": 4,
            "no_repeat_ngram_size": 3,
            "suppress_tokens": [7],
        },
        {"temperature": 1.0},
        ["no_repeat_ngram_size=3", "num_beams=4", "min_p=0.05", "suppress_tokens=[7]"],
    ),
}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("case", ASKS)
def test_sampling_that_a_folder_asks_for_is_reported_or_in_the_call(tmp_path, caplog, case):
    said, options, unknown = ASKS[case]
    folder = folder_with(tmp_path, said)
    generator = Generator(load(folder, progress=False))
    with caplog.at_level(logging.WARNING, "spmd"):
        for _ in range(2):
            generator([[1, 2]], max_new_tokens=1)
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    where, lines = folder / "generation_config.json", []
    lines += (
        [f"{where}: not applied, for there is no such option: {', '.join(unknown)}."]
        if unknown
        else []
    )
    lines += (
        [f"{where} asks for {text}, which is not used unless a call has it."] if options else []
    )
    assert [record.getMessage() for record in caplog.records] == lines
    caplog.clear()
    with caplog.at_level(logging.WARNING, "spmd"):
        Generator(load(folder, progress=False))([[1, 2]], max_new_tokens=1, **options)
    assert [record.getMessage() for record in caplog.records] == lines[: bool(unknown)]


def test_sampling_of_an_old_config_is_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "spmd"):
        generate(
            load(folder_with(tmp_path, do_sample=True, temperature=0.5), progress=False),
            [[1, 2]],
            max_new_tokens=1,
        )
    where = tmp_path / "model" / "config.json"
    assert caplog.messages == [
        f"{where} asks for temperature=0.5, top_k=50, which is not used unless a call has it."
    ]


@pytest.mark.parametrize(
    "key", ["do_sample", "temperature", "top_k", "top_p", "repetition_penalty"]
)
def test_sampling_that_cannot_be_read_is_an_error(tmp_path, key):
    model = load(folder_with(tmp_path, {"do_sample": True, key: "much"}), progress=False)
    with pytest.raises(SpmdError, match=rf"generation_config\.json: {key} is 'much'\.\n +fix: "):
        Generator(model)


def test_texts_longer_than_the_model_was_made_for_are_reported(tmp_path, caplog):
    model = load(folder_with(tmp_path, max_position_embeddings=20), progress=False)
    generator = Generator(model)
    with caplog.at_level(logging.WARNING, "spmd"):
        generator([list(range(10))], max_new_tokens=10)
        model(jnp.ones((1, 20), int))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING, "spmd"):
        for _ in range(2):
            generator([list(range(10))], max_new_tokens=11)
            model(jnp.ones((1, 21), int))
    made = "config.json says that the model was made for 20"
    assert caplog.messages == [
        f"texts of up to 21 tokens with the prompt, and {made}.",
        f"rows of 21 tokens, and {made} (max_position_embeddings)",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": []}, "no prompt"),
        ({"tokens": "abc"}, "tokens='abc' is a str"),
        ({"tokens": [[1], []]}, "tokens[1] is empty"),
        ({"tokens": [[1], [0.5]]}, "tokens[1]=[0.5] is no list of token ids"),
        ({"tokens": [[1, 10**6]]}, "tokens[0] has id 1000000; the model has"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 5}, "top_k and top_p do nothing at temperature 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"stop": "x"}, "stop='x'"),
        (
            {"stop": [2, 96]},
            "stop has id 96; the model has 96 tokens, from 0, and would never end a text with it.",
        ),
        ({"repetition_penalty": 0}, "repetition_penalty=0."),
        ({"repetition_penalty": "1.2"}, "repetition_penalty='1.2'."),
        ({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}, "Linear has no cache of keys and values"),
        ({"model": 3}, "model=3 is an int"),
        ({"model": "gpt2", "max_new_tokens": 10**4}, "need 10009 positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_named(options, message):
    model = options.get("model", "llama")
    chosen = {"tokens": prompts_of("llama"), "max_new_tokens": 4} | options
    chosen["model"] = model_of(model) if isinstance(model, str) else model
    with pytest.raises(SpmdError) as caught:
        generate(chosen.pop("model"), chosen.pop("tokens"), **chosen)
    assert message in str(caught.value)


def test_end_token_of_a_folder_that_is_none_of_its_tokens_is_reported(tmp_path, capsys):
    """Unlike `transformers`, which never ends a text then; the fix is `--stop`."""
    folder = shutil.copytree(FIXTURES / "llama", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 96]}))
    command = ["generate", str(folder), "--tokens", "5,9,7", "--max-new-tokens", "2"]
    assert main(command) == 2
    assert (
        "stop has id 96; the model has 96 tokens, from 0, and would never end a text with it.\n"
        "    fix: stop=[...] (--stop) with tokens of this model"
    ) in capsys.readouterr().err
    assert main([*command, "--stop", "2"]) == 0
    tokens = generate(model_of("llama"), [[5, 9, 7]], max_new_tokens=2, stop=[2])[0]
    assert capsys.readouterr().out.strip() == ",".join(map(str, tokens))
