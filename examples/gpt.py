"""Train a small character-level GPT on the Python source of the standard library.

    python examples/gpt.py --layout fsdp_tensor_parallel --mesh data=4,model=2

Layouts shard kernels by their logical axis names (`named`). `spmd.nn` has attention and embedding
for sharded sequences.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import spmd

VOCAB = 128  # ASCII: fixed, so that sizes divide whatever the text holds
SIZES = ("vocab", "width", "depth", "heads", "length")


def named(*names: str | None) -> Any:
    """A small normal initialiser whose array carries these names, one per dim; the layout maps them
    to mesh axes.
    """
    return nnx.with_partitioning(nnx.initializers.normal(0.02), names)


class Attention(nnx.Module):
    """Causal attention; the layout shards over heads, and never splits a head."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        init = named("embed", "heads")
        self.query, self.key, self.value = (
            nnx.Linear(width, width, use_bias=False, kernel_init=init, rngs=rngs) for _ in range(3)
        )
        self.out = nnx.Linear(
            width, width, use_bias=False, kernel_init=named("heads", "embed"), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = (
            linear(x).reshape(*x.shape[:-1], self.heads, -1)
            for linear in (self.query, self.key, self.value)
        )
        return self.out(spmd.nn.attention(query, key, value, causal=True).reshape(x.shape))


class Block(nnx.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, rngs=rngs)
        self.up = nnx.Linear(
            width, 4 * width, use_bias=False, kernel_init=named("embed", "mlp"), rngs=rngs
        )
        self.down = nnx.Linear(
            4 * width, width, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # names are for [remat] of a layout
        x = x + self.dropout(checkpoint_name(self.attention(self.norm1(x)), "attn_out"))
        return x + self.dropout(
            self.down(nnx.gelu(checkpoint_name(self.up(self.norm2(x)), "mlp_up")))
        )


class GPT(nnx.Module):
    """Embeddings, blocks, and logits for the next character."""

    def __init__(
        self, *, vocab=VOCAB, width=64, depth=2, heads=4, length=64, dropout=0.0, rngs: nnx.Rngs
    ):
        self.tokens = spmd.nn.Embed(vocab, width, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.places = nnx.Embed(length, width, embedding_init=named(None, "embed"), rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, dropout, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(
            width, vocab, use_bias=False, kernel_init=named("embed", "vocab"), rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [rows, length, vocab] of the character after each of `tokens` [rows, length]."""
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Model = GPT


def make_model(**sizes: int) -> GPT:
    """The model, by default at its usual size, always with the same initial values."""
    return GPT(**sizes, rngs=nnx.Rngs(0))


def load_data(
    length: int = 64, limit: int = 400_000
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Windows of `length` characters and what follows each, from the standard library; the last
    tenth is for testing.
    """
    text = b"".join(
        path.read_bytes()[:limit] for path in sorted(Path(os.__file__).parent.glob("*.py"))
    )[:limit]
    codes = np.array([code for code in text if code < VOCAB], np.int32)
    split = (count := (len(codes) - 1) // length) * 9 // 10
    tokens, targets = (
        codes[start : start + count * length].reshape(count, length) for start in (0, 1)
    )
    return {"tokens": tokens[:split], "targets": targets[:split]}, {
        "tokens": tokens[split:],
        "targets": targets[split:],
    }


def main(argv: list[str] | None = None) -> spmd.Result:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on real text, under any layout."
    )
    parser.add_argument(
        "--layout",
        default="data_parallel",
        help="a shipped layout's name, or a path to a TOML file",
    )
    parser.add_argument("--mesh", help='such as "data=4,model=2"; by default the layout\'s own')
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        help="CPU devices to simulate; 0 uses the devices there are",
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="of the model; by default a small one")
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)  # before anything asks JAX for a device
    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    train, test = load_data(length=args.length) if args.length else load_data()
    loss, optimizer = (
        spmd.losses.cross_entropy,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3)),
    )
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("mesh", "layout", "batch_size", "steps", "precision")
    }
    metrics = {"accuracy": spmd.metrics.accuracy}
    result = spmd.fit(
        lambda: make_model(**sizes),
        train,
        loss=loss,
        optimizer=optimizer,
        metrics=metrics,
        progress=True,
        **options,
    )
    print("  ".join(f"test {name} {value:.4f}" for name, value in result.evaluate(test).items()))
    return result


if __name__ == "__main__":
    main()
