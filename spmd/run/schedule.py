"""The length of a run, and how often it evaluates, logs and saves."""

import dataclasses
from collections.abc import Sequence

from spmd.errors import OptionError, check_integer, option
from spmd.run.callback_calls import step_callbacks
from spmd.run.callbacks import Callback
from spmd.run.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class RunSchedule:
    """The planned end of a run, in epochs or steps, and the steps between evaluations (None: once
    per epoch) and between log records.
    """

    epochs: int | None
    steps: int | None
    eval_every: int | None
    log_every: int


def check_length(epochs: int | None, steps: int | None) -> None:
    """Check the length that a user gave a run.

    Raises:
      OptionError: both are given, or one is not a positive integer.
    """
    if epochs is not None and steps is not None:
        raise OptionError(
            f"{option('epochs', epochs)} and {option('steps', steps)} both set the length of the "
            "run.",
            fix="give one of them.",
        )
    check_integer(epochs, "epochs", optional=True)
    check_integer(steps, "steps", optional=True)


def is_due(every: int | None, step: int) -> bool:
    """Return whether something that happens every `every` steps happens after this one; None: only
    at the end of an epoch.

    >>> is_due(3, 6), is_due(3, 7), is_due(None, 6)
    (True, False, False)
    """
    return every is not None and step % every == 0


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Steps between two evaluations, two checkpoints on disk, two in memory, and two calls of each
    callback that reads the state.

    Attributes:
      keeps_best: whether an evaluation decides which checkpoint is the best.
    """

    evaluate: int | None
    save: int | None
    keeps_best: bool
    callbacks: tuple[int, ...]
    memory: int | None = None

    @classmethod
    def of(
        cls, schedule: RunSchedule, checkpoint: Checkpoint | None, callbacks: Sequence[Callback]
    ) -> "Intervals":
        """Collect the intervals from the options of `fit`."""
        exact = []
        for callback in step_callbacks(callbacks):
            reads_state = callback.every > 1 if callback.exact is None else callback.exact
            if reads_state:
                exact.append(callback.every)
        if checkpoint is None:
            return cls(schedule.eval_every, None, keeps_best=False, callbacks=tuple(exact))
        return cls(
            schedule.eval_every,
            checkpoint.every,
            keeps_best=checkpoint.best is not None,
            callbacks=tuple(exact),
            memory=checkpoint.memory_every,
        )

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation is due at this step of an epoch, scheduled or to rank a
        checkpoint.
        """
        return is_due(self.evaluate, step) or (self.keeps_best and is_due(self.save, step))

    @property
    def all(self) -> list[int]:
        """All intervals that count steps."""
        intervals = (self.evaluate, self.save, self.memory, *self.callbacks)
        return [every for every in intervals if every is not None]

    def steps_left(self, step: int) -> list[int]:
        """Return the steps until each happens next."""
        return [every - step % every for every in self.all]
