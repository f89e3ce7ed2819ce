"""Parameters as servers store them: packed into rows, one per position along the data axes.

Packing moves numbers and changes no bit. Arrays here are full; where their rows live is decided
elsewhere.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base.tree import Tree, flatten, map_paths
from spmd.base.xla import move_bits
from spmd.wire.assignment import Assignment, assign


def to_server_rows(leaf: jax.Array, servers: int, positions: int) -> jax.Array:
    """Return an array split over servers, [positions, width]: a row for each, padded with zeros;
    positions that are no servers have rows of zeros.

    >>> to_server_rows(jnp.arange(1.0, 4.0), servers=2, positions=3).tolist()
    [[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]]
    """
    width = -(-leaf.size // servers)
    padding = positions * width - leaf.size
    return jnp.pad(leaf.reshape(-1), (0, padding)).reshape(positions, width)


def from_server_rows(rows: jax.Array, like: Any) -> jax.Array:
    """Return the array of the shape of `like` that has these rows, of all servers."""
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


@dataclasses.dataclass(frozen=True)
class Storage:
    """The way in which a model's parameters are packed and unpacked.

    `sliced` keeps the tree: each parameter is an array [positions, ceil(size / servers)]. Otherwise
    parameters stay unsplit and share one array per dtype, [positions, elements of the fullest
    server]. Padding is zero.

    Args:
      like: the parameters' shapes and dtypes.
      placement: "sliced", or how unsplit parameters are assigned.
      positions: along the data axes.
      servers: number of positions that store parameters, the first ones.
      unpacks: the optimizer sees unpacked parameters, and its state is not packed.

    Example:
      >>> params = {"b": jnp.arange(3.0), "w": jnp.ones((3, 2))}
      >>> storage = Storage(jax.eval_shape(lambda: params), "largest_first", positions=2, servers=2)
      >>> packed = storage.pack(params)
      >>> packed["float32"].tolist(), bool((storage.unpack(packed)["b"] == params["b"]).all())
      ([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 0.0, 0.0, 0.0]], True)
    """

    like: Tree
    placement: str
    positions: int
    servers: int
    # the parameters are packed all the same
    unpacks: bool = dataclasses.field(default=False, compare=False)

    @functools.cached_property
    def assignments(self) -> dict[str, Assignment]:
        """The server of each parameter, by dtype: an array has one dtype."""
        leaves = flatten(self.like)
        dtypes = dict.fromkeys(str(leaf.dtype) for leaf in leaves.values())
        assignments = {}
        for dtype in dtypes:
            sizes = {
                path: math.prod(leaf.shape) for path, leaf in leaves.items() if leaf.dtype == dtype
            }
            assignments[dtype] = assign(self.placement, sizes, self.servers)
        return assignments

    @property
    def sliced(self) -> bool:
        """Return whether every parameter is split over all servers."""
        return self.placement == "sliced"

    def pack(self, params: Tree) -> Tree:
        """Parameters (or their gradients) as they are stored."""
        # Padding and concatenation may change bits of narrow floats on XLA:CPU: see `to_bits`.
        return move_bits(self._packed, params)

    def _packed(self, params: Tree) -> Tree:
        if self.sliced:
            return jax.tree.map(
                lambda leaf: to_server_rows(leaf, self.servers, self.positions), params
            )
        by_path = flatten(params)
        return {
            dtype: self._stack(assignment, by_path)
            for dtype, assignment in self.assignments.items()
        }

    def _stack(self, assignment: Assignment, by_path: dict[str, Any]) -> jax.Array:
        width = max(assignment.load)
        # all of one dtype, which an empty row needs, too
        dtype = by_path[next(iter(assignment.sizes))].dtype
        rows = []
        for server in range(self.positions):
            paths = [path for path in assignment.sizes if assignment.owner[path] == server]
            if paths:
                row = jnp.concatenate([by_path[path].reshape(-1) for path in paths])
            else:
                row = jnp.zeros(0, dtype)
            rows.append(jnp.pad(row, (0, width - row.size)))
        return jnp.stack(rows)

    def unpack(self, stored: Tree) -> Tree:
        """The model's parameters, from packed ones."""
        return move_bits(self.views, stored)

    def views(self, stored: Tree) -> Tree:
        """Return what `unpack` does, but differentiable, for a model that computes with them; XLA
        may flush subnormal numbers.
        """
        if self.sliced:
            return jax.tree.map(
                lambda leaf, rows: from_server_rows(rows[: self.servers], leaf), self.like, stored
            )

        def view(path: str, leaf: Any) -> jax.Array:
            dtype = str(leaf.dtype)
            assignment = self.assignments[dtype]
            start = assignment.start(path)
            end = start + math.prod(leaf.shape)
            return stored[dtype][assignment.owner[path], start:end].reshape(leaf.shape)

        return map_paths(view, self.like)
