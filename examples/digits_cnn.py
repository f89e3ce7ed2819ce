"""Train a convolutional network on scikit-learn's 1,797 real 8x8 digits.

    python examples/digits_cnn.py --layout tensor_parallel --mesh data=4,model=2

Every kernel has logical axis names (`named`), by which layouts shard it. Nothing else in the model
refers to devices.
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import spmd


def named(*names: str | None, init: Any = None) -> Any:
    """An initialiser whose array carries these names, one per dim; the layout's `[axes]` maps them
    to mesh axes.
    """
    return nnx.with_partitioning(init or nnx.initializers.he_normal(), names)


def max_pool(x: jax.Array) -> jax.Array:
    """The largest of every 2x2 pixels. Reshaping beats `nnx.max_pool`, whose backward pass is 12
    times slower on a CPU.
    """
    rows, height, width, channels = x.shape
    return x.reshape(rows, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class CNN(nnx.Module):
    """Two convolutions with BatchNorm, dropout, two dense layers.

    Names come in pairs: one layer shards its outputs ("hidden", "mlp"), and the next shards its
    inputs along the same axis, so that activations are communicated once per pair.
    """

    def __init__(
        self,
        *,
        channels: int = 32,
        width: int = 128,
        classes: int = 10,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        out = 2 * channels
        self.conv1 = nnx.Conv(
            1,
            channels,
            (3, 3),
            kernel_init=named(None, None, None, "hidden"),
            use_bias=False,
            rngs=rngs,
        )
        self.norm1 = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(
            channels,
            out,
            (3, 3),
            kernel_init=named(None, None, "hidden", "embed"),
            use_bias=False,
            rngs=rngs,
        )
        self.norm2 = nnx.BatchNorm(out, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.dense = nnx.Linear(2 * 2 * out, width, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.head = nnx.Linear(width, classes, kernel_init=named("mlp", None), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [rows, classes] of images [rows, 8, 8, 1]."""
        x = max_pool(nnx.relu(self.norm1(self.conv1(x))))
        x = max_pool(nnx.relu(self.norm2(self.conv2(x))))
        x = nnx.relu(self.dense(self.dropout(x.reshape(x.shape[0], -1))))
        return self.head(x)


Model = CNN


def make_model() -> CNN:
    """The model at its usual size, always with the same initial values."""
    return CNN(dropout=0.3, rngs=nnx.Rngs(0))


def load_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """1,536 images to train on (twelve batches of 128) and 261 to test with, in an order shuffled
    once and for all.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    return {"image": images[:1536], "label": labels[:1536]}, {
        "image": images[1536:],
        "label": labels[1536:],
    }


def main(argv: list[str] | None = None) -> spmd.Result:
    parser = argparse.ArgumentParser(description="Train a CNN on real digits, under any layout.")
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
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, help="how many updates, instead of --epochs")
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)  # before anything asks JAX for a device
    train, test = load_data()
    steps = args.steps or args.epochs * -(-len(train["label"]) // args.batch_size)
    result = spmd.fit(
        make_model,
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(optax.cosine_decay_schedule(3e-3, steps)),
        mesh=args.mesh,
        layout=args.layout,
        batch_size=args.batch_size,
        steps=steps,
        eval_data=test,
        metrics={"accuracy": spmd.metrics.accuracy},
        progress=True,
    )
    print("  ".join(f"test {name} {value:.4f}" for name, value in result.evaluate(test).items()))
    return result


if __name__ == "__main__":
    main()
