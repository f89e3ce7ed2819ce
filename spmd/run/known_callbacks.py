"""Callbacks of the library: checks of replicas and numbers, early stopping, and a last step."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.ranking import rank
from spmd.data.nonfinite import find_nonfinite
from spmd.distributed.replica_check import check_replicas
from spmd.errors import (
    DivergedError,
    OptionError,
    check_integer,
    did_you_mean,
)
from spmd.run.callbacks import Callback, Info
from spmd.train.skipped_updates import LEFT


class CheckReplicas(Callback):
    """Compare the replicas of the state's arrays every `every` steps
    (`spmd.distributed.replica_check`); `fit` does so before the first.

    This finds a device or host that computes wrong results; the error names arrays, devices and
    processes. Each device reads its part of the state once per check, and the loop waits for it.

    Args:
      every: steps between two checks.

    Example:
      >>> CheckReplicas(every=1000).every
      1000
    """

    def __init__(self, every: int = 1000):
        check_integer(every, "CheckReplicas: every")
        self.every = every
        # The check reads the state, with a program on the devices of all processes.
        self.exact = True
        self.together = True

    def on_step(self, info: Info) -> None:
        """Raise `ClusterError` if replicas differ."""
        check_replicas(info.state, f"after step {info.step}")


class Each(Callback):
    """A function as a callback.

    Args:
      function: called with the run's `info`.
      every: steps between two calls.
      may_fail: how often in a row it may raise, as an upload may: then training continues, with a
        warning.

    Example:
      >>> print_loss = Each(lambda info: print(info.step, info.metrics["loss"]), every=100)
    """

    def __init__(self, function: Callable[[Info], Any], *, every: int = 1, may_fail: int = 0):
        self.function = function
        self.every = every
        self.may_fail = may_fail

    def on_step(self, info: Info) -> None:
        """Call the function."""
        self.function(info)


class TerminateOnNaN(Callback):
    """Raise when a watched metric is not finite, in training or in an evaluation. Every run has one
    by default, which watches the loss.

    A step whose update `spmd.optimizers.skip_spikes` or `scale_loss` skipped may have any metrics:
    they count those in a row themselves.

    Args:
      metrics: their names.

    Example:
      >>> watch_nothing = TerminateOnNaN(metrics=())
    """

    moves_nothing = True

    def __init__(self, metrics: tuple[str, ...] = ("loss",)):
        self.metrics = metrics

    def watches(self) -> tuple[str, ...]:
        """The metrics given."""
        return self.metrics

    def on_step(self, info: Info) -> None:
        """Raise `DivergedError` on the first value that is not finite."""
        if LEFT in info.metrics:
            return
        if all(math.isfinite(info.metrics.get(name, 0.0)) for name in self.metrics):
            return
        inspect = f"inspect the batch of this step{info.suspects}"
        self._check(
            info,
            "",
            look_at(
                info.nonfinite,
                "lower the learning rate, clip gradients (optax.clip_by_global_norm), or "
                f"{inspect}.",
            ),
        )

    def on_eval(self, info: Info) -> None:
        """Raise `DivergedError` on the first value of an evaluation that is not finite."""
        self._check(
            info,
            "eval_",
            "check the evaluation data for NaN, for targets that are not a class, and for masks "
            "that leave nothing.",
        )

    def _check(self, info: Info, prefix: str, fix: str) -> None:
        for metric in self.metrics:
            name = prefix + metric
            value = info.metrics.get(name)
            if value is not None and not math.isfinite(value):
                raise DivergedError(
                    f'step {info.step}: metric "{name}" is {value}. {info.last_checkpoint}', fix=fix
                )


def look_at(nonfinite: str, otherwise: str) -> str:
    """Return a fix that names a value of the batch that is not finite, if there is one, before
    other advice.
    """
    if nonfinite:
        return f"correct the data: {nonfinite}. If that is intended, {otherwise}"
    return otherwise


def check_first_loss(callbacks: Sequence[Callback], loss: float, batch: Any = None) -> None:
    """Raise `DivergedError` if the loss is watched and not finite at the first step: training
    cannot be the cause then.
    """
    if math.isfinite(loss):
        return
    terminating = [each for each in callbacks if isinstance(each, TerminateOnNaN)]
    if not any("loss" in each.watches() for each in terminating):
        return
    nonfinite = "" if batch is None else find_nonfinite(batch)
    data = "" if nonfinite else "a NaN or infinity in the data, "
    fix = f"look for {data}a log of 0 or a division by 0 in the loss, or too large initial values."
    raise DivergedError(f"the loss is {loss} at the first step.", fix=look_at(nonfinite, fix))


class EarlyStopping(Callback):
    """Stop when a metric has not improved by `min_delta` for `patience` checks in a row.

    A metric named eval_... is checked after each evaluation, any other every `every` steps.

    Args:
      metric: its name, such as "eval_loss" or "loss".
      patience: checks in a row without an improvement, after which the run stops.
      min_delta: by how much the best value must be exceeded to count as an improvement.
      mode: whether "min" or "max" is better.
      every: steps between two checks of a metric of training.

    Example:
      >>> stop = EarlyStopping("eval_loss", patience=3)
    """

    moves_nothing = True

    def __init__(
        self,
        metric: str = "eval_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "min",
        every: int = 1,
    ):
        if mode not in ("min", "max"):
            raise OptionError(
                f'EarlyStopping: no mode "{mode}".', fix=did_you_mean(mode, ("min", "max"))
            )
        check_integer(patience, "EarlyStopping: patience")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.every = every
        self._sign = 1.0 if mode == "min" else -1.0
        self._best = math.inf
        self._waited = 0

    def on_start(self, info: Info) -> None:
        """Reset: an instance may serve several runs."""
        del info
        self._best = math.inf
        self._waited = 0

    def on_step(self, info: Info) -> None:
        """Check a training metric."""
        # A metric is absent at a step where nothing was counted.
        if not self.metric.startswith("eval_") and self.metric in info.metrics:
            self._check(info)

    def on_eval(self, info: Info) -> None:
        """Check an evaluation metric."""
        if self.metric.startswith("eval_"):
            self._check(info)

    def watches(self) -> tuple[str, ...]:
        """The metric given."""
        return (self.metric,)

    def save(self) -> dict[str, Any]:
        """Return the best value so far, and the number of checks since."""
        # JSON has no infinity.
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "waited": self._waited}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue with the saved values."""
        self._best = saved["best"]
        if self._best is None:
            self._best = math.inf
        self._waited = saved["waited"]

    def _check(self, info: Info) -> None:
        if self.metric not in info.metrics:
            raise OptionError(
                f'EarlyStopping: there is no metric "{self.metric}".',
                fix=did_you_mean(self.metric, info.metrics),
            )
        value = self._sign * info.metrics[self.metric]
        if rank(value, "min") < rank(self._best - self.min_delta, "min"):
            self._best = value
            self._waited = 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            result = "none of its values is finite"
            if math.isfinite(self._best):
                result = f"the best value is {self._sign * self._best:.6g}"
            info.stop(f"{self.metric} has not improved in {self._waited} checks; {result}")


class StopAt(Callback):
    """Stop after a number of updates or seconds, whichever comes first.

    Args:
      step: updates since the start of training; None: any number.
      seconds: since the call of `fit`; None: any number.

    Example:
      >>> stop = StopAt(step=1000, seconds=3600)
    """

    moves_nothing = True

    def __init__(self, *, step: int | None = None, seconds: float | None = None):
        if (
            (step is None and seconds is None)
            or (step is not None and step < 1)
            or (seconds is not None and seconds < 0)
        ):
            raise OptionError(
                f"StopAt(step={step}, seconds={seconds}).",
                fix="step from 1, seconds from 0, or both.",
            )
        self.step = step
        self.seconds = seconds
        self._started = time.monotonic()

    def on_start(self, info: Info) -> None:
        """Start the clock, and set the last step."""
        self._started = time.monotonic()
        if self.step is not None:
            info.stop_at(self.step)

    def on_step(self, info: Info) -> None:
        """Stop when the time is up."""
        if self.seconds is not None and time.monotonic() - self._started >= self.seconds:
            info.ask(f"{self.seconds:g} seconds have passed")

    def on_stop(self, info: Info) -> None:
        """Set the stop reason if this callback stopped the run."""
        if self.step is not None and info.step >= self.step:
            info.stop(f"step {info.step} reached")
