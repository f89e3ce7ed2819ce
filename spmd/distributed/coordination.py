"""JAX's coordination service as we use it. All that is private to JAX and has to do with several processes is in this file.

The service runs in process 0 and keeps short texts under paths; all processes see the same ones. Tested with each release of JAX that
is supported (`tests/distributed/test_launch.py`).
"""

import os
import sys
import time
from typing import Any, NoReturn

import jax
from jax._src import distributed, xla_bridge

from spmd.errors import ClusterError

ROOT = "spmd/"
SLICE = 1000  # milliseconds that one wait takes at most: one that cannot be interrupted


def started() -> bool:
    """Whether this process is one of several that JAX knows of."""
    return jax.distributed.is_initialized() and distributed.global_state.num_processes > 1


def too_late() -> bool:
    """Whether JAX has looked for devices already; what it found then is all that it will ever know."""
    return xla_bridge.backends_are_initialized()


def start(
    address: str, rank: int, size: int, *, devices: tuple[int, ...] | None, timeout: float, heartbeat: float, shutdown: float
) -> None:
    """Begin the service (in process 0, at that address only), and join it. SIGTERM stays with Python."""
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and nobody hears of it
    jax.distributed.initialize(
        address,
        size,
        rank,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(timeout)),
        heartbeat_timeout_seconds=max(1, round(heartbeat)),
        shutdown_timeout_seconds=max(1, round(shutdown)),
        coordinator_bind_address=address,
    )


def place() -> tuple[int, int, str]:
    """Rank of this process, how many there are, and the service's address; asks no device."""
    state = distributed.global_state
    return state.process_id, state.num_processes, state.coordinator_address or ""


def put(path: str, text: str) -> None:
    """Keep a text; the newest of a path is kept."""
    _client().key_value_set(ROOT + path, text, allow_overwrite=True)


def get(path: str, timeout: float) -> str:
    """A text, as soon as it is there.

    Raises:
      TimeoutError: it is not, in so many seconds.
    """
    until = time.monotonic() + timeout
    while True:
        left = until - time.monotonic()
        try:
            return _client().blocking_key_value_get(ROOT + path, max(1, min(SLICE, int(1000 * left))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if left <= 0:
                raise TimeoutError(f"{path} is not there after {timeout:g} s") from None


def below(path: str) -> dict[str, str]:
    """All texts under a path that ends in "/", by what comes after it."""
    root = ROOT + path
    return {key.removeprefix(root): text for key, text in _client().key_value_dir_get(root)}


def shutdown() -> None:
    """Wait at JAX's barrier for all to come to their end; the service is gone then."""
    jax.distributed.shutdown()


def leave(code: int) -> NoReturn:
    """End this process at once, without waiting for others at JAX's barrier."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ClusterError("this process is alone.", fix="spmd.join() first, or `spmd launch`.")
    return client
