"""How one gradient is divided among the workers: who owns which elements of the mean."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from spmd.layout.schema import Spec, entry_axes, spec_axes
from spmd.wire import collectives


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """A gradient that is whole on every worker, and the piece of its mean that each worker is to get.

    `shape` is what one worker holds (its own piece along other mesh axes). `spec` cuts it over some of the data axes
    `axes` (outermost first, of `sizes`): the piece. The workers along the remaining axes, `left`, get the same piece. Every worker owns
    one row of `rows`: 1 / workers of the elements, a part of its piece.

    Example:
      >>> cut = ShardLayout((4, 6), ("data",), ("node", "data"), (2, 2))
      >>> cut.left, cut.piece, cut.width
      (('node',), (2, 6), 6)
    """

    shape: tuple[int, ...]
    spec: Spec
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def workers(self) -> int:
        """Positions along the data axes."""
        return math.prod(self.sizes)

    @functools.cached_property
    def owning(self) -> tuple[str, ...]:
        """The data axes that cut the gradient, in the order of `axes`."""
        used = spec_axes(self.spec)
        return tuple(axis for axis in self.axes if axis in used)

    @property
    def left(self) -> tuple[str, ...]:
        """The data axes along which all workers get the same piece."""
        return tuple(axis for axis in self.axes if axis not in self.owning)

    @functools.cached_property
    def piece(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return tuple(size // self._count(axes) for size, axes in zip(self.shape, self._cutting, strict=True))

    @property
    def width(self) -> int:
        """Elements of a row; where the workers do not divide the piece the last rows end in zeros."""
        return -(-math.prod(self.piece) // self._count(self.left))

    def pieces(self, x: jax.Array) -> jax.Array:
        """All pieces of `x`, [positions along `owning`, elements of a piece]."""
        return x.reshape(self._split).transpose(self._order).reshape(self._count(self.owning), -1)

    def own(self, x: jax.Array) -> jax.Array:
        """This worker's piece of `x`, which all hold whole."""
        if not self.owning:
            return x
        return lax.dynamic_index_in_dim(self.pieces(x), collectives.worker_index(self.owning), keepdims=False).reshape(self.piece)

    def rows(self, x: jax.Array) -> jax.Array:
        """`x` as float32[workers, width]; row j is what worker j owns."""
        pieces, left = self.pieces(x).astype(jnp.float32), self._count(self.left)
        padded = jnp.pad(pieces, ((0, 0), (0, left * self.width - pieces.shape[1])))
        named = (*self.owning, *self.left)
        grid = padded.reshape(*self._sizes(named), self.width)
        return grid.transpose(*(named.index(axis) for axis in self.axes), len(named)).reshape(self.workers, self.width)

    def unrows(self, rows: jax.Array) -> jax.Array:
        """The inverse of `rows`."""
        grid = rows.reshape(*self.sizes, self.width)
        named = (*self.owning, *self.left)
        grid = grid.transpose(*(self.axes.index(axis) for axis in named), len(self.axes))
        pieces = grid.reshape(self._count(self.owning), -1)[:, : math.prod(self.piece)]
        split = [self._split[dim] for dim in self._order]
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return pieces.reshape(split).transpose(back).reshape(self.shape)

    def join(self, rows: jax.Array) -> jax.Array:
        """The piece from the rows [positions along `left`, width] of all workers that share it."""
        return rows.reshape(-1)[: math.prod(self.piece)].reshape(self.piece)

    @functools.cached_property
    def _cutting(self) -> tuple[tuple[str, ...], ...]:
        """For every dim the axes that cut it."""
        return tuple(map(entry_axes, (*self.spec, *[None] * (len(self.shape) - len(self.spec)))))

    @functools.cached_property
    def _split(self) -> tuple[int, ...]:
        """The shape with every cut dim taken apart, one dim for each of its axes."""
        cut = zip(self._cutting, self.piece, strict=True)
        return tuple(size for axes, left in cut for size in (*self._sizes(axes), left))

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        """The order of these dims that puts the axes first, as in `owning`."""
        at, rest, dim = {}, [], 0
        for axes in self._cutting:
            for axis in axes:
                at[axis], dim = dim, dim + 1
            rest.append(dim)
            dim += 1
        return (*(at[axis] for axis in self.owning), *rest)

    def _sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[self.axes.index(axis)] for axis in axes)

    def _count(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._sizes(axes))
