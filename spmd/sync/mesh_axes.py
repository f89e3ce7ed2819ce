"""The mesh as reductions see it: data axes, along which the workers are, and all others."""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from spmd.base.specs import Entry, Spec, entry_axes, pspec


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh with its axes split into data axes (the workers') and all others."""

    mesh: Mesh | AbstractMesh
    data_axes: tuple[str, ...]

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Mesh axes that the manual step leaves to the compiler."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.data_axes)

    def devices_along(self, entry: Entry) -> int:
        """Number of devices along one mesh axis, or along several."""
        return math.prod(self.mesh.shape[axis] for axis in entry_axes(entry))


def constrain(mesh_axes: MeshAxes, spec: Spec, x: Any) -> Any:
    """Give `x` the sharding of `spec`. Does nothing in a fully manual region, where shardings are
    explicit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names and set(mesh.axis_names) == set(mesh.manual_axes):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh_axes.mesh, pspec(spec)))
