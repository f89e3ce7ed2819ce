"""A small training script with faults: run by `spmd launch` in the tests, and by hand."""

import argparse
import ctypes
import dataclasses
import hashlib
import itertools
import os
import signal
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import spmd
from spmd.run import checkpoint, memory_checkpoint
from spmd.run.time_account import _process_start


class MLP(nnx.Module):
    def __init__(self, rngs, wide=0):
        width = 1024 if wide else 16
        self.hidden, self.out = nnx.Linear(6, width, rngs=rngs), nnx.Linear(width, 4, rngs=rngs)
        self.wide = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(wide)])

    def __call__(self, x):
        x = nnx.relu(self.hidden(x))
        for layer in self.wide:
            x = x + nnx.relu(layer(x)) / len(self.wide)
        return self.out(x)


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=1, help="who has it")
    parser.add_argument("--at", type=int, default=25, help="after how many steps")
    parser.add_argument("--after", help="and once this file exists")
    parser.add_argument(
        "--always", action="store_true", help="in every attempt, not only the first"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--no-cache", dest="cache", action="store_false", help="of compiled programs"
    )
    parser.add_argument("--memory-every", type=int, help="steps between two checkpoints in memory")
    parser.add_argument("--wide", type=int, default=0, help="more layers, of 8 MiB of state each")
    parser.add_argument(
        "--layout", help="default: fsdp_bf16 with error feedback, whose residuals must survive, too"
    )
    return parser.parse_args()


def with_feedback(name):
    layout = spmd.Layout.load(name)
    return dataclasses.replace(
        layout, gradients=dataclasses.replace(layout.gradients, error_feedback=True)
    )


def die_while_saving(moment, step):
    """SIGKILL at a moment of writing the first checkpoint after that step, which a thread of Orbax
    does while training continues.
    """
    seal, begin = checkpoint.CheckpointStore._seal, checkpoint.CheckpointStore.save

    def die():
        print(f"FAULT at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def sealed(store):
        if store._writing > step and moment == "save written":
            die()
        if store._writing > step and moment == "save half sealed":
            (folder,) = (store.folder / "checkpoints").glob(
                f"{store._writing}.orbax-checkpoint-tmp*"
            )
            (folder / "manifest.json").write_text('{"algorithm": "sha256", "files": {"st')
            die()
        seal(store)
        if store._writing > step and moment == "save sealed":
            die()

    def save(store, state, at, *rest):
        if moment == "save committed" and store.latest() is not None and store.latest() > step:
            store.wait()
            die()
        result = begin(store, state, at, *rest)
        if at > step and moment == "save begun":
            die()
        return result

    checkpoint.CheckpointStore._seal, checkpoint.CheckpointStore.save = sealed, save


def leave_no_checkpoint_out():
    """Wait for each checkpoint in memory before the next: one that still runs would make the next
    be left out.
    """
    begin = memory_checkpoint.MemoryCheckpoints.save

    def save(memory, *arguments):
        memory.wait()
        begin(memory, *arguments)

    memory_checkpoint.MemoryCheckpoints.save = save


def main():
    print(f"MAIN at {time.time():.3f}", flush=True)
    options = parse_options()
    rank, attempt = (
        int(os.environ.get("SPMD_PROCESS") or os.environ.get("SLURM_PROCID", "0")),
        os.environ.get("SPMD_ATTEMPT", "0"),
    )
    is_faulty = rank == options.rank and (options.always or attempt == "0")
    steps_of_attempt = itertools.count()

    def fault(info):
        if next(steps_of_attempt) == 0:
            print(
                f"FIRST {info.step} in a process that began at {_process_start(time.time()):.3f}",
                flush=True,
            )
        time.sleep(options.pause)
        if options.pause and info.step % 10 == 0:
            print(f"STEP {info.step}", flush=True)
        if info.step == options.at + 1:
            print(f"STEP {info.step} at {time.time()}", flush=True)
        if not is_faulty or info.step != options.at:
            return
        while options.after and not os.path.exists(options.after):
            time.sleep(0.02)
        print(f"FAULT at {time.time()}", flush=True)
        if options.fault == "raise":
            raise ValueError(f"boom on process {rank}")
        if options.fault == "exit":
            sys.exit(3)
        if options.fault == "exit 0":
            sys.exit(0)
        if options.fault == "os exit":
            os._exit(0)
        if options.fault == "stop":
            info.stop("enough")
        if options.fault == "GIL":
            ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, it lets no other thread run
        if options.fault == "sleep":
            time.sleep(1000)
        if options.fault == "wait":  # for what the test does meanwhile
            time.sleep(1)
        while options.fault == "release" and not os.path.exists(f"{options.folder}/released"):
            time.sleep(0.02)
        if options.fault in ("KILL", "STOP", "TERM", "INT"):
            os.kill(os.getpid(), getattr(signal, f"SIG{options.fault}"))

    if options.fault in ("sleep", "release"):
        leave_no_checkpoint_out()
    if is_faulty and options.fault.startswith("save "):
        die_while_saving(options.fault, options.at)
    if is_faulty and options.fault == "leaves":
        sys.exit(0)

    def differs(name):
        return is_faulty and options.fault == name

    random = np.random.default_rng(0)
    data = {
        "x": random.normal(size=(144, 6)).astype("float32"),
        "y": random.integers(0, 4, 144).astype("int32"),
    }
    if options.fault == "nan":
        data["x"][3] = np.nan
    if differs("data"):
        data["x"][-1] += 1
    result = spmd.fit(
        lambda: MLP(nnx.Rngs(int(differs("weights"))), options.wide),
        data,
        batch_size=32,
        steps=options.steps,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.5 if differs("learning rate") else 0.1, momentum=0.9),
        layout="data_parallel"
        if differs("layout")
        else options.layout or with_feedback("fsdp_bf16"),
        checkpoint=spmd.Checkpoint(
            options.folder, every=options.every, memory_every=options.memory_every
        )
        if options.folder
        else None,
        resume=options.resume,
        compile_cache=None if options.cache else False,
        callbacks=[fault, *([spmd.callbacks.CheckReplicas(10)] if differs("callbacks") else [])],
        progress=False,
    )
    replicated = jax.jit(
        lambda tree: tree, out_shardings=jax.NamedSharding(result.trainer.mesh, jax.P())
    )(result.state)
    kept = [
        np.asarray(leaf)
        for leaf in jax.tree.leaves((replicated.params, replicated.opt, replicated.step))
    ]
    print(
        "HASH",
        hashlib.sha256(b"".join(leaf.tobytes() for leaf in kept)).hexdigest()[:16],
        int(replicated.step),
        flush=True,
    )


if __name__ == "__main__":
    main()
