"""Dims of arrays of an attention that a model writes out, by what they are for.

A role is a number: one for each dim that the product of queries and keys has. A dim of an array has
a tuple of roles, because a reshape may join dims and split them again; a dim of size 1 has none.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

Roles = tuple[int, ...]
Sizes = Mapping[int, int]


def wide(roles: Sequence[int], sizes: Sizes) -> Roles:
    """Return the roles of more than one entry."""
    return tuple(role for role in roles if sizes[role] > 1)


def reshaped(dims: Sequence[Roles], sizes: Sizes, shape: Sequence[int]) -> tuple[Roles, ...] | None:
    """Return the roles of an array's dims once it has another shape; None if a role would be split.

    Example:
      >>> reshaped([(0,), (1,), (2, 3)], {0: 2, 1: 5, 2: 4, 3: 3}, (10, 4, 1, 3))
      ((0, 1), (2,), (), (3,))
    """
    left = [role for roles in dims for role in roles]
    new_dims = []
    for size in shape:
        roles: Roles = ()
        while math.prod(sizes[role] for role in roles) < size and left:
            roles = (*roles, left.pop(0))
        if math.prod(sizes[role] for role in roles) != size:
            return None
        new_dims.append(roles)
    return tuple(new_dims)


def arrange(
    x: jax.Array, dims: Sequence[Roles], sizes: Sizes, new_dims: Sequence[Roles]
) -> jax.Array:
    """Return an array with dims of these roles, as one with a dim for each of `new_dims`, of size 1
    where `x` has none of its roles.

    Example:
      >>> arrange(
      ...     jnp.zeros((2, 5, 12)),
      ...     [(0,), (1,), (2, 3)],
      ...     {0: 2, 1: 5, 2: 4, 3: 3, 4: 7},
      ...     [(2, 3), (4,), (0, 1)],
      ... ).shape
      (12, 1, 10)
    """
    here = [role for roles in dims for role in roles]
    x = x.reshape([sizes[role] for role in here])
    order = [here.index(role) for roles in new_dims for role in roles if role in here]
    x = jnp.transpose(x, order)
    # Of a new dim, the array gets all roles or none.
    shape = []
    roles_shape = []
    full_shape = []
    for roles in new_dims:
        size = 1
        if not set(here).isdisjoint(roles):
            for role in wide(roles, sizes):
                size *= sizes[role]
                full_shape.append(sizes[role])
                if role in here:
                    roles_shape.append(sizes[role])
                else:
                    roles_shape.append(1)
        shape.append(size)
    return jnp.broadcast_to(x.reshape(roles_shape), full_shape).reshape(shape)
