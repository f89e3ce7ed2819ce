"""How gradients meet: `pull` makes whole weights from a worker's pieces, `push` makes one gradient from all workers'.

A `Reduction` is two functions over one parameter each. The manual step calls them inside
`jax.shard_map`, on this worker's arrays; under the compiler's reduction they only say where arrays should be.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from spmd.comm import wire
from spmd.layout.declare import Spec, entry_axes, keep_axes, spec_axes
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

    `manual` says whether the step runs per worker under `jax.shard_map`. `pull(scene, place, piece)` returns the weight
    with every data axis gathered. `push(scene, place, grad)` takes the gradient of the mean loss over this worker's
    rows and returns the mean over workers, in the pieces that `pushed_spec` says.
    """

    name: str
    manual: bool
    pull: Callable[[Scene, Placement, Any], Any]
    push: Callable[[Scene, Placement, Any], Any]
    pushed_spec: Callable[[Placement], Spec]


def gathered(spec: Spec, scene: Scene) -> Spec:
    """The spec of a weight while it is used: cut over the rest, whole over the workers."""
    return keep_axes(spec, scene.rest)


def _constrain_pull(scene: Scene, place: Placement, x: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(scene.mesh, pspec(gathered(place.spec, scene))))


def _constrain_push(scene: Scene, place: Placement, grad: Any) -> Any:
    return lax.with_sharding_constraint(grad, NamedSharding(scene.mesh, pspec(place.state_spec)))


def _gather_pull(scene: Scene, place: Placement, piece: Any) -> Any:
    def gather(x: Any) -> Any:
        for dim, entry in enumerate(place.spec):
            x = wire.all_gather(x, tuple(axis for axis in entry_axes(entry) if axis in scene.data_axes), dim)
        return x

    return _over_rest(scene, gather, place.spec)(piece) if needs_gather(place, scene) else piece


def _all_reduce_push(scene: Scene, place: Placement, grad: Any) -> Any:
    workers = wire.worker_count(scene.data_axes)
    return _over_rest(scene, lambda g: wire.all_reduce(g, scene.data_axes) / workers, place.spec)(grad)


def _reduce_scatter_push(scene: Scene, place: Placement, grad: Any) -> Any:
    workers = wire.worker_count(scene.data_axes)

    def scatter(g: Any) -> Any:
        left = scene.data_axes
        for dim, entry in enumerate(place.state_spec):
            axes = tuple(axis for axis in entry_axes(entry) if axis in scene.data_axes)
            g = wire.reduce_scatter(g, axes, dim)
            left = tuple(axis for axis in left if axis not in axes)
        return wire.all_reduce(g, left) / workers

    return _over_rest(scene, scatter, place.state_spec)(grad)


def needs_gather(place: Placement, scene: Scene) -> bool:
    """Whether the parameter is stored in pieces that differ between workers."""
    return any(axis in scene.data_axes for axis in spec_axes(place.spec))


def _over_rest(scene: Scene, function: Callable[[Any], Any], spec: Spec) -> Callable[[Any], Any]:
    """`function` on each device's own piece along the remaining axes, so that only that piece travels.

    Left to the partitioner, a collective on an array cut over the model axis gathers it there first. A dim that is cut
    over a data axis and another one together cannot be treated so: its pieces would be joined in the wrong order.
    """
    mixed = any(len({axis in scene.data_axes for axis in entry_axes(entry)}) > 1 for entry in spec)
    if not scene.rest or mixed:
        return function
    rest_spec = pspec(keep_axes(spec, scene.rest))
    return jax.shard_map(function, in_specs=rest_spec, out_specs=rest_spec, axis_names=set(scene.rest), check_vma=False)


def _manual_spec(place: Placement) -> Spec:
    return place.state_spec


def _whole_spec(place: Placement) -> Spec:
    return ()


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("compiler", False, _constrain_pull, _constrain_push, _manual_spec),
        Reduction("all_reduce", True, _gather_pull, _all_reduce_push, _whole_spec),
        Reduction("reduce_scatter", True, _gather_pull, _reduce_scatter_push, _manual_spec),
    )
}
