"""The order in which a state stores a stack's layers, so that each stage of a circular pipeline
holds its layers without communication.

With g groups on each of p stages, group c of stage s is the network's (c p + s)th
(`spmd.nn.schedule`), but a mesh axis shards dim 0 into contiguous blocks. So the layers of stage 0
are stored first, then those of stage 1, and so on.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from spmd.base.tree import Tree, flatten, map_paths
from spmd.base.xla import move_bits
from spmd.models.base import Model, Variables, WrappedModel


def stage_order(layers: int, stages: int, groups: int) -> np.ndarray:
    """int[layers]: the network's layer at each position.

    >>> stage_order(8, stages=2, groups=2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return np.arange(layers).reshape(groups, stages, -1).swapaxes(0, 1).reshape(-1)


@dataclasses.dataclass(frozen=True)
class StageOrder:
    """An order of parameters in a state: those of `paths` have their layers in stage order, all
    others are as they are.
    """

    like: Tree
    stages: int
    groups: int
    paths: tuple[str, ...]

    def pack(self, params: Tree) -> Tree:
        """Return parameters in stage order, from the network's order."""
        return self._permute(params, lambda order: order)

    def unpack(self, stored: Tree) -> Tree:
        """Return parameters in the network's order, from stage order."""
        return self._permute(stored, np.argsort)

    def _permute(self, params: Tree, direction: Callable[[np.ndarray], np.ndarray]) -> Tree:
        def permute(path: str, leaf: Any) -> Any:
            if path not in self.paths:
                return leaf
            return leaf[direction(stage_order(leaf.shape[0], self.stages, self.groups))]

        # XLA:CPU loses bits of floats that are only moved (`to_bits` in `base/xla.py` says which).
        return move_bits(lambda tree: map_paths(permute, tree), params)

    def alone(self, path: str, leaf: Any) -> "StageOrder":
        """Return the same order for a single parameter."""
        paths = ()
        if path in self.paths:
            paths = ("",)
        return dataclasses.replace(self, like=leaf, paths=paths)


class StageOrderedModel(WrappedModel):
    """`model` with its parameters stored in stage order; its stacks read
    `ParallelConfig.in_stage_order`.
    """

    def __init__(self, model: Model, order: StageOrder):
        super().__init__(model)
        self._order = order

    @property
    def concrete(self) -> Variables | None:
        """The arrays of a model that was passed already initialized, in stage order."""
        if self._model.concrete is None:
            return None
        return self._packed(self._model.concrete)

    def _packed(self, variables: Variables) -> Variables:
        return dataclasses.replace(
            variables,
            params=self._order.pack(variables.params),
            frozen=self._order.pack(variables.frozen),
        )

    def make_variables(self, key: Any, run_loss: Callable[[Any], Any]) -> Variables:
        """All arrays, in stage order."""
        return self._packed(self._model.make_variables(key, run_loss))

    def rebuild(self, variables: Variables) -> Any:
        """An object of the user's kind, with layers in the network's order."""
        params = jax.jit(self._order.unpack)(variables.params)
        frozen = jax.jit(self._order.unpack)(variables.frozen)
        return self._model.rebuild(dataclasses.replace(variables, params=params, frozen=frozen))


def make_stage_order(
    stacks: Mapping[str, int], like: Tree, stages: int, groups: int
) -> StageOrder | None:
    """The stage order of a pipeline with several groups on each stage; None where the network's
    order is kept.
    """
    paths = tuple(path for path in {**flatten(like), **stacks} if path in stacks)
    if not (groups > 1 and stages > 1 and paths):
        return None
    return StageOrder(like, stages, groups, paths)
