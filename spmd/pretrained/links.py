"""Links between tensors of files and arrays of a model: boxes of both that hold the same values,
and changes of dims.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from spmd.pretrained.name_map import Dims
from spmd.pretrained.safetensors_files import Box, Tensor, box_shape, relative

# of a matrix that is transposed, rows at a time, and bytes of each: an entire cache line
TILE_ROWS, LINE = 1024, 64


@dataclasses.dataclass(frozen=True)
class Factors:
    """`Dims` with sizes: the factors of a tensor's dims by number, in its order, and the factors of
    each dim of both sides.
    """

    sizes: tuple[int, ...]
    tensor: tuple[tuple[int, ...], ...]
    array: tuple[tuple[int, ...], ...]

    def shape(self, side: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        """The shape of `tensor` or `array`."""
        sizes = []
        for group in side:
            sizes.append(math.prod(self.sizes[factor] for factor in group))
        return tuple(sizes)

    @property
    def keeps_order(self) -> bool:
        """True if the bytes of both sides are equal."""
        return list(itertools.chain.from_iterable(self.array)) == list(range(len(self.sizes)))


def solve(dims: Dims | None, tensor: Sequence[int | None], array: Sequence[int | None]) -> Factors:
    """The factors of a tensor and an array of these shapes, of which each may lack one size.

    >>> solve(Dims.parse("(heads size) width -> width heads size"), (None, 8), (8, 2, 4)).sizes
    (2, 4, 8)

    Raises:
      ValueError: the shapes do not fit, or a size cannot be known.
    """
    if dims is None:
        groups = tuple((str(dim),) for dim in range(len(tensor)))
        dims = Dims(groups, groups)
    if len(dims.tensor) != len(tensor) or len(dims.array) != len(array):
        raise ValueError("the number of dims differs")
    sizes: dict[str, int] = {}
    sides = [*zip(dims.tensor, tensor, strict=True), *zip(dims.array, array, strict=True)]
    for _ in sides:  # each turn finds at least one size, or no turn will
        for group, total in sides:
            unknown = [name for name in group if name not in sizes]
            product = math.prod(sizes[name] for name in group if name in sizes)
            if total is None or len(unknown) != 1:
                continue
            (name,) = unknown
            if product == 0:
                sizes[name] = 0
            elif total % product == 0:
                sizes[name] = total // product
    names = list(itertools.chain.from_iterable(dims.tensor))
    if missing := [name for name in names if name not in sizes]:
        raise ValueError(f"the size of {' and '.join(missing)} cannot be known")
    number = {name: at for at, name in enumerate(names)}

    def numbered(side: tuple[tuple[str, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(number.__getitem__, group)) for group in side)

    sizes_in_order = tuple(sizes[name] for name in names)
    factors = Factors(sizes_in_order, numbered(dims.tensor), numbered(dims.array))
    solved = (*factors.shape(factors.tensor), *factors.shape(factors.array))
    for total, size in zip((*tensor, *array), solved, strict=True):
        if total not in (None, size):
            raise ValueError("the sizes differ")
    return factors


@dataclasses.dataclass(frozen=True)
class Link:
    """A box of a tensor is a box of the model's array at `path`, in which a stack's layer is dim 0
    (`stacked`).

    `twin`: the same values under a second name, in a file that has a tied array twice.
    """

    tensor: Tensor
    tensor_box: Box
    path: str
    array_box: Box
    stacked: bool
    factors: Factors
    twin: "Link | None" = None

    def request(self, box: Box) -> "Request":
        """Return the request to read for a box of the array that lies inside of this link's."""
        local = relative(box, self.array_box)[self.stacked :]
        sizes = self.factors.sizes
        ranges = [(0, size) for size in sizes]
        trim = []
        totals = self.factors.shape(self.factors.array)
        for group, (begin, end), total in zip(self.factors.array, local, totals, strict=True):
            inner = math.prod(sizes[factor] for factor in group[1:])
            if (begin, end) != (0, total):
                first = begin // inner
                ranges[group[0]] = (first, -(-end // inner))
                start = first * inner
                begin, end = begin - start, end - start
            trim.append(slice(begin, end))
        tensor_box = []
        for group, (first, _) in zip(self.factors.tensor, self.tensor_box, strict=True):
            inner = math.prod(sizes[factor] for factor in group[1:])
            begin, end = ranges[group[0]]
            tensor_box.append((first + begin * inner, first + end * inner))
        return Request(self, tuple(tensor_box), tuple(ranges), tuple(trim))

    def as_tensor(self, values: np.ndarray) -> np.ndarray:
        """A view of the values of this link's entire box of the array, without the layers' dim,
        shaped as the box of the tensor.
        """
        order = list(itertools.chain.from_iterable(self.factors.array))
        split = values.reshape([self.factors.sizes[factor] for factor in order])
        inverse = np.argsort(np.array(order, int))
        return split.transpose(inverse).reshape(box_shape(self.tensor_box))

    def parts(self, box: Box, most: int) -> list[Box]:
        """A box of the array in parts, each of which reads about `most` bytes of contiguous rows of
        the tensor.
        """
        if not self.factors.tensor:
            return [box]
        leading = self.factors.tensor[0][0]
        firsts = [group[0] for group in self.factors.array]
        if leading not in firsts:
            return [box]
        group = self.factors.array[firsts.index(leading)]
        dim = firsts.index(leading) + self.stacked
        begin, end = box[dim]
        box_bytes = math.prod(box_shape(box)) * self.tensor.dtype.itemsize
        row = box_bytes // max(end - begin, 1)
        inner = math.prod(self.factors.sizes[factor] for factor in group[1:])
        step = max(1, most // max(row * inner, 1)) * inner
        first = begin // inner * inner  # parts begin where the leading factor does
        before, after = box[:dim], box[dim + 1 :]
        parts = []
        for at in range(first, end, step):
            part = (max(begin, at), min(end, at + step))
            parts.append((*before, part, *after))
        return parts or [box]


@dataclasses.dataclass(frozen=True)
class Request:
    """A box of a tensor to read or to write, and its place in the array: the range of each factor,
    and of each dim of the array.
    """

    link: Link
    tensor_box: Box
    ranges: tuple[tuple[int, int], ...]
    trim: tuple[slice, ...]

    @property
    def exact(self) -> bool:
        """True if the box of the tensor holds the values of the array's box in the same order, and
        no others.
        """
        factors = self.link.factors
        if not factors.keeps_order:
            return False
        for group in factors.tensor:
            for factor in group[1:]:
                if self.ranges[factor] != (0, factors.sizes[factor]):
                    return False
        return self.trim == tuple(slice(0, size) for size in self._shape())

    def _shape(self) -> tuple[int, ...]:
        """Return the shape of the array's box before it is trimmed."""
        sizes = tuple(end - begin for begin, end in self.ranges)
        factors = dataclasses.replace(self.link.factors, sizes=sizes)
        return factors.shape(factors.array)

    def as_array(self, raw: np.ndarray) -> np.ndarray:
        """Return a view of the values that were read, shaped as the array's box without the layers'
        dim.
        """
        factors = self.link.factors
        sizes: list[int] = []
        inside: list[slice] = []
        for group in factors.tensor:
            begin, end = self.ranges[group[0]]
            sizes.append(end - begin)
            inside.append(slice(None))
            for factor in group[1:]:
                sizes.append(factors.sizes[factor])
                inside.append(slice(*self.ranges[factor]))
        order = list(itertools.chain.from_iterable(factors.array))
        split = raw.reshape(sizes)[tuple(inside)].transpose(order)
        return split.reshape(self._shape())[self.trim]


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, with a cast, in tiles where the order of dims differs."""
    # numpy copies a transposed matrix along the target, and reads a cache line of the source for
    # each value; in a tile, the line is still in the cache for its next value
    is_small = source.ndim < 2 or source.size < TILE_ROWS
    if is_small or source.strides[-1] == source.itemsize:
        target[...] = source
        return
    # this dim is contiguous in the source, as the last dim is in the target
    fast = min(range(source.ndim - 1), key=lambda dim: abs(source.strides[dim]))
    target, source = np.moveaxis(target, fast, -2), np.moveaxis(source, fast, -2)
    columns = max(1, LINE // target.itemsize)
    for outer in np.ndindex(target.shape[:-2]):
        into, values = target[outer], source[outer]
        for row in range(0, into.shape[0], TILE_ROWS):
            for column in range(0, into.shape[1], columns):
                part = (slice(row, row + TILE_ROWS), slice(column, column + columns))
                into[part] = values[part]
