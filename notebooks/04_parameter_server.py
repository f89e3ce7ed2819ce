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
# Workers that do not wait for each other stay busy, but the gradients they send were computed from older weights. This
# notebook measures the cost of this *staleness* and the cost of waiting, on real digits. It compares:
#
# - synchronous training;
# - synchronous training with spare workers (Chen et al., [arXiv:1604.00981](https://arxiv.org/abs/1604.00981));
# - asynchronous training at staleness 0, 1, 4 and 16, with the unchanged rate, and with the rate divided by the staleness (Zhang et al.,
#   [arXiv:1511.05950](https://arxiv.org/abs/1511.05950));
# - workers that train separately and synchronize at intervals (DiLoCo, Douillard et al.,
#   [arXiv:2311.08105](https://arxiv.org/abs/2311.08105)).
#
# Arrival times are simulated, from a seed, so the *seconds* below are those of a simulated clock. The updates are real. All
# numbers are computed in this notebook, and another run on the same machine gives the same ones. With `SPMD_SMALL=1` in the environment,
# the notebook uses fewer rates and epochs.

# %%
import dataclasses
import os
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import Markdown
from sklearn.datasets import load_digits

import spmd

spmd.simulate_devices(17)  # to count the bytes that 17 workers would send; the runs themselves use one device
ONE = jax.sharding.Mesh(jax.devices()[:1], ("data",))  # workers are simulated, so one device is enough for any number

SMALL = bool(os.environ.get("SPMD_SMALL"))
EPOCHS = 3 if SMALL else 6
STALENESS = (0, 16) if SMALL else (0, 1, 4, 16)
SLOW_RATE, FAST_RATE = 0.025, 0.4
RATES = (SLOW_RATE, FAST_RATE) if SMALL else tuple(SLOW_RATE * 2**k for k in range(7))
ROWS = 8  # per gradient, for any number of workers
TARGET = 0.9  # the test accuracy that a run should reach

folder = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", folder.name)  # most runs below use a program that an earlier run has compiled
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# %% [markdown]
# ## Data, model, one run
#
# 1,797 digits of 8x8 pixels come with scikit-learn. Of these 1,360 are for training: 170 gradients of eight rows, a number divisible by
# 1, 2, 5 and 17 workers. Each run below computes the same number of gradients of the same number of rows, so all runs do the same
# amount of work. `batch_size` counts the rows of all workers together.

# %%
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels, labels = (digits.data[order] / 16).astype("float32"), digits.target[order].astype("int32")
train, test = {"image": pixels[:1360], "label": labels[:1360]}, {"image": pixels[1360:], "label": labels[1360:]}


class MLP(nnx.Module):
    """64 pixels, 64 hidden units, ten digits."""

    def __init__(self, rngs):
        self.hidden, self.head = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


def fit(layout, rate):
    """One run by plain gradient descent, evaluated five times per epoch."""
    layout = spmd.Layout.load(layout)  # a file's path, or a Layout as it is
    workers = layout.parameter_server.workers
    return spmd.fit(
        lambda: MLP(nnx.Rngs(0)),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(rate),
        metrics={"accuracy": spmd.metrics.accuracy},
        mesh=ONE,
        layout=layout,
        batch_size=ROWS * workers,
        epochs=EPOCHS,
        eval_data=test,
        eval_every=max(1, len(train["label"]) // (5 * ROWS * workers)),
        progress=False,
    )


def server(**options):
    """A layout with a parameter server that reduces gradients, as a TOML file with these options would declare it."""
    return spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=spmd.ParameterServer(**options))


# %% [markdown]
# For each run we measure test accuracy against updates and against simulated seconds. The *final* accuracy is the mean over the
# evaluations of the last epoch, because a single evaluation is noisy where training is unstable.


# %%
@dataclasses.dataclass
class Run:
    """The measurements that the figures and tables use."""

    updates: np.ndarray
    seconds: np.ndarray
    accuracy: np.ndarray
    staleness: float
    computed: float
    dropped: float

    @property
    def final(self):
        return self.accuracy[-max(1, len(self.accuracy) // EPOCHS) :].mean()

    @property
    def seconds_to_target(self):
        return next((second for second, reached in zip(self.seconds, self.accuracy, strict=True) if reached >= TARGET), np.inf)


def measure(layout, rate):
    result = fit(layout, rate)
    history, asynchronous = result.history, result.trainer.layout.parameter_server.asynchronous
    rows, at = list(history.rows()), np.array([row["step"] - 1 for row in history.evaluations])

    def column(name):
        return np.array([row.get(name, 0.0) for row in rows])

    applied, dropped = column("gradients_applied"), column("gradients_dropped")
    updates = np.cumsum(applied) if asynchronous else np.arange(1, len(rows) + 1)
    staleness = np.average(column("staleness"), weights=applied)
    accuracy = np.array(history["eval_accuracy"])
    return Run(updates[at], column("simulated_seconds")[at], accuracy, staleness, sum(applied + dropped), sum(dropped))


# %% [markdown]
# ## Staleness, all else equal
#
# In the first experiment every gradient takes one simulated second. Then W workers take turns: while one computes, each of the others
# updates the weights once, so a gradient is W - 1 versions old when it arrives. One, two, five and seventeen workers give the four
# values of staleness. Only the first gradients of a run are fresher.

# %%
runs = {}
for staleness in STALENESS:
    for scale in ("none", "inverse"):
        layout = server(workers=staleness + 1, mode="asynchronous", staleness_scale=scale)
        same = scale == "inverse" and staleness <= 1  # the scale is then 1: reuse those runs
        runs |= {(staleness, scale, rate): runs[staleness, "none", rate] if same else measure(layout, rate) for rate in RATES}

print("workers  mean staleness  gradients  simulated seconds")
for staleness in STALENESS:
    run = runs[staleness, "none", FAST_RATE]
    print(f"{staleness + 1:7d} {run.staleness:15.2f} {run.computed:10.0f} {run.seconds[-1]:18.0f}")

# %% [markdown]
# ### At two rates
#
# A step in the direction that *was* downhill is a good step as long as steps are small. When they are large, a late gradient
# points in a direction that is no longer right, and the weights oscillate with growing amplitude. Dividing the rate of an update by its
# staleness fixes that. At a rate that is already small enough, the division only slows training down.

# %%
COLOURS = dict(zip((0, 1, 4, 16), plt.get_cmap("plasma")([0.0, 0.35, 0.6, 0.8]), strict=True))
STYLES = {"none": ("-", "rate as it is"), "inverse": ((0, (4, 1.6)), "rate / staleness")}
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6"})
plt.rcParams.update({"axes.axisbelow": True, "axes.titlelocation": "left", "legend.frameon": False, "figure.dpi": 110})

figure, panels = plt.subplots(2, 2, figsize=(11, 6.6), sharey=True, sharex="col", layout="constrained")
for row, rate in zip(panels, (SLOW_RATE, FAST_RATE), strict=True):
    for axes, clock in zip(row, ("updates", "seconds"), strict=True):
        for staleness in STALENESS:
            for scale, (style, _) in STYLES.items():
                run = runs[staleness, scale, rate]
                axes.plot(getattr(run, clock), run.accuracy, color=COLOURS[staleness], linestyle=style, linewidth=1.8)
        axes.set(xscale="log" if clock == "seconds" else "linear", ylim=(0, 1.02), title=f"rate {rate:g}")
    row[0].set_ylabel("test accuracy")
panels[1, 0].set_xlabel("updates")
panels[1, 1].set_xlabel("simulated seconds")
keys = [plt.Line2D([], [], color=COLOURS[staleness], linewidth=3, label=f"staleness {staleness}") for staleness in STALENESS]
styles = [plt.Line2D([], [], color="#555", linestyle=style, linewidth=1.8, label=label) for style, label in STYLES.values()]
figure.legend(handles=keys + styles, loc="outside lower center", ncols=len(keys + styles))
plt.show()

# %% [markdown]
# The scale is 1 up to staleness 1, so there the two lines coincide.
#
# ### At every rate
#
# Is the failure specific to one rate? Below is the final accuracy over a range of rates. On a quadratic with curvature a, descent with
# gradients that are tau versions old is stable up to the rate 2 sin(pi / (2 (2 tau + 1))) / a. A network is not a quadratic, but the
# *ratio* to the limit for fresh gradients does not depend on a, so it can be compared.

# %%
figure, panels = plt.subplots(1, len(STALENESS), figsize=(max(6, 2.8 * len(STALENESS)), 3.4), sharey=True, layout="constrained")
for axes, staleness in zip(panels, STALENESS, strict=True):
    for scale, (style, _) in STYLES.items():
        accuracies = [runs[staleness, scale, rate].final for rate in RATES]
        axes.plot(RATES, accuracies, color=COLOURS[staleness], linestyle=style, linewidth=2, marker="o", markersize=4)
    axes.axhline(TARGET, color="#b0b0b0", linewidth=1, linestyle=":")
    axes.set(xscale="log", ylim=(0, 1.02), title=f"staleness {staleness}", xlabel="rate")
    axes.set_xticks([0.03, 0.1, 0.3, 1.0], ["0.03", "0.1", "0.3", "1"])
    axes.minorticks_off()
panels[0].set_ylabel("final test accuracy")
figure.legend(handles=styles, loc="outside lower center", ncols=2)
plt.show()


# %%
def largest(staleness, scale):
    """The largest rate tried whose final accuracy reaches the target."""
    return max((rate for rate in RATES if runs[staleness, scale, rate].final >= TARGET), default=np.nan)


print(f"The largest rate with a final accuracy of {TARGET}, of {', '.join(f'{rate:g}' for rate in RATES)}")
print("staleness  rate as it is  to that of fresh  on a quadratic  rate / staleness")
for staleness in STALENESS:
    plain, limit = largest(staleness, "none"), np.sin(np.pi / (2 * (2 * staleness + 1)))
    print(f"{staleness:9d} {plain:14g} {plain / largest(0, 'none'):17.3f} {limit:15.3f} {largest(staleness, 'inverse'):17g}")

# %% [markdown]
# ## Waiting for slow workers
#
# Now the time per gradient varies: half of the gradients take more than a second, and some take much longer. A synchronous update waits
# for the slowest of 17 workers. With two *spares* it waits for the first 15 and drops the gradients of the last two. An asynchronous
# server does not wait. With DiLoCo, each worker trains its own weights. The workers wait for each other, and send data, only every ten
# steps. Over ten steps, long and short times partly cancel. All runs use the same workers, times and seed, and compute the same number of
# gradients. The layout with spares is a file:

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
path = Path(folder.name) / "spares.toml"
path.write_text(SPARES, encoding="utf-8")
spares = spmd.Layout.load(path)
others = {"workers": spares.parameter_server.workers, "compute_time": spares.parameter_server.compute_time}
WAYS = {
    "synchronous": server(**others),
    "2 spares": path,
    "asynchronous": server(**others, mode="asynchronous"),
    "asynchronous, scaled": server(**others, mode="asynchronous", staleness_scale="inverse"),
    "DiLoCo, every 10": server(**others, mode="local", every=10, outer_rate=0.7, outer_momentum=0.9),
}
OWN_RATES = (FAST_RATE,) if SMALL else RATES
waits = {(name, rate): measure(layout, rate) for name, layout in WAYS.items() for rate in OWN_RATES}

# %% [markdown]
# The best rate differs between the methods. So each method is drawn at the rate with which it reached the target in the fewest simulated
# seconds (the dot), or, if it never did, at the rate with the best final accuracy. The rate is chosen on the test digits: that is
# fair to all methods, but makes the accuracies slightly optimistic. An update of DiLoCo here is a step that all workers
# make.

# %%
LINES = dict(zip(WAYS, ("#222222", "#3566c0", "#c4571f", "#2a9d6f", "#8d4bb8"), strict=True))
best = {name: min(OWN_RATES, key=lambda rate: (waits[name, rate].seconds_to_target, -waits[name, rate].final)) for name in WAYS}

figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
for axes, clock in zip(panels, ("updates", "seconds"), strict=True):
    for name, colour in LINES.items():
        run = waits[name, best[name]]
        points = getattr(run, clock)
        axes.plot(points, run.accuracy, color=colour, linewidth=1.5, label=f"{name}, rate {best[name]:g}")
        reached = np.flatnonzero(run.accuracy >= TARGET)[:1]
        axes.plot(points[reached], run.accuracy[reached], "o", color=colour, markersize=8, markeredgecolor="white")
    axes.axhline(TARGET, color="#b0b0b0", linewidth=1, linestyle=":")
    axes.set(ylim=(0, 1.02))
panels[0].set(ylabel="test accuracy", xlabel="updates", xscale="log")
panels[1].set(xlabel="simulated seconds", xscale="log")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# To count the bytes sent, the same layouts are placed on 17 devices, one per worker, and their steps are traced, not run. `wire_bytes` is
# what one device sends in a step.


# %%
def sent(layout, steps):
    """Bytes that each of 17 workers sends in `steps` steps."""
    trainer = spmd.Trainer(
        lambda: MLP(nnx.Rngs(0)), loss=spmd.losses.cross_entropy, optimizer=optax.sgd(FAST_RATE), mesh="data=17", layout=layout
    )
    program, _ = trainer.prepare({name: leaf[: 17 * ROWS] for name, leaf in train.items()})
    return sum(program.static_metrics.at(step)["wire_bytes"] for step in range(steps))


steps = EPOCHS * len(train["label"]) // (17 * ROWS)
sent_bytes = {name: sent(layout, steps) for name, layout in WAYS.items()}
print(f"{'':22} at the same rate, {FAST_RATE:g}       at its best rate")
print(f"{'':22} final  to {TARGET:g}  seconds    rate  final  to {TARGET:g}    dropped  sent by a worker")
for name in WAYS:
    same, tuned = waits[name, FAST_RATE], waits[name, best[name]]
    print(f"{name:22} {same.final:5.3f} {same.seconds_to_target:7.1f} {same.seconds[-1]:8.1f}", end="   ")
    print(
        f"{best[name]:5g}  {tuned.final:5.3f} {tuned.seconds_to_target:7.1f} {tuned.dropped / tuned.computed:10.0%} "
        f"{sent_bytes[name] / 1e6:14.2f} MB"
    )

# %% [markdown]
# ## When each worker computes
#
# `spmd.simulate` simulates only the timing, without a model. A synchronous worker is blue while it computes its gradient, and grey
# until the slowest worker has sent its gradient. With spares no worker waits for the hatched ones. An asynchronous worker never waits.
# Every tick above the lines is an update, which makes the gradients still being computed one version older.

# %%
accounts = {name: spmd.simulate(spmd.Layout.load(layout).parameter_server, steps=steps) for name, layout in WAYS.items()}
shown = {name: accounts[name] for name in ("synchronous", "2 spares", "asynchronous, scaled", "DiLoCo, every 10")}
spmd.viz.timeline(shown, seconds=14, workers=8)


# %%
def mean_staleness(account):
    return np.arange(len(account.staleness)) @ account.staleness / account.staleness.sum()


def share(seconds, account):
    return (seconds / account.seconds).mean()


print(f"{'':22} computing  of that dropped  waiting  gradients/s  mean staleness  largest")
for name, account in accounts.items():
    useful, lost, idle = (share(seconds, account) for seconds in (account.compute_seconds, account.wasted_seconds, account.idle_seconds))
    print(f"{name:22} {useful:9.0%} {lost / useful:16.0%} {idle:8.0%} {account.applied.sum() / account.seconds:12.1f}", end=" ")
    print(f"{mean_staleness(account):15.2f} {len(account.staleness) - 1:8d}")

# %% [markdown]
# If times vary, so does the staleness. In the long run its mean is still one less than the number of workers, but some gradients are
# much older. Scaling uses the age of each gradient; a small rate for all gradients does not.

# %%
late = accounts["asynchronous, scaled"].staleness
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.bar(np.arange(len(late)), late, width=0.85, color=LINES["asynchronous, scaled"])
axes.axvline(mean_staleness(accounts["asynchronous, scaled"]), color="#222222", linewidth=1.2, linestyle="--", label="mean")
axes.set(xlabel="staleness, in versions", ylabel="gradients")
axes.grid(axis="x", visible=False)
axes.legend()
plt.show()

# %% [markdown]
# ## Conclusions
#
# Each sentence below is computed from the numbers above and says whether this run confirms it.


# %%
def verdict(holds, sentence):
    return f"- {'**Borne out.**' if holds else '**Not borne out by this run.**'} {sentence}"


late = STALENESS[-1]
fails, fixed, slowed = (runs[late, scale, rate] for scale, rate in (("none", FAST_RATE), ("inverse", FAST_RATE), ("inverse", SLOW_RATE)))
fine, fresh = runs[late, "none", SLOW_RATE], runs[0, "none", FAST_RATE]
waiting, sparing, unscaled, scaled, diloco = (waits[name, best[name]] for name in WAYS)
saved = 1 - waits["2 spares", FAST_RATE].seconds[-1] / waits["synchronous", FAST_RATE].seconds[-1]
bytes_left = sent_bytes["DiLoCo, every 10"] / sent_bytes["synchronous"]
claims = [
    (
        fails.final < 0.5 < fresh.final,
        f"Training with gradients that are {late} versions old fails at rate {FAST_RATE:g}: the accuracy is {fails.final:.3f}, and "
        f"{fresh.final:.3f} with fresh ones.",
    ),
    (
        fixed.final > fails.final + 0.2,
        f"Dividing the rate by the staleness fixes that: {fixed.final:.3f}.",
    ),
    (
        slowed.final < fine.final - 0.05,
        f"At rate {SLOW_RATE:g} late gradients do little harm ({fine.final:.3f}), and the same division costs accuracy: "
        f"{slowed.final:.3f}. It protects against a rate that is too large; it does not improve late gradients.",
    ),
    (
        fixed.seconds[-1] < 0.1 * fresh.seconds[-1],
        f"For the same gradients {late + 1} workers take {fixed.seconds[-1]:.0f} simulated seconds, and one takes {fresh.seconds[-1]:.0f}.",
    ),
    (
        saved > 0.1 and sparing.final > waiting.final - 0.03,
        f"When times vary, not waiting for the slowest two saves {saved:.0%} of the time, and {sparing.dropped / sparing.computed:.0%} of "
        f"the gradients are lost. At its best rate it reaches {sparing.final:.3f}; waiting for all reaches {waiting.final:.3f}.",
    ),
    (
        scaled.seconds_to_target < min(sparing.seconds_to_target, waiting.seconds_to_target),
        f"Not waiting at all is even faster if the rate is scaled: accuracy {TARGET:g} after {scaled.seconds_to_target:.1f} "
        f"simulated seconds, with spares after {sparing.seconds_to_target:.1f}, synchronous after {waiting.seconds_to_target:.1f}.",
    ),
    (
        bytes_left < 0.2 and diloco.final > waiting.final - 0.05,
        f"Synchronizing every ten steps sends {bytes_left:.0%} of the bytes of a synchronous run. The accuracy is {diloco.final:.3f}, and "
        f"{waiting.final:.3f} when synchronous.",
    ),
]
if len(OWN_RATES) > 1:  # where a smaller rate was tried
    holds = unscaled.final > scaled.final - 0.05
    claims.append(
        (
            holds,
            f"A smaller rate for every update does about as well as scaling: accuracy {unscaled.final:.3f} without it at rate "
            f"{best['asynchronous']:g}, {scaled.final:.3f} with it at rate {best['asynchronous, scaled']:g}. Scaling spares you the search "
            "for another rate whenever the number of workers changes.",
        )
    )
Markdown("\n".join(verdict(*claim) for claim in claims))
