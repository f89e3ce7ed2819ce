"""The end of a run: as planned, when a callback asks, or after a signal. Callbacks reach it through
`info`.
"""

import logging
import math
from typing import Any

import jax

from spmd.distributed import watchdog
from spmd.distributed.initialize import grace_seconds
from spmd.run.callback_calls import ReadOnlyMetrics, notify
from spmd.run.callbacks import Info
from spmd.run.config import LoopParts, RunState
from spmd.run.loggers import write_record
from spmd.run.pictures import FOLDER, unused_name, write_picture
from spmd.run.signals import SIGINT_REASON, SIGTERM_REASON


class RunControl:
    """Stops the run, and notifies callbacks of its events."""

    def __init__(self, parts: LoopParts, run: RunState):
        self.parts = parts
        self.run = run
        self.watchdog = watchdog.current()
        self.last_step = parts.config.steps
        self._notified_stop = False
        self._signalled_at: float | None = None
        # A warning says once that there is no folder for pictures.
        self._noted_pictures = False
        # The step of the newest picture, and the names of all pictures of that step.
        self._pictures: tuple[int, set[str]] = (-1, set())

    def stop(self, reason: str) -> None:
        """Stop after the current step. Every process must call this at the same step; use `ask`
        where only one process knows.
        """
        self.run.stop_reason = self.watchdog.local_stop_reason = self.run.stop_reason or reason

    def ask(self, reason: str) -> None:
        """Stop soon, all processes after the same step."""
        self._signalled_at = self._signalled_at or self.run.account.now()
        self.watchdog.request_stop(reason)

    def stop_at(self, step: int) -> None:
        """Stop after this many updates; immediately if there were more already."""
        if self.last_step is None:
            self.last_step = step
        else:
            self.last_step = min(step, self.last_step)

    def should_stop(self) -> bool:
        """Return whether the run stops here, between two steps, before its planned end."""
        if self.run.stop_reason is None and self.watchdog.should_stop(self.run.step):
            self.run.stop_reason = self.watchdog.stop_reason
            # Where another process has received the signal, this one knows of it only now.
            self._signalled_at = self._signalled_at or self.run.account.now()
        return self.run.stop_reason is not None

    def seconds_left(self) -> float:
        """Return the seconds that are left to save after SIGTERM; infinity if there was none, or
        the time is not known.
        """
        if self.run.stop_reason != SIGTERM_REASON or self._signalled_at is None:
            return math.inf
        return grace_seconds() - (self.run.account.now() - self._signalled_at)

    def stopped_by_signal(self) -> bool:
        """Return whether a signal stops the run: then it must hurry, since the sender follows up
        with one that cannot be handled.
        """
        return self.should_stop() and self.run.stop_reason in (SIGINT_REASON, SIGTERM_REASON)

    def stops_evaluation(self, batch: int) -> bool:
        """Return whether a signal ends an evaluation before this batch, from 1: finishing it could
        use up the time left to save.
        """
        if not self.watchdog.should_stop(self.run.step, batch):
            return False
        return self.watchdog.stop_reason in (SIGINT_REASON, SIGTERM_REASON)

    def steps_done(self) -> bool:
        """Return whether the planned number of steps is reached."""
        return self.last_step is not None and self.run.step >= self.last_step

    def finished(self) -> bool:
        """Return whether the run is at its planned end, in steps or in epochs."""
        epochs = self.parts.config.epochs
        return self.steps_done() or (epochs is not None and self.run.position.epoch >= epochs)

    def total_steps(self) -> int | None:
        """Return the steps of the complete run; None where the length of an epoch is not known."""
        if self.last_step is not None:
            return self.last_step
        per_epoch = self.parts.source.steps_per_epoch
        epochs = self.parts.config.epochs
        if per_epoch is None or epochs is None:
            return None
        return per_epoch * epochs

    def log_picture(
        self, step: int, epoch: int, name: str, picture: Any, source: str | None = None
    ) -> None:
        """Write a picture of a step to the run's folder, and a record that names it to all loggers;
        `source`: see `write_picture`.
        """
        if self.parts.store is None:
            if not self._noted_pictures:
                self._noted_pictures = True
                text = (
                    'log_picture("%s"): the run has no folder to keep pictures in: none is '
                    "logged.\n    fix: fit(checkpoint=...)."
                )
                logging.getLogger("spmd").warning(text, name)
            return
        # All processes call this, and one writes to the folder that they share.
        if jax.process_index() != 0:
            return
        if self._pictures[0] != step:
            self._pictures = (step, set())
        names = self._pictures[1]
        name = unused_name(name, names)
        path = write_picture(self.parts.store.folder, name, step, picture, source)
        names.add(name)
        record = {"step": step, "epoch": epoch, FOLDER: {name: path.as_posix()}}
        write_record(self.parts.loggers, record)

    def last_checkpoint(self) -> str:
        """Return a sentence that says where the newest checkpoint is."""
        store = self.parts.store
        step = None if store is None else store.latest()
        if store is None or step is None:
            return "There is no checkpoint."
        return f"The last checkpoint is step {step} in {store.folder}."

    def notify(self, event: str, metrics: dict[str, float] | None = None) -> None:
        """Call this method of each callback."""
        if metrics is None:
            metrics = ReadOnlyMetrics()
        info = Info(self, self.run.step, self.run.epoch, metrics, 0, exact=True)
        notify(self.parts.config.callbacks, event, info)

    def notify_stop(self) -> None:
        """Call `on_stop`, once however the run ends."""
        if not self._notified_stop:
            self._notified_stop = True
            self.notify("on_stop")
