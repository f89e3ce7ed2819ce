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
# # Plan before you rent
#
# You want to train a GPT on four GPUs that you do not have yet. Does it fit? If not, what would
# make it fit, and what is the fastest way? This notebook starts with a model that does not fit, and
# ends with a layout file that you can commit. It needs no GPU. It compiles the real training step
# for hardware that need not be present, and reads memory, traffic and time from the compiled
# program.
#
# With `pip install '.[gpu-compiler]'` in the checkout the compiler is XLA:GPU itself; without it
# plans are estimates by XLA:CPU, and their first line says so.

# %%
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # plans need no accelerator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmd

spmd.simulate_devices(4)  # to train a few steps at the end, with the best layout
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The model and the target
#
# The model is a decoder of transformer blocks in an `spmd.nn.LayerStack`, which compiles as fast
# for 24 layers as for 4. Its code does not mention devices. The target is one node of four L4s, of
# 24 GB each. A target of your own is a TOML file.

# %%
VOCAB, WIDTH, DEPTH, HEADS, LENGTH, ROWS = 32_000, 1024, 24, 16, 1024, 64


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.heads = heads
        self.before, self.between = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.mix, self.out = (
            nnx.Linear(width, 3 * width, rngs=rngs),
            nnx.Linear(width, width, rngs=rngs),
        )
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x):
        rows, length, width = x.shape
        q, k, v = jnp.split(
            self.mix(self.before(x)).reshape(rows, length, 3 * self.heads, -1), 3, axis=2
        )
        x = x + self.out(spmd.nn.attention(q, k, v, causal=True).reshape(rows, length, width))
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class GPT(nnx.Module):
    def __init__(self, vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, length=LENGTH, *, rngs):
        self.tokens, self.places = (
            nnx.Embed(vocab, width, rngs=rngs),
            nnx.Embed(length, width, rngs=rngs),
        )
        self.blocks = spmd.nn.LayerStack(
            spmd.nn.repeat(depth, lambda rngs: Block(width, heads, rngs), rngs)
        )
        self.norm, self.head = (
            nnx.RMSNorm(width, rngs=rngs),
            nnx.Linear(width, vocab, use_bias=False, rngs=rngs),
        )

    def __call__(self, tokens):
        return self.head(
            self.norm(self.blocks(self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))))
        )


def make_model():
    return GPT(rngs=nnx.Rngs(0))


tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")  # shapes are enough: nothing is allocated
batch = {"tokens": tokens, "targets": tokens}
training = {
    "loss": spmd.losses.cross_entropy,
    "optimizer": optax.adamw(3e-4),
    "precision": "bfloat16",
}

target = "4xl4"

leaves = jax.tree.leaves(nnx.eval_shape(make_model))
print(f"{sum(np.prod(leaf.shape) for leaf in leaves) / 1e6:.1f} million parameters")

# %% [markdown]
# ## It does not fit
#
# Data-parallel training keeps all parameters and both of Adam's moments on every device. A notebook
# shows the plan as a page; a terminal shows it as text, and `plan.save("plan.html")` writes the
# page to a file. The compiler takes up to half a minute.

# %%
first = spmd.plan(make_model, batch, target=target, layout="data_parallel", **training)
first

# %% [markdown]
# It would need almost twice the memory of an L4, most of it for activations.
#
# ## What would make it fit
#
# Fixes are tried in a fixed order, each on top of the earlier ones that helped, and each is planned
# before it is shown: more recomputation, more microbatches, optimizer state sharded over the
# workers, then parameters, then more devices. Each is a program, so this takes up to a minute.

# %%
fixes = first.fixes(say=print)
for fix in fixes:
    print(fix)

# %% [markdown]
# It fits, in less than half of the memory, when only the results of matrix products are kept
# (`dots`) and the rest is computed again in the backward pass.
#
# ## The fastest that fits
#
# A search tries layouts, meshes, reductions, microbatches and rematerialization. Closed-form bounds
# and earlier plans rule most of them out; the promising ones are compiled, with a line for each.
# Every rejected candidate has a reason.

# %% tags=["thumbnail"]
names = ["data_parallel", "zero1", "fsdp", "pipeline"]
search = spmd.search(
    make_model, batch, target=target, candidates=names, compiles=16, say=print, **training
)
search

# %% [markdown]
# The first plan beside the best one:

# %%
best = search.best
spmd.compare(first, best)

# %% [markdown]
# Sharded over the four devices (`fsdp`), the step needs 0.28 of the memory of the first plan and
# 0.4 of its time, with the same recomputation as in the fix above. With that fix alone,
# data-parallel training takes 1.2 times as long.
#
# How a parameter of the best plan is sharded, and which rule chose that:

# %%
print(best.explain("blocks/layers/up/kernel"))
best.drawing("blocks/layers/up/kernel")

# %% [markdown]
# ## When does adding a GPU stop helping?
#
# The curves show the predicted throughput of data-parallel training for the same batch, by number
# of devices and gradient codec. The mark shows where doubling the devices gains less than 1.1x. The
# lines coincide as long as communication overlaps with computation.

# %%
curve = spmd.saturation(first)
curve

# %% [markdown]
# For 64 rows there is no such mark: each doubling pays, up to one row for each of 64 devices. From
# 16 devices on, smaller gradients begin to pay too.
#
# ## A layout to commit
#
# The best layout is a TOML file like those shipped with the library, complete with its mesh.

# %%
path = search.save(folder / "my_gpt.toml")
print(path.read_text())

# %% [markdown]
# Training uses the file. Here a small model of the same kind trains a few steps with it on four
# simulated CPU devices; on the rented machines it is the same call with the real model.

# %%
rng = np.random.default_rng(0)
text = rng.integers(0, 256, (256, 65)) % 7  # seven letters
data = {"tokens": text[:, :-1].astype(np.int32), "targets": text[:, 1:].astype(np.int32)}
config = best.program.placed.config
result = spmd.fit(
    lambda: GPT(256, 64, 4, 4, 64, rngs=nnx.Rngs(0)),
    data,
    layout=path,
    loss=spmd.losses.cross_entropy,
    optimizer=optax.adamw(3e-3),
    precision=config.precision,
    accumulate=config.accumulate,
    batch_size=ROWS,
    steps=24,
)
result
