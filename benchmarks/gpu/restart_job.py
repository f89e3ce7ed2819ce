"""The job of `restarts.py`: a small GPT, saved every few steps; it prints what happens as lines of
JSON.
"""

import time

BEGAN = time.perf_counter()  # imports are a part of the time to the first step

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402

import spmd  # noqa: E402
from benchmarks.gpu import cases  # noqa: E402
from spmd.program_cache.counts import compilations  # noqa: E402

RESULT = "final_weights.npz"


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def main(folder: str, steps: str, every: str, small: str) -> None:
    step = cases.restarted(small == "1")
    begun = False

    def seen(info: Any) -> None:
        nonlocal begun
        info.metrics["loss"]  # waits for the device
        if not begun:
            begun, counts = True, compilations()
            say(
                "begin",
                step=info.step,
                seconds=time.perf_counter() - BEGAN,
                compiled=counts.compiled,
                loaded=counts.loaded,
            )
        say("step", step=info.step)

    result = spmd.fit(
        step.model,
        step.data(int(steps)),
        batch_size=step.rows,
        steps=int(steps),
        checkpoint=spmd.Checkpoint(Path(folder), every=int(every)),
        resume=True,
        callbacks=[seen],
        progress=False,
        **step.options,
    )
    np.savez(Path(folder) / RESULT, *jax.tree.leaves(jax.tree.map(np.asarray, result.state.params)))
    counts = result.compilations
    say("end", compiled=counts.compiled, loaded=counts.loaded, compiling=counts.seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
