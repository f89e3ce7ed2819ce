"""Parameter communication: gather parameters from shards for use, and gather sharded updates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.layout.resolve import Placement
from spmd.specs import Spec, entry_axes, keep_axes, mixes_data_axes, pspec, spec_axes
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.mesh_axes import MeshAxes, constrain
from spmd.tree import Tree, flatten
from spmd.wire import collectives
from spmd.wire.codec.bfloat16 import Bfloat16
from spmd.wire.server.exchange import gather_rows
from spmd.xla import shard_map


def needs_gather(placement: Placement, mesh_axes: MeshAxes) -> bool:
    """Whether the parameter is sharded over workers."""
    return any(axis in mesh_axes.data_axes for axis in spec_axes(placement.spec))


def gather_params(sync: GradientSync, placement: Placement, shard: Any) -> Any:
    """The parameter, replicated over the workers, from this worker's shard; unchanged if it is
    replicated, or gathered by layer.
    """
    mesh_axes = sync.mesh_axes
    if not needs_gather(placement, mesh_axes) or placement.path in sync.layerwise:
        return shard
    if not sync.reduction.manual:
        return constrain(mesh_axes, keep_axes(placement.spec, mesh_axes.model_axes), shard)
    with jax.named_scope("gather_params"):
        gather = _all_gather if sync.of_quantized(placement.path) else _gather
        return gather(sync, placement.spec, shard, mesh_axes.data_axes)


def gather_outside(sync: GradientSync, params: Tree) -> Tree:
    """On global arrays, for evaluation: parameters replicated over the workers, but for those that
    are gathered by layer.
    """
    axes = sync.mesh_axes

    def gather(placement: Placement, leaf: Any) -> Any:
        return (
            leaf
            if placement.path in sync.layerwise
            else constrain(axes, keep_axes(placement.spec, axes.model_axes), leaf)
        )

    return sync.map_params(gather, params)


def gather_frozen(sync: GradientSync, frozen: Tree) -> Tree:
    """Every array of a parameter that is not trained, replicated over the workers, from this
    worker's shards.
    """
    return sync.map_params(lambda placement, shard: gather_params(sync, placement, shard), frozen)


def gather_all(sync: GradientSync, params: Tree) -> Tree:
    """Every parameter, replicated over the workers, from this worker's shards."""
    if sync.reduction.keeps_params:
        return jax.tree.unflatten(
            jax.tree.structure(params), list(gather_packed_params(sync, flatten(params)).values())
        )
    return sync.map_params(lambda placement, shard: gather_params(sync, placement, shard), params)


def gather_again(sync: GradientSync, backward: Callable, gathered: Tree, params: Tree) -> Callable:
    """`backward` with those of its residuals that are gathered parameters gathered anew from
    `params`; two lists of trees, of which some may be frozen.

    What `jax.vjp` returns is a pytree of its residuals, and a parameter among them is the array
    that was passed in.
    """
    kept = {id(residual) for residual in jax.tree.leaves(backward)}

    def gather(placement: Placement, old: jax.Array, shard: jax.Array) -> jax.Array:
        return (
            gather_params(sync, placement, shard)
            if id(old) in kept and needs_gather(placement, sync.mesh_axes)
            else old
        )

    again = [sync.map_params(gather, *trees) for trees in zip(gathered, params, strict=True)]
    replaced = {
        id(old): new
        for old, new in zip(jax.tree.leaves(gathered), jax.tree.leaves(again), strict=True)
    }
    return jax.tree.map(lambda residual: replaced.get(id(residual), residual), backward)


def gather_packed_params(sync: GradientSync, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Packed parameters, by path [positions, width], from this server's row of them, [1, width]:
    one all-gather per bucket.

    All of them, or those of some fragments.
    """
    return gather_rows(rows, sync.buckets, sync.mesh_axes.data_axes, rounded=sync.rounds_params)


def gather_updates(sync: GradientSync, updates: Tree) -> Tree:
    """Updates with the sharding of their parameters, from updates with that of the moments
    (ZeRO-1).
    """
    mesh_axes, placements = sync.mesh_axes, sync.resolved.placements
    data_axes = mesh_axes.data_axes
    gathered = {
        path: constrain(mesh_axes, placements[path].state_spec, update)
        for path, update in flatten(updates).items()
    }

    def extra_axes(path: str) -> tuple[str, ...]:
        placement = placements[path]
        return tuple(
            axis
            for axis in spec_axes(placement.state_spec)
            if axis not in spec_axes(placement.spec)
        )

    def is_sharded(path: str) -> bool:
        return any(axis in data_axes for axis in extra_axes(path)) and not mixes_data_axes(
            placements[path].state_spec, data_axes
        )

    def local(shards: dict[str, Any]) -> dict[str, Any]:
        with jax.named_scope("gather_updates"):
            return {
                path: _gather(sync, placements[path].state_spec, shard, extra_axes(path))
                for path, shard in shards.items()
            }

    sharded = {
        path: update
        for path, update in gathered.items()
        if sync.reduction.manual and is_sharded(path)
    }
    if sharded:
        before = {
            path: pspec(keep_axes(placements[path].state_spec, data_axes)) for path in sharded
        }
        after = {path: pspec(keep_axes(placements[path].spec, data_axes)) for path in sharded}
        gathered |= shard_map(
            local, mesh=mesh_axes.mesh, in_specs=(before,), out_specs=after, axis_names=data_axes
        )(sharded)
    return jax.tree.unflatten(jax.tree.structure(updates), list(gathered.values()))


def _gather(sync: GradientSync, spec: Spec, shard: Any, axes: tuple[str, ...]) -> Any:
    """All-gather along `axes`, in the dtype of the layout."""
    if sync.rounds_params and shard.dtype == jnp.float32:
        codec = Bfloat16()
        return codec.decode(_all_gather(sync, spec, codec.encode(shard), axes), 0)
    return _all_gather(sync, spec, shard, axes)


def _all_gather(sync: GradientSync, spec: Spec, shard: Any, axes: tuple[str, ...]) -> Any:
    """Per worker: an array that is sharded as `spec`, gathered along those of `axes` that are data
    axes.
    """
    mesh_axes = sync.mesh_axes

    def local(x: Any) -> Any:
        for dim, entry in enumerate(spec):
            x = collectives.all_gather(
                x,
                tuple(
                    axis
                    for axis in entry_axes(entry)
                    if axis in axes and axis in mesh_axes.data_axes
                ),
                dim,
            )
        return x

    model_axes = mesh_axes.model_axes
    # shards along one axis alone would be joined in the wrong order
    if not model_axes or mixes_data_axes(spec, mesh_axes.data_axes):
        return local(shard)
    # On each device's local shard along the model axes, so that only that shard is sent. Left to
    # the partitioner, a collective on an array that is sharded over a model axis gathers it there
    # first.
    model_spec = pspec(keep_axes(spec, model_axes))
    return shard_map(local, in_specs=model_spec, out_specs=model_spec, axis_names=model_axes)(shard)
