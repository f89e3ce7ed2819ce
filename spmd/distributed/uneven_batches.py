"""Data that each process reads for itself ends in all of them after the same number of batches, or the run ends."""

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from spmd.distributed import coordination, watchdog
from spmd.errors import DataError, RendezvousTimeout

T = TypeVar("T")

_numbers = itertools.count()


def batches(items: Iterable[T], what: str, timeout: float = 1800.0) -> Iterator[T]:
    """The same batches; where the last one was taken, wait until they have ended for all other processes too.

    All processes call it in the same order, and take what it gives in the thread that trains. A process that has more batches is by then
    in a step that waits for those who have none, so it never comes: its guard's sign of life says how many it has taken.

    Args:
      items: this process's part of each batch.
      what: the data, in words.
      timeout: seconds that others may take to read what they have.

    Raises:
      DataError: another process has more, or fewer.
      RendezvousTimeout: one has said nothing for so long.
    """
    if not coordination.started():
        yield from items
        return
    number, taken = next(_numbers), watchdog.current().taken
    count = taken[number] = 0
    for count, batch in enumerate(items, 1):
        taken[number] = count
        yield batch
    with watchdog.current().busy(False):
        _wait_for_all(number, count, what, timeout)


def _wait_for_all(number: int, count: int, what: str, timeout: float) -> None:
    """Until all have ended; each after so many batches."""
    rank, size, _ = coordination.place()
    coordination.put(f"even/{number}/{rank}", str(count))
    pause, until = 0.001, time.monotonic() + timeout
    while True:
        ended = {int(other): int(text) for other, text in coordination.below(f"even/{number}/").items()}
        further = {} if pause < watchdog.LOOK else _further(number, count)
        for other, theirs in sorted((ended | further).items()):
            if theirs != count:
                raise DataError(_uneven(what, {rank: count, other: theirs}, more=other if other in further else None))
        if len(ended) == size:
            del watchdog.current().taken[number]
            return
        if time.monotonic() > until:
            raise RendezvousTimeout(f"{what} has not ended in all processes after {timeout:g} s.", fix="the logs of the others.")
        time.sleep(pause)
        pause = min(2 * pause, watchdog.LOOK)


def _further(number: int, count: int) -> dict[int, int]:
    """By rank, how many batches were taken by those who have taken more, as far as they have told."""
    beats = {int(rank): json.loads(text)["taken"] for rank, text in coordination.below("beat/").items()}
    return {rank: taken[str(number)] for rank, taken in beats.items() if taken.get(str(number), 0) > count}


def _uneven(what: str, counts: dict[int, int], more: int | None) -> str:
    told = [f"{count} {'or more ' if rank == more else ''}in process {rank}" for rank, count in sorted(counts.items())]
    return (
        f"{what} has other numbers of batches in other processes: {', '.join(told)}.\n"
        "    fix: the same number in each, by leaving out rows at the end; or arrays, which every process can index."
    )
