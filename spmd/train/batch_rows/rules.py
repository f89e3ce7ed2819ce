"""The rules for JAX's primitives by which `spmd.train.batch_rows.walk` reads a traced loss.

A rule takes the sizes of the two traces, the equation in each, and what is known of its inputs.
None: the workers have to share something first, and then the rule is asked again.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.train.batch_rows.kinds import (
    Fixed,
    Kind,
    PerRow,
    Sizes,
    Summed,
    joined,
    resized_dims,
    total,
    with_power,
)
from spmd.train.batch_rows.lookups import look_up
from spmd.train.batch_rows.random_numbers import along_keys, draw, split_key
from spmd.train.batch_rows.scatters import scatter

# what workers can find together
OVER_ROWS = {"reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min"}


def _reshape(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    del other
    value, old, new = (
        _without_number(values[0]),
        one.invars[0].aval.shape,
        one.outvars[0].aval.shape,
    )
    if one.params.get("dimensions") is not None or len(values) > 1:
        return None
    if isinstance(value, Summed):
        return value
    if isinstance(value, Fixed):
        every = len(value.uniform | {dim for dim, size in enumerate(old) if size == 1}) == len(old)
        kept = [size for size in old if size > 1] == [size for size in new if size > 1]
        if every or not kept:
            return dataclasses.replace(
                value, uniform=frozenset(range(len(new))) if every else frozenset()
            )
        sources = iter([dim for dim, size in enumerate(old) if size > 1])
        return dataclasses.replace(
            value,
            uniform=frozenset(
                d for d, size in enumerate(new) if size == 1 or next(sources) in value.uniform
            ),
        )
    stride = value.inner * math.prod(old[value.dim + 1 :])
    for dim, size in enumerate(new):
        below = math.prod(new[dim + 1 :])
        if stride % below == 0 and size % (stride // below * sizes.rows) == 0:
            return PerRow(dim, stride // below, value.power)
    return None


def _broadcast(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    del sizes, other
    value, old, new = values[0], one.invars[0].aval.shape, one.outvars[0].aval.shape
    dims = one.params["broadcast_dimensions"]
    if isinstance(value, PerRow):
        return (
            dataclasses.replace(value, dim=int(dims[value.dim]))
            if old[value.dim] == new[dims[value.dim]]
            else None
        )
    if isinstance(value, Summed):
        return value
    varied = {int(to) for dim, to in enumerate(dims) if dim not in value.uniform and old[dim] != 1}
    number = None if value.number is None or value.columns is not None else int(dims[value.number])
    return dataclasses.replace(
        value, uniform=frozenset(range(len(new))) - varied, number=number, columns=None
    )


def _renumbered(value: Kind | None, kept: Sequence[int]) -> Kind | None:
    """Return the kind of an array whose dims are now those numbers of the old ones."""
    if isinstance(value, PerRow):
        return (
            dataclasses.replace(value, dim=list(kept).index(value.dim))
            if value.dim in kept
            else None
        )
    if isinstance(value, Fixed):
        return dataclasses.replace(
            value,
            uniform=frozenset(new for new, old in enumerate(kept) if old in value.uniform),
            number=None,
            columns=None,
        )
    return value


def _without_number(value: Kind) -> Kind:
    if isinstance(value, Fixed):
        return dataclasses.replace(value, number=None, columns=None)
    return dataclasses.replace(value, columns=frozenset()) if isinstance(value, PerRow) else value


def _squeeze(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    del sizes, other
    return _renumbered(
        values[0], [d for d in range(one.invars[0].aval.ndim) if d not in one.params["dimensions"]]
    )


def _transpose(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    del sizes, other
    return _renumbered(values[0], [int(dim) for dim in one.params["permutation"]])


def _reduce(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    value, axes, a, b = (
        values[0],
        one.params["axes"],
        one.invars[0].aval.shape,
        other.invars[0].aval.shape,
    )
    left, name = [dim for dim in range(len(a)) if dim not in axes], one.primitive.name
    if isinstance(value, Summed):
        return value if name == "reduce_sum" else None
    if isinstance(value, PerRow) and value.dim in axes:
        if name == "reduce_sum":
            return Summed(value.power)
        return Fixed(power=None) if name in OVER_ROWS else None
    found = _renumbered(value, left)
    if found is None or (value.power == 0 and a == b):
        return found
    if name == "reduce_sum" and isinstance(value, Fixed):
        grown = [sizes.growth(a[dim], b[dim]) for dim in axes if a[dim] != b[dim]]
        return with_power(
            found,
            total(value.power, *grown) if value.uniform.issuperset(resized_dims(a, b)) else None,
        )
    keeps = name in ("reduce_sum", "reduce_max", "reduce_min") or (
        value.power == 0 and name not in ("reduce_prod", "reduce_xor")
    )
    same = not isinstance(value, Fixed) or value.uniform.issuperset(resized_dims(a, b))
    return with_power(found, value.power if keeps and same else None)


def _concatenate(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """Return the kind of an index, some columns of which may be the numbers of the rows; a worker
    counts them from its first row.
    """
    axis, last = one.params["dimension"], one.outvars[0].aval.ndim - 1
    rows = {(value.dim, value.inner) for value in values if isinstance(value, PerRow)}
    # views of the same rows
    if (
        len(rows) == 1
        and axis == next(iter(rows))[0]
        and all(isinstance(value, PerRow) for value in values)
    ):
        power = values[0].power if len({value.power for value in values}) == 1 else None
        return PerRow(*next(iter(rows)), power)
    single = axis == last and all(var.aval.shape[axis] == 1 for var in one.invars)
    sized = resized_dims(one.outvars[0].aval.shape, other.outvars[0].aval.shape)
    numbers = {
        value.number for value in values if isinstance(value, Fixed) and value.columns is None
    } & sized
    if not single or len(numbers) != 1 or numbers == {last}:
        return _along(sizes, one, other, values)
    (number,) = numbers
    columns = frozenset(
        n for n, value in enumerate(values) if isinstance(value, Fixed) and value.number == number
    )
    all_dims = frozenset(range(last + 1))
    found = _aside(
        sizes,
        one,
        {axis},
        [Fixed(all_dims) if n in columns else value for n, value in enumerate(values)],
    )
    if isinstance(found, PerRow):
        return (
            dataclasses.replace(found, columns=columns)
            if found.dim == number
            else _along(sizes, one, other, values)
        )
    if not isinstance(found, Fixed):
        return found
    return dataclasses.replace(
        found, uniform=found.uniform - {number}, number=number, columns=columns
    )


def _row_dims(value: Kind) -> set[int]:
    """Dims whose size may depend on the number of rows."""
    return (
        {value.dim}
        if isinstance(value, PerRow)
        else set(value.uniform)
        if isinstance(value, Fixed)
        else set()
    )


def _along(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """Return the kind of what works along one dim, such as a cumulative sum: any but the rows'."""
    dim = next(one.params[key] for key in ("axis", "dimension") if key in one.params)
    first = values[0]
    if one.primitive.name == "split" and isinstance(first, PerRow) and first.dim == dim:
        parts = zip(one.params["sizes"], other.params["sizes"], strict=True)
        return first if all(_all_rows(sizes, first, *part) for part in parts) else None
    found = _aside(sizes, one, {int(each) for each in np.atleast_1d(dim)}, values)
    scales = one.primitive.name not in ("cumprod", "cumlogsumexp")
    return found if found is None or scales or not found.power else with_power(found, None)


def _aside(sizes: Sizes, one: Any, touched: set[int], values: list[Kind]) -> Kind | None:
    """Return the kind of a function of operands with the same dims, of which those in `touched` are
    mixed or resized.
    """
    del sizes
    if (
        one.primitive.name in ("concatenate", "split")
        and isinstance(values[0], Summed)
        and len(set(values)) == 1
    ):
        return values[0]
    found = None
    for value, var in zip(values, one.invars, strict=False):
        if isinstance(value, Summed):
            return None
        if not var.aval.ndim and one.outvars[0].aval.ndim:
            value = Fixed(frozenset(range(one.outvars[0].aval.ndim)))
        value = _without_number(value)
        value = (
            dataclasses.replace(value, uniform=value.uniform - touched)
            if isinstance(value, Fixed)
            else value
        )
        found = value if found is None else joined(found, value)
        if found is None or (isinstance(found, PerRow) and found.dim in touched):
            return None
    return found


def _all_rows(sizes: Sizes, value: PerRow, first: int, second: int) -> bool:
    """Return whether a place along the dim of the rows is between two runs of all rows, in both
    traces.
    """
    return first % (sizes.rows * value.inner) == 0 and first * sizes.others == second * sizes.rows


def _transformed(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """`fft`: of the last dims, and linear."""
    del sizes
    value, dims = _without_number(values[0]), one.invars[0].aval.ndim
    touched = set(range(dims - len(one.params["fft_lengths"]), dims))
    if isinstance(value, PerRow):
        return None if value.dim in touched else value
    if isinstance(value, Fixed):
        same = one.outvars[0].aval.shape == other.outvars[0].aval.shape
        return dataclasses.replace(
            with_power(value, 0 if same and value.power == 0 else None),
            uniform=frozenset(value.uniform - touched),
        )
    return value


def _tiled(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """`tile`: repeated rows follow one another, as those of several arrays."""
    del sizes, one, other
    return _without_number(values[0])


def _sliced(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """`slice`, `pad`, `dynamic_slice`, `rev`, windows: dims whose size is kept and that are not
    reversed are not touched.
    """
    old, new = one.invars[0].aval.shape, one.outvars[0].aval.shape
    touched = {dim for dim, (a, b) in enumerate(zip(old, new, strict=True)) if a != b} | set(
        one.params.get("dimensions", ())
    )
    touched |= {
        dim
        for dim, (low, high, _) in enumerate(one.params.get("padding_config", ()))
        if low or high
    }
    touched |= {
        dim for dim, size in enumerate(one.params.get("window_dimensions", ())) if size != 1
    }
    touched |= {dim for dim, edges in enumerate(one.params.get("padding", ())) if any(edges)}
    if any(not isinstance(value, Fixed) for value in values[1:]):
        return None
    kept = _without_number(values[0])
    if isinstance(kept, Fixed) and one.primitive.name == "pad":
        kept = dataclasses.replace(kept, zero=False)
    if isinstance(kept, Summed):
        return kept if one.primitive.name == "slice" else None
    moved = resized_dims(one.params.get("start_indices", ()), other.params.get("start_indices", ()))
    if isinstance(kept, PerRow) and one.primitive.name == "slice" and kept.dim in touched:
        ends = [
            (one.params[key][kept.dim], other.params[key][kept.dim])
            for key in ("start_indices", "limit_indices")
        ]
        runs = all(_all_rows(sizes, kept, *end) for end in ends) and (
            one.params["strides"] is None or one.params["strides"][kept.dim] == 1
        )
        return kept if runs and moved <= {kept.dim} else None
    if moved and isinstance(kept, PerRow):
        return None
    if (
        moved
        or any(value.power != 0 for value in values[1:])
        or resized_dims(one.outvars[0].aval.shape, other.outvars[0].aval.shape) - _row_dims(kept)
    ):
        kept = with_power(kept, None)
    if isinstance(kept, PerRow):
        return None if kept.dim in touched else kept
    # of a slice the uniform dims stay so; of what is padded or seen in windows, those that are not
    # touched
    shrinks = one.primitive.name in ("slice", "dynamic_slice", "rev")
    return (
        kept
        if shrinks or not isinstance(kept, Fixed)
        else dataclasses.replace(kept, uniform=kept.uniform - touched)
    )


def _update(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """`dynamic_update_slice`: dims of the update that are those of the operand are not touched."""
    del other
    old, new = one.invars[0].aval.shape, one.invars[1].aval.shape
    if any(not isinstance(value, Fixed) for value in values[2:]):
        return None
    touched = {dim for dim, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}
    return _aside(sizes, one, touched, values[:2])


def _dot(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    del sizes
    contracted, batched = one.params["dimension_numbers"]
    if any(isinstance(value, Summed) for value in values):
        return None
    power, after, outputs = total(*(value.power for value in values)), len(batched[0]), []
    for side, var in enumerate(one.invars):  # which dim of the result each dim becomes
        free = [
            dim
            for dim in range(var.aval.ndim)
            if dim not in contracted[side] and dim not in batched[side]
        ]
        outputs.append(
            {
                **{dim: n for n, dim in enumerate(batched[side])},
                **{dim: after + n for n, dim in enumerate(free)},
            }
        )
        after += len(free)
    fixed = [(side, value) for side, value in enumerate(values) if isinstance(value, Fixed)]
    if len(fixed) == 2:
        grown = any(
            one.invars[0].aval.shape[dim] != other.invars[0].aval.shape[dim]
            for dim in contracted[0]
        )
        left, right = (
            {outputs[side][dim] for dim in value.uniform if dim in outputs[side]}
            for side, value in fixed
        )
        pairs = set(range(len(batched[0])))
        return Fixed(
            frozenset((left | right) - pairs | (left & right & pairs)), None if grown else power
        )
    places = []
    for side, value in enumerate(values):
        if isinstance(value, PerRow):
            kinds = (
                ("summed", contracted[side]),
                ("paired", batched[side]),
                ("free", tuple(range(99))),
            )
            kind, among = next((kind, list(among)) for kind, among in kinds if value.dim in among)
            places.append(
                (
                    kind,
                    outputs[side][value.dim] if kind == "free" else among.index(value.dim),
                    value.inner,
                )
            )
    kind, at, inner = places[0]
    if kind == "free":
        return PerRow(at, inner, power) if fixed else None
    partner = {"summed": contracted, "paired": batched}[kind]
    if places[0] != places[-1]:
        return None
    if any(partner[side][at] not in value.uniform for side, value in fixed):
        power = None
    return Summed(power) if kind == "summed" else PerRow(at, inner, power)


def _convolution(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    del sizes, other
    numbers, (image, kernel) = one.params["dimension_numbers"], values
    if (
        not isinstance(image, PerRow)
        or not isinstance(kernel, Fixed)
        or image.dim != numbers.lhs_spec[0]
    ):
        return None
    return (
        PerRow(numbers.out_spec[0], image.inner, total(image.power, kernel.power))
        if one.params["batch_group_count"] == 1
        else None
    )


def _psum(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """Summed over workers: what was a sum over a worker's rows is one over all, and the same for
    everybody (BatchNorm).
    """
    del sizes, other
    value, dims = values[0], [axis for axis in one.params["axes"] if isinstance(axis, int)]
    if one.params.get("axis_index_groups") is not None or (
        dims and not (isinstance(value, PerRow) and value.dim in dims)
    ):
        return None
    if dims and isinstance(value, PerRow):  # first over rows here: the model binds an axis by vmap
        value = Summed(value.power)
    if len(dims) == len(one.params["axes"]):
        return value
    if isinstance(value, Summed):
        return Fixed(power=total(value.power, 1))
    return dataclasses.replace(value, uniform=frozenset()) if isinstance(value, Fixed) else None


def _stack(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    """A new dim, along which operands of the same dims lie."""
    del sizes, other
    found, axis = values[0], one.params["axis"]
    for value in values[1:]:
        found = joined(found, value)
    if isinstance(found, PerRow):
        return dataclasses.replace(found, dim=found.dim + (found.dim >= axis))
    if isinstance(found, Fixed):
        return dataclasses.replace(
            found, uniform=frozenset(dim + (dim >= axis) for dim in found.uniform)
        )
    return found


def _iota(sizes: Sizes, one: Any, other: Any, values: list[Kind]) -> Kind | None:
    del sizes, other, values
    along = one.params["dimension"]
    return Fixed(frozenset(range(len(one.params["shape"]))) - {along}, number=along)


RULES: dict[str, Callable[[Sizes, Any, Any, list[Kind]], Kind | None]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": look_up,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), scatter
    ),
    "iota": _iota,
    "random_bits": draw,
    "random_split": split_key,
    **dict.fromkeys(("random_fold_in", "random_wrap", "random_unwrap", "random_gamma"), along_keys),
    "psum": _psum,
    "stack": _stack,
    "dynamic_update_slice": _update,
    "fft": _transformed,
    "tile": _tiled,
    **dict.fromkeys(
        (
            "slice",
            "pad",
            "dynamic_slice",
            "rev",
            "reduce_window_max",
            "reduce_window_sum",
            "reduce_window_min",
        ),
        _sliced,
    ),
    "reduce_window": _sliced,
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "split"), _along
    ),
    "concatenate": _concatenate,
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "reduce_xor",
            "argmax",
            "argmin",
        ),
        _reduce,
    ),
}
