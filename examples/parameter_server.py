"""Digits by a parameter server: synchronous, with spares, and asynchronous, over steps and over simulated seconds.

    python examples/parameter_server.py --workers 8 --epochs 10

Prints, for every way, the test accuracy, the simulated seconds it took, and how old the gradients were.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.digits_cnn import load_data

TIMES = "lognormal(1.0, 0.5)"
WAYS = {
    "synchronous": spmd.ParameterServer(compute_time=TIMES),
    "2 spares": spmd.ParameterServer(compute_time=TIMES, spares=2),
    "asynchronous": spmd.ParameterServer(compute_time=TIMES, mode="asynchronous"),
    "asynchronous, scaled": spmd.ParameterServer(compute_time=TIMES, mode="asynchronous", staleness_scale="inverse"),
    "bounded by 2": spmd.ParameterServer(compute_time=TIMES, mode="bounded", bound=2),
    "2-softsync": spmd.ParameterServer(compute_time=TIMES, mode="softsync", splits=2, staleness_scale="inverse"),
}


class MLP(nnx.Module):
    """64 pixels, two hidden layers, ten digits."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [rows, 10]."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def train(server: spmd.ParameterServer, data: tuple, *, epochs: int, rate: float) -> spmd.Result:
    """One run."""
    layout = spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=server)
    return spmd.fit(
        lambda: MLP(nnx.Rngs(0)),
        data[0],
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(rate),
        metrics={"accuracy": spmd.metrics.accuracy},
        layout=layout,
        batch_size=64,
        epochs=epochs,
        eval_data=data[1],
        progress=False,
    )


def main(argv: list[str] | None = None) -> dict[str, spmd.Result]:
    """Every way in turn; returns the results by name."""
    parser = argparse.ArgumentParser(description="Digits by a parameter server, in every way.")
    parser.add_argument("--workers", type=int, default=8, help="CPU devices to simulate; 0 uses the devices there are")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.2)
    args = parser.parse_args(argv)
    if args.workers:
        spmd.simulate_devices(args.workers)
    train_data, test_data = ({"image": part["image"].reshape(len(part["image"]), -1), "label": part["label"]} for part in load_data())
    results = {}
    print(f"{'':22} accuracy  simulated s  rounds  mean staleness")
    for name, server in WAYS.items():
        found = results[name] = train(server, (train_data, test_data), epochs=args.epochs, rate=args.rate)
        history, rounds = found.history, int(found.state.step)
        staleness = 0.0
        if "staleness" in history.names:
            staleness = float(np.average(history["staleness"], weights=np.maximum(history["gradients_applied"], 1e-9)))
        seconds = history["simulated_seconds"][-1]
        print(f"{name:22} {history['eval_accuracy'][-1]:8.3f} {seconds:12.1f} {rounds:7d} {staleness:15.2f}")
    return results


if __name__ == "__main__":
    main()
