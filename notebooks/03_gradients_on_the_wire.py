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
# # Gradients on the wire
#
# Data-parallel training sends every gradient to every worker, and on a slow network a step waits
# for that. A *codec* sends less: rounded numbers, only the largest numbers, or two thin matrices in
# place of a wide one. This notebook trains the same network on real digits with several codecs, and
# compares three things: the bytes sent, the error of the mean gradient, and its effect on the loss.

# %%
import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import Markdown
from sklearn.datasets import load_digits

import spmd

spmd.simulate_devices(8)  # before anything else: JAX counts its devices once

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels, labels = (digits.data[order] / 16).astype("float32"), digits.target[order].astype("int32")
train = {"image": pixels[:1536], "label": labels[:1536]}


class MLP(nnx.Module):
    """64 pixels, 256 hidden units, ten digits."""

    def __init__(self, rngs):
        self.hidden, self.head = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


# %% [markdown]
# ## Six ways to send a gradient
#
# `top_k` and `power_sgd` leave most of a gradient out. With *error feedback*, each worker keeps
# what was left out and adds it to its next gradient, so that it arrives late instead of never. The
# library rejects such a codec without feedback unless the layout sets `allow_biased`, as the fifth
# run does, to show what happens. `diagnostics` measures the error of each step's mean. Each run
# takes a few seconds, most of them to compile, and its line is complete when it is done.

# %%
TOP = {"keep": 0.02}
WAYS = {
    "exact": spmd.Gradients("all_reduce"),
    "bfloat16": spmd.Gradients("all_reduce", "bfloat16", diagnostics=True),
    "int8": spmd.Gradients("all_reduce", "int8", error_feedback=True, diagnostics=True),
    "top 2 %": spmd.Gradients("all_reduce", "top_k", TOP, error_feedback=True, diagnostics=True),
    "top 2 %, rest lost": spmd.Gradients(
        "all_reduce", "top_k", TOP, allow_biased=True, diagnostics=True
    ),
    "power_sgd": spmd.Gradients(
        "all_reduce", "power_sgd", {"rank": 2}, error_feedback=True, diagnostics=True
    ),
}


def fit(gradients):
    return spmd.fit(
        MLP(nnx.Rngs(0)),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.2),
        mesh="data=8",
        layout=dataclasses.replace(spmd.Layout.load("data_parallel"), gradients=gradients),
        batch_size=64,
        epochs=4,
        progress=False,
    )


runs = {}
for name, gradients in WAYS.items():
    print(f"{name:20}", end="")
    runs[name] = fit(gradients)
    print(f"loss from {runs[name].history['loss'][0]:.2f} to {runs[name].history['loss'][-1]:.2f}")

# %% [markdown]
# ## Bytes sent
#
# Below are the collectives of one step with `int8`. Each worker sums one part of the gradient. It
# receives this part from every other worker, as one byte per number and a scale per block, and
# sends the mean back in the same form. Gradients that would not get smaller are sent exactly. The
# lines `measure` are the cost of `diagnostics`; without it they are absent.

# %%
print(runs["int8"].trainer.wire)
print(*(note for note in runs["int8"].trainer.notes() if note.startswith("gradients are sent")))

# %% [markdown]
# ## Side by side
#
# Bytes are those that one device sends in a step. The error is |decoded mean - exact mean| / |exact
# mean| of the codec's input, averaged over steps. With feedback, this input is the gradient plus
# the residual, which may be the larger part, so an error near 1 is not necessarily bad.

# %%
sent = {name: run.trainer.wire.bytes(where="reduce_gradients") for name, run in runs.items()}
error = {
    name: float(np.mean(run.history["mean_error"])) if name != "exact" else 0.0
    for name, run in runs.items()
}
loss = {name: np.array(run.history["loss"]) for name, run in runs.items()}
last = {name: loss[name][-24:].mean() for name in WAYS}  # of the last epoch

table = [
    "| codec | bytes | of exact | error of the mean | loss, last epoch | of exact |",
    "|:--|--:|--:|--:|--:|--:|",
]
for name in WAYS:
    share, worse = sent[name] / sent["exact"], last[name] / last["exact"]
    table.append(
        f"| {name} | {sent[name]:,} | {share:.1%} | {error[name]:.2g} | {last[name]:.3f} | "
        f"{worse:.2f} |"
    )
Markdown("\n".join(table))

# %% [markdown]
# Rounding costs nothing here: `bfloat16` sends half of the bytes, `int8` a quarter, and the loss is
# that of exact gradients. The largest 2 % of the numbers are 4 % of the bytes, since each is sent
# with its index. With feedback, training ends at 1.05 times the loss; without it, the same bytes
# end at three times the loss: what is never among the largest is never sent. `power_sgd` sends 7 %
# of the bytes, although these matrices are not large, for 1.02 times the loss.

# %% tags=["thumbnail"]
COLOURS = dict(
    zip(WAYS, ("#b0b0b0", "#3f74d1", "#2a9d6f", "#d0692f", "#d0692f", "#9a5bc4"), strict=True)
)
WINDOW = 12
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
for name, curve in loss.items():
    line = {
        "color": COLOURS[name],
        "linestyle": ":" if "lost" in name else "-",
        "linewidth": 4 if name == "exact" else 1.6,
    }
    smooth = np.convolve(curve, np.full(WINDOW, 1 / WINDOW), mode="valid")
    steps = np.arange(WINDOW, len(curve) + 1)
    left.plot(steps, smooth, label=name, **line)
    right.plot(steps * sent[name] / 1e6, smooth, **line)
left.set(yscale="log", xlabel="step", ylabel=f"loss, mean of {WINDOW} steps")
left.set_yticks([0.3, 0.5, 1, 2], ["0.3", "0.5", "1", "2"])
left.minorticks_off()
right.set(xscale="log", xlabel="megabytes sent by one device")
right.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
right.minorticks_off()
left.legend()
plt.show()

# %% [markdown]
# Both panels show the same curves: over steps, and over bytes, which corresponds to time on a slow
# network.
#
# ## The residual
#
# The residual is what a worker has not sent yet: late, but not lost. The worker keeps it; it has
# the size of the gradient.

# %%
print(
    "norm of the residuals after  " + "  ".join(f"{step:5d}" for step in (1, 12, 48, 96)) + " steps"
)
for name in ("int8", "top 2 %", "power_sgd"):
    norms = runs[name].history["residual_norm"]
    print(f"{name:29}" + "  ".join(f"{norms[step - 1]:5.2f}" for step in (1, 12, 48, 96)))

# %% [markdown]
# Feedback catches up. Under `top 2 %` the residuals grow while gradients are large, to a norm of
# 11, and are half of that at the end, when gradients have become small. `int8` loses so little that
# there is never much to send later.
