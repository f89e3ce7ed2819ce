"""Where the rows of a batch are in a scatter: written row by row, or added up by their places, as
counts and sums of classes are.
"""

from typing import Any, NamedTuple

from spmd.train.batch_rows.kinds import Fixed, Kind, PerRow, Sizes, Summed


class RowDims(NamedTuple):
    """The dims along which a scatter has rows, in its operand, index and updates; None where it has
    none.

    `inner` is as in `PerRow`. `column`: of the index, that which holds the number of the row.
    """

    operand: int | None
    index: int | None
    updates: int | None
    inner: int = 1
    column: int | None = None


def scatter(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """Return the kind of the result: of rows that are written each from its own updates, or of a
    sum over rows.
    """
    del sizes
    operand, *others = values
    if any(isinstance(value, Summed) for value in others):
        return None
    if isinstance(operand, Fixed) and all(isinstance(value, Fixed) for value in others):
        return _of_fixed(one, other, [operand, *others])
    rows = row_dims(one, other, values)
    if rows is None:
        return None
    if rows.operand is None:
        added = isinstance(operand, Fixed) and operand.zero and others[0].power == 0
        same = isinstance(others[1], PerRow) or (
            isinstance(others[1], Fixed) and rows.updates in others[1].uniform
        )
        return Summed(others[1].power if added and same else None)
    same = isinstance(operand, PerRow) or (
        isinstance(operand, Fixed) and rows.operand in operand.uniform
    )
    return PerRow(
        rows.operand, rows.inner, 0 if same and all(value.power == 0 for value in values) else None
    )


def _of_fixed(one: Any, other: Any, values: list[Any]) -> Fixed:
    """Return the kind of a scatter into an array that is the same everywhere: along which dims all
    entries are equal.
    """

    def is_uniform(dims: tuple[int, int | None, int]) -> bool:
        return all(
            dim is None or dim in value.uniform for value, dim in zip(values, dims, strict=True)
        )

    uniform = frozenset(dims[0] for dims in _entire(one, other) if is_uniform(dims))
    return Fixed(uniform, 0 if all(value.power == 0 for value in values) else None)


def row_dims(one: Any, other: Any, values: list[Any]) -> RowDims | None:
    """Return where the rows are, if workers can scatter theirs; None if they cannot."""
    found = [_by_number(one, values), *_along(one, other, values), _added(one, values)]
    return next((rows for rows in found if rows is not None and _fits(rows, values)), None)


def _fits(rows: RowDims, values: list[Any]) -> bool:
    """Return whether all that has rows has them there; only sums over rows are added to."""
    if isinstance(values[0], Summed):
        return rows.operand is None and any(isinstance(value, PerRow) for value in values)
    dims = zip(values, rows[:3], strict=True)
    return all(
        (value.dim, value.inner) == (dim, rows.inner)
        for value, dim in dims
        if isinstance(value, PerRow)
    )


def _looked(one: Any) -> list[int]:
    """Return the dims of the updates that are those of the index, in order."""
    return [
        dim
        for dim in range(one.invars[2].aval.ndim)
        if dim not in one.params["dimension_numbers"].update_window_dims
    ]


def _by_number(one: Any, values: list[Any]) -> RowDims | None:
    """Return the dims of `x.at[jnp.arange(rows), ...]`, which writes into each row from its own."""
    index, numbers = values[1], one.params["dimension_numbers"]
    along = (
        index.dim
        if isinstance(index, PerRow)
        else index.number
        if isinstance(index, Fixed)
        else None
    )
    for column in sorted(getattr(index, "columns", None) or ()):
        dim = numbers.scatter_dims_to_operand_dims[column]
        every = (
            along is not None and one.invars[0].aval.shape[dim] == one.invars[1].aval.shape[along]
        )
        if along is not None and every and dim in numbers.inserted_window_dims:
            return RowDims(dim, along, _looked(one)[along], column=column)
    return None


def _entire(one: Any, other: Any) -> list[tuple[int, int | None, int]]:
    """Return the dims that a scatter goes through entry by entry: those of the operand, the index
    and the updates.
    """
    numbers, found = one.params["dimension_numbers"], []
    shapes = [[var.aval.shape for var in each.invars] for each in (one, other)]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    left = [dim for dim in range(len(shapes[0][0])) if dim not in gone]
    for dim, to in zip(left, numbers.update_window_dims, strict=True):
        entire = all(operand[dim] == updates[to] for operand, _, updates in shapes)
        if entire and dim not in numbers.scatter_dims_to_operand_dims:
            found.append((int(dim), None, int(to)))
    for dim, of_index in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        found.append((int(dim), int(of_index), _looked(one)[of_index]))
    return found


def _along(one: Any, other: Any, values: list[Any]) -> list[RowDims]:
    """Return those of these dims that have rows in the operand, the index or the updates."""
    rows = []
    for places in _entire(one, other):
        dims = zip(values, places, strict=True)
        inner = {
            value.inner for value, dim in dims if isinstance(value, PerRow) and value.dim == dim
        }
        rows += [RowDims(*places, inner=inner.pop())] if len(inner) == 1 else []
    return rows


def _added(one: Any, values: list[Any]) -> RowDims | None:
    """Return the dims of the rows of a sum by places, to which each row adds its own updates."""
    operand, index, updates = values
    numbers, looked = one.params["dimension_numbers"], _looked(one)
    if one.primitive.name != "scatter-add" or isinstance(operand, PerRow):
        return None
    if isinstance(updates, PerRow) and updates.dim in looked:
        return RowDims(None, looked.index(updates.dim), updates.dim, updates.inner)
    batched = isinstance(index, PerRow) and index.dim in numbers.scatter_indices_batching_dims
    if isinstance(index, PerRow) and index.dim < len(looked) and not batched:
        return RowDims(None, index.dim, looked[index.dim], index.inner)
    return None
