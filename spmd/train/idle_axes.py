"""Mesh axes along which all devices would do the same work."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from spmd.base.tree import Tree
from spmd.data.batches import check_batch
from spmd.errors import LayoutError, Problem, SpmdError, option, quoted, raise_problems
from spmd.jaxpr.programs import mesh_axes
from spmd.mesh import abstract_mesh
from spmd.train.model_setup import PlacedModel


def check_idle_axes(placed: PlacedModel, sample: Tree, trace: Callable[[], Any]) -> None:
    """Check that every mesh axis of several devices is used: by the layout, or by the model, the
    loss or the optimizer in a step.

    Args:
      sample: the shapes of a full batch.
      trace: returns the jaxpr of the step.

    Raises:
      LayoutError: the devices of an axis would all do the same work.
    """
    idle = placed.resolved.idle_axes()
    if idle:
        used = mesh_axes(trace())
        idle = tuple(axis for axis in idle if axis not in used)
    if not idle:
        return
    sizes, axes = placed.resolved.mesh.sizes, ", ".join(map(quoted, idle))
    devices = math.prod(sizes[axis] for axis in idle)
    why = f"nothing is sharded over {axes}, so groups of {devices} devices would do the same work."
    use = (
        f"a use for {axes} in the layout, such as [[params]] rules, or in the model, such as "
        "jax.lax.with_sharding_constraint."
    )
    mesh = _mesh_without(placed, sample, idle)
    fix = use
    if mesh:
        fix = f"{mesh}; or {use}"
    problem = Problem(f"mesh axis {axes}", [why], fix, kind="unused_axis")
    raise_problems(
        LayoutError,
        f"{placed.resolved.layout.source} does not fit this model on mesh {placed.resolved.mesh}",
        [problem],
    )


def _mesh_without(placed: PlacedModel, sample: Tree, idle: tuple[str, ...]) -> str:
    """Return a mesh with the devices of idle axes on a data axis, as an option, if model and batch
    fit it; else "".
    """
    layout, mesh = placed.resolved.layout, placed.resolved.mesh_without(idle)
    try:
        check_batch(sample, layout, mesh, placed.config.accumulate)
        _ = placed.with_layout(abstract_mesh(mesh), layout).resolved
    except SpmdError:
        return ""
    text = quoted(str(mesh).replace(" ", ""))
    if isinstance(placed.mesh, AbstractMesh) or placed.mesh.size == jax.device_count():
        return option("mesh", text)
    return f"spmd.make_mesh({text}, devices=...), with the same devices"
