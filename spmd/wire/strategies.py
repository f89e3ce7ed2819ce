"""How gradients meet: who gets which piece of their mean.

A `Reduction` says where arrays are. What travels on the way is the codecs' affair (`exchange.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from spmd.layout.resolve import Placement, pspec
from spmd.layout.schema import Spec


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """What a reduction needs to know of the mesh: its axes, split into the workers' and the rest."""

    mesh: Mesh | AbstractMesh
    data_axes: tuple[str, ...]

    @property
    def rest(self) -> tuple[str, ...]:
        """Mesh axes that stay with the compiler in the manual step."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.data_axes)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One way for gradients to meet.

    `manual` says whether the step runs per worker under `jax.shard_map`. `spec(place)` is how a gradient is cut while it is
    exchanged, and `pushed(place)` how its mean is: in pieces, or whole over the workers. `keeps` says whether whole weights are kept for
    the backward pass, as a worker of a parameter server does, which pulls once; else they are gathered again, and memory is saved.
    """

    name: str
    manual: bool
    spec: Callable[[Placement], Spec]
    mean_spec: Callable[[Placement], Spec]
    keeps_params: bool = False


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("compiler", False, lambda place: place.state_spec, lambda place: place.state_spec),
        Reduction("all_reduce", True, lambda place: place.spec, lambda place: ()),
        Reduction("reduce_scatter", True, lambda place: place.state_spec, lambda place: place.state_spec),
        Reduction("parameter_server", True, lambda place: place.state_spec, lambda place: place.state_spec, keeps_params=True),
    )
}


def constrain(mesh_axes: MeshAxes, spec: Spec, x: Any) -> Any:
    """Tell the compiler where `x` is to be; where all axes are manual it is told by what is written, and there is nothing to add."""
    around = jax.sharding.get_abstract_mesh()
    if around.axis_names and set(around.axis_names) == set(around.manual_axes):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh_axes.mesh, pspec(spec)))
