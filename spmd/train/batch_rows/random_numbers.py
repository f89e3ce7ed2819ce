"""The dims along which the rows of a batch lie in random numbers and their keys."""

from typing import Any

from spmd.train.batch_rows.kinds import (
    Fixed,
    Kind,
    PerRow,
    Power,
    Sizes,
    joined_all,
    power_if,
    resized_dims,
    with_power,
)


def draw(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of draws. Draws of one key are those of the rows, on whichever worker they
    are (`spmd.base.rng`); so are draws of a key for each row.
    """
    key, shape, other_shape = kinds[0], one.outvars[0].aval.shape, other.outvars[0].aval.shape
    if isinstance(key, PerRow):
        return key
    if not isinstance(key, Fixed):
        return None
    # each key of an array of keys, such as one for each time step, draws the dims after those of
    # the array
    dim = one.invars[0].aval.ndim
    has_rows = (
        len(shape) > dim
        and shape[dim] % sizes.rows == 0
        and sizes.growth(shape[dim], other_shape[dim]) == 1
        and resized_dims(shape, other_shape) == {dim}
    )
    if not has_rows:
        return Fixed(power=_power_without_rows(sizes, key, shape, other_shape, dim))
    # a key that the loss captures, and not the step's, draws the same rows on every worker
    power = power_if(key.key and key.power == 0)
    return PerRow(dim, shape[dim] // sizes.rows, power)


def split_key(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of keys that a key is split into: as many as there are rows are a key for
    each.
    """
    key, shape, other_shape = kinds[0], one.outvars[0].aval.shape, other.outvars[0].aval.shape
    if isinstance(key, PerRow):
        return with_power(key, None)
    if not isinstance(key, Fixed) or one.invars[0].aval.ndim:
        return None
    if shape[0] % sizes.rows == 0 and resized_dims(shape, other_shape) == {0}:
        return PerRow(0, shape[0] // sizes.rows, None)
    return Fixed(power=_power_without_rows(sizes, key, shape, other_shape, 0), key=key.key)


def _power_without_rows(
    sizes: Sizes, key: Fixed, shape: tuple[int, ...], other_shape: tuple[int, ...], dim: int
) -> Power:
    """Return the power of draws for all rows, from the first dim of a draw of one key on."""
    if key.power != 0 or shape != other_shape:
        return None
    # `spmd.base.rng` takes a draw of as many entries as a worker has rows for one of its rows
    is_taken_for_rows = len(other_shape) > dim and other_shape[dim] % sizes.others == 0
    return power_if(not key.key or not is_taken_for_rows)


def along_keys(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of a function of each key of an array of them."""
    kind, result = joined_all(kinds), one.outvars[0].aval
    if isinstance(kind, PerRow):
        dims = result.ndim
        # The last dim of the data of keys has the words of each.
        if one.primitive.name == "random_unwrap":
            dims = result.ndim - 1
        if kind.dim >= dims:
            return None
        return with_power(kind, None)
    if isinstance(kind, Fixed):
        key = any(isinstance(each, Fixed) and each.key for each in kinds)
        is_same = result.shape == other.outvars[0].aval.shape
        return Fixed(power=power_if(is_same, kind.power), key=key)
    return None
