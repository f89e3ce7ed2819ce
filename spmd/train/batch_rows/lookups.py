"""The dims that hold the rows of a batch in a look-up: one of entire rows of a table, or one that
each row makes in its own row.
"""

import math
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from spmd.train.batch_rows.kinds import Fixed, Kind, PerRow, Power, Sizes, Summed, power_if, total


def look_up(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of a look-up in a table, of entire rows of data, or for each row in its
    own.
    """
    table, index = kinds
    if isinstance(table, Summed) or isinstance(index, Summed):
        return None
    power = power_if(table.power == 0 and index.power == 0)
    if isinstance(table, PerRow):
        return _in_rows(one, table, index, power)
    # what lies outside depends on the size
    if one.invars[0].aval.shape != other.invars[0].aval.shape:
        return None
    return _in_fixed_table(one, table, index, power)


def _in_fixed_table(one: Any, table: Fixed, index: PerRow | Fixed, power: Power) -> Kind | None:
    """Return the kind of a look-up in a table that is the same on every worker."""
    paired = set(one.params["dimension_numbers"].start_indices_batching_dims)
    looked_up, entries = _dims_of_index(one), _dims_of_table(one)
    if isinstance(index, PerRow):
        # the last dim of an index holds the columns of one place in the table
        if index.dim in paired or index.dim == len(looked_up):
            return None
        return PerRow(looked_up[index.dim], index.inner, power)
    uniform = {entries[dim] for dim in table.uniform if dim in entries}
    for dim, to in enumerate(looked_up):
        # with each place along a paired dim another part of the table is looked into
        if dim in index.uniform and dim not in paired:
            uniform.add(to)
    return Fixed(frozenset(uniform), power)


def _in_rows(one: Any, table: PerRow, index: PerRow | Fixed, power: Power) -> Kind | None:
    """Return the kind of a look-up in a table of which each worker has the rows of its own."""
    numbers, result = one.params["dimension_numbers"], one.outvars[0].aval
    shape = one.invars[0].aval.shape
    looked_up, entries = _dims_of_index(one), _dims_of_table(one)
    if numbers_row(one, [table, index]) is not None:
        rows_dim = looked_up[rows_of_index(index)]
        return PerRow(rows_dim, table.inner, total(table.power, index.power))
    if table.dim in numbers.operand_batching_dims:
        place = list(numbers.operand_batching_dims).index(table.dim)
        partner = numbers.start_indices_batching_dims[place]
        if isinstance(index, PerRow) and (index.dim, index.inner) != (partner, table.inner):
            return None
        # a worker that calls the loss on its own rows looks with the first entries of the index
        if isinstance(index, Fixed) and partner not in index.uniform:
            power = None
        return PerRow(looked_up[partner], table.inner, power)
    if isinstance(index, PerRow):
        return None
    # to share a few entries, as a sum over workers, costs less than to share all rows; truth values
    # have no sum
    is_small = 2 * math.prod(result.shape) <= math.prod(shape) and result.dtype != np.bool_
    if is_small and table.dim in numbers.collapsed_slice_dims:
        # workers look up what is in their rows
        return Summed(None)
    is_entire = one.params["slice_sizes"][table.dim] == shape[table.dim]
    if is_entire and table.dim in entries:
        return PerRow(entries[table.dim], table.inner, power)
    return None


def _dims_of_index(one: Any) -> list[int]:
    """Return the dims of the result that are those of the index, in order."""
    offset_dims = one.params["dimension_numbers"].offset_dims
    return [dim for dim in range(one.outvars[0].aval.ndim) if dim not in offset_dims]


def _dims_of_table(one: Any) -> dict[int, int]:
    """Return the dim of the result that each dim of the table becomes, but for those of which one
    entry is looked up.
    """
    numbers = one.params["dimension_numbers"]
    single = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    dims = [dim for dim in range(one.invars[0].aval.ndim) if dim not in single]
    return dict(zip(dims, numbers.offset_dims, strict=True))


def numbers_row(one: Any, kinds: list[Any]) -> int | None:
    """Return the column of the index of a look-up with which each row looks into itself; None if
    there is none.
    """
    numbers, (table, index) = one.params["dimension_numbers"], kinds
    if not isinstance(table, PerRow) or table.inner != 1 or getattr(index, "inner", 1) != 1:
        return None
    # the other modes compare places with the size of the table, and a part has another size
    if one.params["mode"] != GatherScatterMode.PROMISE_IN_BOUNDS:
        return None
    if table.dim not in numbers.collapsed_slice_dims:
        return None
    size, index_shape = one.invars[0].aval.shape[table.dim], one.invars[1].aval.shape
    if size != index_shape[rows_of_index(index)]:
        return None
    column = list(numbers.start_index_map).index(table.dim)
    if column not in (index.columns or ()):
        return None
    return column


def rows_of_index(index: Any) -> int:
    """Return the dim of an index along which the rows are, or their numbers."""
    if isinstance(index, PerRow):
        return index.dim
    return index.number or 0
