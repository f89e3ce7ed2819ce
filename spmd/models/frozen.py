"""A model of which some parameters are not trained: they have a tree of their own, in fewer bits if
asked for.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base.tree import Tree, flatten, map_paths
from spmd.models.base import Call, Model, Variables, WrappedModel
from spmd.models.quantized import KINDS, Quantized, dequantize, quantize


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Parameters that are not trained, by path, and the dtype or format that they are kept in.

    Attributes:
      kept: of those in `lower`, "bfloat16", "float16", "int8" or "nf4", with `block` values for
        each scale; None: as they are.
      lower: paths of those that are kept so; all others stay in their dtype.
    """

    paths: frozenset[str]
    kept: str | None = None
    block: int = 64
    lower: frozenset[str] = frozenset()

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """Return the trained parameters and the frozen ones, as they are kept: two trees like
        `params`, with None for the leaves of the other tree.
        """
        return map_paths(self._trained_leaf, params), map_paths(self._frozen_leaf, params)

    def _trained_leaf(self, path: str, leaf: Any) -> Any:
        if path in self.paths:
            return None
        return leaf

    def _frozen_leaf(self, path: str, leaf: Any) -> Any:
        if path not in self.paths:
            return None
        if self.kept is None or path not in self.lower:
            return leaf
        return _lowered(leaf, self.kept, self.block)

    def arrays(self, params: Tree) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Return, by path of each parameter that is not trained, the arrays in which it is kept, by
        their paths: two for a quantized parameter.
        """
        if not self.paths:
            return {}
        _, frozen = jax.eval_shape(self.split, params)
        arrays: dict[str, dict[str, jax.ShapeDtypeStruct]] = {
            path: {} for path in flatten(params) if path in self.paths
        }
        for path, leaf in flatten(frozen).items():
            parameter = path
            if path not in arrays:
                # A quantized parameter is kept as two arrays, codes and scales.
                parameter = path.rpartition("/")[0]
            arrays[parameter][path] = leaf
        return arrays


# Compiled array by array, so that each is rounded where it lies, and one at a time.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _lowered(leaf: Any, kind: str, block: int) -> Any:
    if kind in KINDS:
        return quantize(leaf, kind, block)
    return leaf.astype(kind)


def join(params: Tree, frozen: Tree) -> Tree:
    """Return all parameters, from the trees of `Frozen.split`; quantized ones stay quantized.

    >>> join({"a": 1, "b": None}, {"a": None, "b": 2}), join({"a": 1}, {})
    ({'a': 1, 'b': 2}, {'a': 1})
    """
    if not jax.tree.leaves(frozen):
        return params
    return jax.tree.map(_either, params, frozen, is_leaf=lambda leaf: leaf is None)


def _either(trained: Any, frozen: Any) -> Any:
    if trained is None:
        return frozen
    return trained


def is_quantized(leaf: Any) -> bool:
    """Return whether a node of a tree is a quantized array."""
    return isinstance(leaf, Quantized)


class FrozenModel(WrappedModel):
    """`model` with the parameters that are not trained as `Variables.frozen`."""

    def __init__(self, model: Model, frozen: Frozen):
        super().__init__(model)
        self._frozen = frozen

    def _split(self, variables: Variables) -> Variables:
        params, frozen = self._frozen.split(variables.params)
        return dataclasses.replace(variables, params=params, frozen=frozen)

    @property
    def concrete(self) -> Variables | None:
        """The arrays of a model that was passed with arrays."""
        if self._model.concrete is None:
            return None
        return self._split(self._model.concrete)

    def make_variables(self, key: Any, run_loss: Callable[[Any], Any]) -> Variables:
        """Return all arrays."""
        return self._split(self._model.make_variables(key, run_loss))

    def stacks(self) -> dict[str, int]:
        """Return the stacks of the model, with the codes and scales of quantized parameters."""
        stacks = self._model.stacks()
        if self._frozen.kept not in KINDS:
            return stacks
        parts = {}
        for path in stacks:
            if path in self._frozen.lower:
                parts[f"{path}/codes"] = stacks[path]
                parts[f"{path}/scales"] = stacks[path]
        return stacks | parts

    def bind(self, variables: Variables, call: Call) -> Any:
        """Return the model with all of its parameters in it."""
        params = join(variables.params, variables.frozen)
        return self._model.bind(dataclasses.replace(variables, params=params, frozen={}), call)

    def rebuild(self, variables: Variables) -> Any:
        """Return an object of the user's kind; quantized parameters are arrays again, where their
        codes lie.
        """
        frozen = jax.tree.map(_restored, variables.frozen, is_leaf=is_quantized)
        params = join(variables.params, frozen)
        return self._model.rebuild(dataclasses.replace(variables, params=params, frozen={}))


def _restored(leaf: Any) -> Any:
    if not is_quantized(leaf):
        return leaf
    return jax.jit(dequantize, out_shardings=getattr(leaf.codes, "sharding", None))(leaf)


def quantized_product(
    product: Callable[[jax.Array, jax.Array], jax.Array], lhs: jax.Array, rhs: Quantized, dtype: Any
) -> jax.Array:
    """Return `product(lhs, values)` with the values of a frozen array, in `dtype`. The backward
    pass computes them again from the codes.

    `product` is linear in `lhs`, but for rounding, and closes over no arrays.
    """
    shape = lhs.shape
    lhs_dtype = lhs.dtype

    @jax.custom_vjp
    def multiply(lhs: jax.Array, rhs: Quantized) -> jax.Array:
        return product(lhs, dequantize(rhs, dtype))

    def forward(lhs: jax.Array, rhs: Quantized) -> tuple[jax.Array, Quantized]:
        return multiply(lhs, rhs), rhs

    def backward(rhs: Quantized, gradient: jax.Array) -> tuple:
        # Without a barrier XLA merges this with the forward pass's `dequantize`, and keeps the
        # values in between.
        codes, gradient = lax.optimization_barrier((rhs.codes, gradient))
        values = dequantize(dataclasses.replace(rhs, codes=codes), dtype)
        # `product` is linear in `lhs`, so it has the same transpose at any value, and `lhs` need
        # not be saved.
        zeros = jnp.zeros(shape, lhs_dtype)
        _, transpose = jax.vjp(lambda lhs: product(lhs, values), zeros)
        # A frozen array has no gradient: None is a cotangent of zero.
        return *transpose(gradient), None

    multiply.defvjp(forward, backward)
    return multiply(lhs, rhs)
