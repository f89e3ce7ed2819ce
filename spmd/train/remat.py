"""Policies of `jax.checkpoint` for a layout's `[remat]`, and checks of the names that they save."""

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
    """Return the `jax.checkpoint` policy of `Remat.saves` and `Remat.offload`; one and the same
    object for equal ones.
    """
    policies = jax.checkpoint_policies
    save = _saving_policy(saves)
    if not offload:
        return save
    move = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst=HOST,
    )

    def policy(primitive: Any, *inputs: Any, **params: Any) -> Any:
        # Asked for these names alone: JAX's policy for offloading recomputes all other values.
        if primitive.name == "name" and params["name"] in offload:
            return move(primitive, *inputs, **params)
        return save(primitive, *inputs, **params)

    return policy


def _saving_policy(saves: str | tuple[str, ...]) -> Policy:
    """Return the policy of `Remat.saves`."""
    policies = jax.checkpoint_policies
    if isinstance(saves, tuple):
        return policies.save_only_these_names(*saves)
    products = policies.dots_with_no_batch_dims_saveable
    return {
        "everything": policies.everything_saveable,
        "dots": policies.save_from_both_policies(policies.dots_saveable, _is_fused_attention),
        "dots_no_batch": policies.save_from_both_policies(products, _is_fused_attention),
        "nothing": policies.nothing_saveable,
        "offload": policies.offload_dot_with_no_batch_dims("device", HOST),
    }[saves]


def _is_fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a primitive is cuDNN's attention, as JAX calls it: its result is as large as a
    product's, and as dear to compute again.
    """
    return primitive.name.startswith("dot_product_attention_fwd")


def module_policies(remat: Remat) -> tuple[tuple[str, Policy], ...]:
    """Return `Call.remat`: patterns of submodules with their policies."""
    pairs = []
    for table in remat.of_modules:
        policy = policy_of(table.saves, table.offload)
        pairs += [(pattern, policy) for pattern in table.modules]
    return tuple(pairs)


def forward_policy(remat: Remat) -> Policy | None:
    """Return the policy for the forward pass as one; None where it is not recomputed as one."""
    if remat.modules or remat.saves == "everything":
        return None
    return policy_of(remat.saves, remat.offload)


def check_remat(placed: PlacedModel, jaxpr: Any) -> None:
    """Check names and memories of `[remat]` against the traced loss.

    Raises:
      LayoutError: no value in the modules has a name that is kept, or a device cannot reach the
        host's memory.
    """
    layout = placed.resolved.layout
    remat = layout.remat
    tables = [table for table in remat.of_modules if table.names]
    if remat.names and not remat.modules:
        tables.append(remat)
    problems = []
    for table in tables:
        names = _names_in(table, jaxpr)
        for name in table.names:
            if name not in names:
                problems.append(_unknown_name(table, name, names))
    missing = ""
    if remat.offloads:
        missing = without_host_memory(placed.mesh)
    if missing:
        why = f"{missing} has no memory of kind {HOST}, to which values are offloaded."
        fix = 'save these values on the device, or save = "nothing".'
        problems.append(Problem("[remat] offload", [why], fix, kind="conflict"))
    raise_problems(LayoutError, f"{layout.source} does not fit the model", problems)


def _names_in(table: Any, jaxpr: Any) -> list[str]:
    """Return the names of values in the modules of a `[remat]` table, or in the complete loss if
    it has none; apart from the library's own.
    """
    programs = [jaxpr]
    if table.modules:
        policy = policy_of(table.saves, table.offload)
        programs = []
        for equation in equations(jaxpr):
            program = called_program(equation)
            # `policy_of` returns one object for equal tables, so it says of which modules this is
            if program is not None and equation.params.get("policy") is policy:
                programs.append(opened(program))
    names = set()
    for program in programs:
        for equation in equations(program):
            # `jax.ad_checkpoint.checkpoint_name` is an equation of this primitive
            if equation.primitive.name == "name":
                names.add(equation.params["name"])
    return sorted(names - {LAYER_PARAMS})


def _unknown_name(table: Any, name: str, names: list[str]) -> Problem:
    """Return the problem of a name in a `[remat]` table that none of the values has."""
    key = "save"
    if name in table.offload:
        key = "offload"
    scope = "in the loss"
    if table.modules:
        scope = f"in modules {', '.join(table.modules)}"
    fix = (
        f'x = jax.ad_checkpoint.checkpoint_name(x, "{name}") in the model; no value there has a '
        "name yet."
    )
    if names:
        fix = f"Names there: {', '.join(names)}."
        nearest = closest(name, names)
        if nearest:
            fix = f'did you mean "{nearest}"? {fix}'
    where = f'[remat] {key} = ["{name}"]'
    return Problem(where, [f"no value {scope} has this name."], fix, kind="unknown_name")
