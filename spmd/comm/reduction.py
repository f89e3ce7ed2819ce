"""How gradients meet: who gets which piece of their mean, and how whole weights are made from pieces.

A `Reduction` says where arrays are. What travels on the way is the codecs' affair (`exchange.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from spmd.comm import wire
from spmd.layout.declare import Spec, entry_axes, keep_axes, mixed, spec_axes
from spmd.layout.resolve import Placement, pspec


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a reduction needs to know of the mesh: its axes, split into the workers' and the rest."""

    mesh: Mesh
    data_axes: tuple[str, ...]

    @property
    def rest(self) -> tuple[str, ...]:
        """Mesh axes that stay with the compiler in the manual step."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.data_axes)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One way for gradients to meet.

    `manual` says whether the step runs per worker under `jax.shard_map`. `spec(place)` is how a gradient is cut while it is
    exchanged, and `pushed(place)` how its mean is: in pieces, or whole over the workers.
    """

    name: str
    manual: bool
    spec: Callable[[Placement], Spec]
    pushed: Callable[[Placement], Spec]


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("compiler", False, lambda place: place.state_spec, lambda place: place.state_spec),
        Reduction("all_reduce", True, lambda place: place.spec, lambda place: ()),
        Reduction("reduce_scatter", True, lambda place: place.state_spec, lambda place: place.state_spec),
    )
}


def gathered(spec: Spec, scene: Scene) -> Spec:
    """The spec of a weight while it is used: cut over the rest, whole over the workers."""
    return keep_axes(spec, scene.rest)


def needs_gather(place: Placement, scene: Scene) -> bool:
    """Whether the parameter is stored in pieces that differ between workers."""
    return any(axis in scene.data_axes for axis in spec_axes(place.spec))


def constrain(scene: Scene, spec: Spec, x: Any) -> Any:
    """Tell the compiler where `x` is to be."""
    return lax.with_sharding_constraint(x, NamedSharding(scene.mesh, pspec(spec)))


def gather(scene: Scene, spec: Spec, piece: Any, axes: tuple[str, ...]) -> Any:
    """Per worker: an array that is cut as `spec`, joined from everybody's pieces along the data axes `axes`."""

    def local(x: Any) -> Any:
        for dim, entry in enumerate(spec):
            x = wire.all_gather(x, tuple(axis for axis in entry_axes(entry) if axis in axes), dim)
        return x

    if not scene.rest or mixed(spec, scene.data_axes):  # pieces along one axis alone would be joined in the wrong order
        return local(piece)
    # on each device's own piece along the remaining axes, so that only that piece travels: left to the partitioner, a
    # collective on an array cut over the model axis gathers it there first
    rest = pspec(keep_axes(spec, scene.rest))
    return jax.shard_map(local, in_specs=rest, out_specs=rest, axis_names=set(scene.rest), check_vma=False)(piece)
