"""The memory of devices: its limit, and the bytes that arrays take of it."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from spmd.base.tree import Tree
from spmd.train.host_memory import HOST


def memory_limit(mesh: Mesh) -> int | None:
    """Return the bytes that a program can use on each local device of a mesh, the smallest limit;
    None if devices do not report it.
    """
    try:
        all_stats = [device.memory_stats() for device in mesh.local_devices]
    except jax.errors.JaxRuntimeError:
        # devices of a description, for which steps are compiled only
        return None
    # JAX returns None for CPUs, which have no statistics
    limits = [(stats or {}).get("bytes_limit", 0) for stats in all_stats]
    return min(limits, default=0) or None


def on_device(leaf: Any) -> int:
    """Return the bytes of one device's shard of an array."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def tree_on_device(tree: Tree) -> int:
    """Return the bytes of one device's shards of all arrays in a tree, except arrays in the host's
    memory.
    """
    return sum(on_device(leaf) for leaf in jax.tree.leaves(tree) if not in_host_memory(leaf))


def in_host_memory(leaf: Any) -> bool:
    """Return whether an array of the state is kept in the host's memory."""
    return leaf.sharding.memory_kind == HOST
