"""The best that 1, 4, 8 and 64 H100s can do for one recurrent network, by plan: eight LSTM layers
of 2,048 over 512 steps, 256 rows, bfloat16.

    pip install -e '.[gpu-compiler]'         # the compiler alone, 400 MB, no CUDA libraries
    python benchmarks/recurrent_plans.py     # writes benchmarks/results/recurrent_plans.md

Each plan is that of a command, which the report lists. Nothing is trained, and no GPU is used.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported
from benchmarks.headline_plans import LSTM, figures, planned

COMMAND = (
    "spmd plan examples/rnn_wavefront.py --target {target} --precision bfloat16 --mesh {mesh} -- "
    "--layout {layout} {arguments}"
)
# GPUs; the mesh; steps of a chunk that a stage computes at once, None for the default
CHUNKS = {
    (1, "data=1"): (None,),
    (4, "data=4"): (None,),
    (4, "data=2,stage=2"): (None,),
    (4, "data=1,stage=4"): (None,),
    (8, "data=8"): (None,),
    (8, "data=4,stage=2"): (None,),
    (8, "data=2,stage=4"): (None,),
    (8, "data=1,stage=8"): (None, 2, 4, 16),
    (64, "data=64"): (None,),
    (64, "data=32,stage=2"): (None,),
    (64, "data=16,stage=4"): (None,),
    (64, "data=8,stage=8"): (None, 4, 16),
}
CASES = [(*case, chunk) for case, chunks in CHUNKS.items() for chunk in chunks]
TIME_CHUNK = "benchmarks/recurrent_time_chunk.toml"


def command(count: int, mesh: str, chunk: int | None, layout: str = "") -> str:
    if not layout:
        layout = "pipeline" if "stage" in mesh else "data_parallel"
    target = f"{count}xh100"
    if count > 8:
        target = f"{count // 8}x8xh100"
    arguments = LSTM
    if chunk:
        arguments += f" --time-chunk {chunk}"
    return COMMAND.format(target=target, layout=layout, mesh=mesh, arguments=arguments)


def main() -> None:
    commands = {case: command(*case) for case in CASES}
    commands[1, "data=1", None, TIME_CHUNK] = command(1, "data=1", None, TIME_CHUNK)
    lines = [
        "| GPUs | mesh | chunk | memory of a GPU | step | times as fast as one | products | "
        "memory | launches | communication not hidden |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    alone = 0.0
    for (count, mesh, chunk, *layout), line in commands.items():
        result = figures(line, planned(line))
        seconds = result["seconds"]
        alone = alone or seconds
        name = chunk or "default"
        if "stage" not in mesh:
            name = "64, computed again" if layout else ""
        limits = " | ".join(f"{1e3 * part:,.0f} ms" for part in result["by_limit"].values())
        memory = f"{result['expected'] / 2**30:.1f} GiB"
        row = f"| {count} | {mesh} | {name} | {memory} | {1e3 * seconds:,.0f} ms | "
        lines.append(f"{row}{alone / seconds:.1f} | {limits} |")
        print(lines[-1], flush=True)
    head = reported.head(
        "Eight LSTM layers on 1 to 64 H100s, by plan",
        "python benchmarks/recurrent_plans.py",
        *("jax", "jaxlib", "jax-cuda13-pjrt"),
    )
    about = [
        "Eight LSTM layers of 2,048 over 512 steps, 256 rows in all, bfloat16. Nothing was "
        "measured on a GPU.",
        "",
    ]
    shown = [f"- `{line}`" for line in commands.values()]
    reported.write("recurrent_plans", [*head, *about, *lines, "", "The commands:", "", *shown])


if __name__ == "__main__":
    main()
