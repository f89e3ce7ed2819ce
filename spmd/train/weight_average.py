"""Averages of weights, as optimizer state: sharded, saved and resumed like the optimizer's
moments.
"""

import math
import numbers
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd.base.tree import Tree, children, flatten, nodes
from spmd.errors import OptimizerError, OptionError, check_integer, join_names, short_repr
from spmd.layout.resolve import Resolved
from spmd.sync.gradient_sync import GradientSync
from spmd.train.adapt_optimizer import SlowWeights, wrap_optimizer
from spmd.train.loss_scale import LossScale
from spmd.train.skipped_updates import SpikeSkip
from spmd.train.state import check_optimizer

# States of optimizers that may be around an average: they make no update at all in some steps, or
# pass updates as they are.
SKIPPING = (SpikeSkip, LossScale, optax.MultiStepsState)
UNCHANGED = (
    *SKIPPING,
    optax.ApplyIfFiniteState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


class WeightAverage(NamedTuple):
    """The state of `average_weights`.

    Attributes:
      inner: the state of the optimizer.
      updates: int32 scalar, updates made so far.
      average: of the weights, shaped and sharded as the optimizer's moments are; float32 for those
        of fewer bits.
    """

    inner: Any
    updates: jax.Array
    average: Tree


def average_weights(
    optimizer: Any, decay: float | None = 0.999, *, start: int = 0, every: int = 1
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that also keeps an average of the weights in its state
    (`WeightAverage`); its updates are those of `optimizer`.

    With w_1 .. w_n for the weights after updates start + every, start + 2 every, ..., the average
    is sum_k decay^(n-k) w_k / sum_k decay^(n-k). So it needs no warm-up: the weights at step 0 are
    no part of it, and the first n weights count nearly the same until n is about 1 / (1 - decay).
    Before w_1 there is nothing to average, and the average is the newest weights.

    With a `decay` it is an exponential moving average, with the correction for the start that Adam
    has (Kingma and Ba, arXiv:1412.6980, section 3). None is decay = 1, the equal average: of all
    iterates (Polyak and Juditsky 1992), or, with `every` the steps of a cycle of the learning rate,
    or of an epoch, stochastic weight averaging (SWA, Izmailov et al., arXiv:1803.05407, algorithm
    1).

    It must see the updates as the weights get them, so it goes around all of the optimizer:
    `average_weights(optax.chain(clip, adamw))`. Only what makes no update in some steps goes around
    it, so that these do not count: `skip_spikes`, `scale_loss`, `optax.MultiSteps` and
    `optax.apply_if_finite`. Batch statistics are not averaged.

    `Trainer.averaged(state)` is a state with the averaged weights, to be evaluated or predicted
    with, and `Result.averaged` a result with them, to be exported or rebuilt as a model;
    `fit(eval_average=True)` evaluates them.

    Args:
      optimizer: any optax gradient transformation. `update` then needs `params`.
      decay: from 0 to 1, exclusive; None for the equal average.
      start: updates before the first average.
      every: updates between the weights that are averaged.

    Returns:
      An optax gradient transformation, whose state is a `WeightAverage`.

    Raises:
      OptimizerError: `optimizer` is no gradient transformation, or `update` has no `params`.
      OptionError: `decay`, `start` or `every` is out of range.

    Example:
      >>> optimizer = average_weights(optax.sgd(1.0), decay=None)
      >>> params = jnp.float32(0)
      >>> state = optimizer.init(params)
      >>> for gradient in (-1.0, -1.0, -4.0):  # the weights are 1, 2 and 6
      ...     updates, state = optimizer.update(jnp.float32(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params), float(state.average)
      (6.0, 3.0)
    """
    tx = check_optimizer(optimizer)
    is_number = isinstance(decay, numbers.Real) and not isinstance(decay, bool)
    if decay is not None and not (is_number and 0 < decay < 1):
        raise OptionError(
            f"average_weights: decay={short_repr(decay)}.",
            fix="such as 0.999, between 0 and 1; None for the equal average.",
        )
    check_integer(start, "average_weights: start", 0)
    check_integer(every, "average_weights: every")

    def init(params: Tree) -> WeightAverage:
        return WeightAverage(tx.init(params), jnp.int32(0), jax.tree.map(_widened, params))

    def update(
        updates: Tree, state: Any, params: Tree = None, **extra: Any
    ) -> tuple[Tree, WeightAverage]:
        if params is None:
            raise OptimizerError(
                "average_weights: update without params.",
                fix="optimizer.update(gradients, state, params).",
            )
        updates, inner = tx.update(updates, state.inner, params, **extra)
        since = state.updates + 1 - start

        def move(average: jax.Array, weight: jax.Array) -> jax.Array:
            moved = weight
            if jnp.issubdtype(average.dtype, jnp.inexact):
                number = jnp.maximum(since // every, 1).astype(jnp.finfo(average.dtype).dtype)
                rate = _rate(number, decay)
                moved = average + rate.astype(average.dtype) * (weight - average)
            is_first = since <= every
            moved = jnp.where(since % every == 0, moved, average)
            return jnp.where(is_first, weight, moved)

        # as the caller's `optax.apply_updates` will make them
        weights = jax.tree.map(_widened, optax.apply_updates(params, updates))
        count = state.updates + 1
        return updates, WeightAverage(inner, count, jax.tree.map(move, state.average, weights))

    rate = None
    if decay is not None:
        rate = float(decay)
    return wrap_optimizer("average_weights", init, update, tx, decay=rate, start=start, every=every)


def _rate(number: jax.Array, decay: float | None) -> jax.Array:
    """Return the share by which the average moves towards the n-th weights: 1 / sum_k
    decay^(n-k).
    """
    if decay is None:
        return 1 / number
    # `expm1`, because 1 - decay^n cancels where decay is nearly 1
    return (float(decay) - 1) / jnp.expm1(number * math.log(decay))


def _widened(leaf: Any) -> jax.Array:
    """Return a copy of an array; floats are copied to at least 32 bits."""
    leaf = jnp.asarray(leaf)
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = np.promote_types(dtype, np.float32)
    # a copy also in the same dtype: the step donates weights and average, which must be two arrays
    return jnp.array(leaf, dtype, copy=True)


def average_of(opt: Any, params: Tree) -> Tree:
    """Return the average that an optimizer keeps: the one of `average_weights`; the one of
    `optax.contrib.schedule_free`, from its state and the weights; or the slow weights of
    `optax.lookahead`.

    Args:
      opt: the optimizer's state.
      params: the weights.

    Raises:
      OptimizerError: it keeps none, or not one of all weights.
    """
    averages = _outermost(opt, WeightAverage)
    if averages:
        return averages[0][0].average
    lookaheads = _outermost(opt, SlowWeights)
    if lookaheads:
        return lookaheads[0][0].slow
    schedule_free = _outermost(opt, optax.contrib.ScheduleFreeState)
    if not schedule_free:
        fix = "optimizer=spmd.optimizers.average_weights(optimizer), whose updates are the same."
        raise OptimizerError("the optimizer keeps no average of the weights.", fix=fix)
    state, outside = schedule_free[0]
    is_part = bool(outside) or len(schedule_free) > 1
    if is_part or _shapes(state.z) != _shapes(params):
        raise OptimizerError(
            "optax.contrib.schedule_free is a part of the optimizer, so its average is not that of "
            "all weights as they are updated.",
            fix="schedule_free around all of the optimizer; what it wraps may be a chain.",
        )
    return optax.contrib.schedule_free_eval_params(state, params)


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in flatten(tree).items()}


def check_average(opt: Any, params: Tree, resolved: Resolved, sync: GradientSync) -> None:
    """If the optimizer keeps an average, check that it is that of all weights, as they are updated.

    Args:
      opt: the optimizer's state; shapes will do.
      params: the weights; shapes will do.

    Raises:
      OptimizerError: it sees other updates than the weights get, or not all weights.
    """
    for state, outside in _outermost(opt, WeightAverage):
        problems = [
            *_layout_problems(resolved, sync),
            *_place_problems(state, outside, params),
            *_inner_problems(state),
        ]
        if problems:
            problem, fix = problems[0]
            raise OptimizerError(
                f"average_weights would not average the weights as they are: {problem}", fix=fix
            )


def _layout_problems(resolved: Resolved, sync: GradientSync) -> Iterator[tuple[str, str]]:
    """Yield why a layout gives the weights other updates, with the fix."""
    if sync.local or sync.asynchronous:
        mode = resolved.layout.parameter_server.mode
        why = (
            f'under a parameter server in mode "{mode}", workers or servers make updates of '
            "their own."
        )
        yield why, 'mode = "synchronous", or another [gradients] reduction.'
    shards_moments = any(at.state_spec != at.spec for at in resolved.placements.values())
    if sync.reduction.manual and sync.rounds_params and shards_moments:
        why = (
            '[gradients] weights = "bfloat16" rounds the updates of sharded moments when they '
            "are gathered."
        )
        yield why, '[gradients] weights = "exact".'


def _place_problems(state: WeightAverage, outside: str, params: Tree) -> Iterator[tuple[str, str]]:
    """Yield why an average is not that of all weights at its place in the optimizer, with the
    fix.
    """
    averaged = flatten(state.average)
    missing = [path for path in flatten(params) if path not in averaged]
    if missing:
        fix = (
            "average_weights(...) around the entire optimizer, not inside optax.masked or "
            "optax.partition."
        )
        yield f"it does not see {join_names(missing, 3)}.", fix
    if outside:
        fix = (
            "average_weights(...) around all of the optimizer; only skip_spikes, scale_loss, "
            "optax.MultiSteps and optax.apply_if_finite go around it."
        )
        yield f"{outside} can change its updates.", fix


def _inner_problems(state: WeightAverage) -> Iterator[tuple[str, str]]:
    """Yield why an average counts steps that are no updates, with the fix."""
    kinds = {type(node) for node in nodes(state.inner)}
    if optax.MultiStepsState in kinds:
        why = "optax.MultiSteps inside it makes no update in most steps, and each would count."
        yield why, "optax.MultiSteps(average_weights(optimizer), k), or fit(accumulate=k)."
    if optax.contrib.SAMState in kinds:
        why = (
            "optax.contrib.sam inside it moves the weights to perturbed ones and back, and "
            "each would count."
        )
        yield why, "one of the two without the other."
    if not kinds.isdisjoint(SKIPPING):
        fix = "average_weights(optimizer)"
        if SpikeSkip in kinds:
            fix = f"skip_spikes({fix})"
        if LossScale in kinds:
            fix = f"scale_loss({fix})"
        yield "what skips updates is inside it, and each that is skipped would count.", f"{fix}."


def _outermost(node: Any, kind: Any, outside: str = "") -> list[tuple[Any, str]]:
    """Return the outermost states of this kind, each with a description of the transformation
    around it that may change its updates; "" if none may.
    """
    if isinstance(node, kind):
        return [(node, outside)]
    is_chain = type(node) is tuple
    around = f"what has the state {type(node).__name__}"
    if is_chain:
        around = "a transformation behind it in optax.chain"
    states = []
    parts = children(node)
    for number, child in enumerate(parts, 1):
        # the updates of the last transformation of a chain are those of the chain
        is_last_of_chain = is_chain and number == len(parts)
        may_change = not is_last_of_chain and not isinstance(node, UNCHANGED)
        nearer = ""
        if may_change:
            nearer = around
        states += _outermost(child, kind, outside or nearer)
    return states
