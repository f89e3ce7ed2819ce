"""Updates that the optimizer skips: what of a step then stays as it was, what is measured, and
which optimizers may skip.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd.base.tree import nodes
from spmd.errors import OptimizerError, option, quoted
from spmd.sync.gradient_sync import GradientSync
from spmd.train.loss_scale import LossScale
from spmd.train.spike_skip import SpikeSkip

GRAD_NORM, LOSS_LIMIT, NORM_LIMIT, LOSS_SCALE = (
    "grad_norm",
    "loss_limit",
    "grad_norm_limit",
    "loss_scale",
)
SKIPPED, LEFT = "skipped", "skips_left"


def skipped(opt: Any) -> Any:
    """Whether the optimizer, by its new state, ignored the gradients; then communication and batch
    statistics stay as they were, too.

    Known are `skip_spikes`, `scale_loss`, `optax.apply_if_finite`, and `optax.MultiSteps` with a
    `should_skip_update_fn`.
    """
    applied = [~flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "should_skip")]
    applied += [flag for _, flag in optax.tree_utils.tree_get_all_with_path(opt, "last_finite")]
    applied += [part.applied for part in _parts(opt) if part is not None]
    return ~jnp.stack(applied).all() if applied else False


def loss_scale(opt: Any) -> dict[str, jax.Array]:
    """By what a step multiplies the loss, as one of its events; nothing if the optimizer keeps no
    scale.
    """
    scale, _ = _parts(opt)
    return {} if scale is None else {LOSS_SCALE: scale.scale}


def _parts(opt: Any) -> tuple[LossScale | None, SpikeSkip | None]:
    """What may skip updates, where `check_skips` lets it be."""
    scale = opt if isinstance(opt, LossScale) else None
    inside = opt if scale is None else scale.inner
    return scale, inside if isinstance(inside, SpikeSkip) else None


def scale_notes(opt: Any) -> list[str]:
    """What a person should know of a scale of the loss."""
    line = (
        "gradients in float16: the loss is scaled, and an update whose gradients overflow is "
        "skipped (metrics loss_scale and skipped)."
    )
    return [line] if loss_scale(opt) else []


def inner_state(opt: Any) -> Any:
    """The state of the optimizer inside `scale_loss` and `skip_spikes`."""
    return next((part.inner for part in reversed(_parts(opt)) if part is not None), opt)


def measure_skips(opt: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Values and counts (1 or 0) by name, from an optimizer's new state. Limits and `skips_left`
    are those of a skipped update.
    """
    scale, spikes = _parts(opt)
    if scale is None and spikes is None:
        return {}
    overflow = jnp.bool(False) if scale is None else ~scale.applied
    # where gradients overflowed, what is inside has not seen them: it is as it was
    spike = jnp.bool(False) if spikes is None else ~spikes.applied & ~overflow
    measured = {} if scale is None else {LOSS_SCALE: (scale.scale, True)}
    lefts = [part.left for part in (scale, spikes) if part is not None]
    measured |= {
        SKIPPED: (overflow | spike, True),
        LEFT: (jnp.where(overflow, lefts[0], lefts[-1]), overflow | spike),
    }
    if spikes is not None:
        measured |= {
            GRAD_NORM: (spikes.seen[1], ~overflow),
            LOSS_LIMIT: (spikes.limits[0], spike),
            NORM_LIMIT: (spikes.limits[1], spike),
        }
    pairs = {
        name: (jnp.asarray(value, jnp.float32), count)
        for name, (value, count) in sorted(measured.items())
    }
    counted = {name: (value, jnp.isfinite(value) & count) for name, (value, count) in pairs.items()}
    return {
        name: (jnp.where(count, value, 0.0), count.astype(jnp.float32))
        for name, (value, count) in counted.items()
    }


def check_skips(opt: Any, sync: GradientSync) -> None:
    """Check that an optimizer that may skip updates skips all of one, on all workers.

    Args:
      opt: its state; shapes will do.

    Raises:
      OptimizerError: workers would decide differently, or a part of the optimizer would.
    """
    known = {id(part) for part in _parts(opt) if part is not None}
    for node in nodes(opt):
        if not isinstance(node, SpikeSkip | LossScale):
            continue
        name = (
            "skip_spikes"
            if isinstance(node, SpikeSkip)
            else f"scale_loss, which {option('precision', quoted('float16'))} needs,"
        )
        if sync.local or sync.asynchronous:
            mode = sync.resolved.layout.parameter_server.mode
            why = (
                f'under a parameter server in mode "{mode}", workers or servers make updates of '
                "their own, and would decide differently."
            )
            fix = 'mode = "synchronous", or another [gradients] reduction.'
            raise OptimizerError(f"{name} cannot skip an update everywhere: {why}", fix=fix)
        if id(node) not in known:
            why = "it is a part of the optimizer, and the rest would not skip with it."
            fix = (
                "scale_loss(skip_spikes(optimizer)), or one of the two, around the entire "
                "optimizer."
            )
            raise OptimizerError(f"{name} would skip half of an update: {why}", fix=fix)


def check_loss_scale(opt: Any, precision: str) -> None:
    """Check that a scale of the loss is kept for float16 alone.

    Raises:
      OptimizerError: the precision needs none.
    """
    if loss_scale(opt) and precision != "float16":
        why = (
            f"scale_loss is for gradients in float16, and {option('precision', quoted(precision))} "
            "has the range of float32."
        )
        raise OptimizerError(
            why, fix=f"the optimizer alone; or {option('precision', quoted('float16'))}."
        )
