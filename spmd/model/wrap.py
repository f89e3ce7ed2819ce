"""Which kind of model the user gave."""

from collections.abc import Callable
from typing import Any, cast

from flax import linen, nnx

from spmd.errors import ModelError
from spmd.model.base import Model, abstractly
from spmd.model.flax_linen import LinenModel
from spmd.model.flax_nnx import NnxModel
from spmd.model.functional import FunctionalModel, FunctionModel


def wrap(model: Any) -> Model:
    """The user's model behind the common interface.

    Raises:
      ModelError: not an nnx.Module, a linen.Module, a FunctionalModel, nor a function of no arguments returning one.
    """
    if isinstance(model, type):
        raise ModelError(
            f"model={model.__name__} is a class.\n    cure: pass a function that builds it: lambda: {model.__name__}(rngs=nnx.Rngs(0))."
        )
    if isinstance(model, nnx.Module):
        return NnxModel(lambda: model, concrete=model)
    if isinstance(model, linen.Module):
        return LinenModel(model)
    if isinstance(model, FunctionalModel):
        return FunctionModel(model)
    if callable(model):
        kind = _built_kind(model)
        return NnxModel(cast(Callable[[], nnx.Module], model)) if issubclass(kind, nnx.Module) else wrap(model())
    raise ModelError(
        f"model={model!r} is a {type(model).__name__}.\n    cure: an nnx.Module, a linen.Module, spmd.FunctionalModel(init, apply), "
        "or a function of no arguments that returns one."
    )


def _built_kind(factory: Callable[[], Any]) -> type:
    """The type that a factory returns, found by tracing it without allocating anything."""
    found: list[type] = []
    abstractly(lambda: found.append(type(factory())), "the model's factory")
    if not issubclass(found[0], nnx.Module | linen.Module | FunctionalModel):
        raise ModelError(f"the model's factory returned a {found[0].__name__}; wanted an nnx.Module, a linen.Module or a FunctionalModel.")
    return found[0]
