"""Optimizers of optax with an interface of their own, as a step calls all: `optax.lookahead` and
`optax.contrib.sam`. And optimizers around others: their options, which a resumed run compares, and
functions for those that may skip an update.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.base.tree import Tree, nodes
from spmd.errors import CommunicationError, OptimizerError
from spmd.wire.states import communicates

VALUE = "value"  # the name by which a step gives an optimizer the loss
AROUND = (
    "optax.lookahead around all else: optax.lookahead(optax.MultiSteps(optimizer, "
    "k).gradient_transformation(), ...)."
)


MOST_COUNTED = 2**31 - 1  # in int32


class SlowWeights(NamedTuple):
    """The state of `optax.lookahead`, with the slow weights, which optax keeps beside the fast
    ones; those are the model's parameters.

    Attributes:
      inner: of the optimizer.
      slow: the slow weights, shaped and sharded as the optimizer's moments are.
    """

    inner: Any
    slow: Tree


def adapt_optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer with the interface of all others: its update takes gradients, state, parameters
    and extra arguments.

    Args:
      optimizer: a gradient transformation. `optax.lookahead` trains the fast weights, and keeps the
        slow ones in its state (`SlowWeights`). An update that takes extra arguments, but not the
        loss, such as that of `optax.contrib.sam`, is called without it.
    """
    tx = optax.with_extra_args_support(optimizer)
    if not _takes_value(tx.update):
        tx = _without_value(tx)
    if _is_lookahead(tx):
        return _with_slow_weights(tx)
    return tx


def _takes_value(update: Any) -> bool:
    """Return whether an update takes the loss, as far as its signature is known."""
    try:
        parameters = inspect.signature(update).parameters.values()
    except (TypeError, ValueError):  # not known: it is called, and what it raises is reported
        return True
    return any(each.name == VALUE or each.kind is each.VAR_KEYWORD for each in parameters)


def _without_value(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        extra.pop(VALUE, None)
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _is_lookahead(tx: optax.GradientTransformationExtraArgs) -> bool:
    """Return whether an optimizer must be given pairs of fast and slow weights."""
    try:
        state = jax.eval_shape(tx.init, optax.LookaheadParams({}, {}))
    except Exception:  # an optimizer that wants certain parameters is no lookahead
        return False
    return any(isinstance(node, optax.LookaheadState) for node in nodes(state))


def _with_slow_weights(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    def init(params: Tree) -> SlowWeights:
        return SlowWeights(tx.init(optax.LookaheadParams(params, params)), params)

    def update(
        updates: Tree, state: Any, params: Tree = None, **extra: Any
    ) -> tuple[Tree, SlowWeights]:
        updates, inner = tx.update(
            updates, state.inner, optax.LookaheadParams(params, state.slow), **extra
        )
        if not isinstance(updates, optax.LookaheadParams):
            raise OptimizerError(
                "what is around optax.lookahead returns no updates of slow weights.", fix=AROUND
            )
        return updates.fast, SlowWeights(inner, optax.apply_updates(state.slow, updates.slow))

    return wrap_optimizer("lookahead", init, update, tx)


def interface_fix(optimizer: optax.GradientTransformation, params: Tree) -> str:
    """A fix for an optimizer that fails when a step calls it; `params` are shapes."""
    try:
        state = jax.eval_shape(optimizer.init, params)
    except Exception:  # which is what failed
        state = ()
    for node in nodes(state):
        if isinstance(node, optax.LookaheadState):
            return AROUND
        if isinstance(node, optax.contrib.SAMState) and node.cache is None:
            return (
                "optax.contrib.sam(..., opaque_mode=False), whose gradients are made in steps of "
                "their own."
            )
        if isinstance(node, optax.contrib.SAMState):
            return (
                "optax.contrib.sam around all else, as in  optax.contrib.sam(optax.chain(clip, "
                "optimizer), optax.chain(clip, adversary))."
            )
    return (
        "one that needs no more than these; a line search that calls the loss itself is not "
        "supported."
    )


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
