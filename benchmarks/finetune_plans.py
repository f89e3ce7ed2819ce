"""Plans of fine-tuning a model of Llama 3's 8 B shape: all of it, adapters, and adapters over 4-bit
weights; no GPU is needed.

    pip install -e '.[gpu-compiler]'         # the compiler alone, 400 MB, no CUDA libraries
    python benchmarks/finetune_plans.py      # writes benchmarks/results/finetune_plans.md

The model is the `Decoder` that `spmd.pretrained.load` makes of such a folder, with the loss and the
optimizer of `spmd finetune`.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported
from spmd.pretrained.decoder import Decoder
from spmd.pretrained.decoder_config import DecoderConfig

CONFIG = {  # as config.json of Meta-Llama-3-8B has them
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LENGTH = 4096
RANK = 16
FIELDS = ("tokens", "targets", "segment_ids", "positions", "mask")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, of which weights, on what."""

    title: str
    target: str
    adapters: bool = False
    frozen: str | None = None
    rows: int = 1  # on each device


CASES = [
    Case("all weights", "1xh100"),
    Case("all weights", "8xh100"),
    Case("adapters", "1xh100", adapters=True, frozen="bfloat16"),
    Case("adapters, int8 weights", "1xh100", adapters=True, frozen="int8"),
    Case("adapters, nf4 weights", "1xh100", adapters=True, frozen="nf4"),
    Case("adapters", "8xh100", adapters=True, frozen="bfloat16"),
    Case("adapters, nf4 weights", "8xh100", adapters=True, frozen="nf4"),
    Case("adapters, nf4 weights", "1xl4", adapters=True, frozen="nf4"),
]


def plan(case: Case) -> Any:
    """The plan of a case: under fsdp, with fused attention, each layer recomputed."""
    layout = dataclasses.replace(
        spmd.Layout.load("fsdp"),
        attention=spmd.Attention("auto"),
        remat=spmd.Remat(modules=("stack/layers",)),
        name="fsdp",
    )
    if case.adapters:
        adapter = spmd.Adapter("stack/layers/**", rank=RANK, alpha=2.0 * RANK)
        layout = dataclasses.replace(
            layout, adapters=(adapter,), train=spmd.Train(frozen=case.frozen)
        )
    row = jax.ShapeDtypeStruct((case.rows * int(case.target.partition("x")[0]), LENGTH), "int32")
    config = DecoderConfig.from_config(CONFIG, "config.json")
    return spmd.plan(
        lambda: Decoder(config, rngs=nnx.Rngs(0)),
        dict.fromkeys(FIELDS, row),
        loss=spmd.losses.next_token,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-4)),
        target=case.target,
        layout=layout,
        precision="bfloat16",
    )


COLUMNS = (
    "trained",
    "devices",
    "step",
    "MFU",
    "trained parameters",
    "frozen",
    "optimizer",
    "temporaries",
    "expected",
    "gradients sent",
)


def row(case: Case, plan: Any) -> str:
    """A line of the table: bytes are of one device."""
    memory = plan.memory
    sizes = (
        memory.parameters,
        memory.frozen,
        memory.optimizer,
        memory.temporaries,
        memory.expected,
        plan.traffic.bytes("gradients"),
    )
    shown = [f"{size / 2**30:.2f} GiB" for size in sizes]
    shown[4] += "" if memory.fits else " (does not fit)"
    return (
        "| "
        + " | ".join(
            [
                case.title,
                case.target,
                f"{plan.timeline.seconds * 1e3:,.0f} ms",
                f"{plan.timeline.mfu:.1%}",
                *shown,
            ]
        )
        + " |"
    )


def main() -> None:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    print("\n".join(lines))
    for case in CASES:
        lines.append(row(case, plan(case)))
        print(lines[-1], flush=True)
    head = reported.head(
        "Fine-tuning 8 B parameters, planned",
        "python benchmarks/finetune_plans.py",
        "jax",
        "jaxlib",
        "jax-cuda13-pjrt",
    )
    about = [
        f"One row of {LENGTH:,} tokens on each device, in bfloat16; layers are recomputed, "
        f"attention is fused. Adapters have rank {RANK},",
        "on all linear maps of all layers. Bytes are of one device, and `expected` includes what "
        "is needed beside the program. Nothing",
        "was measured on a GPU.",
    ]
    reported.write("finetune_plans", [*head, *about, "", *lines])


if __name__ == "__main__":
    main()
