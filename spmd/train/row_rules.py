"""What becomes of the rows of a batch in each of JAX's primitives: the rules by which `spmd.train.row_proof` walks a traced loss.

A rule takes the sizes of the two traces, the equation in each, and what is known of its inputs. None is "not known", which is always safe.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from spmd.train.row_values import Fixed, Known, PerRow, Sizes, Summed, Value, joined


def _reshape(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    del other
    value, old, new = values[0], one.invars[0].aval.shape, one.outvars[0].aval.shape
    if one.params.get("dimensions") is not None or len(values) > 1:
        return None
    if isinstance(value, Summed):
        return value
    if isinstance(value, Fixed):
        every = len(value.uniform | {dim for dim, size in enumerate(old) if size == 1}) == len(old)
        kept = [size for size in old if size > 1] == [size for size in new if size > 1]
        if every or not kept:
            return dataclasses.replace(value, uniform=frozenset(range(len(new))) if every else frozenset())
        sources = iter([dim for dim, size in enumerate(old) if size > 1])
        return dataclasses.replace(value, uniform=frozenset(d for d, size in enumerate(new) if size == 1 or next(sources) in value.uniform))
    stride = value.inner * math.prod(old[value.dim + 1 :])
    for dim, size in enumerate(new):
        below = math.prod(new[dim + 1 :])
        if stride % below == 0 and size % (stride // below * sizes.rows) == 0:
            return PerRow(dim, stride // below, value.power)
    return None


def _broadcast(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    del sizes, other
    value, old, new = values[0], one.invars[0].aval.shape, one.outvars[0].aval.shape
    dims = one.params["broadcast_dimensions"]
    if isinstance(value, PerRow):
        return dataclasses.replace(value, dim=int(dims[value.dim])) if old[value.dim] == new[dims[value.dim]] else None
    if isinstance(value, Summed):
        return value
    varied = {int(to) for dim, to in enumerate(dims) if dim not in value.uniform and old[dim] != 1}
    return dataclasses.replace(value, uniform=frozenset(range(len(new))) - varied)


def _renumbered(value: Value, kept: Sequence[int]) -> Value:
    """Of an array whose dims are now those numbers of the old ones."""
    if isinstance(value, PerRow):
        return dataclasses.replace(value, dim=list(kept).index(value.dim)) if value.dim in kept else None
    if isinstance(value, Fixed):
        return dataclasses.replace(value, uniform=frozenset(new for new, old in enumerate(kept) if old in value.uniform))
    return value


def _squeeze(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    del sizes, other
    return _renumbered(values[0], [d for d in range(one.invars[0].aval.ndim) if d not in one.params["dimensions"]])


def _transpose(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    del sizes, other
    return _renumbered(values[0], [int(dim) for dim in one.params["permutation"]])


def _reduce(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    value, axes, a, b = values[0], one.params["axes"], one.invars[0].aval.shape, other.invars[0].aval.shape
    left, sums = [dim for dim in range(len(a)) if dim not in axes], one.primitive.name == "reduce_sum"
    if isinstance(value, Summed):
        return value if sums else None
    if isinstance(value, PerRow) and value.dim in axes:
        return Summed(value.power) if sums else None
    if value.power and one.primitive.name not in ("reduce_sum", "reduce_max", "reduce_min"):
        return None
    if isinstance(value, Fixed) and one.primitive.name in ("reduce_prod", "reduce_xor") and a != b:
        return None
    grows = [sizes.growth(a[dim], b[dim]) for dim in axes if a[dim] != b[dim]] if isinstance(value, Fixed) and sums else []
    if None in grows:
        return None
    grown = sum(filter(None, grows))
    found = _renumbered(value, left)
    return dataclasses.replace(found, power=found.power + grown) if found is not None else None


def _along(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    """What works along one dim, such as a cumulative sum: any but the rows'."""
    del other
    dim = next(one.params[key] for key in ("axis", "dimension") if key in one.params)
    dim = {dim} if isinstance(dim, int) else set(dim)
    return _aside(sizes, one, dim, values)


def _aside(sizes: Sizes, one: Any, touched: set[int], values: list[Known]) -> Value:
    """Of operands with the same dims, of which those in `touched` are mixed or resized; the others correspond."""
    del sizes
    if one.primitive.name in ("concatenate", "split") and isinstance(values[0], Summed) and len(set(values)) == 1:
        return values[0]
    found = None
    for value, var in zip(values, one.invars, strict=False):
        if isinstance(value, Summed) or value.power:
            return None
        if not var.aval.ndim and one.outvars[0].aval.ndim:
            value = Fixed(frozenset(range(one.outvars[0].aval.ndim)))
        value = dataclasses.replace(value, uniform=value.uniform - touched) if isinstance(value, Fixed) else value
        found = value if found is None else joined(found, value)
        if found is None or (isinstance(found, PerRow) and found.dim in touched):
            return None
    return found


def _sliced(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    """`slice`, `pad`, `dynamic_slice`, `rev`, windows: dims whose size is kept and that are not reversed are not touched."""
    del other
    old, new = one.invars[0].aval.shape, one.outvars[0].aval.shape
    touched = {dim for dim, (a, b) in enumerate(zip(old, new, strict=True)) if a != b} | set(one.params.get("dimensions", ()))
    touched |= {dim for dim, (low, high, _) in enumerate(one.params.get("padding_config", ())) if low or high}
    touched |= {dim for dim, size in enumerate(one.params.get("window_dimensions", ())) if size != 1}
    touched |= {dim for dim, edges in enumerate(one.params.get("padding", ())) if any(edges)}
    if any(not isinstance(value, Fixed) for value in values[1:]):
        return None
    kept = values[0]
    if isinstance(kept, Summed):
        return kept if one.primitive.name == "slice" else None
    if any(v.power for v in values):
        return None
    if isinstance(kept, PerRow):
        return None if kept.dim in touched else kept
    # of a slice the uniform dims stay so; of what is padded or seen in windows, those that are not touched
    shrinks = one.primitive.name in ("slice", "dynamic_slice", "rev")
    return kept if shrinks or not isinstance(kept, Fixed) else dataclasses.replace(kept, uniform=kept.uniform - touched)


def _update(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    """`dynamic_update_slice`: dims of the update that are those of the operand are not touched."""
    del other
    old, new = one.invars[0].aval.shape, one.invars[1].aval.shape
    if any(not isinstance(value, Fixed) for value in values[2:]):
        return None
    touched = {dim for dim, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}
    return _aside(sizes, one, touched, values[:2])


def _dot(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    del sizes
    contracted, batched = one.params["dimension_numbers"]
    if any(isinstance(value, Summed) for value in values):
        return None
    power, after, outputs = sum(value.power for value in values), len(batched[0]), []
    for side, var in enumerate(one.invars):  # which dim of the result each dim becomes
        free = [dim for dim in range(var.aval.ndim) if dim not in contracted[side] and dim not in batched[side]]
        outputs.append({**{dim: n for n, dim in enumerate(batched[side])}, **{dim: after + n for n, dim in enumerate(free)}})
        after += len(free)
    fixed = [(side, value) for side, value in enumerate(values) if isinstance(value, Fixed)]
    if len(fixed) == 2:
        grown = any(one.invars[0].aval.shape[dim] != other.invars[0].aval.shape[dim] for dim in contracted[0])
        left, right = ({outputs[side][dim] for dim in value.uniform if dim in outputs[side]} for side, value in fixed)
        pairs = set(range(len(batched[0])))
        return None if grown else Fixed(frozenset((left | right) - pairs | (left & right & pairs)), power)
    places = []
    for side, value in enumerate(values):
        if isinstance(value, PerRow):
            kinds = (("summed", contracted[side]), ("paired", batched[side]), ("free", tuple(range(99))))
            kind, among = next((kind, list(among)) for kind, among in kinds if value.dim in among)
            places.append((kind, outputs[side][value.dim] if kind == "free" else among.index(value.dim), value.inner))
    kind, at, inner = places[0]
    if kind == "free":
        return PerRow(at, inner, power) if fixed else None
    partner = {"summed": contracted, "paired": batched}[kind]
    if places[0] != places[-1] or any(partner[side][at] not in value.uniform for side, value in fixed):
        return None
    return Summed(power) if kind == "summed" else PerRow(at, inner, power)


def _convolution(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    del sizes, other
    numbers, (image, kernel) = one.params["dimension_numbers"], values
    if not isinstance(image, PerRow) or not isinstance(kernel, Fixed) or image.dim != numbers.lhs_spec[0]:
        return None
    return PerRow(numbers.out_spec[0], image.inner, image.power + kernel.power) if one.params["batch_group_count"] == 1 else None


def _psum(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    """Summed over workers: what was a sum over a worker's rows is one over all, and the same for everybody (BatchNorm)."""
    del sizes, other
    if any(isinstance(axis, int) for axis in one.params["axes"]) or one.params.get("axis_index_groups") is not None:
        return None
    if isinstance(values[0], Summed):
        return Fixed(power=values[0].power + 1)
    return dataclasses.replace(values[0], uniform=frozenset()) if isinstance(values[0], Fixed) else None


def _stack(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    """A new dim, along which operands of the same dims lie."""
    del sizes, other
    found, axis = values[0], one.params["axis"]
    for value in values[1:]:
        found = joined(found, value)
    if isinstance(found, PerRow):
        return dataclasses.replace(found, dim=found.dim + (found.dim >= axis))
    if isinstance(found, Fixed):
        return dataclasses.replace(found, uniform=frozenset(dim + (dim >= axis) for dim in found.uniform))
    return found


def _gather(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    """A look-up in a table, of entire rows of data, or for each row in its own."""
    del sizes
    numbers, (table, index) = one.params["dimension_numbers"], values
    out, taken, shape = one.outvars[0].aval.ndim, one.params["slice_sizes"], one.invars[0].aval.shape
    looked = [dim for dim in range(out) if dim not in numbers.offset_dims]  # those of the index, in order
    if isinstance(table, Summed) or isinstance(index, Summed) or any(value.power for value in values):
        return None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offsets = dict(zip([dim for dim in range(len(shape)) if dim not in gone], numbers.offset_dims, strict=True))
    if isinstance(table, Fixed):
        if shape != other.invars[0].aval.shape:
            return None  # what lies outside depends on it
        paired = set(numbers.start_indices_batching_dims)
        if isinstance(index, PerRow):
            return None if index.dim in paired or index.dim == len(looked) else PerRow(looked[index.dim], index.inner)
        same = {looked[dim] for dim in index.uniform if isinstance(index, Fixed) and dim < len(looked) and dim not in paired}
        return Fixed(frozenset(same | {offsets[dim] for dim in table.uniform if dim in offsets}))
    if table.dim in numbers.operand_batching_dims:
        partner = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(table.dim)]
        same = index.dim == partner and index.inner == table.inner if isinstance(index, PerRow) else partner in index.uniform
        return PerRow(looked[partner], table.inner) if same else None
    full = table.dim in offsets and taken[table.dim] == shape[table.dim]
    return PerRow(offsets[table.dim], table.inner) if full and isinstance(index, Fixed) else None


def _iota(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    del sizes, other, values
    return Fixed(frozenset(range(len(one.params["shape"]))) - {one.params["dimension"]})


def _bits(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    """Draws of the step's own keys are those of the rows, on whichever worker they are (`spmd.rng`)."""
    key, a, b = values[0], one.outvars[0].aval.shape, other.outvars[0].aval.shape
    if not isinstance(key, Fixed) or one.invars[0].aval.ndim:
        return None
    if key.key and a and a[0] % sizes.rows == 0 and sizes.growth(a[0], b[0]) == 1:
        return PerRow(0, a[0] // sizes.rows)
    return None if key.key and _taken_for_rows(sizes, b) else Fixed()


def _taken_for_rows(sizes: Sizes, shape: tuple[int, ...]) -> bool:
    """Whether a draw that is none of rows has their number, so that workers take it for theirs."""
    return bool(shape) and shape[0] % sizes.others == 0


def _split_key(sizes: Sizes, one: Any, other: Any, values: list[Known]) -> Value:
    """Of the step's own key as many as a part has rows would be keys of rows."""
    key, a, b = values[0], one.outvars[0].aval.shape, other.outvars[0].aval.shape
    if not isinstance(key, Fixed) or key.power or a != b or one.invars[0].aval.ndim:
        return None
    return None if key.key and _taken_for_rows(sizes, b) else Fixed(key=key.key)


RULES: dict[str, Callable[[Sizes, Any, Any, list[Known]], Value]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "iota": _iota,
    "random_bits": _bits,
    "random_split": _split_key,
    "psum": _psum,
    "stack": _stack,
    "dynamic_update_slice": _update,
    **dict.fromkeys(("slice", "pad", "dynamic_slice", "rev", "reduce_window_max", "reduce_window_sum", "reduce_window_min"), _sliced),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "concatenate", "split"), _along),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"), _reduce
    ),
}
