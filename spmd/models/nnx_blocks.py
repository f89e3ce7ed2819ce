"""Calls of flax nnx modules as functions of their arrays, for `spmd.models.blocks`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd.models.base import LAYER_PARAMS
from spmd.models.blocks import BlockCalls, BlockTrace

OBJECTS = (nnx.Pytree, nnx.Variable)


def call_block(
    blocks: BlockCalls,
    path: str,
    call: Callable[..., Any],
    block: nnx.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `call(block, *args, **kwargs)`, by way of `blocks` if it takes this call."""
    if not blocks.takes(path):
        return call(block, *args, **kwargs)
    if isinstance(blocks, BlockTrace):
        own_call = functools.partial(call, block, *args, **kwargs)
        return blocks.call(path, lambda: _named_call(path, blocks, block, own_call, (args, kwargs)))
    graphdef, *states = nnx.split(block, nnx.Param, ...)
    params, others = (_by_name(state) for state in states)

    def run(params_now: dict[str, Any], others_now: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        inner = nnx.merge(graphdef, _state(params, params_now), _state(others, others_now))
        outputs = call(inner, *args, **kwargs)
        after = _by_name(nnx.split(inner, nnx.Param, ...)[2])
        return outputs, {
            name: leaf
            for name, (_, variable) in after.items()
            if (leaf := variable.get_value()) is not others_now[name]
        }

    values = [
        {name: variable.get_raw_value() for name, (_, variable) in leaves.items()}
        for leaves in (params, others)
    ]
    outputs, kept = blocks.run(path, run, *values)
    nnx.update(block, _state({name: others[name] for name in kept}, kept))
    return outputs


def _by_name(state: Any) -> dict[str, tuple[tuple, Any]]:
    """Keys and variable of each array."""
    return {
        "/".join(map(str, keys)): (keys, variable) for keys, variable in nnx.to_flat_state(state)
    }


def _state(variables: dict[str, tuple[tuple, Any]], values: dict[str, Any]) -> Any:
    return nnx.from_flat_state(
        [(keys, variable.replace(values[name])) for name, (keys, variable) in variables.items()]
    )


def _named_call(path: str, blocks: BlockTrace, block: nnx.Module, call: Any, inputs: Any) -> Any:
    """The call with named parameters. Why it is no function of arrays is noted."""
    leaves = jax.tree.leaves(inputs, is_leaf=lambda leaf: isinstance(leaf, OBJECTS))
    if any(isinstance(leaf, OBJECTS) for leaf in leaves):
        blocks.reasons[path] = "it is called with an object of flax, such as nnx.Rngs"
    if path in blocks.reasons:
        return call()
    variables = [variable for _, variable in nnx.to_flat_state(nnx.state(block, nnx.Param))]
    before, values = nnx.graphdef(block), [variable.get_raw_value() for variable in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.set_value(jax.tree.map(lambda leaf: checkpoint_name(leaf, LAYER_PARAMS), value))
    outputs = call()
    for variable, value in zip(variables, values, strict=True):
        variable.set_value(value)  # what else the loss does with it is seen
    if nnx.graphdef(block) != before:
        blocks.reasons[path] = (
            "its call changes attributes that are no arrays, or makes variables (self.sow)"
        )
    return outputs
