"""`spmd finetune` and `spmd generate`: a run that is killed and resumed, two processes, what is
written, and bad input.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.launch.cli import main
from spmd.pretrained.safetensors_files import open_files, write_file

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launched import launch

from tests.processes import environment

FOLDER = Path(__file__).parents[1] / "pretrained" / "fixtures" / "finetune"
SOUNDS = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "owl": "hoot",
    "frog": "croak",
}


def conversation(animal, sound):
    return {
        "messages": [
            {"role": "user", "content": f"What does the {animal} say?"},
            {"role": "assistant", "content": sound},
        ]
    }


CONVERSATIONS = [conversation(*pair) for pair in SOUNDS.items()] * 6


def lines(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@pytest.fixture
def data(tmp_path):
    return lines(tmp_path / "chat.jsonl", CONVERSATIONS)


def words(data, out, *more):
    """The command of these tests, which trains on conversations for 6 steps."""
    text = ["--chat", "chatml", "--loss-on", "answers", "--length", "32", "--batch-size", "8"]
    run = ["--epochs", "1", "--learning-rate", "3e-3", "--precision", "float32"]
    return [
        str(word) for word in ("finetune", FOLDER, "--data", data, "--out", out, *text, *run, *more)
    ]


def with_devices(count=8):
    return environment(
        XLA_FLAGS=f"--xla_force_host_platform_device_count={count} {os.environ['SPMD_TEST_FLAGS']}"
    )


def command(arguments, devices=8):
    done = subprocess.run(
        [sys.executable, "-m", "spmd", *arguments],
        capture_output=True,
        text=True,
        env=with_devices(devices),
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tensors(folder):
    files = open_files(folder)
    raw = (folder / "model.safetensors").read_bytes()
    return {name: raw[one.offset : one.offset + one.nbytes] for name, one in files.tensors.items()}


@pytest.mark.system
def test_a_folder_of_the_same_names_is_written_which_answers(data, tmp_path, capsys):
    out = tmp_path / "tuned"
    sampled = ["--sample", "What does the cow say?", "--sample-every", 3, "--max-new-tokens", 4]
    assert main(words(data, out, *sampled, "--weight-decay", 0.1, "--eval-data", data)) == 0
    shown = capsys.readouterr()
    assert (
        f"{out}: step " in shown.out
        and "eval_loss" in shown.out
        and "step 0: What does the cow say? -> " in shown.out
    )
    given, tuned = tensors(FOLDER), tensors(out)
    assert given.keys() == tuned.keys() and all(given[name] != tuned[name] for name in given)
    assert {path.name for path in out.iterdir()} == {path.name for path in FOLDER.iterdir()}
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (FOLDER / "config.json").read_text()
    )


ADAPTERS = """
[train]
frozen = "bfloat16"

[[adapters]]
modules = "**/{query,value,down}"
rank = 4
alpha = 8.0
"""


@pytest.mark.system
def test_adapters_are_trained_alone_and_written_as_peft_does(data, tmp_path, capsys):
    (tmp_path / "lora.toml").write_text(ADAPTERS)
    adapters, merged, run = (
        tmp_path / "adapters",
        tmp_path / "merged",
        ["--adapters", tmp_path / "lora.toml", "--epochs", 8],
    )
    assert (
        main(words(data, adapters, *run)) == 0 and main(words(data, merged, *run, "--merge")) == 0
    )
    assert {path.name for path in adapters.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    asked = ["--prompt", "What does the frog say?", "--chat", "chatml", "--max-new-tokens", "5"]
    capsys.readouterr()
    answers = []
    for folder in ([FOLDER], [FOLDER, "--adapters", adapters], [merged]):
        assert main(["generate", *map(str, folder), *asked]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1] == answers[2]
    given, tuned = tensors(FOLDER), tensors(merged)
    changed = {
        name.rpartition("layers.")[2].partition(".")[2]
        for name in given
        if given[name] != tuned[name]
    }
    assert given.keys() == tuned.keys() and changed == {
        "self_attn.q_proj.weight",
        "self_attn.v_proj.weight",
        "mlp.down_proj.weight",
    }


@pytest.mark.system
def test_generate_prints_what_the_model_writes(tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("The owl")
    assert main(["generate", str(FOLDER), "--prompt", "The cow says", "--max-new-tokens", "7"]) == 0
    assert capsys.readouterr().out == ' "moo". The cow eats grass\n'
    several = [
        "--prompt",
        "The cow says",
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--max-new-tokens",
        "7",
        "--stop",
        '".',
    ]
    assert main(["generate", str(FOLDER), *several, "--mesh", "data=8"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('> The cow says\n "moo".\n\n> The owl\n')
    ids = spmd.data.Prompts(FOLDER).encode("The cow says")
    assert (
        main(
            ["generate", str(FOLDER), "--tokens", ",".join(map(str, ids)), "--max-new-tokens", "7"]
        )
        == 0
    )
    model = spmd.pretrained.load(FOLDER, dtype="file", progress=False)
    written = spmd.generate(model, [ids], max_new_tokens=7)[0]
    assert capsys.readouterr().out == ",".join(map(str, written)) + "\n"


@pytest.mark.system
def test_generate_chooses_tokens_as_the_folder_asks_and_options_say_otherwise(
    tmp_path, capsys, caplog
):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    asked = {
        "eos_token_id": 0,
        "do_sample": True,
        "temperature": 2.0,
        "top_k": 0,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
    }
    (folder / "generation_config.json").write_text(json.dumps(asked))
    model = spmd.pretrained.load(FOLDER, dtype="file", progress=False)
    options = {"temperature": 2.0, "top_p": 0.9, "repetition_penalty": 1.2}
    others = (
        ([], options),
        (["--temperature", "0"], {"repetition_penalty": 1.2}),
        (["--top-p", "0.5", "--repetition-penalty", "1"], {"temperature": 2.0, "top_p": 0.5}),
        (["--temperature", "0", "--repetition-penalty", "1"], {}),
    )
    written = []
    for more, chosen in others:
        assert (
            main(["generate", str(folder), "--tokens", "5,9,7", "--max-new-tokens", "12", *more])
            == 0
        )
        written.append(capsys.readouterr().out.strip())
        tokens = spmd.generate(model, [[5, 9, 7]], max_new_tokens=12, stop=[0], **chosen)[0]
        assert written[-1] == ",".join(map(str, tokens))
    assert len(set(written)) > 2
    says = (
        "temperature=2.0, top_p=0.9, repetition_penalty=1.2, as "
        f"{folder / 'generation_config.json'} says; options say otherwise."
    )
    assert caplog.messages[0] == says


def bad_line(tmp_path):
    path = lines(tmp_path / "bad.jsonl", [conversation("cow", "moo")] * 3)
    path.write_text(
        path.read_text() + '{"messages": [\n' + json.dumps({"text": "no messages"}) + "\n"
    )
    return ["--data", path]


def copied(tmp_path, without=(), **config):
    """The folder, without some files, with another config."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns(*without))
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, **config}))
    return [folder]


def adapters_file(tmp_path, text):
    (tmp_path / "adapters.toml").write_text(text)
    return ["--adapters", tmp_path / "adapters.toml"]


def joined_kernels(tmp_path):
    """A GPT-2 with this tokenizer, and adapters on queries, which share a tensor with keys and
    values.
    """
    folder = tmp_path / "model"
    shutil.copytree(FOLDER.parent / "gpt2", folder)
    shutil.copy(FOLDER / "tokenizer.json", folder)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "vocab_size": 448}))
    shapes = {name: tensor.shape for name, tensor in open_files(folder).tensors.items()}
    write_file(
        folder / "model.safetensors",
        {
            n: np.zeros((448, 32) if s[0] == 96 and "wte" in n else s, "float32")
            for n, s in shapes.items()
        },
    )
    return [folder, *adapters_file(tmp_path, ADAPTERS)]


def full(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("of an earlier run")
    return ["--out", tmp_path / "full"]


NUMBERS = [
    "--batch-size",
    0,
    "--steps",
    -1,
    "--learning-rate",
    "nan",
    "--save-every",
    5,
    "--eval-every",
    5,
    "--max-new-tokens",
    5,
]
WRONG = {
    "folder_missing": lambda path: ["nowhere"],
    "no_tokenizer": lambda path: copied(path, without=["tokenizer.json"]),
    "no_weights": lambda path: copied(path, without=["model.safetensors"]),
    "unknown_model": lambda path: copied(path, model_type="llamma"),
    "tokenizer_of_another_model": lambda path: copied(path, vocab_size=300),
    "weights_of_another_model": lambda path: copied(path, vocab_size=512),
    "lines_that_are_no_conversations": bad_line,
    "no_data": lambda path: ["--data", path / "nothing-*.jsonl"],
    "length_beyond_positions": lambda path: ["--length", 4096],
    "unknown_layout": lambda path: ["--layout", "fdsp"],
    "mesh_that_does_not_divide": lambda path: ["--mesh", "data=3"],
    "batch_that_does_not_divide": lambda path: ["--batch-size", 12],
    "out_not_empty": full,
    "out_in_the_model": lambda path: [
        *copied(path),
        "--out",
        path / "model/tuned",
        "--checkpoint",
        path / "model",
    ],
    "out_in_the_model_without_checkpoints": lambda path: [
        *copied(path),
        "--out",
        path / "model/tuned",
    ],
    "out_that_is_data": lambda path: [
        "--out",
        path / "chat.jsonl",
        "--checkpoint",
        path / "chat.jsonl/run",
    ],
    "checkpoint_in_out": lambda path: ["--checkpoint", path / "tuned/run"],
    "adapters_alone": lambda path: [
        shutil.copytree(FOLDER.parent / "adapters/llama", path / "model")
    ],
    "layers_of_another_size": lambda path: copied(path, num_hidden_layers=10**9),
    "class_of_another_family": lambda path: copied(path, architectures=["MistralForCausalLM"]),
    "mesh_of_more_devices": lambda path: ["--mesh", "data=16"],
    "on_error": lambda path: ["--on-error", "ignore"],
    "numbers": lambda path: NUMBERS,
    "warmup": lambda path: ["--warmup", 10],
    "prompt": lambda path: ["--sample", "<|im_end|>"],
    "precision": lambda path: ["--precision", "float8"],
    "chat_format": lambda path: ["--chat", "llama3"],
    "no_adapters": lambda path: adapters_file(path, '[train]\ninclude = "**"\n'),
    "adapters_with_other_tables": lambda path: adapters_file(
        path, f'{ADAPTERS}\n[optimizer]\nshard = "data"\n'
    ),
    "adapters_that_match_nothing": lambda path: adapters_file(
        path, ADAPTERS.replace("query", "querry").replace(",value,down", "")
    ),
    "nothing_that_train_names": lambda path: adapters_file(
        path, ADAPTERS.replace("[train]", '[train]\ninclude = "final/**"')
    ),
    "weights_beside_adapters": lambda path: adapters_file(
        path, ADAPTERS.replace("[train]", '[train]\ninclude = "final_norm/**"')
    ),
    "adapters_that_files_cannot_hold": joined_kernels,
    "adapters_twice": lambda path: [
        *adapters_file(path, ADAPTERS),
        "--layout",
        path / "adapters.toml",
    ],
    "merge_of_nothing": lambda path: ["--merge"],
    "an_encoder": lambda path: [shutil.copytree(FOLDER.parent / "bert_classes", path / "model")],
}


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_named_before_weights_are_read(
    name, data, tmp_path, capsys, golden, monkeypatch
):
    monkeypatch.setattr(
        "spmd.pretrained.folders.read_arrays", lambda *_: pytest.fail("weights were read")
    )
    arguments, more = words(data, tmp_path / "tuned"), list(map(str, WRONG[name](tmp_path)))
    if not more[0].startswith("--"):
        arguments[1], more = more[0], more[1:]
    assert main([*arguments, *more]) == 2
    text = capsys.readouterr().err
    for path, short in (
        (tmp_path, "TMP"),
        (FOLDER, "FOLDER"),
        (Path(spmd.__file__).parent, "spmd"),
    ):
        text = text.replace(str(path), short)
    golden(f"finetune_{name}", text.rstrip("\n"))
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "there is no prompt"),
        (["--tokens", "1,x"], '--tokens "1,x"'),
        (["--tokens", "1", "--prompt", "a"], "--tokens beside text"),
        (["--prompt", "a", "--stop", "nope"], '--stop "nope" is no token'),
        (["--prompt-file", "nothing.txt"], "--prompt-file nothing.txt cannot be read"),
        (["--prompt", "a", "--top-k", "3"], "top_k and top_p do nothing at temperature 0"),
        (["--prompt", "a", "--chat", "gemma"], "has no token <bos>"),
        (["--prompt", "a", "--repetition-penalty", "0"], "--repetition-penalty 0.0."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_of_generate_is_named_before_weights_are_read(
    options, message, capsys, monkeypatch
):
    monkeypatch.setattr(
        "spmd.pretrained.folders.read_arrays", lambda *_: pytest.fail("weights were read")
    )
    assert main(["generate", str(FOLDER), *options]) == 2
    assert message in capsys.readouterr().err


def test_generate_with_a_folder_of_adapters_alone(capsys):
    folder = FOLDER.parent / "adapters/llama"
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    text = capsys.readouterr().err
    assert (
        f"{folder} has adapters and no model." in text
        and f"fix: spmd generate MODEL --adapters {folder}" in text
    )


MORE = [
    "--epochs",
    4,
    "--save-every",
    2,
    "--sample",
    "What does the cow say?",
    "--sample-every",
    3,
    "--max-new-tokens",
    4,
]
ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run prints that nothing stops, and the folder that it writes."""
    path = tmp_path_factory.mktemp("undisturbed")
    data = lines(path / "chat.jsonl", CONVERSATIONS)
    return command(words(data, path / "tuned", "--checkpoint", path / "run", *MORE)), path / "tuned"


def stopped(arguments, how):
    """Exit code and errors of a run that is stopped when it has shown what it writes after step 6,
    past the checkpoint of step 4.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "spmd", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=with_devices(),
    )
    try:
        for line in process.stdout:
            if line.startswith("step 6:"):
                break
        process.send_signal(how)
        return process.communicate(timeout=120)[1], process.returncode
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize("how", ENDS, ids=lambda how: how.name)
def test_a_run_that_is_stopped_and_started_again_ends_bit_equal(how, undisturbed, data, tmp_path):
    out, run = tmp_path / "tuned", tmp_path / "run"
    arguments = words(data, out, "--checkpoint", run, *MORE)
    errors, code = stopped(arguments, how)
    assert code == ENDS[how]
    assert not out.exists() and any((run / "checkpoints").iterdir())
    assert ("is not written, the same command resumes" in errors) == (how == signal.SIGINT)
    resumed = command(arguments)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record.get("event") == "resumed"] != []
    shown, tuned = undisturbed
    assert "step 0:" in shown and "step 0:" not in resumed
    assert tensors(tuned) == tensors(out) != tensors(FOLDER)
    assert shown.splitlines()[-2] == resumed.splitlines()[-2]  # the last sample


@pytest.mark.system
def test_a_run_is_resumed_on_fewer_devices(data, tmp_path):
    """Weights of float32, so that what is written is not rounded to the same numbers."""
    wide = spmd.pretrained.save(
        spmd.pretrained.load(FOLDER, progress=False),
        tmp_path / "wide",
        dtype="float32",
        progress=False,
    )
    runs = {}
    for name in ("undisturbed", "resumed"):
        arguments = words(data, tmp_path / name, "--checkpoint", tmp_path / f"run-{name}", *MORE)
        runs[name] = [arguments[0], str(wide), *arguments[2:]]
    shown = command(runs["undisturbed"])
    assert stopped(runs["resumed"], signal.SIGKILL)[1] == -signal.SIGKILL
    resumed = command(runs["resumed"], devices=4)
    assert "resumed from step" in resumed and shown.splitlines()[-2] == resumed.splitlines()[-2]
    given, first, second = (
        {n: np.frombuffer(raw, "float32") for n, raw in tensors(tmp_path / f).items()}
        for f in ("wide", *runs)
    )
    for name, value in first.items():
        assert np.abs(value - given[name]).max() > 1e-3, name
        np.testing.assert_allclose(value, second[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.system
def test_two_processes_write_what_one_does(data, tmp_path):
    more = ["--sample", "What does the cow say?", "--sample-every", 3, "--max-new-tokens", 4]
    one = command(words(data, tmp_path / "one", *more))
    result = launch(
        "--processes", 2, "--simulate", 4, "-m", "spmd", *words(data, tmp_path / "two", *more)
    )
    assert result.code == 0, result.text
    samples = [line for line in one.splitlines() if line.startswith("step ")]
    shown = [
        line.partition("step ")[2]
        for line in result.text.splitlines()
        if "What does the cow say? -> " in line
    ]
    assert len(samples) >= 2 and ["step " + line for line in shown] == samples
    given, first, second = (
        numbers(folder) for folder in (FOLDER, tmp_path / "one", tmp_path / "two")
    )
    for name, value in first.items():
        trained, between = np.abs(value - given[name]).mean(), np.abs(value - second[name]).mean()
        # sums of several processes may have another order
        assert trained > 0 and between < 0.01 * trained, name


def numbers(folder):
    return {
        name: np.frombuffer(raw, jnp.bfloat16).astype("float32")
        for name, raw in tensors(folder).items()
    }
