"""Draw docs/mesh.png: two matrices of a model, and the shards of them that each of eight devices holds.

    python docs/building/mesh_picture.py

The layout is read by spmd, and the shards are those of the arrays that spmd places.
"""

from pathlib import Path

import jax
import optax
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import spmd
from spmd.layout.toml_reader import loads

LAYOUT = """\
[mesh]
data = 4
model = 2

[[params]]
path = "up/kernel"
spec = ["data", "model"]

[[params]]
path = "down/kernel"
spec = ["model", "data"]

[default]
params = "replicate"

[gradients]
reduction = "reduce_scatter"
codec = "bfloat16"
"""
COLOURS = (
    "#1f6f8b",
    "#4ba3c3",
    "#2e8b57",
    "#7bc47f",
    "#b5651d",
    "#e8a15c",
    "#7a4e9e",
    "#b491cf",
)  # by device
INK, EMPTY, EDGE = "#22313f", "#eef1f4", "#aab4be"


class MLP(nnx.Module):
    """Two dense layers, which know nothing of devices."""

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        """The rows of `x`, through both layers."""
        return self.down(nnx.relu(self.up(x)))


def make_model():
    """The model whose parameters are drawn."""
    return MLP(nnx.Rngs(0))


def shards(array: jax.Array) -> dict[int, tuple[float, float, float, float]]:
    """Device number -> top, left, height and width of its shard, as fractions of the matrix."""
    found = {}
    for shard in array.addressable_shards:
        rows, columns = (part.indices(size) for part, size in zip(shard.index, array.shape, strict=True))
        top, left = rows[0] / array.shape[0], columns[0] / array.shape[1]
        found[shard.device.id] = (top, left, (rows[1] - rows[0]) / array.shape[0], (columns[1] - columns[0]) / array.shape[1])
    return found


def matrix(axes, array, left, top, width, height, *, only=None):
    """A matrix with its shards in the colours of the devices that hold them; `only` draws those of one device."""
    axes.add_patch(Rectangle((left, top), width, height, facecolor=EMPTY, edgecolor=EDGE, linewidth=0.8))
    for device, (y, x, high, wide) in shards(array).items():
        if only is None or device == only:
            corner = (left + x * width, top + y * height)
            axes.add_patch(Rectangle(corner, wide * width, high * height, facecolor=COLOURS[device], edgecolor="white", linewidth=0.8))
            if only is None:
                middle = (corner[0] + wide * width / 2, corner[1] + high * height / 2)
                axes.text(*middle, str(device), color="white", ha="center", va="center", fontsize=8, fontweight="bold")


def main() -> None:
    """Write the picture."""
    spmd.simulate_devices(8)
    optimizer, loss = optax.sgd(0.1), spmd.losses.mean_squared_error
    trainer = spmd.Trainer(make_model, loss=loss, optimizer=optimizer, layout=loads(LAYOUT))
    params = trainer.init().params
    up, down = params["up"]["kernel"], params["down"]["kernel"]
    mesh = up.sharding.mesh

    figure = Figure(figsize=(11, 4.3), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 110), ylim=(43, 0))
    axes.axis("off")

    def label(x, y, text, **style):
        axes.text(x, y, text, **{"color": INK, "fontsize": 9.5, "va": "center", **style})

    label(2, 3, "the layout file", fontsize=11, fontweight="bold")
    axes.add_patch(Rectangle((2, 5.5), 29, 35, facecolor="#f7f8fa", edgecolor=EDGE, linewidth=0.8))
    label(3.6, 22.5, LAYOUT.strip(), family="monospace", fontsize=9.5, linespacing=1.4)

    label(36, 3, "the model's arrays", fontsize=11, fontweight="bold")
    label(36, 7.2, f"up/kernel {list(up.shape)}", family="monospace", fontsize=9)
    matrix(axes, up, 36, 9, 22, 11)
    label(36, 23.2, f"down/kernel {list(down.shape)}", family="monospace", fontsize=9)
    matrix(axes, down, 36, 25, 11, 15.5)

    label(64, 3, "the mesh: eight devices, each with its shards", fontsize=11, fontweight="bold")
    for column in range(mesh.shape["data"]):
        label(74 + 9.4 * column, 6.7, f"data {column}", fontsize=8.5, ha="center")
    for row in range(mesh.shape["model"]):
        top = 8.5 + 16.5 * row
        label(64, top + 7.5, f"model {row}", fontsize=8.5)
        for column in range(mesh.shape["data"]):
            device, left = mesh.devices[column, row].id, 69.8 + 9.4 * column
            axes.add_patch(Rectangle((left, top), 8.6, 15.3, facecolor="white", edgecolor=COLOURS[device], linewidth=1.6))
            label(left + 0.7, top + 1.7, f"device {device}", fontsize=7.5, color=COLOURS[device], fontweight="bold")
            matrix(axes, up, left + 1.0, top + 3.2, 6.6, 3.6, only=device)
            matrix(axes, down, left + 1.0, top + 7.8, 4.2, 6.3, only=device)
    held = sum(shard.data.nbytes for array in (up, down) for shard in array.addressable_shards if shard.device.id == 0)
    label(64, 41.8, f"{(up.nbytes + down.nbytes) // 1024} KiB of kernels, {held // 1024} KiB on each device", fontsize=9)
    figure.savefig(Path(__file__).parents[1] / "mesh.png", dpi=130)


if __name__ == "__main__":
    main()
