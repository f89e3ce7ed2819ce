"""The configuration of a sweep: which function takes each hyper-parameter, and which trials can
share a program.
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
        for option, function in (
            ("make_model", self.config.model),
            ("optimizer", self.config.optimizer),
        ):
            if not callable(function) or isinstance(function, nnx.Module | linen.Module):
                fix = (
                    "lambda learning_rate: optax.adam(learning_rate)"
                    if option == "optimizer"
                    else "lambda width: Net(width)"
                )
                raise OptionError(
                    f"{option}={short_repr(function)} is not a function of hyper-parameters.",
                    fix=f"{option}={fix}.",
                )
            required = [
                p.name
                for p in _parameters(function)
                if p.default is p.empty and p.kind not in _VARIADIC
            ]
            missing = [name for name in required if name not in space and name != SEED]
            if missing:
                fix = (
                    _of_class(function, missing, space)
                    if isinstance(function, type)
                    else _of_argument(missing[0], space)
                )
                raise OptionError(
                    f'{option} takes "{missing[0]}", which is not in the space.', fix=fix
                )
        for name in takes(self.config.model, space):
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
        used = {*takes(self.config.model, space), *takes(self.config.optimizer, space), SEED}
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
        picked = {name: values[name] for name in takes(self.config.model, values)}
        return lambda: self.config.model(**picked)

    @property
    def builds_from_seed(self) -> bool:
        """Whether make_model takes the seed; otherwise only linen and functional models, which
        receive a key, depend on it.
        """
        return bool(takes(self.config.model, [SEED]))

    def optimizer_of(self, values: Mapping[str, Any]) -> Any:
        """The optimizer of a trial; values may be traced.

        Raises:
          OptimizerError: it cannot be built, or is not an optax transformation.
        """
        picked = {name: values[name] for name in takes(self.config.optimizer, values)}
        try:
            return check_optimizer(self.config.optimizer(**picked))
        except SpmdError:
            raise
        except Exception as error:
            raise OptimizerError(
                f"optimizer({', '.join(picked)}) fails: {first_line(error)}\n    Floats are "
                "traced, so that many values share one program.",
                fix="no Python branch on such a value; or pass strings or integers, which are "
                "constants of the program.",
            ) from error

    def traced(self, trial: Trial) -> dict[str, float]:
        """The values that are arguments of the compiled program."""
        inside = takes(self.config.model, trial.values)
        return {
            name: trial.values[name]
            for name in takes(self.config.optimizer, trial.values)
            if isinstance(trial.values[name], float) and name not in inside
        }

    def constants(self, trial: Trial) -> tuple:
        """The values that are constants of the program: trials with equal ones share it."""
        arguments = (*self.traced(trial), SEED)
        return tuple(
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


def _of_argument(missing: str, space: Mapping[str, Any]) -> str:
    """A fix for an argument that is not in the space."""
    near = closest(missing, list(space))
    known = f'did you mean "{near}" for it? Or' if near else f"{missing}=[...] in the space, or"
    return f"{known} a default for it."


def _of_class(kind: type, missing: Sequence[str], space: Mapping[str, Any]) -> str:
    """A fix for a class in the place of a function: one that calls it, with the arguments that are
    not in the space.
    """
    varied = takes(kind, [*space, SEED])
    arguments = [f"{name}={name}" for name in varied]
    arguments += ["rngs=nnx.Rngs(0)" if name == "rngs" else f"{name}=..." for name in missing]
    begin = f"lambda {', '.join(varied)}:" if varied else "lambda:"
    return f"a function that gives it: make_model={begin} {kind.__name__}({', '.join(arguments)})."


def takes(function: Callable[..., Any], names: Any) -> list[str]:
    """Which of these names are arguments of a function."""
    parameters = _parameters(function)
    named = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [name for name in names if name in named or takes_any]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        if isinstance(function, type):  # nnx hides a class's own arguments behind its metaclass
            return list(inspect.signature(function.__init__).parameters.values())[1:]
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
