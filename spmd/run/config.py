"""The parts of a run (`LoopConfig`), its beginning (`StartPoint`) and its progress (`RunState`)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spmd.data.batches import Placer
from spmd.data.sources import Source
from spmd.data.work_assignment import Position
from spmd.run.callbacks import Callback
from spmd.run.checkpoint import CheckpointStore
from spmd.run.history import History
from spmd.run.loggers import Logger
from spmd.run.memory_checkpoint import MemoryCheckpoints
from spmd.run.progress import AT_REST, NoProgress, Pace, Progress
from spmd.run.schedule import RunSchedule
from spmd.run.time_account import TimeAccount
from spmd.run.watch import Watch
from spmd.run.work import Work
from spmd.train.compiled_step import TrainingProgram
from spmd.train.state import State

if TYPE_CHECKING:
    from spmd.run.step_profiler import StepProfiler


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """The parts of a run; they stay the same until it ends.

    Attributes:
      evaluate: called with the state, with a function that says whether a signal stops the
        evaluation before batch n (it returns None then), and with `draws`, a dict that it fills
        with functions that draw metrics, by name.
      meta: what each checkpoint records about the run's options and data.
      device_data: arrays of a data set that lives on the devices.
      data_retries: how often in a row a batch is read again.
      profiler: traces some of the steps.
      watch: which steps have histograms.
    """

    program: TrainingProgram
    source: Source
    placer: Placer
    schedule: RunSchedule
    evaluate: Callable[..., dict[str, float] | None] | None
    callbacks: Sequence[Callback]
    loggers: Sequence[Logger]
    progress: NoProgress | Progress
    store: CheckpointStore | None
    meta: dict[str, Any]
    prefetch: int
    device_data: Any = None
    steps_per_call: int = 1
    memory: MemoryCheckpoints | None = None
    data_retries: int = 0
    profiler: "StepProfiler | None" = None
    work: Work = dataclasses.field(default_factory=Work)
    watch: Watch | None = None


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
