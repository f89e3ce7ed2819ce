"""Plans of steps with Muon, whose matrices XLA's partitioner multiplies or their owners do, beside
AdamW.

    pip install -e '.[gpu-compiler]'  # the compiler alone, 400 MB, no CUDA libraries
    # every case; writes benchmarks/results/matrix_optimizers.md
    python benchmarks/matrix_optimizers.py
    # one case, by its number from 0, without writing
    python benchmarks/matrix_optimizers.py --only 3

Each case is one step of a GPT (vocabulary 50304, rows of 1,024 tokens, bfloat16, fused attention),
with one row on each device. Muon updates the matrices of the blocks, and AdamW the rest.
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
from optax.contrib import MuonDimensionNumbers

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported
from benchmarks.published.models import UnrolledGPT, next_token_loss
from examples.gpt_pipeline import GPT
from spmd.base.tree import map_paths

KINDS = {"list": UnrolledGPT, "stack": GPT}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: a GPT, a layout, and the hardware."""

    kind: str
    width: int
    depth: int
    layout: str
    target: str
    mesh: str


CASES = [
    Case("list", 1024, 8, "data_parallel", "8xh100", "data=8"),
    Case("list", 1024, 8, "zero1", "8xh100", "data=8"),
    Case("list", 1024, 8, "fsdp", "8xh100", "data=8"),
    Case("list", 1024, 8, "fsdp_tensor_parallel", "8xh100", "data=4,model=2"),
    Case("stack", 1024, 8, "fsdp", "8xh100", "data=8"),
    Case("stack", 2048, 24, "fsdp", "8x8xh100", "data=64"),
]


def dims_of(params: Any) -> Any:
    """The dims of the matrices of blocks, also in stacks; None of all other parameters."""

    def dims(path: str, leaf: Any) -> MuonDimensionNumbers | None:
        matrix = path.startswith("blocks/") and leaf.ndim == (
            3 if path.startswith("blocks/layers/") else 2
        )
        return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if matrix else None

    return map_paths(dims, params)


MUON = optax.contrib.muon(3e-4, muon_weight_dimension_numbers=dims_of)
ARMS = {
    "SGD": (optax.sgd(3e-4), "compiler"),
    "AdamW": (optax.adamw(3e-4), "compiler"),
    "XLA": (MUON, "compiler"),
    "owners": (MUON, "owner"),
}


def plan(case: Case, optimizer: Any, matrices: str) -> Any:
    """The plan of a case."""
    length, devices = 1024, int(np.prod([int(part) for part in case.target.split("x")[:-1]]))
    tokens = jax.ShapeDtypeStruct((devices, length), "int32")
    layout = dataclasses.replace(spmd.Layout.load(case.layout), attention=spmd.Attention("auto"))
    layout = dataclasses.replace(
        layout, optimizer=dataclasses.replace(layout.optimizer, matrices=matrices)
    )
    heads = max(case.width // 128, 2)
    return spmd.plan(
        lambda: KINDS[case.kind](
            vocab=50304,
            width=case.width,
            depth=case.depth,
            heads=heads,
            length=length,
            rngs=nnx.Rngs(0),
        ),
        {"tokens": tokens, "targets": tokens},
        loss=next_token_loss,
        optimizer=optimizer,
        target=case.target,
        mesh=case.mesh,
        layout=layout,
        precision="bfloat16",
    )


HEAD = (
    "| layers | width | layout | devices | SGD's step | AdamW's update | Muon's, by XLA | Muon's, "
    "by owners | sent for it | by owners | "
    "state, AdamW | Muon | peak, by XLA | by owners |"
)


def row(case: Case) -> str:
    """A line of the table: of updates what a step takes, sends and holds more than one of SGD
    without momentum.
    """
    plans = {name: plan(case, *arm) for name, arm in ARMS.items()}
    base = plans["SGD"]
    more = {
        name: planned.timeline.seconds - base.timeline.seconds for name, planned in plans.items()
    }
    sent = {name: planned.traffic.bytes() - base.traffic.bytes() for name, planned in plans.items()}
    cells = [
        f"{case.kind} of {case.depth}",
        str(case.width),
        case.layout,
        case.target,
        f"{base.timeline.seconds * 1e3:.2f} ms",
        *(f"{more[name] * 1e3:.2f} ms" for name in ("AdamW", "XLA", "owners")),
        *(f"{sent[name] / 2**20:.0f} MiB" for name in ("XLA", "owners")),
        *(f"{plans[name].memory.optimizer / 2**30:.2f} GiB" for name in ("AdamW", "owners")),
        *(f"{plans[name].memory.peak / 2**30:.2f} GiB" for name in ("XLA", "owners")),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Plan steps of optimizers that need entire matrices."
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
            "Optimizers that need entire matrices, planned",
            "python benchmarks/matrix_optimizers.py",
            "jax",
            "jaxlib",
            "jax-cuda13-pjrt",
            "optax",
        )
        reported.write("matrix_optimizers", [*head, *lines, "", NOTES])


NOTES = """An update is what a step takes more than one of SGD without momentum, in the plan; "sent for it" is what a device sends more. "By
XLA": `[optimizer] matrices = "compiler"`, the default; "by owners": `matrices = "owner"`. Nothing here was measured on a GPU.
"""  # noqa: E501


if __name__ == "__main__":
    main()
