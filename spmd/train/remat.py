"""What a layout's `[remat]` means for JAX: policies of `jax.checkpoint`, and checks of the names
that they keep.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from spmd.errors import LayoutError, Problem, closest, raise_problems
from spmd.jaxpr.inner_programs import called_program, opened
from spmd.jaxpr.programs import equations
from spmd.layout.remat import Remat
from spmd.models.base import LAYER_PARAMS
from spmd.train.host_memory import HOST, without_host_memory
from spmd.train.model_setup import PlacedModel

Policy = Callable[..., Any]


@functools.lru_cache(maxsize=256)
def policy_of(saves: str | tuple[str, ...], offload: tuple[str, ...] = ()) -> Policy:
    """The `jax.checkpoint` policy of `Remat.saves` and `Remat.offload`; one and the same object for
    equal ones.
    """
    policies = jax.checkpoint_policies
    if isinstance(saves, tuple):
        kept = policies.save_only_these_names(*saves)
    else:
        kept = {
            "everything": policies.everything_saveable,
            "dots": policies.save_from_both_policies(policies.dots_saveable, _fused_attention),
            "dots_no_batch": policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, _fused_attention
            ),
            "nothing": policies.nothing_saveable,
            "offload": policies.offload_dot_with_no_batch_dims("device", HOST),
        }[saves]
    if not offload:
        return kept
    moved = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst=HOST,
    )

    def policy(primitive: Any, *inputs: Any, **params: Any) -> Any:
        named = primitive.name == "name" and params["name"] in offload
        return (moved if named else kept)(primitive, *inputs, **params)

    return policy


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether this is cuDNN's attention, as JAX calls it: its result is as large as a product's,
    and as dear to compute again.
    """
    return primitive.name.startswith("dot_product_attention_fwd")


def module_policies(remat: Remat) -> tuple[tuple[str, Policy], ...]:
    """`Call.remat`: patterns of submodules with their policies."""
    return tuple(
        (pattern, policy_of(one.saves, one.offload))
        for one in remat.of_modules
        for pattern in one.modules
    )


def forward_policy(remat: Remat) -> Policy | None:
    """The policy for the forward pass as one; None where it is not recomputed as one."""
    return (
        None
        if remat.modules or remat.saves == "everything"
        else policy_of(remat.saves, remat.offload)
    )


def check_remat(placed: PlacedModel, jaxpr: Any) -> None:
    """Check names and memories of `[remat]` against the traced loss.

    Raises:
      LayoutError: no value in the modules has a name that is kept, or a device cannot reach the
        host's memory.
    """
    remat, source, problems = placed.resolved.layout.remat, placed.resolved.layout.source, []
    of_modules = [one for one in remat.of_modules if one.names]
    checkpoints = [
        equation
        for equation in equations(jaxpr)
        if "policy" in equation.params and called_program(equation) is not None
    ]
    for one in [*of_modules, *([remat] if not remat.modules and remat.names else [])]:
        policy = policy_of(one.saves, one.offload)
        inside = (
            [
                opened(called_program(equation))
                for equation in checkpoints
                if equation.params["policy"] is policy
            ]
            if one.modules
            else [jaxpr]
        )
        found = sorted({name for part in inside for name in _names(part)})
        for name in one.names:
            if name not in found:
                where = f'[remat] {"offload" if name in one.offload else "save"} = ["{name}"]'
                scope = f"in modules {', '.join(one.modules)}" if one.modules else "in the loss"
                near = f'did you mean "{closest(name, found)}"? ' if closest(name, found) else ""
                known = f"{near}Names there: {', '.join(found)}." if found else ""
                fix = (
                    known
                    or f'x = jax.ad_checkpoint.checkpoint_name(x, "{name}") in the model; no '
                    "value there has a name yet."
                )
                problems.append(
                    Problem(where, [f"no value {scope} has this name."], fix, kind="unknown_name")
                )
    missing = without_host_memory(placed.mesh) if remat.offloads else ""
    if missing:
        why = f"{missing} has no memory of kind {HOST}, to which values are offloaded."
        problems.append(
            Problem(
                "[remat] offload",
                [why],
                'save these values on the device, or save = "nothing".',
                kind="conflict",
            )
        )
    raise_problems(LayoutError, f"{source} does not fit the model", problems)


def _names(jaxpr: Any) -> set[str]:
    """Names given to values, apart from the library's own."""
    return {
        equation.params["name"]
        for equation in equations(jaxpr)
        if equation.primitive.name == "name"
    } - {LAYER_PARAMS}
