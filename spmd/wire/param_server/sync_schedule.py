"""When workers who train by themselves meet at the servers: modes "local" and "elastic"."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from spmd.layout.server import ParameterServer
from spmd.wire.param_server.clock import Times
from spmd.wire.param_server.schedule import Round


def sync_steps(declared: ParameterServer, workers: int, times: Times, push: float, pull: float, latency: float) -> Iterator[Round]:
    """One round for each step of the workers, without end.

    Nobody waits, but where it has to take back what it has sent: that comes when the last worker's push is in, and over the network.

    Args:
      push, pull: seconds that all parameters of one worker take on a server's link, inwards and outwards. Fragments are taken for equal.
    """
    now, number = np.zeros(workers), 0
    returns = np.zeros(declared.fragments)  # when each fragment is back at the workers
    network = workers * (push + pull) / declared.fragments + 2 * latency
    while True:
        number += 1
        done = now + np.array([times.of(worker, number - 1) for worker in range(workers)])
        order = np.argsort(done, kind="stable")
        found = Round.empty(workers)
        found.worker[:], found.staleness[:] = order, 0
        found.takes[:] = found.present[:] = found.applied[:] = True
        found.began[:], found.done[:], found.time[:] = now[order], done[order], done[order]
        sends, receives = due(declared, number), due(declared, number - declared.overlap)
        returns[sends] = done.max() + network
        now = np.maximum(done, returns[receives].max(initial=0.0))
        yield dataclasses.replace(found, sends=sends, receives=receives, end=float(now.max()))


def due(declared: ParameterServer, number: int) -> np.ndarray:
    """bool[fragments]: which of them meet after this many steps. They take turns, and each has its own once in `every` steps.

    >>> [due(ParameterServer(mode="local", every=4, fragments=2), number).tolist() for number in (1, 2, 3, 4)]
    [[False, False], [True, False], [False, False], [False, True]]
    """
    return (_since(declared, number) == 0) & (number > 0)


def unsynced_steps(declared: ParameterServer, steps: int) -> int:
    """How many steps of the workers the servers have not heard of, of the parameters that met longest ago.

    >>> [unsynced_steps(ParameterServer(mode="local", every=4), steps) for steps in (3, 4, 5, 8)]
    [3, 0, 1, 0]
    """
    return int(np.minimum(_since(declared, steps), steps).max())


def has_pending_sync(declared: ParameterServer, steps: int) -> bool:
    """Whether something has been sent after so many steps that nobody has taken back yet.

    >>> [has_pending_sync(ParameterServer(mode="local", every=4, overlap=1), steps) for steps in (3, 4, 5)]
    [False, True, False]
    """
    return any(due(declared, steps - ago).any() for ago in range(declared.overlap))


def _since(declared: ParameterServer, number: int) -> np.ndarray:
    """int[fragments]: steps since each one's turn."""
    every = declared.every or 1
    return np.array([(number - turn * (every // declared.fragments)) % every for turn in range(1, declared.fragments + 1)])
