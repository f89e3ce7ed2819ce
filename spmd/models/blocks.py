"""Blocks of a model: sibling submodules with equal parameters, each called once as `block(x)`.
Their calls are found here, and can be replaced.
"""

import abc
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from jax.ad_checkpoint import checkpoint_name

from spmd.base.tree import Tree, flatten
from spmd.base.xla import current_trace
from spmd.models.base import LAYER_PARAMS

INSIDE = (
    "it is called inside of a transformation of JAX, such as jax.checkpoint, jax.vmap or jax.jit"
)
# (parameters by name, other variables) -> (outputs, variables that the call changed)
RunBlock = Callable[[dict[str, Any], Tree], tuple[Tree, Tree]]


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
