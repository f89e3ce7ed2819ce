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
# # Layers on different devices
#
# A model that is too deep for one device can be split between its layers. Each device then waits
# for the one before it, and the question is how to keep these waits short. This notebook draws when
# each stage works, and computes the idle time. Then it trains a stack of blocks as a *pipeline*
# under three schedules, and a stack of recurrent layers as a *wavefront*. Both are compared with
# one device.

# %%
import dataclasses

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import spmd
from spmd.nn.schedule import make_schedule

spmd.simulate_devices(8)  # before anything else: JAX counts its devices once
ONE = jax.sharding.Mesh(jax.devices()[:1], ("data",))

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images, labels = (digits.images[order] / 16).astype("float32"), digits.target[order].astype("int32")
train = {"image": images[:1536], "label": labels[:1536]}

# %% [markdown]
# ## Schedules
#
# Four stages, eight microbatches. With `gpipe` all microbatches run forward, then all run backward.
# With `1f1b` a stage runs backward as soon as it can. That takes as long, but keeps few activations
# at any time. A `circular` pipeline has two groups of layers on each stage (stage 0 has the first
# and the fifth eighth of the network), so it fills sooner; its ticks are half as long. Blue is
# forward, orange is backward.

# %% tags=["thumbnail"]
STAGES, PARTS, GROUPS = 4, 8, 2
ways = {
    "gpipe": make_schedule("gpipe", stages=STAGES, microbatches=PARTS),
    "1f1b": make_schedule("1f1b", stages=STAGES, microbatches=PARTS),
    "circular": make_schedule("circular", stages=STAGES, microbatches=PARTS, groups=GROUPS),
}
spmd.viz.schedule(ways)

# %% [markdown]
# `1f1b` takes as many ticks as `gpipe` and keeps the activations of four microbatches instead of
# eight. `circular` takes 38 ticks of half the length, as long as 19 of the others' 22, and sends
# activations twice as often.
#
# With p stages and m microbatches, a stage is idle for p - 1 of m + p - 1 ticks in each direction.
# With g groups, m is replaced by g m. The idle share depends only on these numbers, not on the
# speed of the devices. More microbatches mean less waiting, but smaller matrix products.

# %%
formula = {name: (STAGES - 1) / (one.groups * PARTS + STAGES - 1) for name, one in ways.items()}
for name, one in ways.items():
    print(
        f"{name:10}{one.ticks:3d} ticks  {one.bubble:.1%} idle, by the formula "
        f"{formula[name]:.1%};",
        end=" ",
    )
    print(f"at most {max(one.in_flight)} activations of {one.groups * PARTS} kept")

# %% [markdown]
# ## A pipeline that trains
#
# `spmd.nn.LayerStack` is a stack of equal layers. On one device it is a scan over them; under a
# layout with `[pipeline]` each stage holds its share of the layers. The model's code is the same
# for both. It is trained on one device and under the three schedules; each program takes up to ten
# seconds to compile, and its line is complete when its run is done.


# %%
class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(width, 2 * width, rngs=rngs),
            nnx.Linear(2 * width, width, rngs=rngs),
        )

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Deep(nnx.Module):
    """Eight blocks over 64 pixels, and logits for ten digits."""

    def __init__(self, rngs):
        self.blocks = spmd.nn.LayerStack(spmd.nn.repeat(8, lambda rngs: Block(64, rngs), rngs))
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.blocks(x.reshape(len(x), -1)))


def fit(model, layout, mesh=None):
    return spmd.fit(
        model(nnx.Rngs(0)),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.02),
        layout=layout,
        mesh=mesh,  # None: the layout's own, data=2,stage=4
        batch_size=128,
        steps=16,
        progress=False,
    )


def pipeline_layout(**options):
    """The shipped layout with these options in its [pipeline]."""
    layout = spmd.Layout.load("pipeline")
    return dataclasses.replace(layout, pipeline=dataclasses.replace(layout.pipeline, **options))


def largest_difference(name, reference):
    """Between the losses of two runs, in any step."""
    return np.abs(np.subtract(runs[name].history["loss"], runs[reference].history["loss"])).max()


print("One device:", end=" ")
runs = {"one device": fit(Deep, "data_parallel", ONE)}
first, last = runs["one device"].history["loss"][0], runs["one device"].history["loss"][-1]
print(f"the loss goes from {first:.2f} to {last:.2f}.")
for name, one in ways.items():
    print(f"{name}:", end=" ")
    runs[name] = fit(Deep, pipeline_layout(schedule=name, microbatches=PARTS, groups=one.groups))
    print(
        runs[name].trainer.notes()[-1],
        f"Its losses differ by at most {largest_difference(name, 'one device'):.1e}.",
    )

# %% [markdown]
# A pipeline trains like one device: the losses are the same to rounding, and the programs that ran
# have the ticks that were drawn.
#
# Where the layers are: dim 0 of each parameter of the stack is the layer, and it is sharded over
# `stage`.

# %%
runs["gpipe"].trainer.summary()

# %% [markdown]
# So a device holds two of the eight layers. The head is replicated: each device has all of it.
#
# ## A wavefront
#
# Recurrent layers cannot be sharded along time, since each step needs the one before. But a layer
# need not wait until the layer below has finished: layer 2 can start when layer 1 has done its
# first few steps. `spmd.nn.RNNStack` lets layers work on chunks of time, each one chunk behind the
# layer below. Here a digit is read four pixels at a time, in 16 steps, by four LSTMs.


# %%
class Reader(nnx.Module):
    """Four LSTMs over 16 steps of four pixels; the last state says which digit."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 32, rngs=rngs)
        cells = [nnx.OptimizedLSTMCell(32, 32, rngs=rngs) for _ in range(4)]
        self.stack = spmd.nn.RNNStack(cells, residual_from=1)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.stack(self.first(x.reshape(len(x), 16, 4)))[:, -1])


CHUNK = 2
print("One device:", end=" ")
runs["LSTM, one device"] = fit(Reader, "data_parallel", ONE)
print("trained.\nWavefront:", end=" ")
runs["LSTM, wavefront"] = fit(Reader, pipeline_layout(time_chunk=CHUNK))
print(
    "trained. Its losses differ by at most "
    f"{largest_difference('LSTM, wavefront', 'LSTM, one device'):.1e}"
)
(wave,) = runs["LSTM, wavefront"].trainer.schedules.values()
spmd.viz.schedule({"the forward pass: numbers are chunks of time": wave.forward})

# %% [markdown]
# The wavefront takes 11 ticks of two time steps; one device takes 32. Again the losses are the same
# to rounding.
#
# The chunk length is a trade-off: short chunks fill the stages sooner, but are sent more often.
# `spmd.nn.best_chunk` balances the two and is the default if a layout does not set `time_chunk`.

# %%
for chunk in (1, 2, 4, 8, 16):
    one = make_schedule("gpipe", stages=STAGES, microbatches=16 // chunk)
    mark = "  <- best_chunk" if chunk == spmd.nn.best_chunk(16, STAGES) else ""
    print(
        f"chunks of {chunk:2d}: {one.forward.ticks * chunk:3d} steps of time, 64 on one device; "
        f"{one.bubble:.1%} idle{mark}"
    )

# %% [markdown]
# With chunks of two steps, four layers take 22 steps of time instead of 64. Chunks of one would
# idle less, and send twice as often.
