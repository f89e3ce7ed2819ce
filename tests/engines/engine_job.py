"""Train a small model in the processes that an engine starts.

Each writes its first step, and a hash of its weights, to a file: engines may lose the last of what
is printed.
"""

import argparse
import hashlib
import itertools
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import spmd


def main(words=None, callbacks=()):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("--kill", action="store_true", help="process 1, once, after step 12")
    parser.add_argument("--wait", action="store_true", help="in process 1, once, after step 12")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(words)
    steps_here = itertools.count()

    def note(text):
        with (options.folder / f"process-{jax.process_index()}").open("a") as file:
            file.write(f"{text}\n")

    def watch(info):
        if next(steps_here) == 0:
            note(f"first step {info.step}")
        disturbed = options.folder / "disturbed"
        if jax.process_index() != 1 or info.step != 12 or disturbed.exists():
            return
        if options.kill:
            disturbed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if options.wait:
            disturbed.touch()
            # A bound, which no test reaches: this process is ended.
            time.sleep(600)

    random = np.random.default_rng(0)
    data = {
        "x": random.normal(size=(144, 6)).astype("float32"),
        "y": random.integers(0, 4, 144).astype("int32"),
    }
    result = spmd.fit(
        lambda: nnx.Linear(6, 4, rngs=nnx.Rngs(0)),
        data,
        batch_size=32,
        steps=20,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1, momentum=0.9),
        checkpoint=spmd.Checkpoint(options.folder / "run", every=5),
        # without it: a process that an engine has started again resumes, too
        resume=options.resume,
        callbacks=[watch, *callbacks],
        progress=False,
    )
    note(f"loss {result.history['loss'][-1]}")
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.params)]
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in weights)).hexdigest()
    note(f"hash {digest[:16]} of {jax.process_count()} processes")


if __name__ == "__main__":
    main()
