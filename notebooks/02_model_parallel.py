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
# A model that is too deep for one device can be split between its layers. Each device then waits for the one before it, and the question
# is how to keep these waits short. This notebook draws when each stage works, and computes the idle time. Then it trains a stack of
# blocks as a *pipeline* under three schedules, and a stack of recurrent layers as a *wavefront*. Both are compared with one device.

# %%
import dataclasses

import jax
import numpy as np
import optax
from flax import nnx
from IPython.display import Markdown
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
# Four stages, eight microbatches. With `gpipe` all microbatches run forward, then all run backward. With `1f1b` a stage runs backward as
# soon as it can. That takes as long, but keeps few activations at any time. A `circular` pipeline has two groups of layers on each stage
# (stage 0 has the first and the fifth eighth of the network), so it fills sooner; its ticks are half as long. Blue is forward, orange is
# backward.

# %%
STAGES, PARTS, GROUPS = 4, 8, 2
ways = {
    "gpipe": make_schedule("gpipe", stages=STAGES, microbatches=PARTS),
    "1f1b": make_schedule("1f1b", stages=STAGES, microbatches=PARTS),
    "circular": make_schedule("circular", stages=STAGES, microbatches=PARTS, groups=GROUPS),
}
spmd.viz.schedule(ways)

# %% [markdown]
# With p stages and m microbatches, a stage is idle for p - 1 of m + p - 1 ticks in each direction. With g groups, m is replaced by g m.
# The idle share depends only on these numbers, not on the speed of the devices. More microbatches mean less waiting, but smaller
# matrix products.

# %%
formula = {name: (STAGES - 1) / (one.groups * PARTS + STAGES - 1) for name, one in ways.items()}
for name, one in ways.items():
    print(f"{name:10}{one.ticks:3d} ticks  {one.bubble:.1%} idle, by the formula {formula[name]:.1%};", end=" ")
    print(f"at most {max(one.in_flight)} activations of {one.groups * PARTS} kept")

# %% [markdown]
# ## A pipeline that trains
#
# `spmd.nn.LayerStack` is a stack of equal layers. On one device it is a scan over them; under a layout with `[pipeline]` each stage holds
# its share of the layers. The model's code is the same for both.


# %%
class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

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


runs = {"one device": fit(Deep, "data_parallel", ONE)}
for name, one in ways.items():
    runs[name] = fit(Deep, pipeline_layout(schedule=name, microbatches=PARTS, groups=one.groups))
    print(runs[name].trainer.notes()[-1])

# %% [markdown]
# Where the layers are: dim 0 of each parameter of the stack is the layer, and it is sharded over `stage`.

# %%
print(runs["gpipe"].trainer.summary())

# %% [markdown]
# ## A wavefront
#
# Recurrent layers cannot be sharded along time, since each step needs the one before. But a layer need not wait until the layer below has
# finished: layer 2 can start when layer 1 has done its first few steps. `spmd.nn.RNNStack` lets layers work on chunks of time, each one
# chunk behind the layer below. Here a digit is read four pixels at a time, in 16 steps, by four LSTMs.


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
runs["LSTM, one device"] = fit(Reader, "data_parallel", ONE)
runs["LSTM, wavefront"] = fit(Reader, pipeline_layout(time_chunk=CHUNK))
(wave,) = runs["LSTM, wavefront"].trainer.schedules.values()
print(wave.forward)
spmd.viz.schedule({"the forward pass: numbers are chunks of time": wave.forward})

# %% [markdown]
# The chunk length is a trade-off: short chunks fill the stages sooner, but are sent more often. `spmd.nn.best_chunk` balances the two and
# is the default if a layout does not set `time_chunk`.

# %%
for chunk in (1, 2, 4, 8, 16):
    one = make_schedule("gpipe", stages=STAGES, microbatches=16 // chunk)
    mark = "  <- best_chunk" if chunk == spmd.nn.best_chunk(16, STAGES) else ""
    print(f"chunks of {chunk:2d}: {one.forward.ticks * chunk:3d} steps of time, 64 on one device; {one.bubble:.1%} idle{mark}")

# %% [markdown]
# ## Conclusions
#
# Each sentence below is computed from the numbers above and says whether this run confirms it.


# %%
def verdict(holds, sentence):
    return f"- {'**Borne out.**' if holds else '**Not borne out by this run.**'} {sentence}"


loss = {name: np.array(run.history["loss"]) for name, run in runs.items()}
difference = {name: abs(loss[name] - loss["one device"]).max() for name in ways}
behind = abs(loss["LSTM, wavefront"] - loss["LSTM, one device"]).max()
ran = {name: next(iter(runs[name].trainer.schedules.values())) for name in ways}
kept = {name: max(one.in_flight) for name, one in ran.items()}
kernel = runs["gpipe"].state.params["blocks"]["layers"]["up"]["kernel"]
share = np.prod(kernel.sharding.shard_shape(kernel.shape)) / kernel.size
claims = [
    (
        all(abs(ran[name].bubble - formula[name]) < 1e-9 for name in ways),
        "The programs that ran have the idle share that the formula gives: "
        f"{', '.join(f'{name} {one.bubble:.1%}' for name, one in ran.items())}.",
    ),
    (
        max(difference.values()) < 1e-4 and loss["gpipe"][-4:].mean() < loss["gpipe"][:4].mean(),
        f"A pipeline trains like one device: over {len(loss['gpipe'])} steps, from {loss['gpipe'][0]:.2f} to "
        f"{loss['gpipe'][-1]:.2f}, the losses differ by at most "
        f"{', '.join(f'{value:.1e} ({name})' for name, value in difference.items())}.",
    ),
    (
        share == 1 / STAGES,
        f"A device holds {share:.0%} of the stack's parameters.",
    ),
    (
        kept["1f1b"] == STAGES < kept["gpipe"] and ran["1f1b"].ticks == ran["gpipe"].ticks,
        f"`1f1b` takes the {ran['1f1b'].ticks} ticks of `gpipe` and keeps {kept['1f1b']} microbatches' activations instead of "
        f"{kept['gpipe']}.",
    ),
    (
        ran["circular"].ticks < GROUPS * ran["gpipe"].ticks and ran["circular"].bubble < ran["gpipe"].bubble,
        f"`circular` takes {ran['circular'].ticks} ticks of half the length: as long as {ran['circular'].ticks / GROUPS:g} of "
        f"`gpipe`'s, which takes {ran['gpipe'].ticks}. It sends activations twice as often.",
    ),
    (
        behind < 1e-4 and wave.forward.ticks == 16 // CHUNK + STAGES - 1,
        f"The wavefront takes {wave.forward.ticks} ticks of {CHUNK} steps where one device takes {4 * 16 // CHUNK}, and its losses "
        f"differ from those of one device by at most {behind:.1e}.",
    ),
]
Markdown("\n".join(verdict(*claim) for claim in claims))
