"""Draw docs/step.png: one training step, from the shards of the state to the next state.

python docs/building/step_picture.py
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, EDGE = "#22313f", "#aab4be"
COLOURS = {"array": "#eef1f4", "compute": "#d6e9f3", "communication": "#fbe3c8"}
WIDTH, HEIGHT = 15.5, 11.0
ROW_1, ROW_2, ROW_3 = 10.5, 27.5, 47.5

# kind, left, top, title, where in the code
BOXES = {
    "params": ("array", 3, ROW_1, "parameter shards", "State.params"),
    "gather": ("communication", 22.5, ROW_1, "1 gather parameters", "sync/parameter_sync.py\ngather_all"),
    "forward": ("compute", 42, ROW_1, "2 loss on local rows", "train/worker_gradients.py\n_loss"),
    "backward": ("compute", 61.5, ROW_1, "3 backward pass", "train/worker_gradients.py\n_of_microbatch"),
    "local": ("array", 81, ROW_1, "local gradients", "full shape,\nsummed over microbatches"),
    "residual": ("compute", 81, ROW_2, "4 add the residual", "wire/reduction.py\nreduce_bucket"),
    "encode": ("compute", 61.5, ROW_2, "5 encode, per bucket", "wire/codec/\ncodec.mean"),
    "exchange": ("communication", 42, ROW_2, "6 reduce over workers", "wire/collectives.py\nsuch as all_to_all, all_gather"),
    "means": ("array", 22.5, ROW_2, "mean gradients", "next residual = gradient\n+ residual - kept"),
    "optimizer": ("compute", 22.5, ROW_3, "7 optimizer", "train/synchronous.py\nupdate"),
    "updates": ("communication", 42, ROW_3, "8 gather updates", "sync/parameter_sync.py\ngather_updates (ZeRO-1)"),
    "state": ("array", 61.5, ROW_3, "next state", "sharded as before, in the\nold state's memory (donated)"),
}
ARROWS = ["params gather", "gather forward", "forward backward", "backward local", "local residual", "residual encode", "encode exchange"]
ARROWS += ["exchange means", "means optimizer", "optimizer updates", "updates state"]


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(11, 6.4), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 100), ylim=(62, 0))
    axes.axis("off")

    def region(left, top, width, height, title):
        axes.add_patch(FancyBboxPatch((left, top), width, height, boxstyle="round,pad=0,rounding_size=1", fc="none", ec=EDGE, ls="--"))
        axes.text(left + 1.2, top + 2.4, title, color=INK, fontsize=9, style="italic", va="center")

    region(1, 2.5, 98, 38.5, "each worker, in jax.shard_map over the data axes")
    region(21, 5.8, 57.5, 17.2, "once per microbatch")
    region(1, 43, 98, 16.5, "all devices, global arrays")
    for kind, left, top, title, place in BOXES.values():
        shape = FancyBboxPatch((left, top), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.8", fc=COLOURS[kind], ec=EDGE)
        axes.add_patch(shape)
        axes.text(left + WIDTH / 2, top + 2.9, title, color=INK, fontsize=9, fontweight="bold", ha="center", va="center")
        axes.text(left + WIDTH / 2, top + 7.4, place, color=INK, fontsize=7, ha="center", va="center", linespacing=1.5)
    for start, end in map(str.split, ARROWS):
        (_, x0, y0, *_), (_, x1, y1, *_) = BOXES[start], BOXES[end]
        if y0 == y1:
            right = x1 > x0
            tail, head = (x0 + WIDTH * right, y0 + HEIGHT / 2), (x1 + WIDTH * (not right), y1 + HEIGHT / 2)
        else:
            tail, head = (x0 + WIDTH / 2, y0 + HEIGHT), (x1 + WIDTH / 2, y1)
        axes.add_patch(FancyArrowPatch(tail, head, arrowstyle="-|>", mutation_scale=11, color=INK, lw=1, shrinkA=1, shrinkB=1))
    for number, (kind, colour) in enumerate(COLOURS.items()):
        top = ROW_3 + 1.2 + 3.6 * number
        axes.add_patch(FancyBboxPatch((82, top), 2.4, 2.2, boxstyle="round,pad=0,rounding_size=0.4", fc=colour, ec=EDGE))
        axes.text(85.4, top + 1.1, kind, color=INK, fontsize=8.5, va="center")
    figure.savefig(Path(__file__).parents[1] / "step.png", dpi=130)


if __name__ == "__main__":
    main()
