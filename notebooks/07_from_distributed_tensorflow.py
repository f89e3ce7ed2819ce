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
# # A distributed TensorFlow 1.x job, in spmd
#
# Parameter servers and workers, a session that survives failures, many networks at once, an
# exported model: in TensorFlow 1.x this took a graph, a `ClusterSpec` and a script for each job. In
# spmd it is one program. `docs/from_distributed_tensorflow.md` has a pair of programs for every
# concept; this notebook shows one complete job.

# %%
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import spmd

spmd.simulate_devices(8)

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(y))
data = {"x": (x[order] / 16).astype("float32"), "y": y[order].astype("int32")}
train, test = (
    {name: leaf[part] for name, leaf in data.items()} for part in (slice(1536), slice(1536, None))
)


class MLP(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.up, self.out = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.up(x)))


def make():
    return MLP()


how = {
    "loss": spmd.losses.cross_entropy,
    "metrics": {"accuracy": spmd.metrics.accuracy},
    "batch_size": 64,
    "eval_data": test,
}

# %% [markdown]
# ## Parameter servers and workers
#
# `replica_device_setter` put each variable on a server. In spmd the servers are simulated, their
# updates are real, and a layout sets the placement. Two servers, the largest parameters first:


# %%
def server_layout(**options):
    return spmd.Layout(
        gradients=spmd.Gradients("parameter_server"),
        parameter_server=spmd.ParameterServer(**options),
    )


trainer = spmd.Trainer(
    make,
    loss=how["loss"],
    optimizer=optax.sgd(0.1),
    layout=server_layout(placement="largest_first", servers=2),
)
print(*trainer.notes(), sep="\n")

# %% [markdown]
# ## Synchronous, with spares, and asynchronous
#
# The steps of the eight workers vary in length; the median is one simulated second. A synchronous
# step waits for all eight workers, or for six with two spare replicas. Asynchronous workers do not
# wait, and their gradients are stale when they arrive. A line is complete when its run is done.

# %%
times = "lognormal(1.0, 0.5)"
ways = {
    "synchronous": server_layout(compute_time=times),
    "two spares": server_layout(compute_time=times, spares=2),
    "asynchronous": server_layout(
        compute_time=times, mode="asynchronous", staleness_scale="inverse"
    ),
}
print(f"{'':14}{'simulated s':>12}{'accuracy':>10}{'dropped':>9}{'staleness':>11}")
for name, layout in ways.items():
    print(f"{name:14}", end="")
    history = spmd.fit(
        make, train, optimizer=optax.sgd(0.2), layout=layout, epochs=4, progress=False, **how
    ).history
    dropped = sum(history["gradients_dropped"]) if "gradients_dropped" in history else 0
    age = np.mean(history["staleness"]) if "staleness" in history else 0
    print(
        f"{history['simulated_seconds'][-1]:12.0f}{history['eval_accuracy'][-1]:10.3f}{dropped:9.0f}{age:11.1f}"
    )

# %% [markdown]
# Two spares make a step shorter, and a quarter of the gradients are dropped. Without waiting the
# run is shorter still; its gradients are several updates old, and `staleness_scale` divides their
# rate by their age.
#
# ## A run that resumes
#
# `MonitoredTrainingSession` saved checkpoints and resumed from them. So does `fit`. Below, one run
# is stopped after 30 steps and then resumed.

# %% tags=["thumbnail"]
import tempfile

folder = tempfile.mkdtemp() + "/run"
first = spmd.fit(
    make, train, optimizer=optax.adam(2e-3), steps=30, checkpoint=folder, progress=False, **how
)
print("stopped after step", first.state.step)
resumed = spmd.fit(
    make,
    train,
    optimizer=optax.adam(2e-3),
    epochs=4,
    checkpoint=folder,
    resume=True,
    progress=False,
    **how,
)
print("resumed, and done after step", resumed.state.step)
uninterrupted = spmd.fit(make, train, optimizer=optax.adam(2e-3), epochs=4, progress=False, **how)
print(
    "equal to a run that was not stopped:",
    resumed.history["loss"] == uninterrupted.history["loss"][30:],
)
uninterrupted

# %% [markdown]
# ## One network for each device
#
# A search trained a network on each device. In spmd, trials with equal shapes are one compiled
# program.

# %%
sweep = spmd.sweep(
    MLP,
    train,
    space={"learning_rate": spmd.log_uniform(1e-4, 3e-2), "seed": range(100)},
    optimizer=lambda learning_rate: optax.adam(learning_rate),
    trials=8,
    epochs=4,
    **how,
)
sweep

# %% [markdown]
# The ensemble of the best three, compared with each of them:

# %%
print(sweep.ensemble().evaluate(test))

# %% [markdown]
# Its log loss is below the mean of its members'; here the best of them alone is better still.
#
# ## Export the model
#
# `SavedModel` and TF Serving needed a signature. In spmd a folder is enough, and loading it needs
# none of this notebook's code.

# %%
export_folder = tempfile.mkdtemp() + "/model"
sweep.best[0].result().export(export_folder)
model = spmd.load_exported(export_folder)
agree = (
    np.asarray(model(test["x"])).argmax(-1) == sweep.best[0].result().predict(test["x"]).argmax(-1)
).mean()
print(f"the same class for {agree:.1%} of {len(test['x'])} digits")
