"""Mixed precision: compute in bfloat16 or float16, keep parameters, optimizer state and statistics
as they are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base.tree import Tree
from spmd.errors import OptionError, did_you_mean
from spmd.layout.precision import PRODUCTS
from spmd.models.base import Variables
from spmd.models.frozen import is_quantized

PRECISIONS = {"float32": None, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def compute_dtype(precision: str) -> "jnp.dtype | None":
    """Return the dtype that float32 arrays are cast to inside the loss; None leaves them.

    >>> compute_dtype("float32") is None
    True
    """
    if not isinstance(precision, str) or precision not in PRECISIONS:
        fix = did_you_mean(str(precision), PRECISIONS)
        if precision in PRODUCTS:
            fix = (
                f"float32, bfloat16 or float16; products of weights in {precision} are of the "
                f'layout: [[precision]] rules, spmd.Precision("**", "{precision}").'
            )
        raise OptionError(f'no precision "{precision}".', fix=fix)
    return PRECISIONS[precision]


def cast(tree: Tree, dtype: "jnp.dtype | None") -> Tree:
    """Return every float32 leaf as `dtype`; all other leaves, and the gradient's dtype, stay."""
    if dtype is None:
        return tree

    def cast_leaf(x: Any) -> Any:
        if x.dtype != jnp.float32:
            return x
        return x.astype(dtype)

    return jax.tree.map(cast_leaf, tree)


def cast_variables(variables: Variables, dtype: "jnp.dtype | None") -> Variables:
    """Return the parameters of a model for its computation: as `cast`, but quantized parameters
    keep the dtype of their scales.
    """

    # a quantized parameter is a node of the tree, with codes and scales
    def cast_frozen(leaf: Any) -> Any:
        if is_quantized(leaf):
            return leaf
        return cast(leaf, dtype)

    frozen = jax.tree.map(cast_frozen, variables.frozen, is_leaf=is_quantized)
    return dataclasses.replace(variables, params=cast(variables.params, dtype), frozen=frozen)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Return every leaf in the dtype that it had before the step."""
    return jax.tree.map(lambda x, old: x.astype(old.dtype), tree, like)
