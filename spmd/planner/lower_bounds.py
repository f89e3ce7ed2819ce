"""Lower bounds on a step's memory and time, in closed form, from the same figures as a plan's.

Nothing is compiled: the layout determines the shards of parameters and optimizer state, the FLOPs
are those of the step on one device, divided evenly, and gradients cross the links once to be
reduced.
"""

import dataclasses
from collections.abc import Collection

import jax
import numpy as np
from jax.extend.core import Literal

from spmd.layout.resolve import num_shards
from spmd.planner.plan_data import PlanData
from spmd.planner.target import Cluster
from spmd.planner.timeline import Timeline, reduction_time
from spmd.planner.traffic import devices_per_node
from spmd.specs import spec_axes
from spmd.train.device_memory import tree_on_device
from spmd.train.model_setup import PlacedModel
from spmd.tree import Tree, flatten, nbytes


@dataclasses.dataclass(frozen=True)
class LowerBounds:
    """Lower bounds of a step: `state` bytes on each device, and `seconds`; `why` says what these
    are spent on.
    """

    state: int
    seconds: float
    why: str


def trainable_paths(placed: PlacedModel) -> set[str]:
    """Parameters that a gradient can change; those that an optimizer freezes are neither sent nor
    written.
    """
    state = placed.abstract_state

    def updates(grads: Tree, opt: Tree, params: Tree) -> Tree:
        return placed.optimizer.update(grads, opt, params)[0]

    jaxpr = jax.make_jaxpr(updates)(state.params, state.opt, state.params).jaxpr
    dependent = set(jaxpr.invars[: len(jax.tree.leaves(state.params))])
    for equation in jaxpr.eqns:
        if any(not isinstance(var, Literal) and var in dependent for var in equation.invars):
            dependent.update(equation.outvars)
    changes = [not isinstance(var, Literal) and var in dependent for var in jaxpr.outvars]
    return {path for path, change in zip(flatten(state.params), changes, strict=True) if change}


def divided_activations(alone: PlanData) -> float:
    """Bytes of activations of the step on one device, at least: its temporaries without two full
    copies of all parameters.

    One for gradients, and one for parameters in the dtype of the computation and their gradients:
    on a mesh these need not be full.
    """
    arrays = alone.program.placed.abstract_variables
    return max(
        0.0,
        alone.memory.temporaries
        - 2.0 * sum(map(nbytes, jax.tree.leaves((arrays.params, arrays.frozen)))),
    )


def lower_bounds_of(
    placed: PlacedModel, cluster: Cluster, alone: Timeline, trainable: Collection[str]
) -> LowerBounds:
    """The bounds of a placed model.

    Args:
      alone: the same step on one device of the cluster.
      trainable: paths of the parameters that are not frozen.
    """
    state, target = placed.abstract_state, cluster.target
    on_server = placed.resolved.layout.gradients.reduction == "parameter_server"
    trained_params = {
        path: leaf for path, leaf in flatten(state.params).items() if path in trainable
    }
    moved = (
        0
        if on_server
        else 2 * tree_on_device((trained_params, state.opt)) + tree_on_device(state.frozen)
    )  # read, and written but for those
    parts = {
        "matrix products, divided evenly": alone.multiplying / cluster.count,
        "reading and writing parameters": moved
        / (target.memory_bandwidth * target.achieved.memory),
        "gradients on the links": _reduction_time(placed, cluster, trainable),
    }
    why = max(parts, key=lambda name: parts[name])
    return LowerBounds(tree_on_device(state), parts[why], why)


def _reduction_time(placed: PlacedModel, cluster: Cluster, trainable: Collection[str]) -> float:
    """Seconds to reduce all gradients in one collective."""
    resolved, gradients, mesh = (
        placed.resolved,
        placed.resolved.layout.gradients,
        placed.resolved.mesh,
    )
    if (
        gradients.reduction not in ("all_reduce", "reduce_scatter")
        or gradients.compressed
        or resolved.workers == 1
    ):
        return 0.0  # what XLA or a codec sends is not known without compiling
    size = 0
    for place in (place for path, place in resolved.placements.items() if path in trainable):
        size += place.nbytes // num_shards(
            tuple(axis for axis in spec_axes(place.spec) if axis not in resolved.data_axes), mesh
        )
    ids = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    workers = (
        ids[tuple(slice(None) if name in resolved.data_axes else 0 for name in mesh.names)]
        .ravel()
        .tolist()
    )
    return reduction_time(
        gradients.reduction, size, len(workers), devices_per_node(workers, cluster), cluster
    )
