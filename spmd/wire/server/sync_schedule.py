"""The steps in which local SGD workers synchronize with the servers: modes "local" and
"elastic".
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.schedule import Round
from spmd.wire.server.times import Times


def sync_steps(
    declared: ParameterServer,
    workers: int,
    times: Times,
    send: float,
    receive: float,
    latency: float,
) -> Iterator[Round]:
    """One round for each step of the workers, without end.

    A worker waits only for the reply of the servers, which is sent when the last worker's
    parameters have arrived.

    Args:
      send, receive: seconds that all parameters of one worker take on a server's link, inwards and
        outwards. All fragments are assumed to be of equal size.
    """
    now = np.zeros(workers)
    number = 0
    replies = np.zeros(declared.fragments)  # when each fragment is back at the workers
    network = workers * (send + receive) / declared.fragments + 2 * latency
    while True:
        seconds = np.array([times.of(worker, number) for worker in range(workers)])
        number += 1
        done = now + seconds
        order = np.argsort(done, kind="stable")
        new_round = Round.empty(workers)
        new_round.worker[:] = order
        new_round.staleness[:] = 0
        new_round.takes[:] = True
        new_round.present[:] = True
        new_round.applied[:] = True
        new_round.began[:] = now[order]
        new_round.done[:] = done[order]
        new_round.time[:] = done[order]
        sends = due_fragments(declared, number)
        receives = due_fragments(declared, number - declared.overlap)
        replies[sends] = done.max() + network
        now = np.maximum(done, replies[receives].max(initial=0.0))
        end = float(now.max())
        yield dataclasses.replace(new_round, sends=sends, receives=receives, end=end)


def due_fragments(declared: ParameterServer, number: int) -> np.ndarray:
    """bool[fragments]: which fragments are synchronized after step `number`. They take turns, each
    once in `every` steps.

    >>> [
    ...     due_fragments(ParameterServer(mode="local", every=4, fragments=2), number).tolist()
    ...     for number in (1, 2, 3, 4)
    ... ]
    [[False, False], [True, False], [False, False], [False, True]]
    """
    return (_since(declared, number) == 0) & (number > 0)


def unsynced_steps(declared: ParameterServer, steps: int) -> int:
    """Number of steps since the last synchronization, for the fragment where that is longest ago.

    >>> [unsynced_steps(ParameterServer(mode="local", every=4), steps) for steps in (3, 4, 5, 8)]
    [3, 0, 1, 0]
    """
    return int(np.minimum(_since(declared, steps), steps).max())


def has_pending_sync(declared: ParameterServer, steps: int) -> bool:
    """Return whether after `steps` steps the workers have sent a fragment whose reply they have not
    received yet.

    >>> [
    ...     has_pending_sync(ParameterServer(mode="local", every=4, overlap=1), steps)
    ...     for steps in (3, 4, 5)
    ... ]
    [False, True, False]
    """
    return any(due_fragments(declared, steps - ago).any() for ago in range(declared.overlap))


def _since(declared: ParameterServer, number: int) -> np.ndarray:
    """int[fragments]: steps since each fragment's turn."""
    every = declared.every or 1
    turns = np.arange(1, declared.fragments + 1) * (every // declared.fragments)
    return (number - turns) % every
