"""When workers who train by themselves meet at the servers: modes "local" and "elastic"."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from spmd.comm.server.clock import Times
from spmd.comm.server.schedule import Round
from spmd.layout.server import ParameterServer


def meetings(declared: ParameterServer, workers: int, times: Times, push: float, pull: float, latency: float) -> Iterator[Round]:
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
    every = declared.every or 1
    turns = (np.arange(declared.fragments) + 1) * (every // declared.fragments)
    return np.asarray(number % every == turns % every) if number > 0 else np.zeros(declared.fragments, bool)
