"""The user's model, of any kind, behind the common interface."""

import inspect
from collections.abc import Callable
from typing import Any

from flax import linen, nnx

from spmd.errors import ModelError, option, short_repr, type_name
from spmd.models.base import Model, trace_abstractly
from spmd.models.flax_linen import LinenModel
from spmd.models.flax_nnx import NnxModel
from spmd.models.functional import FunctionalModel, FunctionCall, FunctionModel


def wrap(model: Any) -> Model:
    """Return the user's model behind the common interface.

    Raises:
      ModelError: not an nnx.Module, a linen.Module, a FunctionalModel, nor a function of no
        arguments returning one.
    """
    if isinstance(model, type):
        _check_library(model)
        raise ModelError(
            f"{option('model', model.__name__)} is a class.", fix=f"{how_to_build(model)}."
        )
    _check_library(type(model))
    if isinstance(model, Model):
        return model
    if isinstance(model, nnx.Module):
        return NnxModel(lambda: model, concrete=model)
    if isinstance(model, linen.Module):
        return LinenModel(model)
    if isinstance(model, FunctionalModel):
        return FunctionModel(model)
    if isinstance(model, FunctionCall):
        return model.as_model
    if callable(model):
        return _wrap_factory(model)
    fix = (
        "an nnx.Module, a linen.Module, spmd.FunctionalModel(init, apply), or a function of no "
        "arguments that returns one."
    )
    raise ModelError(f"{option('model', short_repr(model))} is {type_name(model)}.", fix=fix)


def how_to_build(kind: type) -> str:
    """Return a fix for a class in the place of a model, with the arguments that it needs.

    >>> how_to_build(type("Net", (linen.Module,), {"__annotations__": {"width": int}}))
    'Net(width=...)'
    >>> how_to_build(nnx.Linear)
    'a function that builds it: lambda: Linear(in_features=..., out_features=..., rngs=nnx.Rngs(0))'
    """
    arguments = []
    # Not the arguments of the class, which nnx hides behind its metaclass.
    for name in missing_arguments(kind.__init__)[1:]:
        if name == "rngs":
            arguments.append("rngs=nnx.Rngs(0)")
        elif name not in ("parent", "name"):
            arguments.append(f"{name}=...")
    call = f"{kind.__name__}({', '.join(arguments)})"
    if issubclass(kind, linen.Module):
        return call
    return f"a function that builds it: lambda: {call}"


# By package: its name, why its models cannot be trained as they are, and what can be done.
LIBRARIES = {
    "torch": (
        "PyTorch",
        "which JAX cannot trace",
        "the same network as an nnx.Module; its weights can be brought along, "
        "nnx.Param(tensor.detach().cpu().numpy())",
    ),
    "keras": (
        "Keras",
        "which keeps its arrays itself, where spmd trains trees of arrays",
        'under KERAS_BACKEND="jax": spmd.FunctionalModel(lambda key: ([v.value for v in '
        "model.trainable_variables], "
        "[v.value for v in model.non_trainable_variables]), "
        "lambda params, state, x, train: model.stateless_call(params, state, x, training=train), "
        "stateful=True)",
    ),
    "haiku": (
        "haiku",
        "which spmd knows as a FunctionalModel",
        "spmd.FunctionalModel(lambda key: f.init(key, x), lambda params, x, rng=None: "
        "f.apply(params, rng, x)); "
        "of transform_with_state: stateful=True and  lambda params, state, x, rng=None: "
        "f.apply(params, state, rng, x)",
    ),
    "equinox": (
        "Equinox",
        "which does not say what of it is trained",
        "params, static = equinox.partition(model, equinox.is_inexact_array) and  "
        "spmd.FunctionalModel(lambda key: params, lambda params, x: "
        "jax.vmap(equinox.combine(params, static))(x))",
    ),
}
ALIASES = {"tensorflow": "keras", "tf_keras": "keras"}


def _check_library(kind: type) -> None:
    """Refuse the models of other libraries by their packages' names; most of them can be called,
    and would be taken for factories.
    """
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        package = ALIASES.get(package, package)
        if package in LIBRARIES:
            name, why, fix = LIBRARIES[package]
            raise ModelError(f"the model is a {kind.__name__} of {name}, {why}.", fix=f"{fix}.")


def _wrap_factory(factory: Callable[[], Any]) -> Model:
    """Return the model that a factory returns; it is traced without allocating anything."""
    missing = missing_arguments(factory)
    if missing:
        fix = f"a function of none: lambda: factory({missing[0]}=...)."
        raise ModelError(f"the model's factory takes arguments: {', '.join(missing)}.", fix=fix)
    nnx_model = NnxModel(factory)
    built = list[Any]()

    def build() -> Any:
        built.append(factory())
        if not isinstance(built[0], nnx.Module):
            return None
        return nnx_model.examine(built[0])

    shapes = trace_abstractly(build, "the model's factory")
    (model,) = built
    _check_library(type(model))
    if isinstance(model, nnx.Module):
        nnx_model.remember(shapes)
        return nnx_model
    if not isinstance(model, linen.Module | FunctionalModel):
        fix = "return an nnx.Module, a linen.Module or an spmd.FunctionalModel."
        raise ModelError(f"the model's factory returned {type_name(model)}.", fix=fix)
    return wrap(factory())


def missing_arguments(factory: Callable[..., Any]) -> list[str]:
    """Return the arguments without which a function of the user's cannot be called."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
