"""The interface of a model to the rest of the library: trees of arrays and a way to call them."""

import abc
import contextvars
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from spmd.base.path_match import matches
from spmd.base.tracebacks import failing_line
from spmd.base.tree import Tree, describe
from spmd.errors import ModelError, Problem, SpmdError, first_line
from spmd.wire import collectives

# Metadata of a stack's parameter: of how many layers it is, along dim 0.
STACKED = "stacked"
# Names, in a traced loss, the parameters that a stack takes to its layers. JAX keeps no names of
# variables in a program; the name of a `checkpoint_name` is one that survives tracing.
LAYER_PARAMS = "layer_params"
# Whether the module that is called next is recomputed by its caller: of two nested
# `jax.checkpoint` the outer one decides.
RECOMPUTED = contextvars.ContextVar("recomputed", default=False)
# Metadata of a stack's parameter in a bound model: its path in the model.
PATH = "path"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "frozen", "stats", "rngs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Variables:
    """All arrays of a model. `params` are trained, `frozen` are not; `stats` change with each call
    (BatchNorm); `rngs` are key data.
    """

    params: Tree
    stats: Tree
    rngs: Tree
    frozen: Tree = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Call:
    """One way to call a model inside a step.

    `key` is the same on all workers; `localize` turns it into the key that draws this worker's
    rows. `sync_axes` are the mesh axes over which batch statistics are averaged (empty where the
    compiler sees the whole batch). `dtype` is that of the computation, set on every layer that has
    no dtype: one float32 array among its inputs (BatchNorm's averages, an embedding) would
    otherwise turn it, and all layers after it, into float32. `remat` has patterns of submodules
    that are recomputed in the backward pass, with the policy of each. `output_hook` is asked by
    path of every submodule that can be called, and gives what its outputs go through, or None.
    `products` is asked by path of every layer that has a `dot_general`, and gives the one to use.
    `blocks`, `spmd.models.blocks.BlockCalls`, takes over calls of submodules.
    """

    training: bool
    key: Any = None
    localize: Callable[[Any], Any] = lambda key: key
    sync_axes: tuple[str, ...] = ()
    remat: tuple[tuple[str, Callable[..., Any]], ...] = ()
    dtype: Any = None
    output_hook: Callable[[str], Callable[[Any], Any] | None] = lambda path: None
    products: Callable[[str, Any], Any] = lambda path, dot_general: dot_general
    blocks: Any = None


class Model(abc.ABC):
    """A user's model of any kind, as the rest of the library uses it."""

    @property
    def concrete(self) -> Variables | None:
        """The arrays of a model that was passed with arrays; None for one that is built later.
        Called outside of traces.
        """
        return None

    @property
    def handed_over(self) -> bool:
        """Return whether the arrays of `concrete` may be used and consumed, not only copied."""
        return False

    def release(self) -> None:
        """Delete the arrays of a model that was handed over; it cannot be called from here on."""
        return

    @abc.abstractmethod
    def make_variables(self, key: Any, run_loss: Callable[[Any], Any]) -> Variables:
        """Return all arrays, under a trace; `run_loss` calls the loss with a stand-in for the
        model, for a model that needs data.
        """

    def shapes(self, run_loss: Callable[[Any], Any]) -> Variables:
        """Return shapes and dtypes of what `make_variables` makes, without allocating it."""
        # A concrete key would be made on a device.
        key = jax.eval_shape(lambda: jax.random.key(0))
        return trace_abstractly(lambda key: self.make_variables(key, run_loss), "the model", key)

    @abc.abstractmethod
    def names(self, key: Any, run_loss: Callable[[Any], Any]) -> dict[str, tuple]:
        """Return logical axis names by path, for the parameters that carry them; of a stack's
        parameter the names of one layer.
        """

    def stacks(self) -> dict[str, int]:
        """Return how many layers a parameter has along dim 0, by path, for the parameters of
        stacks (`spmd.nn.LayerStack`).
        """
        return {}

    def kernels(self) -> frozenset[str]:
        """Return paths of the parameters that can be quantized: kernels that a layer multiplies
        by, and uses in no other way.
        """
        return frozenset()

    def adapters(self) -> frozenset[str]:
        """Return paths of the parameters of adapters."""
        return frozenset()

    def notes(self) -> list[str]:
        """Return lines that a person should read about how the model is trained."""
        return []

    def check_workers(self) -> None:
        """Refuse a model whose statistics would silently be of one worker's rows, where each worker
        is to see its own.
        """
        return

    @abc.abstractmethod
    def bind(self, variables: Variables, call: Call) -> Any:
        """Return the model with these arrays in it, ready to be called inside a trace: the loss
        receives it.
        """

    @abc.abstractmethod
    def get_stats(self, bound: Any) -> Tree:
        """Return the stats that a bound model holds after it was called."""

    @abc.abstractmethod
    def check_remat(self, patterns: tuple[str, ...]) -> None:
        """Refuse patterns that matched no submodule when the loss was traced."""

    def check_adapters(self) -> None:
        """Refuse adapters of layers that were not called when the loss was traced: their gradients
        are zero.
        """
        return

    @abc.abstractmethod
    def rebuild(self, variables: Variables) -> Any:
        """Return an object of the user's kind that holds these arrays."""


class WrappedModel(Model):
    """A model that keeps the arrays of `model` in another way; methods that a subclass does not
    define are the model's.
    """

    def __init__(self, model: Model):
        self._model = model

    def names(self, key: Any, run_loss: Callable[[Any], Any]) -> dict[str, tuple]:
        return self._model.names(key, run_loss)

    def stacks(self) -> dict[str, int]:
        return self._model.stacks()

    def notes(self) -> list[str]:
        return self._model.notes()

    def check_workers(self) -> None:
        self._model.check_workers()

    def bind(self, variables: Variables, call: Call) -> Any:
        return self._model.bind(variables, call)

    def get_stats(self, bound: Any) -> Tree:
        return self._model.get_stats(bound)

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        self._model.check_remat(patterns)

    def check_adapters(self) -> None:
        self._model.check_adapters()


def trace_abstractly(function: Callable[..., Any], subject: str, *args: Any) -> Any:
    """Return shapes as `jax.eval_shape` does, and raise our own errors: nothing is allocated,
    nothing is compiled.
    """
    try:
        # Flax (0.12) shards a variable with names of axes as soon as it is made, and raises where
        # there is no mesh; a layout shards it later.
        with nnx.use_eager_sharding(False):
            return jax.eval_shape(function, *args)
    except (SpmdError, KeyboardInterrupt):
        raise
    except Exception as error:
        if explained := explain_jax_error(error):
            raise ModelError(explained[0], fix=explained[1]) from error
        if needs_values(error):
            why = f"{subject} cannot be traced without data: {first_line(error)}\n"
            why += (
                "    It is traced with abstract arrays, to know every shape before anything is "
                "allocated."
            )
            raise ModelError(why, fix=NO_VALUES) from error
        why = f"{subject} raises {first_line(error)}{failing_line(error)}"
        raise ModelError(why, fix="correct that line.") from error


NO_VALUES = (
    "use jax.numpy instead of numpy on arrays, and no Python branch or float() on an array's value "
    "(jax.lax.cond, jax.numpy.where), at the "
    "line that raised this."
)
# Errors of JAX where a program needs the value of an abstract array.
VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)


def needs_values(error: BaseException | None) -> bool:
    """Return whether an exception is one of `VALUE_ERRORS`, or was raised because of one."""
    # numpy raises an error of its own from that of a tracer
    while error is not None:
        if isinstance(error, VALUE_ERRORS):
            return True
        error = error.__cause__
    return False


def explain_jax_error(error: Exception) -> tuple[str, str] | None:
    """Return the reason and the fix of an error of JAX that is not about shapes; None for other
    errors.
    """
    # JAX (0.10, 0.11) has no exception classes for these: its messages are all there is.
    message = str(error)
    axis = re.search(r"unbound axis name: (\w+)", message)
    if isinstance(error, NameError) and axis:
        return (
            f'the model or the loss runs a collective over an axis "{axis[1]}" (such as '
            "jax.lax.pmean), which is not bound here.",
            "take it out: gradients, metrics and the statistics of BatchNorm are averaged over the "
            "workers already.",
        )
    if "with_sharding_constraint" in message and "mesh" in message:
        return (
            "the model calls with_sharding_constraint by a name that it imported, so spmd cannot "
            "pass it the mesh.",
            "call it as jax.lax.with_sharding_constraint, or take it out.",
        )
    if "PartitionSpec" in message and "mesh context" in message:
        return (
            "the model shards its arrays itself, by out_sharding, which needs a mesh with explicit "
            "axes; here the layout "
            "says where arrays are.",
            "the model without shardings of its own, and [[activations]] for what its submodules "
            "return.",
        )
    return None


# Arguments and fields that switch between training and evaluation, with their values in training.
SWITCHES = {
    **dict.fromkeys(("train", "training", "is_train", "is_training"), True),
    **dict.fromkeys(("deterministic", "use_running_average", "eval_mode"), False),
}


def open_parameters(
    function: Callable[..., Any], kwargs: Mapping[str, Any], positional: int
) -> list[inspect.Parameter]:
    """Return the parameters of a function that a call leaves open: the call passes the first
    `positional` ones by position, and `kwargs` by name.
    """
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    open_ones = []
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        passed = index < positional and parameter.kind in by_position
        if not passed and parameter.name not in kwargs:
            open_ones.append(parameter)
    return open_ones


def with_train_flag(
    function: Callable[..., Any], kwargs: dict[str, Any], *, training: bool, positional: int = 0
) -> dict[str, Any]:
    """Return `kwargs` with the switches of training that `function` takes, unless the caller gave
    them, as one of its first arguments or by name.
    """
    names = [parameter.name for parameter in open_parameters(function, kwargs, positional)]
    switches = {name: SWITCHES[name] == training for name in SWITCHES if name in names}
    return switches | kwargs


@dataclasses.dataclass(eq=False)
class UnboundAxes:
    """Names of axes over which BatchNorms are to average, and which the model does not bind; the
    data axes take their place.
    """

    names: dict[str, None] = dataclasses.field(default_factory=dict)

    def notes(self) -> list[str]:
        """Return a line for each of these axes."""
        return [
            f'note: BatchNorm(axis_name="{name}"): the model binds no such axis; it averages over '
            "the workers."
            for name in self.names
        ]


def averaging_axes(
    axis_name: Any, sync_axes: tuple[str, ...], unbound: UnboundAxes
) -> tuple[str, ...] | None:
    """Return the axes over which a BatchNorm averages its statistics: those of the workers, and
    those of its `axis_name` that the model binds.

    Called where the layer is called: `linen.vmap` or `nnx.vmap` bind names of axes around it.
    """
    names = axis_name
    if axis_name is None:
        names = ()
    elif not isinstance(axis_name, tuple | list):
        names = (axis_name,)
    bound = []
    for name in names:
        if not collectives.is_bound(name):
            unbound.names[str(name)] = None
        elif name not in sync_axes:
            bound.append(name)
    return (*bound, *sync_axes) or None


def shape_text(arrays: Mapping[str, Any], path: str) -> str:
    """Return dtype and shape of an array, or "nothing"."""
    if path not in arrays:
        return "nothing"
    return describe(arrays[path])


def shape_problems(passed: Mapping[str, Any], made: Mapping[str, Any], maker: str) -> list[Problem]:
    """Return the problems of arrays by path whose shapes are not those that `maker` makes; dtypes
    may differ.
    """
    problems = []
    for path in dict.fromkeys([*made, *passed]):
        if path not in passed or path not in made or np.shape(passed[path]) != np.shape(made[path]):
            text = f"given {shape_text(passed, path)}, {maker} makes {shape_text(made, path)}"
            problems.append(Problem(path, [text]))
    return problems


def remat_policies(
    remat: tuple[tuple[str, Callable[..., Any]], ...], paths: Iterable[str]
) -> dict[str, Callable[..., Any]]:
    """Return the policy of each of these submodules that a pattern of `Call.remat` matches, by
    path.

    Raises:
      ModelError: two for one submodule, or one inside another: of two nested `jax.checkpoint` the
        outer one decides.
    """
    paths = list(paths)
    policies: dict[str, tuple[str, Callable[..., Any]]] = {}
    for pattern, policy in remat:
        for path in matches(pattern, paths):
            policies.setdefault(path, (pattern, policy))
    for path, (first, policy) in policies.items():
        others = [
            (pattern, path)
            for pattern, other in remat
            if other is not policy and matches(pattern, [path])
        ]
        outer = [path.rsplit("/", count)[0] for count in range(1, path.count("/") + 1)]
        others += [
            (policies[parent][0], parent)
            for parent in outer
            if parent in policies and policies[parent][1] is not policy
        ]
        for pattern, other in others:
            why = f'[remat]: "{first}" and "{pattern}" say different things of {path}'
            if other != path:
                why += f", a part of {other}"
            raise ModelError(
                f"{why}.",
                fix="one of the two: what is said of a module holds for all of its parts.",
            )
    return {path: policy for path, (_, policy) in policies.items()}


def no_such_module(pattern: str, paths: list[str]) -> ModelError:
    """Return the error for a remat pattern that matches none of these submodules."""
    fix = "a model with submodules, or a layout without it."
    if paths:
        fix = f"one of {', '.join(paths[:12])}"
    return ModelError(f'[remat] modules: "{pattern}" matches no submodule of the model.', fix=fix)
