"""Copies a state on its own devices, so that it can be saved while training continues."""

import collections
from typing import Any

import jax
import jax.numpy as jnp

from spmd.train.state import State

HEADROOM = 1.2  # times the size of a copy that must be free on its device


def fits_on_devices(state: State, copies: int = 1) -> bool:
    """Return whether each device of this process has room for copies at its peak usage. A device
    that reports no memory statistics has.
    """
    needed: collections.Counter[Any] = collections.Counter()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            needed[shard.device] += copies * shard.data.nbytes
    for device, size in needed.items():
        # JAX returns None for a device that has no statistics, such as a CPU.
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            continue
        free = stats["bytes_limit"] - stats.get("peak_bytes_in_use", 0)
        if HEADROOM * size > free:
            return False
    return True


class StateCopier:
    """Copies a state into buffers that no step donates, without blocking the host.

    On CPU devices the copy is kept and the next one reuses its memory: mapping new pages would
    double the time of a copy.
    """

    def __init__(self, state: State):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        self._reuse_memory = all(
            device.platform == "cpu" for device in state.step.sharding.device_set
        )
        self._last: State | None = None
        # The previous copy is donated for its memory only. The function never reads it, so that
        # jit would drop the argument, and with it the donation, without `keep_unused`.
        self._copy = jax.jit(
            _copy, out_shardings=(shardings, None), donate_argnums=0, keep_unused=True
        )

    def __call__(self, state: State) -> State:
        """Copy. The copy of the previous call must not be used any more."""
        last = self._last
        # Forgotten before the call: one that is interrupted may have donated it.
        self._last = None
        copy, _ = self._copy(last, state)
        if self._reuse_memory:
            self._last = copy
        return copy


def _copy(last: State | None, state: State) -> tuple[State, jax.Array]:
    """Copy into the memory of `last`, if there is one."""
    del last
    # XLA:CPU runs short programs in the calling thread. This product makes the program long enough
    # to run in another.
    busy = jnp.arange(2048)[:, None] * state.step.reshape(-1)
    return jax.tree.map(jnp.copy, state), busy
