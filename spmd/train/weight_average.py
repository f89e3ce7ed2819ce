"""Averages of weights, as optimizer state: sharded, saved and resumed like the optimizer's
moments.
"""

import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd.base.tree import Tree, children, flatten, nodes
from spmd.errors import OptimizerError, OptionError, check_integer, join_names, short_repr
from spmd.layout.resolve import Resolved
from spmd.sync.gradient_sync import GradientSync
from spmd.train.adapt_optimizer import SlowWeights
from spmd.train.loss_scale import LossScale
from spmd.train.spike_skip import SpikeSkip
from spmd.train.state import check_optimizer
from spmd.train.wrapped_optimizer import wrap_optimizer

# What may be around it: these pass its updates as they are, or make no update at all.
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
      inner: of the optimizer.
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
    """An optimizer that also keeps an average of the weights in its state (`WeightAverage`); its
    updates are those of `optimizer`.

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
    if decay is not None and (
        isinstance(decay, bool) or not isinstance(decay, numbers.Real) or not 0 < decay < 1
    ):
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

        def step(average: jax.Array, weight: jax.Array) -> jax.Array:
            moved = weight
            if jnp.issubdtype(average.dtype, jnp.inexact):
                rate = _rate(
                    jnp.maximum(since // every, 1).astype(jnp.finfo(average.dtype).dtype), decay
                )
                moved = average + rate.astype(average.dtype) * (weight - average)
            return jnp.where(since <= every, weight, jnp.where(since % every == 0, moved, average))

        weights = jax.tree.map(_widened, optax.apply_updates(params, updates))
        return updates, WeightAverage(
            inner, state.updates + 1, jax.tree.map(step, state.average, weights)
        )

    rate = None if decay is None else float(decay)
    return wrap_optimizer("average_weights", init, update, tx, decay=rate, start=start, every=every)


def _rate(number: jax.Array, decay: float | None) -> jax.Array:
    """How far the average moves towards the n-th weights: 1 / sum_k decay^(n-k)."""
    return 1 / number if decay is None else (float(decay) - 1) / jnp.expm1(number * math.log(decay))


def _widened(leaf: Any) -> jax.Array:
    """A copy; of floats, in at least 32 bits."""
    leaf = jnp.asarray(leaf)
    wide = (
        np.promote_types(leaf.dtype, np.float32)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        else leaf.dtype
    )
    return jnp.array(leaf, wide, copy=True)


def average_of(opt: Any, params: Tree) -> Tree:
    """The average that an optimizer keeps: that of `average_weights`; of
    `optax.contrib.schedule_free`, from its state and the weights; or the slow weights of
    `optax.lookahead`.

    Args:
      opt, params: of a state.

    Raises:
      OptimizerError: it keeps none, or not that of all weights.
    """
    averages, free = _found(opt, WeightAverage), _found(opt, optax.contrib.ScheduleFreeState)
    if averages:
        return averages[0][0].average
    if slow := _found(opt, SlowWeights):
        return slow[0][0].slow
    if not free:
        fix = "optimizer=spmd.optimizers.average_weights(optimizer), whose updates are the same."
        raise OptimizerError("the optimizer keeps no average of the weights.", fix=fix)
    (state, outside), shapes = free[0], {path: leaf.shape for path, leaf in flatten(params).items()}
    if (
        len(free) > 1
        or outside
        or {path: leaf.shape for path, leaf in flatten(state.z).items()} != shapes
    ):
        why = (
            "optax.contrib.schedule_free is a part of the optimizer, so its average is not that of "
            "all weights as they are updated."
        )
        raise OptimizerError(
            why, fix="schedule_free around all of the optimizer; what it wraps may be a chain."
        )
    return optax.contrib.schedule_free_eval_params(state, params)


def check_average(opt: Any, params: Tree, resolved: Resolved, sync: GradientSync) -> None:
    """If the optimizer keeps an average, check that it is that of all weights, as they are updated.

    Args:
      opt, params: of a state; shapes will do.

    Raises:
      OptimizerError: it sees other updates than the weights get, or not all weights.
    """
    problem, fix = "", ""
    for state, outside in _found(opt, WeightAverage):
        missing = [path for path in flatten(params) if path not in flatten(state.average)]
        if sync.local or sync.asynchronous:
            server = resolved.layout.parameter_server
            problem = (
                f'under a parameter server in mode "{server.mode}", workers or servers make '
                "updates of their own."
            )
            fix = 'mode = "synchronous", or another [gradients] reduction.'
        elif (
            sync.reduction.manual
            and sync.rounds_params
            and any(at.state_spec != at.spec for at in resolved.placements.values())
        ):
            problem = (
                '[gradients] weights = "bfloat16" rounds the updates of sharded moments when they '
                "are gathered."
            )
            fix = '[gradients] weights = "exact".'
        elif missing:
            problem = f"it does not see {join_names(missing, 3)}."
            fix = (
                "average_weights(...) around the entire optimizer, not inside optax.masked or "
                "optax.partition."
            )
        elif outside:
            problem = f"{outside} can change its updates."
            around = "skip_spikes, scale_loss, optax.MultiSteps and optax.apply_if_finite"
            fix = f"average_weights(...) around all of the optimizer; only {around} go around it."
        elif any(isinstance(node, optax.MultiStepsState) for node in nodes(state.inner)):
            problem = (
                "optax.MultiSteps inside it makes no update in most steps, and each would count."
            )
            fix = "optax.MultiSteps(average_weights(optimizer), k), or fit(accumulate=k)."
        elif any(isinstance(node, optax.contrib.SAMState) for node in nodes(state.inner)):
            problem = (
                "optax.contrib.sam inside it moves the weights to perturbed ones and back, and "
                "each would count."
            )
            fix = "one of the two without the other."
        elif any(isinstance(node, SKIPPING) for node in nodes(state.inner)):
            problem = "what skips updates is inside it, and each that is skipped would count."
            scales, spikes = (
                any(isinstance(node, kind) for node in nodes(state.inner))
                for kind in (LossScale, SpikeSkip)
            )
            fix = (
                "skip_spikes(average_weights(optimizer))"
                if spikes
                else "average_weights(optimizer)"
            )
            fix = f"scale_loss({fix})." if scales else f"{fix}."
    if problem:
        raise OptimizerError(
            f"average_weights would not average the weights as they are: {problem}", fix=fix
        )


def _found(node: Any, kind: Any, outside: str = "") -> list[tuple[Any, str]]:
    """The outermost states of this kind, each with what is around it and may change its updates; ""
    if nothing may.
    """
    if isinstance(node, kind):
        return [(node, outside)]
    found, parts = [], children(node)
    for number, child in enumerate(parts, 1):
        last_of_chain = type(node) is tuple and number == len(parts)
        around = (
            "a transformation behind it in optax.chain"
            if type(node) is tuple
            else f"what has the state {type(node).__name__}"
        )
        found += _found(
            child, kind, outside or ("" if last_of_chain or isinstance(node, UNCHANGED) else around)
        )
    return found
