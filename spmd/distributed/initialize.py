"""`join`: connect this process to the others, before JAX looks for devices."""

import dataclasses
import importlib.metadata
import math
import os
import platform
import socket
import sys
from collections.abc import Callable

import jax

from spmd.distributed import coordination, watchdog
from spmd.distributed.detect_cluster import detect
from spmd.distributed.links import local_address
from spmd.distributed.ray_world import detect_ray
from spmd.distributed.rendezvous import ProcessInfo, wait_for_all
from spmd.distributed.secret import with_token
from spmd.distributed.timeouts import StallTimeouts
from spmd.distributed.world import World
from spmd.errors import ClusterError, short_repr

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "spmd")

_joined: World | None = None
# Whether Ray has started this run before, as this process first asked. (Other launchers say so in
# the environment.)
_restarted: bool | None = None


def join(
    world: World | None = None,
    *,
    timeout: float | None = None,
    limits: StallTimeouts | None = None,
) -> World | None:
    """Connect this process to those that train with it; does nothing in a single process.

    Processes wait for each other (`distributed/rendezvous.py`), JAX's coordination service starts
    in process 0, and a watchdog runs from then on (`distributed/watchdog.py`). `fit` calls it. A
    script that uses JAX before `fit`, for example for the number of devices or to build a model,
    calls it first. Calling it again does nothing.

    Args:
      world: the place of this process; None: that of Ray Train's worker, or read from the
        environment that launchers set (`spmd.distributed.detect_cluster.detect`).
      timeout: seconds until all processes must have arrived; None: $SPMD_JOIN_TIMEOUT, or 300.
      limits: how long a phase may make no progress; None: $SPMD_STALL, or 60 s for a step and 1800
        s for any other phase.

    Returns:
      The place of this process; None if it is the only one.

    Raises:
      ClusterError: the processes do not agree; or JAX has looked for devices already; or this
        process has joined with another rank.
      RendezvousTimeout: some processes did not arrive in time.

    Example:
      >>> import spmd
      >>> spmd.join() is None  # in a notebook, or a script on one machine
      True
    """
    global _joined, _restarted
    if _joined is not None:
        if world is not None and world != _joined:
            raise ClusterError(
                f"this process has joined as {_joined}, and cannot join as {world}.",
                fix="one spmd.join() in a process.",
            )
        if limits is not None:
            watchdog.current().timeouts = limits
        return _joined
    if limits is None:
        limits = StallTimeouts.parse(os.environ.get("SPMD_STALL", ""), "$SPMD_STALL: ")
    if coordination.is_initialized():
        return _adopt(world, limits)
    is_detected = world is None
    if is_detected:
        # Ray first: its workers also have the variables of what has started Ray.
        world = detect_ray() or detect()
    if world is None:
        return None
    if _restarted is None:
        _restarted = world.restarted
    if world.size == 1:
        return None
    log = _logger(world.rank)
    if is_detected:
        world = with_token(world, log)
    if coordination.backends_initialized():
        raise ClusterError(
            f"{world}: JAX has looked for devices already, so it cannot see those of other "
            "processes.",
            fix="spmd.join() at the top of the script, before the first array.",
        )
    log(str(world))
    info = ProcessInfo(
        world.rank, world.size, f"{socket.gethostname()} (process id {os.getpid()})", _facts()
    )
    if timeout is None:
        timeout = _join_timeout()
    address, links = wait_for_all(world, info, timeout=timeout, log=log)
    coordination.initialize(world, address, timeout, local_address(links))
    watchdog.start(world.rank, world.size, limits, log, links)
    _joined = world
    return world


def _adopt(world: World | None, limits: StallTimeouts) -> World:
    """Return the place of a process that is connected already: by the user's own call of
    `jax.distributed.initialize`, or by Ray's, with `use_gpu` of its JaxConfig.
    """
    global _joined, _restarted
    rank, size, address = coordination.process_info()
    connected = World(rank, size, address, "jax.distributed")
    ray = detect_ray()
    if ray is not None:
        _restarted = ray.restarted
        connected = dataclasses.replace(connected, source=ray.source, token=ray.token)
    _joined = world or connected
    watchdog.start(rank, size, limits, _logger(rank))
    return _joined


def _join_timeout() -> float:
    text = os.environ.get("SPMD_JOIN_TIMEOUT") or "300"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ClusterError(
            f"$SPMD_JOIN_TIMEOUT is {short_repr(text)}.", fix="seconds, such as 300."
        )
    return seconds


def job_token() -> str:
    """The secret of this job's processes; "" if there is none, or only one process."""
    return "" if _joined is None else _joined.token


def was_restarted() -> bool:
    """Return whether `spmd launch`, SLURM, torchrun or Ray has started this process again, after a
    failure or a requeue: a run resumes from its checkpoint.
    """
    names = ("SPMD_ATTEMPT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return bool(_restarted) or any(os.environ.get(name, "0") != "0" for name in names)


def was_requeued() -> bool:
    """Return whether a scheduler has started the launcher itself again, so that earlier attempts
    had another launcher.
    """
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def attempt_times() -> list[float]:
    """Seconds since 1970, from `spmd launch`: its start, then start and end of each attempt, and
    the start of this one. Empty without it, and if they are not such times.

    An attempt ends with its first failure, as far as that is known, or with its last process.
    """
    try:
        times = [float(word) for word in os.environ.get("SPMD_TIMES", "").split()]
    except ValueError:
        return []
    if len(times) % 2 or not all(map(math.isfinite, times)):
        return []
    return times


def grace_seconds() -> float:
    """Seconds to save and exit after SIGTERM, from `spmd launch --grace`; infinity where that is
    not known.
    """
    try:
        return float(os.environ.get("SPMD_GRACE", "inf"))
    except ValueError:
        return math.inf


def shrink_factor() -> int:
    """The factor by which the number of processes has shrunk since `spmd launch` began, rounded up:
    1 unless a host did not come back.
    """
    return -(-int(os.environ.get("SPMD_FULL", "1")) // jax.process_count())


def _logger(rank: int) -> Callable[[str], None]:
    def log(text: str) -> None:
        # Ray Train replaces `print` in its workers, and shows each line twice.
        sys.stderr.write(f"spmd {rank}: {text}\n")
        sys.stderr.flush()

    return log


def _facts() -> dict[str, str]:
    """Versions and settings that must be the same everywhere for programs to be the same."""
    facts = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["jax_enable_x64"] = str(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    return facts
