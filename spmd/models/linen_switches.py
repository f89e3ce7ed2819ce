"""The switches of Flax linen modules between training and evaluation: fields that are set, and
arguments that are not known.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import linen

from spmd.errors import ModelError, join_names
from spmd.models.base import SWITCHES, open_parameters
from spmd.models.linen_record import Record

# Annotations; texts are those of modules with `from __future__ import annotations`.
BOOLS = (bool, bool | None, "bool", "bool | None", "Optional[bool]", "typing.Optional[bool]")
# Parts of a name, with the value that it has in training.
WORDS = {
    **dict.fromkeys(("train", "training", "stochastic", "dropout"), True),
    **dict.fromkeys(
        (
            "eval",
            "evaluate",
            "evaluation",
            "infer",
            "inference",
            "test",
            "testing",
            "deterministic",
        ),
        False,
    ),
}


def set_fields(
    module: linen.Module, function: Callable[..., Any], *, training: bool
) -> linen.Module:
    """A clone of a module, with its fields that are switches, and those of the modules in its
    fields, set for training or evaluation.

    A field that is None is set only where `function`, which is called, has no argument of its name.
    A module in a field keeps a switch that was given another value than its default: it is frozen,
    as a `BatchNorm` made with `use_running_average=True` is.
    """
    arguments = inspect.signature(function).parameters
    unset = [
        name for name in SWITCHES if name not in arguments and getattr(module, name, 0) is None
    ]
    return _with_fields(module, training, {}, unset, top=True)


def _with_fields(
    module: linen.Module,
    training: bool,
    clones: dict[int, linen.Module],
    unset: list[str],
    *,
    top: bool = False,
) -> linen.Module:
    # A module in two fields has one set of parameters, so it has one clone.
    if id(module) in clones:
        return clones[id(module)]
    changes = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if field.name in ("parent", "name"):
            continue
        if field.name in SWITCHES and (isinstance(value, bool) or field.name in unset):
            chosen = not top and isinstance(field.default, bool) and value != field.default
            frozen = chosen or (isinstance(module, linen.BatchNorm) and value is True)
            changed = value
            if not frozen:
                changed = SWITCHES[field.name] == training
        else:
            changed = _with_modules(value, training, clones)
        if changed is not value:
            changes[field.name] = changed
    if changes:
        clones[id(module)] = module.clone(**changes)
    else:
        clones[id(module)] = module
    return clones[id(module)]


def _with_modules(value: Any, training: bool, clones: dict[int, linen.Module]) -> Any:
    """The value of a field, with the modules in it as `_with_fields` returns them; itself, if
    nothing changes.
    """
    if isinstance(value, linen.Module):
        return _with_fields(value, training, clones, [])
    if isinstance(value, Mapping):
        changed = {name: _with_modules(part, training, clones) for name, part in value.items()}
        if all(changed[name] is value[name] for name in value):
            return value
        return changed
    if type(value) in (tuple, list):
        parts = [_with_modules(part, training, clones) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(parts)
    return value


TraceCall = Callable[[dict[str, bool]], tuple[Record, set[str]] | None]


def check_arguments(
    function: Callable[..., Any], kwargs: Mapping[str, Any], positional: int, trace_call: TraceCall
) -> None:
    """Refuse a call that leaves out an argument which switches training, and which is not known.

    Args:
      function: the method that is called.
      positional: how many arguments are given by position.
      trace_call: traces the call with one argument more, and returns the record of it and the paths
        of the module's variables; None if that raises.

    Raises:
      ModelError: names the argument, what it switches, and the lines of a subclass that sets it.
    """
    for parameter in open_parameters(function, kwargs, positional):
        is_bool = isinstance(parameter.default, bool) or parameter.annotation in BOOLS
        if parameter.name in SWITCHES or not is_bool:
            continue
        name = parameter.name
        calls: list[dict[str, bool]] = [{name: True}, {name: False}]
        if parameter.default is None:
            calls.append({})
        on, off, *by_default = _effects([trace_call(more) for more in calls])
        # By default it is None, and does what training needs: it follows another switch.
        if on != off and by_default == [max(on, off, key=len)]:
            continue
        words = [WORDS[word] for word in name.lower().split("_") if word in WORDS]
        if parameter.default is parameter.empty or words or on != off:
            in_training = True
            if on != off:
                in_training = len(on) > len(off)
            elif words:
                in_training = words[0]
            raise _unknown_switch(function, parameter, in_training, sorted(on ^ off))


def _effects(calls: list[tuple[Record, set[str]] | None]) -> list[set[str]]:
    """Return the effects of each call besides its outputs, in words; nothing, if one of them
    raises.

    A variable that only some of them have is no statistic of training, such as a cache for
    decoding.
    """
    traced = [call for call in calls if call is not None]
    if len(traced) < len(calls):
        return [set() for _ in calls]
    common = set.intersection(*(paths for _, paths in traced))
    effects = []
    for record, _ in traced:
        draws = {f'draws from "{name}"' for name in record.streams}
        effects.append(draws | {f"changes {path}" for path in record.writes & common})
    return effects


def _unknown_switch(
    function: Callable[..., Any],
    parameter: inspect.Parameter,
    in_training: bool,
    effects: list[str],
) -> ModelError:
    name = parameter.name
    default = parameter.default
    kind, _, method = function.__qualname__.rpartition("<locals>.")[2].rpartition(".")
    left = "and has no default"
    if default is not parameter.empty:
        left = f"and is {default} in training as in evaluation"
    why = (
        f'{kind}.{method} has an argument "{name}" that may switch training, which nothing gives, '
        f"{left}."
    )
    if effects:
        why += f" Only with {name}={in_training} the call {join_names(effects, most=3)}."
    switch = "train"
    passed = ""
    for argument in inspect.signature(function).parameters:
        if argument in SWITCHES:
            switch = argument
            passed = f"{switch}={switch}, "
            break
    value = switch
    if in_training != SWITCHES[switch]:
        value = f"not {switch}"
    lines = [
        f"a subclass with an argument that is known ({', '.join(SWITCHES)}); its parameters have "
        "the same names:",
        f"        class Switched{kind}({kind}):",
        f"            def {method}(self, *args, {switch}: bool, **kwargs):",
        f"                return super().{method}(*args, {passed}{name}={value}, **kwargs)",
        f"    or, if it switches something else, {name}=... in the loss's call of the model, or in "
        "this subclass.",
    ]
    return ModelError(why, fix="\n".join(lines))
