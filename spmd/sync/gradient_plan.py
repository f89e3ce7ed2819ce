"""Plan each gradient's communication: its shards and its codec. Pure: shapes in, specs out."""

import dataclasses
import math

import numpy as np

from spmd.base.specs import Entry, Spec, entry_axes, keep_axes, mixes_data_axes
from spmd.layout.gradients import GradientRule, Gradients
from spmd.layout.resolve import Placement, Resolved, codec_rules
from spmd.sync.mesh_axes import MeshAxes
from spmd.wire.codec import make_codec
from spmd.wire.codec.exact import Exact
from spmd.wire.reduction import Transfer
from spmd.wire.reduction_registry import Reduction
from spmd.wire.shard_layout import ShardLayout


@dataclasses.dataclass(frozen=True)
class GradientSpec(Transfer):
    """How one parameter's gradient is sharded and communicated."""

    placement: Placement
    model_spec: Spec  # its spec along the mesh axes that are not data axes
    nested: bool  # whether each device communicates its local shard along these axes
    dtype: np.dtype  # in which an exact gradient is sent


def plan_gradients(
    resolved: Resolved, mesh_axes: MeshAxes, reduction: Reduction
) -> dict[str, GradientSpec]:
    """The spec of every parameter's gradient, by path."""
    rules = codec_rules(resolved.layout.gradients, resolved.placements)
    return {
        path: _plan(placement, rules[path], resolved, mesh_axes, reduction)
        for path, placement in resolved.placements.items()
    }


def _plan(
    placement: Placement,
    rule: Gradients | GradientRule,
    resolved: Resolved,
    mesh_axes: MeshAxes,
    reduction: Reduction,
) -> GradientSpec:
    declared, spec = resolved.layout.gradients, reduction.grad_spec(placement)
    model_spec = keep_axes(spec, mesh_axes.model_axes)
    nested = bool(mesh_axes.model_axes) and not mixes_data_axes(spec, mesh_axes.data_axes)
    # XLA:CPU aborts on a bfloat16 sum in a region that is manual over only some axes
    dtype = np.dtype(placement.dtype if nested or not mesh_axes.model_axes else "float32")
    entries = (*model_spec, *[None] * (len(placement.shape) - len(model_spec)))
    local_shape = tuple(
        size // devices_along(mesh_axes, entry)
        for size, entry in zip(placement.shape, entries, strict=True)
    )
    sizes = tuple(mesh_axes.mesh.shape[axis] for axis in mesh_axes.data_axes)
    mean_spec = keep_axes(reduction.mean_spec(placement), mesh_axes.data_axes)
    shard_layout = ShardLayout(
        local_shape if nested else placement.shape, mean_spec, mesh_axes.data_axes, sizes
    )
    codec = make_codec(rule.codec, rule.options)
    if not (
        math.prod(placement.shape)
        and codec_applies(resolved, mesh_axes)
        and codec.compresses(shard_layout, placement.shape)
    ):
        codec = Exact()
    error_feedback = declared.error_feedback and not codec.lossless
    return GradientSpec(shard_layout, codec, error_feedback, placement, model_spec, nested, dtype)


def codec_applies(resolved: Resolved, mesh_axes: MeshAxes) -> bool:
    """Whether there are workers along data axes other than `exact_axes`."""
    exact_axes = resolved.layout.gradients.exact_axes
    return (
        devices_along(
            mesh_axes, tuple(axis for axis in mesh_axes.data_axes if axis not in exact_axes)
        )
        > 1
    )


def devices_along(mesh_axes: MeshAxes, entry: Entry) -> int:
    """Number of devices along one mesh axis, or along several."""
    return math.prod(mesh_axes.mesh.shape[axis] for axis in entry_axes(entry))
