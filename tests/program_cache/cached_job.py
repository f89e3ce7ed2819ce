"""One run in a process of its own, which prints the programs that it compiled, by JAX's own events.
`python cached_job.py '{...}'`.
"""

import json
import os
import signal
import sys

import jax
import jax.monitoring
import numpy as np
import optax
from flax import nnx

import spmd

loaded, programs = [], []


def on_event(event, **details):
    if event == "/jax/compilation_cache/cache_hits":
        loaded.append(event)


def on_duration(event, seconds, **details):
    if event == "/jax/core/compile/backend_compile_duration":
        programs.append((details["fun_name"], bool(loaded)))
        loaded.clear()


class Net(nnx.Module):
    def __init__(self, rngs, width):
        self.first, self.last = nnx.Linear(16, width, rngs=rngs), nnx.Linear(width, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))


def row_losses(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def mean_loss(model, batch):
    return row_losses(model, batch).mean()


def printing_loss(model, batch):
    jax.debug.print("loss")
    return row_losses(model, batch)


def make_small(seed):
    return Net(nnx.Rngs(seed), 8)


class KillAt(spmd.callbacks.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, info):
        if info.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    *,
    width=64,
    rate=1e-3,
    batch_size=32,
    loss="row_losses",
    resident=False,
    kill=None,
    predict=True,
    **options,
):
    draw = np.random.default_rng(0)
    data = {
        "x": draw.normal(size=(100, 16)).astype("float32"),
        "y": draw.integers(0, 8, 100).astype("int32"),
    }
    arguments = {
        "batch_size": batch_size,
        "epochs": 2,
        "eval_data": data,
        "progress": True,
        "layout": "fsdp",
    } | options
    if "checkpoint" in options:
        arguments |= {"checkpoint": spmd.Checkpoint(options["checkpoint"], every=3), "resume": True}
    callbacks = [spmd.callbacks.CheckReplicas(every=2), *([KillAt(kill)] if kill else [])]
    result = spmd.fit(
        lambda: Net(nnx.Rngs(0), width),
        spmd.data.resident(data) if resident else data,
        loss=globals()[loss],
        optimizer=optax.adamw(rate),
        callbacks=callbacks,
        **arguments,
    )
    if predict:
        result.predict(data["x"][:10])
    return result


if __name__ == "__main__":
    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    options = json.loads(sys.argv[1])
    if "SPMD_PROCESSES" not in os.environ:
        spmd.simulate_devices(options.pop("devices", 8))
    of_process_1 = options.pop("of_process_1", {})
    options |= of_process_1 if os.environ.get("SPMD_PROCESS") == "1" else {}
    if options.pop("sweep", False):
        x, y = np.ones((64, 16), np.float32), np.zeros(64, np.int32)
        common = {
            "loss": row_losses,
            "batch_size": 16,
            "search": "grid",
            "eval_data": {"x": x, "y": y},
            "progress": False,
        }
        swept = spmd.sweep(
            make_small,
            {"x": x, "y": y},
            space={"rate": [0.1, 0.2]},
            optimizer=lambda rate: optax.sgd(rate),
            **common,
            **options,
        )
        result = swept.best[0].result()
    else:
        result = train(**options)
    compiled = [name for name, was_loaded in programs if not was_loaded]
    print(
        json.dumps(
            {
                "compiled": compiled,
                "loaded": len(programs) - len(compiled),
                "loss": result.history["loss"][-1],
            }
        )
    )
