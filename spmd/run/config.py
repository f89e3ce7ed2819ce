"""The configuration of a run (`RunConfig`), the parts of its loop (`LoopParts`), its beginning
(`StartPoint`) and its progress (`RunState`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd.data.batches import Placer
from spmd.data.sources import Source
from spmd.data.work_assignment import Position
from spmd.distributed.initialize import was_restarted
from spmd.errors import OptionError, check_integer, option
from spmd.run.callback_calls import step_callbacks
from spmd.run.callbacks import Callback
from spmd.run.checkpoint import Checkpoint, CheckpointStore
from spmd.run.history import History
from spmd.run.loggers import Logger
from spmd.run.memory_checkpoint import MemoryCheckpoints
from spmd.run.progress import AT_REST, NoProgress, Pace, Progress
from spmd.run.time_account import TimeAccount
from spmd.run.watch import Watch
from spmd.run.work import Work
from spmd.train.compiled_step import TrainingProgram
from spmd.train.state import State

if TYPE_CHECKING:
    from spmd.run.step_profiler import Profile, StepProfiler

# fit(resume=...): resume although the data, its batches or its order have changed
CHANGED_DATA = "changed_data"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The configuration of a run: arguments of `fit` with these names, checked and completed.
    Printed, it shows all of them.

    The model, the data and the layout are not among them, nor what the model is trained with
    (`TrainConfig`).

    Attributes:
      epochs, steps: the planned end; at most one of them is given, and one epoch is the default.
      eval_every: steps between two evaluations; None: once per epoch.
      log_every: steps between two records.
      evaluates: whether there are data to evaluate.
      checkpoint: None: the run keeps nothing.
      callbacks: plain functions of `info` are accepted too.
      loggers: without the one that writes to the run's folder.

    Raises:
      OptionError: `resume` is neither a bool nor "changed_data".

    Example:
      >>> config = RunConfig(steps=100, eval_every=20, evaluates=True)
      >>> config.evaluates_after(40), config.evaluates_after(41), config.steps_left(41)
      (True, False, [19])
    """

    epochs: int | None = None
    steps: int | None = None
    eval_every: int | None = None
    eval_average: bool = False
    evaluates: bool = False
    log_every: int = 10
    prefetch: int = 2
    data_retries: int = 0
    checkpoint: Checkpoint | None = None
    resume: bool | str = False
    callbacks: Sequence[Callback] = ()
    loggers: Sequence[Logger] = ()
    profile: "Profile | None" = None
    watch: Watch | None = None

    def __post_init__(self):
        if not isinstance(self.resume, bool) and self.resume != CHANGED_DATA:
            fix = (
                f'True, False, or "{CHANGED_DATA}" to resume where the data, its batches or its '
                "order have changed."
            )
            raise OptionError(f"resume={self.resume!r}", fix=fix)
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)

    @property
    def folder(self) -> Path | None:
        """The run's folder, if it has one."""
        return None if self.checkpoint is None else Path(self.checkpoint.path)

    @property
    def resumes(self) -> bool:
        """True if the run continues one in its folder."""
        # processes that the launcher has started again resume without being asked
        return bool(self.resume) or (self.checkpoint is not None and was_restarted())

    # when something is due ------------------------------------------------------------------------

    @property
    def save_every(self) -> int | None:
        """Steps between two checkpoints on disk; None: once per epoch."""
        return None if self.checkpoint is None else self.checkpoint.every

    @property
    def memory_every(self) -> int | None:
        """Steps between two checkpoints in memory; None: none are made."""
        return None if self.checkpoint is None else self.checkpoint.memory_every

    @functools.cached_property
    def callback_intervals(self) -> tuple[int, ...]:
        """Steps between two calls of each callback that reads the state."""
        exact = []
        for callback in step_callbacks(self.callbacks):
            reads_state = callback.every > 1 if callback.exact is None else callback.exact
            if reads_state:
                exact.append(callback.every)
        return tuple(exact)

    @functools.cached_property
    def intervals(self) -> list[int]:
        """All intervals that count steps."""
        intervals = (self.eval_every, self.save_every, self.memory_every, *self.callback_intervals)
        return [every for every in intervals if every is not None]

    def steps_left(self, step: int) -> list[int]:
        """Return the steps until each happens next."""
        return [every - step % every for every in self.intervals]

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation is due at this step of an epoch, scheduled or to rank a
        checkpoint.
        """
        ranks = self.checkpoint is not None and self.checkpoint.best is not None
        return is_due(self.eval_every, step) or (ranks and is_due(self.save_every, step))

    # descriptions ---------------------------------------------------------------------------------

    def lengths(self) -> dict[str, int]:
        """Return the lengths that are set, for the facts that loggers get."""
        lengths = {"epochs": self.epochs, "steps": self.steps, "log_every": self.log_every}
        return {name: value for name, value in lengths.items() if value is not None}

    def shared_facts(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return what must be equal in all processes, by the names that errors have for it.

        Args:
          meta: describes the run in its checkpoints.
        """
        names = ("epochs", "steps", "eval_every", "log_every")
        # Only callbacks that run programs on the devices of all processes must be equal in all.
        together = {type(hook).__name__: hook.every for hook in self.callbacks if hook.together}
        return {
            "epochs and so on": ", ".join(f"{name}={getattr(self, name)!r}" for name in names),
            "checkpoint": self.checkpoint,
            "eval_data": self.evaluates,
            "eval_average": self.eval_average,
            **meta,
            "profile": None if self.profile is None else self.profile.steps,
            "watch": self.watch,
            "callbacks": together,
        }


def check_numbers(
    epochs: int | None,
    steps: int | None,
    eval_every: int | None,
    log_every: int,
    prefetch: int,
    data_retries: int,
) -> None:
    """Check the numbers that a user gave `fit`.

    Raises:
      OptionError: one is out of range, or `epochs` and `steps` both set the length.
    """
    check_length(epochs, steps)
    check_integer(eval_every, "eval_every", optional=True)
    check_integer(log_every, "log_every")
    check_integer(prefetch, "prefetch", 0)
    check_integer(data_retries, "data_retries", 0)


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
class LoopParts:
    """The parts of a run's loop; they stay the same until it ends.

    Attributes:
      evaluate: called with the state, with a function that says whether a signal stops the
        evaluation before batch n (it returns None then), and with `draws`, a dict that it fills
        with functions that draw metrics, by name.
      loggers: with the one of the run's folder; empty on all processes but 0.
      meta: what each checkpoint records about the run's options and data.
      device_data: arrays of a data set that lives on the devices.
      profiler: traces some of the steps.
    """

    config: RunConfig
    program: TrainingProgram
    source: Source
    placer: Placer
    evaluate: Callable[..., dict[str, float] | None] | None
    loggers: Sequence[Logger]
    progress: NoProgress | Progress
    store: CheckpointStore | None
    meta: dict[str, Any]
    device_data: Any = None
    steps_per_call: int = 1
    memory: MemoryCheckpoints | None = None
    profiler: "StepProfiler | None" = None
    work: Work = dataclasses.field(default_factory=Work)


@dataclasses.dataclass(frozen=True)
class StartPoint:
    """The beginning of a run: new, or from a checkpoint.

    Attributes:
      position: in the data.
      callbacks: (class name, what it saved).
      changes: options that differ from the checkpoint's, and codec state that did not fit, as text.
      owes_evaluation: whether a signal ended the run before an evaluation that was due.
      evaluated: whether the state was evaluated before it was saved.
      source: where it is from, if not from a checkpoint on disk, as text.
    """

    state: State
    position: Position = dataclasses.field(default_factory=Position)
    callbacks: list = dataclasses.field(default_factory=list)
    changes: list[str] = dataclasses.field(default_factory=list)
    owes_evaluation: bool = False
    evaluated: bool = False
    source: str = ""


@dataclasses.dataclass
class RunState:
    """The progress of a run.

    Attributes:
      epoch: number of the current epoch, from 0; `position` is in the next one already when an
        epoch ends.
      samples: examples trained on in this call, over all processes, as far as metrics have been
        read.
      began: the pace from which its rate is measured: without the first two calls, of which one is
        compiled, where more follow.
      pace: its pace when it was last shown.
      evaluated: results of the newest evaluation.
    """

    state: State
    step: int
    position: Position
    epoch: int
    account: TimeAccount
    history: History
    samples: int = 0
    began: Pace = AT_REST
    pace: Pace = AT_REST
    evaluated: dict[str, float] = dataclasses.field(default_factory=dict)
    stop_reason: str | None = None
