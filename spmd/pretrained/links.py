"""Links between tensors of files and arrays of a model: which box of one is which box of the other,
and how dims change.
"""

import dataclasses
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
        return tuple(math.prod(self.sizes[factor] for factor in group) for group in side)

    @property
    def keeps_order(self) -> bool:
        """Whether the bytes of both sides are equal."""
        return [factor for group in self.array for factor in group] == list(range(len(self.sizes)))


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
            unknown, known = (
                [name for name in group if name not in sizes],
                math.prod(sizes[name] for name in group if name in sizes),
            )
            if total is not None and len(unknown) == 1 and (known == 0 or total % known == 0):
                sizes[unknown[0]] = total // known if known else 0
    names = [name for group in dims.tensor for name in group]
    if missing := [name for name in names if name not in sizes]:
        raise ValueError(f"the size of {' and '.join(missing)} cannot be known")
    number = {name: at for at, name in enumerate(names)}
    factors = Factors(
        tuple(sizes[name] for name in names),
        tuple(tuple(number[name] for name in group) for group in dims.tensor),
        tuple(tuple(number[name] for name in group) for group in dims.array),
    )
    for side, given in ((factors.tensor, tensor), (factors.array, array)):
        if any(
            total not in (None, size)
            for total, size in zip(given, factors.shape(side), strict=True)
        ):
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
        """What to read for a box of the array that lies inside of this link's."""
        local = relative(box, self.array_box)[self.stacked :]
        sizes = self.factors.sizes
        ranges = [(0, size) for size in sizes]
        trim = []
        for group, (begin, end), total in zip(
            self.factors.array, local, self.factors.shape(self.factors.array), strict=True
        ):
            inner = math.prod(sizes[factor] for factor in group[1:])
            if (begin, end) != (0, total):
                ranges[group[0]] = (begin // inner, -(-end // inner))
                begin, end = begin - ranges[group[0]][0] * inner, end - ranges[group[0]][0] * inner
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
        order = [factor for group in self.factors.array for factor in group]
        split = values.reshape([self.factors.sizes[factor] for factor in order])
        return split.transpose(np.argsort(np.array(order, int))).reshape(box_shape(self.tensor_box))

    def parts(self, box: Box, most: int) -> list[Box]:
        """A box of the array in parts, each of which reads about `most` bytes of contiguous rows of
        the tensor.
        """
        if not self.factors.tensor:
            return [box]
        leading = self.factors.tensor[0][0]
        dim = next(
            (dim for dim, group in enumerate(self.factors.array) if group[0] == leading), None
        )
        if dim is None:
            return [box]
        dim += self.stacked
        begin, end = box[dim]
        row = math.prod(box_shape(box)) * self.tensor.dtype.itemsize // max(end - begin, 1)
        inner = math.prod(
            self.factors.sizes[factor] for factor in self.factors.array[dim - self.stacked][1:]
        )
        step = max(1, most // max(row * inner, 1)) * inner
        first = begin // inner * inner  # parts begin where the leading factor does
        return [
            (*box[:dim], (max(begin, at), min(end, at + step)), *box[dim + 1 :])
            for at in range(first, end, step)
        ] or [box]


@dataclasses.dataclass(frozen=True)
class Request:
    """A box of a tensor to read or to write, and how it lies in the array: the range of each
    factor, and of each dim of the array.
    """

    link: Link
    tensor_box: Box
    ranges: tuple[tuple[int, int], ...]
    trim: tuple[slice, ...]

    @property
    def exact(self) -> bool:
        """Whether the box of the tensor holds the values of the array's box in the same order, and
        no others.
        """
        factors = self.link.factors
        sizes = tuple(end - begin for begin, end in self.ranges)
        entire = all(
            self.ranges[factor] == (0, factors.sizes[factor])
            for group in factors.tensor
            for factor in group[1:]
        )
        shape = tuple(math.prod(sizes[factor] for factor in group) for group in factors.array)
        return (
            factors.keeps_order
            and entire
            and all(part == slice(0, size) for part, size in zip(self.trim, shape, strict=True))
        )

    def as_array(self, raw: np.ndarray) -> np.ndarray:
        """A view of what was read, shaped as the array's box without the layers' dim."""
        factors, sizes, inside = self.link.factors, [], []
        for group in factors.tensor:
            for factor in group:
                begin, end = self.ranges[factor]
                leading = factor == group[0]
                sizes.append(end - begin if leading else factors.sizes[factor])
                inside.append(slice(None) if leading else slice(begin, end))
        split = raw.reshape(sizes)[tuple(inside)].transpose(
            [factor for group in factors.array for factor in group]
        )
        shape = [
            math.prod(self.ranges[factor][1] - self.ranges[factor][0] for factor in group)
            for group in factors.array
        ]
        return split.reshape(shape)[self.trim]


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, with a cast, in tiles where the order of dims differs."""
    if source.ndim < 2 or source.size < TILE_ROWS or source.strides[-1] == source.itemsize:
        target[...] = source
        return
    fast = min(
        range(source.ndim - 1), key=lambda dim: abs(source.strides[dim])
    )  # contiguous in the source, as the last dim is in the target
    target, source = np.moveaxis(target, fast, -2), np.moveaxis(source, fast, -2)
    columns = max(1, LINE // target.itemsize)
    for outer in np.ndindex(target.shape[:-2]):
        into, values = target[outer], source[outer]
        for row in range(0, into.shape[0], TILE_ROWS):
            for column in range(0, into.shape[1], columns):
                part = (slice(row, row + TILE_ROWS), slice(column, column + columns))
                into[part] = values[part]
