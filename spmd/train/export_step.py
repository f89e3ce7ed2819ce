"""A step as StableHLO for a platform that need not be present."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export

# for which `jax.export` promises no compatibility over years: JAX's own, Pallas's, cuDNN's
KERNELS = (
    "cu_threefry2x32",
    "cu_threefry2x32_ffi",
    "__gpu$xla.gpu.triton",
    "mosaic_gpu_v2",
    "tpu_custom_call",
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropout",
    "__cudnn$fmhaSoftmaxDropoutBackward",
    "__cudnn$fmhaScaleBiasSoftmax",
    "__cudnn$fmhaScaleBiasSoftmaxBackward",
    "__cudnn$fmhaScaleBiasSoftmaxDropout",
    "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward",
)


def export_step(
    update: Callable, arguments: Any, out_shardings: Any, platform: str
) -> jax.export.Exported:
    """`update(*arguments)` exported as a function of flat arguments and results."""
    # Flat, because jax.export serializes only trees of types that are registered with it.
    leaves, tree = jax.tree.flatten(arguments)

    def flat_update(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(update(*jax.tree.unflatten(tree, leaves)))

    jitted = jax.jit(flat_update, out_shardings=jax.tree.leaves(out_shardings))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNELS]
    export = jax.export.export(jitted, platforms=(platform,), disabled_checks=unchecked)
    frames = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    # the text of a step does not depend on the caller
    jax.config.update("jax_traceback_in_locations_limit", 1)
    try:
        return export(*leaves)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)
