"""Two processes whose data is not alike: `uneven_job.py epoch|enough|save|evaluation|rows FOLDER`;
the second has less.
"""

import sys

import equal_job
import jax
import jax.numpy as jnp
import optax

import spmd


def batches(count, last=16):
    """`count` batches of 16 rows, the last of `last` rows; a new iterator each time."""
    arrays, sizes = equal_job.rows(16 * count), [16] * (count - 1) + [last]
    return lambda: (
        jax.tree.map(lambda leaf: leaf[16 * at : 16 * at + size], arrays)
        for at, size in enumerate(sizes)
    )


def main():
    what, folder = sys.argv[1:]
    second = jax.process_index() == 1
    fewer = batches(3 if second else 4)
    options = {
        "epoch": {"data": fewer, "epochs": 3},
        "enough": {"data": fewer, "steps": 3, "checkpoint": folder},
        "save": {"data": fewer, "checkpoint": folder},
        "evaluation": {"data": batches(4), "eval_data": fewer},
        "rows": {"data": batches(4, last=8 if second else 16)},
    }[what]
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((6, 4))}, lambda params, x: x @ params["w"]
    )
    spmd.fit(
        model,
        **options,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        layout="data_parallel",
        progress=False,
    )
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
