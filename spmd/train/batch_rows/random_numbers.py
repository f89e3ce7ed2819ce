"""Where the rows of a batch are in random numbers and their keys."""

from typing import Any

from spmd.train.batch_rows.kinds import Fixed, Kind, PerRow, Sizes, joined, resized_dims, with_power


def draw(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """Draws of one key are those of the rows, on whichever worker they are (`spmd.rng`); so are
    draws of a key for each row.
    """
    key, a, b = values[0], one.outvars[0].aval.shape, other.outvars[0].aval.shape
    if isinstance(key, PerRow):
        return key
    # each key of an array of keys, such as one for each time step, draws the dims after those of
    # the array
    dim = one.invars[0].aval.ndim
    own = isinstance(key, Fixed) and key.key
    if not isinstance(key, Fixed):
        return None
    if (
        len(a) > dim
        and a[dim] % sizes.rows == 0
        and sizes.growth(a[dim], b[dim]) == 1
        and resized_dims(a, b) == {dim}
    ):
        return PerRow(dim, a[dim] // sizes.rows, 0 if own and key.power == 0 else None)
    return Fixed(
        power=None if key.power != 0 or a != b or (own and _taken_for_rows(sizes, b[dim:])) else 0
    )


def _taken_for_rows(sizes: Sizes, shape: tuple[int, ...]) -> bool:
    """Return whether a draw for all rows has as many entries as a worker has rows, so that
    `spmd.rng` takes it for its rows.
    """
    return bool(shape) and shape[0] % sizes.others == 0


def split_key(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """As many keys as there are rows are a key for each."""
    key, a, b = values[0], one.outvars[0].aval.shape, other.outvars[0].aval.shape
    if isinstance(key, PerRow):
        return with_power(key, None)
    if not isinstance(key, Fixed) or one.invars[0].aval.ndim:
        return None
    if a[0] % sizes.rows == 0 and resized_dims(a, b) == {0}:
        return PerRow(0, a[0] // sizes.rows, None)
    return Fixed(
        power=None if key.power != 0 or a != b or (key.key and _taken_for_rows(sizes, b)) else 0,
        key=key.key,
    )


def along_keys(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """A function of each key of an array of them."""
    found = values[0]
    for value in values[1:]:
        found = joined(found, value) if found is not None else None
    if isinstance(found, PerRow):
        aval = one.outvars[0].aval
        return (
            with_power(found, None)
            if found.dim < aval.ndim - (one.primitive.name == "random_unwrap")
            else None
        )
    if isinstance(found, Fixed):
        key = any(isinstance(value, Fixed) and value.key for value in values)
        return Fixed(
            power=found.power if one.outvars[0].aval.shape == other.outvars[0].aval.shape else None,
            key=key,
        )
    return None
