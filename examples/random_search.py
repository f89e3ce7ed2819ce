"""Run a random search, and compare the ensemble of the best three networks with each of them.

    python examples/random_search.py --trials 16 --epochs 20
    # the same table, in each process
    spmd launch --processes 2 --simulate 4 examples/random_search.py --trials 16 --epochs 20

Networks with different learning rates, widths and seeds train on digits. Networks of one width
share one compiled program over eight simulated devices. Training uses a few digits, selection uses
others, and the test uses the remaining half; `--split` sets the parts.
"""

import argparse
from typing import Any

import numpy as np
import optax
from flax import nnx

import spmd


class MLP(nnx.Module):
    """Two dense layers."""

    def __init__(self, width: int, seed: int):
        rngs = nnx.Rngs(seed)
        self.up, self.out = nnx.Linear(64, width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.up(x)))


def digits(split: int) -> tuple[dict[str, np.ndarray], ...]:
    """Digits for training, for selection and for the test."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(split).permutation(len(y))
    data = {"x": (x[order] / 16).astype(np.float32), "y": y[order].astype(np.int32)}
    return tuple(
        {name: leaf[rows] for name, leaf in data.items()}
        for rows in (slice(512), slice(512, 896), slice(896, None))
    )


def main(trials: int, epochs: int, split: int = 0) -> tuple[Any, Any]:
    """The results of the search, and the evaluation of the best three as an ensemble."""
    train, chosen_by, judged_by = digits(split)
    sweep = spmd.sweep(
        MLP,
        train,
        space={
            "learning_rate": spmd.log_uniform(1e-3, 3e-2),
            "width": [32, 64],
            "seed": range(100),
        },
        optimizer=lambda learning_rate: optax.adam(learning_rate),
        loss=spmd.losses.cross_entropy,
        metrics={"accuracy": spmd.metrics.accuracy},
        trials=trials,
        batch_size=32,
        epochs=epochs,
        eval_data=chosen_by,
        keep=3,
    )
    print(sweep)
    judged = sweep.ensemble().evaluate(judged_by)
    print(f"\n{judged}")
    best = min(member["log loss"] for member in judged.members.values())
    print(f"\nlog loss together {judged.ensemble['log loss']:.4f}, of the best alone {best:.4f}")
    return sweep, judged


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--split", type=int, default=0)
    options = parser.parse_args()
    spmd.simulate_devices(8)
    main(options.trials, options.epochs, options.split)
