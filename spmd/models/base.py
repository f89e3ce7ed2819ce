"""What the rest of the library knows of a model: three trees of arrays and a way to call them."""

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
from spmd.base.tree import Tree, describe
from spmd.errors import ModelError, Problem, SpmdError, first_line, user_line
from spmd.wire import collectives

STACKED = "stacked"  # metadata of a stack's parameter: of how many layers it is, along dim 0
# names, in a traced loss, the parameters that a stack takes to its layers
LAYER_PARAMS = "layer_params"
# whether the module that is called next is recomputed by its caller
RECOMPUTED = contextvars.ContextVar("recomputed", default=False)
PATH = "path"  # metadata of a stack's parameter in a bound model: its path in the model


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
    """How a model is called inside a step.

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
    """What the rest of the library needs of a model."""

    @property
    def concrete(self) -> Variables | None:
        """The arrays of a model that was passed with arrays; None for one that is built later.
        Called outside of traces.
        """
        return None

    @property
    def handed_over(self) -> bool:
        """Whether the arrays of `concrete` may be used and consumed, not only copied."""
        return False

    def release(self) -> None:
        """Delete the arrays of a model that was handed over; it cannot be called from here on."""
        return

    @abc.abstractmethod
    def init(self, key: Any, run: Callable[[Any], Any]) -> Variables:
        """All arrays, under a trace; `run` calls the loss with a stand-in for the model, for one
        that needs data.
        """

    def shapes(self, run: Callable[[Any], Any]) -> Variables:
        """Shapes and dtypes of what `init` makes, without allocating it."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return trace_abstractly(lambda key: self.init(key, run), "the model", key)

    @abc.abstractmethod
    def names(self, key: Any, run: Callable[[Any], Any]) -> dict[str, tuple]:
        """Logical axis names by path, for the parameters that carry them; of a stack's those of one
        layer.
        """

    def stacks(self) -> dict[str, int]:
        """How many layers a parameter has along dim 0, by path, for those of a stack
        (`spmd.nn.LayerStack`).
        """
        return {}

    def kernels(self) -> frozenset[str]:
        """Paths of the parameters that can be quantized: kernels that a layer multiplies by, and
        uses in no other way.
        """
        return frozenset()

    def adapters(self) -> frozenset[str]:
        """Paths of the parameters of adapters."""
        return frozenset()

    def notes(self) -> list[str]:
        """What a person should know of how the model is trained."""
        return []

    def check_workers(self) -> None:
        """Refuse a model whose statistics would silently be of one worker's rows, where each worker
        is to see its own.
        """
        return

    @abc.abstractmethod
    def bind(self, variables: Variables, call: Call) -> Any:
        """The model with these arrays in it, ready to be called inside a trace; what the loss
        receives.
        """

    @abc.abstractmethod
    def get_stats(self, bound: Any) -> Tree:
        """The stats a bound model holds after it was called."""

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
        """The user's own kind of object, holding these arrays."""


class WrappedModel(Model):
    """A model that keeps the arrays of `model` in another way; what a subclass does not define is
    as of the model.
    """

    def __init__(self, model: Model):
        self._model = model

    def names(self, key: Any, run: Callable[[Any], Any]) -> dict[str, tuple]:
        return self._model.names(key, run)

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
    """`jax.eval_shape` with our own error: nothing is allocated, nothing is compiled."""
    try:
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
        why = f"{subject} raises {first_line(error)}{user_line(error)}"
        raise ModelError(why, fix="correct that line.") from error


NO_VALUES = (
    "use jax.numpy instead of numpy on arrays, and no Python branch or float() on an array's value "
    "(jax.lax.cond, jax.numpy.where), at the "
    "line that raised this."
)
VALUE_ERRORS = (  # what JAX raises where a program needs the value of an abstract array
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)


def needs_values(error: BaseException | None) -> bool:
    """Whether an exception is one of these, or was raised because of one, as numpy does."""
    return error is not None and (isinstance(error, VALUE_ERRORS) or needs_values(error.__cause__))


def explain_jax_error(error: Exception) -> tuple[str, str] | None:
    """What is wrong and how to fix it, of errors of JAX that are not about shapes; None of
    others.
    """
    message = str(error)
    if isinstance(error, NameError) and (axis := re.search(r"unbound axis name: (\w+)", message)):
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


# arguments and fields that switch between training and evaluation, with their values in training
SWITCHES = {
    **dict.fromkeys(("train", "training", "is_train", "is_training"), True),
    **dict.fromkeys(("deterministic", "use_running_average", "eval_mode"), False),
}


def open_parameters(
    function: Callable[..., Any], kwargs: Mapping[str, Any], positional: int
) -> list[inspect.Parameter]:
    """The parameters of a function that a call leaves open, which gives the first ones by position,
    and others by name.
    """
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = enumerate(inspect.signature(function).parameters.values())
    return [
        p
        for index, p in parameters
        if p.name not in kwargs and not (index < positional and p.kind in by_position)
    ]


def with_train_flag(
    function: Callable[..., Any], kwargs: dict[str, Any], *, training: bool, positional: int = 0
) -> dict[str, Any]:
    """`kwargs` with the train/eval switch that `function` takes, unless the caller gave it, as one
    of its first arguments or by name.
    """
    names = [parameter.name for parameter in open_parameters(function, kwargs, positional)]
    return {**{name: SWITCHES[name] == training for name in SWITCHES if name in names}, **kwargs}


@dataclasses.dataclass(eq=False)
class UnboundAxes:
    """Names of axes over which BatchNorms are to average, and which the model does not bind; the
    data axes take their place.
    """

    names: dict[str, None] = dataclasses.field(default_factory=dict)

    def notes(self) -> list[str]:
        """Say so."""
        return [
            f'note: BatchNorm(axis_name="{name}"): the model binds no such axis; it averages over '
            "the workers."
            for name in self.names
        ]


def averaging_axes(
    own: Any, sync_axes: tuple[str, ...], unbound: UnboundAxes
) -> tuple[str, ...] | None:
    """The axes over which a BatchNorm averages its statistics: those of the workers, and of its own
    axis_name what the model binds.

    Called where the layer is called: `linen.vmap` or `nnx.vmap` bind names of axes around it.
    """
    names = own if isinstance(own, tuple | list) else () if own is None else (own,)
    bound = [name for name in names if collectives.is_bound(name)]
    unbound.names.update(dict.fromkeys(str(name) for name in names if name not in bound))
    return (*(name for name in bound if name not in sync_axes), *sync_axes) or None


def shape_text(arrays: Mapping[str, Any], path: str) -> str:
    """Dtype and shape of an array, or "nothing"."""
    return describe(arrays[path]) if path in arrays else "nothing"


def shape_problems(given: Mapping[str, Any], made: Mapping[str, Any], maker: str) -> list[Problem]:
    """Arrays by path whose shapes are not those that `maker` makes; dtypes may differ."""
    return [
        Problem(path, [f"given {shape_text(given, path)}, {maker} makes {shape_text(made, path)}"])
        for path in dict.fromkeys([*made, *given])
        if path not in given or path not in made or np.shape(given[path]) != np.shape(made[path])
    ]


def remat_policies(
    remat: tuple[tuple[str, Callable[..., Any]], ...], paths: Iterable[str]
) -> dict[str, Callable[..., Any]]:
    """The policy of each of these submodules that a pattern of `Call.remat` matches, by path.

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
            why = f'[remat]: "{first}" and "{pattern}" say different things of {path}' + (
                f", a part of {other}." if other != path else "."
            )
            raise ModelError(
                why, fix="one of the two: what is said of a module holds for all of its parts."
            )
    return {path: policy for path, (_, policy) in policies.items()}


def no_such_module(pattern: str, known: list[str]) -> ModelError:
    """The error for a remat pattern that names nothing."""
    fix = f"one of {', '.join(known[:12])}" if known else ""
    return ModelError(f'[remat] modules: "{pattern}" matches no submodule of the model.', fix=fix)
