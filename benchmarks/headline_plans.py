"""The plans that the README and the benchmarks page draw: a GPT that does not fit and then does,
and eight LSTM layers as a wavefront.

    pip install -e '.[gpu-compiler]'         # the compiler alone, 400 MB, no CUDA libraries
    # writes benchmarks/results/headline_plans.md and .json, then run docs/building/draw.py
    python benchmarks/headline_plans.py

Each plan is that of a command, which the report lists. Nothing is trained, and no GPU is used.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported
from spmd.launch import cli, plan_command
from spmd.planner.html_report import merged
from spmd.planner.planning import Plan, plan

GPT = "--width 2048 --depth 24 --heads 16 --vocab 50304 --length 1024 --batch-size 16 --devices 0"
LSTM = "--width 2048 --length 512 --batch-size 256 --layers 8 --devices 0"
CASES = {  # what a picture calls it: the command
    "gpt data_parallel": "spmd plan examples/gpt_pipeline.py --target 8xl4 --layout data_parallel "
    "--precision "
    f"bfloat16 -- {GPT}",
    "gpt fsdp": "spmd plan examples/gpt_pipeline.py --target 8xl4 --layout fsdp --precision "
    "bfloat16 -- "
    f"{GPT}",
    "lstm one device": "spmd plan examples/rnn_wavefront.py --target 1xh100 --layout data_parallel "
    "--precision "
    f"bfloat16 -- {LSTM}",
    "lstm data_parallel": "spmd plan examples/rnn_wavefront.py --target 8xh100 --layout "
    "data_parallel --precision "
    f"bfloat16 -- {LSTM}",
    "lstm wavefront": "spmd plan examples/rnn_wavefront.py --target 8xh100 --layout pipeline "
    "--mesh "
    "data=1,stage=8"
    f" --precision bfloat16 -- {LSTM}",
}
COLUMNS = (
    "plan",
    "target",
    "memory of a device",
    "",
    "step",
    "rows/s",
    "products",
    "memory",
    "launches",
    "communication not hidden",
)
DRAWN = 400  # pixels of a drawn timeline: spans that are nearer than one are merged


def planned(command: str) -> Plan:
    """The plan that a command prints."""
    words = shlex.split(command)[1:]
    split = words.index("--")
    options = cli._parser().parse_args(words[:split])
    options.script_arguments = words[split + 1 :]
    return plan(**plan_command._step_arguments(options)[0])


def figures(command: str, result: Plan) -> dict[str, Any]:
    """What is drawn of a plan: bytes of a device, seconds of a step."""
    times = result.timeline
    pixel = times.seconds / DRAWN
    spans = {
        kind: [span for span in times.spans if span.communicates is (kind == "communication")]
        for kind in ("computation", "communication")
    }
    schedule = next(iter(result.schedules.values()), None)
    return {
        "command": command,
        "target": result.cluster.target.title,
        "devices": result.cluster.count,
        "parameters": sum(
            place.nbytes // 4 for place in result.program.placed.resolved.placements.values()
        ),
        "expected": result.memory.expected,
        "capacity": result.memory.capacity,
        "fits": result.fits,
        "seconds": times.seconds,
        "rows_per_second": result.rows_per_second,
        "by_limit": {
            name: getattr(times, name) for name in ("products", "memory", "launches", "exposed")
        },
        "spans": {
            kind: [[round(span.begin, 6), round(span.end, 6)] for span in merged(part, pixel)]
            for kind, part in spans.items()
        },
        "schedule": None
        if schedule is None
        else {
            "name": schedule.name,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
        },
    }


def main() -> None:
    results = {}
    for name, command in CASES.items():
        results[name] = figures(command, planned(command))
        print(name, results[name]["seconds"], results[name]["expected"] / 2**30, flush=True)
    (reported.RESULTS / "headline_plans.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )
    head = reported.head(
        "Plans that pictures show",
        "python benchmarks/headline_plans.py",
        "jax",
        "jaxlib",
        "jax-cuda13-pjrt",
    )
    lines = [
        "| plan | target | memory of a device | | step | rows/s | products | memory | launches | "
        "communication not hidden |",
        "|" + "---|" * 10,
    ]
    for name, result in results.items():
        memory = f"{result['expected'] / 2**30:.1f} of {result['capacity'] / 2**30:.1f} GiB"
        limits = " | ".join(f"{1e3 * part:,.0f} ms" for part in result["by_limit"].values())
        fits = "fits" if result["fits"] else "does not fit"
        target = f"{result['devices']} x {result['target']}"
        step = f"{1e3 * result['seconds']:,.0f} ms | {result['rows_per_second']:,.0f}"
        lines.append(f"| {name} | {target} | {memory} | {fits} | {step} | {limits} |")
    alone, others = results["lstm one device"], ("lstm data_parallel", "lstm wavefront")
    faster = "; ".join(
        f"{name.partition(' ')[2]}: {alone['seconds'] / results[name]['seconds']:.1f} times as fast"
        for name in others
    )
    about = [
        f"A GPT of {results['gpt fsdp']['parameters'] / 1e9:.2f} billion parameters, 16 rows of "
        "1,024 tokens; and eight LSTM layers of",
        f"2,048 over 512 steps, 256 rows. On 8 devices beside one, the LSTM layers under {faster}. "
        "Nothing was measured on a GPU.",
    ]
    commands = [f"- {name}: `{result['command']}`" for name, result in results.items()]
    reported.write(
        "headline_plans", [*head, *about, "", *lines, "", "The commands:", "", *commands]
    )


if __name__ == "__main__":
    main()
