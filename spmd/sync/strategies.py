"""Gradient reductions: which shard of the mean gradient each worker gets.

A `Reduction` decides where arrays live. The codecs decide how they are sent (`gradient_sync.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from spmd.layout.resolve import Placement
from spmd.specs import Spec, pspec


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh with its axes split into data axes (the workers') and all others."""

    mesh: Mesh | AbstractMesh
    data_axes: tuple[str, ...]

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Mesh axes that the manual step leaves to the compiler."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.data_axes)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One way to reduce gradients.

    `manual` says whether the step runs per worker under `jax.shard_map`. `grad_spec(placement)` is the spec of a gradient
    while it is reduced, and `mean_spec(placement)` that of its mean. `keeps_params` says whether gathered parameters are kept
    for the backward pass, as by the worker of a parameter server, which gathers once. Otherwise they are gathered again,
    which saves memory.
    """

    name: str
    manual: bool
    grad_spec: Callable[[Placement], Spec]
    mean_spec: Callable[[Placement], Spec]
    keeps_params: bool = False


def _state_spec(placement: Placement) -> Spec:
    return placement.state_spec


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("compiler", False, _state_spec, _state_spec),
        Reduction("all_reduce", True, lambda placement: placement.spec, lambda placement: ()),
        Reduction("reduce_scatter", True, _state_spec, _state_spec),
        Reduction("parameter_server", True, _state_spec, _state_spec, keeps_params=True),
    )
}


def constrain(mesh_axes: MeshAxes, spec: Spec, x: Any) -> Any:
    """Give `x` the sharding of `spec`. Does nothing in a fully manual region, where shardings are explicit."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names and set(mesh.axis_names) == set(mesh.manual_axes):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh_axes.mesh, pspec(spec)))
