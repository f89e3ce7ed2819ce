"""Translate numbers in words to digits with an encoder and decoder like GNMT (Wu et al.,
arXiv:1609.08144), layers split over devices.

    python examples/gnmt.py                              # data=2,stage=4
    python examples/gnmt.py --layout data_parallel       # the same model, replicated
    python examples/gnmt.py --layers 8 --width 128 --steps 600

The encoder's bottom layer is bidirectional, so the layers above wait until it has finished. Those
layers run as a wavefront, with residual connections from the third layer on. In the decoder only
the bottom layer queries the attention, and all layers above get its output, so that they are a
wavefront too. GNMT's bottom layer reads the attention output of the previous step; here it runs
over the full target first, and then all its steps query the attention together, by dot products.
The test numbers are not in the training data. Nothing in the model refers to devices.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.char_lstm import make_cell, named
from examples.number_words import BEGIN, TARGET, VOCAB, WORDS, as_number, load_data


class GNMT(nnx.Module):
    """A bottom layer and `layers` above it in encoder and decoder, and an attention between the
    two.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        layers: int = 4,
        vocab: tuple[int, int] = VOCAB,
        rngs: nnx.Rngs,
    ):
        def embedding(size: int) -> nnx.Embed:
            return nnx.Embed(
                size,
                width,
                embedding_init=named("vocab", "embed", init=nnx.initializers.normal(1.0)),
                rngs=rngs,
            )

        def stack(inputs: int) -> spmd.nn.RNNStack:
            return spmd.nn.RNNStack(
                [make_cell(inputs, width, rngs) for _ in range(layers)], residual_from=1
            )

        self.words, self.digits = map(embedding, vocab)
        self.both_ways = spmd.nn.Bidirectional(
            *(make_cell(width, width // 2, rngs) for _ in range(2))
        )
        self.encoder = stack(width)
        self.bottom = nnx.RNN(make_cell(width, width, rngs), rngs=rngs)
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.decoder = stack(2 * width)
        self.head = nnx.Linear(width, vocab[1], kernel_init=named("embed", "vocab"), rngs=rngs)

    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        """Logits [rows, target, vocabulary] of what comes after each of `begun` [rows, target], for
        `source` [rows, words].
        """
        lengths = inputs["lengths"]
        read = self.encoder(
            self.both_ways(self.words(inputs["source"]), lengths=lengths), lengths=lengths
        )
        bottom: Any = self.bottom(self.digits(inputs["begun"]))
        scores = jnp.einsum("btf,bsf->bts", self.query(bottom), read) / read.shape[-1] ** 0.5
        in_sentence = jnp.arange(read.shape[1]) < lengths[:, None, None]
        context = jax.nn.softmax(jnp.where(in_sentence, scores, -1e9), axis=-1) @ read
        return self.head(self.decoder(bottom, beside=context))


exact = spmd.metrics.PerExample(
    lambda logits, targets: (logits.argmax(axis=-1) == targets).all(axis=1), "exact"
)


def greedy(result: spmd.Result, inputs: dict[str, np.ndarray]) -> list[str]:
    """Each digit is the likeliest after those before it."""
    digits = np.full((len(inputs["source"]), TARGET + 1), BEGIN, np.int32)
    for at in range(TARGET):
        digits[:, at + 1] = result.predict({**inputs, "begun": digits[:, :-1]})[:, at].argmax(
            axis=-1
        )
    return list(map(as_number, digits))


def main(argv: list[str] | None = None) -> spmd.Result:
    parser = argparse.ArgumentParser(
        description="Train an encoder and a decoder of LSTM layers on numbers in words, layers "
        "over "
        "devices."
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
        "--layers", type=int, default=4, help="above the bottom one, in encoder and decoder each"
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)  # before anything asks JAX for a device
    train, test = load_data()
    rate = optax.cosine_decay_schedule(5e-3, args.steps)
    optimizer, metrics = (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)),
        {"accuracy": spmd.metrics.accuracy, "exact": exact},
    )
    options: dict[str, Any] = {
        "mesh": args.mesh,
        "layout": args.layout,
        "batch_size": args.batch_size,
        "steps": args.steps,
    }
    result = spmd.fit(
        lambda: GNMT(width=args.width, layers=args.layers, rngs=nnx.Rngs(0)),
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optimizer,
        metrics=metrics,
        progress=True,
        **options,
    )
    for name, schedule in result.trainer.schedules.items():
        print(f"{name}; {schedule.forward}")
    print("  ".join(f"test {name} {value:.4f}" for name, value in result.evaluate(test).items()))
    few = jax.tree.map(lambda x: x[:5], test["inputs"])
    for words, translation in zip(few["source"], greedy(result, few), strict=True):
        print(f"{' '.join(WORDS[word] for word in words if word)}: {translation}")
    return result


if __name__ == "__main__":
    main()
