"""How fast a state is saved and restored: in memory and on disk, beside plain files, Orbax alone
and torch's DCP, in turns in one run.

The files of all arms are in the system's cache when they are read. The last table has the time by
which a save lengthens a loop of steps.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from reported import head, print_sections, write

import spmd
from spmd.resume import open_checkpoints_in_memory
from spmd.run.checkpoint import CheckpointStore
from spmd.run.config import RunConfig
from spmd.run.memory_restore import newest_in_memory

ARRAYS, SHAPE = 16, (2048, 1024)
STEPS, SAVE_AT = 12, 3

TORCH = """
import sys, time, torch, warnings
import torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
state = {f"{part}/{number}": torch.rand(%d, %d) for part in ("params", "mu", "nu") for number in range(%d)}
for line in sys.stdin:
    how, path = line.split()
    start = time.perf_counter()
    if how == "save":
        saving = dcp.async_save(state, checkpoint_id=path, no_dist=True)
        called = time.perf_counter() - start
        saving.result()
    else:
        called = 0.0
        dcp.load(state, checkpoint_id=path, no_dist=True)
    print(called, time.perf_counter() - start, flush=True)
"""  # noqa: E501


def make_trainer():
    """A model whose state has 3 x 16 arrays, sharded over all devices; and its batch."""

    def make(key):
        keys = jax.random.split(key, ARRAYS)
        return {f"w{number}": jax.random.normal(each, SHAPE) for number, each in enumerate(keys)}

    def apply(params, x):
        return sum(jnp.tanh(x @ w).sum(axis=1, keepdims=True) for w in params.values())

    model = spmd.FunctionalModel(make, apply)
    trainer = spmd.Trainer(
        model, loss=spmd.losses.mean_squared_error, optimizer=optax.adam(1e-3), layout="fsdp"
    )
    rows = np.random.default_rng(0).normal(size=(64, SHAPE[0])).astype(np.float32)
    return trainer, {"x": rows, "y": rows[:, :1]}


def timed(action):
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


class Arms:
    """Saves and restores one state in several ways; each returns (seconds until the call returned,
    until all was written).
    """

    def __init__(self, place, trainer, state, python):
        self.place, self.trainer, self.state, self.step = place, trainer, state, int(state.step)
        config = spmd.Checkpoint(place / "run", memory_every=1)
        self.store = CheckpointStore(config)
        self.memory = open_checkpoints_in_memory(
            RunConfig(checkpoint=config), self.store, trainer, contextlib.ExitStack()
        )
        self.meta = {"mesh": "m", "layout": "l", "storage": None}
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self.content = np.random.default_rng(0).bytes(self.bytes)
        self.torch = None
        if python:
            source = TORCH % (*SHAPE, ARRAYS)
            self.torch = subprocess.Popen(
                [python, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )

    def save_memory(self):
        self.step += 1
        start = time.perf_counter()
        self.memory.copy(self.state, self.step)
        self.memory.save(self.state, self.step, self.meta)
        called = time.perf_counter() - start
        self.memory.wait()
        return called, time.perf_counter() - start

    def restore_memory(self):
        return timed(
            lambda: jax.block_until_ready(
                newest_in_memory(self.memory, self.meta, after=-1).build()
            )
        )[0]

    def save_disk(self):
        self.step += 1
        start = time.perf_counter()
        self.store.save(self.state, self.step, self.meta, {})
        called = time.perf_counter() - start
        self.store.wait()
        return called, time.perf_counter() - start

    def restore_disk(self):
        # a run compares the files with their manifest before it reads them
        step, _ = self.store.newest_intact()
        return timed(
            lambda: jax.block_until_ready(self.store.restore(step, self.trainer.abstract_state)[0])
        )[0]

    def check_disk(self):
        return timed(self.store.newest_intact)[0]

    def save_orbax(self):
        path = self.place / "orbax"
        shutil.rmtree(path, ignore_errors=True)
        with ocp.StandardCheckpointer() as checkpointer:
            start = time.perf_counter()
            checkpointer.save(path, self.state.__dict__)
            called = time.perf_counter() - start
            checkpointer.wait_until_finished()
            return called, time.perf_counter() - start

    def restore_orbax(self):
        with ocp.StandardCheckpointer() as checkpointer:
            return timed(
                lambda: jax.block_until_ready(
                    checkpointer.restore(self.place / "orbax", self.trainer.abstract_state.__dict__)
                )
            )[0]

    def save_torch(self):
        shutil.rmtree(self.place / "torch", ignore_errors=True)
        return self._torch("save")

    def restore_torch(self):
        return self._torch("load")[1]

    def _torch(self, how):
        print(how, self.place / "torch", file=self.torch.stdin, flush=True)
        called, seconds = map(float, self.torch.stdout.readline().split())
        return called, seconds

    def plain(self, folder, *, sync):
        def written():
            with open(folder / "plain", "wb") as file:
                file.write(self.content)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())

        (folder / "plain").unlink(missing_ok=True)
        return timed(written)[0]

    def close(self):
        self.memory.close(remove=True)
        self.store.close()
        if self.torch is not None:
            self.torch.stdin.close()
            self.torch.wait()


def measure(arms, rounds):
    """Seconds by arm, one list entry for each round."""
    seconds, called = {}, {}
    names = [
        ("spmd, memory", "memory"),
        ("spmd, disk", "disk"),
        ("Orbax alone", "orbax"),
        *([("torch DCP, async", "torch")] * bool(arms.torch)),
    ]
    for number in range(rounds + 1):
        one, one_called = {}, {}
        for name, method in names:
            one_called[name], one[f"save: {name}"] = getattr(arms, f"save_{method}")()
            one[f"restore: {name}"] = getattr(arms, f"restore_{method}")()
        one["restore: spmd, disk: comparing with the manifest before it"] = arms.check_disk()
        one["save: plain write and fsync, disk"] = arms.plain(arms.place, sync=True)
        one["save: plain write, memory"] = arms.plain(arms.memory.folder.path, sync=False)
        (arms.memory.folder.path / "plain").unlink()
        if number:  # the first round compiles, and creates files
            for name, value in one.items():
                seconds.setdefault(name, []).append(value)
            for name, value in one_called.items():
                called.setdefault(name, []).append(value)
    return seconds, called


def lengthened(arms, batch, rounds):
    """Seconds that a loop of steps takes, without and with one save in it, by arm; and with it the
    time in the call.
    """
    trainer, totals, state = arms.trainer, {}, arms.state
    placed = trainer.place(batch)
    for number in range(rounds + 1):
        for name in ("no save", "spmd, memory", "spmd, disk"):
            jax.block_until_ready(state)
            start = time.perf_counter()
            for step in range(STEPS):
                state, metrics = trainer.step(state, placed)
                if step == SAVE_AT and name != "no save":
                    arms.step += 1
                    target = arms.memory if name == "spmd, memory" else arms.store
                    target.copy(state, arms.step)
                    metrics.wait()
                    arms.memory.save(
                        state, arms.step, arms.meta
                    ) if target is arms.memory else arms.store.save(state, arms.step, arms.meta, {})
            metrics.wait()
            if number:
                totals.setdefault(name, []).append(time.perf_counter() - start)
            arms.memory.wait()
            arms.store.wait()
    arms.state = state
    return totals


def report(options):
    """The tables."""
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        trainer, batch = make_trainer()
        state = trainer.init()
        state, _ = trainer.step(state, batch)
        arms = Arms(Path(place), trainer, state, options.python)
        try:
            gigabytes = arms.bytes / 1e9
            load = os.getloadavg()[0]
            yield [
                f"{gigabytes:.2f} GB of float32, {3 * ARRAYS} large arrays, sharded over "
                f"{jax.device_count()} CPU devices of one process. "
                f"Arms alternate within each of {options.rounds} rounds. "
                f"Load average of the machine at the start, from other programs: {load:.0f}.",
                "",
            ]
            seconds, called = measure(arms, options.rounds)
            for kind in ("save", "restore"):
                rows = [
                    (name.partition(": ")[2], values)
                    for name, values in seconds.items()
                    if name.startswith(f"{kind}: ")
                ]
                yield [
                    f"### {kind}",
                    "",
                    "| arm | median s | best s | GB/s (median) | call returns after, median s |",
                    "|---|---|---|---|---|",
                    *(
                        f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | "
                        f"{gigabytes / statistics.median(values):.2f} | "
                        + (
                            f"{statistics.median(called[name]):.3f} |"
                            if kind == "save" and name in called
                            else " |"
                        )
                        for name, values in rows
                    ),
                    "",
                ]
            totals = lengthened(arms, batch, options.rounds)
            base = totals["no save"]
            yield [
                f"### a loop of {STEPS} steps with one save",
                "",
                "The save runs on the same cores while training continues; the last column is the "
                "median of the differences in each round.",
                "",
                "| arm | median s | longer by, median s |",
                "|---|---|---|",
                *(
                    f"| {name} | {statistics.median(values):.2f} | "
                    f"{statistics.median(np.subtract(values, base).tolist()):.2f} |"
                    for name, values in totals.items()
                ),
                "",
            ]
        finally:
            arms.close()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--python", help="an interpreter that has torch, for its arm")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk")
    options = parser.parse_args()
    spmd.simulate_devices(options.devices)
    command = f"python benchmarks/checkpoints.py --rounds {options.rounds}" + (
        " --python PYTHON" if options.python else ""
    )
    top = head("Saving and restoring a state", command, "jax", "orbax-checkpoint", "numpy")
    print("\n".join(top))
    write("checkpoints", [*top, *print_sections(report(options))])


if __name__ == "__main__":
    main()
