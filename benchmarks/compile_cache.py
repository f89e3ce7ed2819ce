"""Seconds from the start of `fit` to its first step, with and without compiled programs in the
cache.

    python benchmarks/compile_cache.py --rounds 3     # writes benchmarks/results/compile_cache.md
    python benchmarks/compile_cache.py --rounds 1 --depth 4 --print

Each run is a fresh process, trains the GPT of examples/gpt.py for two steps under a layout on 8
simulated devices, and evaluates it. In a round, the arms follow one another: without a cache, with
an empty one, and with the one that the run before has filled.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported

ROOT = Path(__file__).resolve().parents[1]
ARMS = {
    "off": "without a cache",
    "cold": "with an empty cache",
    "warm": "with the cache that a run has filled",
}


def run(folder: str | bool, options: dict[str, Any]) -> dict[str, Any]:
    """Train in this process; seconds, and what was compiled."""
    import optax

    import spmd
    from examples.gpt import load_data, make_model

    spmd.simulate_devices(8)
    train, test = load_data(limit=40_000)
    train, test = ({name: array[:128] for name, array in data.items()} for data in (train, test))
    sizes = {"width": options["width"], "depth": options["depth"]}
    times: list[float] = []
    began = time.perf_counter()
    result = spmd.fit(
        lambda: make_model(**sizes),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adamw(1e-3),
        layout=options["layout"],
        batch_size=64,
        steps=2,
        eval_data=test,
        callbacks=[lambda info: times.append(time.perf_counter() - began)],
        progress=False,
        compile_cache=folder,
    )
    counts = result.compilations
    return {
        "seconds": times[0],
        "compiled": counts.compiled,
        "loaded": counts.loaded,
        "compiling": counts.seconds,
    }


def in_new_process(folder: str | bool, options: dict[str, Any]) -> dict[str, Any]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "SPMD_"))
    }
    command = [sys.executable, __file__, "--child", json.dumps([folder, options])]
    variables = environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=600, check=True
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    print(measured, file=sys.stderr, flush=True)
    return measured


def measure(rounds: int, options: dict[str, Any]) -> list[str]:
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    size = (0, 0)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            results["off"].append(in_new_process(False, options))
            results["cold"].append(in_new_process(folder, options))
            results["warm"].append(in_new_process(folder, options))
            entries = [path.stat().st_size for path in Path(folder).rglob("*-cache")]
            size = len(entries), sum(entries)

    def median(arm: str, name: str) -> float:
        return statistics.median(each[name] for each in results[arm])

    def ratio(first: str, second: str) -> str:
        ratios = sorted(
            one["seconds"] / two["seconds"]
            for one, two in zip(results[first], results[second], strict=True)
        )
        return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"

    lines = [
        "| run | until the first step, s (median) | compiling or loading, s | programs compiled | "
        "loaded |",
        "|---|---|---|---|---|",
    ]
    for arm, title in ARMS.items():
        times = f"{median(arm, 'seconds'):.2f} | {median(arm, 'compiling'):.2f}"
        lines.append(
            f"| {title} | {times} | {median(arm, 'compiled'):.0f} | {median(arm, 'loaded'):.0f} |"
        )
    lines += [
        "",
        "| seconds until the first step, in a round | median (smallest to largest) |",
        "|---|---|",
    ]
    lines += [
        f"| filled cache / no cache | {ratio('warm', 'off')} |",
        f"| empty cache / no cache | {ratio('cold', 'off')} |",
        "",
    ]
    rest = (
        "The rest of the time is tracing, imports that `fit` makes when first called, and the step "
        "itself."
    )
    rest += (
        f" The load average of the machine was {os.getloadavg()[0]:.0f} at the end: other programs "
        "ran beside these."
    )
    return [*lines, f"The cache has {size[0]} programs, {size[1] / 1e6:.2f} MB. {rest}", ""]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--print", action="store_true", help="write no file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(*json.loads(args.child))))
        return
    options = {"layout": args.layout, "width": args.width, "depth": args.depth}
    changed = "".join(
        f" --{name} {value}" for name, value in options.items() if value != parser.get_default(name)
    )
    command = f"python benchmarks/compile_cache.py --rounds {args.rounds}{changed}"
    lines = reported.head("The compilation cache", command, "jax", "flax", "optax")
    lines += reported.print_sections([measure(args.rounds, options)])
    if not args.print:
        reported.write("compile_cache", lines)


if __name__ == "__main__":
    main()
