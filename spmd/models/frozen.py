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
    """Which parameters are not trained, by path, and how they are kept.

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
        """The trained parameters and the others, as they are kept: two trees like `params`, with
        None for what is in the other one.
        """
        trained = map_paths(lambda path, leaf: None if path in self.paths else leaf, params)
        return trained, map_paths(
            lambda path, leaf: self._keep(path, leaf) if path in self.paths else None, params
        )

    def _keep(self, path: str, leaf: Any) -> Any:
        return (
            _lowered(leaf, self.kept, self.block)
            if self.kept is not None and path in self.lower
            else leaf
        )

    def arrays(self, params: Tree) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Of each parameter that is not trained, by path, the arrays in which it is kept, by their
        paths: of a quantized one two.
        """
        if not self.paths:
            return {}
        _, kept = jax.eval_shape(self.split, params)
        arrays: dict[str, dict[str, jax.ShapeDtypeStruct]] = {
            path: {} for path in flatten(params) if path in self.paths
        }
        for path, leaf in flatten(kept).items():
            arrays[path if path in arrays else path.rpartition("/")[0]][path] = leaf
        return arrays


@functools.partial(jax.jit, static_argnums=(1, 2))  # array by array, where it lies
def _lowered(leaf: Any, kept: str, block: int) -> Any:
    return quantize(leaf, kept, block) if kept in KINDS else leaf.astype(kept)


def join(params: Tree, frozen: Tree) -> Tree:
    """All parameters, from what `Frozen.split` made; those that are quantized stay so.

    >>> join({"a": 1, "b": None}, {"a": None, "b": 2}), join({"a": 1}, {})
    ({'a': 1, 'b': 2}, {'a': 1})
    """
    if not jax.tree.leaves(frozen):
        return params
    return jax.tree.map(
        lambda one, other: other if one is None else one,
        params,
        frozen,
        is_leaf=lambda leaf: leaf is None,
    )


def is_quantized(leaf: Any) -> bool:
    """Whether a node of a tree is a quantized array."""
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
        return None if self._model.concrete is None else self._split(self._model.concrete)

    def init(self, key: Any, run: Callable[[Any], Any]) -> Variables:
        """All arrays."""
        return self._split(self._model.init(key, run))

    def stacks(self) -> dict[str, int]:
        """Those of the model; of quantized parameters those of codes and scales."""
        stacks = self._model.stacks()
        parts = {
            f"{path}/{part}": stacks[path]
            for path in stacks
            if path in self._frozen.lower
            for part in ("codes", "scales")
        }
        return stacks | (parts if self._frozen.kept in KINDS else {})

    def bind(self, variables: Variables, call: Call) -> Any:
        """The model with all of its parameters."""
        return self._model.bind(
            dataclasses.replace(
                variables, params=join(variables.params, variables.frozen), frozen={}
            ),
            call,
        )

    def rebuild(self, variables: Variables) -> Any:
        """An object of the user's kind; quantized parameters are arrays again, where their codes
        lie.
        """
        params = join(
            variables.params, jax.tree.map(_restored, variables.frozen, is_leaf=is_quantized)
        )
        return self._model.rebuild(dataclasses.replace(variables, params=params, frozen={}))


def _restored(leaf: Any) -> Any:
    if not is_quantized(leaf):
        return leaf
    return jax.jit(dequantize, out_shardings=getattr(leaf.codes, "sharding", None))(leaf)


def quantized_product(
    product: Callable[[jax.Array, jax.Array], jax.Array], lhs: jax.Array, rhs: Quantized, dtype: Any
) -> jax.Array:
    """`product(lhs, values)` with the values of a frozen array, in `dtype`. The backward pass
    computes them again from the codes.

    `product` is linear in `lhs`, but for rounding, and closes over no arrays.
    """

    shape, of = lhs.shape, lhs.dtype

    @jax.custom_vjp
    def run(lhs: jax.Array, rhs: Quantized) -> jax.Array:
        return product(lhs, dequantize(rhs, dtype))

    def forward(lhs: jax.Array, rhs: Quantized) -> tuple[jax.Array, Quantized]:
        return run(lhs, rhs), rhs

    def backward(rhs: Quantized, gradient: jax.Array) -> tuple:
        # or a compiler would keep the values of the forward pass
        codes, gradient = lax.optimization_barrier((rhs.codes, gradient))
        values = dequantize(dataclasses.replace(rhs, codes=codes), dtype)
        _, of_lhs = jax.vjp(lambda lhs: product(lhs, values), jnp.zeros(shape, of))
        return *of_lhs(gradient), None

    run.defvjp(forward, backward)
    return run(lhs, rhs)
