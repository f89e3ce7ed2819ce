"""Whether the outer exchange of `wire.local_sgd` runs beside the products of inner steps, in
programs that XLA:GPU compiles for 16 H100.

    # writes benchmarks/results/outer_overlap.md
    pip install '.[gpu-compiler]'; python benchmarks/outer_overlap.py

No GPU is needed: the programs are compiled for a description of the cluster, and read. In the
scheduled program of one device, a collective is in flight between its start and its done; the
products (GEMMs) that stand there run beside it.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reported
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from spmd import wire
from spmd.planner.cluster import Cluster
from spmd.planner.compile import topology

WIDTH, LAYERS, EVERY, STEPS, ROWS = 4096, 4, 4, 8, 512
PROGRAMS = {
    "one step, sent in a `lax.cond`": lambda one, params, state, batches: one(
        (params, state), batches[0]
    ),
    "a `lax.scan` over 8 steps": lambda one, params, state, batches: jax.lax.scan(
        lambda carry, batch: (one(carry, batch), None), (params, state), batches
    )[0],
    "8 steps written out": lambda one, params, state, batches: functools.reduce(
        one, list(batches), (params, dataclasses.replace(state, step=np.int32(0)))
    ),
}


def loss(params, x):
    for number in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{number}"])
    return jnp.mean(x**2)


def program_text(run, overlap, mesh):
    """The scheduled program of one device."""
    tx = wire.local_sgd(
        "data",
        inner=optax.adamw(1e-3),
        outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        every=EVERY,
        overlap=overlap,
    )
    params = {
        f"layer_{number}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        for number in range(LAYERS)
    }
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(tx.init, params)

    def one(carry, batch):
        params, state = carry
        updates, state = tx.update(
            jax.grad(loss)(wire.local_params(state, params), batch), state, params
        )
        return optax.apply_updates(params, updates), state

    specs = (jax.tree.map(lambda _: P(), params), wire.specs(state), P(None, "data"))
    batches = jax.ShapeDtypeStruct((STEPS, mesh.size * ROWS, WIDTH), jnp.float32)
    step = jax.shard_map(
        functools.partial(run, one), mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False
    )
    arguments = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        (params, state, batches),
        specs,
    )
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().as_text()


def products_beside(text):
    """Of each all-reduce, in the program's order: the number of products between its start and its
    done.
    """
    started, counts = {}, []
    for number, line in enumerate(lines := text.splitlines()):
        if found := re.search(r"%(all-reduce-start[.\d]*) = ", line):
            started[found[1]] = number
        if found := re.search(r"all-reduce-done\(%(all-reduce-start[.\d]*)\)", line):
            counts.append(sum("gemm" in between for between in lines[started[found[1]] : number]))
    return counts


def main():
    jax.config.update("jax_platforms", "cpu")
    cluster = Cluster.parse("2x8xh100")
    devices = get_topology_desc(**topology(cluster)).devices
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    lines = reported.head(
        "The outer exchange beside inner steps",
        "python benchmarks/outer_overlap.py",
        "jax",
        "jax-cuda13-plugin",
    )
    lines += [__doc__.strip().split("\n\n")[-1], ""]
    lines += [
        f"{LAYERS} layers of {WIDTH} x {WIDTH}, {ROWS} rows per GPU, DiLoCo every {EVERY} steps. "
        "Each number is of one all-reduce.",
        "",
    ]
    lines += ["| program | overlap | products beside each all-reduce |", "|---|---|---|"]
    for name, run in PROGRAMS.items():
        for overlap in (0, 1):
            counts = products_beside(program_text(run, overlap, mesh))
            lines.append(f"| {name} | {overlap} | {', '.join(map(str, counts))} |")
            print(lines[-1], flush=True)
    reported.write("outer_overlap", lines)


if __name__ == "__main__":
    main()
