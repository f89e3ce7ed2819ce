"""A sweep in a process of its own: `python sweep_job.py FOLDER [CHUNK STEP]`. Prints the table.

With a chunk and a step, it kills itself where that checkpoint is written but not committed.
"""

import sys
from pathlib import Path

import numpy as np
import optax
from flax import nnx

import spmd
from tests.run.job import kill_before_seal


class Net(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.up, self.out = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.up(x)))


def main(folder, epochs=12):
    x = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
    data = {"x": x, "y": x[:, :3].argmax(1).astype(np.int32)}
    result = spmd.sweep(
        Net,
        data,
        space={"rate": spmd.log_uniform(1e-3, 1e-1), "seed": range(100)},
        optimizer=lambda rate: optax.adam(rate),
        loss=spmd.losses.cross_entropy,
        trials=16,
        at_once=8,
        batch_size=32,
        epochs=epochs,
        eval_data=data,
        checkpoint=folder,
        resume=Path(folder).exists(),
        steps_per_call=3,
    )
    print(result.to_csv(), end="")


if __name__ == "__main__":
    spmd.simulate_devices(8)
    if sys.argv[2:]:
        kill_before_seal(int(sys.argv[3]), Path(sys.argv[1]) / "chunks" / sys.argv[2])
    main(sys.argv[1])
