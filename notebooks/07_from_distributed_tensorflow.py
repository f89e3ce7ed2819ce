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
# # A distributed TensorFlow 1.x job, here
#
# A cluster of parameter servers and workers, a session that survives, many networks at once, a model that is served: what took a graph,
# a `ClusterSpec` and a script for each job is one program here. Every concept has its pair of programs in
# `docs/from_distributed_tensorflow.md`; this notebook goes once through a job.

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
train, test = ({name: leaf[part] for name, leaf in data.items()} for part in (slice(1536), slice(1536, None)))


class MLP(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.up, self.out = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.up(x)))


def make():
    return MLP()


how = {"loss": spmd.losses.cross_entropy, "metrics": {"accuracy": spmd.metrics.accuracy}, "batch_size": 64, "eval_data": test}

# %% [markdown]
# ## Parameter servers and workers
#
# `replica_device_setter` put each variable on a server. Here the servers are simulated, their updates are real, and the placement is said
# by a layout. Two servers, the largest parameters first:


# %%
def served(**options):
    return spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=spmd.ParameterServer(**options))


trainer = spmd.Trainer(make, loss=how["loss"], optimizer=optax.sgd(0.1), layout=served(placement="largest_first", servers=2))
print(*trainer.notes(), sep="\n")

# %% [markdown]
# ## Synchronous, with spares, and asynchronous
#
# Eight workers, whose steps take as long as they take: the median is one simulated second. A synchronous step waits for all;
# with two spare replicas for six; asynchronously nobody waits, and gradients are old when they arrive.

# %%
times = "lognormal(1.0, 0.5)"
ways = {
    "synchronous": served(compute_time=times),
    "two spares": served(compute_time=times, spares=2),
    "asynchronous": served(compute_time=times, mode="asynchronous", staleness_scale="inverse"),
}
results = {}
for name, layout in ways.items():
    results[name] = spmd.fit(make, train, optimizer=optax.sgd(0.2), layout=layout, epochs=4, progress=False, **how)

# %%
print(f"{'':14}{'simulated s':>12}{'accuracy':>10}{'dropped':>9}{'staleness':>11}")
for name, result in results.items():
    history = result.history
    dropped = sum(history["gradients_dropped"]) if "gradients_dropped" in history else 0
    age = np.mean(history["staleness"]) if "staleness" in history else 0
    print(f"{name:14}{history['simulated_seconds'][-1]:12.0f}{history['eval_accuracy'][-1]:10.3f}{dropped:9.0f}{age:11.1f}")

# %% [markdown]
# ## The session that survives
#
# `MonitoredTrainingSession` saved, and went on from what was saved. So does `fit`: a run that is stopped after some steps, and the rest
# of it.

# %%
import tempfile

folder = tempfile.mkdtemp() + "/run"
first = spmd.fit(make, train, optimizer=optax.adam(2e-3), steps=30, checkpoint=folder, progress=False, **how)
rest = spmd.fit(make, train, optimizer=optax.adam(2e-3), epochs=4, checkpoint=folder, resume=True, progress=False, **how)
whole = spmd.fit(make, train, optimizer=optax.adam(2e-3), epochs=4, progress=False, **how)
print("equal to a run that was not stopped:", rest.history["loss"] == whole.history["loss"][30:])
whole

# %% [markdown]
# ## One network for each device
#
# A search trained a network on each device. Here the trials of equal shapes are one compiled program.

# %%
found = spmd.sweep(
    MLP,
    train,
    space={"learning_rate": spmd.log_uniform(1e-4, 3e-2), "seed": range(100)},
    optimizer=lambda learning_rate: optax.adam(learning_rate),
    trials=8,
    epochs=4,
    progress=False,
    **how,
)
found

# %% [markdown]
# The best three answer together, beside each alone:

# %%
print(found.ensemble().evaluate(test))

# %% [markdown]
# ## A model that is served
#
# `SavedModel` and TF Serving needed a signature. A folder is enough here, and whoever loads it needs none of this notebook's code.

# %%
served_in = tempfile.mkdtemp() + "/model"
found.best[0].result().export(served_in)
model = spmd.load_exported(served_in)
agree = (np.asarray(model(test["x"])).argmax(-1) == found.best[0].result().predict(test["x"]).argmax(-1)).mean()
print(f"the same class for {agree:.1%} of {len(test['x'])} digits")
