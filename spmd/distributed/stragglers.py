"""Processes that wait for their data while the others do not: all are as slow as they are."""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

COMPARED = 30.0  # seconds between two comparisons
SLOW = 0.2  # the share of time from which it is reported that a process waits for data


class Comparison:
    """Compares processes again and again, by the seconds that each has waited for data so far."""

    def __init__(self) -> None:
        self._at, self._waits = time.monotonic(), dict[int, float]()

    def due(self) -> bool:
        """Whether it is time for another."""
        return time.monotonic() - self._at >= COMPARED

    def lines(self, beats: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
        """What there is to say, from the signs of life of all processes, by rank."""
        now, before = time.monotonic(), self._waits
        self._waits = {rank: float(beat["waited"]) for rank, beat in beats.items()}
        seconds, self._at = now - self._at, now
        shares = {rank: (waited - before[rank]) / seconds for rank, waited in self._waits.items() if rank in before}
        for rank, share in stragglers(shares).items():
            yield f"process {rank} waits for data {share:.0%} of the time, others do not: all are as slow as it is"


def stragglers(shares: Mapping[int, float]) -> dict[int, float]:
    """Of the shares of time that processes wait for data, by rank, those that are large where most are not.

    >>> stragglers({0: 0.02, 1: 0.64, 2: 0.03}), stragglers({0: 0.6, 1: 0.64})
    ({1: 0.64}, {})
    """
    usual = statistics.median(shares.values()) if len(shares) > 2 else min(shares.values(), default=0.0)
    return {rank: share for rank, share in sorted(shares.items()) if share > max(SLOW, 2 * usual)}
