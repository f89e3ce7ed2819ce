"""Callbacks: the base class, those that ship with the library, and how the loop calls them."""

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from spmd.data.batches import find_nonfinite
from spmd.distributed import watchdog
from spmd.distributed.replica_check import check_replicas
from spmd.errors import (
    CallbackError,
    DivergedError,
    OptionError,
    SpmdError,
    check_integer,
    did_you_mean,
    first_line,
    raise_callback_errors,
    short_repr,
    type_name,
)
from spmd.train.skipped_updates import LEFT


class Info:
    """What a callback receives: how far the run is, the metrics, and ways to stop it.

    Attributes:
      step: updates made when the metrics were measured.
      epoch: number of the epoch, from 0, as in the records of loggers; the display and messages
        count from 1: its first is `epoch 1`.
      metrics: floats by name; in `on_step` those of this step, in `on_eval` those of the
        evaluation, to which a callback may add.
      rows: examples in the step's batch, over all workers.
    """

    # so that info.stop = True, which would do nothing, is an error
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
        self._control, self.step, self.epoch, self.metrics, self.rows = (
            control,
            step,
            epoch,
            metrics,
            rows,
        )
        self._exact, self._batch = exact, batch

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
    def placed(self) -> Any:
        """The model on its mesh, as `Trainer.placed`: with `state`, all that a program of one's own
        needs.
        """
        return self._control.config.program.placed

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
        return self._control.config.program.nan_causes

    @property
    def nonfinite(self) -> str:
        """The first value of this step's batch that is not finite, by key and row; "" if there is
        none, or no batch.
        """
        return "" if self._batch is None else find_nonfinite(self._batch)


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
    # True: every process must have it, since it runs programs on the devices of all
    together: bool = False
    # True: transfers no arrays, so the loop keeps its transfer guard on
    moves_nothing: bool = False
    # how often in a row each of its `on_...` methods may raise, but `on_start`: training continues,
    # with a warning
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
        """What a resumed run needs from this callback, as JSON values; every checkpoint stores
        it.
        """
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `save` returned; called after `on_start`, only in a resumed run."""


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
        self.every, self.exact, self.together = every, True, True

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
        self.function, self.every, self.may_fail = function, every, may_fail

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
        """The same for the metrics of an evaluation."""
        self._check(
            info,
            "eval_",
            "check the evaluation data for NaN, for targets that are not a class, and for masks "
            "that leave nothing.",
        )

    def _check(self, info: Info, prefix: str, fix: str) -> None:
        for name, value in (
            (prefix + name, info.metrics.get(prefix + name)) for name in self.metrics
        ):
            if value is not None and not math.isfinite(value):
                raise DivergedError(
                    f'step {info.step}: metric "{name}" is {value}. {info.last_checkpoint}', fix=fix
                )


def look_at(nonfinite: str, otherwise: str) -> str:
    """A fix that names a value of the batch that is not finite, if there is one, before other
    advice.
    """
    return (
        f"correct the data: {nonfinite}. If that is intended, {otherwise}"
        if nonfinite
        else otherwise
    )


def check_first_loss(callbacks: Sequence[Callback], loss: float, batch: Any = None) -> None:
    """Raise `DivergedError` if the loss is watched and not finite at the first step: training
    cannot be the cause then.
    """
    if not math.isfinite(loss) and any(
        "loss" in each.watches() for each in callbacks if isinstance(each, TerminateOnNaN)
    ):
        nonfinite = "" if batch is None else find_nonfinite(batch)
        data = "" if nonfinite else "a NaN or infinity in the data, "
        fix = (
            f"look for {data}a log of 0 or a division by 0 in the loss, or too large initial "
            "values."
        )
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
        self.metric, self.patience, self.min_delta, self.every = metric, patience, min_delta, every
        self._sign = 1.0 if mode == "min" else -1.0
        self._best, self._waited = math.inf, 0

    def on_start(self, info: Info) -> None:
        """Reset: an instance may serve several runs."""
        del info
        self._best, self._waited = math.inf, 0

    def on_step(self, info: Info) -> None:
        """Check a training metric."""
        # absent when nothing was counted
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
        """The best value so far, and the number of checks since."""
        return {"best": self._best if math.isfinite(self._best) else None, "waited": self._waited}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue with the saved values."""
        self._best, self._waited = (
            math.inf if saved["best"] is None else saved["best"],
            saved["waited"],
        )

    def _check(self, info: Info) -> None:
        if self.metric not in info.metrics:
            raise OptionError(
                f'EarlyStopping: there is no metric "{self.metric}".',
                fix=did_you_mean(self.metric, info.metrics),
            )
        value = self._sign * info.metrics[self.metric]
        if math.isfinite(value) and value < self._best - self.min_delta:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            found = (
                f"the best value is {self._sign * self._best:.6g}"
                if math.isfinite(self._best)
                else "none of its values is finite"
            )
            info.stop(f"{self.metric} has not improved in {self._waited} checks; {found}")


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
        self.step, self.seconds, self._started = step, seconds, time.monotonic()

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


def as_callbacks(values: Any) -> list[Callback]:
    """The callbacks of `fit(callbacks=...)`; functions of `info` are wrapped, and `TerminateOnNaN`
    is added unless present.

    Raises:
      OptionError: one is neither a callback nor a function.
    """
    if not isinstance(values, list | tuple):
        raise OptionError(
            f"callbacks={short_repr(values)} is {type_name(values)}.", fix="a list of callbacks."
        )
    callbacks: list[Callback] = []
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    for value in values:
        if isinstance(value, type) or not (isinstance(value, Callback) or callable(value)):
            fix = (
                f"{value.__name__}(...), an instance."
                if isinstance(value, type)
                else "such as spmd.callbacks.StopAt(step=1000)."
            )
            raise OptionError(
                f"callback {short_repr(value)} is neither an spmd.callbacks.Callback nor a "
                "function of info.",
                fix=fix,
            )
        callback = value if isinstance(value, Callback) else Each(value)
        for name in dir(callback):
            if name.startswith("on_") and name not in hooks:
                raise OptionError(
                    f"callback {type(callback).__name__}: nothing calls {name}.",
                    fix=did_you_mean(name, hooks),
                )
        check_integer(callback.every, f"callback {short_repr(value)}: every")
        check_integer(callback.may_fail, f"callback {short_repr(value)}: may_fail", 0)
        if callback.may_fail and callback.together:
            why = (
                f"callback {callback_name(callback)}: may_fail={callback.may_fail}, but all "
                "processes run it together"
            )
            raise OptionError(
                f"{why}: the others would wait for one where it fails.", fix="may_fail=0."
            )
        callbacks.append(callback)
    if not any(isinstance(callback, TerminateOnNaN) for callback in callbacks):
        callbacks.insert(0, TerminateOnNaN())
    return callbacks


class ReadOnlyMetrics(dict):
    """Metrics of a step. A callback that adds to them gets an error, since the addition would be
    lost.
    """

    def _refuse(self, *args: Any, **named: Any) -> Any:
        fix = (
            "use fit(metrics=...), or return (value, {name: metric}) from the loss; on_eval "
            "records what is added."
        )
        raise OptionError("info.metrics cannot be changed here: the change would be lost.", fix=fix)

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = cast(
        Any, _refuse
    )


def as_numbers(metrics: Mapping[str, Any], step: int) -> dict[str, float]:
    """Metrics after the callbacks' `on_eval`, as floats.

    Raises:
      OptionError: one of them is not a number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            with jax.transfer_guard("allow"):
                numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            raise OptionError(
                f"step {step}: on_eval has put {short_repr(value)} into info.metrics[{name!r}].",
                fix="a number.",
            ) from None
    return numbers


def step_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """Those that override `on_step`."""
    return [callback for callback in callbacks if type(callback).on_step is not Callback.on_step]


def notify(callbacks: Sequence[Callback], event: str, info: Info) -> None:
    """Call one method of each callback. The transfer guard is off for callbacks that may transfer
    arrays, and only for them.

    Raises:
      CallbackError: one of them raises, more often than it may.
    """
    callback, transfers = None, any(not callback.moves_nothing for callback in callbacks)
    with raise_callback_errors(
        lambda: f"step {info.step}: callback {callback_name(callback)}.{event}"
    ):
        with contextlib.ExitStack() as block:
            if transfers:
                block.enter_context(jax.transfer_guard("allow"))
                # so that the watchdog blames this callback if it hangs
                block.enter_context(watchdog.current().local_work())
            for callback in callbacks:
                # at the start, an error says before hours of training that it cannot work
                if callback.may_fail and event != "on_start":
                    _notify_tolerantly(callback, event, info)
                else:
                    getattr(callback, event)(info)


def _notify_tolerantly(callback: Callback, event: str, info: Info) -> None:
    """Call a method that may raise so often in a row."""
    failures: dict[str, int] = vars(callback).setdefault("_failures", {})  # by event
    try:
        getattr(callback, event)(info)
        failures[event] = 0
    except SpmdError:
        raise
    except Exception as error:
        count = failures[event] = failures.get(event, 0) + 1
        if count > callback.may_fail:
            raise
        why = (
            f"step {info.step}: callback {callback_name(callback)}.{event} raises "
            f"{first_line(error)}"
        )
        logging.getLogger("spmd").warning(
            "%s; training continues, failure %d of at most %d in a row.",
            why,
            count,
            callback.may_fail,
        )


def callback_name(callback: Any) -> str:
    """The name a user knows a callback by: its class, or the function it calls."""
    return short_repr(callback.function) if isinstance(callback, Each) else type(callback).__name__


def watched_metrics(callback: Callback) -> tuple[str, ...]:
    """The metrics that a callback needs.

    Raises:
      OptionError: they are not a tuple of names.
    """
    with raise_callback_errors(lambda: f"callback {callback_name(callback)}.watches"):
        names = callback.watches()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f"callback {callback_name(callback)} watches {short_repr(names)}.",
            fix="a tuple of names, such as ('loss',).",
        )
    return tuple(names)


def save_callbacks(callbacks: Sequence[Callback], step: int) -> list[list[Any]]:
    """What each callback stores in a checkpoint: [class name, result of `save`].

    Raises:
      CallbackError: one of them raises, or returns a value that JSON cannot represent.
    """
    entries, entry = [], None
    for callback in callbacks:
        with raise_callback_errors(lambda: f"step {step}: callback {callback_name(callback)}.save"):
            entry = callback.save()
        try:
            json.dumps(entry)
        except (TypeError, ValueError) as error:
            headline = (
                f"step {step}: callback {callback_name(callback)}.save returns {short_repr(entry)}"
            )
            fix = "use numbers, strings, lists and dicts, such as float(value)."
            raise CallbackError(
                f"{headline}, which a checkpoint cannot store: {error}.", fix=fix
            ) from error
        entries.append([type(callback).__name__, entry])
    return entries


def restore_callbacks(callbacks: Sequence[Callback], saved: Sequence[Sequence[Any]]) -> None:
    """Restore callbacks from [class name, saved value] entries; several of one class are matched in
    order.

    Raises:
      OptionError: there are more or fewer callbacks of a class than were saved.
    """
    for name in dict.fromkeys(name for name, entry in saved if entry):
        entries = [entry for kind, entry in saved if kind == name]
        matching = [callback for callback in callbacks if type(callback).__name__ == name]
        if len(matching) != len(entries):
            fix = "use the same callbacks, or another checkpoint folder."
            raise OptionError(
                f"the run was saved with {len(entries)} {name} and is resumed with "
                f"{len(matching)}.",
                fix=fix,
            )
        for callback, entry in zip(matching, entries, strict=True):
            with raise_callback_errors(lambda: f"callback {name}.restore"):
                callback.restore(entry)
