"""Models as two plain functions."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax

from spmd.errors import ModelError
from spmd.model.base import Call, Model, Variables, with_mode
from spmd.tree import Tree


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A model as two functions: `init(key) -> params`, `apply(params, *inputs) -> outputs`.

    `apply` may take the keywords `rng` and `train`; they are passed when it does.

    Example:
      >>> import jax.numpy as jnp
      >>> model = FunctionalModel(init=lambda key: {"w": jnp.zeros((4, 2))}, apply=lambda params, x: x @ params["w"])
    """

    init: Callable[..., Tree]
    apply: Callable[..., Any]

    def bind(self, params: Tree) -> "FunctionCall":
        """The model with these parameters: to be called, or to be trained from there, by `fit(model.bind(params), ...)`."""
        return FunctionCall(self.apply, params, Call(training=False))


class FunctionModel(Model):
    """A `FunctionalModel` behind the common interface; `params`, if it was given with them."""

    def __init__(self, model: FunctionalModel, params: Tree = None):
        self._model, self._params = model, params

    @property
    def concrete(self) -> Variables | None:
        return None if self._params is None else Variables(self._params, {}, {})

    def init(self, key: Any, run: Callable[[Any], Any]) -> Variables:
        del run
        return Variables(self._model.init(key), {}, {})

    def names(self, key: Any, run: Callable[[Any], Any]) -> dict[str, tuple]:
        del key, run
        return {}

    def bind(self, variables: Variables, call: Call) -> "FunctionCall":
        return FunctionCall(self._model.apply, variables.params, call)

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        if patterns:
            raise ModelError(
                "[remat] modules names submodules; a FunctionalModel has none.\n"
                "    cure: take `modules` out, or call jax.checkpoint in apply."
            )

    def stats_of(self, bound: "FunctionCall") -> Tree:
        del bound
        return {}

    def rebuild(self, variables: Variables) -> "FunctionCall":
        return FunctionCall(self._model.apply, variables.params, Call(training=False))


class FunctionCall:
    """A functional model with its parameters: call it as `model(x)`; `params` is the tree."""

    def __init__(self, apply: Callable[..., Any], params: Tree, call: Call):
        self._apply, self.params, self._call, self._calls = apply, params, call, 0

    @property
    def given(self) -> FunctionModel:
        """The model that begins with these parameters."""
        return FunctionModel(FunctionalModel(lambda key: self.params, self._apply), self.params)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function."""
        kwargs = with_mode(self._apply, kwargs, training=self._call.training)
        if "rng" in inspect.signature(self._apply).parameters and self._call.key is not None:
            kwargs.setdefault("rng", self._call.localize(jax.random.fold_in(self._call.key, self._calls)))
            self._calls += 1
        if self._call.dtype is not None:  # flax layers cast their own inputs; here nobody else does
            args = jax.tree.map(lambda x: x.astype(self._call.dtype) if getattr(x, "dtype", None) == "float32" else x, args)
        return self._apply(self.params, *args, **kwargs)
