"""A run whose sums are exact in any order, with histograms of two steps: `python watched_job.py
FOLDER`, under `spmd launch`.
"""

import sys

import numpy as np
import optax

import spmd

random = np.random.default_rng(0)
data = {
    "x": random.integers(-2, 3, (64, 16)).astype(np.float32),
    "y": random.integers(-2, 3, (64, 8)).astype(np.float32),
}
weights = random.integers(-2, 3, (16, 8)).astype(np.float32)
model = spmd.FunctionalModel(lambda key: {"w": weights}, lambda params, x: x @ params["w"])
step = {
    "loss": spmd.losses.mean_squared_error,
    "optimizer": optax.sgd(2.0**-4),
    "batch_size": 32,
    "shuffle": False,
}
spmd.fit(model, data, layout="fsdp", checkpoint=sys.argv[1], steps=2, watch=1, **step)
