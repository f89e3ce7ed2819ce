"""Plans of training steps on GPUs: time, share of the peak, memory and bytes sent, from XLA's GPU
compiler, without a GPU.

    pip install -e '.[gpu-compiler]'  # the compiler alone, 400 MB, no CUDA libraries
    python benchmarks/gpu_steps.py  # every case; writes benchmarks/results/gpu_steps.md
    python benchmarks/gpu_steps.py --only 7B --rows 8  # cases of one model, without writing

Every case is the model of one line of `MODELS` under a shipped layout with the options of `CASES`,
compiled as `spmd.plan` does.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported
from benchmarks.published.models import Llama, next_token_loss
from examples.gpt_pipeline import GPT


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the tokens in a row."""

    kind: Any
    length: int
    sizes: dict[str, int]


def gpt(width: int, depth: int, heads: int, length: int) -> Size:
    return Size(
        GPT,
        length,
        {"vocab": 50304, "width": width, "depth": depth, "heads": heads, "length": length},
    )


def llama(width: int, depth: int, heads: int, hidden: int) -> Size:
    return Size(
        Llama,
        8192,
        {
            "vocab": 128256,
            "width": width,
            "depth": depth,
            "heads": heads,
            "groups": 8,
            "hidden": hidden,
        },
    )


MODELS = {
    "124M": gpt(768, 12, 12, 1024),
    "1.3B": gpt(2048, 24, 16, 2048),
    "7B": gpt(4096, 32, 32, 2048),
    "Llama 8B": llama(4096, 32, 32, 14336),
    "Llama 70B": llama(8192, 80, 64, 28672),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: a model of `MODELS`, rows on each device, and the hardware."""

    model: str
    rows: int
    target: str
    layout: str = "fsdp"
    depth: int | None = None  # None: the model's own
    remat: bool = True  # each layer is recomputed in the backward pass
    products: str | None = None  # in which dtype layers multiply; None: bfloat16, as everything


CASES = [
    Case("124M", 8, "8xh100", "data_parallel"),
    *(Case("124M", 32, target, "data_parallel") for target in ("8xh100", "8x8xh100", "64x8xh100")),
    *(Case("1.3B", 4, target) for target in ("8xh100", "8x8xh100", "64x8xh100")),
    *(Case("7B", rows, "8x8xh100", layout) for layout in ("fsdp", "fsdp_bf16") for rows in (1, 8)),
    Case("7B", 8, "8xh100"),
    Case("7B", 8, "64x8xh100"),
    Case("7B", 8, "8x8xh100", products="float8"),
    *(Case("7B", 1, "8x8xh100", depth=depth) for depth in (16, 64)),
    *(Case("Llama 8B", 1, target) for target in ("8xh100", "8x8xh100", "64x8xh100", "8x8xa100_80")),
    *(
        Case("Llama 70B", 1, target)
        for target in ("8xh100", "8x8xh100", "64x8xh100", "8x8xa100_80")
    ),
]


def plan(case: Case) -> Any:
    """The plan of a case: fused attention, and cross-entropy from features."""
    size = MODELS[case.model]
    sizes = size.sizes | ({"depth": case.depth} if case.depth else {})
    devices = [int(part) for part in case.target.split("x")[:-1]]
    rows = case.rows * int(np.prod(devices))
    tokens = jax.ShapeDtypeStruct((rows, size.length), "int32")
    layout = dataclasses.replace(spmd.Layout.load(case.layout), attention=spmd.Attention("auto"))
    if case.remat:
        layout = dataclasses.replace(layout, remat=spmd.Remat(modules=("blocks/layers",)))
    if case.products:
        layout = dataclasses.replace(
            layout, precision=(spmd.Precision("blocks/**", case.products),)
        )
    return spmd.plan(
        lambda: size.kind(**sizes, rngs=nnx.Rngs(0)),
        {"tokens": tokens, "targets": tokens},
        loss=next_token_loss,
        optimizer=optax.adamw(3e-4),
        target=case.target,
        layout=layout,
        precision="bfloat16",
    )


# what the figures mean, and those that others have published
NOTES = Path(__file__).parent / "gpu_steps_notes.md"

HEAD = (
    "| model | devices | layout | rows each | step | HFU | MFU | peak | temporaries | sent | "
    "exposed |"
)


def row(case: Case, plan: Any) -> str:
    """A line of the table."""
    times, memory = plan.timeline, plan.memory
    name = ", ".join(
        [
            case.model,
            *([f"{case.depth} layers"] if case.depth else []),
            *([case.products] if case.products else []),
        ]
    )
    figures = [
        f"{times.seconds * 1e3:,.1f} ms",
        f"{times.hfu:.1%}",
        f"{times.mfu:.1%}",
        f"{memory.peak / 2**30:.1f} GiB" + ("" if memory.fits else " (does not fit)"),
        f"{memory.temporaries / 2**30:.1f} GiB",
        f"{plan.traffic.bytes() / 2**30:.1f} GiB",
        f"{times.exposed * 1e3:,.1f} ms",
    ]
    return "| " + " | ".join([name, case.target, case.layout, str(case.rows), *figures]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan training steps on GPUs.")
    parser.add_argument("--only", help="cases of this model")
    parser.add_argument("--rows", type=int, help="cases with this many rows on each device")
    parser.add_argument("--report", action="store_true", help="print each plan's full report")
    args = parser.parse_args()
    chosen = [
        case for case in CASES if args.only in (None, case.model) and args.rows in (None, case.rows)
    ]
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    print("\n".join(lines))
    for case in chosen:
        planned = plan(case)
        lines.append(row(case, planned))
        print(planned if args.report else lines[-1], flush=True)
    if chosen == CASES:
        head = reported.head(
            "Steps on GPUs, planned",
            "python benchmarks/gpu_steps.py",
            "jax",
            "jaxlib",
            "jax-cuda13-pjrt",
        )
        reported.write("gpu_steps", [*head, *lines, "", NOTES.read_text(encoding="utf-8")])


if __name__ == "__main__":
    main()
