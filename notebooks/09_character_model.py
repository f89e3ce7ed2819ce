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
# # A character model, its layers on four devices
#
# Four LSTM layers learn to predict the next character of a text. The network is trained twice:
#
# - on one device, written in plain Flax and trained by a plain loop, without anything of spmd;
# - on four devices, by `spmd.fit` under the layout `pipeline`, with one layer on each device.
#
# Both have the same initial weights and the same batches, so they must have the same loss. Tables
# of counts and a compressor show how good that loss is. Each training takes a minute or two.

# %%
import bz2
import collections
import math
from pydoc_data.topics import topics

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import spmd

spmd.simulate_devices(4)  # before anything else: JAX counts its devices once

# %% [markdown]
# ## A text that is already here
#
# Python ships the text of its `help()`, so there is nothing to download. Many of its topics repeat
# paragraphs of others; each paragraph is kept once, so that the end of the text does not repeat its
# beginning. The last tenth is held out: it is for testing only. The rest is split into rows of 128
# characters, and a batch is 16 rows drawn at random.

# %%
LENGTH, ROWS, STEPS = 128, 16, 300
SYMBOLS = 128  # ASCII

paragraphs = "\n\n".join(topics.values()).split("\n\n")
text = "\n\n".join(dict.fromkeys(paragraphs)).encode("ascii", "replace")
boundary = len(text) * 9 // 10
train_text, held_out_text = text[:boundary], text[boundary:]


def make_rows(text):
    """Rows of characters, and of the character after each."""
    codes = np.frombuffer(text, np.uint8).astype(np.int32)
    count = (len(codes) - 1) // LENGTH
    tokens = codes[: count * LENGTH].reshape(count, LENGTH)
    targets = codes[1 : count * LENGTH + 1].reshape(count, LENGTH)
    return {"tokens": tokens, "targets": targets}


train, held_out = make_rows(train_text), make_rows(held_out_text)
random = np.random.default_rng(0)
batches = []
for _ in range(STEPS):
    drawn = random.choice(len(train["tokens"]), ROWS, replace=False)
    batches.append({name: array[drawn] for name, array in train.items()})

print(f"{len(train_text):,} characters to learn from, {len(held_out_text):,} held out")
print(f"{STEPS} batches: {STEPS * ROWS / len(train['tokens']):.1f} times the text")

# %% [markdown]
# ## Two yardsticks
#
# **Counts.** A table of order n counts which character follows which n characters. A context that
# is rare or new is mixed with the shorter ones (Witten and Bell, 1991).
#
# **A compressor.** `bz2` packs the text to learn from alone, and then all of the text. The
# difference is what the held-out part costs a program that has read the rest.
#
# Both are measured in bits per character of the held-out text.

# %%
ORDERS = range(1, 7)

followers = collections.defaultdict(collections.Counter)
for position, character in enumerate(train_text):
    for order in range(min(max(ORDERS), position) + 1):
        followers[train_text[position - order : position]][character] += 1


def bits_by_counts(longest):
    """Bits per character of the held-out text, by contexts of up to `longest` characters."""
    bits = 0.0
    for position, character in enumerate(held_out_text):
        probability = 1 / SYMBOLS
        for order in range(min(longest, position) + 1):
            counts = followers.get(held_out_text[position - order : position])
            if counts:
                total = counts.total() + len(counts)
                probability = (counts[character] + len(counts) * probability) / total
        bits -= math.log2(probability)
    return bits / len(held_out_text)


yardsticks = {f"counts, order {order}": bits_by_counts(order) for order in ORDERS}
packed_bytes = len(bz2.compress(text)) - len(bz2.compress(train_text))
yardsticks["bz2"] = 8 * packed_bytes / len(held_out_text)
for name, bits in yardsticks.items():
    print(f"{name:16} {bits:.3f} bits per character")

# %% [markdown]
# ## The known loss: plain Flax, one device
#
# An embedding, four LSTMs, and logits for the next character. From the second LSTM on, a layer adds
# its input to its output. The loop is written by hand.

# %%
WIDTH, LAYERS = 128, 4


def make_parts(rngs):
    """The parts of both models: the same seed, the same initial weights."""
    embed = nnx.Embed(SYMBOLS, WIDTH, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
    cells = [nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)]
    head = nnx.Linear(WIDTH, SYMBOLS, rngs=rngs)
    return embed, cells, head


def make_optimizer():
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, STEPS // 20, STEPS)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


class PlainModel(nnx.Module):
    def __init__(self, rngs):
        self.embed, cells, self.head = make_parts(rngs)
        self.layers = nnx.List([nnx.RNN(cell, rngs=rngs) for cell in cells])

    def __call__(self, tokens):
        first, *others = self.layers
        x = first(self.embed(tokens))
        for layer in others:
            x = x + layer(x)
        return self.head(x)


@nnx.jit
def mean_loss(model, batch):
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@nnx.jit
def update(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(mean_loss)(model, batch)
    optimizer.update(model, gradients)
    return loss


plain = PlainModel(nnx.Rngs(0))
optimizer = nnx.Optimizer(plain, make_optimizer(), wrt=nnx.Param)
loss = {"one device": np.array([update(plain, optimizer, batch) for batch in batches])}
for step in (1, STEPS // 4, STEPS):
    print(f"step {step:3d}: {loss['one device'][step - 1] / math.log(2):.2f} bits per character")

# %% [markdown]
# ## The same network over four devices
#
# `spmd.nn.RNNStack` is a stack of recurrent layers. It is the only difference between the two
# models, and it says nothing about devices. The layout `pipeline` does: its mesh has four stages,
# and each stage holds a fourth of the layers of every stack.


# %%
class CharacterModel(nnx.Module):
    def __init__(self, rngs):
        self.embed, cells, self.head = make_parts(rngs)
        self.stack = spmd.nn.RNNStack(cells, residual_from=1)

    def __call__(self, tokens):
        return self.head(self.stack(self.embed(tokens)))


result = spmd.fit(
    CharacterModel(nnx.Rngs(0)),
    batches,
    loss=spmd.losses.cross_entropy,
    optimizer=make_optimizer(),
    layout="pipeline",
    steps=STEPS,
    progress=False,
)
loss["four devices"] = np.array(result.history["loss"])
print(*result.trainer.notes(), sep="\n")
result.trainer.summary()

# %% [markdown]
# ## The wavefront
#
# An LSTM needs the step before, so it cannot be sharded along time. But a layer need not wait until
# the layer below has read the entire row. It starts when the first chunk of time is done, and is
# then always one chunk behind. This is the forward pass of the program that ran; the backward pass
# goes from the last layer and chunk to the first.

# %%
(wave,) = result.trainer.schedules.values()
chunks = wave.forward.microbatches
print(f"Four devices take {wave.forward.ticks} ticks for {chunks} chunks of time.", end=" ")
print(f"One device, one layer after the other, takes {chunks * LAYERS}.")
spmd.viz.schedule({"the forward pass: numbers are chunks of time": wave.forward})

# %% [markdown]
# The four devices are simulated: they share the processor that one device uses alone. So this
# notebook shows which device holds which layer, when each works, and that the loss is the same. It
# does not show speed. That takes four real devices.
#
# ## Two curves, one loss
#
# The loss of both runs in every step, and the difference between the two, in nats.

# %% tags=["thumbnail"]
bits_of = {name: losses / math.log(2) for name, losses in loss.items()}
difference = np.abs(loss["four devices"] - loss["one device"])
figure, (curves, gap) = plt.subplots(1, 2, figsize=(9, 3.2))
curves.plot(bits_of["one device"], color="#9db8e6", linewidth=4, label="one device, plain Flax")
curves.plot(bits_of["four devices"], color="#c4571f", linewidth=1, label="four devices, spmd")
curves.set(xlabel="step", ylabel="loss, bits per character")
curves.legend()
gap.plot(difference, color="#c4571f", linewidth=1)
gap.set(xlabel="step", ylabel="difference of the losses", yscale="log")
plt.show()
for steps in (1, 10, STEPS // 4, STEPS):
    print(f"largest difference in {steps:3d} steps: {difference[:steps].max():.1e}")

# %% [markdown]
# The curves lie on each other. Up to step 75 the losses differ by about a millionth, as sums in
# float32 do that are added in different orders. Later the difference grows to about a thousandth,
# since each step starts from weights that differ a little more, and there it stays. That is too
# small to be seen in the left picture.
#
# ## The known loss, on text that neither has read
#
# Both networks beside the yardsticks, best first. A row of the networks begins without memory of
# the row before; counts and `bz2` know all the text before a character.

# %%
scores = dict(yardsticks)
scores["one device, plain Flax"] = float(mean_loss(plain, held_out)) / math.log(2)
scores["four devices, spmd"] = result.evaluate(held_out)["loss"] / math.log(2)
for name in sorted(scores, key=scores.get):
    print(f"{name:24} {scores[name]:.4f} bits per character")

# %% [markdown]
# Both networks are below all tables of counts, and their own difference is small beside the
# distance to the best table. `bz2` is better still: it finds long phrases again that are anywhere
# in the text, and the networks have read the text less than twice.
#
# ## What it writes
#
# The weights of the four devices, on one: the model is called as before. Each character is drawn
# from the model's probabilities, and is the next input.

# %%
TEMPERATURE = 0.8  # below 1: likely characters become more likely

graph, weights = nnx.split(result.model)
weights = jax.device_get(weights)


@jax.jit
def write(weights, prompt, keys):
    model = nnx.merge(graph, weights)

    def write_character(memory, key):
        logits, carry = memory
        character = jax.random.categorical(key, logits / TEMPERATURE)
        y, carry = model.stack(model.embed(character)[:, None], initial=carry, return_carry=True)
        return (model.head(y[:, -1]), carry), character

    y, carry = model.stack(model.embed(prompt), return_carry=True)
    _, characters = jax.lax.scan(write_character, (model.head(y[:, -1]), carry), keys)
    return characters[:, 0]


prompt = b'The "with" statement'
codes = np.frombuffer(prompt, np.uint8).astype(np.int32)[None]
characters = write(weights, codes, jax.random.split(jax.random.key(0), 600))
print(prompt.decode() + bytes(characters.tolist()).decode())

# %% [markdown]
# Quotes, indents and most words are those of the documentation. The sentences mean nothing.
