# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -all,jupytext,kernelspec
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tune an open model
#
# From a folder as models are published, to samples, to a folder that other tools read. The model
# here is tiny (64,000 parameters, two layers of the kind that Llama has) and has read a few
# sentences about animals. It shall learn to answer questions. On a machine with GPUs, leave out
# `simulate_devices`, and name the folder of a real model: nothing else changes.
#
# The tiny model's folder is in a checkout of the repository. If you have downloaded this notebook
# alone, first save its five files (135 KB) in a folder `animals` beside the notebook:
# [config.json](../tests/pretrained/fixtures/finetune/config.json),
# [generation_config.json](../tests/pretrained/fixtures/finetune/generation_config.json),
# [model.safetensors](../tests/pretrained/fixtures/finetune/model.safetensors),
# [tokenizer.json](../tests/pretrained/fixtures/finetune/tokenizer.json),
# [tokenizer_config.json](../tests/pretrained/fixtures/finetune/tokenizer_config.json).

# %%
import json
import tempfile
from pathlib import Path

import optax

import spmd

spmd.simulate_devices(8)  # before anything else: JAX counts its devices once
checkout = Path(spmd.__file__).parents[1] / "tests" / "pretrained" / "fixtures" / "finetune"
folder = checkout if checkout.is_dir() else Path("animals")
work = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A folder
#
# A config, weights and a tokenizer. `load` reads each weight straight to the devices that keep it,
# as the layout says: under `fsdp` every device has an eighth of each matrix.

# %%
for path in sorted(folder.iterdir()):
    print(f"{path.stat().st_size:>8,} bytes  {path.name}")
model = spmd.pretrained.load(folder, mesh="data=8", layout="fsdp", progress=False)
print(
    model.config.width, "wide,", len(model.config.layers), "layers,", model.pretrained_origin.report
)

# %% [markdown]
# What does it know? `spmd.data.Prompts` goes from text to token ids and back, by the files of the
# folder.

# %%
text = spmd.data.Prompts(folder)
prompts = ["The cow", 'The owl says "', "What does the duck say?"]
for prompt, tokens in zip(
    prompts,
    spmd.generate(model, [text.encode(prompt) for prompt in prompts], max_new_tokens=16),
    strict=True,
):
    print(f"{prompt} -> {text.decode(tokens)}")

# %% [markdown]
# It knows animals, and not what a question is.
#
# ## Questions and answers
#
# Conversations, one in each line of a file. `spmd.data.text` tokenizes them, packs several into a
# row so that they do not see each other, and with `loss_on="answers"` only answers count in the
# loss.

# %%
sounds = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "owl": "hoot",
    "frog": "croak",
}
with open(work / "questions.jsonl", "w") as file:
    for animal, sound in sounds.items():
        question = {"role": "user", "content": f"What does the {animal} say?"}
        print(
            json.dumps({"messages": [question, {"role": "assistant", "content": sound}]}), file=file
        )
data = spmd.data.text(
    work / "questions.jsonl",
    tokenizer=folder,
    length=32,
    batch_size=8,
    chat="chatml",
    loss_on="answers",
)
data

# %% [markdown]
# ## Training
#
# `fit` takes the loaded model as it lies on the devices. `Samples` lets it write on the way,
# without a change to training.

# %% tags=["thumbnail"]
samples = spmd.callbacks.Samples(
    ["What does the cow say?"], every=20, max_new_tokens=12, tokenizer=folder, chat="chatml"
)
steps = 100
result = spmd.fit(
    model,
    data,
    loss=spmd.losses.next_token,
    optimizer=optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 5, steps)),
    mesh="data=8",
    layout="fsdp",
    steps=steps,
    callbacks=[samples],
)
result

# %% [markdown]
# ## A folder again
#
# `save` writes the names, shapes and dtypes of the folder that was read, with its config and
# tokenizer: what reads the one reads the other. Here, `load`, on one device.

# %%
tuned = spmd.pretrained.save(result, work / "tuned", progress=False)
again = spmd.pretrained.load(tuned, progress=False)
chat = spmd.data.Prompts(tuned, chat="chatml")
questions = [chat.encode(f"What does the {animal} say?") for animal in sounds]
answers = [
    chat.decode(tokens)
    for tokens in spmd.generate(again, questions, max_new_tokens=12, stop=chat.stop)
]
for animal, answer in zip(sounds, answers, strict=True):
    print(f"{animal:>6}: {answer}")

# %% [markdown]
# It did not answer before, and does now: the folder that was written, read again on one device, has
# learnt all eight sounds.
#
# The same without Python:
#
#     spmd finetune FOLDER --data questions.jsonl --chat chatml --loss-on answers --length 32
#     --steps 100 --learning-rate 3e-3 --out tuned spmd generate tuned --chat chatml --prompt "What
#     does the cow say?"
