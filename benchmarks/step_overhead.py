"""Overhead of a step: `spmd.fit` against handwritten loops, interleaved in one run.

    python benchmarks/step_overhead.py  # all sections; writes benchmarks/results/step_overhead.md
    python benchmarks/step_overhead.py --only mlp,tiny --rounds 5

Every arm is a process of its own that stays alive. In each round every arm in turn runs one chunk
of steps while the others wait, so that what else the machine does falls on all of them alike.
Ratios are medians over rounds of the ratio within a round. `spmd.fit` runs with progress, metrics
and JSON lines on; the loops by hand have none of these.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

import reported

# section -> (title, steps per chunk, devices, {arm: why}, [(numerator, denominator, target, what)])
SECTIONS = {
    "cnn": (
        "MNIST-sized CNN (conv 32 5x5, pool, conv 64 5x5, pool, dense 1024, dense 10), batch 128, "
        "Adam, one device",
        8,
        1,
        ("fit", "functional", "kept", "nnx_jit", "keras"),
        (
            ("fit", "functional", 1.03),
            ("fit", "nnx_jit", 1.0),
            ("fit", "keras", 1.0),
            ("fit", "kept", 1.03),
        ),
    ),
    "mlp": (
        "MLP 784-256-256-10, batch 128, Adam, one device",
        400,
        1,
        ("fit", "functional", "nnx_jit", "fit_resident"),
        (
            ("fit", "functional", 1.05),
            ("fit", "nnx_jit", 0.75),
            ("fit_resident", "functional", 0.70),
        ),
    ),
    "tiny": (
        "MLP 8-8-8-8, batch 16, Adam, one device",
        2000,
        1,
        ("fit", "bare", "fit_resident"),
        (),
    ),
    "wide": (
        "MLP 784-2048-2048-10, batch 128, Adam, two simulated devices",
        20,
        2,
        ("fit", "fit_auto"),
        (("fit", "fit_auto", 1.0),),
    ),
}
SHAPES = {"cnn": (28, 28, 1), "mlp": (784,), "tiny": (8,), "wide": (784,)}
WIDTHS = {"mlp": (784, 256, 256, 10), "tiny": (8, 8, 8, 8), "wide": (784, 2048, 2048, 10)}
BATCH = {"cnn": 128, "mlp": 128, "tiny": 16, "wide": 128}
RATE = 1e-3


# the arms: each runs for ever and calls `gate()` after every chunk, with the device at rest -------


def arm_main(section: str, arm: str) -> None:
    import spmd

    spmd.simulate_devices(SECTIONS[section][2])
    globals()[f"arm_{arm}"](section, Gate())


class Gate:
    """Sends the time of the last chunk to the parent and waits for permission to run the next
    one.
    """

    def __init__(self):
        self._out, self._since = os.fdopen(os.dup(1), "w"), time.perf_counter()
        os.dup2(2, 1)  # whatever a library prints goes elsewhere

    def __call__(self) -> None:
        print(time.perf_counter() - self._since, file=self._out, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._since = time.perf_counter()


def make_data(section: str):
    import numpy as np

    random, rows = np.random.default_rng(0), 128 * BATCH[section]
    classes = WIDTHS.get(section, (10,))[-1]
    return {
        "x": random.normal(size=(rows, *SHAPES[section])).astype("float32"),
        "y": random.integers(0, classes, rows).astype("int32"),
    }


def batches(section: str):
    """Shuffled batches without end, as in a handwritten loop."""
    import numpy as np

    data, random, size = make_data(section), np.random.default_rng(1), BATCH[section]
    while True:
        order = random.permutation(len(data["y"]))
        for first in range(0, len(order), size):
            index = order[first : first + size]
            yield data["x"][index], data["y"][index]


def make_model(section: str):
    from flax import nnx

    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv1, self.conv2 = (
                nnx.Conv(1, 32, (5, 5), rngs=rngs),
                nnx.Conv(32, 64, (5, 5), rngs=rngs),
            )
            self.dense, self.head = (
                nnx.Linear(7 * 7 * 64, 1024, rngs=rngs),
                nnx.Linear(1024, 10, rngs=rngs),
            )

        def __call__(self, x):
            for conv in (self.conv1, self.conv2):
                x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), (2, 2))
            return self.head(nnx.relu(self.dense(x.reshape(x.shape[0], -1))))

    class MLP(nnx.Module):
        def __init__(self, rngs):
            sizes = WIDTHS[section]
            self.layers = nnx.List(
                [nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)]
            )

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    return (CNN if section == "cnn" else MLP)(nnx.Rngs(0))


def run_fit(
    section: str,
    gate: Gate,
    *,
    resident: bool = False,
    layout: str = "data_parallel",
    reduction: str | None = None,
):
    import dataclasses

    import optax

    import spmd

    chunk, data = SECTIONS[section][1], make_data(section)
    chosen = spmd.Layout.load(layout)
    if reduction is not None:
        chosen = dataclasses.replace(chosen, gradients=spmd.Gradients(reduction))
    with tempfile.TemporaryDirectory() as folder:
        spmd.fit(
            lambda: make_model(section),
            spmd.data.resident(data, steps_per_call=50) if resident else data,
            loss=spmd.losses.cross_entropy,
            optimizer=optax.adam(RATE),
            layout=chosen,
            batch_size=BATCH[section],
            steps=10**7,
            metrics={"accuracy": spmd.metrics.accuracy},
            checkpoint=spmd.Checkpoint(folder, every=10**7),
            callbacks=[spmd.callbacks.Each(lambda info: gate(), every=chunk)],
            progress=True,
        )


def arm_fit(section: str, gate: Gate):
    run_fit(section, gate)


def arm_fit_auto(section: str, gate: Gate):
    run_fit(section, gate, reduction="compiler")


def arm_fit_resident(section: str, gate: Gate):
    run_fit(section, gate, resident=True)


def functional_step(section: str, donated: tuple[int, ...] = (0, 1)):
    """The step a JAX engineer writes by hand: pure, jitted, donating."""
    import jax
    import optax
    from flax import nnx

    graphdef, params = nnx.split(make_model(section), nnx.Param)
    params, optimizer = nnx.to_pure_dict(params), optax.adam(RATE)

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(
            nnx.merge(graphdef, params)(x), y
        ).mean()

    def step(params, opt, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value

    return jax.jit(step, donate_argnums=donated), params, optimizer.init(params)


def arm_kept(section: str, gate: Gate):
    """The functional loop without donation: what donating costs where XLA:CPU copies a
    convolution's kernels first.
    """
    arm_functional(section, gate, donated=())


def arm_functional(section: str, gate: Gate, donated: tuple[int, ...] = (0, 1)):
    import jax

    step, params, opt = functional_step(section, donated)
    for count, (x, y) in enumerate(batches(section), 1):
        params, opt, value = step(params, opt, x, y)
        if count % SECTIONS[section][1] == 0:
            jax.block_until_ready(value)
            gate()


def arm_bare(section: str, gate: Gate):
    """The compiled call and nothing else: one batch, on the device already."""
    import jax

    step, params, opt = functional_step(section)
    x, y = jax.device_put(next(batches(section)))
    while True:
        for _ in range(SECTIONS[section][1]):
            params, opt, value = step(params, opt, x, y)
        jax.block_until_ready(value)
        gate()


def arm_nnx_jit(section: str, gate: Gate):
    """The loop of flax's documentation: `nnx.jit`, `nnx.Optimizer`, `nnx.MultiMetric`."""
    import jax
    import optax
    from flax import nnx

    model = make_model(section)
    optimizer = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_fn(model, x, y):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    @nnx.jit
    def step(model, optimizer, metrics, x, y):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
        metrics.update(loss=loss, logits=logits, labels=y)
        optimizer.update(model, grads)

    for count, (x, y) in enumerate(batches(section), 1):
        step(model, optimizer, metrics, x, y)
        if count % SECTIONS[section][1] == 0:
            jax.block_until_ready(nnx.state(model))
            gate()


def arm_keras(section: str, gate: Gate):
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    class Chunks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.count = getattr(self, "count", 0) + 1
            if self.count % SECTIONS[section][1] == 0:
                gate()

    def conv(width):
        return keras.layers.Conv2D(width, 5, padding="same", activation="relu")

    model = keras.Sequential(
        [
            conv(32),
            keras.layers.MaxPooling2D(2),
            conv(64),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(RATE), loss=loss, metrics=["accuracy"])
    data = make_data(section)
    model.fit(
        data["x"],
        data["y"],
        batch_size=BATCH[section],
        epochs=10**6,
        verbose=2,
        callbacks=[Chunks()],
    )


# the parent ---------------------------------------------------------------------------------------


def measure(
    script: str, section: str, arms: Iterable[str], chunk: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per step of every arm in every round; every process is ended by its own id."""
    arms = list(arms)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, script, "--arm"]
    jobs = {
        arm: subprocess.Popen(
            [*command, section, arm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for arm in arms
    }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    try:
        for arm in arms:
            jobs[arm].stdout.readline()  # the first chunk holds the compilation
        for turn in range(rounds + 1):
            for arm in arms if turn % 2 else reversed(arms):
                jobs[arm].stdin.write("go\n")
                jobs[arm].stdin.flush()
                line = jobs[arm].stdout.readline()
                if not line:
                    raise SystemExit(f"{section}: arm {arm} ended early")
                if turn:  # the first round warms up
                    times[arm].append(float(line) / chunk)
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()
    return times


def ratio(times: dict[str, list[float]], top: str, bottom: str) -> float:
    return statistics.median(a / b for a, b in zip(times[top], times[bottom], strict=True))


def section_report(section: str, rounds: int) -> list[str]:
    title, chunk, _, arms, targets = SECTIONS[section]
    times = measure(__file__, section, arms, chunk, rounds)
    lines = [
        f"### {section}: {title}",
        "",
        f"{rounds} rounds of {chunk} steps per arm.",
        "",
        "| arm | median us/step | best |",
        "|---|---|---|",
    ]
    for arm in arms:
        lines.append(
            f"| {arm} | {statistics.median(times[arm]) * 1e6:,.1f} | {min(times[arm]) * 1e6:,.1f} |"
        )
    lines += ["", "| ratio | median | target | |", "|---|---|---|---|"] if targets else [""]
    for top, bottom, target in targets:
        quotient = ratio(times, top, bottom)
        lines.append(
            f"| {top} / {bottom} | {quotient:.3f} | {target:.2f} | "
            f"{'ok' if quotient <= target else 'MISSED'} |"
        )
    if section == "tiny":
        for arm in ("fit", "fit_resident"):
            above = (
                statistics.median(a - b for a, b in zip(times[arm], times["bare"], strict=True))
                * 1e6
            )
            lines.append(
                f"{arm} costs {above:.1f} us per step above the bare compiled call; target 60: "
                f"{'ok' if above <= 60 else 'MISSED'}."
            )
    return [*lines, ""]


def layout_report() -> list[str]:
    """Seconds to resolve and check a layout on 10,000 parameters; no device is touched."""
    import jax
    import numpy as np

    from spmd.layout.check import fit_layout
    from spmd.layout.schema import Layout, Rule
    from spmd.mesh import MeshSpec

    kinds = ("query", "key", "value", "out", "up", "down", "gate", "norm", "scale", "bias")
    params = {
        f"blocks/{n}/{kind}/kernel": jax.ShapeDtypeStruct((512, 1024), np.float32)
        for n in range(1000)
        for kind in kinds
    }
    rules = tuple(
        Rule(f"**/{kind}/kernel", (None, "model") if n % 2 else ("model", None))
        for n, kind in enumerate(kinds)
    )
    started = time.perf_counter()
    resolved = fit_layout(Layout(params=rules), params, {}, MeshSpec.parse("data=8,model=8"))
    took = time.perf_counter() - started
    return [
        "### layout",
        "",
        f"{len(resolved.placements):,} parameters, {len(rules)} rules: {took:.2f} s; target 1: "
        f"{'ok' if took <= 1 else 'MISSED'}.",
        "",
    ]


def import_report(rounds: int = 7) -> list[str]:
    """What `import spmd` adds to `import jax, flax`, each in a fresh process, alternating."""
    base, ours = "import jax, flax", "import jax, flax, spmd; spmd.fit"
    seconds: dict[str, list[float]] = {base: [], ours: []}
    for _ in range(rounds):
        for code in seconds:
            timed = f"import time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
            seconds[code].append(
                float(
                    subprocess.run(
                        [sys.executable, "-c", timed], capture_output=True, text=True, check=True
                    ).stdout
                )
            )
    added = statistics.median(b - a for a, b in zip(*seconds.values(), strict=True))
    first = statistics.median(seconds[base])
    verdict = "ok" if added <= 0.3 else "MISSED"
    return [
        "### import",
        "",
        f"`import jax, flax` {first:.2f} s; `import spmd` and reaching `spmd.fit` add {added:.2f} "
        f"s; target 0.3: {verdict}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", nargs=2, metavar=("SECTION", "ARM"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", help="sections, by comma: " + ", ".join([*SECTIONS, "layout", "import"])
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.arm:
        return arm_main(*options.arm)
    wanted = options.only.split(",") if options.only else [*SECTIONS, "layout", "import"]
    other = {"layout": layout_report, "import": import_report}
    lines = reported.print_sections(
        other[name]() if name in other else section_report(name, options.rounds) for name in wanted
    )
    if not options.only:
        command = f"python benchmarks/step_overhead.py --rounds {options.rounds}"
        reported.write(
            "step_overhead",
            [*reported.head("Step overhead", command, "jax", "flax", "optax"), *lines],
        )


if __name__ == "__main__":
    main()
