"""Parameter communication: gather parameters from shards for use, and gather sharded updates."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from spmd.base.specs import Spec, keep_axes, mixes_data_axes, pspec, spec_axes
from spmd.base.tree import Tree, flatten
from spmd.base.xla import shard_map
from spmd.layout.resolve import Placement
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.mesh_axes import constrain
from spmd.wire.codec.bfloat16 import send_rounded
from spmd.wire.gathering import join_shards
from spmd.wire.region import on_local_shards
from spmd.wire.server.exchange import gather_rows


def gather_params(sync: GradientSync, params: Tree, *, outside: bool = False) -> Tree:
    """Return parameters, trained or frozen, replicated over the workers, from this worker's shards.

    Parameters of `sync.layerwise` stay shards: they are gathered where they are used.

    Args:
      outside: on global arrays, outside of workers, for evaluation and prediction.
    """

    def gather(placement: Placement, shard: Any) -> Any:
        return gather_param(sync, placement, shard, outside=outside)

    return sync.map_params(gather, params)


def gather_param(
    sync: GradientSync, placement: Placement, shard: Any, *, outside: bool = False
) -> Any:
    """Return one parameter, as `gather_params` does."""
    mesh_axes, path = sync.mesh_axes, placement.path
    if path in sync.layerwise or not (outside or sync.is_sharded(path)):
        return shard
    if outside or not sync.reduction.manual:
        return constrain(mesh_axes, keep_axes(placement.spec, mesh_axes.model_axes), shard)
    with jax.named_scope("gather_params"):
        # Scales of codes are used as they are: bfloat16 would round every value of their blocks.
        rounded = not sync.of_quantized(path)
        return _gather(sync, placement.spec, shard, mesh_axes.data_axes, rounded=rounded)


def gather_again(sync: GradientSync, full: Tree, shards: Tree, used: Tree) -> Tree:
    """Return `full`, the parameters that a backward pass has `used` (bools) gathered anew from
    `shards`.
    """

    def gather(placement: Placement, old: jax.Array, shard: jax.Array, is_used: bool) -> jax.Array:
        if not is_used or not sync.is_sharded(placement.path):
            return old
        return gather_param(sync, placement, shard)

    return sync.map_params(gather, full, shards, used)


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
    mesh_axes = sync.mesh_axes
    placements = sync.resolved.placements
    gathered = {
        path: constrain(mesh_axes, placements[path].state_spec, update)
        for path, update in flatten(updates).items()
    }
    sharded = {}
    if sync.reduction.manual:
        sharded = {
            path: update
            for path, update in gathered.items()
            if _is_gathered(placements[path], mesh_axes.data_axes)
        }
    if sharded:
        gathered |= _gather_sharded_updates(sync, sharded)
    return jax.tree.unflatten(jax.tree.structure(updates), list(gathered.values()))


def _gather_sharded_updates(sync: GradientSync, sharded: dict[str, Any]) -> dict[str, Any]:
    """Gather updates on the workers, one array at a time."""
    placements = sync.resolved.placements

    def gather(shards: dict[str, Any]) -> dict[str, Any]:
        full = {}
        with jax.named_scope("gather_updates"):
            for path, shard in shards.items():
                axes = _extra_axes(placements[path])
                spec = placements[path].state_spec
                full[path] = _gather(sync, spec, shard, axes, rounded=True)
        return full

    before = {path: sync.data_spec(placements[path].state_spec) for path in sharded}
    after = {path: sync.data_spec(placements[path].spec) for path in sharded}
    return shard_map(
        gather,
        mesh=sync.mesh_axes.mesh,
        in_specs=(before,),
        out_specs=after,
        axis_names=sync.mesh_axes.data_axes,
    )(sharded)


def _extra_axes(placement: Placement) -> tuple[str, ...]:
    """Return the axes that shard a parameter's moments, and not the parameter."""
    axes = spec_axes(placement.state_spec)
    return tuple(axis for axis in axes if axis not in spec_axes(placement.spec))


def _is_gathered(placement: Placement, data_axes: tuple[str, ...]) -> bool:
    """Return whether workers gather an update; the compiler gathers one whose moments are sharded
    over data axes and others along one dim.
    """
    if mixes_data_axes(placement.state_spec, data_axes):
        return False
    return any(axis in data_axes for axis in _extra_axes(placement))


def _gather(
    sync: GradientSync, spec: Spec, shard: Any, axes: tuple[str, ...], *, rounded: bool
) -> Any:
    """Per worker: an array that is sharded as `spec`, gathered along those of `axes` that are data
    axes; `rounded`: as bfloat16, if the layout sends float32 parameters so.
    """
    data_axes = sync.mesh_axes.data_axes
    model_axes = sync.mesh_axes.model_axes
    gathered_axes = tuple(axis for axis in data_axes if axis in axes)
    gathered_spec = keep_axes(spec, gathered_axes)
    join: Callable[[Any], Any] = functools.partial(join_shards, spec=gathered_spec)
    # shards along one axis alone would be joined in the wrong order
    if not mixes_data_axes(spec, data_axes):
        model_spec = pspec(keep_axes(spec, model_axes))
        join = on_local_shards(join, model_axes, model_spec, model_spec)

    def send(shards: list[Any]) -> list[Any]:
        return [join(x) for x in shards]

    [full] = send_rounded([shard], send, rounded=rounded and sync.rounds_params)
    return full
