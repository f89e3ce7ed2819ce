"""Updates that the optimizer skips: the flag that leaves all of a step as it was, metrics, and
checks of the optimizers that may skip.
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

# names of metrics
GRAD_NORM = "grad_norm"
LOSS_LIMIT = "loss_limit"
NORM_LIMIT = "grad_norm_limit"
LOSS_SCALE = "loss_scale"
SKIPPED = "skipped"
LEFT = "skips_left"


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
