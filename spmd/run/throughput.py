"""Where the time of a run goes: steps and samples per second, waiting for data, and goodput."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from spmd.distributed import watchdog

T = TypeVar("T")


class Throughput:
    """Takes the time of a run, on this process.

    Goodput is the share of time in which steps were made that are in the state now: since the run began, or, where `spmd launch` or a
    scheduler has started it again, since it began at first. Compiling, evaluations, saving, restarts, and steps that had to be made again
    are what it lacks.

    Args:
      carried: `to_checkpoint()` of the checkpoint that a restarted run goes on from; None: the run begins now.

    Attributes:
      waited: seconds that the run has waited for data.
    """

    def __init__(self, carried: list[float] | None = None):
        self._trained, self._began = (0.0, time.time()) if carried is None else map(float, carried)
        self.waited = self._apart = 0.0
        self._first: float | None = None  # when the first step was done
        self._marked: tuple[int, float, int, float] | None = None  # step, time, samples, waited: at the last record

    @contextlib.contextmanager
    def not_training(self) -> Iterator[None]:
        """What happens in the block, an evaluation or a save, is not training."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._apart += time.monotonic() - began

    def count_waiting(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; the time until each is there is counted, here and in this process's sign of life."""
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
        """A step is done."""
        if self._first is None:
            self._first, self._apart = time.monotonic(), 0.0

    def to_checkpoint(self) -> list[float]:
        """Seconds of training so far, and when the run began: for the next checkpoint."""
        spent = 0.0 if self._first is None else time.monotonic() - self._first - self._apart
        return [round(self._trained + max(spent, 0.0), 3), round(self._began, 3)]

    def rates(self, step: int, samples: int) -> dict[str, float]:
        """Steps and samples per second and the share of time that data was waited for, all since the last record; and goodput.

        A device is idle meanwhile only where a batch takes longer than a step.

        Args:
          step: steps so far.
          samples: examples so far, over all processes.
        """
        now, before = time.monotonic(), self._marked
        self._marked = (step, now, samples, self.waited)
        if before is None or now <= before[1]:
            return {}
        seconds = now - before[1]
        trained, began = self.to_checkpoint()
        return {
            "steps_per_second": round((step - before[0]) / seconds, 3),
            "samples_per_second": round((samples - before[2]) / seconds, 1),
            "data_wait": round(min(max(self.waited - before[3], 0.0) / seconds, 1.0), 3),
            "goodput": round(min(trained / max(time.time() - began, 1e-9), 1.0), 3),
        }
