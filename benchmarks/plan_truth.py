"""Compare a plan's peak memory and step time with those measured on the present device.

    python benchmarks/plan_truth.py --target h100                  # every case; writes benchmarks/results/plan_truth.md
    python benchmarks/plan_truth.py --target cpu --only lstm --write /tmp/truth.md

Each case is a separate process, because a device reports the peak of its process. The plan is made first, for one device of the target,
then the same step runs. Its time is the median of 20 steps after 5 warm-up steps, with the device idle in between. Devices that do not
report their peak (CPUs) leave that column empty. Targets: memory within 5 %, time within 25 %.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "plan_truth.md"
SIZES = {"gpt124": (12, 768, 12), "gpt350": (24, 1024, 16)}  # layers, width, heads
CASES = {
    "gpt124": ("GPT of 124 million parameters, 1024 tokens, bfloat16, AdamW", (2, 4, 8, 16)),
    "gpt350": ("GPT of 350 million parameters, 1024 tokens, bfloat16, AdamW", (2, 4, 8)),
    "cnn": ("convolutions 64 and 128 of 3x3 on 32x32x3, dense 256 and 10, float32, AdamW", (128, 512, 2048)),
    "lstm": ("LSTM of 1024 over 128 characters, float32, AdamW", (32, 128, 512)),
}


def case_of(name: str, rows: int) -> tuple:
    """A model, shapes of a batch, a precision."""
    import jax
    from flax import nnx

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from examples.char_lstm import CharLSTM
    from examples.gpt import GPT

    def gpt():
        depth, width, heads = SIZES[name]
        return GPT(vocab=50304, width=width, depth=depth, heads=heads, length=1024, rngs=nnx.Rngs(0))

    def lstm():
        return CharLSTM(width=256, hidden=1024, rngs=nnx.Rngs(0))

    def cnn():
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            *(nnx.Conv(3, 64, (3, 3), rngs=rngs), nnx.relu, nnx.Conv(64, 128, (3, 3), strides=2, rngs=rngs), nnx.relu),
            *(lambda x: x.reshape(x.shape[0], -1), nnx.Linear(16 * 16 * 128, 256, rngs=rngs), nnx.relu, nnx.Linear(256, 10, rngs=rngs)),
        )

    if name == "cnn":
        batch = {"image": jax.ShapeDtypeStruct((rows, 32, 32, 3), "float32"), "label": jax.ShapeDtypeStruct((rows,), "int32")}
        return cnn, batch, "float32"
    tokens = jax.ShapeDtypeStruct((rows, 128 if name == "lstm" else 1024), "int32")
    return lstm if name == "lstm" else gpt, {"tokens": tokens, "targets": tokens}, "float32" if name == "lstm" else "bfloat16"


def measure(name: str, rows: int, target: str) -> dict:
    """Predicted and measured, of one case."""
    import jax
    import numpy as np
    import optax

    import spmd

    model, shapes, precision = case_of(name, rows)
    options = {"loss": spmd.losses.cross_entropy, "optimizer": optax.adamw(1e-3), "precision": precision}
    plan = spmd.plan(model, shapes, target=target, **options)
    trainer = spmd.Trainer(model, mesh=spmd.make_mesh("data=1", devices=jax.devices()[:1]), **options)
    batch = trainer.place(jax.tree.map(lambda leaf: np.full(leaf.shape, leaf.dtype == "float32", leaf.dtype), shapes))
    state, times = trainer.init(), []
    for _ in range(25):
        begun = time.perf_counter()
        state, metrics = trainer.step(state, batch)
        metrics.wait()
        times.append(time.perf_counter() - begun)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    seconds, device = statistics.median(times[5:]), jax.devices()[0].device_kind
    measured = {"seconds": seconds, "peak": peak, "device": device}
    return measured | {"plan_seconds": plan.timeline.seconds, "plan_peak": plan.memory.peak, "compiler": plan.compiled.compiler}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="what is here, as `spmd targets` calls it")
    parser.add_argument("--only", help="cases, by comma: " + ", ".join(CASES))
    parser.add_argument("--case", nargs=2, metavar=("NAME", "ROWS"), help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case[0], int(options.case[1]), options.target)))
        return
    lines, result = [], {}
    for name in options.only.split(",") if options.only else CASES:
        title, sizes = CASES[name]
        header = "| rows | step | plan | plan / step | peak | plan | plan / peak |"
        lines += [f"### {name}: {title}", "", header, "|---|---|---|---|---|---|---|"]
        for rows in sizes:
            command = [sys.executable, __file__, "--target", options.target, "--case", name, str(rows)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
            )
            if done.returncode:
                lines.append(f"| {rows} | failed: {done.stderr.strip().splitlines()[-1][:100]} | | | | | |")
                continue
            result = json.loads(done.stdout.splitlines()[-1])
            seconds, planned, peak, planned_peak = (result[key] for key in ("seconds", "plan_seconds", "peak", "plan_peak"))
            memory = f"{peak / 2**30:.3f} GiB | {planned_peak / 2**30:.3f} GiB | {planned_peak / peak:.3f}" if peak else " |  | "
            lines.append(f"| {rows} | {1e3 * seconds:.2f} ms | {1e3 * planned:.2f} ms | {planned / seconds:.2f} | {memory} |")
            print(lines[-1], flush=True)
        lines.append("")
    head = f"`{' '.join(['python', 'benchmarks/plan_truth.py', *sys.argv[1:]])}`, {datetime.date.today()}, {result.get('device')}, "
    head += f"Python {platform.python_version()}; plans compiled by {result.get('compiler')}."
    options.write.write_text("\n".join(["# Plans against the device", "", head, "", *lines]), encoding="utf-8")


if __name__ == "__main__":
    main()
