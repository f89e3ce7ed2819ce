"""A model whose parameters are stored by servers, in packed rows, and unpacked where the model is
called.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from spmd.base.specs import make_entry
from spmd.base.tree import Tree, flatten, nbytes
from spmd.layout.resolve import Placement, Resolved, spread
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.models.base import Call, Model, Variables, WrappedModel
from spmd.wire.server.packing import Storage


def place_packed(storage: Storage, layout: Layout, mesh: MeshSpec) -> Resolved:
    """Return where the stored arrays live: a row on each position along the data axes."""
    spec = (layout.data_axes(),)
    stored = flatten(jax.eval_shape(storage.pack, storage.like))
    source = f"servers, {storage.placement}"
    placements = {
        path: Placement(path, leaf.shape, str(leaf.dtype), nbytes(leaf), spec, spec, source)
        for path, leaf in stored.items()
    }
    return Resolved(layout, mesh, placements)


def place_unpacked(storage: Storage, layout: Layout, mesh: MeshSpec) -> Resolved:
    """Return where unpacked parameters live, for an optimizer that sees them so: replicated, and
    its state split over the data axes.
    """
    sizes = {make_entry(layout.data_axes()): storage.positions}
    source = "unpacked from the servers"
    placements = {}
    for path, leaf in flatten(storage.like).items():
        spec = spread(leaf.shape, sizes)
        placements[path] = Placement(
            path, leaf.shape, str(leaf.dtype), nbytes(leaf), (), spec, source
        )
    return Resolved(layout, mesh, placements)


class PackedModel(WrappedModel):
    """`model` with its parameters packed for the servers."""

    def __init__(self, model: Model, storage: Storage):
        super().__init__(model)
        self.storage = storage

    @property
    def concrete(self) -> Variables | None:
        """The arrays of a model that already has some, packed."""
        if self._model.concrete is None:
            return None
        return self._packed(self._model.concrete)

    def _packed(self, variables: Variables) -> Variables:
        return dataclasses.replace(variables, params=self.storage.pack(variables.params))

    def _unpacked(self, variables: Variables) -> Variables:
        return dataclasses.replace(variables, params=self.storage.unpack(variables.params))

    def make_variables(self, key: Any, run_loss: Callable[[Any], Any]) -> Variables:
        """All arrays, parameters packed."""
        return self._packed(self._model.make_variables(key, run_loss))

    def names(self, key: Any, run_loss: Callable[[Any], Any]) -> dict[str, tuple]:
        """Rows have no logical axes."""
        del key, run_loss
        return {}

    def bind(self, variables: Variables, call: Call) -> Any:
        """The model with its parameters unpacked."""
        # `unpack` moves values as integers, which have no gradient.
        params = self.storage.views(variables.params)
        return self._model.bind(dataclasses.replace(variables, params=params), call)

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

    def init(params: Tree) -> Any:
        return optimizer.init(storage.unpack(params))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        unpacked = None
        if params is not None:
            unpacked = storage.unpack(params)
        updates, state = optimizer.update(storage.unpack(updates), state, unpacked, **extra)
        return storage.pack(updates), state

    return optax.GradientTransformationExtraArgs(init, update)
