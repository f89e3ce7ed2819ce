"""The order in which a state keeps a stack's layers, so that each stage of a circular pipeline holds its own and nothing is moved to it.

With g groups on each of p stages, group c of stage s is the network's (c p + s)th (`spmd.nn.schedule`), but a mesh axis cuts dim 0 into
pieces that lie side by side. So the layers of stage 0 are kept first, then those of stage 1, and so on.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from spmd.models.base import Call, Model, Variables
from spmd.tree import Tree, flatten, map_paths
from spmd.xla import move_bits


def stage_order(layers: int, stages: int, groups: int) -> np.ndarray:
    """int[layers]: which of the network's layers stands where.

    >>> stage_order(8, stages=2, groups=2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return np.arange(layers).reshape(groups, stages, -1).swapaxes(0, 1).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Ordered:
    """How a state keeps parameters like these: those of `paths` with their layers in the order of stages, all others as they are."""

    like: Tree
    stages: int
    groups: int
    paths: tuple[str, ...]

    def pack(self, params: Tree) -> Tree:
        """From the network's order."""
        return self._taken(params, lambda order: order)

    def unpack(self, stored: Tree) -> Tree:
        """To the network's order."""
        return self._taken(stored, np.argsort)

    def _taken(self, params: Tree, rows: Callable[[np.ndarray], np.ndarray]) -> Tree:
        take = lambda leaf: leaf[rows(stage_order(leaf.shape[0], self.stages, self.groups))]
        return move_bits(lambda tree: map_paths(lambda path, leaf: take(leaf) if path in self.paths else leaf, tree), params)

    def alone(self, path: str, leaf: Any) -> "Ordered":
        """The same for one parameter by itself."""
        return dataclasses.replace(self, like=leaf, paths=("",) if path in self.paths else ())


class OrderedModel(Model):
    """`model`, whose parameters are kept in the order of stages; its stacks know it."""

    def __init__(self, model: Model, order: Ordered):
        self._model, self._order = model, order

    @property
    def concrete(self) -> Variables | None:
        """The arrays of one that was given whole, ordered."""
        return None if self._model.concrete is None else self._packed(self._model.concrete)

    def _packed(self, variables: Variables) -> Variables:
        return dataclasses.replace(variables, params=self._order.pack(variables.params))

    def init(self, key: Any, run: Callable[[Any], Any]) -> Variables:
        """All arrays, ordered."""
        return self._packed(self._model.init(key, run))

    def names(self, key: Any, run: Callable[[Any], Any]) -> dict[str, tuple]:
        """The model's own."""
        return self._model.names(key, run)

    def stacks(self) -> dict[str, int]:
        """The model's own."""
        return self._model.stacks()

    def bind(self, variables: Variables, call: Call) -> Any:
        """The model with its layers in the order of stages."""
        return self._model.bind(variables, call)

    def stats_of(self, bound: Any) -> Tree:
        """The model's own."""
        return self._model.stats_of(bound)

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        """The model's own."""
        self._model.check_remat(patterns)

    def rebuild(self, variables: Variables) -> Any:
        """The user's kind of object, layers in the network's order."""
        params = jax.jit(self._order.unpack)(variables.params)
        return self._model.rebuild(dataclasses.replace(variables, params=params))


def order_of(stacks: Mapping[str, int], like: Tree, stages: int, groups: int) -> Ordered | None:
    """The order of a pipeline with several groups on each stage; None where layers stay as they are."""
    paths = tuple(path for path in flatten(like) if path in stacks)
    return Ordered(like, stages, groups, paths) if groups > 1 and stages > 1 and paths else None
