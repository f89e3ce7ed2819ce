"""A loop of a user that resumes, saves, and stops: `loop_job.py FOLDER STOP`. Prints hashes of what
it restores, and at its end.
"""

import hashlib
import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import spmd
from spmd.run.checkpoint_reader import CheckpointReader

folder, stop = sys.argv[1], int(sys.argv[2])
x = np.random.default_rng(0).normal(size=(96, 16)).astype(np.float32)
trainer = spmd.Trainer(
    lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)),
    loss=spmd.losses.mean_squared_error,
    optimizer=optax.adam(1e-2),
    mesh="data=4",
    layout="fsdp",
)


def report(state):
    params = multihost_utils.process_allgather(state.params, tiled=True)
    digest = hashlib.sha256(
        b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    ).hexdigest()
    if jax.process_index() == 0:
        print(f"HASH {digest} {int(state.step)}", flush=True)


if CheckpointReader(folder).steps():
    report(trainer.restore(folder))
info = None
for info in trainer.steps({"x": x, "y": x[:, :8] ** 2}, batch_size=32, epochs=3, resume=folder):
    trainer.save(info, folder)
    if info.step == stop:
        break
if info is not None:
    report(info.state)
