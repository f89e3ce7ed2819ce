"""Two processes trace two steps: `python profiled_job.py FOLDER`, under `spmd launch`."""

import sys

import jax
import numpy as np
import optax

import spmd

data = {"x": np.ones((64, 8), np.float32), "y": np.ones((64, 1), np.float32)}
model = spmd.FunctionalModel(
    lambda key: {"w": np.zeros((8, 1), np.float32)}, lambda params, x: x @ params["w"]
)
step = {
    "loss": spmd.losses.mean_squared_error,
    "optimizer": optax.sgd(0.1),
    "batch_size": 32,
    "steps": 6,
}
result = spmd.fit(model, data, checkpoint=sys.argv[1], profile="2:4", **step)
print(
    f"PROFILED {jax.process_index()} {result.profile!r}; {result.profile and result.profile.notes}",
    flush=True,
)
