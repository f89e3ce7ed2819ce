"""Measures where the time of a run goes: steps and samples per second, waiting for data, and goodput."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from spmd.distributed import watchdog

T = TypeVar("T")


class Throughput:
    """Times a run, on this process.

    Goodput is the share of time spent on steps that are part of the current state, since the run first began (also across restarts by
    `spmd launch` or a scheduler). Compiling, evaluating, saving, restarting and repeating lost steps lower it.

    Args:
      saved: `to_checkpoint()` from the checkpoint that a restarted run continues; None: the run begins now.

    Attributes:
      waited: seconds that the run has waited for data.
    """

    def __init__(self, saved: list[float] | None = None):
        self._trained, self._began = (0.0, time.time()) if saved is None else map(float, saved)
        self.waited = self._not_training = 0.0
        self._first: float | None = None  # when the first step was done
        self._last_record: tuple[int, float, int, float] | None = None  # step, time, samples, waited

    @contextlib.contextmanager
    def not_training(self) -> Iterator[None]:
        """The time spent in the block, as by an evaluation or a save, does not count as training."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._not_training += time.monotonic() - began

    def count_waiting(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; the time spent waiting for each is counted, here and in what the watchdog reports."""
        reader = iter(items)
        while True:
            began = time.monotonic()
            try:
                with watchdog.current().local_work():
                    item = next(reader)
            except StopIteration:
                return
            finally:
                self.waited += time.monotonic() - began
                watchdog.current().data_wait_seconds = self.waited
            yield item

    def step_done(self) -> None:
        """Note that a step is done; timing starts with the first, which includes compilation."""
        if self._first is None:
            self._first, self._not_training = time.monotonic(), 0.0

    def to_checkpoint(self) -> list[float]:
        """Seconds of training so far, and when the run began, to be saved with a checkpoint."""
        spent = 0.0 if self._first is None else time.monotonic() - self._first - self._not_training
        return [round(self._trained + max(spent, 0.0), 3), round(self._began, 3)]

    def rates(self, step: int, samples: int) -> dict[str, float]:
        """Steps and samples per second, the share of time spent waiting for data, all since the last record; and goodput.

        Waiting idles a device only if reading a batch takes longer than a step.

        Args:
          step: steps so far.
          samples: examples so far, over all processes.
        """
        now, previous = time.monotonic(), self._last_record
        self._last_record = (step, now, samples, self.waited)
        if previous is None or now <= previous[1]:
            return {}
        seconds = now - previous[1]
        trained, began = self.to_checkpoint()
        return {
            "steps_per_second": round((step - previous[0]) / seconds, 3),
            "samples_per_second": round((samples - previous[2]) / seconds, 1),
            "data_wait": round(min(max(self.waited - previous[3], 0.0) / seconds, 1.0), 3),
            "goodput": round(min(trained / max(time.time() - began, 1e-9), 1.0), 3),
        }
