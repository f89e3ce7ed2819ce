"""Train eight LSTM layers on Python source as a wavefront over four devices: each stage works one
chunk of text behind the previous one.

    python examples/rnn_wavefront.py                              # data=2,stage=4
    # the same model, a scan over its layers
    python examples/rnn_wavefront.py --layout data_parallel
    python examples/rnn_wavefront.py --width 256 --length 128 --time-chunk 16 --steps 600

Prints bits per byte of held-out text during training, and which stage works on which chunk at each
tick. Nothing in the model refers to devices.
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.char_lstm import VOCAB, load_data, make_cell, named


def _bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return spmd.losses.cross_entropy.function(logits, targets) / math.log(2)


bits_per_byte = spmd.metrics.PerExample(_bits, "bits_per_byte")


class DeepLSTM(nnx.Module):
    """Embedding, LSTM layers with residual connections from the third on, and logits for the next
    character.
    """

    def __init__(
        self,
        *,
        vocab: int = VOCAB,
        width: int = 128,
        layers: int = 8,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        table = named("vocab", "embed", init=nnx.initializers.normal(1.0))
        self.embed = nnx.Embed(vocab, width, embedding_init=table, rngs=rngs)
        cells = [make_cell(width, width, rngs) for _ in range(layers)]
        self.stack = spmd.nn.RNNStack(cells, residual_from=2, dropout=dropout, rngs=rngs)
        self.head = nnx.Linear(width, vocab, kernel_init=named("embed", "vocab"), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [rows, length, vocab] of the character after each of `tokens` [rows, length]."""
        return self.head(self.stack(self.embed(tokens)))


def main(argv: list[str] | None = None) -> spmd.Result:
    parser = argparse.ArgumentParser(
        description="Train a deep LSTM on real text, layers over devices."
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
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="characters that a row holds")
    parser.add_argument(
        "--time-chunk",
        type=int,
        help="steps of time that a stage takes at once; by default chosen from the length",
    )
    parser.add_argument(
        "--text", type=int, default=400_000, help="characters to learn from and to test with"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)  # before anything asks JAX for a device
    layout = spmd.Layout.load(args.layout)
    if args.time_chunk:
        layout = dataclasses.replace(
            layout, pipeline=dataclasses.replace(layout.pipeline, time_chunk=args.time_chunk)
        )
    train, test = load_data(length=args.length, limit=args.text)
    result = spmd.fit(
        lambda: DeepLSTM(width=args.width, layers=args.layers, rngs=nnx.Rngs(0)),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adam(optax.cosine_decay_schedule(4e-3, args.steps)),
        ),
        mesh=args.mesh,
        layout=layout,
        batch_size=args.batch_size,
        steps=args.steps,
        eval_data=test,
        eval_every=max(1, args.steps // 5),
        metrics={"bits_per_byte": bits_per_byte},
        progress=True,
    )
    for name, schedule in result.trainer.schedules.items():
        print(f"{name}; {schedule.forward}")
    print(
        "bits per byte of held-out text: "
        + " ".join(f"{bits:.3f}" for bits in np.asarray(result.history["eval_bits_per_byte"]))
    )
    return result


if __name__ == "__main__":
    main()
