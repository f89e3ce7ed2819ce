"""Mixed precision: compute in bfloat16 or float16, keep parameters, optimizer state and statistics
as they are.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spmd.base.tree import Tree
from spmd.errors import OptionError, did_you_mean
from spmd.layout.precision import PRODUCTS
from spmd.models.base import Variables
from spmd.models.frozen import is_quantized

PRECISIONS = {"float32": None, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def compute_dtype(precision: str) -> "jnp.dtype | None":
    """The dtype that float32 arrays are cast to inside the loss; None leaves them.

    >>> compute_dtype("float32") is None
    True
    """
    if not isinstance(precision, str) or precision not in PRECISIONS:
        of_layout = (
            f"products of weights in {precision} are of the layout: [[precision]] rules, "
            f'spmd.Precision("**", "{precision}").'
        )
        fix = (
            f"float32, bfloat16 or float16; {of_layout}"
            if precision in PRODUCTS
            else did_you_mean(str(precision), PRECISIONS)
        )
        raise OptionError(f'no precision "{precision}".', fix=fix)
    return PRECISIONS[precision]


def cast(tree: Tree, dtype: "jnp.dtype | None") -> Tree:
    """Every float32 leaf as `dtype`; all other leaves, and the gradient's dtype, stay."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, tree)


def cast_variables(variables: Variables, dtype: "jnp.dtype | None") -> Variables:
    """The parameters of a model for its computation: as `cast`, but the scales of quantized ones
    stay.
    """
    frozen = jax.tree.map(
        lambda leaf: leaf if is_quantized(leaf) else cast(leaf, dtype),
        variables.frozen,
        is_leaf=is_quantized,
    )
    return dataclasses.replace(variables, params=cast(variables.params, dtype), frozen=frozen)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Every leaf in the dtype it had before the step."""
    return jax.tree.map(lambda x, old: x.astype(old.dtype), tree, like)
