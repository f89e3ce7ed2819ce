"""The dims along which the rows of a batch lie in a scatter: written row by row, or added up by
their places, as counts and sums of classes are.
"""

from typing import Any, NamedTuple

from spmd.train.batch_rows.kinds import Fixed, Kind, PerRow, Sizes, Summed, power_if


class RowDims(NamedTuple):
    """The dims along which a scatter has rows, in its operand, index and updates; None where it has
    none.

    Attributes:
      operand: the dim of what is written to.
      index: the dim of the places.
      updates: the dim of what is written.
      inner: as in `PerRow`.
      column: of the index, that which holds the number of the row.
    """

    operand: int | None
    index: int | None
    updates: int | None
    inner: int = 1
    column: int | None = None


# dims of a scatter's operand, index and updates that are gone through together, entry by entry
EntryDims = tuple[int, int | None, int]


def scatter(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of the result: of rows that are written each from its own updates, or of a
    sum over rows.
    """
    operand, index, updates = kinds
    if isinstance(index, Summed) or isinstance(updates, Summed):
        return None
    if all(isinstance(kind, Fixed) for kind in kinds):
        return _of_fixed(one, other, kinds)
    rows = row_dims(one, other, kinds)
    if rows is None:
        return None
    if rows.operand is None:
        # a worker that calls the loss on its own rows adds its sum to what is not 0
        is_scaled = isinstance(operand, Fixed) and operand.zero and index.power == 0
        is_sum_of_rows = is_scaled and _is_of_row(updates, rows.updates)
        return Summed(power_if(is_sum_of_rows, updates.power))
    is_same = _is_of_row(operand, rows.operand) and all(kind.power == 0 for kind in kinds)
    return PerRow(rows.operand, rows.inner, power_if(is_same))


def _is_of_row(kind: Kind, dim: int | None) -> bool:
    """Return whether a worker that calls the loss on its own rows has the entries for them: along
    `dim` they are those of the rows, or all equal.
    """
    return isinstance(kind, PerRow) or (isinstance(kind, Fixed) and dim in kind.uniform)


def _of_fixed(one: Any, other: Any, kinds: list[Any]) -> Fixed:
    """Return the kind of a scatter into an array that is the same everywhere: along which dims all
    entries are equal.
    """

    def is_uniform(dims: EntryDims) -> bool:
        pairs = zip(kinds, dims, strict=True)
        return all(dim is None or dim in kind.uniform for kind, dim in pairs)

    uniform = frozenset(dims[0] for dims in _entry_dims(one, other) if is_uniform(dims))
    return Fixed(uniform, power_if(all(kind.power == 0 for kind in kinds)))


def row_dims(one: Any, other: Any, kinds: list[Any]) -> RowDims | None:
    """Return where the rows are, if workers can scatter theirs; None if they cannot."""
    candidates = [_by_number(one, kinds), *_along(one, other, kinds), _added(one, kinds)]
    for rows in candidates:
        if rows is not None and _fits(rows, kinds):
            return rows
    return None


def _fits(rows: RowDims, kinds: list[Any]) -> bool:
    """Return whether all that has rows has them there; only sums over rows are added to."""
    if isinstance(kinds[0], Summed):
        return rows.operand is None and any(isinstance(kind, PerRow) for kind in kinds)
    for kind, dim in zip(kinds, rows[:3], strict=True):
        if isinstance(kind, PerRow) and (kind.dim, kind.inner) != (dim, rows.inner):
            return False
    return True


def _dims_of_index(one: Any) -> list[int]:
    """Return the dims of the updates that are those of the index, in order."""
    window = one.params["dimension_numbers"].update_window_dims
    return [dim for dim in range(one.invars[2].aval.ndim) if dim not in window]


def _by_number(one: Any, kinds: list[Any]) -> RowDims | None:
    """Return the dims of `x.at[jnp.arange(rows), ...]`, which writes into each row from its own."""
    index, numbers = kinds[1], one.params["dimension_numbers"]
    if isinstance(index, Summed):
        return None
    if isinstance(index, PerRow):
        along = index.dim
    else:
        along = index.number
    if along is None:
        return None
    for column in sorted(index.columns or ()):
        dim = numbers.scatter_dims_to_operand_dims[column]
        is_every_row = one.invars[0].aval.shape[dim] == one.invars[1].aval.shape[along]
        if is_every_row and dim in numbers.inserted_window_dims:
            return RowDims(dim, along, _dims_of_index(one)[along], column=column)
    return None


def _entry_dims(one: Any, other: Any) -> list[EntryDims]:
    """Return the dims that a scatter goes through entry by entry: those of the operand, the index
    and the updates.
    """
    numbers = one.params["dimension_numbers"]
    operand_shapes = [trace.invars[0].aval.shape for trace in (one, other)]
    update_shapes = [trace.invars[2].aval.shape for trace in (one, other)]
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [dim for dim in range(len(operand_shapes[0])) if dim not in single]
    entry_dims: list[EntryDims] = []
    for dim, to in zip(window, numbers.update_window_dims, strict=True):
        # part of a dim may be written at any place along it
        is_entire = [x[dim] for x in operand_shapes] == [x[to] for x in update_shapes]
        if is_entire and dim not in numbers.scatter_dims_to_operand_dims:
            entry_dims.append((int(dim), None, int(to)))
    batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    for dim, index_dim in zip(*batching, strict=True):
        entry_dims.append((int(dim), int(index_dim), _dims_of_index(one)[index_dim]))
    return entry_dims


def _along(one: Any, other: Any, kinds: list[Any]) -> list[RowDims]:
    """Return those of these dims that have rows in the operand, the index or the updates."""
    rows = []
    for dims in _entry_dims(one, other):
        inner = set()
        for kind, dim in zip(kinds, dims, strict=True):
            if isinstance(kind, PerRow) and kind.dim == dim:
                inner.add(kind.inner)
        if len(inner) == 1:
            rows.append(RowDims(*dims, inner=inner.pop()))
    return rows


def _added(one: Any, kinds: list[Any]) -> RowDims | None:
    """Return the dims of the rows of a sum by places, to which each row adds its own updates."""
    operand, index, updates = kinds
    if one.primitive.name != "scatter-add" or isinstance(operand, PerRow):
        return None
    index_dims = _dims_of_index(one)
    if isinstance(updates, PerRow) and updates.dim in index_dims:
        return RowDims(None, index_dims.index(updates.dim), updates.dim, updates.inner)
    # the last dim of an index holds the columns of one place in the operand
    if not isinstance(index, PerRow) or index.dim >= len(index_dims):
        return None
    # along a batching dim each row writes into an entry of its own, and adds to no sum
    if index.dim in one.params["dimension_numbers"].scatter_indices_batching_dims:
        return None
    return RowDims(None, index.dim, index_dims[index.dim], index.inner)
