"""A model whose parameters are stored in packed rows, and unpacked where the model is called."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from spmd.base.tree import Tree
from spmd.models.base import Call, Model, Variables, WrappedModel
from spmd.sync.param_server.packing import Storage


class PackedModel(WrappedModel):
    """`model` with its parameters packed for the servers."""

    def __init__(self, model: Model, storage: Storage):
        super().__init__(model)
        self.storage = storage

    @property
    def concrete(self) -> Variables | None:
        """The arrays of a model that already has some, packed."""
        return None if self._model.concrete is None else self._packed(self._model.concrete)

    def _packed(self, variables: Variables) -> Variables:
        return dataclasses.replace(variables, params=self.storage.pack(variables.params))

    def _unpacked(self, variables: Variables) -> Variables:
        return dataclasses.replace(variables, params=self.storage.unpack(variables.params))

    def init(self, key: Any, run: Callable[[Any], Any]) -> Variables:
        """All arrays, parameters packed."""
        return self._packed(self._model.init(key, run))

    def names(self, key: Any, run: Callable[[Any], Any]) -> dict[str, tuple]:
        """Rows have no logical axes."""
        del key, run
        return {}

    def bind(self, variables: Variables, call: Call) -> Any:
        """The model with its parameters unpacked."""
        return self._model.bind(
            dataclasses.replace(variables, params=self.storage.views(variables.params)), call
        )

    def rebuild(self, variables: Variables) -> Any:
        """The user's kind of object, with replicated parameters."""
        return self._model.rebuild(jax.jit(self._unpacked)(variables))

    def stacks(self) -> dict[str, int]:
        """Rows have no layers."""
        return {}


def unpacked_for(
    optimizer: optax.GradientTransformationExtraArgs, storage: Storage
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of packed rows that lets `optimizer` see unpacked parameters; the state is that
    of `optimizer`, and not packed.
    """

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        seen = None if params is None else storage.unpack(params)
        updates, state = optimizer.update(storage.unpack(updates), state, seen, **extra)
        return storage.pack(updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optimizer.init(storage.unpack(params)), update
    )
