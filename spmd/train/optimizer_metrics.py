"""Metrics that a step has of its optimizer: the norm of the gradients, the learning rate, and
skipped updates.
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
    """Return a transformation that changes nothing, and keeps the norm of the updates that it gets:
    the norm of the gradients, as the first of a chain.

    A run under `fit` has it as the metric `grad_norm`, the norm of the mean gradient over all
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
        # the sum of squares of a leaf in float16 would overflow from 256 on
        updates_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
        return updates, GradientNorm(optax.tree.norm(updates_float32))

    # optax declares `update` with a state of any type
    return optax.GradientTransformation(lambda params: GradientNorm(jnp.float32(0)), update)  # type: ignore[arg-type]


def measured(opt: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return values and counts by name, from an optimizer's new state. Where each worker has an
    optimizer, a value is the mean over workers.

    The learning rate is that of `optax.inject_hyperparams`, which keeps it in its state.
    """
    values: dict[str, Any] = {}
    for node in nodes(opt):
        if isinstance(node, GradientNorm):
            values.setdefault(GRAD_NORM, node.norm)
        elif isinstance(node, INJECTED) and LEARNING_RATE in node.hyperparams:
            values.setdefault(LEARNING_RATE, node.hyperparams[LEARNING_RATE])
    pairs = {}
    for name in sorted(values):
        pairs[name] = jnp.mean(values[name], dtype=jnp.float32), jnp.float32(1)
    return pairs | measure_skips(opt)


def pack_measured(opt: Any) -> jax.Array:
    """Return `measured` as float32[2, names]."""
    pairs = measured(opt)
    if not pairs:
        return jnp.zeros((2, 0))
    return jnp.stack([jnp.stack(pair) for pair in pairs.values()], axis=1)


def measured_names(opt: Any) -> tuple[str, ...]:
    """Return the names of the metrics of an optimizer, by its state; shapes will do."""
    return tuple(jax.eval_shape(measured, opt))
