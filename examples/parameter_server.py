"""Train on digits, or a character LSTM, with a parameter server: synchronous, with spares,
asynchronous, and with local workers.

    python examples/parameter_server.py --workers 8 --epochs 10
    python examples/parameter_server.py --model lstm       # two minutes

Prints the test loss and accuracy, the simulated seconds and the staleness of the gradients for each
mode.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples import char_lstm, digits_cnn

TIMES = "lognormal(1.0, 0.5)"
WAYS = {
    "synchronous": spmd.ParameterServer(compute_time=TIMES),
    "2 spares": spmd.ParameterServer(compute_time=TIMES, spares=2),
    "asynchronous": spmd.ParameterServer(compute_time=TIMES, mode="asynchronous"),
    "asynchronous, scaled": spmd.ParameterServer(
        compute_time=TIMES, mode="asynchronous", staleness_scale="inverse"
    ),
    "bounded by 2": spmd.ParameterServer(compute_time=TIMES, mode="bounded", bound=2),
    "2-softsync": spmd.ParameterServer(
        compute_time=TIMES, mode="softsync", splits=2, staleness_scale="inverse"
    ),
    # divides the rounds of an epoch, here 24 and 88
    "DiLoCo, every 8": spmd.ParameterServer(compute_time=TIMES, mode="local", every=8),
    "elastic, every 8": spmd.ParameterServer(compute_time=TIMES, mode="elastic", every=8),
}


class MLP(nnx.Module):
    """64 pixels, two hidden layers, ten digits."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(
            [
                nnx.Linear(64, 128, rngs=rngs),
                nnx.Linear(128, 64, rngs=rngs),
                nnx.Linear(64, 10, rngs=rngs),
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [rows, 10]."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class Task(NamedTuple):
    """A model, data to train on and to test with, an optimizer for a rate, and how it is usually
    run.
    """

    make: Callable[[], Any]
    data: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    optimizer: Callable[[float], optax.GradientTransformation]
    rate: float
    epochs: int


def digits() -> Task:
    """The 8x8 digits as rows of pixels, by plain gradient descent."""
    train, test = (
        {**part, "image": part["image"].reshape(len(part["image"]), -1)}
        for part in digits_cnn.load_data()
    )
    return Task(lambda: MLP(nnx.Rngs(0)), (train, test), optax.sgd, 0.2, 10)


def lstm() -> Task:
    """The standard library's source, character by character, by Adam as in that example."""

    def adam(rate: float) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    return Task(char_lstm.make_model, char_lstm.load_data(), adam, 5e-3, 1)


TASKS = {"digits": digits, "lstm": lstm}


def train(task: Task, server: spmd.ParameterServer, *, epochs: int, rate: float) -> spmd.Result:
    """One run."""
    return spmd.fit(
        task.make,
        task.data[0],
        loss=spmd.losses.cross_entropy,
        optimizer=task.optimizer(rate),
        metrics={"accuracy": spmd.metrics.accuracy},
        layout=spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=server),
        batch_size=64,
        epochs=epochs,
        eval_data=task.data[1],
        progress=False,
    )


def main(argv: list[str] | None = None) -> dict[str, spmd.Result]:
    """Train in each mode; return the results by name."""
    parser = argparse.ArgumentParser(
        description="Digits, or a character LSTM, by a parameter server, in every way."
    )
    parser.add_argument("--model", choices=TASKS, default="digits")
    parser.add_argument(
        "--workers",
        type=int,
        default=8,
        help="CPU devices to simulate; 0 uses the devices there are",
    )
    parser.add_argument("--epochs", type=int, help="by default the model's own")
    parser.add_argument("--rate", type=float, help="by default the model's own")
    args = parser.parse_args(argv)
    if args.workers:
        spmd.simulate_devices(args.workers)
    task, results = TASKS[args.model](), {}
    print(f"{'':22}   loss  accuracy  simulated s  rounds  mean staleness")
    for name, server in WAYS.items():
        result = results[name] = train(
            task, server, epochs=args.epochs or task.epochs, rate=args.rate or task.rate
        )
        history, rounds = result.history, int(result.state.step)
        staleness = 0.0
        if "staleness" in history.names:
            staleness = float(
                np.average(
                    history["staleness"], weights=np.maximum(history["gradients_applied"], 1e-9)
                )
            )
        seconds, loss = history["simulated_seconds"][-1], history["eval_loss"][-1]
        print(
            f"{name:22} {loss:6.3f} {history['eval_accuracy'][-1]:9.3f} {seconds:12.1f} "
            f"{rounds:7d} {staleness:15.2f}",
            flush=True,
        )
    return results


if __name__ == "__main__":
    main()
