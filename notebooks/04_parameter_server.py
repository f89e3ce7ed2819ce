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
# Workers that do not wait for each other keep busy, but the gradients that they send are of weights that have moved on since. This
# notebook measures what such *staleness* costs and what waiting costs, on real digits: synchronous training, synchronous with spare
# workers (Chen et al., [arXiv:1604.00981](https://arxiv.org/abs/1604.00981)), asynchronous training at staleness 0, 1, 4 and
# 16, without and with a rate that is divided by the staleness (Zhang et al.,
# [arXiv:1511.05950](https://arxiv.org/abs/1511.05950)), and workers that train by themselves and meet now and then (DiLoCo, Douillard
# et al., [arXiv:2311.08105](https://arxiv.org/abs/2311.08105)).
#
# Who arrives when is simulated, from a seed, and so the *seconds* below are those of a simulated clock. The updates are real. All
# numbers are computed here, and on the same machine another run gives the same ones. With `SPMD_SMALL=1` in the environment the notebook
# takes fewer rates and epochs.

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

spmd.simulate_devices(17)  # to count what would travel between so many; the runs themselves are on one of them
ONE = jax.sharding.Mesh(jax.devices()[:1], ("data",))  # workers are simulated, so one device is enough for any number

SMALL = bool(os.environ.get("SPMD_SMALL"))
EPOCHS = 3 if SMALL else 6
STALENESS = (0, 16) if SMALL else (0, 1, 4, 16)
SLOW_RATE, FAST_RATE = 0.025, 0.4
RATES = (SLOW_RATE, FAST_RATE) if SMALL else tuple(SLOW_RATE * 2**k for k in range(7))
ROWS = 8  # of the data in each gradient, however many workers there are
TARGET = 0.9  # the test accuracy that a run is asked to reach

folder = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", folder.name)  # most runs below are of a program that an earlier one has compiled
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# %% [markdown]
# ## Data, model, one run
#
# 1,797 digits of 8x8 pixels come with scikit-learn. Of these 1,360 are for training: 170 gradients of eight rows, a number that 1, 2, 5
# and 17 workers divide without a rest. Each run below computes the same number of gradients of the same number of rows, and so
# costs the same work; `batch_size` is what all workers together take at once.

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
    """A layout whose gradients are reduced by a parameter server; it is what a TOML file with these lines says."""
    return spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=spmd.ParameterServer(**options))


# %% [markdown]
# What is measured of a run: its test accuracy after so many updates and after so many simulated seconds. The *final* accuracy is the
# mean over the evaluations of the last epoch, because one alone is a matter of luck where training is unsteady.


# %%
@dataclasses.dataclass
class Run:
    """What the figures and tables read of a result."""

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
    column = lambda name: np.array([row.get(name, 0.0) for row in rows])
    applied, dropped = column("gradients_applied"), column("gradients_dropped")
    updates = np.cumsum(applied) if asynchronous else np.arange(1, len(rows) + 1)
    staleness = np.average(column("staleness"), weights=applied)
    accuracy = np.array(history["eval_accuracy"])
    return Run(updates[at], column("simulated_seconds")[at], accuracy, staleness, sum(applied + dropped), sum(dropped))


# %% [markdown]
# ## Staleness, all else equal
#
# First all gradients take one simulated second each. Then W workers take turns: while one computes, each of the others updates the
# weights once, so that a gradient is W - 1 versions old when it arrives. One, two, five and seventeen workers give the four stalenesses.
# Only the first gradients of a run are fresher.

# %%
runs = {}
for staleness in STALENESS:
    for scale in ("none", "inverse"):
        layout = server(workers=staleness + 1, mode="asynchronous", staleness_scale=scale)
        same = scale == "inverse" and staleness <= 1  # the scale is then 1: those runs are there already
        runs |= {(staleness, scale, rate): runs[staleness, "none", rate] if same else measure(layout, rate) for rate in RATES}

print("workers  mean staleness  gradients  simulated seconds")
for staleness in STALENESS:
    run = runs[staleness, "none", FAST_RATE]
    print(f"{staleness + 1:7d} {run.staleness:15.2f} {run.computed:10.0f} {run.seconds[-1]:18.0f}")

# %% [markdown]
# ### At two rates
#
# A step in the direction that *was* downhill is a good step as long as steps are small. When they are large, a late gradient points back at
# a place that was left long ago, and the weights swing ever further. Dividing the rate of an update by its staleness fixes that. At
# a rate that was small enough anyway the division only makes training slow.

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
# The scale is 1 up to staleness 1, so there the two lines are one.
#
# ### At every rate
#
# Is the failure an accident of one rate? Below is the final accuracy over a range of them. On a quadratic with curvature a, descent by
# gradients that are tau versions old is stable up to the rate 2 sin(pi / (2 (2 tau + 1))) / a. A network is no quadratic, but the
# *ratio* to the limit of fresh gradients does not depend on a, so it can be compared.

# %%
figure, panels = plt.subplots(1, len(STALENESS), figsize=(max(6, 2.8 * len(STALENESS)), 3.4), sharey=True, layout="constrained")
for axes, staleness in zip(panels, STALENESS, strict=True):
    for scale, (style, _) in STYLES.items():
        found = [runs[staleness, scale, rate].final for rate in RATES]
        axes.plot(RATES, found, color=COLOURS[staleness], linestyle=style, linewidth=2, marker="o", markersize=4)
    axes.axhline(TARGET, color="#b0b0b0", linewidth=1, linestyle=":")
    axes.set(xscale="log", ylim=(0, 1.02), title=f"staleness {staleness}", xlabel="rate")
    axes.set_xticks([0.03, 0.1, 0.3, 1.0], ["0.03", "0.1", "0.3", "1"])
    axes.minorticks_off()
panels[0].set_ylabel("final test accuracy")
figure.legend(handles=styles, loc="outside lower center", ncols=2)
plt.show()


# %%
def largest(staleness, scale):
    """The largest of the rates tried at which the final accuracy is what is asked for."""
    return max((rate for rate in RATES if runs[staleness, scale, rate].final >= TARGET), default=np.nan)


print(f"The largest rate with a final accuracy of {TARGET}, of {', '.join(f'{rate:g}' for rate in RATES)}")
print("staleness  rate as it is  to that of fresh  on a quadratic  rate / staleness")
for staleness in STALENESS:
    plain, limit = largest(staleness, "none"), np.sin(np.pi / (2 * (2 * staleness + 1)))
    print(f"{staleness:9d} {plain:14g} {plain / largest(0, 'none'):17.3f} {limit:15.3f} {largest(staleness, 'inverse'):17g}")

# %% [markdown]
# ## Waiting, when some are slow
#
# Now each gradient takes its own time: half of them more than a second, some much more. A synchronous update waits for the slowest of
# 17. With two *spares* it waits for the first 15 and drops what the last two were computing. An asynchronous server waits for nobody.
# And workers with weights of their own, here by DiLoCo, wait for each other only every ten steps, when long and short times have
# evened out, and send something only then. Workers, times and seed are the same for all, as is the number of gradients computed. The layout
# with spares is a file:

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
# Each way has a rate of its own at which it is best. So each is drawn at that one of the rates tried with which it reached the target
# in the fewest simulated seconds (the dot); a way that never did is drawn at the rate with the best final accuracy. The rate is chosen
# by the test digits: that is fair to all ways, but as an estimate of accuracy a little too kind. An update of DiLoCo is here a step
# that all workers make.

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
# And what is sent? For that the same layouts are put on 17 devices, one per worker, and their steps traced, not run: `wire_bytes` is what
# one device sends in a step.


# %%
def sent(layout, steps):
    """Bytes that each of 17 workers sends in that number of steps."""
    trainer = spmd.Trainer(
        lambda: MLP(nnx.Rngs(0)), loss=spmd.losses.cross_entropy, optimizer=optax.sgd(FAST_RATE), mesh="data=17", layout=layout
    )
    program, _ = trainer.prepare({name: leaf[: 17 * ROWS] for name, leaf in train.items()})
    return sum(program.static_metrics.at(step)["wire_bytes"] for step in range(steps))


steps = EPOCHS * len(train["label"]) // (17 * ROWS)
travels = {name: sent(layout, steps) for name, layout in WAYS.items()}
print(f"{'':22} at the same rate, {FAST_RATE:g}       at its best rate")
print(f"{'':22} final  to {TARGET:g}  seconds    rate  final  to {TARGET:g}    dropped  sent by a worker")
for name in WAYS:
    same, own = waits[name, FAST_RATE], waits[name, best[name]]
    print(f"{name:22} {same.final:5.3f} {same.seconds_to_target:7.1f} {same.seconds[-1]:8.1f}", end="   ")
    print(
        f"{best[name]:5g}  {own.final:5.3f} {own.seconds_to_target:7.1f} {own.dropped / own.computed:10.0%} {travels[name] / 1e6:14.2f} MB"
    )

# %% [markdown]
# ## Who computes when
#
# `spmd.simulate` asks the clock alone, without a model. A synchronous worker is blue for as long as its own gradient takes, and grey
# until the slowest has sent its own. With spares no worker waits for the hatched ones. An asynchronous worker never waits, and every tick
# above the lines, an update, makes the gradients that are under way one version older.

# %%
accounts = {name: spmd.simulate(spmd.Layout.load(layout).parameter_server, steps=steps) for name, layout in WAYS.items()}
shown = {name: accounts[name] for name in ("synchronous", "2 spares", "asynchronous, scaled", "DiLoCo, every 10")}
spmd.viz.timeline(shown, seconds=14, workers=8)

# %%
ages = lambda account: np.arange(len(account.staleness)) @ account.staleness / account.staleness.sum()
share = lambda seconds, account: (seconds / account.seconds).mean()
print(f"{'':22} computing  of that dropped  waiting  gradients/s  mean staleness  largest")
for name, told in accounts.items():
    useful, lost, idle = (share(part, told) for part in (told.compute_seconds, told.wasted_seconds, told.idle_seconds))
    print(f"{name:22} {useful:9.0%} {lost / useful:16.0%} {idle:8.0%} {told.applied.sum() / told.seconds:12.1f}", end=" ")
    print(f"{ages(told):15.2f} {len(told.staleness) - 1:8d}")

# %% [markdown]
# Where times vary so does the staleness. In the long run its mean is still one less than there are workers, but some gradients are
# much older. The scale knows the age of each, and a small rate for all does not.

# %%
late = accounts["asynchronous, scaled"].staleness
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.bar(np.arange(len(late)), late, width=0.85, color=LINES["asynchronous, scaled"])
axes.axvline(ages(accounts["asynchronous, scaled"]), color="#222222", linewidth=1.2, linestyle="--", label="mean")
axes.set(xlabel="staleness, in versions", ylabel="gradients")
axes.grid(axis="x", visible=False)
axes.legend()
plt.show()

# %% [markdown]
# ## What to conclude
#
# The sentences are written from the numbers above, and each says whether this run bears it out.


# %%
def verdict(holds, sentence):
    return f"- {'**Borne out.**' if holds else '**Not borne out by this run.**'} {sentence}"


late = STALENESS[-1]
fails, fixed, slowed = (runs[late, scale, rate] for scale, rate in (("none", FAST_RATE), ("inverse", FAST_RATE), ("inverse", SLOW_RATE)))
fine, fresh = runs[late, "none", SLOW_RATE], runs[0, "none", FAST_RATE]
waiting, sparing, unscaled, scaled, meeting = (waits[name, best[name]] for name in WAYS)
saved = 1 - waits["2 spares", FAST_RATE].seconds[-1] / waits["synchronous", FAST_RATE].seconds[-1]
bytes_left = travels["DiLoCo, every 10"] / travels["synchronous"]
claims = [
    (
        fails.final < 0.5 < fresh.final,
        f"Gradients that are {late} versions old do not train at rate {FAST_RATE:g}: the accuracy is {fails.final:.3f}, and "
        f"{fresh.final:.3f} with fresh ones.",
    ),
    (
        fixed.final > fails.final + 0.2,
        f"Dividing the rate by the staleness repairs that: {fixed.final:.3f}.",
    ),
    (
        slowed.final < fine.final - 0.05,
        f"At rate {SLOW_RATE:g} late gradients do little harm ({fine.final:.3f}), and there the same division costs accuracy: "
        f"{slowed.final:.3f}. It protects from a rate that is too large; it does not make late gradients better.",
    ),
    (
        fixed.seconds[-1] < 0.1 * fresh.seconds[-1],
        f"For the same gradients {late + 1} workers take {fixed.seconds[-1]:.0f} simulated seconds, and one takes {fresh.seconds[-1]:.0f}.",
    ),
    (
        saved > 0.1 and sparing.final > waiting.final - 0.03,
        f"When times vary, not waiting for the slowest two saves {saved:.0%} of the time, and {sparing.dropped / sparing.computed:.0%} of "
        f"the gradients are lost. At its best rate it comes to {sparing.final:.3f}, and waiting for all to {waiting.final:.3f}.",
    ),
    (
        scaled.seconds_to_target < min(sparing.seconds_to_target, waiting.seconds_to_target),
        f"Not waiting is faster still, where staleness is scaled: accuracy {TARGET:g} after {scaled.seconds_to_target:.1f} "
        f"simulated seconds, with spares after {sparing.seconds_to_target:.1f}, synchronous after {waiting.seconds_to_target:.1f}.",
    ),
    (
        bytes_left < 0.2 and meeting.final > waiting.final - 0.05,
        f"Synchronizing every ten steps sends {bytes_left:.0%} of the bytes of a synchronous run. The accuracy is {meeting.final:.3f}, and "
        f"{waiting.final:.3f} in step.",
    ),
]
if len(OWN_RATES) > 1:  # where a smaller rate was tried
    holds = unscaled.final > scaled.final - 0.05
    claims.append(
        (
            holds,
            f"A smaller rate for every update does about as well as scaling: accuracy {unscaled.final:.3f} without it at rate "
            f"{best['asynchronous']:g}, {scaled.final:.3f} with it at rate {best['asynchronous, scaled']:g}. What scaling spares you is to "
            "look for another rate whenever the number of workers changes.",
        )
    )
Markdown("\n".join(verdict(*claim) for claim in claims))
