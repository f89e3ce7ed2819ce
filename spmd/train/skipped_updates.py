"""Updates that the optimizer skips: `skip_spikes`, the flag that leaves all of a step as it was,
metrics, and checks of the optimizers that may skip.
"""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd.base.tree import Tree, describe, nodes
from spmd.errors import OptimizerError, OptionError, check_integer, option, quoted, short_repr
from spmd.sync.gradient_sync import GradientSync
from spmd.train.adapt_optimizer import MOST_COUNTED, init_alone, where_applied, wrap_optimizer
from spmd.train.loss_scale import LossScale
from spmd.train.state import check_optimizer

# names of metrics
GRAD_NORM = "grad_norm"
LOSS_LIMIT = "loss_limit"
NORM_LIMIT = "grad_norm_limit"
LOSS_SCALE = "loss_scale"
SKIPPED = "skipped"
LEFT = "skips_left"
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

    Wrap the entire optimizer, including a gradient clip: `skip_spikes(optax.chain(clip, adamw))`.
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
            # The square of a complex number is not that of its magnitude.
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


def skipped(opt: Any) -> Any:
    """Return the flag (bool scalar) of an optimizer's new state that the optimizer ignored the
    gradients; then communication and batch statistics stay as they were, too.

    The flag is that of `skip_spikes`, `scale_loss`, `optax.apply_if_finite`, or `optax.MultiSteps`
    with a `should_skip_update_fn`; False for all other optimizers.
    """
    # `optax.MultiSteps` keeps `should_skip`, and `optax.apply_if_finite` keeps `last_finite`
    applied = [~flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "should_skip")]
    applied += [flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "last_finite")]
    applied += [part.applied for part in _skipping_parts(opt) if part is not None]
    if not applied:
        return False
    return ~jnp.stack(applied).all()


def loss_scale(opt: Any) -> dict[str, jax.Array]:
    """Return the factor of the loss in a step, as one of the step's events; nothing if the
    optimizer keeps no scale.
    """
    scale, _ = _skipping_parts(opt)
    if scale is None:
        return {}
    return {LOSS_SCALE: scale.scale}


def _skipping_parts(opt: Any) -> tuple[LossScale | None, SpikeSkip | None]:
    """Return the states of parts that may skip updates, in the two places that `check_skips`
    allows.
    """
    scale = None
    if isinstance(opt, LossScale):
        scale = opt
        opt = scale.inner
    if isinstance(opt, SpikeSkip):
        return scale, opt
    return scale, None


def scale_notes(opt: Any) -> list[str]:
    """Return notes on a scale of the loss."""
    if not loss_scale(opt):
        return []
    line = (
        "gradients in float16: the loss is scaled, and an update whose gradients overflow is "
        "skipped (metrics loss_scale and skipped)."
    )
    return [line]


def inner_state(opt: Any) -> Any:
    """Return the state of the optimizer inside `scale_loss` and `skip_spikes`."""
    for part in reversed(_skipping_parts(opt)):
        if part is not None:
            return part.inner
    return opt


def measure_skips(opt: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return values and counts (1 or 0) by name, from an optimizer's new state. Limits and
    `skips_left` are those of a skipped update.
    """
    scale, spikes = _skipping_parts(opt)
    # the first is that of `scale_loss`, which skips where gradients overflow
    lefts = [part.left for part in (scale, spikes) if part is not None]
    if not lefts:
        return {}
    measured: dict[str, tuple[Any, Any]] = {}
    overflow = spike = jnp.bool(False)
    if scale is not None:
        overflow = ~scale.applied
        measured[LOSS_SCALE] = scale.scale, True
    if spikes is not None:
        # where gradients overflowed, `skip_spikes` inside has not had them: its state is as before
        spike = ~spikes.applied & ~overflow
    measured[SKIPPED] = overflow | spike, True
    measured[LEFT] = jnp.where(overflow, lefts[0], lefts[-1]), overflow | spike
    if spikes is not None:
        measured[GRAD_NORM] = spikes.seen[1], ~overflow
        measured[LOSS_LIMIT] = spikes.limits[0], spike
        measured[NORM_LIMIT] = spikes.limits[1], spike
    names = sorted(measured)
    values = {name: jnp.asarray(measured[name][0], jnp.float32) for name in names}
    counts = {name: jnp.isfinite(values[name]) & measured[name][1] for name in names}
    pairs = {}
    for name in names:
        value = jnp.where(counts[name], values[name], 0.0)
        pairs[name] = value, counts[name].astype(jnp.float32)
    return pairs


def check_skips(opt: Any, sync: GradientSync) -> None:
    """Check that an optimizer that may skip updates skips all of one, on all workers.

    Args:
      opt: its state; shapes will do.

    Raises:
      OptimizerError: workers would decide differently, or a part of the optimizer would.
    """
    allowed = {id(part) for part in _skipping_parts(opt) if part is not None}
    for node in nodes(opt):
        if isinstance(node, SpikeSkip):
            name = "skip_spikes"
        elif isinstance(node, LossScale):
            name = f"scale_loss, which {option('precision', quoted('float16'))} needs,"
        else:
            continue
        if sync.local or sync.asynchronous:
            mode = sync.resolved.layout.parameter_server.mode
            why = (
                f'under a parameter server in mode "{mode}", workers or servers make updates of '
                "their own, and would decide differently."
            )
            fix = 'mode = "synchronous", or another [gradients] reduction.'
            raise OptimizerError(f"{name} cannot skip an update everywhere: {why}", fix=fix)
        if id(node) not in allowed:
            raise OptimizerError(
                f"{name} would skip half of an update: it is a part of the optimizer, and the rest "
                "would not skip with it.",
                fix="scale_loss(skip_spikes(optimizer)), or one of the two, around the entire "
                "optimizer.",
            )


def check_loss_scale(opt: Any, precision: str) -> None:
    """Check that a scale of the loss is kept for float16 alone.

    Raises:
      OptimizerError: the precision needs none.
    """
    if loss_scale(opt) and precision != "float16":
        raise OptimizerError(
            f"scale_loss is for gradients in float16, and {option('precision', quoted(precision))} "
            "has the range of float32.",
            fix=f"the optimizer alone; or {option('precision', quoted('float16'))}.",
        )
