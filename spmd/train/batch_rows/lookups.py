"""Where the rows of a batch are in a look-up: of entire rows of a table, or in its own row."""

import math
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from spmd.train.batch_rows.kinds import Fixed, Kind, PerRow, Sizes, Summed, total


def look_up(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """A look-up in a table, of entire rows of data, or for each row in its own."""
    del sizes
    numbers, (table, index) = one.params["dimension_numbers"], values
    out, taken, shape = (
        one.outvars[0].aval.ndim,
        one.params["slice_sizes"],
        one.invars[0].aval.shape,
    )
    # those of the index, in order
    looked = [dim for dim in range(out) if dim not in numbers.offset_dims]
    if isinstance(table, Summed) or isinstance(index, Summed):
        return None
    power = 0 if all(value.power == 0 for value in values) else None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offsets = dict(
        zip([dim for dim in range(len(shape)) if dim not in gone], numbers.offset_dims, strict=True)
    )
    if isinstance(table, Fixed):
        if shape != other.invars[0].aval.shape:
            return None  # what lies outside depends on it
        paired = set(numbers.start_indices_batching_dims)
        if isinstance(index, PerRow):
            return (
                None
                if index.dim in paired or index.dim == len(looked)
                else PerRow(looked[index.dim], index.inner, power)
            )
        same = {
            looked[dim]
            for dim in index.uniform
            if isinstance(index, Fixed) and dim < len(looked) and dim not in paired
        }
        return Fixed(
            frozenset(same | {offsets[dim] for dim in table.uniform if dim in offsets}), power
        )
    if numbers_row(one, values) is not None:
        return PerRow(looked[rows_of_index(index)], table.inner, total(table.power, index.power))
    if table.dim in numbers.operand_batching_dims:
        partner = numbers.start_indices_batching_dims[
            list(numbers.operand_batching_dims).index(table.dim)
        ]
        if isinstance(index, PerRow):
            return (
                PerRow(looked[partner], table.inner, power)
                if (index.dim, index.inner) == (partner, table.inner)
                else None
            )
        return PerRow(looked[partner], table.inner, power if partner in index.uniform else None)
    few = (
        2 * math.prod(one.outvars[0].aval.shape) <= math.prod(shape)
        and one.outvars[0].aval.dtype != np.bool_
    )
    if few and table.dim in numbers.collapsed_slice_dims and isinstance(index, Fixed):
        return Summed(None)  # workers look up what is in their rows
    full = table.dim in offsets and taken[table.dim] == shape[table.dim]
    return (
        PerRow(offsets[table.dim], table.inner, power)
        if full and isinstance(index, Fixed)
        else None
    )


def numbers_row(one: Any, values: list[Any]) -> int | None:
    """The column of the index of a look-up with which each row looks into itself; None if there is
    none.
    """
    numbers, (table, index) = one.params["dimension_numbers"], values
    mode = one.params["mode"]
    if (
        not isinstance(table, PerRow)
        or table.inner != 1
        or mode != GatherScatterMode.PROMISE_IN_BOUNDS
        or table.dim not in numbers.collapsed_slice_dims
    ):
        return None
    if one.invars[0].aval.shape[table.dim] != one.invars[1].aval.shape[rows_of_index(index)]:
        return None
    column = list(numbers.start_index_map).index(table.dim)
    return column if column in (index.columns or ()) and getattr(index, "inner", 1) == 1 else None


def rows_of_index(index: Any) -> int:
    """The dim of an index along which the rows are, or their numbers."""
    return index.dim if isinstance(index, PerRow) else index.number or 0
