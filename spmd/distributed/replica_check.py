"""Check that replicas are equal: each device computes checksums of its shards, which are compared
over the mesh.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.tree import Tree, flatten
from spmd.base.xla import shard_map
from spmd.errors import ClusterError

MAX_SHOWN = 8  # arrays in an error
# Words of a shard: up to this size shards are concatenated, which costs a negligible copy.
SMALL = 65536
# it runs seldom: a third of the time to compile, four times that to run
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def check_replicas(state: Tree, when: str) -> None:
    """Compare all replicas of every shard of every array.

    Each device reads its shards once and sends 4 bytes for all arrays with the same sharding; only
    if these differ, it repeats that with 4 bytes for each array. A checksum is a sum over all
    32-bit words, each mixed with its index by an invertible function: a single differing word is
    always found, and replicas that differ in more words escape with probability 2^-32.

    Args:
      state: arrays on one mesh.
      when: when the check runs, for the error.

    Raises:
      ClusterError: in all processes: which arrays differ, and on which processes and devices they
        differ from the majority.
    """
    leaves: dict[str, Any] = {
        path: leaf
        for path, leaf in flatten(state).items()
        if isinstance(leaf, jax.Array) and leaf.size
    }
    if not leaves:
        return
    groups: dict[PartitionSpec, tuple[int, ...]] = {}
    for index, leaf in enumerate(leaves.values()):
        groups[leaf.sharding.spec] = (*groups.get(leaf.sharding.spec, ()), index)
    differing_groups = _differing(leaves, tuple(groups.values()))
    if not differing_groups:
        return
    single_arrays = tuple((index,) for index in range(len(leaves)))
    differing = _differing(leaves, single_arrays) or differing_groups
    devices = next(iter(leaves.values())).sharding.mesh.devices.reshape(-1)
    lines = [f"{when}, copies of {len(differing)} of {len(leaves)} arrays differ from most others:"]
    for path, positions in list(differing.items())[:MAX_SHOWN]:
        processes = sorted({devices[position].process_index for position in positions})
        lines.append(
            f"    {path}: devices {', '.join(map(str, positions))} of the mesh (process "
            f"{', '.join(map(str, processes))})"
        )
    if len(differing) > MAX_SHOWN:
        lines.append(f"    and {len(differing) - MAX_SHOWN} more arrays")
    raise ClusterError(
        "\n".join(lines),
        fix="the same seed, weights and data everywhere; if they were equal before, replace a "
        "device or host that computes wrongly.",
    )


def _differing(
    leaves: dict[str, Any], columns: tuple[tuple[int, ...], ...]
) -> dict[str, list[int]]:
    """The mesh positions that differ from the majority, by the names of the arrays of each column
    in which replicas differ.
    """
    paths = list(leaves)
    arrays = list(leaves.values())
    mesh = arrays[0].sharding.mesh
    specs = tuple(leaf.sharding.spec for leaf in arrays)
    # a run may forbid transfers, and this one is intended
    with jax.transfer_guard("allow"):
        # [devices, columns]
        table = np.asarray(_checksum_function(mesh, specs, columns)(*arrays))
    differing = {}
    for column, sums in zip(columns, table.T, strict=True):
        positions = _minority(arrays[column[0]], mesh, sums)
        if positions:
            differing[" or ".join(paths[index] for index in column)] = positions
    return differing


def _minority(leaf: Any, mesh: Mesh, sums: np.ndarray) -> list[int]:
    """Mesh positions whose checksum differs from that of most replicas of the same shard; in a tie,
    from that of the first.
    """
    index_of = leaf.sharding.devices_indices_map(leaf.shape)
    replicas: dict[str, list[int]] = {}
    for position, device in enumerate(mesh.devices.reshape(-1)):
        replicas.setdefault(str(index_of[device]), []).append(position)
    minority = []
    for positions in replicas.values():
        values = [int(sums[position]) for position in positions]
        # `dict.fromkeys` keeps the order, so in a tie the first value wins in every process.
        majority = max(dict.fromkeys(values), key=values.count)
        minority += [
            position for position, value in zip(positions, values, strict=True) if value != majority
        ]
    return sorted(minority)


@functools.lru_cache(maxsize=8)
def _checksum_function(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], columns: tuple[tuple[int, ...], ...]
) -> Any:
    """The compiled function: takes the arrays, returns replicated checksums [devices, columns]; a
    column covers some of the arrays.
    """

    def sums(*shards: jax.Array) -> jax.Array:
        words = list(map(_words, shards))
        checksums = []
        for column in columns:
            checksums.append(_checksum([words[index] for index in column]))
        return jnp.stack(checksums)[None]

    table = shard_map(sums, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(mesh.axis_names))
    return jax.jit(
        table, out_shardings=NamedSharding(mesh, PartitionSpec()), compiler_options=FAST_COMPILE
    )


def _checksum(vectors: list[jax.Array]) -> jax.Array:
    """uint32[]: the sum of all words, each mixed with its index.

    Compiling a kernel for each vector would take long, so all small vectors share one, and so do
    large vectors of the same size.
    """
    small = [vector for vector in vectors if vector.size <= SMALL]
    large = [vector for vector in vectors if vector.size > SMALL]
    if small:
        large.insert(0, jnp.concatenate(small))
    by_size: dict[int, list[jax.Array]] = {}
    for vector in large:
        by_size.setdefault(vector.size, []).append(vector)
    total = jnp.uint32(0)
    first = 0
    for size, vectors_of_size in by_size.items():
        starts = [
            np.uint32((first + index * size) % 2**32) for index in range(len(vectors_of_size))
        ]
        indices = [jnp.arange(size, dtype=jnp.uint32) + start for start in starts]
        mixed = list(map(_mix, vectors_of_size, indices))
        total += jnp.sum(functools.reduce(operator.add, mixed), dtype=jnp.uint32)
        first += size * len(vectors_of_size)
    return total


def _mix(words: jax.Array, indices: jax.Array) -> jax.Array:
    """uint32[n]: the finalizer of MurmurHash3 (Appleby, 2011; public domain) of each word and its
    index; every step is invertible.
    """
    mixed = words ^ (indices * np.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def _words(shard: jax.Array) -> jax.Array:
    """uint32[n]: the bits, so that NaN equals itself and 0.0 is not -0.0."""
    if jnp.issubdtype(shard.dtype, jax.dtypes.prng_key):
        # Typed keys have no bits of their own to cast.
        shard = jax.random.key_data(shard)
    if jnp.issubdtype(shard.dtype, jnp.complexfloating):
        # XLA does not cast the bits of complex numbers to those of integers.
        shard = jnp.stack([shard.real, shard.imag])
    if shard.dtype == bool or shard.dtype.itemsize < 1:
        words = shard.astype(jnp.uint8)
    else:
        # of 64 bits: two words each, in a new last dim
        word = {1: jnp.uint8, 2: jnp.uint16}.get(shard.dtype.itemsize, jnp.uint32)
        words = jax.lax.bitcast_convert_type(shard, word)
    return words.reshape(-1).astype(jnp.uint32)
