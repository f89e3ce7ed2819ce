"""A user's model with a layout's adapters, as it is on any mesh: its shapes and its axis names."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base.tree import Tree, flatten
from spmd.errors import ModelError
from spmd.layout.schema import Layout
from spmd.models.base import Model, Variables
from spmd.models.flax_linen import LinenModel
from spmd.models.wrap import wrap
from spmd.nn.parallel_context import UNSHARDED, parallel_scope
from spmd.train.choose_frozen import with_adapters
from spmd.train.objective import Objective


class ModelSpec:
    """A model with the adapters of a layout.

    It is traced when its shapes are asked for. Of a linen model this needs a batch: `learn`.

    Attributes:
      as_passed: the model without adapters.
      objective: the loss and the metrics.
      sample: the shapes of the first batch; None before it.
    """

    def __init__(self, as_passed: Model, objective: Objective, layout: Layout, seed: int):
        self.as_passed = as_passed
        self.objective = objective
        self.sample: Tree = None
        self._layout = layout
        self._seed = seed

    def under(self, layout: Layout) -> "ModelSpec":
        """Return the same for another layout; it is not traced again where adapters are alike."""
        if layout.adapters != self._layout.adapters:
            spec = ModelSpec(self.as_passed, self.objective, layout, self._seed)
            spec.learn(self.sample)
            return spec
        # the copy has what is cached: the traced shapes and names
        _ = self.shapes, self.axis_names
        spec = copy.copy(self)
        spec._layout = layout
        return spec

    def learn(self, sample: Tree) -> None:
        """Keep the shapes of a batch, if it is the first."""
        if self.sample is None:
            self.sample = sample

    @functools.cached_property
    def adapted(self) -> Model:
        """The model with its adapters."""
        return with_adapters(self.as_passed, self._layout, self._seed)

    @functools.cached_property
    def shapes(self) -> Variables:
        """Shapes and dtypes of all arrays; `params` has all parameters, trained or not.

        Raises:
          ModelError: it is a linen model, and there was no batch yet.
        """
        if isinstance(self.as_passed, LinenModel) and self.sample is None:
            raise ModelError(
                "a linen module shows its shapes only on data.",
                fix="trainer.init(batch), with a batch or its shapes.",
            )
        return self.adapted.shapes(self.call_on_zeros)

    @property
    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of all parameters by path, packed and quantized in no way."""
        return flatten(self.shapes.params)

    @functools.cached_property
    def axis_names(self) -> dict[str, tuple]:
        """The logical axis names of parameters that carry any, by path."""
        named = self.adapted.names(jax.random.key(0), self.call_on_zeros)
        axis_names = {}
        for path, names in named.items():
            dims = list(names)
            for dim, name in enumerate(names):
                # flax takes PartitionSpec.UNCONSTRAINED among them
                if not isinstance(name, str | tuple):
                    dims[dim] = None
            axis_names[path] = tuple(dims)
        return axis_names

    def call_on_zeros(self, model: Any) -> None:
        """Call the loss on zeros, for a model that shows its shapes only when it is called."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.sample)
        with parallel_scope(UNSHARDED):
            self.objective.for_training().call(model, zeros, jax.random.key(0))

    def rebuilt(self, build: Callable[[], Any], seed: Any) -> Model:
        """Return a model like this, with its adapters, that `build` makes of a seed that may be
        traced.
        """
        return with_adapters(wrap(build), self._layout, seed)

    def release(self) -> None:
        """Free the arrays of a model that was handed over, which are in a state now or are not
        needed.
        """
        self.adapted.release()
