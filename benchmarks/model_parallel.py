"""What model parallelism gains on this machine: each kind against one device and against other
libraries, interleaved in one run.

    python benchmarks/model_parallel.py  # all sections; writes benchmarks/results/model_parallel.md
    python benchmarks/model_parallel.py --only cnn --rounds 3

Every arm is a separate process that stays alive (`step_overhead.py` does the timing). In each round
every arm in turn runs one chunk of steps while the others wait; ratios are medians over rounds of
the ratio within a round. A section is an entry of `SECTIONS`. Simulated devices share the cores:
one device already uses both for a matrix product, and one for a convolution.
"""

import argparse
import dataclasses
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import reported
from step_overhead import Gate, measure, ratio


@dataclasses.dataclass(frozen=True)
class Arm:
    """`run` trains for ever and calls its gate after every chunk of `chunk` steps, with the devices
    at rest.

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
    # (stages, microbatches) of the arms that are pipelines
    tables: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


# the MNIST-sized CNN ------------------------------------------------------------------------------

BATCH, RATE = 128, 1e-3


def images():
    """16,384 random images [28, 28, 1] with labels: what they show does not matter to the clock."""
    import numpy as np

    random, rows = np.random.default_rng(0), 128 * BATCH
    return {
        "x": random.normal(size=(rows, 28, 28, 1)).astype("float32"),
        "y": random.integers(0, 10, rows).astype("int32"),
    }


def batches():
    """Shuffled batches without end, as in a handwritten loop."""
    import numpy as np

    data, random = images(), np.random.default_rng(1)
    while True:
        order = random.permutation(len(data["y"]))
        for first in range(0, len(order), BATCH):
            index = order[first : first + BATCH]
            yield data["x"][index], data["y"][index]


def make_cnn(fast: bool):
    """Conv 32 5x5, pool, conv 64 5x5, pool, dense 1024, dense 10; what the dense layers have
    carries names for the layout.
    """
    from flax import nnx

    import spmd

    kernel, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
    pool = spmd.nn.max_pool2 if fast else partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))

    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv1, self.conv2 = (
                nnx.Conv(1, 32, (5, 5), rngs=rngs),
                nnx.Conv(32, 64, (5, 5), rngs=rngs),
            )
            initializers = {
                "kernel_init": nnx.with_partitioning(kernel, ("embed", "mlp")),
                "bias_init": nnx.with_partitioning(zeros, ("mlp",)),
            }
            self.dense = nnx.Linear(7 * 7 * 64, 1024, **initializers, rngs=rngs)
            self.head = nnx.Linear(
                1024, 10, kernel_init=nnx.with_partitioning(kernel, ("mlp", None)), rngs=rngs
            )

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
        return optax.softmax_cross_entropy_with_integer_labels(
            nnx.merge(graphdef, params)(x), y
        ).mean()

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
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 64, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
    optimizer, loss = torch.optim.Adam(model.parameters(), RATE), nn.CrossEntropyLoss()
    for count, (x, y) in enumerate(batches(), 1):
        optimizer.zero_grad()
        loss(model(torch.from_numpy(x).permute(0, 3, 1, 2)), torch.from_numpy(y).long()).backward()
        optimizer.step()
        if count % chunk == 0:
            gate()


CNN = Section(
    f"MNIST-sized CNN (conv 32 5x5, pool, conv 64 5x5, pool, dense 1024, dense 10), batch {BATCH}, "
    "Adam, host data every step",
    8,
    {
        "conv_data_dense_model": Arm(
            partial(cnn_fit, layout="conv_data_dense_model", mesh="data=1,model=2"),
            "the layout, fast pool",
            2,
        ),
        "data_parallel": Arm(
            partial(cnn_fit, layout="data_parallel", mesh="data=2"), "the layout, fast pool", 2
        ),
        "by hand": Arm(cnn_by_hand, "jit and optax on one device, nnx.max_pool"),
        "by hand, fast pool": Arm(
            partial(cnn_by_hand, fast=True), "the same with spmd.nn.max_pool2"
        ),
        "torch": Arm(cnn_torch, "PyTorch, eager, every core", needs="torch"),
    },
    (("conv_data_dense_model", "by hand", 0.50), ("conv_data_dense_model", "torch", 0.85)),
)

# a recurrent stack as a wavefront -----------------------------------------------------------------

WIDTH, ROWS, TIME = 512, 64, 64


def lstm_fit(
    gate: Gate, chunk: int, *, layout: Callable[[], Any], mesh: str, plain: bool = False
) -> None:
    """Two LSTM layers, mean square of what they return, SGD: `spmd.nn.RNNStack`, or one `nnx.RNN`
    on the other (`plain`).
    """
    import numpy as np
    import optax
    from flax import nnx

    import spmd

    class Net(nnx.Module):
        def __init__(self, rngs):
            cells = [nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs) for _ in range(2)]
            self.stack = (
                nnx.List([nnx.RNN(cell, rngs=rngs) for cell in cells])
                if plain
                else spmd.nn.RNNStack(cells)
            )

        def __call__(self, x):
            if not plain:
                return self.stack(x)
            for layer in self.stack:
                x = layer(x)
            return x

    trainer = spmd.Trainer(
        lambda: Net(nnx.Rngs(0)),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(axis=(1, 2)),
        optimizer=optax.sgd(0.01),
        mesh=mesh,
        layout=layout(),
    )
    data = {"x": np.random.default_rng(0).normal(size=(ROWS, TIME, WIDTH)).astype("float32")}
    train(trainer, data, gate, chunk)


def train(trainer: Any, data: Any, gate: Gate, chunk: int) -> None:
    """Steps on one placed batch for ever."""
    state, batch, count = trainer.init(), trainer.place(data), 0
    while True:
        state, metrics = trainer.step(state, batch)
        count += 1
        if count % chunk == 0:
            float(metrics["loss"])
            gate()


def piped(**pipeline: Any) -> Any:
    """A layout with stages and nothing else."""
    import spmd

    return spmd.Layout(
        gradients=spmd.Gradients("all_reduce"), pipeline=spmd.Pipeline("stage", **pipeline)
    )


def named(name: str) -> Any:
    """A shipped layout."""
    return name


def lstm_arm(why: str, devices: int = 1, cores: int | None = None, **more: Any) -> Arm:
    more = {"layout": partial(named, "data_parallel"), "mesh": f"data={devices}"} | more
    return Arm(partial(lstm_fit, **more), why, devices, cores)


def wavefront(chunk: int | None) -> Arm:
    why = "a layer on each device, " + (
        f"chunks of {chunk} steps" if chunk else "chunks as spmd.nn.best_chunk has them"
    )
    return lstm_arm(why, 2, layout=partial(piped, time_chunk=chunk), mesh="data=1,stage=2")


RNN = Section(
    f"2 LSTM layers of {WIDTH}, {ROWS} rows of {TIME} steps, SGD",
    2,
    {
        "wavefront": wavefront(None),
        "wavefront 1": wavefront(1),
        "wavefront 4": wavefront(4),
        "wavefront 16": wavefront(16),
        "data_parallel": lstm_arm("half of the rows on each device, one reduction per step", 2),
        "one device": lstm_arm("the same stack as a scan, every core"),
        "one core": lstm_arm("the same held to one core", cores=1),
        "nnx.RNN": lstm_arm("the same layers in plain flax, every core", plain=True),
    },
    (
        ("wavefront 1", "one core", 1 / 1.45),
        ("wavefront 1", "data_parallel", 1 / 1.5),
        ("wavefront 1", "one device", 1.0),
        ("one device", "nnx.RNN", 1.0),
    ),
    {"wavefront 1": (2, 64), "wavefront 4": (2, 16), "wavefront 16": (2, 4)},
)


# stages with convolutions -------------------------------------------------------------------------


def conv_fit(
    gate: Gate, chunk: int, *, layout: Callable[[], Any], mesh: str, pixels: int, channels: int
) -> None:
    """Four residual convolutions on [64, pixels, pixels, channels], in a `spmd.nn.LayerStack`."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import spmd

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(channels, channels, (5, 5), rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.conv(x))

    trainer = spmd.Trainer(
        lambda: spmd.nn.LayerStack([Layer(nnx.Rngs(seed)) for seed in range(4)]),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(axis=(1, 2, 3)),
        optimizer=optax.sgd(0.01),
        mesh=mesh,
        layout=layout(),
    )
    train(
        trainer,
        {
            "x": np.random.default_rng(0)
            .normal(size=(64, pixels, pixels, channels))
            .astype("float32")
        },
        gate,
        chunk,
    )


def conv_arm(why: str, devices: int = 1, **more: Any) -> Arm:
    more = {"layout": partial(named, "data_parallel"), "mesh": f"data={devices}"} | more
    return Arm(partial(conv_fit, **more), why, devices)


def conv_stages(pixels: int, channels: int, what: str) -> Section:
    arm = partial(conv_arm, pixels=pixels, channels=channels)

    def pipeline(count: int) -> Arm:
        why = f"two layers on each device, {count} microbatches"
        return arm(why, 2, layout=partial(piped, microbatches=count), mesh="data=1,stage=2")

    return Section(
        f"4 residual convolutions 5x5 of {channels} channels, 64 rows of [{pixels}, {pixels}, "
        f"{channels}], SGD: {what}",
        2,
        {
            "pipeline 2": pipeline(2),
            "pipeline 8": pipeline(8),
            "data_parallel": arm("half of the rows on each device", 2),
            "one device": arm("the same stack, every core"),
        },
        (("pipeline 8", "one device", 1 / 1.6),),
        {"pipeline 2": (2, 2), "pipeline 8": (2, 8)},
    )


SECTIONS = {
    "cnn": CNN,
    "rnn": RNN,
    "stages": conv_stages(14, 64, "nearly all of it is convolution"),
    "large_stages": conv_stages(
        28, 32, "more lies between convolutions, for which one device has both cores already"
    ),
}


# how long a deep stack takes to compile -----------------------------------------------------------


def compile_report() -> list[str]:
    """Seconds to initialise, and to trace and compile a training step, of 6 and of 48 layers, each
    in a process of its own.
    """
    kinds, seconds = ("LayerStack of repeat", "LayerStack of a list", "a list"), {}
    for depth in (6, 48):
        for kind in kinds:
            command = [sys.executable, __file__, "--compile", str(depth), kind]
            last = subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.splitlines()[-1]
            seconds[depth, kind] = tuple(map(float, last.split()))
    lines = [
        "### compile: transformer blocks (width 64), seconds to initialise, and to trace and "
        "compile a training step",
        "",
    ]
    lines += [f"| layers | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    lines += [
        f"| {d} | {' | '.join('{:.1f} s, {:.2f} s'.format(*seconds[d, kind]) for kind in kinds)} |"
        for d in (6, 48)
    ]
    grown = {kind: seconds[48, kind][1] / seconds[6, kind][1] for kind in kinds}
    growth = [
        f"{kind} {ratio:.2f} (target 1.30, {'ok' if ratio <= 1.3 else 'MISSED'})"
        for kind, ratio in grown.items()
        if kind != "a list"
    ]
    return [
        *lines,
        "",
        f"The step of 48 layers / of 6: {', '.join(growth)}, a list {grown['a list']:.2f}.",
        "",
    ]


def compile_main(depth: int, kind: str) -> None:
    import jax
    import optax
    from flax import nnx

    import spmd
    from examples import gpt

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(128, 64, rngs=rngs)
            make = partial(gpt.Block, 64, 4, 0.0)
            if kind == "LayerStack of repeat":
                self.blocks = spmd.nn.LayerStack(
                    spmd.nn.repeat(depth, lambda rngs: make(rngs=rngs), rngs)
                )
            else:
                blocks = [make(rngs=rngs) for _ in range(depth)]
                self.blocks = nnx.List(blocks) if kind == "a list" else spmd.nn.LayerStack(blocks)

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks if kind == "a list" else [self.blocks]:
                x = block(x)
            return self.embed.attend(x)

    spmd.simulate_devices(1)
    trainer = spmd.Trainer(
        lambda: Net(nnx.Rngs(0)),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        layout="data_parallel",
    )
    tokens, times = jax.numpy.zeros((8, 32), "int32"), [time.perf_counter()]
    state = trainer.init()
    batch = trainer.place({"tokens": tokens, "targets": tokens})
    for _ in range(2):  # the second step takes what running takes
        times.append(time.perf_counter())
        state, metrics = trainer.step(state, batch)
        metrics.wait()
    times.append(time.perf_counter())
    print(times[1] - times[0], times[2] - times[1] - (times[3] - times[2]))


# the parent ---------------------------------------------------------------------------------------


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
    lines = [
        f"### {name}: {section.title}",
        "",
        f"{rounds} rounds of {section.chunk} steps per arm.",
        "",
    ]
    lines += ["| arm | | devices | median ms/step | best |", "|---|---|---|---|---|"]
    for key, arm in arms.items():
        devices = f"{arm.devices}" + (
            f", {arm.cores} core{'s' * (arm.cores > 1)}" if arm.cores else ""
        )
        lines.append(
            f"| {key} | {arm.why} | {devices} | {statistics.median(times[key]) * 1e3:.1f} | "
            f"{min(times[key]) * 1e3:.1f} |"
        )
    lines += ["", "| ratio | median | target | |", "|---|---|---|---|"]
    for top, bottom, target in section.targets:
        if top in times and bottom in times:
            quotient = ratio(times, top, bottom)
            lines.append(
                f"| {top} / {bottom} | {quotient:.3f} | {target:.2f} | "
                f"{'ok' if quotient <= target else 'MISSED'} |"
            )
    for key, (stages, parts) in section.tables.items():
        lines += ["", f"Schedule of {key}: {bound(stages, parts)}."]
    missing = [
        f"{key} ({arm.needs} is not installed)"
        for key, arm in section.arms.items()
        if key not in arms
    ]
    return [*lines, "", *([f"Left out: {', '.join(missing)}.", ""] if missing else [])]


def bound(stages: int, microbatches: int) -> str:
    """What the schedule alone allows: the time of one device, all of it on one core, by that of as
    many cores as stages.
    """
    from spmd.nn import make_schedule

    ticks = make_schedule("gpipe", stages=stages, microbatches=microbatches).forward.ticks
    best = stages * microbatches / ticks
    return (
        f"{ticks} ticks forward for {microbatches} of work on each of {stages} stages, at best "
        f"{best:.2f} times as fast"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", nargs=2, metavar=("SECTION", "ARM"), help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=2, metavar=("LAYERS", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--only", help="sections, by comma: " + ", ".join([*SECTIONS, "compile"]))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.arm:
        return arm_main(*options.arm)
    if options.compile:
        return compile_main(int(options.compile[0]), options.compile[1])
    wanted = options.only.split(",") if options.only else (*SECTIONS, "compile")
    lines = reported.print_sections(
        compile_report() if name == "compile" else section_report(name, options.rounds)
        for name in wanted
    )
    if not options.only:
        command = f"python benchmarks/model_parallel.py --rounds {options.rounds}"
        reported.write(
            "model_parallel",
            [*reported.head("Model parallelism", command, "jax", "flax", "optax"), *lines],
        )


if __name__ == "__main__":
    main()
