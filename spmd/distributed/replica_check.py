"""Are copies that should be equal equal? A checksum of every shard, made on its device, compared over the whole mesh."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.errors import ClusterError
from spmd.tree import Tree, flatten
from spmd.xla import shard_map

SHOWN = 8  # arrays that are told
SMALL = 65536  # words; shards up to that are weighed as one vector, a copy that no device notices
QUICK = {"xla_backend_optimization_level": 0}  # it runs seldom: a third of the time to compile, four times that to run


def check_replicas(state: Tree, when: str) -> None:
    """Hold all copies of every piece of every array against each other.

    Each device reads its shards once and sends 4 bytes for all arrays that are cut alike; only where these differ it does so again, with
    4 bytes for each array. A checksum is a sum over all 32-bit words, each mixed with its place by a function that can be undone: one
    word that differs is always found, and of copies that differ in more one in 2^32 is not.

    Args:
      state: arrays on one mesh.
      when: in words, for the error.

    Raises:
      ClusterError: in all processes: which arrays, and which processes and devices differ from most of the others.
    """
    leaves: dict[str, Any] = {path: leaf for path, leaf in flatten(state).items() if isinstance(leaf, jax.Array) and leaf.size}
    if not leaves:
        return
    specs = tuple(leaf.sharding.spec for leaf in leaves.values())
    alike = {spec: tuple(place for place, other in enumerate(specs) if other == spec) for spec in specs}
    several = _wrong(leaves, tuple(alike.values()))
    if not several:
        return
    wrong = _wrong(leaves, tuple((place,) for place in range(len(leaves)))) or several
    devices = next(iter(leaves.values())).sharding.mesh.devices.reshape(-1)
    lines = []
    for path, places in list(wrong.items())[:SHOWN]:
        processes = sorted({devices[place].process_index for place in places})
        lines.append(f"    {path}: devices {', '.join(map(str, places))} of the mesh (process {', '.join(map(str, processes))})")
    more = [f"    and {len(wrong) - SHOWN} more arrays"] if len(wrong) > SHOWN else []
    text = "\n".join([*lines, *more])
    raise ClusterError(
        f"{when}, copies of {len(wrong)} of {len(leaves)} arrays differ from most others:\n{text}\n"
        "    fix: the same seed, weights and data everywhere; if they were equal before, a device or host that computes wrongly."
    )


def _wrong(leaves: dict[str, Any], columns: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
    """By the arrays of each column in which copies differ: the places in the mesh where they do."""
    arrays = list(leaves.items())
    mesh = arrays[0][1].sharding.mesh
    specs = tuple(leaf.sharding.spec for leaf in leaves.values())
    with jax.transfer_guard("allow"):
        table = np.asarray(_summed(mesh, specs, columns)(*leaves.values()))  # [devices, columns]
    found = {column: _odd(arrays[column[0]][1], mesh, table[:, at]) for at, column in enumerate(columns)}
    return {" or ".join(arrays[place][0] for place in column): places for column, places in found.items() if places}


def _odd(leaf: Any, mesh: Mesh, sums: np.ndarray) -> list[int]:
    """Places in the mesh whose checksum is not that of most copies of the same piece; of a tie, not that of the first."""
    index_of = leaf.sharding.devices_indices_map(leaf.shape)
    copies: dict[str, list[int]] = {}
    for place, device in enumerate(mesh.devices.reshape(-1)):
        copies.setdefault(str(index_of[device]), []).append(place)
    found = []
    for places in copies.values():
        values = [int(sums[place]) for place in places]
        usual = max(dict.fromkeys(values), key=values.count)
        found += [place for place, value in zip(places, values, strict=True) if value != usual]
    return sorted(found)


@functools.lru_cache(maxsize=8)
def _summed(mesh: Mesh, specs: tuple[PartitionSpec, ...], columns: tuple[tuple[int, ...], ...]) -> Any:
    """The compiled function: arrays in, checksums [devices, columns] out, the same on all devices; a column is of some of the arrays."""

    def sums(*shards: jax.Array) -> jax.Array:
        return jnp.stack([_checksum([_words(shards[place]) for place in column]) for column in columns])[None]

    table = shard_map(sums, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(mesh.axis_names))
    return jax.jit(table, out_shardings=NamedSharding(mesh, PartitionSpec()), compiler_options=QUICK)


def _checksum(vectors: list[jax.Array]) -> jax.Array:
    """uint32[]: the sum of all words, each mixed with its place.

    What takes time is to compile a kernel for each vector, so there is one for all that are small, and one for those of each size.
    """
    small = [vector for vector in vectors if vector.size <= SMALL]
    alike: dict[int, list[jax.Array]] = {}
    for vector in [*([jnp.concatenate(small)] if small else []), *(vector for vector in vectors if vector.size > SMALL)]:
        alike.setdefault(vector.size, []).append(vector)
    total, first = jnp.uint32(0), 0
    for size, same in alike.items():
        mixed = [
            _mixed(vector, jnp.arange(size, dtype=jnp.uint32) + np.uint32((first + at * size) % 2**32)) for at, vector in enumerate(same)
        ]
        total += jnp.sum(functools.reduce(operator.add, mixed), dtype=jnp.uint32)
        first += size * len(same)
    return total


def _mixed(words: jax.Array, places: jax.Array) -> jax.Array:
    """uint32[n]: the last step of MurmurHash3 (Appleby, 2011; public domain), of each word beside its place; each step can be undone."""
    mixed = words ^ (places * np.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def _words(shard: jax.Array) -> jax.Array:
    """uint32[n]: the bits, so that NaN equals itself and 0.0 is not -0.0."""
    if jnp.issubdtype(shard.dtype, jax.dtypes.prng_key):
        shard = jax.random.key_data(shard)
    if jnp.issubdtype(shard.dtype, jnp.complexfloating):
        shard = jnp.stack([shard.real, shard.imag])
    if shard.dtype == bool or shard.dtype.itemsize < 1:
        words = shard.astype(jnp.uint8)
    else:
        words = jax.lax.bitcast_convert_type(shard, {1: jnp.uint8, 2: jnp.uint16}.get(shard.dtype.itemsize, jnp.uint32))
    return words.reshape(-1).astype(jnp.uint32)
