"""Optimizers around others, with what they were made with: a resumed run compares it."""

from collections.abc import Callable, Mapping
from typing import Any

import optax


class WrappedOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer around another.

    Attributes:
      options: what it and those inside it were made with, by name.
    """

    options: Mapping[str, Any] = {}


def wrap_optimizer(
    name: str, init: Callable[..., Any], update: Callable[..., Any], inner: Any, **options: Any
) -> WrappedOptimizer:
    """An optimizer of this name around `inner`."""
    wrapped = WrappedOptimizer(init, update)
    wrapped.options = {
        **options_of(inner),
        **{f"{name}({option})": value for option, value in options.items()},
    }
    return wrapped


def options_of(optimizer: Any) -> Mapping[str, Any]:
    """What an optimizer was made with, as far as it is known; nothing of one of optax's."""
    return optimizer.options if isinstance(optimizer, WrappedOptimizer) else {}
