"""Submodules of flax nnx modules by path, and their calls as functions of their arrays, for
`spmd.models.blocks`.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd.models.base import LAYER_PARAMS
from spmd.models.blocks import BlockCalls, BlockTrace

OBJECTS = (nnx.Pytree, nnx.Variable)


def path_of_keys(keys: Iterable[Any]) -> str:
    """Return a path from the keys of flax, which are names of attributes and numbers in lists.

    >>> path_of_keys(("blocks", 0, "kernel"))
    'blocks/0/kernel'
    """
    return "/".join(map(str, keys))


def modules_by_path(module: nnx.Module) -> dict[str, Any]:
    """Return a module and all modules inside of it, by path.

    >>> modules = modules_by_path(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    >>> type(modules["layers/0"]).__name__, type(modules[""]).__name__
    ('Linear', 'Sequential')
    """
    return {path_of_keys(keys): sub for keys, sub in nnx.iter_modules(module)}


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
        return blocks.record_call(
            path, lambda: _named_call(path, blocks, block, own_call, (args, kwargs))
        )
    graphdef, params_state, others_state = nnx.split(block, nnx.Param, ...)
    params = _by_name(params_state)
    others = _by_name(others_state)

    def call_with(
        params_now: dict[str, Any], others_now: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        inner = nnx.merge(graphdef, _state(params, params_now), _state(others, others_now))
        outputs = call(inner, *args, **kwargs)
        after = _by_name(nnx.split(inner, nnx.Param, ...)[2])
        changed = {}
        for name, (_, variable) in after.items():
            leaf = variable.get_value()
            if leaf is not others_now[name]:
                changed[name] = leaf
        return outputs, changed

    outputs, changed = blocks.call_block(path, call_with, _raw_values(params), _raw_values(others))
    nnx.update(block, _state({name: others[name] for name in changed}, changed))
    return outputs


# Keys of flax and variable of each array, by the name that the keys make.
Arrays = dict[str, tuple[tuple, Any]]


def _by_name(state: Any) -> Arrays:
    arrays = {}
    for keys, variable in nnx.to_flat_state(state):
        arrays[path_of_keys(keys)] = keys, variable
    return arrays


def _raw_values(arrays: Arrays) -> dict[str, Any]:
    return {name: variable.get_raw_value() for name, (_, variable) in arrays.items()}


def _state(arrays: Arrays, values: dict[str, Any]) -> Any:
    return nnx.from_flat_state(
        [(keys, variable.replace(values[name])) for name, (keys, variable) in arrays.items()]
    )


def _named_call(path: str, blocks: BlockTrace, block: nnx.Module, call: Any, inputs: Any) -> Any:
    """Return `call()` with named parameters. The reason is noted if it is no function of arrays."""
    leaves = jax.tree.leaves(inputs, is_leaf=lambda leaf: isinstance(leaf, OBJECTS))
    if any(isinstance(leaf, OBJECTS) for leaf in leaves):
        blocks.reasons[path] = "it is called with an object of flax, such as nnx.Rngs"
    if path in blocks.reasons:
        return call()
    variables = [variable for _, variable in nnx.to_flat_state(nnx.state(block, nnx.Param))]
    before = nnx.graphdef(block)
    values = [variable.get_raw_value() for variable in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.set_value(jax.tree.map(lambda leaf: checkpoint_name(leaf, LAYER_PARAMS), value))
    outputs = call()
    for variable, value in zip(variables, values, strict=True):
        # Other uses in the loss, such as tied weights, must not have the name.
        variable.set_value(value)
    if nnx.graphdef(block) != before:
        blocks.reasons[path] = (
            "its call changes attributes that are no arrays, or makes variables (self.sow)"
        )
    return outputs
