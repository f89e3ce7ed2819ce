"""Skip the updates of steps whose loss or gradients are far from those of the steps before."""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.base.tree import Tree, describe
from spmd.errors import OptionError, check_integer, short_repr
from spmd.train.state import check_optimizer
from spmd.train.wrapped_optimizer import MOST_COUNTED, init_alone, where_applied, wrap_optimizer

# of the mean: a smaller standard deviation counts as this, so that rounding is no spike where all
# values are alike
LEAST = 0.01


class SpikeSkip(NamedTuple):
    """The state of `skip_spikes`.

    Attributes:
      inner: the state of the optimizer.
      window: float32[2, window], losses and norms of the newest updates that were counted.
      counted: int32 scalar, updates that were made, and whose gradients were not all 0.
      skipped: int32 scalar, updates that were skipped.
      in_a_row: int32 scalar, updates that were skipped since the last one that was made.
      left: int32 scalar, how many more may be; from `in_a_row` and the option, which may change
        when a run resumes.
      seen: float32[2], the last step's loss (0 if `update` got none) and norm.
      limits: float32[2], the largest loss and norm for which that step's update was made.
      applied: bool scalar, True if it was made.
    """

    inner: Any
    window: jax.Array
    counted: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array
    left: jax.Array
    seen: jax.Array
    limits: jax.Array
    applied: jax.Array


def skip_spikes(
    optimizer: Any, *, sigmas: float = 6.0, window: int = 128, max_in_a_row: int = 10
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that makes no update where the loss, or the norm of all gradients, is a
    spike or not finite.

    A spike is larger than mean + sigmas * standard deviation of the last `window` updates that were
    made; a deviation of less than 1 % of the mean counts as 1 %. The first `window` updates only
    fill the window: until then, just what is not finite is skipped. Updates whose gradients are all
    0 do not enter it, and where all losses in it are 0, only the norm is looked at. (PaLM,
    Chowdhery et al., arXiv:2204.02311, section 5.1, skips such batches; the band is that of
    OLMo-core's `SkipStepOptimizer`, on one side, and without skipped values in it.)

    Skipped is all of it: weights, moments, schedules and averages of the optimizer, and in spmd's
    step also batch statistics and what codecs keep, are those of the step before. Steps and data
    are counted on. The decision is one for all workers, from the mean loss and the norm of the mean
    gradient. Meshes sum these in other orders, so a value within rounding of the limit may be
    skipped on one only.

    It goes around all of the optimizer, a clip included: `skip_spikes(optax.chain(clip, adamw))`.
    The loss is optax's extra argument `value`, which `fit` and `Trainer.step` pass; without it,
    only the norm is looked at. They measure `grad_norm` and `skipped` (0 or 1), and of skipped
    steps `loss_limit`, `grad_norm_limit` and `skips_left`. `fit` logs a warning for each skipped
    update, and ends when `max_in_a_row` in a row were skipped; in a loop of your own, look at
    `state.left`.

    Args:
      optimizer: any optax gradient transformation.
      sigmas: standard deviations above the mean.
      window: updates, from 2.
      max_in_a_row: skipped updates after which `fit` raises `DivergedError`.

    Returns:
      An optax gradient transformation, whose state is a `SpikeSkip`.

    Raises:
      OptimizerError: `optimizer` is no gradient transformation.
      CommunicationError: in `init`: the optimizer communicates itself;
        `optax.chain(wire.all_reduce(...), skip_spikes(...))`.
      OptionError: `sigmas`, `window` or `max_in_a_row` is out of range; in `update`: `value` is not
        a scalar.

    Example:
      >>> optimizer = skip_spikes(optax.sgd(1.0), window=2)
      >>> params = jnp.float32(0)
      >>> state = optimizer.init(params)
      >>> for gradient in (-1.0, -1.0, -100.0, -1.0):
      ...     updates, state = optimizer.update(jnp.float32(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params), int(state.skipped)
      (3.0, 1)
    """
    tx = check_optimizer(optimizer)
    is_number = isinstance(sigmas, numbers.Real) and not isinstance(sigmas, bool)
    if not is_number or not 0 < sigmas < float("inf"):
        raise OptionError(
            f"skip_spikes: sigmas={short_repr(sigmas)}.", fix="a number above 0, such as 6."
        )
    check_integer(window, "skip_spikes: window", 2, MOST_COUNTED)
    check_integer(max_in_a_row, "skip_spikes: max_in_a_row", 1, MOST_COUNTED)

    def init(params: Tree) -> SpikeSkip:
        inner = init_alone("skip_spikes", tx, params)
        zero = jnp.int32(0)
        left = jnp.int32(max_in_a_row)
        return SpikeSkip(
            inner=inner,
            window=jnp.zeros((2, window), jnp.float32),
            counted=zero,
            skipped=zero,
            in_a_row=zero,
            left=left,
            seen=jnp.zeros(2, jnp.float32),
            limits=jnp.full(2, jnp.inf, jnp.float32),
            applied=jnp.bool(True),
        )

    def update(
        updates: Tree, state: Any, params: Tree = None, **extra: Any
    ) -> tuple[Tree, SpikeSkip]:
        value = extra.get("value")
        if value is not None and jnp.ndim(value):
            raise OptionError(
                f"skip_spikes: value is {describe(value)}, not one number.",
                fix="the mean loss: update(..., value=loss.mean()).",
            )
        squares = []
        for leaf in jax.tree.leaves(updates):
            # The square of a complex number is no square of its size.
            squares.append(jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))))
        norm = jnp.sqrt(sum(squares, jnp.float32(0)))
        if value is None:
            loss = jnp.float32(0)
        else:
            loss = jnp.asarray(value).astype(jnp.float32)
        measured = jnp.stack([loss, norm])
        mean, deviation = state.window.mean(1), state.window.std(1)
        limits = mean + float(sigmas) * jnp.maximum(deviation, LEAST * jnp.abs(mean))
        judged = (state.counted >= window) & (state.window != 0).any(1)
        limits = jnp.where(judged, limits, jnp.inf)
        applied = (jnp.isfinite(measured) & (measured <= limits)).all()
        updates, inner = tx.update(updates, state.inner, params, **extra)
        updates, inner = where_applied(applied, updates, inner, state.inner)
        # or else a spell of gradients of 0 would make spikes of all that come after
        counts = applied & (norm != 0)
        newest = (jnp.arange(window, dtype=jnp.int32) == state.counted % window) & counts
        in_a_row = jnp.where(applied, 0, state.in_a_row + 1)
        return updates, SpikeSkip(
            inner=inner,
            window=jnp.where(newest, measured[:, None], state.window),
            counted=state.counted + counts.astype(jnp.int32),
            skipped=state.skipped + 1 - applied.astype(jnp.int32),
            in_a_row=in_a_row,
            left=jnp.maximum(max_in_a_row - in_a_row, 0),
            seen=measured,
            limits=limits,
            applied=applied,
        )

    options = {"sigmas": float(sigmas), "max_in_a_row": max_in_a_row}
    return wrap_optimizer("skip_spikes", init, update, tx, **options)
