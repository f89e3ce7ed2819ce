"""What a step measures of its optimizer: the norm of the gradients, the learning rate, and which
updates were skipped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.base.tree import Tree, nodes
from spmd.train.skipped_updates import GRAD_NORM, measure_skips

LEARNING_RATE = "learning_rate"
INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


class GradientNorm(NamedTuple):
    """The state of `measure_norm`.

    Attributes:
      norm: float32 scalar, of the newest gradients.
    """

    norm: jax.Array


def measure_norm() -> optax.GradientTransformation:
    """A transformation that changes nothing, and keeps the norm of what it gets: of the gradients,
    as the first of a chain.

    A run under `fit` has it as the metric `grad_norm`, which is that of the mean gradient over all
    workers: square root of the sum of squares of all elements, in float32. Where gradients are
    sharded it is one more all-reduce of a scalar.

    Returns:
      An optax gradient transformation, whose state is a `GradientNorm`.

    Example:
      >>> optimizer = optax.chain(measure_norm(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))
      >>> params = {"w": jnp.zeros(2)}
      >>> _, state = optimizer.update({"w": jnp.array([3.0, 4.0])}, optimizer.init(params), params)
      >>> float(state[0].norm)
      5.0
    """

    def update(
        updates: Tree, state: GradientNorm, params: Tree = None
    ) -> tuple[Tree, GradientNorm]:
        del state, params
        return updates, GradientNorm(
            optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), updates))
        )

    return optax.GradientTransformation(lambda params: GradientNorm(jnp.float32(0)), update)  # type: ignore[arg-type]


def measured(opt: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Values and counts by name, from an optimizer's new state. Where workers have optimizers of
    their own it is the mean over them.

    The learning rate is that of `optax.inject_hyperparams`, which keeps it in its state.
    """
    found: dict[str, Any] = {}
    for node in nodes(opt):
        if isinstance(node, GradientNorm):
            found.setdefault(GRAD_NORM, node.norm)
        elif isinstance(node, INJECTED) and LEARNING_RATE in node.hyperparams:
            found.setdefault(LEARNING_RATE, node.hyperparams[LEARNING_RATE])
    of_state = {
        name: (jnp.mean(value, dtype=jnp.float32), jnp.float32(1))
        for name, value in sorted(found.items())
    }
    return of_state | measure_skips(opt)


def pack_measured(opt: Any) -> jax.Array:
    """`measured` as float32[2, names]."""
    found = measured(opt)
    return (
        jnp.stack([jnp.stack(pair) for pair in found.values()], axis=1)
        if found
        else jnp.zeros((2, 0))
    )


def measured_names(opt: Any) -> tuple[str, ...]:
    """Names of what a step of such an optimizer measures; shapes will do."""
    return tuple(jax.eval_shape(measured, opt))
