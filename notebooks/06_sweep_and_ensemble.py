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
# Which learning rate is best, and which width? `spmd.sweep` trains many small networks at once,
# sharded over the devices. Networks with equal shapes share one compiled program. The best networks
# then form an ensemble. Finally, a second sweep stops bad networks early.

# %%
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import display
from sklearn.datasets import load_digits

import spmd

spmd.simulate_devices(8)  # before anything else: JAX counts its devices once

# %% [markdown]
# ## Data and a model
#
# 1,797 digits of 8x8 pixels, in three parts: for training, for selection, and for testing. The
# model's constructor takes the hyperparameters of the model; the optimizer's takes the rest.

# %%
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels, labels = (digits.data[order] / 16).astype("float32"), digits.target[order].astype("int32")
rows = {"train": slice(1024), "select": slice(1024, 1408), "test": slice(1408, None)}
train, select, test = ({"x": pixels[part], "y": labels[part]} for part in rows.values())


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
# Learning rates are sampled log-uniformly, and each network has its own seed. A learning rate is an
# argument of the compiled program, but a width is part of it, so there is one program per width.
# Compiling these takes a few seconds.


# %%
def sweep(**options):
    return spmd.sweep(
        MLP,
        train,
        space={
            "learning_rate": spmd.log_uniform(1e-4, 3e-1),
            "width": [16, 64],
            "seed": range(1000),
        },
        optimizer=lambda learning_rate: optax.adam(learning_rate),
        loss=spmd.losses.cross_entropy,
        metrics={"accuracy": spmd.metrics.accuracy},
        trials=16,
        batch_size=64,
        eval_data=select,
        **options,
    )


results = sweep(epochs=5)
print(f"{len(results.trials)} networks, {results.programs} compiled programs, 8 devices")
display(results)

# %% [markdown]
# The best three, and their learning curves:

# %%
for trial in results.best:
    print(
        "trial {}: learning rate {learning_rate:.2g}, width {width}".format(
            trial.number, **trial.values
        )
    )
    display(trial.history)

# %% [markdown]
# The loss of all sixteen networks, by learning rate:

# %% tags=["thumbnail"]
figure, axes = plt.subplots(figsize=(7, 3))
for width, colour in ((16, "#d0692f"), (64, "#3f74d1")):
    trials = [trial for trial in results.trials if trial.values["width"] == width]
    rates, scores = (
        [trial.values["learning_rate"] for trial in trials],
        [trial.score for trial in trials],
    )
    axes.plot(rates, scores, "o", color=colour, label=f"width {width}")
axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss on digits for selection")
axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
axes.minorticks_off()
axes.legend()
plt.show()

# %% [markdown]
# The choice of the rate matters most: too small a rate learns little in five epochs, too large a
# rate is unstable.
#
# ## An ensemble of three
#
# `results.ensemble()` combines the best three: the mean of their probabilities, computed in one
# program. It is evaluated on digits that were used neither for training nor for selection, and
# compared with each member: by log loss, the negative log probability of the true digit, and other
# metrics.

# %%
ensemble = results.ensemble()
evaluation = ensemble.evaluate(test)
print(ensemble)
print(evaluation)

# %% [markdown]
# The log loss of the ensemble is below the mean of its members'. This holds for any networks,
# because the negative logarithm is convex. Here it is also below that of the best member, which
# does not hold for every three networks.
#
# ## Stop bad networks early
#
# If bad networks can be recognized early, there is no need to train all of them to the end. With
# `spmd.Halving` all networks train for a short time, the best quarter trains four times as long,
# and the best quarter of those trains to the end. Values and seeds are the same as before.

# %%
halving = spmd.Halving(factor=4)
print(
    "networks, and until which step:", halving.plan(trials=16, steps=len(results.trials[0].history))
)
halved = sweep(epochs=5, search=halving)
display(halved)

# %%
before = {trial.number: trial for trial in results.trials}
winner = halved.best[0]
same = before[winner.number]
rank = sorted(trial.score for trial in results.trials).index(same.score) + 1
for name, found in (("all to the end", results), ("halving", halved)):
    print(f"{name:15}{sum(len(trial.history) for trial in found.trials):5d} steps of training")
print(
    f"trial {winner.number}: loss {winner.score:.6f} with halving; {same.score:.6f}, and number "
    f"{rank}, without"
)

# %% [markdown]
# Halving takes less than half of the training steps, and its winner is among the best three of the
# full sweep. That network ends at the same loss in both sweeps: networks in one program do not
# affect each other.
