"""Find processes that wait for their data while the others do not; every step is as slow as the
slowest process.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

INTERVAL_SECONDS = 30.0  # between two comparisons
MIN_SHARE = 0.2  # the smallest share of time waiting for data that is reported


class StragglerMonitor:
    """A comparison, at intervals, of the time that each process has waited for data."""

    def __init__(self) -> None:
        self._compared_at = time.monotonic()
        self._waits: dict[int, float] = {}

    def due(self) -> bool:
        """Return whether it is time for another comparison."""
        return time.monotonic() - self._compared_at >= INTERVAL_SECONDS

    def warnings(self, beats: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
        """Warnings from the heartbeats of all processes, by rank."""
        now = time.monotonic()
        seconds = now - self._compared_at
        self._compared_at = now
        previous_waits = self._waits
        self._waits = {rank: float(beat["waited"]) for rank, beat in beats.items()}
        shares = {
            rank: (waited - previous_waits[rank]) / seconds
            for rank, waited in self._waits.items()
            if rank in previous_waits
        }
        for rank, share in stragglers(shares).items():
            yield (
                f"process {rank} waits for data {share:.0%} of the time and slows down the others, "
                "which do not"
            )


def stragglers(shares: Mapping[int, float]) -> dict[int, float]:
    """The processes whose share of time waiting for data is large while that of most others is not,
    by rank.

    >>> stragglers({0: 0.02, 1: 0.64, 2: 0.03}), stragglers({0: 0.6, 1: 0.64})
    ({1: 0.64}, {})
    """
    # The median of two is between them, and hides that one of them waits.
    typical = min(shares.values(), default=0.0)
    if len(shares) > 2:
        typical = statistics.median(shares.values())
    least = max(MIN_SHARE, 2 * typical)
    return {rank: share for rank, share in sorted(shares.items()) if share > least}
