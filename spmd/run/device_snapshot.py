"""Copies of a state on its own devices: what is saved while the steps go on."""

import collections
from typing import Any

import jax
import jax.numpy as jnp

from spmd.train.state import State

ROOM = 1.2  # of a copy's bytes that must be free on its device


def fits_on_devices(state: State) -> bool:
    """Whether each device of this process has room for a copy, whatever a step needs; told nothing, as of host memory, it has."""
    wanted: collections.Counter[Any] = collections.Counter()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            wanted[shard.device] += shard.data.nbytes
    told = [(size, device.memory_stats() or {}) for device, size in wanted.items()]
    return all(ROOM * size <= stats["bytes_limit"] - stats.get("peak_bytes_in_use", 0) for size, stats in told if "bytes_limit" in stats)


class StateCopier:
    """Copies a state into places that no step's donation reaches, while the host goes on.

    On CPU devices the copy stays, and the next takes its memory: where pages must be mapped first, a copy takes twice the time.
    """

    def __init__(self, state: State):
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        self._stay = all(device.platform == "cpu" for device in state.step.sharding.device_set)
        self._last: State | None = None
        self._copy = jax.jit(_copy, out_shardings=(places, None), donate_argnums=0, keep_unused=True)

    def __call__(self, state: State) -> State:
        """Nobody may need the copy of the call before any more."""
        last, self._last = self._last, None  # a call that is interrupted may have donated them
        copy, _ = self._copy(last, state)
        self._last = copy if self._stay else None
        return copy


def _copy(last: State | None, state: State) -> tuple[State, jax.Array]:
    """Into the memory of `last`, where there is some; and work, for XLA:CPU runs short programs in the thread that calls."""
    busy = jnp.arange(2048)[:, None] * state.step.reshape(-1)
    return jax.tree.map(jnp.copy, state), busy
