"""Blocks of a model: sibling submodules with equal parameters, each called once as `block(x)`.
Their calls are found here, and can be replaced. Submodules of flax nnx modules by path, and their
calls as functions of their arrays.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd.base.tree import Tree, flatten
from spmd.base.xla import current_trace
from spmd.models.base import LAYER_PARAMS

INSIDE = (
    "it is called inside of a transformation of JAX, such as jax.checkpoint, jax.vmap or jax.jit"
)
# (parameters by name, other variables) -> (outputs, variables that the call changed)
RunBlock = Callable[[dict[str, Any], Tree], tuple[Tree, Tree]]


OBJECTS = (nnx.Pytree, nnx.Variable)
# Keys of flax and variable of each array, by the name that the keys make.
Arrays = dict[str, tuple[tuple, Any]]


class BlockCalls(abc.ABC):
    """Takes over the calls of some submodules."""

    @abc.abstractmethod
    def takes(self, path: str) -> bool:
        """Return whether a call of the submodule with this path, now, goes through `call_block`."""

    @abc.abstractmethod
    def call_block(
        self, path: str, function: RunBlock, params: dict[str, Any], others: Tree
    ) -> tuple[Tree, Tree]:
        """Return outputs of a call, and the variables that it changed.

        Args:
          function: the call. What it closes over are the call's inputs.
          params: by name in the block, as the model has them.
        """


def block_groups(params: Tree, stacked: Collection[str]) -> list[tuple[str, ...]]:
    """Return paths of siblings with equal names, shapes and dtypes of parameters, at least two of
    them; with matrices, and without `stacked` parameters. A sibling may be inside of another one.

    >>> block_groups(
    ...     {
    ...         "blocks": {name: {"kernel": np.zeros((2, 2))} for name in "01"},
    ...         "out": {"kernel": np.zeros((2, 3))},
    ...     },
    ...     (),
    ... )
    [('blocks/0', 'blocks/1')]
    """
    # Names, shapes and dtypes of the parameters below every prefix.
    members: dict[str, list[tuple]] = {}
    left_out = set()
    for path, leaf in flatten(params).items():
        parts = path.split("/")
        for count in range(1, len(parts)):
            prefix = "/".join(parts[:count])
            array = ("/".join(parts[count:]), np.shape(leaf), str(leaf.dtype))
            members.setdefault(prefix, []).append(array)
            if path in stacked:
                left_out.add(prefix)
    groups: dict[tuple, list[str]] = {}
    for prefix, arrays in members.items():
        if prefix not in left_out and any(len(shape) > 1 for _, shape, _ in arrays):
            parent = prefix.rpartition("/")[0]
            groups.setdefault((parent, tuple(sorted(arrays))), []).append(prefix)
    return [tuple(paths) for paths in groups.values() if len(paths) > 1]


@dataclasses.dataclass
class NamedBlocks(BlockCalls):
    """Calls blocks with these paths through `named`, which gives the calls a name by which a reader
    of the traced loss finds them.
    """

    paths: frozenset[str]
    named: Callable[[RunBlock], RunBlock]
    _inside: bool = False

    def takes(self, path: str) -> bool:
        return not self._inside and path in self.paths

    def call_block(
        self, path: str, function: RunBlock, params: dict[str, Any], others: Tree
    ) -> tuple[Tree, Tree]:
        self._inside = True
        try:
            return self.named(function)(params, others)
        finally:
            self._inside = False


@dataclasses.dataclass
class BlockTrace(BlockCalls):
    """Names the parameters that a traced loss takes to blocks, as `LAYER_PARAMS`, and records the
    calls.

    Attributes:
      groups: as `block_groups` returns them.
      order: paths of the blocks that were called, in order.
      reasons: why a block cannot be taken over, by path.
    """

    groups: list[tuple[str, ...]]
    order: list[str] = dataclasses.field(default_factory=list)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._paths = {path for group in self.groups for path in group}
        self._trace: Any = None
        self._inside = False

    def begin(self) -> None:
        """Remember the trace under which the model was bound: all blocks are to be called in it."""
        self._trace = current_trace()

    def takes(self, path: str) -> bool:
        return not self._inside and path in self._paths

    def record_call(self, path: str, function: Callable[[], Any]) -> Any:
        """Return `function()`, which calls this block."""
        self.order.append(path)
        if current_trace() != self._trace:
            self.reasons[path] = INSIDE
        self._inside = True
        try:
            return function()
        finally:
            self._inside = False

    def call_block(
        self, path: str, function: RunBlock, params: dict[str, Any], others: Tree
    ) -> tuple[Tree, Tree]:
        def call_named() -> tuple[Tree, Tree]:
            named = {name: checkpoint_name(leaf, LAYER_PARAMS) for name, leaf in params.items()}
            return function(named, others)

        return self.record_call(path, call_named)


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
