"""When a run ends, and how often it evaluates, logs and saves."""

import dataclasses
from collections.abc import Sequence

from spmd.errors import OptionError, check_integer, option
from spmd.run.callback_calls import step_callbacks
from spmd.run.callbacks import Callback
from spmd.run.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class RunSchedule:
    """When to stop, in epochs or steps, and the steps between evaluations (None: once per epoch)
    and between log records.
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
    """Whether something that happens every `every` steps happens after this one; None: only at the
    end of an epoch.

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
        """Collected from the options of `fit`."""
        exact = tuple(
            c.every
            for c in step_callbacks(callbacks)
            if (c.exact if c.exact is not None else c.every > 1)
        )
        save, best = (None, None) if checkpoint is None else (checkpoint.every, checkpoint.best)
        return cls(
            schedule.eval_every,
            save,
            best is not None,
            exact,
            None if checkpoint is None else checkpoint.memory_every,
        )

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due at this step of an epoch, scheduled or to rank a
        checkpoint.
        """
        return is_due(self.evaluate, step) or (self.keeps_best and is_due(self.save, step))

    @property
    def all(self) -> list[int]:
        """All intervals that count steps."""
        return [
            every
            for every in (self.evaluate, self.save, self.memory, *self.callbacks)
            if every is not None
        ]

    def steps_left(self, step: int) -> list[int]:
        """Steps until each happens next."""
        return [every - step % every for every in self.all]
