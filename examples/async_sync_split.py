"""Train on digits in three ways on eight devices: a synchronous parameter server, an asynchronous
one, and a model split over all devices.

    python examples/async_sync_split.py --epochs 8

All three read each row equally often and start from the same model and initial values. With the
synchronous server and the split model, a step is one update from 64 rows; the split model's layers
are on different devices. With the asynchronous server, a step is a round of all gradients that
arrive, each from 8 rows and each a separate update. Simulated devices share this machine's cores,
so real steps per second compare programs, not hardware. Simulated seconds come from the server's
clock.
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import digits_cnn

BATCH = 64


class Block(nnx.Module):
    """A dense layer with a residual connection."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.dense = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[rows, width] to the same."""
        return x + 0.5 * nnx.relu(self.dense(x))


class Net(nnx.Module):
    """From 64 pixels through a stack of blocks to ten digits."""

    def __init__(self, depth: int, width: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.blocks = spmd.nn.LayerStack(
            spmd.nn.repeat(depth, lambda rngs: Block(width, rngs), rngs)
        )
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [rows, 10]."""
        return self.head(self.blocks(self.first(x)))


def ways(devices: int, times: str) -> dict[str, tuple[str, spmd.Layout]]:
    """The mesh and the layout of each of the three ways, for this many devices."""
    gradients = spmd.Gradients("parameter_server")
    synchronous = spmd.Layout(
        gradients=gradients, parameter_server=spmd.ParameterServer(compute_time=times)
    )
    server = spmd.ParameterServer(
        compute_time=times, mode="asynchronous", staleness_scale="inverse"
    )
    asynchronous = spmd.Layout(gradients=gradients, parameter_server=server)
    split = spmd.Layout(
        pipeline=spmd.Pipeline("stage", microbatches=8), gradients=spmd.Gradients("all_reduce")
    )
    return {
        "synchronous": (f"data={devices}", synchronous),
        "asynchronous": (f"data={devices}", asynchronous),
        "split": (f"data=1,stage={devices}", split),
    }


class Run(NamedTuple):
    """The measurements of one way."""

    result: spmd.Result
    steps_per_second: float

    def row(self, name: str, rows: int) -> str:
        """A line of the table."""
        history = self.result.history
        seconds = (
            f"{history['simulated_seconds'][-1]:.1f}"
            if "simulated_seconds" in history.names
            else "-"
        )
        updates = (
            int(sum(history["updates"])) if "updates" in history.names else len(history["loss"])
        )
        staleness = (
            f"{np.average(history['staleness'], weights=history['gradients_applied']):.1f}"
            if "staleness" in history.names
            else "0"
        )
        loss, accuracy = history["eval_loss"][-1], history["eval_accuracy"][-1]
        return (
            f"{name:13} {rows:8,} {updates:8,} {staleness:>9} {self.steps_per_second:8.1f} "
            f"{seconds:>12} {loss:7.3f} {accuracy:9.3f}"
        )


def main(argv: list[str] | None = None) -> dict[str, Run]:
    """Train in each way; return the measurements by name."""
    parser = argparse.ArgumentParser(
        description="Synchronous, asynchronous and split training of one model, side by side."
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        help="CPU devices to simulate, and stages; 0 uses those there are",
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1536, help="rows to learn from, of 1536")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument(
        "--times", default="lognormal(1.0, 0.5)", help="seconds of a gradient on the server's clock"
    )
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)
    parts = digits_cnn.load_data()
    train, test = (
        {"image": part["image"][: args.rows].reshape(-1, 64), "label": part["label"][: args.rows]}
        for part in parts
    )
    count, runs = jax.device_count(), {}
    print(
        f"{'':13} {'examples':>8} {'updates':>8} {'staleness':>9} {'steps/s':>8} "
        f"{'simulated s':>12} {'loss':>7} {'accuracy':>9}"
    )
    for name, (mesh, layout) in ways(count, args.times).items():
        ended: list[float] = []
        result = spmd.fit(
            lambda: Net(count, args.width, nnx.Rngs(0)),
            train,
            loss=spmd.losses.cross_entropy,
            optimizer=optax.sgd(args.rate),
            mesh=mesh,
            layout=layout,
            batch_size=BATCH,
            epochs=args.epochs,
            eval_data=test,
            metrics={"accuracy": spmd.metrics.accuracy},
            callbacks=[lambda info: ended.append(time.perf_counter())],
            progress=False,
        )
        gaps = [after - before for before, after in itertools.pairwise(ended)]
        runs[name] = Run(result, 1 / statistics.median(gaps))
        print(runs[name].row(name, args.epochs * len(train["label"])), flush=True)
    return runs


if __name__ == "__main__":
    main()
