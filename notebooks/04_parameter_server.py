# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -all,jupytext,kernelspec
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Late gradients: a parameter server, simulated
#
# Workers that do not wait for each other stay busy, but the gradients they send were computed from
# older weights. What does this *staleness* cost, and what does waiting cost? This notebook trains
# the same network on real digits in five ways:
#
# - synchronous;
# - synchronous with spare workers (Chen et al.,
#   [arXiv:1604.00981](https://arxiv.org/abs/1604.00981));
# - asynchronous, with the learning rate as it is, and with the rate divided by the staleness (Zhang
#   et al., [arXiv:1511.05950](https://arxiv.org/abs/1511.05950));
# - with workers that train separately and synchronize at intervals (DiLoCo, Douillard et al.,
#   [arXiv:2311.08105](https://arxiv.org/abs/2311.08105)).
#
# Arrival times are simulated, from a seed, so the *seconds* below are those of a simulated clock.
# The updates are real.

# %%
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import spmd

# to count the bytes that 17 workers would send; the runs themselves use one device
spmd.simulate_devices(17)
# workers are simulated, so one device is enough for any number
ONE = jax.sharding.Mesh(jax.devices()[:1], ("data",))

# %% [markdown]
# ## Five layouts
#
# There are 17 workers. Half of the gradients take more than a second to compute, and some take much
# longer. A layout says how the server treats them: as a TOML file, or as a `Layout` in Python,
# which is the same.

# %%
SPARES = """
description = "17 simulated workers, the slowest two of which no worker waits for."

[batch]
spec = ["data"]

[gradients]
reduction = "parameter_server"

[parameter_server]
mode = "synchronous"
workers = 17
spares = 2
compute_time = "lognormal(1.0, 0.5)"      # median in seconds, sigma
"""
path = Path(tempfile.mkdtemp()) / "spares.toml"
path.write_text(SPARES, encoding="utf-8")


def server(**options):
    """The same in Python."""
    server = spmd.ParameterServer(workers=17, compute_time="lognormal(1.0, 0.5)", **options)
    return spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=server)


WAYS = {
    "synchronous": server(),
    "2 spares": spmd.Layout.load(path),
    "asynchronous": server(mode="asynchronous"),
    "asynchronous, scaled": server(mode="asynchronous", staleness_scale="inverse"),
    "DiLoCo, every 10": server(mode="local", every=10, outer_rate=0.7, outer_momentum=0.9),
}

# %% [markdown]
# ## When each worker computes
#
# `spmd.simulate` simulates only the timing, without a model. A synchronous worker is blue while it
# computes its gradient, and grey until the slowest worker has sent its gradient. With spares no
# worker waits for the hatched ones. An asynchronous worker never waits. Every tick above the lines
# is an update, which makes the gradients still being computed one version older.

# %%
STEPS = 60
accounts = {
    name: spmd.simulate(layout.parameter_server, steps=STEPS) for name, layout in WAYS.items()
}
shown = {
    name: accounts[name]
    for name in ("synchronous", "2 spares", "asynchronous, scaled", "DiLoCo, every 10")
}
spmd.viz.timeline(shown, seconds=14, workers=8)


# %%
def mean_staleness(account):
    return np.arange(len(account.staleness)) @ account.staleness / account.staleness.sum()


def share(seconds, account):
    return (seconds / account.seconds).mean()


print(f"{'':22} computing  of that dropped  waiting  gradients/s  mean staleness  largest")
for name, account in accounts.items():
    useful, lost, idle = (
        share(seconds, account)
        for seconds in (account.compute_seconds, account.wasted_seconds, account.idle_seconds)
    )
    print(
        f"{name:22} {useful:9.0%} {lost / useful:16.0%} {idle:8.0%} "
        f"{account.applied.sum() / account.seconds:12.1f}",
        end=" ",
    )
    print(f"{mean_staleness(account):15.2f} {len(account.staleness) - 1:8d}")

# %% [markdown]
# Synchronous workers compute for less than half of the time: of 17 workers, one is slow in almost
# every step. Over DiLoCo's ten steps, long and short times partly cancel. Asynchronous workers
# always compute, and their gradients are as old as there are other workers, 16 versions in the
# mean. The age varies with the times, so some gradients are much older. Scaling uses the age of
# each gradient; a smaller rate for all gradients does not.

# %%
late = accounts["asynchronous, scaled"].staleness
figure, axes = plt.subplots(figsize=(7, 2.6))
axes.bar(np.arange(len(late)), late, width=0.85, color="#2a9d6f")
axes.axvline(
    mean_staleness(accounts["asynchronous, scaled"]),
    color="#808080",
    linewidth=1.2,
    linestyle="--",
    label="mean",
)
axes.set(xlabel="staleness of a gradient, in versions", ylabel="gradients")
axes.grid(axis="x", visible=False)
axes.legend()
plt.show()

# %% [markdown]
# ## Training
#
# 1,797 digits of 8x8 pixels come with scikit-learn. A gradient is of eight rows, and each run
# computes as many gradients as the others, so all runs do the same amount of work. `batch_size`
# counts the rows of all workers together. The rate is 0.4, except in the last run, which shows what
# a rate of an eighth does for an asynchronous server. Each run takes up to ten seconds; then its
# line is complete.

# %%
ROWS, EPOCHS, RATE, TARGET = 8, 6, 0.4, 0.9
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels, labels = (digits.data[order] / 16).astype("float32"), digits.target[order].astype("int32")
train, test = (
    {"image": pixels[:1360], "label": labels[:1360]},
    {"image": pixels[1360:], "label": labels[1360:]},
)


class MLP(nnx.Module):
    """64 pixels, 64 hidden units, ten digits."""

    def __init__(self, rngs):
        self.hidden, self.head = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


def fit(layout, rate):
    """Seconds and accuracy at each evaluation: five per epoch."""
    result = spmd.fit(
        lambda: MLP(nnx.Rngs(0)),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(rate),
        metrics={"accuracy": spmd.metrics.accuracy},
        mesh=ONE,
        layout=layout,
        batch_size=ROWS * layout.parameter_server.workers,
        epochs=EPOCHS,
        eval_data=test,
        eval_every=len(train["label"]) // (5 * ROWS * layout.parameter_server.workers),
        progress=False,
    )
    clock = {row["step"]: row["simulated_seconds"] for row in result.history.rows()}
    return np.array([clock[row["step"]] for row in result.history.evaluations]), np.array(
        result.history["eval_accuracy"]
    )


curves, tried = {}, [(name, layout, RATE) for name, layout in WAYS.items()]
tried.append(("asynchronous, rate / 8", WAYS["asynchronous"], RATE / 8))
print(f"{'':26}final accuracy   simulated seconds   to an accuracy of {TARGET:g}")
for name, layout, rate in tried:
    print(f"{name:26}", end="")
    curves[name] = seconds, accuracy = fit(layout, rate)
    reached = (
        f"{seconds[np.argmax(accuracy >= TARGET)]:.1f}" if accuracy.max() >= TARGET else "never"
    )
    # the mean of the last epoch
    print(f"{accuracy[-5:].mean():14.3f}{seconds[-1]:20.1f}{reached:>24}")

# %% [markdown]
# ## Accuracy over time
#
# The same runs; the dotted line is the accuracy to reach.

# %% tags=["thumbnail"]
COLOURS = dict(
    zip(curves, ("#808080", "#3f74d1", "#d0692f", "#2a9d6f", "#9a5bc4", "#d0692f"), strict=True)
)
figure, axes = plt.subplots(figsize=(9, 3.8))
for name, (seconds, accuracy) in curves.items():
    axes.plot(
        seconds,
        accuracy,
        color=COLOURS[name],
        linestyle="--" if "/" in name else "-",
        linewidth=1.8,
        label=name,
    )
axes.axhline(TARGET, color="#808080", linewidth=1, linestyle=":")
axes.set(ylim=(0, 1.02), xscale="log", xlabel="simulated seconds", ylabel="test accuracy")
axes.set_xticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
axes.minorticks_off()
figure.legend(loc="outside right center")
plt.show()

# %% [markdown]
# - **Waiting.** Not waiting for the slowest two workers saves a third of the time, and an eighth of
#   the gradients are lost.
# - **Staleness.** At this rate an asynchronous server learns nothing: a step in the direction that
#   *was* downhill is a good step only as long as steps are small. Dividing each gradient's rate by
#   its age fixes that, and is then the fastest of all by the clock.
# - **A smaller rate** for all gradients fixes it as well. Scaling spares you the search for another
#   rate whenever the number of workers changes. At a rate that is small enough already, it only
#   slows training down.
#
# ## Bytes
#
# To count the bytes sent, the same layouts are placed on 17 devices, one per worker, and their
# steps are traced, not run. `wire_bytes` is what one device sends in a step.


# %%
def sent(layout, steps):
    """Bytes that each of 17 workers sends in `steps` steps."""
    trainer = spmd.Trainer(
        lambda: MLP(nnx.Rngs(0)),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(RATE),
        mesh="data=17",
        layout=layout,
    )
    program, _ = trainer.prepare({name: leaf[: 17 * ROWS] for name, leaf in train.items()})
    return sum(program.static_metrics.at(step)["wire_bytes"] for step in range(steps))


sent_bytes = {name: sent(layout, STEPS) for name, layout in WAYS.items()}
for name, number in sent_bytes.items():
    print(f"{name:22}{number / 1e6:6.2f} MB sent by a worker in {STEPS} steps")

# %% [markdown]
# Workers that synchronize every ten steps send a tenth of the bytes. On a slow network, which this
# simulation leaves out, that is what counts.
#
# Which rates work at which staleness, and how each way does at its best rate:
# `benchmarks/staleness.py` tries seven rates at four ages of gradients. [Parameter
# servers](../docs/parameter_server.md) has its tables, and all options.
