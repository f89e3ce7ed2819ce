"""`join`: this process takes its place among the others, before JAX looks for devices."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable

import jax

from spmd.distributed import coordination, watchdog
from spmd.distributed.detect_cluster import World, detect
from spmd.distributed.rendezvous import Card, call_roll
from spmd.distributed.secret import with_token
from spmd.distributed.timeouts import Limits
from spmd.errors import ClusterError

HEARTBEAT, SHUTDOWN = 30.0, 300.0  # seconds: of a process that says nothing; and for all to reach their end
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "spmd")

_joined: World | None = None


def join(world: World | None = None, *, timeout: float = 300.0, limits: Limits | None = None) -> World | None:
    """Take this process's place among those that train together; alone, do nothing.

    Processes meet (`distributed/rendezvous.py`), JAX's coordination service begins in process 0, and a guard watches from then on
    (`distributed/watchdog.py`). `fit` calls it; a script calls it first where it asks JAX for anything before `fit`, such as the number of
    devices, or a model's arrays. To call it again does nothing.

    Args:
      world: who this is; None: as the environment has it: `spmd launch`, SLURM, Kubernetes, Open MPI, and others
        (`spmd.distributed.detect_cluster.detect`).
      timeout: seconds until all others must be there.
      limits: how long a phase may make no progress; None: $SPMD_STALL, or 60 s for a step and 1800 for all else.

    Returns:
      Who this process is; None when it is alone.

    Raises:
      ClusterError: the others do not fit; or JAX has looked for devices already; or this process has joined as somebody else.
      RendezvousTimeout: the others did not come.

    Example:
      >>> import spmd
      >>> spmd.join() is None  # in a notebook, or a script on one machine
      True
    """
    global _joined
    if _joined is not None:
        if world is not None and world != _joined:
            raise ClusterError(f"this is {_joined} already, and cannot become {world}.", fix="one spmd.join() in a process.")
        if limits is not None:
            watchdog.limit(limits)
        return _joined
    limits = Limits.parse(os.environ.get("SPMD_STALL", ""), "$SPMD_STALL: ") if limits is None else limits
    if coordination.started():  # by the user's own jax.distributed.initialize
        rank, size, address = coordination.place()
        _joined = world or World(rank, size, address, "jax.distributed")
        watchdog.watch(rank, size, limits, _say(rank))
        return _joined
    given = world is not None
    world = detect() if world is None else world
    if world is None or world.size == 1:
        return None
    say = _say(world.rank)
    world = world if given or "SPMD_TOKEN" in os.environ else with_token(world, say)
    if coordination.too_late():
        raise ClusterError(
            f"{world}: JAX has looked for devices already, so it will never see those of other processes.\n"
            "    fix: spmd.join() at the top of the script, before the first array."
        )
    say(str(world))
    address = call_roll(world, Card(world.rank, world.size, watchdog.host(), _facts()), timeout=timeout, say=say)
    coordination.start(
        address, world.rank, world.size, devices=world.local_devices, timeout=timeout, heartbeat=HEARTBEAT, shutdown=SHUTDOWN
    )
    watchdog.watch(world.rank, world.size, limits, say)
    _joined = world
    return world


def restarted() -> bool:
    """Whether this process was started again, by `spmd launch` after a failure, or by SLURM, which has put its job back into the queue:
    a run goes on with what it has saved."""
    return any(os.environ.get(name, "0") != "0" for name in ("SPMD_ATTEMPT", "SLURM_RESTART_COUNT"))


def shrunk() -> int:
    """How many times as many processes there were when `spmd launch` began, rounded up: 1 unless a host did not come back."""
    return -(-int(os.environ.get("SPMD_FULL", "1")) // jax.process_count())


def _say(rank: int) -> Callable[[str], None]:
    return lambda text: print(f"spmd {rank}: {text}", file=sys.stderr, flush=True)


def _facts() -> dict[str, str]:
    """What must be the same everywhere for programs to be the same."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["jax_enable_x64"] = str(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    return found
