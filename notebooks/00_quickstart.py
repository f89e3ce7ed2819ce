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
# # Eight devices in a notebook
#
# This notebook trains a small convolutional network on real digits over eight devices, then shards
# the same model differently by changing one line. The devices are simulated on the CPU, so it runs
# on any laptop; on a machine with GPUs, leave out `simulate_devices` and nothing else changes.

# %%
import optax
from flax import nnx

import spmd

spmd.simulate_devices(8)  # before anything else: JAX counts its devices once

# %% [markdown]
# ## Data and a model
#
# 1,797 handwritten digits of 8x8 pixels come with scikit-learn. The model is plain Flax and does
# not mention devices. It only names the dims of its kernels, with `nnx.with_partitioning`. Layouts
# map these names to mesh axes.

# %%
import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images, labels = (
    (digits.images[order, :, :, None] / 16).astype("float32"),
    digits.target[order].astype("int32"),
)
train, test = (
    {"image": images[:1536], "label": labels[:1536]},
    {"image": images[1536:], "label": labels[1536:]},
)


class CNN(nnx.Module):
    """One convolution with BatchNorm, then two dense layers."""

    def __init__(self, *, rngs):
        def named(*names):
            return nnx.with_partitioning(nnx.initializers.he_normal(), names)

        self.conv = nnx.Conv(
            1, 32, (3, 3), kernel_init=named(None, None, None, "hidden"), use_bias=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 32, 128, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.head = nnx.Linear(128, 10, kernel_init=named("mlp", None), rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = x.reshape(-1, 4, 2, 4, 2, 32).max(axis=(2, 4))  # the largest of every 2x2 pixels
        return self.head(nnx.relu(self.dense(x.reshape(len(x), -1))))


# %% [markdown]
# ## Fit
#
# A *mesh* names the devices along axes; a *layout* says where every array lives. `data_parallel`
# keeps the whole model on every device and shards the batch. Compiling takes a few seconds; then
# the bar and its curve follow the steps.


# %%
def fit(mesh, layout):
    return spmd.fit(
        lambda: CNN(rngs=nnx.Rngs(0)),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(2e-3),
        mesh=mesh,
        layout=layout,
        batch_size=128,
        epochs=5,
        eval_data=test,
        metrics={"accuracy": spmd.metrics.accuracy},
        progress=True,
    )


result = fit(mesh="data=8", layout="data_parallel")

# %% [markdown]
# A result plots what was measured: lines are steps, dots are evaluations. `result.history` has the
# numbers, and `spmd.viz.curve(result.history, "curve.png")` saves the plot as an image.

# %%
result

# %% [markdown]
# ## Where the arrays are
#
# The kernel of the dense layer is replicated: eight devices, eight copies. Only the batch is
# sharded.

# %%
from spmd import viz

viz.pieces(result.state.params["dense"]["kernel"], "dense/kernel")

# %% [markdown]
# ## Another layout, one line changed
#
# The same eight devices as four workers, each of two devices:

# %%
viz.devices("data=4,model=2")

# %% [markdown]
# This layout shards layers over `model`, and everything over `data` as well. Model, data and loss
# are the same, and so are the results.

# %%
sharded = fit(mesh="data=4,model=2", layout="fsdp_tensor_parallel")

# %% [markdown]
# Now each device holds a different eighth of that kernel.

# %% tags=["thumbnail"]
viz.pieces(sharded.state.params["dense"]["kernel"], "dense/kernel")

# %% [markdown]
# The full table lists every parameter, its spec, and the line of the layout that chose it.

# %%
sharded.trainer.summary()

# %% [markdown]
# The largest difference between the losses of the two layouts, over all steps, and the accuracy of
# both:

# %%
difference = np.abs(np.array(result.history["loss"]) - np.array(sharded.history["loss"]))
accuracies = [run.history["eval_accuracy"][-1] for run in (result, sharded)]
print(
    f"largest difference {difference.max():.1e}; test accuracy {accuracies[0]:.3f} and "
    f"{accuracies[1]:.3f}"
)

# %% [markdown]
# The two runs differ by no more than rounding, because sums are computed in a different order. A
# layout changes where the numbers are, not what they are. [Six layouts](01_layouts.ipynb) are
# compared in the next notebook.
