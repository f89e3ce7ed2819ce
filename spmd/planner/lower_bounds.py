"""What a step cannot be below, in closed form: bytes that a device holds, and seconds, by the same figures as a plan's.

Nothing is compiled: parameters and optimizer state have the shapes that the layout gives them, the operations are those of the step on
one device shared evenly, and gradients that meet have to cross the links once.
"""

import dataclasses
import math
from collections.abc import Collection

import jax
import numpy as np
from jax.extend.core import Literal

from spmd.layout.schema import spec_axes
from spmd.mesh import MeshSpec
from spmd.planner.hlo import Array
from spmd.planner.memory import on_device
from spmd.planner.target import Cluster
from spmd.planner.timeline import Timeline, travel_time
from spmd.planner.traffic import Transfer
from spmd.train.model_setup import Placed
from spmd.tree import flatten


@dataclasses.dataclass(frozen=True)
class Floor:
    """Lower bounds of a step: `state` bytes on each device, `seconds`, and in words what these seconds are."""

    state: int
    seconds: float
    why: str


def trained(placed: Placed) -> set[str]:
    """Parameters that a gradient can change; those that an optimizer freezes are neither sent nor written."""
    state = placed.abstract_state
    update = lambda grads, opt, params: placed.optimizer.update(grads, opt, params)[0]
    jaxpr = jax.make_jaxpr(update)(state.params, state.opt, state.params).jaxpr
    moved = set(jaxpr.invars[: len(jax.tree.leaves(state.params))])
    for equation in jaxpr.eqns:
        if any(not isinstance(var, Literal) and var in moved for var in equation.invars):
            moved.update(equation.outvars)
    changed = [not isinstance(var, Literal) and var in moved for var in jaxpr.outvars]
    return {path for path, moves in zip(flatten(state.params), changed, strict=True) if moves}


def floor_of(placed: Placed, cluster: Cluster, alone: Timeline, trained: Collection[str]) -> Floor:
    """The bounds of a placed model.

    Args:
      alone: the same step on one device of the cluster.
      trained: paths of the parameters that are not frozen.
    """
    state = placed.abstract_state
    held = lambda tree: sum(on_device(leaf) for leaf in jax.tree.leaves(tree))
    target = cluster.target
    served = placed.resolved.layout.gradients.reduction == "parameter_server"
    moves = {path: leaf for path, leaf in flatten(state.params).items() if path in trained}
    touched = 0 if served else 2 * (held(moves) + held(state.opt))  # each is read and written
    parts = {
        "matrix products, shared evenly": alone.products / cluster.count,
        "reading and writing weights": touched / (target.memory_bandwidth * target.achieved.memory),
        "gradients on the links": _meeting(placed, cluster, trained),
    }
    why = max(parts, key=lambda name: parts[name])
    return Floor(held(state), parts[why], why)


def _meeting(placed: Placed, cluster: Cluster, trained: Collection[str]) -> float:
    """Seconds of all gradients in one collective: an all-reduce where weights are whole on every worker, else a reduce-scatter."""
    resolved, gradients = placed.resolved, placed.resolved.layout.gradients
    if gradients.reduction not in ("all_reduce", "reduce_scatter") or gradients.compressed or resolved.workers == 1:
        return 0.0  # what XLA or a codec sends is not known without compiling
    size = 0
    for place in (place for path, place in resolved.placements.items() if path in trained):
        others = [axis for axis in spec_axes(place.spec) if axis not in resolved.data_axes]
        size += place.nbytes // math.prod(resolved.mesh.sizes[axis] for axis in others)
    kind = gradients.reduction
    per_node = _per_node(resolved.mesh, resolved.data_axes, cluster)
    given = size if kind == "all_reduce" else size // resolved.workers
    array = Array("uint8", (given,), 8)
    transfer = Transfer(kind, "gradients", resolved.data_axes, resolved.workers, per_node, (array,), 1, "", "", asynchronous=True)
    return travel_time(transfer, cluster)


def _per_node(mesh: MeshSpec, axes: tuple[str, ...], cluster: Cluster) -> int:
    """How many of the devices that meet along these axes share a node."""
    ids = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    group = ids[tuple(slice(None) if name in axes else 0 for name in mesh.names)].ravel() // cluster.devices
    most = int(np.unique(group, return_counts=True)[1].max())
    return most if group.size % most == 0 else 1
