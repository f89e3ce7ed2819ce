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
# # A sweep, and an ensemble of three networks
#
# Which learning rate, and how wide? `spmd.sweep` trains many small networks at once: those with equal shapes in one compiled
# program, sharded over the devices. The best of them then form an ensemble, and finally the worse ones are stopped early.

# %%
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import Markdown, display
from sklearn.datasets import load_digits

import spmd

spmd.simulate_devices(8)  # before anything else: JAX counts its devices once

# %% [markdown]
# ## Data and a model
#
# 1,797 digits of 8x8 pixels, in three parts: for training, for selection, and for testing. The model's constructor takes the
# hyperparameters of the model; the optimizer's takes the rest.

# %%
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels, labels = (digits.data[order] / 16).astype("float32"), digits.target[order].astype("int32")
part = lambda begin, end: {"x": pixels[begin:end], "y": labels[begin:end]}
train, choose, judge = part(0, 1024), part(1024, 1408), part(1408, 1797)


class MLP(nnx.Module):
    """64 pixels, `width` hidden units, ten digits."""

    def __init__(self, width, seed):
        rngs = nnx.Rngs(seed)
        self.up, self.out = nnx.Linear(64, width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.up(x)))


# %% [markdown]
# ## Sixteen networks
#
# Learning rates are sampled log-uniformly, and each network has its own seed. A learning rate is an argument of the
# compiled program, but a width is part of it, so there is one program per width.


# %%
def sweep(**options):
    return spmd.sweep(
        MLP,
        train,
        space={"learning_rate": spmd.log_uniform(1e-4, 3e-1), "width": [16, 64], "seed": range(1000)},
        optimizer=lambda learning_rate: optax.adam(learning_rate),
        loss=spmd.losses.cross_entropy,
        metrics={"accuracy": spmd.metrics.accuracy},
        trials=16,
        batch_size=64,
        eval_data=choose,
        progress=False,
        **options,
    )


found = sweep(epochs=5)
print(f"{len(found.trials)} networks, {found.programs} compiled programs, 8 devices")
display(found)

# %% [markdown]
# The best three, and their learning curves:

# %%
for tried in found.best:
    print("trial {}: learning rate {learning_rate:.2g}, width {width}".format(tried.number, **tried.values))
    display(tried.history)

# %% [markdown]
# All sixteen networks, by learning rate:

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "figure.dpi": 110})
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for width, colour in ((16, "#d0692f"), (64, "#3f74d1")):
    tried = [one for one in found.trials if one.values["width"] == width]
    rates, scores = [one.values["learning_rate"] for one in tried], [one.score for one in tried]
    axes.plot(rates, scores, "o", color=colour, label=f"width {width}")
axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss on digits to choose by")
axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
axes.minorticks_off()
axes.legend()
plt.show()

# %% [markdown]
# ## An ensemble of three
#
# `found.ensemble()` combines the best three: the mean of their probabilities, computed in one program. It is evaluated on digits that
# were used neither for training nor for selection, and compared with each member: by log loss, the negative log probability of the true
# digit, and other metrics.

# %%
ensemble = found.ensemble()
judged = ensemble.evaluate(judge)
print(ensemble)
print(judged)
together, alone = judged.ensemble["log loss"], [member["log loss"] for member in judged.members.values()]

# %% [markdown]
# ## Stop the worse ones early
#
# Training all of them to the end is a waste if the bad ones show early. With `spmd.Halving` all train for a short time, the best
# quarter four times as long, and the best quarter of those to the end. Values and seeds are the same as before.

# %%
halving = spmd.Halving(factor=4)
print("networks, and until which step:", halving.plan(trials=16, steps=len(found.trials[0].history)))
halved = sweep(epochs=5, search=halving)
display(halved)

# %% [markdown]
# ## Conclusions
#
# The sentences use the numbers above, and each says whether this run confirms it.


# %%
def verdict(holds, sentence):
    return f"- {'**Borne out.**' if holds else '**Not borne out by this run.**'} {sentence}"


steps = lambda one: sum(len(tried.history) for tried in one.trials)
scores = sorted(tried.score for tried in found.trials)
winner, same = halved.best[0], {tried.number: tried for tried in found.trials}
rank = 1 + scores.index(same[winner.number].score)
claims = [
    (
        found.programs == 2,
        f"{len(found.trials)} networks of two widths are {found.programs} programs.",
    ),
    (
        scores[-1] > 2 * scores[0],
        f"It matters: the worst has {scores[-1] / scores[0]:.0f} times the loss of the best.",
    ),
    (
        together < np.mean(alone),
        f"Three that vote have a log loss of {together:.4f}; the mean of their own is {np.mean(alone):.4f}. "
        "That much is no luck: the logarithm bends the right way, whatever the networks.",
    ),
    (
        together < min(alone),
        f"They also beat the best of them, which has {min(alone):.4f}. That is not so for any three networks.",
    ),
    (
        steps(halved) < 0.5 * steps(found) and rank <= 3,
        f"Halving takes {steps(halved)} steps of training, not {steps(found)}, and finds the network that comes number {rank} of "
        f"{len(found.trials)} when all are trained to the end.",
    ),
    (
        abs(winner.score - same[winner.number].score) < 1e-4,
        f"What trains beside a network does not matter: trial {winner.number} ends at {winner.score:.6f} in the one sweep and at "
        f"{same[winner.number].score:.6f} in the other.",
    ),
]
Markdown("\n".join(verdict(*claim) for claim in claims))
