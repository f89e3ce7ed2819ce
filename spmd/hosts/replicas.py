"""Are copies that should be equal equal? A checksum of every shard, made on its device, compared over the whole mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.errors import ClusterError
from spmd.tree import Tree, flatten

SHOWN = 8  # arrays that are told


def check_replicas(state: Tree, when: str) -> None:
    """Hold all copies of every piece of every array against each other.

    Each device reads its shards once and sends 4 bytes for each array. A checksum is a sum of all 32-bit words, each times an odd number
    of its own: one word that differs is always found, and order counts.

    Args:
      state: arrays on one mesh.
      when: in words, for the error.

    Raises:
      ClusterError: in all processes: which arrays, and which processes and devices differ from most of the others.
    """
    leaves: dict[str, Any] = {path: leaf for path, leaf in flatten(state).items() if isinstance(leaf, jax.Array) and leaf.size}
    if not leaves:
        return
    mesh = next(iter(leaves.values())).sharding.mesh
    specs = tuple(leaf.sharding.spec for leaf in leaves.values())
    with jax.transfer_guard("allow"):
        table = np.asarray(_summed(mesh, specs)(*leaves.values()))  # [devices, arrays]
    wrong = {path: devices for column, (path, leaf) in enumerate(leaves.items()) if (devices := _odd(leaf, mesh, table[:, column]))}
    if not wrong:
        return
    devices = mesh.devices.reshape(-1)
    lines = []
    for path, places in list(wrong.items())[:SHOWN]:
        processes = sorted({devices[place].process_index for place in places})
        lines.append(f"    {path}: devices {', '.join(map(str, places))} of the mesh (process {', '.join(map(str, processes))})")
    more = [f"    and {len(wrong) - SHOWN} more arrays"] if len(wrong) > SHOWN else []
    text = "\n".join([*lines, *more])
    raise ClusterError(
        f"{when}, copies of {len(wrong)} of {len(leaves)} arrays differ from most others:\n{text}\n"
        "    cure: the same seed, weights and data everywhere; if they were equal before, a device or host that computes wrongly."
    )


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
def _summed(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """The compiled function: arrays in, a checksum [devices, arrays] out, the same on all devices."""

    def sums(*shards: jax.Array) -> jax.Array:
        return jnp.stack([_checksum(shard) for shard in shards])[None]

    table = jax.shard_map(sums, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(mesh.axis_names), check_vma=False)
    return jax.jit(table, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _checksum(shard: jax.Array) -> jax.Array:
    """uint32[]: of the bits, so that NaN equals itself and 0.0 is not -0.0."""
    if jnp.issubdtype(shard.dtype, jax.dtypes.prng_key):
        shard = jax.random.key_data(shard)
    if jnp.issubdtype(shard.dtype, jnp.complexfloating):
        shard = jnp.stack([shard.real, shard.imag])
    if shard.dtype == bool or shard.dtype.itemsize < 1:
        words = shard.astype(jnp.uint8)
    else:
        words = jax.lax.bitcast_convert_type(shard, {1: jnp.uint8, 2: jnp.uint16}.get(shard.dtype.itemsize, jnp.uint32))
    words = words.reshape(-1).astype(jnp.uint32)
    return jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)
