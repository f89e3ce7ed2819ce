"""JAX's coordination service. Everything private to JAX that concerns several processes is in this
file.

The service runs in process 0 and stores short texts by path; all processes see the same ones.
Tested with each supported release of JAX (`tests/distributed/test_coordination.py`).
"""

import contextlib
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax._src import compiler, distributed, xla_bridge
from jax._src.lib import _jax

from spmd.distributed.world import World
from spmd.errors import ClusterError

ROOT = "spmd/"
# Of one call, which Python cannot interrupt: Ctrl-C and SIGTERM are handled between two.
MAX_WAIT_MS = 1000
# seconds: without a heartbeat to the service; and for all to reach their end. JAX aborts a process
# half of the first to all of it after a host is lost, so more than `links.LOST_SECONDS`, and the
# seconds to exit, are below the half.
HEARTBEAT_TIMEOUT, SHUTDOWN_TIMEOUT = 60, 300
EXIT_SECONDS = 2.0  # for what is done in `exit_now`
_before_exit: list[Callable[[], None]] = []


def is_initialized() -> bool:
    """Return whether JAX runs as one of several processes."""
    return jax.distributed.is_initialized() and distributed.global_state.num_processes > 1


def backends_initialized() -> bool:
    """Return whether JAX has looked for devices already; it never sees those of processes that join
    later.
    """
    return xla_bridge.backends_are_initialized()


def initialize(world: World, address: str, timeout: float, local_address: str) -> None:
    """Start the service (in process 0, at that address only), and connect to it. Python keeps
    handling SIGTERM.

    Gloo, by which CPUs communicate, listens at `local_address`.
    """
    # JAX's preemption service would swallow SIGTERM
    jax.config.update("jax_enable_preemption_service", False)
    _listen_at(local_address)
    _use_no_proxy(address.rpartition(":")[0].strip("[]"))
    jax.distributed.initialize(
        address,
        world.size,
        world.rank,
        local_device_ids=world.local_devices,
        # JAX would otherwise look for a cluster itself to fill in what is None, such as the
        # devices.
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(timeout)),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
        # By default the service listens on all interfaces, and accepts any process that connects.
        coordinator_bind_address=address,
    )


class _Jaxlib:
    """JAX's compiled module, as the maker of the CPU's client sees it."""

    def __init__(self, address: str):
        self._module = _jax
        self._address = address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def make_gloo_tcp_collectives(self, distributed_client: Any) -> Any:
        """Gloo, at this process's address."""
        return self._module.make_gloo_tcp_collectives(distributed_client, hostname=self._address)


def _listen_at(address: str) -> None:
    """Let Gloo listen at an address, since JAX's own choice is that of the host's name.

    Debian's /etc/hosts gives the name 127.0.1.1, where other hosts connect to themselves; other
    names do not resolve.
    """
    # make_cpu_client has no option for Gloo's address, and looks the function up in
    # xla_bridge._jax.
    xla_bridge._jax = _Jaxlib(address)  # type: ignore[attr-defined]


def _use_no_proxy(host: str) -> None:
    """Let gRPC connect to the service directly: it uses the proxy of $https_proxy even for
    127.0.0.1, and hangs silently.
    """
    # gRPC reads no_grpc_proxy first, and no_proxy only if there is none
    hosts = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [hosts, host]))
    # JAX would warn that the proxy may make it hang, which it no longer can
    jax.config.update("jax_check_proxy_envs", False)


def process_info() -> tuple[int, int, str]:
    """This process's rank, the number of processes, and the service's address; uses no device."""
    state = distributed.global_state
    return state.process_id, state.num_processes, state.coordinator_address or ""


class _Writer:
    """The state of the service, as the process that writes to the compilation cache sees it."""

    process_id = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed.global_state, name)


def write_programs_in_every_process() -> None:
    """Let every process write to JAX's compilation cache.

    JAX lets only process 0 write. On CPUs the others would never find a program: there its key
    depends on the process.
    """
    compiler.distributed = types.SimpleNamespace(global_state=_Writer())  # type: ignore[attr-defined]


def put(path: str, text: str) -> None:
    """Store a text, in place of an earlier one at this path."""
    _client().key_value_set(ROOT + path, text, allow_overwrite=True)


def get(path: str, timeout: float) -> str:
    """Wait for a text.

    Raises:
      TimeoutError: nothing was stored in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        # At least 1: a text that is stored already must be returned when no time is left.
        milliseconds = max(1, min(MAX_WAIT_MS, int(1000 * remaining)))
        try:
            return _client().blocking_key_value_get(ROOT + path, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            # XLA's status is only in the text of the error
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if remaining <= 0:
                raise TimeoutError(f"{path} was not set within {timeout:g} s") from None


def read_dir(path: str) -> dict[str, str]:
    """All texts under a path that ends in "/", by their paths below it."""
    root = ROOT + path
    return {key.removeprefix(root): text for key, text in _client().key_value_dir_get(root)}


def delete(path: str) -> None:
    """Remove a text."""
    _client().key_value_delete(ROOT + path)


def shutdown() -> None:
    """Wait at JAX's barrier until all processes are done, then stop the service."""
    jax.distributed.shutdown()


def before_exit(function: Callable[[], None]) -> None:
    """Call this function in `exit_now`, which skips what Python calls at its end. It must be short,
    and may be called by any thread.
    """
    _before_exit.append(function)


def exit_now(code: int) -> NoReturn:
    """End this process immediately, without waiting for others at JAX's barrier."""
    try:
        # A file system that is away must not keep this process.
        timer = threading.Timer(EXIT_SECONDS, os._exit, [code])
        timer.daemon = True
        timer.start()
        for function in _before_exit:
            with contextlib.suppress(Exception):
                function()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ClusterError(
            "this process is not part of a cluster.", fix="spmd.join() first, or `spmd launch`."
        )
    return client
