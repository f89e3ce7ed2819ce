"""Weights on the wire: gathered for use from the pieces that workers keep, and updates spread from those who made them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.layout.resolve import Placement, pspec
from spmd.layout.schema import Spec, entry_axes, keep_axes, mixes_data_axes, spec_axes
from spmd.tree import Tree, flatten
from spmd.wire import collectives
from spmd.wire.codec.base import packed_collective
from spmd.wire.codec.bfloat16 import Bfloat16
from spmd.wire.gradient_sync import GradientSync
from spmd.wire.strategies import MeshAxes, constrain
from spmd.xla import shard_map


def needs_gather(place: Placement, mesh_axes: MeshAxes) -> bool:
    """Whether the parameter is stored in pieces that differ between workers."""
    return any(axis in mesh_axes.data_axes for axis in spec_axes(place.spec))


def gather_params(exchange: GradientSync, place: Placement, piece: Any) -> Any:
    """The weight, whole over the workers, from this worker's piece; as it is when it is whole already."""
    mesh_axes = exchange.mesh_axes
    if not needs_gather(place, mesh_axes):
        return piece
    if not exchange.reduction.manual:
        return constrain(mesh_axes, keep_axes(place.spec, mesh_axes.rest), piece)
    with jax.named_scope("pull"):
        return _gathered(exchange, place.spec, piece, mesh_axes.data_axes)


def gather_packed_params(exchange: GradientSync, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Weights whole, by path [positions, width], from what this server keeps of them, [1, width]: one all-gather for each bucket.

    All of them, or those of some fragments.
    """
    found: dict[str, jax.Array] = {}
    with jax.named_scope("pull"):
        for paths in exchange.buckets:
            if paths[0] not in rows:
                continue
            gather = lambda x: collectives.all_gather(x, exchange.mesh_axes.data_axes, 0)
            found |= dict(zip(paths, communicate_params(exchange, [rows[path] for path in paths], 1, gather), strict=True))
    return {path: found[path] for path in rows}


def communicate_params(
    exchange: GradientSync, weights: list[jax.Array], rows: int, move: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Weights [rows, ...] that travel side by side in one collective, as two bytes each where the layout says so."""
    short = exchange.resolved.layout.gradients.weights == "bfloat16"
    thin = [short and leaf.dtype == jnp.float32 for leaf in weights]
    sent = [Bfloat16().encode(leaf) if less else leaf for leaf, less in zip(weights, thin, strict=True)]
    return [Bfloat16().decode(leaf, 0) if less else leaf for leaf, less in zip(packed_collective(sent, rows, move), thin, strict=True)]


def gather_updates(exchange: GradientSync, updates: Tree) -> Tree:
    """Updates as whole as their parameters, from the pieces that the owners of the moments have made (ZeRO-1)."""
    mesh_axes, places = exchange.mesh_axes, exchange.resolved.placements
    here = {path: constrain(mesh_axes, places[path].state_spec, update) for path, update in flatten(updates).items()}
    more = lambda path: tuple(axis for axis in spec_axes(places[path].state_spec) if axis not in spec_axes(places[path].spec))
    wanted = lambda path: (
        any(axis in mesh_axes.data_axes for axis in more(path)) and not mixes_data_axes(places[path].state_spec, mesh_axes.data_axes)
    )
    cut = {path: update for path, update in here.items() if exchange.reduction.manual and wanted(path)}

    def local(pieces: dict[str, Any]) -> dict[str, Any]:
        with jax.named_scope("spread"):
            return {path: _gathered(exchange, places[path].state_spec, piece, more(path)) for path, piece in pieces.items()}

    if cut:
        data = mesh_axes.data_axes
        before = {path: pspec(keep_axes(places[path].state_spec, data)) for path in cut}
        after = {path: pspec(keep_axes(places[path].spec, data)) for path in cut}
        here |= shard_map(local, mesh=mesh_axes.mesh, in_specs=(before,), out_specs=after, axis_names=data)(cut)
    return jax.tree.unflatten(jax.tree.structure(updates), list(here.values()))


def _gathered(exchange: GradientSync, spec: Spec, piece: Any, axes: tuple[str, ...]) -> Any:
    """Joined along `axes`, travelling as the layout says."""
    if exchange.resolved.layout.gradients.weights == "bfloat16" and piece.dtype == jnp.float32:
        codec = Bfloat16()
        return codec.decode(_joined(exchange.mesh_axes, spec, codec.encode(piece), axes), 0)
    return _joined(exchange.mesh_axes, spec, piece, axes)


def _joined(mesh_axes: MeshAxes, spec: Spec, piece: Any, axes: tuple[str, ...]) -> Any:
    """Per worker: an array that is cut as `spec`, joined from everybody's pieces along those of `axes` that are data axes."""

    def local(x: Any) -> Any:
        for dim, entry in enumerate(spec):
            x = collectives.all_gather(x, tuple(axis for axis in entry_axes(entry) if axis in axes and axis in mesh_axes.data_axes), dim)
        return x

    if not mesh_axes.rest or mixes_data_axes(spec, mesh_axes.data_axes):  # pieces along one axis alone would be joined in the wrong order
        return local(piece)
    # on each device's own piece along the remaining axes, so that only that piece travels: left to the partitioner, a
    # collective on an array cut over the model axis gathers it there first
    rest = pspec(keep_axes(spec, mesh_axes.rest))
    return shard_map(local, in_specs=rest, out_specs=rest, axis_names=mesh_axes.rest)(piece)
