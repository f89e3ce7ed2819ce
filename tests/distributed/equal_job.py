"""Small trainings, one after the other in the same processes: `equal_job.py FOLDER '{"name": {...},
...}'`.

Each writes FOLDER/name.npz: all arrays of its final state by path, its losses, and its initial
parameters. With `exact` all numbers that workers add up are small multiples of 1 / GRID, so any
order of additions gives the same bits.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmd

ROWS, BATCH, WIDTH, GRID = 144, 32, 16, 2.0**10


@jax.custom_vjp
def on_grid(x):
    """Round to the nearest multiple of 1 / GRID, in the forward and the backward pass."""
    return jnp.round(x * GRID) / GRID


on_grid.defvjp(lambda x: (on_grid(x), None), lambda _, grad: (on_grid(grad),))


class Dense(nnx.Module):
    """A dense layer; `exact`: its gradients are multiples of 1 / GRID before they are
    communicated.
    """

    def __init__(self, inputs, outputs, names, rngs, exact):
        kernel, bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        self.kernel = nnx.Param(
            nnx.with_partitioning(kernel, names)(rngs.params(), (inputs, outputs))
        )
        self.bias = nnx.Param(nnx.with_partitioning(bias, names[1:])(rngs.params(), (outputs,)))
        self.rounded = on_grid if exact else lambda x: x

    def __call__(self, x):
        return x @ self.rounded(self.kernel[...]) + self.rounded(self.bias[...])


class Block(nnx.Module):
    def __init__(self, rngs, exact):
        self.up, self.down = (
            Dense(WIDTH, 32, ("embed", "mlp"), rngs, exact),
            Dense(32, WIDTH, ("mlp", "embed"), rngs, exact),
        )

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    """A residual stack with dropout; `exact`: see above; else with batch statistics, which are
    averaged over workers without rounding.
    """

    def __init__(self, rngs, exact):
        self.first = Dense(6, WIDTH, (None, "embed"), rngs, exact)
        self.norm = None if exact else nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.blocks = spmd.nn.LayerStack([Block(rngs, exact) for _ in range(4)])
        self.last = Dense(WIDTH, 4, ("embed", None), rngs, exact)

    def __call__(self, x):
        x = self.drop(self.first(x))
        return self.last(self.blocks(x if self.norm is None else self.norm(x)))


def rows(count, spike=None):
    """`spike`: a row that is a million times as large."""
    random = np.random.default_rng(0)
    x, y = (
        random.normal(size=(count, 6)).astype("float32"),
        random.integers(0, 4, count).astype("int32"),
    )
    x[spike if spike is not None else []] *= 2.0**20
    return {"x": x, "y": y}


def read(kind, count, spike=None):
    """The data: arrays that are shuffled and end with a short batch, or batches of which each
    process reads its own rows.
    """
    arrays, rank, processes = rows(count, spike), jax.process_index(), jax.process_count()
    if kind == "arrays":
        return {"data": arrays, "batch_size": BATCH}

    def share(batch):
        return jax.tree.map(
            lambda leaf: leaf[rank * BATCH // processes : (rank + 1) * BATCH // processes], batch
        )

    if kind == "iterable":
        starts = range(0, count - BATCH + 1, BATCH)
        return {
            "data": lambda: (
                share(jax.tree.map(lambda leaf: leaf[start : start + BATCH], arrays))
                for start in starts
            )
        }
    import grain

    records = [jax.tree.map(lambda leaf: leaf[index], arrays) for index in range(count)]
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    shuffled = grain.MapDataset.source(records).seed(5).shuffle().to_iter_dataset(options)
    return {"data": shuffled.batch(BATCH, drop_remainder=True).map(share)}


def mesh_of(text):
    """ "data=2,stage=4 crossed": neighbours on each axis are in different processes, given two
    processes of four devices.
    """
    if text is None or not text.endswith(" crossed"):
        return text
    spec = spmd.MeshSpec.parse(text.removesuffix(" crossed"))
    devices = [jax.devices()[index] for index in (0, 4, 1, 5, 6, 2, 7, 3)]
    return jax.sharding.Mesh(np.array(devices).reshape(tuple(spec.sizes.values())), spec.names)


def train(
    folder,
    name,
    *,
    layout,
    mesh=None,
    exact=True,
    data="arrays",
    count=ROWS,
    rate=0.125,
    skip=None,
    spike=None,
    **options,
):
    """One training; process 0 writes the result. For what `exact` still rounds, see
    `test_processes_match_one.py`.
    """

    def loss(model, batch):
        each = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return on_grid(each) if exact else each

    if "evaluate" in options:
        options["eval_data"] = rows(options.pop("evaluate"))
    if "steps" not in options:
        options.setdefault("epochs", 2)
    if "checkpoint" in options:
        options["checkpoint"] = spmd.Checkpoint(
            options["checkpoint"], every=options.pop("every", None)
        )
    loss = spmd.losses.of_parts(loss) if exact else loss  # each part is rounded to the grid
    optimizer = optax.sgd(rate, momentum=0.5)
    result = spmd.fit(
        lambda: Net(nnx.Rngs(0), exact),
        **read(data, count, spike),
        loss=loss,
        optimizer=spmd.optimizers.skip_spikes(optimizer, **skip) if skip else optimizer,
        mesh=mesh_of(mesh),
        layout=layout,
        **options,
        progress=False,
    )
    trainer = result.trainer
    replicate = jax.jit(lambda tree: tree, out_shardings=jax.NamedSharding(trainer.mesh, jax.P()))

    def by_path(tree, prefix=""):
        return {
            prefix + jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    final = by_path(replicate(result.state)) | by_path(replicate(trainer.init().params), "began ")
    if jax.process_index() == 0:
        kept = [
            name
            for name in ("loss", "eval_loss", "skipped", "loss_scale")
            if name in result.history.names
        ]
        history = {f"history {name}": np.asarray(result.history[name]) for name in kept}
        owners = [device.process_index for device in trainer.mesh.devices.reshape(-1)]
        arrays = {key: np.asarray(leaf) for key, leaf in final.items()}
        np.savez(
            f"{folder}/{name}.npz",
            **arrays,
            **history,
            owners=owners,
            processes=jax.process_count(),
        )


if __name__ == "__main__":
    for name, options in json.loads(sys.argv[2]).items():
        train(sys.argv[1], name, **options)
        print("DONE", name, flush=True)
