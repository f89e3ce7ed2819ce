"""Plans of FSDP steps that gather weights layer by layer, and in full: which is faster, and what
`[gradients] gather = "auto"` picks.

    pip install -e '.[gpu-compiler]'            # the compiler alone, 400 MB, no CUDA libraries
    python benchmarks/gather_auto.py  # every case; writes benchmarks/results/gather_auto.md
    python benchmarks/gather_auto.py --only 3   # one case, by its number from 0, without writing

Each case is one step of a GPT (vocabulary 50304, rows of 1,024 tokens, bfloat16, fused attention)
under the shipped layout `fsdp`.
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
from benchmarks.published.models import UnrolledGPT, next_token_loss
from examples.gpt_pipeline import GPT

# the model, and what recomputes its layers
KINDS = {"stack": (GPT, "blocks/layers"), "list": (UnrolledGPT, "blocks/*")}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: a GPT, rows on each device, and the hardware."""

    kind: str
    width: int
    depth: int
    rows: int
    target: str
    remat: bool = False  # each layer is recomputed in the backward pass


CASES = [
    Case("stack", 128, 8, 1, "8xh100"),
    Case("stack", 1024, 8, 8, "8xh100"),
    Case("stack", 2048, 24, 1, "8x8xh100", remat=True),
    Case("list", 512, 8, 1, "8xh100"),
    Case("list", 1024, 8, 1, "8xh100"),
    Case("list", 1024, 8, 8, "8xh100"),
    Case("list", 1024, 8, 8, "8x8xh100"),
    Case("list", 2048, 8, 1, "8xh100"),
    Case("list", 2048, 8, 8, "8xh100", remat=True),
]


def plan(case: Case, gather: str) -> Any:
    """The plan of a case."""
    kind, layers = KINDS[case.kind]
    length, devices = 1024, int(np.prod([int(part) for part in case.target.split("x")[:-1]]))
    tokens = jax.ShapeDtypeStruct((case.rows * devices, length), "int32")
    layout = dataclasses.replace(spmd.Layout.load("fsdp"), attention=spmd.Attention("auto"))
    layout = dataclasses.replace(
        layout, gradients=dataclasses.replace(layout.gradients, gather=gather)
    )
    if case.remat:
        layout = dataclasses.replace(layout, remat=spmd.Remat(modules=(layers,)))
    return spmd.plan(
        lambda: kind(
            vocab=50304,
            width=case.width,
            depth=case.depth,
            heads=max(case.width // 128, 2),
            length=length,
            rngs=nnx.Rngs(0),
        ),
        {"tokens": tokens, "targets": tokens},
        loss=next_token_loss,
        optimizer=optax.adamw(3e-4),
        target=case.target,
        layout=layout,
        precision="bfloat16",
    )


HEAD = (
    "| layers | width | rows each | devices | a layer | by layer | exposed | peak | in full | "
    "exposed | peak | faster | `auto` |"
)


def row(case: Case) -> str:
    """A line of the table."""
    layer, full, auto = (plan(case, gather) for gather in ("layer", "full", "auto"))
    # of a layer
    times, weights = (
        {"by layer": layer.timeline.seconds, "in full": full.timeline.seconds},
        12 * case.width**2,
    )
    faster = min(times, key=lambda way: times[way])
    chosen = "by layer" if auto.compiled.hlo == layer.compiled.hlo else "in full"
    figures = [
        figure
        for planned in (layer, full)
        for figure in (
            f"{planned.timeline.seconds * 1e3:.2f} ms",
            f"{planned.timeline.exposed * 1e3:.2f} ms",
            f"{planned.memory.peak / 2**30:.2f} GiB",
        )
    ]
    layers = f"{case.kind} of {case.depth}" + (", recomputed" if case.remat else "")
    by = f"{faster}, by {max(times.values()) / min(times.values()) - 1:.0%}"
    cells = [
        layers,
        str(case.width),
        str(case.rows),
        case.target,
        f"{4 * weights / 2**20:.1f} MiB",
        *figures,
        by,
        chosen,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Plan steps that gather weights by layer and in full."
    )
    parser.add_argument("--only", type=int, help="the number of a case, from 0")
    args = parser.parse_args()
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    print("\n".join(lines), flush=True)
    for number, case in enumerate(CASES):
        if args.only in (None, number):
            lines.append(row(case))
            print(lines[-1], flush=True)
    if args.only is None:
        head = reported.head(
            "Gathering by layer or in full, planned",
            "python benchmarks/gather_auto.py",
            "jax",
            "jaxlib",
            "jax-cuda13-pjrt",
        )
        reported.write("gather_auto", [*head, *lines, "", NOTES])


NOTES = """"a layer": its weights in float32. "by layer": a stack's layer or a list's block at a time. "faster": of the two steps.
"`auto`": what the rule picks.

A stack is faster by layer, and holds less: in full, its loop slices each layer's weights from an array of all, and autodiff's loop keeps
every value that a gradient uses. A list holds less block by block, and is slower: each block waits for the weights that it gathers, and
computes with barriers around it, where in full XLA sees the passes of all blocks at once, hides more of the communication and computes them
in fewer kernels. (Until November 2026 a block gathered the next one's weights while it computed. Those plans, with other figures, are in
the history of this file.) Nothing here was measured on a GPU.
"""  # noqa: E501


if __name__ == "__main__":
    main()
