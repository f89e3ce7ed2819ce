"""Calls of callbacks, and their values in checkpoints."""

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from spmd.distributed import watchdog
from spmd.errors import (
    CallbackError,
    OptionError,
    SpmdError,
    check_integer,
    did_you_mean,
    first_line,
    raise_callback_errors,
    short_repr,
    type_name,
)
from spmd.run.callbacks import Callback, Info
from spmd.run.known_callbacks import Each, TerminateOnNaN


def as_callbacks(values: Any) -> list[Callback]:
    """Return the callbacks of `fit(callbacks=...)`; functions of `info` are wrapped, and
    `TerminateOnNaN` is added unless present.

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
            fix = "such as spmd.callbacks.StopAt(step=1000)."
            if isinstance(value, type):
                fix = f"{value.__name__}(...), an instance."
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
    """Return the metrics after the callbacks' `on_eval`, as floats.

    Raises:
      OptionError: one of them is not a number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            # A callback may add an array of a device, which float() transfers to the host.
            with jax.transfer_guard("allow"):
                numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            raise OptionError(
                f"step {step}: on_eval has put {short_repr(value)} into info.metrics[{name!r}].",
                fix="a number.",
            ) from None
    return numbers


def step_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that override `on_step`."""
    return [callback for callback in callbacks if type(callback).on_step is not Callback.on_step]


def notify(callbacks: Sequence[Callback], event: str, info: Info) -> None:
    """Call one method of each callback. The transfer guard is off for callbacks that may transfer
    arrays, and only for them.

    Raises:
      CallbackError: one of them raises, more often than it may.
    """
    callback = None
    transfers = any(not each.moves_nothing for each in callbacks)
    with raise_callback_errors(
        lambda: f"step {info.step}: callback {callback_name(callback)}.{event}"
    ):
        with contextlib.ExitStack() as block:
            if transfers:
                block.enter_context(jax.transfer_guard("allow"))
                # With this the watchdog blames the callback if it hangs.
                block.enter_context(watchdog.current().local_work())
            for callback in callbacks:
                # An error at the start says before hours of training that a callback cannot work.
                if callback.may_fail and event != "on_start":
                    _notify_tolerantly(callback, event, info)
                else:
                    getattr(callback, event)(info)


def _notify_tolerantly(callback: Callback, event: str, info: Info) -> None:
    """Call a method that may raise `may_fail` times in a row."""
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
    """Return the name a user knows a callback by: its class, or the function it calls."""
    if isinstance(callback, Each):
        return short_repr(callback.function)
    return type(callback).__name__


def watched_metrics(callback: Callback) -> tuple[str, ...]:
    """Return the names of the metrics that a callback needs.

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
    """Return the entry of each callback in a checkpoint: [class name, result of `save`].

    Raises:
      CallbackError: one of them raises, or returns a value that JSON cannot represent.
    """
    entries = []
    entry = None
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
