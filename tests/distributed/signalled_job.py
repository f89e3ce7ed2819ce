"""A training script that stops in a phase until it has received SIGTERM: run by `spmd launch`, or
as a process of its own.

`python signalled_job.py FOLDER PHASE RANK`. In the phase, process RANK prints "READY" and waits, in
compiled code: in C++, where Python handles no signals.
"""

import ctypes
import os
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.distributed.watchdog import current
from spmd.run.checkpoint import CheckpointStore
from spmd.train.compiled_functions import CompiledFunctions
from spmd.train.state_factory import StateFactory

FOLDER, PHASE, RANK = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


def wait():
    """Wait for SIGTERM, at most two minutes, as XLA would: the GIL is free, and the main thread
    runs no Python.

    Where something is to save, until the run knows of the request: it may have fewer steps left
    than it makes until then.
    """
    if os.environ.get("SPMD_PROCESS", "0") == RANK and not current().stop_reason:
        print("READY", flush=True)
        remaining, until = 120, time.monotonic() + 120
        while remaining:
            # a signal ends it early
            remaining = ctypes.CDLL(None).sleep(remaining) if PHASE not in LASTING else 0
        while not current().stop_reason and time.monotonic() < until:
            time.sleep(0.01)


def before(kind, name, here=lambda *arguments: True):
    """Wait before each call of a method, where `here` holds."""
    call = getattr(kind, name)

    def waits(*arguments, **options):
        if here(*arguments):
            wait()
        return call(*arguments, **options)

    setattr(kind, name, waits)


def evaluation():
    for at in range(3):
        if PHASE == "evaluate" and at == 1:
            wait()
        yield {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}


LASTING = ("evaluate", "compile later", "write")  # where something is to save
if PHASE == "setup":
    before(StateFactory, "init")
if PHASE == "compile":
    before(CompiledFunctions, "_build", lambda functions, key: key.kind == "step")
if PHASE == "compile later":
    before(CompiledFunctions, "_build", lambda functions, key: key.kind == "evaluate")
if PHASE == "restore":
    before(CheckpointStore, "restore")
if PHASE == "write":
    before(CheckpointStore, "_seal")

model = spmd.FunctionalModel(
    lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"]
)
options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1), "batch_size": 8}
data = {"x": np.ones((64, 4), np.float32), "y": np.ones((64, 1), np.float32)}
result = spmd.fit(
    model,
    data,
    steps=8,
    eval_data=evaluation,
    eval_every=4,
    checkpoint=spmd.Checkpoint(FOLDER, every=2 if PHASE == "write" else 100),
    resume=PHASE == "restore",
    progress=False,
    **options,
)
print("END", int(result.state.step), flush=True)
