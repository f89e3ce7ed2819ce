"""Time of a parameter-server step, compared with an all-reduce step.

    python benchmarks/parameter_server.py

On 8 simulated devices, one process, arms interleaved: a synchronous step (aim: at most 1.15 times
an all-reduce step), and an asynchronous round, in which 8 gradients are 8 updates (aim: at most 1.6
times). A step of local workers that synchronize every 10 steps is measured too. There are two
models: an MLP, whose update is expensive compared with its gradient (4 rows on each device), and
the example GPT. The report also has the bytes of state on each device: the servers' share of
parameters and moments, and the exchange state (weights as workers have read them, or their own).
Simulated devices share two cores and their memory: work that eight servers do in parallel on eight
devices is sequential here.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax
import reported
from flax import nnx

import spmd
from examples import gpt

ARMS = {
    "all_reduce": spmd.Layout(gradients=spmd.Gradients("all_reduce")),
    "synchronous": spmd.Layout(gradients=spmd.Gradients("parameter_server")),
    "asynchronous": spmd.Layout(
        gradients=spmd.Gradients("parameter_server"),
        parameter_server=spmd.ParameterServer(mode="asynchronous"),
    ),
    "local, every 10": spmd.Layout(
        gradients=spmd.Gradients("parameter_server"),
        parameter_server=spmd.ParameterServer(mode="local", every=10),
    ),
}
AIMS = {"synchronous": 1.15, "asynchronous": 1.6}


class MLP(nnx.Module):
    """Three square layers of 1024: 3 million parameters."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = (1024,) * 4
        self.layers = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [rows, 1024]."""
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def mlp() -> tuple:
    """Model, loss and a batch."""
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(32, 1024)).astype(np.float32),
        "y": rng.integers(0, 1024, 32).astype(np.int32),
    }
    return lambda: MLP(nnx.Rngs(0)), spmd.losses.cross_entropy, batch


def transformer() -> tuple:
    """The example GPT on random text."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, gpt.VOCAB, (64, 65)).astype(np.int32)
    return (
        gpt.make_model,
        spmd.losses.cross_entropy,
        {"tokens": text[:, :-1], "targets": text[:, 1:]},
    )


class Arm:
    """A trainer on its way: `run` makes some steps and returns seconds per step."""

    def __init__(self, layout: spmd.Layout, made: tuple):
        model, loss, batch = made
        self.trainer = spmd.Trainer(
            model, loss=loss, optimizer=optax.adamw(1e-4), layout=layout, mesh="data=8"
        )
        self.batch = self.trainer.place(batch)
        self.state = self.trainer.init()
        self.run(2)

    def run(self, steps: int) -> float:
        """Seconds per step, all of them finished."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, metrics = self.trainer.step(self.state, self.batch)
        metrics.wait()
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / steps

    def state_bytes(self) -> tuple[int, int]:
        """Bytes on one device: of parameters and optimizer state, and of the exchange's memory."""

        def here(tree):
            return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

        return here((self.state.params, self.state.opt)), here(self.state.exchange)


def main() -> None:
    """Measure, print, and write benchmarks/results/parameter_server.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    command = (
        f"python benchmarks/parameter_server.py --rounds {options.rounds} --steps {options.steps}"
    )
    lines = [
        *reported.head(__doc__.splitlines()[0], command, "jax", "flax", "optax"),
        *__doc__.strip().split("\n\n", 2)[2].split("\n"),
        "",
        "| model | arm | ms per step | of all_reduce | aim | servers' share of state | remembered "
        "|",
        "|---|---|---|---|---|---|---|",
    ]
    for name, made in (("MLP", mlp()), ("GPT", transformer())):
        arms = {kind: Arm(layout, made) for kind, layout in ARMS.items()}
        times = {kind: [] for kind in arms}
        for _ in range(options.rounds):
            for kind, arm in arms.items():
                times[kind].append(arm.run(options.steps))
        for kind, arm in arms.items():
            ratio = statistics.median(
                mine / other for mine, other in zip(times[kind], times["all_reduce"], strict=True)
            )
            aim = AIMS.get(kind)
            verdict = "" if aim is None else f"{aim} {'ok' if ratio <= aim else 'MISSED'}"
            size = " | ".join(f"{part / 2**20:.2f} MiB" for part in arm.state_bytes())
            lines.append(
                f"| {name} | {kind} | {1e3 * statistics.median(times[kind]):.1f} | {ratio:.2f} | "
                f"{verdict} | {size} |"
            )
            print(lines[-1], flush=True)
    reported.write("parameter_server", lines)


if __name__ == "__main__":
    main()
