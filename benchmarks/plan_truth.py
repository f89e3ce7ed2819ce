"""Calibrate a target on the devices that are here, and compare plans for it with the steps that
run: four models under five layouts.

    # simulated on the CPU; writes benchmarks/results/plan_truth.md
    python benchmarks/plan_truth.py --devices 8
    python benchmarks/plan_truth.py                            # on the GPUs that are here
    python benchmarks/plan_truth.py --devices 8 --only mlp --rounds 5 --write /tmp/truth.md

Everything runs in one process, and in turns: in each round every program of the calibration runs,
and every step, twice, of which the second time counts. Targets: within 25 % on simulated devices,
15 % on GPUs, where peaks of memory are compared, too (within 5 %, each case in a process of its
own, because a device reports the peak of its process). A machine with other work to do has other
figures from one second to the next; the first lines of the results say how much of its cores this
process had.
"""

import argparse
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import spmd
from spmd.planner.calibration import Measurement, base_target, figure_rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.digits_cnn import CNN
from examples.gpt import GPT, named
from examples.rnn_wavefront import DeepLSTM

RESULTS = Path(__file__).parent / "results" / "plan_truth.md"
# and for each model one that shards its layers
LAYOUTS = ("data_parallel", "fsdp", "data_parallel_bf16", "parameter_server")
WITHIN = {"cpu": 0.25, "gpu": 0.15}


class MLP(nnx.Module):
    """Dense layers of one width between 256 features and 10 classes."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        sizes, axes = (256, width, width, width, width, 10), (("embed", "mlp"), ("mlp", "embed"))
        pairs = enumerate(itertools.pairwise(sizes))
        self.layers = nnx.List(
            nnx.Linear(a, b, kernel_init=named(*axes[n % 2]), rngs=rngs) for n, (a, b) in pairs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def _labelled(name: str, rows: int, *shape: int) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct((rows, *shape), "float32"),
        "label": jax.ShapeDtypeStruct((rows,), "int32"),
    }


def _text(rows: int, length: int) -> dict[str, Any]:
    tokens = jax.ShapeDtypeStruct((rows, length), "int32")
    return {"tokens": tokens, "targets": tokens}


def cases(large: bool) -> dict[str, tuple[str, Any, dict[str, Any], str]]:
    """By name: a title, a function that makes the model, shapes of a batch, and the layout that
    shards the layers.

    Args:
      large: for GPUs.
    """
    k = 4 if large else 1
    return {
        "cnn": (
            f"examples/digits_cnn.py with {32 * k} channels, {1024 * k} images",
            lambda: CNN(channels=32 * k, width=128 * k, rngs=nnx.Rngs(0)),
            _labelled("image", 1024 * k, 8, 8, 1),
            "conv_data_dense_model",
        ),
        "mlp": (
            f"4 layers of {1024 * k}, {1024 * k} rows",
            lambda: MLP(1024 * k, nnx.Rngs(0)),
            _labelled("x", 1024 * k, 256),
            "tensor_parallel",
        ),
        "lstm": (
            f"examples/rnn_wavefront.py, 4 layers of {128 * k}, {64 * k} rows of 64 characters",
            lambda: DeepLSTM(width=128 * k, layers=4, rngs=nnx.Rngs(0)),
            _text(64 * k, 64),
            "pipeline",
        ),
        "gpt": (
            f"examples/gpt.py, 4 blocks of {256 * k}, {64 * k} rows of {64 * k} tokens",
            lambda: GPT(width=256 * k, depth=4, heads=8, length=64 * k, rngs=nnx.Rngs(0)),
            _text(64 * k, 64 * k),
            "tensor_parallel",
        ),
    }


class Step:
    """A case that trains, and its times so far."""

    def __init__(self, model: Any, shapes: dict[str, Any], **options: Any) -> None:
        self.model, self.shapes, self.times = model, shapes, list[float]()
        self.options = {
            "loss": spmd.losses.cross_entropy,
            "optimizer": optax.adamw(1e-3),
            **options,
        }
        self.trainer = spmd.Trainer(model, **self.options)
        self.batch = self.trainer.place(
            jax.tree.map(
                lambda leaf: np.full(leaf.shape, leaf.dtype == "float32", leaf.dtype), shapes
            )
        )
        self.state = self.trainer.init()

    def plan(self, target: Any) -> spmd.Plan:
        """The plan of the same step."""
        return spmd.plan(self.model, self.shapes, target=target, **self.options)

    def run(self) -> None:
        """Two steps; the second one's time is kept."""
        for timed in (False, True):
            began = time.perf_counter()
            self.state, metrics = self.trainer.step(self.state, self.batch)
            metrics.wait()
            self.times += [time.perf_counter() - began] if timed else []


def peak_of(name: str, layout: str) -> int:
    """Bytes of the fullest GPU in two steps of a case, in a process of its own; 0 if it fails."""
    command = [sys.executable, __file__, "--peak", name, layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    return 0 if done.returncode else int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--devices", type=int, help="simulate this many on the CPU; default: the GPUs that are here"
    )
    parser.add_argument("--only", help="models, by comma: cnn, mlp, lstm, gpt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", type=Path, default=RESULTS)
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "LAYOUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    large = not options.devices
    models = {
        name: case
        for name, case in cases(large).items()
        if not options.only or name in options.only.split(",")
    }
    if options.peak:
        name, layout = options.peak
        step_of(models[name], layout, large).run()
        print(max(device.memory_stats()["peak_bytes_in_use"] for device in jax.local_devices()))
        return
    names = [(name, layout) for name, case in models.items() for layout in (*LAYOUTS, case[3])]
    # before this process takes the memory
    peaks = {case: peak_of(*case) for case in names} if large else {}
    if options.devices:
        spmd.simulate_devices(options.devices)
    measurement = Measurement(jax.devices(), base_target(jax.devices()), say=_say)
    steps, lines = {}, []
    for name, layout in names:
        _say(f"compiling {name}, {layout}")
        try:
            steps[name, layout] = step_of(models[name], layout, large)
        except spmd.SpmdError as error:  # such as a mesh with more devices than are here
            lines.append(f"{name}, {layout} was not run: {error.summary}")
    load = _in_turns(measurement, steps, options.rounds)
    calibration = measurement.calibration()
    table, ratios = _table(models, steps, calibration, peaks)
    within = WITHIN["gpu" if large else "cpu"]
    reached = sum(1 - within <= ratio <= 1 + within for ratio in ratios)
    summary = (
        f"Plan / step: {min(ratios):.2f} to {max(ratios):.2f}; {reached} of {len(ratios)} within "
        f"{within:.0%}."
    )
    figures = ["", "### The calibration", "", "| figure | value | may be off by |", "|---|---|---|"]
    figures += [f"| {' | '.join(row)} |" for row in figure_rows(calibration.target)]
    command, versions = (
        " ".join(["python benchmarks/plan_truth.py", *sys.argv[1:]]),
        f"Python {platform.python_version()}, jax {jax.__version__}",
    )
    head = (
        f"`{command}`, {date.today()}, {calibration.target.title}, {versions}, {options.rounds} "
        f"rounds. {load}"
    )
    options.write.write_text(
        "\n".join(
            ["# Plans against the devices", "", head, "", summary, *lines, *table, *figures, ""]
        ),
        encoding="utf-8",
    )
    print(summary, load, sep="\n")


def step_of(case: tuple, layout: str, large: bool) -> Step:
    """A case under a layout."""
    _, model, shapes, _ = case
    return Step(model, shapes, layout=layout, precision="bfloat16" if large else "float32")


def _table(
    models: dict[str, tuple],
    steps: dict[tuple, Step],
    calibration: spmd.Calibration,
    peaks: dict[tuple, int],
) -> tuple[list, list]:
    """Lines of predicted and measured figures, and predicted / measured of each step's time."""
    lines, ratios, shown = [], [], set()
    for (name, layout), step in steps.items():
        plan = step.plan(calibration.cluster)
        first, median, third = (1e3 * value for value in statistics.quantiles(step.times, n=4))
        planned, (low, high) = (
            1e3 * plan.timeline.seconds,
            (1e3 * value for value in plan.timeline.range),
        )
        ratios.append(planned / median)
        if name not in shown:
            more = " peak | plan | plan / peak |" if peaks else ""
            header = f"| layout | step | quartiles | plan | range | plan / step |{more}"
            lines += [
                "",
                f"### {name}: {models[name][0]}",
                "",
                header,
                "|---|---|---|---|---|---|" + "---|---|---|" * bool(peaks),
            ]
            shown.add(name)
        row = (
            f"{median:.1f} ms | {first:.1f} to {third:.1f} | {planned:.1f} ms | {low:.1f} to "
            f"{high:.1f} | {planned / median:.2f} |"
        )
        if peak := peaks.get((name, layout)):
            row += (
                f" {peak / 2**30:.3f} GiB | {plan.memory.peak / 2**30:.3f} GiB | "
                f"{plan.memory.peak / peak:.3f} |"
            )
        lines.append(f"| {layout} | {row}")
        print(f"{name:5} {lines[-1]}", flush=True)
    return lines, ratios


def _in_turns(measurement: Measurement, steps: dict[Any, Step], rounds: int) -> str:
    """Run everything; returns how much of the cores this process had."""
    for number in range(rounds + 1):
        _say(f"round {number} of {rounds}")
        measurement.measure()
        for step in steps.values():
            step.run()
        if number == 0:  # programs start slowly
            for program in [*measurement.programs, *steps.values()]:
                program.times.clear()
            before, cpu, began = os.getloadavg()[0], time.process_time(), time.perf_counter()
    share = (time.process_time() - cpu) / ((time.perf_counter() - began) * (os.cpu_count() or 1))
    loads = f"load averages {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    return f"While programs ran, this process had {share:.0%} of the cores ({loads})."


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
