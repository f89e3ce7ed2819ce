"""What cutting a model gives on this machine: each cut against one device and against other libraries, interleaved in one run.

    python benchmarks/model_parallel.py                 # all sections; writes benchmarks/results/model_parallel.md
    python benchmarks/model_parallel.py --only cnn --rounds 3

Every arm is a process of its own that stays alive (`step_overhead.py` has the clockwork). In each round every arm in turn runs one
chunk of steps while the others wait; ratios are medians over rounds of the ratio within a round. A section is an entry of `SECTIONS`.
Simulated devices share the cores: one device already uses both for a matrix product, and one for a convolution.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from step_overhead import Gate, hardware, measure, ratio

RESULTS = Path(__file__).parent / "results" / "model_parallel.md"


@dataclasses.dataclass(frozen=True)
class Arm:
    """`run` trains for ever and calls its gate after every chunk of `chunk` steps, with the devices at rest.

    `cores` holds the process to so many; an arm whose module `needs` is not installed is left out.
    """

    run: Callable[[Gate, int], None]
    why: str
    devices: int = 1
    cores: int | None = None
    needs: str = "jax"


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    chunk: int
    arms: dict[str, Arm]
    targets: tuple[tuple[str, str, float], ...]  # (numerator, denominator, at most)


# the MNIST-sized CNN -----------------------------------------------------------------------------------------------------

BATCH, RATE = 128, 1e-3


def images():
    """16,384 random images [28, 28, 1] with labels: what they show does not matter to the clock."""
    import numpy as np

    random, rows = np.random.default_rng(0), 128 * BATCH
    return {"x": random.normal(size=(rows, 28, 28, 1)).astype("float32"), "y": random.integers(0, 10, rows).astype("int32")}


def batches():
    """Shuffled batches for ever, as a loop by hand would cut them."""
    import numpy as np

    data, random = images(), np.random.default_rng(1)
    while True:
        order = random.permutation(len(data["y"]))
        for first in range(0, len(order), BATCH):
            index = order[first : first + BATCH]
            yield data["x"][index], data["y"][index]


def make_cnn(fast: bool):
    """Conv 32 5x5, pool, conv 64 5x5, pool, dense 1024, dense 10; the dense kernels carry names for the layout."""
    from flax import nnx

    import spmd

    named = lambda *names: nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    pool = spmd.nn.max_pool2 if fast else partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))

    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv1, self.conv2 = nnx.Conv(1, 32, (5, 5), rngs=rngs), nnx.Conv(32, 64, (5, 5), rngs=rngs)
            self.dense = nnx.Linear(7 * 7 * 64, 1024, kernel_init=named("embed", "mlp"), rngs=rngs)
            self.head = nnx.Linear(1024, 10, kernel_init=named("mlp", None), rngs=rngs)

        def __call__(self, x):
            for conv in (self.conv1, self.conv2):
                x = pool(nnx.relu(conv(x)))
            return self.head(nnx.relu(self.dense(x.reshape(x.shape[0], -1))))

    return CNN(nnx.Rngs(0))


def cnn_fit(gate: Gate, chunk: int, *, layout: str, mesh: str) -> None:
    """`spmd.fit` with progress and metrics, the fast pool, and this layout."""
    import optax

    import spmd

    spmd.fit(
        lambda: make_cnn(fast=True),
        images(),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(RATE),
        mesh=mesh,
        layout=layout,
        batch_size=BATCH,
        steps=10**7,
        metrics={"accuracy": spmd.metrics.accuracy},
        callbacks=[spmd.callbacks.Each(lambda info: gate(), every=chunk)],
        progress=True,
    )


def cnn_by_hand(gate: Gate, chunk: int, *, fast: bool = False) -> None:
    """The loop a JAX engineer writes: pure, jitted, optax, one device."""
    import jax
    import optax
    from flax import nnx

    with nnx.use_eager_sharding(False):
        graphdef, params = nnx.split(make_cnn(fast), nnx.Param)
    params, optimizer = nnx.to_pure_dict(params), optax.adam(RATE)
    opt = optimizer.init(params)

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graphdef, params)(x), y).mean()

    @jax.jit
    def step(params, opt, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value

    for count, (x, y) in enumerate(batches(), 1):
        params, opt, value = step(params, opt, x, y)
        if count % chunk == 0:
            jax.block_until_ready(value)
            gate()


def cnn_torch(gate: Gate, chunk: int) -> None:
    """PyTorch, eager, on every core."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(7 * 7 * 64, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip
    optimizer, loss = torch.optim.Adam(model.parameters(), RATE), nn.CrossEntropyLoss()
    for count, (x, y) in enumerate(batches(), 1):
        optimizer.zero_grad()
        loss(model(torch.from_numpy(x).permute(0, 3, 1, 2)), torch.from_numpy(y).long()).backward()
        optimizer.step()
        if count % chunk == 0:
            gate()


CNN = Section(
    f"MNIST-sized CNN (conv 32 5x5, pool, conv 64 5x5, pool, dense 1024, dense 10), batch {BATCH}, Adam, host data every step",
    8,
    {
        "conv_data_dense_model": Arm(partial(cnn_fit, layout="conv_data_dense_model", mesh="data=1,model=2"), "the layout, fast pool", 2),
        "data_parallel": Arm(partial(cnn_fit, layout="data_parallel", mesh="data=2"), "the layout, fast pool", 2),
        "by hand": Arm(cnn_by_hand, "jit and optax on one device, nnx.max_pool"),
        "by hand, fast pool": Arm(partial(cnn_by_hand, fast=True), "the same with spmd.nn.max_pool2"),
        "torch": Arm(cnn_torch, "PyTorch, eager, every core", needs="torch"),
    },
    (("conv_data_dense_model", "by hand", 0.50), ("conv_data_dense_model", "torch", 0.85)),
)

SECTIONS = {"cnn": CNN}


# the parent --------------------------------------------------------------------------------------------------------


def arm_main(section: str, name: str) -> None:
    arm = SECTIONS[section].arms[name]
    if arm.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arm.cores])
    import spmd

    spmd.simulate_devices(arm.devices)
    arm.run(Gate(), SECTIONS[section].chunk)


def section_report(name: str, rounds: int) -> list[str]:
    section = SECTIONS[name]
    arms = {key: arm for key, arm in section.arms.items() if importlib.util.find_spec(arm.needs)}
    times = measure(__file__, name, arms, section.chunk, rounds)
    lines = [f"### {name}: {section.title}", "", f"{rounds} rounds of {section.chunk} steps per arm.", ""]
    lines += ["| arm | | devices | median ms/step | best |", "|---|---|---|---|---|"]
    for key, arm in arms.items():
        devices = f"{arm.devices}" + (f", {arm.cores} core{'s' * (arm.cores > 1)}" if arm.cores else "")
        lines.append(f"| {key} | {arm.why} | {devices} | {statistics.median(times[key]) * 1e3:.1f} | {min(times[key]) * 1e3:.1f} |")
    lines += ["", "| ratio | median | target | |", "|---|---|---|---|"]
    for top, bottom, target in section.targets:
        if top in times and bottom in times:
            found = ratio(times, top, bottom)
            lines.append(f"| {top} / {bottom} | {found:.3f} | {target:.2f} | {'met' if found <= target else 'MISSED'} |")
    missing = [f"{key} ({arm.needs} is not installed)" for key, arm in section.arms.items() if key not in arms]
    return [*lines, "", *([f"Left out: {', '.join(missing)}.", ""] if missing else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", nargs=2, metavar=("SECTION", "ARM"), help=argparse.SUPPRESS)
    parser.add_argument("--only", help="sections, by comma: " + ", ".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.arm:
        return arm_main(*options.arm)
    versions = " ".join(f"{name} {__import__(name).__version__}" for name in ("jax", "flax", "optax"))
    command = f"`python benchmarks/model_parallel.py --rounds {options.rounds}`"
    lines = ["# Model parallelism", "", f"{command}, {datetime.date.today()}, {hardware()}, {versions}.", ""]
    for name in options.only.split(",") if options.only else SECTIONS:
        part = section_report(name, options.rounds)
        print("\n".join(part), flush=True)
        lines += part
    if not options.only:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
