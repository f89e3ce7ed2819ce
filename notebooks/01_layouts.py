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
# # One model, six layouts
#
# A layout says where every array lives and how gradients are reduced. It is a file, separate from
# the model. Here one small network is trained under six of the shipped layouts, on the same eight
# devices and the same digits. The notebook reads from the runs what each device holds, what it
# sends, and by how much the losses differ.

# %%
import math

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import Markdown
from sklearn.datasets import load_digits

import spmd

spmd.simulate_devices(8)  # before anything else: JAX counts its devices once

# %% [markdown]
# ## Data and a model
#
# 1,797 digits of 8x8 pixels, and three dense layers. The names on the kernels say what each dim is
# for. A layout that shards by name maps them to mesh axes; other layouts ignore them.

# %%
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
pixels, labels = (digits.data[order] / 16).astype("float32"), digits.target[order].astype("int32")
train = {"image": pixels[:1536], "label": labels[:1536]}


class MLP(nnx.Module):
    """64 pixels, 256 and 64 hidden units, ten digits."""

    def __init__(self, rngs):
        def named(*names):
            return nnx.with_partitioning(nnx.initializers.he_normal(), names)

        self.up = nnx.Linear(64, 256, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(256, 64, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.head = nnx.Linear(64, 10, kernel_init=named("embed", None), rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.down(nnx.relu(self.up(x)))))


with nnx.use_eager_sharding(False):  # the layouts use the names; Flax must not
    model = MLP(nnx.Rngs(0))

# %% [markdown]
# ## Six runs
#
# Only the name of the layout changes. `fit` copies the model, so all runs start from the same
# weights. Each layout has its own mesh: the first four have eight workers, `data=8`; the last two
# have four workers of two devices each, `data=4,model=2`. Each run compiles a program and takes a
# few seconds; its line is complete when it is done.

# %%
LAYOUTS = (
    "data_parallel",
    "zero1",
    "fsdp",
    "parameter_server",
    "tensor_parallel",
    "fsdp_tensor_parallel",
)


def fit(layout):
    return spmd.fit(
        model,
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(2e-3),
        layout=layout,
        batch_size=128,
        epochs=4,
        progress=False,
    )


runs = {}
for layout in LAYOUTS:
    print(f"{layout:22}", end="")
    runs[layout] = fit(layout)
    print(runs[layout].trainer.layout.description)

# %% [markdown]
# ## What a device holds, and what it sends
#
# The state of a run is made of ordinary JAX arrays, and an array knows the shape of its shard on
# one device. `trainer.wire` lists what a step sends, as read from the traced program. The loss is
# that of the last step; the last column is the largest difference from the first layout's loss in
# any step.


# %%
def bytes_per_device(arrays):
    """Bytes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )


loss = {layout: np.array(run.history["loss"]) for layout, run in runs.items()}
params = {layout: bytes_per_device(run.state.params) for layout, run in runs.items()}
moments = {layout: bytes_per_device(run.state.opt) for layout, run in runs.items()}
sent = {layout: run.trainer.wire.bytes() for layout, run in runs.items()}
difference = {layout: abs(loss[layout] - loss["data_parallel"]).max() for layout in LAYOUTS}

table = [
    "| layout | parameters, bytes | moments, bytes | sent in a step, bytes | loss | difference |"
]
for layout in LAYOUTS:
    numbers = f"{params[layout]:,} | {moments[layout]:,} | {sent[layout]:,}"
    table.append(f"| {layout} | {numbers} | {loss[layout][-1]:.4f} | {difference[layout]:.1e} |")
Markdown("\n".join([table[0], "|:--|--:|--:|--:|--:|--:|", *table[1:]]))

# %% [markdown]
# - **One loss.** In every step the six losses agree, to rounding. A layout changes where numbers
#   are, not what they are.
# - **`zero1`** keeps an eighth of the moments on a device, and sends what `data_parallel` sends: an
#   all-reduce is a reduce-scatter and an all-gather, and the optimizer can run between the two.
# - **`fsdp`** keeps an eighth of the parameters too, and sends a quarter more bytes: weights are
#   gathered twice, except those of the first layer, which the backward pass does not need.
# - **`parameter_server`**, synchronous and with the workers as its servers, sends the bytes of an
#   all-reduce and has the same losses.
# - **`tensor_parallel`** keeps little more than half of the parameters: some are split in two, the
#   others replicated. Sharded over `data` as well, about an eighth is left.
#
# The table does not show everything that layouts with a `model` axis send: half of a layer's
# outputs are on the other device, and XLA adds collectives for them when it compiles.
# `trainer.wire` lists the collectives of the step itself; `spmd.plan` lists both.
#
# ## Where one array lives
#
# The kernel of the second layer, 256 by 64, under each layout. A box is a shard, and its numbers
# are the devices that hold it, from `sharding.devices_indices_map`. A parameter server stores a
# parameter as rows of one array, one row per worker.

# %% tags=["thumbnail"]
second = {layout: run.state.params["down"]["kernel"] for layout, run in runs.items()}


def draw(axes, array):
    """Draw the shards of a matrix, each labelled with its devices and coloured by the first of
    them.
    """
    height, width = array.shape
    shards = {}
    for device, (rows, columns) in array.sharding.devices_indices_map(array.shape).items():
        shards.setdefault((rows.indices(height)[:2], columns.indices(width)[:2]), []).append(
            device.id
        )
    for ((top, bottom), (left, right)), devices in shards.items():
        corner, size = (
            (left / width, top / height),
            ((right - left) / width, (bottom - top) / height),
        )
        colour, label = (
            plt.get_cmap("tab10")(min(devices)),
            " ".join(map(str, devices)) if len(devices) < 8 else "0 to 7",
        )
        axes.add_patch(
            plt.Rectangle(corner, *size, facecolor=colour, edgecolor="white", linewidth=1.5)
        )
        middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
        axes.text(*middle, label, ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_xlabel(f"{height} x {width}", fontsize=8)


figure, panels = plt.subplots(1, len(second), figsize=(11, 2.6))
for axes, (layout, kernel) in zip(panels, second.items(), strict=True):
    draw(axes, kernel)
    axes.set_title(layout, fontsize=9)
plt.show()

# %% [markdown]
# The table shows, for every parameter, the line of the layout that chose its spec:

# %%
runs["fsdp_tensor_parallel"].trainer.summary()

# %% [markdown]
# ## What is sent
#
# Under `fsdp` a device holds an eighth of every weight. `gather_params` gathers the weights for the
# forward pass. It gathers them again where the backward pass needs them, because gathered weights
# are not kept in between. `reduce_gradients` leaves each device its eighth of the mean gradient.

# %%
print(runs["fsdp"].trainer.wire)
