"""The rules for JAX's primitives by which `spmd.train.batch_rows.walk` reads a traced loss.

A rule takes the sizes of the two traces, the equation in each, and the kinds of its inputs, and
returns the kind of its output. None: the workers have to share something first, and then the rule
is asked again. The power of a kind (see `PerRow`) is None where a worker that calls the loss on its
own rows gets no multiple of what the full batch has.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spmd.train.batch_rows.kinds import (
    Fixed,
    Kind,
    PerRow,
    Sizes,
    Summed,
    joined,
    joined_all,
    keep_power_if,
    power_if,
    resized_dims,
    total,
    with_power,
)
from spmd.train.batch_rows.lookups import look_up
from spmd.train.batch_rows.random_numbers import along_keys, draw, split_key
from spmd.train.batch_rows.scatters import scatter

# what workers can find together
OVER_ROWS = {"reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min"}


# dims that are renamed, added or removed ----------------------------------------------------------


def _reshape(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    kind = _without_number(kinds[0])
    old, new = one.invars[0].aval.shape, one.outvars[0].aval.shape
    # `lax.reshape(x, sizes, dimensions)` transposes first; further inputs are sizes that only the
    # run knows
    if one.params.get("dimensions") is not None or len(kinds) > 1:
        return None
    if isinstance(kind, Summed):
        return kind
    if isinstance(kind, Fixed):
        return dataclasses.replace(kind, uniform=_reshaped_uniform(kind.uniform, old, new))
    # an entry of the next row is this far away, in the flattened array, in both shapes
    stride = kind.inner * math.prod(old[kind.dim + 1 :])
    for dim, size in enumerate(new):
        below = math.prod(new[dim + 1 :])
        if stride % below == 0 and size % (stride // below * sizes.rows) == 0:
            return PerRow(dim, stride // below, kind.power)
    return None


def _reshaped_uniform(uniform: frozenset[int], old: Sequence[int], new: Sequence[int]) -> frozenset:
    """Return the dims of a reshaped array along which all entries are equal."""
    if uniform.issuperset(dim for dim, size in enumerate(old) if size != 1):
        return frozenset(range(len(new)))
    old_dims = [dim for dim, size in enumerate(old) if size > 1]
    new_dims = [dim for dim, size in enumerate(new) if size > 1]
    if [old[dim] for dim in old_dims] != [new[dim] for dim in new_dims]:
        return frozenset()
    # only dims of size 1 come or go
    pairs = zip(old_dims, new_dims, strict=True)
    singles = {dim for dim, size in enumerate(new) if size == 1}
    return frozenset(singles.union(to for dim, to in pairs if dim in uniform))


def _broadcast(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    kind, dims = kinds[0], one.params["broadcast_dimensions"]
    old, new = one.invars[0].aval.shape, one.outvars[0].aval.shape
    if isinstance(kind, Summed):
        return kind
    if isinstance(kind, PerRow):
        to = int(dims[kind.dim])
        # the only row of a batch of one, for as many others
        if old[kind.dim] != new[to]:
            return None
        return dataclasses.replace(kind, dim=to)
    number = None
    # the last dim, to which `columns` belong, may be another one now
    if kind.number is not None and kind.columns is None:
        number = int(dims[kind.number])
    uniform = set(range(len(new)))
    for dim, to in enumerate(dims):
        if dim not in kind.uniform and old[dim] != 1:
            uniform.discard(int(to))
    return dataclasses.replace(kind, uniform=frozenset(uniform), number=number, columns=None)


def _squeeze(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    return _with_dims(kinds[0], _other_dims(one, one.params["dimensions"]))


def _transpose(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    return _with_dims(kinds[0], [int(dim) for dim in one.params["permutation"]])


def _stack(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of a stack: operands of the same dims, along a new dim."""
    kind, axis = joined_all(kinds), one.params["axis"]
    if isinstance(kind, PerRow):
        return dataclasses.replace(kind, dim=kind.dim + (kind.dim >= axis))
    if isinstance(kind, Fixed):
        uniform = frozenset(dim + (dim >= axis) for dim in kind.uniform)
        return dataclasses.replace(kind, uniform=uniform)
    return kind


def _tile(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    # repeated rows follow one another, as those of several arrays
    return _without_number(kinds[0])


def _iota(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    along = one.params["dimension"]
    return Fixed(frozenset(range(len(one.params["shape"]))) - {along}, number=along)


def _other_dims(one: Any, dims: Iterable[int]) -> list[int]:
    """Return the dims of the first input of an equation without some of them."""
    return [dim for dim in range(one.invars[0].aval.ndim) if dim not in dims]


def _with_dims(kind: Kind, old_dims: list[int]) -> Kind | None:
    """Return the kind of an array whose dims are, in order, these dims of the array before."""
    if isinstance(kind, PerRow):
        if kind.dim not in old_dims:
            return None
        return dataclasses.replace(kind, dim=old_dims.index(kind.dim))
    if isinstance(kind, Fixed):
        uniform = frozenset(new for new, old in enumerate(old_dims) if old in kind.uniform)
        return dataclasses.replace(kind, uniform=uniform, number=None, columns=None)
    return kind


def _without_number(kind: Kind) -> Kind:
    """Return the kind of an array whose entries are no longer at the places of which they are the
    numbers.
    """
    if isinstance(kind, Fixed):
        return dataclasses.replace(kind, number=None, columns=None)
    if isinstance(kind, PerRow):
        return dataclasses.replace(kind, columns=frozenset())
    return kind


# reductions ---------------------------------------------------------------------------------------


def _reduce(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    name, kind, axes = one.primitive.name, kinds[0], one.params["axes"]
    shape, other_shape = one.invars[0].aval.shape, other.invars[0].aval.shape
    if isinstance(kind, Summed):
        if name != "reduce_sum":
            return None
        return kind
    if isinstance(kind, PerRow) and kind.dim in axes:
        return _reduced_rows(name, kind)
    result = _with_dims(kind, _other_dims(one, axes))
    if result is None or (kind.power == 0 and shape == other_shape):
        return result
    resized = resized_dims(shape, other_shape)
    # else another number of rows leaves out entries that are not equal to the others
    is_uniform = not isinstance(kind, Fixed) or kind.uniform.issuperset(resized)
    if not is_uniform:
        return with_power(result, None)
    if name == "reduce_sum" and isinstance(kind, Fixed):
        # a sum of equal entries grows as their number does
        growths = [sizes.growth(shape[dim], other_shape[dim]) for dim in axes if dim in resized]
        return with_power(result, total(kind.power, *growths))
    scales = name in ("reduce_sum", "reduce_max", "reduce_min")
    # the largest of more equal entries is the same; their product is not, nor their parity
    if scales or (kind.power == 0 and name not in ("reduce_prod", "reduce_xor")):
        return result
    return with_power(result, None)


def _reduced_rows(name: str, kind: PerRow) -> Kind | None:
    """Return the kind of a reduction over rows."""
    if name == "reduce_sum":
        return Summed(kind.power)
    # workers find the largest of all rows together
    if name in OVER_ROWS:
        return Fixed(power=None)
    return None


def _psum(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of a sum over workers: what was a sum over a worker's rows is one over all
    rows, and the same on all workers (BatchNorm).
    """
    kind = kinds[0]
    # where `jax.vmap` binds an axis, it becomes a dim
    dims = [axis for axis in one.params["axes"] if isinstance(axis, int)]
    if one.params.get("axis_index_groups") is not None:
        return None
    if dims:
        # first over the rows here
        if not isinstance(kind, PerRow) or kind.dim not in dims:
            return None
        kind = Summed(kind.power)
    if len(dims) == len(one.params["axes"]):
        return kind
    if isinstance(kind, Summed):
        return Fixed(power=total(kind.power, 1))
    if not isinstance(kind, Fixed):
        return None
    return dataclasses.replace(kind, uniform=frozenset())


# functions along some dims ------------------------------------------------------------------------


def _concatenate(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of rows after rows, such as two views of them; or of an index, some columns
    of which may be the numbers of the rows, which a worker counts from its first row.
    """
    axis, last = one.params["dimension"], one.outvars[0].aval.ndim - 1
    rows = {(kind.dim, kind.inner) for kind in kinds if isinstance(kind, PerRow)}
    if len(rows) == 1 and all(isinstance(kind, PerRow) for kind in kinds):
        ((dim, inner),) = rows
        powers = {kind.power for kind in kinds}
        if axis == dim:
            return PerRow(dim, inner, power_if(len(powers) == 1, kinds[0].power))
    has_columns = axis == last and all(x.aval.shape[axis] == 1 for x in one.invars)
    sized = resized_dims(one.outvars[0].aval.shape, other.outvars[0].aval.shape)
    numbers = set()
    for kind in kinds:
        if isinstance(kind, Fixed) and kind.columns is None and kind.number in sized:
            numbers.add(kind.number)
    if not has_columns or len(numbers) != 1 or numbers == {last}:
        return _along(sizes, one, other, kinds)
    number = numbers.pop()
    columns = frozenset(
        n for n, kind in enumerate(kinds) if isinstance(kind, Fixed) and kind.number == number
    )
    # numbers of rows are as good as equal entries: each worker has those of its own rows
    uniform = Fixed(frozenset(range(last + 1)))
    without_numbers = [uniform if n in columns else kind for n, kind in enumerate(kinds)]
    result = _beside(one, {axis}, without_numbers)
    if isinstance(result, PerRow):
        if result.dim != number:
            return _along(sizes, one, other, kinds)
        return dataclasses.replace(result, columns=columns)
    if isinstance(result, Fixed):
        uniform_dims = result.uniform - {number}
        return dataclasses.replace(result, uniform=uniform_dims, number=number, columns=columns)
    return result


def _along(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of what works along one dim, such as a cumulative sum: any but the rows'."""
    name, first, params = one.primitive.name, kinds[0], one.params
    if "axis" in params:
        dim = params["axis"]
    else:
        dim = params["dimension"]
    if name == "split" and isinstance(first, PerRow) and first.dim == dim:
        parts = zip(params["sizes"], other.params["sizes"], strict=True)
        if not all(_all_rows(sizes, first, *part) for part in parts):
            return None
        return first
    result = _beside(one, {dim}, kinds)
    # f(c x) = c f(x) does not hold for these
    is_curved = name in ("cumprod", "cumlogsumexp")
    if is_curved and result is not None and result.power:
        return with_power(result, None)
    return result


def _beside(one: Any, touched: set[int], kinds: list[Kind]) -> Kind | None:
    """Return the kind of a function of operands with the same dims, of which those in `touched` are
    mixed or resized.
    """
    is_linear = one.primitive.name in ("concatenate", "split")
    if is_linear and isinstance(kinds[0], Summed) and len(set(kinds)) == 1:
        return kinds[0]
    ndim = one.outvars[0].aval.ndim
    result: Kind | None = None
    for number, (kind, variable) in enumerate(zip(kinds, one.invars, strict=False)):
        if isinstance(kind, Summed):
            return None
        if not variable.aval.ndim and ndim:
            kind = Fixed(frozenset(range(ndim)))
        kind = _without_number(kind)
        if isinstance(kind, Fixed):
            kind = dataclasses.replace(kind, uniform=kind.uniform - touched)
        if number:
            result = joined(result, kind)
        else:
            result = kind
        if result is None or (isinstance(result, PerRow) and result.dim in touched):
            return None
    return result


def _all_rows(sizes: Sizes, kind: PerRow, first: int, second: int) -> bool:
    """Return whether a place along the dim of the rows is between two runs of all rows, in both
    traces.
    """
    return first % (sizes.rows * kind.inner) == 0 and first * sizes.others == second * sizes.rows


def _fft(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    kind, ndim = _without_number(kinds[0]), one.invars[0].aval.ndim
    # it is of the last dims, and linear
    touched = set(range(ndim - len(one.params["fft_lengths"]), ndim))
    if isinstance(kind, PerRow) and kind.dim in touched:
        return None
    if isinstance(kind, Fixed):
        kind = dataclasses.replace(kind, uniform=kind.uniform - touched)
        is_same = one.outvars[0].aval.shape == other.outvars[0].aval.shape
        return keep_power_if(kind, is_same and kind.power == 0)
    return kind


# parts of arrays, and windows ---------------------------------------------------------------------


def _slice(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of a `slice`, `pad`, `dynamic_slice`, `rev`, or of windows: dims whose size
    stays and that are not reversed are not touched.
    """
    name, (first, *others) = one.primitive.name, kinds
    # a place, or a value that pads, which each row has for itself
    if any(not isinstance(kind, Fixed) for kind in others):
        return None
    kind = _without_number(first)
    if isinstance(kind, Summed):
        if name == "slice":
            return kind
        return None
    touched = _touched_dims(one)
    starts, other_starts = (each.params.get("start_indices", ()) for each in (one, other))
    moved = resized_dims(starts, other_starts)
    if isinstance(kind, PerRow) and kind.dim in touched and name == "slice":
        is_run = moved <= {kind.dim} and _has_runs_of_all_rows(sizes, one, other, kind)
        if is_run:
            return kind
        return None
    if isinstance(kind, PerRow) and (moved or kind.dim in touched):
        return None
    resized = resized_dims(one.outvars[0].aval.shape, other.outvars[0].aval.shape)
    depends_on_rows = bool(moved or resized - _sized_dims(kind))
    if depends_on_rows or any(each.power != 0 for each in others):
        kind = with_power(kind, None)
    if isinstance(kind, PerRow):
        return kind
    # what pads need not be 0
    if name == "pad":
        kind = dataclasses.replace(kind, zero=False)
    # all entries of a part are equal where all entries are; padding and the windows at an edge are
    # of other entries
    if name not in ("slice", "dynamic_slice", "rev"):
        kind = dataclasses.replace(kind, uniform=kind.uniform - touched)
    return kind


def _touched_dims(one: Any) -> set[int]:
    """Return the dims of an operand that an equation shortens, pads, reverses or sees in
    windows.
    """
    touched = resized_dims(one.invars[0].aval.shape, one.outvars[0].aval.shape)
    # of `rev`
    touched.update(one.params.get("dimensions", ()))
    # of `pad`: entries at both ends; those in between change the size
    for dim, (low, high, _) in enumerate(one.params.get("padding_config", ())):
        if low or high:
            touched.add(dim)
    # of windows
    for dim, size in enumerate(one.params.get("window_dimensions", ())):
        if size != 1:
            touched.add(dim)
    for dim, edges in enumerate(one.params.get("padding", ())):
        if any(edges):
            touched.add(dim)
    return touched


def _has_runs_of_all_rows(sizes: Sizes, one: Any, other: Any, kind: PerRow) -> bool:
    """Return whether a slice of the dim of the rows has some of several runs of all rows."""
    for key in ("start_indices", "limit_indices"):
        if not _all_rows(sizes, kind, one.params[key][kind.dim], other.params[key][kind.dim]):
            return False
    strides = one.params["strides"]
    return strides is None or strides[kind.dim] == 1


def _sized_dims(kind: Kind) -> frozenset[int]:
    """Return the dims whose size may depend on the number of rows."""
    if isinstance(kind, PerRow):
        return frozenset([kind.dim])
    if isinstance(kind, Fixed):
        return kind.uniform
    return frozenset()


def _update(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    """Return the kind of a `dynamic_update_slice`: dims of which the update has all entries are not
    touched.
    """
    operand, update = (variable.aval.shape for variable in one.invars[:2])
    if any(not isinstance(kind, Fixed) for kind in kinds[2:]):
        return None
    return _beside(one, resized_dims(operand, update), kinds[:2])


# products -----------------------------------------------------------------------------------------


def _dot(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    if any(isinstance(kind, Summed) for kind in kinds):
        return None
    power = total(*(kind.power for kind in kinds))
    left, right = kinds
    if isinstance(left, Fixed) and isinstance(right, Fixed):
        return _fixed_product(one, other, [left, right], power)
    contracted, batched = one.params["dimension_numbers"]
    places = [_place_in_product(one, side, kind) for side, kind in enumerate(kinds)]
    (role, place, inner), *other_places = filter(None, places)
    if role == "free":
        # each row of one side with each row of the other one
        if other_places:
            return None
        return PerRow(place, inner, power)
    if other_places and other_places[0] != (role, place, inner):
        return None
    partners = batched
    if role == "summed":
        partners = contracted
    for side, kind in enumerate(kinds):
        # a worker that calls the loss on its own rows has them with the first entries
        if isinstance(kind, Fixed) and partners[side][place] not in kind.uniform:
            power = None
    if role == "summed":
        return Summed(power)
    return PerRow(place, inner, power)


def _fixed_product(one: Any, other: Any, kinds: list[Fixed], power: int | None) -> Fixed:
    """Return the kind of a product of arrays that are the same on every worker."""
    contracted, batched = one.params["dimension_numbers"]
    uniform: list[set[int]] = []
    for side, kind in enumerate(kinds):
        outputs = _dims_of_product(one, side)
        uniform.append({outputs[dim] for dim in kind.uniform if dim in outputs})
    of_either, of_both = uniform[0] | uniform[1], uniform[0] & uniform[1]
    # both sides have the paired dims, and one side any other
    paired = set(range(len(batched[0])))
    shape, other_shape = one.invars[0].aval.shape, other.invars[0].aval.shape
    if any(shape[dim] != other_shape[dim] for dim in contracted[0]):
        power = None
    return Fixed(frozenset((of_either - paired) | (of_both & paired)), power)


def _dims_of_product(one: Any, side: int) -> dict[int, int]:
    """Return the dim of a product that each dim of an operand becomes, but for those that are
    summed.
    """
    contracted, batched = one.params["dimension_numbers"]
    free = []
    for number, variable in enumerate(one.invars):
        summed_or_paired = {*contracted[number], *batched[number]}
        free.append([dim for dim in range(variable.aval.ndim) if dim not in summed_or_paired])
    # the product has the paired dims, then those of the left side, then those of the right one
    start = len(batched[0]) + side * len(free[0])
    outputs = {dim: place for place, dim in enumerate(batched[side])}
    outputs.update((dim, start + place) for place, dim in enumerate(free[side]))
    return outputs


def _place_in_product(one: Any, side: int, kind: Kind) -> tuple[str, int, int] | None:
    """Return the role of an operand's rows in a product, the place of their dim among the dims of
    that role (of a "free" one: in the product), and `PerRow.inner`; None without rows.
    """
    if not isinstance(kind, PerRow):
        return None
    contracted, batched = one.params["dimension_numbers"]
    for role, dims in (("summed", contracted[side]), ("paired", batched[side])):
        if kind.dim in dims:
            return role, list(dims).index(kind.dim), kind.inner
    return "free", _dims_of_product(one, side)[kind.dim], kind.inner


def _convolution(sizes: Sizes, one: Any, other: Any, kinds: list[Kind]) -> Kind | None:
    numbers, (image, kernel) = one.params["dimension_numbers"], kinds
    if not isinstance(image, PerRow) or not isinstance(kernel, Fixed):
        return None
    # with groups of images, as in the gradient by a kernel, rows are summed
    if image.dim != numbers.lhs_spec[0] or one.params["batch_group_count"] != 1:
        return None
    return PerRow(numbers.out_spec[0], image.inner, total(image.power, kernel.power))


# From names of primitives to their rule. Elementwise functions are in `kinds`.
_BY_NAMES = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "stack": _stack,
    "tile": _tile,
    "iota": _iota,
    "reduce_sum reduce_prod reduce_max reduce_min": _reduce,
    "reduce_and reduce_or reduce_xor argmax argmin": _reduce,
    "psum": _psum,
    "concatenate": _concatenate,
    "cumsum cumprod cummax cummin cumlogsumexp sort split": _along,
    "fft": _fft,
    "slice pad dynamic_slice rev": _slice,
    "reduce_window reduce_window_max reduce_window_min reduce_window_sum": _slice,
    "dynamic_update_slice": _update,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": look_up,
    "scatter scatter-add scatter-mul scatter-min scatter-max": scatter,
    "random_bits": draw,
    "random_split": split_key,
    "random_fold_in random_wrap random_unwrap random_gamma": along_keys,
}
Rule = Callable[[Sizes, Any, Any, list[Kind]], Kind | None]
RULES: dict[str, Rule] = {name: rule for names, rule in _BY_NAMES.items() for name in names.split()}
