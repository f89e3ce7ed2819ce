"""Train a character LSTM on the Python source of the standard library.

    python examples/char_lstm.py --layout fsdp --devices 8

Every kernel has logical axis names (`named`), by which layouts shard it. Nothing else in the model
refers to devices.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import spmd

VOCAB = 128  # ASCII: fixed, so that sizes divide whatever the text holds


def named(*names: str | None, init: Any = None) -> Any:
    """An initialiser whose array carries these names, one per dim; the layout's `[axes]` maps them
    to mesh axes.
    """
    return nnx.with_partitioning(init or nnx.initializers.lecun_normal(), names)


def make_cell(inputs: int, hidden: int, rngs: nnx.Rngs) -> nnx.OptimizedLSTMCell:
    """A cell whose kernels carry names; the gates of `hidden` units lie side by side in them."""
    recurrent = named("embed", "hidden", init=nnx.initializers.orthogonal())
    return nnx.OptimizedLSTMCell(
        inputs,
        hidden,
        kernel_init=named("embed", "hidden"),
        recurrent_kernel_init=recurrent,
        rngs=rngs,
    )


class CharLSTM(nnx.Module):
    """Embedding, one LSTM over time, and logits for the next character."""

    def __init__(self, *, vocab: int = VOCAB, width: int = 64, hidden: int = 128, rngs: nnx.Rngs):
        table = named("vocab", "embed", init=nnx.initializers.normal(1.0))
        self.embed = nnx.Embed(vocab, width, embedding_init=table, rngs=rngs)
        self.lstm = nnx.RNN(make_cell(width, hidden, rngs), rngs=rngs)
        self.head = nnx.Linear(hidden, vocab, kernel_init=named("embed", "vocab"), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [rows, length, vocab] of the character after each of `tokens` [rows, length]."""
        # after each character, what the cell makes of all before it
        seen: Any = self.lstm(self.embed(tokens))
        return self.head(seen)


Model = CharLSTM


def make_model() -> CharLSTM:
    """The model at its usual size, always with the same initial values."""
    return CharLSTM(rngs=nnx.Rngs(0))


def load_data(
    length: int = 64, limit: int = 400_000
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Windows of `length` characters and what follows each, from the standard library; the last
    tenth is for testing.
    """
    text = b"".join(
        path.read_bytes()[:limit] for path in sorted(Path(os.__file__).parent.glob("*.py"))
    )[:limit]
    codes = np.frombuffer(text, np.uint8).astype(np.int32)
    codes = codes[codes < VOCAB]
    count = (len(codes) - 1) // length
    tokens, targets = (
        codes[start : start + count * length].reshape(count, length) for start in (0, 1)
    )
    split = count * 9 // 10
    return {"tokens": tokens[:split], "targets": targets[:split]}, {
        "tokens": tokens[split:],
        "targets": targets[split:],
    }


def main(argv: list[str] | None = None) -> spmd.Result:
    parser = argparse.ArgumentParser(
        description="Train a character LSTM on real text, under any layout."
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
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)  # before anything asks JAX for a device
    train, test = load_data()
    result = spmd.fit(
        make_model,
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3)),
        mesh=args.mesh,
        layout=args.layout,
        batch_size=args.batch_size,
        steps=args.steps,
        metrics={"accuracy": spmd.metrics.accuracy},
        progress=True,
    )
    print("  ".join(f"test {name} {value:.4f}" for name, value in result.evaluate(test).items()))
    return result


if __name__ == "__main__":
    main()
