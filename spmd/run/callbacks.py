"""What a user may hang into the loop, and the few that come with it."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from spmd.distributed import watchdog
from spmd.distributed.replica_check import check_replicas
from spmd.errors import CallbackError, DivergedError, OptionError, did_you_mean, raise_callback_errors, short_repr, type_name


class Info:
    """What a callback is told: where the run is, what was measured, and the means to stop or save.

    Attributes:
      step: updates made when the metrics were measured.
      epoch: number of the epoch, from 0.
      metrics: floats by name; for `on_step` those of this step, for `on_eval` those of the evaluation, to which a callback may add.
      rows: examples in the step's batch, over all workers.
    """

    __slots__ = ("_control", "_exact", "epoch", "metrics", "rows", "step")  # info.stop = True would do nothing: it is an error

    def __init__(self, control: Any, step: int, epoch: int, metrics: dict[str, float], rows: int, *, exact: bool):
        self._control, self.step, self.epoch, self.metrics, self.rows = control, step, epoch, metrics, rows
        self._exact = exact

    @property
    def state(self) -> Any:
        """The state after `step` updates. The next step consumes it: copy what is to be kept.

        Raises:
          OptionError: in a callback that runs on every step; there the device is already a step ahead.
        """
        if not self._exact:
            raise OptionError(
                f"info.state at step {self.step}: metrics are read one step late, so this state is consumed already.\n"
                "    fix: give the callback  every = 10  (or more), or  exact = True, which makes the device wait."
            )
        return self._control.state

    def stop(self, reason: str) -> None:
        """Stop the run in good order: the last checkpoint is written and `fit` returns.

        Of several processes all must call it at the same step, as they do where it follows from metrics; otherwise `ask`.
        """
        self._control.stop(reason)

    def ask(self, reason: str) -> None:
        """The same for what only this process knows, such as the time: all processes stop after the same step, soon."""
        self._control.ask(reason)

    def stop_at(self, step: int) -> None:
        """Stop in good order after exactly this many updates, or at once where there were more; `stop` may be a step late."""
        self._control.stop_at(step)

    @property
    def last_checkpoint(self) -> str:
        """Where the newest checkpoint is, in words."""
        return self._control.last_checkpoint()

    @property
    def suspects(self) -> str:
        """What in a batch is known to make this loss NaN, to end a sentence with."""
        return self._control.config.program.nan_causes


class Callback:
    """Base of callbacks: override what is of interest. `on_step` runs on every `every`-th step.

    With `exact`, the loop waits for the step before it calls, so that `info.state` can be read; by default it does so
    when `every` is more than 1.
    """

    every: int = 1
    exact: bool | None = None
    together: bool = False  # True: of several processes all must have it, since it makes devices of all of them do something
    moves_nothing: bool = False  # True: touches only numbers, so the loop keeps its guard against hidden transfers

    def on_start(self, info: Info) -> None:
        """Before the first step."""

    def on_step(self, info: Info) -> None:
        """After a step, when its metrics are known."""

    def on_eval(self, info: Info) -> None:
        """After an evaluation; `info.metrics` holds its results, named eval_..."""

    def on_checkpoint(self, info: Info) -> None:
        """After a checkpoint was handed over to be written."""

    def on_stop(self, info: Info) -> None:
        """Once, when the run ends for whatever reason, before the last checkpoint is waited for."""

    def watches(self) -> tuple[str, ...]:
        """Names of metrics that must exist; checked before the first step."""
        return ()

    def save(self) -> dict[str, Any]:
        """What a resumed run needs of this callback, as plain numbers and words; it goes into every checkpoint."""
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take back what `save` gave; called after `on_start`, in a resumed run only."""


class CheckReplicas(Callback):
    """Compare the copies of the state's arrays every `every` steps (`spmd.distributed.replica_check`); `fit` does so before the first.

    Each device reads its part of the state once, and the loop waits for it. A device or host that computes wrongly is found so: the
    error names arrays, devices and processes.

    Args:
      every: steps from one check to the next.

    Example:
      >>> CheckReplicas(every=1000).every
      1000
    """

    def __init__(self, every: int = 1000):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"CheckReplicas: every={every!r}; a whole number from 1.")
        self.every, self.exact, self.together = every, True, True

    def on_step(self, info: Info) -> None:
        """Raise `ClusterError` where copies differ."""
        check_replicas(info.state, f"after step {info.step}")


class Each(Callback):
    """A plain function as a callback.

    Example:
      >>> print_loss = Each(lambda info: print(info.step, info.metrics["loss"]), every=100)
    """

    def __init__(self, function: Callable[[Info], Any], *, every: int = 1):
        self.function, self.every = function, every

    def on_step(self, info: Info) -> None:
        """Call the function."""
        self.function(info)


class TerminateOnNaN(Callback):
    """Raise as soon as a watched metric is not finite, in training or in an evaluation. In every run by default, watching the loss.

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
        batch = f"a look at the batch of this step{info.suspects}"
        self._look(info, "", f"a lower learning rate, gradient clipping (optax.clip_by_global_norm), or {batch}.")

    def on_eval(self, info: Info) -> None:
        """The same for an evaluation's."""
        self._look(info, "eval_", "a look at the evaluation's data for NaN, for targets that are no class, or for nothing that counts.")

    def _look(self, info: Info, prefix: str, fix: str) -> None:
        for name, value in ((prefix + name, info.metrics.get(prefix + name)) for name in self.metrics):
            if value is not None and not math.isfinite(value):
                raise DivergedError(f'step {info.step}: metric "{name}" is {value}. {info.last_checkpoint}', fix=f"{fix}")


def check_first_loss(callbacks: Sequence[Callback], loss: float) -> None:
    """Raise `DivergedError` where somebody watches the loss and the first one is not finite: training is not the cause then."""
    if not math.isfinite(loss) and any("loss" in each.watches() for each in callbacks if isinstance(each, TerminateOnNaN)):
        raise DivergedError(
            f"the loss is {loss} at the first step.\n"
            "    fix: look for a NaN or infinity in the data, a log of 0 or a division by 0 in the loss, or an initialisation "
            "that is too large."
        )


class EarlyStopping(Callback):
    """Stop when a metric has not improved by `min_delta` for `patience` looks in a row.

    A metric named eval_... is looked at after each evaluation, any other every `every` steps.

    Example:
      >>> stop = EarlyStopping("eval_loss", patience=3)
    """

    moves_nothing = True

    def __init__(self, metric: str = "eval_loss", *, patience: int = 3, min_delta: float = 0.0, mode: str = "min", every: int = 1):
        if mode not in ("min", "max"):
            raise OptionError(f'EarlyStopping: no mode "{mode}".', fix=f"{did_you_mean(mode, ('min', 'max'))}")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise OptionError(f"EarlyStopping: patience={patience!r}; a number of looks, from 1.")
        self.metric, self.patience, self.min_delta, self.every = metric, patience, min_delta, every
        self._sign = 1.0 if mode == "min" else -1.0
        self._best, self._waited = math.inf, 0

    def on_start(self, info: Info) -> None:
        """Forget what another run has shown."""
        del info
        self._best, self._waited = math.inf, 0

    def on_step(self, info: Info) -> None:
        """Look at a training metric."""
        if not self.metric.startswith("eval_") and self.metric in info.metrics:  # not where nothing was counted
            self._look(info)

    def on_eval(self, info: Info) -> None:
        """Look at an evaluation metric."""
        if self.metric.startswith("eval_"):
            self._look(info)

    def watches(self) -> tuple[str, ...]:
        """The metric given."""
        return (self.metric,)

    def save(self) -> dict[str, Any]:
        """The best value seen and how long it has not improved."""
        return {"best": self._best if math.isfinite(self._best) else None, "waited": self._waited}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on waiting where the run stood."""
        self._best, self._waited = math.inf if saved["best"] is None else saved["best"], saved["waited"]

    def _look(self, info: Info) -> None:
        if self.metric not in info.metrics:
            raise OptionError(f'EarlyStopping: there is no metric "{self.metric}".', fix=f"{did_you_mean(self.metric, info.metrics)}")
        value = self._sign * info.metrics[self.metric]
        if value < self._best - self.min_delta:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            info.stop(f"{self.metric} has not improved for {self._waited} looks; its best is {self._sign * self._best:.6g}")


class StopAt(Callback):
    """Stop after a number of updates, or of seconds, whichever comes first.

    Example:
      >>> stop = StopAt(step=1000, seconds=3600)
    """

    moves_nothing = True

    def __init__(self, *, step: int | None = None, seconds: float | None = None):
        if (step is None and seconds is None) or (step is not None and step < 1) or (seconds is not None and seconds < 0):
            raise OptionError(f"StopAt(step={step}, seconds={seconds}): a step from 1, or seconds from 0, or both.")
        self.step, self.seconds, self._started = step, seconds, time.monotonic()

    def on_start(self, info: Info) -> None:
        """Start the clock, and set the mark."""
        self._started = time.monotonic()
        if self.step is not None:
            info.stop_at(self.step)

    def on_step(self, info: Info) -> None:
        """Stop when the time is over."""
        if self.seconds is not None and time.monotonic() - self._started >= self.seconds:
            info.ask(f"{self.seconds:g} seconds are over")

    def on_stop(self, info: Info) -> None:
        """Say why, when it was this."""
        if self.step is not None and info.step >= self.step:
            info.stop(f"step {info.step} reached")


def as_callbacks(given: Any) -> list[Callback]:
    """What the user gave as callbacks: objects, or plain functions of `info`; `TerminateOnNaN` is added unless there.

    Raises:
      OptionError: something that is neither.
    """
    if not isinstance(given, list | tuple):
        raise OptionError(f"callbacks={short_repr(given)} is {type_name(given)}.", fix="a list of them.")
    callbacks: list[Callback] = []
    for one in given:
        if isinstance(one, Callback):
            callbacks.append(one)
        elif callable(one) and not isinstance(one, type):
            callbacks.append(Each(one))
        else:
            raise OptionError(f"callback {short_repr(one)} is neither a spmd.callbacks.Callback nor a function of info.")
        hooks = [name for name in dir(Callback) if name.startswith("on_")]
        for name in dir(one) if isinstance(one, Callback) else ():
            if name.startswith("on_") and name not in hooks:
                raise OptionError(f"callback {type(one).__name__}: nothing calls {name}.", fix=f"{did_you_mean(name, hooks)}")
        if isinstance(callbacks[-1].every, bool) or not isinstance(callbacks[-1].every, int) or callbacks[-1].every < 1:
            raise OptionError(f"callback {short_repr(one)}: every={short_repr(callbacks[-1].every)}; a number of steps, from 1.")
    if not any(isinstance(one, TerminateOnNaN) for one in callbacks):
        callbacks.insert(0, TerminateOnNaN())
    return callbacks


class ReadOnlyMetrics(dict):
    """Metrics of a step. A callback that adds to them gets an error, since the addition would be lost."""

    def _refuse(self, *args: Any, **named: Any) -> Any:
        raise OptionError(
            "info.metrics cannot be changed here: the change would be lost.",
            fix="use fit(metrics=...), or return (value, {name: metric}) from the loss; on_eval records what is added.",
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = cast(Any, _refuse)


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
            raise OptionError(f"step {step}: on_eval has put {short_repr(value)} into info.metrics[{name!r}].", fix="a number.") from None
    return numbers


def step_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """Those that override `on_step`."""
    return [callback for callback in callbacks if type(callback).on_step is not Callback.on_step]


def notify(callbacks: Sequence[Callback], event: str, info: Info) -> None:
    """Call one method of each of them. The transfer guard is lifted for those of the user's, and only for them.

    Raises:
      CallbackError: one of them raises.
    """
    callback, moving = None, any(not callback.moves_nothing for callback in callbacks)
    with raise_callback_errors(lambda: f"step {info.step}: callback {callback_name(callback)}.{event}"):
        with contextlib.ExitStack() as block:
            if moving:
                block.enter_context(jax.transfer_guard("allow"))
                block.enter_context(watchdog.current().local_work())  # where a user's callback hangs, it is why
            for callback in callbacks:
                getattr(callback, event)(info)


def callback_name(callback: Any) -> str:
    """What the user knows a callback as: its class, or the function that it calls."""
    return short_repr(callback.function) if isinstance(callback, Each) else type(callback).__name__


def watched_metrics(callback: Callback) -> tuple[str, ...]:
    """The metrics that a callback needs.

    Raises:
      OptionError: they are no tuple of names.
    """
    with raise_callback_errors(lambda: f"callback {callback_name(callback)}.watches"):
        found = callback.watches()
    if isinstance(found, str) or not all(isinstance(name, str) for name in found):
        raise OptionError(f"callback {callback_name(callback)} watches {short_repr(found)}.", fix="a tuple of names, such as ('loss',).")
    return tuple(found)


def save_callbacks(callbacks: Sequence[Callback], step: int) -> list[list[Any]]:
    """What each wants kept in a checkpoint, (class name, what it gives).

    Raises:
      CallbackError: one of them raises, or gives what JSON cannot hold.
    """
    kept, entry = [], None
    for callback in callbacks:
        with raise_callback_errors(lambda: f"step {step}: callback {callback_name(callback)}.save"):
            entry = callback.save()
        try:
            json.dumps(entry)
        except (TypeError, ValueError) as error:
            why = (
                f"step {step}: callback {callback_name(callback)}.save gives {short_repr(entry)}, which a checkpoint cannot hold: {error}."
            )
            raise CallbackError(f"{why}", fix="plain numbers, words, lists and dicts, such as float(value).") from error
        kept.append([type(callback).__name__, entry])
    return kept


def restore_callbacks(callbacks: Sequence[Callback], saved: Sequence[Sequence[Any]]) -> None:
    """Hand back what callbacks of a resumed run had saved, (class name, what it was): to the first of a class what its first had saved.

    Raises:
      OptionError: there are more or fewer of a class than there were.
    """
    for name in dict.fromkeys(name for name, entry in saved if entry):
        entries = [entry for kind, entry in saved if kind == name]
        mine = [callback for callback in callbacks if type(callback).__name__ == name]
        if len(mine) != len(entries):
            raise OptionError(
                f"the run was saved with {len(entries)} {name} and is resumed with {len(mine)}.\n"
                "    fix: the same callbacks, or another checkpoint folder."
            )
        for callback, entry in zip(mine, entries, strict=True):
            with raise_callback_errors(lambda: f"callback {name}.restore"):
                callback.restore(entry)
