"""Stale gradients and rates: at which learning rates a parameter server trains, by the age of
gradients; each mode at its best rate.

    python benchmarks/staleness.py          # writes benchmarks/results/staleness.md

Everything but the clock is real: arrival times are simulated from a seed, and another run on the
same machine gives the same numbers. All runs compute the same number of gradients of the same
number of digits.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax
from flax import nnx
from reported import head, print_sections, write
from sklearn.datasets import load_digits

import spmd

STALENESS = (0, 1, 4, 16)
RATES = tuple(0.025 * 2**k for k in range(7))
# of a gradient; of a run; the test accuracy that a run should reach
ROWS, EPOCHS, TARGET = 8, 6, 0.9
TIMES = {"workers": 17, "compute_time": "lognormal(1.0, 0.5)"}
MODES = {
    "synchronous": {},
    "2 spares": {"spares": 2},
    "asynchronous": {"mode": "asynchronous"},
    "asynchronous, scaled": {"mode": "asynchronous", "staleness_scale": "inverse"},
    "DiLoCo, every 10": {"mode": "local", "every": 10, "outer_rate": 0.7, "outer_momentum": 0.9},
}


class MLP(nnx.Module):
    """64 pixels, 64 hidden units, ten digits."""

    def __init__(self, rngs):
        self.hidden, self.head = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


@dataclasses.dataclass(frozen=True)
class Run:
    """Simulated seconds and test accuracy at each evaluation, and the share of gradients that were
    dropped.
    """

    seconds: np.ndarray
    accuracy: np.ndarray
    dropped: float

    @property
    def final(self) -> float:
        """The mean over the last epoch: single evaluations are noisy where training is unstable."""
        return self.accuracy[-max(1, len(self.accuracy) // EPOCHS) :].mean()

    @property
    def seconds_to_target(self) -> float:
        return next(
            (
                second
                for second, reached in zip(self.seconds, self.accuracy, strict=True)
                if reached >= TARGET
            ),
            np.inf,
        )


def split() -> tuple[dict, dict]:
    """1,360 digits for training, which are 170 gradients: a number that 1, 2, 5 and 17 workers
    divide.
    """
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    pixels, labels = (
        (digits.data[order] / 16).astype("float32"),
        digits.target[order].astype("int32"),
    )
    return {"image": pixels[:1360], "label": labels[:1360]}, {
        "image": pixels[1360:],
        "label": labels[1360:],
    }


def measure(server: spmd.ParameterServer, rate: float) -> Run:
    """One run by plain gradient descent, evaluated five times per epoch."""
    train, test = split()
    history = spmd.fit(
        lambda: MLP(nnx.Rngs(0)),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(rate),
        metrics={"accuracy": spmd.metrics.accuracy},
        # workers are simulated, so one device is enough for any number
        mesh=jax.sharding.Mesh(jax.devices()[:1], ("data",)),
        layout=spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=server),
        batch_size=ROWS * server.workers,
        epochs=EPOCHS,
        eval_data=test,
        eval_every=max(1, len(train["label"]) // (5 * ROWS * server.workers)),
        progress=False,
    ).history
    rows = list(history.rows())
    seconds = {row["step"]: row["simulated_seconds"] for row in rows}
    dropped = sum(row.get("gradients_dropped", 0.0) for row in rows)
    computed = dropped + sum(row.get("gradients_applied", 0.0) for row in rows)
    at = [seconds[row["step"]] for row in history.evaluations]
    return Run(np.array(at), np.array(history["eval_accuracy"]), dropped / max(computed, 1))


def by_age() -> list[str]:
    """Every gradient takes one second, so that a gradient of W workers is W - 1 versions old when
    it arrives.
    """
    lines = [
        "Final accuracy by staleness and rate, with the rate as it is, and divided by the "
        f"staleness (target {TARGET:g}).",
        "",
    ]
    lines += [
        "| staleness | scaled | "
        + " | ".join(f"{rate:g}" for rate in RATES)
        + " | largest rate that reaches it | on a quadratic |"
    ]
    lines += ["|---|---" + "|--:" * (len(RATES) + 2) + "|"]
    fresh = None
    for age in STALENESS:
        for scale in ("none", "inverse"):
            server = spmd.ParameterServer(
                workers=age + 1, mode="asynchronous", staleness_scale=scale
            )
            if scale == "none" or age > 1:  # else the scale is 1: the same runs once more
                finals = [measure(server, rate).final for rate in RATES]
            largest = max(
                (rate for rate, final in zip(RATES, finals, strict=True) if final >= TARGET),
                default=np.nan,
            )
            fresh = fresh or largest
            # gradient descent on a quadratic of curvature a is stable up to the rate 2 sin(pi / (2
            # (2 tau + 1))) / a
            limit = f"{np.sin(np.pi / (2 * (2 * age + 1))):.3f}" if scale == "none" else ""
            share = f"{largest:g} ({largest / fresh:.3g} of that of fresh ones)"
            lines += [
                f"| {age} | {scale == 'inverse'} | "
                + " | ".join(f"{final:.3f}" for final in finals)
                + f" | {share} | {limit} |"
            ]
    return [*lines, ""]


def at_best_rates() -> list[str]:
    """Times vary: each mode at the rate with which it reaches the target first, or else ends
    best.
    """
    lines = [
        f"17 workers whose times are {TIMES['compute_time']}: each mode at the rate with which it "
        f"reaches {TARGET:g} first.",
        "",
    ]
    lines += [
        "| mode | rate | final accuracy | simulated seconds to the target | of the run | dropped |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, options in MODES.items():
        runs = {rate: measure(spmd.ParameterServer(**TIMES, **options), rate) for rate in RATES}
        rate, run = min(runs.items(), key=lambda item: (item[1].seconds_to_target, -item[1].final))
        lines += [
            f"| {name} | {rate:g} | {run.final:.3f} | {run.seconds_to_target:.1f} | "
            f"{run.seconds[-1]:.1f} | {run.dropped:.0%} |"
        ]
    return lines


def sections() -> Iterator[list[str]]:
    yield head(
        "Stale gradients and rates",
        "python benchmarks/staleness.py",
        "jax",
        "jaxlib",
        "flax",
        "optax",
    )
    yield by_age()
    yield at_best_rates()


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    # most runs use a program that an earlier one has compiled
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        write("staleness", print_sections(sections()))


if __name__ == "__main__":
    main()
