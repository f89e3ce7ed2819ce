"""Which way each gradient goes: how it is cut, by which codec it travels, and in whose company. Pure: shapes in, routes out."""

import dataclasses
import math

import numpy as np

from spmd.layout.resolve import Placement, Resolved, codec_rule
from spmd.layout.schema import Entry, Spec, entry_axes, keep_axes, mixes_data_axes
from spmd.wire.codec import make_codec
from spmd.wire.codec.base import Codec
from spmd.wire.codec.exact import Exact
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.strategies import MeshAxes, Reduction

ALONE = 2**20  # bytes that are worth a collective of their own


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """One parameter's gradient on its way: how it is cut, and how it travels."""

    place: Placement
    name: str  # the codec's
    cut: ShardLayout
    codec: Codec
    feedback: bool
    rest: Spec  # its spec along the axes that are not the workers'
    nested: bool  # whether each device exchanges its own piece along these
    dtype: np.dtype  # what it is on the way when it goes exactly


def plan_gradients(resolved: Resolved, mesh_axes: MeshAxes, reduction: Reduction) -> dict[str, GradientSpec]:
    """The way of every parameter's gradient, by path."""
    return {path: _item(place, resolved, mesh_axes, reduction) for path, place in resolved.placements.items()}


def _item(place: Placement, resolved: Resolved, mesh_axes: MeshAxes, reduction: Reduction) -> GradientSpec:
    declared, spec = resolved.layout.gradients, reduction.spec(place)
    rest = keep_axes(spec, mesh_axes.rest)
    nested = bool(mesh_axes.rest) and not mixes_data_axes(spec, mesh_axes.data_axes)
    # XLA:CPU aborts on a bfloat16 sum where other axes are left to the partitioner
    dtype = np.dtype(place.dtype if nested or not mesh_axes.rest else "float32")
    full = (*rest, *[None] * (len(place.shape) - len(rest)))
    shape = tuple(size // ways_of(mesh_axes, entry) for size, entry in zip(place.shape, full, strict=True))
    sizes = tuple(mesh_axes.mesh.shape[axis] for axis in mesh_axes.data_axes)
    pushed = keep_axes(reduction.mean_spec(place), mesh_axes.data_axes)
    cut = ShardLayout(shape if nested else place.shape, pushed, mesh_axes.data_axes, sizes)
    chosen = codec_rule(declared, place.path)
    name, codec = chosen.codec, make_codec(chosen.codec, chosen.options)
    if not (math.prod(place.shape) and crosses(resolved, mesh_axes) and codec.compresses(cut, place.shape)):
        name, codec = "exact", Exact()
    return GradientSpec(place, name, cut, codec, declared.error_feedback and not codec.lossless, rest, nested, dtype)


def buckets(items: dict[str, GradientSpec], limit: int) -> list[list[str]]:
    """Paths of the gradients that travel together: one codec, one kind of cut, up to `limit` bytes as float32.

    What travels as it is would be copied to lie side by side, so there the limit is lower.
    """
    found: list[list[str]] = []
    open_: dict[tuple, tuple[list[str], int]] = {}
    for path, item in items.items():
        key, size = (item.codec, item.cut.left, item.nested), 4 * math.prod(item.cut.shape)
        paths, filled = open_.get(key, ([], 0))
        if not paths or filled + size > (min(limit, ALONE) if item.codec.lossless else limit):
            paths, filled = [], 0
            found.append(paths)
        paths.append(path)
        open_[key] = (paths, filled + size)
    return found


def crosses(resolved: Resolved, mesh_axes: MeshAxes) -> bool:
    """Whether anything is left for a codec to cross beside `exact_axes`."""
    inside = resolved.layout.gradients.exact_axes
    return ways_of(mesh_axes, tuple(axis for axis in mesh_axes.data_axes if axis not in inside)) > 1


def ways_of(mesh_axes: MeshAxes, entry: Entry) -> int:
    """How many devices there are along one mesh axis, or along several."""
    return math.prod(mesh_axes.mesh.shape[axis] for axis in entry_axes(entry))
