"""Small trainings, one after the other in the same processes: `equal_job.py FOLDER '{"name": {...}, ...}'`.

What each came to goes to FOLDER/name.npz: all arrays of its state by path, its losses, and what it began with. With `exact` all numbers
that workers add up are multiples of 1 / GRID and small: any order of additions gives the same bits.
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
    """To the nearest multiple of 1 / GRID, forwards and backwards."""
    return jnp.round(x * GRID) / GRID


on_grid.defvjp(lambda x: (on_grid(x), None), lambda _, grad: (on_grid(grad),))


class Dense(nnx.Module):
    """A dense layer; `exact`: its gradients are multiples of 1 / GRID before they travel."""

    def __init__(self, inputs, outputs, names, rngs, exact):
        kernel, bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        self.kernel = nnx.Param(nnx.with_partitioning(kernel, names)(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(nnx.with_partitioning(bias, names[1:])(rngs.params(), (outputs,)))
        self.own = on_grid if exact else lambda x: x

    def __call__(self, x):
        return x @ self.own(self.kernel[...]) + self.own(self.bias[...])


class Block(nnx.Module):
    def __init__(self, rngs, exact):
        self.up, self.down = Dense(WIDTH, 32, ("embed", "mlp"), rngs, exact), Dense(32, WIDTH, ("mlp", "embed"), rngs, exact)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    """A residual stack with dropout; `exact`: see above; else with batch statistics, which are averaged over workers as they are."""

    def __init__(self, rngs, exact):
        self.first = Dense(6, WIDTH, (None, "embed"), rngs, exact)
        self.norm = None if exact else nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.blocks = spmd.nn.LayerStack([Block(rngs, exact) for _ in range(4)])
        self.last = Dense(WIDTH, 4, ("embed", None), rngs, exact)

    def __call__(self, x):
        x = self.drop(self.first(x))
        return self.last(self.blocks(x if self.norm is None else self.norm(x)))


def rows(count):
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(count, 6)).astype("float32"), "y": random.integers(0, 4, count).astype("int32")}


def read(kind, count):
    """The data set: arrays that are shuffled and end with a short batch, or whole batches of which each process reads its own rows."""
    arrays, rank, processes = rows(count), jax.process_index(), jax.process_count()
    if kind == "arrays":
        return {"data": arrays, "batch_size": BATCH}
    share = lambda batch: jax.tree.map(lambda leaf: leaf[rank * BATCH // processes : (rank + 1) * BATCH // processes], batch)
    if kind == "iterable":
        starts = range(0, count - BATCH + 1, BATCH)
        return {"data": lambda: (share(jax.tree.map(lambda leaf: leaf[at : at + BATCH], arrays)) for at in starts)}
    import grain

    one = [jax.tree.map(lambda leaf: leaf[at], arrays) for at in range(count)]
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return {"data": grain.MapDataset.source(one).seed(5).shuffle().to_iter_dataset(options).batch(BATCH, drop_remainder=True).map(share)}


def mesh_of(words):
    """ "data=2,stage=4 crossed": on each axis neighbours are in different processes, where there are two of four devices."""
    if words is None or not words.endswith(" crossed"):
        return words
    spec = spmd.MeshSpec.parse(words.removesuffix(" crossed"))
    devices = [jax.devices()[at] for at in (0, 4, 1, 5, 6, 2, 7, 3)]
    return jax.sharding.Mesh(np.array(devices).reshape(tuple(spec.sizes.values())), spec.names)


def train(folder, name, *, layout, mesh=None, exact=True, data="arrays", count=ROWS, rate=0.125, **options):
    """One training; process 0 writes what it came to. What `exact` leaves rounded is said in `test_equal_processes.py`."""

    def loss(model, batch):
        each = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return on_grid(each) if exact else each

    if "evaluate" in options:
        options["eval_data"] = rows(options.pop("evaluate"))
    if "steps" not in options:
        options.setdefault("epochs", 2)
    if "checkpoint" in options:
        options["checkpoint"] = spmd.Checkpoint(options["checkpoint"], every=options.pop("every", None))
    make, loss = lambda: Net(nnx.Rngs(0), exact), spmd.losses.of_parts(loss) if exact else loss  # the grid's rounding is of parts
    result = spmd.fit(
        make, **read(data, count), loss=loss, optimizer=optax.sgd(rate, momentum=0.5), mesh=mesh_of(mesh), layout=layout,
        **options, progress=False,
    )  # fmt: skip
    trainer = result.trainer
    whole = jax.jit(lambda tree: tree, out_shardings=jax.NamedSharding(trainer.mesh, jax.P()))
    named = lambda tree, before="": {before + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    kept = named(whole(result.state)) | named(whole(trainer.init().params), "began ")
    if jax.process_index() == 0:
        told = {f"history {name}": np.asarray(result.history[name]) for name in ("loss", "eval_loss") if name in result.history.names}
        owners = [device.process_index for device in trainer.mesh.devices.reshape(-1)]
        arrays = {key: np.asarray(leaf) for key, leaf in kept.items()}
        np.savez(f"{folder}/{name}.npz", **arrays, **told, owners=owners, processes=jax.process_count())


if __name__ == "__main__":
    for name, given in json.loads(sys.argv[2]).items():
        train(sys.argv[1], name, **given)
        print("DONE", name, flush=True)
