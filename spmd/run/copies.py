"""Copies of a state on its own devices: what is saved while the steps go on."""

import collections
from typing import Any

import jax
import jax.numpy as jnp

ROOM = 1.2  # of a copy's bytes that must be free on its device

Arrays = dict[str, Any]


def has_room_for(arrays: Arrays) -> bool:
    """Whether each device of this process has room for a copy, whatever a step needs; told nothing, as of host memory, it has."""
    wanted: collections.Counter[Any] = collections.Counter()
    for leaf in arrays.values():
        for shard in leaf.addressable_shards:
            wanted[shard.device] += shard.data.nbytes
    told = [(size, device.memory_stats() or {}) for device, size in wanted.items()]
    return all(ROOM * size <= stats["bytes_limit"] - stats.get("peak_bytes_in_use", 0) for size, stats in told if "bytes_limit" in stats)


class Copier:
    """Copies arrays into places that no step's donation reaches, while the host goes on.

    On CPU devices the copies stay, and the next take their memory: where pages must be mapped first, a copy takes twice the time.
    """

    def __init__(self, arrays: Arrays):
        places = {path: leaf.sharding for path, leaf in arrays.items()}
        self._stay = all(device.platform == "cpu" for device in arrays["step"].sharding.device_set)
        self._last: Arrays | None = None
        self._copy = jax.jit(_copy, out_shardings=(places, None), donate_argnums=0, keep_unused=True)

    def __call__(self, arrays: Arrays) -> Arrays:
        """Nobody may need the copies of the call before any more."""
        last, self._last = self._last, None  # a call that is interrupted may have donated them
        copies, _ = self._copy(last, arrays)
        self._last = copies if self._stay else None
        return copies


def _copy(last: Arrays | None, arrays: Arrays) -> tuple[Arrays, jax.Array]:
    """Into the memory of `last`, where there is some; and work, for XLA:CPU runs short programs in the thread that calls."""
    busy = jnp.arange(2048)[:, None] * arrays["step"].reshape(-1)
    return jax.tree.map(jnp.copy, arrays), busy
