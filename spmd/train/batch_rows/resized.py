"""Params of equations that were traced for all rows of a batch, for a part of the rows."""

from collections.abc import Callable
from typing import Any

from spmd.jaxpr.primitives import Kind, of_kind
from spmd.train.batch_rows.row_arrays import Shape, traced_shape

Params = dict[str, Any]


def _broadcast(one: Any, arrays: list[Any], shape: Shape) -> Params:
    return {"shape": shape}


def _reshape(one: Any, arrays: list[Any], shape: Shape) -> Params:
    return {"new_sizes": shape}


def _slice(one: Any, arrays: list[Any], shape: Shape) -> Params:
    full, here = traced_shape(one.invars[0]), arrays[0].shape

    def scaled(places: Shape) -> Shape:
        sizes = zip(places, here, full, strict=True)
        return tuple(place * part // max(size, 1) for place, part, size in sizes)

    return {key: scaled(one.params[key]) for key in ("start_indices", "limit_indices")}


def _split(one: Any, arrays: list[Any], shape: Shape) -> Params:
    axis = one.params["axis"]
    size, here = traced_shape(one.invars[0])[axis], arrays[0].shape[axis]
    return {"sizes": tuple(part * here // size for part in one.params["sizes"])}


def _gather(one: Any, arrays: list[Any], shape: Shape) -> Params:
    slices = []
    for size, full, here in zip(
        one.params["slice_sizes"], traced_shape(one.invars[0]), arrays[0].shape, strict=True
    ):
        slices.append(here if size == full else size)
    return {"slice_sizes": tuple(slices)}


def _same(one: Any, arrays: list[Any], shape: Shape) -> Params:
    return {}


# From an equation of the trace on all rows, its inputs on a part of them, and the shape of its
# result there, to the params that differ.
RESIZED: dict[str, Callable[[Any, list[Any], Shape], Params]] = {
    **dict.fromkeys(of_kind(Kind.REDUCTION, Kind.CUMULATIVE, Kind.WINDOW), _same),
    **dict.fromkeys(
        """
        concatenate conv_general_dilated dot_general pad random_bits random_fold_in random_split
        random_unwrap random_wrap rev sort squeeze stack transpose""".split(),
        _same,
    ),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "gather": _gather,
}
