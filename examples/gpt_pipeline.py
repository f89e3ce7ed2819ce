"""Train the GPT of gpt.py with its blocks in a stack: a scan on one device, a pipeline under a
pipeline layout.

    python examples/gpt_pipeline.py  # gpipe, data=2,stage=4
    python examples/gpt_pipeline.py --layout pipeline_1f1b --microbatches 8 --tied
    python examples/gpt_pipeline.py --layout fsdp_pipeline_tensor  # data=2,stage=2,model=2
    # circular: two groups of blocks on each stage
    python examples/gpt_pipeline.py --layout pipeline --groups 2 --draw runs/schedule.png
    python examples/gpt_pipeline.py --layout data_parallel  # the same model, replicated

Prints which stage works on which microbatch at each tick. Nothing in the model refers to devices.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import spmd
from spmd import viz

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.gpt import SIZES, VOCAB, Block, load_data, named


class GPT(nnx.Module):
    """Embeddings, a stack of blocks, and logits for the next character; with `tied`, by the
    embedding's table.
    """

    def __init__(
        self,
        *,
        vocab=VOCAB,
        width=64,
        depth=8,
        heads=4,
        length=64,
        dropout=0.0,
        tied=False,
        rngs: nnx.Rngs,
    ):
        self.tokens = nnx.Embed(vocab, width, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.places = nnx.Embed(length, width, embedding_init=named(None, "embed"), rngs=rngs)
        self.blocks = spmd.nn.LayerStack(
            spmd.nn.repeat(depth, lambda rngs: Block(width, heads, dropout, rngs=rngs), rngs)
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = (
            None
            if tied
            else nnx.Linear(
                width, vocab, use_bias=False, kernel_init=named("embed", "vocab"), rngs=rngs
            )
        )

    def features(self, tokens: jax.Array) -> jax.Array:
        """What the head is applied to, [rows, length, width], of `tokens` [rows, length]."""
        return self.norm(
            self.blocks(self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1])))
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [rows, length, vocab] of the character after each of `tokens` [rows, length]."""
        x = self.features(tokens)
        return self.tokens.attend(x) if self.head is None else self.head(x)


def cross_entropy(model: GPT, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(sum, count) over all characters. Logits exist for a chunk of them at a time."""
    table, vocab_dim = (model.tokens.embedding, 0) if model.head is None else (model.head.kernel, 1)
    features = model.features(batch["tokens"])
    return spmd.losses.cross_entropy_from_features(
        features, table[...], batch["targets"], vocab_dim=vocab_dim
    )


def with_pipeline(layout: spmd.Layout, **options: Any) -> spmd.Layout:
    """The layout with those options of `[pipeline]` that are not None."""
    changes = {name: value for name, value in options.items() if value is not None}
    if changes.get("groups", 1) > 1:
        changes["schedule"] = "circular"
    return dataclasses.replace(layout, pipeline=dataclasses.replace(layout.pipeline, **changes))


def main(argv: list[str] | None = None) -> spmd.Result:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on real text, blocks over devices."
    )
    parser.add_argument(
        "--layout", default="pipeline", help="a shipped layout's name, or a path to a TOML file"
    )
    parser.add_argument("--mesh", help='such as "data=2,stage=4"; by default the layout\'s own')
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        help="CPU devices to simulate; 0 uses the devices there are",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        help="parts into which a worker's rows are split; by default the layout's own",
    )
    parser.add_argument(
        "--groups", type=int, help="of blocks on each stage; more than one is a circular schedule"
    )
    parser.add_argument("--tied", action="store_true", help="the head is the embedding's table")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--length", type=int, default=64, help="characters that a row holds")
    parser.add_argument(
        "--text", type=int, default=400_000, help="characters to learn from and to test with"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--draw", type=Path, help="a file for a drawing of the schedule: .png, .svg or .pdf"
    )
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)  # before anything asks JAX for a device
    train, test = load_data(length=args.length, limit=args.text)
    result = spmd.fit(
        lambda: GPT(**{name: getattr(args, name) for name in (*SIZES, "tied")}, rngs=nnx.Rngs(0)),
        train,
        loss=cross_entropy,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3)),
        mesh=args.mesh,
        layout=with_pipeline(
            spmd.Layout.load(args.layout), microbatches=args.microbatches, groups=args.groups
        ),
        batch_size=args.batch_size,
        steps=args.steps,
        precision=args.precision,
        metrics={"accuracy": spmd.metrics.accuracy},
        progress=True,
    )
    schedules = dict(result.trainer.schedules)
    for name, schedule in schedules.items():
        print(f"{name}; {schedule}")
    if args.draw is not None and schedules:
        print(f"drawn: {viz.schedule(schedules, args.draw)}")
    print("  ".join(f"test {name} {value:.4f}" for name, value in result.evaluate(test).items()))
    return result


if __name__ == "__main__":
    main()
