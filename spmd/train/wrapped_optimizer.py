"""Optimizers around others: their options, which a resumed run compares, and functions for those
that may skip an update.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd.base.tree import Tree
from spmd.errors import CommunicationError
from spmd.wire.states import communicates

MOST_COUNTED = 2**31 - 1  # in int32


class WrappedOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer around another.

    Attributes:
      options: arguments that it and those inside it were made with, by name.
    """

    options: Mapping[str, Any] = {}


def wrap_optimizer(
    name: str, init: Callable[..., Any], update: Callable[..., Any], inner: Any, **options: Any
) -> WrappedOptimizer:
    """Return an optimizer of this name around `inner`."""
    wrapped = WrappedOptimizer(init, update)
    named = {f"{name}({option})": value for option, value in options.items()}
    wrapped.options = {**options_of(inner), **named}
    return wrapped


def options_of(optimizer: Any) -> Mapping[str, Any]:
    """Return the arguments that an optimizer was made with, as far as they are known; none for an
    optimizer of optax.
    """
    if not isinstance(optimizer, WrappedOptimizer):
        return {}
    return optimizer.options


def init_alone(name: str, optimizer: optax.GradientTransformationExtraArgs, params: Tree) -> Any:
    """Return the first state of an optimizer that gets mean gradients.

    Raises:
      CommunicationError: it communicates, so it gets the gradients of one worker.
    """
    inner = optimizer.init(params)
    if communicates(inner):
        raise CommunicationError(
            f"{name} around a communication: it looks at each worker's own gradients, before they "
            "are reduced, so workers would decide differently.",
            fix=f"optax.chain(wire.all_reduce(...), {name}(optimizer)).",
        )
    return inner


def where_applied(applied: jax.Array, updates: Tree, inner: Any, before: Any) -> tuple[Tree, Any]:
    """Return updates and the optimizer's state if they are applied; or else zeros and the state
    before.
    """
    # never a branch, which only some devices would take, and never by multiplying: 0 * NaN
    updates = jax.tree.map(lambda leaf: jnp.where(applied, leaf, jnp.zeros_like(leaf)), updates)
    return updates, jax.tree.map(lambda new, old: jnp.where(applied, new, old), inner, before)
