"""Models as two plain functions."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from spmd.base.tree import Tree, flatten
from spmd.errors import ModelError, problems_text, type_name
from spmd.models.base import (
    SWITCHES,
    Call,
    Model,
    Variables,
    open_parameters,
    shape_problems,
    shape_text,
    trace_abstractly,
    with_train_flag,
)

# Arguments of `apply` that are passed by name.
RESERVED = ("rng", "axis_name", *SWITCHES)


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A model as two functions: `init(key) -> params`, `apply(params, *inputs) -> outputs`.

    `apply` may take the keywords `rng` (a key, in training only), `train` (or `training`,
    `is_train`, `is_training`; `deterministic`, `use_running_average`, `eval_mode` are its opposite)
    and `axis_name`, after its inputs; they are passed when it does. `axis_name` are the mesh axes
    of the workers, of which each sees its own rows, for `jax.lax.pmean` and the like; None where
    all rows are seen.

    Args:
      init: `init(key) -> params`, a tree of arrays.
      apply: `apply(params, *inputs) -> outputs`.
      stateful: the model has state that a call changes, such as batch statistics: `init(key) ->
        (params, state)` and `apply(params, state, *inputs) -> (outputs, state)`. State has no
        gradient; floats are averaged over the workers after a step, and of integers the largest is
        kept. What evaluation changes is dropped.

    Example:
      >>> import jax.numpy as jnp
      >>> model = FunctionalModel(
      ...     init=lambda key: {"w": jnp.zeros((4, 2))}, apply=lambda params, x: x @ params["w"]
      ... )
    """

    init: Callable[..., Any]
    apply: Callable[..., Any]
    stateful: bool = False

    def bind(self, params: Tree, state: Tree = None) -> "FunctionCall":
        """Return the model with these parameters: to be called, or to be trained from there, by
        `fit(model.bind(params), ...)`.
        """
        if self.stateful != (state is not None):
            fix = "model.bind(params), or FunctionalModel(..., stateful=True)."
            if self.stateful:
                fix = "model.bind(params, state)."
            raise ModelError(
                f"bind: the model is {'' if self.stateful else 'not '}stateful.", fix=fix
            )
        arrays = {"params": params}
        if self.stateful:
            arrays["state"] = state
        made = arrays
        # Arrays that are passed need no `init` that can be traced.
        with contextlib.suppress(ModelError):
            made = trace_abstractly(
                self._made, "the model", jax.eval_shape(lambda: jax.random.key(0))
            )
        _check_shapes(arrays, made)
        return FunctionCall(self, params, state, Call(training=False))

    def _made(self, key: Any) -> dict[str, Tree]:
        """Return the trees that `init` makes, by name."""
        made = self.init(key)
        if not self.stateful:
            return {"params": made}
        params, state = _pair(made, "init", "(params, state)")
        return {"params": params, "state": state}


class FunctionModel(Model):
    """A `FunctionalModel` behind the common interface; `variables`, if it was given with them."""

    def __init__(self, model: FunctionalModel, variables: Variables | None = None):
        self._model = model
        self._variables = variables

    @property
    def concrete(self) -> Variables | None:
        return self._variables

    def make_variables(self, key: Any, run_loss: Callable[[Any], Any]) -> Variables:
        del run_loss
        if self._variables is not None:
            return self._variables
        made = self._model._made(key)
        return Variables(made["params"], made.get("state", {}), {})

    def names(self, key: Any, run_loss: Callable[[Any], Any]) -> dict[str, tuple]:
        del key, run_loss
        return {}

    def check_workers(self) -> None:
        if (
            self._model.stateful
            and "axis_name" not in inspect.signature(self._model.apply).parameters
        ):
            why = (
                "the model has state, and each worker calls it with its own rows: batch statistics "
                "would be of these rows alone."
            )
            fix = (
                "a keyword axis_name=None of apply, over which batch statistics are averaged "
                "(jax.lax.pmean, or BatchNorm's own option), "
            )
            raise ModelError(
                why,
                fix=f"{fix}and which other state may ignore; or  [gradients] reduction = "
                '"compiler".',
            )

    def bind(self, variables: Variables, call: Call) -> "FunctionCall":
        return FunctionCall(self._model, variables.params, variables.stats, call)

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        if patterns:
            fix = "take `modules` out, or call jax.checkpoint in apply."
            raise ModelError(
                "[remat] modules names submodules; a FunctionalModel has none.", fix=fix
            )

    def get_stats(self, bound: "FunctionCall") -> Tree:
        return bound.state

    def rebuild(self, variables: Variables) -> "FunctionCall":
        return self.bind(variables, Call(training=False))


class FunctionCall:
    """A functional model with its arrays: call it as `model(x)`; `params` and `state` are the
    trees.
    """

    def __init__(self, model: FunctionalModel, params: Tree, state: Tree, call: Call):
        self._model = model
        self.params = params
        self.state = state
        if state is None:
            self.state = {}
        self._call = call
        self._calls = 0

    @property
    def as_model(self) -> FunctionModel:
        """Return the model that begins with these arrays."""
        return FunctionModel(self._model, Variables(self.params, self.state, {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function."""
        call = self._call
        apply = self._model.apply
        positional = len(args) + len(_leading(self._model))
        open_names = [parameter.name for parameter in open_parameters(apply, kwargs, positional)]
        kwargs = with_train_flag(apply, kwargs, training=call.training, positional=positional)
        if "rng" in open_names and call.key is not None:
            kwargs.setdefault("rng", call.localize(jax.random.fold_in(call.key, self._calls)))
            self._calls += 1
        if "axis_name" in open_names:
            kwargs.setdefault("axis_name", call.sync_axes or None)
        _check_call(self._model, len(args), kwargs)
        # Flax layers cast their inputs; a function does not.
        if call.dtype is not None:
            args = jax.tree.map(functools.partial(_cast, dtype=call.dtype), args)
        if not self._model.stateful:
            return apply(self.params, *args, **kwargs)
        returned = apply(self.params, self.state, *args, **kwargs)
        outputs, state = _pair(returned, "apply", "(outputs, state)")
        _check_state(self.state, state)
        if call.training:
            self.state = state
        return outputs


def _leading(model: FunctionalModel) -> tuple[str, ...]:
    """Return the first arguments of `apply`."""
    if model.stateful:
        return "params", "state"
    return ("params",)


def _cast(leaf: Any, dtype: Any) -> Any:
    if getattr(leaf, "dtype", None) == "float32":
        return leaf.astype(dtype)
    return leaf


def _check_call(model: FunctionalModel, inputs: int, kwargs: Mapping[str, Any]) -> None:
    """Refuse a call that Python would refuse, if names that spmd passes itself are why."""
    signature = inspect.signature(model.apply)
    leading = _leading(model)
    try:
        signature.bind(*leading, *range(inputs), **kwargs)
    except TypeError as error:
        names = list(signature.parameters)
        reserved = [name for name in names if name in RESERVED]
        among_inputs = reserved != names[len(names) - len(reserved) :]
        needs_key = (
            "rng" in reserved and signature.parameters["rng"].default is inspect.Parameter.empty
        )
        if not among_inputs and not needs_key:
            return
        why = (
            f"apply{signature} is called with {' and '.join(leading)}, and {inputs} "
            f"input{'' if inputs == 1 else 's'}: {error}.\n"
        )
        why += (
            f"    spmd itself passes {', '.join(reserved)} by name; reserved are "
            f"{', '.join(RESERVED)}."
        )
        fix = (
            "these after the inputs, and rng=None, since evaluation has no key; another name for "
            "an input that is called so:\n"
        )
        raise ModelError(why, fix=f"{fix}        apply={_reordered(signature)}") from error


def _reordered(signature: inspect.Signature) -> str:
    """Return the text of a function that calls `apply`, with the reserved names after its
    inputs.
    """
    inputs = []
    keywords = []
    arguments = []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in signature.parameters.values():
        name = parameter.name
        bare = parameter.replace(annotation=parameter.empty)
        if name == "rng":
            keywords.append(bare.replace(kind=parameter.KEYWORD_ONLY, default=None))
        elif name in RESERVED:
            keywords.append(bare.replace(kind=parameter.KEYWORD_ONLY))
        else:
            inputs.append(bare)
        if parameter.kind is parameter.KEYWORD_ONLY:
            arguments.append(f"{name}={name}")
        else:
            arguments.append(f"{stars.get(parameter.kind, '')}{name}")
    parameters = sorted([*inputs, *keywords], key=lambda parameter: parameter.kind)
    return f"lambda {str(inspect.Signature(parameters))[1:-1]}: apply({', '.join(arguments)})"


def _pair(returned: Any, function: str, form: str) -> tuple:
    """Return the two parts that a function of a stateful model returned."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ModelError(
            f"{function} of a stateful model returned {type_name(returned)}.",
            fix=f"{form}, a tuple of two.",
        )
    return returned


def _check_shapes(arrays: Mapping[str, Tree], made: Mapping[str, Tree]) -> None:
    """Refuse arrays for `bind` that have other shapes than those that the model makes."""
    problems = shape_problems(flatten(arrays), flatten(made), "init")
    if problems:
        text = problems_text(
            "bind: the arrays that are given are not of the shapes that init makes", problems
        )
        raise ModelError(
            f"{text}\n",
            fix="arrays of the shapes that init makes; or a FunctionalModel whose init makes "
            "these.",
        )


def _check_state(before: Tree, after: Tree) -> None:
    """Refuse a state that is another tree than before, or has other shapes."""
    old = flatten(before)
    new = flatten(after)
    for path in [*old, *new]:
        if path not in old or path not in new or old[path].shape != new[path].shape:
            why = (
                f"apply was given a state with {path} = {shape_text(old, path)}, and returned one "
                f"with {shape_text(new, path)}."
            )
            raise ModelError(why, fix="a state of equal shapes.")
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ModelError(
            "apply returned a state in another kind of tree than it was given.",
            fix="the same dicts, lists and tuples.",
        )
