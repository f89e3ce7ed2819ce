"""64 MLPs on digits in one compiled program over 8 simulated devices, against the same 64 one after
the other.

    python benchmarks/sweep.py                      # writes benchmarks/results/sweep.md
    python benchmarks/sweep.py --trials 16 --rounds 1

Both arms include building, compiling, training and evaluating. One after the other is `spmd.fit` on
one device with resident data, 50 steps a call, which is the fastest way of this library to train
one small network; every call traces and compiles its program anew, as 64 calls do. So steps alone
are timed as well, of both: calls of a program that is compiled, a call after the other. In each
round the arms take turns. Each trial of the sweep is held against its lone run.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax
import reported
from flax import nnx

import spmd

WIDTH, BATCH, EPOCHS = 64, 64, 20
TARGET = 0.45
PACKAGES = ("jax", "flax", "optax")


class MLP(nnx.Module):
    def __init__(self, width: int, seed: int):
        rngs = nnx.Rngs(seed)
        self.up, self.out = nnx.Linear(64, width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.up(x)))


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    data = {"x": (x / 16).astype(np.float32), "y": y.astype(np.int32)}
    return (
        {name: leaf[:1536] for name, leaf in data.items()},
        {name: leaf[1536:] for name, leaf in data.items()},
    )


def in_one(trials: int, *, exact: bool) -> tuple[float, Any, float]:
    """Seconds of all of it, what came of it, and seconds of a step of all trials in calls that
    compile nothing.
    """
    from spmd.sweeps.vmapped_trials import VmappedTrials

    train, test = digits()
    steps, timed = VmappedTrials.steps, []

    def measured(self, states, values, rows, weights):
        before, since = self.compilations(), time.perf_counter()
        outputs = jax.block_until_ready(steps(self, states, values, rows, weights))
        if self.compilations() == before:
            timed.append((time.perf_counter() - since, len(weights)))
        return outputs

    VmappedTrials.steps = measured
    began = time.perf_counter()
    swept = spmd.sweep(
        lambda seed: MLP(WIDTH, seed),
        train,
        space={"rate": spmd.log_uniform(1e-4, 1e-2), "seed": range(1000)},
        optimizer=lambda rate: optax.adam(rate),
        loss=spmd.losses.cross_entropy,
        metrics={"accuracy": spmd.metrics.accuracy},
        trials=trials,
        mesh="net=8",
        batch_size=BATCH,
        epochs=EPOCHS,
        eval_data=test,
        keep=trials,
        exact=exact,
    )
    VmappedTrials.steps = steps
    return (
        time.perf_counter() - began,
        swept,
        sum(took for took, _ in timed) / sum(count for _, count in timed),
    )


def one_by_one(swept: Any) -> tuple[float, list[Any]]:
    train, test = digits()
    began, results = time.perf_counter(), []
    for trial in swept.trials:
        values = trial.values
        result = spmd.fit(
            lambda seed=values["seed"]: MLP(WIDTH, seed),
            spmd.data.resident(train),
            optimizer=optax.adam(values["rate"]),
            loss=spmd.losses.cross_entropy,
            metrics={"accuracy": spmd.metrics.accuracy},
            mesh=spmd.make_mesh("data=1", devices=jax.devices()[:1]),
            batch_size=BATCH,
            epochs=EPOCHS,
            seed=values["seed"],
            progress=False,
        )
        result.evaluate(test)
        results.append(result)
    return time.perf_counter() - began, results


def steps_alone(swept: Any) -> float:
    """Seconds of a step of all trials, one after the other; all else is done before the clock
    runs.
    """
    from spmd.data.device_dataset import replicate_arrays
    from spmd.sweeps.train_chunk import Piece, Rows

    train, _ = digits()
    mesh = spmd.make_mesh("data=1", devices=jax.devices()[:1])
    spent, total, program = 0.0, 0, None
    for trial in swept.trials:
        values = trial.values
        trainer = spmd.Trainer(
            lambda seed=values["seed"]: MLP(WIDTH, seed),
            optimizer=optax.inject_hyperparams(optax.adam)(1.0),
            loss=spmd.losses.cross_entropy,
            mesh=mesh,
        )
        reader = spmd.data.sources.as_source(
            train, batch_size=BATCH, shuffle=True, seed=values["seed"]
        )
        trial_program, _ = trainer.prepare(reader.sample())
        program, state = program or trial_program, trainer.init()
        state.opt.hyperparams["learning_rate"] = jax.device_put(
            np.float32(values["rate"]), state.step.sharding
        )
        resident, rows = replicate_arrays(train, mesh), Rows(reader)
        total, calls = EPOCHS * reader.steps_per_epoch, []
        for first in range(0, total, 48):
            piece = Piece(first, min(48, total - first), BATCH)
            calls.append(jax.device_put(rows.of(values["seed"], piece), state.step.sharding))
        if program is trial_program:  # compiled before the clock runs
            copy = jax.tree.map(lambda x: x.copy(), state)
            jax.block_until_ready(program.scan_steps(copy, resident, *calls[0], {}))
        began = time.perf_counter()
        for call in calls:
            state, _ = program.scan_steps(state, resident, *call, {})
        jax.block_until_ready(state)
        spent += time.perf_counter() - began
    return spent / total


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"


def differences(largest: dict[str, float]) -> str:
    return f"{largest['parameters']:.1e} and {largest['losses']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    spmd.simulate_devices(8)
    together, abreast, separate, within, within_abreast, alone = [], [], [], [], [], []
    worst, worst_abreast = ({"parameters": 0.0, "losses": 0.0} for _ in range(2))
    for _ in range(options.rounds):
        took, swept, step = in_one(options.trials, exact=True)
        together.append(took)
        within.append(step)
        took, other, step = in_one(options.trials, exact=False)
        abreast.append(took)
        within_abreast.append(step)
        took, results = one_by_one(swept)
        separate.append(took)
        alone.append(steps_alone(swept))
        for sweep, largest in ((swept, worst), (other, worst_abreast)):
            for trial, result in zip(sweep.trials, results, strict=True):
                pairs = zip(
                    jax.tree.leaves(trial.result().state.params),
                    jax.tree.leaves(result.state.params),
                    strict=True,
                )
                largest["parameters"] = max(
                    largest["parameters"],
                    *(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs),
                )
                losses = np.abs(np.array(trial.history["loss"]) - np.array(result.history["loss"]))
                largest["losses"] = max(largest["losses"], float(losses.max()))
    ratio = statistics.median(a / b for a, b in zip(together, separate, strict=True))
    arms = {
        f"one program on 8 simulated devices ({swept.programs} compiled), all of it": together,
        "the same with `exact=False`": abreast,
        "`spmd.fit` one after the other on one device, all of it": separate,
    }
    verdict = "ok" if ratio <= TARGET else "MISSED"
    lines = [
        *reported.head(
            "Sweeps",
            f"python benchmarks/sweep.py --trials {options.trials} --rounds {options.rounds}",
            *PACKAGES,
        ),
        f"{options.trials} MLPs 64-{WIDTH}-10 on 1536 digits, batch {BATCH}, {EPOCHS} epochs, "
        "Adam, learning rates and seeds of their own.",
        "",
        "| arm | seconds, median | best |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} |"
            for name, times in arms.items()
        ),
        "",
        f"In one / one after the other: **{ratio:.3f}**; target {TARGET}: {verdict}.",
        "",
        f"A step of all trials, compiled before: {milliseconds(within)} ms in one, "
        f"{milliseconds(within_abreast)} with `exact=False`, "
        f"{milliseconds(alone)} one after the other.",
        "",
        "Largest difference to separate runs, of parameters and of the losses of all steps: "
        f"{differences(worst)}; "
        f"with `exact=False` {differences(worst_abreast)}.",
        "",
    ]
    print("\n".join(lines))
    reported.write("sweep", lines)


if __name__ == "__main__":
    main()
