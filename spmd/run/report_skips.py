"""What a run says of an update that the optimizer skipped, and when it ends for that."""

import logging
import math
from collections.abc import Mapping

import jax

from spmd.errors import DivergedError, option, quoted
from spmd.train.skipped_updates import GRAD_NORM, LEFT, LOSS_LIMIT, LOSS_SCALE, NORM_LIMIT


def report_skip(step: int, means: Mapping[str, float], last_checkpoint: str) -> None:
    """Log that a step's update was skipped; process 0 does.

    Args:
      means: of the step, by name; `skips_left` is among them.
      last_checkpoint: a sentence that says where it is.

    Raises:
      DivergedError: as many in a row were skipped as the optimizer allows.
    """
    cause, left = skip_cause(means), int(means[LEFT])
    if left == 0:
        fix = (
            "a lower learning rate or a clip (optax.clip_by_global_norm); a look at the data of "
            "these steps; or "
        )
        fix += (
            "larger sigmas or max_in_a_row."
            if GRAD_NORM in means or LOSS_SCALE not in means
            else f'{option("precision", quoted("bfloat16"))} or "float32".'
        )
        why = (
            f"step {step}: {cause}. The update was skipped, and so were those before it, as many "
            "in a row as the optimizer allows."
        )
        raise DivergedError(f"{why} {last_checkpoint}", fix=fix)
    if jax.process_index() == 0:
        logging.getLogger("spmd").warning(
            "step %d: the update was skipped: %s. %d more may be, in a row.", step, cause, left
        )


def skip_cause(means: Mapping[str, float]) -> str:
    """Why a step's update was skipped.

    >>> skip_cause(
    ...     {
    ...         "loss": 2.0,
    ...         "grad_norm": 90.0,
    ...         "loss_limit": 3.0,
    ...         "grad_norm_limit": 4.5,
    ...         "skips_left": 9.0,
    ...     }
    ... )
    'the norm of the gradients is 90, and the limit 4.5'
    """
    if LOSS_SCALE in means and GRAD_NORM not in means:
        what = (
            "gradients in float16 are"
            if math.isfinite(means.get("loss", 0.0))
            else "the loss itself, and so gradients in float16, are"
        )
        return f"{what} not finite; the loss is now scaled by {means[LOSS_SCALE]:g}"
    loss, norm = means.get("loss", math.nan), means.get(GRAD_NORM, math.inf)
    said = []
    for name, value, limit in (
        ("loss", loss, means.get(LOSS_LIMIT)),
        ("norm of the gradients", norm, means.get(NORM_LIMIT)),
    ):
        if not math.isfinite(value):
            said.append(f"the {name} is not finite")
        elif limit is not None and value > limit:
            said.append(f"the {name} is {value:.4g}, and the limit {limit:.4g}")
    return "; ".join(said) or f"the loss is {loss:.6g}, and the norm of the gradients {norm:.6g}"
