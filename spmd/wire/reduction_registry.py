"""Reductions: the ways to reduce gradients that layout files may name, with those that users
register.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from spmd.base.specs import Spec
from spmd.errors import OptionError, did_you_mean, short_repr, type_name

# of `[gradients]`, for a registered function
OPTIONS = ("codec", "codecs", "error_feedback", "start_step", "bucket_bytes", "exact_axes")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One way to reduce gradients.

    `manual` says whether the step runs per worker under `jax.shard_map`. `grad_spec(placement)` is
    the spec of a gradient while it is reduced, and `mean_spec(placement)` that of its mean.
    `keeps_params` says whether gathered parameters are kept for the backward pass, as by the worker
    of a parameter server, which gathers once. Otherwise they are gathered again, which saves
    memory. `make` is the function of a registered reduction.
    """

    name: str
    manual: bool
    grad_spec: Callable[[Any], Spec]
    mean_spec: Callable[[Any], Spec]
    keeps_params: bool = False
    make: Callable[..., Any] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Return those of `OPTIONS` that the registered function takes."""
        if self.make is None:
            return ()
        parameters = inspect.signature(self.make).parameters
        return tuple(name for name in OPTIONS if name in parameters)


def _spec(placement: Any) -> Spec:
    return placement.spec


def _state_spec(placement: Any) -> Spec:
    return placement.state_spec


def _replicated(placement: Any) -> Spec:
    del placement
    return ()


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("compiler", False, _state_spec, _state_spec),
        Reduction("all_reduce", True, _spec, _replicated),
        Reduction("reduce_scatter", True, _state_spec, _state_spec),
        Reduction("parameter_server", True, _state_spec, _state_spec, keeps_params=True),
    )
}


def register_reduction(name: str) -> Callable[[Function], Function]:
    """A decorator that makes a reduction available to layout files, plans and `spmd.fit`:
    `[gradients] reduction = "name"`.

    The function gets the mesh axes of the workers, outermost first, and returns an optax
    transformation whose `update` takes each worker's own gradients and returns their mean, **the
    same bits on every worker**. It runs inside `jax.shard_map` with these axes manual, on a dict of
    full gradients by parameter path, without `params`.

    The names of its other parameters are the options of `[gradients]` that it takes: `codec` (an
    instance), `codecs` (by path, from the rules), `error_feedback`, `start_step`, `bucket_bytes`,
    `exact_axes`. A layout that sets another one is refused, and so is a layout that shards
    parameters. The state of the transformation is saved and restored with the run's. `wire.specs`
    says how it is split: a state of one's own with an array for each worker has a method `specs`.

    Args:
      name: of the reduction in layout files.

    Returns:
      A decorator, which returns the function.

    Raises:
      OptionError: it is no such function, or the name is that of another reduction. The same
        function may be registered again, as a notebook does when a cell runs twice.

    Example:
      >>> from spmd import wire
      >>> @wire.register_reduction("exact_inside")
      ... def exact_inside(axes, codec, error_feedback=False):
      ...     inside, across = (axes[1:], wire.exact()), (axes[:1], codec)
      ...     return wire.hierarchical(inside=inside, across=across, error_feedback=error_feedback)
      >>> REDUCTIONS.pop("exact_inside").options
      ('codec', 'error_feedback')
    """
    where = f"register_reduction({short_repr(name)})"
    if not isinstance(name, str) or not name:
        why = f"{where}: the name is {type_name(name)}."
        raise OptionError(why, fix='such as @wire.register_reduction("ring").')

    def add(function: Function) -> Function:
        if not callable(function):
            why = f"{where}: {type_name(function)} is no function."
            raise OptionError(why, fix=f'@wire.register_reduction("{name}") above a def.')
        _check_parameters(where, function)
        other = REDUCTIONS.get(name)
        if other is not None:
            # By name and not by identity: a notebook's cell that runs again defines the function
            # anew.
            whose = "the library's own"
            if other.make is not None:
                whose = _full_name(other.make)
            if whose != _full_name(function):
                raise OptionError(f"{where}: the name is that of {whose}.", fix="another name.")
        REDUCTIONS[name] = Reduction(name, True, _spec, _replicated, make=function)
        return function

    return add


def _check_parameters(where: str, function: Callable[..., Any]) -> None:
    """Check that the first parameter is for the axes, and that all others are options, or have
    defaults.
    """
    parameters = list(inspect.signature(function).parameters.values())
    by_position = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    if not parameters or parameters[0].kind not in by_position:
        why = f"{where}: the function takes no axes."
        raise OptionError(why, fix="def reduction(axes, codec): ...")
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            fix = (
                f"name those of {', '.join(OPTIONS)} that it takes: layouts that set others are "
                "refused."
            )
            why = f"{where}: {parameter} hides which options the function takes."
            raise OptionError(why, fix=fix)
        if parameter.name not in OPTIONS and parameter.default is parameter.empty:
            why = f"{where}: nothing gives the parameter {parameter.name} a value."
            fix = "a default, or one of the options that a layout has. "
            raise OptionError(why, fix=fix + did_you_mean(parameter.name, OPTIONS))


def _full_name(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}.{name}"
