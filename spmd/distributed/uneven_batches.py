"""Check that data which each process reads for itself ends in all processes after the same number
of batches; otherwise the run fails.
"""

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from spmd.distributed import coordination, watchdog
from spmd.errors import DataError, RendezvousTimeout

T = TypeVar("T")

_call_numbers = itertools.count()


def require_equal_counts(
    items: Iterable[T], data_name: str, timeout: float = 1800.0
) -> Iterator[T]:
    """Yield the same batches; after the last one, wait until the data has ended in all other
    processes too.

    All processes call it in the same order, and iterate in the thread that trains. A process with
    extra batches blocks in a collective that the others never join, so it cannot report here: the
    heartbeat of its watchdog says how many batches it has taken.

    Args:
      items: this process's part of each batch.
      data_name: the data, in words.
      timeout: seconds that other processes may take to read their data.

    Raises:
      DataError: another process has more, or fewer.
      RendezvousTimeout: a process has not reported its count in time.
    """
    if not coordination.is_initialized():
        yield from items
        return
    number = next(_call_numbers)
    counts = watchdog.current().batches_taken
    count = counts[number] = 0
    for count, batch in enumerate(items, 1):
        counts[number] = count
        yield batch
    with watchdog.current().local_work(False):
        _wait_for_all(number, count, data_name, timeout)


def _wait_for_all(number: int, count: int, data_name: str, timeout: float) -> None:
    """Wait until the data has ended in all processes, and compare the counts."""
    rank, size, _ = coordination.process_info()
    coordination.put(f"even/{number}/{rank}", str(count))
    pause = 0.001
    deadline = time.monotonic() + timeout
    while True:
        counts = {
            int(other): int(text)
            for other, text in coordination.read_dir(f"even/{number}/").items()
        }
        ahead = {}
        # Heartbeats are written no more often.
        if pause >= watchdog.POLL_SECONDS:
            ahead = _processes_ahead(number, count)
        for other, other_count in sorted((counts | ahead).items()):
            if other_count != count:
                shown = f"{other_count} or more" if other in ahead else str(other_count)
                pair = sorted({rank: str(count), other: shown}.items())
                listed = ", ".join(f"{batches} in process {process}" for process, batches in pair)
                raise DataError(
                    f"{data_name} has a different number of batches in each process: {listed}.",
                    fix="the same number in each, by leaving out rows at the end; or arrays, which "
                    "every process can index.",
                )
        if len(counts) == size:
            del watchdog.current().batches_taken[number]
            return
        if time.monotonic() > deadline:
            raise RendezvousTimeout(
                f"{data_name} has not ended in all processes after {timeout:g} s.",
                fix="the logs of the others.",
            )
        time.sleep(pause)
        pause = min(2 * pause, watchdog.POLL_SECONDS)


def _processes_ahead(number: int, count: int) -> dict[int, int]:
    """By rank, the batches taken so far by processes that have taken more than `count`."""
    ahead = {}
    for rank, text in coordination.read_dir("beat/").items():
        other_count = json.loads(text)["taken"].get(str(number), 0)
        if other_count > count:
            ahead[int(rank)] = other_count
    return ahead
