"""Training on batches whose number is not known: `unknown_length_job.py FOLDER STEPS`; 4 batches in
an epoch, evaluated after each.
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax

import spmd


class Batches:
    def __iter__(self):
        rng = np.random.default_rng(0)
        for _ in range(4):
            yield {
                "x": rng.normal(size=(4, 3)).astype(np.float32),
                "y": rng.normal(size=(4, 1)).astype(np.float32),
            }


def main():
    folder, steps = sys.argv[1], int(sys.argv[2])
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((3, 1))}, lambda params, x: x @ params["w"]
    )
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.sgd(0.1),
        "layout": "data_parallel",
        "progress": False,
    }
    data, resume = Batches(), steps > 6
    spmd.fit(
        model,
        data,
        steps=steps,
        resume=resume,
        checkpoint=folder,
        eval_data=next(iter(data)),
        log_every=1,
        **options,
    )


if __name__ == "__main__":
    main()
