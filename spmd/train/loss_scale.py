"""Loss scaling: gradients computed in float16 that are too small for it, or too large."""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.base.tree import Tree
from spmd.errors import OptionError, check_integer, short_repr
from spmd.train.adapt_optimizer import (
    MOST_COUNTED,
    init_alone,
    options_of,
    where_applied,
    wrap_optimizer,
)
from spmd.train.state import check_optimizer

SMALLEST, LARGEST = 2.0**-24, 2.0**40  # of the scale
MOST = float(jnp.finfo(jnp.float16).max)
# skipped updates: the scale is then 2**-32 of what it was, so it cannot be the cause
MAX_IN_A_ROW = 32


class LossScale(NamedTuple):
    """The state of `scale_loss`.

    Attributes:
      inner: the state of the optimizer.
      scale: float32 scalar, by which the next step's loss is multiplied.
      since: int32 scalar, updates made since the scale changed.
      skipped: int32 scalar, updates that were skipped.
      left: int32 scalar, updates that may still be skipped in a row.
      applied: bool scalar, True if the last update was made.
    """

    inner: Any
    scale: jax.Array
    since: jax.Array
    skipped: jax.Array
    left: jax.Array
    applied: jax.Array


def scale_loss(
    optimizer: Any, initial: float = 2.0**20, *, every: int = 2000
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that keeps the scale of a loss whose gradients are computed in float16.

    The mean loss is multiplied by `state.scale` before the backward pass, and the gradients are
    divided by it in float32 after: both are the caller's, in spmd's step the step's. If one is then
    not finite, or was too large for float16 when it was scaled, no update is made, and the scale is
    halved. After `every` updates in a row it is doubled. (Micikevicius et al., arXiv:1710.03740,
    section 3.2.) What is skipped is as in `skip_spikes`.

    `fit`, `Trainer` and `sweep` with `precision="float16"` put it around their optimizer; put it
    there yourself for other numbers. They measure `loss_scale` (of the next step) and `skipped` (0
    or 1), and of skipped steps `skips_left`: `fit` ends when 32 in a row were skipped. Those of a
    NaN in the data are among them, and are not counted in the `max_in_a_row` of a `skip_spikes`
    inside. Gradients are too large if those of all rows together are, so the decision does not
    depend on how many rows a device has; but where gradients of single devices overflow and cancel
    in the sum, a mesh of other devices may not skip that step.

    Args:
      optimizer: any optax gradient transformation.
      initial: the first scale; a power of 2 rounds nothing.
      every: updates between doublings.

    Returns:
      An optax gradient transformation, whose state is a `LossScale`.

    Raises:
      OptimizerError: `optimizer` is no gradient transformation.
      CommunicationError: as of `skip_spikes`.
      OptionError: `initial` or `every` is out of range.

    Example:
      >>> optimizer = scale_loss(optax.sgd(0.5), 2.0**10)
      >>> params = jnp.float32(3)
      >>> state = optimizer.init(params)
      >>> def loss(params):
      ...     return (1e-4 * (1e-4 * params.astype(jnp.float16))).astype(jnp.float32)
      >>> scaled = jax.grad(lambda params: loss(params) * state.scale)(params)
      >>> updates, state = optimizer.update(scaled / state.scale, state, params)
      >>> float(jax.grad(loss)(params)), f"{float(updates):.1e}"
      (0.0, '-5.0e-09')
    """
    tx = check_optimizer(optimizer)
    is_number = isinstance(initial, numbers.Real) and not isinstance(initial, bool)
    if not is_number or not SMALLEST <= initial <= LARGEST:
        raise OptionError(
            f"scale_loss: initial={short_repr(initial)}.",
            fix="from 2.0**-24 to 2.0**40, such as 2.0**20.",
        )
    check_integer(every, "scale_loss: every", 1, MOST_COUNTED)

    def init(params: Tree) -> LossScale:
        return LossScale(
            inner=init_alone("scale_loss", tx, params),
            scale=jnp.float32(initial),
            since=jnp.int32(0),
            skipped=jnp.int32(0),
            left=jnp.int32(MAX_IN_A_ROW),
            applied=jnp.bool(True),
        )

    def update(
        updates: Tree,
        state: Any,
        params: Tree = None,
        *,
        factor: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Tree, LossScale]:
        """Return updates and the next state.

        Args:
          factor: by which all gradients were larger in the backward pass; None: the scale.
        """
        if factor is None:
            scaled_by = state.scale
        else:
            scaled_by = factor
        in_range = []
        for leaf in jax.tree.leaves(updates):
            # False for a NaN, too
            in_range.append((jnp.abs(leaf).astype(jnp.float32) * scaled_by <= MOST).all())
        applied = jnp.stack(in_range or [jnp.bool(True)]).all()
        updates, inner = tx.update(updates, state.inner, params, **extra)
        updates, inner = where_applied(applied, updates, inner, state.inner)
        since = jnp.where(applied, state.since + 1, 0)
        # Doubling and halving round nothing: gradients are the same under the next scale, unless
        # they overflow or underflow in float16.
        scale = jnp.where(since == every, 2 * state.scale, state.scale)
        scale = jnp.where(applied, scale, state.scale / 2)
        return updates, LossScale(
            inner=inner,
            scale=jnp.clip(scale, SMALLEST, LARGEST),
            since=since % every,
            skipped=state.skipped + 1 - applied.astype(jnp.int32),
            left=jnp.where(applied, MAX_IN_A_ROW, jnp.maximum(state.left - 1, 0)),
            applied=applied,
        )

    return wrap_optimizer("scale_loss", init, update, tx, every=every)


def with_loss_scale(
    optimizer: optax.GradientTransformationExtraArgs, precision: str
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer for a precision: one that keeps a scale of the loss for float16."""
    has_scale = any(name.startswith("scale_loss") for name in options_of(optimizer))
    if precision == "float16" and not has_scale:
        return scale_loss(optimizer)
    return optimizer
