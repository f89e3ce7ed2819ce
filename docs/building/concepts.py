"""Drawings of the concepts: a mesh, a kernel under six layouts, which layout to use, and one
training step.
"""

import functools
import textwrap

import jax
import optax
from flax import nnx

import spmd
from spmd.base.tree import flatten
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.html_report import device_ranges, shards_of
from spmd.render.svg import SERIES, box, caption, heading, on_box, svg
from spmd.train.model_setup import PlacedModel, TrainConfig

NARROW = 340  # SVG units, which are pixels: what a phone shows
SIX = ("data_parallel", "zero1", "fsdp", "tensor_parallel", "fsdp_tensor_parallel", "pipeline")


class Dense(nnx.Module):
    """Two kernels with names, as in a transformer's MLP."""

    def __init__(self, rngs: nnx.Rngs):
        def named(*names):
            return nnx.with_partitioning(nnx.initializers.zeros, names)

        self.up = nnx.Linear(64, 128, use_bias=False, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(
            128, 64, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs
        )

    def __call__(self, x):
        """Rows of `x`, through both."""
        return x + self.down(nnx.relu(self.up(x)))


class Deep(nnx.Module):
    """Eight of these, as a stack."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = spmd.nn.LayerStack(spmd.nn.repeat(8, Dense, rngs))

    def __call__(self, x):
        """Rows of `x`, through all."""
        return self.blocks(x)


class Experts(nnx.Module):
    """A mixture of four."""

    def __init__(self, rngs: nnx.Rngs):
        self.experts = spmd.nn.MixtureOfExperts(64, 128, 4, k=2, capacity_factor=2.0, rngs=rngs)

    def __call__(self, x):
        """Rows of `x`, each through two of them."""
        return self.experts(x)[0]


class Images(nnx.Module):
    """A convolution and a dense layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.zeros, ("embed", "mlp"))
        self.dense = nnx.Linear(64, 64, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        """Features of images."""
        return self.dense(self.conv(x).mean((1, 2)))


def model_for(layout: str) -> tuple[type, str, dict]:
    """A model that the layout shards, the path of the parameter to draw, and the shapes of a
    batch.
    """
    if layout == "expert_parallel":
        return Experts, "experts/up", {"tokens": jax.ShapeDtypeStruct((16, 64), "int32")}
    if layout in ("spatial", "conv_data_dense_model"):
        path = "conv/kernel" if layout == "spatial" else "dense/kernel"
        return Images, path, {"image": jax.ShapeDtypeStruct((8, 16, 16, 3), "float32")}
    batch = {"tokens": jax.ShapeDtypeStruct((16, 64), "int32")}
    stacked = "pipeline" in layout or layout == "transformer_parallel"
    return (Deep, "blocks/layers/up/kernel", batch) if stacked else (Dense, "up/kernel", batch)


@functools.cache
def layout_picture(layout: str) -> str:
    """What each of eight devices holds under a shipped layout."""
    kind, path, batch = model_for(layout)
    # its default shards like fsdp
    mesh = (
        "stage=2,replica=1,data=2,context=1,model=2" if layout == "transformer_parallel" else None
    )
    return spmd.viz.shards(
        lambda: kind(nnx.Rngs(0)), layout, mesh=mesh, parameter=path, batch=batch
    )


def mesh() -> str:
    """Two nodes of four devices, and their places on the mesh data=2, model=4."""
    spec = MeshSpec.parse("data=2,model=4")
    parts, side, left = [], 60, 58
    for column in range(4):
        parts.append(
            caption(left + 10 + column * (side + 6) + side / 2, 12, f"model {column}", "middle")
        )
    for row in range(2):
        top = 22 + row * (side + 34)
        parts.append(caption(0, top + 32, f"data {row}"))
        parts.append(caption(0, top + 48, f"(node {row})"))
        parts.append(
            f'<rect x="{left}" y="{top - 4}" width="{4 * (side + 6) + 14}" height="{side + 18}" '
            'rx="8" fill="none" stroke="var(--line)"/>'
        )
        for column in range(4):
            x, y, number = (
                left + 10 + column * (side + 6),
                top + 5,
                row * spec.sizes["model"] + column,
            )
            parts.append(
                box(
                    x,
                    y,
                    side,
                    side - 8,
                    SERIES[row],
                    f"device {number}: data {row}, model {column}",
                )
            )
            parts.append(on_box(x + side / 2, y + 31, f"device {number}"))
            if column:
                parts.append(
                    f'<path d="M{x - 6} {y + 27}h6" stroke="currentColor" stroke-width="3"/>'
                )
            if row:
                parts.append(
                    f'<path d="M{x + side / 2} {top - 21}v26" stroke="currentColor" '
                    'stroke-dasharray="3 3"/>'
                )
    y = 22 + 2 * (side + 34)
    parts.append(
        f'<path d="M0 {y}h22" stroke="currentColor" stroke-width="3"/>'
        + caption(28, y + 4, "fast links inside a node")
    )
    parts.append(
        f'<path d="M190 {y}h22" stroke="currentColor" stroke-dasharray="3 3"/>'
        + caption(218, y + 4, "network")
    )
    return svg(
        y + 10,
        parts,
        "eight devices as a mesh of 2 x 4: data=2 over two nodes, model=4 inside each",
        width=NARROW,
    )


def matrix(leaf, left: float, top: float, width: float, height: float) -> list[str]:
    """An array with its shards, and in each the devices that hold it; all dims but the last are
    vertical.
    """
    holders = shards_of(leaf)
    counts = [1 + max(index[dim] for index in holders) for dim in range(leaf.ndim)]
    rows, columns = 1, counts[-1]
    for count in counts[:-1]:
        rows *= count
    parts = []
    for number, (index, devices) in enumerate(sorted(holders.items())):
        row = 0
        for at, count in zip(index[:-1], counts[:-1], strict=True):
            row = row * count + at
        wide, high = width / columns, height / rows
        x, y, names = left + index[-1] * wide, top + row * high, device_ranges(devices)
        parts.append(
            box(
                x + 0.5,
                y + 0.5,
                wide - 1,
                high - 1,
                SERIES[number % len(SERIES)],
                f"on devices {names}",
            )
        )
        parts.append(on_box(x + wide / 2, y + high / 2 + 4, names))
    return parts


def kernel(layout: str) -> str:
    """One kernel and its Adam moments under a layout, on eight devices."""
    kind, path, _ = model_for(layout)
    declared = spmd.Layout.load(layout)
    spec = MeshSpec(declared.mesh).resolve(8)
    config = TrainConfig(lambda: kind(nnx.Rngs(0)), loss=lambda *_: 0.0, optimizer=optax.adam(1e-3))
    state = PlacedModel(config, abstract_mesh(spec), declared).abstract_state
    param = flatten(state.params)[path]
    moments = next(leaf for name, leaf in flatten(state.opt).items() if name.endswith(path))
    title = f"{layout} on {', '.join(f'{axis}={size}' for axis, size in spec.axes)}"
    parts = [heading(0, 13, title)]
    for number, (name, leaf) in enumerate((("kernel", param), ("each of Adam's moments", moments))):
        left = number * 172
        parts += [caption(left, 33, name), *matrix(leaf, left, 40, 160, 132)]
    return svg(
        174,
        parts,
        f"{title}: the devices that hold each shard of a kernel and of its moments",
        width=NARROW,
    )


TREE = (  # a question; if the answer is yes, these, with conditions; if it is no, the next question
    (
        "Does a step fit on each device with everything replicated?",
        (
            ("then start with", "data_parallel"),
            ("slow links in the node", "data_parallel_bf16"),
            ("slow between nodes", "hierarchical_int8"),
            ("slower, between sites", "diloco"),
        ),
    ),
    ("Do parameters fit, and only the optimizer's state does not?", (("", "zero1"),)),
    (
        "Is one row too large: a long sequence, or a large image?",
        (("sequences", "context_parallel"), ("images", "spatial")),
    ),
    ("Is it a mixture of experts?", (("", "expert_parallel"),)),
    (
        "Is it deep, of equal layers, and recurrent, or on a network that is slow for fsdp?",
        (
            ("", "pipeline"),
            ("many microbatches", "pipeline_1f1b"),
        ),
    ),
    (
        "Are there so many GPUs that fsdp leaves less than a row for each, or are single layers "
        "too large?",
        (
            ("", "fsdp_tensor_parallel"),
            ("large activations", "fsdp_sequence_parallel"),
            ("deep, on several nodes", "fsdp_pipeline_tensor"),
        ),
    ),
    ("Anything else", (("", "fsdp"),)),
)


def decision_tree() -> str:
    """Questions from top to bottom, with the layouts that they end in, which are links."""
    parts, y, left, wide = [], 2.0, 192, NARROW - 192
    for number, (question, answers) in enumerate(TREE):
        lines = textwrap.wrap(question, 20)  # in the widest of the usual fonts
        right = sum(22 + 14 * bool(condition) for condition, _ in answers)
        high = max(16 * len(lines) + 14, right + 8)
        parts.append(
            f'<rect x="0.5" y="{y}" width="156" height="{high}" rx="7" fill="var(--soft)" '
            'stroke="var(--line)"/>'
        )
        for at, line in enumerate(lines):
            parts.append(caption(9, y + high / 2 - 8 * len(lines) + 12 + 16 * at, line))
        parts.append(arrow(157, y + high / 2, left - 6, y + high / 2))
        parts += [caption(163, y + high / 2 - 5, "yes")] * (number < len(TREE) - 1)
        at = y + (high - right) / 2
        for condition, layout in answers:
            if condition:
                parts.append(f'<g opacity="0.75">{caption(left, at + 11, condition)}</g>')
                at += 14
            link = (
                f'<rect x="{left}" y="{at:.1f}" width="{wide}" height="19" rx="9.5" '
                'fill="var(--e)"/>' + on_box(left + wide / 2, at + 14, layout)
            )
            parts.append(f'<a href="#{layout}">{link}</a>')
            at += 22
        y += high
        if number < len(TREE) - 1:
            parts += [arrow(78, y + 1, 78, y + 20), caption(86, y + 15, "no")]
            y += 22
    return svg(
        y + 3,
        parts,
        "which layout to use: a tree of questions that ends in shipped layouts",
        width=NARROW,
    )


def arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    """A horizontal or vertical line with a head."""
    head = "l-6 -4v8z" if y0 == y1 else "l-4 -6h8z"
    return (
        f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="currentColor"/><path d="M{x1:.1f} '
        f'{y1:.1f}{head}" fill="currentColor"/>'
    )


STEP = (  # kind, title, where in the code
    ("f", "parameter shards", "State.params"),
    ("c", "1 gather parameters", "sync/parameter_sync.py, gather_params"),
    ("a", "2 loss on local rows", "train/worker_gradients.py, _loss"),
    ("a", "3 backward pass", "train/worker_gradients.py, _of_microbatch"),
    ("f", "local gradients", "full shape, summed over microbatches"),
    ("a", "4 add the residual", "wire/reduction.py, reduce_bucket"),
    ("a", "5 encode, per bucket", "wire/codec/, codec.mean"),
    ("c", "6 reduce over workers", "wire/collectives.py: all_to_all, all_gather, ..."),
    ("f", "mean gradients", "next residual = gradient + residual - kept"),
    ("a", "7 optimizer", "train/update_rules.py, update"),
    ("c", "8 gather updates (ZeRO-1)", "sync/parameter_sync.py, gather_updates"),
    ("f", "next state", "sharded as before, in the old state's memory"),
)
REGIONS = (  # the first and the last box inside, the title, the inset
    (0, 8, "each worker, in jax.shard_map over the data axes", 1),
    (1, 3, "once per microbatch", 9),
    (9, 11, "all devices, global arrays", 1),
)


def flow(boxes, label: str, regions=()) -> str:
    """Boxes from top to bottom: computation, communication, and the arrays or files between them; a
    region frames some of them.
    """
    tops, y, parts = [], 26.0 if regions else 2.0, []
    for number, _ in enumerate(boxes):
        y += 22 * any(first == number for first, _, _, _ in regions if number)
        tops.append(y)
        y += 56 + 10 * any(last == number for _, last, _, _ in regions)
    for first, last, title, inset in regions:
        top, bottom = tops[first] - 24, tops[last] + 40 + (12 if inset == 1 else 6)
        shape = (
            f'x="{inset}" y="{top:.1f}" width="{NARROW - 2 * inset}" height="{bottom - top:.1f}"'
        )
        parts.append(
            f'<rect {shape} rx="8" fill="none" stroke="var(--line)" stroke-dasharray="4 3"/>'
        )
        parts.append(caption(inset + 8, top + 16, title))
    for number, ((colour, title, place), top) in enumerate(zip(boxes, tops, strict=True)):
        shape = f'x="18" y="{top}" width="{NARROW - 36}" height="40" rx="7"'
        parts.append(
            f'<rect {shape} fill="var(--{colour})" fill-opacity="0.22" stroke="var(--{colour})"/>'
        )
        parts += [
            heading(28, top + 16, title),
            f'<g opacity="0.8">{caption(28, top + 32, place)}</g>',
        ]
        if number < len(boxes) - 1:
            parts.append(arrow(NARROW / 2, top + 41, NARROW / 2, tops[number + 1] - 1))
    if not regions:
        return svg(y - 12, parts, label, width=NARROW)
    y += 8
    for left, colour, word in (
        (0, "f", "array"),
        (90, "a", "compute"),
        (200, "c", "communication"),
    ):
        square = f'<rect x="{left}" y="{y}" width="14" height="14" rx="3" fill="var(--{colour})"'
        parts.append(f'{square} fill-opacity="0.22" stroke="var(--{colour})"/>')
        parts.append(caption(left + 20, y + 12, word))
    return svg(y + 18, parts, label, width=NARROW)


def step() -> str:
    """One training step."""
    return flow(STEP, "one training step: eight operations on the shards of the state", REGIONS)


def data_path() -> str:
    """How records get from files to devices."""
    boxes = (
        ("f", "files", "CSV, TFRecord, Parquet, text, images, ..."),
        ("a", "shuffle over all records", "the same order for a seed, on any mesh"),
        ("a", "read and decode", "in worker processes, if workers=N"),
        ("f", "a batch on the host", "rows, and a weight of each: 0 for padding"),
        ("c", "place on the mesh", "a worker gets its rows, two batches ahead"),
        ("f", "shards of the batch", "one program, whatever the last batch holds"),
    )
    return flow(boxes, "from files to devices: shuffled, read, batched, placed on the mesh")


def restart() -> str:
    """What happens after a process has failed."""
    boxes = (
        (
            "bad",
            "a process fails, or says nothing",
            "exit code, exception, or the watchdog's limit",
        ),
        ("a", "all processes end", "the launcher names the one that failed first"),
        ("a", "a new attempt", "new processes, or spare ones that wait"),
        ("c", "processes join, and compare", "code, layout, data, options: equal on all"),
        ("f", "newest complete checkpoint", "of a host's memory, a neighbour's, or the disk"),
        ("good", "training resumes", "and ends in the bits of a run without a fault"),
    )
    return flow(boxes, "after a fault: end, start again, join, restore, train")


def export() -> str:
    """From a result to answers."""
    boxes = (
        ("f", "result", "a trained state, sharded over devices"),
        ("a", "result.export(folder)", "StableHLO, weights and metadata; int8, if asked"),
        ("f", "a folder", "it needs none of the model's code"),
        ("a", "spmd.load_exported(folder)", "one device or many"),
        ("f", "predictions", "of one model, or of an ensemble"),
    )
    return flow(boxes, "from a trained state to predictions without the model's code")


LEVELS = (
    ("errors, base", "what everything stands on"),
    ("jaxpr, render", "traced programs; tables and drawings"),
    ("wire, program_cache", "codecs and collectives"),
    ("mesh, models, layout", "where arrays live"),
    ("nn, sync", "stacks and attention; gradients of a layout"),
    ("train, data, distributed", "the step, batches, processes"),
    ("planner, run", "plans; the loop"),
    ("api, trainer, sweeps, inference, pretrained", "what users call"),
    ("launch, viz", "the command line, pictures"),
)


def packages() -> str:
    """The levels of packages; each imports only from those below it."""
    parts = []
    for level, (names, what) in enumerate(LEVELS):
        top = 2 + 42 * (len(LEVELS) - 1 - level)
        rest = f'fill="var(--a)" fill-opacity="{0.1 + 0.05 * level:.2f}" stroke="var(--a)"'
        parts.append(f'<rect x="26" y="{top}" width="{NARROW - 27}" height="38" rx="6" {rest}/>')
        parts += [
            caption(4, top + 24, str(level)),
            heading(36, top + 16, names),
            f'<g opacity="0.8">{caption(36, top + 31, what)}</g>',
        ]
    return svg(
        4 + 42 * len(LEVELS),
        parts,
        "levels of packages: imports go from the top to the bottom",
        width=NARROW,
    )
