"""Train a convolutional network on tiles of two photographs, with each tile sharded by rows and
columns over four devices.

    python examples/spatial_cnn.py --mesh data=2,row=2,column=2

It classifies which photograph a tile comes from (both photographs are part of scikit-learn).
Nothing in the model refers to devices: the layout `spatial` shards images and outputs of
convolutions over `row` and `column`, and XLA exchanges the pixels along the edges between neighbors
(halo exchange).
"""

import argparse

import jax
import numpy as np
import optax
from flax import nnx

import spmd

SIZE = 32  # of a tile, in pixels
DIMS = ("rows", "height", "width")


class Net(nnx.Module):
    """Three convolutions, the last with stride 2, each with BatchNorm; a pool; the mean over all
    pixels; one dense layer.
    """

    def __init__(self, *, channels: int = 16, classes: int = 2, rngs: nnx.Rngs):
        wide = 2 * channels
        self.conv1 = nnx.Conv(3, channels, (5, 5), use_bias=False, rngs=rngs)
        self.conv2 = nnx.Conv(channels, wide, (3, 3), use_bias=False, rngs=rngs)
        self.conv3 = nnx.Conv(wide, wide, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm1, self.norm2, self.norm3 = (
            nnx.BatchNorm(n, momentum=0.9, rngs=rngs) for n in (channels, wide, wide)
        )
        self.head = nnx.Linear(wide, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [rows, classes] of images [rows, height, width, 3]."""
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        x = nnx.relu(self.norm3(self.conv3(x)))
        return self.head(x.mean(axis=(1, 2)))


Model = Net


def make_model() -> Net:
    """The model at its usual size, always with the same initial values."""
    return Net(rngs=nnx.Rngs(0))


def load_data(size: int = SIZE) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tiles [rows, size, size, 3] of the two photographs, in an order shuffled once and for all;
    the last fifth is for testing.
    """
    from sklearn.datasets import load_sample_images

    # [2, 427, 640, 3]
    photos = np.stack(load_sample_images().images).astype(np.float32) / 255 - 0.5
    down, across = photos.shape[1] // size, photos.shape[2] // size
    tiles = (
        photos[:, : down * size, : across * size]
        .reshape(2, down, size, across, size, 3)
        .swapaxes(2, 3)
        .reshape(-1, size, size, 3)
    )
    labels = np.repeat(np.arange(2, dtype=np.int32), down * across)
    order = np.random.default_rng(0).permutation(len(labels))
    split = len(order) * 4 // 5 // 32 * 32
    train, test = (
        {"image": tiles[some], "label": labels[some]} for some in (order[:split], order[split:])
    )
    return train, test


def main(argv: list[str] | None = None) -> spmd.Result:
    parser = argparse.ArgumentParser(
        description="Train a CNN on images that are sharded by rows and columns."
    )
    parser.add_argument(
        "--layout", default="spatial", help="a shipped layout's name, or a path to a TOML file"
    )
    parser.add_argument(
        "--mesh", help='such as "data=2,row=2,column=2"; by default the layout\'s own'
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        help="CPU devices to simulate; 0 uses the devices there are",
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)  # before anything asks JAX for a device
    train, test = load_data()
    result = spmd.fit(
        make_model,
        train,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(optax.cosine_decay_schedule(3e-3, args.steps)),
        mesh=args.mesh,
        layout=args.layout,
        batch_size=args.batch_size,
        steps=args.steps,
        metrics={"accuracy": spmd.metrics.accuracy},
        progress=True,
    )
    images = result.trainer.place(jax.tree.map(lambda x: x[: args.batch_size], train)).leaves[
        "image"
    ]
    for piece in images.addressable_shards:
        ranges = ", ".join(
            f"{name} {part.start or 0}:{part.stop or size}"
            for name, part, size in zip(DIMS, piece.index, images.shape, strict=False)
        )
        print(f"device {piece.device.id}: {ranges}")
    print("  ".join(f"test {name} {value:.4f}" for name, value in result.evaluate(test).items()))
    return result


if __name__ == "__main__":
    main()
