"""The region in which a transformation runs: `jax.shard_map` with the workers' axes manual."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmd.errors import CommunicationError
from spmd.tree import Tree
from spmd.wire import collectives
from spmd.xla import varying_axes


def bound_sizes(axes: tuple[str, ...]) -> dict[str, int]:
    """Workers along each axis, inside the region.

    Raises:
      CommunicationError: an axis is not manual here.
    """
    sizes = {}
    for axis in axes:
        try:
            sizes[axis] = collectives.worker_count((axis,))
        except NameError:
            raise CommunicationError(
                f'"{axis}" is not a manual mesh axis here.',
                fix=f'jax.shard_map(..., axis_names={{"{axis}"}}, check_vma=False) around it; without axis_names every axis is manual.',
            ) from None
    return sizes


def axis_sizes(axes: tuple[str, ...], params: Tree) -> tuple[dict[str, int], bool]:
    """Workers along each axis, and whether this is inside the region. Outside, the mesh is that of `jax.set_mesh` or of `params`."""
    try:
        return bound_sizes(axes), True
    except CommunicationError:
        meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(params) if isinstance(getattr(leaf, "sharding", None), NamedSharding)]
        for mesh in (jax.sharding.get_abstract_mesh(), *meshes[:1]):
            if all(axis in mesh.shape for axis in axes):
                return {axis: mesh.shape[axis] for axis in axes}, False
    raise CommunicationError(
        f"how many workers there are along {', '.join(axes)} is not known here: the state has a residual for each of them.",
        fix="wire.init(tx, params, mesh), or tx.init inside jax.shard_map.",
    )


def check_grads(axes: tuple[str, ...], grads: Mapping[str, Any], *, lossless: bool) -> None:
    """Refuse gradients that were reduced already, where `jax.shard_map` tracks which values vary (`check_vma=True`).

    Raises:
      CommunicationError: a gradient is equal on all workers, or a codec's collectives cannot be tracked.
    """
    if not any(axis in varying_axes(collectives.worker_index((axis,))) for axis in axes):
        return
    for path, grad in grads.items():
        if not set(axes) & varying_axes(grad):
            raise CommunicationError(
                f"the gradient {path} is equal on all workers: under check_vma=True, jax.grad of replicated parameters sums it already, "
                "and a mean of sums would be too large.",
                fix="jax.shard_map(..., check_vma=False).",
                path=path,
            )
    if not lossless:
        raise CommunicationError(
            "codecs end in an all-gather, whose result jax.shard_map cannot prove to be replicated.",
            fix="jax.shard_map(..., check_vma=False).",
        )
