"""Reports where a run does not fit an optimizer that needs several steps for one update:
`optax.MultiSteps` and `optax.contrib.sam`.
"""

import logging
from typing import Any

import jax
import numpy as np
import optax

from spmd.base.tree import nodes
from spmd.errors import option


def report_unfinished(opt: Any, step: int, *, saved: bool) -> None:
    """Warn, at the end of a run, of steps after the optimizer's last update; process 0 does.

    Args:
      opt: the optimizer's state after `step` steps.
      saved: a checkpoint has it.
    """
    if jax.process_index() != 0:
        return
    uncounted = _steps_since_update(opt, optax.MultiStepsState, "mini_step")
    if uncounted:
        resumed = "; a run that resumes uses them" if saved else ""
        why = (
            "the gradients of %s came after the last update of optax.MultiSteps: they are not in "
            "the model%s.\n    fix: %s"
        )
        logging.getLogger("spmd").warning(
            why, _last_steps(uncounted), resumed, _fix(step, uncounted)
        )
    perturbing = _steps_since_update(opt, optax.contrib.SAMState, "steps_since_sync")
    if perturbing:
        why = (
            "the run ends within an update of optax.contrib.sam: %s moved the weights to perturbed "
            "ones.\n    fix: %s"
        )
        logging.getLogger("spmd").warning(why, _last_steps(perturbing), _fix(step, perturbing))


def report_perturbed(opt: Any, step: int) -> bool:
    """Warn of an evaluation of weights that `optax.contrib.sam` has perturbed; process 0 does.
    Returns whether the weights are perturbed.
    """
    perturbing = _steps_since_update(opt, optax.contrib.SAMState, "steps_since_sync")
    if perturbing and jax.process_index() == 0:
        why = (
            "step %d: perturbed weights are evaluated, of %s within an update of "
            "optax.contrib.sam; later ones are not reported."
        )
        fix = (
            f"{option('eval_every', '...')}, a multiple of its sync_period, and as many steps in "
            "an epoch."
        )
        logging.getLogger("spmd").warning(f"{why}\n    fix: {fix}", step, _last_steps(perturbing))
    return bool(perturbing)


def averages_batches(opt: Any) -> bool:
    """Return whether an optimizer, by its state, takes the mean of the gradients of several
    batches, each counted alike.
    """
    return any(isinstance(node, optax.MultiStepsState) for node in nodes(opt))


def report_short_batch(step: int, rows: int, full: int) -> None:
    """Warn of a batch that counts in `optax.MultiSteps` as much as one with more rows; process 0
    does.
    """
    if jax.process_index() == 0:
        why = (
            "step %d: a batch of %d rows counts in optax.MultiSteps as much as one of %d: each of "
            "its rows weighs %.3g times as much."
        )
        fix = (
            "a batch size that divides the examples; or fit(accumulate=...), where each row counts "
            "alike. Later ones are not reported."
        )
        logging.getLogger("spmd").warning(f"{why}\n    fix: {fix}", step, rows, full, full / rows)


def _steps_since_update(opt: Any, kind: Any, field: str) -> int:
    """Return the number of steps after the last update, as the states of a kind count them."""
    most = 0
    for node in nodes(opt):
        if isinstance(node, kind):
            # One shard is read: an array of several processes cannot be fetched as one.
            count = np.asarray(getattr(node, field).addressable_data(0))
            most = max(most, int(np.max(count)))
    return most


def _last_steps(count: int) -> str:
    return "the last step" if count == 1 else f"the last {count} steps"


def _fix(step: int, uncounted: int) -> str:
    """Return a length of the run that ends with an update."""
    if step > uncounted:
        return f"{option('steps', step - uncounted)}, which ends with an update."
    return "more steps: none has made an update."
