"""`fit(layout="auto")` in several processes: `python auto_job.py FOLDER`, under `spmd launch`."""

import sys

import jax
import numpy as np
import optax

import spmd
from spmd.planner import auto_layout

spmd.join()
rank, search = jax.process_index(), auto_layout.search
auto_layout.COMPILES = 2


def searching(*given, **options):
    print(f"SEARCHED {rank}", flush=True)
    return search(*given, **options)


def fit(layout="auto", loss=spmd.losses.mean_squared_error, **options):
    data = {
        "x": np.random.default_rng(0).normal(size=(64, 8)).astype("float32"),
        "y": np.ones((64, 1), np.float32),
    }
    model = spmd.FunctionalModel(
        lambda key: {"w": np.zeros((8, 1), np.float32)}, lambda params, x: x @ params["w"]
    )
    given = {"loss": loss, "optimizer": optax.adam(0.1), "batch_size": 32, "progress": False}
    return spmd.fit(model, data, layout=layout, **given, **options)


def wrong(model, batch):
    return model(batch["x"])[:, :, None] @ batch["nothing"]


auto_layout.search = searching
first = fit(checkpoint=sys.argv[1], steps=4)
layout = first.trainer.layout
print(f"LAYOUT {rank} {layout.name} {spmd.MeshSpec(layout.mesh)}", flush=True)
auto_layout.search = None  # a resumed run does not search
again = fit(checkpoint=sys.argv[1], resume=True, steps=8)
assert again.trainer.layout == layout and int(again.state.step) == 8
plain = fit(layout, steps=8)
np.testing.assert_array_equal(first.history["loss"] + again.history["loss"], plain.history["loss"])
auto_layout.search = searching
try:
    fit(loss=wrong, steps=1)
except spmd.SpmdError as error:
    print(f"FAILED {rank} {type(error).__name__} {str(error)!r}", flush=True)
