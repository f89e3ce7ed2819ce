"""Callbacks: the base class, and the argument that a callback receives."""

from pathlib import Path
from typing import Any

from spmd.data.nonfinite import find_nonfinite
from spmd.errors import OptionError


class Info:
    """The argument of a callback: the progress of the run, the metrics, and ways to stop it.

    Attributes:
      step: updates made when the metrics were measured.
      epoch: number of the epoch, from 0, as in the records of loggers; the display and messages
        count from 1: its first is `epoch 1`.
      metrics: floats by name; in `on_step` those of this step, in `on_eval` those of the
        evaluation, to which a callback may add.
      rows: examples in the step's batch, over all workers.
    """

    # Without slots info.stop = True would do nothing; with them it is an error.
    __slots__ = ("_batch", "_control", "_exact", "epoch", "metrics", "rows", "step")

    def __init__(
        self,
        control: Any,
        step: int,
        epoch: int,
        metrics: dict[str, float],
        rows: int,
        *,
        exact: bool,
        batch: Any = None,
    ):
        self._control = control
        self.step = step
        self.epoch = epoch
        self.metrics = metrics
        self.rows = rows
        self._exact = exact
        self._batch = batch

    @property
    def state(self) -> Any:
        """The state after `step` updates. The next step donates it: copy what you want to keep.

        Raises:
          OptionError: in a callback that runs on every step, where the device is already one step
            ahead.
        """
        if not self._exact:
            raise OptionError(
                f"info.state at step {self.step}: metrics are read one step late, so this state "
                "was already donated to the next step.",
                fix="give the callback  every = 10  (or more), or  exact = True, which makes the "
                "device wait.",
            )
        return self._control.run.state

    @property
    def folder(self) -> Path | None:
        """The run's folder; None: it has none."""
        return self._control.parts.config.folder

    @property
    def placed(self) -> Any:
        """The model on its mesh, as `Trainer.placed`: with `state`, all that a program of one's own
        needs.
        """
        return self._control.parts.program.placed

    def stop(self, reason: str) -> None:
        """Stop the run cleanly: the last checkpoint is written and `fit` returns.

        Every process must call it at the same step, as they do when the decision follows from
        metrics; otherwise use `ask`.

        Args:
          reason: `result.stop_reason`.
        """
        self._control.stop(reason)

    def ask(self, reason: str) -> None:
        """Stop for a reason that only this process knows, such as the time: soon, and all processes
        after the same step.

        Args:
          reason: `result.stop_reason`.
        """
        self._control.ask(reason)

    def stop_at(self, step: int) -> None:
        """Stop cleanly after exactly this many updates, or immediately if there were more; `stop`
        may be one step late.
        """
        self._control.stop_at(step)

    def log_picture(self, name: str, picture: Any) -> None:
        """Give a picture of this step to all loggers. It is a file in `pictures/` in the run's
        folder; without one, a warning says so.

        Process 0 writes it; in all others this does nothing.

        Args:
          name: for loggers, which show the pictures of a name by step; another of the same name and
            step is NAME_2.
          picture: a matplotlib figure; a picture of `spmd.viz`; an array of uint8, [height, width]
            or [height, width, channels], of 1 to 4 channels; or the path of a PNG or SVG file.

        Raises:
          OptionError: it is none of these.
        """
        self._control.log_picture(self.step, self.epoch, name, picture)

    @property
    def last_checkpoint(self) -> str:
        """A sentence that says where the newest checkpoint is."""
        return self._control.last_checkpoint()

    @property
    def suspects(self) -> str:
        """Known causes of a NaN in a batch under this loss, as the end of a sentence."""
        return self._control.parts.program.loss.nan_causes

    @property
    def nonfinite(self) -> str:
        """The first value of this step's batch that is not finite, by key and row; "" if there is
        none, or no batch.
        """
        if self._batch is None:
            return ""
        return find_nonfinite(self._batch)


class Callback:
    """Base class of callbacks: override the methods you need. `on_step` runs on every `every`-th
    step.

    With `exact`, the loop waits for the step before it calls `on_step`, so that `info.state` can be
    read; by default it does so when `every` is more than 1.

    Example:
      >>> class Largest(Callback):
      ...     largest = 0.0
      ...
      ...     def on_step(self, info):
      ...         self.largest = max(self.largest, info.metrics["loss"])
      >>> Largest().every
      1
    """

    every: int = 1
    exact: bool | None = None
    # True: every process must have the callback, since it runs programs on the devices of all.
    together: bool = False
    # True: the callback transfers no arrays, so the loop keeps JAX's transfer guard on.
    moves_nothing: bool = False
    # How often in a row each of the `on_...` methods may raise, but `on_start`: training continues,
    # with a warning.
    may_fail: int = 0

    def on_start(self, info: Info) -> None:
        """Before the first step."""

    def on_step(self, info: Info) -> None:
        """After a step, when its metrics are known."""

    def on_eval(self, info: Info) -> None:
        """After an evaluation; `info.metrics` holds its results, named eval_..."""

    def on_checkpoint(self, info: Info) -> None:
        """After a checkpoint has started to be written."""

    def on_stop(self, info: Info) -> None:
        """Once, however the run ends, before the loop waits for the last checkpoint."""

    def watches(self) -> tuple[str, ...]:
        """Names of metrics that must exist; checked before the first step."""
        return ()

    def save(self) -> dict[str, Any]:
        """Return what a resumed run needs from this callback, as JSON values; every checkpoint
        stores it.
        """
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `save` returned; called after `on_start`, only in a resumed run."""
