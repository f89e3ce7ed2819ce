"""A model whose parameters are stored in packed rows, and unpacked where the model is called."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from spmd.models.base import Call, Model, Variables
from spmd.sync.param_server.packing import Storage
from spmd.tree import Tree


class PackedModel(Model):
    """`model` with its parameters packed for the servers."""

    def __init__(self, model: Model, storage: Storage):
        self._model, self.storage = model, storage

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
        return self._model.bind(dataclasses.replace(variables, params=self.storage.views(variables.params)), call)

    def get_stats(self, bound: Any) -> Tree:
        """The model's own."""
        return self._model.get_stats(bound)

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        """The model's own."""
        self._model.check_remat(patterns)

    def check_adapters(self) -> None:
        """The model's own."""
        self._model.check_adapters()

    def rebuild(self, variables: Variables) -> Any:
        """The user's kind of object, with replicated parameters."""
        return self._model.rebuild(jax.jit(self._unpacked)(variables))
