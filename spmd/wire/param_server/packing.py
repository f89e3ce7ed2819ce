"""Parameters as the servers keep them: packed into rows, one per position along the data axes.

Only numbers that move: no bit changes. Arrays here are whole; where they live is the affair of `Storage.resolved`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.layout.resolve import Placement, Resolved
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.tree import Tree, flatten, map_paths, nbytes
from spmd.wire.param_server.placement import Assignment, assign
from spmd.xla import move_bits


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a model's parameters are packed, and back.

    `sliced` keeps the tree: each parameter is an array [positions, ceil(size / servers)]. Whole parameters share one array for each
    dtype, [positions, elements of the fullest server]. What only fills up is zero.

    Args:
      like: the parameters' shapes and dtypes.
      placement: "sliced", or how whole parameters are assigned.
      positions: along the data axes.
      servers: how many of these keep something, the first ones.

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

    @functools.cached_property
    def assignments(self) -> dict[str, Assignment]:
        """Who keeps what, by dtype: an array holds numbers of one kind."""
        leaves = flatten(self.like)
        kinds = dict.fromkeys(str(leaf.dtype) for leaf in leaves.values())
        sizes = {kind: {path: math.prod(leaf.shape) for path, leaf in leaves.items() if leaf.dtype == kind} for kind in kinds}
        return {kind: assign(self.placement, found, self.servers) for kind, found in sizes.items()}

    @property
    def sliced(self) -> bool:
        """Whether every parameter is cut over all servers."""
        return self.placement == "sliced"

    def resolved(self, layout: Layout, mesh: MeshSpec) -> Resolved:
        """Where the stored arrays live: a row on each position along the data axes."""
        spec = (layout.data_axes(),)
        stored = flatten(jax.eval_shape(self.pack, self.like))
        place = lambda path, leaf: Placement(path, leaf.shape, str(leaf.dtype), nbytes(leaf), spec, spec, f"servers, {self.placement}")
        return Resolved(layout, mesh, {path: place(path, leaf) for path, leaf in stored.items()})

    def pack(self, params: Tree) -> Tree:
        """Parameters (or their gradients) as they are stored."""
        return move_bits(self._packed, params)

    def _packed(self, params: Tree) -> Tree:
        if self.sliced:
            return jax.tree.map(self._cut, params)
        flat = flatten(params)
        return {kind: self._stacked(found, flat) for kind, found in self.assignments.items()}

    def _cut(self, leaf: jax.Array) -> jax.Array:
        width = -(-leaf.size // self.servers)
        return jnp.pad(leaf.reshape(-1), (0, self.positions * width - leaf.size)).reshape(self.positions, width)

    def _stacked(self, found: Assignment, flat: dict[str, Any]) -> jax.Array:
        width, rows = max(found.load), []
        for server in range(self.positions):
            kept = [flat[path].reshape(-1) for path in found.sizes if found.owner[path] == server]
            row = jnp.concatenate(kept) if kept else jnp.zeros(0, flat[next(iter(found.sizes))].dtype)
            rows.append(jnp.pad(row, (0, width - row.size)))
        return jnp.stack(rows)

    def unpack(self, stored: Tree) -> Tree:
        """The model's parameters, from what is stored."""
        return move_bits(self.views, stored)

    def views(self, stored: Tree) -> Tree:
        """The same with a gradient, for a model that computes with them; XLA may lose subnormal numbers."""
        if self.sliced:
            return jax.tree.map(
                lambda leaf, rows: rows[: self.servers].reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape), self.like, stored
            )

        def whole(path: str, leaf: Any) -> jax.Array:
            found, rows = self.assignments[str(leaf.dtype)], stored[str(leaf.dtype)]
            start = found.start(path)
            return rows[found.owner[path], start : start + math.prod(leaf.shape)].reshape(leaf.shape)

        return map_paths(whole, self.like)
