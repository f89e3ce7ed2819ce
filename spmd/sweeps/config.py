"""The configuration of a sweep: the function that takes each hyper-parameter, and the trials that
can share a program.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import linen, nnx

from spmd.data.sources import ArraySource
from spmd.errors import OptimizerError, OptionError, SpmdError, closest, first_line, short_repr
from spmd.layout.schema import Layout
from spmd.sweeps.search_space import SEED, Between
from spmd.train.model_setup import TrainConfig
from spmd.train.state import check_optimizer

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One setting of the hyper-parameters: its number in the sweep, its values by name, and its
    seed.
    """

    number: int
    values: Mapping[str, Any]
    seed: int

    @property
    def all_values(self) -> dict[str, Any]:
        """All values, the seed among them."""
        return {**self.values, SEED: self.seed}


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Everything that the trials of a sweep share.

    `config.model` and `config.optimizer` are functions of hyper-parameters by name. Floats that the
    optimizer takes are traced, so trials that differ only in them share one program; every other
    value is a constant of its program.
    """

    config: TrainConfig
    layout: Layout
    data: ArraySource
    eval_data: ArraySource | None
    exact: bool

    def check(self, space: Mapping[str, Any]) -> None:
        """Refuse hyper-parameters that no function takes.

        Raises:
          OptionError: such a name; or a function with an argument that is not in the space.
        """
        example = "lambda width: Net(width)"
        _check_function("make_model", self.config.model, space, example)
        example = "lambda learning_rate: optax.adam(learning_rate)"
        _check_function("optimizer", self.config.optimizer, space, example)
        for name in accepted_names(self.config.model, space):
            if isinstance(space[name], Between):
                why = (
                    f"make_model takes {name}, drawn from {space[name]}: each trial would compile "
                    "its own program."
                )
                raise OptionError(
                    why,
                    fix="a list of a few values; only values of the optimizer can be drawn from a "
                    "distribution.",
                )
        used = {
            *accepted_names(self.config.model, space),
            *accepted_names(self.config.optimizer, space),
            SEED,
        }
        for name in space:
            if name not in used:
                fix = "an argument of that name of make_model or optimizer, or leave it out."
                raise OptionError(f'space: nothing takes "{name}".', fix=fix)

    def train_config(self, trial: Trial) -> TrainConfig:
        """The arguments of `fit` that train this trial alone."""
        values = trial.all_values
        return dataclasses.replace(
            self.config,
            model=self.model(values),
            optimizer=self.optimizer_of(values),
            seed=trial.seed,
        )

    def model(self, values: Mapping[str, Any]) -> Callable[[], Any]:
        """A function that builds the model of a trial."""
        arguments = {name: values[name] for name in accepted_names(self.config.model, values)}
        return lambda: self.config.model(**arguments)

    @property
    def builds_from_seed(self) -> bool:
        """True if make_model takes the seed; otherwise only linen and functional models, which
        receive a key, depend on it.
        """
        return bool(accepted_names(self.config.model, [SEED]))

    def optimizer_of(self, values: Mapping[str, Any]) -> Any:
        """The optimizer of a trial; values may be traced.

        Raises:
          OptimizerError: it cannot be built, or is not an optax transformation.
        """
        arguments = {name: values[name] for name in accepted_names(self.config.optimizer, values)}
        try:
            return check_optimizer(self.config.optimizer(**arguments))
        except SpmdError:
            raise
        except Exception as error:
            raise OptimizerError(
                f"optimizer({', '.join(arguments)}) fails: {first_line(error)}\n    Floats are "
                "traced, so that many values share one program.",
                fix="no Python branch on such a value; or pass strings or integers, which are "
                "constants of the program.",
            ) from error

    def traced(self, trial: Trial) -> dict[str, float]:
        """The values that are arguments of the compiled program."""
        of_model = accepted_names(self.config.model, trial.values)
        traced = {}
        for name in accepted_names(self.config.optimizer, trial.values):
            value = trial.values[name]
            if isinstance(value, float) and name not in of_model:
                traced[name] = value
        return traced

    def constants(self, trial: Trial) -> tuple:
        """The values that are constants of the program: trials with equal ones share it."""
        arguments = (*self.traced(trial), SEED)
        return tuple(
            # Python has 1 == 1.0 == True, so the text of a value counts, too.
            (name, repr(value), _same(value))
            for name, value in trial.values.items()
            if name not in arguments
        )


def _same(value: Any) -> Any:
    """A key that is equal only for equal values; their text may omit a difference."""
    try:
        hash(value)
    except TypeError:
        return id(value)  # the search space keeps it alive
    return value


def _check_function(option: str, function: Any, space: Mapping[str, Any], example: str) -> None:
    """Refuse a function with an argument that is not in the space, or a value that is no function.

    Args:
      option: of `sweep`, for the error.
      function: its value.
      space: the hyper-parameters.
      example: a function, for the fix.
    """
    # A module can be called, but not with hyper-parameters.
    if not callable(function) or isinstance(function, nnx.Module | linen.Module):
        raise OptionError(
            f"{option}={short_repr(function)} is not a function of hyper-parameters.",
            fix=f"{option}={example}.",
        )
    missing = []
    for parameter in _parameters(function):
        is_required = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        if is_required and parameter.name not in space and parameter.name != SEED:
            missing.append(parameter.name)
    if not missing:
        return
    if isinstance(function, type):
        fix = _fix_for_class(function, missing, space)
    else:
        fix = _fix_for_argument(missing[0], space)
    raise OptionError(f'{option} takes "{missing[0]}", which is not in the space.', fix=fix)


def _fix_for_argument(missing: str, space: Mapping[str, Any]) -> str:
    """A fix for an argument that is not in the space."""
    near = closest(missing, list(space))
    if near:
        return f'did you mean "{near}" for it? Or a default for it.'
    return f"{missing}=[...] in the space, or a default for it."


def _fix_for_class(kind: type, missing: Sequence[str], space: Mapping[str, Any]) -> str:
    """A fix for a class in the place of a function: one that calls it, with the arguments that are
    not in the space.
    """
    varied = accepted_names(kind, [*space, SEED])
    values = dict.fromkeys(missing, "...")
    if "rngs" in values:
        values["rngs"] = "nnx.Rngs(0)"
    arguments = [f"{name}={name}" for name in varied]
    arguments += [f"{name}={value}" for name, value in values.items()]
    begin = "lambda:"
    if varied:
        begin = f"lambda {', '.join(varied)}:"
    return f"a function that gives it: make_model={begin} {kind.__name__}({', '.join(arguments)})."


def accepted_names(function: Callable[..., Any], names: Any) -> list[str]:
    """The names, of the given ones, that are arguments of a function."""
    parameters = _parameters(function)
    named = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [name for name in names if name in named or takes_any]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        # inspect.signature of an nnx module is that of its metaclass, (*args, **kwargs)
        if isinstance(function, type):
            return list(inspect.signature(function.__init__).parameters.values())[1:]
        return list(inspect.signature(function).parameters.values())
    # Functions that are written in C may have no signature.
    except (TypeError, ValueError):
        return []
